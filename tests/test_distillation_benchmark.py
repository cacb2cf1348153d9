"""benchmarks/distillation.py in a small workspace, with fewer methods."""

import json
import shutil

import pytest

from tests.conftest import Workspace

METHODS = (
    "labels",
    "a larger student",
    "channel-wise, live",
    "features, recorded",
    "channel-wise, unlabelled too",
)


@pytest.mark.slow
@pytest.mark.trial
def test_methods_have_the_same_time_and_are_trained_once(smoke_run: tuple[Workspace, str]) -> None:
    space, _ = smoke_run
    command = ("python", "-m", "benchmarks.distillation", "--seeds", "1", "--epochs", "2")
    command += ("--shares", "1", "0.5", "--methods", *METHODS)
    results = space.path / "benchmarks" / "results" / "distillation.json"
    before = {path: path.read_bytes() for path in (results, results.with_suffix(".md")) if path.exists()}
    try:
        first = space.run(*command)
        assert first.returncode == 0, first.stderr[-3000:]
        record = json.loads(results.read_text(encoding="utf-8"))
        again = space.run(*command)
        assert " steps" not in again.stderr, again.stderr[-3000:]
        assert space.changed_stages() == {}
    finally:
        shutil.rmtree(space.path / "artifacts" / "benchmarks", ignore_errors=True)
        for path, content in before.items():
            path.write_bytes(content)
    rows = {(row["labels"], row["method"]): row for row in record["rows"]}
    assert set(rows) == {(share, method) for share in (1.0, 0.5) for method in METHODS} - {
        (1.0, "channel-wise, unlabelled too")
    }
    for (share, method), row in rows.items():
        seconds = row["steps"] * row["step_cpu_s"]
        if "recorded" not in method and "unlabelled" not in method:
            whole = rows[share, "labels"]
            assert seconds <= whole["steps"] * whole["step_cpu_s"] + row["step_cpu_s"]
        assert 0 <= row["test_mean"] <= 1 and 0 <= row["overlap_mean"] <= 1
