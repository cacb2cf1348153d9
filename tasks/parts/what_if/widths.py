"""Change the number of channels between the convolutions of a graph: pad them with zeros, or cut the last ones.

Padded channels change nothing that is computed: whoever reads them has weights of zero for them. C channels, O output
channels, I input channels.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper

_PASSES = frozenset(
    {
        "AveragePool",
        "Clip",
        "DequantizeLinear",
        "GlobalAveragePool",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "LeakyRelu",
        "MaxPool",
        "QuantizeLinear",
        "Relu",
        "Sigmoid",
    }
)
"""Operators that keep the channels apart and have no constant for each."""


@dataclass(frozen=True)
class WidthGroup:
    """Convolutions whose outputs must have equally many channels, because they meet in a sum or a product."""

    layers: tuple[str, ...]
    """Names of the convolutions, without depthwise ones, which follow what they read."""
    width: int


@dataclass(frozen=True)
class _Reading:
    """A convolution with the parts of the channels that it reads and writes."""

    node: NodeProto
    read: tuple[int, ...] | None
    """Parts that it reads; None if their channels are fixed."""
    written: tuple[int, ...] | None
    is_depthwise: bool


def find_width_groups(model: ModelProto) -> list[WidthGroup]:
    """Return the groups of convolutions whose width can change without changing the output."""
    parts = _Parts(model)
    groups: dict[int, list[str]] = defaultdict(list)
    for name, part in parts.part_of.items():
        if parts.root(part) not in parts.pinned_roots:
            groups[parts.root(part)].append(name)
    return [WidthGroup(tuple(names), parts.sizes[root]) for root, names in groups.items()]


def with_widths(model: ModelProto, widths: Mapping[str, int]) -> ModelProto:
    """Return a copy in which these convolutions have other numbers of output channels, and what reads them follows.

    `widths` names all convolutions of each changed group of `find_width_groups`.
    """
    changed = ModelProto()
    changed.CopyFrom(model)
    parts = _Parts(changed)
    new = {parts.root(parts.part_of[name]): width for name, width in widths.items()}
    fixed = sorted({name for name in widths if parts.root(parts.part_of[name]) in parts.pinned_roots})
    assert not fixed, fixed
    for reading in parts.readings:
        for axis, ids in ((0, reading.written), (1, None if reading.is_depthwise else reading.read)):
            if ids and any(parts.root(part) in new for part in ids):
                parts.resize(reading.node, axis, ids, new)
        if reading.is_depthwise and reading.written:
            count = sum(new.get(parts.root(part), parts.sizes[part]) for part in reading.written)
            next(item for item in reading.node.attribute if item.name == "group").i = count
    del changed.graph.value_info[:]
    return changed


class _Parts:
    """Walks a graph once and follows which convolution each part of the channels comes from."""

    def __init__(self, model: ModelProto) -> None:
        self._graph = model.graph
        self._constants = {tensor.name: tensor for tensor in model.graph.initializer}
        self._makers = {name: node for node in model.graph.node for name in node.output}
        self._readers = Counter(name for node in model.graph.node for name in node.input)
        self.sizes: list[int] = []
        self._above: list[int] = []
        self._pinned: set[int] = set()
        self._channels: dict[str, tuple[int, ...]] = {}
        self.part_of: dict[str, int] = {}
        self.readings: list[_Reading] = []
        for node in model.graph.node:
            self._visit(node)
        for value in model.graph.output:
            self._pin(value.name)

    @property
    def pinned_roots(self) -> set[int]:
        """The parts whose width is fixed."""
        return {self.root(part) for part in self._pinned}

    def root(self, part: int) -> int:
        """Return the part that stands for all that have to be equally wide."""
        while self._above[part] != part:
            part = self._above[part]
        return part

    def resize(self, node: NodeProto, axis: int, ids: Sequence[int], new: Mapping[int, int]) -> None:
        """Pad or cut the constants of a convolution on the axis of its output (0) or input (1) channels."""
        sizes = [(self.sizes[part], new.get(self.root(part), self.sizes[part])) for part in ids]
        dequantize = self._makers.get(node.input[1])
        constants = [node.input[1]] if dequantize is None else list(dequantize.input)
        if axis == 0 and len(node.input) > 2:
            bias = self._makers.get(node.input[2])
            constants += [node.input[2]] if bias is None else list(bias.input)
        for name in constants:
            values = numpy_helper.to_array(self._constants[name])
            if values.ndim > axis:
                padding = 1 if values.ndim == 1 and name.endswith(":scale") else 0
                resized = _resized(values, axis, sizes, padding)
                self._constants[name].CopyFrom(numpy_helper.from_array(resized, name))

    def _visit(self, node: NodeProto) -> None:
        match node.op_type:
            case "Conv":
                self._visit_conv(node)
            case "Add" | "Sub" | "Mul":
                self._visit_pair(node)
            case "Concat" if _integer(node, "axis", 0) == 1 and self._channels.keys() >= set(node.input):
                self._channels[node.output[0]] = tuple(
                    part for name in node.input for part in self._channels[name]
                )
            case "Resize" if node.input[0] in self._channels and (len(node.input) < 4 or not node.input[3]):
                self._channels[node.output[0]] = self._channels[node.input[0]]
            case name if name in _PASSES:
                if node.input[0] in self._channels:
                    self._channels[node.output[0]] = self._channels[node.input[0]]
            case _:
                for name in node.input:
                    self._pin(name)

    def _visit_conv(self, node: NodeProto) -> None:
        dims = self._weight_dims(node)
        groups, read = _integer(node, "group", 1), self._channels.get(node.input[0])
        is_depthwise = groups > 1 and dims is not None and dims[:2] == [groups, 1] and read is not None
        if dims is None or (groups > 1 and not is_depthwise):
            self._pin(node.input[0])
            return
        if is_depthwise:
            written = read
        else:
            part = len(self.sizes)
            self.sizes.append(dims[0])
            self._above.append(part)
            self.part_of[node.name], written = part, (part,)
        assert written is not None
        self._channels[node.output[0]] = written
        self.readings.append(_Reading(node, read, written, is_depthwise))

    def _weight_dims(self, node: NodeProto) -> list[int] | None:
        """Return the sizes of a weight that nothing else reads, or of its int8 levels."""
        maker = self._makers.get(node.input[1])
        names = [node.input[1]] if maker is None else [node.input[1], maker.input[0]]
        if any(self._readers[name] > 1 for name in names) or names[-1] not in self._constants:
            return None
        if any(self._readers[name] > 1 for name in node.input[2:]):
            return None
        return list(self._constants[names[-1]].dims)

    def _visit_pair(self, node: NodeProto) -> None:
        known = [self._channels.get(name) for name in node.input]
        first, second = known
        scalars = [
            name in self._constants and np.prod(self._constants[name].dims, initial=1) == 1
            for name in node.input
        ]
        if first is not None and second is not None:
            if [self.sizes[part] for part in first] == [self.sizes[part] for part in second]:
                for left, right in zip(first, second, strict=True):
                    self._above[self.root(right)] = self.root(left)
                self._channels[node.output[0]] = first
                return
        elif any(scalars) and (known[0] or known[1]) is not None:
            self._channels[node.output[0]] = known[0] or known[1] or ()
            return
        for name in node.input:
            self._pin(name)

    def _pin(self, name: str) -> None:
        self._pinned.update(self._channels.get(name, ()))


def _resized(
    values: NDArray[np.generic], axis: int, sizes: Sequence[tuple[int, int]], padding: int
) -> NDArray[np.generic]:
    """Pad or cut each part of an axis, from its old size to its new one."""
    blocks, start = [], 0
    for old, new in sizes:
        block = values.take(range(start, start + min(old, new)), axis)
        start += old
        widths = [(0, max(0, new - old)) if number == axis else (0, 0) for number in range(values.ndim)]
        blocks.append(np.pad(block, widths, constant_values=padding))
    return np.concatenate(blocks, axis)


def _integer(node: NodeProto, name: str, default: int) -> int:
    return next((int(item.i) for item in node.attribute if item.name == name), default)
