"""Read the inner tensors of a TensorRT plan while it runs. Not run on real hardware.

A plan that was built with its unfused tensors marked calls a listener with each tensor that survived fusion, under
TensorRT's own name for it. Marking them changes no fusion (mark_debug of single tensors would). The values are read
as a plain array of the reported shape and type, as NVIDIA's trtexec does. Needs TensorRT.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorrt as trt
from numpy.typing import NDArray

_PLAIN_TYPES = (trt.DataType.FLOAT, trt.DataType.HALF, trt.DataType.INT8)
"""Types of convolution outputs that numpy supports."""


class DebugTensors(trt.IDebugListener):  # type: ignore[misc]
    """Copies each tensor with a batch axis that a run reports."""

    def __init__(self, copy_from_device: Callable[[NDArray[Any], int], None]) -> None:
        """Take a function that fills an array from an address on the GPU, after all previously queued work."""
        trt.IDebugListener.__init__(self)
        self._copy_from_device = copy_from_device
        self.tensors: dict[str, NDArray[Any]] = {}

    def process_debug_tensor(
        self,
        addr: Any,
        location: "trt.TensorLocation",
        type: "trt.DataType",
        shape: "trt.Dims",
        name: str,
        stream: int,
    ) -> bool:
        """Copy one tensor; its memory is valid only during the call."""
        if type not in _PLAIN_TYPES or len(shape) < 2:
            return True
        values = np.empty(tuple(shape), trt.nptype(type))
        if location == trt.TensorLocation.DEVICE:
            self._copy_from_device(values, _address(addr))
        else:
            ctypes.memmove(values.ctypes.data, _address(addr), values.nbytes)
        self.tensors[name] = values
        return True


def _address(capsule: Any) -> int:
    """Return the pointer in a PyCapsule, in which the bindings pass a void pointer."""
    read = ctypes.pythonapi.PyCapsule_GetPointer
    read.restype, read.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(read(capsule, None))
