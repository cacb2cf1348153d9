"""Graphs whose weights do not fit into one message: the limits are lowered, so that a small one stands for them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper

from tasks.build_engine import build_engine
from tasks.core.errors import ArtifactError
from tasks.import_onnx import import_onnx
from tasks.parts import onnx_session
from tasks.parts.engines.manifest import EngineStatus
from tasks.parts.onnx_graphs import graph as graphs
from tasks.parts.onnx_graphs.export import export_graph
from tasks.parts.onnx_graphs.graph import check_model, infer_shapes, read_graph, write_graph
from tasks.parts.onnx_graphs.half_precision import to_half
from tasks.parts.onnx_graphs.macs import layer_sizes
from tasks.parts.onnx_session import open_session
from tests.tasks import tiny_networks as tiny
from tests.tasks.conftest import Workshop
from tests.tasks.test_import_onnx import CONFIG, classifier, images


@pytest.fixture
def low_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_session, "_LARGE_GRAPH_BYTES", 0)
    monkeypatch.setattr(onnx_session, "_LARGE_TENSOR_BYTES", 64)
    monkeypatch.setattr(graphs, "MAX_BYTES", 0)


@pytest.fixture(scope="module")
def branched() -> ModelProto:
    return export_graph(tiny.make(tiny.Branched), tiny.card(), height=tiny.SIZE, width=tiny.SIZE, opset=20)


def constants(model: ModelProto) -> dict[str, tuple[list[int], str, bytes]]:
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    return {name: ([*array.shape], str(array.dtype), array.tobytes()) for name, array in arrays.items()}


@pytest.mark.usefixtures("low_limits")
def test_weights_lie_beside_the_graph_and_come_back_with_it_b7(branched: ModelProto, tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    write_graph(branched, file)
    [weights] = tmp_path.glob("*.weights")
    assert file.stat().st_size + weights.stat().st_size > branched.ByteSize() > file.stat().st_size
    found = read_graph(file)
    assert constants(found) == constants(branched)
    assert list(found.graph.node) == list(branched.graph.node)
    assert onnx.load(file).graph.node == branched.graph.node  # other tools read it, too
    before = file.read_bytes()
    write_graph(found, file)
    assert file.read_bytes() == before and list(tmp_path.glob("*.weights")) == [weights]
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(ArtifactError, match=r"not the weights of model\.onnx, whose md5 is the file's name"):
        read_graph(file)
    weights.unlink()
    with pytest.raises(ArtifactError, match=r"the weights of model\.onnx cannot be read"):
        read_graph(file)


def test_large_graph_is_written_in_parts_with_the_bytes_of_one_message_b7(
    branched: ModelProto, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("low_limits")
    request.getfixturevalue("monkeypatch").setattr(graphs, "MAX_BYTES", 2**31)
    assert onnx_session.large_constants(branched)
    write_graph(branched, tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx").read_bytes() == branched.SerializeToString(deterministic=True)


def test_weights_in_files_of_others_are_refused_b7(branched: ModelProto, tmp_path: Path) -> None:
    copied = ModelProto()
    copied.CopyFrom(branched)
    onnx.save(
        copied,
        tmp_path / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    with pytest.raises(ArtifactError, match=r"tensors are outside the file .* one self-contained file"):
        read_graph(tmp_path / "model.onnx")


def test_sessions_shapes_and_checks_are_the_same_without_weights_in_the_message_b7(
    branched: ModelProto, request: pytest.FixtureRequest
) -> None:
    def results() -> tuple[object, ...]:
        bare = ModelProto()
        bare.CopyFrom(branched)
        del bare.graph.value_info[:]
        inferred, half = infer_shapes(bare, strict_mode=True, data_prop=True), to_half(branched)
        check_model(branched, full_check=True)
        sessions = [open_session(branched), open_session(branched, is_lean=True)]
        logits = [session.run(None, {"image": tiny.images(2).numpy()})[0] for session in sessions]
        shapes = sorted(value.SerializeToString() for value in inferred.graph.value_info)
        values = constants(half)
        return (
            shapes,
            constants(inferred),
            list(half.graph.node),
            values,
            layer_sizes(branched),
            [values.tobytes() for values in logits],
        )

    expected = results()
    request.getfixturevalue("low_limits")
    assert onnx_session.large_constants(branched)
    for found, wanted in zip(results(), expected, strict=True):
        assert found == wanted


@pytest.mark.usefixtures("low_limits")
def test_checker_still_refuses_what_is_wrong_b7(branched: ModelProto) -> None:
    broken = ModelProto()
    broken.CopyFrom(branched)
    broken.graph.node[-1].input[0] = "nothing"
    with pytest.raises(onnx.checker.ValidationError, match="nothing"):
        check_model(broken)


@pytest.mark.usefixtures("low_limits")
def test_engine_is_built_of_a_large_graph_or_refused_in_one_sentence_b7(
    workshop: Workshop, tmp_path: Path
) -> None:
    write_graph(read_graph(workshop.graph), tmp_path / "model.onnx")
    reports = {}
    for name in ("cpu_openvino", "cpu_onnxruntime"):
        (tmp_path / name).mkdir()
        reports[name] = build_engine(
            replace(workshop.target(name), max_batch=2),
            model=tmp_path / "model.onnx",
            images=workshop.images,
            out=tmp_path / name,
        )
    assert reports["cpu_openvino"].status is EngineStatus.built
    refused = reports["cpu_onnxruntime"]
    assert refused.status is EngineStatus.failed
    assert "GiB of weights. An engine of onnxruntime is built from one ONNX file" in refused.reason
    assert np.isfinite(reports["cpu_openvino"].agreement_db)


@pytest.mark.usefixtures("low_limits")
def test_file_with_external_weights_is_imported_b7(tmp_path: Path) -> None:
    (tmp_path / "network").mkdir()
    (tmp_path / "imported").mkdir()
    onnx.save(
        classifier(),
        tmp_path / "network" / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    data = images(tmp_path, 32)
    report = import_onnx(CONFIG, model=tmp_path / "network", data=data, out=tmp_path / "imported")
    assert min(found.sqnr_db for found in report.differences) > 80
    assert len(list((tmp_path / "imported").glob("*.weights"))) == 1
    assert read_graph(tmp_path / "imported" / "model.onnx").graph.node
