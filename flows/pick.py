"""Pick an engine from MLflow: compare the engines of a target, choose the fastest within limits, get its files.

``python -m flows.pick --target cpu_openvino --max-latency-ms 8 --min-miou 0.6`` prints the engines of the latest
pipeline and the best one; ``--by throughput --max-p99-ms 20`` chooses by images per second under load instead. For a
server it also prints the address of the page that lists them. ``--download DIR`` copies that engine with everything
it needs to run, ``--promote`` makes it the champion. MLflow's address is track.uri in params.yaml, or
``--tracking-uri``. For a server with authentication set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD.
"""

import argparse
import dataclasses
import enum
import json
import math
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from flows.result_table import format_number, open_console
from tasks.core.errors import ArtifactError, ConfigError, EnginewrightError, GateFailed
from tasks.core.tracking.config import TrackingConfig, mask_credentials, read_tracking_config
from tasks.core.tracking.lookup import download_engine, find_engines, page_of, promote
from tasks.core.tracking.pending import has_pending
from tasks.core.tracking.records import LOAD_FRONT_TAG, TrackedEngine
from tasks.parts.engines.manifest import sha256_of
from tasks.parts.selection.engine_row import LoadPoint, Verdict

SHIPPABLE = (Verdict.ACCEPT, Verdict.NOT_FASTER, Verdict.INCONCLUSIVE)
"""The verdicts that pass the accuracy gates: a rung that is not faster may still be more accurate."""

_TARGET = re.compile(r"[a-z][a-z0-9_]*")


class By(enum.StrEnum):
    """What an engine is chosen by."""

    latency = enum.auto()
    throughput = enum.auto()


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits that an engine has to meet; None means no limit."""

    max_latency_ms: float | None
    """The highest p50 at batch 1; the upper end of its 95 % interval counts."""
    min_miou: float | None
    """The lowest mIoU of a segmentation."""
    min_top1: float | None
    """The lowest top-1 accuracy of a classification."""
    min_score: float | None = None
    """The lowest score of values, or of a metric of the user's own."""
    max_p99_ms: float | None = None
    """The highest p99: by latency that of one image at a time, by throughput that of a call under load."""
    by: By = By.latency
    """What the best engine is the best in."""

    def are_held_by(self, run: TrackedEngine) -> bool:
        """Return whether the engine of a run can be shipped and meets the limits."""
        metrics = run.metrics
        return (
            (run.tags["verdict"] in SHIPPABLE or run.tags["picked"] == "true")
            and (self.max_latency_ms is None or _upper_p50_ms(run) <= self.max_latency_ms)
            and self._holds_p99(run)
            and (self.min_miou is None or metrics.get("miou", -1.0) >= self.min_miou)
            and (self.min_top1 is None or metrics.get("top1", -1.0) >= self.min_top1)
            and (self.min_score is None or metrics.get("other_score", -1.0) >= self.min_score)
        )

    def _holds_p99(self, run: TrackedEngine) -> bool:
        if self.by is By.throughput:
            return best_point(run, self.max_p99_ms) is not None
        return self.max_p99_ms is None or run.metrics.get("latency_ms_p99", math.inf) <= self.max_p99_ms

    def __str__(self) -> str:
        asked = []
        if self.max_p99_ms is not None:
            asked.append(f"p99 of {self.max_p99_ms:g} ms or less")
        if self.max_latency_ms is not None:
            asked.append(f"p50 of {self.max_latency_ms:g} ms or less")
        if self.min_miou is not None:
            asked.append(f"mIoU of {self.min_miou:g} or more")
        if self.min_top1 is not None:
            asked.append(f"top-1 accuracy of {self.min_top1:g} or more")
        if self.min_score is not None:
            asked.append(f"score of {self.min_score:g} or more")
        return " and ".join(asked) or "the gates of select_engine"


NO_LIMITS = Limits(None, None, None)


def _upper_p50_ms(run: TrackedEngine) -> float:
    """Return the upper end of the interval of p50; earlier versions logged none."""
    return run.metrics.get("latency_ms_p50_high", run.metrics["latency_ms_p50"])


