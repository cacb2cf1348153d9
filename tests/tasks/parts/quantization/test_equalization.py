import copy
import functools

import numpy as np
import pytest
import torch
from onnx import ModelProto, helper, numpy_helper
from torch import Tensor, nn

from tasks.parts.onnx_graphs.export import export_graph
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session
from tasks.parts.quantization.calibration import (
    choose_range,
    collect_channel_magnitudes,
    collect_statistics,
)
from tasks.parts.quantization.config import Calibrator
from tasks.parts.quantization.equalization import equalize, scalable_tensors, without_upper_limits
from tasks.parts.quantization.qdq import insert_qdq, quantizable_tensors
from tests.tasks import tiny_networks as tiny

OP_TYPES = (*tiny.OP_TYPES, "Gemm", "MatMul")
SAME_FUNCTION_DB = 100.0
"""Float32 reaches more; an INT8 graph reaches 20 to 40 dB."""


class Joined(nn.Module):
    """Concat, Split, grouped convolution, mean, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(3, 4, 3, 2, 1)
        self.grouped = nn.Conv2d(8, 12, 3, 1, 1, groups=2)
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        maps_NCHW = torch.cat(
            [torch.relu(self.left(images_NCHW)), torch.relu(self.right(images_NCHW))], dim=1
        )
        upper_NCHW, lower_NCHW = torch.relu(self.grouped(maps_NCHW)).split(6, dim=1)
        mean_NC = nn.functional.adaptive_avg_pool2d(upper_NCHW + lower_NCHW, 1).flatten(1)
        return self.second(torch.relu(self.first(mean_NC)))


class Attention(nn.Module):
    """Tokens, LayerNorm, two linear layers, and a residual addition."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.norm, self.wide, self.narrow = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        tokens_NTC = self.patches(images_NCHW).flatten(2).transpose(1, 2)
        tokens_NTC = tokens_NTC + self.narrow(torch.relu(self.wide(self.norm(tokens_NTC))))
        return self.head(tokens_NTC.mean(dim=1))


@functools.cache
def exported(network_type: type) -> ModelProto:
    return export_graph(tiny.make(network_type), tiny.card(), height=tiny.SIZE, width=tiny.SIZE, opset=20)


def export(network_type: type) -> ModelProto:
    return copy.deepcopy(exported(network_type))


def multiply(graph: ModelProto, name: str, factors: np.ndarray) -> None:
    tensor = next(item for item in graph.graph.initializer if item.name == name)
    values = numpy_helper.to_array(tensor) * factors
    tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32), name))


def equalized(graph: ModelProto, images_NCHW: np.ndarray) -> ModelProto:
    axes = scalable_tensors(graph, OP_TYPES)
    magnitudes = collect_channel_magnitudes(graph, [images_NCHW], axes)
    return equalize(graph, magnitudes, op_types=OP_TYPES)


def logits(graph: ModelProto, images_NCHW: np.ndarray) -> np.ndarray:
    found: np.ndarray = open_session(graph, is_optimised=False).run(
        None, {graph.graph.input[0].name: images_NCHW}
    )[0]
    return found


def int8_sqnr_db(graph: ModelProto, images_NCHW: np.ndarray) -> float:
    statistics = collect_statistics(graph, lambda: [images_NCHW], quantizable_tensors(graph, OP_TYPES))
    ranges = {
        name: choose_range(found, Calibrator.minmax, percentile=100.0) for name, found in statistics.items()
    }
    quantized = insert_qdq(graph, ranges, op_types=OP_TYPES)
    return difference(logits(graph, images_NCHW), logits(quantized, images_NCHW)).sqnr_db


def unbalance(graph: ModelProto, maker: str, reader: str, factor: float = 1000.0) -> None:
    """Make one channel between a layer and a depthwise, or another, convolution larger, and read it smaller."""
    nodes = {node.name: node for node in graph.graph.node}
    weight = next(item for item in graph.graph.initializer if item.name == nodes[maker].input[1])
    factors = np.ones(weight.dims[0], np.float32)
    factors[0] = factor
    multiply(graph, nodes[maker].input[1], factors[:, None, None, None])
    multiply(graph, nodes[maker].input[2], factors)
    read = next(item for item in graph.graph.initializer if item.name == nodes[reader].input[1])
    shape = (-1, 1, 1, 1) if read.dims[1] == 1 else (1, -1, 1, 1)
    multiply(graph, nodes[reader].input[1], 1 / factors.reshape(shape))


