"""Fold BatchNorm and the branches of training into convolutions, for export and for compilers."""

import copy
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.core.errors import ArtifactError
from tasks.parts.networks.branched_conv import merge_branches


def check_finite(model: nn.Module) -> None:
    """Raise ArtifactError if a weight tensor holds NaN or infinite values."""
    broken = [
        name
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
    ]
    if broken:
        raise ArtifactError(
            f"{len(broken)} weight tensors hold NaN or infinite values (first: '{broken[0]}'), expected "
            "finite numbers. Train again with a lower learning rate, or take an earlier checkpoint."
        )


def fold_batchnorm(model: nn.Module, example_NCHW: Tensor) -> nn.Module:
    """Return a copy in eval mode in which each BatchNorm that is the only reader of a convolution is folded into it.

    Before that, branched convolutions become single ones of the same name. The pairs are found by observing one
    forward pass, without naming rules or traceable code. Folded BatchNorms become Identity, so module names stay.
    """
    folded = copy.deepcopy(model).eval()
    merge_branches(folded)
    for conv_name, norm_name in _conv_norm_pairs(folded, example_NCHW):
        conv, norm = folded.get_submodule(conv_name), folded.get_submodule(norm_name)
        assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
        fused = fuse_conv_bn_eval(conv, norm).requires_grad_()  # its new bias would not be trained otherwise
        folded.set_submodule(conv_name, fused)
        folded.set_submodule(norm_name, nn.Identity())
    return folded


class _UseCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts how often each tensor is read; keeps all tensors alive so that their ids stay unique."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: Counter[int] = Counter()
        self._alive: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        self.uses.update(id(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        result = func(*args, **kwargs)
        self._alive.append((leaves, result))
        return result


def _conv_norm_pairs(model: nn.Module, example_NCHW: Tensor) -> list[tuple[str, str]]:
    made_by: dict[int, str] = {}
    read_by: dict[str, int] = {}
    calls: Counter[str] = Counter()
    handles = []

    def after_conv(name: str, output: Tensor) -> None:
        calls[name] += 1
        made_by[id(output)] = name

    def before_norm(name: str, inputs: tuple[Tensor, ...]) -> None:
        calls[name] += 1
        read_by[name] = id(inputs[0])

    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            handles.append(module.register_forward_hook(lambda _m, _i, y, name=name: after_conv(name, y)))
        elif isinstance(module, nn.BatchNorm2d) and module.track_running_stats:
            handles.append(module.register_forward_pre_hook(lambda _m, x, name=name: before_norm(name, x)))
    counter = _UseCounter()
    with torch.no_grad(), counter:
        model(example_NCHW)
    for handle in handles:
        handle.remove()
    return [
        (made_by[tensor_id], norm)
        for norm, tensor_id in read_by.items()
        if tensor_id in made_by
        and counter.uses[tensor_id] == 1
        and calls[norm] == 1
        and calls[made_by[tensor_id]] == 1
    ]
