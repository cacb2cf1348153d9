"""Small networks with the structures that quantization has to get right, and cards for their graphs."""

from collections.abc import Sequence

import numpy as np
import torch
from onnx import ModelProto
from torch import Tensor, nn
from torch.nn import functional as F

from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.onnx_graphs.export import export_graph
from tasks.parts.quantization.calibration import choose_range, collect_statistics
from tasks.parts.quantization.config import Calibrator
from tasks.parts.quantization.qdq import TensorRange, insert_qdq, quantizable_tensors

OP_TYPES = (
    "Conv",
    "Add",
    "Mul",
    "Concat",
    "AveragePool",
    "GlobalAveragePool",
    "MaxPool",
    "Resize",
    "Sigmoid",
)
SIZE = 32


def conv_norm(
    in_channels: int, out_channels: int, kernel: int = 3, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Convolution without bias, then BatchNorm."""
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels))


def upsample(maps_NCHW: Tensor) -> Tensor:
    """Double the size bilinearly."""
    return F.interpolate(maps_NCHW, scale_factor=2.0, mode="bilinear", align_corners=False)


class Straight(nn.Module):
    """Convolution, ReLU, depthwise convolution, bilinear resize."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_norm(3, 8, stride=2)
        self.depthwise = conv_norm(8, 8, groups=8)
        self.classifier = nn.Conv2d(8, 3, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        maps_NCHW = torch.relu(self.depthwise(torch.relu(self.stem(images_NCHW))))
        return F.interpolate(
            self.classifier(maps_NCHW), scale_factor=2.0, mode="bilinear", align_corners=False
        )


class FullSize(nn.Module):
    """A convolution at the size of the image gives the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_norm(3, 8)
        self.classifier = nn.Conv2d(8, 3, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        return self.classifier(torch.relu(self.stem(images_NCHW)))


class CeilPool(FullSize):
    """A pool whose last windows reach beyond the map, as torch's exporter writes it: count_include_pad is 1."""

    def forward(self, images_NCHW: Tensor) -> Tensor:
        maps_NCHW = F.avg_pool2d(torch.relu(self.stem(images_NCHW)), 3, 2, ceil_mode=True)
        return self.classifier(maps_NCHW)


class Tokens(nn.Module):
    """A patch embedding with LayerNorm, and a feed-forward block with a depthwise convolution, as in SegFormer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, 8, 4, 4)
        self.norm = nn.LayerNorm(8)
        self.first = nn.Linear(8, 16)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.second = nn.Linear(16, 3)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        tokens_NTC = self.first(self.norm(self.embedding(images_NCHW).flatten(2).transpose(1, 2)))
        maps_NCHW = self.depthwise(tokens_NTC.transpose(1, 2).unflatten(2, (SIZE // 4, SIZE // 4)))
        hidden_NTC = maps_NCHW.flatten(2).transpose(1, 2)
        gelu_NTC = hidden_NTC * (1 + torch.erf(hidden_NTC / 2**0.5)) / 2  # as older exporters write it
        tokens_NTC = self.second(gelu_NTC)
        return tokens_NTC.transpose(1, 2).unflatten(2, (SIZE // 4, SIZE // 4))


class Branched(nn.Module):
    """Residual addition, global mean, pooling, attention by Sigmoid and Mul, Concat, resize to a fixed size."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv_norm(3, 8, stride=2)
        self.block = nn.Sequential(conv_norm(8, 8), nn.ReLU(), conv_norm(8, 8))
        self.gate = nn.Conv2d(8, 8, 1)
        self.fuse = conv_norm(24, 8, 1)
        self.classifier = nn.Conv2d(8, 3, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        stem_NCHW = torch.relu(self.stem(images_NCHW))
        maps_NCHW = torch.relu(stem_NCHW + self.block(stem_NCHW))
        gate_NC11 = torch.sigmoid(self.gate(maps_NCHW.mean(dim=(2, 3), keepdim=True)))
        pooled_NCHW = F.interpolate(F.avg_pool2d(maps_NCHW, 4, 4), size=(16, 16), mode="bilinear")
        joined_NCHW = torch.cat([maps_NCHW * gate_NC11, pooled_NCHW, stem_NCHW], dim=1)
        logits_NCHW = self.classifier(torch.relu(self.fuse(joined_NCHW)))
        return F.interpolate(logits_NCHW, size=(SIZE, SIZE), mode="bilinear", align_corners=False)


class Shared(Straight):
    """One layer called twice, so that two convolutions of the graph read one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Conv2d(8, 8, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        maps_NCHW = torch.relu(self.twice(torch.relu(self.stem(images_NCHW))))
        return upsample(self.classifier(torch.relu(self.twice(maps_NCHW))))


class Spoilt(Straight):
    """Its first BatchNorm must not be folded: the convolution before it has another reader."""

    def forward(self, images_NCHW: Tensor) -> Tensor:
        before_NCHW = self.stem[0](images_NCHW)
        maps_NCHW = torch.relu(self.depthwise(self.stem[1](before_NCHW) + before_NCHW))
        return F.interpolate(
            self.classifier(maps_NCHW), scale_factor=2.0, mode="bilinear", align_corners=False
        )


def make(network_type: type[nn.Module], seed: int = 0) -> nn.Module:
    """Return a network in eval mode whose BatchNorms have seen data."""
    torch.manual_seed(seed)
    network = network_type().train()
    with torch.no_grad():
        for _ in range(20):
            network(torch.randn(4, 3, SIZE, SIZE))
    return network.eval()


def card() -> ModelCard:
    """Return a card for 32x32 images of three classes."""
    network = NetworkConfig(name=NetworkName.fast_scnn, width=0.25, depth=0.34, depthwise=False)
    return ModelCard(network, ("background", "zero", "one"), (0.5, 0.5, 0.5), (0.25, 0.25, 0.25), SIZE, SIZE)


def images(count: int, seed: int = 1) -> Tensor:
    """Return normalised random images_NCHW."""
    return torch.randn(count, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


def ranges_of(graph: ModelProto, images_NCHW: np.ndarray, op_types: Sequence[str]) -> dict[str, TensorRange]:
    """Return the MinMax range of each tensor that can be quantized."""
    names = quantizable_tensors(graph, op_types)
    statistics = collect_statistics(graph, lambda: [images_NCHW], names)
    return {
        name: choose_range(found, Calibrator.minmax, percentile=100.0) for name, found in statistics.items()
    }


def quantized(network_type: type, op_types: tuple[str, ...]) -> tuple[ModelProto, ModelProto, np.ndarray]:
    """Return float graph, its U8S8 twin with MinMax ranges, and the images that these come from."""
    graph = export_graph(make(network_type), card(), height=SIZE, width=SIZE, opset=20)
    images_NCHW = images(8).numpy()
    ranges = ranges_of(graph, images_NCHW, op_types)
    return graph, insert_qdq(graph, ranges, op_types=op_types), images_NCHW
