"""Measure the roofs of a target through its own runtime, with its own options."""

import importlib
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tasks.parts.builders.contract import GraphSource
from tasks.parts.builders.executed_layers import LayerRow, join_nodes, list_rows
from tasks.parts.builders.report import new_manifest
from tasks.parts.engines.machine import check_versions, missing_cpu_flags
from tasks.parts.engines.manifest import FloatArray
from tasks.parts.engines.open_engine import load_runner
from tasks.parts.engines.runner import Runner
from tasks.parts.engines.target import Target
from tasks.parts.measuring.machine_state import Machine, read_machine
from tasks.parts.roofs.probes import Probe, chain, convolution, matrix_product, moves
from tasks.parts.roofs.rates import (
    Effort,
    choose_roof,
    compute_roof,
    cost_of_calls,
    memory_roof,
    moved_rate,
    rate_of,
)
from tasks.parts.roofs.roofs import ComputeRoof, Rate, Roofs

INT8 = "int8"
_SHORT, _LONG = 4, 68
"""Lengths of the chains whose difference is the cost of a layer."""
_CALLS_IN_PROFILE = 12
_FEW_CALLS = 5
"""Of layers that take milliseconds: those that compute, and those that move as much as caches cannot hold."""
_MUCH_MOVED = 64 * 1024**2
"""Bytes of the working set beyond which few calls are enough."""
_LEAST_MOVED = 0.4
"""Share of the working set that a layer has to move to count: with 16 bits for a value it is half of it."""


@dataclass(frozen=True)
class _Loaded:
    probe: Probe
    runner: Runner
    rows: Mapping[str, LayerRow]
    images_NCHW: FloatArray

    def profile_ms(self, num_calls: int = _CALLS_IN_PROFILE) -> dict[str, float]:
        """Return the time of each layer, from the runtime's profiler."""
        times = self.runner.profile(self.images_NCHW, num_calls)
        return {time.name: time.milliseconds for time in times if time.name in self.rows}


def measure_roofs(target: Target, effort: Effort) -> Roofs:
    """Return what the target's runtime reaches on this machine.

    `reason` says why if nothing was measured: the CPU lacks a declared flag.
    """
    version, machine = check_versions(target), read_machine(target.device)
    if missing := missing_cpu_flags(target):
        return _nothing(target, version, machine, f"this CPU lacks {', '.join(missing)}")
    if target.runtime.traits.reads_checkpoints:
        from tasks.parts.roofs.torch import measure_torch_roofs

        return measure_torch_roofs(target, version, machine, effort)
    target = replace(target.plain, max_batch=1)
    compute = _compute_roofs(target, version, machine, effort.num_rounds)
    with _loaded(target, version, [chain(_SHORT), chain(_LONG)]) as (short, long):
        chains = {_SHORT: short.runner.run, _LONG: long.runner.run}
        layer_ms, call_ms = cost_of_calls(chains, short.images_NCHW, effort.num_rounds)
        profiled_ms = statistics.median(
            list(long.profile_ms().values()) or [0.0]
        )  # OpenVINO rounds down to 1 us
    memory = [
        memory_roof(target, size, bandwidth)
        for size in effort.working_sets_bytes
        if (bandwidth := _bandwidth(target, version, size, effort.num_rounds, profiled_ms))
    ]
    return Roofs(
        target=target.name,
        runtime_version=version,
        num_threads=target.num_threads,
        machine=machine,
        compute=compute,
        memory=tuple(memory),
        layer_ms=layer_ms,
        call_ms=call_ms,
        profiled_layer_ms=profiled_ms,
        reason="",
    )


def _compute_roofs(
    target: Target, version: str, machine: Machine, num_rounds: int
) -> tuple[ComputeRoof, ...]:
    """Return the roof of each precision, and that of its depthwise convolutions, each confirmed by a new engine."""
    candidates: dict[str, list[ComputeRoof]] = {}
    probes: dict[tuple[str, str], Probe] = {}

    def measure(probe: Probe, wanted: str) -> Rate | None:
        with _loaded(target, version, [probe]) as loaded:
            return _best_rates(loaded[0], num_rounds).get(wanted)

    def repeat(roof: ComputeRoof) -> Rate | None:
        return measure(probes[roof.probe, roof.precision], roof.precision)

    for probe, wanted in _compute_probes(target):
        if rate := measure(probe, wanted):
            probes[probe.name, wanted] = probe
            roof = compute_roof(target, machine, wanted, rate, probe.name, is_depthwise=probe.is_depthwise)
            candidates.setdefault(roof.name, []).append(roof)
    chosen = [choose_roof(roofs, repeat) for roofs in candidates.values()]
    return tuple(roof for roof in chosen if roof is not None)


