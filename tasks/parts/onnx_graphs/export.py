"""Export a torch network as an ONNX graph whose nodes name the module and line of code that they come from.

Exports of one architecture have the same node and tensor names regardless of their weights, so calibrated
ranges, layer comparisons and trained weights can be matched by name.
"""

import contextlib
import copy
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnxslim
import torch
from onnx import ModelProto, NodeProto, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tasks.core.errors import ArtifactError, first_line
from tasks.parts.networks.batchnorm_folding import check_finite, fold_batchnorm
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.onnx_graphs.graph import CARD_KEY, check_model, drop_unused, infer_shapes
from tasks.parts.onnx_graphs.node_names import name_nodes, read_sources
from tasks.parts.onnx_graphs.zeros_before_pools import name_axes_of_pads

INPUT_NAME = "image"
OUTPUT_NAME = "logits"

_MAX_BATCH_OF_EXPORT = 4096


def export_graph(model: nn.Module, card: ModelCard, *, height: int, width: int, opset: int) -> ModelProto:
    """Export a network in eval mode for images of height x width with a dynamic batch.

    BatchNorm is folded into the convolutions before it. The graph is simplified, checked, self-contained, and
    equal for equal weights. Raises ArtifactError for weights that are not finite (ONNX and its checker accept
    them).
    """
    check_finite(model)
    example_NCHW = torch.zeros(2, len(card.mean), height, width)
    folded = fold_batchnorm(model, example_NCHW)
    raw = _run_exporter(folded, example_NCHW, opset)
    graph = _simplify(raw)
    name_nodes(graph, read_sources(raw))
    _clear_unstable_fields(graph)
    entry = graph.metadata_props.add()
    entry.key, entry.value = CARD_KEY, card.to_json()
    check_model(graph, full_check=True)
    return graph


def _run_exporter(model: nn.Module, example_NCHW: Tensor, opset: int) -> ModelProto:
    batch = torch.export.Dim("batch", min=1, max=_MAX_BATCH_OF_EXPORT)
    try:
        with quiet_export(), _AttentionOfFourAxes():
            program = torch.onnx.export(
                model,
                (example_NCHW,),
                dynamo=True,
                opset_version=opset,
                input_names=[INPUT_NAME],
                output_names=[OUTPUT_NAME],
                dynamic_shapes=({0: batch},),
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise ArtifactError(
            f"torch.onnx.export cannot write this network as ONNX: {type(cause).__name__}: {first_line(cause)}. "
            "Replace the operation in the network's code."
        ) from error
    assert program is not None
    proto: ModelProto = program.model_proto
    return proto


class _AttentionOfFourAxes(TorchFunctionMode):
    """Gives attention without an axis of heads, [N, T, C], one head: the exporter translates four axes only."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch; attention of three axes with a fourth one."""
        if func is F.scaled_dot_product_attention and args and args[0].ndim == 3:
            heads = (maps.unsqueeze(1) for maps in args[:3])
            return func(*heads, *args[3:], **(kwargs or {})).squeeze(1)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def quiet_export() -> Iterator[None]:
    """Suppress remarks of torch's exporters about packages that are not used, batches and values."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _simplify(raw: ModelProto) -> ModelProto:
    """Simplify the graph, then replace subgraphs that only depend on the batch (Shape, Concat) by constants."""
    bare = ModelProto()
    bare.CopyFrom(raw)
    with quiet_export():
        slim = onnxslim.slim(bare)
        slim = infer_shapes(slim, data_prop=True)
    shapes = _static_shapes(slim)
    for node in slim.graph.node:
        if node.op_type == "Resize":
            _resize_by_scales(slim, node, shapes)
        elif node.op_type == "ReduceMean":
            _mean_as_global_pool(slim, node, shapes)
    drop_unused(slim.graph)
    name_axes_of_pads(slim)
    return slim


def _static_shapes(model: ModelProto) -> dict[str, list[int | None]]:
    shapes: dict[str, list[int | None]] = {}
    for value in [*model.graph.value_info, *model.graph.input, *model.graph.output]:
        dims = value.type.tensor_type.shape.dim
        shapes[value.name] = [dim.dim_value if dim.HasField("dim_value") else None for dim in dims]
    return shapes


def _resize_by_scales(model: ModelProto, node: NodeProto, shapes: dict[str, list[int | None]]) -> None:
    """Give Resize constant scales instead of `sizes`, which the exporter computes by Shape and Concat."""
    if len(node.input) < 4 or not node.input[3]:
        return
    source, target = shapes.get(node.input[0], []), shapes.get(node.output[0], [])
    if len(source) != 4 or len(target) != 4 or None in source[1:] or None in target[1:]:
        return
    scales = np.ones(4, dtype=np.float32)
    for axis in (2, 3):
        before, after = source[axis], target[axis]
        assert before is not None and after is not None
        scales[axis] = np.float32(after) / np.float32(before)
        if int(np.floor(np.float32(before) * scales[axis])) != after:
            return
    name = f"{node.output[0]}:scales"
    model.graph.initializer.append(numpy_helper.from_array(scales, name))
    del node.input[3]
    node.input[2] = name


def _mean_as_global_pool(model: ModelProto, node: NodeProto, shapes: dict[str, list[int | None]]) -> None:
    """Replace the mean over height and width by GlobalAveragePool, for which runtimes have INT8 kernels."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    has_kept_axes = next((attribute.i for attribute in node.attribute if attribute.name == "keepdims"), 1)
    if len(node.input) < 2 or node.input[1] not in constants or not has_kept_axes:
        return
    axes = sorted(int(axis) % 4 for axis in numpy_helper.to_array(constants[node.input[1]]).ravel())
    if len(shapes.get(node.input[0], [])) == 4 and axes == [2, 3]:
        node.op_type = "GlobalAveragePool"
        del node.input[1]
        del node.attribute[:]


def _clear_unstable_fields(model: ModelProto) -> None:
    """Clear fields that hold paths, tool versions or counters, so that equal networks give equal bytes."""
    del model.metadata_props[:]
    del model.functions[:]
    model.doc_string = ""
    model.graph.doc_string = ""
    model.graph.name = "enginewright"
    del model.graph.metadata_props[:]
    for item in [*model.graph.node, *model.graph.initializer]:
        item.doc_string = ""
    values = [*model.graph.value_info, *model.graph.input, *model.graph.output]
    for value in values:
        value.doc_string = ""
        del value.metadata_props[:]
    for value in [*model.graph.input, *model.graph.output]:
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    used = {name for node in model.graph.node for name in node.output}
    kept = [copy.deepcopy(value) for value in model.graph.value_info if value.name in used]
    del model.graph.value_info[:]
    model.graph.value_info.extend(sorted(kept, key=lambda value: value.name))
