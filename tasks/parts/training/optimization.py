"""Which weights are trained how fast: groups of parameters, their schedule, and the average of their values."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from tasks.core.errors import ConfigError
from tasks.parts.networks.foreign import own_modules
from tasks.parts.training.config import Schedule, TrainerConfig

_POLY_POWER = 0.9

_POSITION_OR_TOKEN = re.compile(
    r"(^|[._])(pos|positions?|positional|rel|relative)_(pos_|position_)?(embed|emb|encoding|bias|[hw]\b)"
    r"|(^|[._])(cls|class|mask|dist|distillation|reg|register|storage)_tokens?\b"
)
"""Names of position embeddings, tables of relative positions and learned tokens in the networks of timm,
`transformers` and torchvision."""


def rate_of(name: str, layer_rates: Mapping[str, float]) -> float:
    """Return the factor on the learning rate of a module or parameter: that of the longest name it begins with."""
    fitting = [key for key in layer_rates if name == key or name.startswith(f"{key}.")]
    return layer_rates[max(fitting, key=len)] if fitting else 1.0


def is_decayed(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay may shrink a parameter: weights of layers alone.

    Biases, scales of norms and other vectors are left out, and so are position embeddings, tables of relative
    positions and learned tokens: towards 0 they lose what they say, and no layer becomes simpler. So do ViT, Swin
    and ConvNeXt (Dosovitskiy et al., arXiv:2010.11929; Liu et al., arXiv:2103.14030 and arXiv:2201.03545).
    """
    return parameter.ndim > 1 and not _POSITION_OR_TOKEN.search(name)


def parameter_groups(network: nn.Module, objective: nn.Module, config: TrainerConfig) -> list[dict[str, Any]]:
    """Group what is trained by its learning rate, the full rate first, and freeze what has the rate 0.

    Of each rate, parameters that do not decay (`is_decayed`) are a group of their own, with the weight decay 0. The
    objective's own parameters, such as the adapter of a hint, have the full rate.

    Raises ConfigError for a name that no parameter begins with, or when nothing is left to be trained.
    """
    rates, own = config.layer_rates, own_modules(network)
    names = [name for name, _ in own.named_parameters()]
    for key in rates:
        if not any(name.startswith(f"{key}.") for name in names):
            children = ", ".join(name for name, _ in own.named_children())
            raise ConfigError(
                f"trainer.layer_rates names {key!r}, and no parameter's name begins with it. Choose from: "
                f"{children}, or a module inside of them."
            )
    groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
    for name, parameter in own.named_parameters():
        if (rate := rate_of(name, rates)) == 0:
            parameter.requires_grad_(False)
        else:
            groups.setdefault((rate, is_decayed(name, parameter)), []).append(parameter)
    if not groups:
        raise ConfigError("trainer.layer_rates is 0 for the whole network. Leave a part of it to be trained.")
    for name, parameter in objective.named_parameters():
        groups.setdefault((1.0, is_decayed(name, parameter)), []).append(parameter)
    full_rate_first = sorted(groups, key=lambda group: (group[0] != 1, not group[1]))
    return [
        {
            "params": groups[rate, decays],
            "lr": config.learning_rate * rate,
            "weight_decay": config.weight_decay if decays else 0.0,
        }
        for rate, decays in full_rate_first
    ]


def rest_frozen_layers(network: nn.Module, layer_rates: Mapping[str, float]) -> None:
    """Keep layers that have the rate 0 from counting statistics; others stay in the mode that they are in."""
    for name, layer in own_modules(network).named_modules() if layer_rates else ():
        if rate_of(name, layer_rates) == 0:
            layer.training = False


def build_schedule(optimizer: torch.optim.Optimizer, config: TrainerConfig, num_steps: int) -> LRScheduler:
    """Return the schedule of the learning rates over `num_steps` optimizer steps."""
    if config.schedule is Schedule.one_cycle:
        return OneCycleLR(
            optimizer,
            max_lr=[group["lr"] for group in optimizer.param_groups],
            total_steps=num_steps + 1,
            pct_start=config.warm_up_share,
            cycle_momentum=False,
        )
    num_rising = max(1, round(config.warm_up_share * num_steps))

    def factor(step: int) -> float:
        if step < num_rising:
            return (step + 1) / num_rising
        share = min(1.0, (step - num_rising) / max(1, num_steps - num_rising))
        if config.schedule is Schedule.cosine:
            return 0.5 * (1 + math.cos(math.pi * share))
        return float((1 - share) ** _POLY_POWER)

    return LambdaLR(optimizer, factor)


def moving_average(decay: float) -> Callable[[Tensor, Tensor, Tensor | int], Tensor]:
    """Return the step of an exponential moving average for ``torch.optim.swa_utils.AveragedModel``.

    The decay of step n is min(decay, (1 + n) / (10 + n)), as in TensorFlow's ExponentialMovingAverage, so that the
    average soon forgets the initial weights.
    """

    def average(mean: Tensor, value: Tensor, step: Tensor | int) -> Tensor:
        if not mean.is_floating_point():
            return value
        number = float(step)
        return mean.lerp(value, 1 - min(decay, (1 + number) / (10 + number)))

    return average
