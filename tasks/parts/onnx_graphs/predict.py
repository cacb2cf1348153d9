"""Run an ONNX graph with ONNX Runtime over the images of a split, to evaluate it.

Engines that are deployed run through tasks.parts.engines. N images, C classes, H rows, W columns.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from tasks.parts.data.dataset import normalised_batches
from tasks.parts.onnx_graphs.graph import read_card_of_graph
from tasks.parts.onnx_session import open_session


def predict_classes(model: ModelProto, images_NHWC: NDArray[Any], *, batch_size: int) -> NDArray[Any]:
    """Return the class of each pixel, [N, H, W], or of each image, [N], for images uint8 [N, H, W, 3]."""
    card = read_card_of_graph(model)
    smallest = np.min_scalar_type(len(card.classes) - 1)
    session = open_session(model)
    name = session.get_inputs()[0].name
    predictions = []
    for images_NCHW in normalised_batches(images_NHWC, card, batch_size):
        logits = session.run(None, {name: images_NCHW})[0]
        predictions.append(logits.argmax(axis=1).astype(smallest))
    return np.concatenate(predictions)


def agreement(left: NDArray[Any], right: NDArray[Any]) -> float:
    """Return the share of pixels, or of images, with the same class, 0..1."""
    return float((left == right).mean())
