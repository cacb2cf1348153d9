"""Run the engine of this folder: ``python infer.py IMAGES.npy CLASSES.npy``.

IMAGES.npy holds RGB images as uint8 [N, H, W, 3] of the size in model.json; CLASSES.npy gets the index of the class
of each pixel, [N, H, W], or of each image, [N]: uint8, or uint16 for more than 256 classes. From Python:
``Engine().predict(images_NHWC)``. Needs numpy and the runtime that requirements.txt names, nothing else.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent


class Engine:
    """The engine of a bundle, checked and loaded."""

    def __init__(self, folder: Path = FOLDER) -> None:
        """Load it; raise ValueError for a file that is not the one that was measured."""
        self.card: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        content = (folder / self.card["file"]).read_bytes()
        found = hashlib.sha256(content).hexdigest()
        if found != self.card["sha256"]:
            raise ValueError(
                f"{folder / self.card['file']}: sha256 {found[:12]}..., model.json says "
                f"{self.card['sha256'][:12]}...; the file was changed or truncated and is not loaded. Copy the "
                "bundle again."
            )
        openers = {"onnxruntime": _open_onnxruntime, "openvino": _open_openvino}
        self._run = openers[self.card["runtime"]](content, self.card)

    def predict(self, images_NHWC: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
        """Return the class of each pixel, [N, H, W], or of each image, [N], for RGB images uint8 [N, H, W, 3].

        Raises ValueError for images of another type or size.
        """
        card = self.card
        expected = (card["height"], card["width"], 3)
        if images_NHWC.dtype != np.uint8 or images_NHWC.shape[1:] != expected or not len(images_NHWC):
            raise ValueError(
                f"images are {images_NHWC.dtype} {list(images_NHWC.shape)}, expected uint8 [N, {card['height']}, "
                f"{card['width']}, 3], RGB, with one image or more. Resize them first."
            )
        std = np.asarray(card["std"], np.float64)
        scale_C = (1.0 / (255.0 * std)).astype(np.float32)
        shift_C = (-np.asarray(card["mean"], np.float64) / std).astype(np.float32)
        classes = []
        smallest = np.min_scalar_type(len(card["classes"]) - 1)
        for start in range(0, len(images_NHWC), card["max_batch"]):
            batch_NHWC = images_NHWC[start : start + card["max_batch"]]
            batch_NCHW = np.ascontiguousarray(np.moveaxis(batch_NHWC, -1, 1), dtype=np.float32)
            logits = self._run(batch_NCHW * scale_C[:, None, None] + shift_C[:, None, None])
            classes.append(logits.argmax(axis=1).astype(smallest))
        return np.concatenate(classes)


Run = Callable[["np.ndarray[Any, Any]"], "np.ndarray[Any, Any]"]


def _open_onnxruntime(content: bytes, card: dict[str, Any]) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = card["num_threads"], 1
    session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
    name = session.get_inputs()[0].name
    return lambda images_NCHW: session.run(None, {name: images_NCHW})[0]


def _open_openvino(content: bytes, card: dict[str, Any]) -> Run:
    import io

    import openvino

    try:
        compiled = openvino.Core().import_model(io.BytesIO(content), "CPU", card["options"])
    except RuntimeError as error:
        raise ValueError(
            f"OpenVINO {openvino.__version__} cannot load the engine; it was compiled by {card['runtime_version']} "
            f"on a CPU with {', '.join(card['isa'])}, and runs only there. Build it again for this machine."
        ) from error
    request = compiled.create_infer_request()
    return lambda images_NCHW: request.infer({0: images_NCHW})[0]


def main() -> None:
    """Read images, write classes."""
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    images_NHWC = np.load(sys.argv[1], allow_pickle=False)
    np.save(sys.argv[2], Engine().predict(images_NHWC), allow_pickle=False)


if __name__ == "__main__":
    main()
