"""BiSeNetV2: a wide, shallow path for detail and a narrow, deep path for semantics.

Yu et al., "BiSeNet V2: Bilateral Network with Guided Aggregation for Real-time Semantic Segmentation", 2020,
arXiv:2004.02147, table 1 and figures 4 to 6.

With width 1, depth 1 and 6 classes: 2,670,806 parameters, 128.1 MMACs at 64x64.

Departures:
- gather-and-expansion widens by a 1x1 convolution before the depthwise one; the paper's depthwise convolution
  with six outputs per channel ties each channel to its six copies, so channels could not be pruned;
- context embedding has a bias instead of BatchNorm, which is undefined on one value per channel;
- the auxiliary heads of the "booster" training are left out: they are discarded before inference.

Tensor suffixes: N batch, C channels, H height, W width.
"""

import torch
from torch import Tensor, nn

from tasks.parts.networks.blocks import (
    ConvNorm,
    ConvNormRelu,
    pool_to_bins,
    resize_to,
    scale_blocks,
    scale_channels,
    spatial_size,
)

EXPANSION = 6


class Stem(nn.Module):
    """Halve the size twice, the second time both by pooling and by convolutions, and join the two results."""

    def __init__(self, image_channels: int, out_channels: int) -> None:
        super().__init__()
        self.first = ConvNormRelu(image_channels, out_channels, stride=2)
        self.left = nn.Sequential(
            ConvNormRelu(out_channels, max(8, out_channels // 2), 1),
            ConvNormRelu(max(8, out_channels // 2), out_channels, stride=2),
        )
        self.right = nn.MaxPool2d(3, stride=2, padding=1)
        self.fuse = ConvNormRelu(2 * out_channels, out_channels)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        maps_NCHW = self.first(images_NCHW)
        fused: Tensor = self.fuse(torch.cat([self.left(maps_NCHW), self.right(maps_NCHW)], dim=1))
        return fused


class GatherExpansion(nn.Module):
    """Gather by a 3x3 convolution, expand, filter each channel, project back, add the shortcut."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1) -> None:
        super().__init__()
        hidden = in_channels * EXPANSION
        self.gather = ConvNormRelu(in_channels, in_channels)
        self.expand = ConvNormRelu(in_channels, hidden, 1)
        self.filter = nn.Sequential(ConvNorm(hidden, hidden, stride=stride, groups=hidden))
        self.shortcut: nn.Module = nn.Identity()
        if stride == 2:
            self.filter.append(ConvNormRelu(hidden, hidden, groups=hidden))
        self.project = ConvNorm(hidden, out_channels, 1)
        self.is_residual = stride == 1 and in_channels == out_channels
        if not self.is_residual:
            self.shortcut = nn.Sequential(
                ConvNorm(in_channels, in_channels, stride=stride, groups=in_channels),
                ConvNorm(in_channels, out_channels, 1),
            )
        self.relu = nn.ReLU(inplace=False)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        projected_NCHW = self.project(self.filter(self.expand(self.gather(maps_NCHW))))
        summed: Tensor = self.relu(projected_NCHW + self.shortcut(maps_NCHW))
        return summed


class ContextEmbedding(nn.Module):
    """Add the average of the whole image to every position."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.ReLU(inplace=False))
        self.fuse = ConvNormRelu(channels, channels)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        embedded: Tensor = self.fuse(maps_NCHW + self.image(pool_to_bins(maps_NCHW, 1)))
        return embedded


class GuidedAggregation(nn.Module):
    """Gate each path by the other at both scales, and add the two results."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.detail_keep = nn.Sequential(
            ConvNorm(channels, channels, groups=channels), nn.Conv2d(channels, channels, 1)
        )
        self.detail_down = nn.Sequential(
            ConvNorm(channels, channels, stride=2), nn.AvgPool2d(3, stride=2, padding=1)
        )
        self.meaning_up = ConvNorm(channels, channels)
        self.meaning_keep = nn.Sequential(
            ConvNorm(channels, channels, groups=channels), nn.Conv2d(channels, channels, 1)
        )
        self.fuse = ConvNormRelu(channels, channels)

    def forward(self, detail_NCHW: Tensor, meaning_NCHW: Tensor) -> Tensor:
        size = spatial_size(detail_NCHW)
        gate_NCHW = torch.sigmoid(resize_to(self.meaning_up(meaning_NCHW), size))
        fine_NCHW = self.detail_keep(detail_NCHW) * gate_NCHW
        coarse_NCHW = self.detail_down(detail_NCHW) * torch.sigmoid(self.meaning_keep(meaning_NCHW))
        fused: Tensor = self.fuse(fine_NCHW + resize_to(coarse_NCHW, size))
        return fused


class BiSeNetV2(nn.Module):
    """Detail path (stride 8), semantic path (stride 32), guided aggregation, head."""

    feature_layer = "head"
    classifier_layer = "classifier"

    def __init__(self, num_classes: int, *, width: float, depth: float, image_channels: int = 3) -> None:
        super().__init__()
        self.image_channels = image_channels
        c16, c32, c64, c128 = (scale_channels(c, width) for c in (16, 32, 64, 128))
        detail: list[nn.Module] = []
        in_channels = image_channels
        for out_channels, repeats in ((c64, 1), (c64, 2), (c128, 2)):
            detail.append(ConvNormRelu(in_channels, out_channels, stride=2))
            detail += [ConvNormRelu(out_channels, out_channels) for _ in range(scale_blocks(repeats, depth))]
            in_channels = out_channels
        self.detail = nn.Sequential(*detail)
        meaning: list[nn.Module] = [Stem(image_channels, c16)]
        in_channels = c16
        for out_channels, repeats in ((c32, 1), (c64, 1), (c128, 3)):
            meaning.append(GatherExpansion(in_channels, out_channels, stride=2))
            meaning += [
                GatherExpansion(out_channels, out_channels) for _ in range(scale_blocks(repeats, depth))
            ]
            in_channels = out_channels
        self.meaning = nn.Sequential(*meaning, ContextEmbedding(c128))
        self.aggregation = GuidedAggregation(c128)
        self.head = ConvNormRelu(c128, c128)
        self.classifier = nn.Conv2d(c128, num_classes, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        fused_NCHW = self.aggregation(self.detail(images_NCHW), self.meaning(images_NCHW))
        return resize_to(self.classifier(self.head(fused_NCHW)), spatial_size(images_NCHW))
