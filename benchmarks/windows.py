"""Measure how windows of a large image are put together: each pixel owned by one window, or blended.

``python -m benchmarks.windows [--variant pruned_qat]`` after a run of the pipeline. Large images are mosaics of 4 x 4
scenes of the validation split, so that their labels are known. The engine that gives scores for windows of its size
is run with each overlap; then each pixel takes the class of the window in which it lies most central (the rule of
bundles and of validate), or that of the mean probability of all windows in which it lies, alike or weighted by how
central it lies in each. The same mosaics are stretched to one window, which is how an engine answers a large image
without windows. Prints a table and writes ``benchmarks/results/windows.json``.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.execute import ARTIFACTS
from tasks.core.reports import write_json
from tasks.parts.data.comparison import ImageResults, compare_with_labels, join_results, score_loss
from tasks.parts.data.dataset import normalise, open_split
from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.manifest import plain_engine
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.reading.sizes import fit_image, restore_mask
from tasks.parts.reading.windows import Window, cover, cut_image

RESULTS = Path(__file__).parent / "results" / "windows.json"
DATA = ARTIFACTS / "prepare_data" / "dataset"
TARGET = "cpu_onnxruntime"
SIDE, OVERLAPS = 4, (0, 8, 16, 32)

Array = NDArray[Any]
Scores = Callable[[Array], Array]
"""Takes uint8 [N, H, W, C] of the engine's size; returns logits [N, K, H, W]."""
Weights = Callable[[int, int], Array]
"""Takes height and width of a window; returns the weight of each of its pixels."""


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--variant", default="pruned_qat")
    variant = parser.parse_args().variant
    engine = plain_engine(ARTIFACTS / "build_engine" / variant / TARGET / "engine")
    with open_engine(engine) as runner:
        card, batch = runner.manifest.card, runner.manifest.target.max_batch

        def scores(frames_NHWC: Array) -> Array:
            parts = [frames_NHWC[start : start + batch] for start in range(0, len(frames_NHWC), batch)]
            return np.concatenate(
                [np.array(runner.infer(normalise(part, card.mean, card.std))) for part in parts]
            )

        rows = measure(scores, card)
    for row in rows:
        print(
            f"{row['overlap']:>3} {row['rule']:<22} {row['num_windows']:>5} windows  mIoU {row['miou']:.4f}  "
            f"against owned {row['change']:+.4f} ({row['change_low']:+.4f} to {row['change_high']:+.4f})"
        )
    write_json(
        RESULTS,
        {
            "variant": variant,
            "target": TARGET,
            "cpu": read_cpu_model(),
            "versions": {name: version(name) for name in ("onnxruntime", "numpy", "pillow")},
            "date": date.today().isoformat(),
            "rows": rows,
        },
    )


def measure(scores: Scores, card: InputCard) -> list[dict[str, Any]]:
    """Return a row for each overlap and rule."""
    mosaics = list(make_mosaics(*open_split(DATA, "val")))
    rows = []
    for overlap in OVERLAPS:
        windows = cover_all(mosaics, card, overlap)
        logits = [scores(cut_all(image_HWC, windows, card)) for image_HWC, _ in mosaics]
        results = {
            "owned": judge(
                [owned(part, windows, image.shape) for part, (image, _) in zip(logits, mosaics, strict=True)],
                mosaics,
                card,
            ),
        }
        for name, weights in (("mean of all", uniform), ("mean, central first", central)) if overlap else ():
            masks = [
                blended(part, windows, image.shape, weights)
                for part, (image, _) in zip(logits, mosaics, strict=True)
            ]
            results[name] = judge(masks, mosaics, card)
        rows += [
            row_of(overlap, name, found, results["owned"], len(windows)) for name, found in results.items()
        ]
    stretched = judge([stretch(image, scores, card) for image, _ in mosaics], mosaics, card)
    rows.append(row_of(0, "stretched to one window", stretched, stretched, 1))
    return rows


