"""Bounds that config fields declare in their types: ``num_images: Annotated[int, AtLeast(1)]``.

`core/config.py` checks every value of params.yaml against them. All bounds of a field have to hold. A plain
string among them is advice that the error repeats: ``Annotated[int, AtLeast(0), "0 takes all"]``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args, get_origin

_KINDS: dict[Any, tuple[str, type | tuple[type, ...]]] = {
    int: ("an integer", int),
    float: ("a number", (int, float)),
    str: ("a string", str),
    list: ("a list", list),
}


class Bound(Protocol):
    """One condition on a value of the right type; its text follows "an integer" or "a list"."""

    def allows(self, value: Any, /) -> bool:
        """Return whether the value meets the condition."""


@dataclass(frozen=True)
class Between:
    """Inclusive lower and upper bound."""

    low: float
    high: float

    def allows(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"from {self.low:.12g} to {self.high:.12g}"


@dataclass(frozen=True)
class AtLeast:
    """Inclusive lower bound."""

    low: float

    def allows(self, value: float) -> bool:
        return value >= self.low

    def __str__(self) -> str:
        return f"of at least {self.low:.12g}"


@dataclass(frozen=True)
class AtMost:
    """Inclusive upper bound."""

    high: float

    def allows(self, value: float) -> bool:
        return value <= self.high

    def __str__(self) -> str:
        return f"at most {self.high:.12g}"


@dataclass(frozen=True)
class MoreThan:
    """Exclusive lower bound."""

    low: float

    def allows(self, value: float) -> bool:
        return value > self.low

    def __str__(self) -> str:
        return f"above {self.low:.12g}"


@dataclass(frozen=True)
class LessThan:
    """Exclusive upper bound."""

    high: float

    def allows(self, value: float) -> bool:
        return value < self.high

    def __str__(self) -> str:
        return f"below {self.high:.12g}"


@dataclass(frozen=True)
class Matches:
    """Regular expression for the whole string, and its meaning in words."""

    pattern: str
    meaning: str

    def allows(self, value: str) -> bool:
        return re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return f"that is {self.meaning}"


@dataclass(frozen=True)
class MinItems:
    """Minimum number of items in a list."""

    least: int

    def allows(self, value: Sequence[Any]) -> bool:
        return len(value) >= self.least

    def __str__(self) -> str:
        return f"of at least {self.least} item{'s' * (self.least > 1)}"


@dataclass(frozen=True)
class Distinct:
    """No item occurs twice in a list."""

    def allows(self, value: Sequence[Any]) -> bool:
        return not any(item in value[:index] for index, item in enumerate(value))

    def __str__(self) -> str:
        return "without repeats"


@dataclass(frozen=True)
class Holds:
    """Item that a list has to contain."""

    item: str

    def allows(self, value: Sequence[Any]) -> bool:
        return self.item in value

    def __str__(self) -> str:
        return f"with {self.item} in it"


def allows(hint: Any, value: object) -> bool:
    """Return whether a value has the type and the bounds of an ``Annotated`` hint; a bool is not a number."""
    base, *marks = get_args(hint)
    is_of_kind = isinstance(value, _KINDS[get_origin(base) or base][1]) and not isinstance(value, bool)
    return is_of_kind and all(mark.allows(value) for mark in marks if not isinstance(mark, str))


def in_words(hint: Any) -> str:
    """Describe what an ``Annotated`` hint allows."""
    base, *marks = get_args(hint)
    bounds = " and ".join(str(mark) for mark in marks if not isinstance(mark, str))
    return f"{_KINDS[get_origin(base) or base][0]} {bounds}"


def advice(hint: Any) -> str:
    """Return the advice in an ``Annotated`` hint: each string in brackets after a space."""
    return "".join(f" ({mark})" for mark in get_args(hint) if isinstance(mark, str))
