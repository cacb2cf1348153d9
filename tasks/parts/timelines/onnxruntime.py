"""Record inferences of ONNX Runtime on the CPU, whose profiler says when each node starts and ends."""

from pathlib import Path
from typing import Any

from tasks.parts.engines.manifest import EngineManifest, FloatArray
from tasks.parts.engines.onnxruntime.layers import record_nodes
from tasks.parts.engines.onnxruntime.runner import provider_of
from tasks.parts.timelines.inference import Inference, LayerTable, layer_details
from tasks.parts.timelines.trace import Slice

HOW = "ONNX Runtime's own timestamps; an inference reaches from the start of its first node to the end of its last"

_WARM_UPS = 2


def record(
    file: Path, manifest: EngineManifest, images_NCHW: FloatArray, num_inferences: int, layers: LayerTable
) -> tuple[Inference, ...]:
    """Record inferences of a graph, after two that are not recorded."""
    target = manifest.target
    num_all = _WARM_UPS + num_inferences
    events = record_nodes(
        file, images_NCHW, num_all, provider=provider_of(target), num_threads=target.num_threads
    )
    num_nodes, rest = divmod(len(events), num_all)
    assert num_nodes and not rest, "every inference runs the same nodes"
    events.sort(key=lambda event: float(event["ts"]))
    starts = range(_WARM_UPS * num_nodes, len(events), num_nodes)
    return tuple(_inference(events[start : start + num_nodes], layers) for start in starts)


def _inference(events: list[dict[str, Any]], layers: LayerTable) -> Inference:
    slices = tuple(
        Slice(
            event["name"],
            float(event["ts"]),
            float(event["dur"]),
            layer_details(layers, event["name"], kind=event["args"].get("op_name", ""))
            | {"duration_us": event["dur"], "provider": event["args"].get("provider", "")},
        )
        for event in events
    )
    return Inference(slices[0].start_us, max(each.end_us for each in slices), slices)
