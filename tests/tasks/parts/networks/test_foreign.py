"""Networks that are not in the package: found by running them, refused by name, and like our own afterwards."""

import copy
import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tasks.core import environment
from tasks.core.errors import ArtifactError, ConfigError
from tasks.parts.networks.build import build_network
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.networks.config import ENTRY_POINTS, NetworkConfig, NetworkName
from tasks.parts.networks.foreign import ForeignNetwork, logits_of
from tasks.parts.networks.foreign_code import code_sha256, network_facts
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.onnx_graphs.export import export_graph
from tasks.parts.pruning.channel_groups import cut_group, layers_kept_whole, list_groups
from tasks.parts.pruning.macs import measure_convs
from tests.tasks.conftest import CLASSES, HEIGHT, REPOSITORY, WIDTH
from tests.tasks.core.test_imported_packages import install

SIZE = (HEIGHT, WIDTH)
TINY_SEGFORMER = {
    "model_type": "segformer",
    "hidden_sizes": [8, 8, 16, 16],
    "depths": [1, 1, 1, 1],
    "num_attention_heads": [1, 1, 1, 1],
    "decoder_hidden_size": 16,
}
TINY_UPERNET = {
    "model_type": "upernet",
    "backbone_config": {
        "model_type": "resnet",
        "embedding_size": 8,
        "hidden_sizes": [8, 8, 16, 16],
        "depths": [1, 1, 1, 1],
        "out_features": ["stage1", "stage2", "stage3", "stage4"],
    },
    "hidden_size": 16,
    "auxiliary_in_channels": 16,
    "auxiliary_channels": 8,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A workspace with the networks of tests/tasks/foreign_networks in my_networks/."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(REPOSITORY / "tests" / "tasks" / "foreign_networks", tmp_path / "my_networks")
    for name in [name for name in sys.modules if name.startswith("enginewright_custom")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / "my_networks"


def custom(file: str = "my_networks/gated.py", factory: str = "build", **arguments: Any) -> NetworkConfig:
    return NetworkConfig(NetworkName.custom, None, None, False, file, factory, arguments)


def transformers(arguments: Mapping[str, Any], file: str | None = None) -> NetworkConfig:
    return NetworkConfig(NetworkName.transformers, None, None, False, file, arguments=arguments)


def write(folder: Path, body: str) -> NetworkConfig:
    """Write a file with a function `build`, and return its configuration."""
    head = "import torch\nfrom torch import nn\n"
    (folder / "own.py").write_text(head + body, encoding="utf-8")
    return custom("my_networks/own.py")


def card(config: NetworkConfig) -> ModelCard:
    return ModelCard(config, CLASSES, (0.5,) * 3, (0.2,) * 3, *SIZE, code_sha256(config))


def test_logits_have_the_size_of_the_images_and_the_layers_are_found(folder: Path) -> None:
    network = build_network(custom(), len(CLASSES), size=SIZE)
    assert isinstance(network, ForeignNetwork)
    assert network.classifier_layer == "network.head.1"
    assert network.feature_layer == "network.head.0"
    assert network.training_only == ("network.auxiliary",)
    images_NCHW = torch.randn(2, 3, *SIZE)
    assert network.eval()(images_NCHW).shape == (2, len(CLASSES), *SIZE)
    assert [tuple(logits.shape) for logits in logits_of(network.train(), images_NCHW)] == [
        (2, len(CLASSES), *SIZE)
    ] * 2


def test_checkpoint_comes_back_without_its_auxiliary_layer_and_trains_further(folder: Path) -> None:
    network = build_network(custom(width=8), len(CLASSES), size=SIZE).eval()
    save_checkpoint(folder / "model.safetensors", network, card(custom(width=8)))
    (folder / "model.safetensors").rename(folder.parent / "model.safetensors")
    with torch.inference_mode():  # as runners load it
        load_checkpoint(folder.parent / "model.safetensors")
    loaded, found = load_checkpoint(folder.parent / "model.safetensors")
    images_NCHW = torch.randn(2, 3, *SIZE)
    with torch.no_grad():
        assert torch.equal(loaded(images_NCHW), network(images_NCHW))
    assert found.network == custom(width=8)
    assert not any("auxiliary" in name for name in loaded.state_dict())
    [logits] = logits_of(loaded.train(), images_NCHW)
    logits.sum().backward()
    assert loaded.network.stem[0][1].training


def test_checkpoint_is_refused_with_other_code(folder: Path) -> None:
    network = build_network(custom(), len(CLASSES), size=SIZE).eval()
    path = folder.parent / "model.safetensors"
    save_checkpoint(path, network, card(custom()))
    (folder / "layers.py").write_text((folder / "layers.py").read_text() + "# edited\n")
    with pytest.raises(
        ArtifactError, match=r"made with other code .* the folder of my_networks/gated.py, with the packages"
    ):
        load_checkpoint(path)


def test_digest_covers_the_folder_but_no_caches(folder: Path) -> None:
    before = code_sha256(custom())
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "gated.pyc").write_bytes(b"x")
    assert network_facts(custom()) == {"network": before}
    (folder / "deeper").mkdir()
    (folder / "deeper" / "table.json").write_text("{}")
    assert code_sha256(custom()) != before


def test_an_update_of_a_package_that_a_network_imports_is_noticed_a10(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its training is not fresh, and no stage reads the checkpoint with the other package."""
    site = folder.parent / "site"
    install(site, "fake-timm", "1.0", module="faketimm")
    monkeypatch.syspath_prepend(str(site))
    (folder / "blocks.py").write_text("def make():\n    import faketimm\n")
    config = write(folder, "def build(num_classes): return nn.Conv2d(3, num_classes, 1)\n")
    before = network_facts(config)
    assert before == {"fake-timm": "1.0", "network": code_sha256(config)}
    network = build_network(config, len(CLASSES), size=SIZE).eval()
    path = folder.parent / "model.safetensors"
    save_checkpoint(path, network, card(config))
    install(site, "fake-timm", "1.0+cu130", module="faketimm")
    load_checkpoint(path)
    install(site, "fake-timm", "1.1", module="faketimm")
    after = network_facts(config)
    assert after["fake-timm"] == "1.1" and after["network"] != before["network"]
    with pytest.raises(
        ArtifactError, match=r"the folder of my_networks/own\.py, with the packages that it imports"
    ):
        load_checkpoint(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (custom("unet.py"), r"network.file is unet.py, expected a file in a folder of this workspace"),
        (custom("../nets/unet.py"), r"expected a file in a folder of this workspace"),
        (custom("my_networks/unet.py"), r"my_networks/unet.py, which does not exist"),
        (
            custom(factory="make"),
            r"no function 'make' \(network.factory\), found: Attention, Gate, Net, build",
        ),
        (custom(depth=3), r"cannot be built with num_classes=3 and .*depth.*TypeError"),
        (transformers({"model_type": "vgg"}), r"transformers \(vgg\) cannot be built .*vgg"),
    ],
)
def test_what_cannot_be_built_is_named(folder: Path, config: NetworkConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_network(config, len(CLASSES), size=SIZE)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("def build(num_classes): return 3", r"build\(\) returned int, expected a torch.nn.Module"),
        (
            "import not_there\nbuild = 3",
            r"cannot be imported \(ModuleNotFoundError: No module named 'not_there'",
        ),
        ("build = 3", r"'build' is not a function"),
        (
            "def build(num_classes): return nn.Conv2d(3, 5, 1)",
            r"returned \[N, 5, h, w\] in eval mode, expected",
        ),
        ("def build(num_classes): return nn.Flatten()", r"returned no tensor of four axes in eval mode"),
        (
            "def build(num_classes): return nn.Conv2d(4, 3, 1)",
            r"cannot run images \[2, 3, 64, 96\] in eval mode",
        ),
        ("def build(num_classes): return nn.Identity()", r"the layer that computes the logits is unknown"),
        (
            "class Net(nn.Conv2d):\n"
            "    def forward(self, x):\n"
            "        return (super().forward(x), x[:, :2]) if self.training else super().forward(x)\n"
            "def build(num_classes): return nn.Sequential(Net(3, num_classes, 1))",
            r"returned \[N, 2, h, w\] in training mode",
        ),
    ],
)
def test_what_is_no_segmentation_network_is_refused(folder: Path, body: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_network(write(folder, body), len(CLASSES), size=SIZE)


def test_classifier_is_the_layer_that_leads_to_the_logits(folder: Path) -> None:
    body = """
class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, num_classes, 1)
        self.unused = nn.Conv2d(8, num_classes, 1)
    def forward(self, x):
        x = self.body(x)
        logits = self.head(x)
        self.unused(x)
        return {"out": logits}
def build(num_classes): return Net(num_classes)
"""
    assert build_network(write(folder, body), 3, size=SIZE).classifier_layer == "network.head"


def test_images_may_have_other_channels_for_a_foreign_network(folder: Path) -> None:
    config = write(folder, "def build(num_classes): return nn.Conv2d(5, num_classes, 1)\n")
    network = build_network(config, 3, size=SIZE, num_channels=5).eval()
    path = folder.parent / "model.safetensors"
    five = dataclasses.replace(card(config), mean=(0.5,) * 5, std=(0.2,) * 5)
    save_checkpoint(path, network, five)
    loaded, found = load_checkpoint(path)
    assert loaded(torch.zeros(1, 5, *SIZE)).shape == (1, 3, *SIZE)
    graph = export_graph(loaded, found, height=HEIGHT, width=WIDTH, opset=20)
    assert [size.dim_value for size in graph.graph.input[0].type.tensor_type.shape.dim][1:] == [5, *SIZE]
    assert measure_convs(loaded, SIZE)["network"].macs == 5 * 3 * HEIGHT * WIDTH


def test_network_of_grey_images_comes_back_with_fewer_channels(folder: Path) -> None:
    body = """
def build(num_classes):
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, num_classes, 1))
"""
    config = write(folder, body)
    network = build_network(config, 3, size=SIZE, num_channels=1).eval()
    [group] = list_groups(network, SIZE)
    cut_group(network, group, 8, size=SIZE)
    path = folder.parent / "model.safetensors"
    save_checkpoint(path, network, dataclasses.replace(card(config), mean=(0.5,), std=(0.2,)))
    images_NCHW = torch.randn(1, 1, *SIZE)
    with torch.no_grad():
        assert torch.equal(load_checkpoint(path)[0](images_NCHW), network(images_NCHW))


def test_named_classifier_layer_has_to_run(folder: Path) -> None:
    body = (
        "def build(num_classes):\n    net = nn.Conv2d(3, num_classes, 1)\n    net.classifier_layer = 'head'\n"
    )
    with pytest.raises(ConfigError, match="classifier_layer is head, which is no module that runs"):
        build_network(write(folder, body + "    return nn.Sequential(net) and net\n"), 3, size=SIZE)


@pytest.mark.parametrize(
    ("arguments", "classifier"),
    [(TINY_SEGFORMER, "decode_head.classifier"), (TINY_UPERNET, "decode_head.classifier")],
)
def test_any_segmentation_network_of_transformers_comes_by_its_config(
    arguments: Mapping[str, Any], classifier: str
) -> None:
    network = build_network(transformers(arguments), len(CLASSES), size=SIZE)
    assert network.classifier_layer == f"network.{classifier}"
    assert network.eval()(torch.zeros(1, 3, *SIZE)).shape == (1, len(CLASSES), *SIZE)


def test_config_of_transformers_may_be_a_file(folder: Path) -> None:
    labels = {str(number): f"label {number}" for number in range(150)}
    (folder / "config.json").write_text(json.dumps({**TINY_SEGFORMER, "id2label": labels}))
    config = transformers({"decoder_hidden_size": 8}, "my_networks/config.json")
    network = build_network(config, len(CLASSES), size=SIZE)
    assert network.get_submodule(network.classifier_layer).weight.shape[:2] == (len(CLASSES), 8)
    assert set(network_facts(config)) == {"network"}


def test_installed_package_offers_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "offering.py").write_text(
        "from torch import nn\ndef tiny(num_classes, width=4):\n    return nn.Conv2d(3, num_classes, 1)\n"
    )
    info = tmp_path / "offering-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        f"[{ENTRY_POINTS}]\ntiny = offering:tiny\nbroken = offering_broken:tiny\n"
    )
    (tmp_path / "offering_broken.py").write_text(
        "raise RuntimeError('operator torchvision::nms does not exist')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = NetworkConfig(NetworkName.installed, None, None, False, None, "tiny", {"width": 8})
    assert network_facts(config) == {"offering": "1.2"}
    (tmp_path / "offering.py").write_text((tmp_path / "offering.py").read_text() + "import numpy\n")
    assert network_facts(config) == {"offering": "1.2", "numpy": numpy.__version__}
    digest = code_sha256(config)
    assert isinstance(build_network(config, 3, size=SIZE).network, nn.Conv2d)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.3\n")
    environment._version.cache_clear()
    assert code_sha256(config) != digest, "checkpoints of another version are others"
    with pytest.raises(ConfigError, match=r"cannot be imported \(RuntimeError: operator torchvision::nms"):
        build_network(dataclasses.replace(config, factory="broken"), 3, size=SIZE)
    missing = dataclasses.replace(config, factory="unet")
    with pytest.raises(ConfigError, match=r"factory is unet, and no installed package .* Found: .*tiny"):
        build_network(missing, 3, size=SIZE)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 1.0}, "which size our own networks only"),
        ({"factory": None}, "expected a Python file and the name of its function"),
        ({"name": NetworkName.installed}, "expected the name of an entry point"),
        ({"name": NetworkName.transformers}, "arguments has no model_type"),
        ({"name": NetworkName.fast_scnn}, "expected two numbers"),
        ({"name": NetworkName.fast_scnn, "width": 1.0, "depth": 1.0}, "belong to networks of your own"),
    ],
)
def test_contradicting_keys_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(custom(), **fields)


def test_networks_of_two_folders_may_have_files_of_one_name(folder: Path) -> None:
    """Each file may import its siblings by their plain names."""
    for name, width in (("one", 4), ("two", 8)):
        (folder.parent / name).mkdir()
        (folder.parent / name / "layers.py").write_text(f"WIDTH = {width}\n")
        (folder.parent / name / "net.py").write_text(
            "from layers import WIDTH\nfrom torch import nn\ndef build(num_classes):\n    import layers\n"
            "    assert layers.WIDTH == WIDTH\n"
            "    return nn.Sequential(nn.Conv2d(3, WIDTH, 1), nn.Conv2d(WIDTH, num_classes, 1))\n"
        )
    for _ in range(2):
        for name, width in (("one", 4), ("two", 8)):
            network = build_network(custom(f"{name}/net.py"), 3, size=SIZE)
            assert network.network[0].out_channels == width
    assert "layers" not in sys.modules
    (folder.parent / "one" / "layers.py").write_text(
        "WIDTH = 5  # of another size: bytecode is kept by size and second\n"
    )
    assert build_network(custom("one/net.py"), 3, size=SIZE).network[0].out_channels == 5


def test_code_that_the_digest_does_not_cover_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.parent / "shared_blocks.py").write_text("KERNEL = 1\n")
    monkeypatch.syspath_prepend(str(folder.parent))  # as `python -m` does
    body = "from shared_blocks import KERNEL\ndef build(num_classes):\n    return nn.Conv2d(3, num_classes, KERNEL)\n"
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"imports shared_blocks, .* outside of my_networks.*Move it"):
            build_network(write(folder, body), 3, size=SIZE)
    (folder / "linked").symlink_to(folder.parent, target_is_directory=True)
    with pytest.raises(ConfigError, match=r"my_networks/linked is a link to a folder, .*Move the folder"):
        code_sha256(custom())


AUXILIARY_IN_EVAL = """
class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.head, self.side = nn.Conv2d(16, num_classes, 1), nn.Conv2d(16, num_classes, 1)
    def forward(self, x):
        low = self.stem(x).relu()
        return {"out": self.head(self.body(low).relu()), "aux": self.side(low)}
