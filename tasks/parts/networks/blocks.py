"""Building blocks that several networks share.

Every layer is registered in the order in which it runs, so that a BatchNorm always follows the convolution
that it can be folded into. Spatial sizes are plain integers at export, so a graph contains no shape arithmetic.

Tensor suffixes: N batch, C channels, H height, W width.
"""

import math
from collections import OrderedDict

from torch import Tensor, nn
from torch.nn import functional as F


def scale_channels(channels: int, width: float) -> int:
    """Multiply a channel count by `width` and round to the nearest multiple of 8, at least 8."""
    return max(8, round(channels * width / 8) * 8)


def scale_blocks(blocks: int, depth: float) -> int:
    """Multiply a number of blocks by `depth`, at least 1."""
    return max(1, round(blocks * depth))


def image_channels(network: nn.Module) -> int:
    """Return the number of channels of the images that a network reads; 3 unless it says otherwise."""
    return int(getattr(network, "image_channels", 3))


class ConvNorm(nn.Sequential):
    """Convolution that keeps the size (divided by `stride`), then BatchNorm."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int = 3,
        *,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        padding = dilation * (kernel // 2)
        conv = nn.Conv2d(
            in_channels, out_channels, kernel, stride, padding, dilation=dilation, groups=groups, bias=False
        )
        super().__init__(OrderedDict(conv=conv, norm=nn.BatchNorm2d(out_channels)))


class ConvNormRelu(ConvNorm):
    """`ConvNorm`, then ReLU."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel: int = 3,
        *,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
    ) -> None:
        super().__init__(in_channels, out_channels, kernel, stride=stride, dilation=dilation, groups=groups)
        self.add_module("relu", nn.ReLU(inplace=False))


class SeparableConv(nn.Sequential):
    """Depthwise 3x3, then pointwise convolution, each with BatchNorm and ReLU.

    Howard et al., "MobileNets", 2017, arXiv:1704.04861, section 3.1 and figure 3.
    """

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1) -> None:
        super().__init__(
            OrderedDict(
                depthwise=ConvNormRelu(in_channels, in_channels, stride=stride, groups=in_channels),
                pointwise=ConvNormRelu(in_channels, out_channels, 1),
            )
        )


class InvertedResidual(nn.Module):
    """Expand by a 1x1, filter by a depthwise 3x3, project by a linear 1x1; add the input where shapes allow.

    Sandler et al., "MobileNetV2", 2018, arXiv:1801.04381, table 1; with ReLU instead of ReLU6, whose upper
    clip costs a node and does not improve a calibrated INT8 range.
    """

    def __init__(self, in_channels: int, out_channels: int, *, expansion: int, stride: int = 1) -> None:
        super().__init__()
        hidden = in_channels * expansion
        self.expand = ConvNormRelu(in_channels, hidden, 1) if expansion > 1 else nn.Identity()
        self.depthwise = ConvNormRelu(hidden, hidden, stride=stride, groups=hidden)
        self.project = ConvNorm(hidden, out_channels, 1)
        self.is_residual = stride == 1 and in_channels == out_channels

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        projected: Tensor = self.project(self.depthwise(self.expand(maps_NCHW)))
        return maps_NCHW + projected if self.is_residual else projected


def spatial_size(maps_NCHW: Tensor) -> tuple[int, int]:
    """Return (H, W) as plain integers, constants in any traced graph."""
    return int(maps_NCHW.shape[2]), int(maps_NCHW.shape[3])


def resize_to(maps_NCHW: Tensor, size: tuple[int, int]) -> Tensor:
    """Resize bilinearly (align_corners=False) to `size` = (H, W).

    An integer upsampling is given by its factor, which exports as two constants in the node; a size would export as
    a chain of Shape and Concat nodes because of the dynamic batch.
    """
    height, width = spatial_size(maps_NCHW)
    if (height, width) == size:
        return maps_NCHW
    if size[0] % height == 0 and size[1] % width == 0:
        factors = (float(size[0] // height), float(size[1] // width))
        return F.interpolate(maps_NCHW, scale_factor=factors, mode="bilinear", align_corners=False)
    return F.interpolate(maps_NCHW, size=size, mode="bilinear", align_corners=False)


def pool_to_bins(maps_NCHW: Tensor, bins: int) -> Tensor:
    """Average to a grid of `bins` x `bins`, or of the map's own size along an axis that has fewer cells.

    Kernel and stride are computed here, so that this is one AveragePool in every runtime. If `bins` does not divide
    the size, the windows overlap, so that each cell is covered.
    """
    height, width = spatial_size(maps_NCHW)
    rows, columns = min(bins, height), min(bins, width)
    stride = (height // rows, width // columns)
    kernel = (height - (rows - 1) * stride[0], width - (columns - 1) * stride[1])
    return F.avg_pool2d(maps_NCHW, kernel, stride)


def initialise(network: nn.Module) -> None:
    """Initialise the weights of convolutions as He et al. 2015 (arXiv:1502.01852) for ReLU, and biases with zero.

    The fan is counted within a group: a depthwise filter has only its own 9 taps, not those of all channels.
    The classifier gets small weights, so that training starts from nearly equal class probabilities.
    Weights on the meta device are skipped (`normal_` on them would import torch's compiler).
    """
    classifier = getattr(network, "classifier_layer", "")
    for name, module in network.named_modules():
        if not isinstance(module, nn.Conv2d) or module.weight.is_meta:
            continue
        fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=0.01 if name == classifier else math.sqrt(2.0 / fan_out))
        if module.bias is not None:
            nn.init.zeros_(module.bias)
