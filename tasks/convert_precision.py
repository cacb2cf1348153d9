"""Convert a float graph to FP16, except for its inputs and outputs: the step between FP32 and INT8."""

import logging
import math
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast, AtMost, MoreThan
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError, ConfigError, DataError, first_line
from tasks.parts.onnx_graphs.float32_nodes import Float32Node
from tasks.parts.onnx_graphs.judging import judging_facts, judging_provider
from tasks.parts.onnx_session import CPU_PROVIDER, ONNXRUNTIME

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray
    from onnx import ModelProto

logger = logging.getLogger(__name__)

_LARGEST_FP16 = 65504.0
_PRECISIONS = 3
"""Versions of an activation that are alive at once where FP16 is computed in float32: exact, rounded, cast back."""


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
    """Calibration images on which activations are measured, and the result is compared with the float graph."""
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
    min_sqnr_db: float
    """Signal-to-noise ratio of the outputs on the calibration images below which the converted graph is warned of."""


@dataclass(frozen=True)
class Report:
    """Which nodes were converted, and the effect on the predictions."""

    num_nodes: int
    """Number of nodes of the float graph."""
    float32_nodes: tuple[Float32Node, ...]
    """The nodes that stay in FP32, and why."""
    calibration_sqnr_db: float
    """Signal-to-noise ratio of the outputs of the FP16 graph against the float graph on the calibration images, over
    all values; 200 if they are equal."""
    metric: str
    """Metric of the scores."""
    score: float
    """Score of the FP16 graph on the validation images. All tensors between nodes are rounded to FP16, on the CPU as
    well, where ONNX Runtime by itself computes most of them in float32."""
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
    from tasks.parts.onnx_graphs.half_precision import find_float32_nodes, measure_tensors, rounded_in_float32
    from tasks.parts.quantization.evaluation import open_evaluator

    graph = read_graph(model)
    if is_quantized(graph):
        raise ArtifactError(f"{model}: already has Q/DQ, expected the float graph of export_onnx.")
    provider = judging_provider()
    evaluator = open_evaluator(
        graph,
        data,
        num_images=cfg.num_val_images,
        batch_size=cfg.batch_size,
        provider=provider,
        num_together=_PRECISIONS,
    )
    kept = find_float32_nodes(
        graph,
        measure_tensors(graph, _images(cfg, graph, data)),
        max_abs=cfg.max_abs,
        op_types=cfg.float32_op_types,
    )
    convert = {Method.converter: _by_converter, Method.autocast: _by_autocast}[cfg.method]
    converted = convert(graph, [node.name for node in kept])
    write_graph(converted, out / "model.onnx")
    num_nodes = len(graph.graph.node)
    del graph  # it is read again where it is compared: as few large graphs as possible at a time
    judged = rounded_in_float32(converted) if provider == CPU_PROVIDER else converted
    del converted
    sqnr_db = _compare(cfg, model, judged, data, evaluator.batch_size, provider)
    if sqnr_db < cfg.min_sqnr_db:
        logger.warning(
            "%s: the FP16 graph keeps %.1f dB of the float graph's outputs on the calibration images, expected %.1f "
            "or more (convert_precision.min_sqnr_db). Lower convert_precision.max_abs, or name operators in "
            "convert_precision.float32_op_types",
            model,
            sqnr_db,
            cfg.min_sqnr_db,
        )
    evaluation = evaluator.evaluate(judged)
    logger.info(
        "%s in FP16, on %s: val score %.4f (float %.4f), %.1f dB, %d nodes in FP32",
        model,
        provider,
        evaluation.score,
        evaluator.float_score,
        sqnr_db,
        len(kept),
    )
    return Report(
        num_nodes=num_nodes,
        float32_nodes=tuple(kept),
        calibration_sqnr_db=sqnr_db,
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


def _compare(
    cfg: Config, model: Path, judged: "ModelProto", data: Path, batch_size: int, provider: str
) -> float:
    """Return the signal-to-noise ratio in dB of the outputs of the FP16 graph on the calibration images."""
    import numpy as np

    from tasks.parts.data.subsets import open_chosen_images
    from tasks.parts.onnx_graphs.graph import read_graph
    from tasks.parts.onnx_graphs.predict import run_batches
    from tasks.parts.onnx_graphs.signal_to_noise import sqnr_db

    images_NHWC = open_chosen_images(data, "calibration", cfg.num_images)
    signal = noise = 0.0
    run = partial(run_batches, images_NHWC=images_NHWC, batch_size=batch_size, provider=provider)
    for exact, found in zip(run(read_graph(model)), run(judged), strict=True):
        signal += float(np.square(exact, dtype=np.float64).sum())
        noise += float(np.square(exact.astype(np.float64) - found).sum())
    return sqnr_db(signal, noise)


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
