"""Keep ONNX Runtime from moving the zeros of a Pad into the MaxPool behind it.

A MaxPool pads with less than any number, so where all values in a window at the border are negative, the runtime
(1.31) answers with one of them in place of 0; onnxsim's issue 290 describes the same for another optimizer. It leaves
alone a Pad that names its axes. Behind a ReLU the zeros change nothing, and moving them saves an operator.
"""

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper

from tasks.parts.onnx_graphs.graph import index_graph, pads_with_zeros, read_attribute

OPSET_OF_AXES = 18
"""First opset in which a Pad names axes."""


def pads_of_zeros(model: ModelProto) -> list[NodeProto]:
    """Return each Pad whose zeros could be moved into a MaxPool, with another result."""
    index = index_graph(model.graph)

    def is_moved(pad: NodeProto) -> bool:
        source = index.makers.get(pad.input[0])
        return (
            read_attribute(pad, "mode", b"constant") == b"constant"
            and len(pad.input) in (2, 3)
            and pad.input[1] in index.constants
            and pads_with_zeros(pad, index.constants)
            and (source is None or source.op_type != "Relu")
            and any(reader.op_type == "MaxPool" for reader in index.readers.get(pad.output[0], []))
        )

    return [node for node in model.graph.node if node.op_type == "Pad" and is_moved(node)]


def name_axes_of_pads(model: ModelProto) -> list[str]:
    """Let each of `pads_of_zeros` name its axes, in place; return one sentence if there are any.

    Needs OPSET_OF_AXES.
    """
    constants, pads = index_graph(model.graph).constants, pads_of_zeros(model)
    for pad in pads:
        num_axes = constants[pad.input[1]].dims[0] // 2
        axes = numpy_helper.from_array(np.arange(num_axes), f"{pad.output[0]}:axes")
        model.graph.initializer.append(axes)
        pad.input.extend([*[""] * (3 - len(pad.input)), axes.name])
    return [f"{len(pads)} Pad with zeros kept in front of the MaxPool behind"] if pads else []
