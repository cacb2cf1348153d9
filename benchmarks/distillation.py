"""Compare ways to spend the same training time on a student, with 10, 25 and 100 % of the labels, for several seeds.

``python -m benchmarks.distillation [--seeds 3] [--shares 1 0.25 0.1] [--methods labels ...]`` after a run of the
pipeline, which made the data, and ``python -m flows.params steps.teacher=true``. Every method trains the configured
student from random weights for the CPU time of ``--epochs`` epochs on labels alone, as measured here: methods take
turns, and those that learn from a recorded teacher also pay for the recording, nobody for the training of the
teacher. With fewer labels the teacher, too, is trained on those labels alone, as many steps as with all; the other
images are there without labels, and only terms that need a teacher learn from them. "A larger student" is on labels
alone, too, but slower as an engine. ``--jobs`` trainings run at a time, each in one thread. All networks are judged
in eager PyTorch on the test split, and on scenes drawn like it that are harder: with more and larger digits, which
cover each other, and with low contrast. Finished trainings are kept under ``artifacts/benchmarks/distillation``,
killed ones resume. Prints a table and writes ``benchmarks/results/distillation.json`` and ``distillation.md``.
"""

import argparse
import hashlib
import json
import logging
import os
import platform
import shutil
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.runtimes import DATA, stage_config
from tasks import distill, record_teacher, train
from tasks.core.config import PARAMS_FILE, read_params
from tasks.core.execute import ARTIFACTS
from tasks.core.processes import die_with_parent
from tasks.core.reports import write_json
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.dataset import MANIFEST_FILE, open_images, open_labels, open_split, read_manifest
from tasks.parts.data.dataset_writer import write_chosen_images
from tasks.parts.data.input_card import Task
from tasks.parts.data.subsets import choose_rows
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.networks.build import build_for_data
from tasks.parts.networks.checkpoint import load_checkpoint
from tasks.parts.networks.config import NetworkConfig
from tasks.parts.pruning.macs import measure_convs, total_macs
from tasks.parts.sources.digit_scenes import draw_scenes
from tasks.parts.training.augmentation import Views
from tasks.parts.training.config import DistillationConfig, views_of
from tasks.parts.training.distillation import build_objective
from tasks.parts.training.losses import build_label_loss
from tasks.parts.training.module import Batch, LabelObjective
from tasks.parts.training.predict import measure_miou
from tasks.parts.training.split_dataset import SplitDataset

RESULTS = Path(__file__).parent / "results" / "distillation.json"
WORKSPACE = ARTIFACTS / "benchmarks" / "distillation"
LABELS, ALL_IMAGES = "labels", "all"
"""Folders of a share of the labels: only the images that have some; all images, most without."""
LARGER = "a larger student"
HARD_SCENES: Mapping[str, Mapping[str, Any]] = {
    "overlap": {"min_digits": 5, "max_digits": 6, "min_digit_share": 0.4, "max_digit_share": 0.6},
    "low contrast": {"min_opacity": 0.25, "max_noise": 20},
}
"""What differs from the configured scenes."""
_TIMED_STEPS, _TIMING_ROUNDS = 6, 5
_VALIDATIONS = 4


@dataclass(frozen=True)
class Method:
    """A way to train the student."""

    weights: Mapping[str, float]
    """Loss weights in addition to that of the labels (1), and the temperature; empty: labels alone."""
    is_recorded: bool = False
    uses_unlabelled: bool = False

    @property
    def has_features(self) -> bool:
        """Whether feature maps are compared."""
        return "hint_weight" in self.weights


