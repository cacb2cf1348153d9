"""A GPU made of a CPU: kernels.cu compiled by g++, and as much of pycuda and TensorRT as plans.py uses."""

import ctypes
import math
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tasks.parts.engines.frame_engine.kernels import BLOCK, SIGNATURES, SOURCE, GpuArray

SHIM = Path(__file__).with_suffix(".hpp")
STREAM = 7
"""Handle of the only stream."""

Array = np.ndarray[Any, Any]
Network = Callable[[Array], Array]


class Memory:
    """Memory whose int() is its address, as pycuda has it."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes = np.full(num_bytes, 0xA5, np.uint8)

    def __int__(self) -> int:
        return int(self.bytes.ctypes.data)


def upload(array: Array) -> Memory:
    """Return a copy of an array."""
    memory = Memory(array.nbytes)
    memory.bytes[:] = np.frombuffer(array.tobytes(), np.uint8)
    return memory


def at(address: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Return the array at an address."""
    content = (ctypes.c_char * (math.prod(shape) * np.dtype(dtype).itemsize)).from_address(address)
    return np.frombuffer(content, dtype).reshape(shape)


def download(array: GpuArray) -> Array:
    """Return a copy of what another library would see."""
    told = array.__cuda_array_interface__
    assert (told["version"], told["strides"], told["stream"]) == (3, None, STREAM)
    return at(told["data"][0], told["shape"], told["typestr"]).copy()


class Frames:
    """Frames as another library offers them."""

    def __init__(self, array: Array, **changes: Any) -> None:
        self._array = array
        told = {"data": (array.ctypes.data, False), "shape": array.shape, "typestr": array.dtype.str}
        strides = None if array.flags.c_contiguous else array.strides
        self.__cuda_array_interface__ = told | {"strides": strides, "version": 2} | changes


def build_library(folder: Path) -> ctypes.CDLL:
    """Compile kernels.cu for the CPU without a warning."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    launchers = [
        f'extern "C" void launch_{name}(unsigned x, unsigned y, unsigned block, const char *arguments)\n'
        f"{{ run_grid({name}, x, y, block, arguments); }}\n"
        for name in SIGNATURES
    ]
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text("".join([f'#include "{SHIM}"\n#include "{SOURCE}"\n', *launchers]))
    # No fused multiplication and addition, as in the intrinsics.
    options = ["-std=c++20", "-O2", "-Wall", "-Wextra", "-ffp-contract=off", "-shared", "-fPIC"]
    done = subprocess.run(
        ["g++", *options, "-o", library, source], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    return ctypes.CDLL(str(library))


def launcher(library: ctypes.CDLL) -> Callable[..., None]:
    """Return what runs a kernel at once."""

    def launch(name: str, num_pixels: int, num_images: int, *arguments: Any) -> None:
        buffer = struct.pack(SIGNATURES[name], *arguments)
        getattr(library, f"launch_{name}")(-(-num_pixels // BLOCK), num_images, BLOCK, buffer)

    return launch


def put_pycuda(patch: pytest.MonkeyPatch, library: ctypes.CDLL) -> None:
    """Let `import pycuda` find a driver that runs on the CPU, where NVRTC's code goes nowhere."""

    class Function:
        def __init__(self, name: str) -> None:
            self._launch = getattr(library, f"launch_{name}")

        def prepare(self, form: str) -> "Function":
            self._form = form
            return self

        def prepared_async_call(
            self, grid: tuple[int, int], block: tuple[int, int, int], stream: Any, *arguments: Any
        ) -> None:
            assert stream.handle == STREAM
            self._launch(*grid, block[0], struct.pack(self._form, *arguments))

    def load_module(code: bytes) -> SimpleNamespace:
        assert code.startswith(b"\x7fELF")
        return SimpleNamespace(get_function=Function)

    def copy_in(memory: Memory, array: Array, stream: Any) -> None:
        memory.bytes[: array.nbytes] = np.frombuffer(array.tobytes(), np.uint8)

    def copy_out(array: Array, memory: Memory, stream: Any) -> None:
        array[...] = memory.bytes[: array.nbytes].view(array.dtype).reshape(array.shape)

    device = SimpleNamespace(name=lambda: "NVIDIA Imaginary", compute_capability=lambda: (9, 0))
    driver: Any = ModuleType("pycuda.driver")
    driver.Stream = lambda flags=0: SimpleNamespace(handle=STREAM, synchronize=lambda: None)
    driver.Context = SimpleNamespace(get_device=lambda: device, synchronize=lambda: None)
    driver.get_driver_version = lambda: 13000
    driver.mem_alloc, driver.to_device, driver.pagelocked_empty = Memory, upload, np.empty
    driver.memcpy_htod_async, driver.memcpy_dtoh_async = copy_in, copy_out
    driver.module_from_buffer = load_module
    primary: Any = ModuleType("pycuda.autoprimaryctx")
    primary.device = device
    package: Any = ModuleType("pycuda")
    package.driver, package.autoprimaryctx = driver, primary
    for module in (package, driver, primary):
        patch.setitem(sys.modules, module.__name__, module)


def put_tensorrt(
    patch: pytest.MonkeyPatch, network: Network, reads: tuple[Any, Any], gives: tuple[Any, Any]
) -> None:
    """Let `import tensorrt` find one whose only plan is a numpy function; `reads` and `gives` are shape and type."""
    tensors = {"reads": reads, "gives": gives}

    class Context:
        active_optimization_profile = 0

        def __init__(self) -> None:
            self.addresses: dict[str, int] = {}
            self.shape: tuple[int, ...] = ()

        def set_tensor_address(self, name: str, address: int) -> bool:
            self.addresses[name] = address
            return True

        def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
            self.shape = shape
            return True

        def execute_async_v3(self, stream: int) -> bool:
            assert stream == STREAM
            found = network(at(self.addresses["reads"], self.shape, reads[1]))
            assert (found.shape[1:], found.dtype) == gives
            at(self.addresses["gives"], found.shape, found.dtype)[...] = found
            return True

    engine = SimpleNamespace(
        num_io_tensors=2,
        get_tensor_name=["reads", "gives"].__getitem__,
        get_tensor_mode=lambda name: name,
        get_tensor_shape=lambda name: (-1, *tensors[name][0]),
        get_tensor_dtype=lambda name: tensors[name][1],
        create_execution_context=Context,
    )
    module: Any = ModuleType("tensorrt")
    module.Logger = type("Logger", (), {"WARNING": 1, "__init__": lambda self, level: None})
    module.Runtime = lambda log: SimpleNamespace(deserialize_cuda_engine=lambda plan: engine)
    module.init_libnvinfer_plugins = lambda log, namespace: True
    module.TensorIOMode = SimpleNamespace(INPUT="reads", OUTPUT="gives")
    module.nptype = lambda dtype: dtype
    patch.setitem(sys.modules, "tensorrt", module)
