"""Race INT8 networks with the structures that decide where Q/DQ pairs stand, against ONNX Runtime's own quantizer.

``python -m benchmarks.placement [network ...]``. Networks of about seven convolutions, 64 to 128 channels, random
weights, images of 64x64, exported by torch's older exporter and imported as a file of another tool. Engines of
``cpu_onnxruntime`` and ``cpu_openvino``, and ``quantize_static`` at its best (after ``quant_pre_process``, uint8
activations, int8 weights per channel, as Q/DQ and as QOperator), all with MinMax ranges of the same images, on one
thread, in the same interleaved rounds at batch 1. A ratio over 1 means that ours is slower. Says which share of the
MACs each engine runs in INT8, and the SQNR of its logits against the float graph. Prints a table and writes
``benchmarks/results/placement.json``.
"""

import argparse
import io
import json
import logging
import platform
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
import torch
from numpy.typing import NDArray
from onnx import ModelProto
from onnxruntime.quantization import QuantFormat
from torch import Tensor, nn

from benchmarks.peers import quantize_with_onnxruntime
from benchmarks.runtimes import in_onnxruntime
from flows.params import compose_params
from tasks.core.config import find_section, typed_config
from tasks.core.execute import load_stage
from tasks.parts.builders.build import build
from tasks.parts.builders.report import EngineBuild
from tasks.parts.data.dataset import normalise
from tasks.parts.data.input_card import InputCard
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.engines.rounds import Network, rounds_ms
from tasks.parts.measuring.intervals import estimate_ratio
from tasks.parts.onnx_graphs.foreign_form import ChannelOrder, InputForm, Layout, Values
from tasks.parts.onnx_graphs.foreign_output import OutputForm
from tasks.parts.onnx_graphs.foreign_rewrite import Quantization, rewrite, with_equal_operators
from tasks.parts.onnx_graphs.graph import CARD_KEY, read_graph, write_graph
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.quantization.calibration import choose_range, collect_statistics
from tasks.parts.quantization.config import Calibrator
from tasks.parts.quantization.qdq import insert_qdq, quantizable_tensors

IMAGES = "images.npy"
RESULTS = Path(__file__).parent / "results" / "placement.json"
TARGETS = ("cpu_onnxruntime", "cpu_openvino")
SIDE, NUM_CLASSES, NUM_IMAGES, NUM_ROUNDS = 64, 5, 16, 60

MEAN, STD = (0.5,) * 3, (0.25,) * 3

Activation = Callable[[], nn.Module]


def conv_norm(
    in_channels: int,
    out_channels: int,
    activation: Activation | None = nn.ReLU,
    *,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
) -> nn.Sequential:
    """Convolution, BatchNorm, activation."""
    conv = nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_channels), *([activation()] if activation else []))


def features(activation: Activation) -> nn.Sequential:
    """Six convolutions, which reduce the image to 16x16."""
    return nn.Sequential(
        conv_norm(3, 64, activation, stride=2),
        conv_norm(64, 64, activation),
        conv_norm(64, 128, activation, stride=2),
        *(conv_norm(128, 128, activation) for _ in range(3)),
    )


