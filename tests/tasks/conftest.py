"""A tiny data set, its network and its engines: real files, built once per test run."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tasks.core.config import typed_config
from tasks.parts.data.dataset import calibration_images
from tasks.parts.engines.runtimes import CHECKPOINT_RUNTIMES, Runtime
from tasks.parts.engines.target import Target
from tasks.quantize_repaired import Config as RepairConfig
from tasks.quantize_repaired import quantize_repaired

CLASSES = ("background", "zero", "one")
HEIGHT, WIDTH = 64, 96
OP_TYPES = ["Conv", "Add", "Concat", "AveragePool", "Resize"]
REPOSITORY = Path(__file__).resolve().parents[2]

ANYWAY: dict[str, Any] = {
    "max_score_rel_loss": 0.0,
    "max_parent_rel_loss": 0.0,
    "class_limits": {},
    "class_floors": {},
    "exhaustive": True,
    "max_minutes": 60.0,
}
"""What rank_layers needs to rank in any case; it reads no `results` then."""


AOTINDUCTOR = pytest.param("cpu_aotinductor", marks=pytest.mark.slow)
"""The target that compiles its engine for half a minute."""

TOLD_BY_CI = ("CI", "TF_BUILD", "JENKINS_URL")
"""Variables with which OpenVINO's telemetry is off."""


@dataclass(frozen=True)
class Workshop:
    """Paths of the tiny files, and a builder of engines."""

    root: Path
    data: Path
    checkpoint: Path
    graph: Path
    quantized: Path

    @property
    def images(self) -> Path:
        """The file of the calibration images."""
        return calibration_images(self.data)

    def target(self, name: str, /, **changes: Any) -> Target:
        """Return a declared target, made plain and to fit any installed version unless said otherwise."""
        fields = yaml.safe_load((REPOSITORY / "conf" / "target" / f"{name}.yaml").read_text(encoding="utf-8"))
        del fields["work_pool"]
        plain = {"reads": "normalised", "gives": "logits"}
        fields |= {"runtime_version": "any", "max_batch": 4} | plain | changes
        target: Target = typed_config(Target, fields, f"target.{name}")
        return target

    def engine(self, variant: str, target: str) -> Path:
        """Return the engine of a variant (float, quantized) for a target, built on first use."""
        from tasks.build_engine import build_engine

        out = self.root / f"engine-{variant}-{target}"
        if not out.is_dir():
            declared = self.target(target)
            if declared.runtime is Runtime.aotinductor and shutil.which("g++") is None:
                pytest.skip("no g++ on this machine, with which AOTInductor compiles")
            out.mkdir()
            graph = self.quantized if variant == "quantized" else self.graph
            model = self.checkpoint if declared.runtime in CHECKPOINT_RUNTIMES else graph
            build_engine(declared, model=model, images=self.images, out=out)
        return out / "engine"


NUM_THREADS = torch.get_num_threads()
"""Threads of torch in a process of the tests, before anything else sets another number."""


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Take back what a runner, a test or a fixture of its module set: sums of another number of threads differ
    in the last bit."""
    yield
    torch.set_num_threads(NUM_THREADS)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Make data set, checkpoint, float graph and Q/DQ graph of a narrow Fast-SCNN with trained-like
    statistics."""
    from tasks.parts.data.dataset import normalise, open_split
    from tasks.parts.data.dataset_writer import SplitBatches, batches_of, write_dataset
    from tasks.parts.data.input_card import Task
    from tasks.parts.networks.build import build_network
    from tasks.parts.networks.checkpoint import save_checkpoint
    from tasks.parts.networks.config import NetworkConfig, NetworkName
    from tasks.parts.networks.model_card import ModelCard
    from tasks.parts.onnx_graphs.export import export_graph
    from tasks.parts.onnx_graphs.graph import write_graph

    root = tmp_path_factory.mktemp("workshop")
    random = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", 8), ("val", 4), ("test", 6), ("calibration", 4)):
        images_NHWC = _smooth_images(random, count)
        masks_NHW = (images_NHWC[..., 0] > 96).astype(np.uint8) + (images_NHWC[..., 1] > 160)
        splits[split] = SplitBatches(count, [*batches_of(images_NHWC, masks_NHW.astype(np.uint8))])
    manifest = write_dataset(
        root / "dataset",
        task=Task.segmentation,
        classes=CLASSES,
        height=HEIGHT,
        width=WIDTH,
        source="test",
        splits=splits,
    )
    torch.manual_seed(0)
    config = NetworkConfig(name=NetworkName.fast_scnn, width=0.25, depth=0.34, depthwise=False)
    network = build_network(config, len(CLASSES)).train()
    images_NCHW = normalise(open_split(root / "dataset", "train")[0], manifest.mean, manifest.std)
    with torch.no_grad():
        for _ in range(20):  # running statistics of real images instead of 0 and 1
            network(torch.from_numpy(images_NCHW))
    card = ModelCard(config, CLASSES, manifest.mean, manifest.std, HEIGHT, WIDTH)
    save_checkpoint(root / "model.safetensors", network.eval(), card)
    graph = export_graph(network, card, height=HEIGHT, width=WIDTH, opset=20)
    write_graph(graph, root / "float.onnx")
    write_graph(quantize(graph, images_NCHW), root / "quantized.onnx")
    return Workshop(
        root, root / "dataset", root / "model.safetensors", root / "float.onnx", root / "quantized.onnx"
    )


@dataclass(frozen=True)
class Unbalanced:
    """A float graph that INT8 ruins in one layer, with data on which the float graph is right everywhere."""

    graph: Path
    ranges: Path
    data: Path
    ranking: Path
    node: str
    """The convolution that reads the unbalanced activation."""
    results: Path
    """What float and INT8 graph get right in each validation image."""


