"""When a training validates, and after how many steps it ends."""

from typing import Any

from tasks.parts.training.lightning_imports import Callback, lightning


class Cadence(Callback):
    """Validates in every n-th epoch and in the last one, which the maximum number of steps may cut short.

    Lightning's own ``max_steps`` ends without a validation, and loses an epoch when such a training resumes (2.6.6).
    """

    def __init__(self, validate_every_epochs: int, max_steps: int | None) -> None:
        self._every, self._max_steps = validate_every_epochs, max_steps

    def on_train_epoch_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Decide whether this epoch is validated: Lightning asks whether its number is a multiple."""
        number = trainer.current_epoch + 1
        steps_left = float("inf") if self._max_steps is None else self._max_steps - trainer.global_step
        steps_of_epoch = -(-int(trainer.num_training_batches) // trainer.accumulate_grad_batches)
        is_last = number == trainer.max_epochs or steps_left <= steps_of_epoch
        trainer.check_val_every_n_epoch = 1 if is_last or number % self._every == 0 else number + 1

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        """End a training that was resumed after its last step."""
        self._end(trainer)

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        """End the epoch after the last step, so that it is validated."""
        self._end(trainer)

    def _end(self, trainer: lightning.Trainer) -> None:
        if self._max_steps is not None and trainer.global_step >= self._max_steps:
            trainer.should_stop = True
