"""ONNX's reference evaluator. The engine file is an ONNX graph, computed node by node in numpy."""

from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from tasks.parts.engines.machine import installed_version
from tasks.parts.engines.manifest import EngineManifest, FloatArray
from tasks.parts.engines.runner import OperatorTime, RunnerDescription, check_batch
from tasks.parts.engines.runtimes import Runtime


def open_runner(file: Path, manifest: EngineManifest) -> "ReferenceRunner":
    """Return the runner of a graph."""
    return ReferenceRunner(file, manifest)


class ReferenceRunner:
    """Runs an ONNX file in the reference evaluator."""

    def __init__(self, file: Path, manifest: EngineManifest) -> None:
        self._file, self.manifest = file, manifest
        self._evaluator: Any = None

    def __enter__(self) -> Self:
        from onnx.reference import ReferenceEvaluator

        self._evaluator = ReferenceEvaluator(str(self._file))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._evaluator = None

    def infer(self, images_NCHW: FloatArray) -> FloatArray:
        check_batch(images_NCHW, self.manifest)
        return self.run(images_NCHW)

    def run(self, images_NCHW: FloatArray) -> FloatArray:
        [logits_NCHW] = self._evaluator.run(None, {self._evaluator.input_names[0]: images_NCHW})
        return np.asarray(logits_NCHW, np.float32)

    def describe(self) -> RunnerDescription:
        return RunnerDescription("reference", installed_version(Runtime.reference), "numpy", 1, {})

    def profile(self, images_NCHW: FloatArray, num_iterations: int) -> tuple[OperatorTime, ...]:
        return ()  # it has no profiler

    def open_concurrent(self, count: int) -> tuple[Self, ...]:
        return tuple(type(self)(self._file, self.manifest) for _ in range(count))

    def time_on_device(self, images_NCHW: FloatArray, num_iterations: int) -> None:
        return None
