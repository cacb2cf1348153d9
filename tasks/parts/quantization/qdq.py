"""INT8 as explicit Q/DQ in an ONNX graph: insert the pairs for given tensor ranges.

Scheme S8S8: activations int8 with one symmetric scale per tensor, weights of convolutions and linear layers
(MatMul and Gemm with a constant) int8 with one symmetric scale per output channel, biases float. TensorRT and
OpenVINO read exactly this; for ONNX Runtime see `onnx_graphs/uint8_activations.py`.

onnxruntime.quantization is not used: it either puts a pair between a convolution and its ReLU, which no runtime can
fuse then, or leaves the inputs of pooling, Resize and Concat in float. Here one rule serves PTQ and QAT, and node
names and sources stay.
"""

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.core.errors import ArtifactError
from tasks.parts.onnx_graphs.graph import node_sources, other_types, set_node_source

INT8_MAX = 127

_STAY_IN_RANGE = frozenset({"AveragePool", "GlobalAveragePool", "MaxPool", "Resize", "Relu"})
_ALL_INPUTS_ARE_MAPS = frozenset({"Add", "Mul", "Concat"})
_LINEAR = frozenset({"MatMul", "Gemm"})
_ALWAYS_FLOAT = frozenset(
    {"LayerNormalization", "Softmax", "Gelu", "Reshape", "Transpose", "Slice", "Pad", "Squeeze", "Unsqueeze"}
)
"""Operators between the layers of transformers: they have INT8 kernels in no runtime, or only move data."""


@dataclass(frozen=True)
class TensorRange:
    """Smallest and largest value of a tensor that INT8 has to represent."""

    low: float
    high: float

    @property
    def amax(self) -> float:
        """Largest magnitude, which the highest INT8 level represents."""
        return max(abs(self.low), abs(self.high))


def quantizable_nodes(model: ModelProto, op_types: Sequence[str]) -> list[NodeProto]:
    """Return the nodes of these types, in graph order.

    The node that computes a graph output (the last Resize) reads float, so that logits keep their precision; a
    convolution there is quantized like the others. These stay in float: products of two activations (attention),
    additions and multiplications of a constant (a bias, a scale), and residual additions whose sum a
    LayerNormalization reads, because it would convert them back to float at once.
    """
    constants = {tensor.name: len(tensor.dims) for tensor in model.graph.initializer}
    outputs = {value.name for value in model.graph.output}
    others = other_types(model)
    normalised = {node.input[0] for node in model.graph.node if node.op_type == "LayerNormalization"}

    def is_quantizable(node: NodeProto) -> bool:
        if node.op_type == "Conv" or node.op_type not in op_types:
            return node.op_type in op_types
        if outputs & set(node.output) or others & set(node.input):
            return False
        if node.op_type in _LINEAR:
            return node.input[0] not in constants and constants.get(node.input[1]) == 2
        if node.op_type in ("Add", "Mul"):
            return not constants.keys() & set(node.input) and not normalised & set(node.output)
        return True

    return [node for node in model.graph.node if is_quantizable(node)]


def float_readers(model: ModelProto, op_types: Sequence[str]) -> set[str]:
    """Return the names of the nodes that read an activation in float even if other nodes read it quantized."""
    quantizable = {node.name for node in quantizable_nodes(model, op_types)}
    chosen = _LINEAR | {"Add", "Mul"}
    return {
        node.name
        for node in model.graph.node
        if node.op_type in _ALWAYS_FLOAT
        or (node.op_type in chosen and node.op_type in op_types and node.name not in quantizable)
    }


def is_layer(node: NodeProto) -> bool:
    """Return whether a quantizable node has a weight."""
    return node.op_type == "Conv" or node.op_type in _LINEAR


def map_inputs(model: ModelProto, node: NodeProto) -> list[str]:
    """Return the names of the activations that a node reads, without weights and other constants."""
    constants = {tensor.name for tensor in model.graph.initializer}
    inputs = node.input if node.op_type in _ALL_INPUTS_ARE_MAPS else node.input[:1]
    return [name for name in inputs if name and name not in constants]


