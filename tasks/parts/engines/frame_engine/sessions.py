"""Open the sessions of the runtimes, with the options that were measured, from the card in model.json.

Each function raises ValueError if the runtime or the machine is not the one that the engine was measured on.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Run = Callable[[Array], Array]
"""Runs the engine; the next call may overwrite the result."""

CPU_PROVIDER, CUDA_PROVIDER = "CPUExecutionProvider", "CUDAExecutionProvider"


def open_onnxruntime(model: Path | bytes, options: dict[str, Any], libraries: Sequence[Path] = ()) -> Any:
    """Return a session of an ONNX graph on options["provider"]; checked `libraries` have its custom operators."""
    import onnxruntime
    from onnxruntime.capi import onnxruntime_pybind11_state as state

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
    settings.enable_cpu_mem_arena = options.get("memory_arena", True)
    if options.get("num_branches", 1) > 1:
        settings.execution_mode = onnxruntime.ExecutionMode.ORT_PARALLEL
        settings.inter_op_num_threads = options["num_branches"]
    settings.log_severity_level = 3  # errors only
    # Threads sleep between inferences, so that an idle engine does not slow down the others.
    settings.add_session_config_entry("session.force_spinning_stop", "1")
    try:
        for library in libraries:
            settings.register_custom_ops_library(str(library))
        session = onnxruntime.InferenceSession(
            model if isinstance(model, bytes) else str(model),
            settings,
            providers=[(provider, options["provider_options"])],
        )
    except (
        state.Fail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.InvalidProtobuf,
        state.NotImplemented,
        state.RuntimeException,
    ) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"onnxruntime {onnxruntime.__version__} cannot load the engine: {reason}."
        ) from error
    if session.get_providers()[0] != provider:  # otherwise it falls back to the CPU
        raise ValueError(
            f"the engine was measured on {provider}, onnxruntime here runs it on {session.get_providers()[0]}."
        )
    return session


def run_onnxruntime(session: Any) -> Run:
    """Return the call of a session; on a GPU it reuses memory there for each batch size."""
    name = session.get_inputs()[0].name
    if session.get_providers()[0] == CPU_PROVIDER:
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


def open_openvino(blob: bytes, options: dict[str, Any], libraries: Sequence[Path] = ()) -> Any:
    """Return the compiled model of a blob; checked `libraries` have its custom operators."""
    import io

    for library in libraries:
        add_extension(library)
    return openvino_core().import_model(io.BytesIO(blob), "CPU", options["properties"])


def run_openvino(compiled: Any) -> Run:
    """Return the call of one request, which copies neither its input nor its output.

    Inputs are bound to the request, which takes 0.01 ms less than to pass them, and only if they lie elsewhere than
    before.
    """
    import openvino

    request, bound = compiled.create_infer_request(), None

    def run(inputs: Array) -> Array:
        nonlocal bound
        if inputs is not bound:
            # OpenVINO shares no other memory. A copy is another array, so it is made and bound anew each time.
            bound = np.require(inputs, requirements=("C", "W"))
            request.set_input_tensor(openvino.Tensor(bound, shared_memory=True))
        request.infer(share_inputs=True, share_outputs=True)
        outputs: Array = request.get_output_tensor().data
        return outputs

    return run


@functools.cache
def openvino_core() -> Any:
    """Return the one Core of this process, which keeps OpenVINO's CPU plugin loaded until the process ends.

    The plugin gives the thread that loads it a stack for signal handlers. Unloaded in another thread, it frees that
    stack and leaves its address behind: the next signal, of an ended child for example, would kill the process.
    """
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # it would tell its maker
    import openvino

    return openvino.Core()


@functools.cache
def add_extension(library: Path) -> None:
    """Let OpenVINO have the operators of a library, which is loaded once per process."""
    openvino_core().add_extension(str(library))
