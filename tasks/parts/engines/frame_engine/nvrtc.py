"""Compile CUDA for the GPU that is here with NVRTC, NVIDIA's compiler as a library, through ctypes.

pycuda's own compiler would need nvcc and a C++ compiler, which machines that only run engines do not have.
"""

import ctypes
import importlib.util
from pathlib import Path
from typing import Any

_OLDEST_MAJOR = 12
_PACKAGES = {12: "nvidia-cuda-nvrtc-cu12"}
"""PyPI's packages of the majors; later ones are nvidia-cuda-nvrtc."""


def find_nvrtc(driver_major: int) -> ctypes.CDLL | None:
    """Return the newest NVRTC that a driver for this major of CUDA accepts code of, or None.

    It comes with the CUDA toolkit, with torch for CUDA, and as a package of PyPI.
    """
    for major in range(driver_major, _OLDEST_MAJOR - 1, -1):
        name = f"libnvrtc.so.{major}"
        for place in (*map(str, _find_in_packages(name)), name):
            try:
                return ctypes.CDLL(place)
            except OSError:  # the loader does not know it
                continue
    return None


def _find_in_packages(name: str) -> list[Path]:
    """Return where NVIDIA's packages for Python have a library."""
    found = importlib.util.find_spec("nvidia")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    return [file for folder in folders for file in sorted(Path(folder).glob(f"*/lib/{name}"))]


def package_of_nvrtc(driver_major: int) -> str:
    """Return what pip installs NVRTC for a driver with, as a requirement."""
    return _PACKAGES.get(driver_major, f"nvidia-cuda-nvrtc=={driver_major}.*")


def compile_cuda(nvrtc: ctypes.CDLL, source: str, architecture: str) -> bytes:
    """Return the machine code (CUBIN) of CUDA source for an architecture such as sm_90.

    Raises ValueError with NVRTC's messages if it has any, warnings included.
    """
    program, length = ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture={architecture}".encode()]
    _call(nvrtc, "nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
    try:
        status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * 1)(*options))
        _call(nvrtc, "nvrtcGetProgramLogSize", program, ctypes.byref(length))
        log = ctypes.create_string_buffer(length.value)
        _call(nvrtc, "nvrtcGetProgramLog", program, log)
        if status or log.value.strip():
            raise ValueError(
                f"NVRTC {version_of(nvrtc)} cannot compile the kernels for {architecture}: "
                f"{log.value.decode().strip()}. Install one that knows this GPU "
                "(pip install --upgrade nvidia-cuda-nvrtc), or remove it: numpy then does what the kernels do."
            )
        _call(nvrtc, "nvrtcGetCUBINSize", program, ctypes.byref(length))
        code = ctypes.create_string_buffer(length.value)
        _call(nvrtc, "nvrtcGetCUBIN", program, code)
    finally:
        _call(nvrtc, "nvrtcDestroyProgram", ctypes.byref(program))
    return code.raw


def version_of(nvrtc: ctypes.CDLL) -> str:
    """Return the version of CUDA that NVRTC belongs to, such as 13.5."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _call(nvrtc, "nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    return f"{major.value}.{minor.value}"


def _call(nvrtc: ctypes.CDLL, function: str, *arguments: Any) -> None:
    status = getattr(nvrtc, function)(*arguments)
    if status:
        raise ValueError(f"{function} returned error {status} (nvrtcResult in nvrtc.h). Install NVRTC again.")
