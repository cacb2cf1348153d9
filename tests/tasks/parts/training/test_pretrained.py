"""Pretrained weights: what fits is taken, what does not is named."""

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tasks.core.errors import ArtifactError, ConfigError
from tasks.parts.networks.build import build_network
from tasks.parts.networks.config import OWN_NETWORKS, NetworkConfig, NetworkName
from tasks.parts.training.pretrained import PretrainedConfig, load_pretrained
from tests.conftest import checked

FAST_SCNN, SEGFORMER, DINOV2 = NetworkName.fast_scnn, NetworkName.segformer, NetworkName.dinov2


def build(
    name: NetworkName = FAST_SCNN,
    *,
    seed: int = 0,
    width: float = 0.25,
    depth: float = 0.1,
    classes: int = 3,
    bands: int = 3,
) -> nn.Module:
    torch.manual_seed(seed)
    return build_network(NetworkConfig(name, width, depth, False), classes, num_channels=bands)


def declared(path: Path) -> PretrainedConfig:
    return PretrainedConfig(str(path), hashlib.sha256(path.read_bytes()).hexdigest())


def safetensors(path: Path, tensors: dict[str, Tensor]) -> PretrainedConfig:
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return declared(path)


@pytest.mark.parametrize("name", OWN_NETWORKS)
def test_every_network_takes_its_own_weights(name: NetworkName, tmp_path: Path) -> None:
    source, network = build(name, seed=1), build(name)
    report = load_pretrained(network, name, safetensors(tmp_path / "a.safetensors", source.state_dict()))
    assert report is not None and (report.num_fresh, report.num_skipped) == (0, 0)
    assert report.num_loaded == len(source.state_dict())
    for key, tensor in network.state_dict().items():
        torch.testing.assert_close(tensor, source.state_dict()[key], msg=key)