@pytest.fixture(scope="session")
def unbalanced(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Unbalanced:
    """Scale one channel between two convolutions up and back again (Nagel et al. 2019, arXiv:1906.04721, figure 2).

    In float nothing changes; in INT8 the range of that channel leaves no levels to the others.
    """
    from onnx import numpy_helper

    from tasks.parts.onnx_graphs.graph import read_graph, write_graph
    from tasks.parts.onnx_graphs.predict import predict_classes
    from tasks.quantize_ptq import Activations, Calibrator, quantize_ptq
    from tasks.quantize_ptq import Config as QuantizeConfig
    from tasks.rank_layers import Config as RankConfig
    from tasks.rank_layers import rank_layers

    root = tmp_path_factory.mktemp("unbalanced")
    graph = read_graph(workshop.graph)
    readers: dict[str, list[Any]] = {}
    for node in graph.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def only_reader(node: Any, op_type: str) -> Any:
        found = readers.get(node.output[0], [])
        return found[0] if len(found) == 1 and found[0].op_type == op_type else None

    constants = {item.name: item for item in graph.graph.initializer}
    pairs = [
        (node, reader)
        for node in graph.graph.node
        if node.op_type == "Conv"
        and (relu := only_reader(node, "Relu"))
        and (reader := only_reader(relu, "Conv"))
        if constants[reader.input[1]].dims[1] > 1
    ]
    before, after = pairs[len(pairs) // 2]
    for name, values_of in (
        (before.input[1], lambda values: values[0]),
        (before.input[2], lambda values: values[:1]),
        (after.input[1], lambda values: values[:, 0]),
    ):
        values = numpy_helper.to_array(constants[name]).copy()
        values_of(values)[...] *= 1 / 1000 if name == after.input[1] else 1000
        constants[name].CopyFrom(numpy_helper.from_array(values, name))
    write_graph(graph, root / "float.onnx")
    data = Path(shutil.copytree(workshop.data, root / "dataset"))
    images_NHWC = _smooth_images(np.random.default_rng(5), 48)  # enough to prove losses
    np.save(data / "val_images.npy", images_NHWC)
    np.save(data / "val_masks.npy", predict_classes(graph, images_NHWC, batch_size=4))
    manifest = json.loads((data / "manifest.json").read_text(encoding="utf-8"))
    manifest["counts"]["val"] = len(images_NHWC)
    (data / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    config = QuantizeConfig(
        calibrators=[Calibrator.minmax],
        percentiles=[100.0],
        num_images=4,
        batch_size=4,
        num_val_images=0,
        max_abs_input=20.0,
        op_types=OP_TYPES,
        activations=[Activations.uint8],
    )
    quantize_ptq(config, model=root / "float.onnx", data=data, out=root)
    rank_layers(
        RankConfig(op_types=OP_TYPES, num_images=4, num_val_images=0, batch_size=4, **ANYWAY),
        model=root / "float.onnx",
        ranges=root / "ranges.json",
        results=root / "images.npz",
        data=data,
        out=root,
    )
    files = (root / name for name in ("float.onnx", "ranges.json", "dataset", "ranking.csv"))
    return Unbalanced(*files, after.name, root / "images.npz")


def loose_repairs() -> RepairConfig:
    """Return the configuration of quantize_repaired for that graph, with loose gates."""
    return RepairConfig(
        op_types=OP_TYPES,
        max_score_rel_loss=0.35,  # random weights: INT8 costs a quarter even with every layer balanced
        max_parent_rel_loss=0.99,
        class_limits={},
        class_floors={},
        num_images=4,
        num_layer_images=4,
        num_val_images=0,
        batch_size=4,
        exhaustive=False,
        max_minutes=60.0,
    )


@pytest.fixture(scope="session")
def repaired(unbalanced: Unbalanced, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What quantize_repaired wrote for that graph: with an equalization that holds loose gates for certain."""
    out = tmp_path_factory.mktemp("repaired")
    quantize_repaired(
        loose_repairs(),
        model=unbalanced.graph,
        reference=unbalanced.graph,
        ranges=unbalanced.ranges,
        results=unbalanced.results,
        data=unbalanced.data,
        out=out,
    )
    return out


def _smooth_images(random: np.random.Generator, count: int) -> np.ndarray:
    coarse = random.integers(0, 256, (count, HEIGHT // 16, WIDTH // 16, 3)).astype(np.uint8)
    noise = random.integers(0, 16, (count, HEIGHT, WIDTH, 3))
    return np.clip(coarse.repeat(16, axis=1).repeat(16, axis=2) + noise, 0, 255).astype(np.uint8)


def quantize(graph: Any, images_NCHW: np.ndarray) -> Any:
    """Insert Q/DQ as quantize_ptq does, with the ranges that the images give."""
    import onnxruntime
    from polygraphy.backend.onnx import ModifyOutputs

    from tasks.parts.quantization.qdq import TensorRange, insert_qdq, quantizable_tensors

    names = quantizable_tensors(graph, OP_TYPES)
    inner = [name for name in names if name != "image"]
    marked = ModifyOutputs(graph, outputs=inner, copy=True)()
    session = onnxruntime.InferenceSession(marked.SerializeToString(), providers=["CPUExecutionProvider"])
    found = dict(zip(inner, session.run(None, {"image": images_NCHW}), strict=True)) | {"image": images_NCHW}
    ranges = {name: TensorRange(float(found[name].min()), float(found[name].max())) for name in names}
    return insert_qdq(graph, ranges, op_types=OP_TYPES)
