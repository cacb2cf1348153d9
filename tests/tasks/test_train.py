"""Training, distillation and fine-tuning on a tiny data set."""

import csv
import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tasks import attach_metric, distill, finetune, train
from tasks.core.errors import ArtifactError, ConfigError, TrainingDiverged
from tasks.parts.data.dataset import open_split
from tasks.parts.data.dataset_writer import write_chosen_images
from tasks.parts.networks.build import build_network
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.networks.zeros import count_zeros
from tasks.parts.pruning.recovery import measure_val_score
from tasks.parts.pruning.weights import prune_two_of_four
from tasks.parts.training.activations import save_activation_memory
from tasks.parts.training.config import (
    Accelerator,
    Augmentation,
    DistillationConfig,
    LossConfig,
    MemoryFormat,
    Optimizer,
    PixelLoss,
    Precision,
    Schedule,
    Strategy,
    TrainerConfig,
)
from tasks.parts.training.distillation import DistillationObjective
from tasks.parts.training.losses import (
    LabelLoss,
    channel_wise_loss,
    class_weights,
    segmentation_loss,
    soft_target_loss,
)
from tasks.parts.training.module import batchnorm_l1_norm
from tasks.parts.training.predict import measure_miou, predict_classes
from tasks.parts.training.pretrained import PretrainedConfig
from tests.tasks.conftest import Workshop

PLAIN = LossConfig(PixelLoss.cross_entropy, 0.25, 2.0, 0.0, 0.4, None)
TRAINER = TrainerConfig(
    seed=0,
    max_epochs=2,
    max_steps=None,
    batch_size=4,
    accumulate=1,
    optimizer=Optimizer.adamw,
    learning_rate=0.003,
    momentum=0.9,
    schedule=Schedule.one_cycle,
    warm_up_share=0.15,
    layer_rates={},
    weight_decay=0.01,
    clip_norm=None,
    ema_decay=0.0,
    loss=PLAIN,
    batchnorm_l1=0.0,
    validate_every_epochs=1,
    patience_epochs=None,
    class_balance=0.5,
    horizontal_flip=0.5,
    brightness=0.2,
    augmentation=Augmentation.none,
    min_scale=None,
    max_scale=None,
    augmentation_seed=0,
    num_views=None,
    precision=Precision.fp32,
    memory_format=MemoryFormat.auto,
    activation_checkpoints=[],
    activation_offload=[],
    accelerator=Accelerator.cpu,
    num_devices=1,
    num_nodes=1,
    strategy=Strategy.auto,
    num_workers=0,
)
STUDENT = NetworkConfig(NetworkName.fast_scnn, 0.25, 1.0, False)
TEACHER = NetworkConfig(NetworkName.deeplabv3plus, 0.25, 1.0, False)
FRESH = PretrainedConfig(None, None)
ALL_LOSSES = DistillationConfig(1.0, 1.0, 0.5, 0.5, 2.0)


def run(stage: Any, config: Any, out: Path, **inputs: Path) -> Any:
    out.mkdir()
    return stage(config, **inputs, out=out)


