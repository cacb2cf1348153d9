"""The index of digests: what it spares, and that it never gives a wrong one. With real files and processes."""

import hashlib
import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.core.digest_index import INDEX_FILE, MIN_SIZE_BYTES, FileVersion, enter_md5, find_md5
from tasks.core.fingerprint import digest
from tests.conftest import REPOSITORY

SENTINEL = "no file has this digest"
PRINT_DIGESTS = """
import sys
from pathlib import Path
from tasks.core.fingerprint import digest
for path in sys.argv[1:]:
    print(digest(Path(path)))
"""
FORK = """
import os, sys
from pathlib import Path
from tasks.core.fingerprint import digest
first, second = map(Path, sys.argv[1:])
digest(first)
if os.fork() == 0:
    print(digest(second))
"""


@pytest.fixture(scope="module")
def old_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files that are old enough for the index. They wait for it together: no program can set ctime."""
    folder = tmp_path_factory.mktemp("old")
    for number in range(32):
        (folder / f"{number}.bin").write_bytes(os.urandom(MIN_SIZE_BYTES))
    (folder / "small").write_bytes(bytes(MIN_SIZE_BYTES - 1))
    (folder / "large").touch()
    os.truncate(folder / "large", 1 << 28)  # takes a moment to read and no room on the disk
    time.sleep(2.1)
    return folder


@pytest.fixture(scope="module")
def old_files(old_folder: Path) -> Iterator[Path]:
    return iter(sorted(old_folder.glob("*.bin")))


@pytest.fixture
def old_file(old_files: Iterator[Path]) -> Path:
    return next(old_files)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with an empty `artifacts`, which tests and their processes work in."""
    (tmp_path / "artifacts").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    return tmp_path


def start_process(program: str, *paths: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program, *paths], stdout=subprocess.PIPE, text=True)


def digests_of_another_process(*paths: Path, program: str = PRINT_DIGESTS) -> list[str]:
    process = start_process(program, *paths)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return output.splitlines()


