"""Options that a target whose engine is a TensorRT plan declares in addition to those of every target."""

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from tasks.core.bounds import AtLeast, Between
from tasks.core.errors import ConfigError
from tasks.parts.engines.gpu import Gpu

MAX_OPTIMIZATION_LEVEL = 5
OLDEST_TENSORRT = (10, 12)
OLDEST_TENSORRT_WITH_DLA = (11, 4, 1)
"""10.7 had it last, which is older than the oldest version here; 11.4.0 has it on Windows on ARM only."""
OLDEST_TENSORRT_RTX = (1, 7)
"""TensorRT for RTX has numbers of its own; this is the version that was tried."""
RTX_CAPABILITIES = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")
"""Compute capabilities for which TensorRT for RTX builds plans (its enum ComputeCapability)."""
RUNTIME_CACHE = Path("artifacts/.runtime_cache")
"""Folder, in the workspace, for the kernels that TensorRT for RTX compiles; `make gc` removes those of old plans."""
_TIMES_NO_KERNEL = "whose builder times no kernel"
_FIXED_FOR_RTX: dict[str, tuple[object, str]] = {
    "optimization_level": (3, _TIMES_NO_KERNEL),
    "tactic_sources": ([], _TIMES_NO_KERNEL),
    "timing_cache": (None, _TIMES_NO_KERNEL),
    "num_builds": (1, _TIMES_NO_KERNEL),
    "sparse_weights": (False, "whose builder does not read it"),
    "max_aux_streams": (None, "whose builder does not read it"),
    "version_compatible": (False, "whose plans load in the version that made them only"),
    "dla_core": (None, "which has no DLA"),
}
"""Options without an effect on a plan of TensorRT for RTX, or that it refuses: their only value, and why. By NVIDIA's
guides for porting and timing caches, and by comparing plans (tests/over_tensorrt_builder.py)."""


class HardwareCompatibility(StrEnum):
    """Other GPUs on which the engine has to run; anything but `none` costs speed."""

    none = "none"
    ampere_plus = "ampere_plus"
    same_compute_capability = "same_compute_capability"


class ProfilingVerbosity(StrEnum):
    """How much the engine reports about its layers; without `detailed` no precision is known: PRECISION_MISMATCH."""

    none = "none"
    layer_names_only = "layer_names_only"
    detailed = "detailed"


class TacticSource(StrEnum):
    """Libraries that kernels may come from."""

    cublas = "cublas"
    cublas_lt = "cublas_lt"
    cudnn = "cudnn"
    edge_mask_convolutions = "edge_mask_convolutions"
    jit_convolutions = "jit_convolutions"


GONE_IN_ELEVEN = (TacticSource.cublas, TacticSource.cublas_lt, TacticSource.cudnn)
"""TensorRT 11 has the others only."""


@dataclass(frozen=True)
class BatchProfile:
    """One optimization profile: the batches that it accepts, and the one for which it is optimized."""

    min: Annotated[int, AtLeast(1)]
    """Smallest batch."""
    opt: Annotated[int, AtLeast(1)]
    """Batch for which it is optimized."""
    max: Annotated[int, AtLeast(1)]
    """Largest batch."""


