"""The inputs and outputs of a graph or an engine: task, classes, image size, preprocessing."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from tasks.core.errors import ArtifactError
from tasks.parts.data.reading import Reading

MAX_CHANNELS = 16
"""Largest number of channels of an image."""


def check_same_classes(checkpoint: Path, known: tuple[str, ...], data: tuple[str, ...], stage: str) -> None:
    """Raise ArtifactError unless a checkpoint, made by `stage`, has the classes of the data in the same order."""
    if known != data:
        raise ArtifactError(
            f"{checkpoint}: has the classes {list(known)}, the data {list(data)}. Train it on this data set "
            f"({stage})."
        )


class Task(StrEnum):
    """What a network predicts."""

    segmentation = "segmentation"
    """The class of each pixel: logits [N, C, H, W]."""
    classification = "classification"
    """The class of the image: logits [N, C]."""
    values = "values"
    """Numbers that are no classes, [N, ...]: a regression, an embedding, a depth map, boxes."""


@dataclass(frozen=True)
class InputCard:
    """All that is needed to feed a graph and to interpret its output."""

    classes: tuple[str, ...]
    """Names of the classes in the order of the logits."""
    mean: tuple[float, ...]
    """Mean of each channel on a 0..1 scale, of RGB for three: the graph reads (value / 255 - mean) / std."""
    std: tuple[float, ...]
    """Standard deviation of each channel on a 0..1 scale."""
    height: int
    width: int
    task: Task = Task.segmentation
    """Task of the logits; cards of our own networks omit it, because all of them do segmentation."""
    max_batch: int | None = None
    """Largest batch that the graph accepts; None if its batch is dynamic."""
    values_shape: tuple[int, ...] | None = None
    """Shape of the values for one image; None for logits."""
    outputs: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name and shape of each output of a model whose outputs are all kept: the values are these, flattened, one after
    the other. Empty for a single output."""
    reading: Reading = field(default_factory=Reading)
    """How image files became what the network was trained on."""

    def __post_init__(self) -> None:
        if (self.task is Task.values) != bool(self.values_shape) or (self.values_shape and self.classes):
            raise ArtifactError(
                f"Card: task {self.task} with {len(self.classes)} classes and values of shape {self.values_shape}; "
                "expected either classes or, for values, their shape."
            )
        if self.outputs and (sum(self.output_sizes),) != self.values_shape:
            raise ArtifactError(
                f"Card: outputs {self.outputs} and values of shape {self.values_shape}; expected as many values as "
                "the outputs have together."
            )
        if self.task is not Task.values and not 2 <= len(self.classes) == len(set(self.classes)):
            raise ArtifactError(
                f"Card: {len(self.classes)} classes ({', '.join(self.classes[:8])}), of which "
                f"{len(set(self.classes))} differ; expected at least two different names."
            )
        for name, values, low in (("mean", self.mean, -math.inf), ("std", self.std, 0.0)):
            if not all(math.isfinite(value) and value > low for value in values):
                raise ArtifactError(f"Card: {name} is {values}; expected finite numbers above {low}.")
        if not 1 <= len(self.mean) == len(self.std) <= MAX_CHANNELS:
            raise ArtifactError(
                f"Card: {len(self.mean)} numbers in mean, {len(self.std)} in std; expected one for each of 1 to "
                f"{MAX_CHANNELS} channels."
            )
        if self.height < 1 or self.width < 1:
            raise ArtifactError(f"Card: image size is {self.height}x{self.width}; expected at least 1x1.")

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape of the input for one image: channels, height, width."""
        return len(self.mean), self.height, self.width

    @property
    def logits_shape(self) -> tuple[int, ...]:
        """Shape of the logits, or of the values, of one image."""
        if self.values_shape is not None:
            return self.values_shape
        size = (self.height, self.width) if self.task is Task.segmentation else ()
        return (len(self.classes), *size)

    @property
    def output_sizes(self) -> tuple[int, ...]:
        """Number of values of each of `outputs`."""
        return tuple(map(math.prod, self.outputs.values()))

    def fit_batch(self, batch_size: int) -> int:
        """Return `batch_size`, limited to what the graph accepts."""
        return batch_size if self.max_batch is None else min(batch_size, self.max_batch)

    def to_json(self) -> str:
        """Write the card as one line with sorted keys."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "InputCard":
        """Read the card of a graph, without its keys about the network.

        Raises ArtifactError when keys are missing or values are invalid.
        """
        try:
            fields = json.loads(text)
            return cls(
                classes=tuple(str(name) for name in fields["classes"]),
                mean=channel_values(fields["mean"]),
                std=channel_values(fields["std"]),
                height=int(fields["height"]),
                width=int(fields["width"]),
                task=Task(fields.get("task", Task.segmentation)),
                max_batch=fields.get("max_batch"),
                values_shape=tuple(shape) if (shape := fields.get("values_shape")) else None,
                outputs={name: tuple(shape) for name, shape in fields.get("outputs", {}).items()},
                reading=Reading.from_fields(fields["reading"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ArtifactError(
                f"The card of the graph cannot be read ({error!r}). The file was changed or written by another "
                "version; run the stage that makes it again."
            ) from error


def channel_values(values: Iterable[float]) -> tuple[float, ...]:
    """Return one value for each channel as floats."""
    return tuple(float(value) for value in values)
