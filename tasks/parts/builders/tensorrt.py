"""Engines for TensorRT: the fastest of several plans of a graph. Not run on real hardware.

Importing this module needs TensorRT and pycuda.
"""

import logging
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tasks.parts.builders.contract import Built, GraphSource
from tasks.parts.builders.frames import fit_frames
from tasks.parts.builders.graph_rewrites import round_rest
from tasks.parts.builders.report import new_manifest
from tasks.parts.builders.tensorrt_commands import describe_build, write_commands
from tasks.parts.builders.tensorrt_plan import build_plan
from tasks.parts.data.input_card import InputCard
from tasks.parts.engines.gpu import find_gpus
from tasks.parts.engines.machine import installed_version
from tasks.parts.engines.manifest import GRAPH_FILE, count_precisions, engine_libraries
from tasks.parts.engines.open_engine import load_runner
from tasks.parts.engines.rounds import rounds_ms
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.engines.target import Reads, Target
from tasks.parts.engines.tensorrt import runner
from tasks.parts.engines.tensorrt.inspector import read_layers
from tasks.parts.engines.tensorrt.tactics import count_units, sum_up_units
from tasks.parts.engines.tensorrt_flavour import choose_tensorrt
from tasks.parts.onnx_graphs.graph import write_graph

logger = logging.getLogger(__name__)

_ROUNDS_OF_BUILDS = 20


def build_file(target: Target, source: GraphSource, engine: Path) -> Built:
    """Build `num_builds` plans and keep the fastest; TensorRT picks kernels by timing them."""
    choose_tensorrt(target.compiler)
    version, gpu = installed_version(target.compiler), find_gpus()[0]
    target = replace(target, runtime=target.compiler)  # here TensorRT itself runs the plan
    assert target.tensorrt is not None
    file, plans = engine / runner.ENGINE_FILE, []
    rewritten = source.rewritten(target)
    encoded = fit_frames(target, rewritten, source.card)
    graph = fit_frames(target, round_rest(target, rewritten, source.images_NCHW), source.card)
    for number in range(1, target.tensorrt.num_builds + 1):
        logger.info("build_engine: build %d of %d", number, target.tensorrt.num_builds)
        plans.append(engine / f"{number}.plan")
        is_cache_read = (
            target.tensorrt.num_builds == 1
        )  # reading the timing cache would make all builds the same
        plans[-1].write_bytes(build_plan(graph, target, gpu, is_cache_read=is_cache_read))
    latencies_ms = _time_builds(plans, target, version, source) if len(plans) > 1 else ()
    plans[int(np.argmin(latencies_ms)) if latencies_ms else 0].rename(file)
    for plan in plans:
        plan.unlink(missing_ok=True)
    with runner.PrimaryContext():
        plan = runner.load_plan(file.read_bytes(), target, engine_libraries(file, target))
        layers = read_layers(runner.inspect(plan, target))
    units = count_units(layer.kernel for layer in layers)
    told = sum_up_units(units, may_be_sparse=target.tensorrt.sparse_weights)
    logger.info("build_engine: kernels of %d layers: %s", len(layers), told)
    if target.compiler is Runtime.tensorrt:  # trtexec and Polygraphy's defaults are of this flavour
        write_commands(engine, target, describe_build(graph, gpu, version, is_quantized=source.is_quantized))
    write_graph(graph, engine / GRAPH_FILE)
    return Built(file, count_precisions(layers), encoded, layers, latencies_ms, units)


def _time_builds(plans: list[Path], target: Target, version: str, source: GraphSource) -> tuple[float, ...]:
    """Return the median latency of each build of the same graph in ms at batch 1, measured in interleaved rounds."""
    with ExitStack() as stack:
        runners = {
            plan.name: stack.enter_context(
                load_runner(plan, new_manifest(target, version, source.card, file=plan))
            )
            for plan in plans
        }
        calls = {name: opened.run for name, opened in runners.items()}
        inputs = source.images_NCHW[:1] if target.reads is Reads.normalised else _frame(source.card)
        rounds = rounds_ms(calls, inputs, _ROUNDS_OF_BUILDS)
    return tuple(float(np.median(np.concatenate(rounds[plan.name]))) for plan in plans)


def _frame(card: InputCard) -> NDArray[np.uint8]:
    """Return a drawn frame [1, H, W, C]."""
    channels, height, width = card.image_shape
    return np.random.default_rng(0).integers(0, 256, (1, height, width, channels), np.uint8)
