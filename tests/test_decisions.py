"""Repeated decisions of benchmarks/decisions.py: its rules and its results, and all of it in a small workspace."""

import json
import math
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.decisions import (
    PARTS,
    busy_loops,
    missing_rows,
    pick_by_p50,
    pool,
    race_two,
    summarise,
    write_record,
)
from benchmarks.ladder import REPOSITORY
from benchmarks.records import open_record
from benchmarks.slowed_engine import SlowedProcess
from tasks.benchmark import Config
from tasks.core.config import typed_config
from tasks.parts.measuring.race import CONTROL
from tests.conftest import Workspace
from tests.tasks.conftest import Workshop, workshop

__all__ = ["workshop"]

CONDITIONS = {"cpu_model": "one", "engines": {"ptq-cpu": "ab"}}


def engine(latency_ms: float | None, loss: float | None, verdict: str = "ACCEPT") -> dict[str, Any]:
    return {"latency_ms_p50": latency_ms, "score_rel_loss": loss, "verdict": verdict}


def decision(repeat: int, pick: str, factor: float, pick_by_p50: str = "ptq") -> dict[str, Any]:
    return {
        "target": "cpu",
        "repeat": repeat,
        "busy_loops": 2 * (repeat % 2),
        "pick": pick,
        "pick_by_p50": pick_by_p50,
        "seconds": 20.0 + repeat,
        "ratios": {"ptq/qat": [factor, 0.9 * factor, 1.1 * factor], "ptq/float": [4.0, 3.9, 4.1]},
    }


def race(repeat: int, factor: float, target: str = "cpu") -> dict[str, Any]:
    """A race whose interval reaches 2 % to both sides."""
    ends = {"low": factor - 0.02, "high": factor + 0.02}
    row = {"target": target, "repeat": repeat, "factor": factor, "seconds": 10.0 + repeat}
    is_certain = ends["low"] > 1 or ends["high"] < 1
    called = {
        "is_faster": is_certain and factor > 1.02,
        "is_slower": is_certain and factor < 0.98,
    }  # A/A spread 2 %
    return row | ends | called | {"true_factor": 1.03}


def test_lowest_p50_within_the_gate_is_picked_whatever_the_interval() -> None:
    engines = {
        "tiny": engine(0.1, 0.021, "TOO_LOSSY"),
        "mismatch": engine(0.15, 0.0, "PRECISION_MISMATCH"),
        "missing": engine(None, None, "SKIPPED"),
        "ptq": engine(0.2, 0.02, "UNPROVEN"),
        "partial": engine(0.2, 0.02, "NOT_FASTER"),  # the same file
        "float": engine(0.4, 0.0),
    }
    assert pick_by_p50(engines, 0.02) == "ptq"
    assert pick_by_p50(engines, -0.1) == "none"


def test_picks_are_counted_and_their_ratio_is_pooled() -> None:
    rows = [decision(0, "qat", 1.0), decision(1, "ptq", 1.01), decision(2, "qat", 1.02, "qat")]
    [summary] = summarise({"decisions": rows, "null": [], "power": []})["decisions"]
    assert (summary["target"], summary["repeats"], summary["median_seconds"]) == ("cpu", 3, 21.0)
    assert (summary["picks"], summary["picks_beside_busy_loops"]) == ({"qat": 2}, {"ptq": 1})
    assert summary["picks_by_p50"] == {"ptq": 1, "qat": 1}
    assert list(summary["ratios_of_picks"]) == ["ptq/qat"]
    assert summary["ratios_of_picks"]["ptq/qat"] == pool([1.0, 1.01, 1.02])
    alike = [decision(0, "qat", 1.0), decision(1, "qat", 1.01)]
    assert summarise({"decisions": alike, "null": [], "power": []})["decisions"][0]["ratios_of_picks"] == {}


def test_pooled_ratio_is_the_geometric_mean_with_student_s_interval() -> None:
    centre, low, high = pool([0.5, 2.0, 1.0])
    reach = 4.3027 * math.log(2) / math.sqrt(3)  # t of 2 degrees of freedom (tables: 4.303); deviation log(2)
    assert centre == 1.0
    assert (low, high) == pytest.approx((math.exp(-reach), math.exp(reach)), rel=1e-3)
    assert pool([1.1]) == [1.1, 1.1, 1.1]


