"""Convert a float graph to FP16, except for its inputs and outputs: the step between FP32 and INT8."""

import logging
import math
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast, AtMost, MoreThan
from tasks.core.errors import ArtifactError, ConfigError, DataError, first_line

if TYPE_CHECKING:
    from collections.abc import Mapping

    from onnx import ModelProto

logger = logging.getLogger(__name__)

_LARGEST_FP16 = 65504.0
_SMALLEST_WEIGHTS = 2.0**-10
"""FP16 keeps full precision down to 2**-14; a tensor needs room below its largest number."""


class Method(StrEnum):
    """Tool that converts the graph. In both cases this stage decides which nodes stay in FP32."""

    converter = "converter"
    """The converter of ONNX Runtime."""
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


def convert_precision(cfg: Config, *, model: Path, data: Path, out: Path) -> Report:
    """Write ``model.onnx``; its input and output stay FP32, so that it replaces the float graph.

    Raises ArtifactError for a graph that is already quantized, ConfigError if AutoCast cannot be imported.
    """
    from tasks.parts.onnx_graphs.graph import is_quantized, read_graph, write_graph
    from tasks.parts.quantization.evaluation import open_evaluator

    graph = read_graph(model)
    if is_quantized(graph):
        raise ArtifactError(f"{model}: already has Q/DQ, expected the float graph of export_onnx.")
    evaluator = open_evaluator(graph, data, num_images=cfg.num_val_images, batch_size=cfg.batch_size)
    kept = _nodes_in_float32(cfg, graph, _largest_outputs(cfg, graph, data))
    convert = {Method.converter: _by_converter, Method.autocast: _by_autocast}[cfg.method]
    converted = convert(graph, kept)
    write_graph(converted, out / "model.onnx")
    evaluation = evaluator.evaluate(converted)
    logger.info(
        "%s in FP16: val score %.4f (float %.4f), %d nodes in FP32",
        model,
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
    )


def _largest_outputs(cfg: Config, graph: "ModelProto", data: Path) -> dict[str, float]:
    """Return tensor -> largest magnitude on calibration images, for each output of a node."""
    from tasks.parts.data.dataset import normalised_batches, open_images
    from tasks.parts.onnx_graphs.graph import other_types, read_card_of_graph
    from tasks.parts.quantization.calibration import collect_statistics

    card = read_card_of_graph(graph)
    images_NHWC = open_images(data, "calibration")[: cfg.num_images]
    if not len(images_NHWC):
        raise DataError("the calibration split has no images. Give it some: prepare_data.scenes or .splits.")
    others = other_types(graph)
    names = [name for node in graph.graph.node for name in node.output if name and name not in others]
    statistics = collect_statistics(
        graph, lambda: normalised_batches(images_NHWC, card, cfg.batch_size), names
    )
    return {name: seen.amax for name, seen in statistics.items()}


def _nodes_in_float32(cfg: Config, graph: "ModelProto", tensors: "Mapping[str, float]") -> list[str]:
    """Return the nodes whose weights, inputs or outputs FP16 cannot hold, and those of the configured types."""
    import numpy as np
    from onnx import numpy_helper

    weights = {}
    for tensor in graph.graph.initializer:
        values = numpy_helper.to_array(tensor)
        # A bias is left out: its rounding error vanishes in the sum.
        if np.issubdtype(values.dtype, np.floating) and values.ndim > 1:
            weights[tensor.name] = float(np.abs(values).max(initial=0.0))
    kept = []
    for node in graph.graph.node:
        own = [weights[name] for name in node.input if name in weights]
        passed = [tensors[name] for name in [*node.input, *node.output] if name in tensors]
        largest = max([*own, *passed], default=0.0)
        is_tiny = any(0 < value < _SMALLEST_WEIGHTS for value in own)
        if node.op_type in cfg.float32_op_types or largest > cfg.max_abs or is_tiny:
            kept.append(node.name)
    return kept


def _by_converter(graph: "ModelProto", float32_nodes: list[str]) -> "ModelProto":
    import onnx_ir
    from onnx import ModelProto
    from onnxruntime.transformers.float16 import convert_float_to_float16

    copy = ModelProto()
    copy.CopyFrom(graph)  # the converter works in place
    converted = onnx_ir.from_proto(
        convert_float_to_float16(copy, keep_io_types=True, op_block_list=[], node_block_list=float32_nodes)
    )
    converted.graph.sort()  # the converter appends its casts at the end
    proto: ModelProto = onnx_ir.to_proto(converted)
    _join_float32_neighbours(proto)
    return proto


def _join_float32_neighbours(model: "ModelProto") -> None:
    """Remove casts from FP32 to FP16 and back, which overflow.

    The converter puts them between two nodes that both stay in FP32, and between such a node and an output.
    """
    from onnx import TensorProto, helper

    from tasks.parts.onnx_graphs.graph import drop_unused

    casts = {
        node.output[0]: (helper.get_attribute_value(node.attribute[0]), node.input[0])
        for node in model.graph.node
        if node.op_type == "Cast"
    }
    wide = {
        name: casts[narrow][1]
        for name, (to, narrow) in casts.items()
        if to == TensorProto.FLOAT and narrow in casts and casts[narrow][0] == TensorProto.FLOAT16
    }
    outputs = {wide[value.name]: value.name for value in model.graph.output if value.name in wide}
    for node in list(model.graph.node):
        if node.output[0] in outputs.values():
            model.graph.node.remove(node)  # the FP32 node now writes this output itself
            continue
        inputs = [wide.get(name, name) for name in node.input]
        node.input[:] = [outputs.get(name, name) for name in inputs]
        node.output[:] = [outputs.get(name, name) for name in node.output]
    drop_unused(model.graph)


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
