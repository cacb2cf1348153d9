"""Measure an engine in a grid of batch, lanes and threads, and what settings of the CPU change in the best cell."""

import itertools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from tasks.core.bounds import AtLeast, Distinct, MinItems, MoreThan
from tasks.parts.engines.runtimes import CUDA, Runtime
from tasks.parts.engines.target import Target
from tasks.parts.engines.tuning import Tuning
from tasks.parts.measuring.arrival_sweep import sweep
from tasks.parts.measuring.engine_process import EngineProcess
from tasks.parts.measuring.intervals import MIN_SAMPLES_OF_P99, Estimate, estimate_ratio
from tasks.parts.measuring.load_report import (
    Arrivals,
    LoadCell,
    Setting,
    Together,
    TriedTuning,
    front_of,
    within,
)
from tasks.parts.measuring.pinning import choose_cpus
from tasks.parts.measuring.reports import Timed

_THREADS_PER_CPU = 2
"""Most threads of all lanes together, per CPU. A lane computes on no other CPU while Python prepares its frames or
takes its answers, so a few more threads than CPUs can pay; with twice as many each waits as long as it runs."""
_FEWEST_ROUNDS = 5


@dataclass(frozen=True)
class LoadOptions:
    """How an engine is measured under load."""

    max_p99_ms: Annotated[float, MoreThan(0)] | None
    """The bound: p99 in ms of a call in the grid, of an arrival in the sweep. Null: images per second alone decide,
    and the sweep ends at unloaded_factor."""
    unloaded_factor: Annotated[float, MoreThan(1)]
    """Without a bound: how many times the p99 at the lowest rate of arrivals the p99 may become."""
    batches: Annotated[list[Annotated[int, AtLeast(1)]], MinItems(1), Distinct()]
    """Batches of the grid; those above the target's max_batch are skipped."""
    lanes: Annotated[list[Annotated[int, AtLeast(1)]], MinItems(1), Distinct()]
    """Calls at the same time."""
    threads: Annotated[list[Annotated[int, AtLeast(1)]], MinItems(1), Distinct()]
    """Threads of one call. Cells with more than two threads per CPU, in all lanes, are skipped; on a GPU only the
    threads of the target are measured."""
    window_s: Annotated[float, MoreThan(0)]
    """Length of one measurement of a cell."""
    num_rounds: Annotated[int, AtLeast(1)]
    """Measurements of each cell, in rounds of random order."""
    num_tuning_rounds: Annotated[int, AtLeast(_FEWEST_ROUNDS)]
    """Measurements of the best cell with each setting of the CPU, in turns."""
    budget_cell_s: Annotated[float, MoreThan(0)]
    """Time for a cell that could be the best to reach the 1,000 calls of a p99."""
    arrival_shares: Annotated[list[Annotated[float, MoreThan(0)]], MinItems(2), Distinct()]
    """Rates of the arrivals, as shares of what the lanes answer in a closed loop."""
    num_refinements: Annotated[int, AtLeast(0)]
    """Rates tried between the last one that held and the first one that did not."""
    min_arrivals_s: Annotated[float, MoreThan(0)]
    """Fewest seconds at each rate."""
    max_arrivals_s: Annotated[float, MoreThan(0)]
    """Most seconds at each rate; rates with fewer than 1,000 arrivals in this time are left out."""
    seed: Annotated[int, AtLeast(0)]
    """Fixes the order of the cells and the arrivals."""
    warm_up_ms: Annotated[float, AtLeast(0)]
    """How long the lanes run before each measurement."""
    timed: Timed
    """What a call is: from a frame to its answer, or the engine alone."""
    timeout_s: Annotated[float, MoreThan(0)]
    """How long to wait for an answer from an engine's process."""


@dataclass(frozen=True)
class Window:
    """One measurement of a setting."""

    images_per_s: float
    latencies_ns: Sequence[int]
    """Of each call, in all lanes."""


Measure = Callable[[Setting, int], Window]
"""Measures a setting; other numbers are other processes of the same engine."""


