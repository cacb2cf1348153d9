"""Write a folder with everything that is needed to run an engine without this repository.

infer.py            reads frames, writes classes or values; needs only numpy and the runtime
frame_engine/       its modules, which benchmark and validate run as well
cpp/                a C++ program in one file that does the same, for plans and for CPU engines that read frames
engine.txt          what it has to know of the engine
client.py           sends frames to a Triton server that runs the engine, and writes its answers as infer.py does
requirements.txt    the packages that it needs, in the versions that were measured
model.json          file, sha256, classes, image size, normalisation, batches, options of the runtime; under "load"
                    the batch, lanes and settings with the most images per second, if measure_load found them
report.json         the engine's row of engines.json
<engine file>
operators/          libraries with custom operators, of engines that have some
SHA256SUMS          of all of these, for `sha256sum -c`
deepstream/         the configuration of Gst-nvinfer, for plans of segmentation networks that it can run
triton/             a model repository for Triton, whose model runs the engine with frame_engine
triton_native/      another one, for the runtime's own backend; not of engines with custom operators, and not for
                    TensorRT for RTX, for which Triton has none
"""

import logging
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tasks.core.reports import write_json
from tasks.parts import reading
from tasks.parts.custom_operators import OPERATORS_FOLDER
from tasks.parts.engines import frame_engine
from tasks.parts.engines.description import describe_engine, package_of
from tasks.parts.engines.frame_engine_cpp.write import write_cpp
from tasks.parts.engines.manifest import engine_libraries, read_engine_manifest, sha256_of
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.engines.target import Target
from tasks.parts.selection.deepstream import write_deepstream
from tasks.parts.selection.triton import Serving, write_native, write_served

logger = logging.getLogger(__name__)

BUNDLED_RUNTIMES = (Runtime.onnxruntime, Runtime.openvino, Runtime.tensorrt, Runtime.tensorrt_rtx)
"""Eager PyTorch needs the code of the network, so it has no bundle."""


_SCRIPT = '''"""{what}: `python {name} --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from frame_engine.{module} import main

if __name__ == "__main__":
    main()
'''
INFER = _SCRIPT.format(what="Run the engine of this folder", name="infer.py", module="command")
CLIENT = _SCRIPT.format(what="Send frames to a Triton server", name="client.py", module="client")


def _has_bundle(target: Target) -> bool:
    """Return whether engines of a target get a bundle.

    A TensorRT plan for ONNX Runtime gets none: a target with runtime tensorrt needs one library less.
    """
    return target.runtime in BUNDLED_RUNTIMES and target.compiler is target.runtime


def write_bundle(engine: Path, row: dict[str, Any], out: Path, serving: Serving | None = None) -> bool:
    """Write the bundle of a built engine into the new folder `out`; return False if its runtime has none.

    `serving` says how a Triton server runs it: by default as measure_load found best, or as one instance.
    """
    manifest = read_engine_manifest(engine)
    if not _has_bundle(manifest.target):
        return False
    write_companions(engine, row, out)
    shutil.copyfile(engine / manifest.file, out / manifest.file)
    name = f"{row['variant']}-{row['target']}"
    write_served(out / "triton" / name, name, describe_engine(manifest), serving or _best_serving(row))
    if manifest.target.runtime is Runtime.tensorrt_rtx:
        logger.info("%s gets no triton_native: Triton has no backend for plans of TensorRT for RTX", name)
    elif not manifest.target.custom_operators:
        write_native(out / "triton_native" / name, name, engine, manifest)
    (out / "client.py").write_text(CLIENT, encoding="utf-8")
    if manifest.target.runtime is Runtime.tensorrt and (reason := write_deepstream(manifest, out)):
        logger.info("%s gets no configuration for DeepStream: %s", name, reason)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    sums = [f"{sha256_of(path)}  {path.relative_to(out)}" for path in files]
    (out / "SHA256SUMS").write_text("\n".join(sums) + "\n", encoding="utf-8")
    return True


def write_companions(engine: Path, row: dict[str, Any], out: Path) -> list[Path]:
    """Write the files that an engine file needs to run; return them, or none if its runtime has no bundle."""
    manifest = read_engine_manifest(engine)
    if not _has_bundle(manifest.target):
        return []
    out.mkdir(parents=True)
    (out / "infer.py").write_text(INFER, encoding="utf-8")
    copy_frame_engine(out)
    card = describe_engine(manifest)
    write_json(out / "model.json", card | _measured_load(row))
    write_cpp(card, out)
    write_json(out / "report.json", row)
    for library in engine_libraries(engine / manifest.file, manifest.target):
        (out / OPERATORS_FOLDER).mkdir(exist_ok=True)
        shutil.copyfile(library, out / OPERATORS_FOLDER / library.name)
    packages = [f"{package_of(manifest)}=={manifest.runtime_version}", f"numpy=={version('numpy')}"]
    if manifest.target.tensorrt is not None:
        packages.append("pycuda")
    packages.append(f"pillow=={version('pillow')}")  # it resizes: before version 13 some values differ by 1
    (out / "requirements.txt").write_text("\n".join(packages) + "\n", encoding="utf-8")
    return sorted(path for path in out.rglob("*") if path.is_file())


def copy_frame_engine(out: Path) -> None:
    """Copy the modules that run an engine into a folder, with those that read images as their sub-package."""
    package, reading_package = (Path(module.__file__ or "").parent for module in (frame_engine, reading))
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, out / package.name, ignore=ignored)
    shutil.copytree(reading_package, out / package.name / reading_package.name, ignore=ignored)
    for path in (out / package.name).glob("*.py"):
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace("from ...reading", "from .reading"), encoding="utf-8")


def _best_serving(row: dict[str, Any]) -> Serving:
    """Return how a server runs the engine as in the best cell of measure_load; one instance without that.

    A frame may wait for as long as a batch takes to arrive at the rate of that cell, within the bound of the p99.
    """
    options = row.get("load_options")
    if not options:
        return Serving()
    delay_ms = 1000 * (options["batch"] - 1) / row["throughput_per_s_within_p99"]
    if row["load_max_p99_ms"] is not None:
        delay_ms = min(delay_ms, max(0.0, row["load_max_p99_ms"] - row["throughput_ms_p99"]))
    return Serving(options["lanes"], options["batch"], round(1000 * delay_ms))


def _measured_load(row: dict[str, Any]) -> dict[str, Any]:
    """Return the entry of model.json about the engine under load; nothing if measure_load has no cell for it."""
    if not row.get("load_options"):
        return {}
    return {
        "load": {
            **row["load_options"],
            "throughput_per_s": row["throughput_per_s_within_p99"],
            "latency_ms_p99": row["throughput_ms_p99"],
            "max_p99_ms": row["load_max_p99_ms"],
            "knee_per_s": row["knee_per_s"],
        }
    }