def _nothing(target: Target, version: str, machine: Machine, reason: str) -> Roofs:
    return Roofs(target.name, version, target.num_threads, machine, (), (), None, None, 0.0, reason)


def _compute_probes(target: Target) -> Iterator[tuple[Probe, str]]:
    """Yield graphs, and the precision in which their layers have to run to count."""
    for is_quantized, precision in ((False, target.precision.value), (True, INT8)):
        for channels, size, kernel in ((64, 32, 3), (128, 32, 3), (256, 16, 3), (256, 32, 1), (512, 16, 1)):
            yield convolution(channels, size, kernel, is_quantized=is_quantized), precision
        yield matrix_product(256, 512, is_quantized=is_quantized), precision
        for channels, size, kernel in ((128, 32, 3), (256, 32, 3), (128, 16, 5)):
            yield convolution(channels, size, kernel, is_quantized=is_quantized, is_depthwise=True), precision


@contextmanager
def _loaded(target: Target, version: str, probes: Sequence[Probe]) -> Iterator[list[_Loaded]]:
    """Build the engines of some graphs and load them."""
    builder = importlib.import_module(f"tasks.parts.builders.{target.runtime}")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        loaded = []
        for number, probe in enumerate(probes):
            engine = Path(folder) / str(number)
            engine.mkdir()
            images_NCHW = (
                np.random.default_rng(0).normal(size=(1, *probe.card.image_shape)).astype(np.float32)
            )
            source = GraphSource(engine / "probe.onnx", probe.graph, probe.card, images_NCHW)
            built = builder.build_file(target, source, engine)
            manifest = new_manifest(target, version, probe.card, file=built.file)
            rows = list_rows(join_nodes(built.layers, built.graph), built.graph)
            runner = stack.enter_context(load_runner(built.file, manifest))
            loaded.append(_Loaded(probe, runner, {row.layer: row for row in rows}, images_NCHW))
        yield loaded


def _best_rates(loaded: _Loaded, num_rounds: int) -> dict[str, Rate]:
    """Return multiply-adds per second of the fastest layer of each precision."""
    rounds = [loaded.profile_ms(_FEW_CALLS) for _ in range(num_rounds)]
    found: dict[str, Rate] = {}
    for name, row in loaded.rows.items():
        times_ms = [times[name] for times in rounds if times.get(name)]
        is_depthwise = (row.groups or 1) > 1
        if row.macs and times_ms and is_depthwise == loaded.probe.is_depthwise:
            rate = rate_of([1000 * row.macs / value for value in times_ms])
            if row.precision not in found or found[row.precision].value < rate.value:
                found[row.precision] = rate
    return found


def _bandwidth(
    target: Target, version: str, working_set_bytes: int, num_rounds: int, profiled_ms: float
) -> Rate | None:
    """Measure layers that only move data; None if the profiler's resolution is too coarse for all of them."""
    rates = []
    num_calls = _FEW_CALLS if working_set_bytes > _MUCH_MOVED else _CALLS_IN_PROFILE
    with _loaded(target, version, moves(working_set_bytes)) as probes:
        for loaded in probes:
            rounds = [loaded.profile_ms(num_calls) for _ in range(num_rounds)]
            for name, row in loaded.rows.items():
                moved_bytes = (row.input_bytes or 0) + (row.output_bytes or 0)
                rate = moved_rate(moved_bytes, [times.get(name, 0.0) for times in rounds], profiled_ms)
                if rate and moved_bytes >= working_set_bytes * _LEAST_MOVED:
                    rates.append(rate)
    return max(rates, key=lambda rate: rate.value, default=None)
