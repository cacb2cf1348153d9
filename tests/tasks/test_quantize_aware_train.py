import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from onnx import numpy_helper

from tasks.core.config import typed_config
from tasks.core.errors import ArtifactError, ConfigError, GateFailed, TrainingDiverged
from tasks.parts.data.dataset import open_split
from tasks.parts.networks.batchnorm_folding import fold_batchnorm
from tasks.parts.networks.checkpoint import load_checkpoint, save_checkpoint
from tasks.parts.onnx_graphs.export import export_graph
from tasks.parts.onnx_graphs.graph import is_quantized, node_sources, read_graph, write_graph
from tasks.parts.pruning.weights import prune_two_of_four
from tasks.parts.quantization.config import Activations
from tasks.parts.quantization.evaluation import GraphEvaluator, open_evaluator
from tasks.parts.quantization.fake_quantization import fake_quantize
from tasks.parts.quantization.qdq import TensorRange, insert_qdq, read_ranges
from tasks.quantize_aware_train import Config, check_agreement, quantize_aware_train
from tests.conftest import REPOSITORY
from tests.tasks.test_train import TRAINER

VALUES: dict[str, Any] = {
    "distillation": {
        "label_weight": 1.0,
        "soft_target_weight": 0.0,
        "channel_wise_weight": 0.0,
        "hint_weight": 0.0,
        "temperature": 2.0,
    },
    "trainer": asdict(TRAINER)
    | {
        "class_balance": 0.0,
        "learning_rate": 1e-3,
        "weight_decay": 0.0,
        "horizontal_flip": 0.0,
        "brightness": 0.1,
    },
    "op_types": ["Conv", "Add", "Concat", "AveragePool", "Resize"],
    "opset": 20,
    "min_agreement": 0.9,
}


def config(**trainer: Any) -> Config:
    values = VALUES | {"trainer": VALUES["trainer"] | trainer}
    typed: Config = typed_config(Config, values, "quantize_aware_train")
    return typed


