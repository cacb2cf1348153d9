"""Build a plan of TensorRT for RTX on a machine without the GPU.

``python -m flows.build_plan rtx4090_tensorrt_rtx --model model.onnx --images calibration_images.npy --out some.plan``
tells whether NVIDIA's parser and builder take a graph for a target of conf/target. Nothing runs the plan, so it is no
engine: ``build_engine`` builds it again on the GPU, and holds its answers and the precision of its layers against
the graph.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from flows.params import compose_params
from tasks.core.config import typed_config
from tasks.core.errors import ConfigError, EnginewrightError, TargetMismatch
from tasks.parts.engines.machine import check_runtime_version
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.engines.target import Target


def read_target(name: str, overrides: Sequence[str]) -> Target:
    """Return a target of conf/target; raise ConfigError unless its runtime is TensorRT for RTX."""
    params = compose_params([f"target=[cpu_torch,cuda_torch,{name}]", *overrides])
    target: Target = typed_config(Target, params["build_engine"][name], f"target.{name}")
    if target.runtime is not Runtime.tensorrt_rtx:
        raise ConfigError(
            f"Target {name} has the runtime {target.runtime}, expected tensorrt_rtx: no other runtime of a GPU "
            "builds without it. Choose a target such as rtx4090_tensorrt_rtx."
        )
    return target


def build_plan(target: Target, *, model: Path, images: Path, out: Path) -> str:
    """Write the plan of a graph, and return what is known of it.

    Raises BuildFailed for a graph that TensorRT for RTX refuses, TargetMismatch for another version than the declared
    or none, and ArtifactError for damaged files.
    """
    from tasks.parts.builders.contract import GraphSource, read_source
    from tasks.parts.builders.tensorrt_rtx import build_unproved

    try:
        import tensorrt_rtx as trt
    except ModuleNotFoundError as error:
        raise TargetMismatch(
            "Package tensorrt_rtx_cu13 is not installed. `pip install tensorrt_rtx_cu13` is enough to build a plan; "
            "to run it, install the extra rtx on a machine with the GPU."
        ) from error
    check_runtime_version(target, trt.__version__)
    source = read_source(target, model, images)
    assert isinstance(source, GraphSource)
    target = replace(target, max_batch=source.card.fit_batch(target.max_batch))
    source.check(target)
    assert target.gpu is not None
    out.write_bytes(build_unproved(target, source))
    return (
        f"{out}: {out.stat().st_size} bytes, built by TensorRT for RTX {trt.__version__} for compute capability "
        f"{target.gpu.compute_capability}. Not proved: nothing has run it. build_engine does that on the GPU."
    )


def main(arguments: Sequence[str]) -> int:
    """Build the plan and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.build_plan", description="Build a plan of TensorRT for RTX without the GPU."
    )
    parser.add_argument("target", help="a target of conf/target with runtime tensorrt_rtx")
    parser.add_argument("--model", type=Path, required=True, help="graph of a variant, an ONNX file")
    parser.add_argument("--images", type=Path, required=True, help="calibration_images.npy of the data set")
    parser.add_argument("--out", type=Path, required=True, help="where to write the plan")
    parser.add_argument("overrides", nargs="*", help="as for flows.optimize")
    options = parser.parse_intermixed_args(arguments)
    try:
        target = read_target(options.target, options.overrides)
        print(build_plan(target, model=options.model, images=options.images, out=options.out))
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
