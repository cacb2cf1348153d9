"""TensorRT for RTX. The engine file is a serialized plan, run by the runner of TensorRT. Not run on real hardware."""

from pathlib import Path

from tasks.parts.engines.manifest import EngineManifest
from tasks.parts.engines.runner import Runner
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.engines.tensorrt_flavour import choose_tensorrt


def open_runner(file: Path, manifest: EngineManifest) -> Runner:
    """Return the runner of a plan; raise TargetMismatch in a process that runs the other flavour of TensorRT."""
    choose_tensorrt(Runtime.tensorrt_rtx)
    from tasks.parts.engines.tensorrt.runner import TensorrtRunner

    return TensorrtRunner(file, manifest)
