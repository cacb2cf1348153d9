"""Measure how long picking one of 1,000 logged engines takes: the query, and MLflow's page in a browser.

``python -m benchmarks.picking`` logs pipelines with 1,000 engines into a new SQLite store with the function that the
pipeline uses, and prints the medians. The page is timed from the click on its link until its table shows the rows.
Needs Chromium (Debian: chromium, chromium-driver). Writes ``benchmarks/results/picking.json``.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import platform
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

from flows.pick import Limits, pick
from tasks.core.tracking.config import TrackingConfig, read_tracking_config, registered_name
from tasks.core.tracking.log import log_pipeline
from tasks.core.tracking.lookup import find_engines, page_of
from tasks.core.tracking.records import DataSet, RunRecord
from tasks.parts.engines.machine import read_cpu_model

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

RESULTS = Path(__file__).parent / "results" / "picking.json"
CHROMIUM, DRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")
NUM_PIPELINES, NUM_VARIANTS, NUM_TARGETS = 10, 10, 10
NUM_ENGINES = NUM_PIPELINES * NUM_VARIANTS * NUM_TARGETS
NUM_REPEATS = 5
TARGET = "target_0"

_PAGE_TIMEOUT_S = 60.0
_SERVER_TIMEOUT_S = 120.0
_ROWS = ".ag-center-cols-container [role=row]"


def main() -> None:
    """Measure, print and write the medians."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        store = read_tracking_config(f"sqlite:///{folder}/mlflow.db")
        started = time.perf_counter()
        for number in range(NUM_PIPELINES):
            log_engines(store, folder, seed=number, num_variants=NUM_VARIANTS, num_targets=NUM_TARGETS)
        logging_s = (time.perf_counter() - started) / NUM_ENGINES
        record = {"logging_s_per_engine": round(logging_s, 3)} | measure(store, folder)
    for name, value in record.items():
        print(f"{name:>22}  {value}")
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def measure(store: TrackingConfig, folder: Path) -> dict[str, Any]:
    """Pick from a filled store by function, by command and by browser."""
    with served(store, folder, free_port()) as server, opened_browser(folder) as browser:
        page = page_of(server, find_engines(server, TARGET)[0])
        assert page is not None
        return {
            "date": date.today().isoformat(),
            "cpu_model": read_cpu_model(),
            "python": platform.python_version(),
            "mlflow": version("mlflow"),
            "browser": f"Chromium {browser.capabilities['browserVersion']}",
            "num_engines": NUM_ENGINES,
            "num_pipelines": NUM_PIPELINES,
            "num_repeats": NUM_REPEATS,
            "load_average_before": round(os.getloadavg()[0], 2),
            "query_sqlite_s": median_s(lambda: pick_from(store)),
            "query_server_s": median_s(lambda: pick_from(server)),
            "command_s": median_s(lambda: run_pick(store)),
            "page_of_target_s": median_s(lambda: read_page(browser, page)),
            "page_of_all_runs_s": median_s(lambda: read_page(browser, page.split("?")[0])),
        }


def log_engines(
    store: TrackingConfig, folder: Path, *, seed: int, num_variants: int, num_targets: int
) -> None:
    """Log a pipeline with a small file for each engine.

    As in the pipeline, the pick is the fastest engine that was accepted; a faster one is too lossy.
    """
    draw = random.Random(seed)
    records, picks = [], {}
    data = DataSet("data/digit_scenes", hashlib.md5(str(seed).encode()).hexdigest() + ".dir", "data")
    for target in (f"target_{number}" for number in range(num_targets)):
        latencies = sorted(draw.uniform(0.5, 20.0) for _ in range(num_variants))
        for number, latency_ms in enumerate(latencies):
            verdict = "TOO_LOSSY" if number == 0 else "ACCEPT"
            records.append(_engine(folder, data, seed, target, number, latency_ms, verdict))
        picks[registered_name(store, target)] = records[1 - num_variants].name
    pipeline = RunRecord("pipeline", {"num_engines": float(len(records))}, {"best": "none"}, (), data)
    log_pipeline(store, pipeline=pipeline, candidates=records, picks=picks)


