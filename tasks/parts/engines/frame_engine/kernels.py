"""Queue the kernels of kernels.cu: what stands before and behind an engine, on the GPU. Not run on real hardware.

They give what images.fit_frame and pixels.py give, to the last bit. N images, C channels, K classes, H height,
W width.
"""

import ctypes
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...reading.sizes import letterbox_inside
from .nvrtc import compile_cuda, find_nvrtc
from .pixels import lead_of_first, scale_and_shift
from .sessions import Array

SOURCE = Path(__file__).with_name("kernels.cu")
RESIZE_MODES = ("resize", "crop", "letterbox")
"""What kernels do with frames of another size."""
BLOCK = 256
"""Threads of a block."""

_FIT, _PAINT = "PqqPPiiiiiii", "PPii"
SIGNATURES = {
    "frames_to_uint8": f"{_FIT}P",
    "frames_to_float32": f"{_FIT}PPP",
    "frames_to_float16": f"{_FIT}PPP",
    "float32_to_uint8": f"{_PAINT}PPif",
    "float32_to_uint16": f"{_PAINT}PPif",
    "float16_to_uint8": f"{_PAINT}PPif",
    "float16_to_uint16": f"{_PAINT}PPif",
    "uint8_to_colours": f"{_PAINT}P",
}
"""The arguments of each kernel, in the letters of `struct`; structs of the source are written out."""

Launch = Callable[..., None]
"""Takes the name of a kernel, the number of pixels and of images, and its arguments."""
Upload = Callable[[Array], Any]
"""Takes an array; returns what owns a copy on the GPU, whose int() is the address."""

_BITS = 22
"""Pillow's weights are multiples of 2^-22."""
_MOST_SIZES = 16
"""Sizes of frames whose tables stay on the GPU."""


