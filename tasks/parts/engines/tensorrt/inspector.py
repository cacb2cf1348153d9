"""Read the layers of an engine from TensorRT's engine inspector.

Its JSON differs between majors: 10 has one text "Format/Datatype" and "Bindings", 11 has separate "Format" and
"DataType" and "I/O Tensors". Both are supported.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.parts.engines.manifest import EngineLayer
from tasks.parts.engines.tensorrt.tactics import unit_of

_PRECISIONS = (
    (re.compile(r"\b(int8|i8)\b", re.IGNORECASE), "int8"),
    (re.compile(r"\b(fp8\w*|e4m3\w*)\b", re.IGNORECASE), "fp8"),
    (re.compile(r"\b(bf16|bfloat16|bfloat)\b", re.IGNORECASE), "bf16"),
    (re.compile(r"\b(fp16|half|float16)\b", re.IGNORECASE), "f16"),
    (re.compile(r"\b(fp32|float|float32)\b", re.IGNORECASE), "f32"),
)
_BYTES = {"int8": 1, "fp8": 1, "bf16": 2, "f16": 2, "f32": 4}
_NODE = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_REFORMAT = re.compile(r"reformat|copy", re.IGNORECASE)


def read_layers(text: str) -> tuple[EngineLayer, ...]:
    """Read the inspector's JSON; an engine that reports only names, or nothing, has layers without precision."""
    layers = json.loads(text).get("Layers", [])
    layers = [{"Name": layer} if isinstance(layer, str) else layer for layer in layers]
    makers = {
        tensor["Name"]: str(layer.get("Name", "")) for layer in layers for tensor in layer.get("Outputs", [])
    }
    return tuple(_read_layer(layer, makers) for layer in layers)


def _read_layer(layer: dict[str, Any], makers: Mapping[str, str]) -> EngineLayer:
    kind = str(layer.get("LayerType", ""))
    nodes = tuple(_NODE.findall(str(layer.get("Metadata", ""))))
    read = [makers[tensor["Name"]] for tensor in layer.get("Inputs", []) if tensor.get("Name") in makers]
    return EngineLayer(
        name=str(layer.get("Name", "")),
        kind=kind,
        precision=_precision(layer),
        nodes=nodes,
        is_conversion=bool(_REFORMAT.search(kind)) and not nodes,
        kernel=_kernel(str(layer.get("TacticName", ""))),
        reads=tuple(dict.fromkeys(read)),
        input_bytes=_bytes_of(layer.get("Inputs")),
        weight_bytes=_weight_bytes(layer.get("Weights")),
        output_bytes=_bytes_of(layer.get("Outputs")),
    )


def _kernel(tactic: str) -> str:
    """Return the name of a tactic with the units of the GPU that it tells, in parentheses."""
    unit = unit_of(tactic)
    return f"{tactic} ({unit})" if unit else tactic


def _bytes_of(tensors: Sequence[dict[str, Any]] | None) -> int | None:
    """Return the size of tensors; None if one has a shape or a type that the inspector does not tell."""
    num_bytes = 0
    for tensor in tensors or ():
        size = _BYTES.get(_read_precision(_type_texts(tensor)))
        dimensions = tensor.get("Dimensions")
        if size is None or not dimensions or min(dimensions) < 0:
            return None
        num_bytes += size * math.prod(dimensions)
    return None if tensors is None else num_bytes


def _weight_bytes(weights: Any) -> int | None:
    if not isinstance(weights, dict):
        return None
    size = _BYTES.get(_read_precision([str(weights.get("Type", ""))]))
    return None if size is None else size * int(weights.get("Count", 0))


def _precision(layer: dict[str, Any]) -> str:
    """Read the precision of the first input, or of the weights if it depends on an unknown shape."""
    inputs: Sequence[dict[str, Any]] = layer.get("Inputs", [])
    texts = _type_texts(inputs[0]) if inputs else []
    weights = layer.get("Weights")
    texts += [str(weights.get("Type", ""))] if isinstance(weights, dict) else []
    return _read_precision(texts)


def _type_texts(tensor: dict[str, Any]) -> list[str]:
    return [str(tensor.get(key, "")) for key in ("DataType", "Format/Datatype")]


def _read_precision(texts: Sequence[str]) -> str:
    return next((name for text in texts for pattern, name in _PRECISIONS if pattern.search(text)), "")