def quantizable_tensors(
    model: ModelProto, op_types: Sequence[str], *, float_nodes: Container[str] = ()
) -> list[str]:
    """Return the names of the activations that quantizable nodes except `float_nodes` read, in graph order."""
    names: dict[str, None] = {}
    for node in quantizable_nodes(model, op_types):
        if node.name not in float_nodes:
            names.update(dict.fromkeys(map_inputs(model, node)))
    return list(names)


def insert_qdq(
    model: ModelProto,
    ranges: Mapping[str, TensorRange],
    *,
    op_types: Sequence[str],
    float_nodes: Container[str] = (),
) -> ModelProto:
    """Return a copy with Q/DQ on each activation that nodes of `op_types` read, and int8 weights in their layers.

    All readers of such an activation read it quantized, because a reader in float would keep the layer before it from
    running in integers. Only `float_readers` and `float_nodes` (names) read float activations and weights. Raises
    ArtifactError for a tensor that has no usable range (a quantizer that saw no data).
    """
    quantized = ModelProto()
    quantized.CopyFrom(model)
    graph = quantized.graph
    sources = node_sources(model)
    made_by = {name: node for node in graph.node for name in node.output}
    outputs = {value.name for value in graph.output}
    wanted = quantizable_tensors(model, op_types, float_nodes=float_nodes)
    names = [name for name in wanted if name not in outputs]
    check_ranges({name: ranges.get(name) for name in names})
    in_float = float_readers(model, op_types)
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        for name in node.input:
            if node.name not in float_nodes and node.name not in in_float:
                readers.setdefault(name, []).append(node)
    after: dict[str, list[NodeProto]] = {}
    for name in names:
        scale = np.float32(ranges[name].amax / INT8_MAX)
        pair = _activation_pair(quantized, name, scale)
        owner = made_by.get(name) or readers[name][0]
        for node in pair:
            _copy_source(sources, owner, node)
        after.setdefault(name, []).extend(pair)
        for reader in readers[name]:
            reader.input[:] = [pair[1].output[0] if read == name else read for read in reader.input]
    layers = {node.name for node in quantizable_nodes(model, op_types) if is_layer(node)}
    before = _quantize_weights(quantized, {name for name in layers if name not in float_nodes}, sources)
    _rewrite_nodes(quantized, after, before)
    return quantized


def add_quantized_twins(
    model: ModelProto, ranges: Mapping[str, TensorRange], *, op_types: Sequence[str]
) -> tuple[ModelProto, dict[str, str], dict[str, str]]:
    """Return a copy that also computes each quantizable node, as a twin, from its exact inputs after quantization.

    Its outputs are sums of squares. Also returns node name -> output with the noise (twin minus original), and node
    name -> output with the signal. Raises ArtifactError like `insert_qdq`.
    """
    twinned = ModelProto()
    twinned.CopyFrom(model)
    graph = twinned.graph
    nodes = quantizable_nodes(model, op_types)
    tensors = quantizable_tensors(model, op_types)
    check_ranges({name: ranges.get(name) for name in tensors})
    added = []
    for name in tensors:
        added += _activation_pair(twinned, name, np.float32(ranges[name].amax / INT8_MAX))
    del graph.output[:]
    noise_of, signal_of = {}, {}
    for node in nodes:
        maps = set(map_inputs(model, node))
        twin = NodeProto()
        twin.CopyFrom(node)
        twin.name = f"{node.name}:twin"
        twin.output[:] = [f"{node.output[0]}:twin"]
        twin.input[:] = [f"{name}/DequantizeLinear" if name in maps else name for name in node.input]
        if is_layer(node):
            weight, axis = numpy_helper.to_array(float_weight(model, node)), _output_axis(node)
            levels, scales_O = weight_levels(weight, axis=axis)
            rounded = levels * _along(scales_O, axis, weight.ndim)
            twin.input[1] = f"{node.name}:rounded_weight"
            graph.initializer.append(numpy_helper.from_array(rounded, twin.input[1]))
        noise, signal = f"{node.name}:noise", f"{node.name}:signal"
        difference = f"{node.name}:difference"
        added += [
            twin,
            helper.make_node("Sub", [node.output[0], twin.output[0]], [difference]),
            helper.make_node("ReduceSumSquare", [difference], [noise], keepdims=0),
            helper.make_node("ReduceSumSquare", [node.output[0]], [signal], keepdims=0),
        ]
        noise_of[node.name], signal_of[node.name] = noise, signal
        graph.output.extend(
            helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (noise, signal)
        )
    graph.node.extend(added)
    return twinned, noise_of, signal_of


