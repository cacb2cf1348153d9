"""Presets of augmentation: what they do to pixels and masks, and that only seed, epoch and index decide it."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tasks.core.errors import ConfigError
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.dataset_writer import SplitBatches, batches_of, write_dataset
from tasks.parts.data.input_card import Task
from tasks.parts.networks.build import build_network
from tasks.parts.training.augmentation import (
    PRESETS,
    Augmenter,
    Deform,
    Mirror,
    Noise,
    QuarterTurns,
    Rotate,
    ScaleAndCrop,
    Step,
    choose_steps,
)
from tasks.parts.training.config import Augmentation, TrainerConfig
from tasks.parts.training.loop import train_network
from tasks.parts.training.losses import LabelLoss
from tasks.parts.training.module import Batch, LabelObjective
from tests.tasks.conftest import Workshop
from tests.tasks.test_train import PLAIN, STUDENT, TRAINER

ON = [name for name in Augmentation if name is not Augmentation.none]
STREET = replace(TRAINER, augmentation=Augmentation.street)


def augmenter(*steps: Step, seed: int = 0, channels: int = 3) -> Augmenter:
    """Return an augmenter of images that are normalised with mean 0 and std 1: they are 0..1."""
    return Augmenter(steps, seed=seed, mean=(0.0,) * channels, std=(1.0,) * channels)


def random_batch(count: int = 3, height: int = 32, width: int = 48, channels: int = 3) -> tuple[Tensor, ...]:
    random = torch.Generator().manual_seed(1)
    images_NCHW = torch.rand(count, channels, height, width, generator=random)
    masks_NHW = torch.randint(0, 3, (count, height, width), generator=random)
    return images_NCHW, masks_NHW, torch.arange(count)


def same(view: int, indices_N: Tensor) -> Tensor:
    return torch.full_like(indices_N, view)


@pytest.mark.parametrize("name", ON)
def test_changes_of_an_image_depend_on_seed_epoch_and_index_alone(name: Augmentation) -> None:
    change = augmenter(*PRESETS[name])
    images_NCHW, masks_NHW, indices_N = random_batch()
    together = change(images_NCHW, masks_NHW, indices_N, views_N=same(4, indices_N))
    torch.rand(1)  # what else the process draws
    reverse = change(
        images_NCHW.flip(0), masks_NHW.flip(0), indices_N.flip(0), views_N=same(4, indices_N.flip(0))
    )
    torch.testing.assert_close(reverse[0].flip(0), together[0])
    assert torch.equal(reverse[1].flip(0), together[1])
    for other in (
        change(images_NCHW, masks_NHW, indices_N, views_N=same(5, indices_N)),
        change(images_NCHW, masks_NHW, indices_N + 3, views_N=same(4, indices_N + 3)),
        augmenter(*PRESETS[name], seed=1)(images_NCHW, masks_NHW, indices_N, views_N=same(4, indices_N)),
    ):
        assert not torch.equal(other[1], together[1])
    assert together[0].min() >= 0 and together[0].max() <= 1


@pytest.mark.parametrize(
    "step",
    [
        Mirror(1.0, "", rows=True),
        ScaleAndCrop(0.6, 1.7, ""),
        Rotate(30, ""),
        QuarterTurns(""),
        Deform(1.0, "", std=0.05),
    ],
    ids=lambda step: type(step).__name__,
)
def test_a_mask_moves_as_its_image_does_and_mixes_no_classes(step: Step) -> None:
    coarse = torch.randint(0, 4, (6, 5, 7), generator=torch.Generator().manual_seed(0))
    masks_NHW = coarse.repeat_interleave(8, dim=1).repeat_interleave(8, dim=2)
    images_NCHW = (masks_NHW / 4 + 0.2)[:, None].expand(-1, 3, -1, -1)
    changed_NCHW, changed_NHW = augmenter(step)(
        images_NCHW, masks_NHW, torch.arange(6), views_N=same(0, torch.arange(6))
    )
    assert not torch.equal(changed_NHW, masks_NHW)
    assert set(changed_NHW.unique().tolist()) <= {0, 1, 2, 3, IGNORE_INDEX}
    patches = changed_NHW.float().unfold(1, 3, 1).unfold(2, 3, 1).flatten(3)
    is_inner = patches.amin(3) == patches.amax(3)  # where bilinear interpolation mixes no two classes
    inner_NHW, inner_image_NHW = (
        changed_NHW[:, 1:-1, 1:-1][is_inner],
        changed_NCHW[:, 0, 1:-1, 1:-1][is_inner],
    )
    expected = torch.where(inner_NHW == IGNORE_INDEX, 0.0, inner_NHW / 4 + 0.2)
    assert is_inner.float().mean() > 0.5
    torch.testing.assert_close(inner_image_NHW, expected, atol=1e-4, rtol=0)


def test_mirrors_and_quarter_turns_of_squares_lose_no_pixel() -> None:
    images_NCHW, masks_NHW, indices_N = random_batch(8, 24, 24)
    mirrored = augmenter(Mirror(1.0, ""))(images_NCHW, masks_NHW, indices_N, views_N=same(0, indices_N))
    torch.testing.assert_close(mirrored[0], images_NCHW.flip(3), atol=1e-4, rtol=0)
    assert torch.equal(mirrored[1], masks_NHW.flip(2))
    _, turned_NHW = augmenter(QuarterTurns(""))(images_NCHW, masks_NHW, indices_N, views_N=same(0, indices_N))
    turns = [
        next(k for k in range(4) if torch.equal(turned, mask.rot90(k)))
        for turned, mask in zip(turned_NHW, masks_NHW, strict=True)
    ]
    assert len(set(turns)) > 2


def test_a_smaller_image_is_padded_with_ignored_pixels_and_a_larger_one_is_cut() -> None:
    images_NCHW, masks_NHW, indices_N = random_batch(4, 32, 32)
    images_NCHW = images_NCHW * 0.5 + 0.5
    changed_NCHW, small_NHW = augmenter(ScaleAndCrop(0.5, 0.5, ""))(
        images_NCHW, masks_NHW, indices_N, views_N=same(0, indices_N)
    )
    is_outside = small_NHW == IGNORE_INDEX
    assert (~is_outside).sum(dim=(1, 2)).tolist() == [16 * 16] * 4
    assert changed_NCHW[:, 0][is_outside].max() < 0.5  # black, or interpolated with it at the border
    places = [tuple(mask.nonzero()[0].tolist()) for mask in ~is_outside]
    assert len(set(places)) > 2, "the place is random"
    _, large_NHW = augmenter(ScaleAndCrop(2.0, 2.0, ""))(
        images_NCHW, masks_NHW, indices_N, views_N=same(0, indices_N)
    )
    assert (large_NHW != IGNORE_INDEX).all()
    unchanged = augmenter(ScaleAndCrop(1.0, 1.0, ""))(
        images_NCHW, masks_NHW, indices_N, views_N=same(0, indices_N)
    )
    torch.testing.assert_close(unchanged[0], images_NCHW, atol=1e-4, rtol=0)
    assert torch.equal(unchanged[1], masks_NHW)


def test_noise_has_its_standard_deviation_and_differs_between_images() -> None:
    images_NCHW, masks_NHW, indices_N = random_batch(2, 64, 64)
    grey_NCHW = torch.full_like(images_NCHW, 0.5)
    changed_NCHW, _ = augmenter(Noise(0.05, "", share=1.0))(
        grey_NCHW, masks_NHW, indices_N, views_N=same(0, indices_N)
    )
    assert float((changed_NCHW - 0.5).std()) == pytest.approx(0.05, rel=0.05)
    assert not torch.equal(changed_NCHW[0], changed_NCHW[1])


def write_4_channels(folder: Path) -> Path:
    random = np.random.default_rng(0)
    images_NHWC = random.integers(0, 256, (8, 32, 32, 4)).astype(np.uint8)
    masks_NHW = (images_NHWC[..., 0] > 127).astype(np.uint8)
    splits = {name: SplitBatches(8, [*batches_of(images_NHWC, masks_NHW)]) for name in ("train", "val")}
    write_dataset(
        folder,
        task=Task.segmentation,
        classes=("low", "high"),
        height=32,
        width=32,
        source="test",
        splits=splits,
        channels=4,
    )
    return folder


class FourToTwo(nn.Sequential):
    """The smallest network of four channels."""

    feature_layer = None
    classifier_layer = "0"

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(4, 2, 1))


def fit(network: nn.Module, data: Path, config: TrainerConfig, out: Path) -> Any:
    out.mkdir(exist_ok=True)
    return train_network(
        network, LabelObjective(LabelLoss(PLAIN, torch.ones(2))), data=data, config=config, out=out
    )


def test_images_of_other_bands_are_augmented_without_the_steps_of_colour_c5(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = write_4_channels(tmp_path / "data")
    one_epoch = replace(TRAINER, max_epochs=1)
    caplog.set_level(logging.INFO)
    for name in Augmentation:
        report = fit(FourToTwo(), data, replace(one_epoch, augmentation=name), tmp_path / name)
        assert report.num_epochs == 1
        assert (tmp_path / name / "augmentation.png").exists() == (name is not Augmentation.none)
        said = "augmentation=street without Saturation, Hue: they need RGB, and the images have 4 bands"
        assert (said in caplog.text) == (name is Augmentation.street)
        caplog.clear()


def test_a_configured_scale_takes_the_place_of_the_presets() -> None:
    steps = choose_steps(replace(STREET, min_scale=0.9, max_scale=1.1))
    [scale] = [step for step in steps if isinstance(step, ScaleAndCrop)]
    assert (scale.min_scale, scale.max_scale) == (0.9, 1.1)
    assert len(steps) == len(PRESETS[Augmentation.street])
    assert [type(step) for step in choose_steps(replace(TRAINER, min_scale=0.5, max_scale=2.0))] == [
        ScaleAndCrop
    ]
    assert choose_steps(TRAINER) == ()


def test_half_a_range_of_scales_and_an_empty_one_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_scale is null, and the other limit of the scale is not"):
        replace(TRAINER, min_scale=0.5)
    with pytest.raises(ConfigError, match=r"min_scale is 2\.0, expected at most max_scale, which is 0\.5"):
        replace(TRAINER, min_scale=2.0, max_scale=0.5)


class Stops(LabelObjective):
    """Ends the training in its second epoch, as a killed process does."""

    num_steps = 0

    def forward(self, network: nn.Module, batch: Batch) -> Tensor:
        self.num_steps += 1
        if self.num_steps == 3:  # of two steps an epoch
            raise InterruptedError
        return super().forward(network, batch)


def train_student(
    workshop: Workshop, out: Path, config: TrainerConfig, objective: type[LabelObjective] = LabelObjective
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    network = build_network(STUDENT, 3)
    out.mkdir(exist_ok=True)
    train_network(
        network, objective(LabelLoss(PLAIN, torch.ones(3))), data=workshop.data, config=config, out=out
    )
    return network.state_dict()


def test_ended_training_with_a_preset_resumes_and_gives_the_same_weights(
    workshop: Workshop, tmp_path: Path
) -> None:
    config = replace(STREET, max_epochs=2)
    whole = train_student(workshop, tmp_path / "whole", config)
    with pytest.raises(InterruptedError):
        train_student(workshop, tmp_path / "parts", config, Stops)
    assert (tmp_path / "parts/resume/last.ckpt").exists()
    resumed = train_student(workshop, tmp_path / "parts", config)
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    with Image.open(tmp_path / "whole/augmentation.png") as sheet:
        assert sheet.height > 3 * 2 * 128


@pytest.mark.slow
def test_data_workers_do_not_change_what_augmentation_gives(workshop: Workshop, tmp_path: Path) -> None:
    config = replace(STREET, max_epochs=1)
    alone = train_student(workshop, tmp_path / "alone", config)
    helped = train_student(workshop, tmp_path / "helped", replace(config, num_workers=2))
    assert all(torch.equal(helped[name], value) for name, value in alone.items())
