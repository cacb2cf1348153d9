"""Record where the time of a training's steps goes: waiting for data, forward, backward, optimizer.

The stage runs as it is, with Lightning's profiler interface listening, until it has made enough steps.
"""

import contextlib
import dataclasses
import functools
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from tasks.parts.data.dataset import read_manifest
from tasks.parts.timelines.trace import Slice, Trace, Track
from tasks.parts.training.config import Strategy, TrainerConfig
from tasks.parts.training.lightning_imports import Profiler, lightning
from tasks.parts.training.speed import peak_memory_mib


class Phase(StrEnum):
    """What a step spends its time on."""

    data_wait = "data wait"
    """Until the next batch is there; without data workers, loading it."""
    copy = "copy to device"
    forward = "forward"
    """Augmentation, networks and loss."""
    backward = "backward"
    optimizer = "optimizer"
    """From the gradients to new weights."""


@dataclass(frozen=True)
class Step:
    """One optimizer step: from asking for the batch to the new weights."""

    start_us: float
    end_us: float
    phases: tuple[Slice, ...]
    """In order, named by Phase; what lies between them is Lightning's own work."""


@dataclass(frozen=True)
class TrainingTimeline:
    """The first steps of a training."""

    steps: tuple[Step, ...]
    validations: tuple[Slice, ...]
    """Validations between the steps, each with the checkpoints that it saves."""
    images_per_step: int
    peak_memory_mib: float
    memory_kind: str
    """Whose peak it is: the memory of the process (RSS), or what torch held on the GPU."""


@dataclass(frozen=True)
class TrainingSummary:
    """Means over the steps after the first, which also warms up; over the first if there is no other."""

    num_steps: int
    images_per_s: float
    ms_per_step: Mapping[str, float]
    """By phase; "other" is what Lightning does between them."""

    def share(self, phase: str) -> float:
        """Return the share of the time of a step."""
        return self.ms_per_step[phase] / sum(self.ms_per_step.values())


OTHER = "other"


class _EnoughSteps(Exception):
    """Ends the training; nothing of it is wanted but the times."""


class StepRecorder(Profiler):
    """Listens to the actions that Lightning reports, and ends the training after some steps.

    On a GPU every phase waits until the GPU is done, so steps take a little longer than without it.
    """

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.validations: list[Slice] = []
        self._num_steps = num_steps
        self._step_start_us: float | None = None
        self._phases: list[Slice] = []
        self._phase_start_us = self._gradients_us = self._validation_start_us = 0.0

    def start(self, action_name: str) -> None:
        """Note when a phase starts; the wait for data starts a step."""
        owner, _, hook = action_name.rpartition(".")
        if hook == "train_dataloader_next":
            self._phases, self._step_start_us = [], _now_us()
            self._phase_start_us = self._step_start_us
        elif _phase_of(owner, hook) is not None:
            self._phase_start_us = _now_us()
        elif owner.startswith("[Strategy]") and hook == "on_validation_start":
            self._validation_start_us = _now_us()

    def stop(self, action_name: str) -> None:
        """Record the phase that ends, and the step with the last one of its phases."""
        owner, _, hook = action_name.rpartition(".")
        phase = _phase_of(owner, hook)
        if phase is not None:
            self._add(phase, self._phase_start_us)
            self._gradients_us = _now_us()
        elif owner.startswith("[LightningModule]") and hook == "optimizer_step":
            self._add(Phase.optimizer, self._gradients_us)
        elif owner.startswith("[Strategy]") and hook == "on_validation_end":
            duration_us = _now_us() - self._validation_start_us
            self.validations.append(Slice("validation", self._validation_start_us, duration_us))
        elif action_name == "run_training_batch" and self._step_start_us is not None:
            self.steps.append(Step(self._step_start_us, _now_us(), tuple(self._phases)))
            self._step_start_us = None
            if len(self.steps) == self._num_steps:
                raise _EnoughSteps

    def _add(self, phase: Phase, start_us: float) -> None:
        if self._step_start_us is not None:  # validation copies batches to the device, too
            self._phases.append(Slice(phase, start_us, _now_us() - start_us))


