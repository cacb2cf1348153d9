"""Draw the images that the networks of benchmarks/zoo.py are trained and measured on, train them, and export them.

Classification: one bright handwritten digit of scikit-learn on a dark part of a photo; ten classes. Segmentation: the
scenes of the default data set. Training draws its own images from the pool that calibration images come from; val
and test use other scans and other photo columns (see tasks/parts/sources/digit_scenes.py).

Shape letters: N images, H rows, W columns, C channels.
"""

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

from benchmarks.zoo_networks import Exporter, ZooNetwork
from flows.params import compose_params
from tasks.core.config import typed_config
from tasks.parts.data.dataset import normalise
from tasks.parts.data.input_card import Task
from tasks.parts.onnx_graphs.export import quiet_export
from tasks.parts.sources.config import ScenesConfig
from tasks.parts.sources.digit_scenes import POOL_OF_SPLIT, Pool, draw_scenes, load_pool

OPSET = 18
INPUT_NAME, OUTPUT_NAME = "pixels", "scores"
BATCH_SIZE = 32
NUM_DIGITS = 10
_WARM_UP = 0.05
"""Share of the time in which the learning rate rises."""
_HALF_SIZE_UNTIL = 0.6
"""Share of the time in which the images have half their rows and columns: four times as many steps fit."""
_WEIGHT_DECAY = 0.02
_MAX_NORM = 1.0


@dataclass(frozen=True)
class Trained:
    """How a network was trained."""

    cpu_s: float
    """Seconds of CPU time, of all threads."""
    num_steps: int
    batch_size: int
    num_images: int
    loss: float
    """Mean over the last tenth of the steps."""


def scenes_of(counts: Mapping[str, int]) -> ScenesConfig:
    """Return how the scenes of the default data set look, with these numbers of images per split."""
    scenes = compose_params()["prepare_data"]["scenes"] | {f"num_{name}": num for name, num in counts.items()}
    config: ScenesConfig = typed_config(ScenesConfig, scenes, "prepare_data.scenes")
    return config


def class_names(task: Task) -> list[str]:
    """Return the classes in the order of the logits."""
    if task is Task.classification:
        return [str(digit) for digit in range(NUM_DIGITS)]
    return ["background", *(str(digit) for digit in range(scenes_of({}).num_digits))]


