"""Flows that lose their process, server or disk; the stages are trivial, all else is the product."""

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.trivial_pipeline import write_workspace
from tests.conftest import Workspace, prepare_server
from tests.services import wait_for

pytestmark = pytest.mark.slow

FLOW = ("python", "-m", "benchmarks.trivial_pipeline")
NUM_CALLS = 8 + 2 * 3 + 4
"""Up to the quantized graphs, three for each of two engines, the benchmark of their target, the selection, its
record in MLflow and the race of the picks."""


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workspace]:
    """A workspace whose trivial stages take long enough to be interrupted."""
    folder = tmp_path_factory.mktemp("survival")
    write_workspace(folder, num_variants=2, num_targets=1, seconds=0.2)
    prepare_server(folder / ".prefect")
    space = Workspace(folder)
    yield space
    space.run("python", "-m", "flows.local_server", "--stop")


def start_and_wait(space: Workspace, num_done: int, **environment: str) -> "subprocess.Popen[str]":
    """Start a flow whose stages all have to run, and wait until so many are done."""
    params = yaml.safe_load((space.path / "params.yaml").read_text())
    for section in (params["prepare_data"], params["build_engine"]["t00"]):
        section["salt"] += 1
    (space.path / "params.yaml").write_text(yaml.safe_dump(params))
    shutil.rmtree(space.path / "artifacts", ignore_errors=True)
    flow = space.start(*FLOW, **environment)
    assert flow.stdout is not None
    for line in flow.stdout:
        if line.startswith(f"[{num_done:3d}/{NUM_CALLS}]"):
            return flow
    raise AssertionError(f"the flow ended with {flow.wait()}")


def server(space: Workspace) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((space.path / ".prefect/server.json").read_text())
    return record


