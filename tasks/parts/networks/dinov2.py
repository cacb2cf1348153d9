"""DINOv2: a plain vision transformer for weights that were trained on very many images; meant as a teacher.

Oquab et al., "DINOv2: Learning Robust Visual Features without Supervision", 2023, arXiv:2304.07193, table 17.
The layers are those of the `transformers` package; nothing is downloaded.

With width 1, depth 1 and 6 classes (ViT-S/14): 22,499,590 parameters, 1462 MMACs at 64x64.

Width scales the number of attention heads (64 channels each), depth that of the blocks: width 2 is ViT-B/14,
width 2.67 with depth 2 ViT-L/14.

Patches are 14x14 pixels. The image is enlarged bilinearly so that each patch covers 8x8 pixels of it (64x64
becomes 112x112), and the position embeddings of the 37x37 patches of the paper are resized to that grid: any
size works, and the map before the head has stride 8.

Tensor suffixes: N batch, T tokens, C channels, H height, W width.
"""

from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Dinov2Config, Dinov2Model

from tasks.parts.networks.blocks import ConvNormRelu, resize_to, scale_blocks, scale_channels, spatial_size

HEADS = 6
HEAD_CHANNELS = 64
BLOCKS = 12
PATCH = 14
PATCHES_OF_TRAINING = 37
STRIDE = 8


class Backbone(nn.Module):
    """Encode image patches to a map of the same grid; the class token takes part and is dropped at the end."""

    def __init__(self, model: Dinov2Model) -> None:
        super().__init__()
        self.embeddings = model.embeddings
        self.encoder = model.encoder
        self.layernorm = model.layernorm

    def forward(self, images_NCHW: Tensor) -> Tensor:
        rows, columns = (side // PATCH for side in spatial_size(images_NCHW))
        patches_NTC = self.embeddings.patch_embeddings(images_NCHW)
        tokens_NTC = F.pad(
            patches_NTC, (0, 0, 1, 0)
        )  # a place for the class token, added below; constant in a graph
        positions_1TC = self.embeddings.interpolate_pos_encoding(tokens_NTC, *spatial_size(images_NCHW))
        tokens_NTC = tokens_NTC + (
            positions_1TC + F.pad(self.embeddings.cls_token, (0, 0, 0, rows * columns))
        )
        for layer in self.encoder.layer:
            tokens_NTC = layer(tokens_NTC)
        tokens_NTC = self.layernorm(tokens_NTC[:, 1:])
        maps_NCHW: Tensor = tokens_NTC.transpose(1, 2).reshape(-1, tokens_NTC.shape[2], rows, columns)
        return maps_NCHW


class DinoV2(nn.Module):
    """Backbone, one convolution, classifier. Layers of the backbone keep the names of `transformers`."""

    feature_layer = "head"
    classifier_layer = "classifier"

    def __init__(self, num_classes: int, *, width: float, depth: float, image_channels: int = 3) -> None:
        super().__init__()
        self.image_channels = image_channels
        heads = max(1, round(HEADS * width))
        config = Dinov2Config(  # type: ignore[call-arg]  # keys of its base class
            hidden_size=heads * HEAD_CHANNELS,
            num_attention_heads=heads,
            num_hidden_layers=scale_blocks(BLOCKS, depth),
            image_size=PATCHES_OF_TRAINING * PATCH,
            patch_size=PATCH,
            num_channels=image_channels,
            use_mask_token=False,
            attn_implementation="eager",
        )
        self.dinov2 = Backbone(Dinov2Model(config))
        self.head = ConvNormRelu(config.hidden_size, scale_channels(128, width))
        self.classifier = nn.Conv2d(scale_channels(128, width), num_classes, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        size = spatial_size(images_NCHW)
        height, width = (-(-side // STRIDE) * PATCH for side in size)
        maps_NCHW = self.dinov2(resize_to(images_NCHW, (height, width)))
        return resize_to(self.classifier(self.head(maps_NCHW)), size)
