"""Engines are picked from a real MLflow store."""

import hashlib
import json
import shutil

import pytest
import yaml

from flows.params import compose_params
from flows.pick import Limits, main, pick, show
from tasks.core.tracking.config import TrackingConfig
from tasks.core.tracking.log import log_pipeline
from tasks.core.tracking.lookup import find_engines
from tasks.core.tracking.records import LOAD_FRONT_TAG, RunRecord, TrackedEngine

TARGET = "cpu_openvino"


def record(folder, variant, latency_ms, miou, verdict="ACCEPT", target=TARGET, picked=False):
    engine = folder / f"{variant}.{target}.blob"
    engine.write_bytes(f"{variant} {target}".encode())
    tags = {
        "variant": variant,
        "target": target,
        "verdict": verdict,
        "reason": f"{variant} is {verdict}",
        "metric": "mIoU",
        "precision": "int8",
        "pareto": "true",
        "picked": str(picked).lower(),
        "engine_sha256": hashlib.sha256(engine.read_bytes()).hexdigest(),
    }
    metrics = {
        "miou": miou,
        "latency_ms_p50": latency_ms,
        "latency_ms_p50_high": 1.05 * latency_ms,
        "latency_ms_p99": 2 * latency_ms,
        "size_bytes": 1e6,
    }
    return RunRecord(f"{variant}-{target}", metrics, tags, (("engine", engine),))


