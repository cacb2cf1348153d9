"""Engines for TensorRT for RTX: built and proved as those of TensorRT. Not run on real hardware.

The plan needs no GPU and takes a second, because no kernel is timed: kernels are compiled where the plan is loaded
(engines/frame_engine/jit.py).
"""

from pathlib import Path

from tasks.parts.builders.contract import Built, GraphSource
from tasks.parts.builders.frames import fit_frames
from tasks.parts.builders.graph_rewrites import round_rest
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.engines.target import Target
from tasks.parts.engines.tensorrt_flavour import choose_tensorrt


def build_file(target: Target, source: GraphSource, engine: Path) -> Built:
    """Build the plan and read its layers, on the declared GPU. Needs pycuda."""
    choose_tensorrt(Runtime.tensorrt_rtx)
    from tasks.parts.builders import tensorrt

    return tensorrt.build_file(target, source, engine)


def build_unproved(target: Target, source: GraphSource) -> bytes:
    """Return the plan of a graph for the declared GPU, which need not be here.

    Nothing has run it, so nothing is known of its precision and its answers. Raises BuildFailed as `build_file` does.
    """
    choose_tensorrt(Runtime.tensorrt_rtx)
    from tasks.parts.builders.tensorrt_plan import build_plan

    assert target.gpu is not None
    rounded = round_rest(target, source.rewritten(target), source.images_NCHW)
    return build_plan(fit_frames(target, rounded, source.card), target, target.gpu)
