"""Correct the mean errors of INT8 layers by their biases.

Rounded weights and activations shift the mean of a layer's outputs, and the shift grows from layer to layer (Nagel et
al. 2019, arXiv:1906.04721, section 4.2 and appendix D). O output channels.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, numpy_helper

from tasks.parts.onnx_graphs.graph import index_graph
from tasks.parts.progress import TimeBudget, tracked
from tasks.parts.quantization.layer_steps import Batches, LayerSteps
from tasks.parts.quantization.qdq import weighted_nodes


def correct_biases(
    model: ModelProto,
    quantized: ModelProto,
    batches: Sequence[NDArray[np.float32]],
    *,
    op_types: Sequence[str],
    budget: TimeBudget | None = None,
) -> ModelProto:
    """Return the float graph with biases that give the layers of `quantized` the means that `model` has.

    `quantized` is the Q/DQ graph of `model`. Each layer is corrected behind the corrected layers before it; once a
    budget is spent, the rest stay as they are.
    """
    exact, rounded = LayerSteps(model, batches), LayerSteps(quantized, batches)
    shifts = {}
    for node in tracked(correctable_layers(model, op_types), "bias correction", budget):
        shifts[node.name] = correct_output(node, exact.read_output(node.name), rounded.read_output(node.name))
    return add_to_biases(model, shifts)


def correctable_layers(model: ModelProto, op_types: Sequence[str]) -> list[NodeProto]:
    """Return the layers that read INT8 and have a bias, or can get one, in graph order."""
    added, constants = _added_constants(model), {tensor.name for tensor in model.graph.initializer}

    def is_correctable(node: NodeProto) -> bool:
        if node.op_type in ("Conv", "Gemm"):
            return len(node.input) < 3 or not node.input[2] or node.input[2] in constants
        return node.name in added

    return [node for node in weighted_nodes(model, op_types) if is_correctable(node)]


def correct_output(node: NodeProto, exact: Batches, rounded: Batches) -> NDArray[np.float32]:
    """Add the difference of the means to each channel of a layer's `rounded` output; return it, [O]."""
    axis = channel_axis(node, exact[0].ndim)
    shift_O = (_mean(exact, axis) - _mean(rounded, axis)).astype(np.float32)
    shape = [1] * exact[0].ndim
    shape[axis] = -1
    for values in rounded:
        values += shift_O.reshape(shape)
    return shift_O


def add_to_biases(model: ModelProto, shifts: Mapping[str, NDArray[np.float32]]) -> ModelProto:
    """Return a copy in which each named layer adds more to its output channels."""
    shifted = ModelProto()
    shifted.CopyFrom(model)
    graph = shifted.graph
    index = index_graph(graph)
    constants, readers = index.constants, index.readers
    added = _added_constants(model)
    nodes = {node.name: node for node in graph.node}
    for name, shift_O in shifts.items():
        node = nodes[name]
        if name in added:
            adder, place = nodes[added[name][0]], added[name][1]
        else:
            adder, place = node, 2
            node.input.extend([""] * (3 - len(node.input)))
        bias = adder.input[place]
        values = numpy_helper.to_array(constants[bias]) if bias else np.zeros(len(shift_O), np.float32)
        total = (values + shift_O).astype(np.float32)  # a Gemm adds [1, 1] or [1, O] to [rows, O] as well
        if bias and len(readers[bias]) == 1:
            constants[bias].CopyFrom(numpy_helper.from_array(total, bias))
        else:
            adder.input[place] = f"{name}:corrected_bias"
            graph.initializer.append(numpy_helper.from_array(total, adder.input[place]))
    return shifted


def channel_axis(node: NodeProto, num_axes: int) -> int:
    """Return the axis of a layer's output channels in its output."""
    return 1 if node.op_type in ("Conv", "ConvTranspose") else num_axes - 1


def _mean(batches: Batches, axis: int) -> NDArray[np.float64]:
    sums = [
        values.sum(axis=tuple(item for item in range(values.ndim) if item != axis), dtype=np.float64)
        for values in batches
    ]
    total: NDArray[np.float64] = np.sum(sums, axis=0) / sum(
        values.size // values.shape[axis] for values in batches
    )
    return total


def _added_constants(model: ModelProto) -> dict[str, tuple[str, int]]:
    """Return MatMul -> the only Add behind it, and which of its inputs is a constant [O]."""
    index = index_graph(model.graph)
    constants, added = index.constants, dict[str, tuple[str, int]]()
    for node in model.graph.node:
        following = index.readers.get(node.output[0], [])
        if node.op_type == "MatMul" and len(following) == 1 and following[0].op_type == "Add":
            for place, name in enumerate(following[0].input):
                if name in constants and node.input[1] in constants:
                    width = constants[node.input[1]].dims[-1]
                    if list(constants[name].dims) == [width]:
                        added[node.name] = following[0].name, place
    return added
