"""Run the engine of this folder: ``python infer.py IMAGES.npy ANSWERS.npy``.

IMAGES.npy holds images as uint8 [N, H, W, C] of the size in model.json, RGB where C is 3. ANSWERS.npy receives the
class index of each pixel, [N, H, W], or of each image, [N]: uint8, or uint16 for more than 256 classes. An engine
with task "values" in model.json has no classes: it gives float32 [N, ...]; if model.json names several `outputs`,
their values stand one after the other in each row. From Python:
``Engine().predict(images_NHWC)``. Needs the packages in requirements.txt: numpy and the runtime, in the version that
was measured.

Images of another size or type are refused. To resize image files with Pillow as prepare_data does:
``ImageOps.exif_transpose(image).convert("RGB").resize((width, height), Image.Resampling.BILINEAR)``.
"""

import argparse
import functools
import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent

Array = np.ndarray[Any, Any]
Run = Callable[[Array], Array]


class Engine:
    """The engine of a bundle, checked and loaded."""

    def __init__(self, folder: Path = FOLDER) -> None:
        """Load it; raise ValueError if the bytes, the runtime or the machine differ from what was measured."""
        self.card: dict[str, Any] = json.loads((folder / "model.json").read_text(encoding="utf-8"))
        content = (folder / self.card["file"]).read_bytes()
        sha256 = hashlib.sha256(content).hexdigest()
        if sha256 != self.card["sha256"]:
            raise ValueError(
                f"{folder / self.card['file']}: sha256 {sha256[:12]}..., model.json says "
                f"{self.card['sha256'][:12]}...; the file was changed or truncated and is not loaded. Copy the "
                "bundle again."
            )
        _check_version(self.card)
        openers = {"onnxruntime": _open_onnxruntime, "openvino": _open_openvino, "tensorrt": _open_tensorrt}
        self._run = openers[self.card["runtime"]](content, self.card)

    def predict(self, images_NHWC: Array) -> Array:
        """Return the class of each pixel, [N, H, W], or of each image, [N], or values [N, ...].

        Images are uint8 [N, H, W, C]. Raises ValueError for images of another type or size.
        """
        card = self.card
        expected = (card["height"], card["width"], len(card["mean"]))
        if images_NHWC.dtype != np.uint8 or images_NHWC.shape[1:] != expected or not len(images_NHWC):
            sizes = ", ".join(map(str, expected))
            raise ValueError(
                f"images are {images_NHWC.dtype} {list(images_NHWC.shape)}, expected uint8 [N, {sizes}] (RGB for "
                "three channels) with at least one image. Convert and resize them first."
            )
        std = np.asarray(card["std"], np.float64)
        scale_C = (1.0 / (255.0 * std)).astype(np.float32)
        shift_C = (-np.asarray(card["mean"], np.float64) / std).astype(np.float32)
        answers = []
        smallest = np.min_scalar_type(max(1, len(card["classes"]) - 1))
        for batch in cut_batches(len(images_NHWC), card["batches"]):
            batch_NCHW = np.ascontiguousarray(np.moveaxis(images_NHWC[batch], -1, 1), dtype=np.float32)
            logits = self._run(batch_NCHW * scale_C[:, None, None] + shift_C[:, None, None])
            answers.append(
                logits.copy() if card["task"] == "values" else logits.argmax(axis=1).astype(smallest)
            )
        return np.concatenate(answers)


def cut_batches(num_images: int, ranges: list[list[int]]) -> Iterator[slice]:
    """Split the images into the largest batches that the engine accepts; `ranges` are (lowest, highest) pairs."""
    start = 0
    while start < num_images:
        left = num_images - start
        size = max(min(highest, left) for lowest, highest in ranges if lowest <= left)
        yield slice(start, start + size)
        start += size


def _check_version(card: dict[str, Any]) -> None:
    package, measured = card["package"], card["runtime_version"]
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        installed = "none"
    if installed == "none" or (installed != measured and not card["options"].get("version_compatible")):
        raise ValueError(
            f"the engine was built and measured with {package} {measured}, installed is {installed}. Run "
            "pip install -r requirements.txt, or build the engine again with that version."
        )


def _open_onnxruntime(content: bytes, card: dict[str, Any]) -> Run:
    import onnxruntime

    if card["options"]["needs_vnni"]:
        check_vnni()
    options, provider = onnxruntime.SessionOptions(), card["options"]["provider"]
    options.intra_op_num_threads, options.inter_op_num_threads = card["options"]["num_threads"], 1
    chosen = (provider, card["options"]["provider_options"])
    session = onnxruntime.InferenceSession(content, options, providers=[chosen])
    if session.get_providers()[0] != provider:  # otherwise it falls back to the CPU
        raise ValueError(
            f"the engine was measured on {provider}, onnxruntime here has {', '.join(session.get_providers())}."
        )
    name = session.get_inputs()[0].name
    return lambda images_NCHW: session.run(None, {name: images_NCHW})[0]


