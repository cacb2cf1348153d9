"""The command that writes traces, on real engines and trainings."""

import itertools
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from flows.params import compose_params
from flows.profile import main
from tasks.core.execute import resolve
from tests.conftest import SMOKE
from tests.tasks.conftest import Workshop, workshop

__all__ = ["workshop"]

TARGETS = ("cpu_torch", "cpu_onnxruntime", "cpu_openvino")
REQUIRED = {"ph", "ts", "dur", "pid", "tid", "name"}


@pytest.fixture(scope="module")
def folder(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with params.yaml, a data set, the trained networks, and an engine for each target."""
    folder = tmp_path_factory.mktemp("profile")
    overrides = (f"target=[{','.join(TARGETS)}]", "distill.trainer.batch_size=2", "distill.start=fresh")
    params = compose_params([*SMOKE[:1], *overrides])
    (folder / "params.yaml").write_text(yaml.safe_dump(params))
    artifacts = folder / "artifacts"
    shutil.copytree(workshop.data, artifacts / "prepare_data" / "dataset")
    for stage in ("train/teacher", "prune"):
        (artifacts / stage).mkdir(parents=True)
        shutil.copy(workshop.checkpoint, artifacts / stage / "model.safetensors")
    record, config = resolve("record_teacher", params)
    (artifacts / "record_teacher").mkdir()
    record(config, teacher=workshop.checkpoint, data=workshop.data, out=artifacts / "record_teacher")
    for target in TARGETS:
        engine = artifacts / "build_engine" / "baseline" / target / "engine"
        shutil.copytree(workshop.engine("float", target), engine)
    return folder


@pytest.fixture
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """That folder, in which the command then runs."""
    monkeypatch.chdir(folder)
    return folder


def tracks_of(path: Path) -> dict[str, list[dict]]:
    """Return the complete events of a valid trace by the name of their track."""
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    tracks: dict[str, list[dict]] = {name: [] for name in names.values()}
    for event in events:
        assert event["ph"] in "XM"
        if event["ph"] == "X":
            assert set(event) >= REQUIRED and event["ts"] >= 0 and event["dur"] >= 0
            tracks[names[event["tid"]]].append(event)
    for track in tracks.values():
        for before, after in itertools.pairwise(track):
            assert before["ts"] + before["dur"] <= after["ts"] + 1e-3
    return tracks


@pytest.mark.parametrize("target", TARGETS)
def test_engine_gives_a_trace_whose_layers_lie_in_its_inferences(inside, tmp_path, capsys, target):
    out = tmp_path / "trace.json"
    assert main(["baseline", "--target", target, "--inferences", "2", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"baseline on {target}: 2 inferences" in printed and "https://ui.perfetto.dev" in printed
    inferences, layers = tracks_of(out).values()
    assert [each["name"] for each in inferences] == ["inference 1", "inference 2"]
    for layer in layers:
        assert any(
            each["ts"] <= layer["ts"] and layer["ts"] + layer["dur"] <= each["ts"] + each["dur"] + 1e-3
            for each in inferences
        )
    assert re.search(r"% of their time is in \d+ layers", printed)
    assert (target == "cpu_openvino") == ("laid end to end: OpenVINO reports durations only" in printed)


@pytest.mark.parametrize(("stage", "num_steps"), [("train.teacher", 2), ("distill", 3), ("finetune", 1)])
def test_training_gives_a_trace_and_a_table_and_publishes_nothing(inside, tmp_path, capsys, stage, num_steps):
    before = sorted(inside.rglob("*"))
    out = tmp_path / "trace.json"
    assert main(["--stage", stage, "--steps", "3", "--out", str(out)]) == 0
    assert sorted(inside.rglob("*")) == before
    printed = capsys.readouterr().out
    for word in ("data wait", "forward", "backward", "optimizer", "images/s", "peak memory"):
        assert word in printed
    # Eight images: one step an epoch, in distill four.
    assert (f"{stage} ended after {num_steps} steps" in printed) == (num_steps < 3)
    tracks = tracks_of(out)
    assert sum(each["name"].startswith("step") for each in tracks["steps"]) == num_steps
    for phase in ("data wait", "forward", "backward", "optimizer"):
        assert sum(each["name"] == phase for each in tracks["phases"]) == num_steps


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ["pruned_qat", "--target", "cpu_openvino"],
            r"ArtifactError: .*pruned_qat/cpu_openvino/engine: not found.*dvc repro build_engine@pruned_qat-cpu_open",
        ),
        (
            ["prned", "--target", "cpu_openvino"],
            r"ConfigError: .*no engine of variant 'prned'.*variants .*pruned_qat.*targets .*cpu_openvino",
        ),
        (["baseline", "--target", "h200"], r"ConfigError: .*for target 'h200'"),
        (
            ["--stage", "prune"],
            r"ConfigError: prune is a stage, but no training.*are: train\.teacher, train\.b",
        ),
        (["--stage", "train"], r"ConfigError: train is no stage of this configuration.*distill, finetune"),
        (
            ["--stage", "quantize_aware_train"],
            r"ArtifactError: quantize_aware_train reads checkpoint from artifacts/finetune/model\.safetensors, which",
        ),
        (["--stage", "distill", "--out", "artifacts"], r"ConfigError: artifacts is a folder.*\(--out\)"),
        (
            ["baseline", "--target", "cpu_onnxruntime", "--out", "params.yaml/trace.json"],
            r"ConfigError: params\.yaml/trace\.json cannot be written \(.*\(--out\)",
        ),
        (
            ["baseline", "--target", "cpu_onnxruntime", "--batch-size", "9"],
            r"DataError: .*batch of 9.*target\.cpu_onnxruntime\.max_batch",
        ),
    ],
)
def test_what_is_not_there_is_named_with_the_way_out(inside, capsys, arguments, error):
    assert main(arguments) == 1
    assert re.search(error, capsys.readouterr().err)


def test_missing_data_set_is_named(inside, tmp_path, monkeypatch, capsys):
    shutil.copy(inside / "params.yaml", tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    assert main(["--stage", "train.teacher"]) == 1
    error = capsys.readouterr().err
    assert (
        "reads data from artifacts/prepare_data/dataset, which does not exist" in error
        and "make run" in error
    )


@pytest.mark.parametrize(
    "arguments", [[], ["baseline"], ["baseline", "--stage", "distill"], ["--target", "x"]]
)
def test_half_of_a_question_is_refused(capsys, arguments):
    with pytest.raises(SystemExit):
        main(arguments)
    assert (
        "expected an engine, as in `pruned_qat --target cpu_openvino`, or a training"
        in capsys.readouterr().err
    )


def test_number_that_counts_nothing_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--stage", "distill", "--steps", "0"])
    assert "'0', expected an integer of 1 or more" in capsys.readouterr().err