class Plain(nn.Module):
    """Seven convolutions with one kind of activation, mean, linear layer."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.features = nn.Sequential(features(activation), conv_norm(128, 128, activation))
        self.classifier = nn.Linear(128, NUM_CLASSES)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        return self.classifier(self.features(images_NCHW).mean((2, 3)))


class Shuffled(nn.Module):
    """Units of ShuffleNetV2 (Ma et al., ECCV 2018, figure 3c): split, three convolutions, concatenate, shuffle."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 64, stride=2), conv_norm(64, 128, stride=2))
        self.units = nn.ModuleList(
            nn.Sequential(
                conv_norm(64, 64, kernel=1),
                conv_norm(64, 64, None, groups=64),
                conv_norm(64, 64, kernel=1),
            )
            for _ in range(3)
        )
        self.classifier = nn.Linear(128, NUM_CLASSES)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        maps_NCHW = self.stem(images_NCHW)
        for unit in self.units:
            left_NCHW, right_NCHW = maps_NCHW.chunk(2, 1)
            maps_NCHW = torch.cat([left_NCHW, unit(right_NCHW)], 1)
            count, channels, height, width = maps_NCHW.shape
            maps_NCHW = maps_NCHW.view(count, 2, channels // 2, height, width).transpose(1, 2)
            maps_NCHW = maps_NCHW.reshape(count, channels, height, width)
        return self.classifier(maps_NCHW.mean((2, 3)))


class Excitation(nn.Module):
    """Squeeze and excite (Hu et al., CVPR 2018) with the hard sigmoid of MobileNetV3."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, channels // 4, 1),
            nn.ReLU(),
            nn.Conv2d(channels // 4, channels, 1),
            nn.Hardsigmoid(),
        )

    def forward(self, maps_NCHW: Tensor) -> Tensor:
        return maps_NCHW * self.gate(maps_NCHW)


class Excited(nn.Module):
    """Seven convolutions with two excitations."""

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            features(activation),
            Excitation(128),
            conv_norm(128, 128, activation),
            Excitation(128),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(128, NUM_CLASSES),
        )

    def forward(self, images_NCHW: Tensor) -> Tensor:
        return self.layers(images_NCHW)


class Residual(nn.Module):
    """Two residual blocks (He et al., CVPR 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(conv_norm(3, 64, stride=2), conv_norm(64, 64), conv_norm(64, 128, stride=2))
        self.blocks = nn.ModuleList(
            nn.Sequential(conv_norm(128, 128), conv_norm(128, 128, None)) for _ in range(2)
        )
        self.classifier = nn.Linear(128, NUM_CLASSES)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        maps_NCHW = self.stem(images_NCHW)
        for block in self.blocks:
            maps_NCHW = torch.relu(maps_NCHW + block(maps_NCHW))
        return self.classifier(maps_NCHW.mean((2, 3)))


def upsampled() -> nn.Module:
    """Six convolutions and a head of two transposed ones."""
    return nn.Sequential(
        features(nn.ReLU),
        nn.ConvTranspose2d(128, 64, 2, 2),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 2, 2),
        nn.ReLU(),
        nn.Conv2d(32, NUM_CLASSES, 1),
    )


def flattened() -> nn.Module:
    """Seven convolutions, two MaxPools and a head of two large linear layers."""
    return nn.Sequential(
        features(nn.ReLU),
        nn.MaxPool2d(2),
        conv_norm(128, 128),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2048, 512),
        nn.ReLU(),
        nn.Linear(512, NUM_CLASSES),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "relu": partial(Plain, nn.ReLU),
    "relu6": partial(Plain, nn.ReLU6),
    "hardswish": partial(Plain, nn.Hardswish),
    "leaky_relu": partial(Plain, partial(nn.LeakyReLU, 0.1)),
    "silu": partial(Plain, nn.SiLU),
    "channel_shuffle": Shuffled,
    "squeeze_excite": partial(Excited, nn.ReLU),
    "squeeze_excite_hardswish": partial(Excited, nn.Hardswish),
    "residual": Residual,
    "conv_transpose": upsampled,
    "gemm": flattened,
}


