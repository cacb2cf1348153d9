"""Composing conf/ into params.yaml."""

import contextlib
import copy
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.params import DVC_FILE, compose_params, keep_targets, write_params
from flows.pipeline import RecordedStages, run_pipeline
from flows.preflight import check_models
from flows.templates import check_templates
from tasks.core.config import read_params
from tasks.core.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def defaults() -> dict[str, Any]:
    """The composed defaults."""
    return compose_params()


def test_machine_is_measured_for_runtimes_of_checkpoints_on_request_and_explains_nothing(
    defaults: dict[str, Any],
) -> None:
    assert set(defaults["measure_machine"]) == set(defaults["explain"]) and defaults["explain"]
    params = compose_params(["measure_machine.checkpoint_targets=true"])
    assert params["explain"] == defaults["explain"]
    assert set(params["measure_machine"]) - set(params["explain"]) == {"cpu_torch"}
    plan = RecordedStages()
    run_pipeline(plan, params)
    assert "measure_machine.cpu_torch" in plan.calls and "explain.cpu_torch" not in plan.calls


@pytest.mark.parametrize(
    ("overrides", "target"),
    [
        ((), "cpu_onnxruntime"),
        (("search_pruning.target=cpu_openvino",), "cpu_openvino"),
        (("target=[cpu_torch,cpu_openvino]",), "cpu_openvino"),
        (("target=[cpu_torch]",), "cpu_torch"),
    ],
)
def test_pruning_is_searched_on_the_named_target_or_the_first_that_reads_graphs(
    overrides: tuple[str, ...], target: str
) -> None:
    params = compose_params([*overrides, f"target.{target}.num_threads=3"])
    assert params["search_pruning"]["target"] == params["build_engine"][target]
    assert params["search_pruning"]["target"]["num_threads"] == 3


