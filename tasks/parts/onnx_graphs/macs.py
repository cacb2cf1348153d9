"""Count the multiply-accumulate operations (MACs) of the operators of a graph that compute.

Additions, multiplications of values one by one, interpolation, pooling and activation functions count as none.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, helper

from tasks.parts.custom_operators import STANDARD_DOMAINS
from tasks.parts.onnx_graphs.graph import light_copy, read_attribute

LAYER_TYPES = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})
"""Operators that do nearly all the work of most networks, and that Q/DQ pairs are made for."""

_Sizes = Mapping[str, list[int]]


@dataclass(frozen=True)
class LayerSize:
    """The size of an operator that computes."""

    macs: int
    """Multiply-accumulates of one image."""
    channels_in: int
    """Channels over which it sums; of a recurrent layer those of its input, of attention those of a query."""
    channels_out: int
    groups: int


def conv_macs(model: ModelProto) -> dict[str, int]:
    """Return the multiply-accumulates of each operator of `COUNTED_TYPES` for one image, by node name."""
    return {name: size.macs for name, size in layer_sizes(model).items()}


def layer_sizes(model: ModelProto) -> dict[str, LayerSize]:
    """Return the size of each operator of `COUNTED_TYPES`, by node name."""
    layers = [node for node in model.graph.node if _is_counted(node)]
    needed = {name for node in layers for name in (*node.input, node.output[0]) if name}
    sizes = sizes_of_one_image(model)
    unknown = sorted(name for name in needed if name not in sizes or not all(sizes[name]))
    if unknown:  # shapes that the graph computes
        sizes |= _run_for_sizes(model, unknown)
    return {node.name: _COUNTS[node.op_type](node, sizes) for node in layers}


def uncounted_operators(model: ModelProto) -> dict[str, int]:
    """Return operator -> number of nodes whose MACs are not known: such operators may do much work, or none.

    They are those outside standard ONNX, Fourier transforms, and branches and loops around operators that compute.
    """
    return dict(sorted(Counter(node.op_type for node in model.graph.node if _is_unknown(node)).items()))


def quantized_layers(model: ModelProto) -> list[NodeProto]:
    """Return the convolutions and matrix products whose input and weight both come from DequantizeLinear.

    The weight of a product of two activations is the second one.
    """
    dequantized = {node.output[0] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    return [
        node
        for node in model.graph.node
        if node.op_type in LAYER_TYPES and dequantized.issuperset(node.input[:2])
    ]


def sizes_of_one_image(model: ModelProto) -> dict[str, list[int]]:
    """Infer the sizes of all tensors for a batch of 1, because tokens and windows may be folded into the batch."""
    single = light_copy(model)
    single.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 1
    del single.graph.value_info[:]
    for value in single.graph.output:
        value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(single, data_prop=True).graph
    sizes = {
        value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in [*inferred.input, *inferred.value_info, *inferred.output]
        if value.type.tensor_type.HasField("shape")
    }
    return sizes | {tensor.name: list(tensor.dims) for tensor in model.graph.initializer}


def _is_counted(node: NodeProto) -> bool:
    return node.domain in STANDARD_DOMAINS and node.op_type in _COUNTS


def _is_unknown(node: NodeProto) -> bool:
    if node.domain not in STANDARD_DOMAINS or node.op_type in ("DFT", "STFT"):
        return True
    graphs: list[GraphProto] = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
    return any(_is_counted(inner) or _is_unknown(inner) for graph in graphs for inner in graph.node)


def _run_for_sizes(model: ModelProto, names: list[str]) -> dict[str, list[int]]:
    """Run the graph on one image of zeros and return the sizes of the named tensors.

    Constants that `light_copy` made inputs are zeros as well: weights, which no size depends on.
    """
    from tasks.parts.onnx_session import open_session

    marked = ModelProto()
    marked.CopyFrom(model)
    own = {value.name for value in model.graph.output}
    marked.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in own)
    feeds = {}
    for index, value in enumerate(model.graph.input):
        size = [axis.dim_value for axis in value.type.tensor_type.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        feeds[value.name] = np.zeros(size if index else (1, *size[1:]), dtype)
    arrays = open_session(marked).run(names, feeds)
    return {name: list(values.shape) for name, values in zip(names, arrays, strict=True)}


def _convolution(node: NodeProto, sizes: _Sizes) -> LayerSize:
    """Count a Conv, a ConvInteger, a QLinearConv or a DeformConv, whose sampling counts as none."""
    weight = sizes[node.input[3 if node.op_type == "QLinearConv" else 1]]
    groups = int(read_attribute(node, "group", 1))
    macs = math.prod(weight) * math.prod(sizes[node.output[0]][2:])
    return LayerSize(macs, groups * weight[1], weight[0], groups)


def _transposed_convolution(node: NodeProto, sizes: _Sizes) -> LayerSize:
    image, weight = (sizes[name] for name in node.input[:2])
    groups = int(read_attribute(node, "group", 1))
    return LayerSize(math.prod(weight) * math.prod(image[2:]), weight[0], groups * weight[1], groups)


def _product(node: NodeProto, sizes: _Sizes) -> LayerSize:
    weight = sizes[node.input[3 if node.op_type == "QLinearMatMul" else 1]]
    output = sizes[node.output[0]]
    channels = weight[-1 if read_attribute(node, "transB", 0) or len(weight) == 1 else -2]
    return LayerSize(channels * math.prod(output), channels, output[-1] if output else 1, 1)


def _einsum(node: NodeProto, sizes: _Sizes) -> LayerSize:
    """Count the products of an Einsum that sum over a label, two operands at a time from the left."""
    operands, output = einsum_labels(
        read_attribute(node, "equation", b"").decode(), [sizes[n] for n in node.input]
    )
    size_of: dict[str, int] = {}
    for labels, name in zip(operands, node.input, strict=True):
        for label, size in zip(labels, sizes[name], strict=True):
            size_of[label] = max(size, size_of.get(label, 1))
    macs, channels = 0, 1
    known = list(dict.fromkeys(operands[0]))
    for index, labels in enumerate(operands[1:], 1):
        joined = list(dict.fromkeys([*known, *labels]))
        needed = {*output, *(label for later in operands[index + 1 :] for label in later)}
        summed = [label for label in joined if label not in needed]
        if summed:
            macs += math.prod(size_of[label] for label in joined)
            channels = math.prod(size_of[label] for label in summed)
        known = [label for label in joined if label in needed]
    only_last = [label for label in operands[-1] if label in output and label not in operands[0]]
    return LayerSize(macs, channels, math.prod(size_of[label] for label in only_last), 1)


def einsum_labels(equation: str, shapes: Sequence[Sequence[int]]) -> tuple[list[list[str]], list[str]]:
    """Return the labels of the axes of the operands and of the output of an Einsum, for operands of these shapes.

    The axes of an ellipsis are ``.1`` for the last one, ``.2`` for the one before, and so on (ONNX, Einsum).
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    hidden = [len(shape) - len(term.replace("...", "")) for term, shape in zip(terms, shapes, strict=True)]
    num_hidden = max((num for num, term in zip(hidden, terms, strict=True) if "..." in term), default=0)

    def expand(term: str, num: int) -> list[str]:
        before, dots, after = term.partition("...")
        return [*before, *(f".{place}" for place in range(num, 0, -1) if dots), *after]

    if not arrow:
        counts = Counter(letter for term in terms for letter in term if letter.isalpha())
        letters = sorted(letter for letter, count in counts.items() if count == 1)
        right = ("..." if "..." in left else "") + "".join(letters)
    operands = [expand(term, num) for term, num in zip(terms, hidden, strict=True)]
    return operands, expand(right, num_hidden)


