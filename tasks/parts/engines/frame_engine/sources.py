"""Open sources of frames. N frames, H height, W width, C channels.

Files are decoded by the code of prepare_data, as the network was trained to read them.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...reading.files import ARRAY_SUFFIX, PILLOW_SUFFIXES, TIFF_SUFFIXES, read_image, scale_image
from ...reading.packages import pillow
from ...reading.parts import open_parts
from ...reading.rules import Advice, Reading, ResizeMode, Rules, WrongChannels

Array = np.ndarray[Any, Any]

IMAGE_SUFFIXES = PILLOW_SUFFIXES
PIXELS_OF_PARTS = 1 << 24
"""Images of more pixels are read in parts where windows are cut from them."""
MAX_PIXELS = 1 << 27
"""Largest number of pixels of an image that is decoded as a whole: 0.4 GB in RGB."""


@dataclass(frozen=True)
class Source:
    """Frames in their order, undecoded."""

    items: Iterator[tuple[str, Any]]
    """Name and content of each frame. One thread reads them."""
    decode: Callable[[Any], Array]
    """Return the frame, uint8 [H, W, C] of any size, or an ImageParts, from its content. Several threads may call
    it."""
    tiff_names: frozenset[str] = frozenset()
    """Names of the frames whose files are TIFF."""


def rules_of(reading: Reading, channels: int) -> Rules:
    """Return by which rules a bundle decodes images for a network of so many channels."""
    types = " or ".join(reading.types)
    advice = Advice(
        channels=f"The network reads {channels} channel(s): give it such images.",
        value_range=f"The network was trained on {types}: give it such images, or say what becomes 0 and 255 with "
        "--value-range LOW,HIGH.",
        max_pixels="Where windows are cut, a .npy file or an upright TIFF of grey values, RGB or bands, without "
        "alpha, is read in parts: save it so, or cut it into tiles.",
    )
    is_in_parts = reading.resize_mode == ResizeMode.windows
    return Rules(channels, MAX_PIXELS, reading.value_range, advice, is_in_parts, reading.types)


def open_source(path: str, *, channels: int, size: tuple[int, int], reading: Reading | None = None) -> Source:
    """Open an array, an image, a folder of images, a video, or stdin ("-") with raw frames of `size`.

    `channels` are the engine's; `size` is (height, width). `reading` says what values mean; None: frames of 8 bits.
    Raises ValueError.
    """
    file, rules = Path(path), rules_of(reading or Reading(), channels)
    if path == "-":
        return _of_8_bits(_open_stdin((*size, channels)), rules, path)
    if file.is_dir():
        return _open_folder(file, rules)
    if not file.exists() and "://" not in path:
        raise ValueError(f"{path}: not found. Name a .npy file, an image, a folder, a video, or - for stdin.")
    if file.suffix.lower() == ARRAY_SUFFIX:
        return _open_array(file, rules)
    if file.suffix.lower() in IMAGE_SUFFIXES:
        return _open_images([file], rules)
    return _of_8_bits(_open_video(path, channels), rules, path)


def open_sources(
    paths: list[str], *, channels: int, size: tuple[int, int], reading: Reading | None = None
) -> Source:
    """Open one source as `open_source` does, or several files of one image each, in their order."""
    if len(paths) == 1:
        return open_source(paths[0], channels=channels, size=size, reading=reading)
    files = [Path(path) for path in paths]
    for file in files:
        if not file.is_file() or file.suffix.lower() not in (*IMAGE_SUFFIXES, ARRAY_SUFFIX):
            raise ValueError(
                f"{file}: is no image file ({', '.join(IMAGE_SUFFIXES)} or .npy), expected where several are named. "
                "Name a folder or a video alone."
            )
    return _open_files(files, rules_of(reading or Reading(), channels))


def _of_8_bits(source: Source, rules: Rules, place: str) -> Source:
    """Return a source of frames of 8 bits, which networks for other types refuse."""
    return Source(source.items, lambda content: scale_image(source.decode(content), rules, place))


def _open_array(path: Path, rules: Rules) -> Source:
    frames = _read_npy(path)
    if frames.ndim in (2, 3) and (frames.ndim == 2 or frames.shape[2] == rules.channels):
        return _open_images([path], rules)
    is_scaled = frames.dtype == np.uint8 or rules.value_range is not None
    if frames.ndim != 4 or frames.shape[3] != rules.channels or not is_scaled:
        raise WrongChannels(
            f"{path}: images are {frames.dtype} {list(frames.shape)}, expected uint8 [N, H, W, {rules.channels}] "
            f"(RGB for three channels). {'Convert them first.' if is_scaled else rules.advice.value_range}"
        )
    items = ((f"{index:06d}", index) for index in range(len(frames)))
    return Source(items, lambda index: scale_image(np.array(frames[index]), rules, f"{path}, image {index}"))


def _read_npy(path: Path) -> Array:
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: not a complete .npy file ({error}). Write the images with numpy.save."
        ) from error


def _open_folder(folder: Path, rules: Rules) -> Source:
    paths = sorted(
        path for path in folder.iterdir() if path.suffix.lower() in (*IMAGE_SUFFIXES, ARRAY_SUFFIX)
    )
    if not paths:
        raise ValueError(f"{folder}: holds no image, expected files {', '.join(IMAGE_SUFFIXES)} or .npy.")
    return _open_files(paths, rules)


def _open_files(paths: list[Path], rules: Rules) -> Source:
    seen: dict[str, Path] = {}
    for path in paths:
        if path.stem in seen:
            raise ValueError(f"{path}: has the name of {seen[path.stem].name}. Rename one of them.")
        seen[path.stem] = path
    return _open_images(paths, rules)


def _open_images(paths: list[Path], rules: Rules) -> Source:
    if any(path.suffix.lower() != ARRAY_SUFFIX for path in paths):
        pillow().Image.preinit()  # before several threads do it
    return Source(
        ((path.stem, path) for path in paths),
        lambda path: _read_image(path, rules),
        frozenset(path.stem for path in paths if path.suffix.lower() in TIFF_SUFFIXES),
    )


def _read_image(path: Path, rules: Rules) -> Any:
    """Decode an image, or open a large one whose parts are decoded as they are asked for."""
    parts = open_parts(path, rules, more_than=PIXELS_OF_PARTS) if rules.is_in_parts else None
    return read_image(path, rules) if parts is None else parts


def _open_stdin(shape: tuple[int, ...]) -> Source:
    def read() -> Iterator[tuple[str, bytearray]]:
        # Without a buffer, whose lock a waiting thread would hold when Python ends.
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as stdin:
            for index in itertools.count():
                frame, filled = bytearray(math.prod(shape)), 0
                while length := stdin.readinto(memoryview(frame)[filled:]):
                    filled += length
                if not filled:
                    return
                if filled < len(frame):
                    raise ValueError(
                        f"stdin ended in frame {index}, after {filled} of {len(frame)} bytes of {list(shape)}. "
                        "Check --frame-size and the pixel format, which is rgb24 for three channels."
                    )
                yield f"{index:06d}", frame

    return Source(read(), lambda frame: np.frombuffer(frame, np.uint8).reshape(shape))


def _open_video(path: str, channels: int) -> Source:
    if channels not in (1, 3):
        raise ValueError(f"{path}: the engine reads {channels} channels. Give it .npy files.")
    try:
        import av
    except ImportError:
        return _open_video_with_opencv(path, channels)
    errors = (av.error.FFmpegError, OSError, ValueError, IndexError)

    def read() -> Iterator[tuple[str, Any]]:
        try:
            with av.open(path) as container:
                video = container.streams.video[0]
                if video.codec_context is None:  # decoding it would end the process
                    raise ValueError("no frame is complete")
                video.thread_type = "AUTO"
                for index, frame in enumerate(container.decode(video)):
                    yield f"{index:06d}", frame
        except errors as error:
            raise ValueError(f"{path}: cannot be decoded as a video ({error}).") from error

    return Source(read(), lambda frame: _to_channels(frame.to_ndarray(format="rgb24"), channels))


def _open_video_with_opencv(path: str, channels: int) -> Source:
    try:
        import cv2
    except ImportError as error:
        raise ValueError(
            f"{path}: neither .npy nor an image ({', '.join(IMAGE_SUFFIXES)}), and a video needs PyAV or OpenCV. "
            "Run pip install av."
        ) from error
    video = cv2.VideoCapture(path)
    if not video.isOpened():
        raise ValueError(f"{path}: OpenCV cannot open it as a video.")

    def read() -> Iterator[tuple[str, Any]]:
        for index in itertools.count():
            is_read, frame_BGR = video.read()
            if not is_read:
                return
            yield f"{index:06d}", frame_BGR

    return Source(read(), lambda frame_BGR: _to_channels(frame_BGR[..., ::-1], channels))


def _to_channels(frame_RGB: Array, channels: int) -> Array:
    """Return RGB as it is, or its grey value as Pillow computes it (ITU-R 601-2)."""
    if channels == 3:
        return np.ascontiguousarray(frame_RGB)
    grey_HW = (frame_RGB.astype(np.uint32) @ np.array([19595, 38470, 7471], np.uint32) + 0x8000) >> 16
    return grey_HW.astype(np.uint8)[..., None]
