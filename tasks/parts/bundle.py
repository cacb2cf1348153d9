"""One folder with all that it takes to run an engine without this repository.

infer.py            reads images, writes classes; numpy and the runtime only
requirements.txt    these two, in the version that was measured
model.json          file, sha256, classes, image size, normalisation, options of the runtime
report.json         the engine's row of engines.json
<engine file>
SHA256SUMS          of all of these, for `sha256sum -c`
triton/<name>/      a Triton model repository of the same file, for ONNX Runtime
"""

import json
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tasks.parts import bundle_infer
from tasks.parts.runners.contract import EngineManifest, read_engine_manifest, sha256_of
from tasks.parts.runners.openvino import compile_options
from tasks.parts.target import Runtime

BUNDLED_RUNTIMES = (Runtime.onnxruntime, Runtime.openvino)
"""Eager PyTorch needs the code of the network, so it has no bundle; TensorRT's is not written."""


def write_bundle(engine: Path, row: dict[str, Any], out: Path) -> bool:
    """Write the bundle of a built engine into the new folder `out`; return False for a runtime that has none."""
    manifest = read_engine_manifest(engine)
    if manifest.target.runtime not in BUNDLED_RUNTIMES:
        return False
    out.mkdir(parents=True)
    shutil.copyfile(engine / manifest.file, out / manifest.file)
    shutil.copyfile(bundle_infer.__file__, out / "infer.py")
    _write_json(out / "model.json", _card(manifest))
    _write_json(out / "report.json", row)
    pinned = f"{manifest.target.runtime}=={manifest.runtime_version}\nnumpy=={version('numpy')}\n"
    (out / "requirements.txt").write_text(pinned, encoding="utf-8")
    if manifest.target.runtime is Runtime.onnxruntime:
        name = f"{row['variant']}-{row['target']}"
        _write_triton(out / "triton" / name, engine / manifest.file, manifest, name)
    files = sorted(path for path in out.rglob("*") if path.is_file())
    sums = [f"{sha256_of(path)}  {path.relative_to(out)}" for path in files]
    (out / "SHA256SUMS").write_text("\n".join(sums) + "\n", encoding="utf-8")
    return True


def _card(manifest: EngineManifest) -> dict[str, Any]:
    target, card = manifest.target, manifest.card
    return {
        "runtime": target.runtime,
        "runtime_version": manifest.runtime_version,
        "file": manifest.file,
        "sha256": manifest.sha256,
        "task": card.task,
        "classes": card.classes,
        "height": card.height,
        "width": card.width,
        "mean": card.mean,
        "std": card.std,
        "max_batch": target.max_batch,
        "num_threads": target.num_threads,
        "isa": manifest.isa,
        "options": compile_options(target) if target.runtime is Runtime.openvino else {},
    }


def _write_triton(folder: Path, file: Path, manifest: EngineManifest, name: str) -> None:
    """Write Triton's model repository for the onnxruntime backend (model_config.proto)."""
    from tasks.parts.onnx_graph import read_graph

    graph = read_graph(file).graph
    target, card = manifest.target, manifest.card
    size = f"{card.height}, {card.width}"
    logits = ", ".join(str(axis) for axis in card.logits_shape)
    (folder / "1").mkdir(parents=True)
    shutil.copyfile(file, folder / "1" / "model.onnx")
    config = f"""\
name: "{name}"
backend: "onnxruntime"
max_batch_size: {target.max_batch}
input [ {{ name: "{graph.input[0].name}" data_type: TYPE_FP32 dims: [ 3, {size} ] }} ]
output [ {{ name: "{graph.output[0].name}" data_type: TYPE_FP32 dims: [ {logits} ] }} ]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
parameters [ {{ key: "intra_op_thread_count" value: {{ string_value: "{target.num_threads}" }} }} ]
"""
    (folder / "config.pbtxt").write_text(config, encoding="utf-8")


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
