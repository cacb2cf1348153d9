"""Compose conf/ into params.yaml. Only this module uses Hydra.

``python -m flows.params [override ...]`` writes params.yaml, which DVC and the stages read. Every section is
checked against the ``Config`` of its stage before anything is written.
"""

import contextlib
import copy
import dataclasses
import itertools
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from flows.class_gates import check_class_gates, name_classes
from flows.networks import check_tracked, complete_networks
from flows.pipeline import RecordedStages, run_pipeline
from flows.preflight import check_models
from flows.steps import apply_steps, check_overrides, check_start
from flows.templates import check_templates
from tasks.core.config import PARAMS_FILE, find_section, typed_config
from tasks.core.errors import ConfigError, EnginewrightError
from tasks.core.execute import load_stage
from tasks.core.tracking.config import mask_credentials
from tasks.parts.engines.runtimes import CHECKPOINT_RUNTIMES, Runtime
from tasks.parts.quantization.left_out import Search

CONF = Path(__file__).resolve().parents[1] / "conf"
DVC_FILE = CONF.with_name("dvc.yaml")

_WITHOUT_MASKS = ("class_folder", "images")

_HEADER = (
    "# Written from conf/ by `python -m flows.params [override ...]`. Edit conf/ instead of this file.\n"
)

_COPIED_FROM = ("build_engine", "prepare_data", "train", "select_engine", "quantize_ptq", "prune", "finetune")
"""Sections that others copy values from are checked first, so that an error names the key to set."""


