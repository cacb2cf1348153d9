"""The benchmarks of large graphs: many nodes, many weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import large_weights


def test_chains_are_measured_once_and_kept_b1(tmp_path: Path) -> None:
    results = tmp_path / "graph_scale.json"
    arguments = ["--chains", "19", "--without-export", "--results", str(results)]
    command = [sys.executable, "-m", "benchmarks.graph_scale", *arguments]
    # Each measurement begins with a collection of garbage, which is slow among the objects of other tests.
    subprocess.run(command, check=True)
    record = json.loads(results.read_text())
    [row] = record["rows"]
    assert row["num_nodes"] == 19
    assert {"import: rewrite", "quantize_ptq: insert_qdq", "quantize_repaired: equalize"} <= set(row["cpu_s"])
    before = results.read_bytes()
    subprocess.run(command, check=True)
    assert results.read_bytes() == before


def test_import_of_many_weights_takes_less_than_three_times_their_size_b7(tmp_path: Path) -> None:
    results = tmp_path / "large_weights.json"
    arguments = ["--gib", "0.3", "--import-only", "--results", str(results)]
    subprocess.run([sys.executable, "-m", "benchmarks.large_weights", *arguments], check=True)
    [row] = json.loads(results.read_text())["rows"]
    assert row["stage"] == "import_onnx" and row["peak_over_size"] < 3


@pytest.mark.trial
def test_network_of_more_than_2_gib_goes_through_to_engines_b7(tmp_path: Path) -> None:
    """At least 10 GB of free memory, 20 GB of disk and an hour on 2 cores."""
    results = tmp_path / "large_weights.json"
    large_weights.main(["--gib", "2.3", "--results", str(results)])
    rows = {row["stage"]: row for row in json.loads(results.read_text())["rows"]}
    assert {stage: row["status"] for stage, row in rows.items() if "status" in row} == {
        "build float cpu_onnxruntime": "failed",
        "build float cpu_openvino": "built",
        "build fp16 cpu_openvino": "built",
        "build fp16 cpu_onnxruntime": "built",
    }
    assert "2.3 GiB of weights" in rows["build float cpu_onnxruntime"]["reason"]
