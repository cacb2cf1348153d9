"""The answers of an engine, to be looked at: N images, H rows, W columns."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError

ANSWERS_FILE = "answers.npz"

_LEVEL = 1
"""Of zlib: masks are nearly all zeros once each row is held against the one above."""


@dataclass
class Answers:
    """Classes of images, [N], or of their pixels, [N, H, W]; each image is packed by itself, at its full size."""

    kind: np.dtype[Any]
    """uint8, or uint16 for more than 256 classes."""
    size: tuple[int, ...] = ()
    """(H, W) of masks."""
    packed: list[bytes] = field(default_factory=list)
    """Equal answers are equal bytes."""

    @classmethod
    def of(cls, num_classes: int) -> "Answers":
        """Return an empty collection."""
        return cls(np.min_scalar_type(num_classes - 1))

    def __len__(self) -> int:
        return len(self.packed)

    def add(self, answers: NDArray[Any]) -> None:
        """Pack the answers for some more images, [n] or [n, H, W]."""
        self.size = answers.shape[1:]
        for one in answers.astype(self.kind):
            if self.size:
                one[1:] ^= one[:-1].copy()
            self.packed.append(zlib.compress(one.tobytes(), _LEVEL))

    def unpack(self, place: int) -> NDArray[Any]:
        """Return the answer for an image: a number [], or a mask [H, W]."""
        one = np.frombuffer(zlib.decompress(self.packed[place]), self.kind).reshape(self.size)
        return np.bitwise_xor.accumulate(one, axis=0, dtype=self.kind) if self.size else one

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return map(self.unpack, range(len(self)))


def write_answers(path: Path, answers: Answers) -> None:
    """Write the answers for all images of a split."""
    np.savez(
        path,
        allow_pickle=False,
        kind=np.zeros(0, answers.kind),
        size=np.array(answers.size, np.int64),
        lengths=np.array([len(one) for one in answers.packed], np.int64),
        packed=np.frombuffer(b"".join(answers.packed), np.uint8),
    )


def read_answers(path: Path) -> Answers:
    """Return what `write_answers` wrote; raise ArtifactError if it is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            content, ends = arrays["packed"].tobytes(), np.cumsum(arrays["lengths"]).tolist()
            size = tuple(arrays["size"].tolist())
            kind = arrays["kind"].dtype
    except (OSError, ValueError, KeyError, EOFError, BadZipFile, zlib.error) as error:
        raise ArtifactError(f"{path}: no answers ({error!r}). Run validate again.") from error
    packed = [content[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    return Answers(kind, size, packed)
