"""What the CUDA driver alone tells and does, by ctypes: the GPUs of a machine, and captured graphs.

Needs no package: a machine without a GPU can be told apart from one without pycuda. Functions and numbers are those
of the CUDA driver API (cuda.h). Graph capture was not run on real hardware.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tasks.core.errors import TargetMismatch

_LIBRARY = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_CAPTURE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
_NAME_BYTES = 256


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it."""

    name: str
    """Such as "NVIDIA H200"."""
    compute_capability: str
    """Such as "9.0", also written sm_90."""


def find_gpus() -> tuple[Gpu, ...]:
    """Return the visible GPUs in the driver's order; none where there is no driver or no device."""
    try:
        driver = ctypes.CDLL(_LIBRARY)
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_describe(driver, index) for index in range(count.value))


def first_bus_id() -> str:
    """Return the PCI address of the first visible GPU, such as "0000:3B:00.0"; empty where there is none."""
    if not find_gpus():
        return ""
    driver, device = ctypes.CDLL(_LIBRARY), ctypes.c_int()
    text = ctypes.create_string_buffer(_NAME_BYTES)
    _check(driver.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    _check(driver.cuDeviceGetPCIBusId(text, _NAME_BYTES, device), "cuDeviceGetPCIBusId")
    return text.value.decode()


def _describe(driver: ctypes.CDLL, index: int) -> Gpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    _check(driver.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    _check(driver.cuDeviceGetName(name, _NAME_BYTES, device), "cuDeviceGetName")
    for value, attribute in ((major, _MAJOR), (minor, _MINOR)):
        _check(driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device), "cuDeviceGetAttribute")
    return Gpu(name.value.decode(), f"{major.value}.{minor.value}")


class CapturedGraph:
    """Work on a stream that was recorded once and is launched again by a single call. pycuda has no such binding."""

    def __init__(self, stream: int, record: Callable[[], None]) -> None:
        """Record what `record` puts on the stream (a CUstream handle); nothing of it runs yet."""
        self._driver, self._stream = ctypes.CDLL(_LIBRARY), ctypes.c_void_p(stream)
        self._graph, self._executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", self._stream, _CAPTURE_THREAD_LOCAL)
        try:
            record()
        except BaseException:  # the stream must leave the capture, whatever broke it
            self._driver.cuStreamEndCapture(self._stream, ctypes.byref(self._graph))
            raise
        self._call("cuStreamEndCapture", self._stream, ctypes.byref(self._graph))
        flags = ctypes.c_ulonglong(0)
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), self._graph, flags)

    def launch(self) -> None:
        """Put the recorded work on the stream."""
        self._call("cuGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        """Free the graph."""
        self._call("cuGraphExecDestroy", self._executable)
        self._call("cuGraphDestroy", self._graph)

    def _call(self, function: str, *arguments: Any) -> None:
        _check(getattr(self._driver, function)(*arguments), function)


def _check(status: int, function: str) -> None:
    if status:
        raise TargetMismatch(
            f"The CUDA driver answers {function} with error {status} (CUresult in cuda.h). See that nvidia-smi runs "
            "and that no other process has broken the GPU; tensorrt.cuda_graph=false of the target does without "
            "captured graphs."
        )
