"""Interpolate logits by matrix products instead of a Resize."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import GraphProto, ModelProto, NodeProto, helper, numpy_helper

from tasks.parts.onnx_graphs.graph import drop_unused, read_shapes, replace_nodes

MAX_MACS_PER_VALUE = 32
"""Largest multiply-adds per value for which interpolation as two products is used; beyond, Resize is faster."""

BLOCK = 8
"""Rows or columns of a block of interpolation by blocks; of 4, 8 and 16 the fastest."""

_Parts = tuple[list[NodeProto], dict[str, NDArray[np.generic]]]
"""Nodes and their constants."""


@dataclass(frozen=True)
class _Axis:
    """What a Resize does to the rows or the columns."""

    size: int
    new_size: int
    scale: float
    """That of the node, where it has one. `new_size` is floor(size * scale), so their ratio is another number where
    the product is not whole, and coordinates follow the scale (ONNX, Resize)."""

    @property
    def factor(self) -> int:
        """The scale of an axis that `has_blocks`."""
        return self.new_size // self.size

    @property
    def has_blocks(self) -> bool:
        """Whether the axis consists of blocks that all grow by the same whole factor."""
        return self.size % BLOCK == 0 and self.factor > 1 and self.scale == self.factor

    @property
    def matrix(self) -> NDArray[np.float32]:
        """The matrix [new_size, size] of linear interpolation (ONNX half_pixel, edges repeated)."""
        centres = np.clip((np.arange(self.new_size) + 0.5) / self.scale - 0.5, 0, self.size - 1)
        left = np.floor(centres).astype(int)
        right = np.minimum(left + 1, self.size - 1)
        matrix = np.zeros((self.new_size, self.size))
        np.add.at(matrix, (np.arange(self.new_size), left), 1 - (centres - left))
        np.add.at(matrix, (np.arange(self.new_size), right), centres - left)
        return matrix.astype(np.float32)

    @property
    def matrix_of_block(self) -> NDArray[np.float32]:
        """The matrix [BLOCK * factor, BLOCK + 2] that interpolates a block between its neighbours."""
        between_others = _Axis(3 * BLOCK, 3 * BLOCK * self.factor, self.scale).matrix
        rows = slice(BLOCK * self.factor, 2 * BLOCK * self.factor)
        return between_others[rows, BLOCK - 1 : 2 * BLOCK + 1].copy()

    @property
    def blocks(self) -> NDArray[np.int64]:
        """The indices [blocks, BLOCK + 2] of blocks with a neighbour on both sides; edges are repeated."""
        indices = [
            [start + offset for offset in range(-1, BLOCK + 1)] for start in range(0, self.size, BLOCK)
        ]
        return np.clip(np.array(indices, np.int64), 0, self.size - 1)


def resize_as_matmul(model: ModelProto, *, in_blocks: bool = False) -> ModelProto:
    """Return a copy in which a bilinear Resize that produces the logits is replaced by matrix products.

    Bilinear interpolation is linear and separable: rows times a constant matrix, columns times another. For the
    small maps of a segmentation head this is three times as fast as ONNX Runtime's Resize kernel. A value depends
    on its neighbours only, so with `in_blocks` large maps that grow by a whole factor are cut into blocks of `BLOCK`
    rows and columns, each with one neighbour on both sides, and all blocks are multiplied by the same small matrix.
    That is for OpenVINO: on large maps ONNX Runtime's own kernel is faster (`benchmarks.roof` races a pick of each
    runtime against its twin with the runtime's Resize).
    """
    rewritten = ModelProto()
    rewritten.CopyFrom(model)
    graph = rewritten.graph
    maker = next(node for node in graph.node if graph.output[0].name in node.output)
    axes = _axes(maker, model) if maker.op_type == "Resize" and _is_bilinear(maker) else None
    if axes is None:
        return rewritten
    rows, columns = axes
    if rows.size + columns.size * rows.size / rows.new_size <= MAX_MACS_PER_VALUE:
        nodes, constants = _interpolate(maker, rows, columns)
    elif in_blocks and rows.has_blocks and columns.has_blocks:
        nodes, constants = _interpolate_blocks(maker, rows, columns)
    else:
        return rewritten
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    replace_nodes(graph, {maker.output[0]: nodes})
    drop_unused(graph)
    return rewritten


def _axes(maker: NodeProto, model: ModelProto) -> tuple[_Axis, _Axis] | None:
    """Return what a Resize does to rows and columns; None if that may change between calls, or to other axes."""
    inferred = read_shapes(model)
    sizes = {
        value.name: [axis.dim_value for axis in value.type.tensor_type.shape.dim]
        for value in [*inferred.value_info, *inferred.input, *inferred.output]
    }
    size, new_size = sizes.get(maker.input[0], []), sizes[maker.output[0]]
    if len(size) != 4 or not all([*size[2:], *new_size[2:]]) or size[:2] != new_size[:2]:
        return None
    has_sizes = len(maker.input) > 3 and bool(maker.input[3])
    scales = (
        [new / old for old, new in zip(size[2:], new_size[2:], strict=True)]
        if has_sizes
        else _scales(maker, model.graph)
    )
    if scales is None:
        return None
    rows, columns = (_Axis(*axis) for axis in zip(size[2:], new_size[2:], scales, strict=True))
    return rows, columns


def _scales(maker: NodeProto, graph: GraphProto) -> list[float] | None:
    """Return the constant scales of rows and columns; None if they are computed or of other axes."""
    stored = [
        tensor for tensor in graph.initializer if len(maker.input) > 2 and tensor.name == maker.input[2]
    ]
    if not stored:
        return None
    scales = numpy_helper.to_array(stored[0]).astype(float).tolist()
    named = next((list(item.ints) for item in maker.attribute if item.name == "axes"), [0, 1, 2, 3])
    by_axis = dict(zip((axis % 4 for axis in named), scales, strict=True))
    return [by_axis.get(axis, 1.0) for axis in (2, 3)]


def _interpolate(maker: NodeProto, rows: _Axis, columns: _Axis) -> _Parts:
    """Return two products that widen and heighten maps [N, C, h, w], and their matrices."""
    maps, logits = maker.input[0], maker.output[0]
    widen_wW, heighten_Hh, widened = (f"{logits}:{name}" for name in ("widen", "heighten", "widened"))
    nodes = [
        helper.make_node("MatMul", [maps, widen_wW], [widened], f"{maker.name}:widen"),
        helper.make_node("MatMul", [heighten_Hh, widened], [logits], maker.name),
    ]
    return nodes, {widen_wW: columns.matrix.T.copy(), heighten_Hh: rows.matrix}


def _interpolate_blocks(maker: NodeProto, rows: _Axis, columns: _Axis) -> _Parts:
    """Return nodes that widen and heighten maps [N, C, h, w] block by block, and their constants.

    The indices of blocks are flat, and a Reshape cuts what was gathered: OpenVINO (2026.4) refuses indices of two
    axes behind an integer convolution with a scale for each channel.
    """
    maps, logits = maker.input[0], maker.output[0]

    def name(part: str) -> str:
        return f"{logits}:{part}"

    nodes = [
        helper.make_node(
            "Gather", [maps, name("columns")], [name("repeated")], f"{maker.name}:repeat_columns", axis=3
        ),
        helper.make_node(
            "Reshape", [name("repeated"), name("split_size")], [name("split")], f"{maker.name}:split"
        ),
        helper.make_node("MatMul", [name("split"), name("widen")], [name("wide")], f"{maker.name}:widen"),
        helper.make_node("Reshape", [name("wide"), name("width")], [name("widened")], f"{maker.name}:join"),
        helper.make_node(
            "Gather", [name("widened"), name("rows")], [name("tall")], f"{maker.name}:repeat_rows", axis=2
        ),
        helper.make_node("Reshape", [name("tall"), name("cut_size")], [name("cut")], f"{maker.name}:cut"),
        helper.make_node("MatMul", [name("heighten"), name("cut")], [name("high")], maker.name),
        helper.make_node("Reshape", [name("high"), name("height")], [logits], f"{maker.name}:stack"),
    ]
    return nodes, {
        name("columns"): columns.blocks.ravel(),
        name("split_size"): np.array([0, 0, 0, *columns.blocks.shape]),
        name("widen"): columns.matrix_of_block.T.copy(),
        name("width"): np.array([0, 0, 0, -1]),
        name("rows"): rows.blocks.ravel(),
        name("cut_size"): np.array([0, 0, *rows.blocks.shape, columns.new_size]),
        name("heighten"): rows.matrix_of_block,
        name("height"): np.array([0, 0, -1, columns.new_size]),
    }


def _is_bilinear(node: NodeProto) -> bool:
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    return (
        attributes.get("mode") == b"linear"
        and attributes.get("coordinate_transformation_mode", b"half_pixel") == b"half_pixel"
        and attributes.get("keep_aspect_ratio_policy", b"stretch") == b"stretch"
        and not attributes.get("antialias", 0)
        and not attributes.get("exclude_outside", 0)
    )