def inherit_ranges(model: ModelProto, ranges: Mapping[str, TensorRange]) -> dict[str, TensorRange]:
    """Give outputs of pooling and resizing that have no range the range of their input, which they cannot leave.

    This is for a network exported at another image size, whose graph may have a Resize that the calibrated one lacks.
    """
    complete = dict(ranges)
    for node in model.graph.node:
        if node.op_type in _STAY_IN_RANGE and node.input[0] in complete:
            complete.setdefault(node.output[0], complete[node.input[0]])
    return complete


def write_ranges(path: Path, calibrator: str, ranges: Mapping[str, TensorRange]) -> None:
    """Write `{"calibrator": name, "ranges": {tensor: [low, high]}}`."""
    content = {
        "calibrator": calibrator,
        "ranges": {name: [limits.low, limits.high] for name, limits in ranges.items()},
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_ranges(path: Path) -> dict[str, TensorRange]:
    """Read what write_ranges wrote; raise ArtifactError for anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return {name: TensorRange(float(low), float(high)) for name, (low, high) in content["ranges"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path}: no readable tensor ranges ({error!r}), expected JSON with 'ranges'. Run quantize_ptq "
            "again."
        ) from error


def check_ranges(ranges: Mapping[str, TensorRange | None]) -> None:
    """Raise ArtifactError unless each tensor has a finite range that is not only 0."""
    for name, limits in ranges.items():
        if limits is None or not np.isfinite([limits.low, limits.high]).all() or limits.amax <= 0:
            text = "no range" if limits is None else f"range [{limits.low}, {limits.high}]"
            raise ArtifactError(
                f"tensor '{name}': {text}, expected a finite one that is not all zero; its quantizer saw no "
                "data or a dead layer. Check the calibration images (quantize_ptq.num_images) and the "
                "weights before it."
            )


def float_weight(model: ModelProto, layer: NodeProto) -> TensorProto:
    """Return the weight of a layer; raise ArtifactError unless it is a float constant."""
    weights = (tensor for tensor in model.graph.initializer if tensor.name == layer.input[1])
    weight: TensorProto | None = next(weights, None)
    if weight is None or weight.data_type != TensorProto.FLOAT:
        raise ArtifactError(
            f"node '{layer.name}': its weight '{layer.input[1]}' is not a float constant, expected a float graph "
            "from export_onnx. Do not quantize a graph twice."
        )
    return weight


def weight_levels(values: np.ndarray, *, axis: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 levels in the weight's shape and float32 scales [O]; `axis` is that of the output channels."""
    scales_O = weight_scales(np.moveaxis(values, axis, 0))
    levels = np.clip(np.rint(values / _along(scales_O, axis, values.ndim)), -INT8_MAX, INT8_MAX)
    return levels.astype(np.int8), scales_O


def weight_scales(values_OI: np.ndarray) -> np.ndarray:
    """Return the largest magnitude per output channel / 127; a channel of zeros gets 1 / 127."""
    amax_O = np.abs(values_OI).reshape(len(values_OI), -1).max(axis=1)
    scales_O: np.ndarray = (np.where(amax_O > 0, amax_O, 1.0) / INT8_MAX).astype(np.float32)
    return scales_O


def _activation_pair(model: ModelProto, name: str, scale: np.float32) -> list[NodeProto]:
    scale_name, zero_name = f"{name}:scale", f"{name}:zero_point"
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(np.array(scale, dtype=np.float32), scale_name),
            numpy_helper.from_array(np.array(0, dtype=np.int8), zero_name),
        ]
    )
    levels, real = f"{name}/QuantizeLinear", f"{name}/DequantizeLinear"
    return [
        helper.make_node("QuantizeLinear", [name, scale_name, zero_name], [levels], name=levels),
        helper.make_node("DequantizeLinear", [levels, scale_name, zero_name], [real], name=real),
    ]


