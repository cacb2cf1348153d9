"""INT8 as explicit Q/DQ in an ONNX graph: insert the pairs for given tensor ranges.

Scheme U8S8: activations uint8 with one scale and zero point per tensor, whose levels cover its range and 0; weights
of convolutions and linear layers (MatMul and Gemm with a constant) int8 with one symmetric scale per output channel;
biases float. For runtimes that want symmetric int8 see `onnx_graphs/int8_activations.py`. What only products of two
activations read is symmetric int8, unless it is never negative: OpenVINO (2026.4) computes attention in INT8 with no
zero point but 0, ONNX Runtime with any.

onnxruntime.quantization is not used: it puts pairs where other runtimes cannot fuse (between a convolution and its
activation), it has one rule for all, and it drops node names and sources. Here one rule serves PTQ and QAT.
"""

import json
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.core.errors import ArtifactError
from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.onnx_graphs.graph import (
    CARD_KEY,
    MOVES_VALUES,
    GraphIndex,
    index_graph,
    is_quantized,
    node_sources,
    other_types,
    pads_with_zeros,
    set_node_source,
)
from tasks.parts.onnx_graphs.macs import LAYER_TYPES
from tasks.parts.onnx_session import copy_without
from tasks.parts.quantization.config import Activations, Calibrator

INT8_MAX = 127
UINT8_MAX = 255

_ALL_INPUTS_ARE_MAPS = frozenset({"Add", "Mul", "Concat"})
_LINEAR = frozenset({"MatMul", "Gemm"})
_FUSED = frozenset({"Relu", "Clip"})
"""Activations that ONNX Runtime computes in the same integer kernel as the layer before them."""
_ACTIVATIONS = _FUSED | {"HardSigmoid", "HardSwish", "LeakyRelu", "Sigmoid"}
_NEEDS_EXACT_INPUT = _LINEAR | {"Softmax"}
"""Operators in front of which the output of a convolution is not rounded for the convolution's sake."""
_ALWAYS_FLOAT = frozenset({"LayerNormalization", "Softmax", "Gelu"})
"""Operators between the layers of transformers that have INT8 kernels in no runtime."""


@dataclass(frozen=True)
class TensorRange:
    """Smallest and largest value of a tensor that INT8 has to represent."""

    low: float
    high: float

    @property
    def amax(self) -> float:
        """Largest magnitude."""
        return max(abs(self.low), abs(self.high))

    def int8(self) -> np.float32:
        """Return the scale of int8 levels that cover the range with zero point 0."""
        return np.float32(self.amax / INT8_MAX)

    def uint8(self) -> tuple[np.float32, np.uint8]:
        """Return scale and zero point of uint8 levels that cover the range and represent 0 exactly."""
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        scale = np.float32((high - low) / UINT8_MAX)
        if low == 0 and scale * UINT8_MAX > np.float32(high):
            scale = np.nextafter(
                scale, np.float32(0)
            )  # so that the highest level is no larger than a Clip's limit
        return scale, np.uint8(np.clip(np.rint(-low / scale), 0, UINT8_MAX))


@dataclass(frozen=True)
class Placement:
    """Where Q/DQ pairs stand in a graph."""

    range_of: dict[str, str]
    """Quantized tensor -> tensor whose range it has, in graph order. Operators that only move values keep the range
    of their input: with another scale behind them, no runtime could move integers."""
    readers: dict[str, set[str]]
    """Quantized tensor -> names of the nodes that read it after the pair."""


def quantizable_nodes(model: ModelProto, op_types: Sequence[str]) -> list[NodeProto]:
    """Return the nodes of these types, in graph order.

    The node that computes a graph output (the last Resize) reads float, so that logits keep their precision; a layer
    there is quantized like the others. Products of two activations (attention) stay in float unless `op_types` names
    BatchMatMul. These always do: layers whose weight the graph computes, additions and multiplications of what no
    image changes (a bias, a scale, a mask), residual additions whose sum a LayerNormalization reads, because it would
    convert them back to float at once, the product inside a GELU, or inside a SiLU behind a matrix product, whose
    operators runtimes fuse unless pairs stand between them, and pools that ONNX Runtime computes wrong in INT8.
    """
    return _look_at(model, op_types).quantizable