def best_point(run: TrackedEngine, max_p99_ms: float | None) -> LoadPoint | None:
    """Return what an engine reaches in images per second within a p99; None if it was not measured, or nothing is."""
    points = [LoadPoint(**point) for point in json.loads(run.tags.get(LOAD_FRONT_TAG, "[]"))]
    held = [
        point
        for point in points
        if max_p99_ms is None or (point.latency_ms_p99 is not None and point.latency_ms_p99 <= max_p99_ms)
    ]
    return max(held, key=lambda point: point.throughput_per_s, default=None)


def check_loads(runs: Sequence[TrackedEngine], target: str) -> None:
    """Raise ConfigError if no engine was measured under load."""
    if not any(LOAD_FRONT_TAG in run.tags for run in runs):
        variants = ",".join(run.tags["variant"] for run in runs if run.tags["verdict"] in SHIPPABLE)
        raise ConfigError(
            f"No engine of target {target} was measured under load, which --by throughput needs. Measure some: "
            f"`python -m flows.optimize 'measure_load.variants=[{variants}]'`."
        )


def pick(runs: Sequence[TrackedEngine], limits: Limits) -> TrackedEngine:
    """Return the engine to ship: the pipeline's own pick if it meets the limits, else the fastest that does.

    By throughput it is the one with the most images per second within the p99, whatever the pipeline picked. Raises
    GateFailed if none does.
    """
    fitting = [run for run in runs if limits.are_held_by(run)]
    if not fitting:
        raise GateFailed(
            f"None of {len(runs)} engines meets {limits}. The table shows them all; loosen a limit, or let the "
            "pipeline make others (docs/architecture.md, quantization ladder)."
        )
    if limits.by is By.throughput:
        return max(fitting, key=lambda run: _throughput_per_s(run, limits))
    return min(fitting, key=lambda run: (run.tags["picked"] != "true", run.metrics["latency_ms_p50"]))


def _throughput_per_s(run: TrackedEngine, limits: Limits) -> float:
    point = best_point(run, limits.max_p99_ms)
    return point.throughput_per_s if point else 0.0


