"""The simulation of interval coverage fills its tables, and ranks the methods as theory does."""

import json
from pathlib import Path

import pytest

from benchmarks.coverage import main, measure_coverage
from benchmarks.loss_coverage import (
    RECORDS,
    binomial_interval,
    bootstrap,
    draw,
    losses,
    measure_cell,
    read_population,
)


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
    main(["--simulations", "10", "--races", "5", "--draws", "20", "--results", str(results)])
    record = json.loads(results.read_text())
    assert [row["rounds"] for row in record["percentiles"]] == [20, 40, 100]
    assert len(record["coverage"]) == 18 and len(record["null test"]) == 12 and len(record["power"]) == 24
    assert record["power"][0]["found"] == 1.0  # 3 % in noise of 1 %
    assert all(5 <= row["mean rounds"] <= 121 for row in record["power"])
    assert len(record["losses"]) == 72 and len(record["methods"]) == 15
    before = record | {"losses": [], "date": ""}
    results.write_text(json.dumps(before), encoding="utf-8")
    main(["--tables", "losses", "--draws", "20", "--results", str(results)])
    again = json.loads(results.read_text())
    assert again["losses"] == record["losses"] and again["power"] == record["power"]


def test_few_videos_are_covered_where_the_bootstrap_is_not_c1() -> None:
    population = read_population(RECORDS, "int8", "mIoU", "unequal")
    row = measure_cell(population, 3, 300)
    assert row["coverage"] >= 0.93 and row["false_accept"] <= 0.035
    truth = float(losses(tuple(counts.sum(axis=0) for counts in population)))
    low, high = bootstrap(draw(population, 3, 300))
    assert ((low <= truth) & (truth <= high)).mean() < 0.85


def test_ten_videos_decide_nearly_as_often_as_those_of_the_oracle_c1() -> None:
    for sizes in ("equal", "unequal"):
        row = measure_cell(read_population(RECORDS, "int8", "mIoU", sizes), 10, 300)
        assert row["accept"] >= row["oracle_accept"] - 0.1


def test_the_binomial_interval_is_that_of_clopper_and_pearson() -> None:
    """0 of 10: 1 - 0.025 ** 0.1; 5 of 10: the table of their paper."""
    assert binomial_interval(0, 10) == pytest.approx((0.0, 0.30850), abs=1e-5)
    assert binomial_interval(5, 10) == pytest.approx((0.18709, 0.81291), abs=1e-5)
