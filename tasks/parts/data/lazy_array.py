"""An array whose rows are read when they are indexed, for splits that need not fit into memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

ReadRows = Callable[[Sequence[int]], list[NDArray[Any]]]
"""Reads rows of given numbers, in their order."""


class LazyArray:
    """What stages use of an array [N, ...]: its shape, and rows by number, slice or numbers, which are read then."""

    def __init__(
        self,
        read_rows: ReadRows,
        row_shape: tuple[int, ...],
        dtype: type[np.generic],
        *,
        rows_N: NDArray[np.int64],
        reopen: tuple[Any, ...],
    ) -> None:
        """`rows_N` are the rows of the split that this array has; `reopen` is what pickle keeps of it, a function and
        its arguments: they open the whole split again."""
        self.shape = (len(rows_N), *row_shape)
        self.dtype = np.dtype(dtype)
        self.ndim = len(self.shape)
        self._read_rows, self._row_shape, self._type = read_rows, row_shape, dtype
        self._rows_N, self._reopen = rows_N, reopen

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> NDArray[Any]:
        if isinstance(key, tuple):
            first, rest = key[0], key[1:]
            return self[first][rest if _is_number(first) else (slice(None), *rest)]
        if _is_number(key):
            return self._read_rows([int(self._rows_N[operator.index(key)])])[0]
        rows = self._rows_N[key if isinstance(key, slice) else np.asarray(key, dtype=_index_type(key))]
        read = self._read_rows(rows.tolist())
        return np.stack(read) if read else np.empty((0, *self._row_shape), self.dtype)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return (self[row] for row in range(len(self)))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Read all rows; a batch at a time is better where there are many."""
        return self[:].astype(dtype or self.dtype, copy=False)

    def __eq__(self, other: object) -> Any:
        """Raise TypeError, as for other comparisons: without this, Python would compare identities in silence."""
        raise TypeError(
            "rows of files are read before they are compared: compare array[...] or np.asarray(array)"
        )

    __ne__ = __eq__
    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle how the array is opened, and nothing that was read: for data workers."""
        return _reopen, (self._reopen, self._rows_N)

    def part(self, rows: Any) -> LazyArray:
        """Return the array of some rows, of which none is read yet; `rows` is a slice or numbers."""
        return LazyArray(
            self._read_rows, self._row_shape, self._type, rows_N=self._rows_N[rows], reopen=self._reopen
        )


def part_of(array: NDArray[Any], rows: slice | NDArray[np.int64]) -> NDArray[Any]:
    """Return some rows of an array; those of a lazy one, which is typed as an array, are not read by this."""
    return cast("NDArray[Any]", array.part(rows)) if isinstance(array, LazyArray) else array[rows]


def _reopen(reopen: tuple[Any, ...], rows_N: NDArray[np.int64]) -> Any:
    function, *arguments = reopen
    opened: LazyArray = function(*arguments)
    return opened.part(rows_N)


def _is_number(key: Any) -> bool:
    return hasattr(key, "__index__") and not isinstance(key, np.ndarray)


def _index_type(key: Any) -> Any:
    """Return the type of the numbers of rows; an empty list has none of its own."""
    return np.int64 if not len(key) else None
