"""The whole pipeline, small: what a newcomer does, by both drivers."""

import json
import random
import re
import shutil
import signal
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.core.fingerprint import digest
from tests.conftest import REPOSITORY, SMOKE, Workspace
from tests.wheels import run_tests_over

pytestmark = pytest.mark.slow

FLOAT_VARIANTS = ("teacher", "baseline", "distilled", "pruned")
GRAPH_VARIANTS = ("pruned_fp16", "pruned_ptq", "pruned_repaired", "pruned_partial", "pruned_qat")


def _executed(output: str) -> int:
    found = re.search(r"stages run: (\d+) of \d+", output)
    assert found, output[-3000:]
    return int(found[1])


def _started(output: str) -> list[str]:
    return re.findall(r"^(\S+): running", output, re.MULTILINE)


def test_first_run_prints_the_engines_and_ends_without_a_traceback(smoke_run: tuple[Workspace, str]) -> None:
    _, output = smoke_run
    assert "Traceback" not in output
    assert "pruned_ptq" in output and "cpu_onnxruntime" in output and "report.html" in output


def test_a_pick_that_does_not_find_a_class_says_so_c2(smoke_run: tuple[Workspace, str]) -> None:
    """So short a training may find hardly more than the background."""
    space, output = smoke_run
    text = " ".join(output.split())
    picks = json.loads((space.path / "artifacts/select_engine/picks.json").read_text())
    for target, row in picks.items():
        dead = [name for name, iou in row["iou"].items() if iou == 0]
        assert len(row["class_warnings"]) >= len(dead)
        assert (f"{target}: Warning: IoU of " in text) == bool(row["class_warnings"])
        assert f"{row['unseen_verdict']} on test" in text


def test_every_rung_is_built_by_tensorrt(smoke_run: tuple[Workspace, str], tensorrt_builder: Path) -> None:
    environment = {"PYTHONPATH": f"{REPOSITORY}:{tensorrt_builder}", "RUN": str(smoke_run[0].path)}
    run_tests_over("tests/over_tensorrt_rungs.py", environment)


def test_every_engine_has_a_row_with_its_numbers(smoke_run: tuple[Workspace, str]) -> None:
    folder = smoke_run[0].path / "artifacts" / "select_engine"
    rows = json.loads((folder / "engines.json").read_text())
    picks = json.loads((folder / "picks.json").read_text())
    assert {(row["variant"], row["target"]) for row in rows} == {
        (variant, target)
        for variant in (*FLOAT_VARIANTS, *GRAPH_VARIANTS)
        for target in ("cpu_torch", "cpu_onnxruntime")
        if not (target == "cpu_torch" and variant in GRAPH_VARIANTS)
    }
    required = {
        "variant",
        "target",
        "miou",
        "score_rel_loss",
        "latency_ms_p50",
        "latency_ms_p99",
        "speedup_vs_reference",
        "size_bytes",
        "compressed_bytes",
        "build_s",
        "load_ms",
        "first_call_ms",
        "memory_total_mib",
        "energy_mj_per_image",
        "macs",
        "engine_sha256",
        "pareto",
        "verdict",
        "reason",
    }
    for row in rows:
        assert required <= set(row)
        assert row["latency_ms_p50"] > 0 and row["size_bytes"] > 0 and row["reason"]
        assert row["build_s"] > 0 and row["load_ms"] > 0 and row["compressed_bytes"] > 0 and row["macs"] > 0
    for target, row in picks.items():
        assert row["target"] == target and row["picked"]
        assert row["verdict"] in (
            "ACCEPT",
            "INCONCLUSIVE",
            "UNPROVEN",
        )  # few images, and perhaps a busy machine


def test_report_shows_the_layers_of_the_engines(smoke_run: tuple[Workspace, str]) -> None:
    page = (smoke_run[0].path / "artifacts/select_engine/report.html").read_text(encoding="utf-8")
    embedded = re.search(r'id="report-data">(.*?)</script>', page)
    assert embedded is not None
    data = json.loads(embedded[1])
    assert list(data["details"]) == ["cpu_onnxruntime"] and data["details"]["cpu_onnxruntime"]["pairs"]


def test_second_run_executes_nothing_and_dvc_agrees(smoke_run: tuple[Workspace, str]) -> None:
    space, _ = smoke_run
    again = space.flow()
    assert again.returncode == 0, again.stderr
    assert _executed(again.stdout) == 0
    assert "Traceback" not in again.stdout + again.stderr
    assert space.changed_stages() == {}
    assert space.reproduce() == []


