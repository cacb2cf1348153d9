"""The command of a bundle: frames in, answers out."""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from .sources import RESIZE_MODES, open_source
from .stream import Profile, Timings, open_sink, run_stream

_DESCRIPTION = """Run the engine of this folder on frames.

FRAMES is one of
  frames.npy     uint8 [N, H, W, C], RGB where C is 3
  image.jpg      or another image file; needs Pillow
  folder         of image files, sorted by name, or of .npy files, uint8 [H, W, C]
  video.mp4      or what else PyAV or OpenCV opens, as rtsp://...; needs one of them
  -              raw frames on stdin, rgb24 for three channels
ANSWERS is one of
  answers.npy    the class of each pixel, [N, H, W], or of each image, [N], as uint8 or uint16; values as float32
  folder         one PNG mask for each frame, named after it; its grey values are class indices
  answers.csv    name, class index and class name of each image
  -              raw answers on stdout
It may be left out with --profile."""

_EXAMPLES = """examples:
  python infer.py frames.npy masks.npy
  python infer.py photos/ masks/ --resize letterbox --full-size
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
    add(
        "--resize",
        choices=RESIZE_MODES,
        default="stretch",
        help="how frames of another size become the engine's: stretched (default), cut or padded at the centre, or "
        "scaled and padded",
    )
    add(
        "--full-size",
        action="store_true",
        help="write masks in the size of their frames; 255 where the frame was cut off",
    )
    add("--frame-size", type=_size, metavar="WxH", help="size of raw frames (default: the engine's)")
    add("--profile", action="store_true", help="print to stderr how long each phase took")
    add("--profile-json", type=Path, metavar="FILE", help="write the same as JSON")
    return parser


def _run(options: argparse.Namespace) -> None:
    from .engine import load_engine

    if (
        options.answers not in (None, "-")
        and Path(options.frames).resolve() == Path(options.answers).resolve()
    ):
        raise ValueError(f"{options.answers}: is both read and written. Name another place for the answers.")
    engine = load_engine(Path(__file__).resolve().parents[1], num_threads=options.threads)
    card = engine.card
    if options.batch > engine.max_batch:
        raise ValueError(f"--batch is {options.batch}, the engine takes at most {engine.max_batch} frames.")
    if options.full_size and card["task"] != "segmentation":
        raise ValueError(f"--full-size resizes masks, and the engine gives {card['task']}. Leave it out.")
    size = options.frame_size or (card["height"], card["width"])
    source = open_source(options.frames, channels=len(card["mean"]), size=size)
    timings, is_interrupted = Timings(), False
    with open_sink(options.answers, task=card["task"], classes=card["classes"]) as write:
        try:
            run_stream(
                engine,
                source,
                write,
                timings=timings,
                batch=options.batch,
                num_decoders=options.decoders,
                resize=options.resize,
                is_full_size=options.full_size,
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


def _size(text: str) -> tuple[int, int]:
    """Return (height, width) of "1920x1080"."""
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not WIDTHxHEIGHT, as 1920x1080")
    return int(parts[1]), int(parts[0])
