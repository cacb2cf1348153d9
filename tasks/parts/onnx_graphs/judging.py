"""Choose where a float graph runs that is only judged: on a GPU, if ONNX Runtime can use one here.

That is honest where nothing is built on the answers and the key of the output has `judging_facts`, as in
`convert_precision`. All else is judged on the CPU, on every machine:

- INT8 graphs, because the CUDA provider computes Q/DQ in float32, and targets in integers; and the float graph that
  they are compared with, so that the difference is that of INT8 alone. What is kept in float depends on it.
- Ranges of calibrations and the labels of a float model, from which later stages build: the same bytes on a machine
  with a GPU and on one without.

Engines are another matter: `validate` runs each through the runner of its target.
"""

import functools
import logging
import subprocess
import sys
from collections.abc import Collection

from tasks.core.environment import versions
from tasks.core.errors import BuildFailed, TargetMismatch, first_line
from tasks.parts.onnx_session import CPU_PROVIDER, CUDA_PROVIDER, open_session

logger = logging.getLogger(__name__)

_GPU_PACKAGE = "onnxruntime-gpu"
_TIMEOUT_S = 120


def judging_facts() -> dict[str, str]:
    """Return what scores of float graphs depend on here, for the key of their output."""
    return {"judged_on": judging_provider()}


@functools.cache
def judging_provider() -> str:
    """Return the first provider that runs on this machine; log why it is not the GPU's if ONNX Runtime has one."""
    if not versions(_GPU_PACKAGE):  # the import of ONNX Runtime takes longer
        return CPU_PROVIDER
    import onnxruntime

    for provider in judging_providers(onnxruntime.get_available_providers()):
        fault = find_fault(provider)
        if not fault:
            return provider
        logger.warning("float graphs are judged on the CPU, since %s does not run here: %s", provider, fault)
    return CPU_PROVIDER


def judging_providers(available: Collection[str]) -> tuple[str, ...]:
    """Return the providers of a build of ONNX Runtime to try before the CPU, which always works.

    TensorRT's is none of them: it would build an engine from each graph, for minutes, to run a few images.
    """
    return tuple(name for name in (CUDA_PROVIDER,) if name in available)


def find_fault(provider: str) -> str:
    """Return why a convolution does not run on a provider; empty if it does.

    It is tried in a process of its own: a flow asks for the facts of its stages, and would hold memory of the GPU
    until its end.
    """
    command = [sys.executable, "-m", __name__, provider]
    try:
        tried = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return f"it did not answer within {_TIMEOUT_S} s"
    if tried.returncode == 0:
        return ""
    return tried.stderr.strip().rpartition("\n")[2] or f"the process ended with {tried.returncode}"


def _try(provider: str) -> None:
    """Run a convolution, for which CUDA's provider needs a device, the driver and cuDNN.

    Raises TargetMismatch or BuildFailed where that is not possible.
    """
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    image, values = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 1, 4, 4]) for name in ("image", "values")
    )
    weights = numpy_helper.from_array(np.ones((1, 1, 1, 1), np.float32), "weights")
    node = helper.make_node("Conv", ["image", "weights"], ["values"])
    graph = helper.make_graph([node], "probe", [image], [values], [weights])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    session = open_session(model, provider=provider)
    ones = np.ones((1, 1, 4, 4), np.float32)
    if not np.array_equal(session.run(None, {"image": ones})[0], ones):
        raise BuildFailed(f"{provider} multiplies by 1 and gets something else.")


if __name__ == "__main__":
    try:
        _try(sys.argv[1])
    except (TargetMismatch, BuildFailed) as error:
        sys.exit(first_line(error))
