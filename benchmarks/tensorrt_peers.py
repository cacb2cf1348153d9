"""Where do Q/DQ pairs stand in our graphs for TensorRT, and where in those of Model-Optimizer?

``python -m benchmarks.tensorrt_peers --workspace DIR`` quantizes five networks with both: the same file, the same
calibration images and their largest magnitudes as ranges, FP16 around INT8 (ours for ``h200_tensorrt``,
Model-Optimizer's defaults, in a virtual environment of its own). It counts the pairs and what reads them, computes
the logits of both as the graphs are written, so that each tensor is rounded to its type between two operators (the
order of additions in a kernel is not modelled), against those of the float file, and lets TensorRT for RTX build both
(tensorrt_rtx.py). No GPU is needed, and no speed is measured.

Results go to ``benchmarks/results/tensorrt_peers.json`` network by network; docs/tensorrt.md has them.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import ModelProto, NodeProto, TensorProto, numpy_helper

from benchmarks.corpus import (
    NotFinished,
    conditions,
    draw_images,
    network_file,
    overrides_of,
    read_images,
    run_stage,
    stage_calls,
)
from benchmarks.corpus_networks import CORPUS, CorpusNetwork, scale_layers
from benchmarks.corpus_writers import NotWritten, described, write_with
from benchmarks.file_to_pick import vit_base
from benchmarks.gpu_cells import REPOSITORY
from benchmarks.records import open_record, write_record
from benchmarks.tensorrt_rtx import installed_builder, version_of
from benchmarks.zoo import code_of
from benchmarks.zoo_networks import Exporter
from benchmarks.zoo_training import export
from flows.params import compose_params
from flows.stage_task import stage_command
from tasks.core.config import typed_config
from tasks.core.errors import BuildFailed, first_line
from tasks.core.execute import ARTIFACTS
from tasks.parts.builders.contract import GraphSource, read_source
from tasks.parts.builders.graph_rewrites import rewrite_for, round_rest
from tasks.parts.data.dataset import normalise
from tasks.parts.engines.target import Target
from tasks.parts.onnx_graphs.graph import (
    index_graph,
    name_nodes,
    read_card_of_graph,
    read_graph,
    write_graph,
)
from tasks.parts.onnx_graphs.macs import LAYER_TYPES, sizes_of_one_image
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session

RESULTS = Path(__file__).parent / "results" / "tensorrt_peers.json"
TARGET, PEER = "h200_tensorrt", "modelopt_max"
OURS, THEIRS = "ours", "Model-Optimizer"
_VIT = "vit_b"
NETWORKS = ("resnet_18", "mobilenet_v2", "efficientnet_b0", "yolov8n_backbone", _VIT)
SPECS = {name: CORPUS[name] for name in NETWORKS if name in CORPUS} | {
    _VIT: CorpusNetwork("ViT", lambda: vit_base(3), side=224)
}
STAGES = ("prepare_data", "import_onnx", "label_images", "quantize_ptq")
STAGE_S = BUILD_S = 1800.0
_NUM_SCALING, NUM_IMAGES = 8, 16
"""Images whose statistics scale the layers, and images of the calibrations."""

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, write each network at once, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--build", action="store_true", help=argparse.SUPPRESS)  # in the builder's process
    options = parser.parse_args(arguments)
    workspace = options.workspace.resolve()
    if options.build:
        print(json.dumps(build_all(workspace)))
        return
    draw_images(workspace / "scenes")
    builder = installed_builder(workspace / "builder")
    known = conditions() | {"builder": version_of(builder), "peer": described(PEER)}
    record = open_record(options.results, known, ["rows"])
    measured = {row["network"] for row in record["rows"]}
    for name in options.networks:
        if name not in measured:
            record["rows"].append(measure(name, workspace, builder))
            write_record(options.results, record)
            print(f"{name}: {record['rows'][-1]['graphs']}", flush=True)
    print("\n".join(table(record["rows"])))


def measure(name: str, workspace: Path, builder: Path) -> Row:
    """Quantize a network with both, and return what is said of the graphs. Raises SystemExit with what failed."""
    spec, folder = SPECS[name], workspace / "peers"
    folder.mkdir(exist_ok=True)
    images_NCHW = read_images(workspace, "train", spec.side)
    try:
        file = network_file(name, workspace) if name in CORPUS else write_vit(workspace, images_NCHW)
        same = (f"prepare_data.folder.num_calibration={NUM_IMAGES}", "quantize_ptq.calibrators=[minmax]")
        calls = stage_calls([*overrides_of(file, spec, workspace), *same], workspace)
        for address in STAGES:
            run_stage(address, stage_command(address, calls[address]), workspace, timeout_s=STAGE_S)
        write_graph(graph_for_target(workspace), folder / f"{OURS}.onnx")
        images = workspace / ARTIFACTS / "label_images" / "dataset" / "calibration_images.npy"
        card = read_card_of_graph(read_graph(workspace / ARTIFACTS / "import_onnx" / "model.onnx"))
        given_NCHW = normalise(np.load(images), card.mean, card.std)
        write_with(PEER, str(file), given_NCHW, folder / f"{THEIRS}.onnx", workspace / "environments")
    except (NotFinished, NotWritten) as error:
        raise SystemExit(f"{name}: {error}") from error
    command = [sys.executable, "-m", "benchmarks.tensorrt_peers", "--build", "--workspace", str(workspace)]
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{builder}"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    builds = json.loads(done.stdout.splitlines()[-1])
    judged_NCHW = read_images(workspace, "val", spec.side)
    exact = logits_of(read_graph(file), judged_NCHW)
    graphs = {}
    for kind in (OURS, THEIRS):
        graph = read_graph(folder / f"{kind}.onnx")
        found = difference(exact, logits_of(graph, judged_NCHW))
        graphs[kind] = {**counts(graph), "logits_db": round(found.sqnr_db, 1), **builds[kind]}
    return {"network": name, "family": spec.family, "code": code_of(REPOSITORY), "graphs": graphs}


def write_vit(workspace: Path, images_NCHW: np.ndarray) -> Path:
    """Write the ViT-B of benchmarks/file_to_pick.py unless it is there."""
    file = workspace / "files" / _VIT / "model.onnx"
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(0)
        network = vit_base(3).eval()
        scale_layers(network, torch.from_numpy(images_NCHW[:_NUM_SCALING]))
        export(network, file, Exporter.dynamo, side=SPECS[_VIT].side)
    return file


def graph_for_target(workspace: Path) -> ModelProto:
    """Return the INT8 graph of a workspace as the builder of TARGET gets it.

    Unlike there, the rewrites are not held against the graph: random weights may drown any logits in rounding.
    """
    images = workspace / ARTIFACTS / "label_images" / "dataset" / "calibration_images.npy"
    target = declared()
    source = read_source(target, workspace / ARTIFACTS / "quantize_ptq" / "model.onnx", images)
    assert isinstance(source, GraphSource)
    return round_rest(target, rewrite_for(target, source.graph), source.images_NCHW)


def declared() -> Target:
    """Return TARGET as conf/ has it."""
    params = compose_params([f"target=[cpu_torch,cuda_torch,{TARGET}]"])
    target: Target = typed_config(Target, params["build_engine"][TARGET], f"target.{TARGET}")
    return target


def build_all(workspace: Path) -> dict[str, Row]:
    """Return seconds and size of the plan of each graph, or why there is none. Needs TensorRT."""
    from tasks.parts.builders.tensorrt_plan import build_plan

    target = declared()
    assert target.tensorrt is not None and target.gpu is not None
    gpu, target = target.gpu, replace(target, tensorrt=replace(target.tensorrt, timing_cache=None))
    found: dict[str, Row] = {}
    for kind in (OURS, THEIRS):
        started = time.monotonic()
        try:
            plan = build_plan(read_graph(workspace / "peers" / f"{kind}.onnx"), target, gpu)
            found[kind] = {"mb": round(len(plan) / 1e6, 1), "seconds": round(time.monotonic() - started, 1)}
        except BuildFailed as error:
            found[kind] = {"fault": first_line(error)}
    return found


def logits_of(graph: ModelProto, images_NCHW: np.ndarray) -> np.ndarray:
    """Run a graph as it is written, image by image."""
    session = open_session(graph, num_threads=os.cpu_count() or 1, is_optimised=False)
    [given] = session.get_inputs()
    runs = [session.run(None, {given.name: image[None]})[0] for image in images_NCHW]
    return np.concatenate(runs).astype(np.float32)


def counts(graph: ModelProto) -> Row:
    """Return how many pairs a graph has, and how many of which operators read them."""
    name_nodes(graph)
    index, sizes = index_graph(graph.graph), sizes_of_one_image(graph)
    computed = {name for node in graph.graph.node for name in node.output} | {
        value.name for value in graph.graph.input
    }

    def pairs_of(node: NodeProto) -> list[str]:
        """Return the levels that a node's computed inputs come from, behind casts."""
        found = []
        for name in node.input:
            maker = index.makers.get(name)
            while maker is not None and maker.op_type == "Cast":
                maker = index.makers.get(maker.input[0])
            if maker is not None and maker.op_type == "DequantizeLinear" and maker.input[0] in computed:
                found.append(maker.input[0])
        return found

    def is_weight(name: str) -> bool:
        maker = index.makers.get(name)
        while maker is not None and maker.op_type in ("Cast", "DequantizeLinear", "QuantizeLinear"):
            name = maker.input[0]
            maker = index.makers.get(name)
        return name in index.constants

    products: Counter[str] = Counter()
    additions: Counter[int] = Counter()
    scales: Counter[str] = Counter()
    for node in graph.graph.node:
        num_pairs = len(pairs_of(node))
        if node.op_type in LAYER_TYPES:
            given = sizes.get(node.output[0], [])
            places = given[2:] if node.op_type == "Conv" else given[:-1]
            kind = "vector" if all(size == 1 for size in places) else "layer"
            kind = kind if is_weight(node.input[1]) else "attention"
            products[f"{kind} {'int8' if num_pairs else 'float'}"] += 1
        elif node.op_type == "Add" and not any(is_weight(name) for name in node.input):
            additions[num_pairs] += 1
        elif node.op_type == "Concat" and num_pairs:
            used = {
                quantize.input[1]
                for levels in pairs_of(node)
                for quantize in [index.makers[levels]]
                if quantize.op_type == "QuantizeLinear"
            }
            values = {_value(index.constants[name]) for name in used if name in index.constants}
            is_whole = num_pairs == len(node.input)
            scales["one scale" if is_whole and len(values) == 1 else "several"] += 1
    activations = [
        node
        for node in graph.graph.node
        if node.op_type == "QuantizeLinear" and node.input[0] in computed and not is_weight(node.input[0])
    ]
    read_by: Counter[str] = Counter()
    for quantize in activations:
        pairs = index.readers.get(quantize.output[0], [])
        readers = [node for pair in pairs for node in index.readers.get(pair.output[0], [])]
        read_by[" and ".join(sorted({node.op_type for node in readers})) or "output"] += 1
    return {
        "pairs": len(activations),
        "pairs by readers": dict(read_by.most_common()),
        "products": dict(sorted(products.items())),
        "additions by pairs": {str(number): additions[number] for number in sorted(additions)},
        "concats": dict(scales),
    }


def _value(tensor: TensorProto) -> float:
    return float(numpy_helper.to_array(tensor).reshape(-1)[0])


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the table in Markdown."""
    yield (
        "| network | by | pairs | layers INT8 | vector products INT8 | attention INT8 | "
        "additions with 0, 1, 2 pairs | Concats: one scale, several | logits | built |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        for kind, found in row["graphs"].items():
            products, additions, concats = found["products"], found["additions by pairs"], found["concats"]
            shares = [
                f"{products.get(f'{name} int8', 0)} of "
                f"{products.get(f'{name} int8', 0) + products.get(f'{name} float', 0)}"
                for name in ("layer", "vector", "attention")
            ]
            built = found.get("fault") or f"{found['seconds']:.1f} s, {found['mb']:.1f} MB"
            yield (
                f"| {row['network']} | {kind} | {found['pairs']} | {' | '.join(shares)} | "
                f"{', '.join(str(additions.get(number, 0)) for number in '012')} | "
                f"{concats.get('one scale', 0)}, {concats.get('several', 0)} | {found['logits_db']:.1f} dB | "
                f"{built.replace('|', '/')} |"
            )


if __name__ == "__main__":
    main()
