"""Run TensorRT plans. Not run on real hardware."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .cuda_graph import CapturedGraph
from .sessions import Array, Run


def open_tensorrt(plan: bytes, card: dict[str, Any], libraries: Sequence[Path]) -> Run:
    """Return the call of a plan on the GPU of pycuda's primary context (CUDA_DEVICE chooses).

    Checked `libraries` have its plugins.

    Raises ValueError for another GPU than the plan was built for, or a plan that does not load.
    """
    import pycuda.autoprimaryctx
    import pycuda.driver as cuda
    import tensorrt as trt

    device, options = pycuda.autoprimaryctx.device, card["options"]
    check_gpu(device.name(), device.compute_capability(), options)
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    runtime.engine_host_code_allowed = options["version_compatible"]
    for library in libraries:
        if runtime.get_plugin_registry().load_library(str(library)) is None:
            raise ValueError(f"TensorRT cannot load the plugins in {library}; its error is above.")
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise ValueError(
            f"TensorRT {trt.__version__} cannot load the engine; its error is above. Build it again here."
        )
    context = engine.create_execution_context()
    if context is None:
        raise ValueError("TensorRT has too little GPU memory for the engine. End other processes on the GPU.")
    largest = max(highest for _, highest in card["batches"])
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    [reads] = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    [gives] = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT]
    host_inputs, host_outputs = (
        cuda.pagelocked_empty(
            (largest, *tuple(engine.get_tensor_shape(name))[1:]), trt.nptype(engine.get_tensor_dtype(name))
        )
        for name in (reads, gives)
    )
    device_inputs, device_outputs = cuda.mem_alloc(host_inputs.nbytes), cuda.mem_alloc(host_outputs.nbytes)
    context.set_tensor_address(reads, int(device_inputs))
    context.set_tensor_address(gives, int(device_outputs))
    stream, graph, captured_batch = cuda.Stream(), None, 0

    def enqueue(batch: int) -> None:
        cuda.memcpy_htod_async(device_inputs, host_inputs[:batch], stream)
        if not context.execute_async_v3(stream.handle):
            raise ValueError("TensorRT cannot run the engine; its error is above. Build it again here.")
        cuda.memcpy_dtoh_async(host_outputs[:batch], device_outputs, stream)

    def choose_batch(batch: int) -> CapturedGraph | None:
        """Set the shape, and capture the work if the measured engine ran as a CUDA graph."""
        fitting = [index for index, (low, high) in enumerate(card["batches"]) if low <= batch <= high]
        if context.active_optimization_profile != fitting[0]:
            context.set_optimization_profile_async(fitting[0], stream.handle)
        context.set_input_shape(reads, (batch, *host_inputs.shape[1:]))
        if not options["cuda_graph"]:
            return None
        enqueue(batch)  # lazily loaded kernels must be loaded before a capture
        stream.synchronize()
        return CapturedGraph(stream.handle, lambda: enqueue(batch))

    def run(inputs: Array) -> Array:
        nonlocal graph, captured_batch
        batch = len(inputs)
        host_inputs[:batch] = inputs
        if batch != captured_batch:
            if graph is not None:
                graph.close()
            graph, captured_batch = choose_batch(batch), batch
        start: Callable[[], None] = graph.launch if graph is not None else lambda: enqueue(batch)
        start()
        stream.synchronize()
        outputs: Array = host_outputs[:batch]
        return outputs

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
