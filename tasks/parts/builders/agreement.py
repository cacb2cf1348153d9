"""Compare an engine with the graph or network that it was built from, on calibration images."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.core.errors import ArtifactError, BuildFailed
from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.engines.frame_engine.pixels import lead_of_first
from tasks.parts.engines.manifest import EngineManifest, FloatArray
from tasks.parts.engines.target import Target
from tasks.parts.onnx_graphs.signal_to_noise import difference

NUM_PROBE_IMAGES = 4
NUM_MORE_IMAGES = 16
"""Images that tell how large values usually are: for some images a network may answer hardly anything."""
_MAX_BYTES = 1 << 30
"""Memory that the logits of one inference, or their comparison, may take."""
_BYTES_PER_LOGIT, _BYTES_PER_COMPARED = 8, 24
"""float32 from the engine and a copy of it; three times float64."""

_NEAR_TIE = 0.05
"""Answers of two engines may differ where the logits of both classes differ by less than this share of the range."""
_MOST_WRONG = 0.001
"""Share of the answers that may differ elsewhere."""


def probe_batches(target: Target) -> list[int]:
    """Return the batches that an engine is tried with: 1, 2 and the largest; of profiles, smallest, opt and largest.

    The first profile that fits a batch runs it. So where profiles overlap, the smallest batch that reaches a profile
    is one of them.
    """
    batches = {1, min(2, target.max_batch), target.max_batch}
    profiles = target.tensorrt.profiles_for(target.max_batch) if target.tensorrt else []
    taken: set[int] = set()
    for profile in profiles:
        reached = set(range(profile.min, profile.max + 1)) - taken
        batches |= {profile.min, profile.opt, profile.max, *sorted(reached)[:1]}
        taken |= reached
    return sorted(batches)


def fitting_batches(target: Target, card: InputCard) -> list[int]:
    """Return those of `probe_batches` whose logits fit into memory; the largest that do in place of larger ones."""
    batches, most = probe_batches(target), _images_that_fit(card, _BYTES_PER_LOGIT)
    fitting = {batch for batch in batches if batch <= most} or {batches[0]}
    if target.tensorrt is None:  # a profile may begin above
        fitting.add(min(target.max_batch, most))
    return sorted(fitting)


def _images_that_fit(card: InputCard, bytes_per_logit: int) -> int:
    return max(1, _MAX_BYTES // (bytes_per_logit * math.prod(card.logits_shape)))


def _draws(target: Target, card: InputCard, num_images: int) -> dict[int, list[NDArray[np.intp]]]:
    """Return, by batch, which of a few images to try an engine on: each alone, then all in changing order."""
    random = np.random.default_rng(0)
    draws = {
        batch: [np.concatenate([random.permutation(num_images) for _ in range(0, batch, num_images)])[:batch]]
        for batch in fitting_batches(target, card)
    }
    return {**draws, 1: list(np.arange(num_images)[:, None])}


def _joined(drawn: Sequence[NDArray[np.intp]], most: int) -> Iterator[list[NDArray[np.intp]]]:
    """Yield draws of one size together, of at most so many images, one draw at least."""
    step = max(1, most // len(drawn[0]))
    for first in range(0, len(drawn), step):
        yield list(drawn[first : first + step])


def _groups(
    drawn: NDArray[np.intp], found: NDArray[Any], size: int = NUM_PROBE_IMAGES
) -> Iterator[tuple[NDArray[np.intp], NDArray[Any]]]:
    """Yield what was drawn and found a few images at a time: little memory, and one wrong image does not get lost."""
    for first in range(0, len(drawn), size):
        yield drawn[first : first + size], found[first : first + size]


def _agreement_db(
    expected_NCHW: FloatArray, drawn: NDArray[np.intp], found_NCHW: FloatArray, usual_power: float
) -> float:
    """Return the lowest signal-to-noise ratio of groups of images against what is expected of those drawn.

    A signal has at least the usual power: where a network answers next to nothing, noise is all there is.
    """
    size = max(1, min(NUM_PROBE_IMAGES, _MAX_BYTES // (_BYTES_PER_COMPARED * expected_NCHW[0].size)))
    return min(
        difference(expected_NCHW[some], found, usual_power).sqnr_db
        for some, found in _groups(drawn, found_NCHW, size)
    )


def _of_each(
    expected_NCHW: FloatArray, drawn: NDArray[np.intp], found_NCHW: FloatArray, usual_power: float
) -> list[tuple[int, float]]:
    """Return each image drawn, and its signal-to-noise ratio."""
    return [
        (int(image), difference(expected_NCHW[image], found, usual_power).sqnr_db)
        for image, found in zip(drawn, found_NCHW, strict=True)
    ]


def _agreements_of_steady(
    of_images: Mapping[int, Sequence[tuple[int, float]]], floor_db: float
) -> dict[int, float]:
    """Return batch -> lowest ratio of the images that agree in the smallest batch; none if more than half do not."""
    smallest = of_images[min(of_images)]
    differing = {image for image, found_db in smallest if found_db < floor_db}
    if 2 * len(differing) > len({image for image, _ in smallest}):
        return {}
    steady = {
        batch: [found_db for image, found_db in found if image not in differing]
        for batch, found in of_images.items()
    }
    return {batch: min(found) for batch, found in steady.items() if found}


def read_probe_images(file: Path, card: InputCard, most: int = NUM_PROBE_IMAGES) -> FloatArray:
    """Return the frames of `read_probe_frames`, normalised for a model."""
    from tasks.parts.data.dataset import normalise

    return normalise(read_probe_frames(file, card, most), card.mean, card.std)


def read_probe_frames(file: Path, card: InputCard, most: int = NUM_PROBE_IMAGES) -> NDArray[np.uint8]:
    """Return a few images of a .npy file, uint8 [N, H, W, C], evenly spread over it.

    They are calibration images, because beyond the calibrated ranges a right INT8 engine may keep what its graph
    clips. Raises ArtifactError for a file that is damaged, empty or of images of another size.
    """
    try:
        images_NHWC = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ArtifactError(f"{file}: cannot be read ({error}). Run prepare_data again.") from error
    expected = (card.height, card.width, len(card.mean))
    if images_NHWC.dtype != np.uint8 or images_NHWC.shape[1:] != expected or not len(images_NHWC):
        raise ArtifactError(
            f"{file}: holds {images_NHWC.dtype} {images_NHWC.shape}, expected one or more images uint8 {expected}, "
            "which the model reads. Give build_engine the calibration images of the model's data set (prepare_data)."
        )
    indices = np.unique(np.linspace(0, len(images_NHWC) - 1, most).astype(int))
    frames_NHWC: NDArray[np.uint8] = images_NHWC[indices]
    return frames_NHWC


def measure_agreement(
    expected_NCHW: FloatArray,
    images_NCHW: FloatArray,
    manifest: EngineManifest,
    file: Path,
    *,
    is_int8: bool = False,
    usual_power: float = 0.0,
    choice: str = "",
) -> tuple[float, str]:
    """Return the engine's lowest signal-to-noise ratio against the expected logits, and its provider.

    Images are passed one by one and in each of `fitting_batches`. Raises BuildFailed below the target's floor.
    `choice` names a node that picks some of the graph's own values: whatever rounds otherwise may pick others, so
    each image is judged by itself, and up to half of them may differ as long as the others do not in any batch.
    """
    from tasks.parts.engines.open_engine import load_runner

    target, card = manifest.target, manifest.card
    _check_logits(expected_NCHW, target, card)
    most = _images_that_fit(card, _BYTES_PER_LOGIT)
    floor_db = target.min_agreement_int8_db if is_int8 else target.min_agreement_db
    with load_runner(file, manifest) as runner:
        agreements_db: dict[int, float] = {}
        of_images: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for batch, draws in _draws(target, card, len(images_NCHW)).items():
            for drawn in _joined(draws, most):
                logits_NCHW = np.concatenate([runner.infer(images_NCHW[one]) for one in drawn])
                _check_logits(logits_NCHW, target, card)
                images = np.concatenate(drawn)
                found_db = _agreement_db(expected_NCHW, images, logits_NCHW, usual_power)
                agreements_db[batch] = min(found_db, agreements_db.get(batch, found_db))
                if choice:
                    of_images[batch] += _of_each(expected_NCHW, images, logits_NCHW, usual_power)
        provider = runner.describe().provider
    if choice:
        agreements_db = _agreements_of_steady(of_images, floor_db) or agreements_db
    worst = min(agreements_db, key=agreements_db.__getitem__)
    agreement_db = agreements_db[worst]
    if agreement_db < floor_db:
        key = f"target.{target.name}.min_agreement{'_int8' if is_int8 else ''}_db"
        is_network = target.runtime.traits.reads_checkpoints
        source = "float32 network" if is_network else "graph"
        advice = (
            f"try another version of it or a wider target.{target.name}.precision"
            if is_network
            else "set that floor to 0 and diff_layers shows where; or try another version of the runtime"
        )
        cause = f"The runtime does not compute what the {source} describes"
        if choice:
            cause += f", or it rounds otherwise and {choice} then picks other ones of the graph's own values"
        raise BuildFailed(
            f"Target {target.name}: the engine's logits agree with the {source} by {agreement_db:.1f} dB only at a "
            f"batch of {worst}, expected {floor_db:g} dB or more ({key}). {cause}: {advice}."
        )
    return agreement_db, provider


def compare_answers(
    frames_NHWC: NDArray[np.uint8],
    manifest: EngineManifest,
    file: Path,
    plain: EngineManifest,
    twin: Path,
    *,
    is_int8: bool = False,
    usual_power: float = 0.0,
    choice: str = "",
) -> float | None:
    """Return the share of the answers of an engine on frames that equal those of its plain twin; None for values.

    The frames are passed one by one and in each of `fitting_batches`, to one engine after the other. Raises
    BuildFailed if more answers differ than near ties explain, unless the target asks for coarse classes. Values have
    to agree like logits, also where the graph has a `choice`.
    """
    from tasks.parts.engines.description import on_frames
    from tasks.parts.engines.open_engine import load_runner

    with load_runner(twin, plain) as runner:
        plain_engine = on_frames(runner)
        logits = np.concatenate([runner.infer(plain_engine.prepare(one[None])) for one in frames_NHWC])
        expected = plain_engine.finish(logits)
    draws = _draws(manifest.target, manifest.card, len(frames_NHWC))
    drawn = [one for many in draws.values() for one in many]
    with load_runner(file, manifest) as runner:
        engine = on_frames(runner)
        answers = [engine.answer(frames_NHWC[one]) for one in drawn]
    if manifest.card.task is Task.values:
        agreement_db = min(
            _agreement_db(logits, *pair, usual_power) for pair in zip(drawn, answers, strict=True)
        )
        target = manifest.target
        floor_db = target.min_agreement_int8_db if is_int8 else target.min_agreement_db
        if choice:
            of_images: dict[int, list[tuple[int, float]]] = defaultdict(list)
            for images, found in zip(drawn, answers, strict=True):
                of_images[len(images)] += _of_each(logits, images, found, usual_power)
            agreement_db = min(_agreements_of_steady(of_images, floor_db).values(), default=agreement_db)
        if agreement_db < floor_db:
            raise BuildFailed(
                f"Target {manifest.target.name}: the engine that reads {manifest.target.reads} agrees with the one "
                f"that reads normalised images by {agreement_db:.1f} dB only, expected {floor_db:g} dB or more. Set "
                f"target.{manifest.target.name}.reads=normalised."
            )
        return None
    if manifest.target.threshold is not None:
        logits[:, 0] += lead_of_first(manifest.target.threshold)
    highest, near_tie = logits.max(axis=1), _NEAR_TIE * (logits.max() - logits.min())
    num_answers = num_equal = num_wrong = 0
    for some, found in (group for pair in zip(drawn, answers, strict=True) for group in _groups(*pair)):
        chosen = np.take_along_axis(logits[some], found[:, None].astype(np.int64), axis=1)[:, 0]
        num_answers += found.size
        num_equal += int((found == expected[some]).sum())
        num_wrong += int((highest[some] - chosen > near_tie).sum())
    wrong = num_wrong / num_answers
    if wrong > _MOST_WRONG and not manifest.target.coarse_classes:
        raise BuildFailed(
            f"Target {manifest.target.name}: the engine that reads {manifest.target.reads} and gives "
            f"{manifest.target.gives} answers {100 * wrong:.2f} % otherwise than the one with normalised images and "
            f"logits, expected {100 * _MOST_WRONG:g} % or less. Set target.{manifest.target.name}.reads=normalised "
            f"and .gives=logits."
        )
    return num_equal / num_answers


def _check_logits(logits: FloatArray, target: Target, card: InputCard) -> None:
    """Raise ArtifactError for logits whose shape differs from the card, BuildFailed for NaN or infinity."""
    if logits.shape[1:] != card.logits_shape:
        raise ArtifactError(
            f"Target {target.name}: the model returns {list(logits.shape[1:])} for an image, its card says "
            f"{list(card.logits_shape)} for {card.task} ({len(card.classes)} classes). Train or export it again "
            "for this data set."
        )
    if not np.isfinite(logits).all():
        raise BuildFailed(
            f"Target {target.name}: the engine returns NaN or infinity for a plain image, expected "
            f"finite logits. Values overflow in {target.precision}; use a wider precision "
            f"(target.{target.name}.precision)."
        )
