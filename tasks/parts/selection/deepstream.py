"""Write what DeepStream's Gst-nvinfer needs to run the plan of a segmentation network. Not run on real hardware.

deepstream/config_infer.txt   the group `property` of its configuration; paths in it are relative to this file
deepstream/labels.txt         the classes, one a line

Keys are those that the parser of Gst-nvinfer 9.0 and 9.1 reads. It gives an engine float32 [N, C, H, W] and reads
float32 logits, so only plans that read normalised images and give logits fit.
"""

from pathlib import Path

from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.engines.manifest import EngineManifest
from tasks.parts.engines.runtimes import Precision, Runtime
from tasks.parts.reading.rules import ResizeMode

FOLDER = "deepstream"

_MAX_VALUE = 255
_COLOR_FORMATS = {3: 0, 1: 2}
"""Number of channels -> model-color-format: RGB or grey."""
_NETWORK_MODES = {Precision.f32: 0, Precision.f16: 2}
_INT8_MODE = 1
_SEMANTIC_SEGMENTATION = 2
_NCHW = 0


def write_deepstream(manifest: EngineManifest, bundle: Path) -> str:
    """Write `deepstream/` into a bundle; return why Gst-nvinfer cannot run the engine, or an empty text."""
    reason = find_obstacle(manifest)
    if not reason:
        (bundle / FOLDER).mkdir()
        (bundle / FOLDER / "config_infer.txt").write_text(configure_nvinfer(manifest), encoding="utf-8")
        labels = "".join(f"{name}\n" for name in manifest.card.classes)
        (bundle / FOLDER / "labels.txt").write_text(labels, encoding="utf-8")
    return reason


def find_obstacle(manifest: EngineManifest) -> str:
    """Return why Gst-nvinfer cannot run an engine as it was measured; empty if it can."""
    target, card = manifest.target, manifest.card
    name = f"target.{target.name}"
    if target.runtime is not Runtime.tensorrt or card.task is not Task.segmentation:
        return "it is not the plan of a segmentation network"
    if not target.is_plain:
        return f"it reads {target.reads} and gives {target.gives}: set {name}.reads=normalised {name}.gives=logits"
    if target.threshold is not None:
        return f"{name}.threshold is {target.threshold}, and it compares logits only: set it to null"
    if target.custom_operators:
        return "it needs plugins"
    if len(card.mean) not in _COLOR_FORMATS:
        return f"it reads {len(card.mean)} channels, and video has 1 or 3"
    if "uint8" not in card.reading.types:
        return f"it was trained on images of {' and '.join(card.reading.types)}, and video has 8 bits"
    if len(set(card.std)) > 1:
        return (
            f"its std differs between channels ({', '.join(f'{value:.4g}' for value in card.std)}), and "
            "net-scale-factor is one number: train with one, for example prepare_data.mean=[0.5,0.5,0.5] "
            "prepare_data.std=[0.5,0.5,0.5]"
        )
    return ""


def configure_nvinfer(manifest: EngineManifest) -> str:
    """Return config_infer.txt; Gst-nvinfer computes net-scale-factor * (value - offset) for each value of 0..255."""
    target, card, gpu = manifest.target, manifest.card, manifest.gpu
    assert target.tensorrt is not None and gpu is not None
    first = target.tensorrt.profiles_for(target.max_batch)[0]
    mode = _INT8_MODE if manifest.is_quantized else _NETWORK_MODES.get(target.precision)
    values: dict[str, object] = {
        "gpu-id": 0,
        "gie-unique-id": 1,
        "model-engine-file": f"../{manifest.file}",
        "labelfile-path": "labels.txt",
        "batch-size": first.max,
        "infer-dims": ";".join(map(str, card.image_shape)),
        "model-color-format": _COLOR_FORMATS[len(card.mean)],
        "net-scale-factor": f"{1 / (_MAX_VALUE * card.std[0]):.9g}",
        "offsets": ";".join(f"{_MAX_VALUE * mean:.9g}" for mean in card.mean),
        "maintain-aspect-ratio": 0,
        **({} if mode is None else {"network-mode": mode}),
        "network-type": _SEMANTIC_SEGMENTATION,
        "num-detected-classes": len(card.classes),
        "segmentation-output-order": _NCHW,
        "segmentation-threshold": "0.0",
        "output-tensor-meta": 1,
    }
    lines = [*_head(manifest, card), "[property]", *(f"{key}={value}" for key, value in values.items())]
    return "\n".join(lines) + "\n"


def _unlike_training(card: InputCard) -> str:
    """Return that the network was trained on parts of images, where Gst-nvinfer scales; empty if it scaled them."""
    mode = card.reading.resize_mode
    if mode == ResizeMode.resize:
        return ""
    return (
        f" The images of the training were not: they were read by {mode}\n"
        f'# (model.json, "reading"), so report.json is about frames of {card.width}x{card.height} alone.'
    )


def _head(manifest: EngineManifest, card: InputCard) -> list[str]:
    assert manifest.gpu is not None
    return [
        "# Gst-nvinfer of NVIDIA DeepStream: nvinfer config-file-path=deepstream/config_infer.txt",
        "# Not run on real hardware.",
        f"# The plan was built by TensorRT {manifest.runtime_version} on {manifest.gpu.name} "
        f"({manifest.gpu.compute_capability}); DeepStream has to have that version.",
        f"# Frames are scaled to {card.width}x{card.height} without borders.{_unlike_training(card)}",
        "# Gst-nvinfer takes logits for probabilities: a pixel without a logit above 0 gets the class -1, all others",
        "# the class with the largest one. NvDsInferTensorMeta has the logits of every pixel (output-tensor-meta).",
        "# The accuracy in report.json is that of their argmax.",
    ]
