"""Run a stream of frames through an engine: decoding, running and writing overlap, and each phase is timed.

Threads: one reads the source, some decode and resize, the calling one prepares and runs, one finishes and writes.
At most a few batches wait between them, so that memory stays flat however long the stream is.
"""

import csv
import math
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from time import perf_counter_ns
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from .sources import Array, Source, fit_frame, restore_mask

if TYPE_CHECKING:
    from .engine import Engine

Write = Callable[[str, Array], None]
"""Takes the name of a frame and its answer: a mask [H, W], a class index [], or values."""

PHASES = ("decode", "resize", "pre", "run", "post", "write")

_BINS_PER_E = 128
"""Bins of durations grow by exp(1 / 128), 0.8 %."""
_WRITER_STOP_S = 5.0
_NPY_HEADER_BYTES = 256


@dataclass(frozen=True)
class Phase:
    """How long one phase took: for each frame in decode and resize, for each batch in the others.

    Decode includes reading, so that it waits for a camera.
    """

    name: str
    latency_ms_p50: float
    latency_ms_p99: float
    share: float
    """Of the sum of all phases, 0..1. They overlap, so that the sum is more than the time of the stream."""


@dataclass(frozen=True)
class Profile:
    """Speed of a stream."""

    num_frames: int
    frames_per_second: float
    """Of the whole stream, with its slow first frames."""
    frame_to_mask_ms_p50: float
    """From decoded frames to their answers: resize, pre, run and post of a batch, without waiting in queues."""
    frame_to_mask_ms_p99: float
    phases: list[Phase]


class Durations:
    """A histogram of durations, whose size does not grow; percentiles are right to 0.4 %."""

    def __init__(self) -> None:
        self.total_ns = 0
        self._counts = np.zeros(40 * _BINS_PER_E, np.int64)  # exp(40) ns are 7 years

    def add(self, duration_ns: int) -> None:
        """Count a duration."""
        self.total_ns += duration_ns
        self._counts[int(math.log(max(1, duration_ns)) * _BINS_PER_E)] += 1

    def percentile_ms(self, percent: float) -> float:
        """Return the smallest duration that `percent` of all do not exceed; 0 if there is none."""
        sums = self._counts.cumsum()
        if not sums[-1]:
            return 0.0
        found = int(np.searchsorted(sums, max(1, math.ceil(sums[-1] * percent / 100))))
        return math.exp((found + 0.5) / _BINS_PER_E) / 1e6


@dataclass(frozen=True)
class _Frame:
    name: str
    image_HWC: Array
    size: tuple[int, int]
    """Height and width before it was resized."""
    decode_ns: int
    resize_ns: int


class Timings:
    """What `run_stream` measures, also of a stream that was interrupted. Each histogram has one writing thread."""

    def __init__(self) -> None:
        self.num_frames, self.elapsed_ns = 0, 0
        self.phases = {name: Durations() for name in PHASES}
        self.frame_to_mask = Durations()

    def add_run(self, frames: list[_Frame], pre_ns: int, run_ns: int) -> int:
        """Count the phases of a batch up to its run; return their time since its frames were decoded."""
        for frame in frames:
            self.phases["decode"].add(frame.decode_ns)
            self.phases["resize"].add(frame.resize_ns)
        self.phases["pre"].add(pre_ns)
        self.phases["run"].add(run_ns)
        return sum(frame.resize_ns for frame in frames) + pre_ns + run_ns

    def profile(self) -> Profile:
        """Return the percentiles."""
        total_ns = max(1, sum(durations.total_ns for durations in self.phases.values()))
        return Profile(
            num_frames=self.num_frames,
            frames_per_second=self.num_frames / max(1, self.elapsed_ns) * 1e9,
            frame_to_mask_ms_p50=self.frame_to_mask.percentile_ms(50),
            frame_to_mask_ms_p99=self.frame_to_mask.percentile_ms(99),
            phases=[
                Phase(name, phase.percentile_ms(50), phase.percentile_ms(99), phase.total_ns / total_ns)
                for name, phase in self.phases.items()
            ],
        )


