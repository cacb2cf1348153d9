"""Parse and build the smallest plan, and print TensorRT's version. Needs TensorRT.

``python -m tasks.parts.builders.tensorrt_trial`` is a process of its own, because a library that does not fit the
driver may end it or never return.
"""

import sys

import tensorrt as trt
from onnx import TensorProto, helper

from tasks.core.errors import BuildFailed
from tasks.parts.engines.tensorrt.log import LOG, describe_errors

_OPSET, _IR_VERSION = 17, 8
"""Old enough for the parser of every version."""


def build_smallest_plan() -> bytes:
    """Return the plan of one ReLU; raise BuildFailed with TensorRT's words if it cannot be built here."""
    image, logits = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("image", "logits")
    )
    graph = helper.make_graph(
        [helper.make_node("Relu", ["image"], ["logits"])], "smallest", [image], [logits]
    )
    opset = helper.make_opsetid("", _OPSET)
    model = helper.make_model(graph, opset_imports=[opset], ir_version=_IR_VERSION)
    try:
        builder = trt.Builder(LOG)
    except TypeError as error:  # its constructor returned nothing
        raise BuildFailed(f"no builder: {describe_errors(LOG.errors)}") from error
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    if network is None or not trt.OnnxParser(network, LOG).parse(model.SerializeToString()):
        raise BuildFailed(f"no network: {describe_errors(LOG.errors)}")
    config = builder.create_builder_config()
    if config is None:
        raise BuildFailed(f"no configuration: {describe_errors(LOG.errors)}")
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise BuildFailed(f"no plan: {describe_errors(LOG.errors)}")
    return bytes(plan)


if __name__ == "__main__":
    try:
        build_smallest_plan()
    except BuildFailed as failure:
        sys.exit(str(failure))
    sys.stdout.write(trt.__version__)
