"""Measure what two large networks of others take from their file to the pick, in the default configuration.

``python -m benchmarks.file_to_pick --workspace DIR``. A U-Net on an EfficientNet-B4 that reads six bands of 256x256
(19 million parameters), and a ViT-B/16 at 224x224 (86 million), with random weights that are scaled layer by layer,
as in benchmarks/corpus.py, and answers that count as numbers. With ``--answers classes`` the largest counts:
near-ties of random networks then lose far more than the gates allow, so that the whole search is done. ``--images``
drawn scenes lie in one folder, which the default configuration splits; with ``--splits each`` there are as many for
calibration, and again for val and for test. A clone of the checkout runs ``dvc repro``, one stage after the other, or
with ``--driver flow`` ``python -m flows.optimize``, which runs independent stages side by side. Prints and writes
``benchmarks/results/file_to_pick.json``: seconds of all and of each stage, the largest resident memory of each stage
and of all processes at once (what they share counts for each), and the picks. A second start measures what is
missing.
"""

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from transformers import EfficientNetConfig, EfficientNetModel, ViTConfig, ViTForImageClassification

from benchmarks.chaos import environment
from benchmarks.corpus import TARGETS, conditions, read_engines
from benchmarks.corpus_networks import double, scale_layers
from benchmarks.gpu_cells import REPOSITORY
from benchmarks.records import open_record, write_record
from benchmarks.zoo import code_of
from benchmarks.zoo_networks import Exporter, LogitsOnly, with_usual_weights
from benchmarks.zoo_training import export
from flows.params import compose_params
from tasks.parts.data.dataset import normalise
from tasks.parts.sources.config import ScenesConfig
from tasks.parts.sources.digit_scenes import draw_scenes

RESULTS = Path(__file__).parent / "results" / "file_to_pick.json"
NUM_CLASSES = 6
NUM_SCALING = 8
LOOK_S = 0.2


class EfficientUNet(nn.Module):
    """A U-Net (Ronneberger et al., 2015) on the features of an EfficientNet-B4 (Tan and Le, 2019)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        config = EfficientNetConfig(
            width_coefficient=1.4, depth_coefficient=1.8, num_channels=channels, hidden_dim=1792
        )
        self.encoder = with_usual_weights(EfficientNetModel(config))
        for name in ("top_conv", "top_bn", "top_activation"):  # of the classifier
            setattr(self.encoder.encoder, name, nn.Identity())
        given, self.join = 448, nn.ModuleList()
        for skip, width in zip((160, 56, 32, 24, 0), (256, 128, 64, 32, 16), strict=True):
            self.join.append(double(given + skip, width, nn.BatchNorm2d))
            given = width
        self.head = nn.Conv2d(given, NUM_CLASSES, 3, padding=1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Return logits [N, classes, H, W]."""
        found = self.encoder(images_NCHW, output_hidden_states=True).hidden_states
        by_height = {maps.shape[2]: maps for maps in found}  # the last of each size
        maps, *skips = [by_height[height] for height in sorted(by_height)]
        for join, skip in zip(self.join, [*skips, None], strict=True):
            maps = nn.functional.interpolate(maps, scale_factor=2.0)
            maps = join(maps if skip is None else torch.cat([maps, skip], dim=1))
        logits: Tensor = self.head(maps)
        return logits


def vit_base(channels: int) -> nn.Module:
    """Return a ViT-B/16 (Dosovitskiy et al., 2020) without its dropout."""
    model = ViTForImageClassification(ViTConfig(num_channels=channels))
    model.set_attn_implementation("eager")
    return LogitsOnly(model)


@dataclass(frozen=True)
class LargeNetwork:
    """A network, and the images that it reads."""

    build: Callable[[int], nn.Module]
    channels: int
    side: int


NETWORKS = {
    "unet_efficientnet_b4": LargeNetwork(EfficientUNet, channels=6, side=256),
    "vit_b": LargeNetwork(vit_base, channels=3, side=224),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, print and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, default=Path("file_to_pick"), help="files of gigabytes")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--answers", default="values", choices=["values", "classes"])
    parser.add_argument("--splits", default="shares", choices=["shares", "each"])
    parser.add_argument("--driver", default="repro", choices=["repro", "flow"])
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    record = open_record(
        options.results, conditions() | {"num_images": options.images, "targets": list(TARGETS)}, ["rows"]
    )
    for name in options.networks:
        wanted = {
            "network": name,
            "answers": options.answers,
            "splits": options.splits,
            "driver": options.driver,
        }
        if not any(wanted.items() <= row.items() for row in record["rows"]):
            workspace = options.workspace.resolve() / "_".join(wanted.values())
            record["rows"].append(wanted | measure(**wanted, workspace=workspace, num_images=options.images))
            write_record(options.results, record)
    for row in record["rows"]:
        took = f"{row['seconds'] / 60:.1f} min, {row['peak_mb']} MB in {row['peak_at']}"
        picks = [
            f"{engine['variant']} on {engine['target']}" for engine in row["engines"] if engine["picked"]
        ]
        kind = ", ".join(row[name] for name in ("answers", "splits", "driver"))
        print(f"{row['network']} ({kind}): {took}, {row['peak_all_mb']} MB in all; picks {', '.join(picks)}")