@dataclass(frozen=True)
class _Layers:
    """What is found in a graph whatever stays in float."""

    graph: GraphProto
    op_types: Sequence[str]
    index: GraphIndex
    quantizable: list[NodeProto]
    logits: set[str]


def _look_at(model: ModelProto, op_types: Sequence[str]) -> _Layers:
    index = index_graph(model.graph)
    constants, outputs, others = index.constants, index.outputs, other_types(model)
    normalised = {node.input[0] for node in model.graph.node if node.op_type == "LayerNormalization"}
    gates, silus = _gates_of_gelu(model.graph, constants), _silus_behind_products(index)
    known = constants.keys() | _known_values(model.graph)

    def num_axes_of_weight(node: NodeProto) -> int:
        """Return 0 for a weight that the graph computes."""
        weight = constants.get(node.input[1])
        return len(weight.dims) if weight is not None and weight.data_type == TensorProto.FLOAT else 0

    def is_quantizable(node: NodeProto) -> bool:
        if node.op_type == "Conv":
            return "Conv" in op_types and num_axes_of_weight(node) > 0
        if others & set(node.input):
            return False
        if is_product(node, constants):
            return "BatchMatMul" in op_types
        if node.op_type not in op_types:
            return False
        if node.op_type in _LINEAR:
            return node.input[0] not in constants and num_axes_of_weight(node) == 2
        if node.op_type == "ConvTranspose":
            return num_axes_of_weight(node) > 0
        if _is_wrong_in_int8(node):
            return False
        if (outputs | silus) & set(node.output):
            return False
        if node.op_type in ("Add", "Mul"):
            return not (known | gates) & set(node.input) and not normalised & set(node.output)
        return True

    quantizable = [node for node in model.graph.node if is_quantizable(node)]
    return _Layers(model.graph, op_types, index, quantizable, class_logits(model))


def _known_values(graph: GraphProto) -> set[str]:
    """Return the computed tensors whose values no image changes: a mask of attention that is repeated for a batch."""
    changing = {value.name for value in graph.input}
    known: set[str] = set()
    for node in graph.node:  # in the order in which they run
        is_known = node.op_type in ("Shape", "Size") or not changing & set(node.input)
        (known if is_known else changing).update(node.output)
    return known


def _gates_of_gelu(graph: GraphProto, constants: Container[str]) -> set[str]:
    """Return the tensors 1 + erf(..) or 1 + tanh(..), also times a constant, with which a GELU multiplies."""
    bells: set[str] = set()
    gates: set[str] = set()
    for node in graph.node:  # in the order in which they run
        inputs = set(node.input)
        is_scaled = node.op_type == "Mul" and any(name in constants for name in inputs)
        if node.op_type in ("Erf", "Tanh"):
            bells.add(node.output[0])
        elif (node.op_type == "Add" and bells & inputs) or (is_scaled and gates & inputs):
            gates.add(node.output[0])
    return gates


def _silus_behind_products(index: GraphIndex) -> set[str]:
    """Return what the two operators of each x * Sigmoid(x), or x * Sigmoid(constant * x), give behind a product.

    The matrix product, perhaps with its bias, gives x. Behind a convolution pairs stand in a SiLU: without them ONNX
    Runtime does not run the convolution in integers.
    """

    def before_constant(name: str, op_type: str) -> str:
        """Return the input of an operator with a constant that makes a tensor; the tensor itself without one."""
        maker = index.makers.get(name)
        if maker is None or maker.op_type != op_type or not index.constants.keys() & set(maker.input):
            return name
        return str(next((given for given in maker.input if given not in index.constants), name))

    silus: set[str] = set()
    for node in index.makers.values():
        for value, gate in (node.input, reversed(node.input)) if node.op_type == "Mul" else ():
            sigmoid, product = index.makers.get(gate), index.makers.get(before_constant(value, "Add"))
            if (
                product is not None
                and product.op_type in _LINEAR
                and sigmoid is not None
                and sigmoid.op_type == "Sigmoid"
                and before_constant(sigmoid.input[0], "Mul") == value
            ):
                silus.update((*node.output, gate))
    return silus


