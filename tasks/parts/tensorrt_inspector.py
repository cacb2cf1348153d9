"""What TensorRT's engine inspector tells about the layers of an engine.

Its JSON differs by major: 10 says "Format/Datatype" in one text and "Bindings", 11 "Format" and "DataType" apart and
"I/O Tensors". Both are read.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from tasks.core.errors import BuildFailed
from tasks.parts.runners.contract import EngineLayer

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
    """Read the inspector's JSON.

    Raises BuildFailed where the engine holds names only: then its precision cannot be proved.
    """
    layers = json.loads(text).get("Layers", [])
    if any(isinstance(layer, str) for layer in layers):
        raise BuildFailed(
            "The engine tells the names of its layers only. Build it with tensorrt.profiling_verbosity=detailed."
        )
    return tuple(_read_layer(layer) for layer in layers)


def _read_layer(layer: dict[str, Any]) -> EngineLayer:
    kind = str(layer.get("LayerType", ""))
    nodes = tuple(_NODE.findall(str(layer.get("Metadata", ""))))
    return EngineLayer(
        name=str(layer.get("Name", "")),
        kind=kind,
        precision=_precision(layer.get("Inputs", [])),
        nodes=nodes,
        is_conversion=bool(_REFORMAT.search(kind)) and not nodes,
    )


def _precision(inputs: Sequence[dict[str, Any]]) -> str:
    if not inputs:
        return ""
    first = inputs[0]
    said = " ".join(str(first.get(key, "")) for key in ("DataType", "Datatype", "Format/Datatype"))
    return next((name for pattern, name in _PRECISIONS if pattern.search(said)), "")
