"""DeepLabV3+ on a residual backbone: the default teacher.

Chen et al., "Encoder-Decoder with Atrous Separable Convolution for Semantic Image Segmentation", 2018,
arXiv:1802.02611; backbone of basic blocks after He et al., "Deep Residual Learning", 2016, arXiv:1512.03385,
figure 5 left.

With width 1, depth 1 and 6 classes: 2,714,038 parameters, 213.2 MMACs at 64x64.

Departures, for images as small as 64x64:
- the stem is one 3x3 of stride 2 without max pooling, and the decoder takes its low-level skip there, at
  stride 2 instead of 4;
- three residual stages; at output stride 8 the last one is dilated instead of strided (section 3.1);
- atrous rates 2, 4, 6 instead of 12, 24, 36, whose taps would all fall on padding;
- the image-pooling branch has a bias instead of BatchNorm, which is undefined on one value a channel.

Tensor suffixes: N batch, C channels, H height, W width.
"""

import torch
from torch import Tensor, nn

from tasks.parts.networks.blocks import (
    ConvNorm,
    ConvNormRelu,
    SeparableConv,
    pool_to_bins,
    resize_to,
    scale_blocks,
    scale_channels,
    spatial_size,
)

ATROUS_RATES = (2, 4, 6)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1, dilation: int = 1) -> None:
        super().__init__()
        self.first = ConvNormRelu(in_channels, out_channels, stride=stride, dilation=dilation)
        self.second = ConvNorm(out_channels, out_channels, dilation=dilation)
        has_same_shape = stride == 1 and in_channels == out_channels
        self.shortcut = (
            nn.Identity() if has_same_shape else ConvNorm(in_channels, out_channels, 1, stride=stride)
        )
        self.relu = nn.ReLU(inplace=False)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        summed: Tensor = self.relu(self.second(self.first(maps_NCHW)) + self.shortcut(maps_NCHW))
        return summed


class AtrousPyramid(nn.Module):
    """Atrous spatial pyramid pooling: the same map seen at several rates, and its average over the image."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.point = ConvNormRelu(in_channels, out_channels, 1)
        self.atrous = nn.ModuleList(
            ConvNormRelu(in_channels, out_channels, dilation=rate) for rate in ATROUS_RATES
        )
        self.image = nn.Sequential(nn.Conv2d(in_channels, out_channels, 1), nn.ReLU(inplace=False))
        self.fuse = ConvNormRelu(out_channels * (2 + len(ATROUS_RATES)), out_channels, 1)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        image_NCHW = resize_to(self.image(pool_to_bins(maps_NCHW, 1)), spatial_size(maps_NCHW))
        views = [self.point(maps_NCHW), *(branch(maps_NCHW) for branch in self.atrous), image_NCHW]
        fused: Tensor = self.fuse(torch.cat(views, dim=1))
        return fused


class DeepLabV3Plus(nn.Module):
    """Residual backbone, atrous pyramid, decoder with one low-level skip.

    `output_stride` is 8 (last stage dilated) or 16 (last stage strided: coarser, about twice as fast).
    """

    feature_layer = "decoder"
    classifier_layer = "classifier"

    def __init__(self, num_classes: int, *, width: float, depth: float, output_stride: int = 16) -> None:
        super().__init__()
        stem, pyramid, skip, decoder = (scale_channels(c, width) for c in (32, 128, 16, 64))
        self.stem = ConvNormRelu(3, stem, stride=2)
        last = (2, 1) if output_stride == 16 else (1, 2)
        blocks: list[nn.Module] = []
        in_channels = stem
        for channels, (stride, dilation) in ((64, (2, 1)), (128, (2, 1)), (192, last)):
            out_channels = scale_channels(channels, width)
            for index in range(scale_blocks(2, depth)):
                block_stride = stride if index == 0 else 1
                blocks.append(BasicBlock(in_channels, out_channels, stride=block_stride, dilation=dilation))
                in_channels = out_channels
        self.backbone = nn.Sequential(*blocks)
        self.pyramid = AtrousPyramid(in_channels, pyramid)
        self.skip = ConvNormRelu(stem, skip, 1)
        self.decoder = nn.Sequential(SeparableConv(pyramid + skip, decoder), SeparableConv(decoder, decoder))
        self.classifier = nn.Conv2d(decoder, num_classes, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        low_NCHW = self.stem(images_NCHW)
        skip_NCHW = self.skip(low_NCHW)
        context_NCHW = resize_to(self.pyramid(self.backbone(low_NCHW)), spatial_size(skip_NCHW))
        features_NCHW = self.decoder(torch.cat([context_NCHW, skip_NCHW], dim=1))
        return resize_to(self.classifier(features_NCHW), spatial_size(images_NCHW))
