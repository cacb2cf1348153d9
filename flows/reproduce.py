"""Trace an engine back to its data, and build the same bytes again.

``python -m flows.reproduce <engine_sha256>`` looks the engine up in MLflow, checks out the code of its commit into a
new folder, restores the inputs of its build from DVC's cache and remote (and runs the stages that neither holds),
prints the lineage from engine to data, and builds the engine again. It reports whether the bytes are the same.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from flows.lock_file import LOCK_FILE, read_lock
from flows.networks import check_recorded
from flows.templates import check_templates
from tasks.core.config import PARAMS_FILE
from tasks.core.environment import ENVIRONMENT_FILE
from tasks.core.errors import ArtifactError, ConfigError, EnginewrightError
from tasks.core.execute import ARTIFACTS, recorded_facts
from tasks.core.reports import read_key
from tasks.core.tracking.config import mask_credentials, read_tracking_config
from tasks.core.tracking.lookup import find_engine, read_pipeline_file
from tasks.core.tracking.records import UNCOMMITTED, UNKNOWN_COMMIT, TrackedEngine
from tasks.parts.engines.manifest import read_engine_manifest, sha256_of
from tasks.parts.engines.runtimes import Runtime

_SHA256 = re.compile(r"[0-9a-f]{8,64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[A-Za-z0-9_]+")
_DVC_FILE = Path("dvc.yaml")
_LOCK = Path("requirements.lock")
_LOCAL_CONFIG = Path(".dvc/config.local")
_OWN_CACHE = Path(".dvc/cache")


def prepare(engine: TrackedEngine, params: str, environment: str, folder: Path) -> None:
    """Make `folder` a checkout of the engine's commit with its params.yaml and this checkout's DVC cache.

    What the pipeline's run kept is restored as it was made, in the surroundings of then (`environment`).

    Raises ArtifactError if the code is not in this repository, or if MLflow holds names and paths that the pipeline
    does not write; ConfigError for an existing folder.
    """
    for tag in ("variant", "target"):
        if not _NAME.fullmatch(engine.tags[tag]):  # a part of paths
            raise ArtifactError(f"The run's {tag} is {engine.tags[tag]!r}, expected letters, digits and _.")
    commit = engine.tags["git_commit"]
    if commit == UNKNOWN_COMMIT or commit.endswith(UNCOMMITTED):
        raise ArtifactError(
            f"The code that made the engine was never committed (git_commit is {commit!r}), so it cannot be checked "
            "out. Commit, and run the pipeline again in an experiment of its own."
        )
    if not _COMMIT.fullmatch(commit):
        raise ArtifactError(f"The run's git_commit is {commit!r}, expected 40 hexadecimal digits.")
    if folder.exists():
        raise ConfigError(f"{folder} exists, expected a new folder (--into).")
    try:
        _run("git", "clone", "--quiet", "--no-checkout", str(Path.cwd()), str(folder))
        _run("git", "checkout", "--quiet", commit, cwd=folder)
    except ArtifactError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise ArtifactError(
            f"Commit {commit[:12]} is not in this repository; `git fetch` it. {error}"
        ) from error
    try:
        content = yaml.safe_load(params)
        check_templates(content, folder / _DVC_FILE)
    except (yaml.YAMLError, ConfigError) as error:
        shutil.rmtree(folder)
        raise ArtifactError(f"The params.yaml of the run was changed in MLflow: {error}") from error
    (folder / PARAMS_FILE).write_text(params, encoding="utf-8")
    (folder / ENVIRONMENT_FILE).parent.mkdir()
    (folder / ENVIRONMENT_FILE).write_text(environment, encoding="utf-8")
    _run(sys.executable, "-m", "dvc", "freeze", "environment", cwd=folder)
    if _LOCAL_CONFIG.is_file():
        shutil.copy(_LOCAL_CONFIG, folder / _LOCAL_CONFIG)  # the credentials of remotes, with their file mode
    cache = _run(sys.executable, "-m", "dvc", "cache", "dir").strip()
    _run(sys.executable, "-m", "dvc", "cache", "dir", "--local", str(Path(cache).resolve()), cwd=folder)
    metrics = [item["file"] for item in content["pipeline"].get("metrics", {}).values()]
    weights = content["pipeline"].get("checkpoints", {}).values()
    lent = (content["prepare_data"]["root"], *content["pipeline"]["imports"].values(), *weights)
    for path in lent:
        _lend(Path(path), folder)
    for path in metrics:
        _check_metric(folder / path, engine.tags.get("metric_sha256", ""), commit)
    check_recorded(content, json.loads(environment), folder, commit)


def _lend(path: Path, folder: Path) -> None:
    """Link data that is not in git into the checkout; DVC fetches its own data in the version of the commit."""
    inside = folder / path
    if (
        path.exists()
        and not path.is_absolute()
        and not inside.exists()
        and not Path(f"{inside}.dvc").is_file()
    ):
        inside.parent.mkdir(parents=True, exist_ok=True)
        inside.symlink_to(path.resolve())


def _check_metric(file: Path, measured: str, commit: str) -> None:
    """Raise ArtifactError unless the commit holds the user's own metric as the engine was measured with it."""
    found = sha256_of(file) if file.is_file() else "no such file"
    if found != measured:
        raise ArtifactError(
            f"{file}: commit {commit[:12]} holds another metric (sha256 {found[:12]}) than the one that the engine "
            f"was measured with ({measured[:12] or 'none was logged'}), because it was changed and not committed. "
            "Commit the file of model.metric and run the pipeline again."
        )


