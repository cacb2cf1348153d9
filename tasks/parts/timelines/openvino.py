"""Record inferences of OpenVINO, which reports how long each layer takes, but not when it starts.

What it reports is the mean over all inferences since the engine was loaded, the slow first one included, rounded down
to a microsecond. The time of one inference is therefore the difference of two totals. So that rounding stays below
3 us for each layer, the engine is loaded anew for every recorded inference; the trace leaves that time out.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.parts.engines.frame_engine.sessions import open_openvino
from tasks.parts.engines.manifest import EngineManifest, FloatArray, engine_libraries
from tasks.parts.engines.openvino.compile import compile_options
from tasks.parts.timelines.inference import Inference, LayerTable, layer_details
from tasks.parts.timelines.trace import Slice

if TYPE_CHECKING:
    import openvino

START = "laid end to end: OpenVINO reports durations only"
HOW = f"{START}; the engine is loaded anew before each inference, which is left out"
REMAINDER = "not in a layer"

_WARM_UPS = 2


def record(
    file: Path, manifest: EngineManifest, images_NCHW: FloatArray, num_inferences: int, layers: LayerTable
) -> tuple[Inference, ...]:
    """Record inferences of a blob that is known to load, each after two that are not recorded."""
    blob, libraries = file.read_bytes(), engine_libraries(file, manifest.target)
    options: dict[str, Any] = compile_options(manifest.target) | {"PERF_COUNT": True}
    inferences, start_us = [], 0.0
    for _ in range(num_inferences):
        request = open_openvino(blob, {"properties": options}, libraries).create_infer_request()
        inferences.append(_record_one(request, images_NCHW, layers, start_us))
        start_us = inferences[-1].end_us
    return tuple(inferences)


def _record_one(
    request: "openvino.InferRequest", images_NCHW: FloatArray, layers: LayerTable, start_us: float
) -> Inference:
    for _ in range(_WARM_UPS):
        request.infer({0: images_NCHW}, share_inputs=True, share_outputs=True)
    before_us = _totals_us(request, _WARM_UPS)
    started_ns = time.perf_counter_ns()
    request.infer({0: images_NCHW}, share_inputs=True, share_outputs=True)
    end_us = start_us + (time.perf_counter_ns() - started_ns) / 1000
    after_us = _totals_us(request, _WARM_UPS + 1)
    durations_us = [max(0, after - before) for before, after in zip(before_us, after_us, strict=True)]
    slices, moment_us = [], start_us
    nodes = request.profiling_info
    for index in _executed(nodes, layers):
        info = nodes[index]
        details = layer_details(layers, info.node_name, kind=info.node_type)
        details |= {"kernel": info.exec_type, "duration_us": durations_us[index], "start": START}
        slices.append(Slice(info.node_name, moment_us, durations_us[index], details))
        moment_us += durations_us[index]
    if moment_us < end_us:
        details = {"content": "the call itself, and what was rounded down in the layers", "start": START}
        slices.append(Slice(REMAINDER, moment_us, end_us - moment_us, details))
    return Inference(start_us, max(moment_us, end_us), tuple(slices))


def _totals_us(request: "openvino.InferRequest", num_inferences: int) -> list[int]:
    """Return the time of each node over all inferences since the engine was loaded, which are so many."""
    return [num_inferences * round(info.real_time.total_seconds() * 1e6) for info in request.profiling_info]


def _executed(nodes: "list[openvino.ProfilingInfo]", layers: LayerTable) -> list[int]:
    """Return the places of the nodes that run: one that takes less than a microsecond counts as not run there."""
    ran = {index for index, info in enumerate(nodes) if info.status == type(info).Status.EXECUTED}
    named = {nodes[index].node_name for index in ran}
    for index, info in enumerate(nodes):
        if info.node_name in layers and info.node_name not in named:
            named.add(info.node_name)
            ran.add(index)
    return sorted(ran)
