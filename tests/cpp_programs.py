"""Build the C++ program of a bundle as a user would."""

import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path

import onnxruntime
import openvino
import pytest

from tests.tensorrt_stand_in import INCLUDE_DIR, cuda_folder, major_of, stand_in_options, tensorrt_headers

ORT_HEADERS = "ONNXRUNTIME_INCLUDE_DIR"
"""Names the folder of onnxruntime_cxx_api.h, in place of the npm package."""

NPM_PACKAGE = "com.github.asus4.onnxruntime@0.4.9"
"""ONNX Runtime 1.29 for Unity (MIT): 150 MB, with the headers that no Python package and no package of Debian has."""
NPM_SHA256 = "e59788788818fdde1b2e522e766a21ba0f7d8391de55737abf81e32cc801785d"
NPM_HEADERS = "package/Plugins/iOS~/onnxruntime.xcframework/ios-arm64/onnxruntime.framework/Headers"


def build_program(bundle: Path, runtime: str) -> Path:
    """Compile the program of a bundle; return its path. That of a plan runs with the stand-in for TensorRT."""
    if runtime == "openvino":
        return compile_program(bundle, [f"-DOpenVINO_DIR={openvino.__path__[0]}/cmake"])
    if runtime == "tensorrt":
        folder = bundle / "cpp" / "stand_in"
        folder.mkdir()
        return compile_program(bundle, stand_in_options(folder))
    return compile_program(bundle, onnxruntime_options(onnxruntime_headers()))


def compile_program(bundle: Path, options: list[str]) -> Path:
    """Compile the program of a bundle with options for CMake and without a warning; return its path."""
    configured = configure_program(bundle, options)
    assert configured.returncode == 0, configured.stdout + configured.stderr
    command = ["cmake", "--build", bundle / "cpp" / "build"]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    assert "warning:" not in configured.stderr + built.stdout + built.stderr
    return bundle / "infer"


def configure_program(bundle: Path, options: list[str]) -> subprocess.CompletedProcess[str]:
    """Run the first command of the bundle's CMakeLists.txt; skip where a tool is missing."""
    if missing := [tool for tool in ("cmake", "g++", "make") if shutil.which(tool) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed")
    command = ["cmake", "-S", bundle / "cpp", "-B", bundle / "cpp" / "build", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def tensorrt_options(folder: Path) -> list[str]:
    """Return what finds the installed TensorRT and CUDA, with headers that are fetched to `folder` if need be.

    Skips the test, with the reason, where the headers cannot be had or do not fit the library.
    """
    headers, installed = tensorrt_headers(folder), importlib.metadata.version("tensorrt")
    if major_of(headers) != int(installed.split(".")[0]):
        pytest.skip(
            f"the headers in {headers} are of TensorRT {major_of(headers)}, installed is {installed}; name the "
            f"folder of such headers with {INCLUDE_DIR}"
        )
    toolkit = Path("/usr/local/cuda")
    cuda = toolkit if (toolkit / "include/cuda_runtime_api.h").is_file() else cuda_folder(folder)
    options = [f"-D{INCLUDE_DIR}={headers}", f"-DCUDA_DIR={cuda}"]
    libraries = importlib.util.find_spec("tensorrt_libs")
    if libraries is None or libraries.submodule_search_locations is None:
        return options  # CMake looks where NVIDIA's archive and packages of Debian put them
    return [*options, f"-DTENSORRT_LIBRARY_DIR={libraries.submodule_search_locations[0]}"]


def onnxruntime_options(headers: Path) -> list[str]:
    """Return what finds ONNX Runtime."""
    return [f"-D{ORT_HEADERS}={headers}", f"-DONNXRUNTIME_LIBRARY={onnxruntime_library()}"]


def onnxruntime_library() -> Path:
    """Return the library of the installed Python package."""
    [library] = Path(onnxruntime.__path__[0]).glob("capi/libonnxruntime.so.*")
    return library


def onnxruntime_headers() -> Path:
    """Return a folder with ONNX Runtime's headers that fit the installed library.

    `ONNXRUNTIME_INCLUDE_DIR` names it; else NPM_PACKAGE is fetched once, and its headers stay in the user's cache.
    Skips the test, with the reason, where they cannot be had or are newer than the library.
    """
    found = _find_headers()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@functools.cache
def _find_headers() -> Path | str:
    """Return the folder, or why there is none, which is looked for once per process."""
    folder = Path(os.environ[ORT_HEADERS]) if ORT_HEADERS in os.environ else _fetch_headers()
    if isinstance(folder, str):
        return folder
    if not (folder / "onnxruntime_cxx_api.h").is_file():
        return f"{ORT_HEADERS}={folder} has no onnxruntime_cxx_api.h"
    [version] = re.findall(r"define ORT_API_VERSION (\d+)", (folder / "onnxruntime_c_api.h").read_text())
    if int(version) > int(onnxruntime.__version__.split(".")[1]):
        return (
            f"the headers in {folder} are of ONNX Runtime 1.{version}, the installed {onnxruntime.__version__} "
            f"serves its own version and earlier ones; name the folder of such headers with {ORT_HEADERS}"
        )
    return folder


def _fetch_headers() -> Path | str:
    """Return the folder in the user's cache, filled by whichever process is first, or why there is none."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "enginewright"
    folder = cache / f"onnxruntime-headers-{NPM_SHA256[:12]}"
    if folder.is_dir():
        return folder
    if shutil.which("npm") is None:
        return f"npm is not installed, and {ORT_HEADERS} names no folder with onnxruntime_cxx_api.h"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("a") as lock, tempfile.TemporaryDirectory(dir=cache) as temporary:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        command = ["npm", "pack", "--loglevel=error", "--fetch-retries=1", "--cache=npm", NPM_PACKAGE]
        pack = subprocess.run(command, cwd=temporary, capture_output=True, text=True, check=False)
        if pack.returncode:
            reason = "; ".join(pack.stderr.strip().splitlines()[:4])
            return f"npm cannot fetch {NPM_PACKAGE}, which has ONNX Runtime's headers: {reason}"
        [archive] = Path(temporary).glob("*.tgz")
        assert hashlib.sha256(archive.read_bytes()).hexdigest() == NPM_SHA256, f"{NPM_PACKAGE} has changed"
        with tarfile.open(archive) as members:
            wanted = [member for member in members if member.name.startswith(f"{NPM_HEADERS}/")]
            members.extractall(temporary, wanted, filter="data")
        (Path(temporary) / NPM_HEADERS).rename(folder)
    return folder
