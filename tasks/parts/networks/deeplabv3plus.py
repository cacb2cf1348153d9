"""DeepLabV3+ on a residual backbone: the default teacher.

Chen et al., "Encoder-Decoder with Atrous Separable Convolution for Semantic Image Segmentation", 2018,
arXiv:1802.02611; backbone of basic blocks after He et al., "Deep Residual Learning", 2016, arXiv:1512.03385,
figure 5 left.

With width 1, depth 1 and 6 classes: 2,165,774 parameters, 78.17 MMACs at 64x64.

Departures, for images as small as 64x64:
- the stem is two 3x3 convolutions, the first of stride 2, without max pooling;
- three residual stages of strides 4, 8 and 16, all strided: a dilated last stage at stride 8 costs twice the
  MACs;
- atrous rates 1, 2, 3 instead of 6, 12, 18 (section 4.1): the map is 4x4, and their taps would fall on padding. For
  large images `atrous_rates` sets others: the paper's are for maps of about 32x32, images of 513x513;
- the image-pooling branch has a bias instead of BatchNorm, which is undefined on one value per channel.

Tensor suffixes: N batch, C channels, H height, W width.
"""

from collections.abc import Sequence

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

ATROUS_RATES = (1, 2, 3)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.first = ConvNormRelu(in_channels, out_channels, stride=stride)
        self.second = ConvNorm(out_channels, out_channels)
        self.is_residual = stride == 1 and in_channels == out_channels
        self.shortcut = (
            nn.Identity() if self.is_residual else ConvNorm(in_channels, out_channels, 1, stride=stride)
        )
        self.relu = nn.ReLU(inplace=False)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        summed: Tensor = self.relu(self.second(self.first(maps_NCHW)) + self.shortcut(maps_NCHW))
        return summed


class AtrousPyramid(nn.Module):
    """Atrous spatial pyramid pooling: convolve the map at several rates, and join its average over the image."""

    def __init__(self, in_channels: int, out_channels: int, rates: Sequence[int] = ATROUS_RATES) -> None:
        super().__init__()
        self.point = ConvNormRelu(in_channels, out_channels, 1)
        self.atrous = nn.ModuleList(ConvNormRelu(in_channels, out_channels, dilation=rate) for rate in rates)
        self.image = nn.Sequential(nn.Conv2d(in_channels, out_channels, 1), nn.ReLU(inplace=False))
        self.fuse = ConvNormRelu(out_channels * (2 + len(rates)), out_channels, 1)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        image_NCHW = resize_to(self.image(pool_to_bins(maps_NCHW, 1)), spatial_size(maps_NCHW))
        views = [self.point(maps_NCHW), *(branch(maps_NCHW) for branch in self.atrous), image_NCHW]
        fused: Tensor = self.fuse(torch.cat(views, dim=1))
        return fused


class DeepLabV3Plus(nn.Module):
    """Residual backbone of output stride 16, atrous pyramid, decoder with one low-level skip."""

    feature_layer = "decoder"
    classifier_layer = "classifier"

    def __init__(
        self,
        num_classes: int,
        *,
        width: float,
        depth: float,
        image_channels: int = 3,
        atrous_rates: Sequence[int] = ATROUS_RATES,
    ) -> None:
        super().__init__()
        self.image_channels = image_channels
        c24, c32, c48, c96, c192 = (scale_channels(c, width) for c in (24, 32, 48, 96, 192))
        self.stem = nn.Sequential(ConvNormRelu(image_channels, c24, stride=2), ConvNormRelu(c24, c24))
        self.low = _residual_stage(c24, c48, scale_blocks(2, depth))
        self.backbone = nn.Sequential(
            _residual_stage(c48, c96, scale_blocks(2, depth)),
            _residual_stage(c96, c192, scale_blocks(2, depth)),
        )
        self.pyramid = AtrousPyramid(c192, c96, atrous_rates)
        self.skip = ConvNormRelu(c48, c32, 1)
        self.decoder = nn.Sequential(SeparableConv(c96 + c32, c96), SeparableConv(c96, c96))
        self.classifier = nn.Conv2d(c96, num_classes, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        low_NCHW = self.low(self.stem(images_NCHW))
        skip_NCHW = self.skip(low_NCHW)
        context_NCHW = resize_to(self.pyramid(self.backbone(low_NCHW)), spatial_size(skip_NCHW))
        features_NCHW = self.decoder(torch.cat([context_NCHW, skip_NCHW], dim=1))
        return resize_to(self.classifier(features_NCHW), spatial_size(images_NCHW))


def _residual_stage(in_channels: int, out_channels: int, num_blocks: int) -> nn.Sequential:
    """Halve the map, then keep its size."""
    following = (BasicBlock(out_channels, out_channels) for _ in range(num_blocks - 1))
    return nn.Sequential(BasicBlock(in_channels, out_channels, stride=2), *following)