def place_pairs(model: ModelProto, op_types: Sequence[str]) -> Placement:
    """Decide which tensors get a Q/DQ pair, and which nodes read them quantized, if all nodes may run in INT8.

    Quantized are the inputs of `quantizable_nodes`, what lies between them and the last integer operator before
    them if only values are moved there, and outputs of convolutions that no such node reads (before HardSwish,
    LeakyRelu, a mean or LayerNormalization, also behind moves, and class logits): ONNX Runtime runs a convolution in
    integers only if a pair follows it or its ReLU or Clip, and nothing reads its output without the pair.
    """
    return _place(_look_at(model, op_types), ())


def _place(layers: _Layers, float_nodes: Container[str]) -> Placement:
    """Do what `place_pairs` says if `float_nodes` stay in float."""
    graph, op_types, index = layers.graph, layers.op_types, layers.index
    makers, readers, constants, outputs = index.makers, index.readers, index.constants, index.outputs
    logits = layers.logits
    chosen = {node.name for node in layers.quantizable if node.name not in float_nodes}
    in_float = {
        node.name
        for node in graph.node
        if node.name in float_nodes
        or node.op_type in _ALWAYS_FLOAT
        or (node.op_type in op_types and node.name not in chosen)
    }

    def keeps_range(node: NodeProto) -> bool:
        is_free = node.op_type not in ("MaxPool", "Resize") or node.name in chosen
        return is_free and node.name not in in_float and _keeps_range(node, constants)

    integers: dict[str, bool] = {}

    def is_integer(name: str) -> bool:
        """Return whether an integer operator computes a tensor, perhaps with moves and activations behind it."""
        passed = []
        while name not in integers:
            passed.append(name)
            node = makers.get(name)
            if node is None or node.name in in_float:
                integers[name] = False
            elif node.name in chosen and node.op_type not in (*_LINEAR, "MaxPool", "Resize"):
                integers[name] = True
            elif node.op_type in _ACTIVATIONS or keeps_range(node):
                name = node.input[0]
            else:
                integers[name] = False
        integers.update(dict.fromkeys(passed, integers[name]))
        return integers[name]

    wanted: dict[str, set[str]] = {}
    for node in reversed(graph.node):
        if node.name in chosen:
            for name in map_inputs(node, constants):
                wanted.setdefault(name, set()).add(node.name)
        elif keeps_range(node) and wanted.keys() & set(node.output) and is_integer(node.input[0]):
            wanted.setdefault(node.input[0], set()).add(node.name)
    for node in graph.node:
        if node.op_type == "Conv" and node.name in chosen:
            name = _fused_output(node, readers)
            following = list(_readers_behind_moves(name, readers))
            if name in logits or (
                following
                and not any(
                    reader.name in float_nodes
                    or outputs & set(reader.output)
                    or reader.op_type in _NEEDS_EXACT_INPUT
                    or _is_wrong_in_int8(reader)
                    for reader in following
                )
            ):
                wanted.setdefault(name, set()).update(reader.name for reader in readers.get(name, []))
    range_of: dict[str, str] = {}
    for name in [value.name for value in graph.input] + [name for node in graph.node for name in node.output]:
        if name in wanted and (name not in outputs or name in logits):
            maker = makers.get(name)
            is_moved = maker is not None and keeps_range(maker) and maker.input[0] in range_of
            range_of[name] = range_of[maker.input[0]] if is_moved and maker is not None else name
            if is_integer(name):
                wanted[name] |= {
                    reader.name for reader in readers.get(name, []) if reader.name not in in_float
                }
    return Placement(range_of, {name: wanted[name] for name in range_of})


def is_product(node: NodeProto, constants: Container[str]) -> bool:
    """Return whether a node is a matrix product of two activations."""
    return node.op_type == "MatMul" and not any(name in constants for name in node.input)