@pytest.mark.parametrize("network_type", [tiny.Straight, tiny.Branched, tiny.Shared, Joined, Attention])
def test_an_equalized_graph_is_the_same_function(network_type: type) -> None:
    graph, images_NCHW = export(network_type), tiny.images(8).numpy()
    changed = equalized(graph, images_NCHW)
    before, after = logits(graph, images_NCHW), logits(changed, images_NCHW)
    assert difference(before, after).sqnr_db > SAME_FUNCTION_DB
    assert [node.name for node in changed.graph.node] == [node.name for node in graph.graph.node]
    if network_type is not tiny.Shared:
        assert changed != graph, "something could be scaled"


@pytest.mark.parametrize(
    ("network_type", "maker", "reader"),
    [
        (tiny.Straight, "stem.0/Conv", "depthwise.0/Conv"),
        (tiny.Straight, "depthwise.0/Conv", "classifier/Conv"),
        (tiny.Branched, "block.0.0/Conv", "block.2.0/Conv"),
    ],
)
def test_a_channel_that_is_a_thousand_times_larger_costs_nothing_afterwards(
    network_type: type, maker: str, reader: str
) -> None:
    graph, images_NCHW = export(network_type), tiny.images(8).numpy()
    balanced_db = int8_sqnr_db(graph, images_NCHW)
    unbalance(graph, maker, reader)
    ruined_db = int8_sqnr_db(graph, images_NCHW)
    repaired_db = int8_sqnr_db(equalized(graph, images_NCHW), images_NCHW)
    assert ruined_db < balanced_db - 10, "or else there is nothing to repair"
    assert repaired_db > balanced_db - 2


def test_channels_that_meet_in_an_addition_are_scaled_alike() -> None:
    """The stem's channels are added to those of a block and joined with others."""
    graph, images_NCHW = export(tiny.Branched), tiny.images(8).numpy()
    nodes = {node.name: node for node in graph.graph.node}
    before, after = (
        {item.name: numpy_helper.to_array(item) for item in model.graph.initializer}
        for model in (graph, equalized(graph, images_NCHW))
    )
    stem, block = (nodes[name].input[1] for name in ("stem.0/Conv", "block.2.0/Conv"))
    inner = nodes["block.0.0/Conv"].input[1]
    stem_O = after[stem][:, 0, 0, 0] / before[stem][:, 0, 0, 0]
    inner_O = (after[inner] / before[inner] * stem_O[None, :, None, None])[:, 0, 0, 0]
    block_O = (after[block] / before[block] * inner_O[None, :, None, None])[:, 0, 0, 0]
    np.testing.assert_allclose(stem_O, block_O, rtol=1e-4)


def test_channels_behind_a_limit_are_left_alone_until_it_is_gone() -> None:
    graph, images_NCHW = export(tiny.Straight), tiny.images(8).numpy()
    graph.graph.initializer.extend(
        numpy_helper.from_array(np.array(value, np.float32), name)
        for name, value in (("low", 0), ("high", 6))
    )
    for index, node in enumerate(graph.graph.node):
        if node.op_type == "Relu":
            limited = helper.make_node("Clip", [node.input[0], "low", "high"], node.output, name=node.name)
            graph.graph.node[index].CopyFrom(limited)
    assert not scalable_tensors(graph, OP_TYPES)
    unlimited = without_upper_limits(graph)
    assert unlimited is not None
    assert scalable_tensors(unlimited, OP_TYPES)
    assert {node.op_type for node in unlimited.graph.node} & {"Clip", "Relu"} == {"Relu"}
    assert without_upper_limits(unlimited) is None
    assert difference(logits(unlimited, images_NCHW), logits(export(tiny.Straight), images_NCHW)).max_abs == 0
