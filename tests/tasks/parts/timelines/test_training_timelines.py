"""Real trainings of a few steps, listened to."""

import itertools
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import lightning
import pytest

from tasks import distill, train
from tasks.core.errors import ArtifactError, TrainingDiverged
from tasks.parts.timelines.trace import Slice
from tasks.parts.timelines.training import (
    OTHER,
    Phase,
    Step,
    TrainingTimeline,
    record_training,
    sum_up,
    training_trace,
)
from tests.tasks.test_train import ALL_LOSSES, FRESH, STUDENT, TRAINER

TRAINER_OF_4_STEPS = replace(TRAINER, batch_size=2, max_epochs=2)
"""8 images: four steps an epoch."""


@pytest.fixture(scope="module")
def timeline(workshop):
    config = train.Config(STUDENT, TRAINER_OF_4_STEPS, FRESH)
    return record_training(train.train, config, {"data": workshop.data}, num_steps=6)


def test_every_step_has_all_phases_in_order_and_nothing_else(timeline):
    assert len(timeline.steps) == 6
    for step in timeline.steps:
        assert [each.name for each in step.phases] == list(Phase)
        moment_us = step.start_us
        for each in step.phases:
            assert moment_us <= each.start_us and each.duration_us > 0
            moment_us = each.end_us
        assert moment_us <= step.end_us


def test_validation_between_two_epochs_is_no_step(timeline):
    [validation] = timeline.validations
    assert timeline.steps[3].end_us <= validation.start_us and validation.end_us <= timeline.steps[4].start_us
    steps, phases = training_trace("train.teacher", timeline).tracks
    names = [each.name for each in steps.slices]
    assert names == ["step 1", "step 2", "step 3", "step 4", "validation", "step 5", "step 6"]
    assert len(phases.slices) == 6 * len(Phase)
    for track in (steps, phases):
        for before, after in itertools.pairwise(track.slices):
            assert before.end_us <= after.start_us


def test_training_that_ends_earlier_gives_the_steps_that_it_has(workshop):
    config = train.Config(STUDENT, replace(TRAINER_OF_4_STEPS, max_epochs=1), FRESH)
    timeline = record_training(train.train, config, {"data": workshop.data}, num_steps=99)
    assert len(timeline.steps) == 4


def test_distillation_on_several_devices_is_recorded_on_one(workshop):
    several = replace(TRAINER_OF_4_STEPS, num_devices=2, strategy=type(TRAINER.strategy).ddp)
    config = distill.Config(distill.Start.fresh, STUDENT, ALL_LOSSES, several, FRESH)
    inputs = {"teacher": workshop.checkpoint, "start": workshop.checkpoint, "data": workshop.data}
    assert len(record_training(distill.distill, config, inputs, num_steps=2).steps) == 2


def record_with_a_worker(data: Path) -> tuple[int, int]:
    """Return the numbers of recorded steps and of processes that are left."""
    config = train.Config(STUDENT, replace(TRAINER_OF_4_STEPS, num_workers=1), FRESH)
    timeline = record_training(train.train, config, {"data": data}, num_steps=2)
    return len(timeline.steps), len(multiprocessing.active_children())


def test_data_workers_end_with_the_recording(workshop):
    """In a process of its own, as a training is: workers are forks, and here other tests' threads run."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        assert pool.submit(record_with_a_worker, workshop.data).result() == (2, 0)


def test_recording_leaves_no_profiler_and_no_files_behind(workshop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    plain = lightning.Trainer
    config = train.Config(STUDENT, replace(TRAINER_OF_4_STEPS, learning_rate=9.9, weight_decay=1e30), FRESH)
    with pytest.raises(TrainingDiverged):
        record_training(train.train, config, {"data": workshop.data}, num_steps=99)
    assert lightning.Trainer is plain and not list(tmp_path.iterdir())


def test_missing_data_set_is_named(tmp_path):
    config = train.Config(STUDENT, TRAINER, FRESH)
    with pytest.raises(ArtifactError, match=r"manifest\.json: not found.*Run prepare_data"):
        record_training(train.train, config, {"data": tmp_path}, num_steps=1)


def test_means_leave_out_the_first_step_and_validation():
    """Steps of 10, 4 and 4 ms, each of 1 ms of waiting, and 1 ms of Lightning's between the last two."""

    def step(start_ms, end_ms):
        phases = (
            Slice(Phase.data_wait, start_ms * 1e3, 1e3),
            Slice(Phase.forward, start_ms * 1e3 + 1e3, 2e3),
        )
        return Step(start_ms * 1e3, end_ms * 1e3, phases)

    steps = (step(0, 10), step(100, 104), step(105, 109))
    timeline = TrainingTimeline(steps, (Slice("validation", 11e3, 80e3),), 16, 1.0, "RSS")
    summary = sum_up(timeline)
    assert summary.num_steps == 2
    assert summary.images_per_s == pytest.approx(2 * 16 / 9e-3)
    assert summary.ms_per_step[Phase.data_wait] == pytest.approx(1)
    assert summary.ms_per_step[Phase.forward] == pytest.approx(2)
    assert summary.ms_per_step[OTHER] == pytest.approx((9 - 6) / 2)
    assert summary.share("data wait") == pytest.approx(2 / 9)
    only_first = sum_up(replace(timeline, steps=steps[:1]))
    assert only_first.num_steps == 1 and only_first.images_per_s == pytest.approx(16 / 10e-3)


def test_peak_memory_is_that_of_the_process(timeline):
    """torch alone takes more than 100 MiB."""
    assert timeline.peak_memory_mib > 100 and timeline.memory_kind == "RSS of the training process"
    assert timeline.images_per_step == 2