def weighted_nodes(model: ModelProto, op_types: Sequence[str]) -> list[NodeProto]:
    """Return the quantizable nodes that have a weight, in graph order."""
    return _weighted(_look_at(model, op_types))


def _weighted(layers: _Layers) -> list[NodeProto]:
    return [
        node
        for node in layers.quantizable
        if node.op_type in LAYER_TYPES and not is_product(node, layers.index.constants)
    ]


def class_logits(model: ModelProto) -> set[str]:
    """Return the names of the class logits, and of what the Resize that gives them reads, unless others read them.

    Of logits only the order counts. Other numbers are worth more than 8 bits.
    """
    graph = model.graph
    cards = [InputCard.from_json(entry.value) for entry in model.metadata_props if entry.key == CARD_KEY]
    if any(card.task is Task.values for card in cards):
        return set()
    outputs = {value.name for value in graph.output}
    resized = {
        node.input[0] for node in graph.node if node.op_type == "Resize" and outputs & set(node.output)
    }
    num_readers = Counter(name for node in graph.node if node.op_type != "Shape" for name in node.input)
    return {name for name in outputs if not num_readers[name]} | {
        name for name in resized if num_readers[name] == 1
    }


def map_inputs(node: NodeProto, constants: Container[str]) -> list[str]:
    """Return the names of the activations that a node reads, without weights and other constants."""
    are_all_maps = node.op_type in _ALL_INPUTS_ARE_MAPS or is_product(node, constants)
    inputs = node.input if are_all_maps else node.input[:1]
    return [name for name in inputs if name and name not in constants]


def quantizable_tensors(model: ModelProto, op_types: Sequence[str]) -> list[str]:
    """Return the names of the tensors whose ranges `insert_qdq` needs, in graph order."""
    return list(dict.fromkeys(place_pairs(model, op_types).range_of.values()))


def insert_qdq(
    model: ModelProto,
    ranges: Mapping[str, TensorRange],
    *,
    op_types: Sequence[str],
    float_nodes: Container[str] = (),
) -> ModelProto:
    """Return a copy with Q/DQ pairs as `place_pairs` says, and int8 weights in the layers of `op_types`.

    Nodes in `float_nodes` (names) read float activations and weights. Whoever tries many sets of them on one graph
    keeps a `QdqInserter`. Raises ArtifactError for a graph that has pairs already, and for a tensor that has no
    usable range (a quantizer that saw no data).
    """
    return QdqInserter(model, ranges, op_types=op_types).insert(float_nodes)


