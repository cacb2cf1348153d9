"""Checkpoints: what is written is read back, and nothing else is accepted."""

import dataclasses
import hashlib
import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tasks.core.errors import ArtifactError
from tasks.parts.networks.build import build_network
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.networks.config import OWN_NETWORKS, NetworkConfig, NetworkName
from tasks.parts.networks.model_card import CARD_KEY, ModelCard, read_card

NETWORK = NetworkConfig(NetworkName.fast_scnn, 0.25, 0.5, False)
CARD = ModelCard(NETWORK, ("background", "zwölf", "3"), (0.1, 0.2, 0.3), (0.2, 0.2, 0.2), 64, 96)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    network = build_network(NETWORK, 3).train()
    network(torch.randn(4, 3, 64, 64))  # so that the running statistics are not the fresh ones
    return network.eval()


@pytest.fixture
def path(model: nn.Module, tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_checkpoint(path, model, CARD)
    return path


def rewrite(path: Path, change: dict[str, torch.Tensor | None], card: ModelCard = CARD) -> None:
    """Change or remove tensors of a file."""
    tensors = {name: tensor for name, tensor in {**load_file(path), **change}.items() if tensor is not None}
    save_file(tensors, path, metadata={CARD_KEY: card.to_json()})


def test_loaded_model_gives_the_same_outputs_and_card(model: nn.Module, path: Path) -> None:
    loaded, card = load_checkpoint(path)
    images_NCHW = torch.randn(2, 3, 64, 96)
    assert card == CARD
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    with torch.no_grad():
        assert torch.equal(loaded(images_NCHW), model(images_NCHW))


def test_network_of_a_named_size_comes_back(tmp_path: Path) -> None:
    config = dataclasses.replace(NETWORK, name=NetworkName.segformer, arguments={"size": "b2"})
    network = build_network(config, 3).eval()
    save_checkpoint(tmp_path / "model.safetensors", network, dataclasses.replace(CARD, network=config))
    loaded, card = load_checkpoint(tmp_path / "model.safetensors")
    assert card.network == config
    assert loaded.state_dict().keys() == network.state_dict().keys()


def test_card_of_a_network_without_options_has_the_keys_that_it_always_had() -> None:
    assert set(json.loads(CARD.to_json())["network"]) == {"name", "width", "depth", "depthwise"}
    assert "code_sha256" not in json.loads(CARD.to_json())


@pytest.mark.parametrize("name", OWN_NETWORKS)
@pytest.mark.parametrize("depthwise", [False, True])
def test_every_network_comes_back(name: NetworkName, depthwise: bool, tmp_path: Path) -> None:
    config = NetworkConfig(name, 0.25, 0.5, depthwise)
    model = build_network(config, 3).eval()
    save_checkpoint(tmp_path / "a", model, dataclasses.replace(CARD, network=config))
    loaded, _ = load_checkpoint(tmp_path / "a")
    images_NCHW = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(loaded(images_NCHW), model(images_NCHW))


def test_equal_content_gives_equal_bytes(model: nn.Module, path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.safetensors"
    loaded, card = load_checkpoint(path)
    save_checkpoint(again, loaded.to(memory_format=torch.channels_last), card)
    assert hashlib.sha256(again.read_bytes()).digest() == hashlib.sha256(path.read_bytes()).digest()


def test_compiled_model_is_saved_without_its_prefix(model: nn.Module, path: Path, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "compiled", torch.compile(model), CARD)  # type: ignore[arg-type]
    assert (tmp_path / "compiled").read_bytes() == path.read_bytes()


def test_loading_leaves_the_random_state_alone(path: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    load_checkpoint(path)
    assert torch.equal(torch.rand(3), expected)


def test_card_is_read_without_torch(path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tasks.parts.networks.model_card import read_card\n"
        f"print(read_card(Path({str(path)!r})).network.name, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["fast_scnn", "False"]


def test_missing_and_extra_keys_are_listed(path: Path) -> None:
    rewrite(path, {"classifier.bias": None, "stranger": torch.zeros(1)})
    with pytest.raises(ArtifactError, match=r"Missing \(1\): classifier\.bias.*Not expected \(1\): stranger"):
        load_checkpoint(path)


@pytest.mark.parametrize(("prefix", "hint"), [("_orig_mod.", "torch.compile"), ("model.", "Lightning")])
def test_prefix_of_a_wrapper_is_named(path: Path, prefix: str, hint: str) -> None:
    tensors = {prefix + name: tensor for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={CARD_KEY: CARD.to_json()})
    with pytest.raises(ArtifactError, match=hint):
        load_checkpoint(path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_named(path: Path, model: nn.Module, value: float) -> None:
    weight = load_file(path)["classifier.weight"]
    weight[0, 0] = value
    rewrite(path, {"classifier.weight": weight})
    with pytest.raises(ArtifactError, match=r"NaN or infinite.*classifier\.weight"):
        load_checkpoint(path)
    with torch.no_grad():
        model.get_parameter("classifier.weight").fill_(value)
    with pytest.raises(ArtifactError, match=r"NaN or infinite.*classifier\.weight"):
        save_checkpoint(path, model, CARD)


def test_foreign_safetensors_file_is_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "foreign.safetensors", metadata={"format": "pt"})
    with pytest.raises(ArtifactError, match="without a model card"):
        load_checkpoint(tmp_path / "foreign.safetensors")


def test_pickle_is_refused_unopened(tmp_path: Path, model: nn.Module) -> None:
    torch.save(model.state_dict(), tmp_path / "zip.pt")
    torch.save(model.state_dict(), tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    for name in ("zip.pt", "old.pt"):
        with pytest.raises(ArtifactError, match="can run code"):
            load_checkpoint(tmp_path / name)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot be read: No such file"):
        read_card(tmp_path / "nothing")


def test_file_torn_anywhere_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    header_bytes = 8 + struct.unpack("<Q", whole[:8])[0]
    for length in (0, 1, 7, 8, 100, header_bytes - 1, header_bytes, header_bytes + 1, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ArtifactError, match=r"empty|damaged"):
            read_card(path)
        with pytest.raises(ArtifactError, match=r"empty|damaged"):
            load_checkpoint(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ArtifactError, match="damaged"):
        load_checkpoint(path)


@pytest.mark.parametrize("content", [b"not a checkpoint at all", b"\x02" + b"\0" * 7 + b"[]", b"\0" * 64])
def test_garbage_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(ArtifactError):
        load_checkpoint(tmp_path / "a")


def test_damaged_tensor_table_is_refused(path: Path) -> None:
    header = {
        "__metadata__": {CARD_KEY: CARD.to_json()},
        "a": {"dtype": "F32", "shape": [1], "data_offsets": "x"},
    }
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(ArtifactError, match="list of tensors cannot be read"):
        read_card(path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"network": 3}', CARD.to_json().replace("fast_scnn", "resnet"), '{"network": {}}'],
)
def test_unreadable_card_names_the_file(path: Path, text: str) -> None:
    save_file(load_file(path), path, metadata={CARD_KEY: text})
    with pytest.raises(ArtifactError, match=r"model\.safetensors: The model card cannot be read"):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"classes": ("one",)}, "two different names"),
        ({"classes": ("a", "a")}, "two different names"),
        ({"std": (0.1, 0.0, 0.1)}, "std is"),
        ({"mean": (0.1, float("nan"), 0.1)}, "mean is"),
        ({"height": 0}, "image size is 0x96"),
    ],
)
def test_impossible_card_is_refused(change: dict[str, object], text: str) -> None:
    with pytest.raises(ArtifactError, match=text):
        dataclasses.replace(CARD, **change)  # type: ignore[arg-type]


def test_card_with_another_number_of_classes_is_refused(path: Path) -> None:
    rewrite(path, {}, card=dataclasses.replace(CARD, classes=("a", "b", "c", "d")))
    with pytest.raises(ArtifactError, match=r"\(1, 3, 64, 64\), expected \(1, 4, 64, 64\).*names 4"):
        load_checkpoint(path)
    rewrite(path, {}, card=dataclasses.replace(CARD, classes=("a", "b")))
    with pytest.raises(ArtifactError, match=r"'classifier\.(weight|bias)' is \[3.*\[2"):
        load_checkpoint(path)


def test_layers_that_do_not_fit_together_are_refused(path: Path) -> None:
    weight = load_file(path)["classifier.weight"]
    rewrite(path, {"classifier.weight": weight[:, :-8].contiguous()})
    with pytest.raises(ArtifactError, match="do not fit together"):
        load_checkpoint(path)


def test_another_kernel_size_is_refused(path: Path) -> None:
    rewrite(path, {"classifier.weight": torch.zeros(3, 32, 3, 3)})
    with pytest.raises(ArtifactError, match=r"'classifier\.weight' is \[3, 32, 3, 3\]"):
        load_checkpoint(path)