@pytest.fixture(scope="module")
def teacher(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("teacher")
    train.train(train.Config(TEACHER, TRAINER, FRESH), data=workshop.data, out=out)
    return out / "model.safetensors"


def test_training_writes_weights_and_history(workshop: Workshop, tmp_path: Path) -> None:
    report = run(train.train, train.Config(STUDENT, TRAINER, FRESH), tmp_path / "a", data=workshop.data)
    network, card = load_checkpoint(tmp_path / "a" / "model.safetensors")
    assert card.network == STUDENT and not network.training
    assert report.num_parameters == sum(p.numel() for p in network.parameters())
    rows = list(csv.DictReader((tmp_path / "a" / "history.csv").open()))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert all(float(row["images_per_s"]) > 0 and 0 < float(row["data_wait_share"]) < 1 for row in rows)
    assert report.metric == "mIoU"
    assert report.val_score == pytest.approx(max(float(row["val_miou"]) for row in rows), abs=1e-6)


OWN_METRICS = """
import numpy as np

def right(logits, masks):
    return (logits.argmax(axis=1) == masks).reshape(len(masks), -1).mean(axis=1)

def dice(logits, masks):
    found = logits.argmax(axis=1)
    sizes = [((found == n) & (masks == n), (found == n).astype(int) + (masks == n)) for n in range(1, 3)]
    return np.mean([2 * a.sum(axis=(1, 2)) / np.maximum(1, b.sum(axis=(1, 2))) for a, b in sizes], axis=0)
"""


@pytest.fixture
def scored_by(workshop: Workshop, tmp_path: Path) -> Callable[[str], Path]:
    def attach(function: str) -> Path:
        (tmp_path / "metrics.py").write_text(OWN_METRICS)
        (tmp_path / function).mkdir()
        config = attach_metric.Config(function, str(tmp_path / "metrics.py"))
        inputs = {"metric": tmp_path / "metrics.py", "data": workshop.data}
        attach_metric.attach_metric(config, **inputs, out=tmp_path / function)
        return tmp_path / function / "dataset"

    return attach


def test_kept_epoch_is_the_best_by_a_metric_of_one_s_own_c5(
    scored_by: Callable[[str], Path], tmp_path: Path
) -> None:
    trainer = replace(TRAINER, max_epochs=4, patience_epochs=4)
    report = run(train.train, train.Config(STUDENT, trainer, FRESH), tmp_path / "a", data=scored_by("right"))
    rows = list(csv.DictReader((tmp_path / "a" / "history.csv").open()))
    assert list(rows[0])[:4] == ["epoch", "loss", "val_miou", "val_right"]
    right = [float(row["val_right"]) for row in rows]
    miou = [float(row["val_miou"]) for row in rows]
    assert report.metric == "right (own metric)"
    assert report.best_epoch == 1 + right.index(max(right)) != 1 + miou.index(max(miou))
    assert report.val_score == pytest.approx(max(right), abs=1e-6)
    network, card = load_checkpoint(tmp_path / "a" / "model.safetensors")
    kept = measure_miou(network, *open_split(scored_by("dice"), "val"), card, batch_size=4)
    assert kept == pytest.approx(miou[report.best_epoch - 1], abs=1e-6), "weights of another epoch"


def test_networks_are_judged_by_a_metric_of_one_s_own_c5(
    workshop: Workshop, scored_by: Callable[[str], Path], tmp_path: Path
) -> None:
    """Dice by hand; search_pruning judges on a part of the data set, which keeps the metric."""
    data, (network, card) = scored_by("dice"), load_checkpoint(workshop.checkpoint)
    images_NHWC, masks_NHW = open_split(data, "val")
    found_NHW = predict_classes(network, images_NHWC, card, batch_size=4)
    by_image = []
    for found_HW, mask_HW in zip(found_NHW, masks_NHW, strict=True):
        pairs = [(found_HW == n, mask_HW == n) for n in (1, 2)]
        by_image.append(np.mean([2 * (a & b).sum() / max(1, a.sum() + b.sum()) for a, b in pairs]))
    assert measure_val_score(network, card, data, 3) == pytest.approx(np.mean(by_image))
    assert measure_val_score(network, card, workshop.data, 3) != pytest.approx(np.mean(by_image))
    write_chosen_images(data, tmp_path / "few", {"train": 4, "val": 2})
    few = measure_val_score(network, card, tmp_path / "few", 1)
    assert few == pytest.approx(np.mean(by_image[:2]))


def test_equal_seeds_give_equal_bytes_and_other_seeds_do_not(workshop: Workshop, tmp_path: Path) -> None:
    contents = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(
            train.train,
            train.Config(STUDENT, replace(TRAINER, seed=seed), FRESH),
            tmp_path / name,
            data=workshop.data,
        )
        contents.append((tmp_path / name / "model.safetensors").read_bytes())
    assert contents[0] == contents[1] != contents[2]


def test_pretrained_weights_are_where_training_starts(
    workshop: Workshop, teacher: Path, tmp_path: Path
) -> None:
    pretrained = PretrainedConfig(str(teacher), hashlib.sha256(teacher.read_bytes()).hexdigest())
    frozen = replace(TRAINER, learning_rate=1e-12, weight_decay=0.0, max_epochs=1)
    labels = DistillationConfig(1.0, 0.0, 0.0, 0.0, 2.0)
    reports = [
        run(train.train, train.Config(TEACHER, frozen, pretrained), tmp_path / "train", data=workshop.data),
        run(
            distill.distill,
            distill.Config(distill.Start.fresh, TEACHER, labels, frozen, pretrained),
            tmp_path / "distill",
            teacher=teacher,
            start=teacher,
            data=workshop.data,
        ),
    ]
    expected, _ = load_checkpoint(teacher)
    for name, report in zip(("train", "distill"), reports, strict=True):
        found, _ = load_checkpoint(tmp_path / name / "model.safetensors")
        for (key, one), two in zip(found.named_parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(one, two, msg=key)
        assert report.pretrained.num_loaded == len(expected.state_dict())
        assert (report.pretrained.num_fresh, report.pretrained.num_skipped) == (0, 0)


def test_pretrained_weights_that_do_not_fit_stop_before_training(
    workshop: Workshop, teacher: Path, tmp_path: Path
) -> None:
    pretrained = PretrainedConfig(str(teacher), hashlib.sha256(teacher.read_bytes()).hexdigest())
    with pytest.raises(ArtifactError, match=r"does not fit fast_scnn"):
        run(train.train, train.Config(STUDENT, TRAINER, pretrained), tmp_path / "a", data=workshop.data)
    assert not list((tmp_path / "a").iterdir())


def test_early_stop_ends_before_the_last_epoch(workshop: Workshop, tmp_path: Path) -> None:
    stubborn = replace(TRAINER, learning_rate=1e-12, max_epochs=9, patience_epochs=1, brightness=0.0)
    report = run(train.train, train.Config(STUDENT, stubborn, FRESH), tmp_path / "a", data=workshop.data)
    assert report.num_epochs < 9


def test_diverging_training_says_step_and_learning_rate(workshop: Workshop, tmp_path: Path) -> None:
    wild = replace(TRAINER, learning_rate=9.9, max_epochs=40, weight_decay=1e30)
    with pytest.raises(TrainingDiverged, match=r"at step \d+ \(learning rate .*Lower trainer\.learning_rate"):
        run(train.train, train.Config(STUDENT, wild, FRESH), tmp_path / "a", data=workshop.data)


def test_mixed_precision_and_activation_checkpoints_train(workshop: Workshop, tmp_path: Path) -> None:
    trainer = replace(TRAINER, precision=Precision.bf16_mixed, activation_checkpoints=["*"], max_epochs=1)
    report = run(train.train, train.Config(TEACHER, trainer, FRESH), tmp_path / "a", data=workshop.data)
    assert report.num_epochs == 1


def test_activation_checkpoints_change_no_gradient() -> None:
    torch.manual_seed(0)
    plain, frugal = build_network(STUDENT, 3).train(), build_network(STUDENT, 3).train()
    frugal.load_state_dict(plain.state_dict())
    save_activation_memory(frugal, ["*"], [])
    images_NCHW = torch.randn(2, 3, 64, 64)
    for network in (plain, frugal):
        network(images_NCHW).square().mean().backward()
    for (name, one), two in zip(plain.named_parameters(), frugal.parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, msg=name)


def test_all_losses_train_a_student(workshop: Workshop, teacher: Path, tmp_path: Path) -> None:
    config = distill.Config(distill.Start.fresh, STUDENT, ALL_LOSSES, TRAINER, FRESH)
    before = teacher.read_bytes()
    report = run(distill.distill, config, tmp_path / "a", teacher=teacher, start=teacher, data=workshop.data)
    network, _ = load_checkpoint(tmp_path / "a" / "model.safetensors")
    assert report.num_parameters == sum(p.numel() for p in network.parameters())  # no adapter, no teacher
    assert teacher.read_bytes() == before


def test_student_continues_the_training_of_the_baseline(
    workshop: Workshop, teacher: Path, tmp_path: Path
) -> None:
    still = replace(TRAINER, learning_rate=1e-12, weight_decay=0.0, max_epochs=1)
    config = distill.Config(distill.Start.baseline, TEACHER, ALL_LOSSES, still, FRESH)
    run(distill.distill, config, tmp_path / "a", teacher=teacher, start=teacher, data=workshop.data)
    found, expected = (load_checkpoint(path)[0] for path in (tmp_path / "a/model.safetensors", teacher))
    for (name, one), two in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, two, msg=name)
    other = replace(config, network=STUDENT)
    with pytest.raises(
        ArtifactError, match=r"deeplabv3plus.*expected distill\.network, which is .*fast_scnn"
    ):
        run(distill.distill, other, tmp_path / "b", teacher=teacher, start=teacher, data=workshop.data)
    with pytest.raises(ConfigError, match=r"start is baseline and pretrained\.file is a\.pt"):
        replace(config, pretrained=PretrainedConfig("a.pt", "0" * 64))


def test_distillation_moves_the_student_towards_the_teacher(
    workshop: Workshop, teacher: Path, tmp_path: Path
) -> None:
    """Trained on soft targets alone, the student agrees better with its teacher than trained on labels alone."""
    trainer = replace(TRAINER, max_epochs=6)
    divergences = []
    for name, losses in (
        ("labels", DistillationConfig(1.0, 0.0, 0.0, 0.0, 2.0)),
        ("teacher", DistillationConfig(0.0, 1.0, 0.0, 0.0, 2.0)),
    ):
        config = distill.Config(distill.Start.fresh, STUDENT, losses, trainer, FRESH)
        run(distill.distill, config, tmp_path / name, teacher=teacher, start=teacher, data=workshop.data)
        student, _ = load_checkpoint(tmp_path / name / "model.safetensors")
        images_NCHW = torch.randn(4, 3, 64, 96, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            divergences.append(
                soft_target_loss(student(images_NCHW), load_checkpoint(teacher)[0](images_NCHW), 1.0)
            )
    assert divergences[1] < divergences[0]


def test_fine_tuning_keeps_the_card_and_starts_from_the_checkpoint(
    workshop: Workshop, teacher: Path, tmp_path: Path
) -> None:
    losses = DistillationConfig(1.0, 0.0, 0.0, 0.0, 2.0)
    frozen = finetune.Config(losses, replace(TRAINER, learning_rate=1e-12, weight_decay=0.0, max_epochs=1))
    run(finetune.finetune, frozen, tmp_path / "a", checkpoint=teacher, teacher=teacher, data=workshop.data)
    found, card = load_checkpoint(tmp_path / "a" / "model.safetensors")
    expected, expected_card = load_checkpoint(teacher)
    assert card == expected_card
    for (name, one), two in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, two, msg=name)


def test_fine_tuning_keeps_weights_that_are_zero(workshop: Workshop, tmp_path: Path) -> None:
    losses = DistillationConfig(1.0, 0.0, 0.0, 0.0, 2.0)
    network, card = load_checkpoint(workshop.checkpoint)
    prune_two_of_four(network)
    save_checkpoint(tmp_path / "sparse", network, card)
    config = finetune.Config(losses, TRAINER)
    inputs = {"checkpoint": tmp_path / "sparse", "teacher": workshop.checkpoint, "data": workshop.data}
    run(finetune.finetune, config, tmp_path / "a", **inputs)
    trained, _ = load_checkpoint(tmp_path / "a" / "model.safetensors")
    assert sum(count_zeros(trained).values()) > 1000
    for name, layer in network.named_modules():
        if isinstance(layer, nn.Conv2d):
            found = trained.get_parameter(f"{name}.weight")
            assert torch.equal(found == 0, layer.weight == 0), name
            assert not torch.equal(found, layer.weight), name


def test_batchnorm_penalty_makes_the_scales_smaller(workshop: Workshop, tmp_path: Path) -> None:
    norms = []
    for name, batchnorm_l1 in (("without", 0.0), ("with", 0.1)):
        config = train.Config(STUDENT, replace(TRAINER, batchnorm_l1=batchnorm_l1), FRESH)
        run(train.train, config, tmp_path / name, data=workshop.data)
        norms.append(batchnorm_l1_norm(load_checkpoint(tmp_path / name / "model.safetensors")[0]).item())
    assert norms[1] < norms[0] - 1


def test_batchnorm_penalty_without_batchnorm_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.batchnorm_l1 is above 0, but the network has no BatchNorm"
    ):
        batchnorm_l1_norm(nn.Conv2d(3, 3, 1))


