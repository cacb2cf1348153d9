"""Tell what pruning costs at equal latency, by each ranking of the channels.

``python -m benchmarks.pruning [--seeds 3]`` after a run of the pipeline, on a quiet machine. By each ranking the
student is pruned to about the same latency of its float engine on ``cpu_onnxruntime``: by the first so far that it
takes ``--latency-ratio`` of the time of the unpruned one, by the others so far that they are as fast as the first.
The share of the MACs is searched by bisection, in interleaved races with the unpruned engine; channels go in
multiples, so latencies have steps. Each of these networks, and the unpruned one as the control, then gets the same
fine-tuning (the stage ``finetune``). What pruning costs is the mIoU of the control minus that of the pruned
network, seed by seed, on the test split. The latencies are those of one race of all fine-tuned networks, with 95 %
intervals.

Everything is made by the stages and their caches: finished outputs under ``artifacts/benchmarks/pruning`` are kept,
killed trainings resume, and a ratio that was found is not searched again. Prints a table and writes
``benchmarks/results/pruning.json`` and ``pruning.md``.
"""

import argparse
import dataclasses
import json
import logging
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.controls import changed_trainer
from benchmarks.runtimes import DATA, stage_config
from tasks.core.config import read_params
from tasks.core.errors import GateFailed
from tasks.core.execute import ARTIFACTS, Call, execute, find_facts, load_stage, output_folder
from tasks.core.fingerprint import digest, stage_key
from tasks.core.reports import read_report, write_json
from tasks.parts.builders.agreement import read_probe_frames
from tasks.parts.data.accuracy import AccuracyReport
from tasks.parts.data.comparison import RESULTS_FILE, read_results
from tasks.parts.data.dataset import calibration_images
from tasks.parts.engines.description import on_frames
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.engines.rounds import rounds_ms
from tasks.parts.measuring.intervals import Estimate, estimate_ratio
from tasks.parts.pruning.config import Ranking

RESULTS = Path(__file__).parent / "results" / "pruning.json"
TARGET = "cpu_onnxruntime"
CHOICE = ARTIFACTS / "search_pruning" / "choice.json"
TABLE = ARTIFACTS / "rank_groups" / "sensitivity.csv"
UNPRUNED, CONTROL = "unpruned", "unpruned_again"
RANKINGS = [Ranking.uniform, Ranking.across_layers, Ranking.sensitivity]
"""Uniform first: its latency has the widest steps, because all layers lose channels at once."""
SEARCH_ROUNDS, MOST_TRIES = (40, 160, 640), 9


@dataclass(frozen=True)
class Pruned:
    """A network that is as fast as wanted, before its fine-tuning."""

    checkpoint: Path
    target_macs_ratio: float
    macs_ratio: float
    """Share of the MACs that is left."""


