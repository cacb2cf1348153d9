"""A teacher whose answers are computed once, and the trainings that learn from them."""

import json
import resource
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tasks import distill, finetune
from tasks.core.errors import ArtifactError, ConfigError, DiskError
from tasks.parts.data.dataset import read_manifest
from tasks.parts.networks.build import build_network
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.training.augmentation import Views
from tasks.parts.training.config import Augmentation, DistillationConfig, TrainerConfig, views_of
from tasks.parts.training.distillation import build_objective
from tasks.parts.training.module import Batch
from tasks.parts.training.recorded_teacher import create_files
from tasks.parts.training.split_dataset import SplitDataset
from tasks.record_teacher import Config, Report, record_teacher
from tests.tasks.conftest import Workshop
from tests.tasks.test_train import ALL_LOSSES, FRESH, STUDENT, TEACHER, TRAINER

WITHOUT_HINT = replace(ALL_LOSSES, hint_weight=0.0)
TWO_VIEWS = replace(TRAINER, num_views=2)


def config_of(trainer: TrainerConfig, **changes: Any) -> Config:
    values = {"stride": 1, "has_features": True, "batch_size": 3}
    return Config(**(views_of(asdict(trainer)) | values | changes))


def record(checkpoint: Path, data: Path, out: Path, config: Config) -> tuple[Path, Report]:
    out.mkdir()
    report = record_teacher(config, teacher=checkpoint, data=data, out=out)
    return out / "recording", report


def write_teacher(folder: Path, data: Path, network: NetworkConfig = TEACHER) -> Path:
    torch.manual_seed(1)
    manifest = read_manifest(data)
    size = manifest.height, manifest.width
    teacher = build_network(network, len(manifest.classes), size=size)
    card = ModelCard(network, manifest.classes, manifest.mean, manifest.std, *size)
    save_checkpoint(folder / "teacher.safetensors", teacher, card)
    return folder / "teacher.safetensors"


@pytest.mark.parametrize("augmentation", [Augmentation.none, Augmentation.medical])
def test_what_is_recorded_is_the_answer_to_what_the_student_sees(
    workshop: Workshop, tmp_path: Path, augmentation: Augmentation
) -> None:
    trainer = replace(TWO_VIEWS, augmentation=augmentation)
    checkpoint = write_teacher(tmp_path, workshop.data)
    folder, report = record(checkpoint, workshop.data, tmp_path / "a", config_of(trainer))
    logits_VNCHW = np.load(folder / "logits.npy")
    assert logits_VNCHW.shape == report.logits_shape == (2, 8, 3, 64, 96)
    manifest, teacher = read_manifest(workshop.data), load_checkpoint(checkpoint)[0]
    views, images = Views(trainer, manifest), SplitDataset(workshop.data, "train", manifest)
    once = torch.tensor([0]), torch.tensor([1])
    assert [int(views.numbers(epoch, *once)) for epoch in range(4)] == [0, 1, 0, 1]
    for view in range(2):
        images_NCHW, _ = views(*images.__getitems__([6, 1]), views_N=torch.tensor([view, view]))
        with torch.no_grad():
            expected_NCHW = teacher(images_NCHW)
        found_NCHW = torch.from_numpy(logits_VNCHW[view, [6, 1]]).float()
        torch.testing.assert_close(found_NCHW, expected_NCHW, rtol=2e-3, atol=2e-3)
    assert np.abs(logits_VNCHW[0] - logits_VNCHW[1]).max() > 0.01  # the views differ


@pytest.mark.parametrize("network", [TEACHER, NetworkConfig(NetworkName.dinov2, 0.25, 0.25, False)])
def test_losses_of_a_recording_are_those_of_the_live_teacher(
    workshop: Workshop, tmp_path: Path, network: NetworkConfig
) -> None:
    """A convolutional teacher, and a vision transformer of transformers with random weights."""
    checkpoint = write_teacher(tmp_path, workshop.data, network)
    folder, _ = record(checkpoint, workshop.data, tmp_path / "a", config_of(TWO_VIEWS))
    manifest = read_manifest(workshop.data)
    images = SplitDataset(workshop.data, "train", manifest)
    indices_N = torch.tensor([5, 0, 3])
    views_N = torch.tensor([1, 0, 1])
    given = images.__getitems__(indices_N.tolist())
    images_NCHW, masks_NHW = Views(TWO_VIEWS, manifest)(*given, views_N=views_N)
    batch = Batch(images_NCHW, masks_NHW, indices_N, views_N)
    losses = []
    for teacher in (checkpoint, folder):
        torch.manual_seed(0)
        student = build_network(STUDENT, 3)
        objective = build_objective(
            ALL_LOSSES, student=student, teacher=teacher, manifest=manifest, trainer=TWO_VIEWS
        )
        losses.append(objective(student.eval(), batch))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-3, atol=1e-4)


