"""Stages that are left out, and what stands for them."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from flows.check_network import main as check_network_main
from flows.networks import build_declared, check_networks, check_recorded
from flows.params import compose_params
from flows.pipeline import RecordedStages, run_pipeline
from flows.preflight import check_models
from tasks.core.errors import ArtifactError, ConfigError
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.foreign_code import code_sha256
from tests.conftest import REPOSITORY

OWN = (
    "network@train.baseline.network=custom",
    "train.baseline.network.file=my_networks/gated.py",
    "train.baseline.network.factory=build",
)
SEARCHED = {"search_pruning", "rank_groups", "prune", "finetune"}
RECORDING = Path("artifacts/record_teacher/recording")
FINISHED = "train.baseline.checkpoint=weights.safetensors"


def calls_of(*overrides: str) -> tuple[dict[str, dict[str, Path]], dict[str, Any]]:
    params = compose_params(("steps.teacher=true", *overrides))
    plan = RecordedStages()
    run_pipeline(plan, params)
    return plan.calls, params


@pytest.mark.parametrize(
    ("overrides", "gone", "student", "base"),
    [
        (("steps.teacher=false",), {"train.teacher", "record_teacher", "distill"}, "baseline", "pruned"),
        (("steps.record_teacher=false",), {"record_teacher"}, "distilled", "pruned"),
        (("steps.distillation=false",), {"distill", "record_teacher"}, "baseline", "pruned"),
        (("steps.pruning=false",), SEARCHED, "distilled", "distilled"),
        (("steps.quantize_aware_train=false",), {"quantize_aware_train"}, "distilled", "pruned"),
        ((FINISHED,), {"train.baseline", "distill", "record_teacher"}, "baseline", "pruned"),
        (
            (FINISHED, "steps.teacher=false", "steps.pruning=false", "steps.quantize_aware_train=false"),
            {
                "train.teacher",
                "train.baseline",
                "record_teacher",
                "distill",
                "quantize_aware_train",
                *SEARCHED,
            },
            "baseline",
            "baseline",
        ),
    ],
)
def test_what_is_left_out_is_neither_called_nor_named(
    overrides: tuple[str, ...], gone: set[str], student: str, base: str
) -> None:
    whole, (calls, params) = calls_of()[0], calls_of(*overrides)
    stages = {
        address
        for address in whole
        if address.split(".")[0] not in ("build_engine", "validate", "diff_layers", "export_onnx")
    }
    assert stages - set(calls) == gone
    made = {f"artifacts/{address.replace('.', '/')}" for address in calls}
    for address, inputs in calls.items():
        for path in inputs.values():
            is_input = str(path) in ("data/digit_scenes", "weights.safetensors")
            above = {str(path), *map(str, path.parents)}
            assert (
                is_input
                or "*" in str(path)
                or above & made
                or any(place.startswith(f"{path}/") for place in made)
            ), (address, path)
    selection = params["select_engine"]
    assert selection["ladder"][0] == selection["float_reference"]["variant"] == student
    assert params["pipeline"]["graph"] == f"artifacts/export_onnx/{base}/model.onnx"
    rungs = [
        rung
        for rung in ("fp16", "ptq", "repaired", "partial", "qat")
        if rung != "qat" or "quantize_aware_train" in calls
    ]
    assert selection["ladder"][-len(rungs) :] == [f"{base}_{rung}" for rung in rungs]
    assert selection["parents"] == {f"{base}_{rung}": base for rung in rungs}


@pytest.mark.parametrize(
    ("overrides", "table"),
    [
        ((), "artifacts/rank_groups/sensitivity.csv"),
        (("prune.ranking=across_layers",), "artifacts/distill/model.safetensors"),
        (("prune.ranking=uniform", "steps.teacher=false"), "artifacts/train/baseline/model.safetensors"),
        (
            ("prune.ranking=uniform", "search_pruning.pruning.ranking=sensitivity"),
            "artifacts/rank_groups/sensitivity.csv",
        ),
        (
            ("prune.method=blocks", "search_pruning.pruning.ranking=uniform"),
            "artifacts/distill/model.safetensors",
        ),
    ],
)
def test_pruning_waits_for_the_table_of_sensitivities_only_where_it_is_read(
    overrides: tuple[str, ...], table: str
) -> None:
    """Elsewhere the checkpoint stands in for it, on which both stages depend anyway."""
    calls, _ = calls_of(*overrides)
    order = list(calls)
    for stage in ("search_pruning", "prune"):
        assert str(calls[stage]["sensitivity"]) == table
        assert order.index("rank_groups") < order.index(stage)


def test_a_float_network_teaches_what_is_made_from_it_where_there_is_no_teacher() -> None:
    calls, _ = calls_of("steps.teacher=false")
    assert str(calls["finetune"]["teacher"]) == "artifacts/train/baseline/model.safetensors"
    assert str(calls["quantize_aware_train"]["teacher"]) == "artifacts/finetune/model.safetensors"


def test_finished_teacher_teaches_a_student_in_training() -> None:
    calls, params = calls_of("train.teacher.checkpoint=weights.safetensors")
    assert str(calls["record_teacher"]["teacher"]) == "artifacts/import_checkpoint/teacher/model.safetensors"
    assert set(params["import_checkpoint"]) == {"teacher"} and set(params["train"]) == {"baseline"}


def test_network_without_engines_is_trained_all_the_same() -> None:
    deleted = [f"~{group}.teacher" for group in ("pipeline.exports", "variants")]
    calls, params = calls_of(*deleted)
    assert "train.teacher" in calls and "export_onnx.teacher" not in calls
    assert str(calls["record_teacher"]["teacher"]) == "artifacts/train/teacher/model.safetensors"
    assert not any(engine["variant"] == "teacher" for engine in params["engines"].values())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("steps.pruning=3",), r"steps.pruning is 3, expected true or false"),
        (
            ("train.teacher.checkpoint=t.safetensors",),
            r"steps.teacher is false, so nothing would read it. Add steps.teacher=true",
        ),
        (
            ("network@train.teacher.network=dinov2",),
            r"^network@train.teacher.network=dinov2 changes nothing, because steps.teacher is false. Add steps.t",
        ),
        (("++distill.trainer.max_epochs=9",), r"distill.trainer.max_epochs=9 changes nothing"),
        (
            ("train.baseline.checkpoint='my weights.pt'",),
            r"train.baseline.checkpoint is 'my weights.pt', which becomes",
        ),
        (("steps.prune=false",), r"steps"),
        (("steps=x",), r"^steps is 'x', expected its keys: steps.<key>=<value>"),
        (
            ("train.baseline.network=segformer",),
            r"^train.baseline.network is 'segformer', expected .* network@train.baseline.network=segformer",
        ),
        (("select_engine.ladder=[teacher]",), r"ladder"),
        (("train.baseline.network.file=a/b.py",), r"override .train.baseline.network.file"),
        (
            ("network@train.baseline.network=custom",),
            r"^train.baseline.network.file is None and factory is None",
        ),
        (
            ("network@train.baseline.network=transformers",),
            r"^train.baseline.network.arguments has no model_type",
        ),
        (
            ("data=city",),
            r"Could not find 'data/city' Available options in 'data': ade20k, cityscapes, .*, voc\. See",
        ),
    ],
)
def test_contradictions_are_refused(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        compose_params(overrides)


def test_missing_weights_are_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    params = compose_params([FINISHED])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"weights.safetensors is missing.*\(train.baseline.checkpoint\)"):
        check_models(params)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A git repository with the networks of the tests, committed."""
    shutil.copytree(
        REPOSITORY / "tests/tasks/foreign_networks",
        tmp_path / "my_networks",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    monkeypatch.chdir(tmp_path)
    git("init", "--quiet")
    git("add", ".")
    git("-c", "user.name=Tests", "-c", "user.email=tests@localhost", "commit", "--quiet", "-m", "Networks")
    return tmp_path


def git(*command: str) -> None:
    subprocess.run(["git", *command], check=True)


def test_foreign_network_loses_the_sizes_of_our_own_unless_they_were_asked_for(checkout: Path) -> None:
    network = compose_params([*OWN, "debug=smoke"])["train"]["baseline"]["network"]
    assert (network["name"], network["width"], network["depth"]) == ("custom", None, None)
    with pytest.raises(ConfigError, match=r"train.baseline.network.*width is 2.0"):
        compose_params([*OWN, "train.baseline.network.width=2.0"])


def test_network_of_a_named_size_has_that_size_unless_another_was_asked_for() -> None:
    b2 = "network@train.baseline.network=segformer_b2"
    network = compose_params([b2, "debug=smoke"])["train"]["baseline"]["network"]
    assert (network["arguments"], network["width"], network["depth"]) == ({"size": "b2"}, 1.0, 1.0)
    halved = compose_params(["steps.teacher=true", b2, "train.baseline.network.depth=0.5"])
    assert halved["train"]["baseline"]["network"]["depth"] == halved["distill"]["network"]["depth"] == 0.5


def test_networks_of_this_package_read_other_channels_too_c5() -> None:
    params = compose_params(["data=folder", "prepare_data.folder.channels=5", "steps.teacher=true"])
    for name in ("teacher", "baseline"):
        network = build_declared(params, name, 3)
        assert network is not None and network.image_channels == 5


@pytest.mark.parametrize("name", ["gated.py", "layers.py"])
def test_code_of_a_network_is_tracked_by_git(checkout: Path, name: str) -> None:
    git("rm", "--quiet", "--cached", f"my_networks/{name}")
    with pytest.raises(
        ConfigError, match=rf"my_networks/{name} is not tracked by git.*train.baseline.network.file"
    ):
        compose_params(OWN)


def test_network_is_tried_before_anything_runs_and_anew_when_it_was_edited(
    checkout: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check_networks(compose_params(OWN))
    assert check_network_main([*OWN, "steps.teacher=false"]) == 0
    told = capsys.readouterr().out
    assert "in training only: network.auxiliary" in told and "network.grouped" in told, told
    assert "network.wide.0, because of network.scale, a parameter of shape [1, 64, 1, 1]" in told, told
    file = checkout / "my_networks/gated.py"
    file.write_text(
        file.read_text().replace("def build(num_classes: int,", "def build(num_classes: int, heads: int,")
    )
    with pytest.raises(
        ConfigError, match=r"^train.baseline.network: network custom .* cannot be built with.*heads"
    ):
        check_networks(compose_params(OWN))
    assert check_network_main([*OWN, "data=ade20k", "steps.teacher=false"]) == 1
    assert "the number of classes is unknown" in capsys.readouterr().err


def test_model_of_the_user_has_no_network_to_try() -> None:
    check_networks(compose_params(["model=onnx", "model.path=model.onnx", "data=folder"]))


def test_checkout_with_other_code_is_refused(checkout: Path) -> None:
    params = compose_params(OWN)
    config = NetworkConfig(NetworkName.custom, None, None, False, "my_networks/gated.py", "build")
    facts = {"train": {"baseline": {"network": code_sha256(config), "torch": "2"}, "teacher": {"torch": "2"}}}
    check_recorded(params, facts, checkout, "0123456789abcdef")
    (checkout / "my_networks/layers.py").write_text("")
    with pytest.raises(ArtifactError, match=r"gated.py: commit 0123456789ab holds other code of the network"):
        check_recorded(params, facts, checkout, "0123456789abcdef")
    shutil.rmtree(checkout / "my_networks")
    with pytest.raises(ArtifactError, match=r"gated.py: commit 0123456789ab holds other code of the network"):
        check_recorded(params, facts, checkout, "0123456789abcdef")


def test_a_teacher_is_recorded_for_the_views_of_those_that_learn_from_it() -> None:
    taught = "finetune.distillation.channel_wise_weight=1"
    calls, params = calls_of(taught, "record_teacher.num_views=3", "record_teacher.horizontal_flip=0.5")
    assert calls["finetune"]["teacher"] == calls["distill"]["teacher"] == RECORDING
    assert params["finetune"]["trainer"]["num_views"] == params["record_teacher"]["num_views"] == 3
    live, shown = calls_of(taught, "steps.record_teacher=false")
    assert live["distill"]["teacher"] == Path("artifacts/train/teacher/model.safetensors")
    assert shown["finetune"]["trainer"]["num_views"] is None  # ever new views
    alone, _ = calls_of("distill.distillation.channel_wise_weight=0")
    assert "record_teacher" not in alone  # nothing learns from it
    with pytest.raises(
        ConfigError, match=r"finetune\.trainer\.brightness is 0\.1, and the teacher is recorded"
    ):
        calls_of(taught, "finetune.trainer.brightness=0.1")
    calls_of("finetune.trainer.brightness=0.1")  # on labels alone


def test_the_student_begins_with_the_weights_of_the_baseline_unless_told_otherwise() -> None:
    baseline = Path("artifacts/train/baseline/model.safetensors")
    other = ("distill.network={name: fast_scnn, width: 1.0, depth: 1.0, depthwise: false}",)
    calls, _ = calls_of()
    assert calls["distill"]["start"] == baseline
    fresh, _ = calls_of("distill.start=fresh", *other)
    assert fresh["distill"]["start"] == RECORDING  # which is read anyway
    with pytest.raises(ConfigError, match=r"distill\.start is baseline, .*Set distill\.start=fresh"):
        calls_of(*other)
