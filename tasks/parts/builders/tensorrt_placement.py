"""Q/DQ pairs where TensorRT wants them: what its fusions and kernels for INT8 take.

Rules of NVIDIA's "Working with Quantized Types" (TensorRT documentation, "Q/DQ Layer-Placement Recommendations") and
of the memory-bound products that Model-Optimizer leaves in float. Importing this module needs no TensorRT. Each
function keeps what the graph computes and changes what it rounds.
"""

from onnx import GraphProto, ModelProto, numpy_helper

from tasks.parts.onnx_graphs.graph import MOVES_VALUES, GraphIndex, drop_unused, index_graph
from tasks.parts.onnx_graphs.macs import LAYER_TYPES, sizes_of_one_image
from tasks.parts.onnx_graphs.pairs import (
    drop_pair,
    float_weight,
    is_stored_quantized,
    read_float,
    rounded_by_pair,
)

_MOVES_INTEGERS = MOVES_VALUES | {"MaxPool", "Pad", "Resize"}
"""Operators that move integers between two pairs with the same steps."""


def residual_pairs_alone(model: ModelProto) -> ModelProto:
    """Return a copy in which a residual addition reads one pair: on the shortcut, none behind the convolution.

    TensorRT computes convolution, addition and activation in one kernel, which reads the shortcut in INT8 and adds it
    to sums that were not rounded. Of two convolutions that an addition joins the one behind more nodes is fused.
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    graph, index = rewritten.graph, index_graph(rewritten.graph)
    makers, depth = index.makers, _depths(rewritten.graph)
    for node in graph.node:
        if node.op_type != "Add" or any(rounded_by_pair(name, makers) is None for name in node.input):
            continue
        branches = []
        for name in set(node.input):
            rounded = str(rounded_by_pair(name, makers))
            is_layer = rounded in makers and makers[rounded].op_type in LAYER_TYPES
            if is_layer and len(index.readers[rounded]) == 1 and _is_read_once(name, index):
                branches.append((depth[rounded], name))
        if branches and len(set(node.input)) > 1:
            drop_pair(index, makers[makers[max(branches)[1]].input[0]])
    drop_unused(graph)
    return rewritten


def vector_products_in_float(model: ModelProto) -> ModelProto:
    """Return a copy in which matrix products of one row, and 1x1 convolutions of one pixel, read float.

    Such a product reads each weight once, so its time is that of the memory, and no kernel for INT8 makes it faster:
    classifiers behind a global pool, squeeze-and-excitation. A pair behind which only moves lead to it goes as well.
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    graph, index = rewritten.graph, index_graph(rewritten.graph)
    makers, readers, constants = index.makers, index.readers, index.constants
    sizes = sizes_of_one_image(model)
    for node in [node for node in graph.node if node.op_type in ("Conv", "Gemm", "MatMul")]:
        weight, source, given = (
            makers.get(node.input[1]),
            rounded_by_pair(node.input[0], makers),
            node.output[0],
        )
        if (
            weight is None
            or source is None
            or given not in sizes
            or not is_stored_quantized(weight, constants)
        ):
            continue
        places = sizes[given][2:] if node.op_type == "Conv" else sizes[given][:-1]
        if all(size == 1 for size in places):
            read_float(graph, node, source, float_weight(weight, constants), constants)
            while source in makers and makers[source].op_type in MOVES_VALUES and len(readers[source]) == 1:
                source = makers[source].input[0]
            if rounded_by_pair(source, makers) is not None and _is_read_once(source, index):
                drop_pair(index, makers[makers[source].input[0]])
    drop_unused(graph)
    return rewritten


def equal_steps_at_concat(model: ModelProto) -> ModelProto:
    """Return a copy whose pairs around each Concat have the widest of their steps.

    TensorRT joins tensors of INT8 without a kernel only if they have one scale. Pairs before and behind operators
    that move values keep equal steps.
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    graph, index = rewritten.graph, index_graph(rewritten.graph)
    constants = index.constants
    quantizers = {
        node.output[0]: node
        for node in graph.node
        if node.op_type == "QuantizeLinear"
        and node.input[1] in constants
        and not constants[node.input[1]].dims
    }
    scale_of = {levels: node.input[1] for levels, node in quantizers.items()}
    steps = {name: float(numpy_helper.to_array(constants[name])) for name in scale_of.values()}
    groups = []
    for node in graph.node:
        is_concat = node.op_type == "Concat"
        if is_concat or node.op_type in _MOVES_INTEGERS:
            before = [_levels_of(name, index) for name in (node.input if is_concat else node.input[:1])]
            behind = [
                reader.output[0]
                for name in node.output
                for reader in index.readers.get(name, [])
                if reader.op_type == "QuantizeLinear"
            ]
            group = [*before, *behind]
            are_known = all(levels in quantizers for levels in group)
            if are_known and (is_concat or len({steps[scale_of[str(levels)]] for levels in group}) == 1):
                groups.append([str(levels) for levels in group])
    is_settled = False
    while not is_settled:
        is_settled = True
        for group in groups:
            widest = max((scale_of[levels] for levels in group), key=steps.__getitem__)
            for levels in group:
                if steps[scale_of[levels]] < steps[widest]:
                    scale_of[levels], is_settled = widest, False
    for levels, scale in scale_of.items():
        for node in (quantizers[levels], *index.readers.get(levels, [])):
            node.input[1] = scale
    drop_unused(graph)
    return rewritten


def _is_read_once(name: str, index: GraphIndex) -> bool:
    """Return whether one node reads what a pair gives, and nothing else reads its levels."""
    return len(index.readers[name]) == 1 and len(index.readers[index.makers[name].input[0]]) == 1


def _levels_of(name: str, index: GraphIndex) -> str | None:
    """Return the levels that a DequantizeLinear makes this tensor of; None if none does."""
    maker = index.makers.get(name)
    return maker.input[0] if maker is not None and maker.op_type == "DequantizeLinear" else None


def _depths(graph: GraphProto) -> dict[str, int]:
    """Return the largest number of nodes between the image and each tensor."""
    depths: dict[str, int] = {}
    for node in graph.node:
        depth = 1 + max((depths.get(name, 0) for name in node.input), default=0)
        depths.update(dict.fromkeys(node.output, depth))
    return depths
