"""Bounds that config fields declare in their types: ``num_images: Annotated[int, AtLeast(1)]``.

`core/config.py` holds every value of params.yaml against them. Several bounds of one field all hold. A plain
text among them is advice that the error repeats: ``Annotated[int, AtLeast(0), "0 takes all"]``.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args, get_origin

_KINDS: dict[Any, tuple[str, type | tuple[type, ...]]] = {
    int: ("an integer", int),
    float: ("a number", (int, float)),
    str: ("a text", str),
    list: ("a list", list),
}


class Bound(Protocol):
    """One condition on a value of the right type; as text it follows "an integer" or "a list"."""

    def allows(self, value: Any, /) -> bool:
        """Tell whether the value meets the condition."""


@dataclass(frozen=True)
class Between:
    """Lowest and highest value, both allowed."""

    low: float
    high: float

    def allows(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"from {self.low:.12g} to {self.high:.12g}"


@dataclass(frozen=True)
class AtLeast:
    """Lowest value."""

    low: float

    def allows(self, value: float) -> bool:
        return value >= self.low

    def __str__(self) -> str:
        return f"of at least {self.low:.12g}"


@dataclass(frozen=True)
class AtMost:
    """Highest value."""

    high: float

    def allows(self, value: float) -> bool:
        return value <= self.high

    def __str__(self) -> str:
        return f"at most {self.high:.12g}"


@dataclass(frozen=True)
class MoreThan:
    """Lower end that is not allowed itself."""

    low: float

    def allows(self, value: float) -> bool:
        return value > self.low

    def __str__(self) -> str:
        return f"above {self.low:.12g}"


@dataclass(frozen=True)
class LessThan:
    """Upper end that is not allowed itself."""

    high: float

    def allows(self, value: float) -> bool:
        return value < self.high

    def __str__(self) -> str:
        return f"below {self.high:.12g}"


@dataclass(frozen=True)
class Matches:
    """Regular expression for the whole text, and what it means in words."""

    pattern: str
    meaning: str

    def allows(self, value: str) -> bool:
        return re.fullmatch(self.pattern, value) is not None

    def __str__(self) -> str:
        return f"that is {self.meaning}"


@dataclass(frozen=True)
class MinItems:
    """Fewest items of a list."""

    least: int

    def allows(self, value: Sequence[Any]) -> bool:
        return len(value) >= self.least

    def __str__(self) -> str:
        return f"of at least {self.least} item{'s' * (self.least > 1)}"


@dataclass(frozen=True)
class NumItems:
    """Exact number of items of a list."""

    number: int

    def allows(self, value: Sequence[Any]) -> bool:
        return len(value) == self.number

    def __str__(self) -> str:
        return f"of {self.number} items"


@dataclass(frozen=True)
class Distinct:
    """No item of a list is there twice."""

    def allows(self, value: Sequence[Any]) -> bool:
        return not any(item in value[:index] for index, item in enumerate(value))

    def __str__(self) -> str:
        return "without repeats"


@dataclass(frozen=True)
class Holds:
    """Item that a list cannot do without."""

    item: str

    def allows(self, value: Sequence[Any]) -> bool:
        return self.item in value

    def __str__(self) -> str:
        return f"with {self.item} in it"


def allows(hint: Any, value: object) -> bool:
    """Tell whether a value is of the type of an ``Annotated`` hint and within its bounds; a bool is no number."""
    base, *marks = get_args(hint)
    is_of_kind = isinstance(value, _KINDS[get_origin(base) or base][1]) and not isinstance(value, bool)
    return is_of_kind and all(mark.allows(value) for mark in marks if not isinstance(mark, str))


def in_words(hint: Any) -> str:
    """Say what an ``Annotated`` hint allows."""
    base, *marks = get_args(hint)
    bounds = " and ".join(str(mark) for mark in marks if not isinstance(mark, str))
    return f"{_KINDS[get_origin(base) or base][0]} {bounds}"


def advice(hint: Any) -> str:
    """Return the texts of an ``Annotated`` hint, each in brackets after a space."""
    return "".join(f" ({mark})" for mark in get_args(hint) if isinstance(mark, str))
