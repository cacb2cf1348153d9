"""Turn a section of params.yaml into the typed ``Config`` of a stage."""

import contextlib
import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import dacite
import yaml

from tasks.core import bounds
from tasks.core.errors import ConfigError

PARAMS_FILE = Path("params.yaml")
_TOP_LEVEL_KEY = re.compile(r"^(\w+):", re.MULTILINE)


def read_params(path: Path = PARAMS_FILE, section: str | None = None) -> dict[str, Any]:
    """Read params.yaml, or one `section` of it, which is faster for very many engines: the others are None then.

    Raises ConfigError if it is missing or is not a YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
        params = None if section is None else _only_section(text, section)
        if params is None:
            params = yaml.load(text, Loader=yaml.CSafeLoader)
    except FileNotFoundError as error:
        raise ConfigError(f"{path} is missing. Write it with `python -m flows.params`.") from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"{path} is not valid YAML: {error}. Write it with `python -m flows.params`."
        ) from error
    if not isinstance(params, dict):
        raise ConfigError(f"{path} is not a mapping. Write it with `python -m flows.params`.")
    return params if section is None else {name: params[name] if name == section else None for name in params}


def _only_section(text: str, section: str) -> dict[str, Any] | None:
    """Parse only the lines of a section; None if they cannot stand alone, as with an alias of an earlier anchor."""
    keys = list(_TOP_LEVEL_KEY.finditer(text))
    names = [key[1] for key in keys]
    if names.count(section) != 1:
        return None
    place = names.index(section)
    end = keys[place + 1].start() if place + 1 < len(keys) else len(text)
    with contextlib.suppress(yaml.YAMLError):
        parsed: dict[str, Any] = yaml.load(text[keys[place].start() : end], Loader=yaml.CSafeLoader)
        return dict.fromkeys(names) | parsed
    return None


def find_section(params: Mapping[str, Any], address: str) -> tuple[str, dict[str, Any]]:
    """Return the dotted name and the content of the section that an address reads.

    The section is ``params[stage]``, or the one below it that later parts of the address name:
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

    Fields are checked against their bounds (core/bounds.py). A ``__post_init__`` rejects fields that contradict each
    other. Its message starts with the name of one of them; this function puts the name of the section before it.

    Raises ConfigError for an unknown key, a wrong type, or a missing or invalid value.
    """
    hints = typing.get_type_hints(config_class, include_extras=True)
    for key in section:
        if key not in hints:
            raise ConfigError(f"{name}.{key} is not a configuration key. Keys of {name}: {', '.join(hints)}.")
    values = {key: _checked(hints[key], value, f"{name}.{key}") for key, value in section.items()}
    try:
        return dacite.from_dict(config_class, values, _STRICT)
    except ConfigError as error:
        raise ConfigError(f"{name}.{error}") from error
    except dacite.DaciteFieldError as error:
        problem = str(error).replace(f' for field "{error.field_path}"', "")
        raise ConfigError(f"{name}.{error.field_path}: {problem}. Fix it in conf/.") from error


def _as_float(value: Any) -> Any:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _as_int(value: Any) -> Any:
    # In Python a bool is an int; here it is a mistake.
    return str(value) if isinstance(value, bool) else value


_STRICT = dacite.Config(type_hooks={float: _as_float, int: _as_int}, cast=[StrEnum])


def _checked(hint: Any, value: Any, key: str, or_null: str = "") -> Any:
    """Return a value with its nested sections built.

    Raises ConfigError if the value or one of its items is out of bounds or not one of the choices.
    """
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        if not bounds.allows(hint, value):
            raise _impossible(key, value, f"{bounds.in_words(hint)}{or_null}", bounds.advice(hint))
        return _checked(arguments[0], value, key)
    if origin in (typing.Union, types.UnionType):
        if value is None and types.NoneType in arguments:
            return None
        for option in arguments:
            value = _checked(option, value, key, " or null" * (types.NoneType in arguments))
    elif origin is list and isinstance(value, list):
        return [_checked(arguments[0], item, f"{key}[{index}]") for index, item in enumerate(value)]
    elif origin is dict and isinstance(value, Mapping):
        return {name: _checked(arguments[1], item, f"{key}.{name}") for name, item in value.items()}
    elif dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        return typed_config(typing.cast(type[Any], hint), value, key)
    elif choices := _choices(hint):
        if value not in choices or isinstance(value, bool | float):
            raise _impossible(key, value, f"one of {', '.join(map(str, choices))}{or_null}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise _impossible(key, value, "a finite number")
    return value


def _choices(hint: Any) -> list[Any]:
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return list(hint)
    return list(typing.get_args(hint)) if typing.get_origin(hint) is typing.Literal else []


def _impossible(key: str, value: object, expected: str, advice: str = "") -> ConfigError:
    return ConfigError(
        f"{key} is {value!r}, expected {expected}{advice}. Set it in conf/ or on the command line."
    )