@dataclass(frozen=True)
class TensorrtOptions:
    """Build options, named as in TensorRT's IBuilderConfig."""

    workspace_mib: Annotated[int, Between(1, 2**20)]
    """GPU memory that kernels may use during the build and at run time."""
    optimization_level: Annotated[int, Between(0, MAX_OPTIMIZATION_LEVEL)]
    """0 builds fastest, 5 tries the most kernels."""
    tactic_sources: list[TacticSource]
    """Libraries that kernels may come from. Empty: TensorRT's default."""
    profiles: list[BatchProfile]
    """Optimization profiles; the first that fits a batch is used. Empty: one for 1..max_batch, optimized for 1."""
    version_compatible: bool
    """Run on later TensorRT versions too; larger and slower."""
    hardware_compatibility: HardwareCompatibility
    """Other GPUs on which the plan has to run."""
    timing_cache: str | None
    """Folder with one cache per GPU and TensorRT version; null: none."""
    error_on_timing_cache_miss: bool
    """Use only cached timings: the same kernels and a bit-identical plan, or an error."""
    max_aux_streams: Annotated[int, Between(0, 64)] | None
    """Streams beside the main one; null: TensorRT decides."""
    profiling_verbosity: ProfilingVerbosity
    """How much the plan reports about its layers."""
    dla_core: Annotated[int, Between(0, 7)] | None
    """Core of a deep learning accelerator (Jetson AGX Orin with TensorRT 11.4.1 or later); null: GPU only."""
    dla_gpu_fallback: bool
    """Let the GPU run the layers that the DLA cannot; false: such a layer fails the build."""
    sparse_weights: bool
    """Let TensorRT use the kernels for 2:4 sparse weights."""
    tf32: bool
    """Let float32 layers multiply in TF32 (10 bits of mantissa)."""
    cuda_graph: bool
    """Launch all kernels of a batch size as one captured graph."""
    num_builds: Annotated[int, Between(1, 100)]
    """Build this many times and keep the fastest; the report shows the spread of the builds."""

    def __post_init__(self) -> None:
        if self.error_on_timing_cache_miss and self.timing_cache is None:
            raise ConfigError(
                "error_on_timing_cache_miss is True, expected false where timing_cache is null."
            )
        if self.error_on_timing_cache_miss and self.num_builds > 1:
            raise ConfigError(
                f"num_builds is {self.num_builds}, expected 1 where error_on_timing_cache_miss makes every build the "
                "same."
            )

        if self.dla_gpu_fallback and self.dla_core is None:
            raise ConfigError("dla_gpu_fallback is True, expected false where dla_core is null.")

    def check_profiles(self, max_batch: int) -> None:
        """Raise ConfigError unless the profiles accept every batch of a target."""
        if not all(profile.min <= profile.opt <= profile.max <= max_batch for profile in self.profiles):
            raise ConfigError(
                f"tensorrt.profiles is {self.profiles}, expected min <= opt <= max <= max_batch ({max_batch})."
            )
        covered = {size for profile in self.profiles for size in range(profile.min, profile.max + 1)}
        if self.profiles and len(covered) < max_batch:
            raise ConfigError(
                f"tensorrt.profiles is {self.profiles}, expected profiles that accept every batch of 1..{max_batch} "
                "(max_batch), or none."
            )

    def check_provider(self) -> None:
        """Raise ConfigError for options that ONNX Runtime does not support for a plan.

        It launches kernels one by one, loads no plan with host code, and uses only the first profile.
        """
        for switch in ("cuda_graph", "version_compatible"):
            if getattr(self, switch):
                raise ConfigError(f"tensorrt.{switch} is True, expected false for runtime onnxruntime.")
        if self.dla_core is not None:
            raise ConfigError(f"tensorrt.dla_core is {self.dla_core}, expected null for runtime onnxruntime.")
        if len(self.profiles) > 1:
            raise ConfigError(
                f"tensorrt.profiles holds {len(self.profiles)}, expected one for runtime onnxruntime."
            )

    def check_rtx(self) -> None:
        """Raise ConfigError for options that change nothing in a plan of TensorRT for RTX, or that it refuses."""
        for key, (only, reason) in _FIXED_FOR_RTX.items():
            if (found := getattr(self, key)) != only:
                raise ConfigError(
                    f"tensorrt.{key} is {found}, expected {json.dumps(only)} for runtime tensorrt_rtx, {reason}."
                )

    def profiles_for(self, max_batch: int) -> list[BatchProfile]:
        """Return the declared profiles, or the default profile."""
        return self.profiles or [BatchProfile(1, 1, max_batch)]


def timing_cache_file(options: TensorrtOptions, gpu: Gpu, version: str) -> Path | None:
    """Return the cache file for a GPU and a TensorRT version; None if the target uses no cache."""
    if options.timing_cache is None:
        return None
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    return Path(
        options.timing_cache, f"{name}-sm{gpu.compute_capability.replace('.', '')}-trt{version}.cache"
    )
