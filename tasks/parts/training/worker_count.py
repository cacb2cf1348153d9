"""How many processes should load images, measured. N images."""

import logging
import math
import os
import statistics
import time
from collections.abc import Callable
from functools import partial

from tasks.parts.training.split_dataset import EpochDataset, SplitDataset

logger = logging.getLogger(__name__)

_ROUNDS = 4
_STEP_OF_FORWARD = 3
"""A training step takes about three forward passes: the backward pass computes two products for each one."""
_SMALL_SHARE = 0.05
"""Of a step; loading that takes less is not worth a process, which needs memory and takes seconds to start."""


def measure_num_workers(
    images: SplitDataset | EpochDataset, *, batch_size: int, num_ranks: int, run_forward: Callable[[], None]
) -> int:
    """Return how many processes load batches at least as fast as an accelerator trains on them.

    `run_forward` runs one batch through the network and waits for the end. Never more than the cores of this rank but
    one.
    """
    batches = [
        [index % len(images) for index in range(start * batch_size, (start + 1) * batch_size)]
        for start in range(_ROUNDS)
    ]
    loading = statistics.median(_seconds(partial(images.__getitems__, batch)) for batch in batches)
    run_forward()  # the first call of a kernel takes longer
    step = _STEP_OF_FORWARD * statistics.median(_seconds(run_forward) for _ in range(_ROUNDS))
    num_cores = (os.cpu_count() or 1) // num_ranks
    wanted = 0 if loading < _SMALL_SHARE * step else math.ceil(loading / step) + 1
    num_workers = max(0, min(wanted, num_cores - 1))
    logger.info(
        "loading a batch takes %.1f ms, training on it about %.1f: %d data workers (trainer.num_workers)",
        loading * 1000,
        step * 1000,
        num_workers,
    )
    return num_workers


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
