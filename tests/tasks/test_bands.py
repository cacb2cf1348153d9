"""Grey and multi-band images from their files to an engine, with networks of this package."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tasks.build_engine import build_engine
from tasks.export_onnx import Config as ExportConfig
from tasks.export_onnx import export_onnx
from tasks.finetune import Config as FinetuneConfig
from tasks.finetune import finetune
from tasks.parts.data.contact_sheet import draw_contact_sheet
from tasks.parts.data.dataset import calibration_images, open_split
from tasks.parts.data.dataset_writer import SplitBatches, batches_of, write_dataset
from tasks.parts.data.input_card import Task
from tasks.parts.engines.frame_engine.engine import load_engine
from tasks.parts.networks.blocks import image_channels
from tasks.parts.networks.build import build_network
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.networks.config import OWN_NETWORKS, NetworkConfig, NetworkName
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.pruning.channel_groups import cut_group, list_groups
from tasks.parts.quantization.config import Activations, Calibrator
from tasks.parts.selection.bundle import write_bundle
from tasks.parts.training.config import DistillationConfig
from tasks.quantize_ptq import Config as QuantizeConfig
from tasks.quantize_ptq import quantize_ptq
from tasks.train import Config as TrainConfig
from tasks.train import train
from tasks.validate import Config as ValidateConfig
from tasks.validate import validate
from tests.tasks.conftest import Workshop
from tests.tasks.test_every_network import OP_TYPES
from tests.tasks.test_train import FRESH, TRAINER

CLASSES, SIDE = ("low", "high"), 64


def write_bands(folder: Path, num_bands: int) -> Path:
    random = np.random.default_rng(0)
    coarse_NHWC = random.integers(0, 256, (12, 8, 8, num_bands)).astype(np.uint8)
    images_NHWC = coarse_NHWC.repeat(SIDE // 8, axis=1).repeat(SIDE // 8, axis=2)
    masks_NHW = (images_NHWC[..., -1] > 127).astype(np.uint8)
    splits = {
        split: SplitBatches(count, [*batches_of(images_NHWC[:count], masks_NHW[:count])])
        for split, count in (("train", 12), ("val", 4), ("test", 6), ("calibration", 4))
    }
    write_dataset(
        folder,
        task=Task.segmentation,
        classes=CLASSES,
        height=SIDE,
        width=SIDE,
        source="folder",
        splits=splits,
        channels=num_bands,
    )
    return folder


@pytest.mark.parametrize("num_bands", [1, 6])
def test_bands_from_training_to_the_answers_of_a_bundle_c5(
    num_bands: int, workshop: Workshop, tmp_path: Path
) -> None:
    data = write_bands(tmp_path / "data", num_bands)
    folders = [
        tmp_path / name for name in ("train", "prune", "finetune", "export", "ptq", "built", "validate")
    ]
    for folder in folders:
        folder.mkdir()
    trained, pruned, tuned, exported, ptq, built, validated = folders
    network = NetworkConfig(NetworkName.deeplabv3plus, 0.25, 0.5, False)
    train(TrainConfig(network, replace(TRAINER, max_epochs=1), FRESH), data=data, out=trained)
    whole, card = load_checkpoint(trained / "model.safetensors")
    group = next(group for group in list_groups(whole, (SIDE, SIDE)) if group.root == "stem.0.conv")
    cut_group(whole, group, 2, size=(SIDE, SIDE))
    save_checkpoint(pruned / "model.safetensors", whole, card)
    labels_alone = DistillationConfig(1.0, 0.0, 0.0, 0.0, 2.0)
    tuning = FinetuneConfig(labels_alone, replace(TRAINER, max_epochs=1))
    checkpoint = pruned / "model.safetensors"
    finetune(tuning, checkpoint=checkpoint, teacher=checkpoint, data=data, out=tuned)
    exporting = ExportConfig(opset=20, batch_sizes=[1, 2], max_abs_difference=1e-3, min_sqnr_db=80.0, seed=0)
    export_onnx(exporting, checkpoint=tuned / "model.safetensors", out=exported)
    quantizing = QuantizeConfig([Calibrator.minmax], [100.0], 4, 4, 0, 5.0, OP_TYPES, [Activations.uint8])
    quantize_ptq(quantizing, model=exported / "model.onnx", data=data, out=ptq)
    target = workshop.target("cpu_onnxruntime", reads="frames", gives="classes")
    images = calibration_images(data)
    assert build_engine(target, model=ptq / "model.onnx", images=images, out=built).status == "built"
    validation = ValidateConfig("val", "test", 4)
    report = validate(validation, engine=built / "engine", data=data, out=validated)
    assert report.accuracy is not None and report.accuracy.miou is not None
    row = {"variant": "pruned_ptq", "target": target.name}
    assert write_bundle(built / "engine", row, tmp_path / "bundle")
    frames_NHWC, masks_NHW = (np.asarray(array) for array in open_split(data, "val"))
    answers_NHW = load_engine(tmp_path / "bundle").predict(frames_NHWC)
    right = [((answers_NHW == n) & (masks_NHW == n)).sum() for n in range(2)]
    either = [((answers_NHW == n) | (masks_NHW == n)).sum() for n in range(2)]
    assert np.mean(np.divide(right, either)) == pytest.approx(report.accuracy.miou, abs=0.002)


@pytest.mark.parametrize("name", OWN_NETWORKS)
def test_every_network_reads_bands_and_is_rebuilt_c5(name: NetworkName, tmp_path: Path) -> None:
    num_bands = 5
    config, path = NetworkConfig(name, 0.25, 0.1, False), tmp_path / "model.safetensors"
    torch.manual_seed(0)
    network: nn.Module = build_network(config, 2, num_channels=num_bands).eval()
    assert image_channels(network) == num_bands
    values = (0.5,) * num_bands
    save_checkpoint(path, network, ModelCard(config, CLASSES, values, values, SIDE, SIDE))
    images_NCHW = torch.randn(1, num_bands, SIDE, SIDE)
    with torch.no_grad():
        assert torch.equal(load_checkpoint(path)[0](images_NCHW), network(images_NCHW))


@pytest.mark.parametrize(("num_bands", "shown"), [(1, [0, 0, 0]), (2, [0, 0, 0]), (6, [0, 1, 2])])
def test_contact_sheet_shows_the_first_three_bands_or_the_first_in_grey_c5(
    num_bands: int, shown: list[int], tmp_path: Path
) -> None:
    image_HWC = np.broadcast_to(np.arange(50, 50 + 30 * num_bands, 30, np.uint8), (SIDE, SIDE, num_bands))
    mask_HW = np.zeros((SIDE, SIDE), np.uint8)
    draw_contact_sheet(
        tmp_path / "sheet.png", classes=CLASSES, samples={"val": (image_HWC[None], mask_HW[None])}
    )
    with Image.open(tmp_path / "sheet.png") as sheet:
        colours = {colour for _, colour in sheet.convert("RGB").getcolors(1 << 20)}
    assert tuple(int(image_HWC[0, 0, band]) for band in shown) in colours
