"""Build the engine of one variant for one target."""

from pathlib import Path

from tasks.parts.builders.build import build
from tasks.parts.builders.report import EngineBuild
from tasks.parts.engines.machine import target_environment
from tasks.parts.engines.manifest import EngineStatus
from tasks.parts.engines.target import Target

Config = Target
"""The configuration of a build is the target that it builds for."""

Report = EngineBuild


def environment(cfg: Config) -> dict[str, str] | None:
    """Return versions, CPU flags and GPU; None without the declared GPU or the runtime."""
    return target_environment(cfg)


def build_engine(cfg: Config, *, model: Path, images: Path, out: Path) -> Report:
    """Build `out/engine` from a variant's ONNX graph (for runtimes torch and aotinductor: from its checkpoint).

    The engine is held against it on some of the calibration images: `images` is their file in the data set. Raises
    TargetMismatch if the runtime of this machine is not the declared one, ArtifactError for a damaged file.
    """
    return build(cfg, model=model, images=images, out=out)


def measures(cfg: Config) -> bool:
    """Return whether nothing else may be measured on this machine meanwhile: builders for GPUs time kernels.

    That of TensorRT for RTX times none, but its engine is proved here, which compiles kernels on the CPU and runs
    them: it would disturb what is measured, for some seconds.
    """
    return cfg.gpu is not None


def still_holds(_: Config, report: Report) -> bool:
    """Return whether building again would end the same way.

    A failed one is tried again: by now memory may be free, or a damaged timing cache gone.
    """
    return report.status is not EngineStatus.failed
