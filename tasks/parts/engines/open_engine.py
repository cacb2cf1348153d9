"""From an engine folder to the runner of its runtime, without asking the caller which runtime that is."""

from pathlib import Path

from tasks.core.errors import ArtifactError
from tasks.parts.engines.machine import check_machine
from tasks.parts.engines.manifest import EngineManifest, read_engine_manifest, sha256_of
from tasks.parts.engines.onnxruntime import runner as onnxruntime
from tasks.parts.engines.openvino import runner as openvino
from tasks.parts.engines.runner import Runner
from tasks.parts.engines.target import Runtime
from tasks.parts.engines.torch import aotinductor
from tasks.parts.engines.torch import eager as torch_eager
from tasks.parts.engines.torch.runner import TorchRunner


def open_engine(engine: Path) -> Runner:
    """Check an engine folder from its manifest and return its runner, not yet loaded.

    Engines are native code: nothing of the file is loaded before its sha256 matches the manifest.
    Raises ArtifactError for an absent, damaged or foreign file, TargetMismatch for another machine or
    version.
    """
    manifest = read_engine_manifest(engine)
    check_machine(manifest)
    file = _checked_file(engine, manifest)
    return load_runner(file, manifest)


def load_runner(file: Path, manifest: EngineManifest) -> Runner:
    """Return the runner of a file that needs no check, because this process has just made it."""
    match manifest.target.runtime:
        case Runtime.torch:
            return TorchRunner(file, manifest, torch_eager.load_network)
        case Runtime.onnxruntime:
            return onnxruntime.OnnxruntimeRunner(file, manifest)
        case Runtime.openvino:
            return openvino.OpenvinoRunner(file, manifest)
        case Runtime.tensorrt:
            from tasks.parts.engines.tensorrt.runner import TensorrtRunner

            return TensorrtRunner(file, manifest)
        case Runtime.aotinductor:
            return TorchRunner(file, manifest, aotinductor.load_package)


def _checked_file(engine: Path, manifest: EngineManifest) -> Path:
    if not manifest.is_built:
        raise ArtifactError(
            f"{engine}: holds no engine, the build was {manifest.status} ({manifest.reason}). Mend the cause "
            "and run build_engine again."
        )
    if not manifest.file or Path(manifest.file).name != manifest.file:
        raise ArtifactError(
            f"{engine}: the manifest names the file {manifest.file!r}, expected a plain file name."
        )
    file = engine / manifest.file
    if not file.is_file():
        raise ArtifactError(f"{file}: not found, expected the engine. Run build_engine again.")
    found = sha256_of(file)
    if found != manifest.sha256:
        raise ArtifactError(
            f"{file}: sha256 {found[:12]}..., the manifest says {manifest.sha256[:12]}...; the file was "
            "changed or truncated and is not loaded. Run build_engine again, or fetch it again from the "
            "remote."
        )
    return file
