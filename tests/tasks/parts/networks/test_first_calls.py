"""No function of MKL is called by several threads before it was called by one."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.parts.networks.build import build_network
from tasks.parts.networks.config import NetworkConfig, NetworkName


class FirstSizes(TorchDispatchMode):
    """Notes how many elements each function got in its first call on the CPU, by name and type."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[tuple[str, torch.dtype], int] = {}

    def __torch_dispatch__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].device.type == "cpu":
            self.sizes.setdefault((function.overloadpacket.__name__, args[0].dtype), args[0].numel())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", "meta"])  # `load_checkpoint` builds on meta
def test_each_function_gets_a_single_element_before_a_network_exists(device: str) -> None:
    network = NetworkConfig(name=NetworkName.fast_scnn, width=0.5, depth=1, depthwise=False)
    with FirstSizes() as seen, torch.device(device):
        build_network(network, num_classes=3)
    sizes = {key: seen.sizes.get(key) for name in ("exp", "log", "sqrt", "tanh", "erf") for key in both(name)}
    assert Counter(sizes.values()) == {1: len(sizes)}, sizes


def both(name: str) -> list[tuple[str, torch.dtype]]:
    return [(name, torch.float32), (name, torch.float64)]
