"""The two drivers, the configuration and the digests say the same."""

import importlib
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from dvc.repo import Repo

from flows.exchange import STAGE_COMMAND
from flows.params import compose_params, write_params
from flows.pipeline import RecordedStages, run_pipeline
from flows.stage_task import stage_command
from tasks.core.config import find_section, read_params
from tasks.core.environment import ENVIRONMENT_FILE
from tasks.core.fingerprint import code_digests, digest
from tasks.parts.selection.run_records import TRAININGS
from tests.conftest import REPOSITORY, Workspace, copy_repository

OVERRIDES = {
    "trained": [],
    "trained, changes tried": ["try_changes.variant=pruned_ptq"],
    "trained, under load": [
        "measure_load.variants=[pruned_ptq]",
        "measure_load.together=[pruned,pruned_ptq]",
    ],
    "CPU and GPU": ["target=[cpu_torch,cpu_openvino,cuda_torch,h200_tensorrt]"],
    "distilled": ["steps.teacher=true"],
    "ranked across layers, distilled from random weights": [
        "steps.teacher=true",
        "prune.ranking=across_layers",
        "distill.start=fresh",
        "steps.record_teacher=false",
    ],
    "no pruning, no QAT": ["steps.pruning=false", "steps.quantize_aware_train=false"],
    "finished student": ["train.baseline.checkpoint=weights.safetensors"],
    "finished networks": [
        "steps.teacher=true",
        "train.teacher.checkpoint=teacher.safetensors",
        "train.baseline.checkpoint=weights.safetensors",
        "steps.pruning=false",
    ],
    "onnx": ["model=onnx", "model.path=model.onnx", "data=folder"],
    "quantized onnx": ["model=onnx_quantized", "model.path=model.onnx", "data=folder"],
    "own metric": ["model.metric=flows/params.py:compose_params", "steps.teacher=true"],
    "onnx without labels": ["model=onnx", "model.path=model.onnx", "data=images"],
}


@pytest.fixture(scope="module", params=OVERRIDES)
def space(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Workspace:
    """A copy of the repository with the params.yaml of one way to run it."""
    copied = copy_repository(tmp_path_factory.mktemp("agreement"))
    write_params(compose_params(OVERRIDES[request.param]), copied.path / "params.yaml")
    return copied


@pytest.fixture(scope="module")
def params(space: Workspace) -> dict[str, Any]:
    return read_params(space.path / "params.yaml")


@pytest.fixture(scope="module")
def flow_calls(params: dict[str, Any]) -> dict[str, dict[str, Path]]:
    stages = RecordedStages()
    run_pipeline(stages, params)
    return stages.calls


@pytest.fixture(scope="module")
def dvc_stages(space: Workspace) -> Iterator[dict[str, Any]]:
    """Every stage of dvc.yaml as DVC resolves it, by address."""
    with Repo(str(space.path)) as repo:
        commands = {stage: shlex.split(stage.cmd) for stage in repo.index.stages}
        yield {words[3]: stage for stage, words in commands.items() if words[:3] == STAGE_COMMAND}


def test_params_are_what_conf_composes() -> None:
    assert read_params(REPOSITORY / "params.yaml") == compose_params()


def test_import_linter_keeps_every_stage_independent() -> None:
    contracts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["importlinter"][
        "contracts"
    ]
    row = next(layer for layer in contracts[0]["layers"] if "tasks.train " in layer)
    named = set(re.findall(r"tasks\.(\w+)", row))
    stages = {file.stem for file in (REPOSITORY / "tasks").glob("[!_]*.py")}
    assert named == stages, "the stages in the first contract of pyproject.toml"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], 16),
        (["target.cpu_openvino.channel_multiple=32"], 32),
        (["target=[cpu_torch,cpu_openvino]", "target.cpu_torch.channel_multiple=1"], 16),
        (["target.cpu_openvino.channel_multiple=32", "prune.channel_multiple=8"], 8),
    ],
)
def test_channel_multiple_is_the_largest_of_the_targets_unless_a_number_is_given(
    overrides: list[str], expected: int
) -> None:
    assert compose_params(overrides)["prune"]["channel_multiple"] == expected


