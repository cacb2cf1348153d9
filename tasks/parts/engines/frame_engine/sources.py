"""Open sources of frames, and bring frames to the size of an engine. N frames, H height, W width, C channels.

Image files become 8-bit RGB, or grey for one channel, as prepare_data decodes them: turned by their EXIF
orientation, transparent pixels on black, the high byte of 16-bit values.
"""

import itertools
import math
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp")
RESIZE_MODES = ("stretch", "crop", "letterbox")
IGNORED = 255
"""What a mask says of pixels that the engine has not seen."""

_FORMATS = ("PNG", "JPEG", "TIFF", "BMP", "WEBP")
_DECODER_ERRORS = (OSError, SyntaxError, ValueError, TypeError, EOFError, KeyError, struct.error, zlib.error)
"""Exceptions that Pillow raises for damaged files."""


@dataclass(frozen=True)
class Source:
    """Frames in their order, undecoded."""

    items: Iterator[tuple[str, Any]]
    """Name and content of each frame. One thread reads them."""
    decode: Callable[[Any], Array]
    """Return the frame, uint8 [H, W, C] of any size, from its content. Several threads may call it."""


def open_source(path: str, *, channels: int, size: tuple[int, int]) -> Source:
    """Open an array, an image, a folder of images, a video, or stdin ("-") with raw frames of `size`.

    `channels` are the engine's; `size` is (height, width). Raises ValueError.
    """
    file = Path(path)
    if path == "-":
        return _open_stdin((*size, channels))
    if file.is_dir():
        return _open_folder(file, channels)
    if not file.exists() and "://" not in path:
        raise ValueError(f"{path}: not found. Name a .npy file, an image, a folder, a video, or - for stdin.")
    if file.suffix.lower() == ".npy":
        return _open_array(file, channels)
    if file.suffix.lower() in IMAGE_SUFFIXES:
        return _open_images([file], channels)
    return _open_video(path, channels)


def open_sources(paths: list[str], *, channels: int, size: tuple[int, int]) -> Source:
    """Open one source as `open_source` does, or several files of one image each, in their order."""
    if len(paths) == 1:
        return open_source(paths[0], channels=channels, size=size)
    files = [Path(path) for path in paths]
    for file in files:
        if not file.is_file() or file.suffix.lower() not in (*IMAGE_SUFFIXES, ".npy"):
            raise ValueError(
                f"{file}: is no image file ({', '.join(IMAGE_SUFFIXES)} or .npy), expected where several are named. "
                "Name a folder or a video alone."
            )
    return _open_files(files, channels)


def fit_frame(frame_HWC: Array, *, size: tuple[int, int], mode: str) -> Array:
    """Bring a frame to a size (height, width) in one of RESIZE_MODES; padding is black."""
    if frame_HWC.shape[:2] == size:
        return frame_HWC
    if mode == "letterbox":
        frame_HWC = _stretch(frame_HWC, letterbox_inside(frame_HWC.shape[:2], size))
    return _stretch(frame_HWC, size) if mode == "stretch" else _crop(frame_HWC, size, 0)


def restore_mask(mask_HW: Array, *, size: tuple[int, int], mode: str) -> Array:
    """Bring the mask of a fitted frame to the `size` of that frame; what was cut off becomes IGNORED."""
    if mask_HW.shape == size:
        return mask_HW
    if mode == "crop":
        return _crop(mask_HW, size, IGNORED)
    if mode == "letterbox":
        mask_HW = _crop(mask_HW, letterbox_inside(size, mask_HW.shape), 0)
    rows, columns = (
        (2 * np.arange(new) + 1) * old // (2 * new) for new, old in zip(size, mask_HW.shape, strict=True)
    )
    restored_HW: Array = mask_HW.take(columns, axis=1).take(rows, axis=0)
    return restored_HW


def letterbox_inside(size: tuple[int, ...], frame: tuple[int, ...]) -> tuple[int, int]:
    """Return the largest size (height, width) of the shape of `size` that fits into `frame`."""
    scale = min(frame[0] / size[0], frame[1] / size[1])
    return max(1, round(size[0] * scale)), max(1, round(size[1] * scale))


def _stretch(frame_HWC: Array, size: tuple[int, int]) -> Array:
    image = _pillow().Image
    parts = [frame_HWC] if frame_HWC.shape[2] == 3 else list(np.moveaxis(frame_HWC, -1, 0))
    resized = [
        np.asarray(image.fromarray(part).resize(size[::-1], image.Resampling.BILINEAR)) for part in parts
    ]
    return np.dstack(resized)