def _engine(
    folder: Path, data: DataSet, seed: int, target: str, number: int, latency_ms: float, verdict: str
) -> RunRecord:
    name = f"variant_{number}-{target}"
    content = f"{name} {seed}".encode()
    (folder / f"{name}.engine").write_bytes(content)
    miou = 0.3 if verdict == "TOO_LOSSY" else 0.6 + latency_ms / 100
    spread = {"latency_ms_p90": 1.1, "latency_ms_p99": 1.2, "throughput_per_s": 0.9, "memory_mib": 30.0}
    tags = {
        "variant": f"variant_{number}",
        "target": target,
        "metric": "mIoU",
        "precision": "int8+f32",
        "pareto": "true",
        "picked": str(number == 1).lower(),
        "verdict": verdict,
        "reason": f"mIoU {miou:.4f}, p50 {latency_ms:.3g} ms; " + 200 * ".",
        "engine_sha256": hashlib.sha256(content).hexdigest(),
    }
    keys = {f"key_{stage}": tags["engine_sha256"][:32] for stage in ("build_engine", "validate", "benchmark")}
    metrics = {name: factor * latency_ms for name, factor in spread.items()} | {
        "latency_ms_p50": latency_ms,
        "miou": miou,
        "size_bytes": 1e6 + number,
    }
    return RunRecord(name, metrics, tags | keys, (("engine", folder / f"{name}.engine"),), data)


@contextlib.contextmanager
def served(store: TrackingConfig, folder: Path, port: int) -> Iterator[TrackingConfig]:
    """Start MLflow's server over a store and yield its address."""
    uri, log = f"http://127.0.0.1:{port}", folder / "server.log"
    command = [
        "mlflow",
        "server",
        "--backend-store-uri",
        store.uri,
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with log.open("w") as lines:
        server = subprocess.Popen(
            [sys.executable, "-m", *command, "--workers", "1"],
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},  # jobs of language models
            stdout=lines,
            stderr=lines,
            cwd=folder,
            start_new_session=True,
        )
    try:
        _wait_for(f"{uri}/health", log)
        yield dataclasses.replace(store, uri=uri)
    finally:
        os.killpg(server.pid, signal.SIGTERM)  # its worker is a separate process
        server.wait()


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(url: str, log: Path) -> None:
    deadline = time.monotonic() + _SERVER_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError), urlopen(url, timeout=5):
            return
        if time.monotonic() > deadline:
            sys.exit(f"{url} did not answer within {_SERVER_TIMEOUT_S:.0f} s:\n{log.read_text()}")
        time.sleep(0.2)


@contextlib.contextmanager
def opened_browser(folder: Path) -> Iterator["Chrome"]:
    """Start a headless Chromium that connects only to the page."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        "window-size=2000,1000",
        f"user-data-dir={folder / 'browser'}",
    ):
        options.add_argument(f"--{flag}")
    browser = webdriver.Chrome(options, webdriver.ChromeService(str(DRIVER)))
    try:
        yield browser
    finally:
        browser.quit()


def read_page(browser: "Chrome", url: str) -> list[dict[str, str]]:
    """Open a runs page and return its rows from top to bottom, column -> text, once the table shows them."""
    from selenium.webdriver.support.wait import WebDriverWait

    browser.get("about:blank")
    browser.get(url)
    wait = WebDriverWait(browser, _PAGE_TIMEOUT_S, poll_frequency=0.05)
    rows: list[dict[str, str]] = wait.until(lambda opened: opened.execute_script(_READ_ROWS, _ROWS))
    return rows


_READ_ROWS = """
const rows = [...document.querySelectorAll(arguments[0])];
rows.sort((a, b) => a.getAttribute('row-index') - b.getAttribute('row-index'));
return rows.map(row => Object.fromEntries(
    [...row.querySelectorAll('[col-id]')].map(cell => [cell.getAttribute('col-id'), cell.innerText.trim()])));
"""


def pick_from(store: TrackingConfig) -> None:
    """Find the engine that `flows.pick` finds."""
    pick(find_engines(store, TARGET), Limits(max_latency_ms=None, min_miou=0.6, min_top1=None))


def run_pick(store: TrackingConfig) -> None:
    """Run `flows.pick` as a user does."""
    command = [sys.executable, "-m", "flows.pick", "--target", TARGET, "--tracking-uri", store.uri]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def median_s(action: Callable[[], object]) -> float:
    """Return the median of some repeats, in seconds."""
    seconds = []
    for _ in range(NUM_REPEATS):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return round(statistics.median(seconds), 2)


if __name__ == "__main__":
    main()
