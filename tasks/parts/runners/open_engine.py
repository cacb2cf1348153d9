"""From an engine folder to the runner of its runtime, without asking the caller which runtime that is."""

import contextlib
import importlib.metadata
from pathlib import Path

from tasks.core.errors import ArtifactError, TargetMismatch
from tasks.parts.cuda_driver import Gpu, find_gpus
from tasks.parts.runners import aotinductor, onnxruntime, openvino, torch_eager
from tasks.parts.runners.contract import EngineManifest, Runner, read_engine_manifest, sha256_of
from tasks.parts.runners.torch_runner import TorchRunner
from tasks.parts.target import (
    CUDA,
    Runtime,
    Target,
    check_gpu,
    check_runtime_version,
    check_tensorrt_version,
    missing_cpu_flags,
    read_isa,
)
from tasks.parts.tensorrt_options import HardwareCompatibility, TensorrtOptions

_AMPERE = (8, 0)
"""Compute capability from which on engines of hardware_compatibility ampere_plus run."""

_DISTRIBUTIONS = {Runtime.onnxruntime: ("onnxruntime", "onnxruntime-gpu"), Runtime.aotinductor: ("torch",)}
"""Packages that hold a runtime, where they are named otherwise; the first that is installed counts."""


def open_engine(engine: Path) -> Runner:
    """Check an engine folder from its manifest and return its runner, not yet loaded.

    Engines are native code: nothing of the file is loaded before its sha256 matches the manifest.
    Raises ArtifactError for an absent, damaged or foreign file, TargetMismatch for another machine or
    version.
    """
    manifest = read_engine_manifest(engine)
    check_machine(manifest)
    file = _checked_file(engine, manifest)
    return load_runner(file, manifest)


def load_runner(file: Path, manifest: EngineManifest) -> Runner:
    """Return the runner of a file that needs no check, because this process has just made it."""
    match manifest.target.runtime:
        case Runtime.torch:
            return TorchRunner(file, manifest, torch_eager.load_network)
        case Runtime.onnxruntime:
            return onnxruntime.OnnxruntimeRunner(file, manifest)
        case Runtime.openvino:
            return openvino.OpenvinoRunner(file, manifest)
        case Runtime.tensorrt:
            from tasks.parts.runners.tensorrt import TensorrtRunner

            return TensorrtRunner(file, manifest)
        case Runtime.aotinductor:
            return TorchRunner(file, manifest, aotinductor.load_package)


def installed_version(runtime: Runtime) -> str:
    """Return the installed version of a runtime without importing it; raise TargetMismatch where there is none."""
    names = _DISTRIBUTIONS.get(runtime, (runtime,))
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    raise TargetMismatch(
        f"Package {' or '.join(names)} is not installed. Install it (TensorRT comes with the extra gpu: `pip install "
        "-e '.[gpu]'`), or run this on a worker of the target's work pool."
    )


def check_versions(target: Target) -> str:
    """Return the installed version of the target's runtime; raise TargetMismatch unless it is the declared one, and
    TensorRT, where that makes a plan, one that can."""
    installed = installed_version(target.runtime)
    check_runtime_version(target, installed)
    if target.tensorrt is not None:
        check_tensorrt_version(target, installed_version(Runtime.tensorrt))
    return installed


def check_machine(manifest: EngineManifest) -> None:
    """Raise TargetMismatch unless this machine can run the engine that the manifest describes."""
    target = manifest.target
    if target.tensorrt is None:
        check_gpu(target)
    installed = check_versions(target)
    missing = missing_cpu_flags(target)
    if missing:
        raise TargetMismatch(
            f"Target {target.name} needs the CPU flags {', '.join(target.cpu_flags)}; this machine lacks "
            f"{', '.join(missing)}. Run it on a worker of pool '{target.work_pool}' "
            f"(target.{target.name}.cpu_flags)."
        )
    if target.runtime in (Runtime.openvino, Runtime.aotinductor):
        _check_compiled(manifest, installed)
    if target.tensorrt is not None:
        _check_plan(manifest, target.tensorrt, installed_version(Runtime.tensorrt))


