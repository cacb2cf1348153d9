"""Find where an engine loses accuracy: compare every layer's output with the float graph's, on a few real images.

Three programs run side by side: the float graph, the variant's graph (the effect of precision alone) and the engine
(the effect of the runtime on top). The output of a layer contains the noise of all layers before it; the noise that
the layer adds itself is measured in a graph that feeds each layer of the variant exact inputs. Optionally, delta
debugging finds the layers of a Q/DQ graph that have to go back to float.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tasks.core.bounds import AtLeast, Between, LessThan
from tasks.core.environment import versions
from tasks.core.errors import TargetMismatch
from tasks.parts.cpu import int8_sums
from tasks.parts.layer_diff.bisection import Bisection
from tasks.parts.layer_diff.report import DiffReport, LayerDifferences
from tasks.parts.onnx_graphs.signal_to_noise import MAX_SQNR_DB
from tasks.parts.onnx_session import ONNXRUNTIME

if TYPE_CHECKING:
    from onnx import ModelProto

    from tasks.parts.engines.manifest import EngineManifest, FloatArray
    from tasks.parts.layer_diff.comparison import Comparison

logger = logging.getLogger(__name__)

_PLAN = (
    "A separate plan is built whose debug tensors are those that remain after fusion, so that all fusions stay. "
    "marked_agreement_db is the SQNR between it and the engine file. Not run on real hardware."
)
_MARKING = {
    "onnxruntime": (
        "Compared tensors are marked as outputs, so the runtime cannot fuse across them and float layers run "
        "one by one. In Q/DQ regions only dequantised tensors are marked, so convolutions keep their int8 "
        "kernels and are compared after their activation. marked_agreement_db is the SQNR between this "
        "program and the engine file."
    ),
    "openvino": (
        "The variant's graph is compiled again with the target's options and the compared tensors as "
        "outputs. The compiler cannot fuse across them; in Q/DQ regions only dequantised tensors are marked, "
        "so that int8 stays. marked_agreement_db is the SQNR between this compilation and the engine file."
    ),
    "tensorrt": _PLAN,
    "tensorrt_rtx": _PLAN,
    "torch": (
        "Eager PyTorch fuses nothing; hooks read the output of each leaf module, and of a convolution after its "
        "BatchNorm if the graph has that folded."
    ),
}


@dataclass(frozen=True)
class BisectionConfig:
    """How to search for the layers that have to run in float."""

    enabled: bool
    """Whether to search; this takes many passes over the validation images. Q/DQ graphs only."""
    max_score_rel_loss: Annotated[float, AtLeast(0), LessThan(1)]
    """Largest share of the float graph's score that may be lost for the score to count as recovered."""
    num_val_images: Annotated[int, AtLeast(0), "0 takes all"]
    """Validation images on which graphs are evaluated."""
    batch_size: Annotated[int, AtLeast(1)]
    """Images in one batch; changes memory and speed only."""


@dataclass(frozen=True)
class Config:
    """What `diff_layers` reads from params.yaml."""

    split: Literal["train", "val", "test", "calibration"]
    """Split that the images come from. The default, calibration, keeps the test split unseen."""
    num_images: Annotated[int, AtLeast(1)]
    """Images that are compared, evenly spread over the split. More: steadier numbers, slower."""
    collapse_db: Annotated[float, Between(0, MAX_SQNR_DB)]
    """SQNR in dB below which a layer has collapsed: at 10 dB the noise has a third of the signal's amplitude."""
    bisection: BisectionConfig
    """How to search for the layers that have to run in float."""


Report = DiffReport


def environment(_: Config) -> dict[str, str]:
    """Return what the output depends on besides code and inputs, of which the engine names its runtime."""
    return versions("onnx", *ONNXRUNTIME) | {"int8_sums": int8_sums()}


