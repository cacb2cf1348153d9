"""Write the commands of NVIDIA's tools for a plan: build it again, time and profile it, compare its logits.

The options are those of trtexec 10.12 to 11.1, Nsight Systems since 2023, Nsight Compute since 2024 and Polygraphy
0.53. What was held against the tools themselves stands in docs/architecture.md; nothing was run on real hardware.
"""

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnx import ModelProto

from tasks.parts.custom_operators import OPERATORS_FOLDER
from tasks.parts.engines.gpu import Gpu
from tasks.parts.engines.manifest import GRAPH_FILE
from tasks.parts.engines.runtimes import Precision
from tasks.parts.engines.target import Target
from tasks.parts.engines.tensorrt_options import (
    GONE_IN_ELEVEN,
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

_GRAPH = f"$engine/{GRAPH_FILE}"
"""The graph that TensorRT was given; `engine` is the folder of the script."""
_PLAN, _REBUILT = "$plan", "rebuilt.plan"

_HEAD = f"""\
#!/usr/bin/env bash
# Commands for this engine, to run from the workspace: all of them with bash, or one by one once the two variables are
# set. They write into the current folder.
set -eu
engine=$(dirname "$0")
plan="$engine/engine.plan"
test -f "$plan" || plan={_REBUILT}  # an engine of ONNX Runtime holds the plan inside"""

_REBUILD = """\
# Build the plan again, in two ways. Kernels are chosen by timing, so bytes differ between builds unless all of them
# read the same timing cache, as these commands do."""

_TIME = "# Latency at batch 1 and, from a second run, the time of each layer; then two inferences at a time."

_TIMELINE = "# A timeline with the NVTX ranges of TensorRT's layers. Nsight Systems opens timeline.nsys-rep."

_KERNELS = r"""# The three slowest kernels of it in detail. Nsight Compute opens kernels.ncu-rep.
kernels=$(nsys stats --quiet --force-export=true --report cuda_gpu_kern_sum:base --format csv --output - \
    timeline.nsys-rep | awk -F, '/^[0-9]/ && count++ < 3 { gsub(/"/, "", $NF); print $NF }' | paste -s -d '|' -)"""

_COMPARE = (
    "# The plan's logits against ONNX Runtime's, for the same uniform noise: signal-to-noise ratio in dB."
)


@dataclass(frozen=True)
class Build:
    """What a build was made from, and on which GPU."""

    input_name: str
    input_shape: tuple[int, ...]
    """For one image."""
    gpu: Gpu
    version: str
    """Version of TensorRT."""
    is_quantized: bool
    """Whether the graph holds Q/DQ pairs."""

    @property
    def is_of_ten(self) -> bool:
        """Whether strong types, a separate profile run and CUDA graphs need a flag; with 11 they are the default."""
        return int(self.version.partition(".")[0]) < 11


def describe_build(graph: ModelProto, gpu: Gpu, version: str, *, is_quantized: bool) -> Build:
    """Return the description of a build of a graph."""
    [image] = graph.graph.input
    shape = tuple(axis.dim_value for axis in image.type.tensor_type.shape.dim[1:])
    return Build(image.name, shape, gpu, version, is_quantized)


def write_commands(out: Path, target: Target, build: Build) -> None:
    """Write `out/commands.sh`; but for the files beside it, paths are relative to the workspace."""
    sections = [
        (_REBUILD, [trtexec_command(target, build), polygraphy_command(target, build)]),
        (_TIME, timing_commands(target, build)),
        (_TIMELINE, [timeline_command(target, build)]),
        (_KERNELS, [kernels_command(target, build)]),
        (_COMPARE, comparing_commands(target, build)),
    ]
    texts = ["\n".join([text, *map(_line, commands)]) for text, commands in sections if commands]
    (out / COMMANDS_FILE).write_text("\n\n".join([_HEAD, *texts]) + "\n", encoding="utf-8")


def _line(command: Sequence[str]) -> str:
    """Return a command as bash reads it; arguments with a variable stand in double quotes."""
    return " ".join(f'"{word}"' if "$" in word else shlex.quote(word) for word in command)


def trtexec_command(target: Target, build: Build) -> list[str]:
    """Return the trtexec command that builds."""
    options = _options(target)
    flags = [
        f"--onnx={_GRAPH}",
        f"--saveEngine={_REBUILT}",
        f"--memPoolSize=workspace:{options.workspace_mib}",
        f"--builderOptimizationLevel={options.optimization_level}",
        f"--profilingVerbosity={options.profiling_verbosity}",
    ]
    profiles = options.profiles_for(target.max_batch) if _is_dynamic(target) else []
    for index, profile in enumerate(profiles):
        flags += [f"--profile={index}"] if options.profiles else []
        flags += [
            f"--{kind}Shapes={build.input_name}:{'x'.join(map(str, shape))}"
            for kind, shape in _shapes(profile, build.input_shape)
        ]
    # trtexec modifies its default sources, whereas the builder's bits replace them.
    known = [source for source in TacticSource if build.is_of_ten or source not in GONE_IN_ELEVEN]
    signs = [f"{'+' if source in options.tactic_sources else '-'}{source.upper()}" for source in known]
    cache = timing_cache_file(options, build.gpu, build.version)
    optional = {
        "--stronglyTyped": build.is_of_ten,
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
    flags += [f"--dynamicPlugins={plugin}" for plugin in _plugins(target)]
    return ["trtexec", *flags, *(flag for flag, is_wanted in optional.items() if is_wanted)]


def polygraphy_command(target: Target, build: Build) -> list[str]:
    """Return the `polygraphy convert` command."""
    options = _options(target)
    command = ["polygraphy", "convert", _GRAPH, "--convert-to", "trt", "-o", _REBUILT]
    command += ["--pool-limit", f"workspace:{options.workspace_mib}M"]
    command += ["--builder-optimization-level", str(options.optimization_level)]
    command += ["--profiling-verbosity", options.profiling_verbosity.value]
    for profile in options.profiles_for(target.max_batch):
        for kind, shape in _shapes(profile, build.input_shape):
            command += [f"--trt-{kind}-shapes", f"{build.input_name}:[{','.join(map(str, shape))}]"]
    if options.hardware_compatibility is not HardwareCompatibility.none:
        command += ["--hardware-compatibility-level", options.hardware_compatibility.value]
    if options.tactic_sources:
        command += ["--tactic-sources", *(source.value for source in options.tactic_sources)]
    if options.max_aux_streams is not None:
        command += ["--max-aux-streams", str(options.max_aux_streams)]
    if target.custom_operators:
        command += ["--plugins", *_plugins(target)]
    cache = timing_cache_file(options, build.gpu, build.version)
    if cache is not None:
        command += ["--load-timing-cache", str(cache)]
    optional = {
        "--strongly-typed": build.is_of_ten,
        "--tf32": options.tf32,
        "--sparse-weights": options.sparse_weights,
        "--version-compatible": options.version_compatible,
        "--error-on-timing-cache-miss": options.error_on_timing_cache_miss,
        "--use-dla": options.dla_core is not None,
        "--allow-gpu-fallback": options.dla_core is not None,
    }
    return [*command, *(flag for flag, is_wanted in optional.items() if is_wanted)]


def timing_commands(target: Target, build: Build) -> list[list[str]]:
    """Return the trtexec commands that time the plan: inferences one by one with their layers, then two at a time."""
    graphs = _graph_flags(build, is_wanted=_options(target).cuda_graph)
    layers = ["--separateProfileRun"] if build.is_of_ten else []
    layers += ["--dumpProfile", "--exportProfile=layer_times.json"]
    return [
        [
            *_load_command(target, build),
            *graphs,
            "--exportTimes=times.json",
            *layers,
            "--exportLayerInfo=layers.json",
        ],
        [*_load_command(target, build), *graphs, "--infStreams=2", "--exportTimes=times_of_2_streams.json"],
    ]


def timeline_command(target: Target, build: Build) -> list[str]:
    """Return the Nsight Systems command; with a CUDA graph the layers would have no ranges, so it runs without."""
    nsys = ["nsys", "profile", "--trace=cuda,nvtx,osrt", "--force-overwrite=true", "--output=timeline"]
    graphs = _graph_flags(build, is_wanted=False)
    return [*nsys, *_load_command(target, build), *graphs, "--warmUp=0", "--duration=0", "--iterations=50"]


def kernels_command(target: Target, build: Build) -> list[str]:
    """Return the Nsight Compute command for the kernels that the variable `kernels` names, separated by bars."""
    ncu = ["ncu", "--set", "full", "--kernel-name", "regex:^($kernels)$", "--launch-count", "12"]
    ncu += ["--force-overwrite", "--export", "kernels"]
    graphs = _graph_flags(build, is_wanted=False)
    return [*ncu, *_load_command(target, build), *graphs, "--warmUp=0", "--duration=0", "--iterations=1"]


def comparing_commands(target: Target, build: Build) -> list[list[str]]:
    """Return the Polygraphy commands that run graph and plan.

    None for BF16, which ONNX Runtime does not convolve, and for plugins, whose operators it lacks.
    """
    if target.precision is Precision.bf16 or target.custom_operators:
        return []
    shape = ",".join(map(str, (1, *build.input_shape)))
    floor_db = target.min_agreement_int8_db if build.is_quantized else target.min_agreement_db
    inputs, outputs = "inputs.json", "onnxruntime.json"
    reference = ["polygraphy", "run", _GRAPH, "--onnxrt", "--input-shapes", f"{build.input_name}:[{shape}]"]
    reference += ["--val-range", "[-2,2]", "--iterations", "4", "--save-inputs", inputs]
    plan = ["polygraphy", "run", _PLAN, "--model-type", "engine", "--trt", "--load-inputs", inputs]
    plan += ["--load-outputs", outputs, "--compare", "snr", "--snr-threshold", f"{floor_db:g}"]
    return [[*reference, "--save-outputs", outputs], plan]


def _load_command(target: Target, build: Build) -> list[str]:
    """Return the start of a trtexec command that runs the plan at batch 1."""
    options = _options(target)
    command = ["trtexec", f"--loadEngine={_PLAN}"]
    if _is_dynamic(target):
        command.append(f"--shapes={build.input_name}:{'x'.join(map(str, (1, *build.input_shape)))}")
    command += [f"--dynamicPlugins={plugin}" for plugin in _plugins(target)]
    if options.version_compatible:
        command.append("--versionCompatible")
    if options.dla_core is not None:
        command.append(f"--useDLACore={options.dla_core}")
    return command


def _graph_flags(build: Build, *, is_wanted: bool) -> list[str]:
    """Return how trtexec is told to launch a captured CUDA graph, or not to; its default changed with 11."""
    if build.is_of_ten:
        return ["--useCudaGraph"] if is_wanted else []
    return [] if is_wanted else ["--noCudaGraph"]


def _is_dynamic(target: Target) -> bool:
    """Return whether the graph takes several batches; trtexec refuses shapes for one that takes one."""
    return target.max_batch > 1


def _plugins(target: Target) -> list[str]:
    """Return the paths of the libraries with plugins, beside the script."""
    return [f"$engine/{OPERATORS_FOLDER}/{library.name}" for library in target.custom_operators]


def _options(target: Target) -> TensorrtOptions:
    assert target.tensorrt is not None
    return target.tensorrt


def _shapes(profile: BatchProfile, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    for kind, batch in (("min", profile.min), ("opt", profile.opt), ("max", profile.max)):
        yield kind, (batch, *shape)
