"""Place a network on a deep learning accelerator (DLA) of a Jetson. Not run on real hardware.

A DLA computes in FP16 and INT8 and for one batch size. What it cannot run, TensorRT moves to the GPU without an error
where BuilderFlag.GPU_FALLBACK allows it. The flag has to be set all the same, because the conversions around a DLA,
from the float32 image and to the float32 logits, run on the GPU. So TensorRT is asked about every layer before the
build, and what it reports to have moved during the build is read behind it. Source: "Working with DLA" and "DLA
Runtime Configuration" of NVIDIA's documentation of TensorRT 11.4.1. Importing this module needs TensorRT.
"""

import logging
import re
from collections.abc import Sequence

import tensorrt as trt

from tasks.core.errors import BuildFailed
from tasks.parts.engines.target import Target

logger = logging.getLogger(__name__)

_SHOWN_LAYERS = 5
_MOVED = re.compile(r"(switch|fall)(ing|s)?\b.*\bGPU\b", re.IGNORECASE)
"""Matches the warnings about layers that run on the GPU instead."""


def place_on_dla(
    config: "trt.IBuilderConfig",
    builder: "trt.Builder",
    network: "trt.INetworkDefinition",
    target: Target,
) -> None:
    """Run the layers of a network on the target's DLA.

    Raises BuildFailed with the layers that a DLA cannot run, unless the target lets the GPU run them, and on a
    machine without that DLA.
    """
    options = target.tensorrt
    assert options is not None and options.dla_core is not None
    if builder.num_DLA_cores <= options.dla_core:
        raise BuildFailed(
            f"Target {target.name}: target.{target.name}.tensorrt.dla_core is {options.dla_core}, TensorRT "
            f"{trt.__version__} finds {builder.num_DLA_cores} DLA cores on this machine. Set it to null, or build on "
            "a Jetson AGX Orin."
        )
    config.default_device_type = trt.DeviceType.DLA
    config.DLA_core = options.dla_core
    config.set_flag(trt.BuilderFlag.GPU_FALLBACK)
    refused = []
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if not config.can_run_on_DLA(layer):
            config.set_device_type(layer, trt.DeviceType.GPU)
            if not _converts_only(layer):
                refused.append(f"{layer.type.name} '{layer.name}'")
    if refused:
        _refuse_or_warn(refused, target)


def check_fallbacks(warnings: Sequence[str], target: Target) -> None:
    """Raise BuildFailed if TensorRT warned, during a build, that it moved layers to the GPU; log it if it may."""
    moved = [warning for warning in warnings if _MOVED.search(warning)]
    if moved:
        _refuse_or_warn(moved, target)


def _refuse_or_warn(layers: Sequence[str], target: Target) -> None:
    assert target.tensorrt is not None
    shown = "; ".join(layers[:_SHOWN_LAYERS])
    if not target.tensorrt.dla_gpu_fallback:
        raise BuildFailed(
            f"Target {target.name}: the DLA cannot run {len(layers)} layers: {shown}. Replace these operators in the "
            f"network, or set target.{target.name}.tensorrt.dla_gpu_fallback=true to run them on the GPU."
        )
    logger.warning(
        "target %s: %d layers run on the GPU and not on the DLA: %s", target.name, len(layers), shown
    )


def _converts_only(layer: "trt.ILayer") -> bool:
    """Return whether a layer holds constants, or casts the image or the logits."""
    if layer.type == trt.LayerType.CONSTANT:
        return True
    if layer.type != trt.LayerType.CAST:
        return False
    return bool(layer.get_input(0).is_network_input or layer.get_output(0).is_network_output)
