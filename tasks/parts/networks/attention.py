"""Attention of tokens to tokens: one fused function of torch, and matrix products and a softmax in an exported graph.

torch's exporter would write the fused function as a chain of shape arithmetic that no runtime recognises as
attention; the matrix products and the softmax are what their fusions look for.

Tensor suffixes: N batch, A attention heads, T tokens, C channels of a head.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F


def attend(query_NATC: Tensor, key_NATC: Tensor, value_NATC: Tensor) -> Tensor:
    """Return softmax(query key^T / sqrt(C)) value (Vaswani et al., 2017, arXiv:1706.03762, equation 1)."""
    if not torch.compiler.is_exporting():
        return F.scaled_dot_product_attention(query_NATC, key_NATC, value_NATC)
    scale = 1 / math.sqrt(query_NATC.shape[-1])
    weights_NATT = torch.softmax(torch.matmul(query_NATC, key_NATC.transpose(2, 3)) * scale, dim=-1)
    return torch.matmul(weights_NATT, value_NATC)
