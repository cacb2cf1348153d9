"""Tests that run where the bindings of TensorRT are on the path, over stub libraries: see test_tensorrt_contract.py.

A builder and its configuration cannot exist there; recorders stand for them.
"""

import ctypes
import logging
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import tensorrt as trt
import yaml
from onnx import TensorProto, helper
from rich.console import Console
from rich.progress import Progress

from tasks.core.config import typed_config
from tasks.core.errors import ArtifactError, BuildFailed
from tasks.parts.builders.tensorrt_dla import check_fallbacks, place_on_dla
from tasks.parts.builders.tensorrt_plan import (
    BuildProgress,
    add_profiles,
    configure,
    describe_parser_errors,
)
from tasks.parts.engines.target import Target
from tasks.parts.engines.tensorrt.debug_tensors import DebugTensors
from tasks.parts.engines.tensorrt.log import LOG, TensorrtLog, describe_errors
from tasks.parts.engines.tensorrt.plugins import load_plugins
from tasks.parts.engines.tensorrt_options import BatchProfile, HardwareCompatibility, TacticSource
from tasks.parts.onnx_graphs.graph import set_node_source
from tests.conftest import REPOSITORY

MAJOR = int(os.environ["MAJOR"])


@dataclass
class RecordedConfig:
    """Stands for an IBuilderConfig and remembers its calls."""

    flags: set[Any] = field(default_factory=set)
    pools: dict[Any, int] = field(default_factory=dict)
    tactics: int | None = None
    is_accepting: bool = True
    on_dla: tuple[str, ...] = ()
    """Layers that a DLA can run."""
    on_gpu: list[str] = field(default_factory=list)
    """Layers that were put on the GPU."""

    def set_flag(self, flag: Any) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: Any) -> None:
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self.pools[pool] = pool_size

    def set_tactic_sources(self, tactic_sources: int) -> bool:
        self.tactics = tactic_sources
        return self.is_accepting

    def add_optimization_profile(self, profile: Any) -> int:
        return 0 if self.is_accepting else -1

    def can_run_on_DLA(self, layer: Any) -> bool:  # noqa: N802
        return layer.name in self.on_dla

    def set_device_type(self, layer: Any, device_type: Any) -> None:
        assert device_type == trt.DeviceType.GPU
        self.on_gpu.append(layer.name)


@dataclass(frozen=True)
class RecordedError:
    """Stands for a ParserError."""

    name: str

    def node_name(self) -> str:
        return self.name

    def node(self) -> int:
        return 3

    def node_operator(self) -> str:
        return "Round"

    def desc(self) -> str:
        return "no importer registered"


@dataclass(frozen=True)
class RecordedParser:
    """Stands for an OnnxParser that refused a graph."""

    errors: tuple[RecordedError, ...]

    @property
    def num_errors(self) -> int:
        return len(self.errors)

    def get_error(self, index: int) -> RecordedError:
        return self.errors[index]


@dataclass(frozen=True)
class RecordedTensor:
    """Stands for an ITensor."""

    is_network_input: bool = False
    is_network_output: bool = False


@dataclass(frozen=True)
class RecordedLayer:
    """Stands for an ILayer with one input and one output."""

    name: str
    type: Any
    read: RecordedTensor = RecordedTensor()
    given: RecordedTensor = RecordedTensor()

    def get_input(self, index: int) -> RecordedTensor:
        return self.read

    def get_output(self, index: int) -> RecordedTensor:
        return self.given


