"""Fine-tune a float network in simulated INT8, starting from calibrated ranges, and export it."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import Between
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError, ConfigError, GateFailed
from tasks.parts.cpu import int8_sums
from tasks.parts.onnx_session import ONNXRUNTIME
from tasks.parts.quantization.config import OpTypes
from tasks.parts.training.config import DistillationConfig, TrainerConfig

if TYPE_CHECKING:
    from onnx import ModelProto
    from torch import nn

    from tasks.parts.networks.model_card import ModelCard
    from tasks.parts.quantization.evaluation import GraphEvaluator

logger = logging.getLogger(__name__)

CURVES = "history.csv"
"""The table that grows by a row per epoch; MLflow shows it while the stage runs."""


@dataclass(frozen=True)
class Config:
    """Which losses, how long, and what runs in INT8."""

    distillation: DistillationConfig
    """Terms of the loss; label_weight alone trains without the teacher."""
    trainer: TrainerConfig
    """Schedule: about 10 % of the original epochs at 1 % of the learning rate, with cosine decay."""
    op_types: OpTypes
    """ONNX operators whose inputs become INT8; as in quantize_ptq, whose ranges are used. BatchMatMul
    is left out: products of two activations stay in float here."""
    opset: Annotated[int, Between(18, 23)]
    """Version of the ONNX operator set, as in export_onnx."""
    min_agreement: Annotated[float, Between(0, 1)]
    """Gate: minimum share of validation pixels on which the INT8 graph, with each type of activations, and the
    trained network predict the same class."""

    def __post_init__(self) -> None:
        if self.trainer.activation_checkpoints:
            raise ConfigError(
                f"trainer.activation_checkpoints is {self.trainer.activation_checkpoints}, expected []: activations "
                "recomputed in the backward pass would not be rounded as in the forward pass. To save memory, lower "
                "trainer.batch_size and raise trainer.accumulate."
            )


@dataclass(frozen=True)
class Report:
    """Result of training in simulated INT8."""

    metric: str
    """Metric of the scores: mIoU, or the user's own (model.metric)."""
    val_score_before: float
    """Score of the INT8 graph before training, in ONNX Runtime."""
    val_score: float
    """Score of the written INT8 graph, in ONNX Runtime."""
    best_epoch: int
    """Epoch whose weights were written; 0 if no epoch was better than the weights before training."""
    num_epochs: int
    """Number of epochs that were run."""
    agreement: float
    """Share of validation pixels on which the written graph predicts the class of the simulated network; the smallest
    of all types of activations."""