def main() -> None:
    """Search, train what is missing, measure, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="fine-tunings of each network")
    parser.add_argument("--latency-ratio", type=float, default=0.55, help="latency / that of the unpruned")
    parser.add_argument(
        "--tolerance", type=float, default=0.02, help="of the latency, with which a search ends"
    )
    parser.add_argument("--rounds", type=int, default=150, help="of the race in the end")
    parser.add_argument("--rankings", nargs="+", default=RANKINGS, choices=RANKINGS, type=Ranking)
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", datefmt="%H:%M:%S")
    if not TABLE.is_file():
        raise SystemExit(f"{TABLE} does not exist. Run the pipeline here first: make run")
    student = Path(read_params()["pipeline"]["pruning"]["student"]["checkpoint"])
    networks, wanted = {UNPRUNED: Pruned(student, 1.0, 1.0)}, options.latency_ratio
    for ranking in options.rankings:
        networks[str(ranking)], reached = found_network(ranking, student, wanted, options.tolerance)
        if ranking is options.rankings[0]:
            wanted = reached
    first = stage_config("finetune").trainer.seed
    engines: dict[str, Path] = {}
    mious: dict[str, list[float]] = {name: [] for name in networks}
    for seed in range(first, first + options.seeds):
        for name, network in networks.items():
            engine, miou = finetuned(name, network, seed)
            engines.setdefault(name, engine)
            mious[name].append(miou)
    ratios = race({**engines, CONTROL: engines[UNPRUNED]}, options.rounds)
    rows = [
        {"network": name, **summary(network, ratios[name], mious[name], mious[UNPRUNED])}
        for name, network in networks.items()
    ]
    print(table(rows))
    latencies = [ratios[ranking].value for ranking in options.rankings]
    difference = max(latencies) / min(latencies) - 1
    print(f"The latencies of the pruned networks differ by up to {difference:.1%}.")
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "onnxruntime": version("onnxruntime"),
        "latency_ratio": options.latency_ratio,
        "latency_difference": round(difference, 4),
        "aa_ratio_spread": round(ratios[CONTROL].spread, 4),
        "rows": rows,
    }
    write_json(RESULTS, record)
    RESULTS.with_suffix(".md").write_text(table(rows) + "\n", encoding="utf-8")


def found_network(
    ranking: Ranking, student: Path, latency_ratio: float, tolerance: float
) -> tuple[Pruned, float]:
    """Return the network of a ranking whose latency ratio is closest to the wanted one, and that ratio.

    It is searched once and then known, because another search on a machine with noise could end at another network.
    """
    cfg = dataclasses.replace(stage_config("prune"), ranking=ranking, from_search=False)
    wanted = {
        "latency_ratio": latency_ratio,
        "tolerance": tolerance,
        "cpu_model": read_cpu_model(),
        "prune": dataclasses.asdict(cfg),
        "inputs": [digest(student), digest(TABLE)],
    }
    known = output_folder(f"benchmarks.pruning.{ranking}") / "ratio.json"
    found = json.loads(known.read_text(encoding="utf-8")) if known.is_file() else {}
    if found.get("wanted") != json.loads(json.dumps(wanted)):
        unpruned = built(UNPRUNED, student)
        latencies: dict[str, float] = {}  # of each network; close ratios give the same one

        def measure(ratio: float) -> float | None:
            try:
                network = pruned(cfg, student, ratio)
            except GateFailed:
                return None
            if (md5 := digest(network.checkpoint)) not in latencies:
                engine = built(f"{ranking}.{_word(ratio)}", network.checkpoint)
                for num_rounds in SEARCH_ROUNDS:  # more where the machine is not quiet
                    latency = race({UNPRUNED: unpruned, str(ranking): engine}, num_rounds)[ranking]
                    if (latency.high - latency.low) / 2 <= tolerance * latency.value:
                        break
                latencies[md5] = latency.value
            return latencies[md5]

        ratio, measured = closest(measure, latency_ratio, tolerance)
        found = {"wanted": wanted, "target_macs_ratio": ratio, "latency_ratio": measured}
        known.parent.mkdir(parents=True, exist_ok=True)
        write_json(known, found)
    print(
        f"{ranking}: {found['latency_ratio']:.3f} of the latency at {found['target_macs_ratio']} of the MACs"
    )
    return pruned(cfg, student, found["target_macs_ratio"]), found["latency_ratio"]


def closest(measure: Callable[[float], float | None], wanted: float, tolerance: float) -> tuple[float, float]:
    """Return the share of the MACs whose latency ratio is closest to the wanted one, and that latency ratio.

    `measure` returns the latency ratio, or None for a share that cannot be reached. The search ends within the
    tolerance, or after MOST_TRIES.
    """
    low, high, ratio = 0.0, 1.0, round(wanted, 3)
    found: dict[float, float] = {}
    for _ in range(MOST_TRIES):
        measured = measure(ratio)
        if measured is not None:
            found[ratio] = measured
            if abs(measured / wanted - 1) <= tolerance:
                break
        low, high = (ratio, high) if measured is None or measured < wanted else (low, ratio)
        ratio = round((low + high) / 2, 3)
    if not found:
        raise SystemExit("No share of the MACs can be reached. Lower prune.channel_multiple.")
    best = min(found, key=lambda ratio: abs(found[ratio] - wanted))
    return best, found[best]


def pruned(cfg: Any, student: Path, ratio: float) -> Pruned:
    """Return the student pruned to a share of its MACs."""
    cfg = dataclasses.replace(cfg, target_macs_ratio=ratio)
    folder = run_stage(
        f"{cfg.ranking}.{_word(ratio)}.network",
        "prune",
        cfg,
        checkpoint=student,
        choice=CHOICE,
        sensitivity=TABLE,
        data=DATA,
    )
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return Pruned(folder / "model.safetensors", ratio, report["macs_ratio"])


def finetuned(name: str, network: Pruned, seed: int) -> tuple[Path, float]:
    """Return the engine of a network after its fine-tuning, and its mIoU on the unseen split."""
    teacher = Path(read_params()["pipeline"]["pruning"]["student"]["teacher"])
    name = f"{name}.seed_{seed}"
    cfg = changed_trainer(stage_config("finetune"), seed=seed)
    folder = run_stage(
        f"{name}.network", "finetune", cfg, checkpoint=network.checkpoint, teacher=teacher, data=DATA
    )
    engine = built(name, folder / "model.safetensors")
    checked = run_stage(f"{name}.accuracy", "validate", stage_config("validate"), engine=engine, data=DATA)
    split = read_report(AccuracyReport, checked).unseen_split
    return engine, read_results(checked / RESULTS_FILE, split).score


def built(name: str, checkpoint: Path) -> Path:
    """Return the float engine of a checkpoint."""
    graph = run_stage(f"{name}.graph", "export_onnx", stage_config("export_onnx"), checkpoint=checkpoint)
    folder = run_stage(
        f"{name}.engine",
        "build_engine",
        stage_config(f"build_engine.{TARGET}"),
        model=graph / "model.onnx",
        images=calibration_images(DATA),
    )
    return folder / "engine"


def run_stage(name: str, stage: str, cfg: Any, **inputs: Path) -> Path:
    """Run a stage below artifacts/benchmarks/pruning unless its output is fresh, and return the output folder."""
    address, function = f"benchmarks.pruning.{name}", load_stage(stage)[0]
    facts = find_facts(function, cfg, output_folder(address)) or {}
    key = stage_key(stage, dataclasses.asdict(cfg), inputs, facts)
    return execute(Call(address, function, cfg, inputs, facts, key))


def race(engines: Mapping[str, Path], num_rounds: int) -> dict[str, Estimate]:
    """Return the latency ratio of each engine to the unpruned one at batch 1, from interleaved rounds."""
    with ExitStack() as stack:
        runners = {name: stack.enter_context(open_engine(folder)) for name, folder in engines.items()}
        calls = {name: on_frames(runner).answer for name, runner in runners.items()}
        frame_NHWC = read_probe_frames(calibration_images(DATA), runners[UNPRUNED].manifest.card)[:1]
        rounds_ms(calls, frame_NHWC, 1)  # warm-up
        rounds = rounds_ms(calls, frame_NHWC, num_rounds)
    medians = {name: np.array([np.median(burst) for burst in bursts]) for name, bursts in rounds.items()}
    return {
        name: estimate_ratio(medians[name] / medians[UNPRUNED], num_comparisons=len(engines) - 1)
        for name in engines
    }


def summary(
    network: Pruned, latency: Estimate, mious: Sequence[float], control: Sequence[float]
) -> dict[str, Any]:
    """Return mean and spread over the seeds; costs are taken seed by seed."""
    costs = [whole - miou for miou, whole in zip(mious, control, strict=True)]
    row: dict[str, Any] = {
        "target_macs_ratio": network.target_macs_ratio,
        "macs_ratio": round(network.macs_ratio, 4),
        "latency_ratio": round(latency.value, 4),
        "latency_ratio_low": round(latency.low, 4),
        "latency_ratio_high": round(latency.high, 4),
        "num_seeds": len(mious),
    }
    for what, values in (("miou_test", mious), ("cost", costs)):
        row[f"{what}_mean"] = round(statistics.mean(values), 4)
        row[f"{what}_spread"] = round(statistics.stdev(values), 4) if len(values) > 1 else None
    return row


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a markdown table."""
    lines = [
        "| ranking | MACs left | latency (95 %) | mIoU test (spread) | cost of pruning (spread) | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, high = row["latency_ratio_low"], row["latency_ratio_high"]
        cells = [
            row["network"],
            f"{row['macs_ratio']:.3f}",
            f"{row['latency_ratio']:.3f} ({low:.3f} to {high:.3f})",
            _with_spread(row, "miou_test"),
            _with_spread(row, "cost"),
            str(row["num_seeds"]),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _with_spread(row: Mapping[str, Any], what: str) -> str:
    spread = row[f"{what}_spread"]
    return f"{row[f'{what}_mean']:.4f}" + ("" if spread is None else f" ({spread:.4f})")


def _word(ratio: float) -> str:
    """Return a ratio as part of an address."""
    return f"macs_{round(1000 * ratio)}"


if __name__ == "__main__":
    main()