def test_teacher_of_other_classes_is_refused_with_both_lists(workshop: Workshop, tmp_path: Path) -> None:
    card = ModelCard(TEACHER, ("background", "one", "zero"), (0.5,) * 3, (0.2,) * 3, 64, 96)
    save_checkpoint(tmp_path / "other.safetensors", build_network(TEACHER, 3), card)
    with pytest.raises(
        ArtifactError, match=r"\['background', 'one', 'zero'\].*\['background', 'zero', 'one'\]"
    ):
        run(
            distill.distill,
            distill.Config(distill.Start.fresh, STUDENT, ALL_LOSSES, TRAINER, FRESH),
            tmp_path / "a",
            teacher=tmp_path / "other.safetensors",
            start=tmp_path / "other.safetensors",
            data=workshop.data,
        )


@pytest.mark.parametrize(("hint_weight", "num_hooks"), [(0.0, 0), (0.5, 1)])
def test_only_a_hint_watches_the_feature_layers(hint_weight: float, num_hooks: int) -> None:
    student, teacher = build_network(STUDENT, 3), build_network(TEACHER, 3)
    losses = DistillationConfig(1.0, 1.0, 0.0, hint_weight, 2.0)
    DistillationObjective(losses, student, teacher, LabelLoss(PLAIN, torch.ones(3)))
    for network in (student, teacher):
        assert len(network.get_submodule(str(network.feature_layer))._forward_hooks) == num_hooks