def test_races_count_what_they_call_faster() -> None:
    rows = [race(0, 1.0), race(1, 1.03), race(2, 0.97), race(0, 1.05, "gpu")]
    record = {"decisions": [], "null": rows, "power": rows}
    null, on_gpu = summarise(record)["null"]
    assert (null["excludes_1"], null["repeats"], null["median_seconds"]) == (2, 3, 11.0)
    assert (
        null["called_faster"] == 2 and null["passes_the_guard"] == 0
    )  # the differences are 1 % for certain, no more
    assert (on_gpu["target"], on_gpu["excludes_1"], on_gpu["passes_the_guard"]) == ("gpu", 1, 1)
    power = summarise(record)["power"][0]
    assert (power["found"], power["found_the_other_way"], power["median_factor"]) == (1 / 3, 1, 1.0)


def test_second_start_measures_only_what_is_missing(tmp_path: Path) -> None:
    results = tmp_path / "decisions.json"
    record = open_record(results, CONDITIONS, PARTS)
    every = missing_rows(record, ["decisions", "null"], ["cpu", "gpu"], 2)
    assert len(every) == 8 and every[:2] == [("decisions", "cpu", 0), ("decisions", "gpu", 0)]
    record["decisions"].append(decision(0, "qat", 1.0))
    record["null"].append(race(1, 1.0, "gpu"))
    write_record(results, record | {"summary": summarise(record)})
    again = open_record(results, CONDITIONS, PARTS)
    assert again["decisions"] == record["decisions"] and again["summary"]["null"][0]["repeats"] == 1
    left = missing_rows(again, ["decisions", "null"], ["cpu", "gpu"], 2)
    assert left == [row for row in every if row not in (("decisions", "cpu", 0), ("null", "gpu", 1))]
    assert [file.name for file in tmp_path.iterdir()] == ["decisions.json"]


def test_results_of_other_engines_are_not_continued(tmp_path: Path) -> None:
    results = tmp_path / "decisions.json"
    write_record(results, open_record(results, CONDITIONS, PARTS))
    with pytest.raises(SystemExit, match=r"measured with other engines than there are now. Delete it"):
        open_record(results, CONDITIONS | {"engines": {"ptq-cpu": "cd"}}, PARTS)


def test_busy_loops_end_with_their_block() -> None:
    with busy_loops(2) as loops:
        assert len(loops) == 2
        with pytest.raises(subprocess.TimeoutExpired):
            loops[0].wait(0.3)
    assert all(loop.poll() is not None for loop in loops)


def test_slowed_engine_loses_the_race(workshop: Workshop) -> None:
    target = "cpu_onnxruntime"
    section = yaml.safe_load((REPOSITORY / "conf/benchmark/default.yaml").read_text(encoding="utf-8"))
    cfg: Config = typed_config(Config, section | {"target": target, "variants": ["float"]}, "benchmark")
    cfg = replace(cfg, burst_ms=3.0, min_rounds=5, budget_s=0.1)
    folder = workshop.engine("float", target)
    with (
        SlowedProcess(folder, wait_ns=5_000_000, timeout_s=60.0) as slowed,
        SlowedProcess(folder, wait_ns=0, timeout_s=60.0) as plain,
        SlowedProcess(folder, wait_ns=0, timeout_s=60.0) as control,
    ):
        for process in (slowed, plain, control):
            assert process.wait_until_loaded()["runtime"] == "onnxruntime"
        found = race_two({"plain": plain, "slowed": slowed, CONTROL: control}, cfg)
    assert found["low"] > 1 and found["num_rounds"] >= 5 and found["is_decided"]
    assert found["aa_spread"] > 0 and not found["is_slower"]


@pytest.mark.slow
@pytest.mark.trial
def test_finished_run_is_decided_again_and_left_as_it_is(
    smoke_run: tuple[Workspace, str], tmp_path: Path
) -> None:
    space, _ = smoke_run
    results, target = tmp_path / "decisions.json", "cpu_onnxruntime"
    command = ("python", "-m", "benchmarks.decisions", "--workspace", ".", "--targets", target)
    command += ("--repeats", "2", "--results", str(results))
    finished = space.run(*command)
    assert finished.returncode == 0, finished.stderr[-3000:]
    record = json.loads(results.read_text(encoding="utf-8"))
    first, second = record["decisions"]
    assert (first["busy_loops"], second["busy_loops"]) == (0, 2)
    assert first["pick"] in first["engines"] and first["engines"].keys() == second["engines"].keys()
    assert all(len(record[part]) == 2 for part in ("null", "power"))
    again = space.run(*command)
    assert again.returncode == 0 and again.stdout.startswith("{")  # nothing was measured
    assert json.loads(results.read_text(encoding="utf-8")) == record
    assert space.changed_stages() == {}