def lineage(lock: Mapping[str, Any], stage: str) -> Iterator[str]:
    """Yield the command of each stage that a stage depends on, nearest first, and what it reads."""
    makers = {
        output["path"]: name for name, entry in lock["stages"].items() for output in entry.get("outs", ())
    }
    order = [stage]
    for name in order:  # the list grows meanwhile
        yield f"{name}: {lock['stages'][name]['cmd']}"
        for dependency in lock["stages"][name].get("deps", ()):
            path = Path(dependency["path"])
            if path.parts[0] == "tasks":
                continue
            yield f"    reads {path}, md5 {dependency['md5']}"
            maker = next(
                (makers[str(place)] for place in (path, *path.parents) if str(place) in makers), None
            )
            if maker is not None and maker not in order:
                order.append(maker)


def rebuild(engine: TrackedEngine, folder: Path) -> str:
    """Restore what the build needs, build once more, and return the sha256 of the new engine."""
    variant, target = engine.tags["variant"], engine.tags["target"]
    stage = f"build_engine@{variant}-{target}"
    print("restoring what the build needs", flush=True)
    dvc = (sys.executable, "-m", "dvc")
    has_remote = bool(_run(*dvc, "remote", "list", cwd=folder).strip())
    _run(*dvc, "repro", *(["--pull"] if has_remote else []), stage, cwd=folder, is_shown=True)
    print("\n".join(lineage(read_lock(folder / LOCK_FILE), stage)))
    print("building the engine once more", flush=True)
    output = folder / ARTIFACTS / "build_engine" / variant / target
    shutil.rmtree(output)  # a stage whose output is fresh, or in the store, would build nothing
    _run(*dvc, "cache", "dir", "--local", str(folder.resolve() / _OWN_CACHE), cwd=folder)
    _run(*dvc, "repro", "--force", "--single-item", "--no-run-cache", stage, cwd=folder, is_shown=True)
    return read_engine_manifest(output / "engine").sha256


