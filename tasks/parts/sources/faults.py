"""Errors that are kept while other files are read."""

from __future__ import annotations

import re
from typing import TypeVar

from tasks.core.errors import DataError

_OBJECT = re.compile(r"\s*(file )?<_io\.BytesIO object at 0x[0-9a-f]+>")
_Fault = TypeVar("_Fault", bound=DataError)


def without_traceback(error: _Fault) -> _Fault:
    """Return an error that holds no frame, and so no decoded image, alive, and whose text names no Python object.

    Pillow calls what it decodes from memory `<_io.BytesIO object at 0x..>`.
    """
    error.args = tuple(_OBJECT.sub("", each) if isinstance(each, str) else each for each in error.args)
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