def build(num_classes): return Net(num_classes)
"""


def test_auxiliary_logits_that_eval_mode_has_too_are_trained_and_pruned(folder: Path) -> None:
    config = write(folder, AUXILIARY_IN_EVAL)
    network = build_network(config, 3, size=SIZE)
    images_NCHW = torch.randn(2, 3, *SIZE)
    assert network.has_auxiliary and network.training_only == ()
    assert len(logits_of(network, images_NCHW)) == 2
    assert {group.root for group in list_groups(network, SIZE)} == {"network.stem", "network.body"}
    for name in ("network.stem", "network.body"):
        [group] = [group for group in list_groups(network, SIZE) if group.root == name]
        cut_group(network, group, 8, size=SIZE)
    assert network.eval()(images_NCHW).shape == (2, 3, *SIZE)
    assert network.network.side.in_channels == 8


def test_classifier_behind_a_pixel_shuffle_is_named_by_the_network(folder: Path) -> None:
    body = """
def build(num_classes):
    net = nn.Sequential(nn.Conv2d(3, 4 * num_classes, 3, 2, 1), nn.PixelShuffle(2))
    {}
    return net
"""
    with pytest.raises(ConfigError, match=r"no convolution or linear layer computes 3 channels"):
        build_network(write(folder, body.format("pass")), 3, size=SIZE)
    named = write(folder, body.format("net.classifier_layer = '0'"))
    assert build_network(named, 3, size=SIZE).classifier_layer == "network.0"


def test_what_couples_layers_of_different_widths_stays_whole(folder: Path) -> None:
    body = """
