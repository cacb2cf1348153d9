"""Tests that run where the bindings of TensorRT are on the path, over stub libraries: see test_tensorrt_contract.py.

A builder and its configuration cannot exist there; recorders stand for them.
"""

import ctypes
import logging
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
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
from tasks.parts.builders.tensorrt_plan import BuildProgress, configure, describe_parser_errors
from tasks.parts.engines.target import Target
from tasks.parts.engines.tensorrt.debug_tensors import DebugTensors
from tasks.parts.engines.tensorrt.log import LOG, TensorrtLog, describe_errors
from tasks.parts.engines.tensorrt.plugins import load_plugins
from tasks.parts.engines.tensorrt_options import HardwareCompatibility, TacticSource, TensorrtOptions
from tasks.parts.onnx_graphs.graph import set_node_source
from tests.conftest import REPOSITORY

MAJOR = int(os.environ["MAJOR"])


@dataclass
class RecordedConfig:
    """Stands for an IBuilderConfig and remembers its calls."""

    flags: set[Any] = field(default_factory=set)
    pools: dict[Any, int] = field(default_factory=dict)
    tactics: int | None = None

    def set_flag(self, flag: Any) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: Any) -> None:
        self.flags.discard(flag)

    def set_memory_pool_limit(self, pool: Any, pool_size: int) -> None:
        self.pools[pool] = pool_size

    def set_tactic_sources(self, tactic_sources: int) -> bool:
        self.tactics = tactic_sources
        return True


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


@pytest.fixture
def options() -> TensorrtOptions:
    fields = yaml.safe_load((REPOSITORY / "conf" / "target" / "h200_tensorrt.yaml").read_text())
    del fields["work_pool"]
    target: Target = typed_config(Target, fields, "build_engine.h200_tensorrt")
    assert target.tensorrt is not None
    return target.tensorrt


def test_configuration_gets_what_the_target_declares(options: TensorrtOptions) -> None:
    config: Any = RecordedConfig({trt.BuilderFlag.TF32})  # on by itself
    wanted = replace(
        options, version_compatible=True, hardware_compatibility=HardwareCompatibility.ampere_plus
    )
    configure(config, wanted, major=MAJOR)
    assert config.flags == {trt.BuilderFlag.SPARSE_WEIGHTS, trt.BuilderFlag.VERSION_COMPATIBLE}
    assert config.pools == {trt.MemoryPoolType.WORKSPACE: 8192 * 2**20}
    assert config.builder_optimization_level == 3
    assert config.profiling_verbosity == trt.ProfilingVerbosity.DETAILED
    assert config.hardware_compatibility_level == trt.HardwareCompatibilityLevel.AMPERE_PLUS
    assert not hasattr(config, "DLA_core") and config.tactics is None


def test_dla_falls_back_to_the_gpu(options: TensorrtOptions) -> None:
    config: Any = RecordedConfig()
    configure(config, replace(options, dla_core=1), major=MAJOR)
    assert config.DLA_core == 1 and config.default_device_type == trt.DeviceType.DLA
    assert trt.BuilderFlag.GPU_FALLBACK in config.flags


def test_tactic_source_of_another_major_is_refused(options: TensorrtOptions) -> None:
    config: Any = RecordedConfig()
    configure(config, replace(options, tactic_sources=[TacticSource.jit_convolutions]), major=MAJOR)
    assert config.tactics == 1 << int(trt.TacticSource.JIT_CONVOLUTIONS)
    old = replace(options, tactic_sources=[TacticSource.cudnn])
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
    assert describe_errors(log.errors) == "no kernel for layer a"
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


def test_plugins_that_tensorrt_cannot_load_are_named(tmp_path: Path) -> None:
    registry: Any = RecordedRegistry()
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


def test_memory_for_logits_grows_where_an_engine_writes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, pycuda = ModuleType("pycuda.driver"), ModuleType("pycuda")  # the real one needs a GPU's driver
    vars(driver)["mem_alloc"] = lambda num_bytes: 1000 + num_bytes
    vars(pycuda)["driver"] = driver
    monkeypatch.setitem(sys.modules, "pycuda", pycuda)
    monkeypatch.setitem(sys.modules, "pycuda.driver", driver)
    from tasks.parts.engines.tensorrt.runner import LogitsMemory

    memory = LogitsMemory(64)
    assert memory.reallocate_output_async("logits", 0, 48, 256, 0) == 1064
    assert memory.reallocate_output_async("logits", 1064, 80, 256, 0) == int(memory.memory) == 1080
    memory.notify_shape("logits", trt.Dims([2, 5, 8, 8]))
    assert memory.shape == (2, 5, 8, 8)
