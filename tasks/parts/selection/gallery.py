"""Images on which the engines differ, with their answers side by side: N images, H rows, W columns, C channels."""

import base64
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.reports import read_report
from tasks.parts.data.accuracy import AccuracyReport
from tasks.parts.data.answers import ANSWERS_FILE, read_answers, shrink
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.dataset import open_images, open_labels
from tasks.parts.data.input_card import Task
from tasks.parts.data.metrics import NO_LABEL
from tasks.parts.selection.engine_row import EngineRow
from tasks.parts.selection.stage_folders import StageFolders

_MOST_ENGINES = 30
_MOST_IMAGES = 12
_JPEG_QUALITY = 80


def make_gallery(
    rows: Sequence[EngineRow], folders: StageFolders, data: Path, reference: str
) -> dict[str, Any] | None:
    """Return the images on which the engines in `rows` differ most, and what each of them answers there.

    Masks are written as runs of equal classes (see `_runs`), equal ones once. Half of the images are those on which
    the first engine differs most from the reference, the others those on which any two differ most. None if the model
    has no classes, or the engines differ nowhere.
    """
    shown = [row for row in rows if _file(folders, row).is_file()][:_MOST_ENGINES]
    answers = {row.name: read_answers(_file(folders, row)) for row in shown}
    if len(answers) < 2:
        return None
    chosen = _choose(answers, reference)
    if not chosen:
        return None
    is_mask = next(iter(answers.values())).ndim == 3
    split = read_report(AccuracyReport, _file(folders, shown[0]).parent).split
    images = open_images(data, split)
    labels = open_labels(data, split, Task.segmentation if is_mask else Task.classification)
    texts: dict[str, int] = {}

    def number(classes: NDArray[Any]) -> int:
        return texts.setdefault(_runs(classes.ravel()), len(texts))

    def truth(place: int) -> NDArray[Any]:
        one = labels[place : place + 1]
        return np.asarray(shrink(one) if is_mask else one)

    small = {place: shrink(images[place : place + 1])[0] for place in chosen}
    height, width = next(iter(answers.values())).shape[1:] if is_mask else (1, 1)
    return {
        "split": split,
        "num_images": len(images),
        "height": height,
        "width": width,
        "places": chosen,
        "pictures": [_picture(small[place]) for place in chosen],
        "truth": [number(truth(place)) for place in chosen],
        "answers": {name: [number(array[place]) for place in chosen] for name, array in answers.items()},
        "runs": list(texts),
        "no_class": IGNORE_INDEX if is_mask else NO_LABEL,
    }


def _file(folders: StageFolders, row: EngineRow) -> Path:
    return folders.of(row.variant, row.target)["validate"] / ANSWERS_FILE


def _choose(answers: Mapping[str, NDArray[np.int64]], reference: str) -> list[int]:
    """Return the places of the images, those with the largest differences first."""
    arrays = [array.reshape(len(array), -1) for array in answers.values()]
    base = answers[reference].reshape(arrays[0].shape) if reference in answers else arrays[0]
    first_N = np.mean(arrays[0] != base, axis=1)
    any_N = np.mean(np.any([array != base for array in arrays], axis=0), axis=1)
    found: dict[int, float] = {}
    for share_N, most in ((first_N, _MOST_IMAGES // 2), (any_N, _MOST_IMAGES)):
        for place in np.argsort(-share_N, kind="stable"):
            if share_N[place] > 0 and len(found) < most:
                found.setdefault(int(place), float(any_N[place]))
    return sorted(found, key=lambda place: -found[place])


def _runs(classes: NDArray[Any]) -> str:
    """Return classes in the order of the pixels as ``3x17 0x5``: 17 pixels of class 3, then 5 of class 0."""
    ends = np.flatnonzero(np.diff(classes)) + 1
    starts = np.concatenate([[0], ends])
    lengths = np.diff(np.concatenate([starts, [classes.size]]))
    return " ".join(f"{int(classes[start])}x{length}" for start, length in zip(starts, lengths, strict=True))


def _picture(image_HWC: NDArray[np.uint8]) -> str:
    """Return a JPEG as a data URI; of other numbers of channels than three, the first one in grey."""
    from PIL import Image

    picture = Image.fromarray(np.asarray(image_HWC if image_HWC.shape[-1] == 3 else image_HWC[..., 0]))
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