def _crop(array: Array, size: tuple[int, int], fill: int) -> Array:
    """Crop to the centre of the first two axes, padded if the array is smaller. It is its own inverse."""
    (height, width), (old_height, old_width) = size, array.shape[:2]
    top, left = max(0, old_height - height) // 2, max(0, old_width - width) // 2
    centre = array[top : top + height, left : left + width]
    missing_y, missing_x = height - centre.shape[0], width - centre.shape[1]
    padding = [(missing_y // 2, missing_y - missing_y // 2), (missing_x // 2, missing_x - missing_x // 2)]
    return np.pad(centre, padding + [(0, 0)] * (array.ndim - 2), constant_values=fill)


def _open_array(path: Path, channels: int) -> Source:
    frames_NHWC = _read_npy(path)
    if frames_NHWC.dtype != np.uint8 or frames_NHWC.ndim != 4 or frames_NHWC.shape[3] != channels:
        raise ValueError(
            f"{path}: images are {frames_NHWC.dtype} {list(frames_NHWC.shape)}, expected uint8 "
            f"[N, H, W, {channels}] (RGB for three channels). Convert them first."
        )
    items = ((f"{index:06d}", index) for index in range(len(frames_NHWC)))
    return Source(items, lambda index: np.array(frames_NHWC[index]))


def _read_npy(path: Path) -> Array:
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: not a complete .npy file ({error}). Write the images with numpy.save."
        ) from error


def _open_folder(folder: Path, channels: int) -> Source:
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in (*IMAGE_SUFFIXES, ".npy"))
    if not paths:
        raise ValueError(f"{folder}: holds no image, expected files {', '.join(IMAGE_SUFFIXES)} or .npy.")
    return _open_files(paths, channels)


def _open_files(paths: list[Path], channels: int) -> Source:
    seen: dict[str, Path] = {}
    for path in paths:
        if path.stem in seen:
            raise ValueError(f"{path}: has the name of {seen[path.stem].name}. Rename one of them.")
        seen[path.stem] = path
    return _open_images(paths, channels)


def _open_images(paths: list[Path], channels: int) -> Source:
    if any(path.suffix.lower() != ".npy" for path in paths):
        if channels not in (1, 3):
            raise ValueError(f"{paths[0]}: the engine reads {channels} channels. Give it .npy files.")
        _pillow().Image.preinit()  # before several threads do it
    return Source(((path.stem, path) for path in paths), lambda path: _decode_image(path, channels))


def _decode_image(path: Path, channels: int) -> Array:
    if path.suffix.lower() == ".npy":
        image_HWC = np.atleast_3d(_read_npy(path))
        if image_HWC.dtype != np.uint8 or image_HWC.ndim != 3 or image_HWC.shape[2] != channels:
            raise ValueError(
                f"{path}: holds {image_HWC.dtype} {list(image_HWC.shape)}, expected uint8 [H, W, {channels}]."
            )
        return np.array(image_HWC)
    pillow = _pillow()
    try:
        # Not by its path: Pillow would map an uncompressed TIFF, and mixes up its pixels when it turns them.
        with path.open("rb") as file, pillow.Image.open(file, formats=_FORMATS) as image:
            pillow.ImageOps.exif_transpose(image, in_place=True)
            if image.mode.startswith("I"):
                deep_HW = np.asarray(image).astype(np.int64)
                return np.dstack([(deep_HW >> 8).clip(0, 255).astype(np.uint8)] * channels)
            if image.has_transparency_data:
                black = pillow.Image.new("RGBA", image.size, (0, 0, 0, 255))
                return _convert(pillow.Image.alpha_composite(black, image.convert("RGBA")), channels)
            return _convert(image, channels)
    except (*_DECODER_ERRORS, pillow.Image.DecompressionBombError) as error:
        raise ValueError(f"{path}: cannot be decoded ({error}). Restore the file, or remove it.") from error


def _convert(image: Any, channels: int) -> Array:
    mode = "L" if channels == 1 else "RGB"
    return np.atleast_3d(np.asarray(image if image.mode == mode else image.convert(mode)))


def _pillow() -> Any:
    try:
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise ValueError("image files and other sizes need Pillow. Run pip install pillow.") from error
    return PIL


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