@pytest.mark.parametrize("bands", [1, 4])
@pytest.mark.parametrize("name", OWN_NETWORKS)
def test_weights_of_rgb_images_answer_alike_for_equal_bands_c5(
    name: NetworkName, bands: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    source, network = build(name, seed=1).eval(), build(name, bands=bands).eval()
    report = load_pretrained(network, name, safetensors(tmp_path / "a.safetensors", source.state_dict()))
    assert report is not None and (report.num_fresh, report.num_skipped) == (0, 0)
    assert f"read RGB, and now {bands} bands" in caplog.text
    grey_N1HW = torch.rand(2, 1, 64, 64)
    with torch.no_grad():
        expected_NCHW = source(grey_N1HW.expand(-1, 3, -1, -1))
        torch.testing.assert_close(
            network(grey_N1HW.expand(-1, bands, -1, -1)), expected_NCHW, rtol=1e-3, atol=1e-4
        )


@pytest.mark.parametrize("wrap", [lambda state: state, lambda state: {"state_dict": state, "epoch": 3}])
def test_a_torch_file_of_tensors_is_taken_also_with_the_prefix_of_a_wrapper(
    wrap: Any, tmp_path: Path
) -> None:
    source, network = build(seed=1), build()
    torch.save(wrap({f"module.{key}": item for key, item in source.state_dict().items()}), tmp_path / "a.pt")
    report = load_pretrained(network, FAST_SCNN, declared(tmp_path / "a.pt"))
    assert report is not None and report.num_loaded == len(source.state_dict())


def test_nothing_is_read_without_a_file() -> None:
    assert load_pretrained(build(), FAST_SCNN, PretrainedConfig(None, None)) is None


def test_a_classifier_of_other_classes_stays_fresh(tmp_path: Path) -> None:
    network = build()
    fresh = network.get_parameter("classifier.weight").clone()
    config = safetensors(tmp_path / "a.safetensors", build(seed=1, classes=9).state_dict())
    report = load_pretrained(network, FAST_SCNN, config)
    assert report is not None and (report.num_fresh, report.num_skipped) == (2, 2)
    assert torch.equal(network.get_parameter("classifier.weight"), fresh)


@pytest.mark.parametrize(
    ("name", "published", "own"),
    [
        (
            SEGFORMER,
            "segformer.encoder.patch_embeddings.1.proj.weight",
            "stages.1.patch_embeddings.proj.weight",
        ),
        (
            SEGFORMER,
            "segformer.encoder.block.0.0.attention.self.query.bias",
            "stages.0.blocks.0.attention.q_proj.bias",
        ),
        (
            SEGFORMER,
            "encoder.block.0.0.attention.output.dense.bias",
            "stages.0.blocks.0.attention.o_proj.bias",
        ),
        (
            SEGFORMER,
            "segformer.encoder.block.0.0.attention.self.sr.weight",
            "stages.0.blocks.0.attention.sequence_reduction.sequence_reduction.weight",
        ),
        (
            SEGFORMER,
            "segformer.encoder.block.0.0.attention.self.layer_norm.weight",
            "stages.0.blocks.0.attention.sequence_reduction.layer_norm.weight",
        ),
        (
            SEGFORMER,
            "segformer.encoder.block.3.0.layer_norm_1.weight",
            "stages.3.blocks.0.layernorm_before.weight",
        ),
        (
            SEGFORMER,
            "segformer.encoder.block.3.0.layer_norm_2.weight",
            "stages.3.blocks.0.layernorm_after.weight",
        ),
        (SEGFORMER, "segformer.encoder.block.3.0.mlp.dense2.weight", "stages.3.blocks.0.mlp.fc2.weight"),
        (SEGFORMER, "segformer.encoder.layer_norm.2.bias", "stages.2.layer_norm.bias"),
        (SEGFORMER, "stages.2.layer_norm.bias", "stages.2.layer_norm.bias"),
        (SEGFORMER, "decode_head.linear_c.3.proj.bias", "decode_head.linear_projections.3.proj.bias"),
        (DINOV2, "embeddings.cls_token", "embeddings.cls_token"),
        (
            DINOV2,
            "encoder.layer.0.attention.attention.value.weight",
            "encoder.layer.0.attention.v_proj.weight",
        ),
        (
            DINOV2,
            "dinov2.encoder.layer.0.attention.output.dense.bias",
            "encoder.layer.0.attention.o_proj.bias",
        ),
        (DINOV2, "layernorm.weight", "layernorm.weight"),
    ],
)
def test_names_of_published_files_are_understood(
    name: NetworkName, published: str, own: str, tmp_path: Path
) -> None:
    network = build(name)
    key = own if own.startswith("decode_head") else f"{name}.{own}"
    given = torch.randn_like(network.state_dict()[key])
    report = load_pretrained(network, name, safetensors(tmp_path / "a.safetensors", {published: given}))
    assert report is not None and report.num_loaded == 1
    assert torch.equal(network.state_dict()[key], given)


def test_weights_of_another_width_list_both_shapes(tmp_path: Path) -> None:
    config = safetensors(tmp_path / "a.safetensors", build(width=0.5).state_dict())
    with pytest.raises(ArtifactError, match=r"another shape: .* is \[.*the network has \[.*network\.width"):
        load_pretrained(build(), FAST_SCNN, config)


@pytest.mark.parametrize("name", [SEGFORMER, DINOV2])
def test_weights_of_a_deeper_network_of_the_family_are_refused(name: NetworkName, tmp_path: Path) -> None:
    depth = 0.2 if name is DINOV2 else 1.0
    config = safetensors(tmp_path / "a.safetensors", build(name, depth=depth).state_dict())
    with pytest.raises(
        ArtifactError, match=r"it has \d+ tensors, the network \d+; \d+ belong to .*\.1\..*network\.depth"
    ):
        load_pretrained(build(name), name, config)


def test_parts_that_the_network_has_not_are_skipped(tmp_path: Path) -> None:
    state = build(DINOV2, seed=1).state_dict()
    extra = {"dinov2.embeddings.mask_token": torch.zeros(1, 64), "other_head.0.weight": torch.zeros(2)}
    report = load_pretrained(build(DINOV2), DINOV2, safetensors(tmp_path / "a.safetensors", state | extra))
    assert report is not None and (report.num_loaded, report.num_skipped) == (len(state), 2)


def test_a_segformer_with_another_decoder_is_told_to_give_its_encoder(tmp_path: Path) -> None:
    state = build(SEGFORMER, seed=1).state_dict()
    encoder = {key: tensor for key, tensor in state.items() if not key.startswith("decode_head.")}
    other = encoder | {"decode_head.linear_fuse.weight": torch.zeros(256, 1024, 1, 1)}
    with pytest.raises(ArtifactError, match=r"The encoder fits.*without the tensors decode_head\.\*"):
        load_pretrained(build(SEGFORMER), SEGFORMER, safetensors(tmp_path / "a.safetensors", other))
    report = load_pretrained(build(SEGFORMER), SEGFORMER, safetensors(tmp_path / "b.safetensors", encoder))
    assert report is not None and report.num_loaded == len(encoder)


def test_a_folder_gives_its_model_file_or_says_what_it_holds(tmp_path: Path) -> None:
    network = build(seed=1)
    config = safetensors(tmp_path / "model.safetensors", network.state_dict())
    report = load_pretrained(build(), FAST_SCNN, PretrainedConfig(str(tmp_path), config.sha256))
    assert report is not None and report.num_loaded == len(network.state_dict())
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ArtifactError, match=r"is a folder without model\.safetensors; .*It holds: pytorch_model\.bin"
    ):
        load_pretrained(build(), FAST_SCNN, PretrainedConfig(str(tmp_path), config.sha256))


