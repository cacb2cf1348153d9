"""Run an engine in its own process, which runs bursts of inferences on command.

Each engine of a benchmark gets its own process, so that it shares neither memory nor thread pools with another
runtime. The parent uses `EngineProcess`; the child is
`python -m tasks.parts.measuring.engine_process <engine> <parent pid> <frame or run> [tuning]`. They exchange JSON
lines over the child's stdin and stdout. The child dies with its parent.
"""

import contextlib
import functools
import gc
import importlib
import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Self

from tasks.core.errors import ArtifactError, EnginewrightError
from tasks.core.processes import die_with_parent
from tasks.parts.data.input_card import InputCard
from tasks.parts.engines.manifest import read_engine_manifest
from tasks.parts.engines.runner import DeviceTimes, Runner, check_batch
from tasks.parts.engines.tuning import Tuning
from tasks.parts.measuring.arrivals import Served, draw_arrivals, serve_arrivals
from tasks.parts.measuring.energy import POWERCAP, open_energy_meter
from tasks.parts.measuring.pinning import choose_cpus
from tasks.parts.measuring.reports import Timed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tasks.parts.engines.frame_engine.engine import Engine

_SOURCE_ROOT = Path(__file__).resolve().parents[3]

_MIB = 1 << 20
_STATUS = Path("/proc/self/status")
"""proc_pid_status(5); VmHWM is the peak of the resident memory."""
_FEWEST_FRAMES = 3
"""Frames that are timed, however slow the engine is."""
_SETTLE_SECONDS = 0.003
"""Pause before a burst, in which the thread pools of the previous engine go to sleep."""
_LONG_NS = 200_000_000
"""A call that takes so long hardly notices that the caches were cold."""


@dataclass(frozen=True)
class WarmUp:
    """What it took to get an engine's process ready: each figure is a single measurement."""

    load_ms: float
    """From the engine file, which lies in the page cache, to a loaded engine; the runtime was imported before."""
    first_call_ms: float
    """The first inference at this batch size."""
    memory_mib: float
    """Resident memory now, minus what Python used before the runtime was imported: runtime + weights + buffers."""
    memory_total_mib: float
    """Peak of the resident memory of the whole process."""


@dataclass(frozen=True)
class Load:
    """Throughput, latency and energy of an engine while several threads keep it busy."""

    calls_per_s: list[float]
    """Inferences per second of all lanes together, in each window."""
    latencies_ns: list[int]
    """Latency of each inference, in all windows."""
    joules: float | None
    """Energy of the device in all windows; None if it is not known."""
    energy_note: str
    """What `joules` covers, or why it is None."""


@dataclass(frozen=True)
class FrameTimes:
    """From image files to answers."""

    phases_ns: dict[str, list[int]]
    """Times of each phase, one frame after the other: decode, pre, run, post."""
    frames_per_s: float
    """Over a stream, in which the phases overlap."""


