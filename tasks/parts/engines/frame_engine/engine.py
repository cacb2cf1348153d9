"""An engine that reads frames and gives answers.

Frames are uint8 [N, H, W, C] of the engine's size, RGB where C is 3; answers are the class of each pixel, [N, H, W],
or of each image, [N], or values [N, ...]. Images have any size, and values as those that the network was trained on.
"""

import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...reading.files import scale_image
from ...reading.rules import Reading
from .images import answer_fitted, answer_windows, cut_batches, is_cut, joined, read_reading
from .pixels import find_classes, normalise
from .plans import Plan
from .sessions import CPU_PROVIDER, Array, Run, open_onnxruntime, open_openvino, run_onnxruntime, run_openvino
from .sources import rules_of


class Engine:
    """An engine with what it needs before and behind it."""

    def __init__(self, card: dict[str, Any], run: Run) -> None:
        """Take a card, as in model.json, and the call of the loaded engine; raise ValueError for an older card."""
        self.card, self.run, self.reading = card, run, read_reading(card)
        self._shape = (card["height"], card["width"], len(card["mean"]))
        self._is_normalised = card["reads"] == "normalised"
        self._is_reversed = card["reads"] == "bgr_frames"
        self._has_logits = card["gives"] == "logits" and card["task"] != "values"

    @property
    def max_batch(self) -> int:
        """The largest batch that the engine accepts."""
        return max(int(highest) for _, highest in self.card["batches"])

    def prepare(self, frames_NHWC: Array) -> Array:
        """Return what the engine reads."""
        if self._is_normalised:
            return normalise(frames_NHWC, self.card["mean"], self.card["std"])
        return np.ascontiguousarray(frames_NHWC[..., ::-1]) if self._is_reversed else frames_NHWC

    def finish(self, outputs: Array) -> Array:
        """Return the answers in what the engine gave, in memory of their own."""
        return find_classes(outputs, self.card["threshold"]) if self._has_logits else outputs.copy()

    def answer(self, frames_NHWC: Array) -> Array:
        """Return the answers for one batch that the engine accepts."""
        return self.finish(self.run(self.prepare(frames_NHWC)))

    def answer_image(self, image_HWC: Array, *, reading: Reading | None = None) -> Array:
        """Return the answer to one image of any size: a mask in that size, a class, or values.

        `image_HWC` has the values of its file, which `reading` brings to 8 bits; None reads as the network was
        trained to. A mask is 255 where `crop` has cut the image off. Raises ValueError for an image that cannot be
        read so.
        """
        reading = reading or self.reading
        image = scale_image(image_HWC, rules_of(reading, self._shape[2]), "the image")
        if is_cut(image.shape, self._shape[:2], reading):
            overlap = reading.window_overlap or 0
            return joined(answer_windows(image, self.answer, card=self.card, overlap=overlap))
        return answer_fitted(image, self.answer, card=self.card, mode=reading.resize_mode)

    def predict(self, frames_NHWC: Array) -> Array:
        """Return the answers for any number of frames; raise ValueError for frames of another type or size."""
        if (
            frames_NHWC.dtype != np.uint8
            or frames_NHWC.shape[1:] != self._shape
            or frames_NHWC.ndim != 4
            or not len(frames_NHWC)
        ):
            sizes = ", ".join(map(str, self._shape))
            raise ValueError(
                f"images are {frames_NHWC.dtype} {list(frames_NHWC.shape)}, expected uint8 [N, {sizes}] (RGB for "
                "three channels) with at least one image. Convert and resize them first."
            )
        batches = cut_batches(len(frames_NHWC), self.card["batches"])
        return np.concatenate([self.answer(frames_NHWC[batch]) for batch in batches])


def load_engine(folder: Path, *, num_threads: int | None = None) -> Engine:
    """Load the engine of a bundle, with as many threads as were measured, or another number.

    Raises ValueError if the bytes, the runtime or the machine differ from what was measured.
    """
    card: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    content = (folder / card["file"]).read_bytes()
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != card["sha256"]:
        raise ValueError(
            f"{folder / card['file']}: sha256 {sha256[:12]}..., model.json says {card['sha256'][:12]}...; the file "
            "was changed or truncated and is not loaded. Copy the bundle again."
        )
    _check_version(card)
    if num_threads is not None:
        _set_threads(card["options"], num_threads)
    libraries = [_checked_library(folder, library) for library in card.get("custom_operators", ())]
    run = _OPENERS[card["runtime"]](content, card, libraries)
    return Engine(run.card if isinstance(run, Plan) else card, run)


def _checked_library(folder: Path, declared: dict[str, str]) -> Path:
    """Return the path of a library with custom operators; raise ValueError if its bytes are not those declared."""
    library = (folder / declared["file"]).resolve()
    sha256 = hashlib.sha256(library.read_bytes()).hexdigest() if library.is_file() else "none"
    if sha256 != declared["sha256"]:
        raise ValueError(
            f"{library}: sha256 {sha256[:12]}..., model.json says {declared['sha256'][:12]}...; the library is not "
            "loaded, because that would run its code. Copy the bundle again."
        )
    return library


def _set_threads(options: dict[str, Any], num_threads: int) -> None:
    """Change the options of a CPU runtime; raise ValueError for an engine that computes on a GPU."""
    if options.get("provider") == CPU_PROVIDER:
        options["num_threads"] = num_threads
    elif "properties" in options:
        options["properties"]["INFERENCE_NUM_THREADS"] = num_threads
    else:
        raise ValueError("the engine computes on a GPU, where --threads changes nothing. Leave it out.")


def _check_version(card: dict[str, Any]) -> None:
    package, measured = card["package"], card["runtime_version"]
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    if installed == "none" or (installed != measured and not card["options"].get("version_compatible")):
        raise ValueError(
            f"the engine was built and measured with {package} {measured}, installed is {installed}. Run "
            "pip install -r requirements.txt, or build the engine again with that version."
        )


def _load_onnxruntime(content: bytes, card: dict[str, Any], libraries: Sequence[Path]) -> Run:
    return run_onnxruntime(open_onnxruntime(content, card["options"], libraries))


def _load_openvino(content: bytes, card: dict[str, Any], libraries: Sequence[Path]) -> Run:
    try:
        return run_openvino(open_openvino(content, card["options"], libraries))
    except RuntimeError as error:
        raise ValueError(
            f"OpenVINO cannot load the engine, which was compiled on a CPU with {', '.join(card['options']['isa'])} "
            "and runs only there. Build it again for this machine."
        ) from error


_OPENERS: dict[str, Callable[[bytes, dict[str, Any], Sequence[Path]], Run]] = {
    "onnxruntime": _load_onnxruntime,
    "openvino": _load_openvino,
    "tensorrt": Plan,
    "tensorrt_rtx": Plan,
}