@pytest.mark.parametrize(
    ("override", "text"),
    [
        ("search_pruning.target=cpu_tpu", r"search_pruning\.target is cpu_tpu, .* \[cpu_torch, cpu_onnx"),
        ("search_pruning.target_macs_ratios=[]", r"search_pruning\.target_macs_ratios is \[\]"),
        (
            "search_pruning.pruning.num_steps=0",
            r"^search_pruning\.pruning\.num_steps is 0, expected an integer",
        ),
        ("prune.num_steps=0", r"^prune\.num_steps is 0"),
        ("quantize_ptq.op_types=[Add]", r"^quantize_ptq\.op_types is \['Add'\], expected a list with Conv"),
        ("target.cpu_onnxruntime.num_threads=0", r"^target\.cpu_onnxruntime\.num_threads is 0"),
        ("target.cpu_openvino.precision=f16", r"^target\.cpu_openvino\.precision is f16, expected f32"),
        ("train.baseline.trainer.max_epochs=0", r"max_epochs is 0, expected an integer of at least 1"),
        ("train.baseline.trainer.max_epochs=many", r"train\.baseline\.trainer\.max_epochs"),
        ("train.baseline.trainer.precision=fp8", r"fp32, bf16_mixed, fp16_mixed"),
        ("prune.target_macs_ratio=1.5", r"target_macs_ratio"),
        ("network@train.baseline.network=resnet9000", r"resnet9000"),
        ("+quantise=x", r"quantise"),
        ("target=[cpu_tpu]", r"cpu_tpu"),
        ("benchmark.min_rounds=4", r"^benchmark\.min_rounds is 4"),
        ("select_engine.max_score_rel_loss=1", r"^select_engine\.max_score_rel_loss is 1"),
        ("select_engine.max_boundary_iou_rel_loss=-1", r"^select_engine\.max_boundary_iou_rel_loss is -1"),
        ("rank_groups.ratios=[0.5,0.5]", r"rank_groups\.ratios is \[0\.5, 0\.5\]"),
        (
            "select_engine.ladder=[baseline,prunned]",
            r"select_engine\.ladder names prunned, .*variant: \[baseline, pruned, pruned_fp16, ",
        ),
        (
            "select_engine.techniques=[{name: INT8, before: pruned, after: ptq}]",
            r"select_engine\.techniques names ptq, .*variant: \[baseline, ",
        ),
        ("model=onnx", r"model\.path is missing"),
        ("data=images", r"data is images, which has no masks, but .*model=onnx"),
        (
            "target=[cpu_openvino]",
            r"It has to include cpu_torch: the variant `baseline` on it is the reference",
        ),
        (
            "target=[cpu_torch,h200_tensorrt]",
            r"^target is \[cpu_torch, h200_tensorrt\]\. For h200_tensorrt it has to include cuda_torch as well: "
            r"speed-ups on cuda refer to the variant `baseline`.*Set target=\[cpu_torch,h200_tensorrt,cuda_torch\]\.",
        ),
        ("target=[cpu_torch,cuda_onnxruntime]", r"it has to include cuda_torch"),
        ("target=[cpu_torch,cuda_aotinductor]", r"it has to include cuda_torch"),
    ],
)
def test_mistake_is_refused_with_its_key(override: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        compose_params([override])


def references(*overrides: str) -> dict[str, str]:
    items = compose_params(overrides)["pipeline"]["references"]
    for item in items.values():
        assert Path(item["engine"]).parts[-2] == item["target"]
    return {target: item["target"] for target, item in items.items()}


def test_speed_ups_refer_to_eager_pytorch_on_the_device_of_the_target() -> None:
    found = references(
        "target=[cpu_torch,cpu_openvino,cuda_torch,cuda_onnxruntime,h200_tensorrt,l4_tensorrt]"
    )
    on_cpu = {"cpu_torch": "cpu_torch", "cpu_openvino": "cpu_torch"}
    on_gpu = dict.fromkeys(("cuda_torch", "cuda_onnxruntime", "h200_tensorrt", "l4_tensorrt"), "cuda_torch")
    assert found == on_cpu | on_gpu


def test_speed_ups_of_an_imported_model_refer_to_its_float_graph_in_onnx_runtime_on_the_device() -> None:
    own = ("model=onnx", "model.path=mine.onnx", "data=class_folder")
    assert set(references(*own).values()) == {"cpu_onnxruntime"}
    with pytest.raises(ConfigError, match=r"it has to include cuda_onnxruntime as well"):
        compose_params([*own, "target=[cpu_onnxruntime,h200_tensorrt]"])
    found = references(*own, "target=[cpu_onnxruntime,cuda_onnxruntime,h200_tensorrt]")
    assert found["h200_tensorrt"] == "cuda_onnxruntime"
    itself = (*own, "target=[cpu_onnxruntime,h200_tensorrt]", "pipeline.speed_references.cuda=h200_tensorrt")
    assert references(*itself) == {"cpu_onnxruntime": "cpu_onnxruntime", "h200_tensorrt": "h200_tensorrt"}


def test_float_reference_is_the_reference_of_speed_on_its_own_device() -> None:
    alone = references("target=[cuda_torch,h200_tensorrt]", "select_engine.float_reference.target=cuda_torch")
    assert set(alone.values()) == {"cuda_torch"}
    other = references(
        "target=[cpu_onnxruntime,cpu_openvino]", "select_engine.float_reference.target=cpu_openvino"
    )
    assert set(other.values()) == {"cpu_openvino"}


def test_reference_of_speed_on_another_device_is_refused() -> None:
    overrides = ["target=[cpu_torch,cuda_torch]", "pipeline.speed_references.cuda=cpu_torch"]
    with pytest.raises(
        ConfigError, match=r"^pipeline\.speed_references\.cuda is cpu_torch, which runs on cpu, expected"
    ):
        compose_params(overrides)


@pytest.mark.parametrize(
    "stage",
    [
        "quantize_ptq",
        "rank_layers",
        "check_int8",
        "quantize_repaired",
        "quantize_partial",
        "quantize_aware_train",
    ],
)
@pytest.mark.parametrize("name", ["Averagepool", "Softmax"])
def test_operator_that_cannot_read_int8_is_refused_with_those_that_can(stage: str, name: str) -> None:
    text = rf"{stage}\.op_types\[1\] is '{name}', expected one of Conv, ConvTranspose, MatMul, .*AveragePool"
    with pytest.raises(ConfigError, match=text):
        compose_params([f"{stage}.op_types=[Conv,{name}]"])


def test_images_without_labels_are_measured_by_what_the_float_model_says() -> None:
    params = compose_params(["model=onnx", "model.path=mine.onnx", "data=images", "debug=smoke"])
    assert params["pipeline"]["data"] == "artifacts/label_images/dataset"
    assert params["pipeline"]["imports"] == {"model": "mine.onnx"}
    assert {engine["variant"] for engine in params["engines"].values()} == {
        "imported",
        "imported_fp16",
        "imported_ptq",
        "imported_repaired",
        "imported_partial",
    }
    assert "train" not in params and "quantize_aware_train" not in params


OWN = ("model=onnx", "model.path=mine.onnx")


def test_metric_of_one_s_own_is_attached_to_the_data_that_engines_are_measured_on() -> None:
    params = compose_params([*OWN, "data=images", "model.metric=flows/params.py:compose_params"])
    labelled = "artifacts/label_images/dataset"
    assert params["pipeline"]["metrics"] == {"own": {"file": "flows/params.py", "data": labelled}}
    assert params["pipeline"]["data"] == "artifacts/attach_metric/dataset"
    assert params["attach_metric"]["function"] == "compose_params"
    assert "attach_metric" not in compose_params([*OWN, "data=images"])


def test_trainings_and_what_follows_read_the_data_with_the_metric_c5() -> None:
    params = compose_params(["model.metric=flows/params.py:compose_params", "steps.teacher=true"])
    plan = RecordedStages()
    run_pipeline(plan, params)
    prepared, attached = (Path(f"artifacts/{stage}/dataset") for stage in ("prepare_data", "attach_metric"))
    assert list(plan.calls)[1] == "attach_metric" and plan.calls["attach_metric"]["data"] == prepared
    of_images = {name for name, inputs in plan.calls.items() if inputs.get("data") == prepared}
    assert of_images == {"attach_metric", "record_teacher"}, "a recording does not depend on the metric"
    assert {inputs["data"] for name, inputs in plan.calls.items() if "data" in inputs} == {prepared, attached}
    assert "attach_metric" not in compose_params()


def test_metric_is_refused_where_engines_have_no_logits_c5() -> None:
    coarse = [f"target.cpu_onnxruntime.{key}" for key in ("gives=classes", "coarse_classes=true")]
    text = r"target\.cpu_onnxruntime\.coarse_classes is true, and model\.metric is .*, which reads logits"
    for pipeline in ([], [*OWN, "data=folder"]):
        compose_params([*pipeline, *coarse])
        with pytest.raises(ConfigError, match=text):
            compose_params([*pipeline, *coarse, "model.metric=flows/params.py:compose_params"])


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("(logits.argmax(1) == masks).mean()", r"returned float64 \[\] for 2 images.*Do not average"),
        ("logits.max(axis=(1, 2, 3))", r"returned 8 for an image, expected a score from 0"),
        ("(logits.argmax(1) == masks).mean(axis=(1, 2))", None),
    ],
)
def test_metric_is_tried_before_the_first_stage_c5(
    body: str, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    Path("metrics.py").write_text(f"def score(logits, masks):\n    return {body}\n", encoding="utf-8")
    subprocess.run(["git", "add", "metrics.py"], check=True)
    with pytest.raises(DataError, match=text) if text else contextlib.nullcontext():
        check_models(compose_params(["model.metric=metrics.py:score"]))
    with pytest.raises(ConfigError, match=r"metrics\.py: has no function 'dice', found: score"):
        check_models(compose_params(["model.metric=metrics.py:dice"]))


@pytest.mark.parametrize(
    ("metric", "text"),
    [
        ("dice", r"model\.metric is dice, expected <file>:<function>"),
        ("../metrics.py:dice", r"with a file of this workspace"),
        ("metrics.py:dice!", r"expected <file>:<function>"),
        ("metrics.py:dice", r"metrics\.py is missing, expected a Python file with the function dice"),
    ],
)
def test_metric_that_cannot_be_found_is_refused(metric: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        compose_params([*OWN, "data=images", f"model.metric='{metric}'"])


def test_metric_that_git_does_not_track_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "-q"], check=True)
    Path("metrics.py").write_text("def dice(outputs, labels): ...\n", encoding="utf-8")
    overrides = [*OWN, "data=images", "model.metric=metrics.py:dice"]
    with pytest.raises(ConfigError, match=r"metrics\.py is not tracked by git.*git add metrics\.py"):
        compose_params(overrides)
    subprocess.run(["git", "add", "metrics.py"], check=True)
    assert compose_params(overrides)["attach_metric"]["function"] == "dice"


