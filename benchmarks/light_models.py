"""Provide real third-party architectures: the backend test data of the ``onnx`` wheel.

The wheel ships their graphs with all weights constant. Here they get seeded random ones (He et al., "Delving Deep
into Rectifiers", 2015), so that outputs depend on the image. Weights are graph inputs as well, as in all files of
IR version 3.
"""

import math
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tasks.parts.onnx_graphs.graph import drop_unused
from tasks.parts.onnx_session import open_session

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES = ("resnet50", "squeezenet", "shufflenet", "densenet121", "inception_v1", "inception_v2")
SIDE = 224

_SHAPING = ("Reshape", "Unsqueeze")
"""Operators that may lie between a weight and the layer that reads it."""


def light_model(name: str, seed: int = 0) -> ModelProto:
    """Return an architecture with random weights, which the seed determines."""
    model = onnx.load(FOLDER / f"light_{name}.onnx")
    graph, random = model.graph, np.random.default_rng(seed)
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    readers = {tensor: (node, index) for node in graph.node for index, tensor in enumerate(node.input)}
    for node in [node for node in graph.node if node.op_type == "ConstantOfShape"]:
        reader, index = readers[node.output[0]]
        while reader.op_type in _SHAPING:
            reader, index = readers[reader.output[0]]
        values = _draw(random, tuple(int(size) for size in shapes[node.input[0]]), reader.op_type, index)
        graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
        graph.input.append(helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, values.shape))
        graph.node.remove(node)
    return model


def _draw(random: np.random.Generator, shape: tuple[int, ...], op_type: str, index: int) -> np.ndarray:
    if op_type == "BatchNormalization":  # scale, bias, mean, variance
        values = np.full(shape, 1.0 if index in (1, 4) else 0.0)
    elif op_type == "Mul":
        values = np.ones(shape)
    elif len(shape) > 1:
        num_inputs = math.prod(shape[1:]) if op_type in ("Conv", "Gemm") else shape[0]
        values = random.normal(0, math.sqrt(2 / num_inputs), shape)
    else:
        values = np.zeros(shape)
    return values.astype(np.float32)


def normalise_features(model: ModelProto, images_NCHW: np.ndarray) -> None:
    """Set the BatchNorms, in order, to the statistics of their inputs over some images, as training would.

    Also normalise the outputs of the last layer with weights to mean 0 and deviation 1: otherwise random features
    give every image the same class (after Mishkin and Matas, "All you need is a good init", 2016).
    """
    graph = model.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    for node in [node for node in graph.node if node.op_type == "BatchNormalization"]:
        maps_NCHW = _run_to(model, node.input[0], images_NCHW)
        for name, values in zip(
            node.input[3:5], (maps_NCHW.mean(axis=(0, 2, 3)), maps_NCHW.var(axis=(0, 2, 3))), strict=True
        ):
            constants[name].CopyFrom(numpy_helper.from_array(values, name))
    last = [node for node in graph.node if node.op_type in ("Conv", "Gemm")][-1]
    answers = _run_to(model, last.output[0], images_NCHW)
    maps_NC = answers.reshape(*answers.shape[:2], -1).mean(axis=2)
    mean_C, deviation = maps_NC.mean(axis=0), (maps_NC - maps_NC.mean(axis=0)).std()
    makers = {node.output[0]: node for node in graph.node if node.op_type in _SHAPING}
    weight, bias = (makers[name].input[0] if name in makers else name for name in last.input[1:])
    for tensor in graph.initializer:
        if tensor.name in (weight, bias):
            shift = mean_C if tensor.name == bias else 0.0
            values = (numpy_helper.to_array(tensor) - shift) / deviation
            tensor.CopyFrom(numpy_helper.from_array(values.astype(np.float32), tensor.name))


def _run_to(model: ModelProto, tensor: str, images_NCHW: np.ndarray) -> np.ndarray:
    """Return one tensor of the graph for every image."""
    part = ModelProto()
    part.CopyFrom(model)
    del part.graph.output[:]
    part.graph.output.append(helper.make_tensor_value_info(tensor, TensorProto.FLOAT, None))
    drop_unused(part.graph)
    kept = {constant.name for constant in part.graph.initializer}
    read = {name for node in part.graph.node for name in node.input}
    inputs = [value for value in part.graph.input if value.name in read]
    del part.graph.input[:]
    part.graph.input.extend(inputs)
    session = open_session(part)
    [image] = [value.name for value in inputs if value.name not in kept]
    return np.concatenate([session.run([tensor], {image: one[None]})[0] for one in images_NCHW])