@dataclass
class _Samples:
    """The windows of one setting."""

    images_per_s: list[float] = field(default_factory=list)
    latencies_ns: list[int] = field(default_factory=list)

    def add(self, window: Window) -> None:
        self.images_per_s.append(window.images_per_s)
        self.latencies_ns += window.latencies_ns

    def summarise(self, setting: Setting, *, is_final: bool = True) -> LoadCell:
        """Return the cell; before the end its p99 is that of the few calls."""
        import numpy as np

        p50, p99 = (float(value) / 1e6 for value in np.percentile(self.latencies_ns, (50, 99)))
        has_p99 = not is_final or len(self.latencies_ns) >= MIN_SAMPLES_OF_P99
        return LoadCell(
            setting=setting,
            throughput_per_s=statistics.median(self.images_per_s),
            throughput_per_s_low=min(self.images_per_s),
            throughput_per_s_high=max(self.images_per_s),
            latency_ms_p50=p50,
            latency_ms_p99=p99 if has_p99 else None,
            num_calls=len(self.latencies_ns),
        )


class Bench:
    """Processes of one engine, one for each tuning; see `open_bench`."""

    def __init__(self, engine: Path, options: LoadOptions, stack: ExitStack) -> None:
        self._engine, self._options, self._stack = engine, options, stack
        self._processes: dict[tuple[Tuning, int], EngineProcess] = {}

    def process(self, tuning: Tuning, number: int = 0) -> EngineProcess:
        """Return a process with this tuning, started on first use; another `number` is another process."""
        if (tuning, number) not in self._processes:
            process = EngineProcess(
                self._engine,
                num_threads=tuning.num_threads,
                timeout_s=self._options.timeout_s,
                timed=self._options.timed,
                tuning=tuning,
            )
            self._processes[tuning, number] = self._stack.enter_context(process)
            process.wait_until_loaded()
        return self._processes[tuning, number]

    def measure(self, setting: Setting, number: int = 0) -> Window:
        """Measure a setting once."""
        load = self.process(setting.tuning, number).load(
            setting.batch,
            concurrency=setting.lanes,
            seconds=self._options.window_s,
            num_windows=1,
            warm_up_s=self._options.warm_up_ms / 1000,
        )
        [calls_per_s] = load.calls_per_s
        return Window(setting.batch * calls_per_s, load.latencies_ns)


@contextmanager
def open_bench(engine: Path, options: LoadOptions) -> Iterator[Bench]:
    """Yield the bench of an engine; its processes end with it. Raises ArtifactError if one of them dies."""
    with ExitStack() as stack:
        yield Bench(engine, options, stack)


def plan_grid(target: Target, options: LoadOptions, *, num_cpus: int) -> list[Setting]:
    """Return the settings of the grid; never empty: the smallest batch, one lane and one thread always fit."""
    on_gpu = target.device == CUDA
    threads = [target.num_threads] if on_gpu else sorted(options.threads)
    batches = [batch for batch in sorted(options.batches) if batch <= target.max_batch] or [1]
    return [
        Setting(batch, lanes, Tuning(count))
        for batch in batches
        for lanes in sorted(options.lanes)
        for count in threads
        if on_gpu or lanes * count <= _THREADS_PER_CPU * num_cpus
    ] or [Setting(batch, 1, Tuning(1)) for batch in batches]


def measure_grid(measure: Measure, settings: Sequence[Setting], options: LoadOptions) -> list[LoadCell]:
    """Measure all settings in rounds, then those that could be the best until their p99 is known."""
    shuffler, samples = random.Random(options.seed), {setting: _Samples() for setting in settings}
    for _ in range(options.num_rounds):
        for setting in shuffler.sample(settings, len(settings)):
            samples[setting].add(measure(setting, 0))
    while True:
        so_far = [found.summarise(setting, is_final=False) for setting, found in samples.items()]
        unknown = [
            cell.setting for cell in front_of(so_far) if _is_worth_more(samples[cell.setting], options)
        ]
        if not unknown:
            break
        for setting in shuffler.sample(unknown, len(unknown)):
            samples[setting].add(measure(setting, 0))
    cells = [found.summarise(setting) for setting, found in samples.items()]
    return sorted(cells, key=lambda cell: -cell.throughput_per_s)


def _is_worth_more(found: _Samples, options: LoadOptions) -> bool:
    spent_s = len(found.images_per_s) * options.window_s
    return len(found.latencies_ns) < MIN_SAMPLES_OF_P99 and spent_s < options.budget_cell_s


@dataclass(frozen=True)
class Tuned:
    """The best cell, measured after it was chosen."""

    best: LoadCell
    aa_spread: float
    tried: tuple[TriedTuning, ...]


def tune(measure: Measure, cells: Sequence[LoadCell], options: LoadOptions, target: Target) -> Tuned | None:
    """Return the cell with the largest images per second within the bound, with the tuning that pays there.

    Each candidate, most images per second first, is measured anew: the largest of many noisy numbers is one of the
    lucky ones. None if none of them holds the bound again.
    """
    for cell in within(cells, options.max_p99_ms):
        found = _tune_cell(measure, cell.setting, options, target)
        if within([found.best], options.max_p99_ms):
            return found
    return None