def md5_of(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


def version_of(path: Path) -> FileVersion:
    return FileVersion.from_status(path.stat())


def replace_entry(path: Path) -> None:
    """Enter a digest that no process can get from reading the file."""
    assert find_md5(str(path), version_of(path)) == md5_of(path)
    enter_md5(str(path), version_of(path), SENTINEL)


def test_second_process_does_not_read_a_large_file_again(checkout: Path, old_file: Path) -> None:
    assert digests_of_another_process(old_file) == [md5_of(old_file)]
    replace_entry(old_file)
    assert digests_of_another_process(old_file) == [SENTINEL]


def test_changed_file_is_read_again_even_with_its_size_and_mtime_put_back(
    checkout: Path, old_file: Path
) -> None:
    digest(old_file)
    replace_entry(old_file)
    before = old_file.stat()
    with old_file.open("r+b") as file:
        file.write(bytes([file.read(1)[0] ^ 1]))
    os.utime(old_file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert old_file.stat().st_mtime_ns == before.st_mtime_ns
    assert digests_of_another_process(old_file) == [md5_of(old_file)]


def test_other_file_at_the_same_path_is_read(checkout: Path, old_files: Iterator[Path]) -> None:
    one, two = next(old_files), next(old_files)
    digest(one)
    replace_entry(one)
    two.replace(one)
    assert digests_of_another_process(one) == [md5_of(one)]


def test_file_that_was_just_written_is_not_entered(checkout: Path) -> None:
    young = checkout / "young"
    young.write_bytes(bytes(MIN_SIZE_BYTES))
    os.utime(young, (0, 0))  # as a copy that keeps mtime
    assert digest(young) == md5_of(young)
    assert find_md5(str(young), version_of(young)) is None


def test_file_from_the_future_is_read_each_time(checkout: Path) -> None:
    file = checkout / "file"
    file.write_bytes(bytes(MIN_SIZE_BYTES))
    tomorrow = time.time() + 24 * 3600
    os.utime(file, (tomorrow, tomorrow))
    assert digest(file) == md5_of(file)
    assert find_md5(str(file), version_of(file)) is None


def test_file_that_changes_while_it_is_read_is_not_entered(checkout: Path, old_folder: Path) -> None:
    large = old_folder / "large"
    before = version_of(large)
    reader = threading.Thread(target=digest, args=[large])
    reader.start()
    while not any(file.resolve() == large for file in Path("/proc/self/fd").iterdir()):
        assert reader.is_alive()
    with large.open("r+b") as file:
        file.write(b"changed")
    reader.join()
    for version in (before, version_of(large)):
        assert find_md5(str(large), version) is None


def test_small_file_costs_no_database(checkout: Path, old_folder: Path) -> None:
    small = old_folder / "small"
    program = PRINT_DIGESTS + "print('sqlite3' in sys.modules)"
    assert digests_of_another_process(small, program=program) == [md5_of(small), "False"]
    assert not INDEX_FILE.exists()


def test_no_index_is_made_outside_a_checkout(
    tmp_path: Path, old_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert digest(old_file) == md5_of(old_file)
    assert not list(tmp_path.iterdir())


def test_index_begins_when_the_first_stage_has_made_its_folder(
    tmp_path: Path, old_files: Iterator[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before, after = next(old_files), next(old_files)
    digest(before)
    Path("artifacts").mkdir()
    assert digest(after) == find_md5(str(after), version_of(after))


def test_name_that_is_no_text_is_entered(checkout: Path, old_file: Path) -> None:
    strange = old_file.with_name(os.fsdecode(b"\xff.bin"))
    strange.symlink_to(old_file)
    assert digest(strange) == md5_of(old_file)
    assert find_md5(str(strange), version_of(strange)) == md5_of(old_file)


@pytest.mark.parametrize("damage", ["no database", "truncated", "overwritten"])
def test_damaged_index_is_replaced(checkout: Path, old_file: Path, damage: str) -> None:
    digests_of_another_process(old_file)
    content = INDEX_FILE.read_bytes()
    damaged = {
        "no database": b"no database" * 1000,
        "truncated": content[: len(content) // 2],
        "overwritten": content[:100].ljust(len(content), b"\xff"),
    }
    INDEX_FILE.write_bytes(damaged[damage])
    assert digests_of_another_process(old_file) == [md5_of(old_file)]
    assert not INDEX_FILE.exists()
    assert digests_of_another_process(old_file) == [md5_of(old_file)]
    replace_entry(old_file)
    assert digests_of_another_process(old_file) == [SENTINEL]


def test_no_flipped_bit_of_the_index_gives_a_wrong_digest(
    checkout: Path, old_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests_of_another_process(old_file)
    content, right = INDEX_FILE.read_bytes(), md5_of(old_file)
    for position in [position for position, byte in enumerate(content) if byte]:
        flipped = bytearray(content)
        flipped[position] ^= 1
        place = checkout / str(position)
        (place / "artifacts").mkdir(parents=True)
        (place / INDEX_FILE).write_bytes(flipped)
        monkeypatch.chdir(place)
        assert find_md5(str(old_file), version_of(old_file)) in (None, right), position


def test_files_are_read_where_the_index_cannot_be_opened(checkout: Path, old_file: Path) -> None:
    INDEX_FILE.mkdir()
    assert digests_of_another_process(old_file) == [md5_of(old_file)]
    assert INDEX_FILE.is_dir()


def test_files_are_read_where_the_index_cannot_grow(checkout: Path, old_file: Path) -> None:
    no_space = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))"
    assert digests_of_another_process(old_file, program=no_space + PRINT_DIGESTS) == [md5_of(old_file)]
    assert digests_of_another_process(old_file) == [md5_of(old_file)]
    replace_entry(old_file)


def test_files_are_read_while_the_index_is_locked(checkout: Path, old_file: Path) -> None:
    digests_of_another_process(old_file)
    replace_entry(old_file)
    holder = sqlite3.connect(INDEX_FILE, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    assert digests_of_another_process(old_file) == [md5_of(old_file)]
    holder.close()
    assert digests_of_another_process(old_file) == [SENTINEL]


def test_eight_processes_fill_one_index(checkout: Path, old_files: Iterator[Path]) -> None:
    paths = [next(old_files) for _ in range(8)]
    expected = [md5_of(path) for path in paths]
    processes = [start_process(PRINT_DIGESTS, *paths) for _ in range(8)]
    for process in processes:
        output, _ = process.communicate(timeout=120)
        assert (process.returncode, output.splitlines()) == (0, expected)
    for path in paths:
        replace_entry(path)


def test_forked_process_reads_for_itself(checkout: Path, old_files: Iterator[Path]) -> None:
    one, two = next(old_files), next(old_files)
    assert digests_of_another_process(one, two, program=FORK) == [md5_of(two)]
    assert find_md5(str(one), version_of(one)) == md5_of(one)
    assert find_md5(str(two), version_of(two)) is None
