"""Stages on a data set that is no copy give what they give on a copy of it; prepare_data.copy=false."""

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.check_int8 import check_int8
from tasks.parts.data.dataset import open_images
from tasks.parts.data.lazy_array import LazyArray
from tasks.parts.networks.checkpoint import load_checkpoint
from tasks.parts.pruning.recovery import batch_losses, measure_val_score
from tasks.parts.quantization.config import Activations, Calibrator
from tasks.prepare_data import prepare_data
from tasks.quantize_ptq import Config as QuantizeConfig
from tasks.quantize_ptq import quantize_ptq
from tasks.rank_groups import Config as GroupsConfig
from tasks.rank_groups import rank_groups
from tasks.rank_layers import Config as RankConfig
from tasks.rank_layers import rank_layers
from tasks.validate import validate
from tests.tasks.conftest import ANYWAY, CLASSES, HEIGHT, OP_TYPES, WIDTH, Workshop
from tests.tasks.parts.sources.runs import config_of
from tests.tasks.parts.sources.test_windowed_splits import write_folder
from tests.tasks.test_check_int8 import CONFIG as CHECK
from tests.tasks.test_train import TRAINER
from tests.tasks.test_validate import CONFIG as VALIDATE

QUANTIZE = QuantizeConfig([Calibrator.minmax], [100.0], 3, 4, 2, 20.0, OP_TYPES, [Activations.uint8])


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The same images in windows of the size of the workshop's network: as a copy, and as lists of files."""
    root = tmp_path_factory.mktemp("source")
    write_folder(root, smallest=(HEIGHT + 8, WIDTH + 8))
    (root / "classes.yaml").write_text(
        f"classes: [{', '.join(CLASSES)}]\nignore_index: 255\n", encoding="utf-8"
    )
    prepared = []
    for copy in (True, False):
        out = tmp_path_factory.mktemp("prepared")
        config = config_of("folder", resize_mode="windows", window_overlap=15)
        prepare_data(replace(config, height=HEIGHT, width=WIDTH, copy=copy), root=root, out=out)
        prepared.append(out / "dataset")
    assert isinstance(open_images(prepared[1], "val"), LazyArray)
    return prepared[0], prepared[1]


def both(
    datasets: tuple[Path, Path], tmp_path: Path, stage: Callable[..., Any], config: Any, **inputs: Path
) -> Path:
    """Run a stage on both, hold their reports and files against each other, and return a folder with the files."""
    reports, files = [], []
    for data in datasets:
        out = tmp_path / data.parent.name
        out.mkdir()
        reports.append(asdict(stage(config, **inputs, data=data, out=out)))
        files.append({path.name: path for path in out.iterdir() if path.is_file()})
    assert repr(reports[0]) == repr(reports[1])
    assert list(files[0]) and files[0].keys() == files[1].keys()
    for name, path in files[0].items():
        if path.suffix == ".npz":
            with np.load(path) as one, np.load(files[1][name]) as two:
                assert all((one[key] == two[key]).all() for key in one)
        else:
            assert path.read_bytes() == files[1][name].read_bytes(), name
    return tmp_path / datasets[0].parent.name


def test_quantization_ranking_and_checks(
    workshop: Workshop, datasets: tuple[Path, Path], tmp_path: Path
) -> None:
    for name in ("ptq", "rank", "check"):
        (tmp_path / name).mkdir()
    quantized = both(datasets, tmp_path / "ptq", quantize_ptq, QUANTIZE, model=workshop.graph)
    ranges = quantized / "ranges.json"
    model, ranges = workshop.graph, quantized / "ranges.json"
    config = RankConfig(op_types=OP_TYPES, num_images=2, num_val_images=2, batch_size=4, **ANYWAY)
    inputs = {"model": model, "ranges": ranges, "results": quantized / "images.npz"}
    ranked = both(datasets, tmp_path / "rank", rank_layers, config, **inputs)
    files = {"trials": quantized / "calibrators.csv", "ranking": ranked / "ranking.csv"}
    both(
        datasets,
        tmp_path / "check",
        check_int8,
        replace(CHECK, op_types=OP_TYPES),
        model=model,
        quantized=quantized / "model.onnx",
        ranges=ranges,
        **files,
    )


def test_validation_and_comparison_of_an_engine(
    workshop: Workshop, datasets: tuple[Path, Path], tmp_path: Path
) -> None:
    engine = workshop.engine("float", "cpu_onnxruntime")
    both(datasets, tmp_path, validate, VALIDATE, engine=engine)


def test_pruning(workshop: Workshop, datasets: tuple[Path, Path], tmp_path: Path) -> None:
    config = GroupsConfig(
        ratios=[0.5], channel_multiple=4, num_train_images=4, num_val_images=2, batch_size=3, max_minutes=60.0
    )
    both(datasets, tmp_path, rank_groups, config, checkpoint=workshop.checkpoint)
    network, card = load_checkpoint(workshop.checkpoint)
    copied, listed = (
        (
            measure_val_score(network, card, data, 2),
            [
                loss.item()
                for loss in batch_losses(network, data, trainer=TRAINER, num_images=5, batch_size=2)
            ],
        )
        for data in datasets
    )
    assert copied == listed
