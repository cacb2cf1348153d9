"""Build a TensorRT plan from an ONNX graph: one path for TensorRT 10.12 to 11. Not run on real hardware.

The network is strongly typed: the precision of every layer is that of the graph (FP16 by convert_precision, INT8 by
Q/DQ), and no builder flag may change it. Importing this module needs TensorRT.

Polygraphy's loaders are less strict: the nodes that TensorRT refuses appear in the log and not in the error, a
damaged timing cache counts as empty and is overwritten in place, and DLA is always core 0.
"""

import fcntl
import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorrt as trt
from onnx import ModelProto
from rich.console import Console
from rich.progress import Progress, TaskID

from tasks.core.errors import BuildFailed
from tasks.parts.builders.tensorrt_capability import aim_at_gpu
from tasks.parts.builders.tensorrt_dla import check_fallbacks, place_on_dla
from tasks.parts.builders.tensorrt_network import check_types, count_products, origin_of
from tasks.parts.custom_operators import check_libraries
from tasks.parts.engines.gpu import Gpu
from tasks.parts.engines.manifest import GRAPH_FILE
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.engines.target import Target
from tasks.parts.engines.tensorrt.log import LOG, describe_errors
from tasks.parts.engines.tensorrt.plugins import load_plugins
from tasks.parts.engines.tensorrt_options import HardwareCompatibility, TensorrtOptions, timing_cache_file
from tasks.parts.onnx_graphs.graph import is_too_large, node_sources, write_graph

logger = logging.getLogger(__name__)

_SHOWN_ERRORS = 5
_OUT_OF_MEMORY = re.compile(r"out ?of ?memory|insufficient memory|cuda failure: 2\b", re.IGNORECASE)
_MIB = 2**20


class BuildProgress(trt.IProgressMonitor):  # type: ignore[misc]
    """Draws one bar per phase of a build; silent if stderr is not a terminal."""

    def __init__(self, progress: Progress) -> None:
        trt.IProgressMonitor.__init__(self)
        self._progress = progress
        self._bars: dict[str, TaskID] = {}

    def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
        """Add a bar, indented below its parent's."""
        indent = "" if parent_phase is None else "  "
        self._bars[phase_name] = self._progress.add_task(indent + phase_name, total=num_steps)

    def step_complete(self, phase_name: str, step: int) -> bool:
        """Advance a bar; return that the build continues."""
        self._progress.update(self._bars[phase_name], completed=step + 1)
        return True

    def phase_finish(self, phase_name: str) -> None:
        """Remove a bar."""
        self._progress.remove_task(self._bars.pop(phase_name))


def build_plan(
    graph: ModelProto,
    target: Target,
    gpu: Gpu,
    *,
    is_cache_read: bool = True,
    are_tensors_marked: bool = False,
) -> bytes:
    """Return the serialized engine; without `is_cache_read` all kernels are timed again.

    With `are_tensors_marked` a run can read the tensors that survive fusion (tensorrt/debug_tensors.py). Raises
    BuildFailed with the module and file:line of the nodes that TensorRT refuses, or if GPU memory is too small.
    """
    options = target.tensorrt
    assert options is not None
    num_before, num_warnings = len(LOG.errors), len(LOG.warnings)
    builder = trt.Builder(LOG)
    load_plugins(
        builder.get_plugin_registry(), check_libraries(target.custom_operators, target.operators_key)
    )
    network, _parser = parse_graph(builder, graph, target)
    logger.info("build_engine: TensorRT parsed products in %s", count_products(network))
    if are_tensors_marked and not network.mark_unfused_tensors_as_debug_tensors():
        raise BuildFailed(f"Target {target.name}: {_explain(LOG.errors[num_before:], target)}")
    config = builder.create_builder_config()
    require(config is not None, "to create a configuration", target)
    configure(config, target, major=int(trt.__version__.partition(".")[0]))
    add_profiles(config, builder, target, graph)
    if options.dla_core is not None:
        place_on_dla(config, builder, network, target)
    console = Console(stderr=True)
    bars = Progress(console=console, transient=True, disable=not console.is_terminal)
    with _timing_cache(config, options, gpu, is_read=is_cache_read), bars as progress:
        config.progress_monitor = BuildProgress(progress)
        plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BuildFailed(f"Target {target.name}: {_explain(LOG.errors[num_before:], target)}")
    if options.dla_core is not None:
        check_fallbacks(LOG.warnings[num_warnings:], target)
    return bytes(plan)


def parse_graph(
    builder: "trt.Builder", graph: ModelProto, target: Target
) -> "tuple[trt.INetworkDefinition, trt.OnnxParser]":
    """Return the network of a graph, checked, and its parser, which owns weights until the plan is built.

    Raises BuildFailed for nodes that TensorRT refuses or reads in other types than the graph has.
    """
    # TensorRT 11 has no other kind of network and ignores the flag.
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    require(network is not None, "to create a network", target)
    parser = trt.OnnxParser(network, LOG)
    if not _parse(parser, graph):
        raise BuildFailed(f"Target {target.name}: {describe_parser_errors(parser, graph)}")
    check_types(network, graph, target)
    return network, parser


def _parse(parser: "trt.OnnxParser", graph: ModelProto) -> bool:
    """Let the parser read a graph: from a file with its weights beside it, if one message cannot hold it."""
    if not is_too_large(graph):
        return bool(parser.parse(graph.SerializeToString()))
    with tempfile.TemporaryDirectory() as folder:
        write_graph(graph, file := Path(folder, GRAPH_FILE))
        return bool(parser.parse_from_file(str(file)))


