"""Label images with what the float model predicts, so that engines are measured by their agreement with it."""

import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from tasks.core.bounds import AtLeast
from tasks.core.errors import ArtifactError, DataError

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
    """Per split."""
    num_classes: int
    """That the model can give."""
    num_classes_given: int
    """That it gave to some image, or pixel."""


def label_images(cfg: Config, *, model: Path, data: Path, out: Path) -> Report:
    """Write ``dataset/``: the images of `data`, with the predictions of the float graph of import_onnx as truth.

    Raises ArtifactError for images that have labels or masks already, DataError where the model knows one class only.
    """
    import numpy as np

    from tasks.parts.data.dataset import open_images, read_manifest
    from tasks.parts.data.dataset_writer import write_manifest, write_truth
    from tasks.parts.data.metrics import FLOAT_MODEL
    from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph
    from tasks.parts.onnx_graphs.predict import predict_classes

    graph, manifest = read_graph(model), read_manifest(data)
    if manifest.classes:
        raise ArtifactError(
            f"{data}: knows the classes {', '.join(manifest.classes[:8])}, expected images that nobody labelled "
            "(data=images). Measure on the labels that there are."
        )
    classes = read_card_of_graph(graph).classes
    dataset = out / "dataset"
    dataset.mkdir()
    files, shares, given = dict(manifest.files), {}, np.zeros(len(classes), np.int64)
    for split in manifest.counts:
        shutil.copyfile(data / f"{split}_images.npy", dataset / f"{split}_images.npy")
        predictions = predict_classes(graph, open_images(data, split), batch_size=cfg.batch_size)
        files |= write_truth(dataset, split, predictions)
        counts = np.bincount(predictions.ravel(), minlength=len(classes))
        shares[split] = tuple(float(share) for share in counts / max(1, counts.sum()))
        given += counts
    if (given > 0).sum() < 2:
        raise DataError(
            f"{data}: the float model answers every image with the class {classes[int(given.argmax())]}, so "
            "agreement with it would tell nothing. Check model.mean and model.std, or give images that show more."
        )
    labelled = replace(manifest, classes=classes, files=files, pixel_share=shares, source=FLOAT_MODEL)
    write_manifest(dataset, labelled)
    report = Report(manifest.counts, len(classes), int((given > 0).sum()))
    logger.info("label_images: %d of %d classes given", report.num_classes_given, report.num_classes)
    return report
