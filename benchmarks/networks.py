"""Compare networks: parameters, MACs, latency in float on the CPU targets, mIoU.

``python -m benchmarks.networks`` after a run of the pipeline, which made the data. Every network of `NETWORKS`, but
for the larger encoders of SegFormer, is trained as ``train.baseline`` is configured. Trained networks and their mIoU
are kept under ``artifacts/benchmarks/networks``, so an interrupted run continues with the next one. Latencies of all
networks are measured at the end, in interleaved rounds on one thread. With small ``--scenes`` and ``--epochs`` it
takes minutes.
``--only ddrnet repvgg-0.5-0.5`` measures some networks and adds a table of its own to the page: latencies of two
runs cannot be compared.
Writes ``docs/networks.md`` and ``benchmarks/results/networks.json``.
"""

import argparse
import json
import logging
import platform
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import ModelProto
from torch import nn
from torch.nn import functional

from benchmarks.runtimes import DATA, in_eager, in_target, stage_config
from tasks.core.execute import ARTIFACTS
from tasks.parts.data.dataset import normalise, open_split, read_manifest
from tasks.parts.data.metrics import confusion_matrix, scores
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.rounds import Network, rounds_ms
from tasks.parts.networks.build import build_network
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.networks.config import SEGFORMER_SIZES, NetworkConfig, NetworkName
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.onnx_graphs.export import export_graph
from tasks.parts.onnx_graphs.graph import read_graph, write_graph
from tasks.parts.onnx_graphs.macs import conv_macs
from tasks.parts.onnx_graphs.predict import predict_classes
from tasks.prepare_data import prepare_data
from tasks.train import train

RESULTS = Path(__file__).parent / "results" / "networks.json"
PAGE = Path("docs") / "networks.md"
WORKSPACE = ARTIFACTS / "benchmarks" / "networks"
BATCH_SIZE = 32


@dataclass(frozen=True)
class Entry:
    """A network of the table."""

    name: NetworkName
    width: float
    depth: float
    size: str | None = None
    """One of SegFormer's larger encoders; these are measured with the weights they start from."""

    @property
    def full_name(self) -> str:
        """Name, and the encoder where there are several: what `network@train.baseline.network` takes."""
        return f"{self.name}_{self.size}" if self.size else str(self.name)

    @property
    def title(self) -> str:
        """Full name, width and depth; also the name of its folder."""
        return f"{self.full_name}-{self.width:g}-{self.depth:g}"

    @property
    def config(self) -> NetworkConfig:
        """What to build."""
        arguments = {"size": self.size} if self.size else {}
        return NetworkConfig(self.name, self.width, self.depth, depthwise=False, arguments=arguments)


NETWORKS = (
    Entry(NetworkName.deeplabv3plus, 0.5, 0.5),
    Entry(NetworkName.deeplabv3plus, 1.0, 0.5),  # the default student
    Entry(NetworkName.deeplabv3plus, 1.0, 2.5),  # the default teacher
    Entry(NetworkName.fast_scnn, 0.75, 0.67),
    Entry(NetworkName.fast_scnn, 1.0, 0.34),
    Entry(NetworkName.bisenetv2, 0.5, 1.0),
    Entry(NetworkName.ddrnet, 0.5, 1.0),
    Entry(NetworkName.espnetv2, 1.0, 1.0),
    Entry(NetworkName.mobile_unet, 0.5, 1.0),
    Entry(NetworkName.mobilevit, 0.5, 0.5),
    Entry(NetworkName.repvgg, 0.5, 0.5),
    Entry(NetworkName.segformer, 0.5, 0.5),
    Entry(NetworkName.segformer, 1.0, 1.0),
    *(Entry(NetworkName.segformer, 1.0, 1.0, size) for size in SEGFORMER_SIZES[1:]),
)
TARGETS = ("eager PyTorch", "ONNX Runtime", "OpenVINO")


@dataclass(frozen=True)
class Row:
    """Measurements of one network."""

    name: str
    width: float
    depth: float
    num_parameters: int
    macs: int
    latency_ms_p50: dict[str, float]
    """By target; one image, one thread, float32."""
    miou: float | None
    """On the test split; None where the network was not trained."""
    num_epochs: int


