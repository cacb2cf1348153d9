"""Time what stands before and behind an engine on a GPU, without the engine: numpy, kernels, and parts of a graph.

Cells of `benchmarks.gpu`. Before an engine, each form turns a frame in host memory into an image in the memory of the
GPU; behind it, scores there into a mask in host memory. Copies count.
"""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from tasks.core.errors import TargetMismatch
from tasks.parts.engines.frame_engine.images import fit_frame
from tasks.parts.engines.frame_engine.kernels import GpuArray, GpuFrames, open_kernels
from tasks.parts.engines.frame_engine.pixels import dtype_of_classes, find_classes, normalise
from tasks.parts.engines.frame_engine.sessions import CUDA_PROVIDER, open_onnxruntime
from tasks.parts.engines.gpu import find_gpus

Array = np.ndarray[Any, Any]

NUMPY, KERNELS, GRAPH = "numpy", "kernels", "graph"
FRAME, CAMERA, SCORES = "frame to image", "camera frame to image, letterbox", "scores to classes"
CAMERA_SIZE = (1080, 1920)
NUM_CLASSES, MEAN, STD = 6, (0.5,) * 3, (0.25,) * 3
NUM_ROUNDS = 40
NO_GRAPH = "onnxruntime-gpu is not installed, which runs the same steps as a graph"


@dataclass(frozen=True)
class KernelCase:
    """The size of the images that an engine reads."""

    height: int
    width: int

    @property
    def name(self) -> str:
        """Name of the cell."""
        return f"kernels-{self.height}x{self.width}"


@dataclass(frozen=True)
class Form:
    """One way to take a step."""

    run: Callable[[], Any]
    """Takes it, and waits for the GPU."""
    result: Callable[[], Array]
    """Returns what it has written."""


def measure_kernels(case: KernelCase) -> dict[str, Any]:
    """Compare all forms on this machine's GPU; raise TargetMismatch without one."""
    if not find_gpus():
        raise TargetMismatch("this machine has no NVIDIA GPU, or no driver (libcuda.so.1)")
    return compare_forms(case, num_rounds=NUM_ROUNDS)


def compare_forms(case: KernelCase, *, num_rounds: int) -> dict[str, Any]:
    """Hold the results of all forms against numpy's, and time them in the same rounds.

    Raises TargetMismatch without NVRTC.
    """
    generator, size = np.random.default_rng(0), (case.height, case.width)
    frame_NHWC = generator.integers(0, 256, (1, *size, 3), np.uint8)
    camera_NHWC = generator.integers(0, 256, (1, *CAMERA_SIZE, 3), np.uint8)
    scores_NKHW = generator.standard_normal((1, NUM_CLASSES, *size), np.float32)
    steps = _forms_of_numpy_and_kernels(size, frame_NHWC, camera_NHWC, scores_NKHW)
    graph_note = NO_GRAPH
    if _has_onnxruntime_gpu():
        graph_note = ""
        steps[FRAME][GRAPH], steps[SCORES][GRAPH] = _forms_of_graph(size, frame_NHWC, scores_NKHW)
    compared = {step: _compare(forms, num_rounds) for step, forms in steps.items()}
    return asdict(case) | {"steps": compared, "graph_note": graph_note}


def _forms_of_numpy_and_kernels(
    size: tuple[int, int], frame_NHWC: Array, camera_NHWC: Array, scores_NKHW: Array
) -> dict[str, dict[str, Form]]:
    import pycuda.autoprimaryctx  # noqa: F401  # makes the context of the GPU current
    import pycuda.driver as cuda

    stream = cuda.Stream()
    card = {"height": size[0], "width": size[1], "mean": MEAN, "std": STD, "threshold": None}
    kernels = open_kernels(card, stream)
    if kernels is None:
        raise TargetMismatch(
            "NVRTC is not installed, which compiles the kernels (pip install nvidia-cuda-nvrtc)"
        )

    def host(like: Array) -> Array:
        return cuda.pagelocked_empty(like.shape, like.dtype)

    def on_gpu(memory: Any, like: Array) -> GpuArray:
        return GpuArray(int(memory), like.shape, like.dtype, stream.handle)

    image_NCHW, classes_NHW = normalise(frame_NHWC, MEAN, STD), find_classes(scores_NKHW)
    images, frames, cameras = host(image_NCHW), host(frame_NHWC), host(camera_NHWC)
    scores, classes = host(scores_NKHW), host(classes_NHW)
    gpu_image, gpu_frame, gpu_camera, gpu_classes = (
        cuda.mem_alloc(array.nbytes) for array in (images, frames, cameras, classes)
    )
    gpu_scores = cuda.to_device(scores_NKHW)

    def give_image(image_NCHW: Array) -> None:
        images[...] = image_NCHW
        cuda.memcpy_htod_async(gpu_image, images, stream)
        stream.synchronize()

    def give_frame(frame_NHWC: Array, pinned: Array, memory: Any) -> None:
        pinned[...] = frame_NHWC
        cuda.memcpy_htod_async(memory, pinned, stream)
        source = GpuFrames.packed(int(memory), frame_NHWC.shape)
        kernels.fit(source, on_gpu(gpu_image, image_NCHW), resize="letterbox")
        stream.synchronize()

    def choose_on_host() -> Array:
        cuda.memcpy_dtoh_async(scores, gpu_scores, stream)
        stream.synchronize()
        return find_classes(scores)

    def choose() -> Array:
        kernels.choose(on_gpu(gpu_scores, scores_NKHW), on_gpu(gpu_classes, classes_NHW))
        cuda.memcpy_dtoh_async(classes, gpu_classes, stream)
        stream.synchronize()
        return classes.copy()

    def read_image() -> Array:
        cuda.memcpy_dtoh_async(images, gpu_image, stream)
        stream.synchronize()
        return images.copy()

    def fit_on_host() -> None:
        fitted_HWC = fit_frame(camera_NHWC[0], size=size, mode="letterbox")
        give_image(normalise(fitted_HWC[None], MEAN, STD))

    return {
        FRAME: {
            NUMPY: Form(lambda: give_image(normalise(frame_NHWC, MEAN, STD)), read_image),
            KERNELS: Form(lambda: give_frame(frame_NHWC, frames, gpu_frame), read_image),
        },
        CAMERA: {
            NUMPY: Form(fit_on_host, read_image),
            KERNELS: Form(lambda: give_frame(camera_NHWC, cameras, gpu_camera), read_image),
        },
        SCORES: {NUMPY: Form(choose_on_host, choose_on_host), KERNELS: Form(choose, choose)},
    }


