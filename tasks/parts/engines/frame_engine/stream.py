"""Run a stream of frames through an engine: decoding, running and writing overlap, and each phase is timed.

Threads: one reads the source, some decode and resize, the calling one prepares and runs, one finishes and writes;
what windows cover is written by the calling one, too.
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

from ...reading.parts import write_tiff
from ...reading.rules import Reading
from ...reading.sizes import restore_mask
from .images import MaskBands, answer_windows, fit_frame, is_cut, joined
from .sources import MAX_PIXELS, Array, Source

if TYPE_CHECKING:
    from .engine import Engine

Write = Callable[[str, Array | MaskBands], None]
"""Takes the name of a frame and its answer: a mask [H, W], at once or in bands, a class index [], or values."""

PHASES = ("decode", "resize", "pre", "run", "post", "write")

_BINS_PER_E = 128
"""Bins of durations grow by exp(1 / 128), 0.8 %."""
_WRITER_STOP_S = 5.0
_NPY_HEADER_BYTES = 256
MASK_SUFFIXES = (".png", ".tif", ".tiff")
"""Files for the mask of a single frame."""


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
    image: Any
    """Uint8 [H, W, C] of the engine's size, or an image of any size that windows will cover."""
    size: tuple[int, int]
    """Height and width before it was resized."""
    decode_ns: int
    resize_ns: int

    @property
    def is_in_parts(self) -> bool:
        """Whether the image is too large to be in memory as a whole."""
        return not isinstance(self.image, np.ndarray)


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
    reading: Reading | None = None,
    is_engine_size: bool = False,
) -> None:
    """Write the answer to each frame, in order; masks in the size of their frame, or in that of the engine.

    `reading` says how frames come to the engine's size, None: as the network was trained. Raises what any thread
    raised. A reader that closes stdout ends it quietly.
    """
    reading = reading or engine.reading
    reader, decoder, writer = _Workers(), _Workers(num_decoders), _Workers()
    size = engine.card["height"], engine.card["width"]
    restore = reading.resize_mode if engine.card["task"] == "segmentation" and not is_engine_size else None
    writes: deque[Future[None]] = deque()
    finished: Future[list[Array]] | None = None
    stream_start = perf_counter_ns()

    def submit() -> "Future[_Frame | None]":
        return decoder.submit(_decode, source, reader.submit(_read, source), size, reading)

    try:
        for frames in _take_batches(submit, batch, 2 * batch + num_decoders, writes):
            if any(is_cut(frame.size, size, reading) for frame in frames):
                while writes:  # the engine runs between the bands of a mask, so this thread writes them
                    writes.popleft().result()
                for frame in frames:
                    _write_cut(write, engine, frame, reading, timings)
                continue
            start = perf_counter_ns()
            images = [frame.image for frame in frames]
            inputs = engine.prepare(np.stack(images) if len(images) > 1 else images[0][None])
            pre_ns = perf_counter_ns() - start
            if finished is not None:
                finished.result()  # the next run may overwrite its outputs
            start = perf_counter_ns()
            outputs = engine.run(inputs)
            run_ns = perf_counter_ns() - start
            ready_ns = timings.add_run(frames, pre_ns, run_ns)
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
    source: Source, read: "Future[tuple[str, Any, int] | None]", size: tuple[int, int], reading: Reading
) -> _Frame | None:
    item = read.result()
    if item is None:
        return None
    name, content, read_ns = item
    start = perf_counter_ns()
    image = source.decode(content)
    decoded = perf_counter_ns()
    own_size = (image.shape[0], image.shape[1])
    fitted = (
        image if is_cut(own_size, size, reading) else fit_frame(image, size=size, mode=reading.resize_mode)
    )
    decode_ns, resize_ns = read_ns + decoded - start, perf_counter_ns() - decoded
    return _Frame(name, fitted, own_size, decode_ns, resize_ns)


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


def _write_cut(write: Write, engine: "Engine", frame: _Frame, reading: Reading, timings: Timings) -> None:
    """Answer one frame in windows, and write its mask; a frame of the engine's size among them is one window."""
    times_ns = {"pre": 0, "run": 0, "post": 0}

    def answer(frames_NHWC: Array) -> Array:
        marks = [perf_counter_ns()]
        inputs = engine.prepare(frames_NHWC)
        marks.append(perf_counter_ns())
        outputs = engine.run(inputs)
        marks.append(perf_counter_ns())
        answers = engine.finish(outputs)
        marks.append(perf_counter_ns())
        for name, begin, end in zip(times_ns, marks, marks[1:], strict=False):
            times_ns[name] += end - begin
        return answers

    start = perf_counter_ns()
    try:
        mask = answer_windows(frame.image, answer, card=engine.card, overlap=reading.window_overlap or 0)
        write(frame.name, mask if frame.is_in_parts else joined(mask))
    finally:
        if frame.is_in_parts:
            frame.image.close()
    total_ns = perf_counter_ns() - start
    ready_ns = timings.add_run([frame], times_ns["pre"], times_ns["run"])
    timings.phases["post"].add(times_ns["post"])
    timings.frame_to_mask.add(ready_ns + times_ns["post"])
    timings.phases["write"].add(total_ns - sum(times_ns.values()))
    timings.num_frames += 1


