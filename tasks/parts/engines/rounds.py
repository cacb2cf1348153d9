"""Time several networks in interleaved bursts in random order, so that noise affects all of them equally."""

import random
import time
from collections.abc import Callable, Mapping
from typing import Any

from numpy.typing import NDArray

BURST_S = 0.02

Network = Callable[[NDArray[Any]], NDArray[Any]]
"""From images [N, 3, H, W] to logits [N, classes, H, W]."""


def rounds_ms(
    networks: Mapping[str, Network], images_NCHW: NDArray[Any], num_rounds: int
) -> dict[str, list[list[float]]]:
    """Return the latencies of every network by round: short interleaved bursts in random order."""
    shuffler, order = random.Random(0), list(networks)
    latencies: dict[str, list[list[float]]] = {name: [] for name in networks}
    for _ in range(num_rounds):
        shuffler.shuffle(order)
        for name in order:
            networks[name](images_NCHW)
            burst: list[float] = []
            end = time.perf_counter() + BURST_S
            while (start := time.perf_counter()) < end:
                networks[name](images_NCHW)
                burst.append(1000 * (time.perf_counter() - start))
            latencies[name].append(burst)
    return latencies
