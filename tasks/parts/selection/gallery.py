"""Images on which the engines differ, with their answers side by side: N images, H rows, W columns, C channels.

Images are chosen by the masks at their full size, and shown smaller: images as means over areas, masks by the class
at the centre of each area.
"""

import base64
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.reports import read_report
from tasks.parts.data.accuracy import AccuracyReport
from tasks.parts.data.answers import ANSWERS_FILE, Answers, read_answers
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.dataset import open_images, open_labels
from tasks.parts.data.input_card import Task
from tasks.parts.data.metrics import NO_LABEL
from tasks.parts.selection.engine_row import EngineRow
from tasks.parts.selection.stage_folders import StageFolders

_MOST_ENGINES = 30
_MOST_IMAGES = 12
_JPEG_QUALITY = 80
_SIDES = (256, 192, 128, 96, 64)
"""Longer sides of the pictures, in pixels: the largest that `_MOST_BYTES` has room for, or the last."""
_MOST_BYTES = 700_000
"""What the pictures and masks of a page may take, so that it stays below 2 MB."""


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
    split = read_report(AccuracyReport, _file(folders, shown[0]).parent).split
    for side in _SIDES:
        gallery = _draw(answers, chosen, data, split, side)
        if len(json.dumps(gallery)) <= _MOST_BYTES:
            break
    return gallery


def _draw(
    answers: Mapping[str, Answers], chosen: Sequence[int], data: Path, split: str, side: int
) -> dict[str, Any]:
    """Return the gallery with pictures whose longer side has at most `side` pixels."""
    is_mask = bool(next(iter(answers.values())).size)
    images = open_images(data, split)
    labels = open_labels(data, split, Task.segmentation if is_mask else Task.classification)
    height, width = _shown_size(images.shape[1:3], side)
    texts: list[str] = []
    places: dict[tuple[int, bytes], int] = {}

    def number(classes: NDArray[Any], key: tuple[int, bytes]) -> int:
        if key not in places:
            places[key] = len(texts)
            texts.append(_runs(_nearest(classes, height, width).ravel() if is_mask else classes.reshape(1)))
        return places[key]

    return {
        "split": split,
        "num_images": len(next(iter(answers.values()))),
        "height": height if is_mask else 1,
        "width": width if is_mask else 1,
        "places": list(chosen),
        "pictures": [_picture(images[place], height, width) for place in chosen],
        "truth": [number(np.asarray(labels[place]), (place, b"")) for place in chosen],
        "answers": {
            name: [number(array.unpack(place), (place, array.packed[place])) for place in chosen]
            for name, array in answers.items()
        },
        "runs": texts,
        "no_class": IGNORE_INDEX if is_mask else NO_LABEL,
    }


def _file(folders: StageFolders, row: EngineRow) -> Path:
    return folders.of(row.variant, row.target)["validate"] / ANSWERS_FILE


def _choose(answers: Mapping[str, Answers], reference: str) -> list[int]:
    """Return the places of the images, those with the largest differences first."""
    shares = [_differences(answers, reference, place) for place in range(len(next(iter(answers.values()))))]
    first_N, any_N = np.array(shares).reshape(-1, 2).T
    found: dict[int, float] = {}
    for share_N, most in ((first_N, _MOST_IMAGES // 2), (any_N, _MOST_IMAGES)):
        for place in np.argsort(-share_N, kind="stable"):
            if share_N[place] > 0 and len(found) < most:
                found.setdefault(int(place), float(any_N[place]))
    return sorted(found, key=lambda place: -found[place])


def _differences(answers: Mapping[str, Answers], reference: str, place: int) -> tuple[float, float]:
    """Return on which share of an image the first engine differs from the reference, and any two differ."""
    first = next(iter(answers))
    base = reference if reference in answers else first
    unpacked = {array.packed[place]: array for array in answers.values()}  # equal answers once
    if len(unpacked) == 1:
        return 0.0, 0.0
    masks = {packed: array.unpack(place) for packed, array in unpacked.items()}
    of_first, of_base = (masks[answers[name].packed[place]] for name in (first, base))
    differs = np.any([mask != of_base for mask in masks.values()], axis=0)
    return float(np.mean(of_first != of_base)), float(np.mean(differs))


def _runs(classes: NDArray[Any]) -> str:
    """Return classes in the order of the pixels as ``3x17 0x5``: 17 pixels of class 3, then 5 of class 0."""
    ends = np.flatnonzero(np.diff(classes)) + 1
    starts = np.concatenate([[0], ends])
    lengths = np.diff(np.concatenate([starts, [classes.size]]))
    return " ".join(f"{int(classes[start])}x{length}" for start, length in zip(starts, lengths, strict=True))


def _shown_size(size: tuple[int, ...], side: int) -> tuple[int, int]:
    """Return height and width of a picture whose longer side has at most `side` pixels; none is enlarged."""
    scale = min(1.0, side / max(size))
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _nearest(mask_HW: NDArray[Any], height: int, width: int) -> NDArray[Any]:
    """Return the class at the centre of each of height x width equal areas."""
    rows, columns = (
        ((np.arange(small) + 0.5) * large / small).astype(int)
        for small, large in zip((height, width), mask_HW.shape, strict=True)
    )
    return mask_HW[np.ix_(rows, columns)]


def _picture(image_HWC: NDArray[np.uint8], height: int, width: int) -> str:
    """Return a JPEG as a data URI, of the first three bands, or of the first in grey if there are fewer."""
    from PIL import Image

    bands = np.asarray(image_HWC[..., :3] if image_HWC.shape[-1] >= 3 else image_HWC[..., 0])
    picture = Image.fromarray(np.ascontiguousarray(bands)).resize((width, height), Image.Resampling.BOX)
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=_JPEG_QUALITY)
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