def _quantize_weights(
    model: ModelProto, layers: Container[str], sources: Mapping[str, tuple[str, str]]
) -> dict[str, list[NodeProto]]:
    """Let these layers read int8 weights; return layer -> the DequantizeLinear of its weight."""
    before: dict[str, list[NodeProto]] = {}
    quantized_weights: dict[str, str] = {}
    for node in model.graph.node:
        if node.name in layers:
            weight = node.input[1]
            if weight not in quantized_weights:
                dequantize = _quantize_weight(model, node)
                _copy_source(sources, node, dequantize)
                before[node.name] = [dequantize]
                quantized_weights[weight] = dequantize.output[0]
            node.input[1] = quantized_weights[weight]  # layers may share a weight
    still_read = {name for node in model.graph.node for name in node.input}
    for tensor in [item for item in model.graph.initializer if item.name in quantized_weights]:
        if tensor.name not in still_read:
            model.graph.initializer.remove(tensor)
    return before


def _quantize_weight(model: ModelProto, layer: NodeProto) -> NodeProto:
    """Add the weight of a layer as int8 with one scale per output channel; return its DequantizeLinear."""
    weight, axis = float_weight(model, layer), _output_axis(layer)
    levels, scales_O = weight_levels(numpy_helper.to_array(weight), axis=axis)
    name, levels_name, real = layer.input[1], f"{layer.input[1]}:int8", f"{layer.input[1]}/DequantizeLinear"
    scale_name, zero_name = f"{name}:scale", f"{name}:zero_point"
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(levels, levels_name),
            numpy_helper.from_array(scales_O, scale_name),
            numpy_helper.from_array(np.zeros(len(scales_O), dtype=np.int8), zero_name),
        ]
    )
    return helper.make_node(
        "DequantizeLinear", [levels_name, scale_name, zero_name], [real], name=real, axis=axis
    )


def _output_axis(layer: NodeProto) -> int:
    """Return the axis of the output channels in a layer's weight."""
    is_transposed = any(attribute.i for attribute in layer.attribute if attribute.name == "transB")
    return 0 if layer.op_type == "Conv" or is_transposed else 1


def _along(scales_O: np.ndarray, axis: int, num_axes: int) -> np.ndarray:
    """Reshape scales so that they multiply a weight along one axis."""
    shape = [1] * num_axes
    shape[axis] = -1
    return scales_O.reshape(shape)


def _copy_source(sources: Mapping[str, tuple[str, str]], owner: NodeProto, node: NodeProto) -> None:
    if owner.name in sources:
        set_node_source(node, *sources[owner.name])


def _rewrite_nodes(
    model: ModelProto, after: Mapping[str, list[NodeProto]], before: Mapping[str, list[NodeProto]]
) -> None:
    """Insert the new nodes in topological order."""
    graph = model.graph
    nodes = [node for value in graph.input for node in after.get(value.name, [])]
    for node in graph.node:
        nodes.extend(before.get(node.name, []))
        kept = NodeProto()
        kept.CopyFrom(node)
        nodes.append(kept)
        nodes.extend(new for name in node.output for new in after.get(name, []))
    del graph.node[:]
    graph.node.extend(nodes)