def check_vnni(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Raise ValueError on a CPU without VNNI."""
    if cpuinfo.is_file() and not {"avx_vnni", "avx512_vnni"} & set(cpuinfo.read_text("utf-8").split()):
        raise ValueError(
            "the engine was built on a CPU with VNNI; this one lacks it, so that INT8 sums can saturate. Build the "
            "engine again for this machine."
        )


def _open_openvino(content: bytes, card: dict[str, Any]) -> Run:
    import io

    try:
        compiled = _openvino_core().import_model(io.BytesIO(content), "CPU", card["options"]["properties"])
    except RuntimeError as error:
        raise ValueError(
            f"OpenVINO cannot load the engine, which was compiled on a CPU with {', '.join(card['options']['isa'])} "
            "and runs only there. Build it again for this machine."
        ) from error
    request = compiled.create_infer_request()
    return lambda images_NCHW: request.infer({0: images_NCHW})[0]


@functools.cache
def _openvino_core() -> Any:
    """Return one Core for the whole process: unloaded in a thread, OpenVINO would break the signals of another."""
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]  # it would tell its maker
    import openvino

    return openvino.Core()


def _open_tensorrt(content: bytes, card: dict[str, Any]) -> Run:
    """Load a plan on the GPU of pycuda's primary context (CUDA_DEVICE chooses). Not run on real hardware."""
    import pycuda.autoprimaryctx
    import pycuda.driver as cuda
    import tensorrt as trt

    device = pycuda.autoprimaryctx.device
    check_gpu(device.name(), device.compute_capability(), card["options"])
    runtime = trt.Runtime(trt.Logger(trt.Logger.WARNING))
    runtime.engine_host_code_allowed = card["options"]["version_compatible"]
    engine = runtime.deserialize_cuda_engine(content)
    if engine is None:
        raise ValueError(
            f"TensorRT {trt.__version__} cannot load the engine; its error is above. Build it again here."
        )
    context = engine.create_execution_context()
    if context is None:
        raise ValueError("TensorRT has too little GPU memory for the engine. End other processes on the GPU.")
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    [image] = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT]
    [logits] = [name for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT]
    largest, size = max(highest for _, highest in card["batches"]), (card["height"], card["width"])
    host_images = cuda.pagelocked_empty((largest, len(card["mean"]), *size), np.float32)
    host_logits = cuda.pagelocked_empty((largest, *card["logits_shape"]), np.float32)
    device_images, device_logits = cuda.mem_alloc(host_images.nbytes), cuda.mem_alloc(host_logits.nbytes)
    context.set_tensor_address(image, int(device_images))
    context.set_tensor_address(logits, int(device_logits))
    stream = cuda.Stream()

    def run(images_NCHW: Array) -> Array:
        batch = len(images_NCHW)
        fitting = [index for index, (low, high) in enumerate(card["batches"]) if low <= batch <= high]
        if context.active_optimization_profile != fitting[0]:
            context.set_optimization_profile_async(fitting[0], stream.handle)
        context.set_input_shape(image, images_NCHW.shape)
        host_images[:batch] = images_NCHW
        cuda.memcpy_htod_async(device_images, host_images[:batch], stream)
        if not context.execute_async_v3(stream.handle):
            raise ValueError("TensorRT cannot run the engine; its error is above. Build it again here.")
        cuda.memcpy_dtoh_async(host_logits[:batch], device_logits, stream)
        stream.synchronize()
        logits_NCHW: Array = host_logits[:batch]
        return logits_NCHW

    return run


def check_gpu(name: str, compute_capability: tuple[int, int], options: dict[str, Any]) -> None:
    """Raise ValueError for a GPU on which the plan does not run, or runs unlike it was measured."""
    built_on, compatibility = options["gpu"], options["hardware_compatibility"]
    here = ".".join(map(str, compute_capability))
    is_same = here == built_on["compute_capability"]
    fits = {
        "none": is_same and name == built_on["name"],
        "same_compute_capability": is_same,
        "ampere_plus": compute_capability >= (8, 0),
    }
    if not fits[compatibility]:
        raise ValueError(
            f"the engine was built on {built_on['name']} ({built_on['compute_capability']}) with "
            f"hardware_compatibility {compatibility}, this GPU is {name} ({here}). Build it again here."
        )


def _read_images(path: str) -> Array:
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path}: not a complete .npy file ({error}). Write the images with numpy.save."
        ) from error


def main() -> None:
    """Read images and write answers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("images", metavar="IMAGES.npy", help="images to read, uint8 [N, H, W, C]")
    parser.add_argument("answers", metavar="ANSWERS.npy", help="file to write classes, or values, to")
    options = parser.parse_args()
    try:
        images_NHWC = _read_images(options.images)
        np.save(options.answers, Engine().predict(images_NHWC), allow_pickle=False)
    except ImportError as error:
        sys.exit(f"infer.py: {error}. Run pip install -r requirements.txt.")
    except (OSError, ValueError) as error:
        sys.exit(f"infer.py: {error}")


if __name__ == "__main__":
    main()