def _recurrent(node: NodeProto, sizes: _Sizes) -> LayerSize:
    """Count an RNN, a GRU or an LSTM: in each step of each sequence all weights of the input and of the state."""
    steps, weight, recurrence = (sizes[name] for name in node.input[:3])
    macs = steps[0] * steps[1] * (math.prod(weight) + math.prod(recurrence))
    return LayerSize(macs, weight[2], weight[0] * recurrence[2], 1)


def _attention(node: NodeProto, sizes: _Sizes) -> LayerSize:
    """Count both products of an Attention (opset 23); a causal mask saves none.

    Queries, keys and values are [N, heads, tokens, channels], or [N, tokens, heads * channels] with attributes.
    """
    query, key, value = (sizes[name] for name in node.input[:3])
    if len(query) == 3:
        heads, value_heads = (int(read_attribute(node, name, 1)) for name in ("q_num_heads", "kv_num_heads"))
        tokens, channels = query[1], query[2] // heads
        num_keys, value_channels = key[1], value[2] // value_heads
    else:
        _, heads, tokens, channels = query
        num_keys, value_channels = key[2], value[3]
    if len(node.input) > 4 and node.input[4]:  # keys of earlier calls
        num_keys += sizes[node.input[4]][2]
    macs = query[0] * heads * tokens * num_keys * (channels + value_channels)
    return LayerSize(macs, channels, value_channels, heads)


_COUNTS: dict[str, Callable[[NodeProto, _Sizes], LayerSize]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "QLinearConv", "DeformConv"), _convolution),
    "ConvTranspose": _transposed_convolution,
    **dict.fromkeys(("MatMul", "Gemm", "MatMulInteger", "QLinearMatMul"), _product),
    "Einsum": _einsum,
    **dict.fromkeys(("RNN", "GRU", "LSTM"), _recurrent),
    "Attention": _attention,
}
COUNTED_TYPES = frozenset(_COUNTS)
"""Operators whose MACs are counted."""
