"""Compare this machine with what a target declares and with the machine that built an engine."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.environment import versions
from tasks.core.errors import TargetMismatch
from tasks.parts.cpu import VNNI, int8_sums_saturate, read_cpu_flags
from tasks.parts.engines.gpu import Gpu, find_gpus
from tasks.parts.engines.runtimes import CUDA, Runtime
from tasks.parts.engines.target import ANY, Target
from tasks.parts.engines.tensorrt_options import (
    OLDEST_TENSORRT,
    OLDEST_TENSORRT_RTX,
    OLDEST_TENSORRT_WITH_DLA,
    HardwareCompatibility,
    TensorrtOptions,
)
from tasks.parts.onnx_session import TENSORRT_MAJOR as ONNXRUNTIME_TENSORRT_MAJOR

if TYPE_CHECKING:
    from tasks.parts.engines.manifest import EngineManifest

ISA_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
"""Flags of /proc/cpuinfo that change which kernels a runtime picks."""

_AMPERE = (8, 0)
"""Lowest compute capability that runs engines of hardware_compatibility ampere_plus."""

_PLAN_HERE = (
    " TensorRT for RTX makes its plan without that GPU, which `python -m flows.build_plan` does here; but only that "
    "GPU can run the plan, and an engine that did not run is not proved."
)


def read_isa() -> tuple[str, ...]:
    """Return the flags of this CPU that change which kernels a runtime picks."""
    return tuple(flag for flag in ISA_FLAGS if flag in read_cpu_flags())


def read_cpu_model() -> str:
    """Return the CPU's name as reported by the system."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} ({os.cpu_count()} logical cores)"
    return f"unknown ({os.cpu_count()} logical cores)"


def needs_vnni(manifest: "EngineManifest") -> bool:
    """Return whether INT8 sums of an engine can saturate on x86 without VNNI, as those built with VNNI do."""
    return manifest.is_quantized and manifest.target.uint8_activations and bool(VNNI & set(manifest.isa))


def missing_cpu_flags(target: Target) -> list[str]:
    """Return the CPU flags that the target requires and this machine lacks."""
    return [flag for flag in target.cpu_flags if flag not in read_cpu_flags()]


def check_gpu(target: Target) -> None:
    """Raise TargetMismatch unless the first visible GPU is the declared one (CUDA_VISIBLE_DEVICES chooses)."""
    declared = target.gpu
    if declared is None or has_gpu(declared):
        return
    traits = {"compute capability": declared.compute_capability, "the name": declared.name}
    named = " and ".join(f"{trait} {value}" for trait, value in traits.items() if value != ANY)
    wanted = f"an NVIDIA GPU with {named}" if named else "an NVIDIA GPU"
    here = _first_gpu()
    plan = _PLAN_HERE if target.runtime is Runtime.tensorrt_rtx else ""
    if here is None:
        raise TargetMismatch(
            f"Target {target.name} needs {wanted}; this machine has none, or no driver (libcuda.so.1). Run it on a "
            f"worker of its work pool, or remove it from target.{plan}"
        )
    raise TargetMismatch(
        f"Target {target.name} needs {wanted}; the first GPU here is {here.name} with {here.compute_capability}. An "
        "engine is fast, or runs at all, only on the GPU that it was built on. Run it on a worker of its work pool, "
        f"or declare this GPU (target.{target.name}.gpu).{plan}"
    )


def has_gpu(declared: Gpu) -> bool:
    """Return whether the first visible GPU is the declared one (CUDA_VISIBLE_DEVICES chooses)."""
    here = _first_gpu()
    return (
        here is not None
        and declared.compute_capability in (ANY, here.compute_capability)
        and declared.name in (ANY, here.name)
    )


def check_runtime_version(target: Target, installed: str) -> None:
    """Raise TargetMismatch if the installed runtime does not have the declared version."""
    declared = target.runtime_version
    if declared == ANY or installed == declared or installed.startswith((declared + ".", declared + "+")):
        return
    raise TargetMismatch(
        f"Target {target.name} declares {target.runtime} {declared}, this machine has {installed}. Run it on "
        f"a worker of its work pool, or declare target.{target.name}.runtime_version={installed} "
        "and build again."
    )


def check_tensorrt_version(target: Target, installed: str) -> None:
    """Raise TargetMismatch for a TensorRT that is too old, or whose plans ONNX Runtime does not run."""
    version = tuple(map(int, installed.split(".")[:3]))
    has_dla = target.tensorrt is not None and target.tensorrt.dla_core is not None
    oldest = OLDEST_TENSORRT_WITH_DLA if has_dla else OLDEST_TENSORRT
    name, how = "TensorRT", "extra gpu; on a Jetson, with JetPack"
    if target.runtime is Runtime.tensorrt_rtx:
        oldest, name, how = OLDEST_TENSORRT_RTX, "TensorRT for RTX", "extra rtx"
    if version < oldest:
        needed = f"{'.'.join(map(str, oldest))} or later{' for a DLA' if has_dla else ''}"
        raise TargetMismatch(
            f"Target {target.name} needs {name} {needed}, this machine has {installed}. Install a later one ({how}), "
            "or run it on a worker of its work pool."
        )
    if target.runtime is Runtime.onnxruntime and version[0] != ONNXRUNTIME_TENSORRT_MAJOR:
        raise TargetMismatch(
            f"Target {target.name} needs TensorRT {ONNXRUNTIME_TENSORRT_MAJOR}, whose plans onnxruntime-gpu runs; "
            f"this machine has {installed}. Install `tensorrt<{ONNXRUNTIME_TENSORRT_MAJOR + 1}`, run it on a worker "
            f"of its work pool, or use a target of runtime tensorrt."
        )


