"""The benchmark of orchestration counts what it says, and runs on a pipeline of one engine."""

import json
from pathlib import Path

import pytest

from benchmarks.orchestration import main, overheads_ms


def test_overhead_is_the_time_of_a_place_without_the_function_itself() -> None:
    two_places = {"build_engine.a": (0.0, 0.1), "build_engine.b": (0.05, 0.1), "build_engine.c": (0.3, 0.4)}
    alone = {"benchmark.a": (1.0, 1.5), "benchmark.b": (1.75, 1.8)}
    assert sorted(overheads_ms(two_places | alone, 2)) == pytest.approx([200.0, 250.0])


@pytest.mark.slow
@pytest.mark.trial
def test_benchmark_runs_everything_once_and_then_nothing(tmp_path: Path) -> None:
    results = tmp_path / "orchestration.json"
    main(["--variants", "1", "--targets", "1", "--dvc", "--results", str(results)])
    record = json.loads(results.read_text())
    assert (record["num_engines"], record["num_calls"]) == (1, 8 + 4 + 3)
    assert record["executed_overhead_ms_p50"] > 0 and record["cached_ms_per_call"] > 0
    assert all(len(record[name]) == 3 for name in ("flow_rss_mb", "server_rss_mb"))
