"""Small graphs whose speed on a runtime is known to be bound by one roof."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.quantization.qdq import TensorRange, insert_qdq, quantizable_tensors

OPSET = 17
_DEPTH = 4
"""Layers in a graph that computes: the first ones read and write other formats."""
TINY_CHANNELS = 16


@dataclass(frozen=True)
class Probe:
    """A graph and what it tells."""

    name: str
    graph: ModelProto
    card: InputCard
    is_depthwise: bool = False
    """Whether its depthwise convolutions tell it, and not its first one."""


def convolution(
    channels: int, size: int, kernel: int, *, is_quantized: bool, is_depthwise: bool = False
) -> Probe:
    """Return a chain of convolutions of `channels` on maps of `size` x `size`; the first one reads fewer."""
    random = np.random.default_rng(0)
    nodes: list[NodeProto] = []
    constants = []
    for number in range(_DEPTH):
        groups = channels if is_depthwise and number else 1
        read = (channels if number else TINY_CHANNELS) // groups
        weight = random.normal(0, 1 / np.sqrt(read * kernel**2), (channels, read, kernel, kernel))
        constants.append(numpy_helper.from_array(weight.astype(np.float32), f"w{number}"))
        pads = [kernel // 2] * 4
        nodes += [
            helper.make_node(
                "Conv",
                [f"r{number}" if number else "image", f"w{number}"],
                [f"c{number}"],
                name=f"conv{number}",
                kernel_shape=[kernel, kernel],
                pads=pads,
                group=groups,
            ),
            helper.make_node("Relu", [f"c{number}"], [f"r{number + 1}"], name=f"relu{number}"),
        ]
    kind = "depthwise convolutions" if is_depthwise else "convolutions"
    name = f"{_DEPTH} {kind} {kernel}x{kernel} of {channels} channels on {size}x{size}"
    image, values = (TINY_CHANNELS, size, size), (channels, size, size)
    probe = _probe(name, nodes, constants, image, values, is_quantized=is_quantized)
    return replace(probe, is_depthwise=is_depthwise)


def matrix_product(rows: int, width: int, *, is_quantized: bool) -> Probe:
    """Return a chain of products of a [rows, width] matrix with [width, width] weights."""
    random = np.random.default_rng(0)
    nodes, constants = [], []
    for number in range(_DEPTH):
        weight = random.normal(0, 1 / np.sqrt(width), (width, width)).astype(np.float32)
        constants.append(numpy_helper.from_array(weight, f"w{number}"))
        nodes += [
            helper.make_node(
                "MatMul",
                [f"r{number}" if number else "image", f"w{number}"],
                [f"m{number}"],
                name=f"matmul{number}",
            ),
            helper.make_node("Relu", [f"m{number}"], [f"r{number + 1}"], name=f"relu{number}"),
        ]
    name = f"{_DEPTH} products of {rows}x{width} by {width}x{width}"
    shape = (1, rows, width)
    return _probe(name, nodes, constants, shape, shape, is_quantized=is_quantized)


def moves(working_set_bytes: int) -> list[Probe]:
    """Return graphs that read and write `working_set_bytes` together and compute little: the fastest one counts."""
    shape = (TINY_CHANNELS, working_set_bytes // 8 // TINY_CHANNELS // 64, 64)
    activation = helper.make_node("Relu", ["image"], ["r1"], name="relu")
    pooling = helper.make_node("MaxPool", ["image"], ["r1"], name="pool", kernel_shape=[1, 1])
    return [
        _probe(
            f"{node.op_type} over {working_set_bytes:,} bytes", [node], [], shape, shape, is_quantized=False
        )
        for node in (activation, pooling)
    ]


def chain(length: int) -> Probe:
    """Return `length` convolutions that compute next to nothing."""
    random = np.random.default_rng(0)
    weight = random.normal(0, 0.25, (TINY_CHANNELS, TINY_CHANNELS, 1, 1)).astype(np.float32)
    nodes = [
        helper.make_node(
            "Conv",
            [f"r{number}" if number else "image", f"w{number}"],
            [f"r{number + 1}"],
            name=f"conv{number}",
        )
        for number in range(length)
    ]
    constants = [numpy_helper.from_array(weight, f"w{number}") for number in range(length)]
    shape = (TINY_CHANNELS, 2, 2)
    return _probe(f"{length} tiny convolutions", nodes, constants, shape, shape, is_quantized=False)


def probe_card(image_shape: tuple[int, ...], values_shape: tuple[int, ...]) -> InputCard:
    """Return the card of a probe, from the shapes of one image and of its result."""
    return InputCard(
        classes=(),
        mean=(0.0,) * image_shape[0],
        std=(1.0,) * image_shape[0],
        height=image_shape[1],
        width=image_shape[2],
        task=Task.values,
        max_batch=1,
        values_shape=values_shape,
    )


def _probe(
    name: str,
    nodes: Sequence[NodeProto],
    constants: Sequence[TensorProto],
    image_shape: tuple[int, ...],
    values_shape: tuple[int, ...],
    *,
    is_quantized: bool,
) -> Probe:
    """Return the graph of nodes that read `image`; the last one gives the output."""
    nodes[-1].output[0] = "values"
    card = probe_card(image_shape, values_shape)
    graph = helper.make_graph(
        list(nodes),
        "probe",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, (1, *image_shape))],
        [helper.make_tensor_value_info("values", TensorProto.FLOAT, (1, *values_shape))],
        list(constants),
    )
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", OPSET)])
    if is_quantized:
        types = ("Conv", "MatMul")
        ranges = {  # with a zero point of 0, runtimes drop the ReLU
            tensor: TensorRange(-4.0 if tensor == "image" else 0.0, 4.0)
            for tensor in quantizable_tensors(model, types)
        }
        model = insert_qdq(model, ranges, op_types=types)
    return Probe(name, model, card)
