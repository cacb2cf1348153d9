"""Does the same set of engines always give the same pick, and do real races find what they should?

``python -m benchmarks.decisions --workspace DIR`` with DIR a checkout in which the pipeline has run. Its engines and
its configuration are taken as they are, and nothing is written there. Each result is written to
``benchmarks/results/decisions.json`` as soon as it is measured; a second start measures what is missing. There are
three parts, each repeated ``--repeats`` times for each target:

- decisions: ``benchmark`` and the judgement of ``select_engine``, every second time beside two busy loops. The table
  says how often each engine is picked, and how much the picked engines differ in speed over all repeats (geometric
  mean, 95 % interval). Beside it, on the same measurements, a simple rule: of the engines whose measured loss is
  within the gate, the one with the lowest p50 in milliseconds.
- null: races of the pick of the workspace under two names. How often is one called faster? As in the product, the
  interval has to exclude 1, and the difference has to exceed the resolution of the race and the spread of the A/A
  control, a third process of the pick.
- power: races of the pick against itself with a busy wait of 3 % of its p50 after each inference. How often is the
  difference found, and after how many seconds? ``true_factor`` refers the wait to the p50 during the race.

The last two want a quiet machine.
"""

import argparse
import dataclasses
import json
import logging
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

from benchmarks.ladder import REPOSITORY
from benchmarks.records import open_record
from benchmarks.runtimes import read_selection, stage_config, stage_folders
from benchmarks.slowed_engine import SlowedProcess
from tasks.benchmark import Config, benchmark
from tasks.core.config import PARAMS_FILE, read_params
from tasks.core.execute import ARTIFACTS
from tasks.core.reports import REPORT_FILE, write_json
from tasks.parts.data.dataset import calibration_images
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.manifest import sha256_of
from tasks.parts.measuring.engine_process import EngineProcess, open_processes, run_round
from tasks.parts.measuring.intervals import LEVEL, student_t
from tasks.parts.measuring.pinning import pinned
from tasks.parts.measuring.race import CONTROL, StoppingRule, compare_all, run_race, undecided_pairs
from tasks.parts.measuring.surroundings import wait_until_quiet
from tasks.parts.selection.engine_row import EngineRow, Verdict
from tasks.select_engine import judge

RESULTS = Path(__file__).parent / "results" / "decisions.json"
NUM_BUSY_LOOPS = 2
DIFFERENCE = 0.03
"""How much slower the slowed engine is in the races of the last part."""
GUARD = 1.02
"""The default select_engine.min_speedup_factor, which a rung has to exceed for certain to be called faster."""
NONE = "none"
"""The pick of a target without one."""

_CALIBRATION_BURSTS = 20
_SPIN = """
import signal, sys
from tasks.core.processes import die_with_parent
die_with_parent(int(sys.argv[1]), signal.SIGKILL)
while True:
    pass
"""

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, write each result at once, and print the summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, required=True, help="a checkout with a finished run")
    parser.add_argument("--repeats", type=int, default=20, help="of each part and target")
    parser.add_argument("--targets", nargs="+", default=["cpu_onnxruntime", "cpu_openvino"])
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.WARNING)
    workspace = options.workspace.resolve()
    picks = {target: pick["variant"] for target, pick in read_selection("picks.json", workspace).items()}
    if missing := [target for target in options.targets if target not in picks]:
        parser.error(
            f"--targets {missing[0]}: expected targets with a pick in {workspace}: {', '.join(picks)}"
        )
    record = open_record(options.results, conditions_of(workspace), PARTS)
    for part, target, repeat in missing_rows(record, options.parts, options.targets, options.repeats):
        row = {"target": target, "repeat": repeat} | PARTS[part](workspace, target, repeat)
        record[part].append(row)
        write_record(options.results, record | {"summary": summarise(record)})
        print(
            part,
            *(f"{name} {value}" for name, value in row.items() if not isinstance(value, dict)),
            flush=True,
        )
    print(json.dumps(summarise(record), indent=2))


