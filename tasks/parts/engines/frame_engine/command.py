"""The command of a bundle: frames in, answers out."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...reading.rules import Reading, ResizeMode
from .images import RESIZE_MODES, changed_reading
from .sources import open_source
from .stream import Profile, Timings, open_sink, run_stream

_DESCRIPTION = """Run the engine of this folder on frames.

FRAMES is one of
  frames.npy     uint8 [N, H, W, C], RGB where C is 3, or one image [H, W, C]
  image.jpg      or another image file; needs Pillow, and tifffile for TIFF
  folder         of image files, sorted by name, or of .npy files [H, W, C]
  video.mp4      or what else PyAV or OpenCV opens, as rtsp://...; needs one of them
  -              raw frames on stdin, rgb24 for three channels
They have any size, and are read as the network was trained to (model.json, "reading"): values of more than 8 bits in
its value range, other sizes resized, cropped or cut into windows.
ANSWERS is one of
  answers.npy    the class of each pixel, [N, H, W], or of each image, [N], as uint8 or uint16; values as float32
  folder         one mask for each frame, PNG, or TIFF for TIFF images, named after it; grey values are class indices
  mask.png       or .tif: the mask of a single frame
  answers.csv    name, class index and class name of each image
  -              raw answers on stdout
It may be left out with --profile. Masks have the size of their frames; 255 is what was cut off and not seen."""

_EXAMPLES = """examples:
  python infer.py frames.npy masks.npy
  python infer.py photo.jpg mask.png
  python infer.py photos/ masks/ --resize letterbox
  python infer.py drive.mp4 --profile --profile-json profile.json
  ffmpeg -i rtsp://camera/1 -f rawvideo -pix_fmt rgb24 - | python infer.py - - --frame-size 1920x1080 | ./viewer"""


def main(argv: list[str] | None = None) -> None:
    """Read frames and write answers."""
    parser = _make_parser()
    options = parser.parse_args(argv)
    if options.answers is None and not (options.profile or options.profile_json):
        parser.error("name a file or folder for the answers, or add --profile")
    try:
        _run(options)
    except ImportError as error:
        sys.exit(f"infer.py: {error}. Run pip install -r requirements.txt.")
    except (OSError, ValueError) as error:
        sys.exit(f"infer.py: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "infer.py",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("frames", metavar="FRAMES", help="what to read")
    add("answers", metavar="ANSWERS", nargs="?", help="what to write")
    add("--batch", type=positive, default=1, metavar="N", help="frames in one inference (default 1)")
    add("--threads", type=positive, metavar="N", help="threads of the runtime (default: as measured)")
    add("--decoders", type=positive, default=1, metavar="N", help="threads that decode (default 1)")
    add_reading_options(parser)
    add("--frame-size", type=_size, metavar="WxH", help="size of raw frames (default: the engine's)")
    add("--profile", action="store_true", help="print to stderr how long each phase took")
    add("--profile-json", type=Path, metavar="FILE", help="write the same as JSON")
    return parser


def _run(options: argparse.Namespace) -> None:
    from .engine import load_engine

    check_places([options.frames], options.answers)
    engine = load_engine(Path(__file__).resolve().parents[1], num_threads=options.threads)
    card = engine.card
    if options.batch > engine.max_batch:
        raise ValueError(f"--batch is {options.batch}, the engine takes at most {engine.max_batch} frames.")
    reading = chosen_reading(options, card, engine.reading)
    size = options.frame_size or (card["height"], card["width"])
    source = open_source(options.frames, channels=len(card["mean"]), size=size, reading=reading)
    timings, is_interrupted = Timings(), False
    with open_sink(
        options.answers, task=card["task"], classes=card["classes"], tiff_names=source.tiff_names
    ) as write:
        try:
            run_stream(
                engine,
                source,
                write,
                timings=timings,
                batch=options.batch,
                num_decoders=options.decoders,
                reading=reading,
                is_engine_size=options.engine_size,
            )
        except KeyboardInterrupt:  # an endless stream ends so: what was answered is kept
            if not timings.num_frames:
                raise
            is_interrupted = True
    profile = timings.profile()
    if options.profile:
        sys.stderr.write(describe_profile(profile, options.batch))
    if options.profile_json:
        text = json.dumps({"batch": options.batch, **dataclasses.asdict(profile)}, indent=2)
        options.profile_json.write_text(f"{text}\n", encoding="utf-8")
    if is_interrupted:
        sys.stderr.write(f"infer.py: interrupted after {timings.num_frames} frames\n")
        raise KeyboardInterrupt


def check_places(frames: Sequence[str], answers: str | None) -> None:
    """Raise ValueError for answers that would take the place of what is read."""
    if answers is None or answers == "-":
        return
    place = Path(answers).resolve()
    for path in frames:
        file = Path(path).resolve()
        is_named_alike = file.parent == place and file.suffix.lower() in (".png", ".tif")
        if file == place or is_named_alike:
            raise ValueError(f"{path}: is read, and its answers would take its place. Name another place.")


def add_reading_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that change how images are read."""
    add = parser.add_argument
    add(
        "--resize",
        choices=RESIZE_MODES,
        help="how frames of another size are read, in place of how the network was trained: stretched, cut or padded "
        "at the centre, cut into windows, or scaled and padded",
    )
    add("--value-range", type=_range, metavar="LOW,HIGH", help="values that become 0 and 255, if not 8 bits")
    add("--overlap", type=_count, metavar="N", help="pixels that neighbouring windows share")
    add("--engine-size", action="store_true", help="write masks in the engine's size")


def chosen_reading(options: argparse.Namespace, card: dict[str, Any], reading: Reading) -> Reading:
    """Return how images are read with the options of the command; what they change is told on stderr.

    Raises ValueError for options that the engine does not have.
    """
    if options.engine_size and card["task"] != "segmentation":
        raise ValueError(f"--engine-size is for masks, and the engine gives {card['task']}. Leave it out.")
    size = card["height"], card["width"]
    chosen, told = changed_reading(
        reading, resize=options.resize, value_range=options.value_range, overlap=options.overlap, size=size
    )
    if options.engine_size and chosen.resize_mode == ResizeMode.windows:
        raise ValueError(
            "--engine-size is for masks of resized images, and windows cover them. Leave it out."
        )
    if told:
        sys.stderr.write(f"{told}\n")
    return chosen


def describe_profile(profile: Profile, batch: int) -> str:
    """Return a profile as a table."""
    row = "{:14}{:>10.3f}{:>10.3f}"
    lines = [f"{'phase':14}{'p50 ms':>10}{'p99 ms':>10}{'share':>9}"]
    for phase in profile.phases:
        times = row.format(phase.name, phase.latency_ms_p50, phase.latency_ms_p99)
        lines.append(f"{times}{phase.share:>9.1%}")
    lines.append(row.format("frame to mask", profile.frame_to_mask_ms_p50, profile.frame_to_mask_ms_p99))
    lines.append(f"{profile.num_frames} frames, {profile.frames_per_second:.1f} frames/s, batch {batch}")
    return "\n".join(lines) + "\n"


def positive(text: str) -> int:
    """Return a number from the command line that is at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number


def _count(text: str) -> int:
    """Return a number from the command line that is at least 0."""
    return 0 if text == "0" else positive(text)


def _range(text: str) -> tuple[float, float]:
    """Return (0, 4095) of "0,4095"."""
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low = high = 0.0
    if not low < high:
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW,HIGH, as 0,4095")
    return low, high


def _size(text: str) -> tuple[int, int]:
    """Return (height, width) of "1920x1080"."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT, as 1920x1080")
    return int(parts[1]), int(parts[0])
