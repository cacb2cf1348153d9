"""NVIDIA's headers, and a stand-in for TensorRT and CUDA with which the C++ program of a plan runs on a CPU.

The stand-in (tensorrt_stand_in.cpp) exists for tests alone. Its plans are lines of text.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.wheels import unpack_wheel

Array = np.ndarray[Any, Any]

INCLUDE_DIR = "TENSORRT_INCLUDE_DIR"
"""Names the folder of NvInfer.h, in place of the package's."""
HEADERS = "kernel-lens==2.0.1"
"""Has NVIDIA's headers of TensorRT 10.14.1 (Apache-2.0), which TensorRT's own packages lack. Only they are used."""
HEADERS_MAJOR = 10
CUDA = ("nvidia-cuda-runtime==13.5.37", "nvidia-cuda-crt==13.5.37")
"""CUDA's headers, and its runtime, which says without a GPU that there is none."""
GPU = {"name": "NVIDIA H200", "compute_capability": "9.0"}
"""What the stand-in says that it runs on."""
SOURCE = Path(__file__).with_suffix(".cpp")


def stand_in_version() -> str:
    """Return the version that the stand-in says it has; its major is that of the headers."""
    major = major_of(Path(os.environ[INCLUDE_DIR])) if INCLUDE_DIR in os.environ else HEADERS_MAJOR
    return f"{major}.4.0.106"


def major_of(headers: Path) -> int:
    """Return the major version of TensorRT's headers in a folder."""
    text = (headers / "NvInferVersion.h").read_text(encoding="utf-8")
    [major] = re.findall(r"#define (?:TRT_MAJOR_ENTERPRISE|NV_TENSORRT_MAJOR) (\d+)", text)
    return int(major)


def tensorrt_headers(folder: Path) -> Path:
    """Return the folder of NvInfer.h: TENSORRT_INCLUDE_DIR, or one in `folder`, to which the package is fetched.

    Skips the test where it cannot be had.
    """
    if INCLUDE_DIR in os.environ:
        return Path(os.environ[INCLUDE_DIR])
    return unpack_wheel(HEADERS, folder / "headers") / "kernel_lens/include/tensorrt"


def cuda_folder(folder: Path) -> Path:
    """Return a folder in `folder` with the include/ and lib/ of CUDA; skip the test where it cannot be had."""
    runtime, compiler = (
        unpack_wheel(package, folder / f"cuda{index}") / "nvidia/cu13" for index, package in enumerate(CUDA)
    )
    shutil.copytree(compiler / "include", runtime / "include", dirs_exist_ok=True)
    return runtime


def stand_in_options(folder: Path) -> list[str]:
    """Compile the stand-in in `folder` without a warning; return what lets CMake find it and the headers."""
    headers, cuda = tensorrt_headers(folder), cuda_folder(folder)
    library = _compiled(SOURCE, folder / "libstand_in.so", headers, cuda)
    libraries = [f"-D{name}={library}" for name in ("NVINFER", "NVINFER_PLUGIN", "CUDART")]
    return [f"-D{INCLUDE_DIR}={headers}", f"-DCUDA_DIR={cuda}", *libraries]


def compiled_plugin(folder: Path) -> Path:
    """Compile the library of tensorrt_plugin.cpp in `folder` without a warning."""
    source = SOURCE.with_name("tensorrt_plugin.cpp")
    return _compiled(source, folder / "libplugin.so", tensorrt_headers(folder), cuda_folder(folder))


def _compiled(source: Path, library: Path, headers: Path, cuda: Path) -> Path:
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-ffp-contract=off", "-shared", "-fPIC"]
    includes = ["-isystem", headers, "-isystem", cuda / "include"]
    command = ["g++", *flags, *includes, "-o", library, source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr
    return library


@dataclass(frozen=True)
class StandInPlan:
    """A plan for the stand-in, and what it computes."""

    reads: tuple[str, tuple[int, ...]]
    """Type, as NumPy writes it, and shape of the input: |u1 [-1, H, W, C] or <f4 [-1, C, H, W]."""
    gives: tuple[str, tuple[int, ...]]
    """The same of the output: <f4 are scores [-1, K, H, W] or [-1, K], others are classes [-1, H, W] or [-1]."""
    num_classes: int = 0
    """Of an output of classes."""
    batches: Sequence[Sequence[int]] = ((1, 1),)
    others: list[str] = field(default_factory=list)
    """More lines."""

    def content(self) -> bytes:
        """Return the content of the file."""
        tensors = {"input": self.reads, "output": self.gives}
        lines = [
            "stand-in plan",
            *(f"{key} its_{key} {dtype} {_joined(shape)}" for key, (dtype, shape) in tensors.items()),
            f"batches {' '.join(map(_joined, self.batches))}",
            f"classes {self.num_classes}",
            *self.others,
        ]
        return "\n".join(lines).encode()

    def __call__(self, inputs: Array) -> Array:
        """Return what the plan gives for a batch of what it reads."""
        dtype, (_, *shape) = self.gives
        planes_NCHW = np.moveaxis(inputs, 3, 1) if self.reads[0] == "|u1" else inputs
        values_NCP = planes_NCHW.reshape(*planes_NCHW.shape[:2], -1)
        channels, num_pixels = values_NCP.shape[1:]
        if dtype != "<f4":
            weights_C1 = np.arange(1, channels + 1)[:, None]
            sums_NP = (values_NCP * weights_C1).sum(axis=1)
            sums = sums_NP.reshape(-1, *shape) if shape else sums_NP.sum(axis=1)
            return (sums % self.num_classes).astype(dtype)
        is_mask, scores = len(shape) > 1, []
        for k in range(shape[0]):
            pixels = slice(None) if is_mask else 97 * k % num_pixels
            score = values_NCP[:, k % channels, pixels] * np.float32(1 + k // (2 * channels) / 64)
            if k == 3 and is_mask:
                score[:, ::7] = np.nan
            scores.append(score)
        return np.stack(scores, axis=1).reshape(-1, *shape).astype(np.float32)


def _joined(numbers: Sequence[int]) -> str:
    return " ".join(map(str, numbers))