def _phase_of(owner: str, hook: str) -> Phase | None:
    if hook == "train_dataloader_next":
        return Phase.data_wait
    names = {"batch_to_device": Phase.copy, "training_step": Phase.forward, "backward": Phase.backward}
    return names.get(hook) if owner.startswith("[Strategy]") else None


def _now_us() -> float:
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
    return time.perf_counter_ns() / 1000


def record_training(
    stage: Callable[..., Any], config: Any, inputs: Mapping[str, Path], *, num_steps: int
) -> TrainingTimeline:
    """Run a training stage on one device until it has made so many steps, or ends; nothing that it writes is kept.

    Raises what the stage raises.
    """
    trainer: TrainerConfig = config.trainer
    one_device = dataclasses.replace(trainer, num_devices=1, num_nodes=1, strategy=Strategy.auto)
    recorder = StepRecorder(num_steps)
    with (
        tempfile.TemporaryDirectory(prefix="enginewright-profile-") as folder,
        _listening(recorder),
        contextlib.suppress(_EnoughSteps),
    ):
        stage(dataclasses.replace(config, trainer=one_device), **inputs, out=Path(folder))
    # Batches are never cut short, but if there are fewer images than one batch.
    num_images = min(trainer.batch_size, read_manifest(inputs["data"]).counts["train"])
    peak_mib, kind = _peak_memory()
    return TrainingTimeline(tuple(recorder.steps), tuple(recorder.validations), num_images, peak_mib, kind)


@contextlib.contextmanager
def _listening(profiler: Profiler) -> Iterator[None]:
    """Give a profiler to each Trainer that is made meanwhile.

    Stages make their Trainer themselves. A parameter that reaches it would change the code of every training, and so
    its key, for a value that changes no result.
    """
    plain = lightning.Trainer
    lightning.Trainer = functools.partial(plain, profiler=profiler)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        lightning.Trainer = plain  # type: ignore[misc]


def _peak_memory() -> tuple[float, str]:
    """Return MiB, and whose they are."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return peak_memory_mib(torch.device("cuda")), "allocated by torch on the GPU"
    return peak_memory_mib(torch.device("cpu")), "RSS of the training process"


def sum_up(timeline: TrainingTimeline) -> TrainingSummary:
    """Return the means; a step lasts until the next one starts, unless a validation comes between them."""
    followed = itertools.zip_longest(timeline.steps, timeline.steps[1:])
    timed = [(step, _until_next_us(step, following, timeline.validations)) for step, following in followed]
    counted = timed[1:] or timed
    elapsed_us = sum(duration_us for _, duration_us in counted)
    spent_us = {
        phase: sum(each.duration_us for step, _ in counted for each in step.phases if each.name == phase)
        for phase in Phase
    }
    per_step = {str(phase): value / 1000 / len(counted) for phase, value in spent_us.items()}
    per_step[OTHER] = (elapsed_us - sum(spent_us.values())) / 1000 / len(counted)
    images_per_s = timeline.images_per_step * len(counted) / (elapsed_us / 1e6)
    return TrainingSummary(len(counted), images_per_s, per_step)


def _until_next_us(step: Step, following: Step | None, validations: tuple[Slice, ...]) -> float:
    if following is None or any(step.end_us <= each.start_us < following.start_us for each in validations):
        return step.end_us - step.start_us
    return following.start_us - step.start_us


def training_trace(name: str, timeline: TrainingTimeline) -> Trace:
    """Return the trace of a training: a track of steps and validations, and one of their phases."""
    steps = [
        Slice(
            f"step {number}", step.start_us, step.end_us - step.start_us, {"images": timeline.images_per_step}
        )
        for number, step in enumerate(timeline.steps, start=1)
    ]
    phases = [phase for step in timeline.steps for phase in step.phases]
    tracks = [
        Track("steps", sorted([*steps, *timeline.validations], key=lambda each: each.start_us)),
        Track("phases", phases),
    ]
    peak = f"{timeline.peak_memory_mib:.0f} MiB ({timeline.memory_kind})"
    return Trace(name, tracks, {"peak memory": peak})
