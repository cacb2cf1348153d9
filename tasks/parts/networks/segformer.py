"""SegFormer: a hierarchical transformer whose attention reads a downsampled map, and a decoder of linear layers.

Xie et al., "SegFormer: Simple and Efficient Design for Semantic Segmentation with Transformers", 2021,
arXiv:2105.15203, table 6. The layers are those of the `transformers` package; nothing is downloaded.

With width 1, depth 1 and 6 classes (MiT-B0): 3,715,686 parameters, 105.6 MMACs at 64x64.

`size` b1 to b5 are the paper's larger ones. Width scales the channels of an attention head and those of the decoder;
the numbers of heads (1, 2, 5, 8) stay, as in the paper. Depth scales the blocks of each stage.

Tensor suffixes: N batch, A attention heads, T tokens, C channels, H height, W width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, SegformerConfig, SegformerForSemanticSegmentation
from transformers.models.segformer.modeling_segformer import SegformerDecodeHead

from tasks.parts.networks.attention import attend
from tasks.parts.networks.blocks import resize_to, scale_blocks, scale_channels, spatial_size

HEADS = (1, 2, 5, 8)
ATTENTION = "enginewright"
"""Name of `_attend` among the implementations of attention of `transformers`."""


def _attend(
    _layer: nn.Module,
    query_NATC: Tensor,
    key_NATC: Tensor,
    value_NATC: Tensor,
    *_mask: None,
    **_settings: Any,
) -> tuple[Tensor, None]:
    """Attend without mask and dropout; return [N, T, A, C], and no weights."""
    return attend(query_NATC, key_NATC, value_NATC).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, _attend)


@dataclass(frozen=True)
class Size:
    """A column of table 6."""

    head_channels: int
    """Channels of an attention head."""
    blocks: tuple[int, int, int, int]
    """Blocks of each stage."""
    decoder_channels: int
    """Channels to which the decoder projects each map."""


SIZES = {
    "b0": Size(32, (2, 2, 2, 2), 256),
    "b1": Size(64, (2, 2, 2, 2), 256),
    "b2": Size(64, (3, 4, 6, 3), 768),
    "b3": Size(64, (3, 4, 18, 3), 768),
    "b4": Size(64, (3, 8, 27, 3), 768),
    "b5": Size(64, (3, 6, 40, 3), 768),
}


class Encoder(nn.Module):
    """Run four stages and return the map of each, at strides 4, 8, 16 and 32."""

    def __init__(self, stages: nn.ModuleList) -> None:
        super().__init__()
        self.stages = stages

    def forward(self, images_NCHW: Tensor) -> list[Tensor]:
        maps_NCHW = [images_NCHW]
        for stage in self.stages:
            maps_NCHW.append(stage(maps_NCHW[-1]))
        return maps_NCHW[1:]


class Decoder(nn.Module):
    """Project each map to the same number of channels, resize all to the largest, fuse and classify."""

    def __init__(self, head: SegformerDecodeHead) -> None:
        super().__init__()
        self.linear_projections = head.linear_projections
        self.linear_fuse = head.linear_fuse
        self.batch_norm = head.batch_norm
        self.activation = head.activation
        self.dropout = head.dropout
        self.classifier = head.classifier

    def forward(self, maps_NCHW: Sequence[Tensor]) -> Tensor:
        size = spatial_size(maps_NCHW[0])
        projected_NCHW = []
        for stage_NCHW, project in zip(maps_NCHW, self.linear_projections, strict=True):
            tokens_NCT = project(stage_NCHW).transpose(1, 2)
            restored_NCHW = tokens_NCT.reshape(*tokens_NCT.shape[:2], *spatial_size(stage_NCHW))
            projected_NCHW.append(resize_to(restored_NCHW, size))
        fused_NCHW = self.batch_norm(self.linear_fuse(torch.cat(projected_NCHW[::-1], dim=1)))
        logits: Tensor = self.classifier(self.dropout(self.activation(fused_NCHW)))
        return logits


class SegFormer(nn.Module):
    """Encoder, decoder at stride 4, bilinear upsampling to the image. Layers keep the names of `transformers`."""

    feature_layer = "decode_head.activation"
    classifier_layer = "decode_head.classifier"

    def __init__(
        self,
        num_classes: int,
        *,
        width: float,
        depth: float,
        size: str = "b0",
        image_channels: int = 3,
    ) -> None:
        super().__init__()
        self.image_channels = image_channels
        table = SIZES[size]
        head_channels = scale_channels(table.head_channels, width)
        config = SegformerConfig(  # type: ignore[call-arg]  # keys of its base class
            hidden_sizes=[heads * head_channels for heads in HEADS],
            depths=[scale_blocks(blocks, depth) for blocks in table.blocks],
            decoder_hidden_size=table.decoder_channels * head_channels // table.head_channels,
            num_labels=num_classes,
            num_channels=image_channels,
            attn_implementation=ATTENTION,
        )
        parts = SegformerForSemanticSegmentation(config)
        self.segformer = Encoder(parts.segformer.stages)
        self.decode_head = Decoder(parts.decode_head)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        logits_NCHW = self.decode_head(self.segformer(images_NCHW))
        return resize_to(logits_NCHW, spatial_size(images_NCHW))
