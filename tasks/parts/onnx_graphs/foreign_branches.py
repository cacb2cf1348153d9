"""Control flow in graphs of other tools: an `If` whose condition is known is the branch that it takes."""

from collections.abc import Mapping
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from tasks.core.errors import ArtifactError


def inline_branches(model: ModelProto) -> int:
    """Replace each `If` with a constant condition by the branch that it takes, in place; return their number."""
    num_inlined = 0
    while (found := _constant_if(model.graph)) is not None:
        index, node, is_true = found
        branch = _branch(node, is_true)
        constants, nodes = _as_nodes(node, branch)
        del model.graph.node[index]
        for offset, inner in enumerate(nodes):
            model.graph.node.insert(index + offset, inner)
        model.graph.initializer.extend(constants)
        num_inlined += 1
    return num_inlined


def branching_nodes(model: ModelProto) -> list[NodeProto]:
    """Return the nodes that contain graphs."""
    return [
        node for node in model.graph.node if any(item.HasField("g") or item.graphs for item in node.attribute)
    ]


def refuse_branches(model: ModelProto, path: Path) -> None:
    """Raise ArtifactError for a graph with control flow."""
    branching = branching_nodes(model)
    if branching:
        raise ArtifactError(
            f"{path}: {len(branching)} nodes contain subgraphs that depend on the image or the batch (first: "
            f"{branching[0].op_type} '{branching[0].name}'), expected one plain graph. Export the model without "
            "control flow (torch.export, or a traced module)."
        )


def _constant_if(graph: GraphProto) -> tuple[int, NodeProto, bool] | None:
    values = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            values[node.output[0]] = node.attribute[0].t
    for index, node in enumerate(graph.node):
        if node.op_type == "If" and node.input[0] in values:
            return index, node, bool(numpy_helper.to_array(values[node.input[0]]).item())
    return None


def _branch(node: NodeProto, is_true: bool) -> GraphProto:
    name = "then_branch" if is_true else "else_branch"
    branch: GraphProto = next(attribute.g for attribute in node.attribute if attribute.name == name)
    return branch


def _as_nodes(node: NodeProto, branch: GraphProto) -> tuple[list[TensorProto], list[NodeProto]]:
    """Return constants and nodes of a branch under names of their own, its results under those of `node`."""
    own = {tensor.name for tensor in branch.initializer} | {
        name for inner in branch.node for name in inner.output if name
    }
    renamed = {name: f"{node.output[0]}/{name}" for name in own}
    constants, nodes = [], []
    for tensor in branch.initializer:
        copied = TensorProto()
        copied.CopyFrom(tensor)
        copied.name = renamed[tensor.name]
        constants.append(copied)
    for inner in branch.node:
        nodes.append(_renamed(inner, renamed))
        nodes[-1].name = f"{node.output[0]}/{inner.name}" if inner.name else ""
    for value, output in zip(branch.output, node.output, strict=True):
        nodes.append(helper.make_node("Identity", [renamed.get(value.name, value.name)], [output]))
    return constants, nodes


def _renamed(node: NodeProto, names: Mapping[str, str]) -> NodeProto:
    """Return a copy that reads and writes tensors under other names, inside its own graphs, too."""
    copied = NodeProto()
    copied.CopyFrom(node)
    copied.input[:] = [names.get(name, name) for name in node.input]
    copied.output[:] = [names.get(name, name) for name in node.output]
    for attribute in copied.attribute:
        if not attribute.HasField("g"):
            continue
        inner = [_renamed(item, names) for item in attribute.g.node]
        del attribute.g.node[:]
        attribute.g.node.extend(inner)
        for value in attribute.g.output:
            value.name = names.get(value.name, value.name)
    return copied
