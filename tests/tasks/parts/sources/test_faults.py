"""Faults of files are kept until all are checked: without what was decoded when they were found."""

from pathlib import Path

import numpy as np
import pytest

from tasks.core.errors import DataError
from tasks.parts.data.class_table import ClassTable
from tasks.parts.data.masks import ColourMask, MaskFile
from tasks.parts.sources.class_folder import ImageFile, _read_all
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.pairs import Pair, _check_all
from tests.tasks.parts.sources.runs import config_of, halves, write_image, write_mask

TABLE = ClassTable(("a", "b"), "test", ((0,), (1,)))


@pytest.fixture
def config() -> FolderConfig:
    folder = config_of("folder", max_bad_images=1).folder
    assert folder is not None
    return folder


def holds_nothing(fault: DataError | None) -> bool:
    return fault is not None and not any((fault.__traceback__, fault.__cause__, fault.__context__))


def test_fault_of_a_pair_keeps_its_type_and_text_and_no_arrays(tmp_path: Path, config: FolderConfig) -> None:
    write_image(tmp_path / "image.png", 0)
    write_mask(tmp_path / "mask.png", np.dstack([halves(0, 1)] * 3))
    (tmp_path / "empty.png").write_bytes(b"")
    pairs = [
        Pair(name, tmp_path / "image.png", MaskFile(tmp_path / f"{name}.png")) for name in ("mask", "empty")
    ]
    colour, empty = (check.fault for check in _check_all(pairs, TABLE, config))
    assert type(colour) is ColourMask and "a RGB image with 2 colours" in str(colour)
    assert "0 bytes" in str(empty) and holds_nothing(colour) and holds_nothing(empty)


def test_fault_of_an_image_holds_nothing(tmp_path: Path, config: FolderConfig) -> None:
    (tmp_path / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    _, bad = _read_all({"broken": ImageFile(tmp_path / "broken.png", None)}, config)
    assert "cannot be decoded" in str(bad["broken"]) and holds_nothing(bad["broken"])
