"""Open the sessions of the runtimes, with the options that were measured, from the card in model.json.

Each function raises ValueError if the runtime or the machine is not the one that the engine was measured on.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Run = Callable[[Array], Array]
"""Runs the engine; the next call may overwrite the result."""

CUDA_PROVIDER = "CUDAExecutionProvider"


def open_onnxruntime(model: Path | bytes, options: dict[str, Any]) -> Any:
    """Return a session of an ONNX graph on options["provider"]."""
    import onnxruntime

    provider = options["provider"]
    if options["needs_vnni"]:
        check_vnni()
    if provider == CUDA_PROVIDER:
        onnxruntime.preload_dlls()  # the loader does not find pip's CUDA libraries by itself
    if provider not in onnxruntime.get_available_providers():
        raise ValueError(
            f"the engine was measured on {provider}, onnxruntime here has "
            f"{', '.join(onnxruntime.get_available_providers())}."
        )
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = options["num_threads"], 1
    settings.log_severity_level = 3  # errors only
    # Threads sleep between inferences, so that an idle engine does not slow down the others.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    session = onnxruntime.InferenceSession(
        model if isinstance(model, bytes) else str(model),
        settings,
        providers=[(provider, options["provider_options"])],
    )
    if session.get_providers()[0] != provider:  # otherwise it falls back to the CPU
        raise ValueError(
            f"the engine was measured on {provider}, onnxruntime here runs it on {session.get_providers()[0]}."
        )
    return session


def run_onnxruntime(session: Any) -> Run:
    """Return the call of a session; on a GPU it reuses memory there for each batch size."""
    name = session.get_inputs()[0].name
    if session.get_providers()[0] != CUDA_PROVIDER:
        return lambda inputs: session.run(None, {name: inputs})[0]
    bound: dict[int, BoundBatch] = {}

    def run(inputs: Array) -> Array:
        if len(inputs) not in bound:
            [answer] = session.run(None, {name: inputs})  # tells shape and type
            bound[len(inputs)] = BoundBatch(session, "cuda", inputs, answer)
        return bound[len(inputs)].run(inputs)

    return run


class BoundBatch:
    """Inputs and outputs of one batch size on a device, bound to a session, so that calls allocate nothing there."""

    def __init__(self, session: Any, device: str, inputs: Array, outputs: Array) -> None:
        """Allocate memory for arrays like these."""
        import onnxruntime

        allocate = onnxruntime.OrtValue.ortvalue_from_shape_and_type
        self._session, self._binding = session, session.io_binding()
        self._inputs = allocate(inputs.shape, inputs.dtype, device)
        self._outputs = allocate(outputs.shape, outputs.dtype, device)
        self._binding.bind_ortvalue_input(session.get_inputs()[0].name, self._inputs)
        self._binding.bind_ortvalue_output(session.get_outputs()[0].name, self._outputs)

    def run(self, inputs: Array) -> Array:
        """Copy the inputs to the device, run, wait, and copy the outputs back."""
        self._inputs.update_inplace(inputs)
        self._session.run_with_iobinding(self._binding)
        outputs: Array = self._outputs.numpy()
        return outputs


def check_vnni(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Raise ValueError on a CPU without VNNI."""
    if cpuinfo.is_file() and not {"avx_vnni", "avx512_vnni"} & set(cpuinfo.read_text("utf-8").split()):
        raise ValueError(
            "the engine was built on a CPU with VNNI; this one lacks it, so that INT8 sums can saturate. Build the "
            "engine again for this machine."
        )


def open_openvino(blob: bytes, options: dict[str, Any]) -> Any:
    """Return the compiled model of a blob."""
    import io

    return openvino_core().import_model(io.BytesIO(blob), "CPU", options["properties"])


def run_openvino(compiled: Any) -> Run:
    """Return the call of one request, which copies neither its input nor its output."""
    request = compiled.create_infer_request()
    return lambda inputs: request.infer({0: inputs}, share_inputs=True, share_outputs=True)[0]


@functools.cache
def openvino_core() -> Any:
    """Return the one Core of this process, which keeps OpenVINO's CPU plugin loaded until the process ends.

    The plugin gives the thread that loads it a stack for signal handlers. Unloaded in another thread, it frees that
    stack and leaves its address behind: the next signal, of an ended child for example, would kill the process.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # it would tell its maker
    import openvino

    return openvino.Core()


def open_tensorrt(plan: bytes, card: dict[str, Any]) -> Run:
    """Return the call of a plan on the GPU of pycuda's primary context (CUDA_DEVICE chooses).

    Not run on real hardware.
    """
    import pycuda.autoprimaryctx
    import pycuda.driver as cuda
    import tensorrt as trt

    device = pycuda.autoprimaryctx.device
    check_gpu(device.name(), device.compute_capability(), card["options"])
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    runtime.engine_host_code_allowed = card["options"]["version_compatible"]
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise ValueError(
            f"TensorRT {trt.__version__} cannot load the engine; its error is above. Build it again here."
        )
    context = engine.create_execution_context()
    if context is None:
        raise ValueError("TensorRT has too little GPU memory for the engine. End other processes on the GPU.")
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    [image] = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    [logits] = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT]
    largest, size = max(highest for _, highest in card["batches"]), (card["height"], card["width"])
    host_images = cuda.pagelocked_empty((largest, len(card["mean"]), *size), np.float32)
    host_logits = cuda.pagelocked_empty((largest, *card["logits_shape"]), np.float32)
    device_images, device_logits = cuda.mem_alloc(host_images.nbytes), cuda.mem_alloc(host_logits.nbytes)
    context.set_tensor_address(image, int(device_images))
    context.set_tensor_address(logits, int(device_logits))
    stream = cuda.Stream()

    def run(images_NCHW: Array) -> Array:
        batch = len(images_NCHW)
        fitting = [index for index, (low, high) in enumerate(card["batches"]) if low <= batch <= high]
        if context.active_optimization_profile != fitting[0]:
            context.set_optimization_profile_async(fitting[0], stream.handle)
        context.set_input_shape(image, images_NCHW.shape)
        host_images[:batch] = images_NCHW
        cuda.memcpy_htod_async(device_images, host_images[:batch], stream)
        if not context.execute_async_v3(stream.handle):
            raise ValueError("TensorRT cannot run the engine; its error is above. Build it again here.")
        cuda.memcpy_dtoh_async(host_logits[:batch], device_logits, stream)
        stream.synchronize()
        logits_NCHW: Array = host_logits[:batch]
        return logits_NCHW

    return run


def check_gpu(name: str, compute_capability: tuple[int, int], options: dict[str, Any]) -> None:
    """Raise ValueError for a GPU on which the plan does not run, or runs unlike it was measured."""
    built_on, compatibility = options["gpu"], options["hardware_compatibility"]
    here = ".".join(map(str, compute_capability))
    is_same = here == built_on["compute_capability"]
    fits = {
        "none": is_same and name == built_on["name"],
        "same_compute_capability": is_same,
        "ampere_plus": compute_capability >= (8, 0),
    }
    if not fits[compatibility]:
        raise ValueError(
            f"the engine was built on {built_on['name']} ({built_on['compute_capability']}) with "
            f"hardware_compatibility {compatibility}, this GPU is {name} ({here}). Build it again here."
        )
