"""Compare a rewritten graph with the file of another tool that it was made from, in ONNX Runtime.

Values are compared in front of the last sigmoid or softmax (`foreign_raw.py`). A file that ONNX Runtime computes
otherwise with its optimisations than without, as it does for quantized files and for sums that cancel out, cannot be
met more closely than it meets itself: this spread is then the limit, and the answers have to be the same.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError, BuildFailed, GateFailed, first_line
from tasks.parts.cpu import int8_sums_saturate
from tasks.parts.custom_operators import check_libraries, libraries_of
from tasks.parts.data.dataset import normalise
from tasks.parts.data.input_card import Task
from tasks.parts.onnx_graphs.foreign_custom import RUN_FAILURES
from tasks.parts.onnx_graphs.foreign_file import Original, open_original
from tasks.parts.onnx_graphs.foreign_form import InputForm
from tasks.parts.onnx_graphs.foreign_output import Head
from tasks.parts.onnx_graphs.foreign_raw import last_activations, leave_out
from tasks.parts.onnx_graphs.foreign_rewrite import FixedBatch, Imported, with_outputs
from tasks.parts.onnx_graphs.foreign_size import depends_on_size
from tasks.parts.onnx_graphs.graph import MAX_OPSET, MIN_OPSET
from tasks.parts.onnx_graphs.signal_to_noise import Difference, agreement_db, difference
from tasks.parts.onnx_session import open_session

if TYPE_CHECKING:
    import onnxruntime

_ROUNDING = 2.0**-23
"""The step of float32 at 1: what cancels out inside a network leaves this much, however small its outputs are."""
_SPREAD_ALLOWANCE_DB = 6.0
"""A graph may differ from its file by this much more than the file differs from itself."""
_LEAST_DB = 10.0
"""Below it two outputs are not the same function, whatever the file's own spread is."""
_OTHER_ANSWERS = 0.02
"""Share of the answers that may change in addition to those that the file itself changes; one may always."""

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Gate:
    """How much a rewritten graph may differ from its file."""

    min_sqnr_db: float
    key: str
    """Key of the configuration that holds the limit."""
    advice: str | None = None
    """What to do where it fails; None: what follows from the changes of the graph."""


@dataclass(frozen=True)
class Comparison:
    """How much a rewritten graph differs from its file."""

    differences: tuple[Difference, ...]
    """One per batch size, in front of the last sigmoid or softmax."""
    spread_db: float | None
    """Agreement of the file with itself, with and without ONNX Runtime's optimisations; None: the gate held."""
    same_answers: float | None
    """Least share of images or pixels with the same class, over the batch sizes; None for values."""
    conversion: str
    """What was done to the file before; empty if it was compared as it is."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each output of the file for one image."""


@dataclass(frozen=True)
class _Pair:
    """The file and the graph that was written from it, opened to be compared."""

    model: Path
    imported: Imported
    head: Head
    original: Original
    reopen: Callable[[], Original]
    """Opens the file at the other level of optimisation."""
    inside: Callable[[Sequence[str]], tuple[Original, list[str]]]
    """Opens the file so that it also gives those of the named tensors that it has; returns their names, too."""
    found: tuple[Floats | Exception, ...]
    """What the written graph gives for each batch, in the form of the file, or how it failed."""
    stop: type[GateFailed] | type[FixedBatch]
    """What is raised if the graph differs."""

    @property
    def stop_of_batch(self) -> type[GateFailed] | type[FixedBatch]:
        """What is raised for a batch that does not go through: a file may only say that its batch is dynamic."""
        is_first = self.imported.static_batch is None and not self.imported.is_simplified_at_one
        return FixedBatch if is_first else self.stop

    def expected(self, images_NHWC: NDArray[np.uint8], *, is_other: bool = False) -> list[Floats]:
        """Return the outputs of the file for images of a data set, with `is_other` at the other level."""
        original = self.reopen() if is_other else self.original
        try:
            outputs = self._answers(original, images_NHWC)
        except RUN_FAILURES as error:
            if self.imported.size is not None:
                raise depends_on_size(
                    self.model, "another size", self.imported.size, first_line(error)
                ) from error
            raise ArtifactError(
                f"{self.model}: the file itself fails ({first_line(error)}) on a batch of "
                f"{self.imported.static_batch or 1}, which it declares. Export it again."
            ) from error
        if not all(np.isfinite(output).all() for output in outputs):
            raise ArtifactError(
                f"{self.model}: returns NaN or infinity for calibration images, expected finite logits. Take another "
                "checkpoint of the model."
            )
        return outputs

    def _answers(self, original: Original, images_NHWC: NDArray[np.uint8]) -> list[Floats]:
        """Return the outputs of the file; one by one where it declares a dynamic batch and does not have it."""
        try:
            outputs = original.answers(images_NHWC)
        except RUN_FAILURES:
            if self.imported.static_batch is not None or len(images_NHWC) == 1:
                raise
        else:
            if all(len(output) == len(images_NHWC) for output in outputs):
                return outputs
        return replace(original, static_batch=1).answers(images_NHWC)

    def found_for(self, index: int, batch_size: int) -> Floats:
        """Return what the written graph gives for one of the batches."""
        found = self.found[index]
        if isinstance(found, Exception):
            raise self.stop_of_batch(
                f"batch of {batch_size}: ONNX Runtime fails on the written graph ({first_line(found)}). "
                f"{_hint(self.imported)}"
            ) from found
        return found


