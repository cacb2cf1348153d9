"""From a section of params.yaml to the typed ``Config`` of a stage."""

import dataclasses
import typing
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import dacite
import yaml

from tasks.core.errors import ConfigError

PARAMS_FILE = Path("params.yaml")


def read_params(path: Path = PARAMS_FILE) -> dict[str, Any]:
    """Read params.yaml.

    Raises ConfigError when it is absent or no YAML mapping.
    """
    try:
        params = yaml.load(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing. Write it with `python -m flows.params`.") from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{path} is not valid YAML: {error}. Write it with `python -m flows.params`."
        ) from error
    if not isinstance(params, dict):
        raise ConfigError(f"{path} holds no mapping. Write it with `python -m flows.params`.")
    return params


def find_section(params: Mapping[str, Any], address: str) -> tuple[str, dict[str, Any]]:
    """Return the dotted name and the content of the section that an address reads.

    It starts at ``params[stage]`` and descends by every later part of the address that names a key there:
    ``build_engine.pruned_qat.cpu_openvino`` reads ``build_engine.cpu_openvino``, and
    ``export_onnx.pruned`` reads ``export_onnx``.

    Raises ConfigError when the stage has no section.
    """
    stage, *rest = address.split(".")
    section = params.get(stage)
    if not isinstance(section, dict):
        raise ConfigError(f"params.yaml has no section {stage!r} for {address}. Found: {', '.join(params)}.")
    name = stage
    for part in rest:
        if isinstance(section.get(part), dict):
            name, section = f"{name}.{part}", section[part]
    return name, section


def typed_config(config_class: type[Any], section: Mapping[str, Any], name: str) -> Any:
    """Build a stage's frozen ``Config`` from its section and run its checks.

    Raises ConfigError for an unknown key, a wrong type, a missing or an impossible value.
    """
    _check_keys(config_class, section, name)
    try:
        return dacite.from_dict(config_class, section, _STRICT)
    except ConfigError as error:
        raise ConfigError(f"Section {name}: {error}") from error
    except dacite.DaciteFieldError as error:
        problem = str(error).replace(f' for field "{error.field_path}"', "")
        raise ConfigError(f"{name}.{error.field_path}: {problem}. Mend it in conf/.") from error


def _as_float(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _as_int(value: Any) -> Any:
    return (
        str(value) if isinstance(value, bool) else value
    )  # a bool is an int to Python, and a typing error to us


_STRICT = dacite.Config(type_hooks={float: _as_float, int: _as_int}, cast=[StrEnum])


def _check_keys(config_class: type[Any], section: Mapping[str, Any], name: str) -> None:
    """Refuse unknown keys, and values that are none of a field's choices, at any depth."""
    types = typing.get_type_hints(config_class)
    for key, value in section.items():
        if key not in types:
            raise ConfigError(
                f"{name}.{key} is no key of the configuration. Keys of {name}: {', '.join(types)}."
            )
        for option in (types[key], *typing.get_args(types[key])):
            for place, item in _items(f"{name}.{key}", value):
                if dataclasses.is_dataclass(option) and isinstance(item, Mapping):
                    _check_keys(typing.cast(type[Any], option), item, place)
                elif isinstance(option, type) and issubclass(option, StrEnum) and item not in [*option, None]:
                    raise ConfigError(f"{place} is {item!r}, expected one of {', '.join(option)}.")


def _items(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, list):
        return [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    return [(name, value)]
