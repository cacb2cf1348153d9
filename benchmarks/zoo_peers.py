"""Quantize one float graph of benchmarks/zoo.py with one of the other tools, and make an engine of what it wrote.

``python -m benchmarks.zoo_peers PEER --graph FILE --data FOLDER --max-rel-loss LOSS --out FILE`` runs in a process of
its own, so that a tool that fails or takes too long costs no more than its time.
"""

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from onnxruntime.quantization import QuantFormat

from benchmarks.peers import (
    Scorer,
    compiled,
    quantize_with_accuracy_control,
    quantize_with_nncf,
    quantize_with_onnxruntime,
)
from tasks.parts.builders.report import new_manifest
from tasks.parts.data.dataset import normalise, open_images, open_labels
from tasks.parts.data.input_card import InputCard
from tasks.parts.engines.machine import check_versions
from tasks.parts.engines.manifest import ENGINE_FOLDER, write_engine_manifest
from tasks.parts.engines.openvino.compile import export_blob
from tasks.parts.engines.target import Target
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph


@dataclass(frozen=True)
class Peer:
    """A tool with its settings."""

    target: str
    """The target whose engines it is raced with."""
    suffix: str
    """Of the file that it writes."""
    quantize: Callable[["Request"], None]


@dataclass(frozen=True)
class Request:
    """What a tool is given."""

    graph: Path
    """The float graph."""
    data: Path
    """The data set."""
    max_rel_loss: float
    """Gate of the tools that measure accuracy."""
    out: Path

    def images(self, split: str) -> np.ndarray:
        """Return the images of a split as the graph reads them."""
        card = read_card_of_graph(read_graph(self.graph))
        return normalise(open_images(self.data, split), card.mean, card.std)


def static(request: Request) -> None:
    """Run ``quantize_static``; as QOperator its graphs are as fast (benchmarks/placement.py)."""
    quantize_with_onnxruntime(request.graph, request.images("calibration"), request.out, QuantFormat.QDQ)


def nncf_plain(preset: str) -> Callable[[Request], None]:
    """Return ``nncf.quantize`` for a preset."""

    def quantize(request: Request) -> None:
        settings = nncf_settings(request.graph, preset)
        model = quantize_with_nncf(request.graph, request.images("calibration"), **settings)
        openvino.save_model(model, request.out, compress_to_fp16=False)

    return quantize


def nncf_controlled(request: Request) -> None:
    """Run ``nncf.quantize_with_accuracy_control`` on the validation images."""
    card = read_card_of_graph(read_graph(request.graph))
    pairs = list(zip(request.images("val"), open_labels(request.data, "val", card.task), strict=True))
    model = quantize_with_accuracy_control(
        request.graph,
        request.images("calibration"),
        pairs,
        Scorer(card.task, len(card.classes)),
        request.max_rel_loss,
        **nncf_settings(request.graph, "MIXED"),
    )
    openvino.save_model(model, request.out, compress_to_fp16=False)


def nncf_settings(graph: Path, preset: str) -> dict[str, Any]:
    """Return NNCF's settings: its scheme for transformers where there is attention, all for the CPU."""
    import nncf

    has_attention = any(node.op_type == "Softmax" for node in read_graph(graph).graph.node)
    return {
        "preset": nncf.QuantizationPreset[preset],
        "target_device": nncf.TargetDevice.CPU,
        "model_type": nncf.ModelType.TRANSFORMER if has_attention else None,
    }


PEERS = {
    "quantize_static": Peer("cpu_onnxruntime", ".onnx", static),
    "NNCF performance": Peer("cpu_openvino", ".xml", nncf_plain("PERFORMANCE")),
    "NNCF mixed": Peer("cpu_openvino", ".xml", nncf_plain("MIXED")),
    "NNCF accuracy control": Peer("cpu_openvino", ".xml", nncf_controlled),
}
"""The tools by name. MIXED has asymmetric activations, PERFORMANCE symmetric ones."""


def main() -> None:
    """Quantize one graph with one tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=list(PEERS))
    for name in ("--graph", "--data", "--out"):
        parser.add_argument(name, type=Path, required=True)
    parser.add_argument("--max-rel-loss", type=float, required=True)
    options = parser.parse_args()
    request = Request(options.graph, options.data, options.max_rel_loss, options.out)
    PEERS[options.peer].quantize(request)


def quantized_by(
    name: str, graph: Path, data: Path, max_rel_loss: float, folder: Path, *, timeout_s: float
) -> tuple[Path, float, str]:
    """Run a tool in its own process; return its file, its seconds, and why there is no file (empty if there is)."""
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"model{PEERS[name].suffix}"
    out.unlink(missing_ok=True)
    command = [sys.executable, "-m", "benchmarks.zoo_peers", name, "--graph", graph, "--data", data]
    command += ["--max-rel-loss", str(max_rel_loss), "--out", out]
    started = time.monotonic()
    try:
        done = subprocess.run(
            list(map(str, command)),
            cwd=Path(__file__).resolve().parents[1],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return out, timeout_s, f"not finished after {timeout_s:.0f} s"
    lines = done.stderr.strip().splitlines() or ["no message"]
    return out, round(time.monotonic() - started, 1), lines[-1] if done.returncode else ""


def as_engine(file: Path, target: Target, card: InputCard, out: Path) -> Path:
    """Make an engine of a tool's file, with the batch, threads and options of the target; return its folder."""
    engine = out / ENGINE_FOLDER
    shutil.rmtree(engine, ignore_errors=True)
    engine.mkdir(parents=True)
    target = replace(target, max_batch=card.fit_batch(target.max_batch))
    if file.suffix == ".xml":
        written = engine / "engine.blob"
        written.write_bytes(export_blob(compiled(openvino.Core().read_model(file), target)))
    else:
        written = Path(shutil.copy(file, engine / "engine.onnx"))
    manifest = new_manifest(target, check_versions(target), card, file=written)
    write_engine_manifest(engine, manifest)
    return engine


if __name__ == "__main__":
    main()