def compose_params(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Compose conf/ with Hydra overrides into the checked content of params.yaml.

    Raises ConfigError for an unknown group or key, a wrong type or an invalid value.
    """
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("config", overrides=list(overrides))
        params: dict[str, Any] = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_first_lines(error)) from error
    for name, section in params.items():
        if not isinstance(section, dict):
            raise ConfigError(f"{name} is {section!r}, expected its keys: {name}.<key>=<value>. See conf/.")
    model, variants, targets = (params.pop(key) for key in ("model", "variants", "target"))
    _check_names(targets)
    params["pipeline"]["work_pools"] = {name: _take_pool(name, options) for name, options in targets.items()}
    params["build_engine"] = targets
    if params["quantize_ptq"]["activations"] is None:
        params["quantize_ptq"]["activations"] = _activations(targets)
    if params["prepare_data"]["source"] != "digit_scenes":
        params["prepare_data"]["scenes"] = None  # debug=smoke sets some
    steps = params.pop("steps", None)
    is_imported = "path" in model
    if not is_imported:
        complete_networks(params, overrides)
        _complete_training(params, targets)
        check_overrides(overrides, steps)
        variants = apply_steps(params, variants, steps)
    else:
        del params["train"]
        _complete_import(params, model)
    if model["metric"] is not None:
        _complete_metric(params, model, targets)
    params["engines"] = dict(_engines(variants, targets))
    _complete_references(params, targets)
    _check_engines(params, targets)
    params["select_engine"]["engines"] = [
        {"variant": engine["variant"], "target": engine["target"]} for engine in params["engines"].values()
    ]
    params["select_engine"]["parents"] = _parents(variants)
    params["select_engine"]["searches"] = _searches(variants)
    measuring, ordered = params["benchmark"], dict.fromkeys([*params["select_engine"]["ladder"], *variants])
    params["benchmark"] = {
        target: {
            "target": target,
            "gpu": targets[target]["gpu"],
            "variants": [variant for variant in ordered if f"{variant}-{target}" in params["engines"]],
            **measuring,
        }
        for target in targets
    }
    _complete_explanations(params, targets)
    _complete_trials(params, targets)
    _complete_loads(params, targets)
    name_classes(params)
    _drop_uncalled(params)
    check_params(params)
    check_class_gates(params)
    if is_imported:
        _check_operators(model["custom_operators"], targets)
    check_start(params)
    _check_variants(params["select_engine"], variants)
    check_templates(params, DVC_FILE)
    return params


def keep_targets(params: dict[str, Any], targets: Collection[str]) -> dict[str, Any]:
    """Return the configuration without the engines of other targets; the models stay as they are."""
    kept = copy.deepcopy(params)
    for items in ("trials", "references"):
        kept["pipeline"][items] = _of(targets, kept["pipeline"][items])
    for section in ("build_engine", "benchmark", "measure_machine", "explain", "try_changes", "measure_load"):
        if section in kept:
            kept[section] = _of(targets, kept[section])
    kept["engines"] = {name: item for name, item in kept["engines"].items() if item["target"] in targets}
    engines = kept["select_engine"]["engines"]
    kept["select_engine"]["engines"] = [item for item in engines if item["target"] in targets]
    _show_explanations(kept)
    _show_loads(kept)
    return kept


def _of(targets: Collection[str], section: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in section.items() if name in targets}


def _check_names(targets: dict[str, Any]) -> None:
    """Reject a target with a wrong name or no runtime: it is easy to leave a copied file half edited."""
    for key, options in targets.items():
        if options.get("name") != key or "runtime" not in options:
            raise ConfigError(
                f"target.{key} has name {options.get('name')!r} and runtime {options.get('runtime')!r}, expected "
                f"the name {key} and a runtime. Fix conf/target/{key}.yaml."
            )


def _take_pool(name: str, options: dict[str, Any]) -> str:
    """Remove the work pool from a target, whose engines do not depend on it, and return it."""
    pool = options.pop("work_pool", None)
    if not isinstance(pool, str) or not pool:
        raise ConfigError(f"target.{name}.work_pool is {pool!r}, expected the name of a work pool.")
    return pool


def check_params(params: dict[str, Any]) -> None:
    """Build the typed ``Config`` of every section, and find one for every stage call.

    Raises ConfigError for the first invalid section.
    """
    for stage in sorted(_stages(params), key=lambda stage: (stage not in _COPIED_FROM, stage)):
        config_class = load_stage(stage)[1]
        fields = {field.name for field in dataclasses.fields(config_class)}
        is_shared = bool(fields & set(params[stage]))  # else it holds one section per address
        for name in [stage] if is_shared else [f"{stage}.{part}" for part in params[stage]]:
            typed_config(config_class, find_section(params, name)[1], _key_in_conf(name))
    for address in _planned(params):
        find_section(params, address)


def _drop_uncalled(params: dict[str, Any]) -> None:
    """Drop the sections of stages that this pipeline does not call; reject those that belong to no stage."""
    for stage in _stages(params):
        try:
            load_stage(stage)
        except ConfigError as error:
            raise ConfigError(
                f"{stage} is not a section of the configuration. Found: {', '.join(params)}."
            ) from error
    called = {address.split(".")[0] for address in _planned(params)}
    for stage in _stages(params) - called:
        if params[stage]:  # else it has no targets, which dvc.yaml looks up
            del params[stage]


def _stages(params: dict[str, Any]) -> set[str]:
    return set(params) - {"engines", "pipeline"}


def _planned(params: dict[str, Any]) -> Collection[str]:
    plan = RecordedStages()
    run_pipeline(plan, params)
    return plan.calls


def _key_in_conf(section: str) -> str:
    """Return the name in conf/ of a section of params.yaml."""
    stage, _, name = section.partition(".")
    in_conf = {"build_engine": f"target.{name}", "benchmark": stage, "measure_machine": stage}
    in_conf |= {"try_changes": stage, "measure_load": stage, "import_checkpoint": f"train.{name}"}
    return in_conf.get(stage, section)


def _complete_training(params: dict[str, Any], targets: dict[str, Any]) -> None:
    """Fill in the values that follow from the targets."""
    if params["prepare_data"]["source"] in _WITHOUT_MASKS:
        raise ConfigError(
            f"data is {params['prepare_data']['source']}, which has no masks, but segmentation networks need them. "
            "Choose data=folder, or use a model of your own: model=onnx model.path=<file>."
        )
    for section in (params["prune"], params["search_pruning"]["pruning"], params["rank_groups"]):
        if section["channel_multiple"] is None:
            section["channel_multiple"] = _largest_multiple(targets)
    is_by_channels = params["prune"]["method"] == "channels"
    for section, prunes_channels in (
        (params["prune"], is_by_channels),
        (params["search_pruning"]["pruning"], True),
    ):
        if section["ranking"] is None:
            section["ranking"] = "sensitivity" if prunes_channels else "across_layers"
    if not is_by_channels:
        # They may name layers that cannot lose channels.
        params["search_pruning"]["pruning"]["layer_ratios"] = {}
    params["search_pruning"]["target"] = _find_target(params["search_pruning"]["target"], targets)


def _complete_explanations(params: dict[str, Any], targets: dict[str, Any]) -> None:
    """Add a section for each target whose runtime reports layers: only those can be explained.

    The machine is also measured for the others if `measure_machine.checkpoint_targets` says so.
    """
    selection, measuring = params["select_engine"], params["measure_machine"]
    are_all_measured = measuring.pop("checkpoint_targets")
    params["measure_machine"], params["explain"] = {}, {}
    for name, options in targets.items():
        reports_layers = options["runtime"] not in CHECKPOINT_RUNTIMES
        if reports_layers or are_all_measured:
            params["measure_machine"][name] = {"target": copy.deepcopy(options), **measuring}
        if not reports_layers:
            continue
        variants, parents = params["benchmark"][name]["variants"], selection["parents"]
        rungs = [rung for rung in selection["ladder"] if rung in variants]
        pairs = [*itertools.pairwise(rungs), *((parents[rung], rung) for rung in variants if rung in parents)]
        params["explain"][name] = {
            "target": name,
            "variants": list(variants),
            "parents": {variant: parents[variant] for variant in variants if variant in parents},
            "pairs": [{"before": before, "after": after} for before, after in dict.fromkeys(pairs)],
        }
    _show_explanations(params)


def _show_explanations(params: dict[str, Any]) -> None:
    """Let the report show the targets that are explained.

    Every dependency of a stage has to exist; if nothing is explained, nothing is read from it.
    """
    params["select_engine"]["explained"] = list(params["explain"])
    params["pipeline"]["explanations"] = f"artifacts/{'explain' if params['explain'] else 'benchmark'}"


def _complete_trials(params: dict[str, Any], targets: dict[str, Any]) -> None:
    """Add a section for each target that builds and can explain the engine of `try_changes.variant`."""
    options = params["try_changes"]
    variant = options.pop("variant")
    if variant is None:
        return
    engines = {name: params["engines"].get(f"{variant}-{name}") for name in params["explain"]}
    trials = {name: engine["model"] for name, engine in engines.items() if engine}
    if not trials:
        raise ConfigError(
            f"try_changes.variant is {variant}, which no target builds whose runtime reports layers. Choose one of: "
            f"{', '.join(params['benchmark'][next(iter(engines))]['variants']) if engines else 'none'}."
        )
    params["pipeline"]["trials"] = trials
    params["try_changes"] = {
        name: {
            "target": copy.deepcopy(targets[name]),
            "variant": variant,
            "parent": params["explain"][name]["parents"].get(variant),
            **options,
        }
        for name in trials
    }


def _complete_loads(params: dict[str, Any], targets: dict[str, Any]) -> None:
    """Add a section for each target that builds an engine of `measure_load.variants`."""
    options = params["measure_load"]
    wanted, together = options.pop("variants"), options.pop("together")
    params["measure_load"] = {}
    if wanted is None and together:
        raise ConfigError(
            f"measure_load.together is {together}, and measure_load.variants is null, so nothing would run. Name "
            "the variants as well."
        )
    built = {name: params["benchmark"][name]["variants"] for name in targets}
    every = list(dict.fromkeys(variant for variants in built.values() for variant in variants))
    if wanted == "all":
        wanted = every
    if not isinstance(wanted, list | None):
        raise ConfigError(
            f"measure_load.variants is {wanted!r}, expected a list such as [{every[0]}], all or null."
        )
    for key, names in (("variants", wanted or []), ("together", together)):
        if unknown := [name for name in names if name not in every]:
            raise ConfigError(
                f"measure_load.{key} has {unknown[0]}, which no target builds. Choose from: {', '.join(every)}."
            )
    for name, options_of_target in targets.items():
        if own := [variant for variant in wanted or [] if variant in built[name]]:
            params["measure_load"][name] = {
                "target": name,
                "gpu": options_of_target["gpu"],
                "variants": own,
                "together": [variant for variant in together if variant in built[name]],
                **options,
            }
    _show_loads(params)


def _show_loads(params: dict[str, Any]) -> None:
    """Let the report show the targets whose engines are measured under load; see `_show_explanations`."""
    params["select_engine"]["loaded"] = list(params["measure_load"])
    params["pipeline"]["loads"] = f"artifacts/{'measure_load' if params['measure_load'] else 'benchmark'}"


def _complete_import(params: dict[str, Any], model: dict[str, Any]) -> None:
    """Check the model and its data; let the float model label images without labels."""
    if model["path"] is None:
        raise ConfigError("model.path is missing. Name the ONNX file: model=onnx model.path=<file>.")
    if params["prepare_data"]["source"] == "digit_scenes":
        raise ConfigError(
            "data is digit_scenes, which your own model was hardly trained on. Choose your own data: "
            "data=class_folder, data=folder or, without labels, data=images, and prepare_data.root=<folder>."
        )
    pipeline = params["pipeline"]
    if params["prepare_data"]["source"] == "images":
        pipeline["unlabelled"] = {"images": pipeline["data"]}
        pipeline["data"] = "artifacts/label_images/dataset"
    elif model["output_kind"] == "values" and model["metric"] is None:
        raise ConfigError(
            f"model.output_kind is values, and data is {params['prepare_data']['source']}, whose labels say nothing "
            "about values. Choose data=images: the truth is what the float model returns; or compare with the labels "
            "by a function of your own: model.metric=<file>:<function>."
        )


def _complete_metric(params: dict[str, Any], model: dict[str, Any], targets: dict[str, Any]) -> None:
    """Attach a metric of the user's own to the data set; reject targets whose engines give it no logits."""
    file, params["attach_metric"]["function"] = _find_metric(model["metric"])
    params["attach_metric"]["file"] = file
    for name, options in targets.items():
        if options.get("coarse_classes") and model.get("output_kind") != "values":
            raise ConfigError(
                f"target.{name}.coarse_classes is true, and model.metric is {model['metric']}, which reads logits: "
                "such an engine has none. Set it to false, or leave the metric out."
            )
    pipeline = params["pipeline"]
    pipeline["metrics"] = {"own": {"file": file, "data": pipeline["data"]}}
    pipeline["data"] = "artifacts/attach_metric/dataset"


def _check_operators(libraries: list[dict[str, Any]], targets: dict[str, Any]) -> None:
    """Reject a target whose runtime has no library for a domain of the model's custom operators.

    ONNX Runtime takes those that the model declares.
    """
    domains = {domain for library in libraries for domain in library["domains"]}
    for name, options in targets.items():
        if options["runtime"] == "onnxruntime" and options["tensorrt"] is None:
            continue
        missing = domains - {
            domain for library in options["custom_operators"] for domain in library["domains"]
        }
        if missing:
            has_plugins = options["runtime"] != Runtime.tensorrt_rtx
            declare = (
                f"Declare one for {options['runtime']}, or " if has_plugins else "That runtime takes none: "
            )
            raise ConfigError(
                f"target.{name}.custom_operators has no library for {', '.join(sorted(missing))}, which the model "
                f"needs (model.custom_operators). {declare}remove {name} from target."
            )


def _find_metric(metric: str) -> tuple[str, str]:
    """Return file and function of model.metric; raise ConfigError unless git tracks the file."""
    file, _, function = str(metric).rpartition(":")
    path = PurePath(file)
    if not file or not function.isidentifier() or path.is_absolute() or ".." in path.parts:
        raise ConfigError(
            f"model.metric is {metric}, expected <file>:<function> with a file of this workspace: "
            "model.metric=metrics.py:dice."
        )
    if not Path(file).is_file():
        raise ConfigError(
            f"{file} is missing, expected a Python file with the function {function} (model.metric)."
        )
    check_tracked(path, "model.metric")
    return path.as_posix(), function


def _complete_references(params: dict[str, Any], targets: dict[str, Any]) -> None:
    """Name the engine that the speed-ups of each target refer to: the float reference's variant on its device."""
    reference, pipeline = params["select_engine"]["float_reference"], params["pipeline"]
    by_device = pipeline.pop("speed_references")
    if reference["target"] in targets:
        by_device[targets[reference["target"]].get("device")] = reference["target"]
    pipeline["references"] = {}
    for name, options in targets.items():
        place = by_device.get(options.get("device"), reference["target"])
        engine = f"artifacts/build_engine/{reference['variant']}/{place}/engine"
        pipeline["references"][name] = {"target": place, "engine": engine}


def _check_engines(params: dict[str, Any], targets: dict[str, Any]) -> None:
    """Reject a run without a reference engine, or with a target that runs none of the variants."""
    engines, reference = params["engines"], params["select_engine"]["float_reference"]
    if f"{reference['variant']}-{reference['target']}" not in engines:
        raise ConfigError(
            f"target is [{', '.join(targets)}]. It has to include {reference['target']}: the variant "
            f"`{reference['variant']}` on it is the reference for every accuracy and for the speed-ups on its device "
            "(select_engine.float_reference)."
        )
    idle = [target for target in targets if target not in {engine["target"] for engine in engines.values()}]
    if idle:
        raise ConfigError(
            f"target {idle[0]} runs checkpoints of our own networks, and model=onnx has none. Remove it from target."
        )
    for target, item in params["pipeline"]["references"].items():
        device, place = targets[target].get("device"), item["target"]
        if f"{reference['variant']}-{place}" not in engines:
            raise ConfigError(
                f"target is [{', '.join(targets)}]. For {target} it has to include {place} as well: speed-ups on "
                f"{device} refer to the variant `{reference['variant']}` on it (pipeline.speed_references.{device}). "
                f"Set target=[{','.join([*targets, place])}]."
            )
        if targets[place].get("device") != device:
            raise ConfigError(
                f"pipeline.speed_references.{device} is {place}, which runs on {targets[place].get('device')}, "
                f"expected a target on {device}, as {target} is: speed-ups compare engines on one device."
            )


def write_params(params: dict[str, Any], path: Path = PARAMS_FILE) -> list[str]:
    """Write params.yaml unless it already holds this content; return the sections that had other values.

    Raises ConfigError where it would hold a password: git keeps it, and DVC copies it into dvc.lock.
    """
    text = _HEADER + yaml.safe_dump(params, sort_keys=False, allow_unicode=True)
    for line in text.splitlines():
        if (masked := mask_credentials(line)) != line:
            raise ConfigError(
                f"{path} would hold a password: {masked.strip()}. Leave user and password out of the address; an "
                "MLflow server takes them from MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, PostgreSQL "
                "from PGUSER and PGPASSWORD."
            )
    before = path.read_text(encoding="utf-8") if path.is_file() else ""
    if before == text:
        return []
    path.write_text(text, encoding="utf-8")
    old = None
    with contextlib.suppress(yaml.YAMLError):  # it was cut off
        old = yaml.load(before, Loader=yaml.CSafeLoader)
    return (
        [name for name in params if name in old and old[name] != params[name]]
        if isinstance(old, dict)
        else []
    )


def _engines(variants: dict[str, Any], targets: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield every engine as its DVC name and its inputs; runtimes of checkpoints run float variants only."""
    for variant, files in variants.items():
        for target, options in targets.items():
            model = files["checkpoint"] if options["runtime"] in CHECKPOINT_RUNTIMES else files["graph"]
            if model is not None:
                yield (
                    f"{variant}-{target}",
                    {
                        "variant": variant,
                        "target": target,
                        "model": model,
                        "float_graph": files["float_graph"],
                    },
                )


def _parents(variants: dict[str, Any]) -> dict[str, str]:
    """Return the variant that each variant of lower precision was made from, by name or by its float graph."""
    owners = {
        files["graph"]: name for name, files in variants.items() if files["graph"] == files["float_graph"]
    }
    named = {
        name: files.get("parent") or owners.get(files["float_graph"])
        for name, files in variants.items()
        if files["graph"] != files["float_graph"]
    }
    return {name: parent for name, parent in named.items() if parent}


def _searches(variants: dict[str, Any]) -> dict[str, str]:
    """Return the search that made the graph of a variant, for those whose graph is the result of one."""
    made = {f"artifacts/{search}/model.onnx": str(search) for search in Search}
    return {name: made[files["graph"]] for name, files in variants.items() if files["graph"] in made}


def _check_variants(select_engine: dict[str, Any], variants: dict[str, Any]) -> None:
    """Reject names of unknown variants, which would silently leave out a rung or a technique."""
    named = [("ladder", name) for name in select_engine["ladder"]]
    for technique in select_engine["techniques"]:
        named += [("techniques", technique[side]) for side in ("before", "after")]
    for key, name in named:
        if name not in variants:
            raise ConfigError(
                f"select_engine.{key} names {name}, which is not a variant: [{', '.join(variants)}]. Choose one "
                "of them, or add it to variants in conf/model/trained.yaml (or onnx.yaml)."
            )


def _largest_multiple(targets: dict[str, Any]) -> int | None:
    """Return the largest channel multiple of the targets; None if none declares one, which a later check reports."""
    multiples = [options.get("channel_multiple") for options in targets.values()]
    return max((multiple for multiple in multiples if isinstance(multiple, int)), default=None)


def _activations(targets: dict[str, Any]) -> list[str]:
    """Return the types of activations that the engines of quantized graphs have on these targets."""
    graphs = [options for options in targets.values() if options["runtime"] not in CHECKPOINT_RUNTIMES]
    types = {"uint8" if options.get("uint8_activations") else "int8" for options in graphs}
    return sorted(types, reverse=True) or ["uint8"]


def _find_target(name: str | None, targets: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the target that search_pruning.target names; null means the first that is not eager."""
    deployed = [target for target, options in targets.items() if options["runtime"] != "torch"]
    chosen = [*deployed, *targets][0] if name is None else name
    if chosen not in list(targets):
        raise ConfigError(
            f"search_pruning.target is {chosen}, which is not a target of this run: [{', '.join(targets)}]. Choose "
            "one of them, or add it to target."
        )
    declared: dict[str, Any] = copy.deepcopy(targets[chosen])
    return declared


def _first_lines(error: Exception) -> str:
    """Return what Hydra says without its search path: the options of a group, or the first lines of anything else."""
    told = str(error).partition("Config search path")[0]
    lines = [line.strip() for line in told.splitlines() if line.strip()]
    options = next(
        (number for number, line in enumerate(lines, 1) if line.startswith("Available options")), 0
    )
    if options:
        lines = [*lines[:options], f"{', '.join(lines[options:])}."]
    return " ".join(lines[:3]) + " See conf/config.yaml for the groups and keys."


def main(overrides: Sequence[str]) -> int:
    """Check what the configuration names, write params.yaml, and return the exit code."""
    try:
        params = compose_params(overrides)
        check_models(params)
        write_params(params)
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"wrote {PARAMS_FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
