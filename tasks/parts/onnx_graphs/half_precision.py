"""Give the float32 part of a graph another type, FP16 or BF16; works on graphs with Q/DQ pairs too.

Which operators exist in a type, and which of their inputs share it, is read from the schemas of ONNX. A runtime with
strong types (TensorRT) computes each operator in the type that the graph gives it, so scales of pairs get the type
too: QuantizeLinear has an input and a scale of one type, DequantizeLinear a scale of its output's type.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.core.errors import ArtifactError
from tasks.parts.custom_operators import STANDARD_DOMAINS
from tasks.parts.onnx_graphs.float32_nodes import Cause, Float32Node
from tasks.parts.onnx_graphs.graph import (
    MOVES_VALUES,
    captured_names,
    index_graph,
    infer_shapes,
    is_quantized,
    read_shapes,
    replace_nodes,
    without_large_constants,
)
from tasks.parts.onnx_session import copy_without, large_constants, open_session

LARGEST_FP16 = 65504.0
FP16, BF16 = int(TensorProto.FLOAT16), int(TensorProto.BFLOAT16)

_FP32 = int(TensorProto.FLOAT)
_SUFFIX = {_FP32: "f32", FP16: "f16", BF16: "bf16"}
_TYPE_TEXT = {FP16: "tensor(float16)", BF16: "tensor(bfloat16)"}
_OPSET_OF_PAIRS = 19
"""First opset whose pairs have scales of other types than float32."""
_OPSET_OF_BF16 = 22
"""First opset with convolutions and pools in BF16."""

_SMALLEST_WEIGHTS = 2.0**-10
"""FP16 keeps full precision down to 2**-14; a tensor needs room below its largest number."""
_SMALLEST_RMS = 2.0**-17
"""Below 2**-14 the numbers of FP16 are 2**-24 apart, which rounds values of this size at 53 dB; normal ones at 74."""
_SAFE_TO_SQUARE = 1e-3, 1e15
"""Sums of squares are exact enough in float32 if the largest magnitude is between these."""
_SUMS = frozenset({"Add", "Sub", "Sum"})
_BIASES = {
    "Conv": (2,),
    "ConvTranspose": (2,),
    "Gemm": (2,),
    "LayerNormalization": (2,),
    "BatchNormalization": (2, 3),
}
"""Operator -> inputs that it only adds."""
_MAX_LEVEL = 127


@dataclass(frozen=True)
class Magnitudes:
    """How large the values of a tensor are."""

    largest: float
    mean_square: float
    """Of the values that are not 0; 0 if all are."""

    @property
    def is_small(self) -> bool:
        """Return whether FP16 has too few bits for most of what the tensor says."""
        return bool(0 < self.mean_square < _SMALLEST_RMS**2)


def find_float32_nodes(
    model: ModelProto,
    seen: Mapping[str, Magnitudes],
    *,
    max_abs: float,
    op_types: Collection[str] = (),
    half: int = FP16,
) -> list[Float32Node]:
    """Return the nodes of some operator types, and for FP16 those whose constants, inputs or outputs it cannot hold.

    `seen` has the magnitudes of tensors on images; beyond `max_abs` a node stays in float32. A tensor that is too
    small for FP16 does no harm where it is only added to larger ones. BF16 has the range of float32.
    """
    finder = _Float32Finder(model, seen, max_abs)
    kept = []
    for node in model.graph.node:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear", "Constant"):
            continue
        if node.op_type in op_types:
            kept.append(Float32Node(node.name, node.op_type, Cause.operator, "", 0.0))
        elif half == FP16 and (found := next(finder.faults(node), None)) is not None:
            kept.append(Float32Node(node.name, node.op_type, *found))
    return kept


class _Float32Finder:
    """Finds what FP16 cannot hold among the tensors of a node."""

    def __init__(self, model: ModelProto, seen: Mapping[str, Magnitudes], max_abs: float) -> None:
        self._max_abs = max_abs
        self._constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in _float_constants(model)}
        self._seen = seen
        index = index_graph(model.graph)
        self._outputs, self._readers = index.outputs, index.readers
        self._rounded_scales = {
            node.output[0]: float(scale.max())
            for node in model.graph.node
            if node.op_type == "DequantizeLinear"
            and (scale := self._constants.get(node.input[1])) is not None
            and not _fits(scale, FP16)
        }

    def faults(self, node: NodeProto) -> Iterator[tuple[Cause, str, float]]:
        for index, name in enumerate(node.input):
            if name in self._constants:
                values = self._constants[name]
                magnitudes = magnitudes_of(values[np.isfinite(values)])
                cause = self._fault_of_constant(node, index, magnitudes, is_weight=_is_weight(values))
                if cause is not None:
                    yield cause, name, magnitudes.largest
            elif name in self._rounded_scales:
                yield Cause.scale, name, self._rounded_scales[name]
        for name in (*node.input, *node.output):
            values_seen = self._seen.get(name)
            if values_seen is not None and values_seen.largest > self._max_abs:
                yield Cause.large_values, name, values_seen.largest
            elif values_seen is not None and values_seen.is_small and self._does_harm(name):
                yield Cause.small_values, name, values_seen.largest

    def _fault_of_constant(
        self, node: NodeProto, index: int, found: Magnitudes, *, is_weight: bool
    ) -> Cause | None:
        """Return what FP16 does to a constant: a weight, or a scalar or vector.

        A bias may hold small numbers; their rounding error vanishes in the sum. So may what scales a small summand.
        """
        if found.largest > (self._max_abs if is_weight else LARGEST_FP16):
            is_bound = node.op_type == "Clip" and index > 0  # which no value of FP16 reaches
            return None if is_bound else Cause.large_constant
        is_zero = found.largest > 0 and not np.float16(found.largest)
        is_small = is_weight and 0 < found.largest < _SMALLEST_WEIGHTS
        if found.is_small and not is_zero and not is_small:
            is_added = node.op_type in _SUMS or index in _BIASES.get(node.op_type, ())
            is_small = not is_added and not all(map(self._is_negligible, node.output))
        return Cause.small_constant if is_zero or is_small else None

    def _is_negligible(self, name: str) -> bool:
        return name in self._seen and self._seen[name].is_small and not self._does_harm(name)

    def _does_harm(self, name: str) -> bool:
        """Return whether a small tensor is an output, or a reader does more than add it to larger ones."""
        if name in self._outputs or name not in self._readers:
            return True
        for node in self._readers[name]:
            if node.op_type in _SUMS:
                if all(self._seen[output].is_small for output in node.output if output in self._seen):
                    return True
            elif node.op_type not in MOVES_VALUES or any(map(self._does_harm, node.output)):
                return True
        return False


def _is_weight(values: NDArray[Any]) -> bool:
    """Return whether an array is more than a scalar, or a vector along one axis."""
    return bool(sum(size > 1 for size in values.shape) > 1)


def magnitudes_of(values: NDArray[Any]) -> Magnitudes:
    """Return the magnitudes of an array."""
    largest = float(np.abs(values).max(initial=0.0))
    flat = values.ravel()
    if not _SAFE_TO_SQUARE[0] < largest < _SAFE_TO_SQUARE[1]:
        flat = flat.astype(np.float64)
    num = np.count_nonzero(flat)
    return Magnitudes(largest, float(flat @ flat) / num if num else 0.0)


def measure_tensors(model: ModelProto, images: Iterable[NDArray[np.float32]]) -> dict[str, Magnitudes]:
    """Return float32 tensor -> its magnitudes over some images, each [1, C, H, W], of the input and all nodes.

    Raises ArtifactError for a tensor that is not finite.
    """
    kinds = _types(model)
    names = [name for node in model.graph.node for name in node.output if kinds.get(name) == _FP32]
    large = large_constants(model)
    marked = copy_without(model, large)
    outputs = {value.name for value in model.graph.output}
    marked.graph.output.extend(
        helper.make_tensor_value_info(name, _FP32, None) for name in names if name not in outputs
    )
    session = open_session(marked, is_optimised=False, weights=large)
    source = model.graph.input[0].name
    found: dict[str, list[Magnitudes]] = {}
    for image in images:
        arrays = zip([source, *names], [image, *session.run(names, {source: image})], strict=True)
        for name, values in arrays:
            found.setdefault(name, []).append(magnitudes_of(values))
    for name, each in found.items():
        value = float(np.max([one.largest for one in each]))  # keeps NaN
        if not np.isfinite(value):
            raise ArtifactError(
                f"tensor '{name}' reaches {value} on calibration images, expected finite numbers. Check the weights "
                "of the graph."
            )
    return {
        name: Magnitudes(max(one.largest for one in each), float(np.mean([one.mean_square for one in each])))
        for name, each in found.items()
    }


def to_half(model: ModelProto, *, float32_nodes: Collection[str] = (), half: int = FP16) -> ModelProto:
    """Return a copy that computes in `half` between float32 inputs and outputs, but for some nodes (names).

    Operators that do not exist in that type stay in float32 as well. Casts stand where the type changes; a
    DequantizeLinear gives each reader the type that it computes in, so that no cast separates a pair from a layer.
    Raises the opset where that is needed for pairs or BF16.
    """
    oldest = max(_OPSET_OF_PAIRS if is_quantized(model) else 0, _OPSET_OF_BF16 if half == BF16 else 0)
    model = _constants_as_initializers(_raise_opset(model, oldest))
    return _Rewriter(model, half, frozenset(float32_nodes)).rewrite()


def rounded_in_float32(model: ModelProto) -> ModelProto:
    """Return a copy of an FP16 graph that computes in float32 and rounds each FP16 tensor: what FP16 kernels store.

    ONNX Runtime has few FP16 kernels on the CPU. Between the others it does not round, so that a graph whose tensors
    underflow or overflow computes there as if they did not. A graph whose branches or loops read FP16 tensors is
    returned as it is.
    """
    kinds = _types(model)
    if any(kinds.get(name) == FP16 for node in model.graph.node for name in captured_names(node)):
        return model
    model = _constants_as_initializers(model)
    halves = {tensor.name: tensor for tensor in model.graph.initializer if tensor.data_type == FP16}
    rounded = copy_without(model, halves)
    graph = rounded.graph
    nodes: list[NodeProto] = []
    for name, tensor in halves.items():
        values = numpy_helper.to_array(tensor).astype(np.float32)
        graph.initializer.append(numpy_helper.from_array(values, name))
    for node in graph.node:
        new = NodeProto()
        new.CopyFrom(node)
        nodes.append(new)
        for index, name in enumerate(node.output):
            if kinds.get(name) == FP16:
                exact, half = f"{name}:exact", f"{name}:half"
                new.output[index] = exact
                nodes.append(helper.make_node("Cast", [exact], [half], half, to=FP16))
                nodes.append(helper.make_node("Cast", [half], [name], f"{name}:rounded", to=_FP32))
    del graph.node[:], graph.value_info[:]
    graph.node.extend(nodes)
    return rounded


class _Rewriter:
    """Rewrites node by node; knows under which name each float tensor exists in which type."""

    def __init__(self, model: ModelProto, half: int, kept: frozenset[str]) -> None:
        self._model, self._half, self._kept = model, half, kept
        self._kinds = _types(model)
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._opset = _opset(model)
        self._names: dict[str, dict[int, str]] = {
            value.name: {_FP32: value.name} for value in model.graph.input
        }
        self._fixed = {value.name for value in model.graph.output} | {
            name for node in model.graph.node for name in captured_names(node)
        }
        """Tensors whose name belongs to their float32 form, because it is read from outside of the nodes."""
        self._dequantizers: dict[str, NodeProto] = {}
        self._nodes: list[NodeProto] = []
        self._tensors: dict[str, TensorProto] = {}

    def rewrite(self) -> ModelProto:
        for node in self._model.graph.node:
            if node.op_type == "DequantizeLinear":
                self._dequantizers[node.output[0]] = node  # written where it is read
            elif node.op_type == "QuantizeLinear":
                self._add_quantizer(node)
            else:
                self._add(node)
        for value in self._model.graph.output:
            self._read(value.name, _FP32)
        rewritten = copy_without(self._model, self._constants)
        graph = rewritten.graph
        for field in (graph.node, graph.value_info):
            del field[:]
        graph.node.extend(self._nodes)
        graph.initializer.extend(self._tensors.values())
        return infer_shapes(rewritten, data_prop=True)

    def _add(self, node: NodeProto) -> None:
        new = NodeProto()
        new.CopyFrom(node)
        in_half, inputs, outputs = self._variables(node)
        for name in captured_names(node):
            self._read(name, _FP32)
        for index, name in enumerate(node.input):
            if node.op_type == "Cast":
                new.input[index] = self._any(name)
            else:
                new.input[index] = self._read(name, self._half if inputs[index] in in_half else _FP32)
        for index, name in enumerate(node.output):
            if self._kinds.get(name) == _FP32 and outputs[index] in in_half:
                new.output[index] = self._name_of(name, self._half)
                self._names[name] = {self._half: new.output[index]}
            elif name:
                self._names[name] = {_FP32: name}
        self._nodes.append(new)

    def _add_quantizer(self, node: NodeProto) -> None:
        """Add a QuantizeLinear in the type that its input has."""
        new = NodeProto()
        new.CopyFrom(node)
        new.input[0] = self._any(node.input[0])
        kind = next(
            (kind for kind, name in self._names.get(node.input[0], {}).items() if name == new.input[0]), _FP32
        )
        if kind == self._half and not self._is_representable(node.input[1]):
            kind, new.input[0] = _FP32, self._read(node.input[0], _FP32)
        new.input[1] = self._scale(node.input[1], kind, is_rounded=True)
        for name in new.input[2:]:
            self._keep(name)
        self._names[node.output[0]] = {_FP32: node.output[0]}
        self._nodes.append(new)

    def _add_dequantizer(self, node: NodeProto, kind: int) -> str:
        """Add a DequantizeLinear with an output of this type, and return its name."""
        new, output = NodeProto(), self._name_of(node.output[0], kind)
        new.CopyFrom(node)
        if self._names[node.output[0]]:  # there is one of the other type
            new.name = f"{node.name}:{_SUFFIX[kind]}"
            if output in self._names[node.output[0]].values():
                output = f"{output}:{_SUFFIX[kind]}"
        for name in (new.input[0], *new.input[2:]):
            self._keep(name)
        is_weight = node.input[0] in self._constants
        new.input[1] = self._scale(node.input[1], kind, is_rounded=not is_weight)
        new.output[0] = output
        self._nodes.append(new)
        return output

    def _variables(self, node: NodeProto) -> tuple[set[str], list[str], list[str]]:
        """Return the type variables of a node that become half, and those of its inputs and outputs."""
        inputs, outputs = [""] * len(node.input), [""] * len(node.output)
        if node.op_type == "Cast" or node.domain not in STANDARD_DOMAINS or captured_names(node):
            return set(), inputs, outputs
        schema = onnx.defs.get_schema(node.op_type, self._opset)
        inputs = [_formal(schema.inputs, index) for index in range(len(node.input))]
        outputs = [_formal(schema.outputs, index) for index in range(len(node.output))]
        if node.name in self._kept:
            return set(), inputs, outputs
        text = _TYPE_TEXT[self._half]
        allowed = {rule.type_param_str for rule in schema.type_constraints if text in rule.allowed_type_strs}
        read = {kind for name, kind in zip(node.input, inputs, strict=True) if self._kinds.get(name) == _FP32}
        return allowed & read, inputs, outputs

    def _any(self, name: str) -> str:
        """Return the name of a tensor in the type in which it exists already."""
        known = self._names.get(name)
        if known:
            return known.get(self._half) or next(iter(known.values()))
        return self._read(name, self._half if name in self._dequantizers else _FP32)

    def _read(self, name: str, kind: int) -> str:
        """Return the name of a tensor in a type; a tensor that is not float32 keeps its own."""
        if name in self._constants:
            return self._constant(name, kind)
        if not name or self._kinds.get(name) != _FP32:
            return name
        known = self._names.setdefault(name, {})
        if kind in known:
            return known[kind]
        node = self._dequantizers.get(name)
        if node is not None and (kind == _FP32 or self._is_representable(node.input[1])):
            known[kind] = self._add_dequantizer(node, kind)
        else:
            source = self._read(name, _FP32) if node is not None else next(iter(known.values()))
            cast = name if name in self._fixed and kind == _FP32 else f"{name}:{_SUFFIX[kind]}"
            self._nodes.append(helper.make_node("Cast", [source], [cast], f"{cast}:cast", to=kind))
            known[kind] = cast
        return known[kind]

    def _name_of(self, name: str, kind: int) -> str:
        return f"{name}:{_SUFFIX[kind]}" if name in self._fixed and kind != _FP32 else name

    def _keep(self, name: str) -> None:
        if name in self._constants:
            self._tensors[name] = self._constants[name]

    def _constant(self, name: str, kind: int) -> str:
        tensor = self._constants[name]
        if tensor.data_type != _FP32 or kind == _FP32:
            self._keep(name)
            return name
        return self._store(f"{name}:{_SUFFIX[kind]}", _rounded(numpy_helper.to_array(tensor), kind))

    def _scale(self, name: str, kind: int, *, is_rounded: bool) -> str:
        """Return the name of a scale in a type; the two sides of a pair have the same value in different types."""
        if name not in self._constants:
            return self._read(name, kind)
        if kind == _FP32 and is_rounded and self._is_representable(name):
            values = _rounded(numpy_helper.to_array(self._constants[name]), self._half)
            return self._store(f"{name}:{_SUFFIX[self._half]}_in_f32", values.astype(np.float32))
        return self._constant(name, kind)

    def _is_representable(self, scale: str) -> bool:
        tensor = self._constants.get(scale)
        return tensor is None or _fits(numpy_helper.to_array(tensor), self._half)

    def _store(self, name: str, values: NDArray[Any]) -> str:
        self._tensors.setdefault(name, numpy_helper.from_array(values, name))
        return name


def _types(model: ModelProto) -> dict[str, int]:
    """Return tensor -> its type, where ONNX can infer it."""
    graph = read_shapes(model)
    kinds = {
        value.name: value.type.tensor_type.elem_type
        for value in (*graph.value_info, *graph.input, *graph.output)
    }
    return kinds | {tensor.name: tensor.data_type for tensor in graph.initializer}


def _opset(model: ModelProto) -> int:
    return next(int(entry.version) for entry in model.opset_import if entry.domain in STANDARD_DOMAINS)


def _formal(parameters: Sequence[Any], index: int) -> str:
    """Return the type variable, or the type, of an input or output; the last parameter may be repeated."""
    return str(parameters[min(index, len(parameters) - 1)].type_str) if parameters else ""


def _float_constants(model: ModelProto) -> list[TensorProto]:
    return [tensor for tensor in model.graph.initializer if tensor.data_type == _FP32]


def _fits(scale: NDArray[Any], half: int) -> bool:
    """Return whether rounding a scale moves no level by more than half a step."""
    rounded = _rounded(scale, half).astype(np.float64)
    return bool((np.abs(rounded - scale) * _MAX_LEVEL <= scale / 2).all())


def _rounded(values: NDArray[Any], half: int) -> NDArray[Any]:
    """Return values in a half type; finite numbers beyond it become its largest."""
    if half == FP16:
        values = np.where(np.isfinite(values), np.clip(values, -LARGEST_FP16, LARGEST_FP16), values)
    return np.asarray(values).astype(helper.tensor_dtype_to_np_dtype(half))


def _raise_opset(model: ModelProto, oldest: int) -> ModelProto:
    """Return the graph, or a copy in a newer opset; names and metadata of nodes stay."""
    if _opset(model) >= oldest:
        return model
    metadata = {node.name: list(node.metadata_props) for node in model.graph.node}
    converted = without_large_constants(
        model, lambda light: onnx.version_converter.convert_version(light, oldest)
    )
    opsets = list(converted.opset_import)
    converted.ir_version = max(model.ir_version, helper.find_min_ir_version_for(opsets, ignore_unknown=True))
    del converted.metadata_props[:]
    converted.metadata_props.extend(model.metadata_props)
    for node in converted.graph.node:
        del node.metadata_props[:]
        node.metadata_props.extend(metadata.get(node.name, []))
    return converted


def _constants_as_initializers(model: ModelProto) -> ModelProto:
    """Return a graph whose Constant nodes with a tensor are initializers, so that readers may have it in two types.

    It is the graph itself if it has no such nodes.
    """
    if not any(node.op_type == "Constant" for node in model.graph.node):
        return model
    changed = ModelProto()
    changed.CopyFrom(model)
    graph = changed.graph
    stored: dict[str, list[NodeProto]] = {}
    for node in graph.node:
        value = next((a for a in node.attribute if a.name == "value"), None)
        if node.op_type == "Constant" and value is not None:
            value.t.name = node.output[0]
            graph.initializer.append(value.t)
            stored[node.output[0]] = []
    replace_nodes(graph, stored)
    return changed
