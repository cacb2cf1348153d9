"""Equalize the channels of INT8 activations without changing what the float graph computes.

One range per tensor leaves few levels to channels that are much smaller than others. Nagel et al. 2019
(arXiv:1906.04721, section 4.1) scale channels so that layers with one weight range each lose least. Weights here have
one range per output channel, so the layer that makes a channel scales it for free, and only the range of the
activation and the input channels of the layers that read it count, as in SmoothQuant (Xiao et al. 2022,
arXiv:2211.10438, equation 4). A depthwise convolution has one input channel per output channel and costs nothing
either. C channels, G groups of channels with one factor, O output channels, I input channels.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

from tasks.parts.quantization.channels import ScalableChannels, ScaledLayer, find_scalable_channels
from tasks.parts.quantization.qdq import place_pairs, weighted_nodes

_SMALLEST = 1e-4
"""Smaller shares of the largest channel count as this much: calibration images hardly show such channels."""
_TINY = 1e-30


def scalable_tensors(model: ModelProto, op_types: Sequence[str]) -> dict[str, int]:
    """Return the quantized tensors with channels that can be scaled, and the axis of the channels."""
    channels = find_scalable_channels(model)
    quantized = place_pairs(model, op_types).range_of
    return {
        name: found.axis
        for name, found in channels.tensors.items()
        if name in quantized and channels.is_free_G[found.groups_C].any()
    }


def equalize(
    model: ModelProto, magnitudes: Mapping[str, NDArray[np.float32]], *, op_types: Sequence[str]
) -> ModelProto:
    """Return an equal float graph whose quantized activations have channels of more similar magnitudes.

    `magnitudes` are the largest magnitudes [C] of each channel of the tensors that `scalable_tensors` names.
    """
    channels = find_scalable_channels(model)
    layers = {node.name for node in weighted_nodes(model, op_types)}
    num_groups = len(channels.is_free_G)
    activation_G, weight_G = np.zeros(num_groups), np.zeros(num_groups)
    for name, magnitude_C in magnitudes.items():
        share_C = magnitude_C / max(float(magnitude_C.max()), _TINY)
        np.maximum.at(activation_G, channels.tensors[name].groups_C, share_C)
    weights = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for layer in channels.layers:
        if layer.inputs_I is not None and layer.node.name in layers:
            np.maximum.at(weight_G, layer.inputs_I, _input_shares(layer, weights[layer.node.input[1]]))
    is_scaled_G = channels.is_free_G & (activation_G > 0)
    activation_G, weight_G = np.maximum(activation_G, _SMALLEST), np.maximum(weight_G, _SMALLEST)
    is_read_G = weight_G > _SMALLEST
    factors_G = np.where(is_read_G, np.sqrt(activation_G / weight_G), activation_G)
    return _scale(model, channels, np.where(is_scaled_G, factors_G, 1.0))


def without_upper_limits(model: ModelProto) -> ModelProto | None:
    """Return a copy with Relu for each Clip from 0 to a limit (ReLU6); None if there is none.

    Channels behind a Clip cannot be scaled (Nagel et al. 2019, section 5.1.1). The copy is another function where
    activations reach the limit.
    """
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    changed = ModelProto()
    changed.CopyFrom(model)
    clips = [
        node
        for node in changed.graph.node
        if node.op_type == "Clip"
        and len(node.input) == 3
        and node.input[1] in constants
        and not numpy_helper.to_array(constants[node.input[1]]).any()
    ]
    for node in clips:
        node.op_type = "Relu"
        del node.input[1:]
    return changed if clips else None


def _input_shares(layer: ScaledLayer, weight: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the largest share [I] of a row's largest weight that each input channel has; 0 in depthwise layers."""
    weight_GOIK = np.abs(_by_group(layer.node, weight)).astype(np.float64)
    if weight_GOIK.shape[2] == 1:
        return np.zeros(len(weight_GOIK))
    column_GOI = weight_GOIK.max(axis=3)
    row_GO1 = column_GOI.max(axis=2, keepdims=True)
    shares_GOI = np.divide(column_GOI, row_GO1, out=np.zeros_like(column_GOI), where=row_GO1 > 0)
    shares_I: NDArray[np.float64] = shares_GOI.max(axis=1).ravel()
    return shares_I


def _scale(model: ModelProto, channels: ScalableChannels, factors_G: NDArray[np.float64]) -> ModelProto:
    """Divide each channel by its factor where it is made, and multiply by it where it is read."""
    scaled = ModelProto()
    scaled.CopyFrom(model)
    constants = {tensor.name: tensor for tensor in scaled.graph.initializer}

    def multiply(name: str, factors: NDArray[np.float64]) -> None:
        tensor = constants[name]
        values = (numpy_helper.to_array(tensor) * factors).astype(np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, name))

    for layer in channels.layers:
        weight, *bias = [name for name in layer.node.input[1:] if name]
        made_O = 1 / factors_G[layer.outputs_O]
        for name in bias:
            multiply(name, made_O)
        if layer.node.op_type == "LayerNormalization":
            multiply(weight, made_O)
            continue
        values = numpy_helper.to_array(constants[weight])
        weight_GOIK = _by_group(layer.node, values)
        num_groups = len(weight_GOIK)
        factors = made_O.reshape(num_groups, -1, 1, 1)
        if layer.inputs_I is not None:
            factors = factors * factors_G[layer.inputs_I].reshape(num_groups, 1, -1, 1)
        multiply(weight, _from_groups(layer.node, np.broadcast_to(factors, weight_GOIK.shape), values.shape))
    for name, (axis, groups_C) in channels.constants.items():
        shape = [1] * len(constants[name].dims)
        shape[axis] = -1
        multiply(name, (1 / factors_G[groups_C]).reshape(shape))
    return scaled


def _by_group(node: NodeProto, weight: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return a layer's weight as [groups, output channels, input channels, positions of the kernel]."""
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    if node.op_type == "Conv":
        return weight.reshape(attributes.get("group", 1), -1, weight.shape[1], int(np.prod(weight.shape[2:])))
    return (weight if attributes.get("transB") else weight.T)[None, :, :, None]


def _from_groups(
    node: NodeProto, weight_GOIK: NDArray[np.float64], shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """Undo `_by_group`."""
    if node.op_type == "Conv":
        return weight_GOIK.reshape(shape)
    is_transposed = any(item.i for item in node.attribute if item.name == "transB")
    return weight_GOIK[0, :, :, 0] if is_transposed else weight_GOIK[0, :, :, 0].T
