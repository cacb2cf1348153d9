"""Rewrite a graph for the fastest execution on a target: the same function with other operators.

Each rewrite is a switch of the target; benchmarks/encodings.py measures them.
"""

from collections.abc import Mapping
from functools import partial

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from tasks.parts.builders.interpolation import resize_as_matmul
from tasks.parts.builders.tensorrt_placement import (
    equal_steps_at_concat,
    residual_pairs_alone,
    vector_products_in_float,
)
from tasks.parts.cpu import int8_sums_saturate
from tasks.parts.engines.runtimes import Precision, Runtime
from tasks.parts.engines.target import Target
from tasks.parts.onnx_graphs.checked_rewrite import Rewrite, apply
from tasks.parts.onnx_graphs.dropped_activations import write_dropped_activations
from tasks.parts.onnx_graphs.foreign_half import has_half
from tasks.parts.onnx_graphs.graph import (
    MOVES_VALUES,
    GraphIndex,
    drop_unused,
    index_graph,
    infer_shapes,
    is_quantized,
    replace_nodes,
)
from tasks.parts.onnx_graphs.half_precision import (
    BF16,
    FP16,
    LARGEST_FP16,
    find_float32_nodes,
    measure_tensors,
    to_half,
)
from tasks.parts.onnx_graphs.int8_activations import activations_to_int8, constants_to_int8
from tasks.parts.onnx_graphs.int8_weights import weights_to_7_bits
from tasks.parts.onnx_graphs.macs import LAYER_TYPES
from tasks.parts.onnx_graphs.pairs import (
    drop_pair,
    float_weight,
    is_stored_quantized,
    read_float,
    rounded_by_pair,
)

_GATES = frozenset({"Sigmoid", "HardSigmoid"})
_INTEGER_OPERATORS = (
    LAYER_TYPES
    | MOVES_VALUES
    | {
        "Add",
        "AveragePool",
        "Concat",
        "GlobalAveragePool",
        "MaxPool",
        "Mul",
        "Pad",
        "QuantizeLinear",
        "Resize",
    }
)
"""Operators that compute or move integers if they read a Q/DQ pair."""

STEM_CHANNELS, STEM_FILTERS = 4, 32
"""Largest number of channels of an image, and of filters for which a convolution of it is faster in float."""

_HEADROOM = 8
"""Other images may have values that are this many times larger than those of the few that a build looks at."""


def rewrite_for(target: Target, graph: ModelProto) -> ModelProto:
    """Return the graph with the target's rewrites, unchecked. Builders take `GraphSource.rewritten`."""
    return apply(rewrites_for(target, graph), graph)


def rewrites_for(target: Target, graph: ModelProto) -> list[Rewrite]:
    """Return the rewrites of a graph for a target, in their order.

    Those that serve speed alone may be left out. With the others a runtime computes at all, or computes right.
    """
    rewrites = [Rewrite("fix_batch", fix_batch)] if target.max_batch == 1 else []
    if is_quantized(graph):
        rewrites += _encodings_for(target)
    if target.stem_in_float:
        rewrites.append(Rewrite("stem_in_float", stem_in_float, is_optional=True))
    if target.token_depthwise_in_float:
        rewrites.append(Rewrite("token_depthwise_in_float", token_depthwise_in_float, is_optional=True))
    if target.resize_as_matmul and not target.coarse_classes:
        resize = partial(resize_as_matmul, in_blocks=target.runtime is Runtime.openvino)
        rewrites.append(Rewrite("resize_as_matmul", resize, is_optional=True))
    return rewrites


def encode_for(target: Target, graph: ModelProto) -> ModelProto:
    """Return a Q/DQ graph in the target's scheme: type of activations, width of weights, places of pairs."""
    return apply(_encodings_for(target), graph) if is_quantized(graph) else graph