def test_values_need_the_float_model_s_answers_or_a_metric_of_one_s_own() -> None:
    values = [*OWN, "model.output_kind=values", "data=class_folder"]
    with pytest.raises(ConfigError, match=r"data is class_folder, whose labels say nothing about values"):
        compose_params(values)
    params = compose_params([*values, "model.metric=flows/params.py:compose_params"])
    assert params["pipeline"]["metrics"]["own"]["data"] == "artifacts/prepare_data/dataset"


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["prepare_data.root='my photos'"],
            r"^prepare_data\.root is 'my photos', which becomes part of a command",
        ),
        (["prepare_data.root='data;touch x'"], r"^prepare_data\.root is 'data;touch x'"),
        (["prepare_data.root='data/größe'"], r"letters without accents"),
        (
            ["model=onnx", "model.path='$(touch x).onnx'", "data=class_folder"],
            r"^model\.path is '\$\(touch x\)\.onnx'.*Rename the file",
        ),
    ],
)
def test_path_that_a_shell_would_not_take_as_one_word_is_refused(overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        compose_params(overrides)


@pytest.mark.parametrize(
    "change",
    [
        lambda params, bad: params["pipeline"].update(data=bad),
        lambda params, bad: params["pipeline"].update(graph=bad),
        lambda params, bad: params["pipeline"].update(reference_graph=bad),
        lambda params, bad: params["pipeline"].update(reference_engine=bad),
        lambda params, bad: params["pipeline"]["pruning"]["student"].update(checkpoint=bad),
        lambda params, bad: params["pipeline"]["quantization_aware"]["student"].update(teacher=bad),
        lambda params, bad: params["pipeline"]["checkpoints"].update(baseline=bad),
        lambda params, bad: params["pipeline"]["networks"].append(bad),
        lambda params, bad: params["pipeline"]["exports"].update(pruned=bad),
        lambda params, bad: params["pipeline"]["exports"].update({bad: "model.safetensors"}),
        lambda params, bad: params["pipeline"]["unlabelled"].update(images=bad),
        lambda params, bad: params["pipeline"]["metrics"].update(own={"file": bad, "data": "data"}),
        lambda params, bad: params["pipeline"]["metrics"].update(own={"file": "metrics.py", "data": bad}),
        lambda params, bad: params["engines"].update({bad: params["engines"]["pruned-cpu_torch"]}),
        lambda params, bad: params["engines"]["pruned-cpu_torch"].update(variant=bad),
        lambda params, bad: params["engines"]["pruned-cpu_torch"].update(target=bad),
        lambda params, bad: params["engines"]["pruned-cpu_torch"].update(model=bad),
        lambda params, bad: params["engines"]["pruned-cpu_torch"].update(float_graph=bad),
        lambda params, bad: params["pipeline"]["references"]["cpu_torch"].update(engine=bad),
        lambda params, bad: params["pipeline"]["references"].update({bad: {}}),
    ],
)
def test_every_value_that_dvc_puts_into_a_command_or_path_is_checked(
    defaults: dict[str, Any], change: Callable[[dict[str, Any], str], None]
) -> None:
    params = copy.deepcopy(defaults)
    check_templates(params, DVC_FILE)
    change(params, "x; touch y")
    with pytest.raises(ConfigError, match=r"'x; touch y', which becomes part of a command"):
        check_templates(params, DVC_FILE)


@pytest.mark.parametrize(
    "uri", ["http://me:secret@mlflow:5000", "postgresql://db/mlflow?user=me&password=secret"]
)
def test_password_is_not_written(tmp_path: Path, uri: str) -> None:
    params = compose_params([f"track.uri='{uri}'"])
    with pytest.raises(
        ConfigError, match=r"would hold a password: uri: .*MLFLOW_TRACKING_PASSWORD"
    ) as refused:
        write_params(params, tmp_path / "params.yaml")
    assert "secret" not in str(refused.value) and not list(tmp_path.iterdir())


def test_sections_that_had_other_values_are_named(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    first, second = compose_params(), compose_params(["finetune.trainer.seed=1"])
    assert write_params(first, file) == []
    assert write_params(second, file) == ["finetune"]
    assert write_params(second, file) == []
    for damaged in ("", "prepare_data", "prepare_data: [", "- prepare_data\n"):
        file.write_text(damaged)
        assert write_params(first, file) == [] and read_params(file) == first


def test_changes_are_tried_only_for_the_variant_that_is_named(defaults: dict[str, Any]) -> None:
    assert "try_changes" not in defaults and defaults["pipeline"]["trials"] == {}
    params = compose_params(["try_changes.variant=pruned_ptq", "target=[cpu_torch,cpu_openvino]"])
    assert params["pipeline"]["trials"] == {"cpu_openvino": "artifacts/quantize_ptq/model.onnx"}
    section = params["try_changes"]["cpu_openvino"]
    assert (section["variant"], section["parent"]) == ("pruned_ptq", "pruned")
    assert section["target"] == params["build_engine"]["cpu_openvino"]
    assert compose_params(["try_changes.variant=pruned"])["try_changes"]["cpu_openvino"]["parent"] is None
    kept = keep_targets(params, ["cpu_torch"])
    assert not kept["pipeline"]["trials"] and not kept["try_changes"]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["try_changes.variant=ptq"], r"try_changes\.variant is ptq, which no target builds .* pruned_ptq"),
        (["try_changes.variant=pruned", "try_changes.num_changes=0"], r"try_changes\..*num_changes is 0"),
    ],
)
def test_changes_that_cannot_be_tried_are_refused(overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        compose_params(overrides)


def test_engines_are_measured_under_load_only_if_they_are_named(defaults: dict[str, Any]) -> None:
    assert defaults["measure_load"] == {} and defaults["select_engine"]["loaded"] == []
    assert defaults["pipeline"]["loads"] == "artifacts/benchmark"  # exists, and nothing is read from it
    overrides = ["measure_load.variants=[pruned_ptq]", "measure_load.together=[pruned_ptq,baseline]"]
    params = compose_params([*overrides, "target=[cpu_torch,cpu_openvino]"])
    assert list(params["measure_load"]) == ["cpu_openvino"]  # cpu_torch does not run quantized graphs
    section = params["measure_load"]["cpu_openvino"]
    assert (section["variants"], section["together"]) == (["pruned_ptq"], ["pruned_ptq", "baseline"])
    assert params["select_engine"]["loaded"] == ["cpu_openvino"]
    assert params["pipeline"]["loads"] == "artifacts/measure_load"
    plan = RecordedStages()
    run_pipeline(plan, params)
    assert "measure_load.cpu_openvino" in plan.calls and "measure_load.cpu_torch" not in plan.calls
    kept = keep_targets(params, ["cpu_torch"])
    assert kept["measure_load"] == {} and kept["pipeline"]["loads"] == "artifacts/benchmark"
    everything = compose_params(["measure_load.variants=all"])
    for target, loaded in everything["measure_load"].items():
        assert loaded["variants"] == everything["benchmark"][target]["variants"]


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["measure_load.variants=[ptq]"],
            r"measure_load\.variants has ptq, which no target builds.*pruned_ptq",
        ),
        (["measure_load.variants=pruned_ptq"], r"measure_load\.variants is 'pruned_ptq', expected a list"),
        (["measure_load.together=[pruned]"], r"measure_load\.together is \['pruned'\], .* is null"),
        (["measure_load.variants=all", "measure_load.together=[ptq]"], r"measure_load\.together has ptq"),
        (["measure_load.variants=all", "measure_load.max_p99_ms=0"], r"measure_load\..*max_p99_ms is 0"),
        (["measure_load.variants=all", "measure_load.lanes=[1,1]"], r"measure_load\..*lanes"),
    ],
)
def test_loads_that_cannot_be_measured_are_refused(overrides: list[str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        compose_params(overrides)


def test_report_reads_explanations_only_of_targets_that_have_some(defaults: dict[str, Any]) -> None:
    assert defaults["select_engine"]["explained"] == list(defaults["explain"])
    assert defaults["pipeline"]["explanations"] == "artifacts/explain"
    kept = keep_targets(defaults, ["cpu_torch"])
    assert (
        kept["select_engine"]["explained"] == [] and kept["pipeline"]["explanations"] == "artifacts/benchmark"
    )


def test_products_of_activations_are_quantized_by_all_stages_on_request_a6(defaults: dict[str, Any]) -> None:
    stages = [name for name, section in defaults.items() if "op_types" in section]
    assert {"quantize_ptq", "quantize_repaired", "quantize_partial", "rank_layers", "check_int8"} <= {*stages}
    params = compose_params(["quantize_ptq=products"])
    for name in stages:
        before, after = defaults[name]["op_types"], params[name]["op_types"]
        assert [op_type for op_type in after if op_type != "BatchMatMul"] == before != after
