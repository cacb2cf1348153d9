"""Export a trained network as one ONNX file in which each node names its module and its line of code."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast, Between, LessThan, MinItems, MoreThan
from tasks.core.environment import versions
from tasks.core.errors import GateFailed
from tasks.parts.onnx_graphs.signal_to_noise import Difference

if TYPE_CHECKING:
    from onnx import ModelProto
    from torch import nn

    from tasks.parts.networks.model_card import ModelCard

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """How to export, and how far ONNX Runtime may differ from torch."""

    opset: Annotated[int, Between(18, 23)]
    """Version of the ONNX operator set. Higher: newer operators, fewer runtimes that read it."""
    batch_sizes: Annotated[list[Annotated[int, Between(1, 1024)]], MinItems(1)]
    """Batches on which torch and ONNX Runtime are compared; two or more prove that the batch is dynamic."""
    max_abs_difference: Annotated[float, MoreThan(0)]
    """Gate: largest absolute difference of a logit."""
    min_sqnr_db: Annotated[float, AtLeast(0), LessThan(200)]
    """Gate: minimum signal-to-noise ratio of the logits, dB. Float32 reaches more than 100."""
    seed: Annotated[int, AtLeast(0)]
    """Seed of the random images that are compared."""


@dataclass(frozen=True)
class Report:
    """What was exported."""

    num_nodes: int
    """Number of nodes after simplification."""
    num_parameters: int
    """Number of weights of the network, BatchNorm included."""
    size_bytes: int
    """Size of model.onnx."""
    opset: int
    """Version of the ONNX operator set."""
    two_of_four_macs_share: float
    """Share of the MACs of convolutions and matrix products whose weights in the graph have at most two non-zeros in
    four input channels."""
    differences: tuple[Difference, ...]
    """How far ONNX Runtime is from torch, for each batch size."""


def environment(_: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("onnx", "onnxscript", "onnxslim", "torch", "transformers")


def export_onnx(cfg: Config, *, checkpoint: Path, out: Path) -> Report:
    """Write ``model.onnx`` from a checkpoint.

    Raises ArtifactError for weights that are not finite, GateFailed when ONNX Runtime differs from torch.
    """
    from tasks.parts.networks.checkpoint import load_checkpoint
    from tasks.parts.onnx_graphs.export import export_graph
    from tasks.parts.onnx_graphs.graph import write_graph

    network, card = load_checkpoint(checkpoint)
    logger.info("exporting %s (%s, %dx%d)", checkpoint, card.network.name, card.height, card.width)
    graph = export_graph(network, card, height=card.height, width=card.width, opset=cfg.opset)
    differences = tuple(_compare(cfg, network, graph, card))
    path = out / "model.onnx"
    write_graph(graph, path)
    report = Report(
        num_nodes=len(graph.graph.node),
        num_parameters=sum(parameter.numel() for parameter in network.parameters()),
        size_bytes=path.stat().st_size,
        opset=cfg.opset,
        two_of_four_macs_share=two_of_four_macs_share(graph),
        differences=differences,
    )
    logger.info(
        "%s: %d nodes, %d bytes, at most %.2g from torch",
        path,
        report.num_nodes,
        report.size_bytes,
        max(compared.max_abs for compared in differences),
    )
    return report


def two_of_four_macs_share(graph: "ModelProto") -> float:
    """Return the share of the MACs of convolutions and matrix products whose weights are 2:4 sparse.

    BatchNorm is folded in `graph`. Matrix products without weights, as in attention, count as dense.
    """
    from onnx import numpy_helper

    from tasks.parts.networks.zeros import is_two_of_four
    from tasks.parts.onnx_graphs.macs import conv_macs

    macs = conv_macs(graph)
    constants = {tensor.name: tensor for tensor in graph.graph.initializer}
    sparse = []
    for node in graph.graph.node:
        if node.name not in macs or node.input[1] not in constants:
            continue
        weights = numpy_helper.to_array(constants[node.input[1]])
        is_transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
        if node.op_type != "Conv" and not is_transposed:
            weights = weights.swapaxes(-1, -2)  # [I, O] to [O, I]
        if weights.ndim >= 2 and is_two_of_four(weights):
            sparse.append(macs[node.name])
    return sum(sparse) / sum(macs.values())


def _compare(cfg: Config, network: "nn.Module", graph: "ModelProto", card: "ModelCard") -> list[Difference]:
    """Compare the logits for each batch size; raise GateFailed at the first that differs too much."""
    import torch

    from tasks.parts.onnx_graphs.export import INPUT_NAME
    from tasks.parts.onnx_graphs.signal_to_noise import difference
    from tasks.parts.onnx_session import open_session

    session = open_session(graph)
    generator = torch.Generator().manual_seed(cfg.seed)
    differences = []
    for batch_size in cfg.batch_sizes:
        images_NCHW = torch.randn(batch_size, len(card.mean), card.height, card.width, generator=generator)
        with torch.no_grad():
            expected_NCHW = network.eval()(images_NCHW).numpy()
        logits_NCHW = session.run(None, {INPUT_NAME: images_NCHW.numpy()})[0]
        result = difference(expected_NCHW, logits_NCHW)
        if not (result.max_abs <= cfg.max_abs_difference and result.sqnr_db >= cfg.min_sqnr_db):
            raise GateFailed(
                f"batch of {batch_size}: ONNX Runtime differs from torch by {result.max_abs:.3g} (SQNR "
                f"{result.sqnr_db:.1f} dB), expected at most {cfg.max_abs_difference} "
                f"(export_onnx.max_abs_difference) and at least {cfg.min_sqnr_db} dB (export_onnx.min_sqnr_db). "
                "Look for an operator that the exporter changed."
            )
        differences.append(result)
    return differences
