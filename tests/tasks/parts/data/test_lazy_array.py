"""tasks/parts/data/lazy_array.py, held against numpy's own array."""

import pickle

import numpy as np
import pytest

from tasks.parts.data.lazy_array import LazyArray, part_of

CONTENT = np.random.default_rng(0).integers(0, 256, (7, 4, 5)).astype(np.uint8)


def open_content() -> LazyArray:
    return LazyArray(
        lambda numbers: [CONTENT[number] for number in numbers],
        CONTENT.shape[1:],
        np.uint8,
        rows_N=np.arange(len(CONTENT)),
        reopen=(open_content,),
    )


@pytest.mark.parametrize(
    "key",
    [
        2,
        -1,
        np.int64(3),
        slice(1, 5),
        slice(None),
        slice(None, None, -2),
        slice(9, 12),
        [4, 0, 4],
        np.array([6, 2]),
        np.array([], np.int64),
        [],
        np.arange(7) % 2 == 0,
        (slice(1, 3), 0),
        (2, slice(0, 2), 1),
        (slice(0, 2), ..., slice(0, 1)),
    ],
    ids=str,
)
def test_rows_are_those_of_an_array(key: object) -> None:
    found = open_content()[key]
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, CONTENT[key])


def test_shape_length_and_content_are_those_of_an_array() -> None:
    lazy = open_content()
    assert (lazy.shape, lazy.dtype, lazy.ndim, len(lazy)) == (CONTENT.shape, CONTENT.dtype, 3, 7)
    np.testing.assert_array_equal(np.asarray(lazy), CONTENT)
    np.testing.assert_array_equal(np.stack(list(lazy)), CONTENT)
    np.testing.assert_array_equal(np.asarray(lazy, dtype=np.int64), CONTENT)


def test_a_comparison_does_not_pass_in_silence() -> None:
    for compare in (lambda lazy: lazy == 255, lambda lazy: lazy != 255):
        with pytest.raises(TypeError, match=r"compare array\[\.\.\.\] or np\.asarray\(array\)"):
            compare(open_content())
    assert ((np.asarray(open_content()) == 255) == (CONTENT == 255)).all()


def test_a_number_beyond_the_rows_is_refused() -> None:
    with pytest.raises(IndexError):
        open_content()[7]


def test_a_part_reads_nothing_and_is_pickled_as_the_way_to_open_it() -> None:
    read: list[int] = []

    def read_rows(numbers: list[int]) -> list[np.ndarray]:
        read.extend(numbers)
        return [CONTENT[number] for number in numbers]

    lazy = LazyArray(read_rows, (4, 5), np.uint8, rows_N=np.arange(7), reopen=(open_content,))
    part = part_of(part_of(lazy, np.array([5, 3, 1])), slice(1, None))
    assert not read
    np.testing.assert_array_equal(part[:], CONTENT[[3, 1]])
    assert read == [3, 1]
    again = pickle.loads(pickle.dumps(part))
    assert len(pickle.dumps(part)) < 500
    np.testing.assert_array_equal(again[:], CONTENT[[3, 1]])
    np.testing.assert_array_equal(part_of(CONTENT, slice(2)), CONTENT[:2])
