"""Learning from a frozen teacher: which losses, and how strong."""

import math
from dataclasses import dataclass

from tasks.core.errors import ConfigError


@dataclass(frozen=True)
class DistillationConfig:
    """Weights of the terms of the loss; a term of weight 0 is not computed."""

    label_weight: float
    """Cross-entropy with the labels."""
    soft_target_weight: float
    """Temperature-softened class probabilities per pixel (Hinton et al., 2015)."""
    channel_wise_weight: float
    """Temperature-softened channel maps of the logits, CWD (Shu et al., 2021)."""
    hint_weight: float
    """Feature map before the classifier through a trained 1x1 adapter (Romero et al., 2015)."""
    temperature: float
    """Softens both distributions; higher: the teacher's small probabilities count more."""

    def __post_init__(self) -> None:
        weights = {
            "label_weight": self.label_weight,
            "soft_target_weight": self.soft_target_weight,
            "channel_wise_weight": self.channel_wise_weight,
            "hint_weight": self.hint_weight,
        }
        for name, weight in weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(f"distillation.{name} is {weight}, expected a number of at least 0.")
        if not any(weights.values()):
            raise ConfigError(
                "All weights of distillation are 0. Set distillation.label_weight to 1, for example."
            )
        if not (math.isfinite(self.temperature) and self.temperature > 0):
            raise ConfigError(f"distillation.temperature is {self.temperature}, expected a number over 0.")

    @property
    def needs_teacher(self) -> bool:
        """Whether any term looks at the teacher."""
        return self.soft_target_weight > 0 or self.channel_wise_weight > 0 or self.hint_weight > 0