class EngineProcess:
    """The parent's end of one engine process; use it in a `with` block."""

    def __init__(
        self,
        engine: Path,
        *,
        num_threads: int,
        timeout_s: float,
        timed: Timed = Timed.frame,
        tuning: Tuning | None = None,
    ) -> None:
        """Start the process; `tuning` has the same number of threads, and without it the target's are in use."""
        self._engine, self._timeout_s = engine, timeout_s
        self.num_threads = num_threads
        environment = dict(os.environ)
        environment["PYTHONPATH"] = os.pathsep.join([str(_SOURCE_ROOT), environment.get("PYTHONPATH", "")])
        environment["OMP_NUM_THREADS"] = str(num_threads)
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tasks.parts.measuring.engine_process"),
                *(str(engine), str(os.getpid()), timed),
                *([json.dumps(vars(tuning))] if tuning else []),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._unread = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.kill()  # it has nothing to save, and some runtimes take long to unload
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):  # the child did not read everything
            self._process.stdin.close()
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self._process.pid

    def wait_until_imported(self) -> None:
        """Wait until the process has imported the runtime, which it does as soon as it starts.

        Wait for all processes, then load one after the other: they do not disturb each other's load time.
        """
        self._ask({"do": "wait"})

    def wait_until_loaded(self) -> dict[str, Any]:
        """Load the engine and return the runner's description; raise the child's error if it does not load."""
        return self._ask({"do": "open"})

    def warm_up(self, batch: int, *, seconds: float) -> WarmUp:
        """Run for `seconds`, at least three times, and return what it took until now."""
        return WarmUp(**self._ask({"do": "warm_up", "batch": batch, "seconds": seconds}))

    def burst(self, batch: int, *, seconds: float, min_calls: int) -> list[int]:
        """Return the latency of each call in nanoseconds, after one call that does not count unless it is long."""
        answer = self._ask({"do": "burst", "batch": batch, "seconds": seconds, "min_calls": min_calls})
        latencies_ns: list[int] = answer["latencies_ns"]
        return latencies_ns

    def time_frames(self, frames: Path, *, num_frames: int, seconds: float) -> FrameTimes:
        """Time each phase of up to `num_frames` of the image files of a folder, then stream the files.

        Both end after `seconds`, or a little later, when a few frames are done.
        """
        command = {"do": "time_frames", "batch": 1, "frames": str(frames)}
        return FrameTimes(**self._ask({**command, "num_frames": num_frames, "seconds": seconds}))

    def profile(self, *, num_iterations: int) -> dict[str, float]:
        """Return the typical milliseconds of each layer at batch 1, by the runtime's name for it."""
        answer = self._ask({"do": "profile", "batch": 1, "num_iterations": num_iterations})
        milliseconds: dict[str, float] = answer["milliseconds"]
        return milliseconds

    def time_on_device(self, batch: int, *, num_iterations: int) -> DeviceTimes | None:
        """Return the times measured on the GPU; None for an engine on the CPU."""
        answer = self._ask({"do": "time_on_device", "batch": batch, "num_iterations": num_iterations})
        return DeviceTimes(**answer["times"]) if answer["times"] else None

    def load(
        self, batch: int, *, concurrency: int, seconds: float, num_windows: int, warm_up_s: float = 0.0
    ) -> Load:
        """Keep `concurrency` lanes of the engine busy for `num_windows` windows of `seconds` each."""
        command = {"do": "load", "batch": batch, "concurrency": concurrency, "warm_up_s": warm_up_s}
        return Load(**self._ask({**command, "seconds": seconds, "num_windows": num_windows}))

    def serve(self, *, lanes: int, rate_per_s: float, seconds: float, seed: int) -> Served:
        """Serve images that arrive one by one, as a Poisson process of this rate, in `lanes` lanes."""
        command = {"do": "serve", "batch": 1, "concurrency": lanes, "rate_per_s": rate_per_s}
        return Served(**self._ask({**command, "seconds": seconds, "seed": seed}))

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._death() from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._read_line()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ArtifactError(f"{self._engine}: {answer['error']}")
        return answer

    def _read_line(self) -> bytes:
        assert self._process.stdout is not None
        output = select.poll()  # select() takes no file descriptor above 1023
        output.register(self._process.stdout, select.POLLIN)
        deadline = time.monotonic() + self._timeout_s
        while b"\n" not in self._unread:
            left = deadline - time.monotonic()
            if left <= 0 or not output.poll(left * 1000):
                raise ArtifactError(
                    f"{self._engine}: its process gave no answer for {self._timeout_s:g} s. The engine hangs "
                    "or the machine is overloaded; run it alone, or raise timeout_s of the stage."
                )
            chunk = os.read(self._process.stdout.fileno(), 1 << 16)
            if not chunk:
                raise self._death()
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _death(self) -> ArtifactError:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return ArtifactError(
            f"{self._engine}: the process that ran it died ({how}). Its own output is above. SIGKILL often "
            "means that the machine ran out of memory, SIGILL that the engine was built for another CPU."
        )