def make_mosaics(images_NHWC: Array, masks_NHW: Array) -> Iterator[tuple[Array, Array]]:
    """Yield images and masks of SIDE x SIDE scenes each."""
    for start in range(0, len(images_NHWC) - SIDE * SIDE + 1, SIDE * SIDE):
        rows = [slice(start + SIDE * row, start + SIDE * (row + 1)) for row in range(SIDE)]
        yield (
            np.concatenate([np.concatenate(list(images_NHWC[row]), axis=1) for row in rows]),
            np.concatenate([np.concatenate(list(masks_NHW[row]), axis=1) for row in rows]),
        )


def cover_all(mosaics: Sequence[tuple[Array, Array]], card: InputCard, overlap: int) -> tuple[Window, ...]:
    """Return the windows of one mosaic; all have one size."""
    height, width = mosaics[0][1].shape
    size = {"window_height": card.height, "window_width": card.width}
    return cover(height, width, **size, overlap=overlap, is_owned_once=True)


def cut_all(image_HWC: Array, windows: Sequence[Window], card: InputCard) -> Array:
    """Return the windows as frames."""
    size = {"height": card.height, "width": card.width}
    return np.stack([cut_image(image_HWC, window, **size) for window in windows])


def owned(logits_NKHW: Array, windows: Sequence[Window], shape: tuple[int, ...]) -> Array:
    """Return the mask in which each pixel is that of the window that owns it."""
    mask_HW = np.zeros(shape[:2], np.uint8)
    for window, answer_HW in zip(windows, logits_NKHW.argmax(axis=1), strict=True):
        rows, columns = window.rows, window.columns
        mask_HW[rows.first : rows.end, columns.first : columns.end] = answer_HW[
            rows.first - rows.start : rows.end - rows.start,
            columns.first - columns.start : columns.end - columns.start,
        ]
    return mask_HW


def blended(logits_NKHW: Array, windows: Sequence[Window], shape: tuple[int, ...], weights: Weights) -> Array:
    """Return the mask of the weighted mean probability."""
    num_classes, height, width = logits_NKHW.shape[1:]
    powers_NKHW = np.exp(logits_NKHW - logits_NKHW.max(axis=1, keepdims=True))
    weighted_NKHW = powers_NKHW / powers_NKHW.sum(axis=1, keepdims=True) * weights(height, width)
    sums_KHW = np.zeros((num_classes, *shape[:2]))
    for window, part_KHW in zip(windows, weighted_NKHW, strict=True):
        top, left = window.rows.start, window.columns.start
        sums_KHW[:, top : top + height, left : left + width] += part_KHW
    mask_HW: Array = sums_KHW.argmax(axis=0).astype(np.uint8)
    return mask_HW


def uniform(height: int, width: int) -> Array:
    """Weigh all pixels of a window alike."""
    return np.ones((height, width))


def central(height: int, width: int) -> Array:
    """Weigh a pixel by its distance from the border of the window."""
    rows, columns = (np.minimum(np.arange(size), np.arange(size)[::-1]) + 1.0 for size in (height, width))
    return np.minimum.outer(rows, columns)


def stretch(image_HWC: Array, scores: Scores, card: InputCard) -> Array:
    """Return the mask of the image as one window."""
    fitted_HWC = fit_image(image_HWC, height=card.height, width=card.width, mode="resize")
    [mask_HW] = scores(fitted_HWC[None]).argmax(axis=1).astype(np.uint8)
    return restore_mask(mask_HW, size=image_HWC.shape[:2], mode="resize")


def judge(masks: Sequence[Array], mosaics: Sequence[tuple[Array, Array]], card: InputCard) -> ImageResults:
    """Return what is right in each mosaic."""
    parts = [
        compare_with_labels(mask_HW[None], labels_HW[None], len(card.classes), Task.segmentation)
        for mask_HW, (_, labels_HW) in zip(masks, mosaics, strict=True)
    ]
    return join_results(parts, np.arange(len(parts)))


def row_of(
    overlap: int, rule: str, found: ImageResults, base: ImageResults, num_windows: int
) -> dict[str, Any]:
    """Return the row of a rule, with its difference from owned pixels and the 95 % interval of that."""
    loss = score_loss(found, base)
    return {
        "overlap": overlap,
        "rule": rule,
        "num_windows": num_windows,
        "miou": found.score,
        "change": -loss.rel_loss * base.score,
        "change_low": -loss.high * base.score,
        "change_high": -loss.low * base.score,
    }


if __name__ == "__main__":
    main()
