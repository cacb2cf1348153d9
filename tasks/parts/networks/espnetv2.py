"""ESPNetv2: units that see several distances at once by dilated depthwise convolutions, for little arithmetic.

Mehta et al., "ESPNetv2: A Light-weight, Power Efficient, and General Purpose Convolutional Neural Network", 2019,
arXiv:1811.11431; layers as in the authors' code (github.com/sacmehta/ESPNetv2, folder segmentation/cnn), whose
classifier has one more level.

With width 1, depth 1 and 6 classes: 330,395 parameters, 11.93 MMACs at 64x64.

Width is the paper's factor `s`: the first level has at most 32 channels, and channels are multiples of 16, because
a unit has four branches and its 1x1 convolutions have four groups.

Departures:
- each dilated convolution has its own BatchNorm, which can be folded, instead of one for all behind their sums;
- ReLU instead of PReLU, which no runtime merges into an INT8 convolution;
- no dropout; the training logits of the third level are left out.

Grouped convolutions, and all layers that they read or are read by, keep their channels when the network is pruned:
that is nearly all of it. The other methods of pruning work on every layer.

Tensor suffixes: N batch, C channels, H height, W width.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tasks.parts.networks.blocks import ConvNorm, ConvNormRelu, resize_to, scale_blocks, spatial_size

BRANCHES = 4
BASE_CHANNELS = 32
LEVELS = ((2, 0, 13, 0), (4, 3, 11, 9), (8, 7, 9, 7))
"""Channels by the base, units, and the widest window (at one dilation) of the downsampling and of the units."""
CONTEXT_WINDOW = 7
NUM_POOLINGS = 4


class Unit(nn.Module):
    """Reduce, filter at four dilations, add each result to that of the next dilation, merge (EESP)."""

    def __init__(self, in_channels: int, out_channels: int, *, widest: int, stride: int = 1) -> None:
        super().__init__()
        hidden = out_channels // BRANCHES
        self.reduce = ConvNormRelu(in_channels, hidden, 1, groups=BRANCHES)
        self.branches = nn.ModuleList(
            ConvNorm(hidden, hidden, stride=stride, dilation=dilation, groups=hidden)
            for dilation in _dilations(widest)
        )
        self.relu = nn.ReLU(inplace=False)
        self.merge = ConvNorm(out_channels, out_channels, 1, groups=BRANCHES)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        reduced_NCHW = self.reduce(maps_NCHW)
        sums: list[Tensor] = []
        for branch in self.branches:
            filtered_NCHW = branch(reduced_NCHW)
            sums.append(filtered_NCHW + sums[-1] if sums else filtered_NCHW)
        merged: Tensor = self.merge(self.relu(torch.cat(sums, dim=1)))
        return merged


class ResidualUnit(nn.Module):
    """A unit around which the map is passed."""

    is_residual = True

    def __init__(self, channels: int, *, widest: int) -> None:
        super().__init__()
        self.unit = Unit(channels, channels, widest=widest)
        self.relu = nn.ReLU(inplace=False)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        summed: Tensor = self.relu(maps_NCHW + self.unit(maps_NCHW))
        return summed


class Downsampling(nn.Module):
    """Join a strided unit and the averaged map, and add a view of the averaged image (strided EESP)."""

    def __init__(self, in_channels: int, out_channels: int, *, widest: int, image_channels: int) -> None:
        super().__init__()
        self.unit = Unit(in_channels, out_channels - in_channels, widest=widest, stride=2)
        self.image = nn.Sequential(ConvNormRelu(image_channels, 3), ConvNorm(3, out_channels, 1))
        self.relu = nn.ReLU(inplace=False)

    def forward(self, maps_NCHW: Tensor, images_NCHW: Tensor) -> Tensor:
        joined_NCHW = torch.cat([_halve(maps_NCHW), self.unit(maps_NCHW)], dim=1)
        reinforced: Tensor = self.relu(joined_NCHW + self.image(images_NCHW))
        return reinforced


class PooledContext(nn.Module):
    """Filter ever smaller averages of a map, and join them with it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.filters = nn.ModuleList(
            nn.Conv2d(channels, channels, 3, padding=1, groups=channels, bias=False)
            for _ in range(NUM_POOLINGS)
        )
        self.fuse = ConvNormRelu(channels * (1 + NUM_POOLINGS), channels, 1)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        views, average_NCHW = [maps_NCHW], maps_NCHW
        for kernel in self.filters:
            average_NCHW = _halve(average_NCHW)
            views.append(resize_to(kernel(average_NCHW), spatial_size(maps_NCHW)))
        fused: Tensor = self.fuse(torch.cat(views, dim=1))
        return fused


