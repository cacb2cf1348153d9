"""What TensorRT's engine inspector tells about the layers of an engine.

Its JSON differs by major: 10 says "Format/Datatype" in one text and "Bindings", 11 "Format" and "DataType" apart and
"I/O Tensors". Both are read.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks.core.errors import BuildFailed
from tasks.parts.runners.contract import Precisions

_PRECISIONS = (
    (re.compile(r"\b(int8|i8)\b", re.IGNORECASE), "int8"),
    (re.compile(r"\b(fp8\w*|e4m3\w*)\b", re.IGNORECASE), "fp8"),
    (re.compile(r"\b(bf16|bfloat16|bfloat)\b", re.IGNORECASE), "bf16"),
    (re.compile(r"\b(fp16|half|float16)\b", re.IGNORECASE), "f16"),
    (re.compile(r"\b(fp32|float|float32)\b", re.IGNORECASE), "f32"),
)
_NODE = re.compile(r"\[ONNX Layer: ([^\]]+)\]")
_REFORMAT = re.compile(r"reformat|copy", re.IGNORECASE)


@dataclass(frozen=True)
class EngineLayer:
    """One layer that the engine really runs."""

    name: str
    kind: str
    """TensorRT's word for it, such as CaskConvolution."""
    precision: str
    """int8, fp8, f16, bf16 or f32: of its first input; empty where the input is none of them."""
    nodes: tuple[str, ...]
    """ONNX nodes that it computes."""

    @property
    def is_reformat(self) -> bool:
        """Whether it only changes layout or precision."""
        return bool(_REFORMAT.search(self.kind)) and not self.nodes


def read_layers(text: str) -> tuple[EngineLayer, ...]:
    """Read the inspector's JSON.

    Raises BuildFailed where the engine holds names only: then its precision cannot be proved.
    """
    layers = json.loads(text).get("Layers", [])
    if any(isinstance(layer, str) for layer in layers):
        raise BuildFailed(
            "The engine tells the names of its layers only. Build it with tensorrt.profiling_verbosity=detailed."
        )
    return tuple(
        EngineLayer(
            name=str(layer.get("Name", "")),
            kind=str(layer.get("LayerType", "")),
            precision=_precision(layer.get("Inputs", [])),
            nodes=tuple(_NODE.findall(str(layer.get("Metadata", "")))),
        )
        for layer in layers
    )


def count_precisions(layers: Sequence[EngineLayer]) -> Precisions:
    """Count layers by kind and precision; reformats are left out."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for layer in layers:
        if layer.precision and not layer.is_reformat:
            counts[layer.kind][layer.precision] += 1
    return {kind: dict(sorted(found.items())) for kind, found in sorted(counts.items())}


def _precision(inputs: Sequence[dict[str, Any]]) -> str:
    if not inputs:
        return ""
    first = inputs[0]
    said = " ".join(str(first.get(key, "")) for key in ("DataType", "Datatype", "Format/Datatype"))
    return next((name for pattern, name in _PRECISIONS if pattern.search(said)), "")
