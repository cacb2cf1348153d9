"""NVIDIA's parser and builder without a GPU: TensorRT for RTX, installed apart, also under the name `tensorrt`.

It is proprietary: tests and benchmarks fetch it, with the hashes in tensorrt_rtx.txt, and never keep it.
"""

import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).with_suffix(".txt")
_PACKAGE = """from tensorrt_rtx_bindings import *
from tensorrt_rtx_bindings import __version__
"""
"""What NVIDIA's package tensorrt_rtx_cu13, which has no wheel, holds for `tensorrt_rtx`."""


def installed_builder(folder: Path) -> Path:
    """Return a folder for PYTHONPATH whose `tensorrt` and `tensorrt_rtx` are TensorRT for RTX.

    It is installed unless it is there.

    Raises OSError with pip's reason where it cannot be had.
    """
    if not (folder / "tensorrt").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        command += ["--only-binary", ":all:", "--require-hashes", "-r", str(REQUIREMENTS)]
        done = subprocess.run(
            [*command, "--target", str(folder)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            reason = done.stderr.strip().splitlines()[-1]
            raise OSError(f"{REQUIREMENTS.name} cannot be installed: {reason}")
        for name in ("tensorrt_rtx", "tensorrt"):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "__init__.py").write_text(_PACKAGE, encoding="utf-8")
    return folder


def version_of(builder: Path) -> str:
    """Return package and version in such a folder."""
    [found] = builder.glob("tensorrt_rtx_cu13_libs-*.dist-info")
    return found.name.removesuffix(".dist-info").replace("_", " ")
