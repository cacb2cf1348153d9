"""MobileViT against the implementation in the package `transformers`, of which it shares no code."""

import re

import torch
from torch import Tensor, nn
from transformers import MobileViTConfig, MobileViTForSemanticSegmentation

from tasks.parts.networks.build import build_network
from tasks.parts.networks.config import NetworkConfig, NetworkName

NUM_CLASSES = 6
NAMES = (
    (r"^mobilevit\.conv_stem\.", "stem."),
    (r"^mobilevit\.encoder\.layer\.0\.layer\.0\.", "encoder.0."),
    (r"^mobilevit\.encoder\.layer\.1\.layer\.(\d)\.", lambda found: f"encoder.{int(found[1]) + 1}."),
    (
        r"^mobilevit\.encoder\.layer\.([234])\.downsampling_layer\.",
        lambda found: f"encoder.{2 * int(found[1])}.",
    ),
    (r"^mobilevit\.encoder\.layer\.([234])\.", lambda found: f"encoder.{2 * int(found[1]) + 1}."),
    (r"expand_1x1\.", "expand."),
    (r"conv_3x3\.", "depthwise."),
    (r"reduce_1x1\.", "project."),
    (r"conv_kxk\.", "local."),
    (r"(encoder\.\d\.)conv_1x1\.convolution", r"\1widen"),
    (r"conv_projection\.", "narrow."),
    (r"fusion\.", "fuse."),
    (r"transformer\.layer\.", "layers."),
    (r"attention\.attention\.", "attention."),
    (r"attention\.output\.dense", "attention.out"),
    (r"intermediate\.dense", "mlp.expand"),
    (r"(layers\.\d\.)output\.dense", r"\1mlp.project"),
    (r"layernorm_before", "attention_norm"),
    (r"layernorm_after", "mlp_norm"),
    (r"layernorm", "norm"),
    (r"^segmentation_head\.aspp\.convs\.0\.", "head.point."),
    (r"^segmentation_head\.aspp\.convs\.([123])\.", lambda found: f"head.atrous.{int(found[1]) - 1}."),
    (r"^segmentation_head\.aspp\.convs\.4\.conv_1x1\.convolution", "head.image.0"),
    (r"^segmentation_head\.aspp\.project\.", "head.fuse."),
    (r"^segmentation_head\.classifier\.convolution", "classifier"),
    (r"\.convolution\.", ".conv."),
    (r"\.normalization\.", ".norm."),
)
POOLED_NORM = "segmentation_head.aspp.convs.4.conv_1x1.normalization"


def published() -> nn.Module:
    """MobileViT-S with DeepLabv3, with random weights and statistics."""
    torch.manual_seed(0)
    config = MobileViTConfig(output_stride=16, atrous_rates=[1, 2, 3], num_labels=NUM_CLASSES)  # type: ignore[call-arg]
    network = MobileViTForSemanticSegmentation(config).eval()
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None and norm.running_var is not None
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.running_mean, std=0.1)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
    return network


def renamed(network: nn.Module) -> dict[str, Tensor]:
    """Weights by our names; the BatchNorm of the pooled branch is folded into its convolution, which has a bias."""
    tensors = {}
    for name, tensor in network.state_dict().items():
        if name.startswith(POOLED_NORM):
            continue
        for pattern, replacement in NAMES:
            name = re.sub(pattern, replacement, name)
        tensors[name] = tensor
    norm = network.get_submodule(POOLED_NORM)
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_mean is not None and norm.running_var is not None
    scale_O = norm.weight / (norm.running_var + norm.eps).sqrt()
    tensors["head.image.0.weight"] = tensors["head.image.0.weight"] * scale_O[:, None, None, None]
    tensors["head.image.0.bias"] = norm.bias - norm.running_mean * scale_O
    return tensors


def test_weights_of_transformers_give_the_same_logits() -> None:
    reference = published()
    network = build_network(NetworkConfig(NetworkName.mobilevit, 1.0, 1.0, False), NUM_CLASSES).eval()
    network.load_state_dict(renamed(reference))
    for size in (
        (64, 64),
        (96, 160),
        (80, 80),
    ):  # the last one leaves an odd map, which is resized for attention
        images_NCHW = torch.randn(2, 3, *size)
        with torch.no_grad():
            expected_NCHW = nn.functional.interpolate(
                reference(images_NCHW).logits, size=size, mode="bilinear", align_corners=False
            )
            found_NCHW = network(images_NCHW)
        assert expected_NCHW.std() > 1e-3
        torch.testing.assert_close(
            found_NCHW, expected_NCHW, atol=1e-4 * expected_NCHW.std().item(), rtol=1e-4
        )


def test_parameters_are_those_of_the_published_network() -> None:
    """arXiv:2110.02178, results on PASCAL VOC: DeepLabv3 with MobileViT-S and 21 classes has 6.4 million."""
    network = build_network(NetworkConfig(NetworkName.mobilevit, 1.0, 1.0, False), 21)
    assert round(sum(parameter.numel() for parameter in network.parameters()) / 1e6, 1) == 6.4
