"""What a target declares: a runtime and its version, a device, and the options of a build.

A target is declared in `conf/target/<name>.yaml` and never detected, so that the key of an engine does not
depend on the machine that asks for it. The machine is only held against the declaration.
"""

import functools
import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tasks.core.errors import ConfigError, TargetMismatch
from tasks.parts.cuda_driver import Gpu, find_gpus
from tasks.parts.tensorrt_options import OLDEST_TENSORRT, TensorrtOptions

ANY = "any"
CPU, CUDA = "cpu", "cuda"

ISA_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")
"""Flags of /proc/cpuinfo that change which kernels a runtime picks."""

ONNXRUNTIME_TENSORRT_MAJOR = 10
"""onnxruntime-gpu 1.31 is linked against libnvinfer.so.10."""

CHANNEL_MULTIPLES = (1, 8, 16, 32, 64)

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_VERSION = re.compile(r"\d+(\.\d+)*|" + ANY)


class Runtime(StrEnum):
    """The library that runs an engine."""

    torch = "torch"
    onnxruntime = "onnxruntime"
    openvino = "openvino"
    tensorrt = "tensorrt"
    aotinductor = "aotinductor"


CHECKPOINT_RUNTIMES = (Runtime.torch, Runtime.aotinductor)
"""They make engines from a checkpoint instead of an ONNX graph; Q/DQ variants have none."""


class Precision(StrEnum):
    """What unquantized layers compute in; Q/DQ layers are int8 in any case."""

    f32 = "f32"
    bf16 = "bf16"
    f16 = "f16"


_DEVICES = {
    Runtime.torch: (CPU, CUDA),
    Runtime.onnxruntime: (CPU, CUDA),
    Runtime.openvino: (CPU,),
    Runtime.tensorrt: (CUDA,),
    Runtime.aotinductor: (CPU, CUDA),
}
_PRECISIONS = {
    Runtime.torch: tuple(Precision),
    Runtime.onnxruntime: (Precision.f32,),
    Runtime.openvino: (Precision.f32, Precision.bf16),
    Runtime.tensorrt: (Precision.f32,),
    Runtime.aotinductor: tuple(Precision),
}