def conditions_of(workspace: Path) -> dict[str, Any]:
    """Return what has to be the same for all results of one file."""
    rows = read_selection("engines.json", workspace)
    return {
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "onnxruntime", "openvino")},
        "params_sha256": sha256_of(workspace / PARAMS_FILE),
        "engines": {f"{row['variant']}-{row['target']}": row["engine_sha256"] for row in rows},
    }


def write_record(results: Path, record: Mapping[str, Any]) -> None:
    """Write the results, one line for each measurement; a kill leaves the old file or the new one."""
    values = {name: json.dumps(value, indent=2).replace("\n", "\n  ") for name, value in record.items()}
    for part in PARTS:
        lines = [f"\n    {json.dumps(row)}" for row in record[part]]
        values[part] = f"[{','.join(lines)}\n  ]"
    body = ",\n".join(f'  "{name}": {value}' for name, value in values.items())
    draft = results.with_suffix(".draft")
    draft.write_text(f"{{\n{body}\n}}\n", encoding="utf-8")
    draft.replace(results)


def missing_rows(
    record: Mapping[str, Sequence[Row]], parts: Sequence[str], targets: Sequence[str], num_repeats: int
) -> list[tuple[str, str, int]]:
    """Return part, target and number of each measurement that the results do not have."""
    wanted = [(part, target, repeat) for part in parts for repeat in range(num_repeats) for target in targets]
    known = {(part, row["target"], row["repeat"]) for part in parts for row in record[part]}
    return [row for row in wanted if row not in known]


def measure_decision(workspace: Path, target: str, repeat: int) -> Row:
    """Measure the engines of a target and judge them; beside busy loops if the number of the repeat is odd."""
    cfg, selection = stage_config(f"benchmark.{target}", workspace), stage_config("select_engine", workspace)
    base = selection.float_reference.target
    folders = stage_folders(workspace)
    pipeline = read_params(workspace / PARAMS_FILE)["pipeline"]
    reference = workspace / pipeline["references"][target]["engine"]
    images = calibration_images(workspace / pipeline["data"])
    num_busy_loops = NUM_BUSY_LOOPS * (repeat % 2)
    if num_busy_loops:  # there is no use in waiting until they end
        cfg = dataclasses.replace(cfg, quiet=dataclasses.replace(cfg.quiet, max_wait_s=0.0))
    with tempfile.TemporaryDirectory() as temporary:
        benchmarks = Path(temporary)
        if base != target:  # the losses refer to an engine of that target
            (benchmarks / base).symlink_to(folders.benchmarks / base)
        out = benchmarks / target
        out.mkdir()
        started = time.monotonic()
        with busy_loops(num_busy_loops):
            report = benchmark(
                cfg,
                builds=folders.builds / "*" / target / "engine",
                reference=reference,
                images=images,
                out=out,
            )
        seconds = time.monotonic() - started
        write_json(out / REPORT_FILE, dataclasses.asdict(report))
        judged = judge(
            dataclasses.replace(
                selection, engines=[name for name in selection.engines if name.target in (target, base)]
            ),
            dataclasses.replace(folders, benchmarks=benchmarks),
        )
    engines = {row.variant: described(row) for row in judged.rows if row.target == target}
    built = [variant for variant, row in engines.items() if row["latency_ms_p50"] is not None]
    ratios = {pair: report.ratio(*pair) for pair in combinations(built, 2)}
    assert report.race is not None
    return {
        "busy_loops": num_busy_loops,
        "pick": next((row.variant for row in judged.picks if row.target == target), NONE),
        "pick_by_p50": pick_by_p50(engines, selection.max_score_rel_loss),
        "num_rounds": report.race.num_rounds,
        "num_repeats": report.race.num_repeats,
        "aa_spread": round(report.aa_ratio_spread, 4),
        "seconds": round(seconds, 1),
        "engines": engines,
        "ratios": {
            f"{faster}/{slower}": [round(value, 4) for value in (ratio.factor, ratio.low, ratio.high)]
            for (faster, slower), ratio in ratios.items()
        },
    }


def described(row: EngineRow) -> Row:
    """Return what the two rules see of an engine."""
    measured = row.measured
    losses = measured.losses if measured else None
    return {
        "verdict": row.verdict,
        "latency_ms_p50": round(measured.speed.latency_ms_p50, 5) if measured else None,
        "score_rel_loss": round(losses.score_rel_loss, 5) if losses else None,
    }