class _Workers:
    """Threads that do tasks in their order, up to the first that fails: those after it fail as it did.

    The process may end while they wait, for stdin for example.
    """

    def __init__(self, num_threads: int = 1) -> None:
        self._tasks: queue.SimpleQueue[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]] | None]
        self._tasks = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        self._tasks.put((future, function, arguments))
        return future

    def stop(self, timeout_s: float = 0) -> None:
        """Drop the tasks that have not begun, and wait for the others."""
        with suppress(queue.Empty):
            while task := self._tasks.get_nowait():
                task[0].cancel()
        for _ in self._threads:
            self._tasks.put(None)
        for thread in self._threads:
            thread.join(timeout_s)

    def _work(self) -> None:
        failure: BaseException | None = None
        while task := self._tasks.get():
            future, function, arguments = task
            if failure is None:
                try:
                    future.set_result(function(*arguments))
                    continue
                except BaseException as error:  # noqa: BLE001 - it is raised where the result is read
                    failure = error
            future.set_exception(failure)


def run_stream(
    engine: "Engine",
    source: Source,
    write: Write,
    *,
    timings: Timings,
    batch: int = 1,
    num_decoders: int = 1,
    resize: str = "stretch",
    is_full_size: bool = False,
) -> None:
    """Write the answer to each frame, in order; `is_full_size` brings masks to the size of the frames.

    Raises what any thread raised. A reader that closes stdout ends it quietly.
    """
    reader, decoder, writer = _Workers(), _Workers(num_decoders), _Workers()
    size = engine.card["height"], engine.card["width"]
    writes: deque[Future[None]] = deque()
    finished: Future[list[Array]] | None = None
    stream_start = perf_counter_ns()

    def submit() -> "Future[_Frame | None]":
        return decoder.submit(_decode, source, reader.submit(_read, source), size, resize)

    try:
        for frames in _take_batches(submit, batch, 2 * batch + num_decoders, writes):
            start = perf_counter_ns()
            images = [frame.image_HWC for frame in frames]
            inputs = engine.prepare(np.stack(images) if len(images) > 1 else images[0][None])
            pre_ns = perf_counter_ns() - start
            if finished is not None:
                finished.result()  # the next run may overwrite its outputs
            start = perf_counter_ns()
            outputs = engine.run(inputs)
            run_ns = perf_counter_ns() - start
            ready_ns = timings.add_run(frames, pre_ns, run_ns)
            restore = resize if is_full_size else None
            finished = writer.submit(_finish, engine, outputs, frames, restore, timings, ready_ns)
            writes.append(writer.submit(_write, write, frames, finished, timings))
            if len(writes) > 2:
                writes.popleft().result()
        while writes:
            writes.popleft().result()
        if not timings.num_frames:
            raise ValueError("there is no frame to read, expected at least one.")
    except BrokenPipeError:
        pass
    finally:
        timings.elapsed_ns = perf_counter_ns() - stream_start
        reader.stop()
        decoder.stop()
        writer.stop(_WRITER_STOP_S)


def _take_batches(
    submit: Callable[[], "Future[_Frame | None]"], batch: int, depth: int, writes: "deque[Future[None]]"
) -> "Iterator[list[_Frame]]":
    """Yield frames in batches while the next ones, up to `depth`, are decoded; raise if one of `writes` fails."""
    pending: deque[Future[_Frame | None]] = deque()
    taken: list[_Frame] = []
    while True:
        while len(pending) < depth:
            pending.append(submit())
        while writes and not pending[0].done():
            awaited: list[Future[Any]] = [pending[0], writes[0]]
            wait(awaited, return_when=FIRST_COMPLETED)
            if writes[0].done():
                writes.popleft().result()
        frame = pending.popleft().result()
        if frame is not None:
            taken.append(frame)
        if taken and (frame is None or len(taken) == batch):
            yield taken
            taken = []
        if frame is None:
            return


def _read(source: Source) -> tuple[str, Any, int] | None:
    start = perf_counter_ns()
    item = next(source.items, None)
    return None if item is None else (*item, perf_counter_ns() - start)


def _decode(
    source: Source, read: "Future[tuple[str, Any, int] | None]", size: tuple[int, int], resize: str
) -> _Frame | None:
    item = read.result()
    if item is None:
        return None
    name, content, read_ns = item
    start = perf_counter_ns()
    image_HWC = source.decode(content)
    decoded = perf_counter_ns()
    fitted_HWC = fit_frame(image_HWC, size=size, mode=resize)
    decode_ns, resize_ns = read_ns + decoded - start, perf_counter_ns() - decoded
    return _Frame(name, fitted_HWC, (image_HWC.shape[0], image_HWC.shape[1]), decode_ns, resize_ns)