def test_fine_tuning_with_hints_depends_on_its_seed_alone(
    workshop: Workshop, teacher: Path, tmp_path: Path
) -> None:
    config = finetune.Config(ALL_LOSSES, replace(TRAINER, max_epochs=1))
    inputs = {"checkpoint": workshop.checkpoint, "teacher": teacher, "data": workshop.data}
    for name in ("a", "b"):
        torch.rand(1)  # what ran before in this process
        run(finetune.finetune, config, tmp_path / name, **inputs)
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b"))
    assert first == second


def test_all_weights_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"label_weight and all other weights are 0"):
        DistillationConfig(0.0, 0.0, 0.0, 0.0, 2.0)


def test_loss_of_an_unlabelled_batch_is_zero() -> None:
    logits_NCHW = torch.randn(2, 3, 4, 4, requires_grad=True)
    loss = segmentation_loss(logits_NCHW, torch.full((2, 4, 4), 255))
    loss.backward()
    assert loss.item() == 0 and torch.isfinite(logits_NCHW.grad).all()


def test_soft_targets_at_temperature_one_equal_the_formula() -> None:
    student, teacher = torch.randn(2, 5, 3, 3), torch.randn(2, 5, 3, 3)
    p = F.softmax(teacher, 1)
    expected = (p * (p.log() - F.log_softmax(student, 1))).sum(1).mean()
    torch.testing.assert_close(soft_target_loss(student, teacher, 1.0), expected)
    assert soft_target_loss(teacher, teacher, 4.0).abs() < 1e-6


def test_channel_wise_loss_ignores_a_shift_of_a_whole_channel() -> None:
    student, teacher = torch.randn(2, 5, 6, 6), torch.randn(2, 5, 6, 6)
    shifted = teacher + torch.arange(5.0).view(1, 5, 1, 1)
    torch.testing.assert_close(
        channel_wise_loss(student, shifted, 2.0), channel_wise_loss(student, teacher, 2.0)
    )


def test_class_weights_keep_the_mean_and_bound_absent_classes() -> None:
    share = (0.9, 0.1, 0.0)
    weights = class_weights(share, 1.0)
    assert float((weights * torch.tensor(share)).sum()) == pytest.approx(1.0)
    assert weights[2] == weights[1] and weights[1] / weights[0] == pytest.approx(9.0)
    assert class_weights(share, 0.0).tolist() == pytest.approx([1.0, 1.0, 1.0])
