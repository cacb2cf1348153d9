"""A 3x3 convolution that is trained as a sum of branches, which are then the same as one convolution.

Ding et al., "RepVGG: Making VGG-style ConvNets Great Again", 2021, arXiv:2101.03697, section 3.3.

Shapes: O output channels, I input channels (of one group), h, w kernel positions.
Tensor suffixes: N batch, C channels, H height, W width.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tasks.parts.networks.blocks import ConvNorm


class BranchedConv(nn.Module):
    """Add a 3x3 and a 1x1 convolution, and the map itself if its shape does not change, each with BatchNorm."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.square = ConvNorm(in_channels, out_channels, stride=stride, groups=groups)
        self.point = ConvNorm(in_channels, out_channels, 1, stride=stride, groups=groups)
        is_same_shape = stride == 1 and in_channels == out_channels
        self.identity = nn.BatchNorm2d(out_channels) if is_same_shape else None

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        summed_NCHW: Tensor = self.square(maps_NCHW) + self.point(maps_NCHW)
        return summed_NCHW if self.identity is None else summed_NCHW + self.identity(maps_NCHW)

    @property
    def conv(self) -> nn.Conv2d:
        """The 3x3 convolution, whose shape is that of the merged one."""
        conv = self.square.get_submodule("conv")
        assert isinstance(conv, nn.Conv2d)
        return conv

    def merged(self) -> nn.Conv2d:
        """Return the one convolution that computes the sum of the branches in eval mode."""
        conv = self.conv
        kernels, biases = zip(*self._kernels_and_biases(), strict=True)
        with conv.weight.device:
            merged = nn.Conv2d(
                conv.in_channels,
                conv.out_channels,
                3,
                stride=(conv.stride[0], conv.stride[1]),
                padding=1,
                groups=conv.groups,
            )
        with torch.no_grad():
            merged.weight.copy_(torch.stack(kernels).sum(0))
            assert merged.bias is not None
            merged.bias.copy_(torch.stack(biases).sum(0))
        return merged.train(self.training)

    def _kernels_and_biases(self) -> list[tuple[Tensor, Tensor]]:
        """Return kernel [O, I, 3, 3] and bias [O] of each branch in float64."""
        kernel_OIhw = self.conv.weight.detach().double()
        point_OI11 = self.point.get_submodule("conv").get_parameter("weight").detach().double()
        branches = [
            (kernel_OIhw, self.square.get_submodule("norm")),
            (F.pad(point_OI11, (1, 1, 1, 1)), self.point.get_submodule("norm")),
        ]
        if self.identity is not None:
            identity_OIhw = torch.zeros_like(kernel_OIhw)
            channels = torch.arange(len(identity_OIhw))
            identity_OIhw[channels, channels % identity_OIhw.shape[1], 1, 1] = 1
            branches.append((identity_OIhw, self.identity))
        found = []
        for branch_OIhw, norm in branches:
            assert isinstance(norm, nn.BatchNorm2d)
            assert norm.running_mean is not None and norm.running_var is not None
            scale_O = norm.weight.detach().double() / (norm.running_var.double() + norm.eps).sqrt()
            bias_O = norm.bias.detach().double() - norm.running_mean.double() * scale_O
            found.append((branch_OIhw * scale_O[:, None, None, None], bias_O))
        return found

    def separable(self) -> nn.Sequential:
        """Return a fresh depthwise-separable one of the same shape: only the depthwise filter has branches."""
        conv = self.conv
        depthwise = BranchedConv(
            conv.in_channels, conv.in_channels, stride=conv.stride[0], groups=conv.in_channels
        )
        pointwise = ConvNorm(conv.in_channels, conv.out_channels, 1)
        return nn.Sequential(OrderedDict(depthwise=depthwise, pointwise=pointwise))


def merge_branches(network: nn.Module) -> None:
    """Replace, in place, each branched convolution by the one convolution that computes the same."""
    branched = [name for name, module in network.named_modules() if isinstance(module, BranchedConv)]
    for name in branched:
        module = network.get_submodule(name)
        assert isinstance(module, BranchedConv)
        network.set_submodule(name, module.merged())
