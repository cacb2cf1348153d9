"""Open the runner of an engine folder, whatever its runtime."""

import dataclasses
import functools
import importlib
from pathlib import Path

from tasks.core.errors import ArtifactError
from tasks.parts.engines.machine import check_machine
from tasks.parts.engines.manifest import EngineManifest, FloatArray, read_engine_manifest, sha256_of
from tasks.parts.engines.nvtx import is_profiled, nvtx_range
from tasks.parts.engines.runner import Runner
from tasks.parts.engines.tuning import Tuning


def open_engine(engine: Path, tuning: Tuning | None = None) -> Runner:
    """Check an engine folder from its manifest and return its runner, not yet loaded.

    `tuning` takes the place of the threads that the target declares. Engines are native code: nothing of the file is
    loaded before its sha256 matches the manifest. Raises ArtifactError for a missing, damaged or foreign file,
    TargetMismatch for another machine or version.
    """
    manifest = read_engine_manifest(engine)
    check_machine(manifest)
    file = _checked_file(engine, manifest)
    return load_runner(file, manifest, tuning)


def load_runner(file: Path, manifest: EngineManifest, tuning: Tuning | None = None) -> Runner:
    """Return the runner of a file that this process has just made, without checks."""
    runtime, more = manifest.target.runtime, {}
    if tuning is not None:
        target = dataclasses.replace(manifest.target, num_threads=tuning.num_threads)
        manifest = dataclasses.replace(manifest, target=target)
        more = tuning.options_for(runtime)
    module = importlib.import_module(f"tasks.parts.engines.{runtime}.runner")
    runner: Runner = module.open_runner(file, manifest, **({"more_options": more} if more else {}))
    if is_profiled():
        _mark_inferences(runner, f"{file} on {manifest.target.name}")
    return runner


def _mark_inferences(runner: Runner, name: str) -> None:
    """Show each inference of a runner, and of the concurrent ones that it opens, as an NVTX range."""
    run, open_concurrent = runner.run, runner.open_concurrent

    @functools.wraps(run)
    def run_marked(images_NCHW: FloatArray) -> FloatArray:
        with nvtx_range(f"{name}, batch {len(images_NCHW)}"):
            return run(images_NCHW)

    @functools.wraps(open_concurrent)
    def open_marked(count: int) -> tuple[Runner, ...]:
        opened = open_concurrent(count)
        for each in opened:
            _mark_inferences(each, name)
        return opened

    runner.run, runner.open_concurrent = run_marked, open_marked  # type: ignore[method-assign]


def _checked_file(engine: Path, manifest: EngineManifest) -> Path:
    if not manifest.is_built:
        raise ArtifactError(
            f"{engine}: holds no engine, the build was {manifest.status} ({manifest.reason}). Fix the cause "
            "and run build_engine again."
        )
    if not manifest.file or Path(manifest.file).name != manifest.file:
        raise ArtifactError(
            f"{engine}: the manifest names the file {manifest.file!r}, expected a plain file name."
        )
    file = engine / manifest.file
    if not file.is_file():
        raise ArtifactError(f"{file}: not found, expected the engine. Run build_engine again.")
    sha256 = sha256_of(file)
    if sha256 != manifest.sha256:
        raise ArtifactError(
            f"{file}: sha256 {sha256[:12]}..., the manifest says {manifest.sha256[:12]}...; the file was "
            "changed or truncated and is not loaded. Run build_engine again, or fetch it again from the "
            "remote."
        )
    return file
