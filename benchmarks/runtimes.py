"""Share code among the benchmarks: configuration and data of the run, graphs in the CPU runtimes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import ModelProto
from torch import nn

from tasks.core.config import PARAMS_FILE, find_section, read_params, typed_config
from tasks.core.execute import ARTIFACTS, load_stage
from tasks.parts.builders.graph_rewrites import rewrite_for
from tasks.parts.data.dataset import normalise, open_split, read_manifest
from tasks.parts.engines.openvino.compile import compile_graph
from tasks.parts.engines.rounds import Network
from tasks.parts.engines.target import Target
from tasks.parts.networks.build import build_network
from tasks.parts.networks.config import NetworkConfig
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.onnx_graphs.export import export_graph
from tasks.parts.onnx_session import open_session
from tasks.parts.selection.stage_folders import StageFolders

DATA = ARTIFACTS / "prepare_data" / "dataset"


def read_selection(name: str, workspace: Path = Path()) -> Any:
    """Return a file of select_engine; exit with one line if the pipeline has not run."""
    file = workspace / ARTIFACTS / "select_engine" / name
    if not file.is_file():
        raise SystemExit(f"{file} does not exist. Run the pipeline here first: make run")
    return json.loads(file.read_text(encoding="utf-8"))


def in_onnxruntime(graph: ModelProto) -> Network:
    """Load a graph as the target ``cpu_onnxruntime`` does."""
    # As bytes: a message whose constants are large would run without packed weights, unlike an engine's file.
    session = open_session(graph.SerializeToString(), num_threads=1)
    name = session.get_inputs()[0].name
    return lambda images_NCHW: session.run(None, {name: images_NCHW})[0]


def in_eager(network: nn.Module) -> Network:
    """Run a network as the target ``cpu_torch`` does."""
    torch.set_num_threads(1)

    def run(images_NCHW: np.ndarray) -> np.ndarray:
        with torch.inference_mode():
            return network(torch.from_numpy(images_NCHW)).numpy()

    return run


def in_openvino(graph: ModelProto, *, max_batch: int = 1) -> Network:
    """Compile a graph as the target ``cpu_openvino`` does."""
    target = replace(openvino_target(), max_batch=max_batch)
    return requests_of(compile_graph(graph.SerializeToString(), target))


def in_target(graph: ModelProto, target: str) -> Network:
    """Open a graph in the runtime of a target, rewritten as build_engine does."""
    if target not in ("cpu_onnxruntime", "cpu_openvino"):
        raise SystemExit(f"{target} is not compared; expected cpu_onnxruntime or cpu_openvino")
    rewritten = rewrite_for(stage_config(f"build_engine.{target}"), graph)
    return in_onnxruntime(rewritten) if target == "cpu_onnxruntime" else in_openvino(rewritten)


def requests_of(compiled: Any) -> Network:
    """Run a compiled OpenVINO model as its runner does; the logits are overwritten by the next call."""
    request = compiled.create_infer_request()
    return lambda images_NCHW: request.infer({0: images_NCHW}, share_inputs=True, share_outputs=True)[0]


def stage_config(address: str, workspace: Path = Path()) -> Any:
    """Return the typed configuration of a stage call."""
    name, section = find_section(read_params(workspace / PARAMS_FILE), address)
    return typed_config(load_stage(address)[1], section, name)


def stage_folders(workspace: Path) -> StageFolders:
    """Return the folders of a workspace that select_engine reads."""
    stages = ("build_engine", "validate", "benchmark", "diff_layers")
    return StageFolders(*(workspace / ARTIFACTS / stage for stage in stages))


def openvino_target() -> Target:
    """Return the declared options of ``cpu_openvino``."""
    target: Target = stage_config("build_engine.pruned_ptq.cpu_openvino")
    return target


def images(split: str, count: int | None = None, start: int = 0) -> np.ndarray:
    """Return `count` images of a split, or all, from `start` on: normalised, float32 [N, 3, H, W]."""
    manifest = read_manifest(DATA)
    return normalise(open_split(DATA, split)[0][start:][:count], manifest.mean, manifest.std)


def random_graph(config: NetworkConfig) -> ModelProto:
    """Export an untrained network whose BatchNorm statistics come from the data."""
    manifest = read_manifest(DATA)
    torch.manual_seed(0)
    network = build_network(config, len(manifest.classes)).train()
    with torch.no_grad():
        for start in range(0, 320, 16):  # running statistics of real images instead of 0 and 1
            network(torch.from_numpy(images("train", 16, start)))
    card = ModelCard(config, manifest.classes, manifest.mean, manifest.std, manifest.height, manifest.width)
    return export_graph(network.eval(), card, height=manifest.height, width=manifest.width, opset=20)