@dataclass(frozen=True)
class RecordedNetwork:
    """Stands for an INetworkDefinition."""

    layers: tuple[RecordedLayer, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def get_layer(self, index: int) -> RecordedLayer:
        return self.layers[index]


@dataclass(frozen=True)
class RecordedBuilder:
    """Stands for a Builder."""

    num_DLA_cores: int = 2
    profile: Any = None

    def create_optimization_profile(self) -> Any:
        return self.profile


class RecordedProfile:
    """Stands for an IOptimizationProfile."""

    def set_shape(self, input: str, min: Any, opt: Any, max: Any) -> None:
        if not min <= opt <= max:
            raise RuntimeError("Shape provided for opt is inconsistent with other shapes.")


def read_target(name: str) -> Target:
    fields = yaml.safe_load((REPOSITORY / "conf" / "target" / f"{name}.yaml").read_text())
    del fields["work_pool"]
    target: Target = typed_config(Target, fields, f"build_engine.{name}")
    return target


def with_options(target: Target, **changes: Any) -> Target:
    assert target.tensorrt is not None
    return replace(target, tensorrt=replace(target.tensorrt, **changes))


@pytest.fixture
def target() -> Target:
    return read_target("h200_tensorrt")


def test_configuration_gets_what_the_target_declares(target: Target) -> None:
    config: Any = RecordedConfig({trt.BuilderFlag.TF32})  # on by itself
    compatibility = HardwareCompatibility.ampere_plus
    wanted = with_options(target, version_compatible=True, hardware_compatibility=compatibility)
    configure(config, wanted, major=MAJOR)
    assert config.flags == {trt.BuilderFlag.SPARSE_WEIGHTS, trt.BuilderFlag.VERSION_COMPATIBLE}
    assert config.pools == {trt.MemoryPoolType.WORKSPACE: 8192 * 2**20}
    assert config.builder_optimization_level == 3
    assert config.profiling_verbosity == trt.ProfilingVerbosity.DETAILED
    assert config.hardware_compatibility_level == trt.HardwareCompatibilityLevel.AMPERE_PLUS
    assert not hasattr(config, "DLA_core") and config.tactics is None


IMAGE, LOGITS = RecordedTensor(is_network_input=True), RecordedTensor(is_network_output=True)
LAYERS = (
    RecordedLayer("to half", trt.LayerType.CAST, read=IMAGE),
    RecordedLayer("weights", trt.LayerType.CONSTANT),
    RecordedLayer("conv", trt.LayerType.CONVOLUTION),
    RecordedLayer("resize", trt.LayerType.RESIZE),
    RecordedLayer("to float", trt.LayerType.CAST, given=LOGITS),
)


def place(config: RecordedConfig, layers: tuple[RecordedLayer, ...], **changes: Any) -> None:
    network: Any = RecordedNetwork(layers)
    builder: Any = RecordedBuilder()
    recorded: Any = config
    place_on_dla(recorded, builder, network, with_options(read_target("orin_tensorrt11_dla"), **changes))


def test_only_conversions_of_a_dla_run_on_the_gpu() -> None:
    config: Any = RecordedConfig(on_dla=("conv", "resize"))
    place(config, LAYERS, dla_core=1)
    assert config.DLA_core == 1 and config.default_device_type == trt.DeviceType.DLA
    assert config.on_gpu == ["to half", "weights", "to float"]


def test_layer_that_a_dla_cannot_run_fails_the_build_by_name() -> None:
    with pytest.raises(BuildFailed, match=r"cannot run 1 layers: RESIZE 'resize'\. .*dla_gpu_fallback=true"):
        place(RecordedConfig(on_dla=("conv",)), LAYERS)
    inner = (*LAYERS, RecordedLayer("inner", trt.LayerType.CAST))
    with pytest.raises(BuildFailed, match=r"cannot run 1 layers: CAST 'inner'"):
        place(RecordedConfig(on_dla=("conv", "resize")), inner)


def test_layer_that_a_dla_cannot_run_runs_on_the_gpu_where_the_target_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = RecordedConfig(on_dla=("conv",))
    place(config, LAYERS, dla_gpu_fallback=True)
    assert "resize" in config.on_gpu and "1 layers run on the GPU and not on the DLA" in caplog.text


def test_machine_without_the_dla_is_refused() -> None:
    with pytest.raises(BuildFailed, match=r"dla_core is 3, TensorRT .* finds 2 DLA cores"):
        place(RecordedConfig(), LAYERS, dla_core=3)


def test_layer_that_tensorrt_moves_during_the_build_fails_it() -> None:
    said = ["Validation failed for DLA layer: head/Conv. Switching to GPU fallback.", "slow kernel"]
    target = read_target("orin_tensorrt11_dla")
    with pytest.raises(BuildFailed, match=r"cannot run 1 layers: Validation failed for DLA layer: head/Conv"):
        check_fallbacks(said, target)
    check_fallbacks(said, with_options(target, dla_gpu_fallback=True))
    check_fallbacks(said[1:], target)


def image_graph() -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 3, 8, 8]) for name in "xy"]
    node = helper.make_node("Relu", ["x"], ["y"], name="relu")
    graph: onnx.ModelProto = helper.make_model(helper.make_graph([node], "g", values[:1], values[1:]))
    return graph


