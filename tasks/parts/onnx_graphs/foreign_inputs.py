"""Several inputs of a graph of another tool: those that are left out, or have constant values."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, ValueInfoProto, helper, numpy_helper

from tasks.core.errors import ArtifactError

INPUTS_FILE = "inputs.npz"
"""File beside the model, in its folder, with the constant values of its other inputs, by name."""


def drop_listed_constants(model: ModelProto) -> None:
    """Remove the weights from the inputs, among which old files list them, in place."""
    constants = {tensor.name for tensor in model.graph.initializer}
    _keep(model, [value for value in model.graph.input if value.name not in constants])


def drop_unread_inputs(model: ModelProto) -> None:
    """Remove inputs that no node reads, in place, unless that leaves none."""
    read = {name for node in model.graph.node for name in node.input}
    _keep(model, [value for value in model.graph.input if value.name in read] or list(model.graph.input))


def give_inputs(model: ModelProto, file: Path) -> None:
    """Make inputs constants with the values of a file, in place.

    Raises ArtifactError for a damaged file, and for values that are not for an input of the graph.
    """
    drop_listed_constants(model)
    inputs = {value.name: value for value in model.graph.input}
    try:
        with np.load(file, allow_pickle=False) as opened:
            given: dict[str, NDArray[Any]] = dict(opened)
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise ArtifactError(
            f"{file}: no arrays can be read ({error}), expected those of numpy.savez, one for each input."
        ) from error
    for name, values in given.items():
        if name not in inputs or not _fits(values, inputs[name]):
            expected = ", ".join(f"'{own}' {describe(value)}" for own, value in inputs.items())
            raise ArtifactError(
                f"{file}: '{name}' is {values.dtype} {list(values.shape)}, expected an array for an input of the "
                f"model but the image: {expected}."
            )
        model.graph.initializer.append(numpy_helper.from_array(values, name))
    _keep(model, [value for name, value in inputs.items() if name not in given])


def ways_to_one_input(model: ModelProto, path: Path) -> str:
    """Say how a graph with several inputs can be used: its part that reads the image alone, or with constants."""
    names = [value.name for value in model.graph.input]
    image = next((value.name for value in model.graph.input if len(sizes_of(value)) == 4), "")
    others = [name for name in names if name != image]
    ends = _ends_of(model, image)
    cut = f"Measure the part that reads the image alone: model.output={ends[0]}. Or give" if ends else "Give"
    name = others[0] if others else "name"
    return (
        f"{cut} the others constant values: numpy.savez('{INPUTS_FILE}', {name}=...) beside the model in a folder of "
        f"their own, and model.path=<folder> instead of {path.name}."
    )


def sizes_of(value: ValueInfoProto) -> list[int]:
    """Return the sizes of a tensor, 0 for open ones."""
    return [axis.dim_value for axis in value.type.tensor_type.shape.dim]


def describe(value: ValueInfoProto) -> str:
    """Return the type and the shape of a tensor as text."""
    kind = value.type.tensor_type
    if not kind.elem_type:
        return "of unknown type"
    sizes = [str(axis.dim_value or axis.dim_param or "?") for axis in kind.shape.dim]
    return f"{helper.tensor_dtype_to_np_dtype(kind.elem_type)} [{', '.join(sizes)}]"


def _keep(model: ModelProto, inputs: list[ValueInfoProto]) -> None:
    kept = [ValueInfoProto.FromString(value.SerializeToString()) for value in inputs]
    del model.graph.input[:]
    model.graph.input.extend(kept)


def _fits(values: NDArray[Any], value: ValueInfoProto) -> bool:
    sizes = [max(0, size) for size in sizes_of(value)]
    kind = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    return (
        values.dtype == kind
        and len(values.shape) == len(sizes)
        and all(own in (0, given) for own, given in zip(sizes, values.shape, strict=True))
    )


def _ends_of(model: ModelProto, image: str) -> list[str]:
    """Return the tensors of the image alone that are read together with other inputs, the last one first."""
    inputs = {value.name for value in model.graph.input}
    sources: dict[str, set[str]] = {name: {name} for name in inputs}
    ends: dict[str, None] = {}
    for node in model.graph.node:
        reads = set().union(*(sources.get(name, set()) for name in node.input))
        sources.update(dict.fromkeys(node.output, reads))
        if reads - {image}:
            ends.update(
                dict.fromkeys(name for name in node.input if sources.get(name) == {image} and name != image)
            )
    return list(ends)[::-1]
