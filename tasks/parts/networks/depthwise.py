"""Replace the plain convolutions of any network by depthwise-separable ones."""

from collections import OrderedDict

from torch import nn

from tasks.parts.networks.branched_conv import BranchedConv

MIN_IN_CHANNELS = 8  # an RGB stem has only three channels to filter: little is saved, and colour is lost


class DepthwiseSeparable(nn.Sequential):
    """A KxK filter on each channel (`depthwise`), then a 1x1 convolution over the channels (`pointwise`)."""

    def __init__(self, conv: nn.Conv2d) -> None:
        channels = conv.in_channels
        depthwise = nn.Conv2d(
            channels,
            channels,
            (conv.kernel_size[0], conv.kernel_size[1]),
            stride=(conv.stride[0], conv.stride[1]),
            padding=conv.padding if isinstance(conv.padding, str) else (conv.padding[0], conv.padding[1]),
            dilation=(conv.dilation[0], conv.dilation[1]),
            groups=channels,
            bias=False,
        )
        pointwise = nn.Conv2d(channels, conv.out_channels, 1, bias=conv.bias is not None)
        super().__init__(OrderedDict(depthwise=depthwise, pointwise=pointwise))


def to_depthwise_separable(module: nn.Module) -> nn.Module:
    """Replace, in place, each plain convolution of 3x3 or more; return `module`.

    Plain means one group and at least 8 input channels. New weights have torch's default initialisation, so convert
    before training. The MACs of a converted layer shrink to 1 / out_channels + 1 / kernel^2 of the original
    (Howard et al., "MobileNets", 2017, arXiv:1704.04861, section 3.1).
    """
    for name, child in module.named_children():
        if isinstance(child, nn.Conv2d):
            if _is_plain(child):
                setattr(module, name, DepthwiseSeparable(child))
        elif isinstance(child, BranchedConv):
            if _is_plain(child.conv):
                setattr(module, name, child.separable())
        elif not isinstance(child, DepthwiseSeparable):
            to_depthwise_separable(child)
    return module


def _is_plain(conv: nn.Conv2d) -> bool:
    return conv.groups == 1 and conv.in_channels >= MIN_IN_CHANNELS and min(conv.kernel_size) >= 3
