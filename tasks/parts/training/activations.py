"""What becomes of activations between the forward and the backward pass: recomputed, or kept by the CPU."""

import contextlib
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tasks.core.errors import ConfigError
from tasks.parts.networks.foreign import own_modules


def save_activation_memory(network: nn.Module, checkpointed: Sequence[str], offloaded: Sequence[str]) -> None:
    """Recompute the activations of some modules, and move those of others to the CPU; gradients stay the same.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv:1604.06174. Names are patterns; of
    modules that contain each other, the outermost counts. Modules without a tensor on a GPU are not offloaded.

    Raises ConfigError for a pattern that fits no module with parameters.
    """
    for module in fitting_modules(network, offloaded, "activation_offload"):
        _offload(module)
    for module in fitting_modules(network, checkpointed, "activation_checkpoints"):
        _recompute(module)


def fitting_modules(network: nn.Module, patterns: Sequence[str], key: str) -> Iterator[nn.Module]:
    """Yield the outermost modules whose names fit; those of a list, which computes nothing itself, stand for it.

    Raises ConfigError for a pattern of this key that fits no module with parameters.
    """
    modules = {
        name: module
        for name, module in own_modules(network).named_modules()
        if name and any(True for _ in module.parameters())
    }
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in modules):
            raise ConfigError(
                f"trainer.{key} names {pattern!r}, which fits no module with parameters. Choose from: "
                f"{', '.join(name for name in modules if '.' not in name)}, or modules inside of them."
            )
    outermost, lists = "", set()
    for name, module in modules.items():
        if outermost and name.startswith(f"{outermost}."):
            continue
        is_of_list = name.rpartition(".")[0] in lists
        if not is_of_list and not any(fnmatchcase(name, pattern) for pattern in patterns):
            continue
        if type(module).forward is nn.Module.forward:  # of a ModuleList, which nobody calls
            lists.add(name)
        else:
            outermost = name
            yield module


def _recompute(module: nn.Module) -> None:
    plain_forward = module.forward

    def forward(*inputs: Any, **named: Any) -> Any:
        if not (torch.is_grad_enabled() and module.training):
            return plain_forward(*inputs, **named)
        contexts = (contextlib.nullcontext(), _statistics_at_rest(module))
        return checkpoint(plain_forward, *inputs, use_reentrant=False, context_fn=lambda: contexts, **named)

    module.forward = forward


@contextlib.contextmanager
def _statistics_at_rest(module: nn.Module) -> Iterator[None]:
    """Keep BatchNorm from counting a batch again that it has already seen."""
    counting = [
        (layer, layer.momentum, layer.num_batches_tracked)
        for layer in module.modules()
        if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training and layer.track_running_stats
    ]
    for layer, _, count in counting:
        layer.momentum = 0.0
        layer.num_batches_tracked = None if count is None else count.clone()
    try:
        yield
    finally:
        for layer, momentum, count in counting:
            layer.momentum, layer.num_batches_tracked = momentum, count


def _offload(module: nn.Module) -> None:
    plain_forward = module.forward

    def forward(*inputs: Any, **named: Any) -> Any:
        is_on_gpu = any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs)
        if not (is_on_gpu and torch.is_grad_enabled() and module.training):
            return plain_forward(*inputs, **named)
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return plain_forward(*inputs, **named)

    module.forward = forward