def _has_onnxruntime_gpu() -> bool:
    if find_spec("onnxruntime") is None or find_spec("onnx") is None:
        return False
    import onnxruntime

    return CUDA_PROVIDER in onnxruntime.get_available_providers()


def _forms_of_graph(size: tuple[int, int], frame_NHWC: Array, scores_NKHW: Array) -> tuple[Form, Form]:
    """Return what reads frames and what gives classes, as `reads` and `gives` of a target put it into the graph."""
    import onnxruntime

    reader, chooser = (
        open_onnxruntime(
            content,
            {"provider": CUDA_PROVIDER, "provider_options": {}, "num_threads": 1, "needs_vnni": False},
        )
        for content in make_graphs(size)
    )

    def bind(session: Any, inputs: Array, outputs: Array) -> tuple[Any, Any, Any]:
        allocate = onnxruntime.OrtValue.ortvalue_from_shape_and_type
        given, found = (allocate(array.shape, array.dtype, "cuda") for array in (inputs, outputs))
        binding = session.io_binding()
        binding.bind_ortvalue_input(session.get_inputs()[0].name, given)
        binding.bind_ortvalue_output(session.get_outputs()[0].name, found)
        return binding, given, found

    image_NCHW = np.empty((1, 3, *size), np.float32)
    reads, frame, image = bind(reader, frame_NHWC, image_NCHW)
    gives, scores, classes = bind(chooser, scores_NKHW, np.empty((1, *size), dtype_of_classes(NUM_CLASSES)))
    scores.update_inplace(scores_NKHW)

    def read() -> None:
        frame.update_inplace(frame_NHWC)
        reader.run_with_iobinding(reads)

    def choose() -> Array:
        chooser.run_with_iobinding(gives)
        found: Array = classes.numpy()
        return found

    return Form(read, image.numpy), Form(choose, choose)


def make_graphs(size: tuple[int, int]) -> tuple[bytes, bytes]:
    """Return an ONNX graph from frames to images, and one from scores to classes."""
    from onnx import TensorProto, helper

    from tasks.parts.builders.frames import give_classes, read_frames
    from tasks.parts.data.input_card import InputCard

    card = InputCard(tuple(map(str, range(NUM_CLASSES))), MEAN, STD, *size)

    def identity(channels: int) -> Any:
        given, found = (
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", channels, *size])
            for name in ("given", "found")
        )
        node = helper.make_node("Identity", ["given"], ["found"])
        graph = helper.make_graph([node], "identity", [given], [found])
        return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])

    graphs = read_frames(identity(3), card), give_classes(identity(NUM_CLASSES), card)
    reads, gives = (graph.SerializeToString() for graph in graphs)
    return reads, gives


def _compare(forms: Mapping[str, Form], num_rounds: int) -> dict[str, dict[str, Any]]:
    """Return latency, speed-up over numpy and the share of equal values of each form."""
    from tasks.parts.engines.rounds import rounds_ms
    from tasks.parts.measuring.intervals import estimate_ratio

    results = {}
    for name, form in forms.items():
        form.run()
        results[name] = form.result()
    calls = {name: lambda _, form=form: form.run() for name, form in forms.items()}
    rounds = rounds_ms(calls, np.empty(0), num_rounds)
    medians = {name: [statistics.median(burst) for burst in bursts] for name, bursts in rounds.items()}
    found = {}
    for name in forms:
        speedup = estimate_ratio([a / b for a, b in zip(medians[NUMPY], medians[name], strict=True)])
        found[name] = {
            "latency_ms_p50": statistics.median(value for burst in rounds[name] for value in burst),
            "speedup": speedup.value,
            "speedup_low": speedup.low,
            "speedup_high": speedup.high,
            "share_equal": float((results[name] == results[NUMPY]).mean()),
        }
    return found
