"""Capture CUDA graphs with ctypes, because pycuda has no binding for them. Not run on real hardware."""

import ctypes
from collections.abc import Callable
from typing import Any

NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING, which pycuda's Stream passes to cuStreamCreate and has no name for."""
_CAPTURE_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


class CapturedGraph:
    """Work on a stream that is recorded once and then launched by a single call."""

    def __init__(self, stream: int, record: Callable[[], None], error: type[Exception] = ValueError) -> None:
        """Record what `record` queues on the stream (a CUstream handle); none of it runs yet.

        Calls that fail raise `error`.
        """
        self._error = error
        self._driver, self._stream = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p(stream)
        self._graph, self._executable = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuStreamBeginCapture_v2", self._stream, _CAPTURE_THREAD_LOCAL)
        try:
            record()
        except BaseException:  # the stream must leave capture mode after any failure
            self._driver.cuStreamEndCapture(self._stream, ctypes.byref(self._graph))
            raise
        self._call("cuStreamEndCapture", self._stream, ctypes.byref(self._graph))
        flags = ctypes.c_ulonglong(0)
        self._call("cuGraphInstantiateWithFlags", ctypes.byref(self._executable), self._graph, flags)

    def launch(self) -> None:
        """Launch the recorded work on the stream."""
        self._call("cuGraphLaunch", self._executable, self._stream)

    def close(self) -> None:
        """Free the graph."""
        self._call("cuGraphExecDestroy", self._executable)
        self._call("cuGraphDestroy", self._graph)

    def _call(self, function: str, *arguments: Any) -> None:
        status = getattr(self._driver, function)(*arguments)
        if status:
            raise self._error(
                f"{function} of the CUDA driver returned error {status} (CUresult in cuda.h). Check that nvidia-smi "
                "runs and that no other process has broken the GPU; tensorrt.cuda_graph=false of the target avoids "
                "captured graphs."
            )
