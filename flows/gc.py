"""Free disk space without losing a picked engine.

``python -m flows.gc`` removes from DVC's cache what neither the workspace (``dvc.lock``, and of that also the stages
that today's params.yaml leaves out) nor a picked engine needs.
An engine is picked if an alias of a registered model in MLflow points to it. MLflow keeps the engine's files; the
cache keeps everything that ``flows.reproduce`` needs to build it again without training, found through DVC's run
cache. Records of Prefect, leftovers of killed stages, and kernels that TensorRT for RTX compiled for plans that are
no longer here, are removed once they are a day old. With ``--dry`` nothing is removed, and DVC lists what would be.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flows import local_server
from flows.lock_file import LOCK_FILE, read_lock
from flows.workspace import KEPT_LOCK_FILE, hold_workspace
from tasks.core.errors import ArtifactError, EnginewrightError
from tasks.core.execute import ARTIFACTS, LEFTOVER_AGE_S, remove_leftovers
from tasks.core.fingerprint import listing_md5
from tasks.core.reports import KEY_FILE, read_key
from tasks.core.store import cache_folder, object_file, remove_incomplete
from tasks.core.tracking.config import read_tracking_config
from tasks.core.tracking.lookup import find_picked_engines
from tasks.parts.engines.frame_engine.jit import DRAFT, SUFFIX
from tasks.parts.engines.manifest import MANIFEST_FILE
from tasks.parts.engines.tensorrt_options import RUNTIME_CACHE


class CollectionFailed(EnginewrightError):
    """The cache is not cleaned: DVC could not, or it is not known what is needed."""


class Cache:
    """What DVC's cache holds, and which stage runs filled it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        records = (
            yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
            for file in sorted((folder / "runs").glob("*/*/*"))
        )
        self.runs: list[Mapping[str, Any]] = [
            run for run in records if run["cmd"].startswith("python -m tasks ")
        ]
        self._listings: dict[str, dict[str, str]] = {}
        self._by_output: defaultdict[Path, list[Mapping[str, Any]]] = defaultdict(list)
        for run in self.runs:
            self._by_output[Path(_output(run)["path"])].append(run)

    def holds(self, md5: str) -> bool:
        """Return whether the cache has a file or the listing of a folder."""
        return object_file(self.folder, md5).is_file()

    def key_of(self, run: Mapping[str, Any]) -> str | None:
        """Return the key of a run's stage call; None if the cache does not have its output."""
        md5 = self._md5_inside(_output(run)["md5"], KEY_FILE)
        if md5 is None or not self.holds(md5):
            return None
        return str(json.loads(object_file(self.folder, md5).read_text(encoding="utf-8"))["key"])

    def lineage(self, keys: Collection[str]) -> set[str]:
        """Return the md5 of everything in the cache that the calls with these keys made or read, back to the data."""
        waiting = [run for run in self.runs if self.key_of(run) in keys]
        for run in waiting:  # the list grows meanwhile
            for dependency in run["deps"]:
                waiting += [maker for maker in self._makers(dependency) if maker not in waiting]
        used = {entry["md5"] for run in waiting for entry in (*run["deps"], *run["outs"])}
        return {md5 for md5 in used if self.holds(md5)}

    def _makers(self, dependency: Mapping[str, str]) -> Iterator[Mapping[str, Any]]:
        path = Path(dependency["path"])
        for place in (path, *path.parents):
            for run in self._by_output[place]:
                inside = path.relative_to(place).as_posix()
                if self._md5_inside(_output(run)["md5"], inside) == dependency["md5"]:
                    yield run

    def _md5_inside(self, folder_md5: str, inside: str) -> str | None:
        """Return the md5 of a file or folder inside a folder, from the folder's listing."""
        if inside == ".":
            return folder_md5
        files = self._files(folder_md5)
        if inside in files:
            return files[inside]
        below = [
            {"md5": md5, "relpath": name.removeprefix(f"{inside}/")}
            for name, md5 in files.items()
            if name.startswith(f"{inside}/")
        ]
        return listing_md5(below) if below else None

    def _files(self, md5: str) -> Mapping[str, str]:
        """Return the md5 of a folder's files by relative path; empty if the cache does not have its listing."""
        if md5 not in self._listings:
            is_there = md5.endswith(".dir") and self.holds(md5)
            text = object_file(self.folder, md5).read_text(encoding="utf-8") if is_there else "[]"
            self._listings[md5] = {entry["relpath"]: entry["md5"] for entry in json.loads(text)}
        return self._listings[md5]


