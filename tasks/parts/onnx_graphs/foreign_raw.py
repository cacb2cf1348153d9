"""The values before the last sigmoid or softmax of a graph: the outputs behind it hide differences, or enlarge them.

A sigmoid far from 0 gives nearly the same for all values, and its rounding is all that is left of their difference.
"""

from collections.abc import Collection, Sequence

from onnx import ModelProto

from tasks.parts.onnx_graphs.graph import MOVES_VALUES, index_graph

_SQUASHES = {"Sigmoid", "Softmax"}
_MOVES = MOVES_VALUES | {"Cast", "Concat"}
"""What may stand between the last activation and an output; detectors join parts behind their sigmoids."""


def last_activations(model: ModelProto, tensors: Sequence[str]) -> frozenset[str]:
    """Return what the last sigmoids and softmaxes in front of these tensors make."""
    makers = index_graph(model.graph).makers
    found, seen, waiting = set[str](), set[str](), list(tensors)
    while waiting:
        name = waiting.pop()
        node = makers.get(name)
        if node is None or name in seen:
            continue
        seen.add(name)
        if node.op_type in _SQUASHES:
            found.add(name)
        elif node.op_type in _MOVES:
            waiting.extend(node.input)
    return frozenset(found)


def leave_out(model: ModelProto, activations: Collection[str]) -> None:
    """Let the nodes that make these tensors hand on what they read, in place."""
    for node in model.graph.node:
        if set(node.output) & set(activations):
            node.op_type = "Identity"
            del node.attribute[:]
