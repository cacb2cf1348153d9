"""MobileViT: an inverted-residual network in which three blocks attend between patches; with the head of DeepLabv3.

Mehta, Rastegari, "MobileViT: Light-weight, General-purpose, and Mobile-friendly Vision Transformer", 2022,
arXiv:2110.02178, figure 1b and MobileViT-S of the appendix, at output stride 16. Head: Chen et al.,
"Rethinking Atrous Convolution for Semantic Image Segmentation", 2017, arXiv:1706.05587, section 3.3.

With width 1, depth 1 and 6 classes: 6,353,830 parameters, 164.8 MMACs at 64x64.

Width 1 is MobileViT-S. XS of the paper is about width 0.65, XXS about width 0.5 with half the expansion.

Departures: atrous rates 1, 2, 3 instead of 6, 12, 18, and an image-pooling branch with a bias instead of BatchNorm,
as in deeplabv3plus.py; no dropout.

Channel pruning keeps whole what attention reads and writes, and what is added or joined to it.

Tensor suffixes: N batch, P positions in a patch, T patches, C channels, H height, W width.
"""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from tasks.parts.networks.attention import attend
from tasks.parts.networks.blocks import ConvNorm, resize_to, scale_blocks, scale_channels, spatial_size
from tasks.parts.networks.deeplabv3plus import AtrousPyramid

STEM_CHANNELS = 16
CONVOLUTIONAL_STAGES = ((32, 1, 1), (64, 3, 2))
"""Channels, blocks, stride of the first block."""
ATTENDING_STAGES = ((96, 144, 2, 2), (128, 192, 4, 2), (160, 240, 3, 1))
"""Channels, channels of attention, its layers, stride; the last stride is 2 in a classifier."""
HEAD_CHANNELS = 256
EXPANSION = 4
NUM_HEADS = 4
PATCH = 2


class Swish(nn.Module):
    """Multiply each value by its sigmoid; as two operators, which a graph and its simulation in INT8 share."""

    def forward(self, maps: Tensor) -> Tensor:
        return maps * torch.sigmoid(maps)