_CHANNELS = {"channel_wise_weight": 1.0, "temperature": 4.0}
_TARGETS = {"soft_target_weight": 1.0, "temperature": 1.0}
_FEATURES = {"hint_weight": 0.5, "temperature": 1.0}
METHODS: Mapping[str, Method] = {
    LABELS: Method({}),
    LARGER: Method({}),
    "channel-wise, live": Method(_CHANNELS),
    "channel-wise, recorded": Method(_CHANNELS, is_recorded=True),
    "soft targets, live": Method(_TARGETS),
    "soft targets, recorded": Method(_TARGETS, is_recorded=True),
    "features, live": Method(_FEATURES),
    "features, recorded": Method(_FEATURES, is_recorded=True),
    "channel-wise, unlabelled too": Method(_CHANNELS, is_recorded=True, uses_unlabelled=True),
    "soft targets, unlabelled too": Method(_TARGETS, is_recorded=True, uses_unlabelled=True),
}


def main() -> None:
    """Train what is missing, judge, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each method")
    parser.add_argument("--shares", type=float, nargs="+", default=[1.0, 0.25, 0.1], help="of the labels")
    parser.add_argument(
        "--epochs", type=int, default=3, help="over all images on labels alone, whose time every method has"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trainings at a time")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    options = parser.parse_args()
    log()
    if not DATA.is_dir():
        raise SystemExit(f"{DATA} does not exist. Run the pipeline here first: make run")
    if "distill" not in read_params():
        raise SystemExit(f"{PARAMS_FILE} has no teacher. Run: python -m flows.params steps.teacher=true")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes below
    torch.set_num_threads(1)
    with ProcessPoolExecutor(options.jobs, get_context("spawn"), start_worker, (os.getpid(),)) as pool:
        list(pool.map(teacher_of, options.shares))
        costs = measured_costs()
        rows = []
        for share in options.shares:
            chosen = [LABELS, *(name for name in options.methods if name != LABELS)]
            chosen = [name for name in chosen if share < 1 or not METHODS[name].uses_unlabelled]
            prepare(share, chosen)
            steps = {name: steps_of(name, share, options.epochs, costs) for name in chosen}
            waiting = {
                (seed, name): pool.submit(trained, name, share, seed, steps[name])
                for seed in range(options.seeds)
                for name in chosen
            }
            found = {name: [waiting[seed, name].result() for seed in range(options.seeds)] for name in chosen}
            rows += [
                summary(share, options.epochs, name, runs, found[LABELS], costs[name])
                for name, runs in found.items()
            ]
            write_results(rows, costs)
    print(RESULTS.with_suffix(".md").read_text(encoding="utf-8"))


def log() -> None:
    """Log in this process."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", datefmt="%H:%M:%S")


def start_worker(parent: int) -> None:
    """Prepare a process that trains."""
    die_with_parent(parent, signal.SIGKILL)  # SIGTERM would wait for the end of a training
    log()


def prepare(share: float, names: Sequence[str]) -> None:
    """Make what several trainings read: data and recordings."""
    folders = data_of(share)
    for method in (METHODS[name] for name in names):
        if method.is_recorded:
            data = folders[ALL_IMAGES if method.uses_unlabelled else LABELS]
            recording(share, data, teacher_of(share), has_features=method.has_features)


def student_of(name: str) -> NetworkConfig:
    """Return the network that a method trains."""
    student: NetworkConfig = stage_config("train.baseline").network
    return replace(student, depth=2 * (student.depth or 1)) if name == LARGER else student


def losses_of(name: str) -> DistillationConfig:
    """Return the loss of a method."""
    off = {"soft_target_weight": 0.0, "channel_wise_weight": 0.0, "hint_weight": 0.0, "temperature": 1.0}
    return DistillationConfig(**({"label_weight": 1.0} | off | dict(METHODS[name].weights)))


def trainer_of(name: str) -> Any:
    """Return the trainer of a method: with the views of the recording, or another view in each epoch."""
    if METHODS[name].is_recorded:
        return stage_config("distill").trainer
    views = views_of(asdict(stage_config("record_teacher"))) | {"num_views": None}
    return replace(stage_config("train.baseline").trainer, **views)


