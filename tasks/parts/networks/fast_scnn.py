"""Fast-SCNN: the default student.

Poudel, Liwicki, Cipolla, "Fast-SCNN: Fast Semantic Segmentation Network", 2019, arXiv:1902.04502, table 1.

With width 1, depth 1 and 6 classes: 1,127,830 parameters, 47.96 MMACs at 64x64.

Departures, the first two for small images:
- `detail_stride` 4 instead of 8: the third layer of "learning to downsample" keeps the size, so that the
  detail path of a 64x64 image is 16x16 and not 8x8. Every later stride is the paper's.
- Pyramid bins 1, 2, 4 instead of 1, 2, 3, 6: at 64x64 the pooled map is 4x4. The single
  bin has a bias instead of BatchNorm, which is undefined on one value per channel.

Tensor suffixes: N batch, C channels, H height, W width.
"""

import torch
from torch import Tensor, nn

from tasks.parts.networks.blocks import (
    ConvNorm,
    ConvNormRelu,
    InvertedResidual,
    SeparableConv,
    pool_to_bins,
    resize_to,
    scale_blocks,
    scale_channels,
    spatial_size,
)

PYRAMID_BINS = (1, 2, 4)


class PyramidPooling(nn.Module):
    """Join a map with its averages over coarse grids (Zhao et al., "PSPNet", 2017, arXiv:1612.01105)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        reduced = max(8, channels // 4)
        image = nn.Sequential(nn.Conv2d(channels, reduced, 1), nn.ReLU(inplace=False))
        grids = (ConvNormRelu(channels, reduced, 1) for _ in PYRAMID_BINS[1:])
        self.branches = nn.ModuleList((image, *grids))
        self.fuse = ConvNormRelu(channels + reduced * len(PYRAMID_BINS), channels, 1)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        size = spatial_size(maps_NCHW)
        pooled = [
            resize_to(branch(pool_to_bins(maps_NCHW, bins)), size)
            for bins, branch in zip(PYRAMID_BINS, self.branches, strict=True)
        ]
        fused: Tensor = self.fuse(torch.cat([maps_NCHW, *pooled], dim=1))
        return fused


class FeatureFusion(nn.Module):
    """Add the upsampled context to the detail map (table 3 of the paper)."""

    def __init__(self, detail_channels: int, context_channels: int, out_channels: int) -> None:
        super().__init__()
        self.detail = ConvNorm(detail_channels, out_channels, 1)
        self.context_filter = ConvNormRelu(context_channels, context_channels, groups=context_channels)
        self.context = ConvNorm(context_channels, out_channels, 1)
        self.relu = nn.ReLU(inplace=False)

    def forward(self, detail_NCHW: Tensor, context_NCHW: Tensor) -> Tensor:
        context_NCHW = resize_to(context_NCHW, spatial_size(detail_NCHW))
        fused: Tensor = self.relu(self.detail(detail_NCHW) + self.context(self.context_filter(context_NCHW)))
        return fused


class FastSCNN(nn.Module):
    """Learning to downsample, global feature extractor, feature fusion, classifier."""

    feature_layer = "head"
    classifier_layer = "classifier"

    def __init__(
        self,
        num_classes: int,
        *,
        width: float,
        depth: float,
        detail_stride: int = 4,
        image_channels: int = 3,
    ) -> None:
        super().__init__()
        self.image_channels = image_channels
        c32, c48, c64, c96, c128 = (scale_channels(c, width) for c in (32, 48, 64, 96, 128))
        self.downsample = nn.Sequential(
            ConvNormRelu(image_channels, c32, stride=2),
            SeparableConv(c32, c48, stride=2),
            SeparableConv(c48, c64, stride=2 if detail_stride == 8 else 1),
        )
        blocks: list[nn.Module] = []
        in_channels = c64
        for out_channels, stride in ((c64, 2), (c96, 2), (c128, 1)):
            for index in range(scale_blocks(3, depth)):
                block_stride = stride if index == 0 else 1
                blocks.append(InvertedResidual(in_channels, out_channels, expansion=6, stride=block_stride))
                in_channels = out_channels
        self.context = nn.Sequential(*blocks)
        self.pyramid = PyramidPooling(c128)
        self.fusion = FeatureFusion(c64, c128, c128)
        self.head = nn.Sequential(*(SeparableConv(c128, c128) for _ in range(2)))
        self.classifier = nn.Conv2d(c128, num_classes, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        detail_NCHW = self.downsample(images_NCHW)
        context_NCHW = self.pyramid(self.context(detail_NCHW))
        features_NCHW = self.head(self.fusion(detail_NCHW, context_NCHW))
        return resize_to(self.classifier(features_NCHW), spatial_size(images_NCHW))
