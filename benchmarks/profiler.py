"""Hold the layer times of ONNX Runtime's engines against their latency, with and without what its profiler adds.

``python -m benchmarks.profiler <engine folder> ...`` after a run: ``artifacts/build_engine/*/<target>/engine``.
Prints for each engine the median of 200 inferences, and the sum of its layers as the profiler records them and as
`profile` returns them: the latter should be the latency without a call.
"""

import statistics
import sys
import time
from pathlib import Path

import numpy as np

from tasks.parts.engines.description import on_frames
from tasks.parts.engines.onnxruntime.layers import operator_times, record_nodes, without_first_runs
from tasks.parts.engines.onnxruntime.runner import provider_of
from tasks.parts.engines.open_engine import open_engine

NUM_PROFILED, NUM_TIMED = 40, 200


def main(engines: list[Path]) -> None:
    """Measure and print each engine."""
    for engine in engines:
        with open_engine(engine) as runner:
            manifest = runner.manifest
            channels, height, width = manifest.card.image_shape
            frame_NHWC = np.random.default_rng(0).integers(0, 256, (1, height, width, channels), np.uint8)
            image_NCHW = on_frames(runner).prepare(frame_NHWC)
            times_ms = []
            for _ in range(NUM_TIMED):
                start = time.perf_counter()
                runner.run(image_NCHW)
                times_ms.append(1000 * (time.perf_counter() - start))
            events = record_nodes(
                engine / manifest.file,
                image_NCHW,
                1 + NUM_PROFILED,
                provider=provider_of(manifest.target),
                num_threads=manifest.target.num_threads,
            )
            recorded = operator_times(without_first_runs(events), NUM_PROFILED)
            corrected = runner.profile(image_NCHW, NUM_PROFILED)
        recorded_ms, own_ms = (sum(time.milliseconds for time in times) for times in (recorded, corrected))
        print(
            f"{engine}: {len(recorded)} nodes, latency {statistics.median(times_ms):.3f} ms, "
            f"recorded {recorded_ms:.3f} ms, without the profiler {own_ms:.3f} ms"
        )


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]])
