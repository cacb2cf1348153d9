"""How fast a training is: images per second, the share of the time that it waits for data, and its memory."""

import resource
import sys
import time
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
"""proc_pid_status(5); VmHWM is the peak of the resident memory."""


class StepClock:
    """Adds up the times of steps, and of the waits for their batches, until `reset`.

    A wait ends with the batch on the device. On a GPU, which may still be at the previous step, it is thus an upper
    bound of the time that the GPU has nothing to do.
    """

    def __init__(self) -> None:
        self._since_s = time.perf_counter()
        self.reset()

    def reset(self) -> None:
        """Start over."""
        self.num_images, self.wait_s, self.step_s = 0, 0.0, 0.0

    def resume(self) -> None:
        """Wait for a batch from now on; what came before counts as neither."""
        self._since_s = time.perf_counter()

    def start_step(self, num_images: int) -> None:
        """End the wait for a batch."""
        self.wait_s += self._lap_s()
        self.num_images += num_images

    def end_step(self) -> None:
        """End a step, and wait for the next batch."""
        self.step_s += self._lap_s()

    @property
    def images_per_s(self) -> float:
        """Images per second of waits and steps; 0 before the first step."""
        return self.num_images / self._total_s if self.num_images else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the waits in waits and steps, 0..1."""
        return self.wait_s / self._total_s if self.num_images else 0.0

    @property
    def _total_s(self) -> float:
        return self.wait_s + self.step_s

    def _lap_s(self) -> float:
        before_s, self._since_s = self._since_s, time.perf_counter()
        return self._since_s - before_s


def peak_memory_mib(device: torch.device) -> float:
    """Return the peak of what torch held on the GPU so far; of a training on the CPU, of this process (RSS)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    lines = _STATUS.read_text(encoding="utf-8").splitlines() if _STATUS.is_file() else []
    for line in lines:  # on Linux ru_maxrss is at least what the parent had when it started this process
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 1024)