class Join(nn.Module):
    """Enlarge a coarse map to the size of a fine one, and join both."""

    def forward(self, fine_NCHW: Tensor, coarse_NCHW: Tensor) -> Tensor:
        return torch.cat([fine_NCHW, resize_to(coarse_NCHW, spatial_size(fine_NCHW))], dim=1)


class ESPNetV2(nn.Module):
    """Stem at stride 2, three levels at strides 4, 8 and 16, context at stride 8, decoder to stride 2."""

    feature_layer = "join_first"
    classifier_layer = "classifier"

    def __init__(self, num_classes: int, *, width: float, depth: float, image_channels: int = 3) -> None:
        super().__init__()
        self.image_channels = image_channels
        base = max(16, round(BASE_CHANNELS * width / 16) * 16)
        in_channels = min(base, BASE_CHANNELS)
        channels = [in_channels]
        self.stem = ConvNormRelu(image_channels, in_channels, stride=2)
        self.downsamplings = nn.ModuleList()
        self.levels = nn.ModuleList()
        for factor, num_units, widest_strided, widest in LEVELS:
            out_channels = base * factor
            self.downsamplings.append(
                Downsampling(in_channels, out_channels, widest=widest_strided, image_channels=image_channels)
            )
            repeats = scale_blocks(num_units, depth) if num_units else 0
            self.levels.append(
                nn.Sequential(*(ResidualUnit(out_channels, widest=widest) for _ in range(repeats)))
            )
            channels.append(out_channels)
            in_channels = out_channels
        first, second, third, fourth = channels
        self.project = ConvNormRelu(fourth, third, 1)
        self.join_third = Join()
        self.context = Unit(2 * third, third, widest=CONTEXT_WINDOW)
        self.relu = nn.ReLU(inplace=False)
        self.pooled = PooledContext(third)
        self.third = ConvNormRelu(third, num_classes, 1)
        self.join_second = Join()
        self.second = ConvNormRelu(second + num_classes, num_classes, 1)
        self.join_first = Join()
        self.classifier = nn.Conv2d(first + num_classes, num_classes, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        maps = [self.stem(images_NCHW)]
        view_NCHW = _halve(images_NCHW)
        for downsampling, level in zip(self.downsamplings, self.levels, strict=True):
            view_NCHW = _halve(view_NCHW)
            maps.append(level(downsampling(maps[-1], view_NCHW)))
        first_NCHW, second_NCHW, third_NCHW, fourth_NCHW = maps
        joined_NCHW = self.join_third(third_NCHW, self.project(fourth_NCHW))
        context_NCHW = self.third(self.pooled(self.relu(self.context(joined_NCHW))))
        middle_NCHW = self.second(self.join_second(second_NCHW, context_NCHW))
        logits_NCHW = self.classifier(self.join_first(first_NCHW, middle_NCHW))
        return resize_to(logits_NCHW, spatial_size(images_NCHW))


def _halve(maps_NCHW: Tensor) -> Tensor:
    """Average windows of 3x3 at every second position."""
    return F.avg_pool2d(maps_NCHW, 3, stride=2, padding=1)


def _dilations(widest: int) -> Sequence[int]:
    """Return the dilations for windows of 3, 5, 7 and 9 positions; wider ones than `widest` become 3."""
    windows = [3 + 2 * branch for branch in range(BRANCHES)]
    return sorted((window - 1) // 2 if window <= widest else 1 for window in windows)