def pick_by_p50(engines: Mapping[str, Row], max_score_rel_loss: float) -> str:
    """Return the engine with the lowest p50 among those whose measured loss is within the gate."""
    holding = [
        variant
        for variant, row in engines.items()
        if row["score_rel_loss"] is not None
        and row["score_rel_loss"] <= max_score_rel_loss
        and row["verdict"] != Verdict.PRECISION_MISMATCH
    ]
    return min(holding, key=lambda variant: engines[variant]["latency_ms_p50"], default=NONE)


@contextmanager
def busy_loops(count: int) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Keep so many cores busy with processes that do nothing."""
    command = [sys.executable, "-c", _SPIN, str(os.getpid())]
    loops = [subprocess.Popen(command, cwd=REPOSITORY) for _ in range(count)]
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def measure_null(workspace: Path, target: str, repeat: int) -> Row:
    """Race the pick against itself."""
    cfg, engine = racing(workspace, target, repeat)
    quiet = wait_until_quiet(cfg.quiet)
    with open_processes(
        dict.fromkeys(("one", "other", CONTROL), engine), timeout_s=cfg.timeout_s
    ) as processes:
        for process in processes.values():
            process.wait_until_loaded()
        for process in processes.values():
            process.warm_up(1, seconds=cfg.warm_up_ms / 1000)
        return {"busy_cores": quiet.busy_cores} | race_two(processes, cfg)


def measure_power(workspace: Path, target: str, repeat: int) -> Row:
    """Race the pick against itself, slowed by DIFFERENCE of the p50 that it has before the race."""
    cfg, engine = racing(workspace, target, repeat)
    quiet = wait_until_quiet(cfg.quiet)
    with ExitStack() as stack:

        def start(wait_ns: int) -> EngineProcess:
            process = stack.enter_context(SlowedProcess(engine, wait_ns=wait_ns, timeout_s=cfg.timeout_s))
            process.wait_until_loaded()
            process.warm_up(1, seconds=cfg.warm_up_ms / 1000)
            return process

        plain = start(0)
        bursts_ns = [
            plain.burst(1, seconds=cfg.burst_ms / 1000, min_calls=cfg.min_calls)
            for _ in range(_CALIBRATION_BURSTS)
        ]
        wait_ns = round(DIFFERENCE * statistics.median(value for burst in bursts_ns for value in burst))
        found = race_two({"plain": plain, "slowed": start(wait_ns), CONTROL: start(0)}, cfg)
    true_factor = round(1 + wait_ns / 1e6 / found["latency_ms_p50"], 5)
    return {"busy_cores": quiet.busy_cores, "wait_ns": wait_ns, "true_factor": true_factor} | found


def racing(workspace: Path, target: str, repeat: int) -> tuple[Config, Path]:
    """Return the configuration of a race, with an order of its own, and the engine that races."""
    cfg = stage_config(f"benchmark.{target}", workspace)
    pick = read_selection("picks.json", workspace)[target]["variant"]
    engine = workspace / ARTIFACTS / "build_engine" / pick / target / "engine"
    return dataclasses.replace(cfg, seed=cfg.seed + repeat), engine


def race_two(processes: Mapping[str, EngineProcess], cfg: Config) -> Row:
    """Race two processes, and a control of the first one, as `benchmark` does.

    Return how many times as fast the first one is, its p50 in the race, and how long the race took.
    """
    first, second, _ = processes
    shuffler = random.Random(cfg.seed)
    rule = StoppingRule(
        contenders=[first, second],
        controlled=first,
        num_comparisons=1,
        min_rounds=cfg.min_rounds,
        budget_s=cfg.budget_s,
        resolution=cfg.resolution,
    )
    started = time.monotonic()
    with pinned({process.pid: process.num_threads for process in processes.values()}):
        bursts_ms = run_race(
            lambda: run_round(processes, 1, shuffler, burst_ms=cfg.burst_ms, min_calls=cfg.min_calls), rule
        )
    seconds = time.monotonic() - started
    [behind], control = compare_all(bursts_ms, controlled=first, num_comparisons=rule.num_comparisons)
    ratio, smallest_difference = behind.inverse, max(control.spread, cfg.resolution)
    return {
        "factor": round(ratio.factor, 5),
        "low": round(ratio.low, 5),
        "high": round(ratio.high, 5),
        "aa_spread": round(control.spread, 5),
        "is_faster": ratio.is_faster(smallest_difference),
        "is_slower": behind.is_faster(smallest_difference),
        "latency_ms_p50": round(statistics.median(value for burst in bursts_ms[first] for value in burst), 5),
        "num_rounds": len(bursts_ms[first]),
        "is_decided": not undecided_pairs(bursts_ms, rule),
        "seconds": round(seconds, 2),
    }


PARTS: Mapping[str, Callable[[Path, str, int], Row]] = {
    "decisions": measure_decision,
    "null": measure_null,
    "power": measure_power,
}


def summarise(record: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Return the results of each part by target."""
    summaries: Mapping[str, Callable[[Sequence[Row]], Row]] = {
        "decisions": summarise_decisions,
        "null": summarise_null,
        "power": summarise_power,
    }
    return {
        part: [
            {"target": target, "repeats": len(rows)} | summary(rows)
            for target in dict.fromkeys(row["target"] for row in record[part])
            if (rows := [row for row in record[part] if row["target"] == target])
        ]
        for part, summary in summaries.items()
    }


