"""benchmarks/frames.py: other sizes, what stands around engines, and its tables."""

import numpy as np
import pytest

from benchmarks.frames import (
    ALONE,
    FRAMES,
    Resize,
    _as_png,
    _decode,
    _resize_table,
    _row,
    _table,
    at_size,
    measure_resizes,
)
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph
from tests.tasks.conftest import Workshop, workshop

__all__ = ["workshop"]


def test_graph_takes_images_of_another_size(workshop: Workshop) -> None:
    larger = at_size(read_graph(workshop.graph), 128)
    card = read_card_of_graph(larger)
    assert (card.height, card.width) == (128, 128)
    for value in (*larger.graph.input, *larger.graph.output):
        assert [axis.dim_value for axis in value.type.tensor_type.shape.dim[2:]] == [128, 128]


def test_png_is_decoded_to_the_frame_that_it_was_made_of() -> None:
    frame_HWC = np.random.default_rng(0).integers(0, 256, (8, 12, 3), np.uint8)
    np.testing.assert_array_equal(_decode(_as_png(frame_HWC)), frame_HWC[None])


def test_rows_are_multiples_of_the_engine_alone() -> None:
    rounds = {ALONE: [[2.0, 2.0]] * 6, FRAMES: [[2.2, 2.2]] * 6}
    row = _row("cpu_openvino", 64, FRAMES, rounds)
    assert row.ratio == pytest.approx(1.1) and row.latency_ms_p50 == 2.2
    assert f"| cpu_openvino | 64 | {FRAMES} | 2.200 | 2.200 | 1.100 (1.100 to 1.100) |" in _table([row])
    line = _resize_table([Resize("Pillow", 480, 640, 1.5, 0.125, 2.0)])
    assert "| 480x640 | Pillow | 1.50 | 12.5 % | 2 of 255 |" in line


def test_runtimes_resize_nearly_as_pillow_does(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.frames.DATA", workshop.data)
    pillow, *others = measure_resizes(96, 128, num_rounds=1)
    assert (pillow.share_different, pillow.largest_difference) == (0.0, 0.0)
    assert len(others) == 2 and all(row.largest_difference <= 8 for row in others)