@dataclass(frozen=True)
class GpuArray:
    """A packed array in the memory of the GPU, which torch, CuPy and pycuda read by `__cuda_array_interface__`."""

    address: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    stream: int
    """Handle of the stream on which it is written: who reads it waits for that stream."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "data": (self.address, False),  # torch refuses what is read-only
            "shape": self.shape,
            "typestr": self.dtype.str,
            "strides": None,
            "stream": self.stream,
            "version": 3,
        }


@dataclass(frozen=True)
class GpuFrames:
    """Frames uint8 [N, H, W, C] in the memory of the GPU; rows and frames may have gaps between them."""

    address: int
    shape: tuple[int, ...]
    frame_bytes: int
    row_bytes: int
    stream: int | None = None
    """Handle of the stream on which they are written; None: it is not known."""

    @classmethod
    def packed(cls, address: int, shape: tuple[int, ...]) -> "GpuFrames":
        """Return frames without gaps."""
        return cls(address, shape, math.prod(shape[1:]), math.prod(shape[2:]))

    @classmethod
    def of(cls, array: Any, channels: int) -> "GpuFrames":
        """Return the frames of an object with `__cuda_array_interface__`; raise ValueError for others."""
        told = getattr(array, "__cuda_array_interface__", None)
        if told is None:
            raise ValueError(
                f"frames are {type(array).__name__}, expected an array on the GPU that has __cuda_array_interface__, "
                "such as a torch tensor, a CuPy array or a GPUArray of pycuda."
            )
        shape = tuple(told["shape"])
        steps = told.get("strides") or tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
        is_frames = len(shape) == 4 and shape[3] == channels and all(shape) and told["typestr"] == "|u1"
        if not is_frames or steps[2:] != (channels, 1):
            raise ValueError(
                f"frames are {told['typestr']} {list(shape)} with strides {list(steps)}, expected |u1 "
                f"[N, H, W, {channels}] with packed pixels and at least one frame. Convert them, or copy them to "
                "contiguous memory."
            )
        return cls(told["data"][0], shape, steps[0], steps[1], told.get("stream"))

    def __len__(self) -> int:
        return self.shape[0]


class Kernels:
    """Queues what stands before and behind one engine."""

    def __init__(self, card: dict[str, Any], launch: Launch, upload: Upload) -> None:
        """Take a card, as in model.json, and what reaches the GPU."""
        self._launch, self._upload = launch, upload
        self._size = (card["height"], card["width"])
        threshold = card["threshold"]
        self._lead = 0.0 if threshold is None else lead_of_first(threshold)
        self._scale_C, self._shift_C = map(upload, scale_and_shift(card["mean"], card["std"]))
        self._own = self._make_tables(self._size, "resize")
        self._fitted: dict[tuple[tuple[int, ...], str], _Tables] = {}
        self._palette: tuple[bytes, Any] = (b"", 0)

    def fit(
        self, frames: GpuFrames, out: GpuArray, *, resize: str = "resize", is_reversed: bool = False
    ) -> None:
        """Write frames in the engine's size.

        `out` is uint8 [N, H, W, C], or float32 or float16 [N, C, H, W], which is normalised. `resize` is one of
        RESIZE_MODES; `is_reversed` turns the order of the channels.
        """
        tables = self._tables(frames.shape[1:3], resize)
        place = (frames.address, frames.frame_bytes, frames.row_bytes)
        order = (int(is_reversed), int(tables.is_height_first))
        fit = (*place, *tables.arguments, frames.shape[3], *self._size, *order)
        factors = () if out.dtype == np.uint8 else (int(self._scale_C), int(self._shift_C))
        num_pixels = math.prod(self._size)
        self._launch(f"frames_to_{out.dtype}", num_pixels, len(frames), *fit, *factors, out.address)

    def choose(
        self,
        scores: GpuArray,
        classes: GpuArray,
        *,
        palette: Array | None = None,
        colours: GpuArray | None = None,
    ) -> None:
        """Write the classes [N, ...] of the scores [N, K, ...], as pixels.find_classes gives them.

        With a palette, uint8 [num_colours, 3] in host memory, also their colours, uint8 [N, ..., 3].
        """
        num_images, num_classes, *pixels = scores.shape
        self._launch(
            f"{scores.dtype}_to_{classes.dtype}",
            math.prod(pixels),
            num_images,
            *self._paint(palette, colours, math.prod(pixels)),
            scores.address,
            classes.address,
            num_classes,
            self._lead,
        )

    def paint(self, classes: GpuArray, *, palette: Array, colours: GpuArray) -> None:
        """Write the colours [N, ..., 3] of uint8 classes [N, ...]; what the palette lacks becomes black."""
        num_images, *pixels = classes.shape
        paint = self._paint(palette, colours, math.prod(pixels))
        self._launch("uint8_to_colours", math.prod(pixels), num_images, *paint, classes.address)

    def _paint(
        self, palette: Array | None, colours: GpuArray | None, num_pixels: int
    ) -> tuple[int, int, int, int]:
        if palette is None or colours is None:
            return 0, 0, 0, num_pixels
        if palette.dtype != np.uint8 or palette.ndim != 2 or palette.shape[1] != 3:
            raise ValueError(
                f"the palette is {palette.dtype} {list(palette.shape)}, expected uint8 [K, 3]: one colour a class."
            )
        content = palette.tobytes()
        if content != self._palette[0]:
            self._palette = (content, self._upload(np.ascontiguousarray(palette)))
        return int(self._palette[1]), colours.address, len(palette), num_pixels

    def _tables(self, size: tuple[int, ...], resize: str) -> "_Tables":
        if size == self._size:
            return self._own
        if resize not in RESIZE_MODES:
            raise ValueError(
                f"frames are {size[1]} x {size[0]} and read by {resize}, which is not done on the GPU, expected "
                f"frames of {self._size[1]} x {self._size[0]}. Cut them, call answer_image, or name another resize."
            )
        key = (size, resize)
        if key not in self._fitted:
            if len(self._fitted) == _MOST_SIZES:
                del self._fitted[next(iter(self._fitted))]
            self._fitted[key] = self._make_tables(size, resize)
        return self._fitted[key]

    def _make_tables(self, size: tuple[int, ...], resize: str) -> "_Tables":
        inside = letterbox_inside(size, self._size) if resize == "letterbox" else self._size
        axes = zip(size, inside, strict=True)
        tables = [copy_centre(*axis) if resize == "crop" else resample(*axis) for axis in axes]
        rows, columns = (_pad(table, length) for table, length in zip(tables, self._size, strict=True))
        taps = (rows.shape[1] - 2, columns.shape[1] - 2)
        return _Tables(self._upload(rows), self._upload(columns), *taps, is_height_first(size, inside))


@dataclass(frozen=True)
class _Tables:
    """How frames of one size become frames of the engine's size: a table for each axis, on the GPU."""

    rows: Any
    columns: Any
    row_taps: int
    column_taps: int
    is_height_first: bool

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        return int(self.rows), int(self.columns), self.row_taps, self.column_taps


