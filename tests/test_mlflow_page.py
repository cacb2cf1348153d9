"""MLflow's page in a browser shows a picker the engine that the pipeline picked."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.picking import CHROMIUM, DRIVER, free_port, log_engines, opened_browser, read_page, served
from flows.pick import main
from tasks.core.tracking.config import TrackingConfig, read_tracking_config
from tasks.core.tracking.lookup import find_engines, page_of

TARGET = "target_1"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        "CI" not in os.environ and not (CHROMIUM.exists() and DRIVER.exists()),
        reason=f"needs {CHROMIUM} and {DRIVER} (Debian: chromium, chromium-driver)",
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TrackingConfig]:
    """A server with two pipelines, of which the page is to show the second."""
    store = read_tracking_config(f"sqlite:///{folder}/mlflow.db")
    for seed in (1, 2):
        log_engines(store, folder, seed=seed, num_variants=4, num_targets=2)
    with served(store, folder, free_port()) as server:
        yield server


def test_page_of_a_target_shows_the_picks_columns_and_the_pick_first(server, folder) -> None:
    engines = {run.tags["variant"]: run for run in find_engines(server, TARGET)}
    [picked] = [run for run in engines.values() if run.tags["picked"] == "true"]
    page = page_of(server, picked)
    with opened_browser(folder) as browser:
        rows = read_page(browser, page)

    columns = ["latency_ms_p50", "latency_ms_p99", "miou", "size_bytes"]
    shown = {f"metrics.`{name}`" for name in columns} | {
        f"tags.`{name}`" for name in ("picked", "verdict", "variant", "precision", "target")
    }
    assert shown <= set(rows[0])
    assert rows[0]["tags.`variant`"] == picked.tags["variant"] and rows[0]["tags.`picked`"] == "true"
    latencies = [float(row["metrics.`latency_ms_p50`"]) for row in rows]
    assert latencies == sorted(
        run.metrics["latency_ms_p50"] for run in engines.values() if run.tags["verdict"] == "ACCEPT"
    )
    assert {row["tags.`target`"] for row in rows} == {TARGET}


def test_pick_prints_the_page_of_a_server_and_the_page_asks_for_no_password(server, capsys) -> None:
    uri = server.uri.replace("http://", "http://me:secret@")
    assert main(["--target", TARGET, "--tracking-uri", uri]) == 0
    out = capsys.readouterr().out
    engine = find_engines(server, TARGET)[0]
    assert f"fastest first: {page_of(server, engine)}" in out and "secret" not in out
