"""Name stages and inferences in Nsight Systems and Nsight Compute by NVTX ranges. Not run on real hardware.

Without a profiler, nothing is imported and no call that is timed is touched.
"""

import contextlib
import os
from collections.abc import Iterator

_PROFILERS = ("NSYS_PROFILING_SESSION_ID", "NVTX_INJECTION64_PATH")
"""Environment variables that Nsight Systems sets for its program; the second one is the one that NVTX reads."""


def is_profiled() -> bool:
    """Return whether a profiler listens, and torch is built with NVTX, which its builds for CPUs are not."""
    if not any(map(os.environ.get, _PROFILERS)):
        return False
    import torch

    return torch.version.cuda is not None


@contextlib.contextmanager
def nvtx_range(name: str) -> Iterator[None]:
    """Show what runs inside as a range of this thread; do nothing without a profiler."""
    if not is_profiled():
        yield
        return
    import torch

    torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]
