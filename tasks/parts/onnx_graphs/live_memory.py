"""Estimate the memory of the activations of a graph, to choose how many images run at once."""

import math

from onnx import ModelProto

from tasks.parts.onnx_graphs.macs import sizes_of_one_image

MAX_BYTES = 1 << 29
"""Limit for the activations of the images that run at once; fewer images give the same answers."""


def live_bytes(model: ModelProto) -> int:
    """Return the most bytes of activations that are alive at once for one image, in the order of the nodes.

    Tensors whose size is not known count as nothing, all others as float32. Runtimes that compute in place need less,
    and with a heap that is divided into odd pieces more.
    """
    constants = {tensor.name for tensor in model.graph.initializer}
    sizes = {
        name: 4 * math.prod(size) for name, size in sizes_of_one_image(model).items() if name not in constants
    }
    last_reader = {name: index for index, node in enumerate(model.graph.node) for name in node.input}
    ends: dict[int, list[str]] = {}
    for name, index in last_reader.items():
        ends.setdefault(index, []).append(name)
    alive = most = sum(sizes.get(value.name, 0) for value in model.graph.input)
    for index, node in enumerate(model.graph.node):
        alive += sum(sizes.get(name, 0) for name in node.output)
        most = max(most, alive)
        alive -= sum(sizes.get(name, 0) for name in ends.get(index, ()))
    return most


def images_that_fit(model: ModelProto, *, most: int, max_bytes: int = MAX_BYTES) -> int:
    """Return of how many images, at most `most` and one at least, the activations fit into so much memory."""
    return max(1, min(most, max_bytes // max(1, live_bytes(model))))