def environment(cfg: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    packages = ("lightning", "nvidia-modelopt", "onnx", *ONNXRUNTIME, "torch", *cfg.trainer.extra_packages)
    return versions(*packages) | {"int8_sums": int8_sums()}


def quantize_aware_train(
    cfg: Config, *, checkpoint: Path, teacher: Path, model: Path, ranges: Path, data: Path, out: Path
) -> Report:
    """Write ``model.onnx`` (U8S8 Q/DQ) and ``history.csv``; ``model`` is the float graph of ``checkpoint``.

    BatchNorm is folded before training, so that training sees the same weights as the INT8 graph. Weights that are
    exactly zero stay zero. If some engines have int8 activations and others uint8, the network trains with int8,
    whose steps are wider. On a CPU whose engines have 7-bit weights, it trains with them. An interrupted training
    resumes without a stored state of modelopt: the simulated network is rebuilt from checkpoint, graph and ranges,
    and the trained weights are loaded into it.

    Raises ArtifactError when the inputs do not belong together, TrainingDiverged when the loss is not finite,
    GateFailed when the graph's predictions differ from those of the trained network.
    """
    import torch

    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.data.input_card import check_same_classes
    from tasks.parts.networks.batchnorm_folding import fold_batchnorm
    from tasks.parts.networks.checkpoint import load_checkpoint
    from tasks.parts.networks.zeros import keep_zeros
    from tasks.parts.onnx_graphs.export import export_graph
    from tasks.parts.onnx_graphs.graph import read_graph, write_graph
    from tasks.parts.quantization.config import coarsest
    from tasks.parts.quantization.evaluation import open_evaluator, weight_bits
    from tasks.parts.quantization.fake_quantization import fake_quantize, float_weights
    from tasks.parts.quantization.qdq import insert_qdq, read_ranges
    from tasks.parts.training.distillation import build_objective
    from tasks.parts.training.loop import train_network

    network, card = load_checkpoint(checkpoint)
    manifest = read_manifest(data)
    check_same_classes(checkpoint, card.classes, manifest.classes, "distill")
    op_types = [op_type for op_type in cfg.op_types if op_type != "BatchMatMul"]
    float_graph, (activations, tensor_ranges) = read_graph(model), read_ranges(ranges)
    folded = fold_batchnorm(network, torch.zeros(2, len(card.mean), card.height, card.width))
    _check_graph_of(folded, float_graph, model, op_types)
    evaluator = open_evaluator(
        float_graph, data, num_images=0, batch_size=cfg.trainer.batch_size, activations=activations
    )
    before = insert_qdq(float_graph, tensor_ranges, op_types=op_types)
    score_before = evaluator.evaluate(before).score
    logger.info("%s: val %s %.4f in INT8 before training", model, evaluator.metric, score_before)

    start = {name: value.clone() for name, value in folded.state_dict().items()}
    simulated = fake_quantize(
        folded,
        float_graph,
        tensor_ranges,
        op_types=op_types,
        activations=coarsest(activations),
        weight_bits=min(map(weight_bits, activations)),
    )
    keep_zeros(simulated)
    objective = build_objective(
        cfg.distillation,
        student=simulated,
        teacher=teacher,
        manifest=manifest,
        trainer=cfg.trainer,
    )
    result = train_network(simulated, objective, data=data, config=cfg.trainer, out=out)

    plain = fold_batchnorm(network, torch.zeros(2, len(card.mean), card.height, card.width))
    plain.load_state_dict(float_weights(simulated))
    trained = export_graph(plain, card, height=card.height, width=card.width, opset=cfg.opset)
    graph, best_epoch = insert_qdq(trained, tensor_ranges, op_types=op_types), result.best_epoch
    score = evaluator.evaluate(graph).score
    if score < score_before:
        graph, best_epoch, score = before, 0, score_before
        simulated.load_state_dict(start, strict=False)
    agreement = check_agreement(cfg, simulated, card, graph, evaluator)
    write_graph(graph, out / "model.onnx")
    logger.info("epoch %d kept: val %s %.4f (before %.4f)", best_epoch, evaluator.metric, score, score_before)
    return Report(evaluator.metric, score_before, score, best_epoch, result.num_epochs, agreement)


def _check_graph_of(folded: "nn.Module", graph: "ModelProto", path: Path, op_types: Sequence[str]) -> None:
    """Raise ArtifactError unless the graph is an export of this network with these weights."""
    import numpy as np
    from onnx import numpy_helper

    from tasks.parts.quantization.qdq import weighted_nodes

    constants = {tensor.name: tensor for tensor in graph.graph.initializer}
    weights = folded.state_dict()
    layers = {node.name for node in weighted_nodes(graph, op_types)}
    for node in graph.graph.node:
        if node.op_type != "Conv" and node.name not in layers:
            continue
        name = f"{node.name.partition('/')[0]}.weight"
        values = numpy_helper.to_array(constants[node.input[1]]) if node.input[1] in constants else None
        if node.op_type == "MatMul" and values is not None:
            values = values.T
        if name not in weights or values is None or values.shape != tuple(weights[name].shape):
            raise ArtifactError(
                f"{path}: node '{node.name}' has no weights of the same shape in the checkpoint, expected the "
                "float graph that export_onnx made from it. Export this checkpoint and calibrate its graph."
            )
        if not np.allclose(values, weights[name].numpy(), rtol=1e-4, atol=1e-7):  # folded on another machine
            raise ArtifactError(
                f"{path}: the weights of node '{node.name}' differ from the checkpoint's, expected the float graph "
                "that export_onnx made from it. Export this checkpoint and calibrate its graph."
            )


def check_agreement(
    cfg: Config,
    simulated: "nn.Module",
    card: "ModelCard",
    graph: "ModelProto",
    evaluator: "GraphEvaluator",
) -> float:
    """Return the share of pixels on which graph and trained network agree; the smallest of all types of activations.

    Raises GateFailed when it is too small.
    """
    from tasks.parts.onnx_graphs import predict as onnx_predict
    from tasks.parts.quantization.evaluation import with_activations
    from tasks.parts.training import predict as torch_predict

    batch_size, images_NHWC = cfg.trainer.batch_size, evaluator.images_NHWC
    trained_NHW = torch_predict.predict_classes(simulated, images_NHWC, card, batch_size=batch_size)
    agreements = {}
    for activations in evaluator.activations:
        encoded = with_activations(graph, activations)
        classes_NHW = onnx_predict.predict_classes(encoded, images_NHWC, batch_size=batch_size)
        agreements[activations] = onnx_predict.agreement(classes_NHW, trained_NHW)
    smallest = min(agreements.values())
    if smallest < cfg.min_agreement:
        found = ", ".join(f"{share:.4f} with {activations}" for activations, share in agreements.items())
        raise GateFailed(
            "the INT8 graph predicts the class of the trained network for this share of the validation pixels: "
            f"{found} activations, expected at least {cfg.min_agreement} (quantize_aware_train.min_agreement). Look "
            "for an operator that is INT8 in the graph and float in training, or for calibrated ranges that clip too "
            "much (quantize_ptq.calibrators)."
        )
    return smallest
