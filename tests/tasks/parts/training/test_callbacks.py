"""What a training records of itself, by Lightning's own hooks."""

import csv
import logging
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from tasks import train
from tasks.parts.data.dataset import read_manifest
from tasks.parts.networks.build import build_network
from tasks.parts.training.callbacks import History
from tasks.parts.training.lightning_imports import lightning
from tasks.parts.training.losses import LabelLoss
from tasks.parts.training.module import LabelObjective, SegmentationModule
from tasks.parts.training.plot import draw_training
from tasks.parts.training.split_dataset import EpochDataset, SplitDataset, as_is
from tests.tasks.conftest import Workshop
from tests.tasks.test_train import FRESH, PLAIN, STUDENT, TRAINER

COLUMNS = [
    *("epoch", "loss", "val_miou", "learning_rate"),
    *("images_per_s", "data_wait_share", "peak_memory_mib"),
]


class SlowImages(SplitDataset):
    """Each batch of the epochs named takes a while."""

    slow_epochs: tuple[int, ...] = ()
    epoch = 0

    def __getitems__(self, indices: list[int]) -> Any:
        if self.epoch in self.slow_epochs:
            time.sleep(0.7)
        return super().__getitems__(indices)


class SlowTraining(SegmentationModule):
    """Reads its eight images in two batches."""

    def __init__(self, data: Path, *slow_epochs: int) -> None:
        manifest = read_manifest(data)
        super().__init__(
            build_network(STUDENT, 3),
            LabelObjective(LabelLoss(PLAIN, torch.ones(3))),
            data,
            manifest,
            TRAINER,
        )
        self._images = SlowImages(data, "train", manifest)
        self._images.slow_epochs = slow_epochs

    def train_dataloader(self) -> DataLoader[Any]:
        images = EpochDataset(self._images, range(len(self._images)))
        return DataLoader(images, batch_size=4, collate_fn=as_is)

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        self._images.epoch = self.current_epoch + 1


def fit(module: SegmentationModule, history: History, *, num_epochs: int, validated_every: int = 1) -> None:
    trainer = lightning.Trainer(
        max_epochs=num_epochs,
        check_val_every_n_epoch=validated_every,
        accelerator="cpu",
        callbacks=[history],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(module)


def test_waiting_for_data_is_measured_and_said_once(workshop, tmp_path, caplog) -> None:
    history = History(tmp_path / "history.csv")
    with caplog.at_level(logging.INFO):
        fit(SlowTraining(workshop.data, 2, 3), history, num_epochs=3)
    shares = [row["data_wait_share"] for row in history.rows]
    assert shares[0] < min(shares[1:]) <= max(shares) <= 1
    for row in history.rows[1:]:
        assert 0 < row["images_per_s"] <= 8 / 1.4
        assert row["data_wait_share"] * 8 / row["images_per_s"] >= 1.4 * 0.99
    [warning] = [record.getMessage() for record in caplog.records if "waits for data" in record.message]
    assert "Raise trainer.num_workers (now 0, with " in warning
    assert sum("images/s" in record.message for record in caplog.records) == 3


def test_epoch_in_which_the_workers_start_is_not_judged(workshop, tmp_path, caplog) -> None:
    module = SlowTraining(workshop.data, 1)
    module.num_workers = 1  # those of the validation split
    fit(module, History(tmp_path / "history.csv"), num_epochs=2)
    assert "waits for data" not in caplog.text


def test_row_of_a_validated_epoch_covers_those_before_it(workshop, tmp_path) -> None:
    """The slow epochs are not the validated ones, whose own share would be small."""
    history = History(tmp_path / "history.csv")
    fit(SlowTraining(workshop.data, 1), history, num_epochs=4, validated_every=2)
    assert [row["epoch"] for row in history.rows] == [2, 4]
    first, second = history.rows
    assert 16 / first["images_per_s"] >= 1.4
    assert first["data_wait_share"] * 16 / first["images_per_s"] >= 1.4 * 0.99
    assert second["data_wait_share"] < first["data_wait_share"]
    assert second["peak_memory_mib"] >= first["peak_memory_mib"] > 50  # of a process that has imported torch
    with (tmp_path / "history.csv").open() as file:
        assert [list(row) for row in csv.DictReader(file)] == [COLUMNS, COLUMNS]


def test_training_that_resumes_after_its_last_epoch_has_its_table_and_plot(
    workshop: Workshop, tmp_path: Path
) -> None:
    config = train.Config(STUDENT, TRAINER, FRESH)
    train.train(config, data=workshop.data, out=tmp_path)
    table, plot = tmp_path / "history.csv", tmp_path / "training.png"
    before = table.read_text()
    table.unlink()
    plot.unlink()
    train.train(config, data=workshop.data, out=tmp_path)
    assert table.read_text() == before and plot.is_file()


@pytest.mark.parametrize("num_epochs", [1, 60])
def test_plot_is_readable_with_any_number_of_epochs(num_epochs: int, tmp_path: Path) -> None:
    rows = [
        {**dict.fromkeys(COLUMNS, 0.5), "epoch": epoch, "val_miou": 0.9 - 1 / (epoch + 1)}
        for epoch in range(1, num_epochs + 1)
    ]
    draw_training(rows, tmp_path / "training.png")
    with Image.open(tmp_path / "training.png") as image:
        assert image.size[0] > 1000 and "Software" not in image.info
        assert len(image.convert("L").getcolors() or []) > 50


def test_plot_of_a_training_without_any_score(tmp_path: Path) -> None:
    """No class of the validation masks is known, so mIoU is not a number."""
    draw_training([{**dict.fromkeys(COLUMNS, 0.5), "val_miou": float("nan")}], tmp_path / "training.png")
    assert (tmp_path / "training.png").is_file()
