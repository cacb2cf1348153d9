"""Read the layers of an engine from TensorRT's engine inspector.

Its JSON differs between majors: 10 has one text "Format/Datatype" and "Bindings", 11 has separate "Format" and
"DataType" and "I/O Tensors". Both are supported.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from tasks.parts.engines.manifest import EngineLayer

_PRECISIONS = (
    (re.compile(r"\b(int8|i8)\b", re.IGNORECASE), "int8"),
    (re.compile(r"\b(fp8\w*|e4m3\w*)\b", re.IGNORECASE), "fp8"),
    (re.compile(r"\b(bf16|bfloat16|bfloat)\b", re.IGNORECASE), "bf16"),
    (re.compile(r"\b(fp16|half|float16)\b", re.IGNORECASE), "f16"),
    (re.compile(r"\b(fp32|float|float32)\b", re.IGNORECASE), "f32"),
)
_NODE = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_REFORMAT = re.compile(r"reformat|copy", re.IGNORECASE)


def read_layers(text: str) -> tuple[EngineLayer, ...]:
    """Read the inspector's JSON; an engine that reports only names, or nothing, has layers without precision."""
    layers = json.loads(text).get("Layers", [])
    layers = [{"Name": layer} if isinstance(layer, str) else layer for layer in layers]
    return tuple(_read_layer(layer) for layer in layers)


def _read_layer(layer: dict[str, Any]) -> EngineLayer:
    kind = str(layer.get("LayerType", ""))
    nodes = tuple(_NODE.findall(str(layer.get("Metadata", ""))))
    return EngineLayer(
        name=str(layer.get("Name", "")),
        kind=kind,
        precision=_precision(layer),
        nodes=nodes,
        is_conversion=bool(_REFORMAT.search(kind)) and not nodes,
    )


def _precision(layer: dict[str, Any]) -> str:
    """Read the precision of the first input, or of the weights if it depends on an unknown shape."""
    inputs: Sequence[dict[str, Any]] = layer.get("Inputs", [])
    texts = [str(inputs[0].get(key, "")) for key in ("DataType", "Format/Datatype")] if inputs else []
    weights = layer.get("Weights")
    texts += [str(weights.get("Type", ""))] if isinstance(weights, dict) else []
    return next((name for text in texts for pattern, name in _PRECISIONS if pattern.search(text)), "")
