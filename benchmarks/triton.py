"""Measure what a Triton server adds: p99 under open arrivals, through the server and in process, of one engine.

    pip download --no-deps nvidia-pytriton==0.7.0 && unzip -d <folder> nvidia_pytriton-0.7.0-*.whl
    python -m benchmarks.triton --wheel <folder> [BUNDLE ...]

Run it after ``make run``, on a machine that does nothing else; without bundles it takes those of the pipeline for the
CPU. Arrivals are a Poisson process whose rate is a share of what the engine answers in process, one call after the
other. Each round draws them anew and serves the same ones in process (one lane: a frame waits until the call is
free), over HTTP and over gRPC (``--lanes`` connections; the server batches what waits), beginning with another one.
Client and server share the processors. Writes ``benchmarks/results/triton.json``, row by row, so that a second start
continues, and ``triton.md``.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np

from benchmarks.records import open_record
from benchmarks.triton_server import WHEEL, TritonServer, install, serve
from tasks.core.execute import ARTIFACTS
from tasks.core.reports import write_json
from tasks.parts.engines.frame_engine.client import ServedModel
from tasks.parts.engines.frame_engine.engine import load_engine
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.measuring.arrivals import draw_arrivals, serve_arrivals
from tasks.parts.measuring.intervals import estimate_ratio

RESULTS = Path(__file__).parent / "results" / "triton.json"
IN_PROCESS, HTTP, GRPC = "in process", "HTTP", "gRPC"
FORMS = (IN_PROCESS, HTTP, GRPC)
_CALIBRATION_S = 2.0


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing in the results, and print the table."""
    options = _make_parser().parse_args(arguments)
    bundles = options.bundles or sorted((ARTIFACTS / "select_engine" / "bundles").glob("cpu_*"))
    bundles = [bundle for bundle in bundles if (bundle / "triton").is_dir()]
    if not bundles:
        raise SystemExit("There is no bundle with a folder triton/. Run the pipeline here first: make run")
    record = open_record(options.results, _conditions(bundles, options), ("capacities", "rows"))
    with tempfile.TemporaryDirectory() as scratch:
        repositories = [bundle / "triton" for bundle in bundles]
        log = Path(scratch) / "server.log"
        with serve(install(options.wheel), repositories, log, is_verbose=False) as server:
            for bundle in bundles:
                for _ in measure(
                    bundle,
                    server,
                    record,
                    shares=options.shares,
                    seconds=options.seconds,
                    num_rounds=options.rounds,
                    num_lanes=options.lanes,
                ):
                    write_json(options.results, record)
    table = describe(record)
    print(table)
    options.results.with_suffix(".md").write_text(table, encoding="utf-8")


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("bundles", metavar="BUNDLE", type=Path, nargs="*")
    parser.add_argument("--wheel", type=Path, required=True, help=f"folder of the unpacked {WHEEL}")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4, 0.8])
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals in each cell")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--lanes", type=int, default=16, help="connections to the server")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser


def _conditions(bundles: Sequence[Path], options: argparse.Namespace) -> dict[str, Any]:
    return {
        "cpu_model": read_cpu_model(),
        "server": WHEEL,
        "versions": {name: version(name) for name in ("tritonclient", "numpy", "openvino", "onnxruntime")},
        "engines": {bundle.name: _card_of(bundle)["sha256"] for bundle in bundles},
        "seconds": options.seconds,
        "lanes": options.lanes,
    }


def measure(
    bundle: Path,
    server: TritonServer,
    record: dict[str, Any],
    *,
    shares: Sequence[float],
    seconds: float,
    num_rounds: int,
    num_lanes: int,
) -> Iterator[None]:
    """Add the missing cells of a bundle to `record`; yields after each one, when it can be written."""
    engine, card = load_engine(bundle), _card_of(bundle)
    frame_NHWC = np.random.default_rng(0).integers(
        0, 256, (1, card["height"], card["width"], len(card["mean"])), np.uint8
    )
    if not any(row["bundle"] == bundle.name for row in record["capacities"]):
        capacity = measure_capacity(lambda: engine.answer(frame_NHWC), _CALIBRATION_S)
        record["capacities"].append({"bundle": bundle.name, "capacity_per_s": round(capacity, 1)})
        yield
    [capacity] = [row["capacity_per_s"] for row in record["capacities"] if row["bundle"] == bundle.name]
    for number in range(num_rounds):
        turned = FORMS[number % len(FORMS) :] + FORMS[: number % len(FORMS)]
        for share in shares:
            for form in turned:
                cell = {"bundle": bundle.name, "share": share, "form": form, "round": number}
                if any(row.items() >= cell.items() for row in record["rows"]):
                    continue
                offsets_ns = draw_arrivals(share * capacity, seconds, seed=number)
                if form == IN_PROCESS:
                    found = _serve(offsets_ns, [lambda: engine.answer(frame_NHWC)])
                else:
                    found = _serve_remotely(bundle, server, form, offsets_ns, frame_NHWC, num_lanes)
                record["rows"].append({**cell, "rate_per_s": round(share * capacity, 1), **found})
                yield


