"""A model with a custom operator on its way to an engine, with libraries that g++ compiles here."""

import json
import shutil
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from flows.params import compose_params
from flows.preflight import check_models, check_operators
from tasks.build_engine import build_engine
from tasks.convert_precision import Config as ConvertConfig
from tasks.convert_precision import convert_precision
from tasks.core.config import typed_config
from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.fingerprint import stage_key
from tasks.import_onnx import import_onnx
from tasks.parts.custom_operators import OPERATORS_KEY, CustomOperators, declare_libraries, libraries_of
from tasks.parts.data.dataset import calibration_images, normalise, open_images
from tasks.parts.engines.manifest import (
    LAYERS_FILE,
    EngineStatus,
    plain_engine,
    read_engine_manifest,
    sha256_of,
)
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.layer_diff.readers import onnxruntime_runner, plain_runner
from tasks.parts.onnx_graphs.graph import read_graph
from tasks.parts.onnx_graphs.half_precision import BF16, FP16, to_half
from tasks.parts.onnx_graphs.macs import conv_macs
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.onnx_session import open_session
from tasks.parts.quantization.layer_steps import LayerSteps
from tasks.parts.selection.bundle import write_bundle
from tasks.quantize_ptq import Config as PtqConfig
from tasks.quantize_ptq import quantize_ptq
from tests.custom_operators import DOMAIN, OPERATOR, compile_extension, compile_library
from tests.tasks.parts.selection.test_bundle import infer
from tests.tasks.test_import_onnx import CONFIG, images, target

CLASSES = tuple("abcde")
SIDE = 32
TARGET = "cpu_onnxruntime"


def custom(read: str, made: str) -> list[NodeProto]:
    return [helper.make_node(OPERATOR, [read], [made], name=f"{made}/swish", domain=DOMAIN)]


def standard(read: str, made: str) -> list[NodeProto]:
    """x * sigmoid(2 x), which is what the custom operator computes."""
    return [
        helper.make_node("Mul", [read, "two"], [f"{made}:2"]),
        helper.make_node("Sigmoid", [f"{made}:2"], [f"{made}:s"]),
        helper.make_node("Mul", [read, f"{made}:s"], [made]),
    ]


