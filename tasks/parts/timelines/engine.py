"""Record the timeline of some inferences of an engine, with the layers that its runtime lets us see.

Shape letters: N batch, C channels, H height, W width.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from tasks.parts.engines.description import on_frames
from tasks.parts.engines.manifest import FloatArray
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.engines.runner import Runner, check_batch
from tasks.parts.engines.runtimes import CPU, Runtime
from tasks.parts.timelines import onnxruntime, openvino, torch
from tasks.parts.timelines.inference import Inference, read_layers
from tasks.parts.timelines.trace import Slice, Trace, Track

INFERENCES, LAYERS, KERNELS = "inferences", "layers, in order of execution", "GPU kernels"

_WARM_UPS = 3
_NO_LAYERS = {
    Runtime.onnxruntime: "on a GPU, ONNX Runtime's profiler times the launch of a kernel and not the kernel",
    Runtime.aotinductor: "AOTInductor compiles the network into one program, whose kernels report no times",
    **dict.fromkeys(
        (Runtime.tensorrt, Runtime.tensorrt_rtx),
        "TensorRT reports the times of layers as means only, which benchmark writes into layers.csv",
    ),
}


@dataclass(frozen=True)
class EngineTimeline:
    """Some inferences of an engine."""

    name: str
    """The engine file and its target."""
    inferences: tuple[Inference, ...]
    kernels: tuple[Slice, ...]
    """What a GPU ran meanwhile, if the runtime reports it."""
    note: str
    """Where the times of the layers come from, or why there are none."""

    @property
    def num_layers(self) -> int:
        """Slices of layers in each inference; 0 if the runtime reports none."""
        return sum(each.name != openvino.REMAINDER for each in self.inferences[0].layers)

    @property
    def share_in_layers(self) -> float:
        """Share of the time of all inferences that is in a layer."""
        in_layers = sum(
            each.duration_us
            for inference in self.inferences
            for each in inference.layers
            if each.name != openvino.REMAINDER
        )
        return in_layers / sum(inference.duration_us for inference in self.inferences)


def record_engine(engine: Path, *, num_inferences: int, batch_size: int) -> EngineTimeline:
    """Run some inferences of an engine on drawn images, after some that are not recorded.

    Raises what `open_engine` raises, and DataError for a batch that the engine does not take.
    """
    with open_engine(engine) as runner:
        manifest = runner.manifest
        images_NCHW = _draw_inputs(runner, batch_size)
        check_batch(images_NCHW, manifest)
        for _ in range(_WARM_UPS):
            runner.run(images_NCHW)
        name = f"{manifest.file} on {manifest.target.name}"
        file, layers = engine / manifest.file, read_layers(engine)
        match manifest.target.runtime, manifest.target.device:
            case Runtime.openvino, _:
                inferences = openvino.record(file, manifest, images_NCHW, num_inferences, layers)
                return EngineTimeline(name, inferences, (), openvino.HOW)
            case Runtime.onnxruntime, device if device == CPU:
                inferences = onnxruntime.record(file, manifest, images_NCHW, num_inferences, layers)
                return EngineTimeline(name, inferences, (), onnxruntime.HOW)
            case Runtime.torch, _:
                seen = torch.record(runner, images_NCHW, num_inferences)
                return EngineTimeline(name, seen.inferences, seen.kernels, torch.HOW)
            case runtime, _:
                inferences = _time_calls(runner, images_NCHW, num_inferences)
                reason = _NO_LAYERS.get(runtime, f"no profiler is known for runtime {runtime}")
                return EngineTimeline(name, inferences, (), f"no layers: {reason}")


def engine_trace(timeline: EngineTimeline) -> Trace:
    """Return the trace of an engine: a track of inferences, and tracks of layers and kernels if there are any."""
    inferences = [
        Slice(f"inference {number}", each.start_us, each.duration_us, {"layers": timeline.note})
        for number, each in enumerate(timeline.inferences, start=1)
    ]
    layers = [layer for each in timeline.inferences for layer in each.layers]
    tracks = [Track(INFERENCES, inferences), Track(LAYERS, layers), Track(KERNELS, timeline.kernels)]
    return Trace(timeline.name, [track for track in tracks if track.slices], {"layers": timeline.note})


def _draw_inputs(runner: Runner, batch_size: int) -> FloatArray:
    """Return what the engine reads of drawn frames."""
    import numpy as np

    channels, height, width = runner.manifest.card.image_shape
    random = np.random.default_rng(0)
    frames_NHWC = random.integers(0, 256, (batch_size, height, width, channels), np.uint8)
    return on_frames(runner).prepare(frames_NHWC)


def _time_calls(runner: Runner, images_NCHW: FloatArray, num_inferences: int) -> tuple[Inference, ...]:
    moments_us = []
    for _ in range(num_inferences):
        start_ns = time.perf_counter_ns()
        runner.run(images_NCHW)
        moments_us.append((start_ns / 1000, time.perf_counter_ns() / 1000))
    return tuple(Inference(start_us, end_us) for start_us, end_us in moments_us)