def fetch(tracking: TrackingConfig, run: TrackedEngine, folder: Path) -> Path:
    """Copy the engine of a run into a new folder.

    Raises ArtifactError if its bytes are not those that were measured.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is a file or not empty, expected a new folder (--download).")
    folder.mkdir(parents=True, exist_ok=True)
    engine, sha256 = download_engine(tracking, run.run_id, folder), run.tags["engine_sha256"]
    if sha256 not in {sha256_of(file) for file in engine.iterdir() if file.is_file()}:
        shutil.rmtree(engine)
        raise ArtifactError(
            f"{engine}: no file had the measured sha256 {sha256[:12]}... The artifact store of "
            f"{mask_credentials(tracking.uri)} was changed; run the pipeline again to log what is missing."
        )
    return engine


def show(runs: Sequence[TrackedEngine], picked: TrackedEngine | None, limits: Limits = NO_LIMITS) -> None:
    """Print the engines of a target, fastest first; by throughput also what they do under load."""
    from rich.table import Table

    names = ("other_score", "miou", "top1")
    metric = next((name for name in names if any(name in run.metrics for run in runs)), "top1")
    has_boundaries = any("boundary_iou" in run.metrics for run in runs)
    is_by_throughput = limits.by is By.throughput
    table = Table(
        "variant",
        runs[0].tags.get("metric", "mIoU"),  # earlier versions only did segmentation
        *(["Boundary IoU"] if has_boundaries else []),
        "p50 ms",
        "p99 ms",
        *(["images/s", "at p99", "knee/s"] if is_by_throughput else []),
        "MB",
        "precision",
        "verdict",
        "on the front",
    )
    table.columns[0].no_wrap = True
    for run in sorted(runs, key=lambda run: run.metrics.get("latency_ms_p50", float("inf"))):
        tags = run.tags
        table.add_row(
            tags["variant"],
            format_number(run.metrics.get(metric), 4),
            *([format_number(run.metrics.get("boundary_iou"), 4)] if has_boundaries else []),
            format_number(run.metrics.get("latency_ms_p50"), 3),
            format_number(run.metrics.get("latency_ms_p99"), 3),
            *(_load_cells(run, limits) if is_by_throughput else []),
            format_number(run.metrics.get("size_bytes"), 2, scale=1e-6),
            tags["precision"],
            tags["verdict"],
            "yes" if tags["pareto"] == "true" else "",
            style="bold green" if picked is not None and run.run_id == picked.run_id else None,
        )
    open_console().print(table)


def _load_cells(run: TrackedEngine, limits: Limits) -> list[str]:
    """Return the cells of an engine under load: its best within the limit, and the knee of its own bound."""
    point = best_point(run, limits.max_p99_ms)
    return [
        format_number(point.throughput_per_s if point else None, 0),
        format_number(point.latency_ms_p99 if point else None, 3),
        format_number(run.metrics.get("knee_per_s"), 0),
    ]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flows.pick", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, help="a name in conf/target")
    parser.add_argument(
        "--max-latency-ms", type=float, help="p50 at batch 1, by the upper end of its interval"
    )
    parser.add_argument(
        "--by",
        type=By,
        choices=list(By),
        default=By.latency,
        help="what the best engine is the best in; throughput needs measure_load",
    )
    parser.add_argument(
        "--max-p99-ms",
        type=float,
        help="by latency p99 of one image at a time, by throughput p99 of a call under load",
    )
    parser.add_argument("--min-miou", type=float, help="for segmentation")
    parser.add_argument("--min-top1", type=float, help="for classification")
    parser.add_argument("--min-score", type=float, help="for values, and for a metric of your own")
    parser.add_argument("--download", type=Path, metavar="DIR", help="copy the engine into this new folder")
    parser.add_argument("--promote", action="store_true", help="make it the champion of the target")
    parser.add_argument("--tracking-uri", help="instead of track.uri")
    options = parser.parse_args(arguments)
    if not _TARGET.fullmatch(options.target):
        parser.error(f"--target is {options.target!r}, expected lower-case letters, digits and _")
    return options


def main(arguments: Sequence[str]) -> int:
    """Print the engines and the pick, download or promote it; return the exit code."""
    options = _parse(arguments)
    try:
        tracking = read_tracking_config(options.tracking_uri)
        runs = find_engines(tracking, options.target)
        if not runs:
            raise ConfigError(
                f"MLflow at {mask_credentials(tracking.uri)} has no engine of target {options.target} in experiment "
                f"{tracking.experiment}. Run the pipeline with that target first (`make run`)."
            )
        limits = Limits(
            options.max_latency_ms,
            options.min_miou,
            options.min_top1,
            options.min_score,
            options.max_p99_ms,
            options.by,
        )
        if limits.by is By.throughput:
            check_loads(runs, options.target)
        try:
            picked = pick(runs, limits)
        except GateFailed:
            show(runs, None, limits)
            raise
        show(runs, picked, limits)
        if has_pending():
            print("some runs are not in MLflow yet: `python -m tasks.core.tracking` sends them")
        print(f"{picked.tags['variant']} on {options.target}: {picked.tags['reason']}")
        if limits.by is By.throughput and (point := best_point(picked, limits.max_p99_ms)):
            p99 = "" if point.latency_ms_p99 is None else f" with p99 {point.latency_ms_p99:.3g} ms"
            print(f"{point.throughput_per_s:.4g} images/s{p99}: {point.setting}")
        print(f"run {picked.run_id}, engine sha256 {picked.tags['engine_sha256']}")
        if page := page_of(tracking, picked):
            print(f"accepted engines, fastest first: {page}")
        if options.download:
            engine = fetch(tracking, picked, options.download)
            alone = (
                "; its infer.py runs it without this repository" if (engine / "infer.py").is_file() else ""
            )
            print(f"downloaded to {engine}{alone}")
        if options.promote:
            print(f"champion: version {promote(tracking, options.target, picked.run_id)}")
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