class QdqInserter:
    """Inserts pairs into copies of one graph, each time with other nodes in float.

    What does not depend on these nodes is found once, and each weight is rounded once. The graph must not change
    meanwhile. Raises ArtifactError like `insert_qdq`.
    """

    def __init__(
        self, model: ModelProto, ranges: Mapping[str, TensorRange], *, op_types: Sequence[str]
    ) -> None:
        if is_quantized(model):
            raise ArtifactError(
                f"graph '{model.graph.name}': has Q/DQ pairs already, expected a float graph from export_onnx. Do "
                "not quantize a graph twice."
            )
        self._model, self._ranges = model, ranges
        self._layers = _look_at(model, op_types)
        self._weighted = {node.name for node in _weighted(self._layers)}
        self._range_of = _place(self._layers, ()).range_of
        self._operands = _operands_of_products(self._layers)
        self._sources = node_sources(model)
        self._levels: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}

    def insert(self, float_nodes: Container[str] = ()) -> ModelProto:
        """Return a copy in which these nodes (names) stay in float, and all others run in INT8."""
        layers = {name for name in self._weighted if name not in float_nodes}
        quantized = copy_without(self._model, self._weights_of(layers))
        graph = quantized.graph
        nodes = {node.name: node for node in graph.node}
        _count_no_padding(
            nodes[node.name] for node in self._layers.quantizable if node.name not in float_nodes
        )
        made_by = {name: node for node in graph.node for name in node.output}
        placement = _place(self._layers, float_nodes)
        limits = _limits(self._range_of, self._ranges, list(placement.range_of))
        operands = self._operands & {name for name, root in placement.range_of.items() if name == root}
        after: dict[str, list[NodeProto]] = {}
        for name, limit in limits.items():
            readers = [nodes[reader] for reader in placement.readers[name]]
            pair = _activation_pair(quantized, name, limit, is_symmetric=name in operands)
            owner = made_by.get(name) or readers[0]
            if name in self._layers.index.outputs:  # keeps its name
                owner.output[0] = pair[0].input[0] = f"{name}:float"
                pair[1].output[0] = name
            for node in pair:
                _copy_source(self._sources, owner, node)
            after[pair[0].input[0]] = pair
            for reader in readers:
                reader.input[:] = [pair[1].output[0] if read == name else read for read in reader.input]
        before = self._quantize_weights(quantized, layers)
        _rewrite_nodes(quantized, after, before)
        return quantized

    def _weights_of(self, layers: Container[str]) -> set[str]:
        """Return the weights that these layers read, and nothing else."""
        index = self._layers.index
        return {
            node.input[1]
            for node in self._layers.quantizable
            if node.name in layers
            and all(
                reader.name in layers
                and list(reader.input).count(node.input[1]) == 1
                and reader.input[1] == node.input[1]
                for reader in index.readers[node.input[1]]
            )
            and node.input[1] not in index.outputs
        }

    def _quantize_weights(self, model: ModelProto, layers: Container[str]) -> dict[str, list[NodeProto]]:
        """Let these layers read int8 weights; return layer -> the DequantizeLinear of its weight.

        Layers that share a weight share its levels, if their output channels lie along the same axis of it.
        """
        before: dict[str, list[NodeProto]] = {}
        dequantized: dict[tuple[str, int], str] = {}
        quantized = set()
        for node in model.graph.node:
            if node.name not in layers:
                continue
            weight = self._layers.index.constants[node.input[1]]
            axis = output_axis(node, weight.dims)
            key = weight.name, axis
            if key not in dequantized:
                if key not in self._levels:
                    self._levels[key] = weight_levels(numpy_helper.to_array(weight), axis=axis)
                suffix = f":axis{axis}" if weight.name in quantized else ""
                dequantize = _add_levels(model, f"{weight.name}{suffix}", *self._levels[key], axis)
                _copy_source(self._sources, node, dequantize)
                before[node.name] = [dequantize]
                dequantized[key] = dequantize.output[0]
                quantized.add(weight.name)
            node.input[1] = dequantized[key]
        return before


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
    layers = _look_at(model, op_types)
    nodes, constants = layers.quantizable, layers.index.constants
    weighted = {node.name for node in _weighted(layers)}
    read = dict.fromkeys(name for node in nodes for name in map_inputs(node, constants))
    operands, added = _operands_of_products(layers), []
    for name, limit in _limits(_place(layers, ()).range_of, ranges, list(read)).items():
        added += _activation_pair(twinned, name, limit, is_symmetric=name in operands)
    del graph.output[:]
    noise_of, signal_of, twins = {}, {}, []
    for node in nodes:
        maps = set(map_inputs(node, constants))
        twin = NodeProto()
        twin.CopyFrom(node)
        twin.name = f"{node.name}:twin"
        twin.output[:] = [f"{node.output[0]}:twin"]
        twin.input[:] = [f"{name}/DequantizeLinear" if name in maps else name for name in node.input]
        if node.name in weighted:
            tensor = constants[node.input[1]]
            weight, axis = numpy_helper.to_array(tensor), output_axis(node, tensor.dims)
            levels, scales_O = weight_levels(weight, axis=axis)
            rounded = levels * along(scales_O, axis, weight.ndim)
            twin.input[1] = f"{node.name}:rounded_weight"
            graph.initializer.append(numpy_helper.from_array(rounded, twin.input[1]))
        noise, signal = f"{node.name}:noise", f"{node.name}:signal"
        difference = f"{node.name}:difference"
        twins += [
            helper.make_node("ReduceSumSquare", [node.output[0]], [signal], keepdims=0),
            helper.make_node("ReduceSumSquare", [difference], [noise], keepdims=0),
            helper.make_node("Sub", [node.output[0], twin.output[0]], [difference]),
            twin,
        ]
        noise_of[node.name], signal_of[node.name] = noise, signal
        graph.output.extend(
            helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (noise, signal)
        )
    # ONNX Runtime begins with the last nodes: each twin then runs as soon as it can, and frees what it read.
    graph.node.extend([*added, *reversed(twins)])
    return twinned, noise_of, signal_of


