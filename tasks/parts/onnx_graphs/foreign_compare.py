"""Compare a rewritten graph with the file of another tool that it was made from, in ONNX Runtime."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError, BuildFailed, GateFailed, first_line
from tasks.parts.cpu import int8_sums_saturate
from tasks.parts.custom_operators import check_libraries, libraries_of
from tasks.parts.data.dataset import normalise
from tasks.parts.onnx_graphs.foreign_custom import RUN_FAILURES
from tasks.parts.onnx_graphs.foreign_file import open_original
from tasks.parts.onnx_graphs.foreign_form import InputForm
from tasks.parts.onnx_graphs.foreign_rewrite import FixedBatch, Imported, with_output
from tasks.parts.onnx_graphs.signal_to_noise import Difference, agreement_db, difference
from tasks.parts.onnx_session import open_session


@dataclass(frozen=True)
class Gate:
    """How much a rewritten graph may differ from its file."""

    min_sqnr_db: float
    key: str
    """Key of the configuration that holds the limit."""


@dataclass(frozen=True)
class Comparison:
    """How much a rewritten graph differs from its file."""

    differences: tuple[Difference, ...]
    """One per batch size."""
    conversion: str
    """What was done to the file before; empty if it was compared as it is."""
    shapes: tuple[tuple[int, ...], ...]
    """Shape of each output of the file for one image."""


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
    libraries = check_libraries(libraries_of(imported.graph), "model.custom_operators")
    original = open_original(
        model, form, imported.tensors, imported.static_batch, libraries, is_float_form=is_float_form
    )
    stop = GateFailed if imported.static_batch is None or imported.max_batch else FixedBatch
    hint = _hint(imported)
    try:
        session = open_session(
            with_output(imported.graph, imported.head.tensor), is_optimised=not int8_sums_saturate()
        )
    except BuildFailed as error:
        raise stop(f"ONNX Runtime refuses the written graph ({first_line(error)}). {hint}") from error
    name = imported.graph.graph.input[0].name
    differences = []
    for batch_size in batch_sizes:
        images_NCHW = normalise(images_NHWC[:batch_size], imported.mean, imported.std)
        try:
            answers = original.answers(images_NHWC[:batch_size])
        except RUN_FAILURES as error:
            raise ArtifactError(
                f"{model}: the file itself fails on a batch of {batch_size} ({first_line(error)}), though it "
                f"declares {imported.static_batch or 'a dynamic batch'}. Export it with a batch that it supports."
            ) from error
        try:
            parts = np.split(images_NCHW, batch_size) if imported.max_batch else [images_NCHW]
            logits = np.concatenate([session.run(None, {name: part})[0] for part in parts])
        except RUN_FAILURES as error:
            raise stop(
                f"batch of {batch_size}: ONNX Runtime fails on the written graph ({first_line(error)}). {hint}"
            ) from error
        found = imported.head.to_answer(logits)
        expected = answers[0]
        if len(answers) > 1:
            expected = np.concatenate([answer.reshape(len(answer), -1) for answer in answers], axis=1)
        if not np.isfinite(expected).all():
            raise ArtifactError(
                f"{model}: returns NaN or infinity for calibration images, expected finite logits. Take another "
                "checkpoint of the model."
            )
        if found.shape != expected.shape:
            raise stop(
                f"batch of {batch_size}: the logits of the written graph are {list(found.shape)}, those of the file "
                f"{list(expected.shape)}. {hint}"
            )
        result = difference(expected, found)
        if not agreement_db(expected, found) >= gate.min_sqnr_db:
            file = "the float form of the file" if is_float_form else "the file"
            raise stop(
                f"batch of {batch_size}: the written graph differs from {file} by {result.max_abs:.3g} (SQNR "
                f"{result.sqnr_db:.1f} dB), expected at least {gate.min_sqnr_db} dB ({gate.key}). {hint}"
            )
        differences.append(result)
    shapes = tuple(answer.shape[1:] for answer in answers)
    return Comparison(tuple(differences), original.conversion, shapes)


def _hint(imported: Imported) -> str:
    if imported.static_batch is None or imported.max_batch:
        return "An operator behaves differently in the opset that it was converted to; export with a newer opset."
    return f"The file fixes its batch at {imported.static_batch}; export it again with a dynamic batch."