@dataclass(frozen=True)
class Target:
    """A runtime on a declared device with declared options."""

    name: str
    """Last part of the addresses of this target's engines."""
    runtime: Runtime
    runtime_version: str
    """Leading parts of the version that must be installed, such as "2026.4", or "any"."""
    device: str
    """"cpu", or "cuda" for an NVIDIA GPU."""
    gpu: Gpu | None
    """The GPU that must be there, for device cuda. Its name may be "any" where only the compute capability counts,
    and that may be "any" as well."""
    cpu_flags: list[str]
    """Flags of /proc/cpuinfo without which this target makes no sense: the build is skipped there, with
    the reason."""
    precision: Precision
    num_threads: int
    """Threads of one inference. More than free cores makes latency worse and noisy."""
    max_batch: int
    """Largest batch that the engine accepts. OpenVINO compiles for 1..max_batch."""
    channel_multiple: int
    """Layer widths that this device computes without waste; pruning keeps multiples of the largest of all targets.

    16 floats fill an AVX-512 register, 32 int8 channels are one vector of TensorRT's CHW32 format, 64 a row of
    int8 in AMX. 1: any width.
    """
    uint8_activations: bool
    """Re-encode int8 activations of Q/DQ graphs as uint8, losslessly.

    Both runtimes are faster with it on CPUs with VNNI, and OpenVINO 2026.4 follows the graph more closely
    (benchmarks/encodings.py).
    """
    stem_in_float: bool
    """Run convolutions that read the image in float even where the graph is quantized."""
    resize_as_matmul: bool
    """Interpolate the logits by two matrix products where they are small."""
    opsets: list[int]
    """Lowest and highest ONNX opset that this runtime takes. Empty for runtimes that read checkpoints."""
    min_agreement_db: float
    """A build fails if the engine's logits keep less signal-to-noise (dB) against the unoptimised graph, or
    against the float32 network on the CPU where the runtime reads checkpoints."""
    min_agreement_int8_db: float
    """The same floor for Q/DQ graphs. Two right int8 engines differ by about the noise of quantization itself."""
    work_pool: str
    """Where the engines of this target are built and measured."""
    tensorrt: TensorrtOptions | None
    """Options of the plan, for runtime tensorrt and where ONNX Runtime shall run a plan; null for the others."""

    def __post_init__(self) -> None:
        """Raise ConfigError for values that no machine could satisfy."""
        self._require(bool(_NAME.fullmatch(self.name)), "name", self.name, "lower-case letters, digits, _")
        version_ok = bool(_VERSION.fullmatch(self.runtime_version))
        self._require(
            version_ok, "runtime_version", self.runtime_version, 'a prefix such as "1.31", or "any"'
        )
        devices = _DEVICES[self.runtime]
        named = " or ".join(f'"{device}"' for device in devices)
        self._require(self.device in devices, "device", self.device, f"{named} for runtime {self.runtime}")
        self._require(
            (self.gpu is None) == (self.device == CPU), "gpu", self.gpu, "a GPU for cuda, null for cpu"
        )
        may_run_plan = self.device == CUDA and self.runtime in (Runtime.tensorrt, Runtime.onnxruntime)
        self._require(
            may_run_plan if self.tensorrt else self.runtime is not Runtime.tensorrt,
            "tensorrt",
            self.tensorrt,
            "options for runtime tensorrt, options or null for onnxruntime on cuda, null for the others",
        )
        if self.tensorrt:
            self.tensorrt.check(self.name, self.max_batch)
            for switch in ("uint8_activations", "stem_in_float", "resize_as_matmul"):
                self._require(not getattr(self, switch), switch, True, "false for engines of TensorRT")
            if self.runtime is Runtime.onnxruntime:
                self._check_provider(self.tensorrt)
        self._require(1 <= self.num_threads <= 1024, "num_threads", self.num_threads, "1..1024")
        self._require(1 <= self.max_batch <= 4096, "max_batch", self.max_batch, "1..4096")
        self._require(
            self.channel_multiple in CHANNEL_MULTIPLES,
            "channel_multiple",
            self.channel_multiple,
            ", ".join(map(str, CHANNEL_MULTIPLES)),
        )
        self._require(bool(self.work_pool), "work_pool", self.work_pool, "the name of a work pool")
        for floor in ("min_agreement_db", "min_agreement_int8_db"):
            self._require(getattr(self, floor) >= 0, floor, getattr(self, floor), "0 dB or more")
        if self.runtime in CHECKPOINT_RUNTIMES:
            self._require(not self.opsets, "opsets", self.opsets, f"[] for runtime {self.runtime}")
        else:
            opsets_ok = len(self.opsets) == 2 and self.opsets[0] <= self.opsets[1]
            self._require(opsets_ok, "opsets", self.opsets, "[lowest, highest]")
        precisions = _PRECISIONS[self.runtime]
        self._require(
            self.precision in precisions,
            "precision",
            self.precision,
            f"{', '.join(precisions)} for runtime {self.runtime}",
        )

    def _check_provider(self, options: TensorrtOptions) -> None:
        """ONNX Runtime launches kernels one by one, loads no plan with host code, takes the first profile only."""
        for switch in ("cuda_graph", "version_compatible"):
            self._require(
                not getattr(options, switch), f"tensorrt.{switch}", True, "false for runtime onnxruntime"
            )
        self._require(
            options.dla_core is None, "tensorrt.dla_core", options.dla_core, "null for runtime onnxruntime"
        )
        num_profiles = len(options.profiles)
        self._require(num_profiles <= 1, "tensorrt.profiles", num_profiles, "one for runtime onnxruntime")

    @property
    def compiler(self) -> Runtime:
        """What makes the engine out of a graph: TensorRT also where ONNX Runtime runs its plan."""
        return Runtime.tensorrt if self.tensorrt else self.runtime

    def _require(self, is_met: bool, field: str, found: object, allowed: str) -> None:
        if not is_met:
            shown = str(found) if isinstance(found, StrEnum) else repr(found)
            raise ConfigError(f"target.{self.name}.{field} is {shown}, allowed: {allowed}.")


