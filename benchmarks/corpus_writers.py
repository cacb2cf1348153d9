"""Write ONNX files with tools of others, for benchmarks/corpus.py; each tool has a virtual environment of its own.

The environment's Python runs this file, ``python corpus_writers.py TOOL GIVEN --images NPY --out ONNX``, so nothing
of this repository is imported here, and packages only where a tool needs them. GIVEN is a float ONNX file for tools
that quantize, and the name of an architecture for those that export.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

INSTALL_S, WRITE_S = 1800.0, 900.0
"""Seconds for an environment, and for a file."""
NUM_CLASSES = 10
_NUM_SCALING = 8
"""Images that tell the statistics of BatchNorm."""


class NotWritten(Exception):
    """An environment could not be installed, or its tool failed."""


@dataclass(frozen=True)
class Writer:
    """A tool and what it writes."""

    package: str
    """Its requirement, for pip."""
    write: Callable[[str, Any, Path], None]
    """Write a file of what is given, with images float32 [N, 3, H, W]."""
    others: tuple[str, ...] = ()
    """Requirements beside it; torch is that of the calling environment, whose build is one for the CPU."""
    is_here: bool = False
    """Whether the tool is a package of the calling environment."""
    shares: str = ""
    """The tool whose environment it has, if it has none of its own."""


def write_with(tool: str, given: str, images_NCHW: Any, out: Path, environments: Path) -> None:
    """Let a tool write a file in its own environment, a folder of `environments`, which is made unless it is there.

    Raises NotWritten with the tool's last line.
    """
    import numpy as np

    python = _python_of(tool, environments)
    with tempfile.TemporaryDirectory() as folder:
        np.save(images := Path(folder) / "images.npy", images_NCHW)
        command = [python, "-I", __file__, tool, given, "--images", images, "--out", out]
        _run(command, timeout_s=WRITE_S, what=described(tool))


def described(tool: str) -> str:
    """Return a tool's package and version."""
    writer = WRITERS[tool]
    return (
        f"{writer.package} {version(writer.package)}" if writer.is_here else writer.package.replace("==", " ")
    )


def _python_of(tool: str, environments: Path) -> Path:
    writer = WRITERS[tool]
    if writer.is_here:
        return Path(sys.executable)
    packages = [writer.package, *writer.others]
    packages = [f"torch=={version('torch')}" if name == "torch" else name for name in packages]
    folder = environments / (writer.shares or tool)
    python, installed = folder / "bin" / "python", folder / "installed.txt"
    if not installed.is_file() or installed.read_text(encoding="utf-8").split() != packages:
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        command = [python, "-m", "pip", "install", "--quiet", *packages]
        _run(command, timeout_s=INSTALL_S, what=f"{described(tool)} was not installed")
        installed.write_text("\n".join(packages), encoding="utf-8")
    return python


def _run(command: list[Any], *, timeout_s: float, what: str) -> None:
    settings = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            [str(part) for part in command],
            env=settings,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NotWritten(f"{what}: not finished after {timeout_s:.0f} s") from error
    if done.returncode:
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise NotWritten(f"{what}: {(lines or ['no message'])[-1]}")


def _nncf(given: str, images_NCHW: Any, out: Path) -> None:
    import nncf
    import onnx

    model = onnx.load(given)
    images = [{model.graph.input[0].name: image_CHW[None]} for image_CHW in images_NCHW]
    has_attention = any(node.op_type == "Softmax" for node in model.graph.node)
    quantized = nncf.quantize(
        model,
        nncf.Dataset(images),
        subset_size=len(images),
        model_type=nncf.ModelType.TRANSFORMER if has_attention else None,
    )
    onnx.save(quantized, out)


def _aimet(given: str, images_NCHW: Any, out: Path) -> None:
    import onnx
    from aimet_onnx.quantsim import QuantizationSimModel

    model = onnx.load(given)
    simulated = QuantizationSimModel(model, param_type="int8", activation_type="int8")
    name = model.graph.input[0].name
    simulated.compute_encodings([{name: image_CHW[None]} for image_CHW in images_NCHW])
    onnx.save(simulated.to_onnx_qdq(), out)


def _modelopt(given: str, images_NCHW: Any, out: Path) -> None:
    """Its defaults: INT8, and FP16 for the rest."""
    from modelopt.onnx.quantization import quantize

    quantize(given, calibration_data=images_NCHW, calibration_eps=["cpu"], output_path=str(out))


def _modelopt_max(given: str, images_NCHW: Any, out: Path) -> None:
    """The same with the largest magnitudes as ranges."""
    from modelopt.onnx.quantization import quantize

    images = {"calibration_data": images_NCHW, "calibration_method": "max", "calibration_eps": ["cpu"]}
    quantize(given, output_path=str(out), **images)


def _tf2onnx(given: str, images_NCHW: Any, out: Path) -> None:
    import keras
    import tensorflow
    import tf2onnx

    keras.utils.set_random_seed(0)
    images_NHWC = images_NCHW.transpose(0, 2, 3, 1)
    model = getattr(keras.applications, given)(
        input_shape=images_NHWC.shape[1:], weights=None, classes=NUM_CLASSES, classifier_activation=None
    )
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.momentum = 0.0  # one pass replaces the statistics
    model(images_NHWC[:_NUM_SCALING], training=True)
    signature = (tensorflow.TensorSpec((None, *images_NHWC.shape[1:]), tensorflow.float32, name="image"),)
    tf2onnx.convert.from_keras(model, signature, output_path=str(out))


def _paddle2onnx(given: str, images_NCHW: Any, out: Path) -> None:
    import paddle

    paddle.seed(0)
    model = getattr(paddle.vision.models, given)(num_classes=NUM_CLASSES)
    for layer in model.sublayers():
        if hasattr(layer, "_momentum"):
            layer._momentum = 0.0
    model.train()
    model(paddle.to_tensor(images_NCHW[:_NUM_SCALING]))
    model.eval()
    shape = [None, *images_NCHW.shape[1:]]
    paddle.onnx.export(
        model, str(out.with_suffix("")), input_spec=[paddle.static.InputSpec(shape, "float32", "image")]
    )


_MODELOPT = Writer(
    "nvidia-modelopt==0.47.0",
    _modelopt,
    # What its extra `onnx` names, without the packages for CUDA.
    (
        *("torch", "onnx==1.21.*", "onnxruntime==1.24.*", "onnxscript", "onnxslim", "onnxconverter-common"),
        *("onnx-graphsurgeon", "polygraphy", "cppimport", "lief", "ml_dtypes"),
    ),
)
WRITERS: Mapping[str, Writer] = {
    "nncf": Writer("nncf", _nncf, is_here=True),
    "aimet": Writer("aimet-onnx==2.42.0", _aimet, ("torch",)),
    "modelopt": _MODELOPT,
    "modelopt_max": replace(_MODELOPT, write=_modelopt_max, shares="modelopt"),
    "tf2onnx": Writer("tf2onnx==1.17.0", _tf2onnx, ("tensorflow-cpu==2.20.0",)),
    "paddle2onnx": Writer(
        "paddle2onnx==2.1.0",
        _paddle2onnx,
        # It imports the last four without declaring them.
        ("paddlepaddle==3.3.1", "packaging", "onnx-graphsurgeon", "onnxruntime", "sympy"),
    ),
}


def main() -> None:
    """Write one file with one tool."""
    import numpy as np

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tool", choices=list(WRITERS))
    parser.add_argument("given")
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    WRITERS[options.tool].write(options.given, np.load(options.images), options.out)


if __name__ == "__main__":
    main()
