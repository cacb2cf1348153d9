"""AOTInductor. The engine file is a package of native code that torch compiled ahead of time.

A package belongs to the torch version, the CPU's instruction sets and the GPU that compiled it.
"""

from pathlib import Path

from tasks.core.errors import ArtifactError, first_line
from tasks.parts.engines.manifest import EngineManifest
from tasks.parts.engines.target import Target
from tasks.parts.engines.torch.runner import Program, TorchRunner

ENGINE_FILE = "engine.pt2"


def open_runner(file: Path, manifest: EngineManifest) -> TorchRunner:
    """Return the runner of a package, which takes one caller at a time: concurrent ones load their own."""
    return TorchRunner(file, manifest, load_package, is_program_shared=False)


def load_package(file: Path, target: Target) -> Program:
    """Load a package; raise ArtifactError with torch's error if that fails."""
    import torch

    try:
        program: Program = torch._inductor.aoti_load_package(str(file))
    except RuntimeError as error:
        raise ArtifactError(
            f"{file}: torch {torch.__version__} cannot load the engine ({first_line(error)}). Run build_engine for "
            f"target {target.name} again on this machine."
        ) from error
    return program