@contextmanager
def open_sink(
    path: str | None, *, task: str, classes: list[str], tiff_names: frozenset[str] = frozenset()
) -> Iterator[Write]:
    """Open what answers are written to; what is not written to the end is removed.

    It is .npy (one after the other), .csv of classes of images, .png or .tif for the mask of a single frame, "-" for
    raw values on stdout, a folder of masks, PNG or, for `tiff_names`, TIFF, or None for nowhere. Raises ValueError
    for answers that do not fit in it.
    """
    if path is None:
        yield _write_nowhere
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
            yield lambda name, answer: table.writerow([name, int(answer), classes[int(answer)]])  # type: ignore[arg-type]
    elif Path(path).suffix.lower() in MASK_SUFFIXES:
        yield _open_single(Path(path), task)
    else:
        yield _open_folder(Path(path), task, tiff_names)


def _write_nowhere(name: str, answer: Array | MaskBands) -> None:
    if isinstance(answer, MaskBands):
        for _ in answer.bands:  # an engine that is measured has to run
            pass


class _Rows:
    """Answers of one shape in a binary file, one after the other."""

    def __init__(self, file: BinaryIO | FileIO) -> None:
        self._file = file
        self._first: tuple[tuple[int, ...], np.dtype[Any]] | None = None
        self._num_rows = 0

    def write(self, name: str, answer: Array | MaskBands) -> None:
        parts = answer.bands if isinstance(answer, MaskBands) else [answer := np.asarray(answer)]
        found = (answer.shape, np.dtype(answer.dtype))
        self._first = found if self._first is None else self._first
        if found != self._first:
            raise ValueError(
                f"{name}: the answer is {list(answer.shape)}, those before it are {list(self._first[0])}. Write "
                "them to a folder, or as masks of one size with --engine-size."
            )
        for part in parts:
            content = memoryview(part.tobytes())
            while content:
                content = content[self._file.write(content) :]
        self._num_rows += 1

    def npy_header(self) -> bytes:
        """Return the header of the file as .npy, format 1.0."""
        assert self._first is not None
        descr = np.lib.format.dtype_to_descr(self._first[1])
        shape = (self._num_rows, *self._first[0])
        text = repr({"descr": descr, "fortran_order": False, "shape": shape}).encode("latin1")
        length = _NPY_HEADER_BYTES - 10
        return b"\x93NUMPY\x01\x00" + length.to_bytes(2, "little") + text.ljust(length - 1) + b"\n"


def _open_single(path: Path, task: str) -> Write:
    """Return what writes the mask of the only frame."""
    _check_masks(path, task)
    names: list[str] = []

    def write(name: str, answer: Array | MaskBands) -> None:
        if names:
            raise ValueError(
                f"{path}: holds the mask of {names[0]}, and there is {name}, too. Name a folder."
            )
        names.append(name)
        _write_mask(path, answer)

    return write


def _open_folder(folder: Path, task: str, tiff_names: frozenset[str]) -> Write:
    _check_masks(folder, task)
    if folder.suffix and not folder.is_dir():
        raise ValueError(f"{folder}: expected a .npy, .csv, .png or .tif file, a folder, or - for stdout.")
    folder.mkdir(parents=True, exist_ok=True)
    return lambda name, answer: _write_mask(
        folder / f"{name}.{'tif' if name in tiff_names else 'png'}", answer
    )


def _check_masks(path: Path, task: str) -> None:
    if task != "segmentation":
        raise ValueError(f"{path}: holds masks, and the engine gives {task}. Name a .npy file.")
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ValueError(f"{path}: masks as image files need Pillow. Run pip install pillow.") from error


def _write_mask(path: Path, answer: Array | MaskBands) -> None:
    """Write a mask whose grey values are class indices."""
    import PIL.Image

    if isinstance(answer, MaskBands):
        if path.suffix.lower() != ".png":
            with _draft(path) as draft:
                write_tiff(draft, answer.shape, answer.dtype, answer.bands)
            return
        if math.prod(answer.shape) > MAX_PIXELS:
            raise ValueError(
                f"{path}: a mask of {answer.shape[1]} x {answer.shape[0]} pixels is too large for PNG, which is "
                f"written as a whole, at most {MAX_PIXELS / 1e6:g} megapixels. Name a .tif or .npy file."
            )
        answer = joined(answer)
    mask_HW = np.ascontiguousarray(answer)
    with _draft(path) as draft:
        if path.suffix.lower() == ".png":
            PIL.Image.fromarray(mask_HW).save(draft, format="PNG", compress_level=1)
        else:
            PIL.Image.fromarray(mask_HW).save(draft, format="TIFF", compression="tiff_adobe_deflate")


@contextmanager
def _draft(path: Path) -> Iterator[Path]:
    """Give a file beside `path`, which takes its place at the end."""
    draft = path.with_name(f"{path.name}.draft")
    try:
        yield draft
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
