"""Finished weights: all of them fit, or the file is refused with what is wrong."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flows.convert_weights import convert
from flows.convert_weights import main as convert_main
from tasks.core.errors import ArtifactError, ConfigError
from tasks.import_checkpoint import Config, import_checkpoint
from tasks.parts.data.dataset import open_split
from tasks.parts.data.reading import Reading, ResizeMode
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.model_card import read_card
from tasks.parts.training.predict import measure_miou
from tests.tasks.conftest import Workshop

NETWORK = NetworkConfig(NetworkName.fast_scnn, 0.25, 0.34, False)
CONFIG = Config(NETWORK, batch_size=4)


@pytest.fixture
def tensors(workshop: Workshop) -> dict[str, Tensor]:
    return load_file(workshop.checkpoint)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def test_weights_of_others_become_a_checkpoint(
    workshop: Workshop, tensors: dict[str, Tensor], out: Path
) -> None:
    weights = out.parent / "weights.safetensors"
    old = {f"module.{key}": item for key, item in tensors.items() if not key.endswith("num_batches_tracked")}
    save_file(old, weights)
    report = import_checkpoint(CONFIG, weights=weights, data=workshop.data, out=out)
    network, card = load_checkpoint(out / "model.safetensors")
    expected, expected_card = load_checkpoint(workshop.checkpoint)
    images_NHWC, masks_NHW = open_split(workshop.data, "val")
    assert card == expected_card
    assert report.val_score == measure_miou(expected, images_NHWC, masks_NHW, card, batch_size=2)
    assert report.num_parameters == sum(parameter.numel() for parameter in network.parameters())


def test_checkpoint_of_this_pipeline_says_itself_what_it_is(workshop: Workshop, out: Path) -> None:
    other = dataclasses.replace(CONFIG, network=dataclasses.replace(NETWORK, name=NetworkName.bisenetv2))
    import_checkpoint(other, weights=workshop.checkpoint, data=workshop.data, out=out)
    assert read_card(out / "model.safetensors") == read_card(workshop.checkpoint)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"height": 32},
            r"trained on images of 32x96, prepare_data makes them 64x96. Set prepare_data.height=32",
        ),
        ({"mean": (0.1, 0.2, 0.3)}, r"Set prepare_data.mean=\[0.1, 0.2, 0.3\]"),
        ({"classes": ("background", "one", "zero")}, r"has the classes \['background', 'one', 'zero'\]"),
        (
            {"reading": Reading(value_range=(0, 4095))},
            r"\[0.0, 4095.0\], the data set has null. Set prepare_data.folder.value_range=\[0.0, 4095.0\]",
        ),
        (
            {"reading": Reading(resize_mode=ResizeMode.crop)},
            r"resize_mode crop, the data set has resize. Set prepare_data.folder.resize_mode=crop",
        ),
        (
            {"reading": Reading(types=("uint16",))},
            r"values of type uint16, the data set has uint8, too. Convert these files",
        ),
    ],
)
def test_checkpoint_for_other_images_is_refused(
    workshop: Workshop, out: Path, changes: dict[str, object], message: str
) -> None:
    network, card = load_checkpoint(workshop.checkpoint)
    save_checkpoint(out.parent / "other.safetensors", network, dataclasses.replace(card, **changes))
    with pytest.raises(ArtifactError, match=message):
        import_checkpoint(CONFIG, weights=out.parent / "other.safetensors", data=workshop.data, out=out)


def test_checkpoint_of_more_types_of_files_is_taken(workshop: Workshop, out: Path) -> None:
    network, card = load_checkpoint(workshop.checkpoint)
    card = dataclasses.replace(card, reading=Reading(types=("uint16", "uint8")))
    save_checkpoint(out.parent / "other.safetensors", network, card)
    import_checkpoint(CONFIG, weights=out.parent / "other.safetensors", data=workshop.data, out=out)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda own: own.pop("classifier.weight"), r"1 of the \d+ tensors are missing: classifier.weight"),
        (lambda own: own.update(extra=torch.zeros(1)), "1 belong to nothing in the network: extra"),
        (
            lambda own: own.update({"classifier.bias": torch.zeros(7)}),
            r"1 have another shape: classifier.bias \(\[7\] in the file, \[3\] in the network\)",
        ),
        (lambda own: own["classifier.bias"].fill_(torch.nan), "1 are not finite: classifier.bias"),
    ],
)
def test_weights_that_do_not_fit_are_refused_with_what_is_wrong(
    workshop: Workshop,
    tensors: dict[str, Tensor],
    out: Path,
    change: Callable[[dict[str, Tensor]], object],
    message: str,
) -> None:
    change(tensors)
    save_file(tensors, out.parent / "weights.safetensors")
    with pytest.raises(ArtifactError, match=rf"does not fit the network fast_scnn: {message}"):
        import_checkpoint(CONFIG, weights=out.parent / "weights.safetensors", data=workshop.data, out=out)


def test_file_of_another_kind_is_refused(workshop: Workshop, out: Path) -> None:
    for name, content in (("a.safetensors", b"weights"), ("a.pt", b"PK\x03\x04")):
        (out.parent / name).write_bytes(content)
        with pytest.raises(ArtifactError, match=r"\(train.<network>.checkpoint\) is damaged"):
            import_checkpoint(CONFIG, weights=out.parent / name, data=workshop.data, out=out)
    with pytest.raises(ArtifactError, match="cannot be read: No such file"):
        import_checkpoint(CONFIG, weights=out.parent / "none", data=workshop.data, out=out)


def test_state_dict_of_torch_is_converted(
    workshop: Workshop, tensors: dict[str, Tensor], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"model_state_dict": tensors, "epoch": 3}, tmp_path / "a.pt")
    assert convert_main([str(tmp_path / "a.pt"), str(tmp_path / "a.safetensors")]) == 0
    assert f"a.safetensors: {len(tensors)} tensors" in capsys.readouterr().out
    assert load_file(tmp_path / "a.safetensors").keys() == tensors.keys()
    assert convert_main([str(tmp_path / "a.pt"), str(tmp_path / "a.safetensors")]) == 1
    assert "expected a new file that ends with .safetensors" in capsys.readouterr().err


class Unknown:
    """What a pickle may not bring."""


def test_pickle_that_needs_code_and_a_missing_file_are_not_converted(tmp_path: Path) -> None:
    torch.save({"model": Unknown()}, tmp_path / "a.pt")
    with pytest.raises(ArtifactError, match=r"a.pt \(source\) needs code to be run"):
        convert(tmp_path / "a.pt", tmp_path / "a.safetensors")
    assert not (tmp_path / "a.safetensors").exists()
    with pytest.raises(ConfigError, match=r"b\.pt is missing"):
        convert(tmp_path / "b.pt", tmp_path / "b.safetensors")
    shutil.copy(tmp_path / "a.pt", tmp_path / "c.pt")
    with pytest.raises(ConfigError, match=r"ends with \.safetensors"):
        convert(tmp_path / "c.pt", tmp_path / "c.pt2")