def require(is_accepted: bool, call: str, target: Target) -> None:
    """Raise BuildFailed with TensorRT's latest error unless it accepted a call."""
    if not is_accepted:
        raise BuildFailed(
            f"Target {target.name}: TensorRT {trt.__version__} refuses {call} ({describe_errors(LOG.errors[-1:])})."
        )


def add_profiles(
    config: "trt.IBuilderConfig", builder: "trt.Builder", target: Target, graph: ModelProto
) -> None:
    """Declare the batches that a plan accepts, in the order of the target's profiles."""
    assert target.tensorrt is not None
    [image] = graph.graph.input
    size = [axis.dim_value for axis in image.type.tensor_type.shape.dim[1:]]
    for number, batch in enumerate(target.tensorrt.profiles_for(target.max_batch)):
        profile = builder.create_optimization_profile()
        require(profile is not None, "to create an optimization profile", target)
        least, best, most = ((images, *size) for images in (batch.min, batch.opt, batch.max))
        try:
            profile.set_shape(image.name, min=least, opt=best, max=most)
        except RuntimeError as error:
            raise BuildFailed(
                f"Target {target.name}: TensorRT refuses a profile of {least}, {best}, {most} ({error})."
            ) from error
        # The number of the profile, or -1.
        is_added = config.add_optimization_profile(profile) == number
        require(is_added, f"the profile of {batch} (target.{target.name}.tensorrt.profiles)", target)


def configure(config: "trt.IBuilderConfig", target: Target, *, major: int) -> None:
    """Set the options that a target declares."""
    options = target.tensorrt
    assert options is not None
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, options.workspace_mib * _MIB)
    config.builder_optimization_level = options.optimization_level
    config.profiling_verbosity = trt.ProfilingVerbosity.__members__[options.profiling_verbosity.upper()]
    if target.compiler is Runtime.tensorrt_rtx:
        aim_at_gpu(config, target)
    elif options.hardware_compatibility is not HardwareCompatibility.none:
        config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.__members__[
            options.hardware_compatibility.upper()
        ]
    if options.tactic_sources:
        is_set = config.set_tactic_sources(_tactic_bits(options, major))
        require(is_set, f"tactic_sources {', '.join(options.tactic_sources)}", target)
    if options.max_aux_streams is not None:
        config.max_aux_streams = options.max_aux_streams
    for flag, is_wanted in (
        (trt.BuilderFlag.VERSION_COMPATIBLE, options.version_compatible),
        (trt.BuilderFlag.SPARSE_WEIGHTS, options.sparse_weights),
        (trt.BuilderFlag.TF32, options.tf32),
        (trt.BuilderFlag.ERROR_ON_TIMING_CACHE_MISS, options.error_on_timing_cache_miss),
    ):
        if is_wanted:
            config.set_flag(flag)
        else:
            config.clear_flag(flag)  # TF32 is on by default


def _tactic_bits(options: TensorrtOptions, major: int) -> int:
    known = trt.TacticSource.__members__
    missing = [source.value for source in options.tactic_sources if source.upper() not in known]
    if missing:
        raise BuildFailed(
            f"TensorRT {major} has no tactic source {', '.join(missing)}; it has {', '.join(known).lower()}. Correct "
            "tensorrt.tactic_sources of the target."
        )
    return sum(1 << int(known[source.upper()]) for source in options.tactic_sources)


def describe_parser_errors(parser: "trt.OnnxParser", graph: ModelProto) -> str:
    """Describe which nodes TensorRT refuses, and where in the network's source they come from."""
    sources = node_sources(graph)
    lines = []
    for index in range(min(parser.num_errors, _SHOWN_ERRORS)):
        error: trt.ParserError = parser.get_error(index)
        name = error.node_name() or f"node {error.node()}"
        lines.append(f"{error.node_operator()} '{name}'{origin_of(name, sources)}: {error.desc().strip()}")
    return (
        f"TensorRT {trt.__version__} refuses {parser.num_errors} nodes of the graph: {'; '.join(lines)}. Replace "
        "these operators in the network, or lower export_onnx.opset."
    )


def _explain(errors: list[str], target: Target) -> str:
    reasons = describe_errors(errors)
    if any(_OUT_OF_MEMORY.search(error) for error in errors):
        return (
            f"GPU memory is too small for the build ({reasons}). End other processes on the GPU, or lower "
            f"target.{target.name}.tensorrt.workspace_mib, .optimization_level or target.{target.name}.max_batch."
        )
    return f"TensorRT {trt.__version__} cannot build the engine ({reasons})."


@contextmanager
def _timing_cache(
    config: "trt.IBuilderConfig", options: TensorrtOptions, gpu: Gpu, *, is_read: bool
) -> Iterator[None]:
    """Build with the timings of the cache file, and merge new ones into it; safe for concurrent builds."""
    path = timing_cache_file(options, gpu, trt.__version__)
    if path is None:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    known = path.read_bytes() if is_read and path.is_file() else b""
    cache = config.create_timing_cache(known)
    if cache is None or not config.set_timing_cache(cache, ignore_mismatch=False):
        raise BuildFailed(
            f"{path}: TensorRT refuses this timing cache; it is damaged or of another GPU. Delete it; the next build "
            "writes it again."
        )
    yield
    learnt = config.get_timing_cache()
    if learnt is None:
        logger.warning("TensorRT returns no timings, and %s stays unchanged", path)
        return
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file() and (others := path.read_bytes()) != known:
            theirs = config.create_timing_cache(others)
            if theirs is None or not learnt.combine(theirs, ignore_mismatch=False):
                logger.warning(
                    "%s cannot be merged with the timings of this build, and stays unchanged", path
                )
                return
        draft = path.with_suffix(".draft")
        draft.write_bytes(bytes(learnt.serialize()))
        draft.replace(path)