def _encodings_for(target: Target) -> list[Rewrite]:
    encodings = []
    if not target.uint8_activations:
        encodings.append(Rewrite("constants_to_int8", constants_to_int8, rounds_weights=True))
        encodings.append(Rewrite("activations_to_int8", activations_to_int8))
    elif int8_sums_saturate():
        encodings.append(Rewrite("weights_to_7_bits", weights_to_7_bits, rounds_weights=True))
    if target.pairs_before_activations:
        return [*encodings, Rewrite("gemm_as_matmul", gemm_as_matmul, is_optional=True)]
    placements = [fuse_activations, drop_pairs_between_moves]
    if target.tensorrt is not None:
        placements += [residual_pairs_alone, vector_products_in_float, equal_steps_at_concat]
    return [*encodings, *(Rewrite(move.__name__, move, is_optional=True) for move in placements)]


def round_rest(target: Target, graph: ModelProto, images_NCHW: NDArray[np.float32]) -> ModelProto:
    """Return a graph whose layers compute in the target's precision unless they are quantized.

    For runtimes that follow the types of the graph. Nodes that carry more than FP16 holds, on these images and with
    room for others, or values too small for it, stay in float32. A graph that has such types already stays as it is.
    """
    half = {Precision.f32: None, Precision.f16: FP16, Precision.bf16: BF16}[target.precision]
    if half is None or has_half(graph):
        return graph
    seen = measure_tensors(graph, np.split(images_NCHW, len(images_NCHW))) if half == FP16 else {}
    kept = find_float32_nodes(graph, seen, max_abs=LARGEST_FP16 / _HEADROOM, half=half)
    return to_half(graph, float32_nodes=[node.name for node in kept], half=half)


def fix_batch(model: ModelProto) -> ModelProto:
    """Return a copy that takes one image, with all shapes known.

    OpenVINO is 1.1 to 1.2 times as fast for it as for a range of batches; ONNX Runtime gains nothing
    (benchmarks/encodings.py).
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    for value in (*rewritten.graph.input, *rewritten.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    del rewritten.graph.value_info[:]
    return infer_shapes(rewritten, data_prop=True)


def fuse_activations(model: ModelProto) -> ModelProto:
    """Return a copy without the Q/DQ pairs that keep a runtime from fusing a layer with the activation behind it.

    Removed are pairs behind a layer that only float operators read (HardSwish, LeakyRelu, a mean, LayerNormalization)
    or that gives the output, and both pairs inside x * Sigmoid(x). The pair behind the activation stays. ONNX Runtime
    needs the others. A ReLU that such a pair stands for is written again.
    """
    fused = ModelProto()
    fused.CopyFrom(model)
    write_dropped_activations(fused)
    graph, index = fused.graph, index_graph(fused.graph)
    makers, readers, outputs = index.makers, index.readers, index.outputs

    def before_pair(name: str) -> str:
        """Return the tensor that a pair rounds, or the tensor itself if it comes from no pair."""
        return rounded_by_pair(name, makers) or name

    def gates_itself(product: NodeProto) -> bool:
        """Return whether a Mul computes x * Sigmoid(x) or x * HardSigmoid(x)."""
        left, right = (before_pair(name) for name in product.input)
        return any(
            gate in makers and makers[gate].op_type in _GATES and before_pair(makers[gate].input[0]) == value
            for value, gate in ((left, right), (right, left))
        )

    def is_fused(reader: NodeProto) -> bool:
        if reader.op_type in MOVES_VALUES:
            behind = [user for name in reader.output for user in readers.get(name, [])]
            return bool(behind) and all(is_fused(user) for user in behind)
        is_float = reader.op_type not in _INTEGER_OPERATORS or bool(outputs & set(reader.output))
        if reader.op_type in ("Add", "Mul", "Concat"):
            is_float = is_float or any(before_pair(name) == name for name in reader.input)
        return is_float or (reader.op_type == "Mul" and gates_itself(reader))

    for dequantize in [node for node in graph.node if node.op_type == "DequantizeLinear"]:
        source = before_pair(dequantize.output[0])
        maker, users = makers.get(source), readers.get(dequantize.output[0], [])
        if source == dequantize.output[0] or maker is None:
            continue
        if dequantize.output[0] in outputs:
            graph.node.remove(dequantize)
            _rename(graph, source, dequantize.output[0])
            makers[dequantize.output[0]] = maker
            continue
        if maker.op_type in LAYER_TYPES:
            is_removable = all(is_fused(user) for user in users)
        else:
            is_removable = maker.op_type in _GATES and all(
                user.op_type == "Mul" and gates_itself(user) for user in users
            )
        if is_removable:
            for user in users:
                user.input[:] = [source if name == dequantize.output[0] else name for name in user.input]
    drop_unused(graph)
    return fused


def drop_pairs_between_moves(model: ModelProto) -> ModelProto:
    """Return a copy without the Q/DQ pairs between operators that only move values.

    Such a pair rounds nothing if it has the scale of the pair before the moves. OpenVINO shuffles channels in one
    kernel only if Reshape, Transpose and Reshape follow each other; ONNX Runtime moves integers only between pairs.
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    graph, index = rewritten.graph, index_graph(rewritten.graph)
    makers, readers, constants = index.makers, index.readers, index.constants

    def levels(dequantize: NodeProto) -> list[object]:
        return [
            numpy_helper.to_array(constants[name]).tolist() if name in constants else name
            for name in dequantize.input[1:]
        ]

    for dequantize in graph.node:
        quantize = makers.get(dequantize.input[0]) if dequantize.op_type == "DequantizeLinear" else None
        users = readers.get(dequantize.output[0], [])
        if quantize is None or not users or any(user.op_type not in MOVES_VALUES for user in users):
            continue
        origin = makers.get(quantize.input[0])
        if origin is None or origin.op_type not in MOVES_VALUES:
            continue
        while origin is not None and origin.op_type in MOVES_VALUES:
            origin = makers.get(origin.input[0])
        if (
            origin is not None
            and origin.op_type == "DequantizeLinear"
            and levels(origin) == levels(dequantize)
        ):
            for user in users:
                user.input[0] = quantize.input[0]
    drop_unused(graph)
    return rewritten


