"""The same build by hand: the command lines of trtexec and Polygraphy that stand beside each TensorRT engine."""

import shlex
from collections.abc import Iterator
from pathlib import Path

from tasks.parts.runners.contract import InputCard
from tasks.parts.target import Target
from tasks.parts.tensorrt_options import BatchProfile, HardwareCompatibility, TensorrtOptions

COMMANDS_FILE = "commands.sh"

_TRTEXEC_COMPATIBILITY = {
    HardwareCompatibility.ampere_plus: "ampere+",
    HardwareCompatibility.same_compute_capability: "sameComputeCapability",
}


def write_commands(
    out: Path, target: Target, card: InputCard, *, model: Path, input_name: str, major: int
) -> None:
    """Write `out/commands.sh`; paths are relative to the workspace."""
    lines = [
        "# What build_engine did, by hand. Kernels are chosen by timing, so the bytes differ from build to build",
        "# unless both read the same timing cache.",
        shlex.join(trtexec_command(target, card, model=model, input_name=input_name, major=major)),
        shlex.join(polygraphy_command(target, card, model=model, input_name=input_name, major=major)),
    ]
    (out / COMMANDS_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


def trtexec_command(
    target: Target, card: InputCard, *, model: Path, input_name: str, major: int
) -> list[str]:
    """Return the call of trtexec; 11 types networks strongly by itself."""
    options = _options(target)
    flags = [
        f"--onnx={model}",
        "--saveEngine=engine.plan",
        f"--memPoolSize=workspace:{options.workspace_mib}",
        f"--builderOptimizationLevel={options.optimization_level}",
        f"--profilingVerbosity={options.profiling_verbosity}",
    ]
    for index, profile in enumerate(options.profiles_for(target.max_batch)):
        flags += [f"--profile={index}"] if options.profiles else []
        flags += [
            f"--{kind}Shapes={input_name}:{'x'.join(map(str, shape))}"
            for kind, shape in _shapes(profile, card)
        ]
    signs = [f"+{source.upper()}" for source in options.tactic_sources]
    optional = {
        "--stronglyTyped": major < 11,
        "--noTF32": not options.tf32,
        "--sparsity=enable": options.sparse_weights,
        "--versionCompatible": options.version_compatible,
        f"--hardwareCompatibilityLevel={_TRTEXEC_COMPATIBILITY.get(options.hardware_compatibility)}": (
            options.hardware_compatibility in _TRTEXEC_COMPATIBILITY
        ),
        f"--tacticSources={','.join(signs)}": bool(signs),
        f"--maxAuxStreams={options.max_aux_streams}": options.max_aux_streams is not None,
        f"--timingCacheFile={options.timing_cache}/trtexec.cache": options.timing_cache is not None,
        "--errorOnTimingCacheMiss": options.error_on_timing_cache_miss,
        f"--useDLACore={options.dla_core}": options.dla_core is not None,
        "--allowGPUFallback": options.dla_core is not None,
    }
    return ["trtexec", *flags, *(flag for flag, is_wanted in optional.items() if is_wanted)]


def polygraphy_command(
    target: Target, card: InputCard, *, model: Path, input_name: str, major: int
) -> list[str]:
    """Return the call of `polygraphy convert`."""
    options = _options(target)
    command = ["polygraphy", "convert", str(model), "--convert-to", "trt", "-o", "engine.plan"]
    command += ["--pool-limit", f"workspace:{options.workspace_mib}M"]
    command += ["--builder-optimization-level", str(options.optimization_level)]
    command += ["--profiling-verbosity", options.profiling_verbosity.value]
    for profile in options.profiles_for(target.max_batch):
        for kind, shape in _shapes(profile, card):
            command += [f"--trt-{kind}-shapes", f"{input_name}:[{','.join(map(str, shape))}]"]
    if options.hardware_compatibility is not HardwareCompatibility.none:
        command += ["--hardware-compatibility-level", options.hardware_compatibility.value]
    if options.tactic_sources:
        command += ["--tactic-sources", *(source.value for source in options.tactic_sources)]
    if options.max_aux_streams is not None:
        command += ["--max-aux-streams", str(options.max_aux_streams)]
    if options.timing_cache is not None:
        cache = f"{options.timing_cache}/polygraphy.cache"
        command += ["--load-timing-cache", cache, "--save-timing-cache", cache]
    optional = {
        "--strongly-typed": major < 11,
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
        yield kind, (batch, 3, card.height, card.width)