@contextmanager
def open_processes(
    engines: Mapping[str, Path], *, timeout_s: float, timed: Timed = Timed.frame
) -> Iterator[dict[str, EngineProcess]]:
    """Start a process for each engine, with the number of threads of its target; they import in parallel."""
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(
                EngineProcess(
                    engine,
                    num_threads=read_engine_manifest(engine).target.num_threads,
                    timeout_s=timeout_s,
                    timed=timed,
                )
            )
            for name, engine in engines.items()
        }


def run_round(
    processes: Mapping[str, EngineProcess],
    batch: int,
    shuffler: random.Random,
    *,
    burst_ms: float,
    min_calls: int,
) -> dict[str, list[float]]:
    """Run one burst in each process, in random order, and return the latencies of each in ms."""
    bursts = {
        name: processes[name].burst(batch, seconds=burst_ms / 1000, min_calls=min_calls)
        for name in shuffler.sample(list(processes), len(processes))
    }
    return {name: [value / 1e6 for value in bursts[name]] for name in processes}


def serve(
    engine: Path, commands: IO[str], answers: IO[str], timed: Timed, tuning: Tuning | None = None
) -> None:
    """Load the engine at the first command, then answer commands, one per line, until `commands` ends."""
    from tasks.parts.engines.open_engine import open_engine

    rss_before_mib = _rss_mib()
    _import_runtime(engine)
    for line in commands:
        if json.loads(line)["do"] == "open":
            break
        _send(answers, {})
    unloaded, start = open_engine(engine, tuning), time.perf_counter()
    with unloaded as runner:
        load_ms = 1000 * (time.perf_counter() - start)
        _send(answers, vars(runner.describe()))
        frames: dict[int, NDArray[np.uint8]] = {}
        gc.disable()
        for line in commands:
            command = json.loads(line)
            batch = command.pop("batch")
            if batch not in frames:
                frames[batch] = _draw_frames(runner.manifest.card, batch)
            if command["do"] in ("load", "serve"):
                command["is_pinned"] = tuning is not None and tuning.is_pinned
            answer = _carry_out(runner, frames[batch], timed, **command)
            if command["do"] == "warm_up":
                memory = {"memory_mib": _rss_mib() - rss_before_mib, "memory_total_mib": _peak_mib()}
                answer = {"load_ms": load_ms} | answer | memory
            _send(answers, answer)


def _import_runtime(engine: Path) -> None:
    with contextlib.suppress(ImportError, ArtifactError):  # open_engine says what is wrong
        importlib.import_module(read_engine_manifest(engine).target.runtime.traits.module)


def _draw_frames(card: InputCard, batch: int) -> "NDArray[np.uint8]":
    import numpy as np

    channels, height, width = card.image_shape
    return np.random.default_rng(0).integers(0, 256, (batch, height, width, channels), np.uint8)


def _carry_out(
    runner: Runner, frames_NHWC: "NDArray[np.uint8]", timed: Timed, *, do: str, **options: Any
) -> dict[str, Any]:
    from tasks.parts.engines.description import on_frames

    engine = on_frames(runner)
    call = _call(runner, frames_NHWC, timed)
    match do:
        case "warm_up":
            check_batch(engine.prepare(frames_NHWC), runner.manifest)
            [first_ns] = _time_calls(call, 0.0, min_calls=1)
            _time_calls(call, options["seconds"], min_calls=1 if first_ns >= _LONG_NS else 2)
            return {"first_call_ms": first_ns / 1e6}
        case "burst":
            time.sleep(_SETTLE_SECONDS)
            cold_ns = _time_calls(call, 0.0, min_calls=1)
            is_enough = cold_ns[0] >= max(_LONG_NS, 1e9 * options["seconds"]) and options["min_calls"] <= 1
            return {"latencies_ns": cold_ns if is_enough else _time_calls(call, **options)}
        case "time_frames":
            return _time_frames(engine, **options)
        case "load":
            return _load_metered(runner, frames_NHWC, timed, **options)
        case "serve":
            return _serve_arrivals(runner, frames_NHWC, timed, **options)
        case "time_on_device":
            times = runner.time_on_device(engine.prepare(frames_NHWC), **options)
            return {"times": times and vars(times)}
        case _:
            milliseconds: dict[str, float] = {}
            for layer in runner.profile(engine.prepare(frames_NHWC), **options):
                milliseconds[layer.name] = milliseconds.get(layer.name, 0.0) + layer.milliseconds
            return {"milliseconds": milliseconds}