@functools.cache
def read_cpu_flags() -> frozenset[str]:
    """Return the flags of this machine's CPU; empty where the system does not tell (no Linux)."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return frozenset()
    for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith(("flags", "Features")):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def read_isa() -> tuple[str, ...]:
    """Return those flags of this CPU that change which kernels a runtime picks."""
    return tuple(flag for flag in ISA_FLAGS if flag in read_cpu_flags())


def read_cpu_model() -> str:
    """Return the CPU's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return f"{line.partition(':')[2].strip()} ({os.cpu_count()} logical cores)"
    return f"unknown ({os.cpu_count()} logical cores)"


def missing_cpu_flags(target: Target) -> list[str]:
    """Return the CPU flags that the target asks for and this machine lacks."""
    return [flag for flag in target.cpu_flags if flag not in read_cpu_flags()]


def check_gpu(target: Target) -> None:
    """Raise TargetMismatch unless the first visible GPU is the declared one (CUDA_VISIBLE_DEVICES chooses)."""
    declared = target.gpu
    if declared is None:
        return
    found = find_gpus()
    traits = {"compute capability": declared.compute_capability, "the name": declared.name}
    named = " and ".join(f"{trait} {value}" for trait, value in traits.items() if value != ANY)
    wanted = f"an NVIDIA GPU with {named}" if named else "an NVIDIA GPU"
    if not found:
        raise TargetMismatch(
            f"Target {target.name} needs {wanted}; this machine has none, or no driver "
            f"(libcuda.so.1). Run it on a worker of pool '{target.work_pool}', or take it out of target."
        )
    is_same = declared.compute_capability in (ANY, found[0].compute_capability)
    if not is_same or declared.name not in (ANY, found[0].name):
        raise TargetMismatch(
            f"Target {target.name} needs {wanted}; the first one here is {found[0].name} with "
            f"{found[0].compute_capability}. An engine is fast, or runs at all, only on the GPU that it was built "
            f"on. Run it on a worker of pool '{target.work_pool}', or declare this GPU (target.{target.name}.gpu)."
        )


def check_runtime_version(target: Target, installed: str) -> None:
    """Raise TargetMismatch when the installed runtime is not of the declared version."""
    declared = target.runtime_version
    if declared == ANY or installed == declared or installed.startswith((declared + ".", declared + "+")):
        return
    raise TargetMismatch(
        f"Target {target.name} declares {target.runtime} {declared}, this machine has {installed}. Run it on "
        f"a worker of pool '{target.work_pool}', or declare target.{target.name}.runtime_version={installed} "
        "and build again."
    )


def check_tensorrt_version(target: Target, installed: str) -> None:
    """Raise TargetMismatch for a TensorRT that is too old, or that ONNX Runtime does not run plans of."""
    version = tuple(map(int, installed.split(".")[:2]))
    if version < OLDEST_TENSORRT:
        raise TargetMismatch(
            f"Target {target.name} needs TensorRT {'.'.join(map(str, OLDEST_TENSORRT))} or later, this machine has "
            f"{installed}. Install a later one (extra gpu), or run it on a worker of pool '{target.work_pool}'."
        )
    if target.runtime is Runtime.onnxruntime and version[0] != ONNXRUNTIME_TENSORRT_MAJOR:
        raise TargetMismatch(
            f"Target {target.name} needs TensorRT {ONNXRUNTIME_TENSORRT_MAJOR}, whose plans onnxruntime-gpu runs; "
            f"this machine has {installed}. Install `tensorrt<{ONNXRUNTIME_TENSORRT_MAJOR + 1}`, run it on a worker "
            f"of pool '{target.work_pool}', or take a target of runtime tensorrt."
        )