def summarise_decisions(rows: Sequence[Row]) -> Row:
    """Return how often each engine was picked, and how much the picked ones differ in speed."""

    def count(rule: str, *, is_busy: bool) -> dict[str, int]:
        return dict(Counter(row[rule] for row in rows if bool(row["busy_loops"]) is is_busy).most_common())

    return {
        "picks": count("pick", is_busy=False),
        "picks_beside_busy_loops": count("pick", is_busy=True),
        "picks_by_p50": count("pick_by_p50", is_busy=False),
        "picks_by_p50_beside_busy_loops": count("pick_by_p50", is_busy=True),
        "ratios_of_picks": ratios_of(rows, {row["pick"] for row in rows}),
        "ratios_of_picks_by_p50": ratios_of(rows, {row["pick_by_p50"] for row in rows}),
        "median_seconds": statistics.median(row["seconds"] for row in rows),
    }


def ratios_of(rows: Sequence[Row], variants: set[str]) -> dict[str, list[float]]:
    """Return the geometric mean over all repeats, with its interval, of the ratio of each two of the engines."""
    return {
        pair: pool([row["ratios"][pair][0] for row in rows])
        for pair in rows[0]["ratios"]
        if set(pair.split("/")) <= variants
    }


def pool(ratios: Sequence[float]) -> list[float]:
    """Return the geometric mean and the ends of its interval; a single ratio has no width."""
    logs = [math.log(ratio) for ratio in ratios]
    centre, reach = statistics.mean(logs), 0.0
    if len(logs) > 1:
        reach = student_t(LEVEL, len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs))
    return [round(math.exp(value), 4) for value in (centre, centre - reach, centre + reach)]


def summarise_null(rows: Sequence[Row]) -> Row:
    """Return how often one of two equal engines is called faster, and how often the speed guard lets one pass."""
    return {
        "called_faster": sum(row["is_faster"] or row["is_slower"] for row in rows),
        "excludes_1": sum(not row["low"] <= 1 <= row["high"] for row in rows),
        "passes_the_guard": sum(row["low"] >= GUARD or row["high"] <= 1 / GUARD for row in rows),
        "largest_difference": max(abs(row["factor"] - 1) for row in rows),
        "median_seconds": statistics.median(row["seconds"] for row in rows),
    }


def summarise_power(rows: Sequence[Row]) -> Row:
    """Return in what share of the races the slowed engine was found to be slower."""
    return {
        "found": sum(row["is_faster"] for row in rows) / len(rows),
        "found_the_other_way": sum(row["is_slower"] for row in rows),
        "median_factor": statistics.median(row["factor"] for row in rows),
        "median_true_factor": statistics.median(row["true_factor"] for row in rows),
        "median_seconds": statistics.median(row["seconds"] for row in rows),
    }


if __name__ == "__main__":
    main()
