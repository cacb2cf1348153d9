"""Graphs of every rung, parsed and built by NVIDIA's own code: the builder of TensorRT for RTX, which needs no GPU.

Its parser, its strong typing and its profiles are those of TensorRT; kernels, tactics and speed of the data-centre
builder are not, and no plan is loaded without a GPU. It is installed apart, for the time of these tests, under the
name `tensorrt`.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.tasks.conftest import Workshop
from tests.wheels import install_locked


@pytest.fixture(scope="session")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH whose `tensorrt` is TensorRT for RTX."""
    site = install_locked(REPOSITORY / "tests" / "tensorrt_rtx.txt", tmp_path_factory.mktemp("builder"))
    (site / "tensorrt_rtx_bindings").rename(site / "tensorrt")
    return site


def test_real_builder_takes_the_graphs_as_they_are(builder: Path, workshop: Workshop) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{builder}", "WORKSHOP": str(workshop.root)}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "tests/over_tensorrt_builder.py",
    ]
    output = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert output.returncode == 0, output.stdout + output.stderr