def measured_costs() -> dict[str, float]:
    """Return the CPU seconds of a training step of each method, and of a recording; measured once, in turns."""
    path = WORKSPACE / "costs.json"
    if path.is_file():
        return dict(json.loads(path.read_text(encoding="utf-8")))
    costs = {}
    for name in ("recording", "recording of features"):
        shutil.rmtree(_recording_folder(1.0, DATA, has_features="features" in name), ignore_errors=True)
        started = time.process_time()
        recording(1.0, DATA, teacher_of(1.0), has_features="features" in name)
        costs[name] = round(time.process_time() - started, 2)
    steps = {name: timed_steps(name) for name in METHODS if not METHODS[name].uses_unlabelled}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_number in range(_TIMING_ROUNDS + 1):
        for name, step in steps.items():
            taken = next(step)
            if round_number:  # the first one warms up
                seconds[name].append(taken)
    costs |= {name: round(statistics.median(values), 5) for name, values in seconds.items()}
    for name, method in METHODS.items():
        if method.uses_unlabelled:
            costs[name] = costs[name.replace("unlabelled too", "recorded")]
    WORKSPACE.mkdir(parents=True, exist_ok=True)
    write_json(path, costs)
    return costs


def timed_steps(name: str) -> Iterator[float]:
    """Yield the mean CPU seconds of some training steps of a method, each time that it is asked."""
    manifest, trainer, method = read_manifest(DATA), trainer_of(name), METHODS[name]
    torch.manual_seed(0)
    network = build_for_data(student_of(name), manifest)
    teacher = teacher_of(1.0)
    if method.is_recorded:
        teacher = recording(1.0, DATA, teacher, has_features=True)
    objective: nn.Module = (
        build_objective(losses_of(name), student=network, teacher=teacher, manifest=manifest, trainer=trainer)
        if method.weights
        else LabelObjective(build_label_loss(trainer, manifest))
    )
    network.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.AdamW([*network.parameters(), *objective.parameters()], lr=1e-3, fused=True)
    images, views = SplitDataset(DATA, "train", manifest), Views(trainer, manifest)
    number = 0
    while True:
        started = time.process_time()
        for _ in range(_TIMED_STEPS):
            start = number * trainer.batch_size % (len(images) - trainer.batch_size)
            number += 1
            given = images.__getitems__(list(range(start, start + trainer.batch_size)))
            views_N = torch.zeros_like(given[2])
            images_NCHW, masks_NHW = views(*given, views_N=views_N)
            images_NCHW = images_NCHW.contiguous(memory_format=torch.channels_last)
            batch = Batch(images_NCHW, masks_NHW, given[2], views_N)
            optimizer.zero_grad()
            objective(network, batch).backward()
            optimizer.step()
        yield (time.process_time() - started) / _TIMED_STEPS


