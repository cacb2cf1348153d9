"""Write the trtexec and Polygraphy commands that repeat a TensorRT build by hand."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.parts.data.input_card import InputCard
from tasks.parts.engines.gpu import Gpu
from tasks.parts.engines.target import Target
from tasks.parts.engines.tensorrt_options import (
    BatchProfile,
    HardwareCompatibility,
    TacticSource,
    TensorrtOptions,
    timing_cache_file,
)

COMMANDS_FILE = "commands.sh"

_TRTEXEC_COMPATIBILITY = {
    HardwareCompatibility.ampere_plus: "ampere+",
    HardwareCompatibility.same_compute_capability: "sameComputeCapability",
}


@dataclass(frozen=True)
class Build:
    """What a build was made from, and on which GPU."""

    model: Path
    input_name: str
    card: InputCard
    gpu: Gpu
    version: str
    """Version of TensorRT."""

    @property
    def is_typed_by_flag(self) -> bool:
        """Whether strong typing needs a flag; from 11 on all networks are strongly typed."""
        return int(self.version.partition(".")[0]) < 11


def write_commands(out: Path, target: Target, build: Build) -> None:
    """Write `out/commands.sh`; paths are relative to the workspace, but for the graph.onnx beside this file."""
    lines = [
        "# Repeats the build of build_engine. Kernels are chosen by timing, so the bytes differ between builds",
        "# unless all builds read the same timing cache, as these commands do. graph.onnx, where named, is the file",
        "# beside this one: the graph in the target's scheme and precision.",
        shlex.join(trtexec_command(target, build)),
        shlex.join(polygraphy_command(target, build)),
    ]
    (out / COMMANDS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def trtexec_command(target: Target, build: Build) -> list[str]:
    """Return the trtexec command."""
    options = _options(target)
    flags = [
        f"--onnx={build.model}",
        "--saveEngine=engine.plan",
        f"--memPoolSize=workspace:{options.workspace_mib}",
        f"--builderOptimizationLevel={options.optimization_level}",
        f"--profilingVerbosity={options.profiling_verbosity}",
    ]
    for index, profile in enumerate(options.profiles_for(target.max_batch)):
        flags += [f"--profile={index}"] if options.profiles else []
        flags += [
            f"--{kind}Shapes={build.input_name}:{'x'.join(map(str, shape))}"
            for kind, shape in _shapes(profile, build.card)
        ]
    # trtexec modifies its default sources, whereas the builder's bits replace them.
    signs = [f"{'+' if source in options.tactic_sources else '-'}{source.upper()}" for source in TacticSource]
    cache = timing_cache_file(options, build.gpu, build.version)
    optional = {
        "--stronglyTyped": build.is_typed_by_flag,
        "--noTF32": not options.tf32,
        "--sparsity=enable": options.sparse_weights,
        "--versionCompatible": options.version_compatible,
        f"--hardwareCompatibilityLevel={_TRTEXEC_COMPATIBILITY.get(options.hardware_compatibility)}": (
            options.hardware_compatibility in _TRTEXEC_COMPATIBILITY
        ),
        f"--tacticSources={','.join(signs)}": bool(options.tactic_sources),
        f"--maxAuxStreams={options.max_aux_streams}": options.max_aux_streams is not None,
        f"--timingCacheFile={cache}": cache is not None,
        "--errorOnTimingCacheMiss": options.error_on_timing_cache_miss,
        f"--useDLACore={options.dla_core}": options.dla_core is not None,
        "--allowGPUFallback": options.dla_core is not None,
    }
    return ["trtexec", *flags, *(flag for flag, is_wanted in optional.items() if is_wanted)]


def polygraphy_command(target: Target, build: Build) -> list[str]:
    """Return the `polygraphy convert` command."""
    options = _options(target)
    command = ["polygraphy", "convert", str(build.model), "--convert-to", "trt", "-o", "engine.plan"]
    command += ["--pool-limit", f"workspace:{options.workspace_mib}M"]
    command += ["--builder-optimization-level", str(options.optimization_level)]
    command += ["--profiling-verbosity", options.profiling_verbosity.value]
    for profile in options.profiles_for(target.max_batch):
        for kind, shape in _shapes(profile, build.card):
            command += [f"--trt-{kind}-shapes", f"{build.input_name}:[{','.join(map(str, shape))}]"]
    if options.hardware_compatibility is not HardwareCompatibility.none:
        command += ["--hardware-compatibility-level", options.hardware_compatibility.value]
    if options.tactic_sources:
        command += ["--tactic-sources", *(source.value for source in options.tactic_sources)]
    if options.max_aux_streams is not None:
        command += ["--max-aux-streams", str(options.max_aux_streams)]
    cache = timing_cache_file(options, build.gpu, build.version)
    if cache is not None:
        command += ["--load-timing-cache", str(cache)]
    optional = {
        "--strongly-typed": build.is_typed_by_flag,
        "--tf32": options.tf32,
        "--sparse-weights": options.sparse_weights,
        "--version-compatible": options.version_compatible,
        "--error-on-timing-cache-miss": options.error_on_timing_cache_miss,
        "--use-dla": options.dla_core is not None,
        "--allow-gpu-fallback": options.dla_core is not None,
    }
    return [*command, *(flag for flag, is_wanted in optional.items() if is_wanted)]


def _options(target: Target) -> TensorrtOptions:
    assert target.tensorrt is not None
    return target.tensorrt


def _shapes(profile: BatchProfile, card: InputCard) -> Iterator[tuple[str, tuple[int, ...]]]:
    for kind, batch in (("min", profile.min), ("opt", profile.opt), ("max", profile.max)):
        yield kind, (batch, *card.image_shape)