def _call(runner: Runner, frames_NHWC: "NDArray[np.uint8]", timed: Timed) -> Callable[[], Any]:
    """Return what is timed."""
    from tasks.parts.engines.description import on_frames

    engine = on_frames(runner)
    if timed is Timed.frame:
        return functools.partial(engine.answer, frames_NHWC)
    return functools.partial(engine.run, engine.prepare(frames_NHWC))


def _time_frames(engine: "Engine", frames: str, *, num_frames: int, seconds: float) -> dict[str, Any]:
    """Return the fields of FrameTimes."""
    from tasks.parts.engines.frame_engine.images import fit_frame
    from tasks.parts.engines.frame_engine.sources import Source, open_source
    from tasks.parts.engines.frame_engine.stream import Timings, run_stream

    size = engine.card["height"], engine.card["width"]
    source = open_source(frames, channels=len(engine.card["mean"]), size=size)
    images = list(source.items)
    clock = time.perf_counter_ns

    def repeat() -> Iterator[tuple[str, Any]]:
        end_ns = clock() + int(seconds * 1e9)
        first, others = images[:_FEWEST_FRAMES], itertools.cycle(images)
        return itertools.chain(first, itertools.takewhile(lambda _: clock() < end_ns, others))

    phases_ns: dict[str, list[int]] = {"decode": [], "pre": [], "run": [], "post": []}
    for _, image in itertools.islice(repeat(), num_frames):
        times_ns = [clock()]
        frame_HWC = fit_frame(source.decode(image), size=size, mode="resize")
        times_ns.append(clock())
        inputs = engine.prepare(frame_HWC[None])
        times_ns.append(clock())
        outputs = engine.run(inputs)
        times_ns.append(clock())
        engine.finish(outputs)
        times_ns.append(clock())
        for name, (start, end) in zip(phases_ns, itertools.pairwise(times_ns), strict=True):
            phases_ns[name].append(end - start)
    timings = Timings()
    run_stream(engine, Source(repeat(), source.decode), lambda name, answer: None, timings=timings)
    return {"phases_ns": phases_ns, "frames_per_s": timings.profile().frames_per_second}


def _load_metered(
    runner: Runner,
    frames_NHWC: "NDArray[np.uint8]",
    timed: Timed,
    *,
    concurrency: int,
    seconds: float,
    num_windows: int,
    warm_up_s: float = 0.0,
    is_pinned: bool = False,
    powercap: Path = POWERCAP,
) -> dict[str, Any]:
    """Keep lanes of the engine busy, and meter the energy from the first window's start to the last one's end."""
    device, runners = runner.manifest.target.device, runner.open_concurrent(concurrency)
    readings_uj: list[tuple[int, ...]] = []
    with open_energy_meter(device, seconds=num_windows * seconds, powercap=powercap) as (meter, note):

        def read_meter() -> None:
            if meter:
                readings_uj.append(meter.read_uj())

        calls = [_call(each, frames_NHWC, timed) for each in runners]
        lanes = _lanes(runners, is_pinned=is_pinned)
        load = _load(lanes, calls, read_meter, seconds=seconds, num_windows=num_windows, warm_up_s=warm_up_s)
        joules = meter.joules_between(readings_uj[0], readings_uj[-1]) if meter else None
    if joules == 0:
        joules, note = None, f"{note}: the counter stands still"
    return load | {"joules": joules, "energy_note": note}


def _serve_arrivals(
    runner: Runner,
    frames_NHWC: "NDArray[np.uint8]",
    timed: Timed,
    *,
    concurrency: int,
    rate_per_s: float,
    seconds: float,
    seed: int,
    is_pinned: bool,
) -> dict[str, Any]:
    runners = runner.open_concurrent(concurrency)
    calls = [_call(each, frames_NHWC, timed) for each in runners]
    offsets_ns = draw_arrivals(rate_per_s, seconds, seed)
    return vars(serve_arrivals(offsets_ns, calls, lanes=_lanes(runners, is_pinned=is_pinned)))


