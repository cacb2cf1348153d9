"""Evaluate quantized graphs on validation images, in the same way for every stage that quantizes.

N images, H rows, W columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from tasks.core.errors import ArtifactError
from tasks.parts.data.comparison import ImageResults, compare_with_labels
from tasks.parts.data.dataset import open_groups, open_images, open_labels, read_manifest
from tasks.parts.data.input_card import Task
from tasks.parts.data.metrics import Metric, metric_of
from tasks.parts.onnx_graphs.graph import read_card_of_graph
from tasks.parts.onnx_graphs.int8_activations import activations_to_int8
from tasks.parts.onnx_graphs.predict import agreement, predict_classes
from tasks.parts.quantization.config import Activations


@dataclass(frozen=True)
class Evaluation:
    """The predictions of a graph, compared with the labels and with the float graph."""

    results: ImageResults
    agreement: float
    """Share of pixels, or of images, with the class that the float graph predicts, 0..1."""
    activations: Activations
    """Type of the activations with which the graph was evaluated."""

    @cached_property
    def score(self) -> float:
        """Score in the metric of the data set, 0..1."""
        return self.results.score


@dataclass(frozen=True)
class GraphEvaluator:
    """Validation images with their labels, and the classes that the float graph predicts for them."""

    images_NHWC: NDArray[Any]
    labels: NDArray[Any]
    """masks_NHW or labels_N."""
    float_classes: NDArray[Any]
    """Classes that the float graph predicts, in the shape of `labels`."""
    num_classes: int
    batch_size: int
    task: Task
    metric: Metric
    groups_N: NDArray[np.int64]
    """Group of each image."""
    activations: tuple[Activations, ...]
    """Types of activations in the engines that graphs are evaluated for."""

    @cached_property
    def float_results(self) -> ImageResults:
        """What the float graph gets right in the same images."""
        return self._compare(self.float_classes)

    @property
    def float_score(self) -> float:
        """Score of the float graph on the same images."""
        return self.float_results.score

    def evaluate(self, quantized: ModelProto) -> Evaluation:
        """Evaluate a graph in ONNX Runtime with each type of activations; return the worst evaluation."""
        evaluations = []
        for activations in self.activations:
            encoded = with_activations(quantized, activations)
            classes = predict_classes(encoded, self.images_NHWC, batch_size=self.batch_size)
            found = Evaluation(self._compare(classes), agreement(classes, self.float_classes), activations)
            evaluations.append(found)
        return min(evaluations, key=lambda evaluation: evaluation.score)

    def _compare(self, classes: NDArray[Any]) -> ImageResults:
        return compare_with_labels(classes, self.labels, self.num_classes, self.task, self.groups_N)


def with_activations(quantized: ModelProto, activations: Activations) -> ModelProto:
    """Return a Q/DQ graph of `insert_qdq` as targets with this type of activations run it."""
    return activations_to_int8(quantized) if activations is Activations.int8 else quantized


def open_evaluator(
    graph: ModelProto,
    data: Path,
    *,
    num_images: int,
    batch_size: int,
    activations: Sequence[Activations] = (Activations.uint8,),
) -> GraphEvaluator:
    """Run the float graph on the first `num_images` of the validation split; 0 takes all.

    Quantized graphs are evaluated with each type of activations.

    Raises ArtifactError when the graph has other classes than the data.
    """
    manifest, card = read_manifest(data), read_card_of_graph(graph)
    if manifest.classes != card.classes:
        raise ArtifactError(
            f"the graph has the classes {list(card.classes)}, the data {list(manifest.classes)}. Export a "
            "network that was trained on this data set."
        )
    images_NHWC = open_images(data, "val")[: num_images or None]
    return GraphEvaluator(
        images_NHWC=images_NHWC,
        labels=open_labels(data, "val", card.task)[: num_images or None],
        float_classes=predict_classes(graph, images_NHWC, batch_size=batch_size),
        num_classes=len(card.classes),
        batch_size=batch_size,
        task=card.task,
        metric=metric_of(card.task, manifest.source),
        groups_N=open_groups(data, "val")[: num_images or None],
        activations=tuple(activations),
    )
