"""MobileUNet: a MobileNetV2 encoder with a U-Net decoder.

Encoder: Sandler et al., "MobileNetV2", 2018, arXiv:1801.04381, table 2. Decoder: Ronneberger et al., "U-Net",
2015, arXiv:1505.04597, figure 1: upsample, join with the encoder map of that size, convolve.

With width 1, depth 1 and 6 classes: 1,874,446 parameters, 28.27 MMACs at 64x64.

Departures: bilinear upsampling instead of transposed convolutions (no checkerboard, one node), separable
convolutions in the decoder, which ends at stride 2; ReLU instead of ReLU6; no 1280-channel layer, which only
an image classifier needs.

Tensor suffixes: N batch, C channels, H height, W width.
"""

import torch
from torch import Tensor, nn

from tasks.parts.networks.blocks import (
    ConvNormRelu,
    InvertedResidual,
    SeparableConv,
    resize_to,
    scale_blocks,
    scale_channels,
    spatial_size,
)

# Expansion, channels, number of blocks, stride of the first one; a scale ends where the next stride is 2.
ENCODER_SCALES = (
    ((1, 16, 1, 1),),
    ((6, 24, 2, 2),),
    ((6, 32, 3, 2),),
    ((6, 64, 4, 2), (6, 96, 3, 1)),
    ((6, 160, 3, 2), (6, 320, 1, 1)),
)
DECODER_CHANNELS = (96, 64, 48, 32)


class UpBlock(nn.Module):
    """Upsample the deep map to the size of the skip, join both, filter."""

    def __init__(self, deep_channels: int, skip_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = SeparableConv(deep_channels + skip_channels, out_channels)

    def forward(self, deep_NCHW: Tensor, skip_NCHW: Tensor) -> Tensor:
        deep_NCHW = resize_to(deep_NCHW, spatial_size(skip_NCHW))
        joined: Tensor = self.conv(torch.cat([deep_NCHW, skip_NCHW], dim=1))
        return joined


class MobileUNet(nn.Module):
    """Five scales down (strides 2 to 32), four up again."""

    feature_layer = "decoder.3"
    classifier_layer = "classifier"

    def __init__(self, num_classes: int, *, width: float, depth: float, image_channels: int = 3) -> None:
        super().__init__()
        self.image_channels = image_channels
        in_channels = scale_channels(32, width)
        self.stem = ConvNormRelu(image_channels, in_channels, stride=2)
        self.encoder = nn.ModuleList()
        skips: list[int] = []
        for scale in ENCODER_SCALES:
            blocks: list[nn.Module] = []
            for expansion, channels, repeats, stride in scale:
                out_channels = scale_channels(channels, width)
                for index in range(scale_blocks(repeats, depth)):
                    block_stride = stride if index == 0 else 1
                    blocks.append(
                        InvertedResidual(in_channels, out_channels, expansion=expansion, stride=block_stride)
                    )
                    in_channels = out_channels
            self.encoder.append(nn.Sequential(*blocks))
            skips.append(in_channels)
        self.decoder = nn.ModuleList()
        for channels, skip_channels in zip(DECODER_CHANNELS, reversed(skips[:-1]), strict=True):
            out_channels = scale_channels(channels, width)
            self.decoder.append(UpBlock(in_channels, skip_channels, out_channels))
            in_channels = out_channels
        self.classifier = nn.Conv2d(in_channels, num_classes, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        maps_NCHW = self.stem(images_NCHW)
        scales = []
        for scale in self.encoder:
            maps_NCHW = scale(maps_NCHW)
            scales.append(maps_NCHW)
        for block, skip_NCHW in zip(self.decoder, reversed(scales[:-1]), strict=True):
            maps_NCHW = block(maps_NCHW, skip_NCHW)
        return resize_to(self.classifier(maps_NCHW), spatial_size(images_NCHW))
