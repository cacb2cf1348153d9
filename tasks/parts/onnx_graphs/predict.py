"""Run an ONNX graph with ONNX Runtime over the images of a split, to evaluate it.

Engines that are deployed run through tasks.parts.engines. N images, C classes, H rows, W columns.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from tasks.parts.data.comparison import energies
from tasks.parts.data.dataset import normalised_batches
from tasks.parts.data.judge import answers_of
from tasks.parts.onnx_graphs.graph import read_card_of_graph
from tasks.parts.onnx_session import CPU_PROVIDER, open_session, run_session


def predict_classes(model: ModelProto, images_NHWC: NDArray[Any], *, batch_size: int) -> NDArray[Any]:
    """Return the class of each pixel, [N, H, W], or of each image, [N], for images uint8 [N, H, W, C].

    For a graph whose outputs are no classes, these values themselves are returned.
    """
    card = read_card_of_graph(model)
    batches = run_batches(model, images_NHWC, batch_size=batch_size)
    return np.concatenate([answers_of(outputs, card) for outputs in batches])


def run_batches(
    model: ModelProto, images_NHWC: NDArray[Any], *, batch_size: int, provider: str = CPU_PROVIDER
) -> Iterator[NDArray[Any]]:
    """Yield the outputs of a graph for images uint8 [N, H, W, C], batch by batch.

    The graph itself is given up as soon as the session is open, so that a caller need not keep it in memory.

    Raises TargetMismatch where ONNX Runtime has not this provider, BuildFailed where it does not run the graph.
    """
    session = open_session(model, provider=provider)
    name, card = session.get_inputs()[0].name, read_card_of_graph(model)
    del model
    for images_NCHW in normalised_batches(images_NHWC, card, batch_size):
        yield run_session(session, None, {name: images_NCHW})[0]


@dataclass
class Agreement:
    """How far answers agree with others, added up batch by batch."""

    same: float = 0.0
    """Pixels, or images, with the same class; signal less noise of values."""
    total: float = 0.0

    def add(self, found: NDArray[Any], expected: NDArray[Any]) -> None:
        """Count further answers."""
        if expected.dtype.kind != "f":
            self.same += int((found == expected).sum())
            self.total += found.size
        else:
            signal, noise = (float(part.sum()) for part in energies(found, expected))
            self.same += signal - noise
            self.total += signal

    @property
    def share(self) -> float:
        """Share of pixels, or of images, with the same class, or 1 - noise / signal of values, 0..1."""
        return max(0.0, self.same / self.total) if self.total else float(not self.same)


def agreement(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the share of pixels, or of images, with the same class, or 1 - noise / signal of values, 0..1."""
    counted = Agreement()
    counted.add(found, expected)
    return counted.share
