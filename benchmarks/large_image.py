"""Measure the memory of a bundle that answers a TIFF of 20,000 x 20,000 pixels, in parts.

    python -m benchmarks.large_image artifacts/select_engine/bundles/cpu_onnxruntime [--side 20000]

The image is noise, deflate in tiles. The bundle is read in windows with an overlap of an eighth of a window, whatever
its network was trained on; images of one window tell what runtime and weights take.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tifffile

_PROGRAM = (
    "import resource, runpy, sys; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
    "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
)


def measure(bundle: Path, image: Path, mask: Path, *options: str) -> float:
    """Return the largest resident memory of infer.py, MB."""
    command = [sys.executable, "-I", "-c", _PROGRAM, bundle / "infer.py", image, mask, *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout) * 1024 / 1e6


def write_noise(path: Path, height: int, width: int, channels: int) -> None:
    """Write an image of repeated noise, row of tiles by row of tiles."""
    side = 256
    noise = np.random.default_rng(0).integers(0, 256, (side, side, channels), np.uint8)
    rows = np.tile(noise, (1, -(-width // side), 1))[:, :width]

    def tiles() -> Any:
        for top in range(0, height, side):
            for left in range(0, width, side):
                yield rows[: height - top, left : left + side]

    options: dict[str, Any] = {"photometric": "rgb" if channels == 3 else "minisblack", "maxworkers": 1}
    shape = (height, width, channels)
    tifffile.imwrite(
        path, tiles(), shape=shape, dtype=np.uint8, tile=(side, side), compression="zlib", **options
    )


def main() -> None:
    """Print the memory for a small and for a large image."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--side", type=int, default=20_000)
    options = parser.parse_args()
    bundle = options.bundle.resolve()
    card = json.loads((bundle / "model.json").read_text(encoding="utf-8"))
    height, width, channels = card["height"], card["width"], len(card["mean"])
    reading = ("--resize", "windows", "--overlap", str(min(height, width) // 8))
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder, "small.tif"), Path(folder, "large.tif")
        write_noise(small, height, width, channels)
        write_noise(large, options.side, options.side, channels)
        small_mb = measure(bundle, small, Path(folder, "a.tif"), *reading)
        large_mb = measure(bundle, large, Path(folder, "b.tif"), *reading)
    whole_mb = options.side**2 * channels / 1e6
    print(
        f"{options.side} x {options.side} x {channels}: {large_mb:.0f} MB, for one window {small_mb:.0f} MB; "
        f"the image as a whole is {whole_mb:.0f} MB"
    )


if __name__ == "__main__":
    main()
