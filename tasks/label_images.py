"""Label images with the predictions of the float model, so that engines are measured by their agreement with it."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tasks.core.bounds import AtLeast
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError, DataError
from tasks.parts.onnx_session import ONNXRUNTIME

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from onnx import ModelProto

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """How the float model runs."""

    batch_size: Annotated[int, AtLeast(1)]
    """Images in one batch; changes memory and speed only."""


@dataclass(frozen=True)
class Report:
    """What was labelled."""

    num_images: dict[str, int]
    """Number of images per split."""
    num_classes: int
    """Number of classes of the model; 0 if it returns values."""
    num_classes_given: int
    """Number of classes that the model predicted for at least one image, or pixel."""


def environment(_: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions(*ONNXRUNTIME)


def label_images(cfg: Config, *, model: Path, data: Path, out: Path) -> Report:
    """Write ``dataset/``: the images of `data`, labelled with the predictions of the float graph of import_onnx.

    Raises ArtifactError for images that already have labels or masks, DataError if the model answers the same for
    every image.
    """
    from tasks.parts.data.dataset import open_groups, read_manifest
    from tasks.parts.data.dataset_writer import SplitBatches, write_dataset
    from tasks.parts.data.metrics import FLOAT_MODEL
    from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph

    graph, manifest = read_graph(model), read_manifest(data)
    if manifest.classes:
        raise ArtifactError(
            f"{data}: has the classes {', '.join(manifest.classes[:8])}, expected images without labels "
            "(data=images). Measure on the existing labels instead."
        )
    card = read_card_of_graph(graph)
    seen = _Seen()
    labelled = write_dataset(
        out / "dataset",
        task=card.task,
        classes=card.classes,
        height=manifest.height,
        width=manifest.width,
        source=FLOAT_MODEL,
        channels=manifest.num_channels,
        values_shape=card.values_shape,
        reading=manifest.reading,
        splits={
            split: SplitBatches(num_images, _label(cfg, graph, data, split, seen), open_groups(data, split))
            for split, num_images in manifest.counts.items()
        },
    )
    given = [
        name
        for name, *shares in zip(card.classes, *labelled.pixel_share.values(), strict=True)
        if any(share > 0 for share in shares)
    ]
    if not seen.is_varied:
        answer = f"predicts the class {given[0]}" if given else "returns the same values"
        raise DataError(
            f"{data}: the float model {answer} for every image, so agreement with it would be meaningless. Check "
            "model.mean and model.std, or provide more varied images."
        )
    report = Report(labelled.counts, len(card.classes), len(given))
    logger.info("label_images: %d of %d classes given", report.num_classes_given, report.num_classes)
    return report


@dataclass
class _Seen:
    """Whether answers differ."""

    first: Any = None
    is_varied: bool = False

    def add(self, answers: "NDArray[Any]") -> None:
        """Compare the answers of a batch with the first number, or values, of all."""
        if self.first is None:
            self.first = answers[0].copy() if answers.dtype.kind == "f" else answers.flat[0]
        self.is_varied = self.is_varied or bool((answers != self.first).any())


def _label(
    cfg: Config, graph: "ModelProto", data: Path, split: str, seen: _Seen
) -> "Iterator[tuple[NDArray[np.uint8], NDArray[Any]]]":
    """Yield the images of a split in batches, each with the predictions of the graph."""
    from tasks.parts.data.dataset import LABEL_TYPES, open_images
    from tasks.parts.data.judge import answers_of
    from tasks.parts.onnx_graphs.graph import read_card_of_graph
    from tasks.parts.onnx_graphs.live_memory import images_that_fit
    from tasks.parts.onnx_graphs.predict import run_batches

    images_NHWC, card, start = open_images(data, split), read_card_of_graph(graph), 0
    for outputs in run_batches(graph, images_NHWC, batch_size=images_that_fit(graph, most=cfg.batch_size)):
        answers = answers_of(outputs, card)
        seen.add(answers)
        yield images_NHWC[start : start + len(answers)], answers.astype(LABEL_TYPES[card.task])
        start += len(answers)