@pytest.fixture
def tracking(tmp_path, monkeypatch, empty_database):
    """A folder with params.yaml and an empty store."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    params = compose_params([f"track.uri={uri}"])
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    return TrackingConfig(enabled=True, uri=uri, experiment="enginewright")


def log(tracking, folder, records, picks):
    pipeline = RunRecord("pipeline", {"num_engines": float(len(records))}, {}, ())
    log_pipeline(tracking, pipeline=pipeline, candidates=records, picks=picks)


@pytest.fixture
def filled(tracking, tmp_path):
    records = [
        record(tmp_path, "ptq", 1.0, 0.60, picked=True),
        record(tmp_path, "qat", 0.99, 0.65, "NOT_FASTER"),
        record(tmp_path, "tiny", 0.2, 0.30, "TOO_LOSSY"),
        record(tmp_path, "float", 4.0, 0.66),
        record(tmp_path, "float", 1.5, 0.66, target="cpu_onnxruntime"),
    ]
    log(tracking, tmp_path, records, {f"enginewright-{TARGET}": f"ptq-{TARGET}"})
    return tracking


@pytest.mark.parametrize(
    ("limits", "variant"),
    [
        ((), "ptq"),  # the pipeline's own pick, though another is a hair faster
        (("--max-latency-ms", "8", "--min-miou", "0.6"), "ptq"),
        (("--max-latency-ms", "1.045"), "qat"),  # ptq takes 1.00 ms, but perhaps 1.05
        (("--min-miou", "0.62"), "qat"),  # not faster than ptq, and the fastest that is as accurate
        (("--min-miou", "0.655"), "float"),
    ],
)
def test_fastest_engine_within_the_limits_is_picked(filled, capsys, limits, variant):
    assert main(["--target", TARGET, *limits]) == 0
    out = capsys.readouterr().out
    assert f"{variant} on {TARGET}" in out and "TOO_LOSSY" in out


@pytest.mark.parametrize(
    ("verdict", "picked", "shipped"),
    [
        ("INCONCLUSIVE", False, "fast"),  # noise hides its speed; it holds the gates
        ("UNPROVEN", False, "slow"),
        ("UNPROVEN", True, "fast"),  # select_engine.allow_unproven
        ("TOO_LOSSY", False, "slow"),
    ],
)
def test_unproven_engine_ships_only_if_it_was_picked(tmp_path, verdict, picked, shipped):
    records = [
        record(tmp_path, "fast", 1.0, 0.60, verdict, picked=picked),
        record(tmp_path, "slow", 4.0, 0.66),
    ]
    runs = [TrackedEngine("0", logged.name, logged.tags, logged.metrics) for logged in records]
    assert pick(runs, Limits(None, None, None)).tags["variant"] == shipped


def test_boundary_iou_of_masks_is_a_column_of_the_engines(tmp_path, capsys):
    logged = record(tmp_path, "fast", 1.0, 0.60)
    show([TrackedEngine("0", logged.name, logged.tags, logged.metrics)], None)
    assert "Boundary IoU" not in capsys.readouterr().out  # of classes, or logged by an earlier version
    show([TrackedEngine("0", logged.name, logged.tags, {**logged.metrics, "boundary_iou": 0.4321})], None)
    out = capsys.readouterr().out
    assert "Boundary IoU" in out and "0.4321" in out


def test_limits_that_no_engine_holds_show_what_there_is(filled, capsys):
    assert main(["--target", TARGET, "--max-latency-ms", "0.5"]) == 1
    shown = capsys.readouterr()
    assert "tiny" in shown.out  # fast enough, and too lossy
    assert "p50 of 0.5 ms" in shown.err and shown.err.startswith("GateFailed")


def test_download_hands_out_the_measured_bytes_and_refuses_others(filled, tmp_path, capsys):
    assert main(["--target", TARGET, "--download", str(tmp_path / "mine")]) == 0
    assert (tmp_path / f"mine/engine/ptq.{TARGET}.blob").read_bytes() == f"ptq {TARGET}".encode()
    assert main(["--target", TARGET, "--download", str(tmp_path / "mine")]) == 1
    assert "not empty" in capsys.readouterr().err
    [stored] = (tmp_path / "mlruns").rglob(f"ptq.{TARGET}.blob")
    stored.write_bytes(b"changed")
    assert main(["--target", TARGET, "--download", str(tmp_path / "other")]) == 1
    assert "sha256" in capsys.readouterr().err


def test_promotion_moves_the_champion_and_leaves_the_candidate(filled):
    from mlflow.tracking import MlflowClient

    client, model = MlflowClient(filled.uri, filled.uri), f"enginewright-{TARGET}"
    for limits, variant in (((), "ptq"), (("--min-miou", "0.62"), "qat"), ((), "ptq")):
        assert main(["--target", TARGET, "--promote", *limits]) == 0
        assert client.get_model_version_by_alias(model, "champion").tags["variant"] == variant
        assert client.get_model_version_by_alias(model, "candidate").tags["variant"] == "ptq"
    assert len(client.search_model_versions(f"name = '{model}'")) == 2


def test_engines_are_those_of_the_candidate_also_when_it_was_logged_before(tracking, tmp_path):
    first = [record(tmp_path, "ptq", 1.0, 0.6, picked=True), record(tmp_path, "float", 4.0, 0.66)]
    second = [record(tmp_path, "ptq", 1.0, 0.6, picked=True), record(tmp_path, "float", 3.0, 0.67)]
    for records in (first, second, first):
        log(tracking, tmp_path, records, {f"enginewright-{TARGET}": f"ptq-{TARGET}"})
    latencies = {run.tags["variant"]: run.metrics["latency_ms_p50"] for run in find_engines(tracking, TARGET)}
    assert latencies == {"ptq": 1.0, "float": 4.0}


def under_load(logged, *points, knee_per_s=None):
    """Add what measure_load found: images per second and p99 in ms of each cell."""
    front = [
        {"throughput_per_s": per_s, "latency_ms_p99": p99_ms, "setting": f"cell of {per_s}/s"}
        for per_s, p99_ms in points
    ]
    tags = {**logged.tags, LOAD_FRONT_TAG: json.dumps(front)}
    metrics = logged.metrics if knee_per_s is None else {**logged.metrics, "knee_per_s": knee_per_s}
    return RunRecord(logged.name, metrics, tags, logged.artifacts)


@pytest.fixture
def loaded(tracking, tmp_path):
    records = [
        under_load(record(tmp_path, "ptq", 1.0, 0.60, picked=True), (900.0, 30.0), (500.0, 4.0)),
        under_load(record(tmp_path, "wide", 2.0, 0.64), (1200.0, 45.0), (700.0, 19.0), knee_per_s=432.1),
        under_load(record(tmp_path, "tiny", 0.2, 0.30, "TOO_LOSSY"), (9000.0, 1.0)),
        under_load(record(tmp_path, "slow", 900.0, 0.66), (3.0, None)),
        record(tmp_path, "float", 4.0, 0.66),
    ]
    log(tracking, tmp_path, records, {f"enginewright-{TARGET}": f"ptq-{TARGET}"})
    return tracking


@pytest.mark.parametrize(
    ("options", "variant", "per_s"),
    [
        ((), "wide", "1200 images/s with p99 45 ms: cell of 1200.0/s"),
        (("--max-p99-ms", "30"), "ptq", "900 images/s"),  # the bound itself is allowed
        (("--max-p99-ms", "20"), "wide", "700 images/s with p99 19 ms"),  # another cell of the same engine
        (("--max-p99-ms", "10"), "ptq", "500 images/s"),
        (("--max-p99-ms", "20", "--max-latency-ms", "1.5"), "ptq", "500 images/s"),
        (("--min-miou", "0.65"), "slow", "3 images/s: cell"),  # too slow for a p99
    ],
)
def test_most_images_per_second_within_the_p99_are_picked(loaded, capsys, options, variant, per_s):
    assert main(["--target", TARGET, "--by", "throughput", *options]) == 0
    out = capsys.readouterr().out
    assert f"{variant} on {TARGET}" in out and per_s in out
    assert "432" in out and "knee/s" in out


def test_p99_that_no_cell_holds_is_a_gate(loaded, capsys):
    assert main(["--target", TARGET, "--by", "throughput", "--max-p99-ms", "2"]) == 1
    assert "None of 5 engines meets p99 of 2 ms or less" in capsys.readouterr().err


def test_by_latency_the_p99_is_that_of_one_image_at_a_time(loaded, capsys):
    assert main(["--target", TARGET, "--max-p99-ms", "3.9"]) == 0
    assert f"ptq on {TARGET}" in capsys.readouterr().out
    assert main(["--target", TARGET, "--max-p99-ms", "0.3"]) == 1
    assert "p99 of 0.3 ms" in capsys.readouterr().err


def test_throughput_that_was_not_measured_names_the_command(filled, capsys):
    assert main(["--target", TARGET, "--by", "throughput", "--max-p99-ms", "20"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("ConfigError") and error.count("\n") == 1
    assert "measure_load.variants=[" in error and "ptq" in error and "tiny" not in error
    assert "knee/s" not in capsys.readouterr().out


def test_target_without_engines_and_foolish_names_are_clear_errors(filled, capsys):
    assert main(["--target", "thor_tensorrt"]) == 1
    assert "no engine of target thor_tensorrt" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--target", "a' or '1'='1"])