@pytest.fixture(scope="module")
def calibrated(workshop: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the inputs of the stage."""
    from tasks.parts.quantization.config import Calibrator
    from tasks.quantize_ptq import Config as PtqConfig
    from tasks.quantize_ptq import quantize_ptq

    out = tmp_path_factory.mktemp("ptq")
    ptq = PtqConfig([Calibrator.minmax], [100.0], 4, 4, 0, 20.0, VALUES["op_types"], [Activations.uint8])
    quantize_ptq(ptq, model=workshop.graph, data=workshop.data, out=out)
    return {
        "checkpoint": workshop.checkpoint,
        "teacher": workshop.checkpoint,
        "model": workshop.graph,
        "ranges": out / "ranges.json",
        "data": workshop.data,
    }


@pytest.fixture(scope="module")
def trained(calibrated: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    out = tmp_path_factory.mktemp("qat")
    return quantize_aware_train(config(), **calibrated, out=out), out


def test_training_writes_a_graph_that_is_no_worse_and_computes_what_was_trained(
    trained: tuple[Any, Path],
) -> None:
    report, out = trained
    assert report.val_score >= report.val_score_before
    assert report.num_epochs == 2
    assert report.best_epoch in (0, 1, 2)
    assert report.agreement >= 0.9
    assert is_quantized(read_graph(out / "model.onnx"))


@pytest.mark.slow
def test_graph_has_the_nodes_of_the_calibrated_one_with_other_weights(
    trained: tuple[Any, Path], calibrated: dict[str, Path]
) -> None:
    report, out = trained
    assert report.best_epoch > 0, "this training improves the network; otherwise the test compares nothing"
    before, after = read_graph(calibrated["model"]), read_graph(out / "model.onnx")
    assert node_sources(before).items() <= node_sources(after).items()
    assert all(module and source for module, source in node_sources(after).values())


@pytest.mark.slow
def test_killed_training_resumes_and_ends_with_the_same_bytes(
    trained: tuple[Any, Path], calibrated: dict[str, Path], tmp_path: Path
) -> None:
    paths = {name: str(path) for name, path in calibrated.items()} | {"out": str(tmp_path)}
    program = textwrap.dedent(
        f"""
        from pathlib import Path
        from tests.tasks.test_quantize_aware_train import config, quantize_aware_train
        paths = {{name: Path(path) for name, path in {paths!r}.items()}}
        quantize_aware_train(config(), **paths)
        """
    )
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    while not (tmp_path / "resume" / "last.ckpt").exists() and process.poll() is None:
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resumed = quantize_aware_train(config(), **calibrated, out=tmp_path)
    assert resumed == trained[0]
    assert (tmp_path / "model.onnx").read_bytes() == (trained[1] / "model.onnx").read_bytes()


@pytest.mark.slow
def test_weights_that_are_zero_stay_zero_in_the_int8_graph(
    calibrated: dict[str, Path], workshop: Any, tmp_path: Path
) -> None:
    network, card = load_checkpoint(workshop.checkpoint)
    prune_two_of_four(network)
    checkpoint, model, out = (tmp_path / name for name in ("sparse.safetensors", "sparse.onnx", "out"))
    save_checkpoint(checkpoint, network, card)
    write_graph(export_graph(network, card, height=card.height, width=card.width, opset=20), model)
    out.mkdir()
    inputs = calibrated | {"checkpoint": checkpoint, "model": model}
    assert quantize_aware_train(config(), **inputs, out=out).best_epoch > 0, "or else nothing was trained"
    graph = read_graph(out / "model.onnx")
    constants = {item.name: numpy_helper.to_array(item) for item in graph.graph.initializer}
    made_by = {name: node for node in graph.graph.node for name in node.output}
    compared = 0
    for node in graph.graph.node:
        if node.op_type == "Conv":
            name = node.input[1]
            while name not in constants:
                name = made_by[name].input[0]
            before = network.get_parameter(f"{node_sources(graph)[node.name][0]}.weight").detach().numpy()
            assert not constants[name][before == 0].any(), node.name
            compared += int((before == 0).sum())
    assert compared > 1000


def test_a_diverging_training_says_step_and_learning_rate(
    calibrated: dict[str, Path], tmp_path: Path
) -> None:
    loss = config().distillation
    endless = replace(config(), distillation=replace(loss, label_weight=1e39))
    with pytest.raises(TrainingDiverged, match=r"step \d+ \(learning rate"):
        quantize_aware_train(endless, **calibrated, out=tmp_path)


@pytest.mark.slow
def test_weights_that_training_made_worse_are_not_written(
    calibrated: dict[str, Path], tmp_path: Path
) -> None:
    before = _float_graph_that_is_already_right(calibrated, tmp_path)
    (tmp_path / "out").mkdir()
    report = quantize_aware_train(config(learning_rate=0.5, max_epochs=1), **before, out=tmp_path / "out")
    assert (report.best_epoch, report.val_score) == (0, report.val_score_before)
    assert report.agreement >= 0.9


def open_judge(calibrated: dict[str, Path], *activations: Activations) -> GraphEvaluator:
    graph = read_graph(calibrated["model"])
    return open_evaluator(graph, calibrated["data"], num_images=0, batch_size=4, activations=activations)


def test_gate_stops_a_graph_that_computes_something_else(calibrated: dict[str, Path]) -> None:
    graph = read_graph(calibrated["model"])
    for tensor in graph.graph.initializer:
        if tensor.name == "classifier/Conv:weight":
            tensor.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(tensor), tensor.name))
    network, card = load_checkpoint(calibrated["checkpoint"])
    with pytest.raises(GateFailed, match=r"quantize_aware_train\.min_agreement"):
        check_agreement(config(), network, card, graph, open_judge(calibrated, Activations.uint8))


@pytest.mark.parametrize("trained", list(Activations))
def test_gate_holds_for_each_type_of_activations(calibrated: dict[str, Path], trained: Activations) -> None:
    """Wide ranges, so that the steps of the other type give other classes."""
    graph = read_graph(calibrated["model"])
    ranges = {
        name: TensorRange(found.low * 8, found.high * 8)
        for name, found in read_ranges(calibrated["ranges"])[1].items()
    }
    network, card = load_checkpoint(calibrated["checkpoint"])
    op_types = VALUES["op_types"]
    folded = fold_batchnorm(network, torch.zeros(2, 3, card.height, card.width))
    simulated = fake_quantize(folded, graph, ranges, op_types=op_types, activations=trained)
    arguments = simulated, card, insert_qdq(graph, ranges, op_types=op_types)
    lenient = replace(config(), min_agreement=0.0)
    alone = check_agreement(lenient, *arguments, open_judge(calibrated, trained))
    both = check_agreement(lenient, *arguments, open_judge(calibrated, *Activations))
    assert alone > both + 0.02
    strict = replace(config(), min_agreement=(alone + both) / 2)
    with pytest.raises(GateFailed, match=f"{alone:.4f} with {trained}"):
        check_agreement(strict, *arguments, open_judge(calibrated, *Activations))


def test_a_graph_of_another_network_is_refused(calibrated: dict[str, Path], tmp_path: Path) -> None:
    import onnx

    graph = onnx.load(calibrated["model"])
    for tensor in graph.graph.initializer:
        if tensor.name == "classifier/Conv:weight":
            wider = np.concatenate([numpy_helper.to_array(tensor)] * 2)
            tensor.CopyFrom(numpy_helper.from_array(wider, tensor.name))
    (tmp_path / "other.onnx").write_bytes(graph.SerializeToString())
    with pytest.raises(ArtifactError, match="classifier/Conv"):
        quantize_aware_train(config(), **(calibrated | {"model": tmp_path / "other.onnx"}), out=tmp_path)


def test_a_graph_with_other_weights_of_the_same_network_is_refused(
    calibrated: dict[str, Path], workshop: Any, tmp_path: Path
) -> None:
    network, card = load_checkpoint(workshop.checkpoint)
    with torch.no_grad():
        network.get_parameter("classifier.weight").mul_(1.01)
    save_checkpoint(tmp_path / "other.safetensors", network, card)
    inputs = calibrated | {"checkpoint": tmp_path / "other.safetensors"}
    with pytest.raises(ArtifactError, match=r"'classifier/Conv' differ from the checkpoint's"):
        quantize_aware_train(config(), **inputs, out=tmp_path)


def test_missing_ranges_are_named(calibrated: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "ranges.json").write_text(
        '{"activations": ["uint8"], "ranges": {"image": [-1, 1]}}', encoding="utf-8"
    )
    with pytest.raises(ArtifactError, match="saw no data"):
        quantize_aware_train(config(), **(calibrated | {"ranges": tmp_path / "ranges.json"}), out=tmp_path)


def test_activation_checkpoints_are_refused_with_their_key() -> None:
    with pytest.raises(
        ConfigError, match=r"trainer\.activation_checkpoints is \['\*'\], expected \[\]: .*rounded"
    ):
        config(activation_checkpoints=["*"])


def _float_graph_that_is_already_right(calibrated: dict[str, Path], folder: Path) -> dict[str, Path]:
    """Return the inputs with a data set whose validation masks are what the calibrated graph predicts."""
    import shutil

    from tasks.parts.onnx_graphs.predict import predict_classes

    data = Path(shutil.copytree(calibrated["data"], folder / "dataset"))
    graph = insert_qdq(
        read_graph(calibrated["model"]), read_ranges(calibrated["ranges"])[1], op_types=VALUES["op_types"]
    )
    images_NHWC = open_split(data, "val")[0]
    np.save(data / "val_masks.npy", predict_classes(graph, images_NHWC, batch_size=4))
    return calibrated | {"data": data}
