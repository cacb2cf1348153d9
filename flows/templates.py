"""Check the values of params.yaml that dvc.yaml puts into commands, paths and stage names.

DVC runs every command through a shell, and removes a stage's outputs before it runs: a value that is more than a name
or path would do more than the pipeline says.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from tasks.core.errors import ConfigError

_PLAIN = re.compile(r"[A-Za-z0-9_./-]+")
_TEMPLATE = re.compile(r"\$\{\s*([^}]*?)\s*\}")

_IN_CONF = {
    "pipeline.imports.model": "model.path",
    "pipeline.metrics.own.file": "model.metric",
    "pipeline.checkpoints.teacher": "train.teacher.checkpoint",
    "pipeline.checkpoints.baseline": "train.baseline.checkpoint",
}
"""What the user sets, where params.yaml has another name for it."""


def check_templates(params: Mapping[str, Any], dvc_file: Path) -> None:
    """Check every value that dvc.yaml takes from params.yaml, and every name of a stage that it makes with one.

    Raises ConfigError for the first that is not plain: letters without accents, digits and ``_ . / -``.
    """
    content = yaml.load(dvc_file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    for name, stage in content["stages"].items():
        for place, scope in _scopes(stage, params):
            for template in sorted(set(_templates(stage.get("do", stage)))):
                key = re.sub(r"^(item|key)\b", place, template)
                _check(_find(scope, template, f"stage {name} of {dvc_file}"), key)


def _scopes(stage: Mapping[str, Any], params: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the place of each item of a stage's ``foreach``, and what the stage's templates can name there."""
    if "foreach" not in stage:
        yield "", params
        return
    [source] = _templates(stage["foreach"])
    items = _find(params, source, "foreach")
    if not isinstance(items, Mapping | list):
        raise ConfigError(f"{source} is {items!r}, expected a list or a mapping (foreach in dvc.yaml).")
    pairs: Iterable[tuple[Any, Any]] = (
        items.items() if isinstance(items, Mapping) else zip(items, items, strict=True)
    )
    for key, item in pairs:
        _check(key, source)
        yield f"{source}.{key}", {**params, "key": key, "item": item}


def _templates(content: Any) -> Iterator[str]:
    """Yield the dotted names in all templates of a part of dvc.yaml."""
    if isinstance(content, str):
        yield from _TEMPLATE.findall(content)
    elif isinstance(content, Mapping):
        for name, part in content.items():
            yield from _templates(name)
            yield from _templates(part)
    elif isinstance(content, list):
        for part in content:
            yield from _templates(part)


def _find(scope: Mapping[str, Any], name: str, place: str) -> Any:
    value: Any = scope
    for part in name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ConfigError(
                f"params.yaml has no {name}, which {place} names. Write it with `python -m flows.params`."
            )
        value = value[part]
    return value


def _check(value: object, key: str) -> None:
    if not _PLAIN.fullmatch(str(value)):
        raise ConfigError(
            f"{_IN_CONF.get(key, key)} is {value!r}, which becomes part of a command (dvc.yaml); expected letters "
            "without accents, digits and _ . / - only. Rename the file or folder, or link to it under another name."
        )
