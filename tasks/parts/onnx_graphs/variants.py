"""Compute several variants of a graph in one session: what they share with it runs once."""

from collections.abc import Iterable

from onnx import ModelProto, NodeProto

from tasks.parts.onnx_graphs.graph import drop_unused


def with_variants(model: ModelProto, variants: Iterable[ModelProto]) -> tuple[ModelProto, list[str]]:
    """Return a graph that computes the first output of each variant, and the names of these outputs.

    A variant has nodes of `model` and other ones. Nodes that are equal in both, and read nothing that differs, are
    computed once for all; the others, and what follows them, once for each variant. Constants of one name are the
    same in `model` and in the variants, which hold further ones under other names.
    """
    merged = ModelProto()
    merged.CopyFrom(model)
    graph = merged.graph
    answer, outputs = graph.output[0], []
    known = {node.output[0]: node for node in model.graph.node}
    constants = {tensor.name for tensor in graph.initializer}
    for number, variant in enumerate(variants):
        own = [tensor for tensor in variant.graph.initializer if tensor.name not in constants]
        differing = {tensor.name for tensor in own}
        for tensor in own:
            graph.initializer.add().CopyFrom(tensor)
            graph.initializer[-1].name = _numbered(tensor.name, number)
        for node in variant.graph.node:
            if known.get(node.output[0]) != node or differing & set(node.input):
                differing |= set(node.output)
                graph.node.append(_renamed(node, differing, number))
        name = variant.graph.output[0].name
        outputs.append(_numbered(name, number) if name in differing else name)
    kind = answer.type.tensor_type
    del graph.output[:], graph.value_info[:]
    for name in dict.fromkeys(outputs):
        graph.output.add(name=name).type.tensor_type.CopyFrom(kind)
    drop_unused(graph)
    return merged, outputs


def _numbered(name: str, number: int) -> str:
    return f"{name}@{number}"


def _renamed(node: NodeProto, differing: set[str], number: int) -> NodeProto:
    """Return a copy of a node in which everything that differs has the number of its variant."""
    copied = NodeProto()
    copied.CopyFrom(node)
    copied.name = _numbered(node.name, number)
    for names in (copied.input, copied.output):
        names[:] = [_numbered(name, number) if name in differing and name else name for name in names]
    return copied
