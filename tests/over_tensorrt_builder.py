"""Tests that run where NVIDIA's builder is on the path as `tensorrt`: see tests/tasks/test_tensorrt_builder.py."""

import functools
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
import tensorrt as trt

from flows.doctor import State, examine
from flows.params import compose_params
from tasks.core.config import typed_config
from tasks.core.errors import ArtifactError, BuildFailed
from tasks.parts.builders.contract import GraphSource, read_source
from tasks.parts.builders.graph_rewrites import round_rest
from tasks.parts.builders.tensorrt_commands import describe_build, polygraphy_command
from tasks.parts.builders.tensorrt_network import check_types, count_products
from tasks.parts.builders.tensorrt_plan import add_profiles, build_plan, configure, parse_graph
from tasks.parts.engines.runtimes import Precision
from tasks.parts.engines.target import Target
from tasks.parts.engines.tensorrt.log import LOG
from tasks.parts.engines.tensorrt.plugins import load_plugins
from tasks.parts.engines.tensorrt_options import (
    RTX_CAPABILITIES,
    BatchProfile,
    HardwareCompatibility,
    TacticSource,
)
from tasks.parts.onnx_graphs.graph import write_graph
from tasks.parts.onnx_graphs.half_precision import to_half
from tasks.parts.onnx_graphs.macs import LAYER_TYPES

ROOT = Path(os.environ["WORKSHOP"])
TARGETS = (
    "h200_tensorrt",
    "h200_tensorrt_f32",
    "h200_tensorrt_static",
    "rtx4090_tensorrt",
    "orin_tensorrt11",
    "rtx4090_tensorrt_rtx",
    "rtx5090_tensorrt_rtx",
)
RTX = TARGETS[-2:]


def declared(name: str) -> Target:
    """Return a target of conf/target, without its timing cache."""
    params = compose_params([f"target=[cpu_torch,cuda_torch,{name}]"])
    target: Target = typed_config(Target, params["build_engine"][name], f"target.{name}")
    assert target.tensorrt is not None
    return replace(target, tensorrt=replace(target.tensorrt, timing_cache=None))


