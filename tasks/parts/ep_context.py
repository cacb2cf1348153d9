"""A TensorRT plan as an ONNX graph, for ONNX Runtime's TensorRT provider.

By itself that provider compiles when a session opens: no file is the engine that was measured, types are weak, and of
the layers nothing is told. Here the plan is that of runtime tensorrt, its options and proof included, and the
provider only runs it: a node of ONNX Runtime's operator EPContext holds it ("EPContext Design" in its documentation).
Not run on real hardware.
"""

from onnx import ModelProto, helper

from tasks.core.errors import BuildFailed
from tasks.parts.runners.onnxruntime import PLAN_OPERATOR

_DOMAIN = "com.microsoft"
_MAX_BYTES = 2**31 - 2**20
"""What a protobuf message takes, less what is beside the plan."""


def wrap_plan(plan: bytes, graph: ModelProto) -> ModelProto:
    """Return a graph with the inputs and outputs of `graph`, that the plan was built from, and the plan as only node.

    Raises BuildFailed for a plan of 2 GB or more.
    """
    if len(plan) > _MAX_BYTES:
        raise BuildFailed(
            f"The plan has {len(plan) / 2**30:.2f} GB, an ONNX file takes less than 2. Build it for a target of "
            "runtime tensorrt."
        )
    node = helper.make_node(
        PLAN_OPERATOR,
        [value.name for value in graph.graph.input],
        [value.name for value in graph.graph.output],
        name=graph.graph.name,
        domain=_DOMAIN,
        embed_mode=1,
        ep_cache_context=plan,
    )
    wrapped = helper.make_graph([node], graph.graph.name, graph.graph.input, graph.graph.output)
    opsets = [entry for entry in graph.opset_import if entry.domain != _DOMAIN]
    return helper.make_model(
        wrapped, ir_version=graph.ir_version, opset_imports=[*opsets, helper.make_opsetid(_DOMAIN, 1)]
    )
