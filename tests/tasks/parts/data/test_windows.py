"""tasks/parts/data/windows.py on images of many sizes."""

import numpy as np
import pytest

from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.reading.windows import Span, cover, cut_image, cut_mask


def draw_case(seed: int) -> tuple[tuple[int, int], tuple[int, int], int]:
    random = np.random.default_rng(seed)
    window = tuple(int(side) for side in random.integers(4, 40, 2))
    overlap = int(random.integers(0, min(window)))
    size = tuple(int(side) for side in random.integers(1, 120, 2))
    return size, window, overlap


@pytest.mark.parametrize("seed", range(200))
def test_every_pixel_is_owned_once_with_half_the_overlap_around_it(seed: int) -> None:
    (height, width), window, overlap = draw_case(seed)
    num_owners_HW = np.zeros((height, width), np.int64)
    for each in cover(
        height, width, window_height=window[0], window_width=window[1], overlap=overlap, is_owned_once=True
    ):
        rows, columns = each.rows, each.columns
        num_owners_HW[rows.first : rows.end, columns.first : columns.end] += 1
        for span, length, side in ((rows, height, window[0]), (columns, width, window[1])):
            stop = span.start + side
            assert 0 <= span.start <= span.first < span.end <= min(stop, length)
            assert stop <= length or (span.start == 0 and length < side), "a window reaches over the image"
            assert span.start == 0 or span.first - span.start >= overlap // 2
            assert stop >= length or stop - span.end >= overlap // 2
    assert (num_owners_HW == 1).all()


def test_the_last_window_is_moved_inward() -> None:
    windows = cover(10, 25, window_height=10, window_width=10, overlap=4, is_owned_once=True)
    assert [window.columns for window in windows] == [
        Span(0, 0, 8),
        Span(6, 8, 14),
        Span(12, 14, 19),
        Span(15, 19, 25),
    ]
    assert {window.rows for window in windows} == {Span(0, 0, 10)}


def test_a_window_is_a_part_of_the_image_and_ignored_where_it_does_not_own_or_has_no_image() -> None:
    random = np.random.default_rng(0)
    image_HWC = random.integers(1, 256, (6, 25, 3)).astype(np.uint8)
    mask_HW = random.integers(0, 5, (6, 25)).astype(np.uint8)
    shared, owned = (
        cover(6, 25, window_height=8, window_width=10, overlap=4, is_owned_once=is_owned_once)[1]
        for is_owned_once in (False, True)
    )
    image = cut_image(image_HWC, shared, height=8, width=10)
    assert (image[:6] == image_HWC[:, 6:16]).all() and (image[6:] == 0).all()
    mask = cut_mask(mask_HW, shared, height=8, width=10)
    assert (mask[:6] == mask_HW[:, 6:16]).all() and (mask[6:] == IGNORE_INDEX).all()
    assert (cut_image(image_HWC, owned, height=8, width=10) == image).all()
    mask = cut_mask(mask_HW, owned, height=8, width=10)
    assert (mask[:6, 2:8] == mask_HW[:, 8:14]).all()
    assert (mask != IGNORE_INDEX).sum() == 6 * 6