def steps_of(name: str, share: float, epochs: int, costs: Mapping[str, float]) -> int:
    """Return the optimizer steps for which a method has time, after it has paid for its recording."""
    manifest, batch_size = read_manifest(DATA), stage_config("train.baseline").trainer.batch_size
    budget = costs[LABELS] * epochs * (manifest.counts["train"] // batch_size)
    if METHODS[name].is_recorded:
        recorded = costs["recording of features" if METHODS[name].has_features else "recording"]
        budget -= recorded * (1.0 if METHODS[name].uses_unlabelled else share)
    return max(1, int(budget / costs[name]))


def trained(name: str, share: float, seed: int, steps: int) -> dict[str, Any]:
    """Train a student unless its result is there, and return it: mIoU by scenes, and its steps."""
    folder = WORKSPACE / f"{share:g}" / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}"
    result = folder / "result.json"
    if result.is_file() and json.loads(result.read_text(encoding="utf-8"))["steps"] == steps:
        return dict(json.loads(result.read_text(encoding="utf-8")))
    logging.info("%s, %g of the labels, seed %d: %d steps", name, share, seed, steps)
    method, folders = METHODS[name], data_of(share)
    data = folders[ALL_IMAGES if method.uses_unlabelled else LABELS]
    num_images, batch_size = read_manifest(data).counts["train"], trainer_of(name).batch_size
    num_epochs = -(-steps // max(1, num_images // batch_size))
    trainer = replace(
        trainer_of(name),
        seed=seed,
        max_steps=steps,
        max_epochs=num_epochs,
        validate_every_epochs=max(1, num_epochs // _VALIDATIONS),
    )
    baseline = replace(stage_config("train.baseline"), network=student_of(name), trainer=trainer)
    folder.mkdir(parents=True, exist_ok=True)
    if not method.weights:
        train.train(baseline, data=data, out=folder)
    else:
        teacher = teacher_of(share)
        if method.is_recorded:
            teacher = recording(share, data, teacher, has_features=method.has_features)
        config = distill.Config(
            distill.Start.fresh, student_of(name), losses_of(name), trainer, baseline.pretrained
        )
        distill.distill(config, teacher=teacher, start=teacher, data=data, out=folder)
    content = {"steps": steps, "miou": judged(folder / "model.safetensors")}
    write_json(result, content)
    shutil.rmtree(folder / "resume", ignore_errors=True)
    return content


def data_of(share: float) -> dict[str, Path]:
    """Return the data sets of a share of the labels."""
    if share == 1:
        return {LABELS: DATA, ALL_IMAGES: DATA}
    root = WORKSPACE / f"data_{share:g}"
    labelled, everything = root / LABELS, root / ALL_IMAGES
    manifest = read_manifest(DATA)
    count = round(manifest.counts["train"] * share)
    if not labelled.is_dir():
        counts = dict(manifest.counts) | {"train": count}
        write_chosen_images(DATA, _fresh(root / "draft"), counts)
        (root / "draft").rename(labelled)
    if not everything.is_dir():
        draft = _fresh(root / "draft")
        shutil.copytree(DATA, draft, copy_function=os.link)
        numbers_N = np.arange(manifest.counts["train"])
        chosen_N = numbers_N[choose_rows(DATA, "train", count)]
        order_N = np.concatenate([chosen_N, np.setdiff1d(numbers_N, chosen_N)])  # as prepare_data orders them
        masks_NHW = open_labels(DATA, "train", Task.segmentation)[order_N]
        masks_NHW[count:] = IGNORE_INDEX
        card = json.loads((draft / MANIFEST_FILE).read_text(encoding="utf-8"))
        arrays = {"train_images.npy": open_images(DATA, "train")[order_N], "train_masks.npy": masks_NHW}
        for name, values in arrays.items():
            (draft / name).unlink()  # a link to the file of the pipeline
            np.save(draft / name, values)
            card["files"][name] = hashlib.sha256((draft / name).read_bytes()).hexdigest()
        card["pixel_share"]["train"] = read_manifest(labelled).pixel_share["train"]
        card["num_unlabelled"] = len(numbers_N) - count
        (draft / MANIFEST_FILE).unlink()
        write_json(draft / MANIFEST_FILE, card)
        draft.rename(everything)
    return {LABELS: labelled, ALL_IMAGES: everything}


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def teacher_of(share: float) -> Path:
    """Train the teacher that knows this share of the labels, unless it is there, in as many steps as with all."""
    folder = WORKSPACE / f"teacher_{share:g}"
    if not (folder / "model.safetensors").is_file():
        config = stage_config("train.teacher")
        num_epochs = round(config.trainer.max_epochs / share)
        trainer = replace(
            config.trainer, max_epochs=num_epochs, validate_every_epochs=max(1, num_epochs // _VALIDATIONS)
        )
        folder.mkdir(parents=True, exist_ok=True)
        train.train(replace(config, trainer=trainer), data=data_of(share)[LABELS], out=folder)
    return folder / "model.safetensors"


def recording(share: float, data: Path, teacher: Path, *, has_features: bool) -> Path:
    """Return the recording of a teacher's answers to a data set."""
    folder = _recording_folder(share, data, has_features=has_features)
    if not folder.is_dir():
        config = replace(stage_config("record_teacher"), has_features=has_features)
        draft = _fresh(WORKSPACE / "draft")
        draft.mkdir()
        record_teacher.record_teacher(config, teacher=teacher, data=data, out=draft)
        draft.rename(folder)
    return folder / "recording"


def _recording_folder(share: float, data: Path, *, has_features: bool) -> Path:
    return WORKSPACE / f"recording_{share:g}_{data.name}{'_features' if has_features else ''}"


def judged(checkpoint: Path) -> dict[str, float]:
    """Return the mIoU of a network on the test split and on the hard scenes."""
    network, card = load_checkpoint(checkpoint)
    splits: dict[str, tuple[NDArray[Any], NDArray[Any]]] = {"test": open_split(DATA, "test"), **hard_scenes()}
    return {
        name: round(measure_miou(network, *arrays, card, batch_size=32), 4) for name, arrays in splits.items()
    }


def hard_scenes() -> dict[str, tuple[NDArray[Any], NDArray[Any]]]:
    """Draw the scenes that are harder than those of the test split."""
    config = stage_config("prepare_data")
    found = {}
    for name, changes in HARD_SCENES.items():
        scenes = replace(config.scenes, **changes)
        chunks = list(draw_scenes("test", scenes, height=config.height, width=config.width, seed=config.seed))
        images_NHWC, masks_NHW = (np.concatenate(part) for part in zip(*chunks, strict=True))
        found[name] = images_NHWC, masks_NHW
    return found


def summary(
    share: float,
    epochs: int,
    name: str,
    runs: Sequence[Mapping[str, Any]],
    plain: Sequence[Mapping[str, Any]],
    cost: float,
) -> dict[str, Any]:
    """Return mean and standard deviation over the seeds; the gain over labels alone is computed per seed."""
    manifest = read_manifest(DATA)
    size = manifest.height, manifest.width
    network = build_for_data(student_of(name), manifest)
    row: dict[str, Any] = {
        "labels": share,
        "epochs_of_labels_alone": epochs,
        "method": name,
        "steps": runs[0]["steps"],
        "step_cpu_s": cost,
        "mmacs": round(total_macs(measure_convs(network, size)) / 1e6, 1),
        "num_seeds": len(runs),
    }
    gains = [run["miou"]["test"] - other["miou"]["test"] for run, other in zip(runs, plain, strict=False)]
    values = {scenes: [run["miou"][scenes] for run in runs] for scenes in runs[0]["miou"]} | {"gain": gains}
    for what, found in values.items():
        row[f"{what}_mean"] = round(statistics.mean(found), 4)
        row[f"{what}_spread"] = round(statistics.stdev(found), 4) if len(found) > 1 else None
    return row


def write_results(rows: Sequence[Mapping[str, Any]], costs: Mapping[str, float]) -> None:
    """Write both files; rows of other calls on the same measured costs stay."""
    known = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    if known.get("cpu_seconds") == costs:
        made = {(row["labels"], row["method"]) for row in rows}
        rows = [*rows, *(row for row in known["rows"] if (row["labels"], row["method"]) not in made)]
    rows = sorted(rows, key=lambda row: (-row["labels"], list(METHODS).index(row["method"])))
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "teacher_miou": {
            f"{share:g}": judged(teacher_of(share)) for share in dict.fromkeys(row["labels"] for row in rows)
        },
        "cpu_seconds": costs,
        "rows": rows,
    }
    write_json(RESULTS, record)
    head = ["labels", "method", "steps", "MMACs", "test", "gain over labels alone", *HARD_SCENES]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [
            f"{row['labels']:.0%}",
            row["method"],
            str(row["steps"]),
            f"{row['mmacs']:g}",
            _with_spread(row, "test"),
            "" if row["method"] == LABELS else _with_spread(row, "gain", sign="+"),
            *(_with_spread(row, scenes) for scenes in HARD_SCENES),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    RESULTS.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _with_spread(row: Mapping[str, Any], what: str, sign: str = "") -> str:
    spread = row[f"{what}_spread"]
    return f"{row[f'{what}_mean']:{sign}.4f}" + ("" if spread is None else f" ({spread:.4f})")


if __name__ == "__main__":
    main()
