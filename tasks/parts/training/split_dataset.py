"""The images that a training reads, in a module of its own: data workers start without importing Lightning.

N images, H rows, W columns.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from tasks.parts.data.dataset import Manifest, normalise, open_split


class SplitDataset(Dataset[Any]):
    """One split of the canonical layout, loaded one batch at a time."""

    def __init__(self, data: Path, split: str, manifest: Manifest) -> None:
        self._images_NHWC, self._masks_NHW = open_split(data, split)
        self._data, self._split, self._manifest = data, split, manifest

    def __reduce__(self) -> tuple[Any, ...]:
        """Let a data worker map the files itself, instead of sending it their content."""
        return SplitDataset, (self._data, self._split, self._manifest)

    def __len__(self) -> int:
        return len(self._images_NHWC)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Return images_NCHW (float32, normalised), masks_NHW (int64) and indices_N."""
        images_NCHW = normalise(self._images_NHWC[indices], self._manifest.mean, self._manifest.std)
        masks_NHW = np.asarray(self._masks_NHW[indices], dtype=np.int64)
        return torch.from_numpy(images_NCHW), torch.from_numpy(masks_NHW), torch.tensor(indices)


class EpochDataset(Dataset[Any]):
    """The images of one epoch, of which some may come several times; each time knows which one it is."""

    def __init__(self, images: SplitDataset, rows: Sequence[int]) -> None:
        self._images, self._rows = images, rows
        times: Counter[int] = Counter()
        self._occurrences = []
        for row in rows:
            self._occurrences.append(times[row])
            times[row] += 1
        self._times = times

    def __len__(self) -> int:
        return len(self._rows)

    def __getitems__(self, positions: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return images_NCHW, masks_NHW and indices_N in the split; occurrences_N, counted from 0, of times_N."""
        rows = [self._rows[position] for position in positions]
        occurrences_N = torch.tensor([self._occurrences[position] for position in positions])
        return (
            *self._images.__getitems__(rows),
            occurrences_N,
            torch.tensor([self._times[row] for row in rows]),
        )


def as_is(batch: Any) -> Any:
    """Collate nothing: the data set gives whole batches."""
    return batch
