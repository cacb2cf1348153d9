"""The simulation of interval coverage fills its tables, and ranks the methods as theory does."""

import json
from pathlib import Path

from benchmarks.coverage import main, measure_coverage


def test_correlated_rounds_fool_the_bootstrap_and_not_the_order_statistics() -> None:
    row = measure_coverage(100, 0.6, 0.0, 150)
    assert row["bootstrap"] < 0.85 < 0.88 < row["order statistics"]
    assert row["bootstrap"] < row["block bootstrap"]


def test_disturbed_rounds_are_covered_by_short_intervals() -> None:
    row = measure_coverage(100, 0.2, 0.35, 150)
    assert row["order statistics"] > 0.9
    assert row["length"] < 0.04  # a disturbed round is off by 0.34


def test_all_tables_are_written(tmp_path: Path) -> None:
    results = tmp_path / "coverage.json"
    main(["--simulations", "10", "--races", "5", "--results", str(results)])
    record = json.loads(results.read_text())
    assert [row["rounds"] for row in record["percentiles"]] == [20, 40, 100]
    assert len(record["coverage"]) == 18 and len(record["null test"]) == 12 and len(record["power"]) == 24
    assert record["power"][0]["found"] == 1.0  # 3 % in noise of 1 %
    assert all(5 <= row["mean rounds"] <= 121 for row in record["power"])