def main() -> None:
    """Train missing networks, measure all, write table and page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, help="instead of train.baseline.trainer.max_epochs")
    parser.add_argument("--scenes", type=int, help="training scenes; makes its own data set")
    parser.add_argument("--rounds", type=int, default=30, help="bursts of each network and target")
    parser.add_argument(
        "--only", nargs="+", help="names, or titles such as segformer-0.5-0.5, of the networks to measure"
    )
    parser.add_argument(
        "--note", default="", help="a sentence below the table, such as what else the machine did"
    )
    options = parser.parse_args()
    names = {entry: {entry.name.value, entry.full_name, entry.title} for entry in NETWORKS}
    unknown = {*(options.only or ())} - set().union(*names.values())
    if unknown:
        parser.error(f"--only has {', '.join(sorted(unknown))}, expected names of docs/networks.md")
    entries = [entry for entry in NETWORKS if not options.only or names[entry] & {*options.only}]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    data = DATA if options.scenes is None else small_data(options.scenes)
    folders = {entry: trained(entry, data, options.epochs, options.scenes) for entry in entries}
    rows = measure(folders, data, options.rounds)
    manifest = read_manifest(data)
    run = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers", "onnxruntime", "openvino")},
        "size": [manifest.height, manifest.width],
        "num_train_images": len(open_split(data, "train")[0]),
        "miou_of_cells": {str(stride): round(miou_of_cells(data, stride), 2) for stride in (8, 16)},
        "note": options.note,
        "rows": [asdict(row) for row in rows],
    }
    earlier = json.loads(RESULTS.read_text(encoding="utf-8"))["runs"] if options.only else []
    runs = [*(kept for kept in earlier if not titles(kept) <= titles(run)), run]
    RESULTS.write_text(json.dumps({"runs": runs}, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(runs), encoding="utf-8")
    print(f"wrote {RESULTS} and {PAGE}")


def small_data(num_scenes: int) -> Path:
    """Make a data set with fewer training scenes unless it is there."""
    out = WORKSPACE / f"data_{num_scenes}"
    if not (out / "dataset" / "manifest.json").is_file():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        cfg = stage_config("prepare_data")
        prepare_data(
            replace(cfg, scenes=replace(cfg.scenes, num_train=num_scenes)), root=Path(cfg.root), out=out
        )
    return out / "dataset"


def trained(entry: Entry, data: Path, num_epochs: int | None, num_scenes: int | None) -> Path:
    """Train a network, or write it as it starts, unless its result is there; return its folder."""
    cfg = stage_config("train.baseline")
    trainer = replace(cfg.trainer, max_epochs=num_epochs or cfg.trainer.max_epochs)
    folder = WORKSPACE / f"{entry.title}_{trainer.max_epochs}_{num_scenes or 'all'}"
    if not (folder / "result.json").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        content: dict[str, Any]
        if entry.size:
            card = ModelCard.for_data(entry.config, read_manifest(data))
            save_checkpoint(
                folder / "model.safetensors", build_network(entry.config, len(card.classes)), card
            )
            content = {"miou": None, "num_epochs": 0}
        else:
            print(f"training {entry.title}", flush=True)
            report = train(replace(cfg, network=entry.config, trainer=trainer), data=data, out=folder)
            content = {"miou": miou_of(exported(folder)[1], data), "num_epochs": report.num_epochs}
        (folder / "result.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def exported(folder: Path) -> tuple[nn.Module, ModelProto]:
    """Return a trained network and its graph, which is exported once."""
    network, card = load_checkpoint(folder / "model.safetensors")
    path = folder / "model.onnx"
    if not path.is_file():
        opset = stage_config("export_onnx").opset
        write_graph(export_graph(network, card, height=card.height, width=card.width, opset=opset), path)
    return network, read_graph(path)


def miou_of(graph: ModelProto, data: Path) -> float:
    """Return the mIoU of a graph on the test split."""
    images_NHWC, masks_NHW = open_split(data, "test")
    classes_NHW = predict_classes(graph, images_NHWC, batch_size=BATCH_SIZE)
    miou = scores(confusion_matrix(classes_NHW, masks_NHW, len(read_manifest(data).classes))).miou
    assert miou is not None
    return miou


def miou_of_cells(data: Path, stride: int) -> float:
    """Return the mIoU of the test labels themselves when they are averaged over cells and resized back."""
    num_classes = len(read_manifest(data).classes)
    masks_NHW = np.asarray(open_split(data, "test")[1])
    labels_NCHW = torch.from_numpy(masks_NHW[:, None] == np.arange(num_classes)[:, None, None]).float()
    cells_NCHW = functional.avg_pool2d(labels_NCHW, stride)
    shares_NCHW = functional.interpolate(cells_NCHW, size=masks_NHW.shape[1:], mode="bilinear")
    miou = scores(confusion_matrix(shares_NCHW.argmax(1).numpy(), masks_NHW, num_classes)).miou
    assert miou is not None
    return miou


def measure(folders: dict[Entry, Path], data: Path, num_rounds: int) -> list[Row]:
    """Measure the latencies of all networks on all targets in interleaved rounds; return the fastest first."""
    manifest = read_manifest(data)
    images_NCHW = normalise(open_split(data, "test")[0][:1], manifest.mean, manifest.std)
    programs: dict[str, Network] = {}
    sizes: dict[Entry, tuple[int, int]] = {}
    for entry, folder in folders.items():
        network, graph = exported(folder)
        runs = (
            in_eager(network),
            in_target(graph, "cpu_onnxruntime"),
            in_target(graph, "cpu_openvino"),
        )
        programs |= {f"{entry.title} {target}": run for target, run in zip(TARGETS, runs, strict=True)}
        num_parameters = sum(parameter.numel() for parameter in network.parameters())
        sizes[entry] = num_parameters, sum(conv_macs(graph).values())
    bursts = rounds_ms(programs, images_NCHW, num_rounds)
    p50 = {
        name: statistics.median(value for burst in found for value in burst) for name, found in bursts.items()
    }
    rows = []
    for entry, folder in folders.items():
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        latencies = {target: round(p50[f"{entry.title} {target}"], 4) for target in TARGETS}
        rows.append(
            Row(
                entry.full_name,
                entry.width,
                entry.depth,
                *sizes[entry],
                latencies,
                result["miou"] and round(result["miou"], 4),
                result["num_epochs"],
            )
        )
    return sorted(rows, key=lambda row: min(row.latency_ms_p50.values()))


def titles(run: Mapping[str, Any]) -> set[str]:
    """Return which networks a run measured."""
    return {f"{row['name']}-{row['width']:g}-{row['depth']:g}" for row in run["rows"]}


def page(runs: Sequence[Mapping[str, Any]]) -> str:
    """Write a table for each run as one page."""
    height, width = runs[-1]["size"]
    num_epochs = max(row["num_epochs"] for run in runs for row in run["rows"])
    cells = runs[-1]["miou_of_cells"]
    lines = [
        "# Networks",
        "",
        "Written by `python -m benchmarks.networks`; sorted by the latency on the fastest of the three targets.",
    ]
    for run in runs:
        lines += ["", *table(run)]
    lines += [
        "",
        f"How to read it: every network was trained on labels alone for {num_epochs} "
        f"epochs of {runs[-1]['num_train_images']} images of {height}x{width}, with one seed, as `train.baseline` is "
        "configured; networks that differ by less than about two points of mIoU "
        "may change places with another seed or a longer training. None started from pretrained weights, as "
        "transformers usually do. mobilevit predicts at stride 16 and joins no finer maps: the labels themselves, "
        f"averaged over cells of 16x16 pixels and resized back, have an mIoU of {cells['16']:.2f}, over 8x8 "
        f"{cells['8']:.2f}. "
        "A network that was not trained has the weights it starts from. Latencies are "
        "medians for one image in float32 on one thread, measured "
        "in short interleaved bursts; compare them within one table only, not with other machines or days. "
        "MACs count convolutions and matrix products of the exported graph: they measure arithmetic but not memory "
        "traffic, so the order by MACs differs from the order by latency. Parameters are those of training; eager "
        "PyTorch runs the branches that export merges (repvgg).",
    ]
    return "\n".join(lines) + "\n"


def table(run: Mapping[str, Any]) -> list[str]:
    """Return the lines of a run's table, with date and machine."""
    lines = [
        f"Measured on {run['date']}, {run['cpu_model']}, Python {run['python']}, torch {run['torch']}, "
        f"transformers {run['transformers']}, ONNX Runtime {run['onnxruntime']}, OpenVINO {run['openvino']}:",
        "",
        "| network | width | depth | parameters | MMACs | eager PyTorch ms | ONNX Runtime ms | OpenVINO ms | "
        "test mIoU |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in run["rows"]:
        latencies = " | ".join(f"{row['latency_ms_p50'][target]:.3f}" for target in TARGETS)
        miou = "not trained" if row["miou"] is None else f"{row['miou']:.4f}"
        lines.append(
            f"| {row['name']} | {row['width']:g} | {row['depth']:g} | {row['num_parameters']:,} | "
            f"{row['macs'] / 1e6:.1f} | {latencies} | {miou} |"
        )
    if run.get("note"):
        lines += ["", run["note"]]
    return lines


if __name__ == "__main__":
    main()