def measure_capacity(call: Callable[[], Any], seconds: float) -> float:
    """Return the calls per second, one after the other, by their median."""
    durations_ns: list[int] = []
    end_ns = time.perf_counter_ns() + int(1e9 * seconds)
    while (start_ns := time.perf_counter_ns()) < end_ns:
        call()
        durations_ns.append(time.perf_counter_ns() - start_ns)
    return 1e9 / statistics.median(durations_ns)


def _serve(
    offsets_ns: Any, calls: Sequence[Callable[[], Any]], lanes: Sequence[AbstractContextManager[Any]] = ()
) -> dict[str, Any]:
    served = serve_arrivals(offsets_ns, calls, lanes=lanes)
    p50, p99 = np.percentile(served.latencies_ns, [50, 99]) / 1e6
    return {
        "num_frames": len(served.latencies_ns),
        "latency_ms_p50": round(float(p50), 4),
        "latency_ms_p99": round(float(p99), 4),
        "late_ms_p99": round(float(np.percentile(served.late_ns, 99)) / 1e6, 4),
        "achieved_per_s": round(served.achieved_per_s, 1),
    }


def _serve_remotely(
    bundle: Path, server: TritonServer, form: str, offsets_ns: Any, frame_NHWC: Any, num_lanes: int
) -> dict[str, Any]:
    card, is_grpc = _card_of(bundle), form == GRPC
    [name] = (path.name for path in (bundle / "triton").iterdir())
    url = server.grpc if is_grpc else server.http
    model = ServedModel(name, card["task"], url, is_grpc=is_grpc)
    with _connection(model):
        model.check(card["sha256"])
    before = _read_counts(server, name)
    found = _serve(
        offsets_ns,
        [lambda: model.infer(frame_NHWC)] * num_lanes,
        [_connection(model) for _ in range(num_lanes)],
    )
    frames, calls = (after - first for after, first in zip(_read_counts(server, name), before, strict=True))
    return {**found, "mean_batch": round(frames / max(1, calls), 2)}


@contextmanager
def _connection(model: ServedModel) -> Iterator[None]:
    """Close what this thread has opened."""
    try:
        yield
    finally:
        model.disconnect()


def _read_counts(server: TritonServer, name: str) -> tuple[int, int]:
    """Return how many frames a model has answered, in how many calls."""
    with urlopen(f"http://{server.http}/v2/models/{name}/stats") as answer:
        [told] = json.load(answer)["model_stats"]
    return int(told["inference_count"]), int(told["execution_count"])


def describe(record: dict[str, Any]) -> str:
    """Return the medians over the rounds as a table; ratios compare the same arrivals in the same round."""
    lines = [
        "| bundle | frames per s | form | p50 ms | p99 ms | p99 of in process | answers per s | frames per call |",
        "|---|---|---|---|---|---|---|---|",
    ]
    cells = sorted({(row["bundle"], row["share"], FORMS.index(row["form"])) for row in record["rows"]})
    for bundle, share, number in cells:
        form, rows = FORMS[number], _rows_of(record, bundle, share)
        mine = list(rows[FORMS[number]].values())
        middle = {
            name: statistics.median(row[name] for row in mine)
            for name in ("latency_ms_p50", "latency_ms_p99", "achieved_per_s")
        }
        batches = [row["mean_batch"] for row in mine if "mean_batch" in row]
        lines.append(
            f"| {bundle} | {mine[0]['rate_per_s']:.0f} ({share:.0%} of one lane) | {form} "
            f"| {middle['latency_ms_p50']:.2f} | {middle['latency_ms_p99']:.2f} | {_ratio(rows, form)} "
            f"| {middle['achieved_per_s']:.0f} | {statistics.median(batches) if batches else 1:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _rows_of(record: dict[str, Any], bundle: str, share: float) -> dict[str, dict[int, Any]]:
    """Return the rows of a bundle at a rate, by form and round."""
    found: dict[str, dict[int, Any]] = {form: {} for form in FORMS}
    for row in record["rows"]:
        if (row["bundle"], row["share"]) == (bundle, share):
            found[row["form"]][row["round"]] = row
    return found


def _ratio(rows: dict[str, dict[int, Any]], form: str) -> str:
    alone, name = rows[IN_PROCESS], "latency_ms_p99"
    both = sorted(alone.keys() & rows[form].keys())
    if form == IN_PROCESS or len(both) < 2:
        return "1" if form == IN_PROCESS else "one round"
    ratio = estimate_ratio([rows[form][number][name] / alone[number][name] for number in both])
    return f"{ratio.value:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"


def _card_of(bundle: Path) -> dict[str, Any]:
    card: dict[str, Any] = json.loads((bundle / "model.json").read_text(encoding="utf-8"))
    return card


if __name__ == "__main__":
    main()
