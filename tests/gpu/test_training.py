"""Training on a GPU."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tasks import train
from tasks.parts.training.config import Accelerator, Precision
from tests.tasks.test_train import FRESH, STUDENT, TRAINER, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU on this machine"),
]


@pytest.mark.parametrize("precision", list(Precision))
def test_every_precision_trains_on_a_gpu(workshop, tmp_path: Path, precision: Precision) -> None:
    trainer = replace(TRAINER, accelerator=Accelerator.gpu, precision=precision)
    report = run(train.train, train.Config(STUDENT, trainer, FRESH), tmp_path / "a", data=workshop.data)
    assert report.num_epochs == TRAINER.max_epochs
    with (tmp_path / "a" / "history.csv").open() as file:
        peaks = [float(row["peak_memory_mib"]) for row in csv.DictReader(file)]
    assert peaks[-1] == pytest.approx(torch.cuda.max_memory_allocated() / 2**20, abs=0.1)
