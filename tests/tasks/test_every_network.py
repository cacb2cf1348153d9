"""Every network of this package through the stages behind training, small and with random weights."""

from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tasks.build_engine import build_engine
from tasks.export_onnx import Config as ExportConfig
from tasks.export_onnx import export_onnx
from tasks.parts.data.dataset import normalise, open_split, read_manifest
from tasks.parts.engines.description import on_frames
from tasks.parts.engines.frame_engine.engine import load_engine
from tasks.parts.engines.manifest import plain_engine
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.networks.batchnorm_folding import fold_batchnorm
from tasks.parts.networks.checkpoint import load_checkpoint
from tasks.parts.networks.config import OWN_NETWORKS, NetworkConfig, NetworkName
from tasks.parts.onnx_graphs.graph import read_graph
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session
from tasks.parts.quantization.config import Activations, Calibrator
from tasks.parts.quantization.fake_quantization import fake_quantize
from tasks.parts.quantization.qdq import read_ranges
from tasks.parts.selection.bundle import write_bundle
from tasks.quantize_ptq import Config as QuantizeConfig
from tasks.quantize_ptq import quantize_ptq
from tests.tasks.conftest import Workshop
from tests.tasks.test_transformers import write_network

CONF = Path(__file__).resolve().parents[2] / "conf" / "quantize_ptq" / "default.yaml"
OP_TYPES = yaml.safe_load(CONF.read_text(encoding="utf-8"))["op_types"]

CONVOLUTIONAL = {"Conv", "Relu", "Add", "Mul", "Sigmoid", "AveragePool", "MaxPool", "Resize", "Concat"}
ATTENTION = {"MatMul", "Gemm", "LayerNormalization", "Softmax", "Reshape", "Transpose"}
OTHERS = {
    NetworkName.mobilevit: ATTENTION,
    NetworkName.segformer: {*ATTENTION, "Gelu"},
    NetworkName.dinov2: {*ATTENTION, "Gelu", "Pad", "Slice"},
}
"""Operators of the graphs, beside those of convolutions: every runtime has kernels for them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", OWN_NETWORKS)
def test_network_is_exported_quantized_simulated_and_built(
    name: NetworkName, workshop: Workshop, tmp_path: Path
) -> None:
    checkpoint = write_network(
        tmp_path / "model.safetensors", NetworkConfig(name, 0.25, 0.1, False), workshop.data
    )
    export, ptq, built = (tmp_path / folder for folder in ("export", "ptq", "built"))
    for folder in (export, ptq, built):
        folder.mkdir()
    exporting = ExportConfig(opset=20, batch_sizes=[1, 3], max_abs_difference=1e-3, min_sqnr_db=80.0, seed=0)
    export_onnx(exporting, checkpoint=checkpoint, out=export)
    model = export / "model.onnx"
    operators = {node.op_type for node in read_graph(model).graph.node}
    assert operators <= CONVOLUTIONAL | OTHERS.get(name, set())
    quantizing = QuantizeConfig([Calibrator.minmax], [100.0], 4, 4, 0, 20.0, OP_TYPES, [Activations.uint8])
    quantize_ptq(quantizing, model=model, data=workshop.data, out=ptq)

    network, _ = load_checkpoint(checkpoint)
    manifest = read_manifest(workshop.data)
    images_NCHW = torch.from_numpy(
        normalise(open_split(workshop.data, "val")[0], manifest.mean, manifest.std)
    )
    activations, ranges = read_ranges(ptq / "ranges.json")
    simulated = fake_quantize(
        fold_batchnorm(network, images_NCHW),
        read_graph(model),
        ranges,
        op_types=OP_TYPES,
        activations=activations[0],
    )
    session = open_session(read_graph(ptq / "model.onnx"), is_optimised=False)
    found_NCHW = session.run(None, {"image": images_NCHW.numpy()})[0]
    with torch.no_grad():
        expected_NCHW, exact_NCHW = simulated.eval()(images_NCHW).numpy(), network(images_NCHW).numpy()
    assert difference(expected_NCHW, found_NCHW).sqnr_db > difference(exact_NCHW, found_NCHW).sqnr_db + 2

    declared = workshop.target("cpu_onnxruntime", reads="frames", gives="classes")
    report = build_engine(declared, model=ptq / "model.onnx", images=workshop.images, out=built)
    assert report.status == "built" and report.num_layers_quantized > 0
    assert write_bundle(
        built / "engine", {"variant": "quantized", "target": declared.name}, tmp_path / "bundle"
    )
    frames_NHWC = np.asarray(open_split(workshop.data, "test")[0][:5])
    with open_engine(plain_engine(built / "engine")) as twin:
        expected_NHW = on_frames(twin).predict(frames_NHWC)
    answers_NHW = load_engine(tmp_path / "bundle").predict(frames_NHWC)
    assert (answers_NHW == expected_NHW).mean() > 0.999
