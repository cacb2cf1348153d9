"""INT8 ranges from calibration images: collect statistics once, then choose ranges by one of several calibrators.

N images, C channels, H rows, W columns.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, TensorProto, helper

from tasks.core.errors import ArtifactError, DataError
from tasks.parts.data.lazy_array import part_of
from tasks.parts.onnx_session import open_session
from tasks.parts.quantization.config import Activations, Calibrator
from tasks.parts.quantization.qdq import TensorRange, class_logits

logger = logging.getLogger(__name__)

NUM_BINS = 2048
_RANGE_OF_ZEROS = TensorRange(0.0, 1.0)
_FEWEST_BINS = 128
_BINS_PER_STEP = 8
_VALUES_AT_ONCE = 1 << 15
_MAX_BYTES = 1 << 29
"""Limit for the activations that are read at once; fewer images per run do not change the statistics."""


@dataclass(frozen=True)
class TensorStatistics:
    """Statistics of one tensor over all calibration images."""

    low: float
    high: float
    counts: NDArray[np.int64]
    """Histogram of the magnitudes over [0, amax] in NUM_BINS equal bins."""

    @property
    def amax(self) -> float:
        """Largest magnitude in the tensor."""
        return max(abs(self.low), abs(self.high))


def check_images(images_NCHW: NDArray[np.float32], max_abs: float) -> None:
    """Raise DataError for normalised images that would silently distort calibration.

    One pixel of 1e6 widens a range so much that everything else becomes 0.
    """
    if not np.isfinite(images_NCHW).all():
        raise DataError("calibration images hold NaN or infinite values. Check mean and std in the manifest.")
    largest = float(np.abs(images_NCHW).max())
    if largest > max_abs:
        raise DataError(
            f"calibration images reach {largest:.3g} after normalisation, expected at most {max_abs} "
            "(quantize_ptq.max_abs_input). Check mean and std in the manifest, or outliers in the images."
        )


def without_blank_images(images_NHWC: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Leave out images of one value only, such as black frames of a video, with a warning.

    Raises DataError if all are such. Their activations would count as much as those of real images.
    """
    kept = [number for number, image in enumerate(images_NHWC) if np.ptp(image, axis=(0, 1)).any()]
    num_blank = len(images_NHWC) - len(kept)
    if num_blank and not kept:
        raise DataError(
            f"all {num_blank} calibration images hold one value only, expected real images. Name some in "
            "calibration.txt, or raise prepare_data.folder.num_calibration."
        )
    if not num_blank:
        return images_NHWC
    logger.warning(
        "%d of %d calibration images hold one value only, such as black frames: left out (first: number %d)",
        num_blank,
        len(images_NHWC),
        next(number for number in range(len(images_NHWC)) if number not in kept),
    )
    return part_of(images_NHWC, np.array(kept))


def collect_statistics(
    model: ModelProto, batches: Callable[[], Iterable[NDArray[np.float32]]], names: Sequence[str]
) -> dict[str, TensorStatistics]:
    """Run the float graph over all batches twice: first for the extremes of the named tensors, then for histograms.

    Raises ArtifactError for a tensor that is not finite.
    """
    run = _tensor_reader(model, names)
    lows = dict.fromkeys(names, np.inf)
    highs = dict.fromkeys(names, -np.inf)
    for images_NCHW in batches():
        for name, values in run(images_NCHW):
            lows[name] = float(np.minimum(lows[name], values.min()))  # keeps NaN, unlike min()
            highs[name] = float(np.maximum(highs[name], values.max()))
    for name in names:
        if not np.isfinite([lows[name], highs[name]]).all():
            raise ArtifactError(
                f"tensor '{name}': range [{lows[name]}, {highs[name]}] over the calibration images, expected "
                "finite numbers. Check the checkpoint that the graph was exported from."
            )
    counts = {name: np.zeros(NUM_BINS, dtype=np.int64) for name in names}
    for images_NCHW in batches():
        for name, values in run(images_NCHW):
            amax = max(abs(lows[name]), abs(highs[name]))
            counts[name] += _histogram(values, amax)
    return {name: TensorStatistics(lows[name], highs[name], counts[name]) for name in names}


