"""Make the engine of one variant for one target."""

from pathlib import Path

from tasks.parts.builders.build import build
from tasks.parts.builders.report import EngineBuild
from tasks.parts.engines.target import Target

Config = Target
"""The configuration of a build is the target that it builds for."""

Report = EngineBuild


def build_engine(cfg: Config, *, model: Path, out: Path) -> Report:
    """Build `out/engine` from a variant's ONNX graph (for runtimes torch and aotinductor: from its checkpoint).

    Raises TargetMismatch on a machine whose runtime is not the declared one, ArtifactError for a damaged model.
    """
    return build(cfg, model=model, out=out)
