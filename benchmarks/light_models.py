"""Real architectures that this repository did not make: the backend test data of the ``onnx`` wheel.

The wheel ships their graphs with all weights constant. Here they get seeded random ones (He et al., "Delving Deep
into Rectifiers", 2015), so that outputs depend on the image. Weights are among the inputs,
as in all files of IR version 3.
"""

import math
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

FOLDER = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NAMES = ("resnet50", "squeezenet", "shufflenet", "densenet121", "inception_v1", "inception_v2")
SIDE = 224


def light_model(name: str, seed: int = 0) -> ModelProto:
    """Return an architecture with random weights; the same seed gives the same."""
    model = onnx.load(FOLDER / f"light_{name}.onnx")
    graph, random = model.graph, np.random.default_rng(seed)
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    readers = {tensor: (node, index) for node in graph.node for index, tensor in enumerate(node.input)}
    for node in [node for node in graph.node if node.op_type == "ConstantOfShape"]:
        reader, index = readers[node.output[0]]
        values = _draw(random, tuple(int(size) for size in shapes[node.input[0]]), reader.op_type, index)
        graph.initializer.append(numpy_helper.from_array(values, node.output[0]))
        graph.input.append(helper.make_tensor_value_info(node.output[0], TensorProto.FLOAT, values.shape))
        graph.node.remove(node)
    return model


def _draw(random: np.random.Generator, shape: tuple[int, ...], op_type: str, index: int) -> np.ndarray:
    if op_type == "BatchNormalization":  # scale, bias, mean, variance
        values = np.full(shape, 1.0 if index in (1, 4) else 0.0)
    elif len(shape) > 1:
        num_inputs = math.prod(shape[1:]) if op_type in ("Conv", "Gemm") else shape[0]
        values = random.normal(0, math.sqrt(2 / num_inputs), shape)
    else:
        values = np.zeros(shape)
    return values.astype(np.float32)
