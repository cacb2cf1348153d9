"""Bounds that config fields declare in their types."""

import math
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import pytest

from flows.params import compose_params
from tasks.core.bounds import (
    AtLeast,
    AtMost,
    Between,
    Distinct,
    Holds,
    LessThan,
    Matches,
    MinItems,
    MoreThan,
)
from tasks.core.config import find_section, typed_config
from tasks.core.errors import ConfigError
from tasks.core.execute import load_stage


@dataclass(frozen=True)
class Inner:
    low: Annotated[int, AtLeast(0)]
    high: int

    def __post_init__(self) -> None:
        if self.high < self.low:
            raise ConfigError(f"high is {self.high}, expected at least low, which is {self.low}.")


@dataclass(frozen=True)
class Outer:
    inner: Inner
    inners: list[Inner]
    maybe: Inner | None


HINTS: dict[str, Any] = {
    "between": Annotated[int, Between(1, 2**32 - 1)],
    "above": Annotated[float, MoreThan(0), AtMost(8)],
    "below": Annotated[float, AtLeast(0), LessThan(1)],
    "advised": Annotated[int, AtLeast(0), "0 takes all"],
    "optional": Annotated[int, AtLeast(16)] | None,
    "text": Annotated[str, Matches(r"\w+", "one word")],
    "choice": Literal[1, 8],
    "items": Annotated[list[Annotated[float, LessThan(1)]], MinItems(1), Distinct()],
    "holding": Annotated[list[str], Holds("Conv")],
    "by_name": dict[str, Annotated[float, LessThan(1)]],
    "unbounded": float,
}


def build(field: str, value: object) -> Any:
    config_class = dataclass(frozen=True)(type("One", (), {"__annotations__": {field: HINTS[field]}}))
    return getattr(typed_config(config_class, {field: value}, "stage.part"), field)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("between", 1),
        ("between", 2**32 - 1),
        ("above", 8),
        ("below", 0.0),
        ("optional", None),
        ("optional", 16),
        ("text", "word"),
        ("choice", 8),
        ("items", [0.5, 0.25]),
        ("holding", ["Add", "Conv"]),
        ("by_name", {"a.b": 0.5}),
    ],
)
def test_values_within_their_bounds_are_taken_as_they_are(field: str, value: object) -> None:
    assert build(field, value) == value


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("between", 0, "between is 0, expected an integer from 1 to 4294967295."),
        ("between", 2**32, "between is 4294967296, expected"),
        ("between", True, "between is True, expected an integer"),
        ("between", 2.5, "between is 2.5, expected an integer"),
        ("between", "3", "between is '3', expected an integer"),
        ("between", None, "between is None, expected an integer"),
        ("above", 0, "above is 0, expected a number above 0 and at most 8."),
        ("above", 8.5, "above is 8.5, expected"),
        ("above", math.nan, "above is nan, expected"),
        ("below", 1, "below is 1, expected a number of at least 0 and below 1."),
        ("below", -0.1, "below is -0.1, expected"),
        ("advised", -1, "advised is -1, expected an integer of at least 0 (0 takes all)."),
        ("optional", 4, "optional is 4, expected an integer of at least 16 or null."),
        ("text", "two words", "text is 'two words', expected a string that is one word."),
        ("choice", 2, "choice is 2, expected one of 1, 8."),
        ("choice", True, "choice is True, expected one of 1, 8."),
        ("items", [], "items is [], expected a list of at least 1 item and without repeats."),
        ("items", [0.5, 0.5], "items is [0.5, 0.5], expected a list"),
        ("items", [0.5, 1.0], "items[1] is 1.0, expected a number below 1."),
        ("items", [-math.inf], "items[0] is -inf, expected a finite number."),
        ("items", 0.5, "items is 0.5, expected a list"),
        ("holding", ["Add"], "holding is ['Add'], expected a list with Conv in it."),
        ("by_name", {"a.b": 1.0}, "by_name.a.b is 1.0, expected a number below 1."),
        ("unbounded", math.nan, "unbounded is nan, expected a finite number."),
    ],
)
def test_values_out_of_bounds_are_refused_with_key_and_bound(field: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        build(field, value)
    assert str(refused.value).startswith(f"stage.part.{text}")
    assert str(refused.value).endswith("Set it in conf/ or on the command line.")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"inner": {"low": -1, "high": 0}}, "stage.inner.low is -1, expected an integer of at least 0."),
        ({"inner": {"low": 2, "high": 1}}, "stage.inner.high is 1, expected at least low, which is 2."),
        ({"inners": [{"low": 0, "high": 1}, {"low": 2, "high": 1}]}, "stage.inners[1].high is 1, expected"),
        ({"maybe": {"low": 2, "high": 1}}, "stage.maybe.high is 1, expected"),
        ({"maybe": {"low": 0, "hihg": 1}}, "stage.maybe.hihg is not a configuration key."),
        ({"inners": [{"low": 0}]}, "stage.inners[0].high: missing value"),
    ],
)
def test_sections_within_sections_name_their_whole_key(change: dict[str, Any], text: str) -> None:
    section = {"inner": {"low": 0, "high": 1}, "inners": [], "maybe": None} | change
    with pytest.raises(ConfigError) as refused:
        typed_config(Outer, section, "stage")
    assert str(refused.value).startswith(text)


