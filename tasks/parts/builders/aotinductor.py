"""Compile a checkpoint to a package of native code for the CPU or an NVIDIA GPU: torch.export, then AOTInductor.

On a GPU, torch 2.11 crashed when it loaded some of these packages (docs/gpu-results.md).
"""

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.utils import fresh_cache
from torch.export import Dim, ExportedProgram

from tasks.core.errors import BuildFailed, TargetMismatch
from tasks.parts.builders.contract import Built, CheckpointSource
from tasks.parts.engines.aotinductor.runner import ENGINE_FILE
from tasks.parts.engines.runtimes import CPU
from tasks.parts.engines.target import Target
from tasks.parts.engines.torch.precision import CastNetwork, precisions_of_program
from tasks.parts.engines.torch.runner import set_up_torch
from tasks.parts.networks.batchnorm_folding import fold_batchnorm
from tasks.parts.networks.checkpoint import load_checkpoint

_OPTIONS = {
    "freezing": True,  # weights are constants, laid out once as their kernels read them
    "aot_inductor.precompile_headers": False,  # pays off only for many compilations in one cache
}


def build_file(target: Target, source: CheckpointSource, engine: Path) -> Built:
    """Write the package of a network, with BatchNorm folded in float32.

    Raises TargetMismatch without a C++ compiler, BuildFailed if the network cannot be exported or compiled.
    """
    set_up_torch(target)
    _check_compiler(target)
    file = engine / ENGINE_FILE
    network, card = load_checkpoint(source.file)
    # torch treats a size of 1 as a constant (0/1 specialisation), so the example is a batch of 2.
    example_NCHW = torch.zeros(min(2, target.max_batch), 3, card.height, card.width)
    folded = CastNetwork(fold_batchnorm(network, example_NCHW), target.precision).to(target.device)
    program = compile_network(folded, example_NCHW.to(target.device), target, file)
    return Built(file, precisions_of_program(program))


def compile_network(network: nn.Module, example_NCHW: Tensor, target: Target, file: Path) -> ExportedProgram:
    """Write the package of a network on the target's device, and return what was compiled; raise BuildFailed."""
    program = export_program(network, example_NCHW, target)
    _compile(program, target, file)
    return program


def export_program(network: nn.Module, example_NCHW: Tensor, target: Target) -> ExportedProgram:
    """Trace a network for batches of 1..max_batch; raise BuildFailed with torch's error if that fails."""
    batch = {0: Dim("batch", min=1, max=target.max_batch)} if target.max_batch > 1 else None
    try:
        with torch.no_grad():
            return torch.export.export(network, (example_NCHW,), dynamic_shapes=(batch,))
    except (RuntimeError, ValueError, TypeError) as error:
        raise BuildFailed(
            f"Target {target.name}: torch.export cannot trace the network for batches of 1..{target.max_batch} "
            f"({_first_lines(error)}). Remove from its forward what depends on values or on the batch size, "
            "or build the variant for a target of runtime torch."
        ) from error


def _check_compiler(target: Target) -> None:
    """Raise TargetMismatch if there is no C++ compiler; code for a GPU is called from C++ as well."""
    try:
        get_cpp_compiler()
    except InvalidCxxCompiler as error:
        raise TargetMismatch(
            f"Target {target.name} needs a C++ compiler; this machine has no {torch._inductor.config.cpp.cxx[1]}. "
            "Install g++, name another one in the environment variable CXX, or run this on a worker of "
            f"its work pool."
        ) from error


def _compile(program: ExportedProgram, target: Target, file: Path) -> None:
    """Compile in a temporary cache folder, so that a package holds only what this build made."""
    failure: RuntimeError | None = None
    with tempfile.TemporaryDirectory() as folder, fresh_cache(dir=folder), torch.no_grad():
        try:
            torch._inductor.aoti_compile_and_package(
                program,
                package_path=str(file),
                # Names kernels for the profiler; on a GPU the driver names them.
                inductor_configs=_OPTIONS | {"cpp.enable_kernel_profile": target.device == CPU},
            )
        except RuntimeError as error:
            failure = error
    if failure:
        raise BuildFailed(
            f"Target {target.name}: AOTInductor of torch {torch.__version__} cannot compile the network "
            f"({_first_lines(failure)}). Build the variant for a target of runtime torch, or set another "
            f"target.{target.name}.precision. For a GPU it also needs the CUDA headers (CUDA_HOME)."
        ) from failure


def _first_lines(error: BaseException) -> str:
    """Return the most informative lines: a compiler prints its errors below its command line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [repr(error)]
    telling = [line for line in lines if "error:" in line.lower()] or lines
    return " ".join(telling[:3])[:400]