@pytest.mark.parametrize(
    ("profile", "is_accepting", "message"),
    [
        (None, True, r"refuses to create an optimization profile"),
        (RecordedProfile(), False, r"refuses the profile of BatchProfile\(min=1, opt=1, max=32\)"),
    ],
)
def test_profile_that_tensorrt_refuses_fails_the_build(
    target: Target, profile: Any, is_accepting: bool, message: str
) -> None:
    config: Any = RecordedConfig(is_accepting=is_accepting)
    builder: Any = RecordedBuilder(profile=profile)
    with pytest.raises(BuildFailed, match=message):
        add_profiles(config, builder, target, image_graph())
    builder = RecordedBuilder(profile=RecordedProfile())
    add_profiles(RecordedConfig(), builder, target, image_graph())  # type: ignore[arg-type]


def test_tactic_sources_that_tensorrt_refuses_fail_the_build(target: Target) -> None:
    config: Any = RecordedConfig(is_accepting=False)
    wanted = with_options(target, tactic_sources=[TacticSource.jit_convolutions])
    with pytest.raises(BuildFailed, match=r"refuses tactic_sources jit_convolutions"):
        configure(config, wanted, major=MAJOR)


def test_tactic_source_of_another_major_is_refused(target: Target) -> None:
    config: Any = RecordedConfig()
    configure(config, with_options(target, tactic_sources=[TacticSource.jit_convolutions]), major=MAJOR)
    assert config.tactics == 1 << int(trt.TacticSource.JIT_CONVOLUTIONS)
    old = with_options(target, tactic_sources=[TacticSource.cudnn])
    if MAJOR < 11:
        configure(config, old, major=MAJOR)
        assert config.tactics == 1 << int(trt.TacticSource.CUDNN)
    else:
        with pytest.raises(
            BuildFailed, match=r"TensorRT 11 has no tactic source cudnn; it has .*jit_convolutions"
        ):
            configure(config, old, major=MAJOR)


def test_messages_go_to_the_log_and_errors_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    log = TensorrtLog()
    assert describe_errors(log.errors) == "it gave no reason"
    with caplog.at_level(logging.WARNING):
        log.log(trt.ILogger.Severity.WARNING, "slow kernel")
        log.log(trt.ILogger.Severity.ERROR, "no kernel for layer a")
        log.log(trt.ILogger.Severity.VERBOSE, "tactic 7")
    assert describe_errors(log.errors) == "no kernel for layer a" and log.warnings == ["slow kernel"]
    assert caplog.messages == ["TensorRT: slow kernel", "TensorRT: no kernel for layer a"]


def test_every_severity_has_a_level() -> None:
    log = TensorrtLog()
    for severity in trt.ILogger.Severity.__members__.values():
        log.log(severity, "something")


def test_progress_draws_a_bar_per_phase_and_takes_it_away() -> None:
    progress = Progress(console=Console(quiet=True))
    monitor = BuildProgress(progress)
    monitor.phase_start("Building Engine", None, 5)
    monitor.phase_start("Tactic Timing", "Building Engine", 10)
    assert monitor.step_complete("Tactic Timing", 3)
    assert [(task.description, task.completed, task.total) for task in progress.tasks] == [
        ("Building Engine", 0, 5),
        ("  Tactic Timing", 4, 10),
    ]
    monitor.phase_finish("Tactic Timing")
    assert [task.description for task in progress.tasks] == ["Building Engine"]


def test_refused_nodes_are_named_with_module_and_line() -> None:
    node = helper.make_node("Round", ["x"], ["y"], name="head/Round")
    set_node_source(node, "head", "tasks/parts/networks/head.py:12")
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
    graph: onnx.ModelProto = helper.make_model(helper.make_graph([node], "g", values[:1], values[1:]))
    parser: Any = RecordedParser((RecordedError("head/Round"), RecordedError("")))
    text = describe_parser_errors(parser, graph)
    assert "refuses 2 nodes" in text
    assert "Round 'head/Round' (module head, tasks/parts/networks/head.py:12): no importer registered" in text
    assert "Round 'node 3': no importer registered" in text


@dataclass
class RecordedRegistry:
    """Stands for an IPluginRegistry that cannot load refused.so."""

    loaded: list[str] = field(default_factory=list)

    def load_library(self, plugin_lib: str) -> object:
        self.loaded.append(plugin_lib)
        if plugin_lib.endswith("refused.so"):
            LOG.log(trt.ILogger.Severity.ERROR, "no plugin creator")
            return None
        return object()