def installed_version(runtime: Runtime) -> str:
    """Return the installed version of a runtime without importing it.

    Raises TargetMismatch if there is none, or more than one.
    """
    names = runtime.traits.distributions
    found = versions(*names)
    if len(set(found.values())) > 1:
        several = " and ".join(f"{name} {version}" for name, version in found.items())
        raise TargetMismatch(
            f"{several} are both installed. They overwrite each other's files, so the version that runs is unknown. "
            f"`pip uninstall {' '.join(found)}`, then install one of them."
        )
    for version in found.values():
        return version
    raise TargetMismatch(
        f"Package {' or '.join(names)} is not installed. Install it (TensorRT comes with the extra gpu: `pip install "
        "-e '.[gpu]'`; TensorRT for RTX with the extra rtx), or run this on a worker of the target's work pool."
    )


def check_versions(target: Target) -> str:
    """Return the installed version of the target's runtime; raise TargetMismatch unless it is the declared one.

    If TensorRT builds the plan, its version is checked as well.
    """
    installed = installed_version(target.runtime)
    check_runtime_version(target, installed)
    if target.tensorrt is not None:
        check_tensorrt_version(target, installed_version(target.compiler))
    return installed


def target_environment(target: Target) -> dict[str, str] | None:
    """Return what an engine for a target depends on here: versions, CPU flags, GPU.

    None without the declared GPU, or without the runtime.
    """
    try:
        check_gpu(target)
        installed = {
            runtime.value: installed_version(runtime) for runtime in (target.compiler, target.runtime)
        }
    except TargetMismatch:
        return None
    flags = {flag for flag in (*ISA_FLAGS, *target.cpu_flags) if flag in read_cpu_flags()}
    gpu = {"gpu": _gpu_text(_first_gpu())} if target.device == CUDA else {}
    return {**installed, "cpu_flags": " ".join(sorted(flags)), **gpu}


def check_machine(manifest: "EngineManifest") -> None:
    """Raise TargetMismatch unless this machine can run the engine that the manifest describes."""
    target = manifest.target
    if target.tensorrt is None:
        check_gpu(target)
    installed = check_versions(target)
    missing = missing_cpu_flags(target)
    if missing:
        raise TargetMismatch(
            f"Target {target.name} needs the CPU flags {', '.join(target.cpu_flags)}; this machine lacks "
            f"{', '.join(missing)}. Run it on a worker of its work pool "
            f"(target.{target.name}.cpu_flags)."
        )
    if target.runtime.traits.is_native_code:
        _check_native_code(manifest, installed)
    if needs_vnni(manifest) and int8_sums_saturate():
        raise TargetMismatch(
            f"Engine {manifest.file} of target {target.name} was built on a CPU with VNNI; this one lacks it, so "
            f"INT8 sums can saturate. Build it again here (build_engine for target {target.name}), or run it on a "
            f"worker of its work pool."
        )
    if target.tensorrt is not None:
        _check_plan(manifest, target.tensorrt, installed_version(target.compiler))


def _check_native_code(manifest: "EngineManifest", installed: str) -> None:
    """Raise TargetMismatch unless version, CPU and GPU are those that compiled the engine."""
    target = manifest.target
    if installed != manifest.runtime_version:
        raise TargetMismatch(
            f"Engine {manifest.file} of target {target.name} was compiled by {target.runtime} "
            f"{manifest.runtime_version}, this machine has {installed}; native code loads only in the version that "
            f"compiled it. Build it again here (build_engine for target {target.name}), or install that "
            "version."
        )
    if read_isa() != manifest.isa:
        raise TargetMismatch(
            f"Engine {manifest.file} of target {target.name} was compiled for a CPU with "
            f"{', '.join(manifest.isa)}, this one has {', '.join(read_isa())}. Build it again here "
            f"(build_engine for target {target.name}), or run it on a worker of its work pool."
        )
    if target.device == CUDA and (here := _first_gpu()) != manifest.gpu:
        raise TargetMismatch(
            f"Engine {manifest.file} of target {target.name} was compiled on {_gpu_text(manifest.gpu)}, this machine "
            f"has {_gpu_text(here)}. Build it again here (build_engine for target {target.name}), or run it on a "
            f"worker of its work pool."
        )


def _check_plan(manifest: "EngineManifest", options: TensorrtOptions, installed: str) -> None:
    target, built_by = manifest.target, manifest.tensorrt_version
    if installed != built_by and not options.version_compatible:
        can_be_compatible = target.compiler is Runtime.tensorrt
        other = (
            f", or build with target.{target.name}.tensorrt.version_compatible" if can_be_compatible else ""
        )
        raise TargetMismatch(
            f"Engine {manifest.file} of target {target.name} was built by TensorRT {built_by}, this machine has "
            f"{installed}; a plan loads only in the version that made it. Build it again here (build_engine for "
            f"target {target.name}), install that version{other}."
        )
    here, built_on = _first_gpu(), manifest.gpu
    if here is None or built_on is None or not _runs_on(options.hardware_compatibility, here, built_on):
        raise TargetMismatch(
            f"Engine {manifest.file} of target {target.name} was built on {_gpu_text(built_on)}, this machine has "
            f"{_gpu_text(here)}, and its hardware_compatibility is {options.hardware_compatibility}. Build it again "
            f"here (build_engine for target {target.name}), run it on a worker of "
            f"its work pool, or build with target.{target.name}.tensorrt.hardware_compatibility."
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