def gemm_as_matmul(model: ModelProto) -> ModelProto:
    """Return a copy in which an INT8 Gemm whose output stays in float is a MatMul, minus the negative bias.

    ONNX Runtime has an integer MatMul with float output, but no such Gemm: it would dequantize the weight in every
    inference. It would make a Gemm again of a MatMul and an Add.
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    graph, index = rewritten.graph, index_graph(rewritten.graph)
    makers, readers, constants = index.makers, index.readers, index.constants
    products: dict[str, list[NodeProto]] = {}
    for node in [node for node in graph.node if node.op_type == "Gemm"]:
        attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
        dequantize = makers.get(node.input[1])
        following = readers.get(node.output[0], [])
        while len(following) == 1 and following[0].op_type in ("Relu", "Clip"):
            following = readers.get(following[0].output[0], [])
        is_plain = [attributes.get(name, 1) for name in ("alpha", "beta")] == [1, 1] and not attributes.get(
            "transA"
        )
        source = makers.get(node.input[0])
        is_int8 = dequantize is not None and is_stored_quantized(dequantize, constants)
        is_int8 = is_int8 and source is not None and source.op_type == "DequantizeLinear"
        if (
            not is_plain
            or not is_int8
            or dequantize is None
            or len(readers[node.input[1]]) > 1
            or any(reader.op_type == "QuantizeLinear" for reader in following)
            or not set(node.input[2:]) <= constants.keys()
        ):
            continue
        if attributes.get("transB"):
            name = f"{dequantize.input[0]}:transposed"
            if name not in constants:  # layers may share levels
                levels_IO = np.ascontiguousarray(numpy_helper.to_array(constants[dequantize.input[0]]).T)
                graph.initializer.append(numpy_helper.from_array(levels_IO, name))
                constants[name] = graph.initializer[-1]
            dequantize.input[0] = name
            for axis in dequantize.attribute:  # none with one scale for all
                axis.i = 1 - axis.i % 2 if axis.name == "axis" else axis.i
        has_bias = len(node.input) > 2
        product = f"{node.output[0]}:product" if has_bias else node.output[0]
        nodes = [helper.make_node("MatMul", node.input[:2], [product], node.name)]
        if has_bias:
            bias = f"{node.input[2]}:{node.name}:negative"
            graph.initializer.append(
                numpy_helper.from_array(-numpy_helper.to_array(constants[node.input[2]]), bias)
            )
            nodes.append(helper.make_node("Sub", [product, bias], node.output, f"{node.name}:bias"))
        products[node.output[0]] = nodes
    replace_nodes(graph, products)
    drop_unused(graph)
    return rewritten


def stem_in_float(model: ModelProto) -> ModelProto:
    """Return a copy in which convolutions that read the quantized image read the image itself.

    Their int8 weights are dequantized. Three channels do not fill a vector register of an integer kernel: with 16
    filters the convolution is faster in float, with 64 in INT8. Before a MaxPool it stays in INT8, because ONNX
    Runtime's integer MaxPool is fast only in the layout of integer convolutions.
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    graph, index = rewritten.graph, index_graph(rewritten.graph)
    makers, constants = index.makers, index.constants
    images = {value.name for value in graph.input}
    for node in graph.node:
        if node.op_type != "Conv" or node.input[1] not in makers:
            continue
        weight, image = makers[node.input[1]], rounded_by_pair(node.input[0], makers)
        if image not in images or not is_stored_quantized(weight, constants):
            continue
        values_OIHW = float_weight(weight, constants)
        if values_OIHW.shape[1] > STEM_CHANNELS or values_OIHW.shape[0] > STEM_FILTERS:
            continue
        if _is_pooled(node, index):
            continue
        assert image is not None
        read_float(graph, node, image, values_OIHW, constants)
    drop_unused(graph)
    return rewritten


