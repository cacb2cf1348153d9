"""Everything that tasks/ uses of TensorRT, held against the real bindings of the oldest and the newest 10 and of 11.

TensorRT's libraries are not on PyPI, its bindings are. Imported over empty stub libraries they know every class,
enum, method and keyword, but can build nothing.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.wheels import run_tests_over, unpack_wheel

PACKAGES = {
    "10.12": "tensorrt-cu12-bindings==10.12.*",  # for CUDA 13 they begin at 10.13
    "10.16": "tensorrt-cu13-bindings==10.16.*",
    "11": "tensorrt-cu13-bindings==11.*",
}
LIBRARIES = ("nvinfer", "nvonnxparser", "nvinfer_plugin")
SYMBOLS = (
    "createInferBuilder_INTERNAL",
    "createInferRefitter_INTERNAL",
    "createInferRuntime_INTERNAL",
    "createNvOnnxParserRefitter_INTERNAL",
    "createNvOnnxParser_INTERNAL",
    "getBuilderPluginRegistry",
    "getNvOnnxParserVersion",
    "getPluginRegistry",
    "initLibNvInferPlugins",
)
CORE = {
    "Builder.build_serialized_network",
    "Builder.get_plugin_registry",
    "BuilderFlag.ERROR_ON_TIMING_CACHE_MISS",
    "IBuilderConfig.set_memory_pool_limit",
    "ICudaEngine.create_execution_context",
    "IExecutionContext.execute_async_v3",
    "IExecutionContext.unfused_tensors_debug_state",
    "IPluginRegistry.load_library",
    "INetworkDefinition.mark_unfused_tensors_as_debug_tensors",
    "IOptimizationProfile.set_shape",
    "ITimingCache.combine",
    "NetworkDefinitionCreationFlag.STRONGLY_TYPED",
    "ParserError.node_name",
    "EngineInspector.get_engine_information",
}
"""Uses that must be found, or the search has gone blind."""


@pytest.fixture(scope="module", params=PACKAGES)
def environment(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Unpack the bindings of one version over stub libraries, and return what a process needs to import them."""
    folder, version = tmp_path_factory.mktemp("tensorrt"), request.param
    major = version.partition(".")[0]
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler, which makes the stub libraries")
    site = unpack_wheel(PACKAGES[version], folder)
    (site / "tensorrt_bindings").rename(site / "tensorrt")
    (folder / "stub.c").write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in SYMBOLS))
    for library in LIBRARIES:
        name = f"lib{library}.so.{major}"
        options = ["-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(folder / name)]
        subprocess.run([compiler, *options, str(folder / "stub.c")], check=True)
    paths = {"PYTHONPATH": f"{REPOSITORY}:{site}", "LD_LIBRARY_PATH": str(folder)}
    return {**os.environ, **paths, "MAJOR": major, "VERSION": version}


def read_faults(environment: dict[str, str], *files: Path) -> tuple[set[str], dict[str, list[str]]]:
    """Return what the files use, and file -> what the bindings lack."""
    command = [sys.executable, "-m", "tests.tensorrt_faults", *map(str, files)]
    output = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert output.returncode == 0, output.stderr
    report = json.loads(output.stdout)
    assert report["version"].startswith(environment["VERSION"])
    uses = {use for file in report["files"].values() for use in file["uses"]}
    faults = {name: [use for _, use in file["faults"]] for name, file in report["files"].items()}
    return uses, {name: found for name, found in faults.items() if found}


def test_every_version_has_everything_that_tasks_uses(environment: dict[str, str]) -> None:
    uses, faults = read_faults(environment, *sorted((REPOSITORY / "tasks").rglob("*.py")))
    assert not faults
    assert uses >= CORE


def test_script_of_the_bundle_is_searched_too(environment: dict[str, str], tmp_path: Path) -> None:
    script = REPOSITORY / "tasks" / "parts" / "engines" / "frame_engine" / "plans.py"
    uses, _ = read_faults(environment, script)
    assert uses >= {
        "Runtime.deserialize_cuda_engine",
        "ICudaEngine.get_tensor_mode",
        "IExecutionContext.execute_async_v3",
        "IExecutionContext.set_tensor_address",
        "IPluginRegistry.load_library",
    }
    (tmp_path / "old.py").write_text(script.read_text().replace("execute_async_v3", "execute_async_v2"))
    faults = read_faults(environment, tmp_path / "old.py")[1]
    assert faults == {str(tmp_path / "old.py"): ["IExecutionContext.execute_async_v2"]}


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("import tensorrt as trt\nflag = trt.BuilderFlag.FP16\n", ["BuilderFlag.FP16"]),
        (
            "import tensorrt as trt\n\ndef build(log):\n    builder = trt.Builder(log)\n"
            "    return builder.platform_has_fast_fp16\n",
            ["Builder.platform_has_fast_fp16"],
        ),
        (
            "import tensorrt\n\nclass A:\n    def __enter__(self):\n        self._log = B()\n"
            "        self._runtime = tensorrt.Runtime(self._log)\n"
            "        self._engine = self._runtime.deserialize_cuda_engine(b'')\n"
            "        assert self._engine is not None\n"
            "        self._engine.has_implicit_batch_dimension\n",
            ["ICudaEngine.has_implicit_batch_dimension"],
        ),
        (
            "import tensorrt as trt\n\ndef set_up(config: 'trt.IBuilderConfig'):\n"
            "    return config.set_timing_cache(None, ignore_mismatches=False)\n",
            ["config.set_timing_cache(ignore_mismatches=)"],
        ),
    ],
)
def test_use_that_a_version_lacks_is_found(
    environment: dict[str, str], tmp_path: Path, source: str, missing: list[str]
) -> None:
    (tmp_path / "module.py").write_text(source)
    faults = read_faults(environment, tmp_path / "module.py")[1]
    is_only_gone_in_11 = "ignore_mismatches" not in source
    expected = [] if is_only_gone_in_11 and environment["MAJOR"] == "10" else missing
    assert faults.get(str(tmp_path / "module.py"), []) == expected


def test_trial_tells_that_there_is_no_builder(environment: dict[str, str]) -> None:
    """The stub libraries return none, as TensorRT does without a driver."""
    command = [sys.executable, "-m", "tasks.parts.builders.tensorrt_trial"]
    done = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (1, "no builder: it gave no reason\n")


UNCHECKED = """
import tensorrt as trt

def build(config: "trt.IBuilderConfig", context: "trt.IExecutionContext", builder: "trt.Builder"):
    config.set_flag(trt.BuilderFlag.TF32)
    config.add_optimization_profile(None)
    context.set_input_shape("images", (1, 3, 4, 4))
    if not context.set_tensor_address("images", 0):
        raise ValueError
    checked = builder.build_serialized_network(None, config)
    if checked is None:
        raise ValueError
    made = builder.create_network(0)
    return made.num_layers

def load(runtime: "trt.Runtime"):
    return runtime.deserialize_cuda_engine(b"").create_execution_context()
"""


def test_result_that_nobody_looks_at_is_found(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(UNCHECKED)
    faults = read_faults(environment, tmp_path / "module.py")[1]
    assert faults == {
        str(tmp_path / "module.py"): [
            "IBuilderConfig.add_optimization_profile() is not checked",
            "IExecutionContext.set_input_shape() is not checked",
            "Builder.create_network() may be None",
            "ICudaEngine.create_execution_context() may be None",
            "Runtime.deserialize_cuda_engine() may be None",
        ]
    }


def test_what_needs_no_gpu_works_over_the_bindings(environment: dict[str, str]) -> None:
    run_tests_over("tests/over_tensorrt_bindings.py", environment)
