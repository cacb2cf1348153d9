"""Convert a float graph to FP16, except for its inputs and outputs: the step between FP32 and INT8."""

import logging
import math
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast, AtMost, MoreThan
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError, ConfigError, DataError, first_line
from tasks.parts.onnx_graphs.judging import judging_facts, judging_provider
from tasks.parts.onnx_session import ONNXRUNTIME

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray
    from onnx import ModelProto

logger = logging.getLogger(__name__)

_LARGEST_FP16 = 65504.0


class Method(StrEnum):
    """Tool that converts the graph. In both cases this stage decides which nodes stay in FP32."""

    converter = "converter"
    """The rewrite that build_engine applies as well (tasks/parts/onnx_graphs/half_precision.py)."""
    autocast = "autocast"
    """AutoCast of nvidia-modelopt, which needs the extra autocast."""


@dataclass(frozen=True)
class Config:
    """Which tool converts, which nodes stay in FP32, and the images that this is decided on."""

    method: Method
    """Tool that converts the graph."""
    num_images: Annotated[int, AtLeast(1)]
    """Calibration images on which the largest activations are measured."""
    batch_size: Annotated[int, AtLeast(1)]
    """Images in one batch; changes memory and speed only."""
    num_val_images: Annotated[int, AtLeast(0), "0 takes all"]
    """Validation images for the accuracy in the report."""
    max_abs: Annotated[float, MoreThan(0), AtMost(_LARGEST_FP16)]
    """Magnitude beyond which a weight, an input or an output keeps its node in FP32.

    FP16 ends at 65504; leave room for images with larger activations.
    """
    float32_op_types: list[str]
    """ONNX operators that always stay in FP32."""


@dataclass(frozen=True)
class Report:
    """Which nodes were converted, and the effect on the predictions."""

    num_nodes: int
    """Number of nodes of the float graph."""
    float32_nodes: tuple[str, ...]
    """Names of the nodes that stay in FP32."""
    metric: str
    """Metric of the scores."""
    score: float
    """Score of the FP16 graph on the validation images. ONNX Runtime rounds the tensors between nodes to FP16."""
    float_score: float
    """Score of the float graph on the same images."""
    agreement: float
    """Share of pixels, or images, with the class that the float graph predicts."""
    judged_on: str
    """Provider of ONNX Runtime on which both were run. The graph itself does not depend on it."""


def environment(_: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("nvidia-modelopt", "onnx", *ONNXRUNTIME) | judging_facts()


def convert_precision(cfg: Config, *, model: Path, data: Path, out: Path) -> Report:
    """Write ``model.onnx``; its input and output stay FP32, so that it replaces the float graph.

    Raises ArtifactError for a graph that is already quantized, ConfigError if AutoCast cannot be imported.
    """
    from tasks.parts.onnx_graphs.graph import is_quantized, read_graph, write_graph
    from tasks.parts.onnx_graphs.half_precision import find_float32_nodes, largest_values
    from tasks.parts.quantization.evaluation import open_evaluator

    graph = read_graph(model)
    if is_quantized(graph):
        raise ArtifactError(f"{model}: already has Q/DQ, expected the float graph of export_onnx.")
    provider = judging_provider()
    evaluator = open_evaluator(
        graph, data, num_images=cfg.num_val_images, batch_size=cfg.batch_size, provider=provider
    )
    kept = find_float32_nodes(
        graph,
        largest_values(graph, _images(cfg, graph, data)),
        max_abs=cfg.max_abs,
        op_types=cfg.float32_op_types,
    )
    convert = {Method.converter: _by_converter, Method.autocast: _by_autocast}[cfg.method]
    converted = convert(graph, kept)
    write_graph(converted, out / "model.onnx")
    evaluation = evaluator.evaluate(converted)
    logger.info(
        "%s in FP16, on %s: val score %.4f (float %.4f), %d nodes in FP32",
        model,
        provider,
        evaluation.score,
        evaluator.float_score,
        len(kept),
    )
    return Report(
        num_nodes=len(graph.graph.node),
        float32_nodes=tuple(kept),
        metric=evaluator.metric,
        score=evaluation.score,
        float_score=evaluator.float_score,
        agreement=evaluation.agreement,
        judged_on=provider,
    )


def _images(cfg: Config, graph: "ModelProto", data: Path) -> "Iterator[NDArray[np.float32]]":
    """Yield calibration images one by one, each [1, 3, H, W] and normalised."""
    from tasks.parts.data.dataset import normalised_batches
    from tasks.parts.data.subsets import open_chosen_images
    from tasks.parts.onnx_graphs.graph import read_card_of_graph

    images_NHWC = open_chosen_images(data, "calibration", cfg.num_images)
    if not len(images_NHWC):
        raise DataError("the calibration split has no images. Give it some: prepare_data.scenes or .splits.")
    yield from normalised_batches(images_NHWC, read_card_of_graph(graph), 1)


def _by_converter(graph: "ModelProto", float32_nodes: list[str]) -> "ModelProto":
    from tasks.parts.onnx_graphs.half_precision import to_half

    return to_half(graph, float32_nodes=float32_nodes)


def _by_autocast(graph: "ModelProto", float32_nodes: list[str]) -> "ModelProto":
    """Let AutoCast insert the casts, and restore the metadata of nodes and graph, which it drops."""
    import tempfile

    from onnx import ModelProto

    from tasks.parts.onnx_graphs.graph import node_sources, set_node_source, write_graph

    try:
        from modelopt.onnx.autocast import convert_to_mixed_precision
    except ImportError as error:
        raise ConfigError(
            f"convert_precision.method is autocast, which cannot be imported ({first_line(error)}). Install "
            "the extra autocast (`pip install -e '.[autocast]'`), or set convert_precision.method=converter."
        ) from error
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "float.onnx")
        write_graph(graph, file)
        converted: ModelProto = convert_to_mixed_precision(
            str(file),
            nodes_to_exclude=[f"{re.escape(name)}$" for name in float32_nodes],
            data_max=math.inf,  # the ranges are known already
            init_max=math.inf,
            keep_io_types=True,
        )
    del converted.metadata_props[:]
    converted.metadata_props.extend(graph.metadata_props)
    sources = node_sources(graph)
    for node in converted.graph.node:
        if node.name in sources:
            set_node_source(node, *sources[node.name])
    return converted