def _run(*command: str, cwd: Path | None = None, is_shown: bool = False) -> str:
    """Run a command; raise ArtifactError with the last line of its output if it fails."""
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"  # dvc.yaml calls `python`
    environment = {**os.environ, "PATH": binaries}
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=not is_shown, text=True, check=False
    )
    if done.returncode:
        words = f": {done.stderr.strip().splitlines()[-1]}" if done.stderr else ", see its output above"
        raise ArtifactError(f"`{' '.join(command[-4:])}` ended with {done.returncode}{words}")
    return done.stdout or ""


def _verdict(engine: TrackedEngine, rebuilt_sha256: str, folder: Path) -> tuple[str, bool]:
    asked = engine.tags["engine_sha256"]
    if rebuilt_sha256 == asked:
        return f"the same bytes: {asked}", True
    output = folder / ARTIFACTS / "build_engine" / engine.tags["variant"] / engine.tags["target"]
    manifest = read_engine_manifest(output / "engine")
    if not manifest.is_built:
        return f"no engine: the build was {manifest.status}, {manifest.reason}", False
    if (here := recorded_facts(output)) != (there := _facts(folder, engine.tags["target"])):
        return (
            f"different bytes, {rebuilt_sha256} instead of {asked}: built with {dict(here)}, then with {there}",
            False,
        )
    if read_key(output) != engine.tags["key_build_engine"]:
        return (
            "different bytes: the build's inputs are not those that were logged (data, parameters or code)",
            False,
        )
    if manifest.target.tensorrt is not None:
        is_rtx = manifest.target.compiler is Runtime.tensorrt_rtx
        why = (
            "TensorRT for RTX writes other bytes each time"
            if is_rtx
            else "TensorRT chooses kernels by timing"
        )
        return f"different bytes, {rebuilt_sha256}: {why}, so no two plans are equal", True
    why = (
        "the packages come from another lock file"
        if _is_other_lock(folder)
        else "its build is not deterministic"
    )
    return (
        f"different bytes, {rebuilt_sha256} instead of {asked}: {why}, or this CPU differs",
        False,
    )


def _facts(folder: Path, target: str) -> Any:
    """Return the facts of the surroundings in which the logged engine was built."""
    content = json.loads((folder / ENVIRONMENT_FILE).read_text(encoding="utf-8"))
    return content["build_engine"][target]


def _is_other_lock(folder: Path) -> bool:
    both = [path.read_bytes() if path.is_file() else b"" for path in (folder / _LOCK, _LOCK)]
    return both[0] != both[1]


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flows.reproduce",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("engine_sha256", help="all of it, or at least its first eight characters")
    parser.add_argument(
        "--into", type=Path, help="a new folder for the checkout; .reproduced/<sha256> by default"
    )
    parser.add_argument("--tracking-uri", help="instead of track.uri")
    options = parser.parse_args(arguments)
    if not _SHA256.fullmatch(options.engine_sha256):
        parser.error(f"{options.engine_sha256!r} is not a sha256, expected 8 to 64 hexadecimal digits")
    return options


def main(arguments: Sequence[str]) -> int:
    """Build the engine again and return the exit code: 0 if the result is as expected."""
    options = _parse(arguments)
    try:
        tracking = read_tracking_config(options.tracking_uri)
        engine = find_engine(tracking, options.engine_sha256)
        if engine is None:
            raise ConfigError(
                f"MLflow at {mask_credentials(tracking.uri)} has no engine with sha256 {options.engine_sha256}. "
                "`python -m flows.pick --target <target>` lists its engines."
            )
        folder = options.into or Path(".reproduced") / engine.tags["engine_sha256"][:12]
        print(f"{engine.tags['variant']} on {engine.tags['target']}, run {engine.run_id}")
        print(f"code {engine.tags['git_commit']}, checked out into {folder}")
        params, environment = (
            read_pipeline_file(tracking, engine, file.name) for file in (PARAMS_FILE, ENVIRONMENT_FILE)
        )
        prepare(engine, params, environment, folder)
        words, is_right = _verdict(engine, rebuild(engine, folder), folder)
        print(words)
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return int(not is_right)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
