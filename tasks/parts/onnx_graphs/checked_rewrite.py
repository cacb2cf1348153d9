"""Apply rewrites to a graph, and hold the result against the graph before a runtime sees it.

A rewrite means to change how a graph is computed, and not what. Of float graphs the outputs are compared. Q/DQ graphs
are compared twice, since other places of pairs and other steps round other values, and one value between two steps
moves all behind it:

- Their float forms, without any pair, are the same function: `MIN_SQNR_DB` as for float graphs. A wrong axis, a wrong
  weight and a lost ReLU show here, below any rounding.
- The graphs themselves, as they are written (no optimisation, so that nothing else rounds), differ by their rounding
  alone. Steps that are twice as wide have four times the noise, so two such graphs differ by 7 dB more than the first
  one differs from its float form; `_ROUNDING_ALLOWANCE_DB` leaves room for that. Wrong scales show here.

Where weights get other steps, both comparisons begin with the graph that has these weights, each of them within half
a step of its old value.

N images, C channels, H rows, W columns.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tasks.core.errors import BuildFailed, first_line
from tasks.parts.onnx_graphs.foreign_custom import RUN_FAILURES
from tasks.parts.onnx_graphs.foreign_qdq import float_form
from tasks.parts.onnx_graphs.graph import is_quantized
from tasks.parts.onnx_graphs.signal_to_noise import agreement_db
from tasks.parts.onnx_session import open_session

logger = logging.getLogger(__name__)

MIN_SQNR_DB = 80.0
"""Least signal-to-noise ratio of a rewritten float graph; float32 reaches 100."""
NUM_IMAGES = 2
"""Images that graphs are compared on: both graphs run once for each."""
_SPREAD_ALLOWANCE_DB = 6.0
"""A graph that differs from itself between levels of optimisation may be rewritten with this much more difference."""
_ROUNDING_ALLOWANCE_DB = 12.0
_ENOUGH_ROUNDED_DB = 40.0
"""Q/DQ graphs that agree by this much are never refused for their rounding."""
_HALF_A_STEP = 0.501
"""Steps by which a rounded weight may differ, with room for float32."""

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Rewrite:
    """A change of how a graph is computed."""

    name: str
    apply: Callable[[ModelProto], ModelProto]
    """Returns a changed copy, or the graph itself."""
    is_optional: bool = False
    """Whether a graph without it is as right, only slower."""
    rounds_weights: bool = False
    """Whether it gives weights other steps, and changes nothing else."""


def apply(rewrites: Sequence[Rewrite], graph: ModelProto) -> ModelProto:
    """Return the graph with all rewrites, unchecked."""
    for rewrite in rewrites:
        graph = rewrite.apply(graph)
    return graph


def checked_rewrite(
    graph: ModelProto,
    rewrites: Sequence[Rewrite],
    images_NCHW: Logits,
    *,
    where: str,
    min_int8_db: float = 0.0,
    expected: Logits | None = None,
) -> ModelProto:
    """Return the graph with those rewrites that compute the same on a few normalised images.

    All are tried together, and one by one only if they differ. `expected` are the graph's outputs for the first
    `NUM_IMAGES` images, if they are known; `min_int8_db` is the least that a Q/DQ graph has to reach in any case. An
    optional rewrite that fails is left out with a warning; another raises BuildFailed. `where` opens both messages.
    """
    images_NCHW = images_NCHW[:NUM_IMAGES]
    rewritten = apply(rewrites, graph)
    if rewritten == graph:
        return graph
    if expected is None:
        expected = _run(graph, images_NCHW)
    expected = expected[:NUM_IMAGES]
    if not np.isfinite(expected).all():
        return rewritten  # such a graph is refused by itself
    weighed = apply([rewrite for rewrite in rewrites if rewrite.rounds_weights], graph)
    if not _find_fault(graph, weighed, rewritten, images_NCHW, expected, min_int8_db):
        return rewritten
    current = graph
    for rewrite in rewrites:
        after = rewrite.apply(current)
        weighed = after if rewrite.rounds_weights else current
        fault = _find_fault(current, weighed, after, images_NCHW, expected, min_int8_db)
        if not fault:
            current, expected = after, _run(after, images_NCHW)
            continue
        message = f"{where}: the rewrite {rewrite.name} changes what the graph computes: {fault}"
        if not rewrite.is_optional:
            raise BuildFailed(
                f"{message}. Build this variant for another target, or replace the node by other operators."
            )
        logger.warning("%s. It is left out.", message)
    return current


def _find_fault(
    graph: ModelProto,
    weighed: ModelProto,
    rewritten: ModelProto,
    images_NCHW: Logits,
    expected: Logits,
    min_int8_db: float,
) -> str:
    """Say how much a rewritten graph differs and from which node on; empty if it computes the same.

    `weighed` is the graph with the weights of the rewritten one; `expected` are its own outputs.
    """
    try:
        if not is_quantized(graph):
            return _compare(graph, rewritten, images_NCHW, MIN_SQNR_DB, expected)
        if weighed != graph:
            fault = _moved_weight(graph, weighed)
            fault = fault or _compare(graph, weighed, images_NCHW, min_int8_db, expected)
            if fault:
                return fault
            expected = _run(weighed, images_NCHW)
        exact_before, exact_after = float_form(weighed), float_form(rewritten)
        exact = _run(exact_before, images_NCHW)
        fault = _compare(exact_before, exact_after, images_NCHW, MIN_SQNR_DB, exact)
        if fault:
            return f"{fault}, both without the rounding of their activations"
        own_db = agreement_db(exact, expected)
        limit_db = max(min_int8_db, min(own_db - _ROUNDING_ALLOWANCE_DB, _ENOUGH_ROUNDED_DB))
        return _compare(weighed, rewritten, images_NCHW, limit_db, expected)
    except (BuildFailed, *RUN_FAILURES) as error:
        return f"ONNX Runtime does not run it ({first_line(error)})"


def _moved_weight(graph: ModelProto, weighed: ModelProto) -> str:
    """Say what else than rounding happened to the weights of a Q/DQ graph; empty if nothing did."""
    steps = _steps_of_weights(weighed)
    before, after = float_form(graph).graph, float_form(weighed).graph
    new = {tensor.name: tensor for tensor in after.initializer}
    if list(before.node) != list(after.node) or new.keys() != {tensor.name for tensor in before.initializer}:
        return "it has other nodes or constants, expected other weights alone"
    for tensor in before.initializer:
        if tensor == new[tensor.name]:
            continue
        old_values, new_values = (numpy_helper.to_array(item) for item in (tensor, new[tensor.name]))
        if tensor.name not in steps:
            return f"constant '{tensor.name}' is another one, expected other weights alone"
        if old_values.shape != new_values.shape:
            return f"weight '{tensor.name}' is {list(new_values.shape)}, expected {list(old_values.shape)}"
        moved, step = float(np.abs(new_values - old_values).max()), steps[tensor.name]
        if not moved <= _HALF_A_STEP * step:
            return (
                f"weight '{tensor.name}' changes by {moved:.3g}, expected {step / 2:.3g} or less, half a step"
            )
    return ""


def _steps_of_weights(model: ModelProto) -> dict[str, float]:
    """Return weight in the float form -> the largest step between its levels."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    return {
        node.output[0]: float(numpy_helper.to_array(constants[node.input[1]]).max())
        for node in model.graph.node
        if node.op_type == "DequantizeLinear"
        and all(name in constants for name in node.input if name)
        and constants[node.input[0]].data_type in (TensorProto.INT8, TensorProto.UINT8)
    }


