"""Custom operators in a graph of another tool: which are accepted, and the shapes of what they compute."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, NodeProto, ValueInfoProto, helper
from onnxruntime.capi import onnxruntime_pybind11_state as state

from tasks.core.errors import ArtifactError, first_line
from tasks.parts.custom_operators import (
    STANDARD_DOMAINS,
    CustomOperators,
    declare_libraries,
    domains_of,
)
from tasks.parts.onnx_session import open_session

RUN_FAILURES = (
    state.Fail,
    state.InvalidArgument,
    state.InvalidGraph,
    state.NotImplemented,
    state.RuntimeException,
)
"""What ONNX Runtime raises where a graph cannot be run on an input."""


def accept_domains(model: ModelProto, path: Path, libraries: Sequence[CustomOperators]) -> None:
    """Declare in a graph the libraries that have its custom operators; drop domains that no node needs.

    Raises ArtifactError for an operator of a domain without a library, or with the name of an ONNX operator.
    """
    custom = _custom_nodes(model)
    foreign = [node for node in custom if node.domain not in domains_of(libraries)]
    if foreign:
        kinds = sorted({f"{node.domain}::{node.op_type}" for node in foreign})
        raise ArtifactError(
            f"{path}: {len(foreign)} nodes are not standard ONNX operators: {', '.join(kinds[:5])} (first: "
            f"'{_name(foreign[0])}'), and no library is declared for {foreign[0].domain}. Export the model without "
            "runtime-specific operators, for example before a runtime optimised it, or declare the library that has "
            "them (model.custom_operators)."
        )
    standard = {schema.name for schema in onnx.defs.get_all_schemas_with_history()} if custom else set()
    for node in custom:
        if node.op_type in standard:  # every rewrite would take it for that one
            raise ArtifactError(
                f"{path}: node '{_name(node)}' is {node.domain}::{node.op_type}, which has the name of an ONNX "
                "operator, expected one of its own. Register it in its library under another name."
            )
    domains = {node.domain for node in custom}
    kept = [entry for entry in model.opset_import if entry.domain in STANDARD_DOMAINS]
    kept += [entry for entry in model.opset_import if entry.domain in domains]
    del model.opset_import[:]
    model.opset_import.extend(kept)
    declare_libraries(model, [library for library in libraries if domains & set(library.domains)])


def infer_custom_outputs(model: ModelProto, batches: Sequence[int], batch: str) -> list[ValueInfoProto]:
    """Return type and shape of what custom operators compute, which ONNX cannot infer, by running the graph.

    The first axis is called `batch` where it has the size of each of several batches; axes that differ otherwise stay
    open. Raises ArtifactError where ONNX Runtime does not run the graph.
    """
    names = [name for node in _custom_nodes(model) for name in node.output if name]
    if not names:
        return []
    marked = ModelProto()
    marked.CopyFrom(model)
    del marked.graph.value_info[:]
    own = {value.name for value in model.graph.output}
    marked.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names if name not in own)
    session, image = open_session(marked, is_optimised=False), model.graph.input[0]
    sizes = [axis.dim_value for axis in image.type.tensor_type.shape.dim[1:]]
    dtype = helper.tensor_dtype_to_np_dtype(image.type.tensor_type.elem_type)
    try:
        runs = [session.run(names, {image.name: np.zeros((size, *sizes), dtype)}) for size in batches]
    except RUN_FAILURES as error:
        raise ArtifactError(
            f"ONNX Runtime fails on a batch of {max(batches)}: {first_line(error)}"
        ) from error
    values = []
    for name, arrays in zip(names, zip(*runs, strict=True), strict=True):
        shapes = [array.shape for array in arrays]
        axes = zip(*shapes, strict=True)
        shape: list[int | str | None] = [axis[0] if len(set(axis)) == 1 else None for axis in axes]
        if shape and len(batches) > 1 and [found[0] for found in shapes] == list(batches):
            shape[0] = batch
        values.append(
            helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(arrays[0].dtype), shape)
        )
    return values


def _custom_nodes(model: ModelProto) -> list[NodeProto]:
    return [node for node in model.graph.node if node.domain not in STANDARD_DOMAINS]


def _name(node: NodeProto) -> str:
    return node.name or node.output[0]