class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.gated, self.free = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(32, 16, 3, padding=1)
        self.gate = nn.Sequential(nn.Conv2d(16, 1, 1), nn.BatchNorm2d(1))
        self.wider = nn.Conv2d(16, 32, 3, padding=1, groups=16)
        self.head = nn.Conv2d(16, num_classes, 1)
    def forward(self, x):
        x = self.gated(x)
        x = x * torch.sigmoid(self.gate(x)) * x.mean(1, keepdim=True)
        return self.head(self.free(self.wider(x)).relu())
def build(num_classes): return Net(num_classes)
"""
    network = build_network(write(folder, body), 3, size=SIZE)
    assert [group.root for group in list_groups(network, SIZE)] == ["network.free"]
    assert "network.gated" in layers_kept_whole(network, SIZE)


def test_network_that_keeps_its_maps_is_built_traced_and_copied(folder: Path) -> None:
    body = """
class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.body, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, num_classes, 1)
    def forward(self, x):
        self.kept = self.body(x).softmax(1)
        return self.head(self.kept)
def build(num_classes): return Net(num_classes)
"""
    network = build_network(write(folder, body), 3, size=SIZE)
    list_groups(network, SIZE)
    copy.deepcopy(network)


def test_branches_whose_weights_eval_mode_reads_are_stored(folder: Path) -> None:
    body = """