def token_depthwise_in_float(model: ModelProto) -> ModelProto:
    """Return a copy in which depthwise convolutions of the tokens that a linear layer gives read float.

    Their int8 weights are dequantized, and pairs behind them removed. In the feed-forward blocks of SegFormer (Xie et
    al. 2021, arXiv:2105.15203, equation 3) the convolution stands between transpositions and a GELU. A ReLU that such
    a pair stands for is written again.
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    write_dropped_activations(rewritten)
    graph, index = rewritten.graph, index_graph(rewritten.graph)
    makers, constants = index.makers, index.constants
    quantize_of = {node.input[0]: node for node in graph.node if node.op_type == "QuantizeLinear"}

    for node in [node for node in graph.node if node.op_type == "Conv"]:
        tokens, weight = rounded_by_pair(node.input[0], makers), makers.get(node.input[1])
        if tokens is None or weight is None or not is_stored_quantized(weight, constants):
            continue
        values_OIHW = float_weight(weight, constants)
        if values_OIHW.shape[1] == 1 and _is_linear(tokens, makers):
            read_float(graph, node, tokens, values_OIHW, constants)
            drop_pair(index, quantize_of.get(node.output[0]))
    drop_unused(graph)
    return rewritten


def _is_linear(name: str, makers: Mapping[str, NodeProto]) -> bool:
    """Return whether a MatMul or Gemm gives a tensor, perhaps with moves and a bias behind it."""
    node = makers.get(name)
    if node is None or node.op_type in ("MatMul", "Gemm"):
        return node is not None
    return node.op_type in (*MOVES_VALUES, "Add") and any(_is_linear(each, makers) for each in node.input)


def _rename(graph: GraphProto, name: str, new_name: str) -> None:
    """Give a tensor another name where it is made and read."""
    for node in graph.node:
        for names in (node.input, node.output):
            if name in names:
                names[:] = [new_name if each == name else each for each in names]


def _is_pooled(layer: NodeProto, index: GraphIndex) -> bool:
    """Return whether a MaxPool reads the output of a layer, perhaps behind an activation and a Q/DQ pair."""
    waiting = [layer.output[0]]
    while waiting:
        for node in index.readers.get(waiting.pop(), []):
            if node.op_type == "MaxPool":
                return True
            if node.op_type in ("Relu", "Clip", "QuantizeLinear", "DequantizeLinear"):
                waiting.extend(node.output)
    return False
