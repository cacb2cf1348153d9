"""Digests of files and code, and the key that decides whether a stage's output is fresh.

The digests equal DVC's (md5 of a file; md5 of the sorted JSON listing with the suffix ``.dir`` for a folder),
so that both drivers of the pipeline see the same changes.
"""

import ast
import functools
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tasks.core.digest_index import MIN_SIZE_BYTES, FileVersion, enter_md5, find_md5
from tasks.core.errors import ArtifactError

SCHEMA_VERSION = 3
"""Part of every key. Raise it when the meaning of an output folder changes, so that old outputs are made again."""

SOURCE_ROOT = Path(__file__).resolve().parents[2]
"""The folder that holds the package ``tasks``."""

_PACKAGE_DEPTH = 3
"""The number of path components of a package, such as ``tasks/parts/data``."""

_CHUNK_BYTES = 1 << 20


def digest(path: Path) -> str:
    """Return DVC's md5 of a file or folder.

    Data added with ``dvc add`` has the digest in its pointer file ``<path>.dvc``. It is held against the data, of
    which only files are read that changed since the last time, whatever their size.
    ``__pycache__`` is skipped, as in ``.dvcignore``.

    Raises ArtifactError if nothing exists at ``path``, or if it is not the data that the pointer names.
    """
    pointer = path.with_name(path.name + ".dvc")
    if pointer.is_file():
        return _added_md5(path, pointer)
    md5 = _content_md5(path)
    if md5 is None:
        raise ArtifactError(f"{path} does not exist. Run the stage that makes it first, or `dvc repro`.")
    return md5


def _added_md5(path: Path, pointer: Path) -> str:
    named = str(yaml.safe_load(pointer.read_text(encoding="utf-8"))["outs"][0]["md5"])
    if _content_md5(path, min_indexed_bytes=1) not in (None, named):
        raise ArtifactError(
            f"{path} is not the data that {pointer} names. Run `dvc checkout {pointer}` (`dvc pull {pointer}` if "
            f"another machine added it) to have what it names, or `dvc add {path}` if it was changed on purpose."
        )
    return named


def _content_md5(path: Path, *, min_indexed_bytes: int = MIN_SIZE_BYTES) -> str | None:
    md5 = file_md5(str(path), min_indexed_bytes)
    if md5 is None and path.is_dir():
        prefix = len(str(path)) + 1
        return listing_md5(
            {"md5": file_md5(file, min_indexed_bytes) or "", "relpath": file[prefix:].replace(os.sep, "/")}
            for file in _files(path)
        )
    return md5


def is_pattern(path: Path) -> bool:
    """Return whether a path is a pattern, such as ``artifacts/build_engine/*/cpu_openvino``."""
    return "*" in path.parts


def matches(pattern: Path) -> list[Path]:
    """Return the paths that match a pattern, sorted.

    Raises ArtifactError if there are none.
    """
    paths = sorted(Path().glob(pattern.as_posix()))
    if not paths:
        raise ArtifactError(f"{pattern} matches nothing. Run the stage that makes it first, or `dvc repro`.")
    return paths


def listing_md5(files: Iterable[Mapping[str, str]]) -> str:
    """Return DVC's md5 of a folder from the md5 and the relative path of each of its files."""
    listing = sorted(files, key=lambda entry: entry["relpath"])
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode()).hexdigest() + ".dir"


def stage_key(
    stage: str,
    config: Mapping[str, Any],
    inputs: Mapping[str, Path | Sequence[Path]],
    environment: Mapping[str, str],
) -> str:
    """Return the key of one stage call: one output with a key stands for any other that has it.

    Their bytes are equal too on one machine; on another CPU a training may give other ones (docs/cache.md).

    Covers the schema version, the stage's name, its resolved configuration, the source of its module and of the
    packages that it imports from, the facts of its surroundings (core/environment.py), and the content of its inputs,
    of which one may be several paths.
    """
    content = {
        "schema": SCHEMA_VERSION,
        "stage": stage,
        "config": config,
        "code": code_digests(f"tasks.{stage}"),
        "environment": dict(environment),
        "inputs": {
            name: digest(paths)
            if isinstance(paths, Path)
            else {path.as_posix(): digest(path) for path in paths}
            for name, paths in inputs.items()
        },
    }
    return hashlib.md5(json.dumps(content, sort_keys=True).encode()).hexdigest()


@functools.cache
def code_digests(module: str) -> dict[str, str]:
    """Return ``{path relative to the repository: md5}`` of a module and the ``tasks`` modules that it imports.

    Imports are found with ``ast`` at any depth of the file, so that none is forgotten. If a module's name is
    completed at run time, every module that it can name counts. A module in a package of ``tasks/core`` or
    ``tasks/parts`` stands for that whole folder, as in dvc.yaml; the imports of the folder's other files are not
    followed.
    """
    reached: set[Path] = set()
    waiting = [module]
    while waiting:
        file = SOURCE_ROOT.joinpath(*waiting.pop().split(".")).with_suffix(".py")
        if file not in reached and file.is_file():
            reached.add(file)
            waiting += _imported_task_modules(file)
    paths = {Path(*file.relative_to(SOURCE_ROOT).parts[:_PACKAGE_DEPTH]) for file in reached}
    return {path.as_posix(): digest(SOURCE_ROOT / path) for path in sorted(paths)}


@functools.cache
def _imported_task_modules(file: Path) -> tuple[str, ...]:
    text = file.read_text(encoding="utf-8")
    tree, names = ast.parse(text), list[str]()
    for node in _statements(tree.body):
        if isinstance(node, ast.Import):
            names += (alias.name for alias in node.names if alias.name.startswith("tasks."))
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "tasks":
            names += (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
    if "import_module(" in text:
        names += _modules_named_at_run_time(tree)
    return tuple(names)


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yield statements at any depth, without their expressions, which are most of a tree."""
    for node in body:
        yield node
        for blocks in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from _statements(getattr(node, blocks, ()))


def _modules_named_at_run_time(tree: ast.AST) -> Iterator[str]:
    """Yield all modules that a call like import_module(f"tasks.parts.engines.{runtime}.runner") can import."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0]
            parts = name.values if isinstance(name, ast.JoinedStr) else [name]
            form = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
            for file in SOURCE_ROOT.glob(f"{form.replace('.', '/')}.py") if form.startswith("tasks.") else ():
                yield ".".join(file.relative_to(SOURCE_ROOT).with_suffix("").parts)


def _files(folder: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name != "__pycache__"]
        yield from (f"{parent}{os.sep}{name}" for name in names)


def file_md5(path: str, min_indexed_bytes: int = MIN_SIZE_BYTES) -> str | None:
    """Return the md5 of a file, which is read if it changed since the last time; None if there is no file."""
    try:
        status = os.stat(path)  # noqa: PTH116 (a tenth of a cached call was the making of paths)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(status.st_mode):
        return None
    return _md5_of_version(path, FileVersion.from_status(status), min_indexed_bytes)


@functools.lru_cache(maxsize=65536)
def _md5_of_version(path: str, version: FileVersion, min_indexed_bytes: int) -> str:
    is_indexed = version.belongs_in_index(min_indexed_bytes)
    if is_indexed and (known := find_md5(path, version)):
        return known
    md5 = hashlib.md5()
    with Path(path).open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            md5.update(chunk)
        version_after = FileVersion.from_status(os.fstat(file.fileno()))
    if is_indexed and version_after == version:
        enter_md5(path, version, md5.hexdigest())
    return md5.hexdigest()
