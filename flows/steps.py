"""Leave stages of a training pipeline out, as `steps` and finished weights say, before params.yaml is checked."""

from collections.abc import Mapping, Sequence
from typing import Any

from tasks.core.errors import ConfigError
from tasks.distill import Start
from tasks.parts.pruning.config import Ranking
from tasks.parts.training.config import check_views

_IMPORTED = "artifacts/import_checkpoint/{}/model.safetensors"
_GRAPH = "artifacts/export_onnx/{}/model.onnx"
_SENSITIVITY = "artifacts/rank_groups/sensitivity.csv"
_RECORDING = "artifacts/record_teacher/recording"
_CHECKPOINTS = {
    "teacher": "artifacts/train/teacher/model.safetensors",
    "baseline": "artifacts/train/baseline/model.safetensors",
    "distilled": "artifacts/distill/model.safetensors",
    "pruned": "artifacts/finetune/model.safetensors",
}
"""Float network -> the file of its weights, if it is trained."""
_OF_A_TEACHER = (
    "train.teacher.",
    "distill.trainer",
    "distill.start",
    "distill.network",
    "distill.pretrained",
    "record_teacher.num_views",
    "record_teacher.stride",
    "record_teacher.has_features",
)
"""Keys that nothing reads without a teacher; others of distill and record_teacher are copied by other stages."""


def apply_steps(params: dict[str, Any], variants: dict[str, Any], steps: Mapping[str, Any]) -> dict[str, Any]:
    """Take what is not to run out of the sections, and return the variants that are left.

    A variant that is not made is stood for by the last float network before it: without pruning, the rungs of lower
    precision are those of the student, and without distillation the student is the baseline. What teaches is the
    teacher, else the float network itself, which its pruned or quantized form is to imitate.

    Raises ConfigError for steps that contradict each other.
    """
    for name, value in steps.items():
        if not isinstance(value, bool):
            raise ConfigError(f"steps.{name} is {value!r}, expected true or false.")
    finished = _take_finished(params, has_teacher=steps["teacher"])
    checkpoints = _CHECKPOINTS | {name: _IMPORTED.format(name) for name in finished}
    is_distilled = steps["teacher"] and steps["distillation"] and "baseline" not in finished
    student = "distilled" if is_distilled else "baseline"
    base = "pruned" if steps["pruning"] else student
    names = _new_names(variants, steps, student=student, base=base)
    kept = _rename(variants, names, checkpoints)

    learners = [
        stage
        for stage, runs in (
            ("distill", is_distilled),
            ("finetune", steps["pruning"]),
            ("quantize_aware_train", steps["quantize_aware_train"]),
        )
        if runs
    ]
    recorded = steps["teacher"] and steps["record_teacher"]
    readers = [stage for stage in learners if recorded and _has_teacher_terms(params[stage]["distillation"])]
    teacher = _RECORDING if readers else checkpoints["teacher"]
    _set_views(params, learners, readers)

    def taught(network: str) -> dict[str, str]:
        return {
            "checkpoint": checkpoints[network],
            "teacher": teacher if steps["teacher"] else checkpoints[network],
        }

    rankings = (params["prune"]["ranking"], params["search_pruning"]["pruning"]["ranking"])
    # Every input has to exist; where nothing reads the table or the baseline, it is one that is read anyway.
    sensitivity = _SENSITIVITY if Ranking.sensitivity in rankings else checkpoints[student]
    start = checkpoints["baseline"] if params["distill"]["start"] == Start.baseline else teacher
    pipeline = params["pipeline"]
    exported = dict.fromkeys(names.get(name, name) for name in pipeline["exports"])
    pipeline |= {
        "networks": [name for name in pipeline["networks"] if name in params["train"]],
        "checkpoints": finished,
        "recordings": {"teacher": checkpoints["teacher"]} if readers else {},
        "distillation": {"student": {"teacher": teacher, "start": start}} if is_distilled else {},
        "pruning": {"student": taught(student) | {"sensitivity": sensitivity}} if steps["pruning"] else {},
        "quantization_aware": {"student": taught(base)} if steps["quantize_aware_train"] else {},
        "exports": {name: kept[name]["checkpoint"] for name in exported if name in kept},
        "graph": _GRAPH.format(base),
    }
    _rename_selection(params["select_engine"], names)
    reference = params["select_engine"]["float_reference"]
    if reference["variant"] in kept:  # else a later check names it
        pipeline["reference_graph"] = kept[reference["variant"]]["float_graph"]
    pipeline["reference_engine"] = (
        f"artifacts/build_engine/{reference['variant']}/{reference['target']}/engine"
    )
    return kept


def _has_teacher_terms(losses: Mapping[str, Any]) -> bool:
    terms = ("soft_target_weight", "channel_wise_weight", "hint_weight")
    return any(losses.get(term) != 0 for term in terms)


