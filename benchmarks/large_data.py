"""Prepare and read a large data set that is not copied, and measure time and memory.

``python -m benchmarks.large_data --folder <empty or earlier folder>`` draws 5,000 JPEGs of 2048 x 1024 with masks
there (small files: coarse shapes with noise), prepares them with ``copy=false``, then reads the train split once as a
training does, with 0 and with 2 data workers. Each part runs in a process of its own, whose peak of resident memory
is recorded. Files that are there are kept, and so are measurements of the same number of images, so an interrupted
run goes on. Prints and writes ``benchmarks/results/large_data.json`` and ``large_data.md``.
"""

import argparse
import json
import platform
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tasks.core.environment import versions
from tasks.parts.engines.machine import read_cpu_model

RESULTS = Path(__file__).parent / "results" / "large_data.json"

HEIGHT, WIDTH = 1024, 2048
CLASSES = ("road", "building", "tree", "car", "sky")
PREPARED = (512, 1024)
"""Height and width after prepare_data."""
BATCH_SIZE = 8
MAX_PEAK_MIB = 1024


def main() -> None:
    """Draw, prepare, read, print and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--images", type=int, default=5000)
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(PARTS[options.part](options.folder)))
        return
    draw_images(options.folder / "source", options.images)
    found = _earlier(options.images)
    for name in PARTS:
        if name not in found or (name == "prepare" and not (options.folder / "out/dataset").is_dir()):
            command = [
                sys.executable,
                "-m",
                "benchmarks.large_data",
                "--folder",
                options.folder,
                "--part",
                name,
            ]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            found[name] = json.loads(done.stdout.splitlines()[-1])
            _write(options.images, found)
        print(name, json.dumps(found[name]))


def draw_images(root: Path, num_images: int) -> None:
    """Write what is missing of the images and masks, and the names of the classes."""
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    names = [f"{number:05d}" for number in range(num_images)]
    missing = [name for name in names if not (root / f"masks/{name}.png").exists()]
    with ThreadPoolExecutor(2) as pool:
        for number, _ in enumerate(pool.map(lambda name: _draw(root, name), missing), start=1):
            if number % 500 == 0:
                print(f"drew {number} of {len(missing)} images", flush=True)
    (root / "classes.yaml").write_text(f"classes: [{', '.join(CLASSES)}]\n", encoding="utf-8")


def _draw(root: Path, name: str) -> None:
    """Write an image, then its mask: a mask that is there has its image."""
    random = np.random.default_rng(int(name))
    coarse = random.integers(0, len(CLASSES), (HEIGHT // 128, WIDTH // 128)).astype(np.uint8)
    mask = Image.fromarray(coarse).resize((WIDTH, HEIGHT), Image.Resampling.NEAREST)
    values = coarse[..., None] * 40 + random.integers(0, 60, (*coarse.shape, 3))
    colours = Image.fromarray(values.astype(np.uint8)).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)
    colours.save(root / f"images/{name}.jpg", quality=80)
    mask.save(root / f"masks/{name}.png", compress_level=1)


def prepare(folder: Path) -> dict[str, Any]:
    """Run the stage without a copy."""
    began = time.perf_counter()
    num_images = prepare_without_copy(folder, *PREPARED, num_calibration=256)
    return _figures(num_images, time.perf_counter() - began)


def prepare_without_copy(folder: Path, height: int, width: int, *, num_calibration: int) -> int:
    """Make ``out/dataset`` of the images in a folder; return their number."""
    from tasks.parts.data.image_files import ResizeMode
    from tasks.parts.sources.config import FolderConfig
    from tasks.prepare_data import Config, Source, prepare_data

    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    rules = FolderConfig(
        channels=3,
        resize_mode=ResizeMode.resize,
        val_share=0.1,
        test_share=0.15,
        num_calibration=num_calibration,
        max_megapixels=64,
        max_bad_images=0,
    )
    config = Config(Source.folder, "source", 0, height, width, scenes=None, folder=rules, copy=False)
    report = prepare_data(config, root=folder / "source", out=folder / "out")
    return sum(count for split, count in report.num_images.items() if split != "calibration")


def read_alone(folder: Path) -> dict[str, Any]:
    """Read the train split in the training process."""
    return _read(folder, num_workers=0)


def read_with_workers(folder: Path) -> dict[str, Any]:
    """Read the train split with two data workers."""
    return _read(folder, num_workers=2)


def _read(folder: Path, *, num_workers: int) -> dict[str, Any]:
    from torch.utils.data import DataLoader, RandomSampler

    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.training.data_workers import DataWorkers, prepare_worker
    from tasks.parts.training.split_dataset import SplitDataset, as_is

    dataset = folder / "out/dataset"
    images = SplitDataset(dataset, "train", read_manifest(dataset))
    loader: DataLoader[Any] = DataLoader(
        images,
        batch_size=BATCH_SIZE,
        sampler=RandomSampler(images),
        num_workers=num_workers,
        multiprocessing_context=DataWorkers() if num_workers else None,
        worker_init_fn=prepare_worker,
        collate_fn=as_is,
    )
    began = time.perf_counter()
    num_images = sum(len(images_NCHW) for images_NCHW, *_ in loader)
    return _figures(num_images, time.perf_counter() - began)


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "prepare": prepare,
    "read, 0 workers": read_alone,
    "read, 2 workers": read_with_workers,
}


def _figures(num_images: int, seconds: float) -> dict[str, Any]:
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    cpu_s = sum(used.ru_utime + used.ru_stime for used in (own, children))
    return {
        "num_images": num_images,
        "minutes": round(seconds / 60, 2),
        "images_per_s": round(num_images / seconds, 1),
        "cpu_ms_per_image": round(1000 * cpu_s / num_images, 1),
        "peak_mib": round(own.ru_maxrss / 1024),
        "peak_of_a_worker_mib": round(children.ru_maxrss / 1024),
    }


def _earlier(num_images: int) -> dict[str, Any]:
    """Return the measurements of an earlier run with the same number of images on the same machine."""
    if not RESULTS.exists():
        return {}
    record = json.loads(RESULTS.read_text(encoding="utf-8"))
    is_same = (record["num_images"], record["cpu_model"]) == (num_images, read_cpu_model())
    return dict(record["parts"]) if is_same else {}


def _write(num_images: int, found: dict[str, Any]) -> None:
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        "versions": versions("numpy", "pillow", "torch"),
        "num_images": num_images,
        "parts": found,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    shown = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    lines = [
        "# A large data set without a copy",
        "",
        f"{record['cpu_model']}, {record['date']}, Python {record['python']}, {shown}; "
        f"`python -m benchmarks.large_data --folder <folder> --images {num_images}`.",
        "",
        f"{num_images} JPEGs of {WIDTH} x {HEIGHT} with masks, prepared with `copy=false` at {PREPARED[1]} x "
        f"{PREPARED[0]}, then the train split read once in random order, {BATCH_SIZE} images a batch. Memory is the "
        "peak of what is resident in one process. The CPU time holds the start of the process and of its workers.",
        "",
        "| part | images | minutes | images/s | CPU per image | peak of the process | peak of a data worker |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {part['num_images']} | {part['minutes']} | {part['images_per_s']} | "
            f"{part['cpu_ms_per_image']} ms | {part['peak_mib']} MiB | {_worker(name, part)} |"
            for name, part in found.items()
        ),
        "",
    ]
    RESULTS.with_suffix(".md").write_text("\n".join(lines), encoding="utf-8")
    for name, part in found.items():
        assert max(part["peak_mib"], part["peak_of_a_worker_mib"]) < MAX_PEAK_MIB, (
            f"{name} needs too much memory"
        )


def _worker(name: str, part: dict[str, Any]) -> str:
    return f"{part['peak_of_a_worker_mib']} MiB" if "2 workers" in name else ""


if __name__ == "__main__":
    main()
