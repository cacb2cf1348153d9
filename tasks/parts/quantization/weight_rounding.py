"""Round weights so that the outputs of layers, not the weights themselves, change least.

Rounding to the nearest level is not the best rounding (Nagel et al. 2020, arXiv:2004.10568, AdaRound). The error of a
layer's output is a quadratic form of the error of its weights, so no gradient descent is needed: each weight of a row
is rounded in turn, and the ones that are still open make up for its error (Frantar et al. 2022, arXiv:2208.11580,
section 4, in the fixed order of arXiv:2210.17323, algorithm 1). It gives the same weights in every run, and a layer
takes less than a second. Layers are rounded from the first to the last, each with the inputs that the rounded layers
before it give, and with weights that were fitted to these inputs.

P sampled positions, G groups, O output channels of a group, I input channels of a group, K weights of a row.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

from tasks.parts.onnx_graphs.graph import GraphIndex, index_graph
from tasks.parts.progress import TimeBudget, tracked
from tasks.parts.quantization.bias_correction import (
    add_to_biases,
    channel_axis,
    correct_output,
    correctable_layers,
)
from tasks.parts.quantization.layer_steps import Batches, LayerSteps
from tasks.parts.quantization.qdq import INT8_MAX, along, output_axis

_DAMPING = 0.01
"""Share of the mean energy of the inputs that is added to each input's: keeps weights near the original ones."""
_MIN_SAMPLES_PER_WEIGHT = 4
"""With fewer positions per weight of a row, the inputs do not tell how the weights depend on each other."""
_MAX_SAMPLES = 1 << 15
_SAMPLES_AT_ONCE = 1 << 11
_BLOCK = 128
"""Weights of a row whose errors are passed on to the rest of the row at once."""
_SEED = 0
_TINY = 1e-12


def round_weights(
    model: ModelProto,
    quantized: ModelProto,
    batches: Sequence[NDArray[np.float32]],
    *,
    op_types: Sequence[str],
    num_bits: int = 8,
    budget: TimeBudget | None = None,
) -> ModelProto:
    """Return the float graph with weights on the levels of `num_bits` that change the layers' outputs least.

    `quantized` is the Q/DQ graph of `model`. `insert_qdq`, and `weights_to_7_bits` behind it, find the same levels,
    because the largest weight of each row stays at the end of the scale. Biases are corrected on the way.
    Once a budget is spent, the rest stay as they are.
    """
    largest_level = 2 ** (num_bits - 1) - 1
    exact, rounded = LayerSteps(model, batches), LayerSteps(quantized, batches)
    index = index_graph(model.graph)
    random = np.random.default_rng(_SEED)
    weights, shifts = {}, {}
    for node in tracked(correctable_layers(model, op_types), "weight rounding", budget):
        inputs, outputs = rounded.read_input(node.name), exact.read_output(node.name)
        weight = _round_layer(node, index, inputs, outputs, random, largest_level)
        if weight is not None:
            weights[node.input[1]] = weight
            rounded.set_weight(node.name, weight)
        shifts[node.name] = correct_output(node, outputs, rounded.read_output(node.name))
    changed = add_to_biases(model, shifts)
    for tensor in changed.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    return changed


def round_rows(
    weights_GOK: NDArray[np.float64],
    energy_GKK: NDArray[np.float64],
    scales_GO: NDArray[np.float64],
    largest_level: int = INT8_MAX,
) -> NDArray[np.float64]:
    """Return the levels whose outputs are nearest to those of the weights for inputs of this energy (X^T X).

    The largest weight of each row becomes the largest level, or its negative, so that the row keeps its scale.
    """
    open_GOK = weights_GOK / scales_GO[..., None]
    levels_GOK = np.zeros_like(open_GOK)
    largest_GO1 = np.abs(open_GOK).argmax(axis=2)[..., None]
    ends_GO1 = np.copysign(largest_level, np.take_along_axis(open_GOK, largest_GO1, axis=2))
    passed_GKK = np.linalg.cholesky(np.linalg.inv(energy_GKK)).swapaxes(1, 2)
    for start in range(0, open_GOK.shape[2], _BLOCK):
        stop = min(start + _BLOCK, open_GOK.shape[2])
        errors_GOB = np.zeros((*open_GOK.shape[:2], stop - start))
        for column in range(start, stop):
            values_GO = open_GOK[:, :, column]
            levels_GO = np.clip(np.rint(values_GO), -largest_level, largest_level)
            levels_GO = np.where(largest_GO1[..., 0] == column, ends_GO1[..., 0], levels_GO)
            levels_GOK[:, :, column] = levels_GO
            error_GO = (values_GO - levels_GO) / passed_GKK[:, None, column, column]
            errors_GOB[:, :, column - start] = error_GO
            open_GOK[:, :, column + 1 : stop] -= (
                error_GO[..., None] * passed_GKK[:, None, column, column + 1 : stop]
            )
        open_GOK[:, :, stop:] -= errors_GOB @ passed_GKK[:, start:stop, stop:]
    return levels_GOK