def diff_layers(
    cfg: Config, *, engine: Path, model: Path, float_graph: Path, data: Path, out: Path
) -> Report:
    """Write `layers.csv` and `layers.png`, and name the layers at which `engine` departs from `float_graph`.

    `model` is what the engine was built from. An engine that gives classes is compared through its twin, which gives
    logits. With cfg.bisection, `bisection.csv` lists all graphs that were tried.
    For an engine that was skipped or failed, the report has that status; a TensorRT engine is skipped on a machine
    that cannot run it. Raises ArtifactError when graph and engine have no tensors in common.
    """
    from tasks.parts.engines.manifest import plain_engine, read_engine_manifest
    from tasks.parts.layer_diff.comparison import compare
    from tasks.parts.layer_diff.plot import plot_growth
    from tasks.parts.layer_diff.table import find_suspects, list_layers, write_layers
    from tasks.parts.onnx_graphs.graph import read_graph

    deployed, engine = read_engine_manifest(engine), plain_engine(engine)
    manifest = read_engine_manifest(engine)
    if not manifest.is_built:
        return _report_without_layers(engine, manifest.status, manifest.reason)
    if obstacle := _obstacle(manifest):
        return _report_without_layers(engine, "skipped", obstacle)
    logger.info(
        "diff_layers: %s of target %s, %d images", manifest.file, manifest.target.name, cfg.num_images
    )
    graph = read_graph(float_graph)
    images_NCHW = _read_images(cfg, manifest, data)
    comparison = compare(manifest, engine, model, graph, images_NCHW)
    layers = list_layers(graph, comparison.compared)
    first_collapse, largest_own_drop = find_suspects(layers, collapse_db=cfg.collapse_db)
    write_layers(out / "layers.csv", layers)
    plot_growth(
        out / "layers.png",
        layers,
        title=f"Error growth in {manifest.file}, target {manifest.target.name}: higher is closer to float",
        collapse_db=cfg.collapse_db,
        first_collapse=first_collapse,
        largest_own_drop=largest_own_drop,
    )
    bisection = None
    if cfg.bisection.enabled and manifest.is_quantized:
        bisection = _bisect(cfg.bisection, read_graph(model), graph, comparison, data, out)
    logits = layers[-1]
    logger.info(
        "diff_layers: %d of %d tensors compared, %d more through fusions, logits at %.1f dB",
        len(layers),
        comparison.match.num_tensors,
        comparison.num_fused,
        logits.sqnr_db,
    )
    differences = LayerDifferences(
        num_images=len(images_NCHW),
        num_tensors=comparison.match.num_tensors,
        num_layers=len(layers),
        num_fused=comparison.num_fused,
        logits_sqnr_db=logits.sqnr_db,
        logits_cosine=logits.cosine,
        variant_logits_sqnr_db=logits.variant.sqnr_db if logits.variant else None,
        runtime_logits_sqnr_db=logits.runtime.sqnr_db if logits.runtime else None,
        worst_sqnr_db=min(layer.sqnr_db for layer in layers),
        first_collapse=first_collapse,
        largest_own_drop=largest_own_drop,
        marking=_MARKING[manifest.target.compiler],
        marked_agreement_db=_agreement_with_engine(engine, images_NCHW, comparison.marked_logits),
        bisection=bisection,
    )
    return Report(manifest.status, "", deployed.sha256, differences)


def _obstacle(manifest: "EngineManifest") -> str:
    """Return why the tensors inside an engine cannot be read here; empty if they can.

    Only TensorRT is checked against the machine, because many machines lack it; other engines raise when opened.
    """
    from tasks.parts.engines.machine import check_machine

    if manifest.target.runtime not in _MARKING:
        return f"the tensors inside an engine of {manifest.target.runtime} cannot be read"
    if manifest.target.tensorrt is None:
        return ""
    try:
        check_machine(manifest)
    except TargetMismatch as error:
        return str(error)
    return ""


def _report_without_layers(engine: Path, status: str, reason: str) -> Report:
    logger.warning("diff_layers: %s is not compared: %s", engine, reason)
    return Report(status, reason, "", None)


def _read_images(cfg: Config, manifest: "EngineManifest", data: Path) -> "FloatArray":
    import numpy as np

    from tasks.parts.data.dataset import normalise, open_images

    images_NHWC = open_images(data, cfg.split)
    picked = np.unique(np.linspace(0, len(images_NHWC) - 1, cfg.num_images).astype(int))
    return normalise(images_NHWC[picked], manifest.card.mean, manifest.card.std)


def _agreement_with_engine(
    engine: Path, images_NCHW: "FloatArray", marked_logits: Sequence["FloatArray"]
) -> float:
    """Return the SQNR of the engine file's logits against the run with marked layers."""
    from tasks.parts.engines.open_engine import open_engine
    from tasks.parts.layer_diff.measures import PairSums

    sums = PairSums()
    with open_engine(engine) as runner:
        for image, logits in zip(images_NCHW, marked_logits, strict=True):
            sums.add(logits, runner.infer(image[None]))
    return sums.difference.sqnr_db


def _bisect(
    cfg: BisectionConfig,
    variant: "ModelProto",
    graph: "ModelProto",
    comparison: "Comparison",
    data: Path,
    out: Path,
) -> Bisection:
    """Search, starting with the noisiest layer, and write all trials."""
    from tasks.parts.layer_diff.bisection import bisect, quantized_nodes
    from tasks.parts.quantization.evaluation import open_evaluator
    from tasks.parts.tables import write_table

    tensor_of = {node.name: node.output[0] for node in graph.graph.node}
    ranked = sorted(quantized_nodes(variant, graph), key=lambda node: comparison.own_sqnr_db(tensor_of[node]))
    evaluator = open_evaluator(graph, data, num_images=cfg.num_val_images, batch_size=cfg.batch_size)
    bisection, trials = bisect(variant, graph, ranked, evaluator, max_score_rel_loss=cfg.max_score_rel_loss)
    write_table(out / "bisection.csv", trials)
    return bisection
