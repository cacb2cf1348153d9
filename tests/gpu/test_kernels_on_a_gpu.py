"""The kernels around an engine, on this machine's GPU. Not run on real hardware."""

import importlib.util

import pytest

from benchmarks.gpu_kernels import KERNELS, KernelCase, compare_forms
from tasks.core.errors import TargetMismatch
from tasks.parts.engines.gpu import find_gpus

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not find_gpus(), reason="no NVIDIA GPU on this machine"),
    pytest.mark.skipif(
        importlib.util.find_spec("pycuda") is None, reason="pycuda is not installed (extra gpu)"
    ),
]


@pytest.mark.parametrize("size", [(1, 1), (7, 13), (359, 641)])
def test_kernels_equal_numpy_on_the_gpu(size: tuple[int, int]) -> None:
    try:
        found = compare_forms(KernelCase(*size), num_rounds=2)
    except TargetMismatch as error:
        pytest.skip(str(error))
    assert [forms[KERNELS]["share_equal"] for forms in found["steps"].values()] == [1, 1, 1]
