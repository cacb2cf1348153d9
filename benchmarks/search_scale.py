"""Measure what the search for an INT8 graph costs on a U-Net of a few hundred layers.

``python -m benchmarks.search_scale [--blocks 16] [--size 128] [--images 48]``. A U-Net of residual blocks with random
weights, scaled layer by layer to unit variance, labels its own images; one channel of some layers is scaled up and
back again, so that PTQ is below the gates (``--easy`` leaves that out). quantize_ptq, quantize_repaired, rank_layers
and quantize_partial run in processes of their own with the settings of the default run. Prints seconds of CPU, the
peak of the resident memory, and what each stage left out, and writes ``benchmarks/results/search_scale.json``.
"""

import argparse
import inspect
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import fields, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from benchmarks.runtimes import stage_config
from tasks.core.execute import load_stage
from tasks.parts.data.dataset_writer import SplitBatches, batches_of, write_dataset
from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.onnx_graphs.graph import CARD_KEY, write_graph
from tasks.parts.onnx_graphs.predict import predict_classes

RESULTS = Path(__file__).parent / "results" / "search_scale.json"
STAGES = ("quantize_ptq", "quantize_repaired", "rank_layers", "quantize_partial")
CLASSES = ("a", "b", "c", "d")
LEVELS, CHANNELS = 4, 16
FACTOR = 1000.0


