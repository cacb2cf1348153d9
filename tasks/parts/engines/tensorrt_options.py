"""What a target of runtime tensorrt declares beside the options of every target."""

import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from tasks.core.errors import ConfigError
from tasks.parts.engines.gpu import Gpu

MAX_OPTIMIZATION_LEVEL = 5

OLDEST_TENSORRT = (10, 12)


class HardwareCompatibility(StrEnum):
    """On which other GPUs the engine shall run; anything but `none` costs speed."""

    none = "none"
    ampere_plus = "ampere_plus"
    same_compute_capability = "same_compute_capability"


class ProfilingVerbosity(StrEnum):
    """How much the engine tells of its layers; without `detailed` no precision is proved: PRECISION_MISMATCH."""

    none = "none"
    layer_names_only = "layer_names_only"
    detailed = "detailed"


class TacticSource(StrEnum):
    """Where kernels may come from. The first three exist on TensorRT 10 only."""

    cublas = "cublas"
    cublas_lt = "cublas_lt"
    cudnn = "cudnn"
    edge_mask_convolutions = "edge_mask_convolutions"
    jit_convolutions = "jit_convolutions"


@dataclass(frozen=True)
class BatchProfile:
    """One optimization profile: which batches it takes, and for which one it is fastest."""

    min: int
    opt: int
    max: int


@dataclass(frozen=True)
class TensorrtOptions:
    """Build options; the names are those of TensorRT's IBuilderConfig."""

    workspace_mib: int
    """GPU memory that kernels may use while they are tried and while they run."""
    optimization_level: int
    """0 builds fastest, 5 tries most kernels."""
    tactic_sources: list[TacticSource]
    """Empty: TensorRT's default."""
    profiles: list[BatchProfile]
    """Empty: one profile for 1..max_batch, fastest at 1. Of several the first that fits a batch is used."""
    version_compatible: bool
    """Run on later TensorRT versions too; larger, and slower."""
    hardware_compatibility: HardwareCompatibility
    timing_cache: str | None
    """Folder with one cache per GPU and TensorRT version; null: none."""
    error_on_timing_cache_miss: bool
    """Build only what the cache knows: the same kernels again, bit by bit the same plan, or an error."""
    max_aux_streams: int | None
    """Streams beside the main one; null: TensorRT decides."""
    profiling_verbosity: ProfilingVerbosity
    dla_core: int | None
    """Core of a deep learning accelerator (Jetson), with the GPU for what it cannot run; null: GPU alone."""
    sparse_weights: bool
    """Let TensorRT use the kernels for 2:4 sparse weights."""
    tf32: bool
    """Let float32 layers multiply in TF32 (10 bits of mantissa)."""
    cuda_graph: bool
    """Launch all kernels of a batch size as one captured graph."""
    num_builds: int
    """Build so many times and keep the fastest; the report says how far the builds lie apart."""

    def check(self, target: str, max_batch: int) -> None:
        """Raise ConfigError for values that no build could use."""

        def require(is_met: bool, field: str, allowed: str) -> None:
            if not is_met:
                found = getattr(self, field)
                raise ConfigError(f"target.{target}.tensorrt.{field} is {found!r}, allowed: {allowed}.")

        require(1 <= self.workspace_mib <= 2**20, "workspace_mib", "1..1048576")
        levels_ok = 0 <= self.optimization_level <= MAX_OPTIMIZATION_LEVEL
        require(levels_ok, "optimization_level", f"0..{MAX_OPTIMIZATION_LEVEL}")
        profiles_ok = all(1 <= one.min <= one.opt <= one.max <= max_batch for one in self.profiles)
        require(profiles_ok, "profiles", f"1 <= min <= opt <= max <= max_batch ({max_batch})")
        covered = {n for one in self.profiles for n in range(one.min, one.max + 1)}
        is_whole = not self.profiles or len(covered) == max_batch
        require(
            is_whole, "profiles", f"profiles that take every batch of 1..{max_batch} (max_batch), or none"
        )
        cache_ok = not (self.error_on_timing_cache_miss and self.timing_cache is None)
        require(cache_ok, "error_on_timing_cache_miss", "false where timing_cache is null")
        builds_ok = self.num_builds == 1 or not self.error_on_timing_cache_miss
        require(builds_ok, "num_builds", "1 where error_on_timing_cache_miss makes every build the same")
        streams_ok = self.max_aux_streams is None or 0 <= self.max_aux_streams <= 64
        require(streams_ok, "max_aux_streams", "0..64 or null")
        require(self.dla_core is None or 0 <= self.dla_core <= 7, "dla_core", "0..7 or null")
        require(1 <= self.num_builds <= 100, "num_builds", "1..100")

    def profiles_for(self, max_batch: int) -> list[BatchProfile]:
        """Return the declared profiles, or the one that stands for none."""
        return self.profiles or [BatchProfile(1, 1, max_batch)]


def timing_cache_file(options: TensorrtOptions, gpu: Gpu, version: str) -> Path | None:
    """Return the one file of a GPU and a TensorRT version; None where the target wants no cache."""
    if options.timing_cache is None:
        return None
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")
    return Path(
        options.timing_cache, f"{name}-sm{gpu.compute_capability.replace('.', '')}-trt{version}.cache"
    )
