"""Build a network with fresh weights from its configuration."""

from typing import Any

from torch import nn

from tasks.core.errors import ConfigError
from tasks.parts.data.dataset import Manifest
from tasks.parts.networks.bisenetv2 import BiSeNetV2
from tasks.parts.networks.blocks import initialise
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.ddrnet import DDRNet
from tasks.parts.networks.deeplabv3plus import DeepLabV3Plus
from tasks.parts.networks.depthwise import to_depthwise_separable
from tasks.parts.networks.espnetv2 import ESPNetV2
from tasks.parts.networks.fast_scnn import FastSCNN
from tasks.parts.networks.first_calls import settle_kernels
from tasks.parts.networks.mobile_unet import MobileUNet
from tasks.parts.networks.mobilevit import MobileViT
from tasks.parts.networks.repvgg import RepVGG


def build_for_data(config: NetworkConfig, manifest: Manifest) -> nn.Module:
    """Build a network for the classes, the size and the channels of a data set; errors as ``build_network``."""
    return build_network(
        config,
        len(manifest.classes),
        size=(manifest.height, manifest.width),
        num_channels=manifest.num_channels,
    )


def build_network(
    config: NetworkConfig, num_classes: int, *, size: tuple[int, int] = (64, 64), num_channels: int = 3
) -> nn.Module:
    """Build a network that maps normalised images, float32 [N, num_channels, H, W], to logits [N, num_classes, H, W].

    The deepest path of our own halves an image five times, so H and W should be multiples of 32. A foreign network is
    tried with images of `size` (height, width). Seed torch first for repeatable weights. The result has three
    attributes: `feature_layer`, the dotted name of the submodule whose output is the last feature map before the
    classifier (None if there is none), `classifier_layer`, that of the layer that computes the logits, and
    `image_channels`.

    Raises ConfigError for a foreign network that cannot be built, or whose logits have another shape.
    """
    if num_classes < 2:
        raise ConfigError(f"num_classes is {num_classes}; expected at least 2 (background and one class).")
    settle_kernels()
    if config.name.is_foreign:
        from tasks.parts.networks.foreign import build_foreign

        return build_foreign(config, num_classes, size=size, num_channels=num_channels)
    assert config.width is not None and config.depth is not None
    sizes: dict[str, Any] = {
        "width": config.width,
        "depth": config.depth,
        "image_channels": num_channels,
    }
    network: nn.Module
    match config.name:
        case NetworkName.deeplabv3plus:
            if config.atrous_rates is not None:
                sizes["atrous_rates"] = config.atrous_rates
            network = DeepLabV3Plus(num_classes, **sizes)
        case NetworkName.fast_scnn:
            network = FastSCNN(num_classes, **sizes)
        case NetworkName.bisenetv2:
            network = BiSeNetV2(num_classes, **sizes)
        case NetworkName.ddrnet:
            network = DDRNet(num_classes, **sizes)
        case NetworkName.espnetv2:
            network = ESPNetV2(num_classes, **sizes)
        case NetworkName.mobile_unet:
            network = MobileUNet(num_classes, **sizes)
        case NetworkName.mobilevit:
            network = MobileViT(num_classes, **sizes)
        case NetworkName.repvgg:
            network = RepVGG(num_classes, **sizes)
        case NetworkName.segformer:
            from tasks.parts.networks.segformer import SegFormer

            network = SegFormer(num_classes, **sizes, **config.arguments)
        case NetworkName.dinov2:
            from tasks.parts.networks.dinov2 import DinoV2

            network = DinoV2(num_classes, **sizes)
    if config.depthwise:
        to_depthwise_separable(network)
    initialise(network)
    return network
