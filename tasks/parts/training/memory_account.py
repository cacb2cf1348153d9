"""What a training keeps in memory, by its purpose. N images, C channels, H rows, W columns."""

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn

from tasks.parts.training.activations import fitting_modules
from tasks.parts.training.config import Optimizer, Precision, TrainerConfig
from tasks.parts.training.module import Batch, chosen_memory_format
from tasks.parts.training.optimization import parameter_groups, rest_frozen_layers

_AUTOCAST = {Precision.bf16_mixed: torch.bfloat16, Precision.fp16_mixed: torch.float16}


@dataclass(frozen=True)
class MemoryAccount:
    """Bytes that a training keeps on one device.

    Not counted: the largest temporary of a kernel, such as the gradient of one map, what the allocator leaves unused
    between tensors, the libraries, and the buckets of ddp.
    """

    weight_bytes: int
    """Weights and buffers of network and objective, such as the statistics of BatchNorm."""
    gradient_bytes: int
    """Gradients of the weights that are trained."""
    optimizer_bytes: int
    """Two moments of each trained weight for AdamW, one for SGD with momentum; not its step counters."""
    average_bytes: int
    """The moving average of weights and buffers; 0 without trainer.ema_decay."""
    activation_bytes: int
    """What the forward pass of a batch keeps for the backward pass; grows with the batch."""
    recomputed_bytes: int
    """The most that one of the checkpointed modules keeps once the backward pass computes it again."""

    @property
    def total_bytes(self) -> int:
        """Sum of all parts."""
        constant = self.weight_bytes + self.gradient_bytes + self.optimizer_bytes + self.average_bytes
        return constant + self.activation_bytes + self.recomputed_bytes


def account_memory(
    network: nn.Module, objective: nn.Module, batch: Batch, config: TrainerConfig
) -> MemoryAccount:
    """Count the bytes that training on such batches keeps, for a network as it was built.

    Runs one forward pass of a copy without its activation checkpoints, and needs the memory of that; nothing of the
    network changes. Counts no trainer.activation_offload, whose maps leave the memory of a GPU.

    Raises ConfigError for names of layers or modules that the network does not have.
    """
    network, objective = copy.deepcopy((network, objective))
    network.train()
    groups = parameter_groups(network, objective, config)
    rest_frozen_layers(network, config.layer_rates)
    memory_format = chosen_memory_format(network, config.memory_format)
    network.to(memory_format=memory_format)  # type: ignore[call-overload]
    batch = batch._replace(images_NCHW=batch.images_NCHW.contiguous(memory_format=memory_format))
    held = [*network.parameters(), *network.buffers(), *objective.parameters(), *objective.buffers()]
    saved = _SavedStorages({tensor.untyped_storage().data_ptr() for tensor in held})
    for module in fitting_modules(network, config.activation_checkpoints, "activation_checkpoints"):
        saved.watch(module)
    _run_forward(network, objective, batch, config.precision, saved)
    trained = [weight for group in groups for weight in group["params"] if weight.requires_grad]
    gradient_bytes = _bytes(trained)
    return MemoryAccount(
        weight_bytes=_bytes(held),
        gradient_bytes=gradient_bytes,
        optimizer_bytes=_num_moments(config) * gradient_bytes,
        average_bytes=_bytes(held) if config.ema_decay else 0,
        activation_bytes=saved.kept_bytes,
        recomputed_bytes=saved.recomputed_bytes,
    )


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _num_moments(config: TrainerConfig) -> int:
    if config.optimizer is Optimizer.adamw:
        return 2
    return 1 if config.momentum else 0


def _run_forward(
    network: nn.Module, objective: nn.Module, batch: Batch, precision: Precision, saved: "_SavedStorages"
) -> None:
    device = batch.images_NCHW.device
    numbers = (
        torch.autocast(device.type, _AUTOCAST[precision])
        if precision in _AUTOCAST
        else contextlib.nullcontext()
    )
    random = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with random, numbers, torch.autograd.graph.saved_tensors_hooks(saved.add, lambda tensor: tensor):
        objective(network, batch)


def _tensors_in(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_in(item)


class _SavedStorages:
    """Storages that autograd saves, each counted once; those of weights and buffers are left out.

    A checkpointed module saves its inputs alone, and what it saves in a plain pass is what it computes again.
    """

    def __init__(self, left_out: set[int]) -> None:
        self._left_out = left_out
        self._kept: dict[int, UntypedStorage] = {}
        self._inside: list[dict[int, UntypedStorage]] = []
        """Of each call of a checkpointed module."""
        self._current = self._kept

    @property
    def kept_bytes(self) -> int:
        """What stays from the forward to the backward pass."""
        return sum(storage.nbytes() for storage in self._kept.values())

    @property
    def recomputed_bytes(self) -> int:
        """What the largest call of a checkpointed module saves and nothing else keeps."""
        return max(
            (
                sum(storage.nbytes() for address, storage in call.items() if address not in self._kept)
                for call in self._inside
            ),
            default=0,
        )

    def watch(self, module: nn.Module) -> None:
        """Count what this module saves as computed again."""
        module.register_forward_pre_hook(self._enter, with_kwargs=True)
        module.register_forward_hook(self._leave)

    def add(self, tensor: Tensor) -> Tensor:
        """Count a tensor that autograd saves, and return it."""
        storage = tensor.untyped_storage()
        # Storages are held, so that no later one gets the address of an earlier one.
        if storage.data_ptr() not in self._left_out:
            self._current[storage.data_ptr()] = storage
        return tensor

    def _enter(self, _: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        for tensor in _tensors_in((inputs, named)):
            self.add(tensor)
        self._inside.append({})
        self._current = self._inside[-1]

    def _leave(self, *_: Any) -> None:
        self._current = self._kept