def test_a_recording_that_has_no_space_is_refused_with_its_size_c7(
    workshop: Workshop, tmp_path: Path, mount_disk: Callable[[Path, str], None]
) -> None:
    """A page of a mapped file that finds no space would end the process by SIGBUS."""
    checkpoint = write_teacher(tmp_path, workshop.data)
    (tmp_path / "a").mkdir()
    mount_disk(tmp_path / "a", "size=256k")
    with pytest.raises(DiskError, match=r"needs [\d,]{7,} bytes and 262,144 bytes are free.*num_views"):
        record_teacher(config_of(TWO_VIEWS), teacher=checkpoint, data=workshop.data, out=tmp_path / "a")


def test_the_space_of_a_recording_is_its_own_before_the_first_view_c7(tmp_path: Path) -> None:
    shapes = {"logits.npy": (1, 10, 4, 100, 100)}
    file = create_files(tmp_path, shapes)["logits.npy"]
    assert (tmp_path / "logits.npy").stat().st_blocks * 512 >= file.nbytes == 800_000
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (65536, hard))
    try:
        with pytest.raises(
            DiskError, match=r"needs 800,000 bytes and [\d,]+ bytes are free, or fewer by a quota"
        ):
            create_files(tmp_path, {"features.npy": shapes["logits.npy"]})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_the_stride_averages_the_answers(workshop: Workshop, tmp_path: Path) -> None:
    checkpoint = write_teacher(tmp_path, workshop.data)
    fine, coarse = (
        torch.from_numpy(
            np.load(
                record(checkpoint, workshop.data, tmp_path / str(n), config_of(TWO_VIEWS, stride=n))[0]
                / "logits.npy"
            )
        ).float()
        for n in (1, 5)
    )
    assert coarse.shape[3:] == (13, 20)  # 64 x 96, rounded up
    expected = F.avg_pool2d(fine.flatten(0, 1), 5, ceil_mode=True).view_as(coarse)
    torch.testing.assert_close(coarse, expected, rtol=5e-3, atol=5e-3)


def test_students_learn_from_a_recording(workshop: Workshop, tmp_path: Path) -> None:
    folder, _ = record(
        write_teacher(tmp_path, workshop.data), workshop.data, tmp_path / "a", config_of(TWO_VIEWS, stride=4)
    )
    (tmp_path / "b").mkdir()
    config = distill.Config(distill.Start.fresh, STUDENT, ALL_LOSSES, TWO_VIEWS, FRESH)
    distill.distill(config, teacher=folder, start=folder, data=workshop.data, out=tmp_path / "b")
    (tmp_path / "c").mkdir()
    report = finetune.finetune(
        finetune.Config(ALL_LOSSES, TWO_VIEWS),
        checkpoint=tmp_path / "b" / "model.safetensors",
        teacher=folder,
        data=workshop.data,
        out=tmp_path / "c",
    )
    assert report.num_epochs == 2


def test_a_recording_that_does_not_fit_is_refused(workshop: Workshop, tmp_path: Path) -> None:
    checkpoint, manifest = write_teacher(tmp_path, workshop.data), read_manifest(workshop.data)
    config = config_of(TWO_VIEWS, has_features=False)
    folder, report = record(checkpoint, workshop.data, tmp_path / "a", config)
    assert report.features_shape is None

    def build(losses: DistillationConfig = WITHOUT_HINT, **changes: Any) -> nn.Module:
        return build_objective(
            losses,
            student=build_network(STUDENT, 3),
            teacher=folder,
            manifest=manifest,
            trainer=replace(TWO_VIEWS, **changes),
        )

    build()
    with pytest.raises(
        ConfigError, match=r"trainer\.brightness is 0\.1, and the teacher is recorded with 0\.2.*one value"
    ):
        build(brightness=0.1)
    with pytest.raises(ConfigError, match=r"trainer\.num_views is None, and the teacher is recorded with 2"):
        build(num_views=None)
    with pytest.raises(ConfigError, match=r"hint_weight is above 0, .*record_teacher\.has_features=true"):
        build(ALL_LOSSES)
    card = json.loads((folder / "card.json").read_text())
    (folder / "card.json").write_text(json.dumps(card | {"classes": ["a", "b", "c"]}))
    with pytest.raises(ArtifactError, match=r"'a', 'b', 'c'"):
        build()
    (folder / "card.json").write_text(json.dumps(card | {"normalisation": [[0, 0, 0], [1, 1, 1]]}))
    with pytest.raises(ArtifactError, match=r"mean or std changed\. Run record_teacher again"):
        build()
    (folder / "card.json").write_text("{")
    with pytest.raises(ArtifactError, match=r"damaged .*Run record_teacher again"):
        build()
    (folder / "card.json").unlink()
    with pytest.raises(ArtifactError, match=r"card\.json.*Run record_teacher again"):
        build()


def test_views_without_end_cannot_be_recorded() -> None:
    with pytest.raises(ConfigError, match=r"num_views is null, .*steps\.record_teacher=false"):
        config_of(TRAINER)