def test_weights_of_another_network_list_both_names(tmp_path: Path) -> None:
    config = safetensors(tmp_path / "a.safetensors", {"backbone.conv1": torch.zeros(2)})
    with pytest.raises(
        ArtifactError, match=r"none of its 1 tensors.*Found backbone\.conv1; expected .*network\.name"
    ):
        load_pretrained(build(), FAST_SCNN, config)
    only_classifier = {"classifier.weight": build().get_parameter("classifier.weight")}
    with pytest.raises(ArtifactError, match="does not fit fast_scnn"):
        load_pretrained(build(), FAST_SCNN, safetensors(tmp_path / "b.safetensors", only_classifier))


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_a_torn_file_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{kind}"
    save_file(build().state_dict(), path) if kind == "safetensors" else torch.save(build().state_dict(), path)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ArtifactError, match="is damaged"):
        load_pretrained(build(), FAST_SCNN, declared(path))


class Planted:
    """What a hostile pickle does when it is opened carelessly."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("planted",)


def test_a_pickle_that_needs_code_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for content in (Planted(), build()):
        torch.save(content, "a.pt")
        with pytest.raises(ArtifactError, match=r"needs code to be run.*model\.state_dict\(\)"):
            load_pretrained(build(), FAST_SCNN, declared(Path("a.pt")))
    assert not Path("planted").exists()


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    torch.save([1, 2], tmp_path / "a.pt")
    with pytest.raises(ArtifactError, match="holds no tensors by name"):
        load_pretrained(build(), FAST_SCNN, declared(tmp_path / "a.pt"))


def test_nan_weights_are_named(tmp_path: Path) -> None:
    state = build().state_dict()
    state["classifier.weight"][0] = float("nan")
    with pytest.raises(ArtifactError, match=r"NaN or infinite values in 1 tensors: classifier\.weight"):
        load_pretrained(build(), FAST_SCNN, safetensors(tmp_path / "a.safetensors", state))


def test_other_content_than_declared_prints_the_found_sum_to_copy(tmp_path: Path) -> None:
    found = safetensors(tmp_path / "a.safetensors", build().state_dict())
    with pytest.raises(ArtifactError, match=rf"set pretrained\.sha256={found.sha256}"):
        load_pretrained(build(), FAST_SCNN, PretrainedConfig(found.file, "0" * 64))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"nothing\.pt \(pretrained\.file\) cannot be read: No such file"):
        load_pretrained(build(), FAST_SCNN, PretrainedConfig(str(tmp_path / "nothing.pt"), "0" * 64))


@pytest.mark.parametrize(("file", "sha256"), [("a.pt", None), (None, "0" * 64), ("a.pt", "short")])
def test_impossible_values_name_their_key(file: str | None, sha256: str | None) -> None:
    with pytest.raises(ConfigError, match=r"train\.pretrained\.(file|sha256) is .*expected .*sha256sum"):
        checked(PretrainedConfig(None, None), "train.pretrained", file=file, sha256=sha256)
