"""The model of a bundle in a Triton server with the Python backend: each instance is a process of its own.

Requests hold frames, uint8 [N, H, W, C] of any size, RGB where C is 3, with values that are scaled to 8 bits already.
Those of another size than the engine's are read as the network was trained to, and masks have their size. The server
puts those of one size that wait into one call, up to the largest batch of its configuration. Arrays travel by DLPack:
before Triton 2.52 (24.11), the backend's own functions read wrong pixels and give no answer with numpy 2 (pull
request 384 of python_backend).
"""

import ctypes
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from .engine import load_engine


class TritonPythonModel:
    """What the Python backend calls."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine of the bundle, as infer.py does, on a CPU with as many threads as were best under load.

        What it raises is the reason in the server's log.
        """
        folder = Path(__file__).resolve().parents[1]
        load = json.loads((folder / "model.json").read_text(encoding="utf-8")).get("load", {})
        is_cpu = args["model_instance_kind"] == "CPU"
        self._engine = load_engine(folder, num_threads=load.get("num_threads") if is_cpu else None)
        self._size = self._engine.card["height"], self._engine.card["width"]
        self._reading = replace(self._engine.reading, types=("uint8",))
        [described] = json.loads(args["model_config"])["output"]
        self._output = str(described["name"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer frames of the engine's size in the largest batches that it accepts, others one by one."""
        frames = [
            np.from_dlpack(pb_utils.get_input_tensor_by_name(request, "frames")) for request in requests
        ]
        if any(part.shape[1:3] != self._size for part in frames):
            return [self._respond(np.stack([self._answer(frame) for frame in part])) for part in frames]
        answers = self._engine.predict(frames[0] if len(frames) == 1 else np.concatenate(frames))
        ends = np.cumsum([len(part) for part in frames])
        return [self._respond(part) for part in np.split(answers, ends[:-1])]

    def _answer(self, frame_HWC: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self._engine.answer_image(frame_HWC, reading=self._reading)

    def _respond(self, answers: np.ndarray[Any, Any]) -> Any:
        if answers.ndim == 1:  # the class of each image: Triton takes no output without an axis
            answers = answers[:, None]
        return pb_utils.InferenceResponse([_tensor(self._output, answers)])


def _tensor(name: str, array: np.ndarray[Any, Any]) -> Any:
    """Return an array as a tensor of the backend.

    The backend gives a used capsule another name than DLPack says, at which numpy's destructor complains to stderr.
    The tensor frees the memory itself, so the capsule goes without one.
    """
    capsule = array.__dlpack__()
    ctypes.pythonapi.PyCapsule_SetDestructor(ctypes.py_object(capsule), None)
    return pb_utils.Tensor.from_dlpack(name, capsule)
