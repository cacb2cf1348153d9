"""Compose conf/ into params.yaml: the single Hydra entry.

``python -m flows.params [override ...]`` writes params.yaml, which DVC and the stages read. Every section is
checked against the ``Config`` of its stage before anything is written.
"""

import copy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tasks.core.config import PARAMS_FILE, find_section, typed_config
from tasks.core.errors import ConfigError, EnginewrightError
from tasks.core.execute import load_stage
from tasks.parts.target import CHECKPOINT_RUNTIMES

CONF = Path(__file__).resolve().parents[1] / "conf"

_HEADER = (
    "# Written from conf/ by `python -m flows.params [override ...]`. Edit conf/ instead of this file.\n"
)

SINGLE_CALLS = (
    "prepare_data",
    "train.teacher",
    "train.baseline",
    "distill",
    "rank_groups",
    "search_pruning",
    "prune",
    "finetune",
    "export_onnx",
    "convert_precision",
    "quantize_ptq",
    "rank_layers",
    "check_int8",
    "quantize_partial",
    "quantize_aware_train",
    "validate",
    "benchmark",
    "diff_layers",
    "select_engine",
)
"""The sections that every run reads; build_engine and race_rungs have one for each target."""


def compose_params(overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Compose conf/ with Hydra overrides into the content of params.yaml, checked.

    Raises ConfigError for an unknown group or key, a wrong type or an impossible value.
    """
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            composed = compose("config", overrides=list(overrides))
        params: dict[str, Any] = OmegaConf.to_container(composed, resolve=True)  # type: ignore[assignment]
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(_first_lines(error)) from error
    variants, targets = params.pop("variants"), params.pop("target")
    params["build_engine"] = targets
    for section in (params["prune"], params["search_pruning"]["pruning"], params["rank_groups"]):
        if section["channel_multiple"] is None:
            section["channel_multiple"] = _largest_multiple(targets)
    if params["prune"]["method"] != "channels":
        params["search_pruning"]["pruning"][
            "layer_ratios"
        ] = {}  # they may name layers that no channels can lose
    params["engines"] = dict(_engines(variants, targets))
    if "distilled-cpu_torch" not in params["engines"]:
        raise ConfigError(
            f"target is [{', '.join(targets)}]. It has to hold cpu_torch: eager PyTorch of the variant `distilled` "
            "is the reference of every accuracy and speed-up."
        )
    params["select_engine"]["engines"] = [
        {"variant": engine["variant"], "target": engine["target"]} for engine in params["engines"].values()
    ]
    race, ladder = params["race_rungs"], params["select_engine"]["ladder"]
    params["race_rungs"] = {
        target: {
            "target": target,
            "variants": [variant for variant in ladder if f"{variant}-{target}" in params["engines"]],
            **race,
        }
        for target in targets
    }
    params["search_pruning"]["target"] = _find_target(params["search_pruning"]["target"], targets)
    check_params(params)
    _check_variants(params["select_engine"], variants)
    return params


def check_params(params: dict[str, Any]) -> None:
    """Build the typed ``Config`` of every stage.

    Raises ConfigError at the first section that is not valid.
    """
    stages = ("build_engine", "race_rungs")
    calls = [*SINGLE_CALLS, *(f"{stage}.{target}" for stage in stages for target in params["build_engine"])]
    for address in calls:
        name, section = find_section(params, address)
        typed_config(load_stage(address)[1], section, name)
    unknown = set(params) - {call.split(".")[0] for call in calls} - {"engines"}
    if unknown:
        raise ConfigError(
            f"{sorted(unknown)[0]} is no section of the configuration. Found: {', '.join(params)}."
        )


def write_params(params: dict[str, Any], path: Path = PARAMS_FILE) -> None:
    """Write params.yaml unless it already holds this content."""
    text = _HEADER + yaml.safe_dump(params, sort_keys=False, allow_unicode=True)
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def _engines(variants: dict[str, Any], targets: dict[str, Any]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield every engine as its DVC name and its inputs; what is made of checkpoints exists for floats only."""
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


def _check_variants(select_engine: dict[str, Any], variants: dict[str, Any]) -> None:
    """Refuse names that are no variant: a rung or a technique would be left out without a word."""
    named = [("ladder", name) for name in select_engine["ladder"]]
    for technique in select_engine["techniques"]:
        named += [("techniques", technique[side]) for side in ("before", "after")]
    for key, name in named:
        if name not in variants:
            raise ConfigError(
                f"select_engine.{key} names {name}, which is no variant: [{', '.join(variants)}]. Name one of "
                "them, or add it to variants in conf/config.yaml."
            )


def _largest_multiple(targets: dict[str, Any]) -> int | None:
    """Return the largest channel multiple of the targets; None where none declares one, which is found later."""
    found = [options.get("channel_multiple") for options in targets.values()]
    return max((multiple for multiple in found if isinstance(multiple, int)), default=None)


def _find_target(name: str | None, targets: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the declaration that search_pruning.target names; null: the first that is not eager."""
    deployed = [target for target, options in targets.items() if options["runtime"] != "torch"]
    found = [*deployed, *targets][0] if name is None else name
    if found not in list(targets):
        raise ConfigError(
            f"search_pruning.target is {found}, which is no target of this run: [{', '.join(targets)}]. Name one of "
            "them, or add it to target."
        )
    declared: dict[str, Any] = copy.deepcopy(targets[found])
    return declared


def _first_lines(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) + " Look at conf/config.yaml for the groups and keys there are."


def main(overrides: Sequence[str]) -> int:
    """Write params.yaml and return the exit code."""
    try:
        write_params(compose_params(overrides))
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"wrote {PARAMS_FILE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