def _conv(
    in_channels: int, out_channels: int, kernel: int = 3, *, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Convolution, BatchNorm, Swish."""
    layers = ConvNorm(in_channels, out_channels, kernel, stride=stride, groups=groups)
    layers.add_module("swish", Swish())
    return layers


class InvertedBlock(nn.Module):
    """Expand, filter each channel, project; add the input where shapes allow (MobileNetV2, with Swish)."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1) -> None:
        super().__init__()
        hidden = in_channels * EXPANSION
        self.expand = _conv(in_channels, hidden, 1)
        self.depthwise = _conv(hidden, hidden, stride=stride, groups=hidden)
        self.project = ConvNorm(hidden, out_channels, 1)
        self.is_residual = stride == 1 and in_channels == out_channels

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        projected: Tensor = self.project(self.depthwise(self.expand(maps_NCHW)))
        return maps_NCHW + projected if self.is_residual else projected


class Attention(nn.Module):
    """Mix the tokens of each row of the batch by attention with several heads."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.query = nn.Linear(channels, channels)
        self.key = nn.Linear(channels, channels)
        self.value = nn.Linear(channels, channels)
        self.out = nn.Linear(channels, channels)

    def forward(self, tokens_NTC: Tensor) -> Tensor:
        num_tokens, channels = (int(side) for side in tokens_NTC.shape[1:])
        shape = (-1, num_tokens, NUM_HEADS, channels // NUM_HEADS)
        query, key, value = (
            layer(tokens_NTC).reshape(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = attend(query, key, value)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(-1, num_tokens, channels))
        return out


class TransformerLayer(nn.Module):
    """Attention, then two linear layers for each token, each behind a LayerNorm and around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(channels)
        self.attention = Attention(channels)
        self.mlp_norm = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(
            OrderedDict(
                expand=nn.Linear(channels, 2 * channels),
                swish=Swish(),
                project=nn.Linear(2 * channels, channels),
            )
        )

    def forward(self, tokens_NTC: Tensor) -> Tensor:
        tokens_NTC = tokens_NTC + self.attention(self.attention_norm(tokens_NTC))
        mixed: Tensor = tokens_NTC + self.mlp(self.mlp_norm(tokens_NTC))
        return mixed


class AttendingBlock(nn.Module):
    """Attend between the pixels at one place of every 2x2 patch, and join the result with the map (figure 1b)."""

    def __init__(self, channels: int, attention_channels: int, *, num_layers: int) -> None:
        super().__init__()
        self.local = _conv(channels, channels)
        self.widen = nn.Conv2d(channels, attention_channels, 1, bias=False)
        self.layers = nn.Sequential(*(TransformerLayer(attention_channels) for _ in range(num_layers)))
        self.norm = nn.LayerNorm(attention_channels)
        self.narrow = _conv(attention_channels, channels, 1)
        self.fuse = _conv(2 * channels, channels)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        size = spatial_size(maps_NCHW)
        even = (-(-size[0] // PATCH) * PATCH, -(-size[1] // PATCH) * PATCH)
        wide_NCHW = resize_to(self.widen(self.local(maps_NCHW)), even)
        tokens_NTC = self.norm(self.layers(_to_tokens(wide_NCHW)))
        global_NCHW = self.narrow(resize_to(_to_maps(tokens_NTC, even), size))
        fused: Tensor = self.fuse(torch.cat([maps_NCHW, global_NCHW], dim=1))
        return fused


class MobileViT(nn.Module):
    """Stem at stride 2, stages to stride 16, atrous pyramid."""

    feature_layer = "head"
    classifier_layer = "classifier"

    def __init__(self, num_classes: int, *, width: float, depth: float, image_channels: int = 3) -> None:
        super().__init__()
        self.image_channels = image_channels
        in_channels = scale_channels(STEM_CHANNELS, width)
        self.stem = _conv(image_channels, in_channels, stride=2)
        layers: list[nn.Module] = []
        for channels, num_blocks, stride in CONVOLUTIONAL_STAGES:
            out_channels = scale_channels(channels, width)
            for index in range(scale_blocks(num_blocks, depth)):
                layers.append(InvertedBlock(in_channels, out_channels, stride=stride if index == 0 else 1))
                in_channels = out_channels
        for channels, attention_channels, num_layers, stride in ATTENDING_STAGES:
            out_channels = scale_channels(channels, width)
            layers.append(InvertedBlock(in_channels, out_channels, stride=stride))
            layers.append(
                AttendingBlock(
                    out_channels,
                    scale_channels(attention_channels, width),
                    num_layers=scale_blocks(num_layers, depth),
                )
            )
            in_channels = out_channels
        self.encoder = nn.Sequential(*layers)
        self.head = AtrousPyramid(in_channels, scale_channels(HEAD_CHANNELS, width))
        self.classifier = nn.Conv2d(scale_channels(HEAD_CHANNELS, width), num_classes, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        features_NCHW = self.head(self.encoder(self.stem(images_NCHW)))
        return resize_to(self.classifier(features_NCHW), spatial_size(images_NCHW))


def _to_tokens(maps_NCHW: Tensor) -> Tensor:
    """Return tokens [N * P, T, C]: for each image and each place in a patch, that place of every patch."""
    channels, (height, width) = int(maps_NCHW.shape[1]), spatial_size(maps_NCHW)
    rows, columns = height // PATCH, width // PATCH
    patches = maps_NCHW.reshape(-1, channels, rows, PATCH, columns, PATCH)
    return patches.permute(0, 3, 5, 2, 4, 1).reshape(-1, rows * columns, channels)


def _to_maps(tokens_NTC: Tensor, size: tuple[int, int]) -> Tensor:
    """Undo `_to_tokens` for maps of `size` = (H, W)."""
    rows, columns = size[0] // PATCH, size[1] // PATCH
    channels = int(tokens_NTC.shape[2])
    patches = tokens_NTC.reshape(-1, PATCH, PATCH, rows, columns, channels)
    return patches.permute(0, 5, 3, 1, 4, 2).reshape(-1, channels, *size)
