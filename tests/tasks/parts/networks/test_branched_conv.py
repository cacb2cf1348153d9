"""Branched convolutions: one convolution computes the same, for plain and depthwise ones, also after pruning."""

import pytest
import torch
from torch import nn

from tasks.parts.networks.branched_conv import BranchedConv, merge_branches


def make(in_channels: int, out_channels: int, *, stride: int, groups: int) -> BranchedConv:
    torch.manual_seed(0)
    conv = BranchedConv(in_channels, out_channels, stride=stride, groups=groups)
    for norm in conv.modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None and norm.running_var is not None
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias)
            nn.init.normal_(norm.running_mean)
            nn.init.uniform_(norm.running_var, 0.5, 1.5)
    return conv.eval()


@pytest.mark.parametrize(
    ("in_channels", "out_channels", "stride", "groups"),
    [(8, 8, 1, 1), (8, 16, 1, 1), (8, 8, 2, 1), (8, 8, 1, 8), (8, 8, 1, 2)],
)
def test_merged_convolution_computes_the_sum_of_the_branches(
    in_channels: int, out_channels: int, stride: int, groups: int
) -> None:
    conv = make(in_channels, out_channels, stride=stride, groups=groups)
    assert (conv.identity is not None) == (in_channels == out_channels and stride == 1)
    merged = conv.merged()
    maps_NCHW = torch.randn(2, in_channels, 9, 7)
    with torch.no_grad():
        torch.testing.assert_close(merged(maps_NCHW), conv(maps_NCHW), atol=1e-5, rtol=1e-5)
    assert all(parameter.requires_grad for parameter in merged.parameters())


def test_every_branch_counts() -> None:
    conv = make(8, 8, stride=1, groups=1)
    maps_NCHW = torch.randn(1, 8, 5, 5)
    for branch in ("square.norm", "point.norm", "identity"):
        norm = conv.get_submodule(branch)
        before = norm.weight.detach().clone()
        with torch.no_grad():
            whole_NCHW = conv.merged()(maps_NCHW)
            norm.weight.zero_()
            assert (conv.merged()(maps_NCHW) - whole_NCHW).abs().max() > 0.1
            norm.weight.copy_(before)


def test_merging_replaces_the_module_under_its_name() -> None:
    network = nn.Sequential(nn.Sequential(make(8, 8, stride=1, groups=1), nn.ReLU()), nn.Conv2d(8, 2, 1))
    merge_branches(network)
    assert [name for name, _ in network.named_parameters()] == [
        "0.0.weight",
        "0.0.bias",
        "1.weight",
        "1.bias",
    ]


def test_separable_form_has_the_same_shape_and_merges_its_filter() -> None:
    conv = BranchedConv(8, 16, stride=2)
    separable = conv.separable().eval()
    maps_NCHW = torch.randn(1, 8, 9, 9)
    assert separable(maps_NCHW).shape == conv(maps_NCHW).shape
    merge_branches(separable)
    filters = [m for m in separable.modules() if isinstance(m, nn.Conv2d)]
    assert [(m.kernel_size, m.groups) for m in filters] == [((3, 3), 8), ((1, 1), 1)]
