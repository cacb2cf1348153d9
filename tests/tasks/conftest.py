"""A tiny data set, its network and its engines: real files, built once per test run."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from tasks.parts.target import Target

CLASSES = ("background", "zero", "one")
HEIGHT, WIDTH = 64, 96
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Workshop:
    """Paths of the tiny files, and a builder of engines."""

    root: Path
    data: Path
    checkpoint: Path
    graph: Path
    quantized: Path

    def target(self, name: str, /, **changes: Any) -> Target:
        """Return a declared target, made to fit any installed version unless said otherwise."""
        from tasks.core.config import typed_config

        fields = yaml.safe_load((REPOSITORY / "conf" / "target" / f"{name}.yaml").read_text(encoding="utf-8"))
        target: Target = typed_config(Target, fields, f"build_engine.{name}")
        return replace(target, **({"runtime_version": "any", "max_batch": 4} | changes))

    def engine(self, variant: str, target: str) -> Path:
        """Return the engine of a variant (float, quantized) for a target, built on first use."""
        from tasks.build_engine import build_engine

        out = self.root / f"engine-{variant}-{target}"
        if not out.is_dir():
            out.mkdir()
            model = self.quantized if variant == "quantized" else self.graph
            build_engine(
                self.target(target), model=self.checkpoint if target == "cpu_torch" else model, out=out
            )
        return out / "engine"


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Take back what a runner in this process set: sums of another number of threads differ in the last bit."""
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Make data set, checkpoint, float graph and Q/DQ graph of a narrow Fast-SCNN with trained-like
    statistics."""
    from tasks.parts.checkpoint import save_checkpoint
    from tasks.parts.data import SplitBatches, batches_of, normalise, open_split, write_dataset
    from tasks.parts.export import export_graph
    from tasks.parts.model_card import ModelCard
    from tasks.parts.networks.build import build_network
    from tasks.parts.networks.config import NetworkConfig, NetworkName
    from tasks.parts.onnx_graph import write_graph

    root = tmp_path_factory.mktemp("workshop")
    random = np.random.default_rng(0)
    splits = {}
    for split, count in (("train", 8), ("val", 4), ("test", 6), ("calibration", 4)):
        images_NHWC = _smooth_images(random, count)
        masks_NHW = (images_NHWC[..., 0] > 96).astype(np.uint8) + (images_NHWC[..., 1] > 160)
        splits[split] = SplitBatches(count, [*batches_of(images_NHWC, masks_NHW.astype(np.uint8))])
    manifest = write_dataset(
        root / "dataset", classes=CLASSES, height=HEIGHT, width=WIDTH, source="test", splits=splits
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
    write_graph(_quantize(graph, images_NCHW), root / "quantized.onnx")
    return Workshop(
        root, root / "dataset", root / "model.safetensors", root / "float.onnx", root / "quantized.onnx"
    )


def _smooth_images(random: np.random.Generator, count: int) -> np.ndarray:
    coarse = random.integers(0, 256, (count, HEIGHT // 16, WIDTH // 16, 3)).astype(np.uint8)
    noise = random.integers(0, 16, (count, HEIGHT, WIDTH, 3))
    return np.clip(coarse.repeat(16, axis=1).repeat(16, axis=2) + noise, 0, 255).astype(np.uint8)


def _quantize(graph: Any, images_NCHW: np.ndarray) -> Any:
    """Insert Q/DQ around the convolutions, with the ranges that the images give."""
    import onnxruntime
    from polygraphy.backend.onnx import ModifyOutputs

    from tasks.parts.onnx_qdq import TensorRange, insert_qdq, quantizable_tensors

    op_types = ("Conv",)
    names = quantizable_tensors(graph, op_types)
    inner = [name for name in names if name != "image"]
    marked = ModifyOutputs(graph, outputs=inner, copy=True)()
    session = onnxruntime.InferenceSession(marked.SerializeToString(), providers=["CPUExecutionProvider"])
    found = dict(zip(inner, session.run(None, {"image": images_NCHW}), strict=True)) | {"image": images_NCHW}
    ranges = {name: TensorRange(float(found[name].min()), float(found[name].max())) for name in names}
    return insert_qdq(graph, ranges, op_types=op_types)
