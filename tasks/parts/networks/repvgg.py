"""RepVGG: plain 3x3 convolutions with ReLU in use, sums of branches in training; with a light decoder.

Encoder: Ding et al., "RepVGG: Making VGG-style ConvNets Great Again", 2021, arXiv:2101.03697, RepVGG-A0
without its last stage of 1280 channels, which only an image classifier needs. Decoder: the sum of resized maps of
Kirillov et al., "Panoptic Feature Pyramid Networks", 2019, arXiv:1901.02446, with one convolution for
each stage instead of several.

With width 1, depth 1 and 6 classes: 5,428,870 parameters, 125.5 MMACs at 64x64.
That is the network in training. Export merges the branches (`fold_batchnorm`): 4,874,278 parameters, 113.1 MMACs
are left. Runtimes of torch that read the checkpoint unfolded run the branches.

Channel pruning cuts the branches together. All blocks of a stage lose the same channels, because the identity ties
what a block reads to what it writes.

Tensor suffixes: N batch, C channels, H height, W width.
"""

from torch import Tensor, nn

from tasks.parts.networks.blocks import ConvNorm, resize_to, scale_blocks, scale_channels, spatial_size
from tasks.parts.networks.branched_conv import BranchedConv

STEM_CHANNELS = 48
STAGES = ((48, 2), (96, 4), (192, 14))
"""Channels and blocks; the first block of each has stride 2."""
DECODER_CHANNELS = 64


class Block(nn.Sequential):
    """A branched convolution, then ReLU."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int = 1) -> None:
        super().__init__()
        self.add_module("conv", BranchedConv(in_channels, out_channels, stride=stride))
        self.add_module("relu", nn.ReLU(inplace=False))


class RepVGG(nn.Module):
    """Stem at stride 2, stages at strides 4, 8 and 16, their sum at stride 4, head."""

    feature_layer = "head"
    classifier_layer = "classifier"

    def __init__(self, num_classes: int, *, width: float, depth: float, image_channels: int = 3) -> None:
        super().__init__()
        self.image_channels = image_channels
        in_channels = scale_channels(STEM_CHANNELS, width)
        decoder_channels = scale_channels(DECODER_CHANNELS, width)
        self.stem = Block(image_channels, in_channels, stride=2)
        self.stages = nn.ModuleList()
        self.laterals = nn.ModuleList()
        for channels, num_blocks in STAGES:
            out_channels = scale_channels(channels, width)
            following = (
                Block(out_channels, out_channels) for _ in range(scale_blocks(num_blocks, depth) - 1)
            )
            self.stages.append(nn.Sequential(Block(in_channels, out_channels, stride=2), *following))
            self.laterals.append(ConvNorm(out_channels, decoder_channels, 1))
            in_channels = out_channels
        self.relu = nn.ReLU(inplace=False)
        self.head = Block(decoder_channels, decoder_channels)
        self.classifier = nn.Conv2d(decoder_channels, num_classes, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        maps_NCHW = self.stem(images_NCHW)
        views: list[Tensor] = []
        for stage, lateral in zip(self.stages, self.laterals, strict=True):
            maps_NCHW = stage(maps_NCHW)
            view_NCHW = lateral(maps_NCHW)
            views.append(resize_to(view_NCHW, spatial_size(views[0] if views else view_NCHW)))
        fine_NCHW, middle_NCHW, coarse_NCHW = views
        features_NCHW = self.head(self.relu(fine_NCHW + middle_NCHW + coarse_NCHW))
        return resize_to(self.classifier(features_NCHW), spatial_size(images_NCHW))
