"""Match the tensors of a variant with those of its float graph, and make graphs that expose them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from onnx import ModelProto, NodeProto, TensorProto, helper

from tasks.core.errors import ArtifactError
from tasks.parts.onnx_graphs.graph import node_sources, read_shapes
from tasks.parts.onnx_session import copy_without, large_constants

_FUSED_BEFORE_QUANTIZE = {"Relu", "Clip"}
_PREFIX = "variant:"
_LAYERS = ("Conv", "ConvTranspose", "Gemm")


@dataclass(frozen=True)
class Match:
    """The tensors of a float graph that can be compared."""

    names: dict[str, str]
    """Tensor of the float graph -> tensor of the variant with the same meaning, in graph order, the image first."""
    fused: dict[str, str]
    """Tensor of the float graph that a runtime never exposes -> the next one, with which it is compared."""
    num_tensors: int
    """Tensors of the float graph that depend on the image."""


def match_tensors(graph: ModelProto, variant: ModelProto) -> Match:
    """Match by name, through fusions.

    A tensor that the variant quantizes, or computes as integers, is compared after its DequantizeLinear. An int8
    convolution that is read only by activations is compared together with the activation: reading the tensor between
    them would prevent the fused int8 kernel. Raises ArtifactError for graphs that have no names in common.
    """
    readers: dict[str, list[NodeProto]] = {}
    for node in variant.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    makers = {name: node for node in variant.graph.node for name in node.output}
    dequantizers = {name for name, node in makers.items() if node.op_type == "DequantizeLinear"}
    integers = _integers(variant)

    def dequantised(name: str) -> str | None:
        quantizers = [node.output[0] for node in readers.get(name, []) if node.op_type == "QuantizeLinear"]
        for quantized in [name] if name in integers else quantizers:
            for reader in readers.get(quantized, []):
                if reader.op_type == "DequantizeLinear":
                    return str(reader.output[0])
        return None

    def is_fused(name: str) -> bool:
        users, maker = readers.get(name, []), makers.get(name)
        is_int8 = maker is not None and bool(dequantizers.intersection(maker.input))
        return bool(users) and all(
            user.op_type in _FUSED_BEFORE_QUANTIZE and (is_int8 or dequantised(user.output[0]))
            for user in users
        )

    names, fused = {}, {}
    logits = graph.graph.output[0].name
    tensors = [*_activations(graph)]
    for name in tensors:
        twin = dequantised(name)
        if name == logits:
            names[name] = variant.graph.output[0].name
        elif twin is not None:
            names[name] = twin
        elif name in makers and is_fused(name):
            fused[name] = readers[name][0].output[0]
        elif name in makers and name not in integers:
            names[name] = name
    if len(names) < 2:
        raise ArtifactError(
            f"The engine's graph '{variant.graph.name}' and the float graph '{graph.graph.name}' have no "
            "tensor names in common except the logits, so layers cannot be compared. Give diff_layers the "
            "float graph that this variant was quantized from."
        )
    return Match(names, fused, len(tensors))


def match_modules(graph: ModelProto) -> Match:
    """Match each tensor of the graph with the leaf torch module that computes it.

    The output of a leaf module is that of its last node. Modules that run several times are left out.
    """
    sources = node_sources(graph)
    last_of: dict[str, str] = {}
    layers: list[str] = []
    for node in graph.graph.node:
        module = sources.get(node.name, ("", ""))[0]
        last_of[module] = node.output[0]
        layers += [module] if node.op_type in _LAYERS else []
    logits = graph.graph.output[0].name
    names = {
        tensor: module
        for module, tensor in last_of.items()
        if module and tensor != logits and layers.count(module) < 2
    }
    return Match({**names, logits: logits}, {}, len([*_activations(graph)]))


def _activations(graph: ModelProto) -> Iterator[str]:
    """Yield the image and all float tensors that depend on it, in graph order."""
    types = _types(graph)
    dependent = {graph.graph.input[0].name}
    yield graph.graph.input[0].name
    for node in graph.graph.node:
        if node.op_type in ("Shape", "Constant") or not dependent.intersection(node.input):
            continue
        dependent.update(node.output)
        if types.get(node.output[0], TensorProto.FLOAT) == TensorProto.FLOAT:
            yield node.output[0]


def _integers(graph: ModelProto) -> set[str]:
    """Return the tensors of 8 bits; a MaxPool of integers has the name that it has in the float graph."""
    return {name for name, kind in _types(graph).items() if kind in (TensorProto.INT8, TensorProto.UINT8)}


def _types(graph: ModelProto) -> dict[str, int]:
    inferred = read_shapes(graph)
    values = [*inferred.value_info, *inferred.input, *inferred.output]
    return {value.name: value.type.tensor_type.elem_type for value in values}


def mark(graph: ModelProto, names: Sequence[str]) -> ModelProto:
    """Return a copy with `names` as its outputs."""
    from polygraphy.backend.onnx import ModifyOutputs
    from polygraphy.logger import G_LOGGER

    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        marked: ModelProto = ModifyOutputs(graph, outputs=list(names), copy=True)()
    return marked


@dataclass(frozen=True)
class Twinned:
    """A float graph that also computes each layer of a variant from exact inputs."""

    graph: ModelProto
    """The graph without the large constants of both."""
    large: dict[str, TensorProto]
    """These constants, shared with the two graphs that they come from, by their names in this one."""
    noise_of: dict[str, str]
    """Tensor of the float graph -> the scalar that holds the sum of squared differences."""


def add_exact_twins(graph: ModelProto, variant: ModelProto, names: Mapping[str, str]) -> Twinned:
    """Let a copy of the float graph compute each layer of the variant as well.

    Wherever the variant reads a tensor of `names`, its copy reads that of the float graph. A variant in another
    opset gives no twins.
    """
    large = large_constants(graph)
    twinned = copy_without(graph, large)
    opsets = [{(opset.domain, opset.version) for opset in model.opset_import} for model in (graph, variant)]
    if opsets[0] != opsets[1]:
        return Twinned(twinned, large, {})
    makers = {name: node for node in variant.graph.node for name in node.output}
    types, integers = _types(variant), _integers(variant)
    own = makers.keys() | {tensor.name for tensor in variant.graph.initializer}
    halves = [name for name in names if types.get(name) == TensorProto.FLOAT16]
    # Of two versions of an exact input, use the one in the variant's own precision.
    exact = {
        name: f"{_PREFIX}{name}:half" if name in halves else name for name in names if name not in integers
    }
    added = [helper.make_node("Cast", [name], [exact[name]], to=TensorProto.FLOAT16) for name in halves]
    for node in variant.graph.node:
        twin = NodeProto()
        twin.CopyFrom(node)
        twin.name = f"{_PREFIX}{node.name}"
        twin.input[:] = [exact.get(name, f"{_PREFIX}{name}" if name in own else name) for name in node.input]
        twin.output[:] = [f"{_PREFIX}{name}" for name in node.output]
        added.append(twin)
    large_of_variant = large_constants(variant)
    large |= {f"{_PREFIX}{name}": tensor for name, tensor in large_of_variant.items()}
    for tensor in variant.graph.initializer:
        if tensor.name not in large_of_variant:
            constant = twinned.graph.initializer.add()
            constant.CopyFrom(tensor)
            constant.name = f"{_PREFIX}{tensor.name}"
    noise_of = {}
    for name in names:
        counterpart = name if name in makers and name not in integers else names[name]
        if counterpart not in makers or name == graph.graph.input[0].name:
            continue
        real, difference, noise = (f"{_PREFIX}{name}:{what}" for what in ("real", "difference", "noise"))
        added += [
            helper.make_node("Cast", [f"{_PREFIX}{counterpart}"], [real], to=TensorProto.FLOAT),
            helper.make_node("Sub", [name, real], [difference]),
            helper.make_node("ReduceSumSquare", [difference], [noise], keepdims=0),
        ]
        noise_of[name] = noise
    twinned.graph.node.extend(added)
    return Twinned(twinned, large, noise_of)