def open_kernels(card: dict[str, Any], stream: Any) -> Kernels | None:
    """Return the kernels for the GPU of pycuda's current context, queued on its `stream`; None without NVRTC.

    Raises ValueError if NVRTC cannot compile for this GPU.
    """
    import pycuda.driver as cuda

    nvrtc = find_nvrtc(cuda.get_driver_version() // 1000)
    if nvrtc is None:
        return None
    module = cuda.module_from_buffer(compile_kernels(nvrtc, cuda.Context.get_device().compute_capability()))
    functions = {name: module.get_function(name).prepare(form) for name, form in SIGNATURES.items()}

    def launch(name: str, num_pixels: int, num_images: int, *arguments: Any) -> None:
        grid = (-(-num_pixels // BLOCK), num_images)
        functions[name].prepared_async_call(grid, (BLOCK, 1, 1), stream, *arguments)

    return Kernels(card, launch, cuda.to_device)


def compile_kernels(nvrtc: ctypes.CDLL, compute_capability: tuple[int, int]) -> bytes:
    """Return the kernels as machine code for GPUs of a compute capability; raise ValueError if that fails."""
    major, minor = compute_capability
    return compile_cuda(nvrtc, SOURCE.read_text(encoding="utf-8"), f"sm_{major}{minor}")


def is_height_first(old: tuple[int, ...], new: tuple[int, ...]) -> bool:
    """Return whether Pillow resizes the height before the width; before Pillow 13 it never did.

    Values are rounded to uint8 between both, so that the other order differs by 1 here and there.
    """
    less_height, less_width = old[0] - new[0], old[1] - new[1]
    return less_height > max(0, 2 * less_width)


def resample(old: int, new: int) -> Array:
    """Return the table of one axis for Pillow's bilinear filter, a triangle that grows with the reduction.

    It is int32 [new, 2 + taps]: the first pixel that counts, how many do, and their weights as multiples of 2^-22.
    """
    scale = old / new
    reach = max(scale, 1.0)
    centres = (np.arange(new) + 0.5) * scale
    first = (centres - reach + 0.5).clip(0).astype(np.int32)
    counts = (centres + reach + 0.5).clip(max=old).astype(np.int32) - first
    taps = np.arange(counts.max())
    distances = (taps + first[:, None] - centres[:, None] + 0.5) * (1.0 / reach)
    weights = (1.0 - np.abs(distances)).clip(0) * (taps < counts[:, None])
    weights /= weights.cumsum(axis=1)[:, -1:]  # one after the other, as Pillow adds them
    steps = (weights * (1 << _BITS) + 0.5).astype(np.int32)
    return np.column_stack([first, counts, steps]).astype(np.int32)


def copy_centre(old: int, new: int) -> Array:
    """Return the table of one axis that copies the pixels of the centre, as resample has it."""
    num_pixels = min(old, new)
    first = max(0, old - new) // 2 + np.arange(num_pixels)
    return np.column_stack([first, np.ones_like(first), np.full_like(first, 1 << _BITS)]).astype(np.int32)


def _pad(table: Array, size: int) -> Array:
    """Return a table with lines of padding, which have no pixels, before and behind its own."""
    missing = size - len(table)
    return np.pad(table, ((missing // 2, missing - missing // 2), (0, 0)))