class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.Conv2d(3, 8, 1, bias=False)
        self.head = nn.Conv2d(8, num_classes, 1)
    def forward(self, x):
        if self.training:
            return self.head(self.a(x) + self.b(x))
        merged = self.a.weight + nn.functional.pad(self.b.weight, [1] * 4)
        return self.head(nn.functional.conv2d(x, merged, padding=1))
def build(num_classes): return Net(num_classes)
"""
    config = write(folder, body)
    network = build_network(config, 3, size=SIZE).eval()
    path = folder.parent / "model.safetensors"
    save_checkpoint(path, network, card(config))
    images_NCHW = torch.randn(1, 3, *SIZE)
    with torch.no_grad():
        assert torch.equal(load_checkpoint(path)[0](images_NCHW), network(images_NCHW))


def test_shared_weights_are_shared_again_after_loading(folder: Path) -> None:
    body = """
class Net(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 3, 3, padding=1)
        self.two.weight = self.one.weight
        self.head = nn.Conv2d(3, num_classes, 1)
    def forward(self, x): return self.head(self.two(self.one(x)))
def build(num_classes): return Net(num_classes)
"""
    config = write(folder, body)
    path = folder.parent / "model.safetensors"
    save_checkpoint(path, build_network(config, 3, size=SIZE), card(config))
    loaded = load_checkpoint(path)[0].network
    assert loaded.two.weight is loaded.one.weight and loaded.two.bias is not loaded.one.bias