def compare(
    model: Path,
    imported: Imported,
    form: InputForm,
    gate: Gate,
    images_NHWC: NDArray[np.uint8],
    batch_sizes: Sequence[int],
    *,
    is_float_form: bool = False,
) -> Comparison:
    """Compare the logits for the first images, as many as each batch holds; with `is_float_form`, those of the
    file's float form.

    Raises GateFailed, or FixedBatch where the batch was made dynamic, at the first batch that differs too much.
    """
    batches = [images_NHWC[:batch_size] for batch_size in batch_sizes]
    pair = _open(model, imported, form, batches, is_float_form=is_float_form)
    file = "the float form of the file" if is_float_form else "the file"
    differences, shares, spreads = [], [], []
    for index, (batch_size, images) in enumerate(zip(batch_sizes, batches, strict=True)):
        outputs, found = pair.expected(images), pair.found_for(index, batch_size)
        expected = _joined(outputs)
        if found.shape != expected.shape:
            raise pair.stop_of_batch(
                f"batch of {batch_size}: the logits of the written graph are {list(found.shape)}, those of the file "
                f"{list(expected.shape)}. {_hint(imported)}"
            )
        result = difference(expected, found)
        if not (agreement_db(expected, found) >= gate.min_sqnr_db or result.max_abs <= _ROUNDING):
            other = _joined(pair.expected(images, is_other=True))
            spreads.append(agreement_db(expected, other))
            if agreement_db(other, found) >= gate.min_sqnr_db:
                # A fault of the runtime's optimisations that the written graph does not run into, or runs into.
                expected, result = other, difference(other, found)
            elif fault := _fault(pair.head, expected, other, found, gate, file):
                where = _first_difference(pair, images[:1], gate.min_sqnr_db)
                hint = _hint(imported) if gate.advice is None else gate.advice
                raise pair.stop(f"batch of {batch_size}: {fault}.{where} {hint}")
        differences.append(result)
        if pair.head.task is not Task.values:
            shares.append(float((pair.head.classes(expected) == pair.head.classes(found)).mean()))
    return Comparison(
        tuple(differences),
        min(spreads, default=None),
        min(shares, default=None),
        pair.original.conversion,
        tuple(output.shape[1:] for output in outputs),
    )


def _open(
    model: Path,
    imported: Imported,
    form: InputForm,
    batches: Sequence[NDArray[np.uint8]],
    *,
    is_float_form: bool,
) -> _Pair:
    """Run the written graph, close it, and open the file: both at once take twice the memory."""
    libraries = check_libraries(libraries_of(imported.graph), "model.custom_operators")
    head, (written, weights) = imported.head, with_outputs(imported.graph, [imported.head.tensor])
    activations, own = imported.activations, last_activations(written, [head.tensor])
    if len(activations) == len(own) + head.is_probability:
        leave_out(written, own)
        head = replace(head, is_probability=False)
    else:  # a pair of a quantized file stands behind its activation, say
        activations = frozenset()
    stop = GateFailed if imported.static_batch is None or imported.max_batch else FixedBatch
    level = not int8_sums_saturate()

    def opened(is_optimised: bool, inner: Collection[str] = ()) -> Original:
        return open_original(
            model,
            form,
            imported.tensors,
            imported.static_batch,
            libraries,
            is_float_form=is_float_form,
            activations=activations,
            is_optimised=is_optimised,
            is_whole=imported.is_whole,
            inner=inner,
            size=imported.size,
            is_lean=bool(weights),
        )

    def inside(names: Sequence[str]) -> tuple[Original, list[str]]:
        original = opened(False, names)
        known = {output.name for output in original.session.get_outputs()}
        return original, [name for name in names if name in known]

    try:
        session = open_session(written, is_optimised=level, weights=weights, is_lean=bool(weights))
    except BuildFailed as error:
        raise stop(
            f"ONNX Runtime refuses the written graph ({first_line(error)}). {_hint(imported)}"
        ) from error
    found = tuple(_answer(session, imported, head, images) for images in batches)
    del session
    return _Pair(
        model,
        imported,
        head,
        opened(level),
        lambda: opened(not level),
        inside,
        found,
        stop,
    )


