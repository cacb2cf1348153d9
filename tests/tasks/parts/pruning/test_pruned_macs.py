"""MACs of calls, not of layers: against counts by hand and by torch's own counter."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tasks.parts.pruning.macs import measure_convs, total_macs

SIZE = (16, 24)


class Pyramid(nn.Module):
    """One head for two levels, and a transposed convolution."""

    image_channels = 3

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.head = nn.Conv2d(8, 6, 3, padding=1)
        self.up = nn.ConvTranspose2d(6, 4, 4, stride=2, padding=1)
        self.depthwise_up = nn.ConvTranspose2d(4, 4, 2, stride=2, groups=4)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        fine = F.relu(self.stem(images_NCHW))
        coarse = self.head(F.max_pool2d(fine, 2))
        fused = self.head(fine) + F.interpolate(coarse, scale_factor=2)
        out_NCHW: Tensor = self.depthwise_up(self.up(fused))
        return out_NCHW


class Attention(nn.Module):
    """A linear layer on [N, H, W, C], attention of torch's module and function, and a weight of its own."""

    image_channels = 3

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.own = nn.Parameter(torch.zeros(5, 8, 1, 1))

    def forward(self, images_NCHW: Tensor) -> Tensor:
        tokens = self.embed(images_NCHW.permute(0, 2, 3, 1)).flatten(1, 2)
        tokens = self.attention(tokens, tokens, tokens)[0]
        tokens = F.scaled_dot_product_attention(tokens[:, None], tokens[:, None], tokens[:, None])[:, 0]
        return F.conv2d(tokens.transpose(1, 2).unflatten(2, images_NCHW.shape[2:]), self.own)


def counted_by_torch(network: nn.Module) -> int:
    """Count without the fused kernels, which torch's counter does not know on a CPU."""
    network.train()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        network(torch.zeros(1, 3, *SIZE))
    network.eval()
    return counter.get_total_flops() // 2


def test_a_shared_head_counts_at_each_level_and_a_transposed_convolution_at_its_inputs_a7() -> None:
    network = Pyramid().eval()
    sizes = measure_convs(network, SIZE)
    assert {name: size.macs for name, size in sizes.items()} == {
        "stem": 3 * 8 * 9 * 8 * 12,
        "head": 8 * 6 * 9 * (8 * 12 + 4 * 6),
        "up": 6 * 4 * 16 * 8 * 12,
        "depthwise_up": 4 * 4 * 16 * 24,
    }
    assert total_macs(sizes) == counted_by_torch(network)


def test_products_of_attention_and_of_weights_without_a_layer_count_a7() -> None:
    network, tokens = Attention().eval(), 16 * 24
    sizes = measure_convs(network, SIZE)
    assert sizes["embed"].macs == 3 * 8 * tokens
    assert sizes["attention (products)"].macs == 4 * 8 * 8 * tokens + 2 * 8 * tokens**2
    assert sizes["network (products)"].macs == 2 * 8 * tokens**2 + 5 * 8 * tokens
    assert [name for name, size in sizes.items() if size.has_channels] == ["embed"]
    assert total_macs(sizes) == counted_by_torch(network)


class NamedInputs(nn.Module):
    """Layers that are called with their input by its name."""

    image_channels = 3

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        out_NCHW: Tensor = self.conv(input=images_NCHW)
        return out_NCHW


def test_layers_may_be_called_by_the_names_of_their_inputs_a7() -> None:
    assert total_macs(measure_convs(NamedInputs(), SIZE)) == 16 * 24 * 9 * 3 * 4
