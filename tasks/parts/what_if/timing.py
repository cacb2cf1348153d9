"""The layer times of engines, profiled in turns: what disturbs one only makes it longer."""

import statistics
import tempfile
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

from tasks.parts.engines.manifest import read_engine_manifest
from tasks.parts.engines.runtimes import CPU
from tasks.parts.explain.engine_view import EngineView
from tasks.parts.explain.layers import read_layers
from tasks.parts.measuring.engine_process import open_processes
from tasks.parts.measuring.pinning import pinned
from tasks.parts.measuring.race import RaceOptions
from tasks.parts.measuring.tables import write_layers
from tasks.parts.roofs.roofs import Roofs

_PROFILED = 10
"""Inferences in a turn from which the time of each layer is taken."""


def time_engines(
    engines: Mapping[str, Path], roofs: Roofs, options: RaceOptions, *, device: str, num_turns: int
) -> dict[str, EngineView]:
    """Return the views of engines, by name: latency and time of each layer are those of its fastest turn."""
    bursts_ms = defaultdict[str, list[float]](list)
    layers_ms = defaultdict[str, dict[str, list[float]]](lambda: defaultdict(list))
    with open_processes(engines, timeout_s=options.timeout_s, timed=options.timed) as processes:
        for process in processes.values():
            process.wait_until_loaded()
        for process in processes.values():
            process.warm_up(1, seconds=options.warm_up_ms / 1000)
        threads = {process.pid: process.num_threads for process in processes.values()}
        with pinned(threads if device == CPU else {}):
            for _ in range(num_turns):
                for name, process in processes.items():
                    calls_ns = process.burst(1, seconds=options.burst_ms / 1000, min_calls=options.min_calls)
                    bursts_ms[name].append(statistics.median(calls_ns) / 1e6)
                    for layer, milliseconds in process.profile(num_iterations=_PROFILED).items():
                        layers_ms[name][layer].append(milliseconds)
    views = {}
    for name, engine in engines.items():
        fastest_ms = {layer: min(turns) for layer, turns in layers_ms[name].items()}
        with tempfile.TemporaryDirectory() as folder:
            write_layers(engine, fastest_ms, Path(folder))
            layers = read_layers(Path(folder))
        views[name] = EngineView(name, read_engine_manifest(engine), min(bursts_ms[name]), layers, roofs)
    return views
