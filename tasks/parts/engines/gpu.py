"""The GPUs of a machine, as the CUDA driver describes them, by ctypes.

Needs no package, so a machine without a GPU can be distinguished from one without pycuda. Functions and numbers are
those of the CUDA driver API (cuda.h).
"""

import ctypes
from dataclasses import dataclass

from tasks.core.errors import TargetMismatch

CUDA_LIBRARY = "libcuda.so.1"

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR

_NAME_BYTES = 256


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it."""

    name: str
    """Name, such as "NVIDIA H200"."""
    compute_capability: str
    """Compute capability, such as "9.0", also written sm_90."""


def find_gpus() -> tuple[Gpu, ...]:
    """Return the visible GPUs in the driver's order; none without a driver or device."""
    try:
        driver = ctypes.CDLL(CUDA_LIBRARY)
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    return tuple(_describe(driver, index) for index in range(count.value))


def first_bus_id() -> str:
    """Return the PCI address of the first visible GPU, such as "0000:3B:00.0"; empty without a GPU."""
    if not find_gpus():
        return ""
    driver, device = ctypes.CDLL(CUDA_LIBRARY), ctypes.c_int()
    text = ctypes.create_string_buffer(_NAME_BYTES)
    check_driver_call(driver.cuDeviceGet(ctypes.byref(device), 0), "cuDeviceGet")
    check_driver_call(driver.cuDeviceGetPCIBusId(text, _NAME_BYTES, device), "cuDeviceGetPCIBusId")
    return text.value.decode()


def _describe(driver: ctypes.CDLL, index: int) -> Gpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name = ctypes.create_string_buffer(_NAME_BYTES)
    check_driver_call(driver.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    check_driver_call(driver.cuDeviceGetName(name, _NAME_BYTES, device), "cuDeviceGetName")
    for value, attribute in ((major, _MAJOR), (minor, _MINOR)):
        check_driver_call(
            driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device), "cuDeviceGetAttribute"
        )
    return Gpu(name.value.decode(), f"{major.value}.{minor.value}")


def check_driver_call(status: int, function: str) -> None:
    if status:
        raise TargetMismatch(
            f"{function} of the CUDA driver returned error {status} (CUresult in cuda.h). Check that nvidia-smi runs "
            "and that no other process has broken the GPU."
        )