def _round_layer(
    node: NodeProto,
    index: GraphIndex,
    inputs: Batches,
    outputs: Batches,
    random: np.random.Generator,
    largest_level: int,
) -> NDArray[np.float32] | None:
    """Return a weight on INT8 levels; None where a layer has too few positions, or is not supported."""
    weight = numpy_helper.to_array(index.constants[node.input[1]])
    is_shared = len(index.readers[node.input[1]]) > 1
    if is_shared or (node.op_type == "Conv" and (weight.ndim != 4 or not _has_plain_padding(node))):
        return None
    moments = _moments(node, weight, inputs, outputs, random)
    if moments is None:
        return None
    energy_GKK, product_GOK = moments
    axis = output_axis(node, weight.shape)
    rows = np.moveaxis(weight, axis, 0)
    weights_GOK = rows.reshape(*product_GOK.shape).astype(np.float64)
    mean_G = np.trace(energy_GKK, axis1=1, axis2=2) / energy_GKK.shape[1]
    damping_GKK = _DAMPING * np.maximum(mean_G, _TINY)[:, None, None] * np.eye(energy_GKK.shape[1])
    missing_GOK = product_GOK - weights_GOK @ energy_GKK
    energy_GKK = energy_GKK + damping_GKK
    weights_GOK = weights_GOK + np.linalg.solve(energy_GKK, missing_GOK.swapaxes(1, 2)).swapaxes(1, 2)
    amax_GO = np.abs(weights_GOK).max(axis=2)
    scales_GO = np.where(amax_GO > 0, amax_GO, 1.0) / largest_level
    levels_GOK = round_rows(weights_GOK, energy_GKK, scales_GO, largest_level)
    levels = np.moveaxis(levels_GOK.reshape(rows.shape), 0, axis)
    rounded: NDArray[np.float32] = (levels * along(scales_GO.ravel(), axis, weight.ndim)).astype(np.float32)
    return rounded


def _moments(
    node: NodeProto,
    weight: NDArray[np.float32],
    inputs: Batches,
    outputs: Batches,
    random: np.random.Generator,
) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
    """Return X^T X [G, K, K] and Y^T X [G, O, K] of the inputs and the wanted outputs, both without their means."""
    axis = channel_axis(node, outputs[0].ndim)
    num_outputs = outputs[0].shape[axis]
    num_groups = next((item.i for item in node.attribute if item.name == "group"), 1)
    num_weights = weight.size // num_outputs
    num_positions = sum(values.size // num_outputs for values in outputs)
    if num_positions < _MIN_SAMPLES_PER_WEIGHT * num_weights:
        return None
    share = min(
        1.0,
        max(_SAMPLES_AT_ONCE, 2 * _MIN_SAMPLES_PER_WEIGHT * num_weights) / num_positions,
        _MAX_SAMPLES / num_positions,
    )
    energy = np.zeros((num_groups, num_weights, num_weights))
    product = np.zeros((num_groups, num_outputs // num_groups, num_weights))
    sum_x, sum_y, count = np.zeros((num_groups, num_weights)), np.zeros(num_outputs), 0
    for values, wanted in zip(inputs, outputs, strict=True):
        wanted_PO = np.moveaxis(wanted, axis, -1).reshape(-1, num_outputs)
        chosen = np.sort(random.choice(len(wanted_PO), max(1, round(share * len(wanted_PO))), replace=False))
        read = _position_reader(node, weight, values, wanted.shape)
        for start in range(0, len(chosen), _SAMPLES_AT_ONCE):
            part = chosen[start : start + _SAMPLES_AT_ONCE]
            x_GPK = read(part).astype(np.float64)
            x_GPK = x_GPK.reshape(len(part), num_groups, num_weights).swapaxes(0, 1)
            y_PO = wanted_PO[part].astype(np.float64)
            energy += x_GPK.swapaxes(1, 2) @ x_GPK
            product += y_PO.reshape(len(part), num_groups, -1).transpose(1, 2, 0) @ x_GPK
            sum_x += x_GPK.sum(axis=1)
            sum_y += y_PO.sum(axis=0)
            count += len(part)
    mean_x, mean_y = sum_x / count, (sum_y / count).reshape(num_groups, -1)
    return (
        energy / count - mean_x[:, :, None] * mean_x[:, None],
        product / count - mean_y[:, :, None] * mean_x[:, None],
    )


def _position_reader(
    node: NodeProto, weight: NDArray[np.float32], values: NDArray[np.float32], output_shape: tuple[int, ...]
) -> Callable[[NDArray[np.int64]], NDArray[np.float32]]:
    """Return a function that maps positions of the output to the layer's inputs, [P, input channels, ...]."""
    if node.op_type != "Conv":
        return lambda chosen: values.reshape(-1, values.shape[-1])[chosen]
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    top, left, bottom, right = attributes.get("pads", (0, 0, 0, 0))
    stride, dilation = attributes.get("strides", (1, 1)), attributes.get("dilations", (1, 1))
    padded = np.pad(values, ((0, 0), (0, 0), (top, bottom), (left, right)))

    def read(chosen: NDArray[np.int64]) -> NDArray[np.float32]:
        image_P, row_P, column_P = np.unravel_index(chosen, (output_shape[0], *output_shape[2:]))
        rows = row_P[:, None] * stride[0] + np.arange(weight.shape[2]) * dilation[0]
        columns = column_P[:, None] * stride[1] + np.arange(weight.shape[3]) * dilation[1]
        windows = padded[image_P[:, None, None], :, rows[:, :, None], columns[:, None]]
        return np.moveaxis(windows, -1, 1)  # channels before the positions of the kernel, as in the weight

    return read


def _has_plain_padding(node: NodeProto) -> bool:
    return not any(item.name == "auto_pad" and item.s not in (b"NOTSET", b"VALID") for item in node.attribute)
