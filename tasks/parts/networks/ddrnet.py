"""DDRNet-23-slim: a branch that keeps detail and a branch that goes deep, which exchange their maps twice.

Hong et al., "Deep Dual-resolution Networks for Real-time and Accurate Semantic Segmentation of Road Scenes", 2021,
arXiv:2101.06085; layers and numbers of blocks as in the authors' code (github.com/ydhongHIT/DDRNet, file
segmentation/DDRNet_23_slim.py).

With width 1, depth 1 and 6 classes: 5,688,678 parameters, 76.01 MMACs at 64x64.

Departures:
- the deep branch ends at stride 32 instead of 64 (`deep_stride`): a 64x64 image would leave one position;
- BatchNorm and ReLU come after the convolutions of pooling module and head, where they can be folded, not before;
- averages at the border leave out the padding;
- the pooled branches have a bias instead of BatchNorm, which is undefined on one value per channel;
- the auxiliary head is left out: it is discarded before inference.

Tensor suffixes: N batch, C channels, H height, W width.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tasks.parts.networks.blocks import (
    ConvNorm,
    ConvNormRelu,
    pool_to_bins,
    resize_to,
    scale_blocks,
    scale_channels,
    spatial_size,
)

POOL_STRIDES = (2, 4, 8)


class Residual(nn.Module):
    """Add a shortcut to what the layers make of a map; no ReLU follows, since branches are joined before it."""

    def __init__(self, layers: nn.Sequential, shortcut: nn.Module) -> None:
        super().__init__()
        self.layers = layers
        self.shortcut = shortcut
        self.is_residual = isinstance(shortcut, nn.Identity)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        summed: Tensor = self.layers(maps_NCHW) + self.shortcut(maps_NCHW)
        return summed


def _basic(in_channels: int, out_channels: int, *, stride: int = 1) -> Residual:
    """Two 3x3 convolutions (He et al., "Deep Residual Learning", 2016, arXiv:1512.03385, figure 5 left)."""
    is_residual = stride == 1 and in_channels == out_channels
    shortcut = nn.Identity() if is_residual else ConvNorm(in_channels, out_channels, 1, stride=stride)
    layers = nn.Sequential(
        ConvNormRelu(in_channels, out_channels, stride=stride), ConvNorm(out_channels, out_channels)
    )
    return Residual(layers, shortcut)


def _bottleneck(channels: int, *, stride: int) -> Residual:
    """1x1, 3x3 and 1x1 convolutions, which double the channels (figure 5 right, with another width)."""
    layers = nn.Sequential(
        ConvNormRelu(channels, channels, 1),
        ConvNormRelu(channels, channels, stride=stride),
        ConvNorm(channels, 2 * channels, 1),
    )
    return Residual(layers, ConvNorm(channels, 2 * channels, 1, stride=stride))


def _stage(in_channels: int, out_channels: int, num_blocks: int, *, stride: int) -> nn.Sequential:
    """Basic blocks with ReLU between them but not behind the last one."""
    layers: list[nn.Module] = [_basic(in_channels, out_channels, stride=stride)]
    for _ in range(num_blocks - 1):
        layers += [nn.ReLU(inplace=False), _basic(out_channels, out_channels)]
    return nn.Sequential(*layers)


class DeepAggregationPyramid(nn.Module):
    """Average a map over ever larger windows, and add each average to the sum so far (DAPPM)."""

    def __init__(self, in_channels: int, branch_channels: int, out_channels: int) -> None:
        super().__init__()
        self.point = ConvNormRelu(in_channels, branch_channels, 1)
        self.pooled = nn.ModuleList(
            nn.Sequential(nn.Conv2d(in_channels, branch_channels, 1), nn.ReLU(inplace=False))
            for _ in range(len(POOL_STRIDES) + 1)
        )
        self.fuse = nn.ModuleList(ConvNormRelu(branch_channels, branch_channels) for _ in self.pooled)
        self.compress = ConvNorm(branch_channels * (1 + len(self.pooled)), out_channels, 1)
        self.shortcut = ConvNorm(in_channels, out_channels, 1)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        size = spatial_size(maps_NCHW)
        views = [self.point(maps_NCHW)]
        averages = [
            F.avg_pool2d(maps_NCHW, 2 * stride + 1, stride, padding=stride, count_include_pad=False)
            for stride in POOL_STRIDES
        ]
        averages.append(pool_to_bins(maps_NCHW, 1))
        for average_NCHW, reduce, fuse in zip(averages, self.pooled, self.fuse, strict=True):
            views.append(fuse(resize_to(reduce(average_NCHW), size) + views[-1]))
        aggregated: Tensor = self.compress(torch.cat(views, dim=1)) + self.shortcut(maps_NCHW)
        return aggregated


class DDRNet(nn.Module):
    """Common stem to stride 8, detail branch there, deep branch to stride 32, pyramid, head."""

    feature_layer = "head"
    classifier_layer = "classifier"

    def __init__(
        self,
        num_classes: int,
        *,
        width: float,
        depth: float,
        deep_stride: int = 32,
        image_channels: int = 3,
    ) -> None:
        super().__init__()
        self.image_channels = image_channels
        c32, c64, c128, c256 = (scale_channels(c, width) for c in (32, 64, 128, 256))
        num_blocks = scale_blocks(2, depth)
        self.stem = nn.Sequential(
            ConvNormRelu(image_channels, c32, stride=2),
            ConvNormRelu(c32, c32, stride=2),
            _stage(c32, c32, num_blocks, stride=1),
            nn.ReLU(inplace=False),
            _stage(c32, c64, num_blocks, stride=2),
            nn.ReLU(inplace=False),
        )
        self.deep = nn.ModuleList(
            (_stage(c64, c128, num_blocks, stride=2), _stage(c128, c256, num_blocks, stride=2))
        )
        self.detail = nn.ModuleList(_stage(c64, c64, num_blocks, stride=1) for _ in range(2))
        self.up = nn.ModuleList((ConvNorm(c128, c64, 1), ConvNorm(c256, c64, 1)))
        self.down = nn.ModuleList(
            (
                ConvNorm(c64, c128, stride=2),
                nn.Sequential(ConvNormRelu(c64, c128, stride=2), ConvNorm(c128, c256, stride=2)),
            )
        )
        self.relu = nn.ReLU(inplace=False)
        self.last_detail = _bottleneck(c64, stride=1)
        self.last_deep = _bottleneck(c256, stride=deep_stride // 32)
        self.pyramid = DeepAggregationPyramid(2 * c256, scale_channels(128, width), c128)
        self.head = ConvNormRelu(c128, c64)
        self.classifier = nn.Conv2d(c64, num_classes, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        detail_NCHW = deep_NCHW = self.stem(images_NCHW)
        size = spatial_size(detail_NCHW)
        for deep, detail, up, down in zip(self.deep, self.detail, self.up, self.down, strict=True):
            deeper_NCHW, finer_NCHW = deep(deep_NCHW), detail(detail_NCHW)
            deep_NCHW = self.relu(deeper_NCHW + down(self.relu(finer_NCHW)))
            detail_NCHW = self.relu(finer_NCHW + resize_to(up(self.relu(deeper_NCHW)), size))
        context_NCHW = resize_to(self.pyramid(self.last_deep(deep_NCHW)), size)
        joined_NCHW = self.relu(context_NCHW + self.last_detail(detail_NCHW))
        return resize_to(self.classifier(self.head(joined_NCHW)), spatial_size(images_NCHW))
