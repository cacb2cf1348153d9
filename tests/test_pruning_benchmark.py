"""benchmarks/pruning.py: its search, its table, and all of it in a small workspace."""

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.pruning import Pruned, closest, summary, table
from tasks.parts.measuring.intervals import Estimate
from tests.conftest import Workspace


def test_search_ends_within_the_tolerance() -> None:
    tried: list[float] = []

    def measure(ratio: float) -> float:
        tried.append(ratio)
        return 0.2 + 0.8 * ratio

    ratio, measured = closest(measure, 0.6, 0.01)
    assert measured == pytest.approx(0.6, rel=0.01) and ratio == pytest.approx(0.5, abs=0.01)
    assert tried[0] == 0.6 and len(tried) < 8


def test_search_on_a_latency_with_steps_takes_the_closest_that_can_be_reached() -> None:
    def measure(ratio: float) -> float | None:
        return None if ratio < 0.35 else 0.5 if ratio < 0.5 else 0.62 if ratio < 0.7 else 1.0

    assert closest(measure, 0.6, 0.001) == (0.6, 0.62)
    assert closest(measure, 0.3, 0.001)[1] == 0.5
    with pytest.raises(SystemExit, match="No share of the MACs can be reached"):
        closest(lambda _: None, 0.6, 0.01)


def test_cost_is_taken_seed_by_seed() -> None:
    network, latency = Pruned(Path("model.safetensors"), 0.5, 0.49), Estimate(0.6, 0.59, 0.61)
    row = summary(network, latency, [0.60, 0.64], [0.61, 0.67])
    assert (row["miou_test_mean"], row["cost_mean"], row["cost_spread"]) == (0.62, 0.02, 0.0141)
    assert "| uniform | 0.490 | 0.600 (0.590 to 0.610) | 0.6200 (0.0283) | 0.0200 (0.0141) | 2 |" in table(
        [{"network": "uniform", **row}]
    )
    row = summary(network, latency, [0.60], [0.61])
    assert "| 0.6000 | 0.0100 | 1 |" in table([{"network": "uniform", **row}])


@pytest.mark.slow
@pytest.mark.trial
def test_networks_are_searched_and_trained_once_and_leave_the_run_as_it_is(
    smoke_run: tuple[Workspace, str],
) -> None:
    space, _ = smoke_run
    command = ("python", "-m", "benchmarks.pruning", "--seeds", "1", "--rounds", "5")
    results = space.path / "benchmarks" / "results"
    try:
        first = space.run(*command)
        assert first.returncode == 0, first.stderr[-3000:]
        rows = json.loads((results / "pruning.json").read_text(encoding="utf-8"))["rows"]
        again = space.run(*command)
        assert not re.search(r": started$", again.stderr, re.MULTILINE), again.stderr[-3000:]
        assert space.changed_stages() == {}
    finally:
        shutil.rmtree(space.path / "artifacts" / "benchmarks", ignore_errors=True)
        for suffix in ("json", "md"):
            (results / f"pruning.{suffix}").unlink(missing_ok=True)
    assert [row["network"] for row in rows] == ["unpruned", "uniform", "across_layers", "sensitivity"]
    assert rows[0]["cost_mean"] == 0 and rows[0]["latency_ratio"] == 1
    assert all(0 < row["macs_ratio"] < 1 and 0 <= row["miou_test_mean"] <= 1 for row in rows[1:])
