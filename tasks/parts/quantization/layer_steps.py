"""Run a graph layer by layer, so that what a layer gets and gives can be read, and changed, on the way.

All layers together cost one pass over the images, also if each layer is changed before the next one runs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper

from tasks.parts.onnx_session import open_session, run_session

Batches = list[NDArray[Any]]
"""A tensor of several batches of images."""


class LayerSteps:
    """Runs the nodes of a graph in order and holds only the tensors that later nodes read.

    Each call runs the nodes that its layer needs; the layers have to be asked for in graph order.
    """

    def __init__(self, model: ModelProto, batches: Sequence[NDArray[np.float32]]) -> None:
        self._model = ModelProto()
        self._model.CopyFrom(model)
        graph = self._model.graph
        self._constants = {tensor.name: tensor for tensor in graph.initializer}
        self._index_of = {node.name: index for index, node in enumerate(graph.node)}
        self._last_reader = {name: index for index, node in enumerate(graph.node) for name in node.input}
        self._values: list[dict[str, NDArray[Any]]] = [{graph.input[0].name: images} for images in batches]
        self._next = 0

    def read_input(self, name: str) -> Batches:
        """Return the first input of a layer."""
        index = self._index_of[name]
        wanted = self._model.graph.node[index].input[0]
        self._run_to(index, wanted)
        return [values[wanted] for values in self._values]

    def read_output(self, name: str) -> Batches:
        """Return the output of a layer; change the arrays in place to change what later nodes read."""
        index = self._index_of[name]
        wanted = self._model.graph.node[index].output[0]
        self._run_to(index + 1, wanted)
        return [values[wanted] for values in self._values]

    def set_weight(self, name: str, weight: NDArray[np.float32]) -> None:
        """Let a layer, which has not run yet, read another weight."""
        constant = f"{name}:step_weight"
        self._constants[constant] = numpy_helper.from_array(weight, constant)
        self._model.graph.node[self._index_of[name]].input[1] = constant

    def _run_to(self, stop: int, wanted: str) -> None:
        nodes = list(self._model.graph.node[self._next : stop])
        if nodes:
            made = dict.fromkeys(name for node in nodes for name in node.output if name)
            kept = [name for name in made if name == wanted or self._last_reader.get(name, -1) >= stop]
            part, inputs = self._part(nodes, made, kept)
            session = open_session(part)
            for values in self._values:
                found = run_session(session, kept, {name: values[name] for name in inputs})
                values |= dict(zip(kept, found, strict=True))
            self._next = stop
        for values in self._values:
            for name in [item for item in values if item != wanted]:
                if self._last_reader.get(name, -1) < stop:
                    del values[name]

    def _sizes(self, name: str) -> list[int | None]:
        """Return the sizes of a tensor, None where batches differ.

        ONNX Runtime wants to know how many numbers a computed shape has that it reshapes or resizes to.
        """
        shapes = [values[name].shape for values in self._values]
        return [axis[0] if len(set(axis)) == 1 else None for axis in zip(*shapes, strict=True)]

    def _part(
        self, nodes: Sequence[NodeProto], made: dict[str, None], outputs: Sequence[str]
    ) -> tuple[ModelProto, list[str]]:
        """Return these nodes as a graph of their own, and the names of the tensors that it reads."""
        read = dict.fromkeys(name for node in nodes for name in node.input if name and name not in made)
        inputs = [name for name in read if name in self._values[0]]
        graph = helper.make_graph(
            nodes,
            "part",
            [
                helper.make_tensor_value_info(
                    name,
                    helper.np_dtype_to_tensor_dtype(self._values[0][name].dtype),
                    self._sizes(name),
                )
                for name in inputs
            ],
            [helper.make_empty_tensor_value_info(name) for name in outputs],
            [self._constants[name] for name in read if name in self._constants],
        )
        part = helper.make_model(
            graph, opset_imports=self._model.opset_import, ir_version=self._model.ir_version
        )
        part.metadata_props.extend(
            self._model.metadata_props
        )  # they name the libraries with custom operators
        return part, inputs
