"""Which losses have the same bits in AVX2 and AVX-512: why `distill` gives other weights where `train` does not."""

import functools
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.conftest import REPOSITORY

_SCRIPT = """
import hashlib, json, torch
from torch.nn import functional as F
from tasks.parts.training.losses import channel_wise_loss, segmentation_loss, soft_target_loss

torch.manual_seed(0)
torch.set_num_threads(1)
logits, teacher = torch.randn(2, 11, 48, 64) * 4, torch.randn(2, 11, 48, 64) * 4
masks, weights = torch.randint(0, 11, (2, 48, 64)), torch.rand(11) + 0.5
losses = {
    "softmax over classes": lambda x: F.softmax(x, 1),
    "log_softmax over classes": lambda x: F.log_softmax(x, 1),
    "segmentation_loss": lambda x: segmentation_loss(x, masks, weights),
    "soft_target_loss": lambda x: soft_target_loss(x, teacher, 4.0),
    "softmax over pixels": lambda x: F.softmax(x.flatten(2), 2),
    "log_softmax over pixels": lambda x: F.log_softmax(x.flatten(2), 2),
    "channel_wise_loss": lambda x: channel_wise_loss(x, teacher, 4.0),
}

def bits(loss):
    leaf = logits.clone().requires_grad_()
    value = loss(leaf)
    (value if value.dim() == 0 else (value * teacher.reshape(value.shape)).sum()).backward()
    return [hashlib.md5(part.detach().numpy().tobytes()).hexdigest() for part in (value, leaf.grad)]

found = {name: bits(loss) for name, loss in losses.items()}
print(json.dumps([torch.backends.cpu.get_cpu_capability(), found]))
"""


@functools.cache
def compute(capability: str) -> dict[str, list[str]]:
    """Return the digests of each loss and its gradient, with torch's kernels for a CPU of some capability."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "ATEN_CPU_CAPABILITY": capability}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT], env=environment, capture_output=True, text=True, check=True
    )
    used, found = json.loads(done.stdout)
    assert used.lower() == capability
    return dict(found)


pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason=f"torch computes in {torch.backends.cpu.get_cpu_capability()} on this CPU, and AVX-512 is compared",
)


@pytest.mark.parametrize(
    "name",
    ["softmax over classes", "log_softmax over classes", "segmentation_loss", "soft_target_loss"],
)
def test_softmax_over_classes_has_the_same_bits_on_both(name: str) -> None:
    assert compute("avx2")[name] == compute("avx512")[name]


@pytest.mark.parametrize("name", ["softmax over pixels", "log_softmax over pixels", "channel_wise_loss"])
def test_softmax_over_pixels_has_other_bits(name: str) -> None:
    value, gradient = zip(compute("avx2")[name], compute("avx512")[name], strict=True)
    assert value[0] != value[1] and gradient[0] != gradient[1]