def write_ranges(
    path: Path, calibrator: str, activations: Sequence[Activations], ranges: Mapping[str, TensorRange]
) -> None:
    """Write `{"calibrator": name, "activations": [type], "ranges": {tensor: [low, high]}}`."""
    content = {
        "calibrator": calibrator,
        "activations": list(activations),
        "ranges": {name: [limits.low, limits.high] for name, limits in ranges.items()},
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def read_ranges(path: Path) -> tuple[tuple[Activations, ...], dict[str, TensorRange]]:
    """Read what write_ranges wrote: the types of activations to judge by, and the ranges.

    Raises ArtifactError for anything else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return tuple(Activations(name) for name in content["activations"]), {
            name: TensorRange(float(low), float(high)) for name, (low, high) in content["ranges"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path}: no readable tensor ranges ({error!r}), expected JSON with 'activations' and 'ranges'. Run "
            "quantize_ptq again."
        ) from error


def read_calibrator(path: Path) -> tuple[str, Calibrator, float]:
    """Read title, calibrator and percentile from what write_ranges wrote; raise ArtifactError for anything else."""
    try:
        title = json.loads(path.read_text(encoding="utf-8"))["calibrator"]
        name, _, percentile = title.partition(" ")
        return title, Calibrator(name), float(percentile or 100)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path}: no readable calibrator ({error!r}), expected JSON with 'calibrator'. Run quantize_ptq again."
        ) from error


def check_ranges(ranges: Mapping[str, TensorRange | None]) -> None:
    """Raise ArtifactError unless each tensor has a finite range that is not only 0."""
    for name, limits in ranges.items():
        if limits is None or not np.isfinite([limits.low, limits.high]).all() or limits.amax <= 0:
            text = "no range" if limits is None else f"range [{limits.low}, {limits.high}]"
            raise ArtifactError(
                f"tensor '{name}': {text}, expected a finite one that is not all zero; its quantizer saw no data. "
                "Run quantize_ptq again."
            )


def weight_levels(values: np.ndarray, *, axis: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return int8 levels in the weight's shape and float32 scales [O]; `axis` is that of the output channels."""
    scales_O = weight_scales(np.moveaxis(values, axis, 0))
    levels = np.clip(np.rint(values / along(scales_O, axis, values.ndim)), -INT8_MAX, INT8_MAX)
    return levels.astype(np.int8), scales_O


def weight_scales(values_OI: np.ndarray) -> np.ndarray:
    """Return the largest magnitude per output channel / 127; a channel of zeros gets 1 / 127."""
    amax_O = np.abs(values_OI).reshape(len(values_OI), -1).max(axis=1)
    scales_O: np.ndarray = (np.where(amax_O > 0, amax_O, 1.0) / INT8_MAX).astype(np.float32)
    return scales_O


def _limits(
    range_of: Mapping[str, str], ranges: Mapping[str, TensorRange], names: Sequence[str]
) -> dict[str, TensorRange]:
    """Return the range of each tensor, which is that of the whole graph in INT8 also if parts stay in float."""
    check_ranges({range_of[name]: ranges.get(range_of[name]) for name in names})
    return {name: ranges[range_of[name]] for name in names}


def _keeps_range(node: NodeProto, constants: Mapping[str, TensorProto]) -> bool:
    """Return whether the outputs of a node have no values beyond those of its input and 0."""
    if node.op_type == "Resize":
        return not any(item.name == "mode" and item.s == b"cubic" for item in node.attribute)
    if node.op_type == "Pad":
        return pads_with_zeros(node, constants)
    return node.op_type in MOVES_VALUES or node.op_type == "MaxPool"


def _is_wrong_in_int8(node: NodeProto) -> bool:
    """Return whether ONNX Runtime's QLinearAveragePool (1.31) refuses a pool, or divides by too much at the edge."""
    if node.op_type != "AveragePool":
        return False
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    is_padding_counted = attributes.get("count_include_pad", 0) and any(attributes.get("pads", []))
    is_dilated = any(step != 1 for step in attributes.get("dilations", []))
    return bool(is_padding_counted and attributes.get("ceil_mode", 0)) or is_dilated


def _count_no_padding(nodes: Iterable[NodeProto]) -> None:
    """Drop `count_include_pad` where there is no padding: with it QLinearAveragePool counts what ceil_mode adds."""
    for node in nodes:
        attributes = {item.name: item for item in node.attribute}
        is_padded = "pads" in attributes and any(attributes["pads"].ints)
        if node.op_type == "AveragePool" and "count_include_pad" in attributes and not is_padded:
            node.attribute.remove(attributes["count_include_pad"])


def _readers_behind_moves(name: str, readers: Mapping[str, Sequence[NodeProto]]) -> Iterator[NodeProto]:
    """Yield the nodes that read a tensor, directly or behind operators that only move its values."""
    for node in readers.get(name, []):
        if node.op_type in MOVES_VALUES:
            yield from (found for moved in node.output for found in _readers_behind_moves(moved, readers))
        else:
            yield node


def _fused_output(layer: NodeProto, readers: Mapping[str, Sequence[NodeProto]]) -> str:
    """Return the output of a layer, or of the only ReLU or Clip behind it."""
    name: str = layer.output[0]
    while len(following := readers.get(name, [])) == 1 and following[0].op_type in _FUSED:
        name = following[0].output[0]
    return name


def _operands_of_products(layers: _Layers) -> set[str]:
    """Return the tensors that products of two activations read, and no other quantizable node."""
    read: dict[bool, set[str]] = {True: set(), False: set()}
    for node in layers.quantizable:
        read[is_product(node, layers.index.constants)].update(node.input)
    return read[True] - read[False]


def _activation_pair(
    model: ModelProto, name: str, limits: TensorRange, *, is_symmetric: bool
) -> list[NodeProto]:
    scale, zero_point = (limits.int8(), np.int8(0)) if is_symmetric and limits.low < 0 else limits.uint8()
    scale_name, zero_name = f"{name}:scale", f"{name}:zero_point"
    model.graph.initializer.extend(
        [
            numpy_helper.from_array(np.array(scale), scale_name),
            numpy_helper.from_array(np.array(zero_point), zero_name),
        ]
    )
    levels, real = f"{name}/QuantizeLinear", f"{name}/DequantizeLinear"
    return [
        helper.make_node("QuantizeLinear", [name, scale_name, zero_name], [levels], name=levels),
        helper.make_node("DequantizeLinear", [levels, scale_name, zero_name], [real], name=real),
    ]


def _add_levels(
    model: ModelProto, name: str, levels: np.ndarray, scales_O: np.ndarray, axis: int
) -> NodeProto:
    """Add a weight as int8 with one scale for each index of an axis; return its DequantizeLinear."""
    real = f"{name}/DequantizeLinear"
    levels_name, scale_name, zero_name = f"{name}:int8", f"{name}:scale", f"{name}:zero_point"
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


def output_axis(layer: NodeProto, sizes: Sequence[int]) -> int:
    """Return the axis of a layer's weight that its scales follow: that of the output channels.

    A ConvTranspose with groups has that axis once per group, and its groups share the scales; with one channel per
    group the axis of the input channels is the one of the output channels as well.
    """
    if layer.op_type == "ConvTranspose":
        return 0 if sizes[1] == 1 else 1
    is_transposed = any(attribute.i for attribute in layer.attribute if attribute.name == "transB")
    return 0 if layer.op_type == "Conv" or is_transposed else 1


def along(scales_O: np.ndarray, axis: int, num_axes: int) -> np.ndarray:
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