def _tune_cell(measure: Measure, setting: Setting, options: LoadOptions, target: Target) -> Tuned:
    """Measure a setting, a second process of it and each other tuning in turns."""
    base, control = (setting.tuning, 0), (setting.tuning, 1)
    others = [(tuning, 0) for tuning in tunings(setting, target)]
    names, shuffler = [base, control, *others], random.Random(options.seed)
    samples = {name: _Samples() for name in names}
    while len(samples[base].images_per_s) < options.num_tuning_rounds or _is_worth_more(
        samples[base], options
    ):
        for name in shuffler.sample(names, len(names)):
            samples[name].add(measure(replace(setting, tuning=name[0]), name[1]))
    spread = _ratio(samples[control], samples[base]).spread
    kept, tried = samples[base].summarise(setting), []
    for name in others:
        cell = samples[name].summarise(replace(setting, tuning=name[0]))
        ratio = _ratio(samples[name], samples[base])
        is_faster = ratio.low > 1 and ratio.value - 1 > spread
        is_accepted = is_faster and bool(within([cell], options.max_p99_ms))
        tried.append(
            TriedTuning(name[0], ratio.value, ratio.low, ratio.high, cell.latency_ms_p99, is_accepted)
        )
        if is_accepted and cell.throughput_per_s > kept.throughput_per_s:
            kept = cell
    return Tuned(kept, spread, tuple(tried))


def tunings(setting: Setting, target: Target) -> list[Tuning]:
    """Return the other ways to use the CPU that a target's runtime knows, each changed in one point."""
    plain = setting.tuning
    if target.device == CUDA:
        return []
    found = [replace(plain, is_pinned=True)] if choose_cpus(setting.lanes * plain.num_threads) else []
    if target.runtime is Runtime.onnxruntime:
        found += [replace(plain, has_arena=False), replace(plain, num_branches=2)]
    return found


def _ratio(one: _Samples, base: _Samples) -> Estimate:
    pairs = zip(one.images_per_s, base.images_per_s, strict=True)
    return estimate_ratio([value / other for value, other in pairs])


def find_knee(bench: Bench, best: Setting, options: LoadOptions) -> Arrivals:
    """Let single images arrive at rising rates, in the lanes and with the tuning of the best cell."""
    setting, samples = replace(best, batch=1), _Samples()
    for _ in range(options.num_rounds):
        samples.add(bench.measure(setting))
    process = bench.process(setting.tuning)
    return sweep(
        lambda rate_per_s, seconds, seed: process.serve(
            lanes=setting.lanes, rate_per_s=rate_per_s, seconds=seconds, seed=seed
        ),
        setting,
        capacity_per_s=statistics.median(samples.images_per_s),
        max_p99_ms=options.max_p99_ms,
        unloaded_factor=options.unloaded_factor,
        shares=options.arrival_shares,
        num_refinements=options.num_refinements,
        min_seconds=options.min_arrivals_s,
        max_seconds=options.max_arrivals_s,
        seed=options.seed,
    )


def measure_together(
    engines: Mapping[str, Path], options: LoadOptions, num_threads: int
) -> tuple[Together, ...]:
    """Measure engines at batch 1 in one lane each: in turns alone, and all at once in their own processes."""
    alone, together = ({name: _Samples() for name in engines} for _ in range(2))
    with ExitStack() as stack, ThreadPoolExecutor(max(1, len(engines))) as pool:
        benches = {name: stack.enter_context(open_bench(engine, options)) for name, engine in engines.items()}
        setting, shuffler = Setting(1, 1, Tuning(num_threads)), random.Random(options.seed)
        for bench in benches.values():
            bench.process(setting.tuning)  # loads it

        def measure(name: str, found: Mapping[str, _Samples]) -> None:
            found[name].add(benches[name].measure(setting))

        rounds = 0
        while rounds < options.num_rounds or any(
            _is_worth_more(found[name], options) for found in (alone, together) for name in engines
        ):
            rounds += 1
            for name in shuffler.sample(list(engines), len(engines)):
                measure(name, alone)
            list(pool.map(measure, engines, itertools.repeat(together)))
    return tuple(
        Together(
            name,
            (one := alone[name].summarise(setting)).throughput_per_s,
            one.latency_ms_p99,
            (shared := together[name].summarise(setting)).throughput_per_s,
            shared.latency_ms_p99,
        )
        for name in engines
    )
