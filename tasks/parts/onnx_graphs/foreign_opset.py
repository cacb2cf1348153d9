"""The opset of an ONNX graph of another tool: find it, and convert it to one that all runtimes here read."""

from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, helper, numpy_helper

from tasks.core.errors import ArtifactError, first_line
from tasks.parts.custom_operators import STANDARD_DOMAINS
from tasks.parts.onnx_graphs.graph import MAX_OPSET, MIN_OPSET, without_large_constants

_FIRST_WITH_COORDINATES = 11
"""Opset since which a Resize says which of its pixels lies where."""


def read_opset(model: ModelProto, path: Path) -> int:
    """Return the opset of the standard operators; raise ArtifactError for one that cannot be converted."""
    opset = next((entry.version for entry in model.opset_import if entry.domain in STANDARD_DOMAINS), 0)
    newest = onnx.defs.onnx_opset_version()
    if not 1 <= opset <= newest:
        raise ArtifactError(
            f"{path}: opset {opset}, expected at most {newest}, the newest of onnx {onnx.__version__}. Export it "
            f"with opset {MIN_OPSET} to {MAX_OPSET}."
        )
    return int(opset)


def check_opset(model: ModelProto, path: Path) -> None:
    """Raise ArtifactError for an opset or an operator that cannot be converted."""
    opset = read_opset(model, path)
    if opset > MAX_OPSET:
        _refuse_newer_operators(model, path, MAX_OPSET)


def convert_opset(
    model: ModelProto, path: Path, opset: int, *, least: int = MIN_OPSET
) -> tuple[ModelProto, list[str]]:
    """Bring the graph to `least` .. MAX_OPSET with onnx's converter; return it and what was done.

    Raises ArtifactError for an operator that the other opset does not have.
    """
    wanted = min(max(opset, least), MAX_OPSET)
    if wanted == opset:
        return model, []
    _refuse_newer_operators(model, path, wanted)
    model.ir_version = max(model.ir_version, 4)  # since version 4 weights need not be inputs
    try:
        converted = without_large_constants(
            model, lambda light: onnx.version_converter.convert_version(light, wanted)
        )
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
        raise ArtifactError(
            f"{path}: onnx cannot convert it from opset {opset} to {wanted} ({first_line(error)}). Export it "
            f"with opset {least} to {MAX_OPSET}."
        ) from error
    if opset < _FIRST_WITH_COORDINATES:
        _keep_coordinates(converted)
    return converted, [f"opset {opset} converted to {wanted} by onnx {onnx.__version__}"]


def _keep_coordinates(model: ModelProto) -> None:
    """Give Upsample and Resize of old opsets, which know one rule for coordinates, that rule, in place.

    Since opset 11 the default is another (half_pixel), and onnx's converter leaves it at that. Of nearest values a
    larger output takes those below, a smaller one those above, as in ONNX Runtime.
    """
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type != "Resize":
            continue
        scales = constants.get(node.input[2], np.ones(1)) if len(node.input) > 2 else np.ones(1)
        rules = {"coordinate_transformation_mode": "asymmetric"}
        rules["nearest_mode"] = "ceil" if scales.size and scales.min() < 1 else "floor"
        for attribute in [item for item in node.attribute if item.name in rules]:
            node.attribute.remove(attribute)
        node.attribute.extend(helper.make_attribute(name, value) for name, value in rules.items())


def _refuse_newer_operators(model: ModelProto, path: Path, wanted: int) -> None:
    known = {
        schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.since_version <= wanted
    }
    for node in model.graph.node:
        if node.domain in STANDARD_DOMAINS and node.op_type not in known:
            raise ArtifactError(
                f"{path}: node '{node.name or node.output[0]}' is {node.op_type}, which opset {wanted} lacks; "
                f"runtimes here read opsets up to {MAX_OPSET}. Export the model with opset {MAX_OPSET} or older, so "
                "that the exporter writes it with other operators."
            )