def _lanes(runners: Sequence[Runner], *, is_pinned: bool) -> list[AbstractContextManager[Any]]:
    """Return what each lane opens in its thread, which then keeps to CPUs of its own if lanes are pinned."""
    num_threads = runners[0].manifest.target.num_threads
    cpus = choose_cpus(len(runners) * num_threads) if is_pinned else ()
    if not cpus:
        return list(runners)
    own = [cpus[number * num_threads : (number + 1) * num_threads] for number in range(len(runners))]
    return [_pinned_lane(*each) for each in zip(runners, own, strict=True)]


@contextmanager
def _pinned_lane(runner: Runner, cpus: Sequence[int]) -> Iterator[None]:
    os.sched_setaffinity(0, cpus)  # of this thread, which ends with its lane
    with runner:
        yield


def _load(
    lanes: Sequence[AbstractContextManager[Any]],
    calls: Sequence[Callable[[], Any]],
    at_window: Callable[[], None],
    *,
    seconds: float,
    num_windows: int,
    warm_up_s: float = 0.0,
) -> dict[str, Any]:
    """Run the call of each lane in its own thread; all lanes start each window together, right after `at_window`."""
    barrier, entry = threading.Barrier(len(lanes), action=at_window), threading.Lock()

    def drive(lane: AbstractContextManager[Any], call: Callable[[], Any]) -> list[list[int]]:
        windows = []
        with ExitStack() as stack:
            with entry:  # one at a time: some runtimes cannot open contexts in two threads at once
                stack.enter_context(lane)
                call()
            _time_calls(call, warm_up_s, min_calls=0)
            for _ in range(num_windows):
                barrier.wait()
                windows.append(_time_calls(call, seconds, min_calls=1))
            barrier.wait()  # closing a lane would disturb the others
        return windows

    with ThreadPoolExecutor(len(lanes)) as pool:
        futures = [pool.submit(drive, *each) for each in zip(lanes, calls, strict=True)]
        for future in as_completed(futures):
            if error := future.exception():
                barrier.abort()  # the other lanes wait for it
                raise error
    by_lane = [future.result() for future in futures]
    return {
        "calls_per_s": [
            1e9 * sum(map(len, window)) / max(map(sum, window)) for window in zip(*by_lane, strict=True)
        ],
        "latencies_ns": [value for windows in by_lane for window in windows for value in window],
    }


def _time_calls(call: Callable[[], Any], seconds: float, min_calls: int) -> list[int]:
    latencies_ns: list[int] = []
    clock = time.perf_counter_ns
    end = clock() + int(seconds * 1e9)
    while clock() < end or len(latencies_ns) < min_calls:
        start = clock()
        call()
        latencies_ns.append(clock() - start)
    return latencies_ns


def _rss_mib() -> float:
    import psutil

    return float(psutil.Process().memory_info().rss) / _MIB


def _peak_mib() -> float:
    import resource

    lines = _STATUS.read_text(encoding="utf-8").splitlines() if _STATUS.is_file() else []
    for line in lines:  # on Linux ru_maxrss is at least what the parent had when it started this process
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak) / (_MIB if sys.platform == "darwin" else 1024)


def _send(answers: IO[str], answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def main(engine: str, parent_pid: str, timed: str, tuning: str = "null") -> None:
    """Run the child: answers go to the original stdout; whatever a library prints goes to stderr."""
    die_with_parent(int(parent_pid), signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        try:
            settings = json.loads(tuning)
            tuned = None if settings is None else Tuning(**settings)
            serve(Path(engine), sys.stdin, answers, Timed(timed), tuned)
        except EnginewrightError as error:
            _send(answers, {"error": str(error)})


if __name__ == "__main__":
    main(*sys.argv[1:])
