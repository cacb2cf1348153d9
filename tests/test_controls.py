"""The control of benchmarks/controls.py: its table, and all of it in a small workspace."""

import json
import re
import shutil

import pytest

from benchmarks.controls import summaries, table
from tests.conftest import Workspace


def row(role: str, name: str, seed: int, val: float, test: float) -> dict[str, object]:
    return {
        "role": role,
        "name": name,
        "seed": seed,
        "num_epochs": 4,
        "miou_val": val,
        "miou_test": test,
    }


def test_gains_are_taken_seed_by_seed() -> None:
    rows = summaries(
        [
            row("technique", "QAT", 0, 0.60, 0.62),
            row("control", "whole", 0, 0.61, 0.60),
            row("technique", "QAT", 1, 0.64, 0.66),
            row("control", "whole", 1, 0.65, 0.63),
        ]
    )
    technique, control = rows
    assert (technique["miou_test_mean"], technique["technique_gain_test_mean"]) == (0.64, 0)
    assert (control["technique_gain_val_mean"], control["technique_gain_test_mean"]) == (-0.01, 0.025)
    assert control["technique_gain_test_spread"] == 0.0071 and control["num_seeds"] == 2  # 0.01 / sqrt(2)
    assert "| control | whole | 4 | 0.6300 (0.0283) | 0.6150 (0.0212) | +0.0250 (0.0071) |" in table(rows)


def test_one_seed_has_no_spread() -> None:
    rows = summaries([row("technique", "QAT", 0, 0.6, 0.62), row("control", "whole", 0, 0.61, 0.6)])
    assert rows[1]["miou_val_spread"] is None
    assert "| technique | QAT | 4 | 0.6000 | 0.6200 |  |" in table(rows)


@pytest.mark.slow
@pytest.mark.trial
def test_controls_are_trained_once_and_leave_the_run_as_it_is(smoke_run: tuple[Workspace, str]) -> None:
    space, _ = smoke_run
    command = ("python", "-m", "benchmarks.controls")
    results = space.path / "benchmarks" / "results"
    try:
        first = space.run(*command)
        assert first.returncode == 0, first.stderr[-3000:]
        rows = json.loads((results / "controls.json").read_text(encoding="utf-8"))["rows"]
        again = space.run(*command)
        assert not re.search(r": started$", again.stderr, re.MULTILINE), again.stderr[-3000:]
        assert space.changed_stages() == {}
    finally:
        shutil.rmtree(space.path / "artifacts" / "benchmarks", ignore_errors=True)
        for suffix in ("json", "md"):
            (results / f"controls.{suffix}").unlink(missing_ok=True)
    assert [row["name"] for row in rows if row["role"].startswith("control")] == [
        "same steps in float, then PTQ",
        "same steps in float",
    ]
    assert all(0 <= row[f"miou_{split}_mean"] <= 1 for row in rows for split in ("val", "test"))