def _compare(
    before: ModelProto, after: ModelProto, images_NCHW: Logits, limit_db: float, expected: Logits
) -> str:
    """Describe the difference of the outputs of two graphs; empty if it is within the limit."""
    if before == after:
        return ""
    found = _run(after, images_NCHW)
    if found.shape != expected.shape:
        return f"its outputs are {list(found.shape)}, expected {list(expected.shape)}"
    found_db = agreement_db(expected, found)
    if found_db >= limit_db:
        return ""
    spread_db = agreement_db(expected, _run(before, images_NCHW, is_optimised=True))
    if not is_quantized(before) and found_db >= spread_db - _SPREAD_ALLOWANCE_DB:
        return ""
    return (
        f"they agree by {found_db:.1f} dB, expected {limit_db:.1f} dB or more on {len(images_NCHW)} calibration "
        f"images; the first node that differs is {_first_difference(before, after, images_NCHW, limit_db)}"
    )


def _run(graph: ModelProto, images_NCHW: Logits, *, is_optimised: bool = False) -> Logits:
    """Return the only output for each image."""
    session = open_session(graph, is_optimised=is_optimised)
    name = session.get_inputs()[0].name
    return np.concatenate([session.run(None, {name: image[None]})[0] for image in images_NCHW])


def _first_difference(before: ModelProto, after: ModelProto, images_NCHW: Logits, limit_db: float) -> str:
    """Name the first node of a rewritten graph whose output is another one than before."""
    both = {name for node in before.graph.node for name in node.output} & {
        name for node in after.graph.node for name in node.output
    }
    found, expected = (dict(_float_tensors(model, both, images_NCHW[:1])) for model in (after, before))
    for node in after.graph.node:
        for name in node.output:
            if name not in found or name not in expected:
                continue
            is_alike = found[name].shape == expected[name].shape
            if not is_alike or agreement_db(expected[name], found[name]) < limit_db:
                return f"{node.op_type} '{node.name}'"
    return "the one that gives the output"


def _float_tensors(
    model: ModelProto, names: set[str], images_NCHW: Logits
) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield those of the named tensors that are floats, with their values for one image."""
    marked = ModelProto()
    marked.CopyFrom(model)
    del marked.graph.output[:]
    marked.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in sorted(names))
    session = open_session(marked, is_optimised=False)
    for output, values in zip(
        session.get_outputs(), session.run(None, {session.get_inputs()[0].name: images_NCHW}), strict=True
    ):
        if values.dtype.kind == "f":
            yield output.name, values