def ask(space: Workspace, method: str, body: dict[str, Any] | None = None) -> Any:
    """Return what the API of the Prefect server answers."""
    auth_string = (space.path / ".prefect/auth_string").read_bytes()
    request = urllib.request.Request(
        f"{server(space)['url']}/{method}",
        None if body is None else json.dumps(body).encode(),
        {
            "Content-Type": "application/json",
            "Authorization": f"Basic {base64.b64encode(auth_string).decode()}",
        },
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def states(space: Workspace, kind: str) -> list[str]:
    """Return the states of all flow runs, latest last, or of all task runs, latest first."""
    time.sleep(1.5)  # the server records the states of tasks each second
    order = "EXPECTED_START_TIME_ASC" if kind == "flow_runs" else "EXPECTED_START_TIME_DESC"
    return [run["state_name"] for run in ask(space, f"{kind}/filter", {"sort": order})]


def finished(space: Workspace) -> set[str]:
    artifacts = space.path / "artifacts"
    return {
        ".".join(file.parent.relative_to(artifacts).parts) for file in artifacts.glob("[!.]*/**/key.json")
    }


def assert_rest_runs(space: Workspace, before: set[str]) -> None:
    """Run the flow again: it runs what was not finished, and nothing else."""
    again = space.run(*FLOW)
    assert again.returncode == 0, again.stderr[-3000:]
    started = set(re.findall(r"^(\S+): running", again.stdout, re.MULTILINE))
    assert before and not started & before
    assert len(started | before) == NUM_CALLS
    assert f"stages run: {len(started)} of {NUM_CALLS}" in again.stdout


def test_killed_flow_is_marked_crashed_and_the_next_one_repeats_no_finished_stage(space: Workspace) -> None:
    flow = start_and_wait(space, 9)
    flow.kill()
    flow.communicate()  # ends with the last stage that still publishes: stages hold the flow's standard output
    assert states(space, "flow_runs")[-1] == "Running"
    assert_rest_runs(space, finished(space))
    assert states(space, "flow_runs")[-2:] == ["Crashed", "Completed"]
    assert "Running" not in states(space, "task_runs")


def test_flow_whose_server_is_killed_starts_it_again_and_goes_on(space: Workspace) -> None:
    flow = start_and_wait(space, 5)
    url = server(space)["url"]
    os.kill(server(space)["pid"], signal.SIGKILL)
    output = flow.communicate(timeout=300)[0]
    assert flow.returncode == 0, output[-3000:]
    assert f"stages run: {NUM_CALLS} of {NUM_CALLS}" in output and "Traceback" not in output
    assert f"Prefect: the server at {url} was killed; starting it again" in output
    assert server(space)["url"] == url
    assert states(space, "flow_runs")[-1] == "Completed"


def test_server_killed_before_the_first_stage_and_again_later_costs_a_flow_run_at_most(
    space: Workspace,
) -> None:
    shutil.rmtree(space.path / "artifacts", ignore_errors=True)
    space.run("python", "-m", "flows.local_server", "--stop")
    (space.path / ".prefect/flow_run").write_text(
        str(uuid.uuid4())
    )  # what a killed flow leaves is asked for first
    before = len(list((space.path / ".dvc/cache/keys").rglob("*.json")))
    flow = space.start(*FLOW)
    for _ in range(3):
        while flow.poll() is None:
            with contextlib.suppress(OSError, ValueError, KeyError):
                ask(space, "flows/count", {})
                break
            time.sleep(0.01)
        os.kill(server(space)["pid"], signal.SIGKILL)
    output = flow.communicate(timeout=300)[0]
    assert flow.returncode == 0, output[-3000:]
    assert "Traceback" not in output and output.count("was killed; starting it again") >= 2
    assert states(space, "flow_runs")[-1] == "Completed"
    assert before == len(list((space.path / ".dvc/cache/keys").rglob("*.json")))


def test_flow_that_loses_a_server_of_others_ends_with_one_line_and_the_next_one_goes_on(
    space: Workspace,
) -> None:
    flow = start_and_wait(space, 5, PREFECT_CLIENT_MAX_RETRIES="0")
    pid = server(space)["pid"]
    (space.path / ".prefect/server.json").unlink()
    os.kill(pid, signal.SIGKILL)
    output = flow.communicate(timeout=300)[0]
    assert flow.returncode == 1
    assert "Traceback" not in output, output[-3000:]
    assert re.search(
        r"^ServerUnavailable: The Prefect server stopped answering.*run again", output, re.MULTILINE
    )
    assert_rest_runs(space, finished(space))
    assert states(space, "flow_runs")[-2:] == ["Crashed", "Completed"]


def test_full_disk_of_the_cache_is_named_and_the_next_run_commits(
    space: Workspace, mount_disk: Callable[[Path, str], None]
) -> None:
    assert space.run(*FLOW).returncode == 0
    cache = space.path / ".dvc/cache"
    (space.path / "artifacts/.committed").unlink()
    mount_disk(cache, "size=64k")
    (cache / "filler").write_bytes(bytes(shutil.disk_usage(cache).free))
    before = finished(space)
    failed = space.run(*FLOW)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert re.search(
        r"^DiskError: `dvc commit --force`: the disk or its quota is full", failed.stderr, re.MULTILINE
    )
    assert failed.stderr.rstrip().endswith("No space left on device")  # in DVC's words, without its footer
    assert finished(space) == before and len(before) == NUM_CALLS

    (cache / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=16m", cache], check=True)
    again = space.run(*FLOW)
    assert again.returncode == 0 and f"stages run: 0 of {NUM_CALLS}" in again.stdout, again.stderr
    assert space.changed_stages() == {}


def test_dvc_lock_that_was_cut_off_is_written_anew(space: Workspace) -> None:
    assert space.run(*FLOW).returncode == 0
    lock = space.path / "dvc.lock"
    before = lock.read_text()
    for share in (0.0, 0.31, 0.5, 0.77, 0.999):
        lock.write_text(before[: int(share * len(before))])
        again = space.run(*FLOW)
        assert again.returncode == 0 and f"stages run: 0 of {NUM_CALLS}" in again.stdout, again.stderr
        assert lock.read_text() == before, share
        assert space.changed_stages() == {}


def test_locks_of_dvc_that_were_cut_off_are_removed(space: Workspace) -> None:
    assert space.run(*FLOW).returncode == 0
    (space.path / "artifacts/.committed").unlink(missing_ok=True)
    (space.path / ".dvc/tmp/rwlock").write_text('{"artifacts/prepare_data": {"write": {"pid": 1')
    flow = space.run(*FLOW)
    assert flow.returncode == 0 and "removing .dvc/tmp/rwlock, which is damaged" in flow.stdout, flow.stderr
    assert space.changed_stages() == {}


def test_damaged_output_that_dvc_committed_comes_back_under_either_driver(space: Workspace) -> None:
    params, lock = space.path / "params.yaml", space.path / "dvc.lock"
    first = yaml.safe_load(params.read_text())
    assert space.run(*FLOW).returncode == 0
    file = space.path / "artifacts/convert_precision/model.onnx"
    before, lock_before = file.read_bytes(), lock.read_text()

    def commit_damage() -> None:
        file.write_bytes(b"damaged between the end of its stage and the commit")
        (space.path / "artifacts/.committed").unlink(missing_ok=True)
        commit = "from flows.workspace import commit_outputs; commit_outputs()"
        committed = space.run("python", "-c", commit)
        assert "ArtifactError: artifacts/convert_precision was changed after it was made" in committed.stderr
        assert lock.read_text() != lock_before and not (space.path / "artifacts/.committed").exists()
        assert not file.exists()

    commit_damage()
    repro = space.run("dvc", "repro")
    assert repro.returncode == 0 and ": started" not in repro.stderr, repro.stderr
    assert (file.read_bytes(), lock.read_text()) == (before, lock_before)

    file.write_bytes(b"damaged between the end of its stage and a commit by DVC itself")
    assert space.run("dvc", "commit", "--force").returncode == 0 and lock.read_text() != lock_before
    repro = space.run("dvc", "repro")
    assert repro.returncode == 0 and ": started" not in repro.stderr, repro.stderr
    assert "removing artifacts/convert_precision, which was changed" in repro.stdout + repro.stderr
    assert (file.read_bytes(), lock.read_text()) == (before, lock_before)

    commit_damage()
    flow = space.run(*FLOW)
    assert flow.returncode == 0 and f"stages run: 0 of {NUM_CALLS}" in flow.stdout, flow.stderr[-3000:]
    assert (file.read_bytes(), lock.read_text()) == (before, lock_before)

    second = {**first, "convert_precision": {**first["convert_precision"], "salt": 99}}
    for content in (second, first):  # DVC takes the way back from the cache of its runs
        params.write_text(yaml.safe_dump(content))
        repro = space.run("dvc", "repro")
        assert repro.returncode == 0, repro.stderr
    assert file.read_bytes() == before and yaml.safe_load(lock.read_text()) == yaml.safe_load(lock_before)


def test_leftovers_that_no_stage_makes_again_block_no_run(space: Workspace) -> None:
    assert space.run(*FLOW).returncode == 0
    made, damaged, older = (space.path / f"artifacts/validate/{name}/t00" for name in ("v01", "v98", "v99"))
    for leftover in (damaged, older):
        shutil.copytree(made, leftover)
    (damaged / "scores.csv").write_bytes(b"damaged")
    record = json.loads((older / "key.json").read_text())
    (older / "key.json").write_text(json.dumps({**record, "schema": 2}))
    first = space.run(*FLOW)
    assert first.returncode == 1 and "ArtifactError: artifacts/validate/v98/t00 was changed" in first.stderr
    shutil.rmtree(space.path / "artifacts/.locks")  # as in a clone after `dvc pull`
    for command in (("dvc", "repro"), FLOW):
        again = space.run(*command)
        assert again.returncode == 0, again.stderr
    assert not damaged.exists() and older.exists()
    shutil.rmtree(older)


def test_going_back_to_an_earlier_configuration_runs_nothing_and_prefect_shows_it_as_cached(
    space: Workspace,
) -> None:
    params = space.path / "params.yaml"
    first = yaml.safe_load(params.read_text())
    assert space.run(*FLOW).returncode == 0
    second = {**first, "prepare_data": {**first["prepare_data"], "salt": first["prepare_data"]["salt"] + 1}}
    params.write_text(yaml.safe_dump(second))
    between = space.run(*FLOW)
    assert f"stages run: {NUM_CALLS} of {NUM_CALLS}" in between.stdout, between.stderr[-3000:]
    params.write_text(yaml.safe_dump(first))
    back = space.run(*FLOW)
    assert f"stages run: 0 of {NUM_CALLS}" in back.stdout, back.stderr[-3000:]
    assert states(space, "task_runs")[:NUM_CALLS] == ["Cached"] * NUM_CALLS


def test_page_of_a_run_has_its_parameters_and_the_edges_between_its_stages(space: Workspace) -> None:
    assert space.run(*FLOW).returncode == 0
    run = ask(space, "flow_runs/filter", {"sort": "EXPECTED_START_TIME_ASC"})[-1]
    params = yaml.safe_load((space.path / "params.yaml").read_text())
    assert run["parameters"] == {"configuration": params}

    def nodes_of_graph() -> dict[str, Any]:
        return dict(ask(space, f"flow_runs/{run['id']}/graph-v2")["nodes"])

    def is_recorded() -> bool:
        states = [node["state_type"] for node in nodes_of_graph().values()]
        return states == ["COMPLETED"] * NUM_CALLS

    # A task has its stage's name from the second of its states on.
    wait_for(is_recorded, "the last states of all tasks, which are recorded each second")
    nodes = nodes_of_graph()
    parents = {
        node["label"]: {nodes[parent["id"]]["label"] for parent in node["parents"]} for node in nodes.values()
    }
    assert parents["import_onnx"] == {"prepare_data"}
    assert parents["build_engine.v00.t00"] == {"quantize_ptq", "prepare_data"}
    assert parents["benchmark.t00"] == {"build_engine.v00.t00", "build_engine.v01.t00", "prepare_data"}
    assert parents["select_engine"] > {"validate.v00.t00", "diff_layers.v01.t00", "benchmark.t00"}
    assert parents["race_picks"] > {"select_engine", "build_engine.v00.t00"}


def test_another_version_of_a_library_makes_the_stages_stale_that_depend_on_it(
    space: Workspace, tmp_path: Path
) -> None:
    metadata = tmp_path / "onnxruntime-99.0.dist-info/METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: onnxruntime\nVersion: 99.0\n", encoding="utf-8")
    assert space.run(*FLOW).returncode == 0
    assert space.changed_stages() == {}
    looked_up = space.run("dvc", "repro", "environment", PYTHONPATH=str(tmp_path))
    assert looked_up.returncode == 0, looked_up.stderr
    assert set(space.changed_stages()) == {"build_engine-v00-t00", "build_engine-v01-t00"}
    made = space.run("dvc", "repro", PYTHONPATH=str(tmp_path))
    assert made.returncode == 0, made.stderr
    ran = re.findall(r"tasks.core.execute (\S+): started", made.stderr)
    # What reads the engines is not run again, because their bytes are the same; the rest reads whole folders.
    assert ran[:2] == ["build_engine.v00.t00", "build_engine.v01.t00"] and "validate.v00.t00" not in ran
    flow = space.run(*FLOW, PYTHONPATH=str(tmp_path))
    assert f"stages run: 0 of {NUM_CALLS}" in flow.stdout, flow.stderr[-3000:]
    back = space.run(*FLOW)  # in the first surroundings again
    assert f"stages run: 0 of {NUM_CALLS}" in back.stdout, back.stderr[-3000:]
    assert space.changed_stages() == {}


def test_variants_with_the_same_model_share_one_engine_that_is_built_once(tmp_path: Path) -> None:
    write_workspace(tmp_path / "space", num_variants=3, num_targets=1, seconds=0.2)
    prepare_server(tmp_path / "space/.prefect")
    space = Workspace(tmp_path / "space")
    shutil.copy(space.path / "models/v01.onnx", space.path / "models/v02.onnx")
    try:
        flow = space.run(*FLOW)
    finally:
        space.run("python", "-m", "flows.local_server", "--stop")
    assert flow.returncode == 0, flow.stdout[-3000:] + flow.stderr[-3000:]
    built = re.findall(r"^(build_engine\S+): running$", flow.stdout, re.MULTILINE)
    restored = re.findall(
        r"^(build_engine\S+): made before, restored from the store$", flow.stdout, re.MULTILINE
    )
    # Stages that are sent side by side start in any order: either of the twins builds.
    assert sorted(built + restored) == [f"build_engine.{name}.t00" for name in ("v00", "v01", "v02")]
    assert len(restored) == 1 and restored[0] != "build_engine.v00.t00", built
    engines = [space.path / f"artifacts/build_engine/{name}/t00/engine/model.bin" for name in ("v01", "v02")]
    assert engines[0].read_bytes() == engines[1].read_bytes()


def test_comment_in_the_code_of_the_builds_measures_nothing_again_under_either_driver(
    space: Workspace,
) -> None:
    assert space.run(*FLOW).returncode == 0
    file = space.path / "tasks/build_engine.py"
    before = file.read_text(encoding="utf-8")
    again = {"build_engine.v00.t00", "build_engine.v01.t00", "select_engine", "track"}
    file.write_text(before + "\n# Remark\n", encoding="utf-8")
    repro = space.run("dvc", "repro")
    assert repro.returncode == 0, repro.stderr
    assert set(re.findall(r"tasks.core.execute (\S+): started", repro.stderr)) == again
    file.write_text(before + "\n# Another remark\n", encoding="utf-8")
    flow = space.run(*FLOW)
    assert set(re.findall(r"^(\S+): running$", flow.stdout, re.MULTILINE)) == again
    file.write_text(before, encoding="utf-8")


def test_output_that_no_longer_holds_is_made_again_under_either_driver(space: Workspace) -> None:
    file, short = space.path / "tasks/validate.py", space.path / "memory_is_short"
    before = file.read_text(encoding="utf-8")
    file.write_text(f"{before}\n\ndef still_holds(*_):\n    return not Path({short.name!r}).exists()\n")
    assert space.run(*FLOW).returncode == 0
    short.touch()
    made = {"validate.v00.t00", "validate.v01.t00"}
    for command in (("dvc", "repro"), FLOW, ("dvc", "repro")):
        again = space.run(*command)
        assert again.returncode == 0, again.stderr
        started = set(
            re.findall(
                r"(?:^|execute )(\S+): (?:running$|started)", again.stdout + again.stderr, re.MULTILINE
            )
        )
        assert made <= started <= {*made, "select_engine", "track"}
    short.unlink()
    repro, flow = space.run("dvc", "repro"), space.run(*FLOW)
    assert repro.returncode == 0 and ": started" not in repro.stderr, repro.stderr
    assert f"stages run: 0 of {NUM_CALLS}" in flow.stdout, flow.stderr
    file.write_text(before, encoding="utf-8")