def measure(
    network: str, answers: str, splits: str, driver: str, workspace: Path, num_images: int
) -> dict[str, Any]:
    """Write images and the file of a network, let a driver run all stages, and return what they took."""
    built, is_split = NETWORKS[network], splits == "each"
    scenes, file, checkout = (workspace / name for name in ("scenes", "model.onnx", "checkout"))
    write_images(scenes, built, num_images, is_split=is_split)
    if not file.is_file():
        write_network(built, scenes, draft := workspace / "draft.onnx")
        draft.rename(file)
    numbers = [0.5] * built.channels
    overrides = [
        *("model=onnx", f"model.path={file}", f"model.mean={numbers}", f"model.std={numbers}"),
        f"model.output_kind={answers}",
        *("data=images", f"prepare_data.root={scenes}", f"prepare_data.folder.channels={built.channels}"),
        *(f"prepare_data.{axis}={built.side}" for axis in ("height", "width")),
        *([f"prepare_data.folder.num_calibration={num_images}"] if is_split else []),
        f"target=[{','.join(TARGETS)}]",
    ]
    if not checkout.is_dir():
        subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(checkout)], check=True)
    command = ["dvc", "repro"]
    if driver == "flow":
        command = ["flows.optimize", *overrides]
    else:
        subprocess.run(
            [sys.executable, "-m", "flows.params", *overrides], cwd=checkout, env=environment(), check=True
        )
    found = run_watched(command, checkout)
    stop = [sys.executable, "-m", "flows.local_server", "--stop"]
    subprocess.run(stop, cwd=checkout, env=environment(), check=True)
    return {"code": code_of(REPOSITORY)} | found | {"engines": read_engines(checkout)}


def run_watched(command: Sequence[str], checkout: Path) -> dict[str, Any]:
    """Run a module to its end; return seconds and memory of all and of each stage.

    Raises CalledProcessError where it fails; its output is in ``log`` beside the checkout.
    """
    log, started = checkout.with_name("log"), time.monotonic()
    peaks_mb: dict[str, int] = {}
    peak_all_mb = 0
    with log.open("w", encoding="utf-8") as output:
        process = psutil.Popen(
            [sys.executable, "-m", *command], cwd=checkout, env=environment(), stdout=output, stderr=output
        )
        while process.poll() is None:
            sizes_mb = [read_size(one) for one in (process, *process.children(recursive=True))]
            for stage, size_mb in sizes_mb:
                peaks_mb[stage] = max(peaks_mb.get(stage, 0), size_mb)
            peak_all_mb = max(peak_all_mb, sum(size_mb for _, size_mb in sizes_mb))
            time.sleep(LOOK_S)
    subprocess.CompletedProcess(command, process.returncode).check_returncode()
    found = re.findall(r"tasks\.core\.execute (\S+): finished in (\S+) s", log.read_text(encoding="utf-8"))
    peak_at = max((stage for stage, _ in found), key=lambda stage: peaks_mb.get(stage, 0))
    return {
        "seconds": round(time.monotonic() - started, 1),
        "peak_mb": peaks_mb[peak_at],
        "peak_at": peak_at,
        "peak_all_mb": peak_all_mb,
        "stages": {stage: [float(seconds), peaks_mb.get(stage, 0)] for stage, seconds in found},
    }


def read_size(process: psutil.Process) -> tuple[str, int]:
    """Return the stage that a process runs, empty for others, and its resident memory in MiB."""
    try:
        words = process.cmdline()
        stage = words[3] if words[1:3] == ["-m", "tasks"] else ""
        return stage, process.memory_info().rss >> 20
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return "", 0


def write_images(root: Path, network: LargeNetwork, num_images: int, *, is_split: bool) -> None:
    """Write ``images/[<split>/]<number>.npy``, uint8 [H, W, channels], each of as many scenes as it takes."""
    if root.is_dir():
        return
    num_scenes = -(-network.channels // 3)
    splits = ("train", "val", "test") if is_split else ("train",)
    counts = dict.fromkeys(("num_train", "num_val", "num_test"), num_scenes * num_images)
    drawing: ScenesConfig = ScenesConfig(
        **compose_params()["prepare_data"]["scenes"] | counts | {"num_calibration": 1}
    )
    draft = root.with_name("drawing")
    for split in splits:
        folder = draft / "images" / split if is_split else draft / "images"
        folder.mkdir(parents=True, exist_ok=True)
        drawn = draw_scenes(split, drawing, height=network.side, width=network.side, seed=0)
        images = (image_HWC for images_NHWC, _ in drawn for image_HWC in images_NHWC)
        for number, parts in enumerate(zip(*[images] * num_scenes, strict=True)):
            np.save(folder / f"{number:04d}.npy", np.concatenate(parts, axis=2)[..., : network.channels])
    draft.rename(root)


def write_network(network: LargeNetwork, scenes: Path, file: Path) -> None:
    """Write a network as ONNX, its layers scaled on the first training images."""
    torch.manual_seed(0)
    model = network.build(network.channels).eval()
    files = sorted((scenes / "images").rglob("*.npy"))[:NUM_SCALING]
    numbers = (0.5,) * network.channels
    images_NCHW = torch.from_numpy(normalise(np.stack([np.load(found) for found in files]), numbers, numbers))
    scale_layers(model, images_NCHW)
    export(model, file, Exporter.dynamo, side=network.side, channels=network.channels)


if __name__ == "__main__":
    main()