def _set_views(params: dict[str, Any], learners: Sequence[str], readers: Sequence[str]) -> None:
    """Let trainings that read no recording see another view of an image in each epoch, unless they say otherwise.

    Raises ConfigError when one that reads it does not show the views that record_teacher shows to the teacher.
    """
    recorded = params["record_teacher"]
    for stage in learners:
        trainer = params[stage]["trainer"]
        if stage in readers:
            check_views(recorded, trainer, f"{stage}.trainer")
        elif trainer["num_views"] == recorded["num_views"]:
            trainer["num_views"] = None


def check_start(params: Mapping[str, Any]) -> None:
    """Raise ConfigError if the student is to begin with the weights of a baseline that is another network."""
    if "distill" not in params or params["distill"]["start"] != Start.baseline:
        return
    student, baseline = params["distill"]["network"], params["train"]["baseline"]["network"]
    if student != baseline:
        raise ConfigError(
            f"distill.start is baseline, and distill.network is {student}, where train.baseline.network is "
            f"{baseline}: its weights do not fit. Set distill.start=fresh, or give both the same network."
        )


def check_overrides(overrides: Sequence[str], steps: Mapping[str, Any]) -> None:
    """Raise ConfigError if an override changes a teacher, or what only learns from one, where there is none."""
    if steps["teacher"]:
        return
    for override in overrides:
        key = override.lstrip("+~").partition("=")[0].rpartition("@")[2]
        if key.startswith(_OF_A_TEACHER) and not key.endswith(".checkpoint"):  # that is refused by its value
            raise ConfigError(
                f"{override} changes nothing, because steps.teacher is false. Add steps.teacher=true, or leave it "
                "out."
            )


def _take_finished(params: dict[str, Any], *, has_teacher: bool) -> dict[str, str]:
    """Move the sections of finished networks from train to import_checkpoint; return network -> file of weights."""
    finished = {}
    imports: dict[str, Any] = {}
    for name, section in list(params["train"].items()):
        file = section.pop("checkpoint")
        if name == "teacher" and not has_teacher:
            if file is not None:
                raise ConfigError(
                    f"train.teacher.checkpoint is {file}, and steps.teacher is false, so nothing would read it. Add "
                    "steps.teacher=true, or leave it out."
                )
            del params["train"][name]
        elif file is not None:
            del params["train"][name]
            finished[name] = str(file)
            imports[name] = {"network": section["network"], "batch_size": section["trainer"]["batch_size"]}
    if imports:
        params["import_checkpoint"] = imports
    return finished


def _new_names(
    variants: Mapping[str, Any], steps: Mapping[str, bool], *, student: str, base: str
) -> dict[str, str | None]:
    """Return variant -> the variant that stands for it; None if nothing does."""
    names: dict[str, str | None] = {name: name for name in variants}
    if not steps["teacher"]:
        names["teacher"] = None
    names |= {"distilled": student, "pruned": base}
    for name in variants:
        if name.startswith("pruned_"):
            names[name] = f"{base}_{name.removeprefix('pruned_')}"
    if not steps["quantize_aware_train"]:
        names["pruned_qat"] = None
    return names


def _rename(
    variants: Mapping[str, Any], names: Mapping[str, str | None], checkpoints: Mapping[str, str]
) -> dict[str, Any]:
    """Return the variants under their new names, and their files where they now are."""
    paths: dict[str, str] = {}
    for network, file in _CHECKPOINTS.items():
        stand_in = names.get(network) or network
        paths |= {file: checkpoints[stand_in], _GRAPH.format(network): _GRAPH.format(stand_in)}
    kept: dict[str, Any] = {}
    for old, files in variants.items():
        new = names[old]
        if new is None or (new != old and new in checkpoints):  # a float network that another one stands for
            continue
        kept[new] = {key: paths.get(value, value) for key, value in files.items()}
        if "parent" in files:
            kept[new]["parent"] = names.get(files["parent"], files["parent"])
    return kept


def _rename_selection(selection: dict[str, Any], names: Mapping[str, str | None]) -> None:
    """Let the report speak of the variants that are left; a technique that was left out changes nothing."""

    def new_name(name: str) -> str | None:
        return names.get(name, name)

    reference = selection["float_reference"]
    reference["variant"] = new_name(reference["variant"]) or reference["variant"]
    selection["ladder"] = list(dict.fromkeys(filter(None, map(new_name, selection["ladder"]))))
    techniques = []
    for technique in selection["techniques"]:
        before, after = (new_name(technique[side]) for side in ("before", "after"))
        if before and after and before != after:
            techniques.append({**technique, "before": before, "after": after})
    selection["techniques"] = techniques
