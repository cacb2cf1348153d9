"""The file with the kernels that TensorRT for RTX compiled. What is in it needs a GPU: tests/gpu."""

import logging
from pathlib import Path

import pytest

from tasks.parts.engines.frame_engine.jit import kernels_file, read_kernels, user_folder, write_kernels

MACHINE = {"gpu": "NVIDIA GeForce RTX 4090", "capability": "8.9", "version": "1.7.1.116", "driver": 13020}
FILE = "nvidia-geforce-rtx-4090-sm89-rtx1.7.1.116-cuda13020-{}.kernels"


def test_file_is_that_of_a_plan_a_gpu_a_version_and_a_driver(tmp_path: Path) -> None:
    file = kernels_file(tmp_path, **MACHINE, sha256="a" * 64)  # type: ignore[arg-type]
    assert file == tmp_path / FILE.format("a" * 64)
    others = [
        {"gpu": "NVIDIA GeForce RTX 4080"},
        {"version": "1.7.2"},
        {"driver": 13030},
        {"sha256": "b" * 64},
    ]
    for other in others:
        assert kernels_file(tmp_path, **MACHINE | {"sha256": "a" * 64} | other) != file  # type: ignore[arg-type]


def test_kernels_are_read_as_they_were_written_and_replace_the_former(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / FILE.format("a" * 64)
    assert read_kernels(file) == b"" and read_kernels(None) == b""
    for content in (b"some kernels", b"some more kernels"):
        write_kernels(file, content)
        assert read_kernels(file) == content
    assert list(file.parent.iterdir()) == [file]


def test_folder_that_cannot_be_used_is_told_and_stops_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a file").write_bytes(b"")
    file = tmp_path / "a file" / FILE.format("a" * 64)
    with caplog.at_level(logging.WARNING):
        write_kernels(file, b"some kernels")
        assert read_kernels(file) == b""
    written, read = caplog.messages
    assert "cannot be written" in written and "the next start compiles" in written
    assert "cannot be read" in read


def test_bundles_keep_kernels_among_the_user_s_caches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_folder() == tmp_path / "enginewright"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_folder() == tmp_path / ".cache" / "enginewright"
