"""The store: what stages published, found by its key, whatever ran in between and at whichever address.

DVC's cache holds the files by their md5, so ``dvc commit`` finds them there and stores no byte twice. The folder
``keys`` beside them holds a record for each key: a copy of the output's ``key.json``. Checkouts that share a cache
(``dvc cache dir``) share the store. Where there is no DVC project, nothing is kept.
"""

import configparser
import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.core.digest_index import FileVersion
from tasks.core.fingerprint import SCHEMA_VERSION, digest, file_md5
from tasks.core.reports import KEY_FILE, write_json

logger = logging.getLogger(__name__)

Record = Mapping[str, Any]
"""Content of ``key.json``: ``schema``, ``address``, ``key``, ``environment`` (facts of the surroundings) and
``files``, the md5 of each file by its name. The file also has the ``checksum`` of the rest."""

_PROJECT = Path(".dvc")
_OBJECT_MODE = 0o444
"""As DVC protects what its cache holds."""


def cache_folder() -> Path:
    """Return the folder of DVC's cache: ``cache.dir`` of the project, else of the user, else of the system."""
    for file in (_PROJECT / "config.local", _PROJECT / "config", *_shared_configs()):
        if file.is_file() and (folder := _cache_in_config(file)):
            return folder
    return _PROJECT / "cache"


@functools.cache
def _shared_configs() -> tuple[Path, Path]:
    """Return where DVC looks on Linux for the configuration of the user and of the system."""
    asked = os.environ.get
    user = asked("DVC_GLOBAL_CONFIG_DIR") or Path(asked("XDG_CONFIG_HOME") or Path.home() / ".config", "dvc")
    system = asked("DVC_SYSTEM_CONFIG_DIR") or Path(
        (asked("XDG_CONFIG_DIRS") or "/etc/xdg").split(":")[0], "dvc"
    )
    return Path(user, "config"), Path(system, "config")


def _cache_in_config(file: Path) -> Path | None:
    config = configparser.ConfigParser(interpolation=None)
    config.read(file, encoding="utf-8")
    folder = config.get("cache", "dir", fallback=None)
    return file.parent / Path(folder).expanduser() if folder else None


def object_file(cache: Path, md5: str) -> Path:
    """Return where DVC's cache holds the file, or the listing of the folder, with an md5."""
    return cache / "files" / "md5" / md5[:2] / md5[2:]


def read_record(file: Path) -> Record | None:
    """Return the record in a file; None if there is none, or with a warning if it is damaged."""
    try:
        version = FileVersion.from_status(file.stat())
        return _record_of_version(file, version)
    except (FileNotFoundError, NotADirectoryError):
        return None


@functools.lru_cache(maxsize=8192)
def _record_of_version(file: Path, _: FileVersion) -> Record | None:
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        record = None
    if (
        not isinstance(record, dict)
        or record.pop("checksum", None) != _checksum(record)
        or record.get("schema") != SCHEMA_VERSION
        or not isinstance(record.get("key"), str)
        or not isinstance(record.get("environment"), dict)
        or not isinstance(record.get("files"), dict)
        or not all(map(_is_inside, record["files"]))
    ):
        logger.warning("ignoring %s, which is damaged or from another version", file)
        return None
    return record


def write_record(file: Path, record: Record) -> None:
    """Write a record with its checksum."""
    write_json(file, {**record, "checksum": _checksum(record)})


def _checksum(record: Record) -> str:
    return hashlib.md5(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _is_inside(name: str) -> bool:
    """Return whether the name of a file stays in its folder."""
    return not name.startswith("/") and ".." not in name.split("/")


def keep(folder: Path, record: Record) -> None:
    """Store an output and its record, unless it has a damaged file of which the store has no intact copy."""
    if not _PROJECT.is_dir():
        return
    cache = cache_folder()
    for name, md5 in record["files"].items():
        kept, file = object_file(cache, md5), folder / name
        if file_md5(str(kept)) == md5:
            continue
        if file_md5(str(file)) != md5:
            return
        _copy(file, kept)
    file = _record_file(cache, record["key"])
    if read_record(file) != record:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft = file.with_suffix(f".{os.getpid()}")
        write_record(draft, record)
        draft.replace(file)


def restore(key: str, folder: Path, address: str, published: Path) -> bool:
    """Fill a folder with the output that was published under a key; return whether the store has all of it.

    If the store lost its record, that of the `published` output, which has lost a file itself, may be it. The md5 of
    every file is verified; a damaged file of DVC's cache is named and removed.
    """
    cache = cache_folder()
    records = map(read_record, (_record_file(cache, key), published / KEY_FILE))
    record = next((record for record in records if record is not None and record["key"] == key), None)
    if record is None:
        return False
    for name, md5 in record["files"].items():
        kept, file = object_file(cache, md5), folder / name
        if not kept.is_file():
            return False
        file.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(kept, file)
        if digest(file) != md5:
            logger.warning("removing %s, which was changed after it was stored", kept)
            kept.unlink(missing_ok=True)
            return False
    write_record(folder / KEY_FILE, {**record, "address": address})
    return True


def forget(key: str) -> None:
    """Remove the record of a key; the files stay until ``make gc``."""
    _record_file(cache_folder(), key).unlink(missing_ok=True)


def forget_damaged(folder: Path) -> None:
    """Make DVC unable to restore a folder as it is, because it hashed the output after that was damaged."""
    object_file(cache_folder(), digest(folder)).unlink(missing_ok=True)


def remove_incomplete() -> None:
    """Remove the records of outputs that DVC's cache no longer has."""
    cache = cache_folder()
    for file in sorted((cache / "keys").glob("*/*.json")):
        record = read_record(file)
        if record is None or not all(object_file(cache, md5).is_file() for md5 in record["files"].values()):
            file.unlink()


def _record_file(cache: Path, key: str) -> Path:
    return cache / "keys" / key[:2] / f"{key[2:]}.json"


def _copy(file: Path, kept: Path) -> None:
    kept.parent.mkdir(parents=True, exist_ok=True)
    draft = kept.with_name(f"{kept.name}.{os.getpid()}")
    try:
        shutil.copyfile(file, draft)
        draft.chmod(_OBJECT_MODE)
        draft.replace(kept)
    except BaseException:
        draft.unlink(missing_ok=True)  # half a gigabyte would keep a full disk full
        raise
