"""Find the layers of a Q/DQ graph that have to run in float to recover the accuracy: delta debugging.

Algorithm ddmin of Zeller & Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE Transactions on
Software Engineering 28 (2), 2002, section 3: halves first, then smaller parts. The result is 1-minimal: without
any one of its layers the accuracy is not recovered. Another, smaller set may exist.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from onnx import ModelProto

    from tasks.parts.quantization.evaluation import GraphEvaluator

logger = logging.getLogger(__name__)

_CONVERSIONS = ("QuantizeLinear", "DequantizeLinear")


@dataclass(frozen=True)
class Trial:
    """One graph that was evaluated."""

    score: float
    is_recovered: bool
    num_float_layers: int
    float_layers: str
    """Names of the nodes that ran in float, separated by spaces."""


@dataclass(frozen=True)
class FloatLayer:
    """A layer that has to run in float."""

    node: str
    module: str
    source: str


@dataclass(frozen=True)
class Bisection:
    """Result of the search; all scores are on the same validation images."""

    is_recovered: bool
    """False: even with all layers in float the graph stays below the target; its weights are not the float ones."""
    float_score: float
    variant_score: float
    """Score of the unmodified Q/DQ graph."""
    target_score: float
    recovered_score: float
    """Score with `layers` in float; with all layers in float if nothing recovers it."""
    num_quantized_layers: int
    num_trials: int
    layers: tuple[FloatLayer, ...]
    """Empty if the unmodified graph reaches the target, or if nothing recovers it."""


def bisect(
    variant: "ModelProto",
    graph: "ModelProto",
    ranked: Sequence[str],
    evaluator: "GraphEvaluator",
    *,
    max_score_rel_loss: float,
) -> tuple[Bisection, list[Trial]]:
    """Search among the nodes `ranked`, noisiest first, of a Q/DQ graph of the float graph `graph`."""
    from tasks.parts.onnx_graphs.graph import node_sources

    target_score = evaluator.float_score * (1 - max_score_rel_loss)
    known: dict[frozenset[str], Trial] = {}

    def attempt(nodes: Sequence[str]) -> Trial:
        key = frozenset(nodes)
        if key not in known:
            score = evaluator.evaluate(with_float_layers(variant, graph, key)).score
            shown = " ".join(node for node in ranked if node in key)
            known[key] = Trial(score, score >= target_score, len(key), shown)
            logger.info("diff_layers: %d layers in float, val score %.4f", len(key), score)
        return known[key]

    before, chosen = attempt(()), list[str]()
    is_recovered = before.is_recovered
    if not is_recovered and attempt(ranked).is_recovered:
        is_recovered = True
        chosen = minimal_set(ranked, lambda nodes: attempt(nodes).is_recovered)
    sources = node_sources(graph)
    bisection = Bisection(
        is_recovered=is_recovered,
        float_score=evaluator.float_score,
        variant_score=before.score,
        target_score=target_score,
        recovered_score=attempt(chosen if is_recovered else ranked).score,
        num_quantized_layers=len(ranked),
        num_trials=len(known),
        layers=tuple(FloatLayer(node, *sources.get(node, ("", ""))) for node in chosen),
    )
    return bisection, list(known.values())


def minimal_set(items: Sequence[str], holds: Callable[[Sequence[str]], bool]) -> list[str]:
    """Return a subset of `items` for which `holds` is true, but false once any one item is removed.

    `holds` must be true for all `items` and false for the empty set. Putting likely items first saves calls.
    """
    chosen, num_parts = list(items), 2
    while len(chosen) > 1:
        size = -(-len(chosen) // num_parts)
        parts = [chosen[start : start + size] for start in range(0, len(chosen), size)]
        # The least likely part is removed first.
        rests = [[item for item in chosen if item not in part] for part in reversed(parts)]
        if (part := next(filter(holds, parts), None)) is not None:
            chosen, num_parts = part, 2
        elif (rest := next(filter(holds, rests), None)) is not None:
            chosen, num_parts = rest, max(num_parts - 1, 2)
        elif size == 1:
            break
        else:
            num_parts = min(2 * num_parts, len(chosen))
    return chosen


def quantized_nodes(variant: "ModelProto", graph: "ModelProto") -> list[str]:
    """Return the nodes of the variant that read dequantised tensors and could read the float ones, in graph order."""
    dequantised = {
        name for node in variant.graph.node if node.op_type == "DequantizeLinear" for name in node.output
    }
    known = {name for node in variant.graph.node for name in node.output}
    known |= {value.name for value in variant.graph.input} | {
        tensor.name for tensor in graph.graph.initializer
    }
    replaceable = {node.name for node in graph.graph.node if set(node.input) <= known | {""}}
    return [
        node.name
        for node in variant.graph.node
        if node.op_type not in _CONVERSIONS and node.name in replaceable and dequantised & set(node.input)
    ]


def with_float_layers(variant: "ModelProto", graph: "ModelProto", nodes: "frozenset[str]") -> "ModelProto":
    """Return a copy of the Q/DQ graph in which some nodes read the inputs and weights of the float graph."""
    from onnx import ModelProto

    from tasks.parts.onnx_graphs.graph import drop_unused

    changed = ModelProto()
    changed.CopyFrom(variant)
    originals = {node.name: node for node in graph.graph.node}
    constants = {tensor.name: tensor for tensor in graph.graph.initializer}
    needed: dict[str, None] = {}
    for node in changed.graph.node:
        if node.name in nodes:
            original = originals[node.name]
            needed.update(dict.fromkeys(name for name in original.input if name in constants))
            node.input[:] = [f"float:{name}" if name in constants else name for name in original.input]
    for name in needed:
        constant = changed.graph.initializer.add()
        constant.CopyFrom(constants[name])
        constant.name = f"float:{name}"
    drop_unused(changed.graph)
    return changed