def _check_compiled(manifest: EngineManifest, installed: str) -> None:
    """Native code of a compiler: the same version, CPU and GPU or none."""
    target = manifest.target
    if installed != manifest.runtime_version:
        raise TargetMismatch(
            f"Engine {manifest.file} of target {target.name} was compiled by {target.runtime} "
            f"{manifest.runtime_version}, this machine has {installed}; native code loads only in the version that "
            f"made it. Build it again here (build_engine for target {target.name}), or install that "
            "version."
        )
    if read_isa() != manifest.isa:
        raise TargetMismatch(
            f"Engine {manifest.file} of target {target.name} was compiled for a CPU with "
            f"{', '.join(manifest.isa)}, this one has {', '.join(read_isa())}. Build it again here "
            f"(build_engine for target {target.name}), or run it on a worker of pool '{target.work_pool}'."
        )
    if target.device == CUDA and (here := _first_gpu()) != manifest.gpu:
        raise TargetMismatch(
            f"Engine {manifest.file} of target {target.name} was compiled on {_gpu_text(manifest.gpu)}, this machine "
            f"has {_gpu_text(here)}. Build it again here (build_engine for target {target.name}), or run it on a "
            f"worker of pool '{target.work_pool}'."
        )


def _check_plan(manifest: EngineManifest, options: TensorrtOptions, installed: str) -> None:
    target, built_by = manifest.target, manifest.tensorrt_version
    if installed != built_by and not options.version_compatible:
        raise TargetMismatch(
            f"Engine {manifest.file} of target {target.name} was built by TensorRT {built_by}, this machine has "
            f"{installed}; a plan loads only in the version that made it. Build it again here (build_engine for "
            f"target {target.name}), install that version, or build with target.{target.name}.tensorrt"
            ".version_compatible."
        )
    here, built_on = _first_gpu(), manifest.gpu
    if here is None or built_on is None or not _runs_on(options.hardware_compatibility, here, built_on):
        raise TargetMismatch(
            f"Engine {manifest.file} of target {target.name} was built on {_gpu_text(built_on)}, this machine has "
            f"{_gpu_text(here)}, and its hardware_compatibility is {options.hardware_compatibility}. Build it again "
            f"here (build_engine for target {target.name}), run it on a worker of pool "
            f"'{target.work_pool}', or build with target.{target.name}.tensorrt.hardware_compatibility."
        )


def _runs_on(compatibility: HardwareCompatibility, here: Gpu, built_on: Gpu) -> bool:
    match compatibility:
        case HardwareCompatibility.none:
            return here == built_on
        case HardwareCompatibility.same_compute_capability:
            return here.compute_capability == built_on.compute_capability
        case HardwareCompatibility.ampere_plus:
            return tuple(map(int, here.compute_capability.split("."))) >= _AMPERE


def _first_gpu() -> Gpu | None:
    return next(iter(find_gpus()), None)


def _gpu_text(gpu: Gpu | None) -> str:
    return f"{gpu.name} ({gpu.compute_capability})" if gpu else "no NVIDIA GPU"


def _checked_file(engine: Path, manifest: EngineManifest) -> Path:
    if not manifest.is_built:
        raise ArtifactError(
            f"{engine}: holds no engine, the build was {manifest.status} ({manifest.reason}). Mend the cause "
            "and run build_engine again."
        )
    if not manifest.file or Path(manifest.file).name != manifest.file:
        raise ArtifactError(
            f"{engine}: the manifest names the file {manifest.file!r}, expected a plain file name."
        )
    file = engine / manifest.file
    if not file.is_file():
        raise ArtifactError(f"{file}: not found, expected the engine. Run build_engine again.")
    found = sha256_of(file)
    if found != manifest.sha256:
        raise ArtifactError(
            f"{file}: sha256 {found[:12]}..., the manifest says {manifest.sha256[:12]}...; the file was "
            "changed or truncated and is not loaded. Run build_engine again, or fetch it again from the "
            "remote."
        )
    return file