def _finish(
    engine: "Engine",
    outputs: Array,
    frames: list[_Frame],
    restore: str | None,
    timings: Timings,
    ready_ns: int,
) -> list[Array]:
    start = perf_counter_ns()
    answers = list(engine.finish(outputs))
    if restore is not None:
        pairs = zip(answers, frames, strict=True)
        answers = [restore_mask(answer, size=frame.size, mode=restore) for answer, frame in pairs]
    post_ns = perf_counter_ns() - start
    timings.phases["post"].add(post_ns)
    timings.frame_to_mask.add(ready_ns + post_ns)
    return answers


def _write(write: Write, frames: list[_Frame], finished: "Future[list[Array]]", timings: Timings) -> None:
    answers, start = finished.result(), perf_counter_ns()
    for frame, answer in zip(frames, answers, strict=True):
        write(frame.name, answer)
        timings.num_frames += 1
    timings.phases["write"].add(perf_counter_ns() - start)


@contextmanager
def open_sink(path: str | None, *, task: str, classes: list[str]) -> Iterator[Write]:
    """Open what answers are written to; what is not written to the end is removed.

    It is .npy (one after the other), .csv of classes of images, "-" for raw values on stdout, a folder of PNG masks,
    or None for nowhere. Raises ValueError for answers that do not fit in it.
    """
    if path is None:
        yield lambda name, answer: None
    elif path == "-":
        with open(sys.stdout.fileno(), "wb", buffering=0, closefd=False) as stdout:
            yield _Rows(stdout).write
    elif path.lower().endswith(".npy"):
        with _draft(Path(path)) as draft, draft.open("wb") as file:
            file.write(bytes(_NPY_HEADER_BYTES))
            rows = _Rows(file)
            yield rows.write
            file.seek(0)
            file.write(rows.npy_header())
    elif path.lower().endswith(".csv"):
        if task != "classification":
            raise ValueError(
                f"{path}: .csv holds classes of images, and the engine gives {task}. Name a .npy."
            )
        with _draft(Path(path)) as draft, draft.open("w", encoding="utf-8", newline="") as text:
            table = csv.writer(text)
            table.writerow(["name", "class_index", "class_name"])
            yield lambda name, answer: table.writerow([name, int(answer), classes[int(answer)]])
    else:
        yield _open_folder(Path(path), task)


class _Rows:
    """Answers of one shape in a binary file, one after the other."""

    def __init__(self, file: BinaryIO | FileIO) -> None:
        self._file = file
        self._first: Array | None = None
        self._num_rows = 0

    def write(self, name: str, answer: Array) -> None:
        answer = np.asarray(answer)
        self._first = answer if self._first is None else self._first
        if answer.shape != self._first.shape:
            raise ValueError(
                f"{name}: the answer is {list(answer.shape)}, those before it are {list(self._first.shape)}. Write "
                "them to a folder, or leave out --full-size."
            )
        content = memoryview(answer.tobytes())
        while content:
            content = content[self._file.write(content) :]
        self._num_rows += 1

    def npy_header(self) -> bytes:
        """Return the header of the file as .npy, format 1.0."""
        assert self._first is not None
        descr = np.lib.format.dtype_to_descr(self._first.dtype)
        shape = (self._num_rows, *self._first.shape)
        text = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode("latin1")
        length = _NPY_HEADER_BYTES - 10
        return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1) + b"\n"


def _open_folder(folder: Path, task: str) -> Write:
    if task != "segmentation":
        raise ValueError(f"{folder}: a folder holds masks, and the engine gives {task}. Name a .npy file.")
    if folder.suffix and not folder.is_dir():
        raise ValueError(f"{folder}: expected a .npy or .csv file, a folder, or - for stdout.")
    try:
        import PIL.Image
    except ImportError as error:
        raise ValueError(f"{folder}: masks as PNG need Pillow. Run pip install pillow.") from error
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, answer: Array) -> None:
        with _draft(folder / f"{name}.png") as draft:
            PIL.Image.fromarray(np.ascontiguousarray(answer)).save(draft, format="PNG", compress_level=1)

    return write


@contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """Give a file beside `path`, which takes its place at the end."""
    draft = path.with_name(f"{path.name}.draft")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