def main() -> None:
    """Measure, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "networks", nargs="*", help=f"of: {', '.join(NETWORKS)}; none: all, and write the file"
    )
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="interleaved rounds")
    options = parser.parse_args()
    if unknown := set(options.networks) - NETWORKS.keys():
        parser.error(f"unknown networks: {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows = []
    for name in options.networks or NETWORKS:
        rows.append(measure(name, options.rounds))
        print(describe(rows[-1]), flush=True)
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
        "openvino": openvino.__version__,
        "num_rounds": options.rounds,
        "rows": rows,
    }
    if not options.networks:
        RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def measure(name: str, num_rounds: int) -> dict[str, Any]:
    """Return the row of one network."""
    images_NHWC = draw_images(NUM_IMAGES)
    images_NCHW = normalise(images_NHWC, MEAN, STD)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        graph = imported(NETWORKS[name])
        np.save(folder / IMAGES, images_NHWC)
        write_graph(graph, folder / "float.onnx")
        write_graph(quantized(graph, images_NCHW), folder / "int8.onnx")
        networks: dict[str, Network] = {}
        builds: dict[str, EngineBuild] = {}
        for target in TARGETS:
            for kind in ("float", "int8"):
                engine = f"{kind} on {target}"
                builds[engine], networks[engine] = engine_of(
                    folder / f"{kind}.onnx", target, folder / engine, stack
                )
        for kind in QuantFormat:
            networks[f"quantize_static {kind}"] = in_onnxruntime(static(folder, images_NCHW, kind))
        expected = networks["float on cpu_onnxruntime"](images_NCHW[:1]).copy()
        sqnr_db = {
            engine: round(difference(expected, network(images_NCHW[:1]).copy()).sqnr_db, 1)
            for engine, network in networks.items()
        }
        bursts = rounds_ms(networks, images_NCHW[:1], num_rounds)
    medians = {engine: np.array([np.median(burst) for burst in found]) for engine, found in bursts.items()}
    static_ms = np.minimum(*(medians[f"quantize_static {kind}"] for kind in QuantFormat))
    row: dict[str, Any] = {
        "network": name,
        "latency_ms_p50": {engine: round(float(np.median(found)), 4) for engine, found in medians.items()},
        "sqnr_db": sqnr_db,
    }
    for target in TARGETS:
        ours, executed = medians[f"int8 on {target}"], builds[f"int8 on {target}"].executed
        assert executed is not None
        ratios = {"to_float": ours / medians[f"float on {target}"], "to_quantize_static": ours / static_ms}
        row[target] = {
            "int8_macs_share": round(executed.macs_share.get("int8", 0.0), 4),
            "quantized_macs_share": round(executed.macs_share_quantized, 4),
        }
        for other, ratio in ratios.items():
            found = estimate_ratio(ratio, num_comparisons=2 * len(TARGETS))
            row[target][f"ratio_{other}"] = [
                round(value, 3) for value in (found.value, found.low, found.high)
            ]
    return row


def draw_images(count: int, side: int = SIDE) -> NDArray[np.uint8]:
    """Return images [N, H, W, 3] of noise."""
    values = np.random.default_rng(0).normal(127.5, 64, (count, side, side, 3))
    return values.clip(0, 255).astype(np.uint8)


def imported(make: Callable[[], nn.Module]) -> ModelProto:
    """Return a network, with BatchNorm statistics and weights of a seed, as import_onnx writes it."""
    torch.manual_seed(0)
    network, file = make().train(), io.BytesIO()
    with torch.no_grad():
        for _ in range(8):
            network(torch.randn(8, 3, SIDE, SIDE))
    torch.onnx.export(
        network.eval(),
        (torch.zeros(1, 3, SIDE, SIDE),),
        file,
        dynamo=False,
        opset_version=17,
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
    )
    return as_imported(onnx.load_from_string(file.getvalue()), SIDE)


def as_imported(model: ModelProto, side: int) -> ModelProto:
    """Return the graph of a network for images of `side` x `side`, as import_onnx writes it."""
    found = rewrite(
        model,
        path=Path("placement.onnx"),
        form=InputForm(Layout.nchw, ChannelOrder.rgb, Values.normalised, MEAN, STD),
        height=None,
        width=None,
        output=OutputForm(None, Layout.nchw, None),
        quantization=Quantization.none,
        is_batch_freed=False,
    )
    images_NCHW = np.random.default_rng(0).normal(size=(1, 3, side, side)).astype(np.float32)
    found = with_equal_operators(found, images_NCHW, Path("placement.onnx"))
    names = tuple(str(index) for index in range(found.head.num_classes))
    entry = found.graph.metadata_props.add()
    entry.key = CARD_KEY
    entry.value = InputCard(names, MEAN, STD, side, side, found.head.task, None).to_json()
    return found.graph


def quantized(graph: ModelProto, images_NCHW: np.ndarray) -> ModelProto:
    """Return the Q/DQ graph with MinMax ranges."""
    op_types = configuration("quantize_ptq").op_types
    statistics = collect_statistics(graph, lambda: [images_NCHW], quantizable_tensors(graph, op_types))
    ranges = {
        name: choose_range(found, Calibrator.minmax, percentile=100.0) for name, found in statistics.items()
    }
    return insert_qdq(graph, ranges, op_types=op_types)


def engine_of(file: Path, target: str, out: Path, stack: ExitStack) -> tuple[EngineBuild, Network]:
    """Build the engine of a graph, and load it; the images are beside the graph."""
    out.mkdir()
    report = build(
        configuration(f"build_engine.{target}").plain, model=file, images=file.with_name(IMAGES), out=out
    )
    if report.reason:
        raise SystemExit(f"{file.name} on {target}: {report.reason}")
    return report, stack.enter_context(open_engine(out / "engine")).infer


def static(folder: Path, images_NCHW: np.ndarray, kind: QuantFormat) -> ModelProto:
    """Quantize the float graph with ONNX Runtime."""
    written = folder / "static.onnx"
    quantize_with_onnxruntime(folder / "float.onnx", images_NCHW, written, kind)
    return read_graph(written)


def configuration(address: str) -> Any:
    """Return the typed configuration of a stage for a file of the user's own."""
    params = compose_params(["model=onnx", "model.path=model.onnx", "data=images"])
    name, section = find_section(params, address)
    return typed_config(load_stage(address)[1], section, name)


def describe(row: dict[str, Any]) -> str:
    """Return a row as text."""
    parts = [
        f"{target}: {row['latency_ms_p50'][f'int8 on {target}']:.3f} ms, {found['ratio_to_float'][0]:.2f} of float, "
        f"{found['ratio_to_quantize_static'][0]:.2f} ({found['ratio_to_quantize_static'][1]:.2f} to "
        f"{found['ratio_to_quantize_static'][2]:.2f}) of quantize_static, "
        f"{found['int8_macs_share']:.1%} of MACs in INT8"
        for target, found in ((target, row[target]) for target in TARGETS)
    ]
    return f"{row['network']:>24}  " + "; ".join(parts)


if __name__ == "__main__":
    main()
