"""Build a network with fresh weights from its configuration."""

from torch import nn

from tasks.core.errors import ConfigError
from tasks.parts.networks.bisenetv2 import BiSeNetV2
from tasks.parts.networks.blocks import initialise
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.deeplabv3plus import DeepLabV3Plus
from tasks.parts.networks.depthwise import to_depthwise_separable
from tasks.parts.networks.fast_scnn import FastSCNN
from tasks.parts.networks.first_calls import settle_kernels
from tasks.parts.networks.mobile_unet import MobileUNet


def build_network(config: NetworkConfig, num_classes: int) -> nn.Module:
    """Build a network that maps normalised images, float32 [N, 3, H, W], to logits [N, num_classes, H, W].

    The deepest path halves an image five times, so H and W should be multiples of 32. Seed torch first for
    repeatable weights. The result has two attributes: `feature_layer`, the dotted name of the submodule whose output
    is the last feature map before the classifier, and `classifier_layer`, that of the convolution that computes the
    logits.
    """
    if num_classes < 2:
        raise ConfigError(f"num_classes is {num_classes}; expected at least 2 (background and one class).")
    settle_kernels()
    network: nn.Module
    match config.name:
        case NetworkName.deeplabv3plus:
            network = DeepLabV3Plus(num_classes, width=config.width, depth=config.depth)
        case NetworkName.fast_scnn:
            network = FastSCNN(num_classes, width=config.width, depth=config.depth)
        case NetworkName.bisenetv2:
            network = BiSeNetV2(num_classes, width=config.width, depth=config.depth)
        case NetworkName.mobile_unet:
            network = MobileUNet(num_classes, width=config.width, depth=config.depth)
        case NetworkName.segformer:
            from tasks.parts.networks.segformer import SegFormer

            network = SegFormer(num_classes, width=config.width, depth=config.depth)
        case NetworkName.dinov2:
            from tasks.parts.networks.dinov2 import DinoV2

            network = DinoV2(num_classes, width=config.width, depth=config.depth)
    if config.depthwise:
        to_depthwise_separable(network)
    initialise(network)
    return network