def test_sections_within_sections_are_built() -> None:
    values = {"low": 0, "high": 1}
    built = typed_config(Outer, {"inner": values, "inners": [values], "maybe": None}, "stage")
    assert built == Outer(Inner(0, 1), [Inner(0, 1)], None)


NAN, INFINITE = math.nan, math.inf
IMPOSSIBLE: dict[str, dict[str, list[Any]]] = {
    "train.teacher": {f"network.{key}": [0.0, -1.0, 9.0, NAN, INFINITE] for key in ("width", "depth")},
    "distill": {
        f"distillation.{key}": [NAN, INFINITE, -1.0]
        for key in ("label_weight", "soft_target_weight", "channel_wise_weight", "hint_weight", "temperature")
    }
    | {"distillation.temperature": [0.0, NAN, INFINITE, -1.0]},
    "prune": {
        "target_macs_ratio": [0.0, 1.0, 1.5, -0.2, NAN],
        "channel_multiple": [0, 5000],
        "max_layer_ratio": [0.0, 1.0],
        "num_steps": [0],
        "layer_ratios": [{"a": 1.0}, {"a": -0.1}],
        "weight_sparsity": [1.0, NAN],
        "iterations": [0],
        "num_images": [0],
        "batch_size": [0],
        "min_val_score_ratio": [1.1],
    },
    "rank_groups": {
        "ratios": [[], [0.5, 0.5], [0.0], [1.0], [NAN]],
        "channel_multiple": [0],
        "num_train_images": [1],
        "num_val_images": [0],
        "batch_size": [1],
    },
    "search_pruning": {
        "target_macs_ratios": [[], [0.5, 0.5], [0.5, 1.0], [0.0], [NAN]],
        "num_images": [0],
        "batch_size": [0],
        "num_train_images": [0],
        "num_val_images": [0],
        "num_rounds": [4],
        "pruning.num_steps": [0],
    },
    "export_onnx": {
        "opset": [99],
        "batch_sizes": [[], [0]],
        "max_abs_difference": [0.0],
        "min_sqnr_db": [-1.0],
        "seed": [-1],
    },
    "convert_precision": {
        "num_images": [0],
        "batch_size": [0],
        "num_val_images": [-1],
        "max_abs": [1e5, 0.0],
    },
    "quantize_ptq": {
        "calibrators": [[], ["minmax", "minmax"]],
        "percentiles": [[99.0, 101.0], []],
        "num_images": [0],
        "batch_size": [0],
        "num_val_images": [-1],
        "max_abs_input": [0.0],
        "op_types": [["Add"]],
        "activations": [[], ["uint8", "uint8"]],
    },
    "quantize_aware_train": {"op_types": [[]], "opset": [3], "min_agreement": [-0.1]},
    "quantize_repaired": {
        "max_score_rel_loss": [1.0],
        "max_parent_rel_loss": [-0.1],
        "num_images": [0],
        "num_layer_images": [0],
        "num_val_images": [-1],
        "batch_size": [0],
        "op_types": [["Add"]],
    },
    "quantize_partial": {
        "max_score_rel_loss": [1.0],
        "num_candidates": [0],
        "max_float_layers": [-1],
        "num_val_images": [-1],
        "batch_size": [0],
        "op_types": [["Add"]],
    },
    "rank_layers": {"num_images": [0], "batch_size": [0], "num_val_images": [-1], "op_types": [["Add"]]},
    "check_int8": {
        "op_types": [["Add"]],
        "num_images": [1],
        "num_train_images": [0],
        "num_val_images": [-1],
        "batch_size": [1],
        "suspect_loss": [0.0],
        "suspect_clipped_share": [1.0],
    },
    "validate": {"split": ["calibration"], "batch_size": [0]},
    "benchmark.cpu_torch": {
        "batch_sizes": [[4, 1]],
        "concurrencies": [[0]],
        "throughput_s": [0.0],
        "min_rounds": [4],
        "min_calls": [0],
        "burst_ms": [0.0],
        "warm_up_ms": [NAN],
        "budget_s": [-1.0],
        "resolution": [0.0],
        "quiet.max_busy_cores": [0.0],
        "quiet.max_wait_s": [-1.0],
        "timeout_s": [-1.0],
        "max_aa_spread": [0.0],
        "windows.num_rounds": [0],
        "windows.tolerance": [0.0],
    },
    "diff_layers": {
        "split": ["all"],
        "num_images": [0],
        "collapse_db": [-1.0, 500.0],
        "bisection.max_score_rel_loss": [1.0],
        "bisection.num_val_images": [-1],
        "bisection.batch_size": [0],
    },
}


def _impossible() -> Iterator[tuple[str, str, object]]:
    for address, fields in IMPOSSIBLE.items():
        yield from ((address, key, value) for key, values in fields.items() for value in values)


@pytest.fixture(scope="module")
def params() -> dict[str, Any]:
    return compose_params(["steps.teacher=true"])


@pytest.mark.parametrize(("address", "key", "value"), _impossible())
def test_impossible_value_of_a_stage_names_its_key(
    params: dict[str, Any], address: str, key: str, value: object
) -> None:
    name, section = find_section(deepcopy(params), address)
    *parents, last = key.split(".")
    part = section
    for parent in parents:
        part = part[parent]
    part[last] = value
    with pytest.raises(ConfigError, match=rf"^{re.escape(f'{name}.{key}')}(\[\d\]|\.a)? is .*expected"):
        typed_config(load_stage(address)[1], section, name)