def test_second_run_adds_no_runs_to_mlflow(smoke_run: tuple[Workspace, str]) -> None:
    space, _ = smoke_run
    with sqlite3.connect(space.path / "mlflow.db") as database:
        (num_runs,) = database.execute(
            "select count(*) from runs"
        ).fetchone()  # also of others in this session
        engines = database.execute(
            "select value, count(*) from tags where key = 'engine_sha256' group by run_uuid"
        ).fetchall()
    assert len(engines) >= 10
    for name in ("select_engine", "track"):
        assert space.run("python", "-m", "flows.forget", name).returncode == 0
    assert _started(space.flow().stdout) == ["select_engine", "track"]
    with sqlite3.connect(space.path / "mlflow.db") as database:
        assert database.execute("select count(*) from runs").fetchone() == (num_runs,)
        report = json.loads((space.path / "artifacts" / "track" / "report.json").read_text())
        children = "select count(*) from tags where key = 'mlflow.parentRunId' and value = ?"
        pipeline = report["run"].rpartition("/")[2]
        assert database.execute(children, (pipeline,)).fetchone() == (13,)  # one for each engine


def test_metrics_plots_and_graph_are_there_for_dvc_users(smoke_run: tuple[Workspace, str]) -> None:
    space, _ = smoke_run
    assert "artifacts/distill/report.json" in space.run("dvc", "metrics", "show").stdout
    dag = space.run("dvc", "dag").stdout
    assert "select_engine" in dag and "quantize_ptq" in dag
    plots = space.run("dvc", "plots", "show")
    assert plots.returncode == 0 and "index.html" in plots.stdout, plots.stderr


def test_one_value_reruns_its_stage_and_what_depends_on_it(smoke_run: tuple[Workspace, str]) -> None:
    space, _ = smoke_run
    changed = "select_engine.min_speedup_factor=1.5"
    always, perhaps = ["select_engine", "track"], ["race_picks"]  # the picks themselves may stay the same
    assert _started(space.flow(changed).stdout) in (always, always + perhaps)
    assert space.run("python", "-m", "flows.params", *SMOKE).returncode == 0
    assert "track" in space.reproduce()  # it changes MLflow, so DVC's run cache cannot stand in for it
    assert _executed(space.flow().stdout) == 0


def test_flow_after_dvc_repro_runs_nothing_though_prefect_has_no_record(
    smoke_run: tuple[Workspace, str],
) -> None:
    space, _ = smoke_run
    space.run("python", "-m", "flows.local_server", "--stop")
    shutil.rmtree(space.path / ".prefect")
    assert _executed(space.flow().stdout) == 0


@pytest.fixture
def restored(smoke_run: tuple[Workspace, str], tmp_path: Path) -> Iterator[Workspace]:
    """The workspace of the smoke run, whose code and outputs are put back instead of being made again."""
    space, _ = smoke_run
    names = ("artifacts", "tasks")
    for name in names:
        shutil.copytree(space.path / name, tmp_path / name)
    shutil.copy2(space.path / "dvc.lock", tmp_path)
    yield space
    for name in names:
        shutil.rmtree(space.path / name)
        shutil.copytree(tmp_path / name, space.path / name)
    shutil.copy2(tmp_path / "dvc.lock", space.path)


def test_comment_in_a_training_reruns_it_and_stops_where_the_bytes_are_the_same(restored: Workspace) -> None:
    weights = restored.path / "artifacts/finetune/model.safetensors"
    before = digest(weights), weights.stat().st_mtime_ns
    with (restored.path / "tasks/finetune.py").open("a") as file:
        file.write("\n# a comment\n")
    done = restored.flow()
    assert done.returncode == 0, done.stderr
    assert _started(done.stdout) == ["finetune"]
    assert digest(weights) == before[0] and weights.stat().st_mtime_ns > before[1]