def classifier(swish: Any, batch: int | str = "n") -> ModelProto:
    """Three convolutions with this activation function between them, and the mean of the last as logits."""
    random = np.random.default_rng(0)
    shapes = {"first": (16, 3, 3, 3), "second": (16, 16, 3, 3), "last": (5, 16, 1, 1)}
    weights = {
        name: random.normal(size=shape) / np.sqrt(np.prod(shape[1:])) for name, shape in shapes.items()
    }
    constants = [numpy_helper.from_array(values.astype(np.float32), name) for name, values in weights.items()]
    constants.append(numpy_helper.from_array(np.float32(2), "two"))
    constants.append(numpy_helper.from_array(np.array([batch if isinstance(batch, int) else -1, 5]), "shape"))
    nodes = [
        helper.make_node("Conv", ["x", "first"], ["a"], strides=[2, 2], pads=[1] * 4),
        *swish("a", "b"),
        helper.make_node("Conv", ["b", "second"], ["c"], pads=[1] * 4),
        *swish("c", "d"),
        helper.make_node("Conv", ["d", "last"], ["e"]),
        helper.make_node("GlobalAveragePool", ["e"], ["f"]),
        helper.make_node("Reshape", ["f", "shape"], ["y"]),
    ]
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, *sizes])
        for name, sizes in (("x", (3, SIDE, SIDE)), ("y", (5,)))
    ]
    graph = helper.make_graph(nodes, "classifier", values[:1], values[1:], constants)
    opsets = [helper.make_opsetid(DOMAIN, 1), helper.make_opsetid("", 17)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@dataclass(frozen=True)
class Made:
    """One model twice, with the custom operator and with standard ones, and what the stages made of both."""

    library: CustomOperators
    data: Path
    graphs: dict[str, Path]
    """Graph of each kind: custom, standard, and both with _ptq."""
    engines: dict[str, Path]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("custom")
    library, data = compile_library(folder), images(folder, SIDE, CLASSES)
    ptq = compose_params(["model=onnx", "model.path=model.onnx", "data=images", f"target=[{TARGET}]"])[
        "quantize_ptq"
    ]
    graphs, engines = {}, {}
    for kind, swish, libraries in (("custom", custom, [library]), ("standard", standard, [])):
        file, quantized = folder / f"{kind}.onnx", f"{kind}_ptq"
        onnx.save(classifier(swish), file)
        for name in (kind, quantized, f"{kind}-engine", f"{quantized}-engine"):
            (folder / name).mkdir()
        import_onnx(replace(CONFIG, custom_operators=libraries), model=file, data=data, out=folder / kind)
        graphs[kind] = folder / kind / "model.onnx"
        cfg: PtqConfig = typed_config(PtqConfig, ptq | {"calibrators": ["minmax"]}, "quantize_ptq")
        quantize_ptq(cfg, model=graphs[kind], data=data, out=folder / quantized)
        graphs[quantized] = folder / quantized / "model.onnx"
        for name in (kind, quantized):
            out = folder / f"{name}-engine"
            report = build_engine(
                target(TARGET), model=graphs[name], images=calibration_images(data), out=out
            )
            assert report.status is EngineStatus.built, report.reason
            engines[name] = out / "engine"
    return Made(library, data, graphs, engines)


def inputs_of(made: Made) -> NDArray[np.float32]:
    return normalise(np.asarray(open_images(made.data, "test")), CONFIG.mean, CONFIG.std)


def run(graph: ModelProto, images_NCHW: NDArray[np.float32]) -> NDArray[np.float32]:
    session = open_session(graph)
    logits: NDArray[np.float32] = session.run(None, {session.get_inputs()[0].name: images_NCHW})[0]
    return logits


@pytest.mark.parametrize(("suffix", "least_db"), [("", 100), ("_ptq", 30)])
def test_graphs_compute_what_standard_operators_do(made: Made, suffix: str, least_db: float) -> None:
    graphs = [read_graph(made.graphs[f"{kind}{suffix}"]) for kind in ("standard", "custom")]
    expected, found = (run(graph, inputs_of(made)) for graph in graphs)
    assert difference(expected, found).sqnr_db >= least_db
    assert conv_macs(graphs[0]).values() and [*conv_macs(graphs[0]).values()] == [
        *conv_macs(graphs[1]).values()
    ]
    nodes = [node for node in graphs[1].graph.node if node.domain == DOMAIN]
    assert len(nodes) == 2 and libraries_of(graphs[1]) == [made.library]
    assert not libraries_of(graphs[0]) and DOMAIN not in {entry.domain for entry in graphs[0].opset_import}
    shapes = {
        value.name: [axis.dim_value or axis.dim_param for axis in value.type.tensor_type.shape.dim]
        for value in graphs[1].graph.value_info
    }
    assert all(shapes[node.output[0]] == ["batch", 16, SIDE // 2, SIDE // 2] for node in nodes)


def test_layer_steps_load_the_library_for_each_part(made: Made) -> None:
    graph = read_graph(made.graphs["custom"])
    convolutions = [node.name for node in graph.graph.node if node.op_type == "Conv"]
    steps = LayerSteps(graph, [inputs_of(made)])
    shapes = [steps.read_input(name)[0].shape for name in convolutions]
    assert [shape[1] for shape in shapes] == [3, 16, 16]


def test_fixed_batch_becomes_dynamic(made: Made, tmp_path: Path) -> None:
    onnx.save(classifier(custom, batch=2), tmp_path / "model.onnx")
    cfg = replace(CONFIG, custom_operators=[made.library])
    report = import_onnx(cfg, model=tmp_path / "model.onnx", data=made.data, out=tmp_path)
    assert report.static_batch_before == 2 and report.max_batch is None


def test_custom_operators_stay_in_float32(made: Made, tmp_path: Path) -> None:
    section = compose_params()["convert_precision"]
    cfg: ConvertConfig = typed_config(ConvertConfig, section, "convert_precision")
    convert_precision(cfg, model=made.graphs["custom"], data=made.data, out=tmp_path)
    graph = read_graph(tmp_path / "model.onnx")
    makers = {name: node for node in graph.graph.node for name in node.output}
    [first, second] = [node for node in graph.graph.node if node.domain == DOMAIN]
    for node in (first, second):
        cast = makers[node.input[0]]
        assert cast.op_type == "Cast" and helper.get_node_attr_value(cast, "to") == TensorProto.FLOAT
        assert makers[cast.input[0]].op_type == "Conv"
    logits = run(graph, inputs_of(made))
    assert difference(run(read_graph(made.graphs["custom"]), inputs_of(made)), logits).sqnr_db > 40


@pytest.mark.parametrize("kind", ["custom", "custom_ptq"])
@pytest.mark.parametrize("half", [FP16, BF16])
def test_custom_operators_stay_in_float32_for_tensorrt(made: Made, kind: str, half: int) -> None:
    """Both types raise the opset here: BF16 for convolutions, FP16 for pairs."""
    graph = to_half(read_graph(made.graphs[kind]), half=half)
    types = {value.name: value.type.tensor_type.elem_type for value in graph.graph.value_info}
    [first, second] = [node for node in graph.graph.node if node.domain == DOMAIN]
    assert types[first.input[0]] == types[second.input[0]] == TensorProto.FLOAT
    assert half in types.values()
    assert libraries_of(graph) == [made.library]
    onnx.checker.check_model(graph, full_check=True)


@pytest.mark.parametrize("suffix", ["", "_ptq"])
def test_engines_answer_what_those_of_standard_operators_do(made: Made, suffix: str) -> None:
    engine = made.engines[f"custom{suffix}"]
    assert read_engine_manifest(engine).target.custom_operators == [made.library]
    frames_NHWC = np.asarray(open_images(made.data, "test"))
    with open_engine(engine) as runner, open_engine(made.engines[f"standard{suffix}"]) as other:
        np.testing.assert_array_equal(runner.run(frames_NHWC), other.run(frames_NHWC))
    with open_engine(plain_engine(engine)) as twin:
        assert OPERATOR in {time.op_type for time in twin.profile(inputs_of(made)[:1], 2)}
    layers = (engine / LAYERS_FILE).read_text()
    assert OPERATOR in layers


def test_engine_is_compared_with_its_graph_layer_by_layer(made: Made) -> None:
    graph, engine = read_graph(made.graphs["custom_ptq"]), plain_engine(made.engines["custom_ptq"])
    [name] = [node.output[0] for node in graph.graph.node if node.name == "b/swish"]
    manifest = read_engine_manifest(engine)
    plain = plain_runner(graph, [name], num_threads=1, name="plain")
    marked = onnxruntime_runner(read_graph(engine / manifest.file), [name], manifest)
    with plain, marked:
        expected, found = (each.infer({"x": inputs_of(made)[:1]})[name] for each in (plain, marked))
    assert difference(expected, found).sqnr_db > 20


def test_bundle_brings_the_library_along_and_runs_alone(made: Made, tmp_path: Path) -> None:
    bundle, frames_NHWC = tmp_path / "bundle", np.asarray(open_images(made.data, "test"))
    assert write_bundle(made.engines["custom_ptq"], {"variant": "imported_ptq", "target": TARGET}, bundle)
    assert f"{made.library.sha256}  operators/libswish.so" in (bundle / "SHA256SUMS").read_text().splitlines()
    assert not (bundle / "triton_native").exists() and not (bundle / "cpp").exists()
    done = infer(sys.executable, bundle, frames_NHWC, tmp_path)
    assert done.returncode == 0, done.stderr
    with open_engine(made.engines["custom_ptq"]) as runner:
        np.testing.assert_array_equal(np.load(tmp_path / "classes.npy"), runner.run(frames_NHWC))
    with (bundle / "operators" / "libswish.so").open("ab") as library:
        library.write(b"more")
    refused = infer(sys.executable, bundle, frames_NHWC, tmp_path)
    assert refused.returncode != 0 and "operators/libswish.so: sha256" in refused.stderr
    assert "the library is not loaded, because that would run its code" in refused.stderr


def test_changed_library_beside_an_engine_is_not_loaded(made: Made, tmp_path: Path) -> None:
    engine = Path(shutil.copytree(made.engines["custom"], tmp_path / "engine"))
    replace_file(engine / "operators" / "libswish.so", b"another")
    with (
        pytest.raises(ArtifactError, match=f"sha256 .* target.{TARGET}.custom_operators declares"),
        open_engine(engine),
    ):
        pass
    (engine / "operators" / "libswish.so").unlink()
    with (
        pytest.raises(ArtifactError, match=r"libswish.so: not found, expected .* test\.lab"),
        open_engine(engine),
    ):
        pass


def test_library_with_another_sha256_is_refused_and_not_loaded(made: Made, tmp_path: Path) -> None:
    wrong = replace(made.library, sha256="0" * 64)
    onnx.save(classifier(custom), tmp_path / "model.onnx")
    with pytest.raises(ArtifactError, match=r"declares 000000000000\.\.\.; the library is not loaded"):
        import_onnx(
            replace(CONFIG, custom_operators=[wrong]),
            model=tmp_path / "model.onnx",
            data=made.data,
            out=tmp_path,
        )
    graph = read_graph(made.graphs["custom"])
    declare_libraries(graph, [wrong])
    with pytest.raises(ArtifactError, match=r"model\.custom_operators declares 0000"):
        open_session(graph)


def test_library_without_operators_is_one_line(made: Made, tmp_path: Path) -> None:
    (tmp_path / "text.so").write_bytes(b"text")
    graph = read_graph(made.graphs["custom"])
    declare_libraries(
        graph, [CustomOperators(str(tmp_path / "text.so"), sha256_of(tmp_path / "text.so"), [DOMAIN])]
    )
    with pytest.raises(
        ArtifactError, match=r"text\.so: ONNX Runtime cannot load the custom operators"
    ) as caught:
        open_session(graph)
    assert "\n" not in str(caught.value)


def test_undeclared_domain_names_node_operator_and_key(made: Made, tmp_path: Path) -> None:
    onnx.save(classifier(custom), tmp_path / "model.onnx")
    expected = (
        r"2 nodes are not standard ONNX operators: test\.lab::Swish2 \(first: 'b/swish'\), and no library is "
        r"declared for test\.lab\. .*\(model\.custom_operators\)\.$"
    )
    for libraries in ([], [replace(made.library, domains=["other.lab"])]):
        with pytest.raises(ArtifactError, match=expected):
            import_onnx(
                replace(CONFIG, custom_operators=libraries),
                model=tmp_path / "model.onnx",
                data=made.data,
                out=tmp_path,
            )


def test_operator_with_the_name_of_a_standard_one_is_refused(made: Made, tmp_path: Path) -> None:
    model = classifier(custom)
    for node in model.graph.node:
        if node.domain == DOMAIN:
            node.op_type = "Relu"
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(
        ArtifactError, match=r"node 'b/swish' is test\.lab::Relu, which has the name of an ONNX"
    ):
        import_onnx(
            replace(CONFIG, custom_operators=[made.library]),
            model=tmp_path / "model.onnx",
            data=made.data,
            out=tmp_path,
        )


def test_declaration_that_a_file_brings_along_counts_for_nothing(made: Made, tmp_path: Path) -> None:
    model = classifier(custom)
    declare_libraries(model, [made.library])
    assert [entry.key for entry in model.metadata_props] == [OPERATORS_KEY]
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(ArtifactError, match="no library is declared for"):
        import_onnx(CONFIG, model=tmp_path / "model.onnx", data=made.data, out=tmp_path)


def test_runtime_without_a_library_fails_with_the_nodes(made: Made, tmp_path: Path) -> None:
    report = build_engine(
        target("cpu_openvino"),
        model=made.graphs["custom"],
        images=calibration_images(made.data),
        out=tmp_path,
    )
    assert report.status is EngineStatus.failed
    assert "openvino does not support 2 nodes" in report.reason and "'b/swish'" in report.reason
    assert "target.cpu_openvino.custom_operators" in report.reason


def test_openvino_runs_an_extension(made: Made, tmp_path: Path) -> None:
    library, bundle = compile_extension(tmp_path), tmp_path / "bundle"
    declared = replace(target("cpu_openvino"), custom_operators=[library])
    report = build_engine(
        declared, model=made.graphs["custom_ptq"], images=calibration_images(made.data), out=tmp_path
    )
    assert report.status is EngineStatus.built, report.reason
    assert OPERATOR in (tmp_path / "engine" / LAYERS_FILE).read_text()
    assert write_bundle(tmp_path / "engine", {"variant": "imported_ptq", "target": "cpu_openvino"}, bundle)
    frames_NHWC = np.asarray(open_images(made.data, "test"))
    done = infer(sys.executable, bundle, frames_NHWC, tmp_path)
    assert done.returncode == 0, done.stderr
    with open_engine(made.engines["standard_ptq"]) as other:
        np.testing.assert_array_equal(np.load(tmp_path / "classes.npy"), other.run(frames_NHWC))
    replace_file(tmp_path / "engine" / "operators" / "libswish_openvino.so", b"another")
    with pytest.raises(ArtifactError, match="the library is not loaded"), open_engine(tmp_path / "engine"):
        pass


def replace_file(file: Path, content: bytes) -> None:
    """Put another file in its place: this process may have loaded its bytes, and would crash without them."""
    file.unlink()
    file.write_bytes(content)


def overrides(library: CustomOperators, *more: str) -> list[str]:
    fields = f"{{library: '{library.library}', sha256: '{library.sha256}', domains: [{', '.join(library.domains)}]}}"
    wanted = ["model=onnx", "model.path=model.onnx", "data=images", f"model.custom_operators=[{fields}]"]
    return [*wanted, f"prepare_data.height={SIDE}", f"prepare_data.width={SIDE}", *more]


def test_configuration_is_checked_before_the_first_stage(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(classifier(custom), "model.onnx")
    params = compose_params(overrides(made.library, f"target=[{TARGET}]"))
    assert params["import_onnx"]["custom_operators"] == [asdict(made.library)]
    check_models(params)
    with pytest.raises(
        ConfigError,
        match=r"target\.cpu_openvino\.custom_operators has no library for test\.lab, which the model",
    ):
        compose_params(overrides(made.library, f"target=[{TARGET},cpu_openvino]"))
    with pytest.raises(ConfigError, match=r"import_onnx\.custom_operators\[0\]\.sha256 is 'abc', expected"):
        compose_params(overrides(replace(made.library, sha256="abc"), f"target=[{TARGET}]"))
    with pytest.raises(ConfigError, match=r"a domain of operators, not ONNX's own"):
        compose_params(overrides(replace(made.library, domains=["ai.onnx"]), f"target=[{TARGET}]"))
    params["import_onnx"]["custom_operators"][0]["sha256"] = "0" * 64
    with pytest.raises(ArtifactError, match="the library is not loaded"):
        check_models(params)
    params["build_engine"]["cpu_openvino"] = params["build_engine"][TARGET] | {
        "name": "cpu_openvino",
        "runtime": "openvino",
        "custom_operators": [asdict(replace(made.library, sha256="1" * 64))],
    }
    with pytest.raises(ArtifactError, match=r"target\.cpu_openvino\.custom_operators declares 1111"):
        check_operators(params, ["cpu_openvino"])


@pytest.mark.parametrize("name", ["cpu_torch", "cpu_aotinductor", "cuda_onnxruntime_tensorrt"])
def test_targets_that_cannot_have_them_refuse_them(name: str) -> None:
    with pytest.raises(ConfigError, match=r"custom_operators is .*, expected \[\] for runtime"):
        replace(target(name), custom_operators=[CustomOperators("ops.so", "0" * 64, [DOMAIN])])


def test_another_library_is_another_key(made: Made) -> None:
    section = asdict(replace(CONFIG, custom_operators=[made.library]))
    other = asdict(replace(CONFIG, custom_operators=[replace(made.library, sha256="0" * 64)]))
    assert stage_key("import_onnx", section, {}, {}) != stage_key("import_onnx", other, {}, {})
    graph = read_graph(made.graphs["custom"])  # later stages have its digest in their keys
    before = graph.SerializeToString(deterministic=True)
    declare_libraries(graph, [replace(made.library, sha256="0" * 64)])
    assert graph.SerializeToString(deterministic=True) != before
    assert json.loads(graph.metadata_props[-1].value)[0]["sha256"] == "0" * 64
