"""A layer in a file beside that of the network."""

from torch import nn


def conv(inputs: int, outputs: int, *, stride: int = 1, groups: int = 1, dilation: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, dilation, dilation, groups, bias=False),
        nn.BatchNorm2d(outputs),
        nn.Hardswish(),
    )