def shares_beyond(
    model: ModelProto, batches: Iterable[NDArray[np.float32]], limits: Mapping[str, float]
) -> dict[str, float]:
    """Run the float graph over all batches; return the share of each tensor's magnitudes above its limit, 0..1."""
    run = _tensor_reader(model, list(limits))
    beyond, sizes = dict.fromkeys(limits, 0), dict.fromkeys(limits, 0)
    for images_NCHW in batches:
        for name, values in run(images_NCHW):
            limit = limits[name]
            beyond[name] += int(np.count_nonzero(values > limit) + np.count_nonzero(values < -limit))
            sizes[name] += values.size
    return {name: beyond[name] / max(1, sizes[name]) for name in limits}


def collect_channel_magnitudes(
    model: ModelProto, batches: Iterable[NDArray[np.float32]], axes: Mapping[str, int]
) -> dict[str, NDArray[np.float32]]:
    """Run the float graph over all batches; return the largest magnitudes [C] of each tensor along its axis."""
    run = _tensor_reader(model, list(axes))
    found: dict[str, NDArray[np.float32]] = {}
    for images_NCHW in batches:
        for name, values in run(images_NCHW):
            others = tuple(axis for axis in range(values.ndim) if axis != axes[name])
            magnitude_C = np.maximum(values.max(axis=others), -values.min(axis=others))
            found[name] = np.maximum(found.get(name, magnitude_C), magnitude_C)
    return found


def choose_ranges(
    model: ModelProto,
    statistics: Mapping[str, TensorStatistics],
    calibrator: Calibrator,
    *,
    percentile: float,
    activations: Activations,
) -> dict[str, TensorRange]:
    """Return the range of each tensor.

    That of class logits has all values, because clipped ones would be equal. A tensor that was always 0 (of a layer
    that died in training) gets the range 0..1, so that its layers can run in INT8.
    """
    logits = class_logits(model)
    return {
        name: choose_range(
            seen,
            Calibrator.minmax if name in logits else calibrator,
            percentile=percentile,
            activations=activations,
        )
        if seen.amax
        else _RANGE_OF_ZEROS
        for name, seen in statistics.items()
    }


def choose_range(
    statistics: TensorStatistics,
    calibrator: Calibrator,
    *,
    percentile: float,
    activations: Activations = Activations.uint8,
) -> TensorRange:
    """Return the range that a calibrator chooses for a tensor; mse and entropy go by the levels of `activations`."""
    match calibrator:
        case Calibrator.minmax:
            amax = statistics.amax
        case Calibrator.percentile:
            amax = _percentile_amax(statistics, percentile)
        case Calibrator.entropy:
            amax = _entropy_amax(statistics, activations)
        case Calibrator.mse:
            amax = _mse_amax(statistics, activations)
    return _limits(statistics, amax)


def _limits(statistics: TensorStatistics, amax: float) -> TensorRange:
    return TensorRange(low=max(statistics.low, -amax), high=min(statistics.high, amax))


def _step(statistics: TensorStatistics, amax: float, activations: Activations) -> float:
    """Return the distance of two levels: of uint8 over the range of the tensor, of int8 over twice its magnitude."""
    limits = _limits(statistics, amax)
    return float(limits.int8() if activations is Activations.int8 else limits.uint8()[0])


def _tensor_reader(
    model: ModelProto, names: Sequence[str]
) -> Callable[[NDArray[np.float32]], Iterable[tuple[str, NDArray[Any]]]]:
    """Return a function that maps one batch to (name, values) of the named tensors."""
    marked = ModelProto()
    marked.CopyFrom(model)
    image = model.graph.input[0].name
    outputs = {value.name for value in model.graph.output}
    for name in names:
        if name != image and name not in outputs:
            marked.graph.output.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, None))
    session = open_session(marked)
    inner = [name for name in names if name != image]
    at_once = model.graph.input[0].type.tensor_type.shape.dim[0].dim_value  # 0 for an open batch

    def run(images_NCHW: NDArray[np.float32]) -> Iterable[tuple[str, NDArray[Any]]]:
        nonlocal at_once
        if image in names:
            yield image, images_NCHW
        if inner:  # an empty list of names means all outputs to ONNX Runtime
            if not at_once:
                at_once = _images_at_once(session.run(inner, {image: images_NCHW[:1]}))
            for start in range(0, len(images_NCHW), at_once):
                arrays = session.run(inner, {image: images_NCHW[start : start + at_once]})
                yield from zip(inner, arrays, strict=True)

    return run