def test_damaged_artifact_comes_back_from_the_store(smoke_run: tuple[Workspace, str]) -> None:
    space, _ = smoke_run
    engine = next((space.path / "artifacts/build_engine/pruned_ptq/cpu_onnxruntime/engine").glob("*.onnx"))
    content = bytearray(engine.read_bytes())
    content[len(content) // 2] ^= 1
    engine.chmod(0o644)
    engine.write_bytes(bytes(content))
    finished = space.flow()
    assert finished.returncode == 0, finished.stderr
    assert _executed(finished.stdout) == 0 and "was changed or deleted" in finished.stderr
    assert "build_engine.pruned_ptq.cpu_onnxruntime: made before, restored" in finished.stdout
    content[len(content) // 2] ^= 1
    assert engine.read_bytes() == bytes(content)


def test_engine_build_killed_at_random_moments_leaves_nothing_half_made(
    smoke_run: tuple[Workspace, str],
) -> None:
    space, _ = smoke_run
    address = "build_engine.distilled.cpu_onnxruntime"  # no other rung is the same file: nothing is copied
    folder = space.path / "artifacts/build_engine/distilled/cpu_onnxruntime"
    inputs = (
        "model=artifacts/export_onnx/distilled/model.onnx",
        "images=artifacts/prepare_data/dataset/calibration_images.npy",
    )
    undisturbed = digest(folder / "engine")
    files = {path.name for path in folder.iterdir()}
    generator = random.Random(0)
    num_killed = 0
    for _ in range(3):
        space.run("python", "-m", "flows.forget", address)
        process = space.start("python", "-m", "tasks", address, *inputs)
        while process.poll() is None and not list((space.path / "artifacts/.drafts").glob(f"{address}-*")):
            time.sleep(0.002)
        time.sleep(generator.uniform(0.0, 0.1))
        process.kill()
        process.communicate()
        num_killed += process.returncode == -signal.SIGKILL
        if folder.exists():
            assert digest(folder / "engine") == undisturbed
            assert {path.name for path in folder.iterdir()} == files
    assert num_killed >= 1
    assert space.flow().returncode == 0
    assert digest(folder / "engine") == undisturbed


def test_flow_killed_in_a_training_resumes_and_repeats_no_finished_stage(workspace: Workspace) -> None:
    """SIGKILL of the flow alone: its stage dies with it, and the next flow goes on where it was."""
    epochs = "train.teacher.trainer.max_epochs=40"
    flow = workspace.start("python", "-m", "flows.optimize", *SMOKE, epochs)
    try:
        checkpoint = "train.teacher-*/resume/last.ckpt"
        while not list((workspace.path / "artifacts/.drafts").glob(checkpoint)):
            assert flow.poll() is None
            time.sleep(0.05)
        flow.kill()
        flow.wait()
        again = workspace.start("python", "-m", "flows.optimize", *SMOKE, epochs)
        assert again.stdout is not None
        lines = []
        for line in again.stdout:
            lines.append(line)
            if "resuming after epoch" in line:
                break
        again.kill()
        again.wait()
        assert "resuming after epoch" in lines[-1], "".join(lines[-30:])
        assert not any("prepare_data: running" in line for line in lines)
    finally:
        workspace.run("python", "-m", "flows.local_server", "--stop")


def test_two_flows_at_once_take_turns(smoke_run: tuple[Workspace, str]) -> None:
    space, _ = smoke_run
    assert space.run("python", "-m", "flows.forget", "diff_layers.pruned").returncode == 0
    command = ("python", "-m", "flows.optimize", *SMOKE)
    running = [space.start(*command), space.start(*command)]
    outputs = [process.communicate(timeout=600)[0] for process in running]
    assert [process.returncode for process in running] == [0, 0], outputs
    assert sorted(_executed(output) for output in outputs)[0] == 0
    assert sum("waiting until it ends" in output for output in outputs) == 1


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.teacher.trainer.max_epoch=3", "max_epoch"),
        ("prepare_data.root=../elsewhere", "prepare_data.root"),
    ],
)
def test_config_mistake_fails_before_any_stage(workspace: Workspace, override: str, expected: str) -> None:
    failed = workspace.run("python", "-m", "flows.optimize", override)
    assert failed.returncode == 1
    assert expected in failed.stderr and "ConfigError" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not (workspace.path / "artifacts").exists()
    copied = workspace.path / ".prefect/prefect.db"
    assert list(copied.parent.iterdir()) == [copied]  # no server was started


def test_engine_is_built_again_from_its_sha256_alone(smoke_run: tuple[Workspace, str]) -> None:
    space, _ = smoke_run
    rows = json.loads((space.path / "artifacts/select_engine/engines.json").read_text())
    [row] = [row for row in rows if (row["variant"], row["target"]) == ("pruned_ptq", "cpu_onnxruntime")]
    done = space.run("python", "-m", "flows.reproduce", row["engine_sha256"][:16])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert f"the same bytes: {row['engine_sha256']}" in done.stdout
    assert "train@teacher: " in done.stdout and "reads artifacts/prepare_data/dataset, md5 " in done.stdout
    [built] = re.findall(r"Running stage '(.*)'", done.stdout)  # all else came from DVC's cache
    assert re.fullmatch("build_engine@pruned_(ptq|partial)-cpu_onnxruntime", built)  # both are the same file
    again = space.run("python", "-m", "flows.reproduce", row["engine_sha256"])
    assert again.returncode == 1 and "expected a new folder (--into)" in again.stderr
    unknown = space.run("python", "-m", "flows.reproduce", "0123456789abcdef")
    assert unknown.returncode == 1 and "has no engine" in unknown.stderr
