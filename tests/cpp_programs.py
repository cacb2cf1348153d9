"""Build the C++ program of a bundle as a user would."""

import os
import shutil
import subprocess
from pathlib import Path

import onnxruntime
import openvino
import pytest

ORT_HEADERS = "ONNXRUNTIME_INCLUDE_DIR"
"""Names the folder of onnxruntime_cxx_api.h: no Python package has it."""


def build_program(bundle: Path, runtime: str) -> Path:
    """Compile the program of a bundle without a warning; return its path."""
    if missing := [tool for tool in ("cmake", "g++", "make") if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed")
    source, build = bundle / "cpp", bundle / "cpp" / "build"
    for command in (
        ["cmake", "-S", source, "-B", build, *_cmake_options(runtime)],
        ["cmake", "--build", build],
    ):
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
        assert "warning:" not in run.stdout + run.stderr
    return bundle / "infer"


def _cmake_options(runtime: str) -> list[str]:
    """Return what finds the runtime, as the head of its CMakeLists.txt says; skip where that has to."""
    if runtime == "openvino":
        return [f"-DOpenVINO_DIR={openvino.__path__[0]}/cmake"]
    if ORT_HEADERS not in os.environ:
        pytest.skip(
            f"{ORT_HEADERS} does not name a folder with onnxruntime_cxx_api.h, which no Python package has"
        )
    [library] = Path(onnxruntime.__path__[0]).glob("capi/libonnxruntime.so.*")
    return [f"-D{ORT_HEADERS}={os.environ[ORT_HEADERS]}", f"-DONNXRUNTIME_LIBRARY={library}"]