def draw_images(
    split: str, task: Task, count: int, side: int, *, seed: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield images uint8 [N, H, W, 3] with masks [N, H, W], or with the classes [N] of single digits."""
    if task is Task.segmentation:
        yield from draw_scenes(split, scenes_of({split: count}), height=side, width=side, seed=seed)
        return
    pool = load_pool(POOL_OF_SPLIT[split], num_digits=NUM_DIGITS, seed=seed)
    random = np.random.default_rng([seed, list(POOL_OF_SPLIT).index(split)])
    chosen_N = random.integers(len(pool.digits), size=count)
    images = [draw_digit(random, pool, scan, side) for scan in chosen_N]
    yield np.stack(images), pool.digits[chosen_N]


def draw_digit(random: np.random.Generator, pool: Pool, scan: int, side: int) -> np.ndarray:
    """Return an image [H, W, 3] of one scan of a pool, scaled and moved, over a part of a photo."""
    photo = pool.photos[random.integers(len(pool.photos))]
    top, left = (int(random.integers(size - side + 1)) for size in photo.shape[:2])
    image = photo[top : top + side, left : left + side] * random.uniform(0.2, 0.6)
    size = int(random.uniform(0.6, 1.0) * side)
    ink = Image.fromarray(pool.scans[scan]).resize((size, size), Image.Resampling.BICUBIC)
    top, left = (int(random.integers(side - size + 1)) for _ in range(2))
    ink_HW = np.zeros((side, side), np.float32)
    ink_HW[top : top + size, left : left + size] = ink
    image += (ink_HW.clip(0, 1) * random.uniform(0.6, 1.0))[..., None] * (255 - image)
    image += random.normal(0, random.uniform(0, 10), image.shape)
    return image.clip(0, 255).astype(np.uint8)


def write_images(root: Path, task: Task, side: int, counts: Mapping[str, int], *, seed: int = 0) -> None:
    """Write a user's folder for ``data=class_folder`` or ``data=folder``: images, classes and the lists of splits.

    Its train split holds only the calibration images; nothing else reads it.
    """
    names: dict[str, list[str]] = {}
    for split in ("calibration", "val", "test"):
        names[split] = []
        for images_NHWC, labels in draw_images(split, task, counts[split], side, seed=seed):
            for image_HWC, label in zip(images_NHWC, labels, strict=True):
                folder = f"{label}/" if task is Task.classification else ""
                name = f"{folder}{split}_{len(names[split]):05}"
                _save(image_HWC, root / "images" / f"{name}.png")
                if task is Task.segmentation:
                    _save(label, root / "masks" / f"{name}.png")
                names[split].append(name)
    for split, listed in (names | {"train": names["calibration"]}).items():
        (root / f"{split}.txt").write_text("\n".join(listed) + "\n", encoding="utf-8")
    classes = "".join(f'- "{name}"\n' for name in class_names(task))
    (root / "classes.yaml").write_text(classes, encoding="utf-8")  # last: its presence says that all is there


def _save(pixels: np.ndarray, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file, compress_level=1)


def train(
    network: nn.Module, spec: ZooNetwork, *, num_images: int, budget_s: float, seed: int = 0
) -> Trained:
    """Train a network for some seconds of CPU time, at least one step, and leave it in eval mode.

    AdamW, cross-entropy, a learning rate that rises and then falls as a cosine of the time that has passed; small
    images first, as in Tan and Le, "EfficientNetV2", 2021, section 4. Equal seeds draw equal images and batches; how
    many fit into the time depends on the machine.
    """
    images_NHWC, labels = _training_images(spec, num_images, seed)
    mean, std = input_statistics()
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=spec.learning_rate, weight_decay=_WEIGHT_DECAY, fused=True
    )
    generator, losses, is_masks = np.random.default_rng(seed), [], spec.task is Task.segmentation
    network.train().to(memory_format=torch.channels_last)
    begun = time.process_time()
    while (spent := time.process_time() - begun) < budget_s or not losses:
        optimizer.param_groups[0]["lr"] = spec.learning_rate * learning_rate_factor(spent / budget_s)
        chosen = generator.integers(len(images_NHWC), size=BATCH_SIZE)
        images_NCHW = torch.from_numpy(normalise(images_NHWC[chosen], mean, std))
        truth = torch.from_numpy(labels[chosen].astype(np.int64))
        if spent < _HALF_SIZE_UNTIL * budget_s:
            images_NCHW, truth = F.avg_pool2d(images_NCHW, 2), truth[..., ::2, ::2] if is_masks else truth
        logits = network(images_NCHW.contiguous(memory_format=torch.channels_last))
        loss = F.cross_entropy(logits, truth)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(network.parameters(), _MAX_NORM)
        optimizer.step()
        losses.append(float(loss.detach()))
    network.eval().to(memory_format=torch.contiguous_format)
    last = losses[-max(1, len(losses) // 10) :]
    return Trained(
        round(time.process_time() - begun, 1),
        len(losses),
        BATCH_SIZE,
        len(images_NHWC),
        round(sum(last) / len(last), 4),
    )


def learning_rate_factor(progress: float) -> float:
    """Return the learning rate as a share of its highest value, for a share of the time from 0 to 1."""
    if progress < _WARM_UP:
        return max(progress / _WARM_UP, 0.01)
    return (1 + math.cos(math.pi * min(1.0, (progress - _WARM_UP) / (1 - _WARM_UP)))) / 2


def input_statistics() -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and std that ``model=onnx`` declares by default; the networks are trained with them."""
    model: dict[str, Any] = compose_params(["model=onnx", "model.path=model.onnx", "data=images"])[
        "import_onnx"
    ]
    return tuple(model["mean"]), tuple(model["std"])


def _training_images(spec: ZooNetwork, num_images: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    parts = list(draw_images("train", spec.task, num_images, spec.side, seed=seed))
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def export(network: nn.Module, file: Path, exporter: Exporter, *, side: int, channels: int = 3) -> None:
    """Write an ONNX file with a dynamic batch, as a user of one of torch's exporters would."""
    images_NCHW = torch.zeros(2, channels, side, side)
    names: dict[str, Any] = {"input_names": [INPUT_NAME], "output_names": [OUTPUT_NAME]}
    with quiet_export():
        if exporter is Exporter.dynamo:
            torch.onnx.export(
                network,
                (images_NCHW,),
                file,
                dynamo=True,
                opset_version=OPSET,
                external_data=False,
                dynamic_shapes=({0: torch.export.Dim("batch", min=1, max=4096)},),
                verbose=False,
                **names,
            )
        else:
            torch.onnx.export(
                network,
                (images_NCHW,),
                file,
                dynamo=False,
                opset_version=OPSET,
                dynamic_axes={INPUT_NAME: {0: "batch"}, OUTPUT_NAME: {0: "batch"}},
                **names,
            )
