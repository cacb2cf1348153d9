"""Judge quantized graphs on validation images, by one measure for every stage that quantizes.

N images, H rows, W columns.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from tasks.core.errors import ArtifactError
from tasks.parts.data import open_split, read_manifest
from tasks.parts.metrics import mean_iou
from tasks.parts.onnx_graph import activations_to_uint8, read_card_of_graph
from tasks.parts.onnx_predict import agreement, predict_classes


@dataclass(frozen=True)
class Judgement:
    """What a graph is worth."""

    miou: float
    agreement: float
    """Share of pixels with the class that the float graph gives, 0..1."""


@dataclass(frozen=True)
class Judge:
    """Validation images and masks, and the classes that the float graph gives them."""

    images_NHWC: NDArray[Any]
    masks_NHW: NDArray[Any]
    float_classes_NHW: NDArray[np.uint8]
    num_classes: int
    batch_size: int

    @cached_property
    def float_miou(self) -> float:
        """MIoU of the float graph on the same images."""
        return mean_iou(self.float_classes_NHW, self.masks_NHW, self.num_classes)

    def judge(self, quantized: ModelProto) -> Judgement:
        """Measure a graph as it runs in ONNX Runtime: with uint8 activations."""
        encoded = activations_to_uint8(quantized)
        classes_NHW = predict_classes(encoded, self.images_NHWC, batch_size=self.batch_size)
        miou = mean_iou(classes_NHW, self.masks_NHW, self.num_classes)
        return Judgement(miou, agreement(classes_NHW, self.float_classes_NHW))


def open_judge(graph: ModelProto, data: Path, *, num_images: int, batch_size: int) -> Judge:
    """Run the float graph on the first `num_images` of the validation split; 0 takes all.

    Raises ArtifactError when the graph knows other classes than the data.
    """
    classes, card = read_manifest(data).classes, read_card_of_graph(graph)
    if classes != card.classes:
        raise ArtifactError(
            f"the graph knows the classes {list(card.classes)}, the data {list(classes)}. Export a network "
            "that was trained on this data set."
        )
    images_NHWC, masks_NHW = (found[: num_images or None] for found in open_split(data, "val"))
    float_classes_NHW = predict_classes(graph, images_NHWC, batch_size=batch_size)
    return Judge(images_NHWC, masks_NHW, float_classes_NHW, len(classes), batch_size)