class _Network:
    """Nodes and constants of a graph that is written layer by layer; a layer has unit variance."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[NodeProto] = []
        self.constants: list[TensorProto] = []
        self._random = np.random.default_rng(seed)

    def add(self, op_type: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    def constant(self, name: str, values: NDArray[Any]) -> str:
        self.constants.append(numpy_helper.from_array(values, name))
        return name

    def conv(
        self, source: str, inputs: int, outputs: int, *, kernel: int = 3, stride: int = 1, first: float = 1.0
    ) -> str:
        """Add a convolution and a ReLU; `first` scales what the first channel reads."""
        weight = self._random.normal(size=(outputs, inputs, kernel, kernel)).astype(np.float32)
        weight *= np.float32(np.sqrt(2 / (inputs * kernel**2)))
        weight[:, 0] *= np.float32(first)
        bias = np.zeros(outputs, np.float32)
        at = len(self.nodes)
        names = (self.constant(f"weight_{at}", weight), self.constant(f"bias_{at}", bias))
        pads = [kernel // 2] * 4
        return self.add("Conv", source, *names, strides=[stride] * 2, pads=pads)

    def block(self, source: str, channels: int, *, is_hard: bool) -> str:
        """Add a residual block, in which one channel may be far larger than the others."""
        inner = self.conv(source, channels, channels)
        if is_hard:
            for tensor in self.constants[-2:]:
                values = numpy_helper.to_array(tensor).copy()
                values[0] *= np.float32(FACTOR)
                tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        inner = self.add("Relu", inner)
        outer = self.conv(inner, channels, channels, first=1 / FACTOR if is_hard else 1.0)
        scaled = self.add("Add", source, outer)
        return self.add("Relu", scaled)


def unet(num_blocks: int, size: int, *, is_hard: bool, card: InputCard) -> ModelProto:
    """Return a U-Net with `num_blocks` residual blocks of two convolutions in each of seven stages."""
    network = _Network(0)
    source, channels, skips = network.add("Relu", network.conv("image", 3, CHANNELS)), CHANNELS, []
    for level in range(LEVELS):
        for number in range(num_blocks):
            source = network.block(source, channels, is_hard=is_hard and number == 0)
        if level < LEVELS - 1:
            skips.append((source, channels))
            source = network.add("Relu", network.conv(source, channels, 2 * channels, stride=2))
            channels *= 2
    scales = network.constant("scales", np.array([1, 1, 2, 2], np.float32))
    for skip, width in reversed(skips):
        larger = network.add("Resize", source, "", scales, mode="nearest")
        joined = network.add("Concat", larger, skip, axis=1)
        source, channels = network.add("Relu", network.conv(joined, channels + width, width)), width
        for _ in range(num_blocks):
            source = network.block(source, channels, is_hard=False)
    logits = network.conv(source, channels, len(CLASSES), kernel=1)
    graph = helper.make_graph(
        network.nodes,
        "unet",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, size, size])],
        [helper.make_tensor_value_info(logits, TensorProto.FLOAT, ["N", len(CLASSES), size, size])],
        network.constants,
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    entry = model.metadata_props.add()
    entry.key, entry.value = CARD_KEY, card.to_json()
    return model


def write_files(root: Path, options: argparse.Namespace) -> int:
    """Write ``float.onnx`` and a data set whose labels it gives; return how many nodes it has."""
    random = np.random.default_rng(1)
    size = options.size
    splits = {}
    for split in ("train", "val", "test", "calibration"):
        coarse = random.integers(0, 256, (options.images, size // 16, size // 16, 3))
        images_NHWC = np.repeat(np.repeat(coarse, 16, axis=1), 16, axis=2)
        images_NHWC = (images_NHWC + random.integers(0, 24, images_NHWC.shape)).clip(0, 255).astype(np.uint8)
        splits[split] = images_NHWC
    mean, std = (0.5,) * 3, (0.25,) * 3
    card = InputCard(classes=CLASSES, mean=mean, std=std, height=size, width=size, task=Task.segmentation)
    model = unet(options.blocks, size, is_hard=not options.easy, card=card)
    write_graph(model, root / "float.onnx")
    write_dataset(
        root / "dataset",
        task=Task.segmentation,
        classes=CLASSES,
        height=size,
        width=size,
        source="test",
        normalisation=(mean, std),
        splits={
            split: SplitBatches(
                len(images_NHWC),
                [*batches_of(images_NHWC, predict_classes(model, images_NHWC, batch_size=4))],
            )
            for split, images_NHWC in splits.items()
        },
    )
    return len(model.graph.node)


def run_stage(stage: str, root: Path, max_minutes: float) -> None:
    """Run one stage on what the stages before it wrote, and print what it cost."""
    function, config_class = load_stage(stage)[:2]
    config = stage_config(stage)
    if "max_minutes" in {field.name for field in fields(config_class)}:
        config = replace(config, max_minutes=max_minutes)
    ptq, repaired = root / "quantize_ptq", root / "quantize_repaired"
    later = stage == "quantize_partial"
    known = {
        "model": root / "float.onnx",
        "reference": root / "float.onnx",
        "ranges": (repaired if later else ptq) / "ranges.json",
        "results": (ptq if stage == "quantize_repaired" else repaired) / "images.npz",
        "repaired": repaired / "float.onnx",
        "ranking": root / "rank_layers" / "ranking.csv",
        "data": root / "dataset",
        "out": root / stage,
    }
    known["out"].mkdir()
    report = function(
        config, **{name: known[name] for name in inspect.signature(function).parameters if name != "cfg"}
    )
    used = resource.getrusage(resource.RUSAGE_SELF)
    cost = {
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "peak_gib": round(used.ru_maxrss / 2**20, 2),
        "score": getattr(report, "score", None),
        "left_out": getattr(report, "left_out", ""),
        "num_passes": getattr(report, "num_passes", getattr(report, "num_judged", None)),
    }
    print(json.dumps(cost))


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=16, help="residual blocks in each of seven stages")
    parser.add_argument("--size", type=int, default=128, help="rows and columns of an image")
    parser.add_argument("--images", type=int, default=48, help="images of each split")
    parser.add_argument("--minutes", type=float, default=60.0, help="max_minutes of each search")
    parser.add_argument("--easy", action="store_true", help="a network that INT8 does not harm")
    parser.add_argument("--stage", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        run_stage(options.stage[0], Path(options.stage[1]), options.minutes)
        return
    with tempfile.TemporaryDirectory() as name:
        row: dict[str, Any] = {
            **{key: getattr(options, key) for key in ("blocks", "size", "images", "minutes", "easy")},
            "num_nodes": write_files(Path(name), options),
            "stages": {},
        }
        for stage in STAGES:
            command = [sys.executable, "-m", "benchmarks.search_scale", "--stage", stage, name]
            command += ["--minutes", str(options.minutes)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            row["stages"][stage] = json.loads(done.stdout.splitlines()[-1])
            print(stage, row["stages"][stage], flush=True)
    record = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {"rows": []}
    record |= {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "onnxruntime": version("onnxruntime"),
    }
    record["rows"].append(row)
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