def _answer(
    session: "onnxruntime.InferenceSession", imported: Imported, head: Head, images_NHWC: NDArray[np.uint8]
) -> Floats | Exception:
    """Return what the written graph gives for images of a data set, in the form of the file, or how it failed."""
    images_NCHW = normalise(images_NHWC, imported.mean, imported.std)
    parts = np.split(images_NCHW, len(images_NCHW)) if imported.max_batch else [images_NCHW]
    name = session.get_inputs()[0].name
    try:
        answer: Floats = head.to_answer(
            np.concatenate([session.run(None, {name: part})[0] for part in parts])
        )
    except RUN_FAILURES as error:
        failure: Exception = error
        return failure
    return answer


def _joined(outputs: Sequence[Floats]) -> Floats:
    """Return one output, or several flattened and joined, as the written graph gives them."""
    if len(outputs) == 1:
        return outputs[0]
    return np.concatenate([output.reshape(len(output), -1) for output in outputs], axis=1)


def _fault(head: Head, expected: Floats, other: Floats, found: Floats, gate: Gate, file: str) -> str:
    """Say what is wrong with a graph below its gate; empty if it differs no more than the file does from itself.

    `other` are the outputs of the file at the other level of optimisation.
    """
    spread_db, found_db = (agreement_db(expected, values) for values in (other, found))
    limit_db = min(gate.min_sqnr_db, max(_LEAST_DB, spread_db - _SPREAD_ALLOWANCE_DB))
    own = f"{file} differs from itself by {spread_db:.1f} dB with and without ONNX Runtime's optimisations"
    if not found_db >= limit_db:
        result = difference(expected, found)
        return (
            f"the written graph differs from {file} by {result.max_abs:.3g} (SQNR {result.sqnr_db:.1f} dB), expected "
            f"at least {limit_db:.1f} dB ({gate.key}; {own})"
        )
    if head.task is Task.values:
        return ""
    answers, own_answers, new_answers = (head.classes(values) for values in (expected, other, found))
    num_own = int((own_answers != answers).sum())
    num_new = int(((new_answers != answers) & (new_answers != own_answers)).sum())
    if num_new <= num_own + max(1.0, _OTHER_ANSWERS * answers.size):
        return ""
    return (
        f"the written graph gives {num_new} of {answers.size} images or pixels another class than {file}, which "
        f"changes {num_own} itself; expected at most {_OTHER_ANSWERS:.0%} more ({own})"
    )


def _hint(imported: Imported) -> str:
    if imported.static_batch is not None and not imported.max_batch:
        return f"The file fixes its batch at {imported.static_batch}; export it again with a dynamic batch."
    if not MIN_OPSET <= imported.opset_before <= MAX_OPSET:
        return (
            f"An operator may behave differently than in opset {imported.opset_before}, from which it was converted; "
            f"export with opset {MIN_OPSET} to {MAX_OPSET}."
        )
    return (
        "Export the model with other operators there (another opset or exporter), or set the limit lower if this "
        "difference does not matter."
    )


def _first_difference(pair: _Pair, images_NHWC: NDArray[np.uint8], limit_db: float) -> str:
    """Name the first node of the written graph whose output is not that of the file, as a sentence with a space.

    Empty if the graph has no such node, as where an output changed its name.
    """
    graph, card = pair.imported.graph, pair.imported
    if pair.imported.static_batch not in (None, 1):
        return ""
    original, names = pair.inside([name for node in graph.graph.node for name in node.output])
    written, weights = with_outputs(graph, names)
    session = open_session(written, is_optimised=False, weights=weights)
    images_NCHW = normalise(images_NHWC, card.mean, card.std)
    found = session.run(names, {session.get_inputs()[0].name: images_NCHW})
    expected = original.session.run(names, original.feed(images_NHWC))
    for name, before, after in zip(names, expected, found, strict=True):
        is_like = after.dtype.kind == "f" and after.shape == before.shape
        if is_like and agreement_db(before.astype(np.float32), after) < limit_db:
            node = next(node for node in graph.graph.node if name in node.output)
            return f" The first node that differs is {node.op_type} '{node.name}'."
    return ""