def test_layer_ratios_are_given_by_dotted_names() -> None:
    override = "+prune.layer_ratios={context.1.expand.conv: 0.25}"
    params = compose_params([override])
    assert params["prune"]["layer_ratios"] == {"context.1.expand.conv": 0.25}
    assert params["search_pruning"]["pruning"]["layer_ratios"] == {"context.1.expand.conv": 0.25}
    params = compose_params([override, "prune.method=weights"])  # they may name what loses no channels
    assert params["search_pruning"]["pruning"]["layer_ratios"] == {}


def test_flow_and_dvc_have_the_same_commands(
    flow_calls: dict[str, dict[str, Path]], dvc_stages: dict[str, Any]
) -> None:
    from_flow = {address: stage_command(address, inputs) for address, inputs in flow_calls.items()}
    from_dvc = {address: shlex.split(stage.cmd) for address, stage in dvc_stages.items()}
    assert from_flow == from_dvc


def test_speed_ups_refer_to_the_float_engine_of_the_same_device(
    params: dict[str, Any], flow_calls: dict[str, dict[str, Path]]
) -> None:
    variant = params["select_engine"]["float_reference"]["variant"]
    for target, section in params["build_engine"].items():
        parts = flow_calls[f"benchmark.{target}"]["reference"].parts
        assert parts[2] == variant and parts[-1] == "engine"
        assert params["build_engine"][parts[3]]["device"] == section["device"]
        assert f"build_engine.{variant}.{parts[3]}" in flow_calls


def test_dvc_depends_on_the_inputs_and_on_the_imported_modules(
    space: Workspace, flow_calls: dict[str, dict[str, Path]], dvc_stages: dict[str, Any]
) -> None:
    for address, stage in dvc_stages.items():
        paths = {os.path.relpath(dep.fs_path, space.path) for dep in stage.deps if not hasattr(dep, "params")}
        inputs = {str(path).partition("/*")[0] for path in flow_calls[address].values()}
        assert inputs <= paths, address
        assert paths - inputs == set(code_digests(f"tasks.{address.split('.')[0]}")), address


def test_dvc_outputs_and_params_follow_from_the_address(
    space: Workspace, params: dict[str, Any], dvc_stages: dict[str, Any]
) -> None:
    for address, stage in dvc_stages.items():
        folder = Path("artifacts", *address.split("."))
        assert [os.path.relpath(out.fs_path, space.path) for out in stage.outs] == [str(folder)]
        sections = [section for dep in stage.deps if dep.def_path == "params.yaml" for section in dep.params]
        section = find_section(params, address)[0]
        assert sections == [section]
        facts = [name for dep in stage.deps if dep.def_path == str(ENVIRONMENT_FILE) for name in dep.params]
        module = importlib.import_module(f"tasks.{address.split('.')[0]}")
        assert facts == [section if hasattr(module, "environment") else "checked"], address


@pytest.mark.slow
def test_digests_are_those_in_dvc_lock(smoke_run: tuple[Workspace, str]) -> None:
    space, _ = smoke_run
    lock = yaml.safe_load((space.path / "dvc.lock").read_text())
    compared = 0
    for stage in lock["stages"].values():
        for entry in [*stage.get("deps", []), *stage["outs"]]:
            assert digest(space.path / entry["path"]) == entry["md5"], entry["path"]
            compared += 1
    assert compared > 100


def test_every_training_with_a_table_of_epochs_is_named_in_the_run_of_the_pipeline() -> None:
    stages = [path.stem for path in (REPOSITORY / "tasks").glob("[!_]*.py")]
    shown = {stage for stage in stages if hasattr(importlib.import_module(f"tasks.{stage}"), "CURVES")}
    assert shown == set(TRAININGS)