def _output(run: Mapping[str, Any]) -> Mapping[str, str]:
    [output] = run["outs"]  # `python -m tasks` fills one folder
    return dict(output)


def find_locked(cache: Cache) -> set[str]:
    """Return the md5 of all outputs in dvc.lock, also in that of the last deployed run.

    `dvc gc` sees only the stages of today's params.yaml.

    Raises CollectionFailed for one that is damaged.
    """
    try:
        locks = [read_lock(file) for file in (LOCK_FILE, KEPT_LOCK_FILE) if file.is_file()]
    except ArtifactError as error:
        raise CollectionFailed(f"Nothing is removed, as nobody can say what is needed: {error}") from error
    stages = [stage for lock in locks for stage in lock["stages"].values()]
    outputs = (output for stage in stages for output in stage.get("outs", ()))
    made = {output["md5"] for output in outputs if "md5" in output}
    return {md5 for md5 in made if cache.holds(md5)}


def find_kept(cache: Cache) -> set[str]:
    """Return the md5 of everything in the cache that picked engines need.

    Raises TrackingUnavailable when MLflow does not answer.
    """
    tracking = read_tracking_config()
    picked = find_picked_engines(tracking) if tracking.enabled else []
    kept: set[str] = set()
    for engine in picked:
        if "key_build_engine" not in engine.tags:
            continue  # somebody else's model on the same server
        needed = cache.lineage({engine.tags["key_build_engine"]})
        place = f"{len(needed)} objects kept" if needed else "built elsewhere, only MLflow has its files"
        print(f"{engine.tags['variant']} on {engine.tags['target']}: {place}")
        kept |= needed
    return kept


def collect_garbage(cache: Cache, kept: Collection[str], *, is_dry: bool) -> None:
    """Let DVC remove what neither the stages of params.yaml nor `kept` name.

    Raises CollectionFailed after DVC has printed its own message.
    """
    with tempfile.TemporaryDirectory() as folder:
        _write_project(Path(folder), cache.folder, kept)
        command = [sys.executable, "-m", "dvc", "gc", "--workspace", "--force", "--projects", folder]
        if subprocess.run([*command, *(["--dry"] if is_dry else [])], check=False).returncode:
            raise CollectionFailed(
                "`dvc gc` failed; see its message above. Nothing in use is lost; run it again."
            )


def _write_project(folder: Path, cache: Path, kept: Collection[str]) -> None:
    """Write a DVC project with the data to keep, which `dvc gc --projects` then spares."""
    (folder / ".dvc").mkdir()
    (folder / ".dvc/config").write_text(
        f"[core]\n    no_scm = true\n[cache]\n    dir = {cache}\n", encoding="utf-8"
    )
    outputs = [{"md5": md5, "hash": "md5", "path": md5} for md5 in sorted(kept)]
    (folder / "kept.dvc").write_text(yaml.safe_dump({"outs": outputs}), encoding="utf-8")


def remove_old_results() -> None:
    """Remove Prefect's records that are a day old and belong to no output of this checkout."""
    current = {read_key(file.parent) for file in ARTIFACTS.glob(f"[!.]*/**/{KEY_FILE}")}
    for file in (local_server.HOME / "storage").glob("*"):
        if file.name not in current and time.time() - file.stat().st_mtime > LEFTOVER_AGE_S:
            file.unlink()


def remove_old_kernels() -> None:
    """Remove kernels of TensorRT for RTX that are a day old and belong to no plan of this checkout."""
    manifests = (ARTIFACTS / "build_engine").rglob(MANIFEST_FILE)
    plans = {json.loads(file.read_text(encoding="utf-8")).get("sha256") for file in manifests}
    for file in RUNTIME_CACHE.glob(f"*{SUFFIX}"):
        is_current = file.stem.rpartition("-")[2] in plans
        if not is_current and time.time() - file.stat().st_mtime > LEFTOVER_AGE_S:
            file.unlink()
    for draft in RUNTIME_CACHE.glob(f"{DRAFT}*"):  # of processes that were killed
        if time.time() - draft.stat().st_mtime > LEFTOVER_AGE_S:
            shutil.rmtree(draft)


def main(arguments: Sequence[str]) -> int:
    """Clean up and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.gc", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--dry", action="store_true", help="remove nothing, list what would be removed from the cache"
    )
    options = parser.parse_args(arguments)
    try:
        with hold_workspace():
            cache = Cache(cache_folder().resolve())
            collect_garbage(cache, find_kept(cache) | find_locked(cache), is_dry=options.dry)
            if not options.dry:
                remove_incomplete()
                remove_leftovers()
                remove_old_results()
                remove_old_kernels()
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
