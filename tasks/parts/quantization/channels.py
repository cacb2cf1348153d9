"""Find channels whose scale can change without changing what a graph computes.

Convolutions and linear layers can produce any channel smaller by a factor and read it larger by the same factor; a
ReLU, a pool and other operators between them pass a positive factor on (Nagel et al. 2019, arXiv:1906.04721, section
4.1). Channels that meet in an addition have to keep equal factors. C channels, O output channels, I input channels.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from tasks.parts.onnx_graphs.graph import pads_with_zeros
from tasks.parts.onnx_graphs.macs import sizes_of_one_image

Groups = NDArray[np.int64]

_PASSES = frozenset(
    {
        "AveragePool",
        "GlobalAveragePool",
        "GlobalMaxPool",
        "Identity",
        "LeakyRelu",
        "MaxPool",
        "PRelu",
        "Relu",
        "Resize",
    }
)
"""Operators that multiply each channel of their output by the factor of the same channel of their input."""
_JOINS_AXES = frozenset({"Flatten", "Reshape", "Squeeze"})


@dataclass(frozen=True)
class ChannelAxis:
    """The channels of a tensor."""

    axis: int
    groups_C: Groups
    """Group of each channel; channels of a group have the same factor."""


@dataclass(frozen=True)
class ScaledLayer:
    """A node whose constants take up factors of channels."""

    node: NodeProto
    inputs_I: Groups | None
    """Groups of the input channels; None where the input cannot be scaled."""
    outputs_O: Groups


@dataclass(frozen=True)
class ScalableChannels:
    """Groups of channels, and where their factors go."""

    tensors: dict[str, ChannelAxis]
    layers: tuple[ScaledLayer, ...]
    """Convolutions, linear layers and normalisations."""
    constants: dict[str, tuple[int, Groups]]
    """Constant that is added to a tensor -> its axis of the channels, and their groups."""
    is_free_G: NDArray[np.bool_]
    """Whether each group may have a factor other than 1."""


def find_scalable_channels(model: ModelProto) -> ScalableChannels:
    """Return the groups of channels in a float graph that have to be scaled together."""
    return _Search(model).run()


class _Search:
    """Walks the graph once and collects which channels depend on each other; ids become groups at the end."""

    def __init__(self, model: ModelProto) -> None:
        self._graph = model.graph
        self._sizes = sizes_of_one_image(model)
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        counts = Counter(name for node in model.graph.node for name in node.input)
        self._own = {
            tensor.name
            for tensor in model.graph.initializer
            if counts[tensor.name] == 1 and tensor.data_type == TensorProto.FLOAT
        }
        self._num_ids = 0
        self._pinned: list[Groups] = []
        self._equal: list[tuple[Groups, Groups]] = []
        self._tensors: dict[str, ChannelAxis] = {}
        self._layers: list[ScaledLayer] = []
        self._added: dict[str, tuple[int, Groups]] = {}

    def run(self) -> ScalableChannels:
        for node in self._graph.node:
            if not self._visit(node):
                for name in node.input:
                    self._pin(name)
        for value in self._graph.output:
            self._pin(value.name)
        group_of = self._groups()
        is_free_G = np.ones(int(group_of.max(initial=-1)) + 1, bool)
        for ids in self._pinned:
            is_free_G[group_of[ids]] = False
        return ScalableChannels(
            tensors={
                name: ChannelAxis(found.axis, group_of[found.groups_C])
                for name, found in self._tensors.items()
            },
            layers=tuple(
                ScaledLayer(
                    layer.node,
                    None if layer.inputs_I is None else group_of[layer.inputs_I],
                    group_of[layer.outputs_O],
                )
                for layer in self._layers
            ),
            constants={name: (axis, group_of[ids]) for name, (axis, ids) in self._added.items()},
            is_free_G=is_free_G,
        )

    def _groups(self) -> Groups:
        left, right = (
            np.concatenate([np.zeros(0, np.int64), *(pair[side] for pair in self._equal)]) for side in (0, 1)
        )
        links = coo_array((np.ones(len(left), bool), (left, right)), shape=(self._num_ids, self._num_ids))
        group_of: Groups = connected_components(links, directed=False)[1].astype(np.int64)
        return group_of

    def _visit(self, node: NodeProto) -> bool:
        """Follow the factors through a node; return False if they cannot pass."""
        match node.op_type:
            case "Conv" | "Gemm" | "MatMul" | "LayerNormalization":
                return self._visit_layer(node)
            case "Add" | "Sub" | "Mul":
                return self._visit_pair(node)
            case "Concat":
                return self._visit_concat(node)
            case "Split":
                return self._visit_split(node)
            case "Transpose":
                source = self._tensors.get(node.input[0])
                if source is None:
                    return False
                order = next((list(item.ints) for item in node.attribute if item.name == "perm"), None)
                return order is not None and self._set(
                    node.output[0], order.index(source.axis), source.groups_C
                )
            case "Pad" | "Clip":
                return self._is_homogeneous(node) and self._pass_on(node)
            case name if name in _JOINS_AXES:
                return self._visit_reshape(node)
            case name:
                return name in _PASSES and len(node.output) == 1 and self._pass_on(node)

    def _visit_layer(self, node: NodeProto) -> bool:
        constants = [name for name in node.input[1:] if name]
        if not constants or not self._own.issuperset(constants) or _integer(node, "transA"):
            return False
        weight = self._constants[constants[0]]
        is_norm = node.op_type == "LayerNormalization"
        if (is_norm and len(weight.dims) != 1) or (
            node.op_type in ("Gemm", "MatMul") and len(weight.dims) != 2
        ):
            return False
        axis = 1 if node.op_type == "Conv" else len(self._sizes.get(node.output[0], ())) - 1
        num_outputs = (
            weight.dims[0]
            if node.op_type == "Conv" or is_norm or _integer(node, "transB")
            else weight.dims[1]
        )
        source = self._tensors.get(node.input[0])
        is_read = source is not None and not is_norm and source.axis == axis
        outputs_O = self._new_ids(num_outputs)
        if not self._set(node.output[0], axis, outputs_O):
            return False
        self._layers.append(
            ScaledLayer(node, source.groups_C if is_read and source is not None else None, outputs_O)
        )
        if not is_read:
            self._pin(node.input[0])
        return True

    def _visit_pair(self, node: NodeProto) -> bool:
        known = [self._tensors.get(name) for name in node.input]
        for source, other in ((0, 1), (1, 0)):
            if node.input[other] in self._constants:
                return self._visit_constant(node, node.input[source], node.input[other])
        first, second = known
        if first is None or second is None or first.axis != second.axis:
            return False
        if len(first.groups_C) != len(second.groups_C):
            return False
        if node.op_type == "Mul":  # a gate, which keeps its factor of 1
            gate = min((1, 0), key=lambda index: np.prod(self._sizes.get(node.input[index], [0])))
            self._pin(node.input[gate])
            return self._set(node.output[0], first.axis, (second if gate == 0 else first).groups_C)
        self._equal.append((first.groups_C, second.groups_C))
        return self._set(node.output[0], first.axis, first.groups_C)

    def _visit_constant(self, node: NodeProto, name: str, constant: str) -> bool:
        source, sizes = self._tensors.get(name), self._sizes.get(name, [])
        dims = list(self._constants[constant].dims)
        if source is None or len(dims) > len(sizes) or (node.op_type == "Sub" and node.input[0] == constant):
            return False
        if node.op_type != "Mul":
            axis = source.axis - len(sizes) + len(dims)
            is_vector = 0 <= axis < len(dims) and np.prod(dims) == dims[axis] == len(source.groups_C)
            if not is_vector or constant not in self._own:
                return False
            self._added[constant] = (axis, source.groups_C)
        return self._set(node.output[0], source.axis, source.groups_C)

    def _visit_concat(self, node: NodeProto) -> bool:
        parts = [self._tensors.get(name) for name in node.input]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts) or len({part.axis for part in known}) != 1:
            return False
        axis = _integer(node, "axis")
        axis += len(self._sizes.get(node.output[0], ())) if axis < 0 else 0
        if axis == known[0].axis:
            return self._set(node.output[0], axis, np.concatenate([part.groups_C for part in known]))
        for part in known[1:]:
            self._equal.append((known[0].groups_C, part.groups_C))
        return self._set(node.output[0], known[0].axis, known[0].groups_C)

    def _visit_split(self, node: NodeProto) -> bool:
        source = self._tensors.get(node.input[0])
        if source is None:
            return False
        axis = _integer(node, "axis")
        axis += len(self._sizes.get(node.input[0], ())) if axis < 0 else 0
        start = 0
        for name in node.output:
            if axis == source.axis:
                stop = start + (self._sizes.get(name) or [0] * (axis + 1))[axis]
                groups_C, start = source.groups_C[start:stop], stop
            else:
                groups_C = source.groups_C
            if not self._set(name, source.axis, groups_C):
                return False
        return True

    def _visit_reshape(self, node: NodeProto) -> bool:
        """Pass on the factors of [N, C, H, W] as [N, C H W]."""
        source, sizes = self._tensors.get(node.input[0]), self._sizes.get(node.input[0], [])
        if source is None or source.axis != 1 or not all(sizes) or sizes[0] != 1:
            return False
        if len(self._sizes.get(node.output[0], [])) != 2:
            return False
        return self._set(node.output[0], 1, source.groups_C.repeat(int(np.prod(sizes[2:]))))

    def _is_homogeneous(self, node: NodeProto) -> bool:
        """Return whether a Pad adds zeros or copies, or a Clip only cuts off what is negative."""
        if node.op_type == "Pad":
            return pads_with_zeros(node, self._constants)
        low, high = (*node.input[1:], "", "")[:2]
        return low in self._constants and not high and not numpy_helper.to_array(self._constants[low]).any()

    def _pass_on(self, node: NodeProto) -> bool:
        source = self._tensors.get(node.input[0])
        return source is not None and self._set(node.output[0], source.axis, source.groups_C)

    def _set(self, name: str, axis: int, ids: Groups) -> bool:
        """Record the channels of a tensor if it has so many on that axis."""
        sizes = self._sizes.get(name, [])
        if not 0 < axis < len(sizes) or sizes[axis] != len(ids):
            self._pinned.append(ids)
            return False
        self._tensors[name] = ChannelAxis(axis, ids)
        return True

    def _new_ids(self, count: int) -> Groups:
        self._num_ids += count
        return np.arange(self._num_ids - count, self._num_ids)

    def _pin(self, name: str) -> None:
        if name in self._tensors:
            self._pinned.append(self._tensors[name].groups_C)


def _integer(node: NodeProto, name: str) -> int:
    return next((int(item.i) for item in node.attribute if item.name == name), 0)
