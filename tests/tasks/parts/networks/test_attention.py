"""Attention: the fused function and what an exported graph computes are the same, and follow the paper's equation."""

import math

import torch
from torch import Tensor, nn

from tasks.parts.networks.attention import attend


class Attend(nn.Module):
    def forward(self, query_NATC: Tensor, key_NATC: Tensor, value_NATC: Tensor) -> Tensor:
        return attend(query_NATC, key_NATC, value_NATC)


def tokens() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 8)


def test_every_token_gets_the_mean_of_the_values_weighted_by_its_products_with_the_keys() -> None:
    query_NATC, key_NATC, value_NATC = tokens()
    found_NATC = attend(query_NATC, key_NATC, value_NATC)
    products = [float(query_NATC[1, 2, 3] @ key_NATC[1, 2, index]) / math.sqrt(8) for index in range(7)]
    weights = [math.exp(product) / sum(map(math.exp, products)) for product in products]
    expected_C = sum(weight * value_NATC[1, 2, index] for index, weight in enumerate(weights))
    torch.testing.assert_close(found_NATC[1, 2, 3], expected_C)


def test_exported_program_has_two_products_and_a_softmax_and_the_same_result() -> None:
    exported = torch.export.export(Attend(), tokens())
    operators = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert operators == {"aten.transpose.int", "aten.matmul.default", "aten.mul.Tensor", "aten.softmax.int"}
    torch.testing.assert_close(exported.module()(*tokens()), attend(*tokens()))
