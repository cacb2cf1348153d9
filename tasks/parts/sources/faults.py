"""Errors that are kept while other files are read."""

from __future__ import annotations

from typing import TypeVar

from tasks.core.errors import DataError

_Fault = TypeVar("_Fault", bound=DataError)


def without_traceback(error: _Fault) -> _Fault:
    """Return an error of the same type and text that holds no frame, and so no decoded image, alive."""
    return type(error)(*error.args)