def test_plugins_that_tensorrt_cannot_load_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    registry: Any = RecordedRegistry()
    with pytest.raises(ArtifactError, match="cannot load its own plugins"):  # a stub has none
        load_plugins(registry, [])
    monkeypatch.setattr(trt, "init_libnvinfer_plugins", lambda _log, _namespace: True)
    load_plugins(registry, [tmp_path / "a.so", tmp_path / "b.so"])
    assert registry.loaded == [str(tmp_path / "a.so"), str(tmp_path / "b.so")]
    with pytest.raises(ArtifactError, match=rf"refused\.so: TensorRT {MAJOR}.* \(no plugin creator\)"):
        load_plugins(registry, [tmp_path / "refused.so"])


def capsule(values: np.ndarray) -> Any:
    """Wrap an address as the bindings do."""
    wrap = ctypes.pythonapi.PyCapsule_New
    wrap.restype, wrap.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return wrap(values.ctypes.data, None, None)


@pytest.mark.parametrize("location", [trt.TensorLocation.HOST, trt.TensorLocation.DEVICE])
def test_debug_tensors_are_copied_while_they_are_valid(location: Any) -> None:
    def copy_from_device(values: np.ndarray, address: int) -> None:
        ctypes.memmove(values.ctypes.data, address, values.nbytes)

    listener = DebugTensors(copy_from_device)
    levels_NC = np.array([[1, -128, 127]], np.int8)
    assert listener.process_debug_tensor(
        capsule(levels_NC), location, trt.DataType.INT8, trt.Dims([1, 3]), "levels", 0
    )
    kept = levels_NC.copy()
    levels_NC[:] = 0
    np.testing.assert_array_equal(listener.tensors["levels"], kept)


def test_debug_tensors_that_numpy_does_not_know_are_passed_over() -> None:
    listener = DebugTensors(lambda values, address: None)
    for kind, shape in ((trt.DataType.BF16, [1, 3]), (trt.DataType.FLOAT, [3])):
        assert listener.process_debug_tensor(None, trt.TensorLocation.HOST, kind, trt.Dims(shape), "a", 0)
    assert listener.tensors == {}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Take the place of pycuda, which needs a GPU's driver."""
    driver, pycuda = ModuleType("pycuda.driver"), ModuleType("pycuda")
    vars(driver).update(mem_alloc=lambda num_bytes: 1000 + num_bytes, MemoryError=MemoryError)
    vars(pycuda)["driver"] = driver
    monkeypatch.setitem(sys.modules, "pycuda", pycuda)
    monkeypatch.setitem(sys.modules, "pycuda.driver", driver)
    monkeypatch.delitem(sys.modules, "tasks.parts.engines.tensorrt.runner", raising=False)
    return driver


def test_memory_for_logits_grows_where_an_engine_writes_more(driver: ModuleType) -> None:
    from tasks.parts.engines.tensorrt.runner import LogitsMemory

    memory = LogitsMemory(64)
    assert memory.reallocate_output_async("logits", 0, 48, 256, 0) == 1064
    assert memory.reallocate_output_async("logits", 1064, 80, 256, 0) == int(memory.memory) == 1080
    memory.notify_shape("logits", trt.Dims([2, 5, 8, 8]))
    assert memory.shape == (2, 5, 8, 8)


@dataclass
class RecordedContext:
    """Stands for an IExecutionContext that refuses one kind of call."""

    refused: str
    active_optimization_profile: int = 0

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        return self.refused != "profile"

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        return self.refused != "shape"


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ("profile", r"refuses optimization profile 1"),
        ("shape", r"refuses the shape \[4, 3, 8, 8\] of images"),
    ],
)
def test_call_that_tensorrt_refuses_stops_the_engine(
    driver: ModuleType, target: Target, refused: str, message: str
) -> None:
    from tasks.parts.engines.tensorrt.runner import TensorrtRunner

    profiles = [BatchProfile(1, 1, 1), BatchProfile(2, 4, 32)]
    runner: Any = TensorrtRunner.__new__(TensorrtRunner)
    runner.manifest = SimpleNamespace(target=with_options(target, profiles=profiles))
    runner._input, runner._images_NCHW = "images", np.zeros((32, 3, 8, 8), np.float32)
    runner._set_shape(RecordedContext(""), 4, 0)
    with pytest.raises(ArtifactError, match=message + r" for the engine of target h200_tensorrt \("):
        runner._set_shape(RecordedContext(refused), 4, 0)
