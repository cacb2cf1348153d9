"""A network as a user may bring it: attention, grouped and dilated convolutions, a gate, auxiliary logits."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from .layers import conv


class Attention(nn.Module):
    """Self-attention over the pixels of a small map."""

    def __init__(self, channels: int, heads: int = 2) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(channels)
        self.qkv, self.out = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)

    def forward(self, maps: Tensor) -> Tensor:
        n, c, h, w = maps.shape
        tokens = maps.flatten(2).transpose(1, 2)
        qkv = self.qkv(self.norm(tokens)).reshape(n, h * w, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v)
        tokens = tokens + self.out(mixed.transpose(1, 2).reshape(n, h * w, c))
        return tokens.transpose(1, 2).reshape(n, c, h, w)


class Gate(nn.Module):
    """Scales channels by what a small perceptron makes of their means."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Linear(channels, channels // 4), nn.Linear(channels // 4, channels)

    def forward(self, maps: Tensor) -> Tensor:
        weights = torch.sigmoid(self.excite(functional.relu(self.squeeze(maps.mean((2, 3))))))
        return maps * weights[:, :, None, None]


class Net(nn.Module):
    """Stride 8, skip connection at stride 4."""

    def __init__(self, num_classes: int, width: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv(3, width, stride=2), conv(width, 2 * width, stride=2))
        self.grouped = conv(2 * width, 2 * width, groups=4)
        self.down = conv(2 * width, 4 * width, stride=2)
        self.gate, self.attention = Gate(4 * width), Attention(4 * width)
        self.wide = conv(4 * width, 4 * width, dilation=2)
        self.scale = nn.Parameter(torch.ones(1, 4 * width, 1, 1))
        self.up = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.head = nn.Sequential(conv(2 * width, 2 * width), nn.Conv2d(2 * width, num_classes, 1))
        self.auxiliary = nn.Conv2d(4 * width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        skip = self.grouped(self.stem(images))
        deep = self.wide(self.attention(self.gate(self.down(skip)))) * self.scale
        logits = self.head(self.up(deep) + skip)
        return (logits, self.auxiliary(deep)) if self.training else logits


def build(num_classes: int, width: int = 16) -> nn.Module:
    return Net(num_classes, width)