def _images_at_once(arrays_of_one_image: Sequence[NDArray[Any]]) -> int:
    """Return how many images fit into the limit.

    The shapes in the graph do not tell: tokens and windows may be folded into an axis of the batch, which is open.
    """
    return max(1, _MAX_BYTES // max(1, sum(array.nbytes for array in arrays_of_one_image)))


def _histogram(values: NDArray[Any], amax: float) -> NDArray[np.int64]:
    """Count the magnitudes in blocks, which stay in the cache of the CPU."""
    counts = np.zeros(NUM_BINS + 1, dtype=np.int64)
    if amax > 0:
        flat, bins_per_unit = values.reshape(-1), np.float32(NUM_BINS / amax)
        for start in range(0, flat.size, _VALUES_AT_ONCE):
            bins = np.abs(flat[start : start + _VALUES_AT_ONCE]) * bins_per_unit
            counts += np.bincount(bins.astype(np.intp), minlength=NUM_BINS + 1)
    counts[-2] += counts[-1]  # amax itself
    return counts[:-1]


def _percentile_amax(statistics: TensorStatistics, percentile: float) -> float:
    """Return the upper edge of the first bin below which `percentile` % of all magnitudes lie."""
    cumulated = np.cumsum(statistics.counts)
    if cumulated[-1] == 0:
        return statistics.amax
    index = int(np.searchsorted(cumulated, cumulated[-1] * percentile / 100))
    return statistics.amax * min(index + 1, NUM_BINS) / NUM_BINS


def _mse_amax(statistics: TensorStatistics, activations: Activations) -> float:
    """Return the threshold with the least mean squared error between the magnitudes and their levels.

    A higher threshold increases the rounding error and reduces clipping; each bin counts with its centre.
    """
    if statistics.counts.sum() == 0:
        return statistics.amax
    centres = (np.arange(NUM_BINS) + 0.5) * statistics.amax / NUM_BINS
    best_amax, least_error = statistics.amax, np.inf
    for num_kept in range(_FEWEST_BINS, NUM_BINS + 1, _BINS_PER_STEP):
        amax = statistics.amax * num_kept / NUM_BINS
        step = _step(statistics, amax, activations)
        rounded = np.rint(np.minimum(centres, amax) / step) * step
        error = float(statistics.counts @ np.square(centres - rounded))
        if error < least_error:
            best_amax, least_error = amax, error
    return best_amax


def _entropy_amax(statistics: TensorStatistics, activations: Activations) -> float:
    """Return the threshold with the least KL divergence between the float histogram and its 8-bit version.

    Migacz, "8-bit Inference with TensorRT", GTC 2017, slides 26-37. The bin of the smallest magnitudes is set
    to the next one: ReLU fills it with zeros, which any range represents.
    """
    counts = statistics.counts.astype(np.float64)
    counts[0] = counts[1]
    if counts.sum() == 0:
        return statistics.amax
    best_amax, least_divergence = statistics.amax, np.inf
    for num_kept in range(_FEWEST_BINS, NUM_BINS + 1, _BINS_PER_STEP):
        amax = statistics.amax * num_kept / NUM_BINS
        num_levels = round(amax / _step(statistics, amax, activations)) + 1
        if num_kept < num_levels:
            continue
        divergence = _divergence(counts, num_kept, num_levels)
        if divergence < least_divergence:
            best_amax, least_divergence = amax, divergence
    return best_amax


def _divergence(counts: NDArray[np.float64], num_kept: int, num_levels: int) -> float:
    """Return KL(P || Q): P the first bins, with clipped values in the last one; Q these bins in 8-bit resolution."""
    kept = counts[:num_kept]
    reference = kept.copy()
    reference[-1] += counts[num_kept:].sum()
    level = np.arange(num_kept) * num_levels // num_kept
    is_filled = reference > 0
    sums = np.bincount(level, weights=kept, minlength=num_levels)
    num_filled = np.bincount(level, weights=is_filled, minlength=num_levels)
    spread = np.where(is_filled, (sums / np.maximum(num_filled, 1))[level], 0.0)
    if spread.sum() == 0:
        return float(np.inf)
    p, q = reference / reference.sum(), spread / spread.sum()
    shared = p > 0
    return float((p[shared] * np.log(p[shared] / np.maximum(q[shared], 1e-12))).sum())