def read(name: str, target: Target, folder: Path) -> tuple[GraphSource, Target]:
    """Return a graph of the workshop as a builder reads it, and the target with the batch that it takes."""
    file = ROOT / f"{name}.onnx"
    if name == "half":
        file = folder / "half.onnx"
        write_graph(to_half(onnx.load(ROOT / "float.onnx")), file)
    source = read_source(target, file, ROOT / "dataset" / "calibration_images.npy")
    assert isinstance(source, GraphSource)
    return source, replace(target, max_batch=source.card.fit_batch(target.max_batch))


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("variant", ["float", "half", "quantized"])
def test_every_graph_is_built_in_the_precision_that_was_asked_for(
    variant: str, name: str, tmp_path: Path
) -> None:
    source, target = read(variant, declared(name), tmp_path)
    assert target.gpu is not None
    graph = round_rest(target, source.rewritten(target), source.images_NCHW)
    num_warnings = len(LOG.warnings)
    plan = build_plan(graph, target, target.gpu)
    assert len(plan) > 10_000
    assert not [text for text in LOG.warnings[num_warnings:] if "unsupported" in text.lower()]
    products = count_products(parse_graph(trt.Builder(LOG), graph, target)[0])
    num_layers = sum(node.op_type in LAYER_TYPES for node in graph.graph.node)
    if variant == "quantized":
        assert products["int8"] >= 0.9 * num_layers
    else:
        expected = "f16" if variant == "half" or target.precision == "f16" else "f32"
        assert products == {expected: num_layers}


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": Precision.bf16},
        {"max_batch": 16, "profiles": [BatchProfile(1, 1, 1), BatchProfile(2, 8, 16)]},
        {"max_batch": 1},
    ],
    ids=["bf16", "two profiles", "one image"],
)
@pytest.mark.parametrize("variant", ["float", "quantized"])
def test_precision_profiles_and_batches_are_taken(
    variant: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    target = declared("h200_tensorrt")
    assert target.tensorrt is not None and target.gpu is not None
    fields = {name: value for name, value in changes.items() if name != "profiles"}
    options = replace(target.tensorrt, profiles=changes.get("profiles", []))
    target = replace(target, **fields, tensorrt=options)
    source, _ = read(variant, target, tmp_path)
    graph = round_rest(target, source.rewritten(target), source.images_NCHW)
    assert len(build_plan(graph, target, target.gpu)) > 10_000
    expected = "int8" if variant == "quantized" else str(target.precision)
    assert expected in count_products(parse_graph(trt.Builder(LOG), graph, target)[0])


def test_graph_that_no_message_holds_is_read_from_a_file_with_its_weights_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = read("float", declared("h200_tensorrt"), tmp_path)
    assert target.gpu is not None
    for name, value in (
        ("onnx_graphs.graph.MAX_BYTES", 0),
        ("onnx_session._LARGE_GRAPH_BYTES", 0),
        ("onnx_session._LARGE_TENSOR_BYTES", 256),
    ):
        monkeypatch.setattr(f"tasks.parts.{name}", value)
    parse_from_file = trt.OnnxParser.parse_from_file
    seen: list[list[str]] = []

    def record(parser: "trt.OnnxParser", file: str) -> bool:
        seen.append(sorted(path.suffix for path in Path(file).parent.iterdir()))
        return bool(parse_from_file(parser, file))

    monkeypatch.setattr(trt.OnnxParser, "parse_from_file", record)
    assert len(build_plan(source.graph, target, target.gpu)) > 10_000
    assert seen == [[".onnx", ".weights"]]


def test_library_of_plugins_is_loaded_and_another_file_is_refused(tmp_path: Path) -> None:
    registry = trt.Builder(LOG).get_plugin_registry()
    load_plugins(registry, [Path(os.environ["PLUGIN"])])
    assert "Swish2" in {creator.name for creator in registry.all_creators}
    other = tmp_path / "libother.so"
    other.write_bytes(b"no library")
    with pytest.raises(ArtifactError, match=r"libother\.so: TensorRT .* cannot load the plugins \(.+\)"):
        load_plugins(registry, [other])


def test_refused_operator_is_named_with_its_node(tmp_path: Path) -> None:
    source, target = read("float", declared("h200_tensorrt"), tmp_path)
    graph, node = source.graph, source.graph.graph.node[3]
    node.op_type, node.domain = "Unheard", "of.nobody"
    graph.opset_import.add(domain="of.nobody", version=1)
    assert target.gpu is not None
    with pytest.raises(BuildFailed, match=f"Unheard '{node.name}'"):
        build_plan(graph, target, target.gpu)


def test_tensor_of_another_type_than_that_of_the_graph_is_named(tmp_path: Path) -> None:
    source, target = read("float", declared("h200_tensorrt"), tmp_path)
    half = read("half", target, tmp_path)[0]
    network, _parser = parse_graph(trt.Builder(LOG), source.graph, target)
    with pytest.raises(BuildFailed, match=r"tensors in other types.* gives f32, expected f16"):
        check_types(network, half.graph, target)


def test_polygraphy_builds_by_the_command_beside_a_plan(tmp_path: Path) -> None:
    """All options of the target but `version_compatible`, whose runtime TensorRT for RTX lacks."""
    source, target = read("float", declared("h200_tensorrt"), tmp_path)
    assert target.tensorrt is not None and target.gpu is not None
    options = replace(
        target.tensorrt,
        profiles=[BatchProfile(1, 1, 1), BatchProfile(2, 4, 4)],
        timing_cache=str(tmp_path / "timings"),
        tactic_sources=[TacticSource.jit_convolutions],
        hardware_compatibility=HardwareCompatibility.ampere_plus,
        max_aux_streams=2,
    )
    write_graph(source.graph, tmp_path / "graph.onnx")
    build = describe_build(source.graph, target.gpu, trt.__version__, is_quantized=False)
    command = polygraphy_command(replace(target, max_batch=4, tensorrt=options), build)
    done = subprocess.run(
        [
            Path(sys.executable).with_name("polygraphy"),
            *(word.replace("$engine/", "") for word in command[1:]),
        ],
        cwd=tmp_path,
        env={**os.environ, "POLYGRAPHY_USE_TENSORRT_RTX": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "rebuilt.plan").stat().st_size > 10_000
    size = source.card.image_shape
    assert f"opt=[4, {', '.join(map(str, size))}]" in done.stdout
    assert "Tactic Sources         | [JIT_CONVOLUTIONS]" in done.stdout
    assert f"WORKSPACE: {options.workspace_mib}.00 MiB" in done.stdout


def test_doctor_tells_that_it_builds_here() -> None:
    findings = examine(compose_params([]), all_targets=False)
    found = next(one for one in findings if one.subject == "TensorRT's builder")
    assert (found.state, found.text) == (State.ok, f"{trt.__version__} parses and builds plans here")


def test_zero_points_which_our_graphs_avoid_are_refused(tmp_path: Path) -> None:
    """Targets for CPUs have uint8 with a zero point."""
    source, target = read("quantized", declared("h200_tensorrt"), tmp_path)
    assert target.gpu is not None
    with pytest.raises(BuildFailed, match="zero point"):
        build_plan(source.graph, target, target.gpu)


def configured(target: Target) -> "trt.IBuilderConfig":
    config = trt.Builder(LOG).create_builder_config()
    configure(config, target, major=1)
    return config


def test_plan_for_rtx_is_aimed_at_the_declared_gpu() -> None:
    for name, capability in zip(RTX, ("SM89", "SM120"), strict=True):
        config = configured(declared(name))
        assert config.num_compute_capabilities == 1
        assert config.get_compute_capability(0) == trt.ComputeCapability.__members__[capability]


def test_plan_for_rtx_that_is_to_run_since_ampere_is_aimed_at_none() -> None:
    target = declared(RTX[0])
    assert target.tensorrt is not None
    options = replace(target.tensorrt, hardware_compatibility=HardwareCompatibility.ampere_plus)
    config = configured(replace(target, tensorrt=options))
    default = trt.Builder(LOG).create_builder_config()
    assert config.num_compute_capabilities == default.num_compute_capabilities


def test_compute_capabilities_of_targets_are_those_of_the_builder() -> None:
    known = {f"SM{one.replace('.', '')}" for one in RTX_CAPABILITIES}
    assert known == set(trt.ComputeCapability.__members__) - {"NONE", "CURRENT"}


SAID = re.compile(rb"\bfqn=\w+|\bmemory_budget = \d+|\bcorrltn=\{ name=\S+")
"""Functions with the hash of their code, bytes that kernels may take, and convolutions."""


def set_level(config: Any) -> None:
    config.builder_optimization_level = 5


def set_tactics(config: Any) -> None:
    assert config.set_tactic_sources(1 << int(trt.TacticSource.JIT_CONVOLUTIONS))


def set_sparse(config: Any) -> None:
    config.set_flag(trt.BuilderFlag.SPARSE_WEIGHTS)


def set_streams(config: Any) -> None:
    config.max_aux_streams = 4


def set_hardware(config: Any) -> None:
    config.hardware_compatibility_level = trt.HardwareCompatibilityLevel.AMPERE_PLUS


def set_workspace(config: Any) -> None:
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 64 * 2**20)


@functools.cache
def usual_words(variant: str, folder: Path) -> Counter[bytes]:
    return Counter(SAID.findall(plan_for_rtx(variant, folder)))


def plan_for_rtx(variant: str, folder: Path, change: Callable[[Any], None] = lambda config: None) -> bytes:
    """Build a plan as `build_plan` does, with a change of its configuration."""
    source, target = read(variant, declared(RTX[0]), folder)
    graph = round_rest(target, source.rewritten(target), source.images_NCHW)
    builder = trt.Builder(LOG)
    network, _parser = parse_graph(builder, graph, target)
    config = builder.create_builder_config()
    configure(config, target, major=1)
    add_profiles(config, builder, target, graph)
    change(config)
    return bytes(builder.build_serialized_network(network, config))


@pytest.mark.parametrize(
    ("change", "has_effect"),
    [
        (set_level, False),
        (set_tactics, False),
        (set_sparse, False),
        (set_streams, False),
        (set_hardware, False),
        (set_workspace, True),
    ],
)
@pytest.mark.parametrize("variant", ["float", "quantized"])
def test_options_that_a_target_for_rtx_may_not_set_change_no_plan(
    variant: str, change: Callable[[Any], None], has_effect: bool, tmp_path: Path
) -> None:
    """Bytes differ between builds in any case. A plan says in text which kernels it has, by a hash of their code."""
    usual = usual_words(variant, ROOT)
    changed = Counter(SAID.findall(plan_for_rtx(variant, tmp_path, change)))
    assert sum(usual.values()) > 20
    assert (usual != changed) == has_effect


def test_convolutions_of_a_plan_for_rtx_read_int8_and_have_no_kernel_yet(tmp_path: Path) -> None:
    plan = plan_for_rtx("quantized", tmp_path)
    are_int8 = dict.fromkeys(re.findall(rb'tensor=\{[^}\n]*\}[^\n]*name="([^"]+)"[^\n]*type=int8 \}', plan))
    convolutions = re.findall(rb'corrltn=\{[^\n]* input=\{"([^"]+)" "([^"]+)"[^\n]*', plan)
    assert len(convolutions) > 10
    assert sum(set(read) <= are_int8.keys() for read in convolutions) >= 0.9 * len(convolutions)
    assert plan.count(b"runtime_tactic=true") >= len(convolutions)


def test_plan_for_rtx_may_show_its_inner_tensors(tmp_path: Path) -> None:
    source, target = read("quantized", declared(RTX[0]), tmp_path)
    assert target.gpu is not None
    graph = round_rest(target, source.rewritten(target), source.images_NCHW)
    assert len(build_plan(graph, target, target.gpu, are_tensors_marked=True)) > 10_000


def run_python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_command_builds_a_plan_without_the_gpu_and_says_that_it_is_not_proved(tmp_path: Path) -> None:
    model, images = str(ROOT / "float.onnx"), str(ROOT / "dataset" / "calibration_images.npy")
    files = ["--model", model, "--images", images, "--out", str(tmp_path / "some.plan")]
    done = run_python("-m", "flows.build_plan", RTX[1], *files)
    assert done.returncode == 0, done.stderr
    assert "for compute capability 12.0. Not proved: nothing has run it." in done.stdout
    assert (tmp_path / "some.plan").stat().st_size > 10_000
    done = run_python("-m", "flows.build_plan", RTX[1], *files, f"target.{RTX[1]}.runtime_version='1.6'")
    assert done.returncode == 1 and "declares tensorrt_rtx 1.6, this machine has 1.7" in done.stderr


_FIRST_COMES_FIRST = """
import sys
from tasks.core.errors import TargetMismatch
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.engines.tensorrt_flavour import choose_tensorrt
first, second = (Runtime(name) for name in sys.argv[1:])
choose_tensorrt(first)
choose_tensorrt(first)
import tensorrt
assert tensorrt.__name__ == first, tensorrt.__name__
try:
    choose_tensorrt(second)
except TargetMismatch as error:
    print(error)
"""


@pytest.mark.parametrize("first", ["tensorrt", "tensorrt_rtx"])
def test_process_runs_the_flavour_that_comes_first(first: str) -> None:
    [second] = {"tensorrt", "tensorrt_rtx"} - {first}
    done = run_python("-c", _FIRST_COMES_FIRST, first, second)
    assert done.returncode == 0, done.stderr
    assert f"runs plans of {first} and cannot run those of {second} as well" in done.stdout
