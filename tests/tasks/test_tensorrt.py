"""What of TensorRT targets needs no TensorRT: declarations, refusals, commands beside an engine, the inspector."""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from polygraphy.tools.convert.convert import Convert
from polygraphy.tools.run.run import Run

from flows.params import compose_params
from tasks.build_engine import build_engine
from tasks.core.errors import ConfigError, TargetMismatch
from tasks.parts.builders.onnxruntime import wrap_plan
from tasks.parts.builders.report import LayerCounts, find_precision_fault
from tasks.parts.builders.tensorrt_commands import (
    Build,
    comparing_commands,
    kernels_command,
    polygraphy_command,
    timing_commands,
    trtexec_command,
    write_commands,
)
from tasks.parts.custom_operators import CustomOperators
from tasks.parts.data.input_card import InputCard
from tasks.parts.engines.gpu import Gpu, find_gpus
from tasks.parts.engines.machine import _runs_on, check_gpu, check_runtime_version, check_tensorrt_version
from tasks.parts.engines.manifest import count_precisions
from tasks.parts.engines.onnxruntime.runner import provider_of
from tasks.parts.engines.runtimes import Precision, Runtime
from tasks.parts.engines.target import Target
from tasks.parts.engines.tensorrt.inspector import read_layers
from tasks.parts.engines.tensorrt_options import (
    BatchProfile,
    HardwareCompatibility,
    TacticSource,
    TensorrtOptions,
)
from tasks.parts.onnx_graphs.graph import read_graph, write_graph
from tasks.parts.onnx_session import open_session
from tests.conftest import REPOSITORY, checked
from tests.tasks.conftest import Workshop

TARGETS = [
    "h200_tensorrt",
    "h200_tensorrt_f32",
    "h200_tensorrt_static",
    "a100_tensorrt",
    "l4_tensorrt",
    "rtx4090_tensorrt",
    "orin_tensorrt11",
    "thor_tensorrt",
]
DLA = "orin_tensorrt11_dla"
RTX = ("rtx4090_tensorrt_rtx", "rtx5090_tensorrt_rtx")
CARD = InputCard(("background", "one"), (0.5,) * 3, (0.2,) * 3, 64, 96)
BUILD = Build("images", (3, 64, 96), Gpu("NVIDIA H200", "9.0"), "10.16.1.11", is_quantized=False)
CACHE = "artifacts/.timing_cache/nvidia-h200-sm90-trt10.16.1.11.cache"


def options_of(target: Target, **changes: Any) -> TensorrtOptions:
    assert target.tensorrt is not None
    return replace(target.tensorrt, **changes)


PLAN_IN_ONNXRUNTIME = "cuda_onnxruntime_tensorrt"


@pytest.mark.parametrize("name", [*TARGETS, DLA])
def test_shipped_target_is_valid_and_named_in_its_file(workshop: Workshop, name: str) -> None:
    target = workshop.target(name, **({"max_batch": 1} if name == DLA else {}))
    assert (target.name, target.runtime, target.device) == (name, Runtime.tensorrt, "cuda")
    assert target.gpu is not None
    pools = compose_params([f"target=[cpu_torch,cuda_torch,{name}]"])["pipeline"]["work_pools"]
    assert pools[name] == f"gpu-sm{target.gpu.compute_capability.replace('.', '')}"


def test_targets_of_a_gpu_compose_beside_those_of_the_cpu() -> None:
    params = compose_params(["target=[cpu_torch,cuda_torch,h200_tensorrt,h200_tensorrt_f32]"])
    assert {"pruned_ptq-h200_tensorrt", "baseline-cpu_torch"} <= set(params["engines"])
    twins = [params["build_engine"][name] for name in ("h200_tensorrt", "h200_tensorrt_f32")]
    assert [twin.pop("precision") for twin in twins] == ["f16", "f32"]
    assert [twin.pop("name") for twin in twins] != twins and twins[0] == twins[1]
    assert params["prune"]["channel_multiple"] == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workspace_mib": 0}, r"tensorrt\.workspace_mib is 0"),
        ({"optimization_level": 6}, r"tensorrt\.optimization_level is 6, expected an integer from 0 to 5"),
        ({"profiles": [BatchProfile(1, 4, 2)]}, r"tensorrt\.profiles"),
        ({"profiles": [BatchProfile(1, 1, 64)]}, r"max <= max_batch \(4\)"),
        ({"profiles": [BatchProfile(2, 4, 4)]}, r"profiles that accept every batch of 1\.\.4"),
        ({"timing_cache": None, "error_on_timing_cache_miss": True}, r"false where timing_cache is null"),
        ({"max_aux_streams": -1}, r"tensorrt\.max_aux_streams is -1"),
        ({"dla_core": 9}, r"tensorrt\.dla_core is 9"),
        ({"dla_gpu_fallback": True}, r"dla_gpu_fallback is True, expected false where dla_core is null"),
        ({"num_builds": 0}, r"tensorrt\.num_builds is 0"),
        ({"num_builds": 2, "error_on_timing_cache_miss": True}, r"tensorrt\.num_builds is 2"),
    ],
)
def test_impossible_options_are_refused(workshop: Workshop, changes: dict[str, Any], message: str) -> None:
    target = workshop.target("h200_tensorrt")
    with pytest.raises(ConfigError, match=rf"target\.h200_tensorrt\..*{message}"):
        checked(target, "target.h200_tensorrt", tensorrt=asdict(target)["tensorrt"] | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "cpu"}, r"device is cpu, expected cuda for runtime tensorrt"),
        ({"gpu": None}, r"gpu is None, expected a GPU for cuda"),
        ({"uint8_activations": True}, r"uint8_activations is True, expected false for engines of TensorRT"),
        ({"tensorrt": None}, r"tensorrt is None, expected options for runtime tensorrt"),
    ],
)
def test_target_that_contradicts_itself_is_refused(
    workshop: Workshop, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        workshop.target("h200_tensorrt", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_batch": 8}, r"max_batch is 8, expected 1 where tensorrt\.dla_core is set"),
        ({"precision": "f32"}, r"precision is f32, expected f16 where tensorrt\.dla_core is set"),
    ],
)
def test_dla_runs_one_image_in_fp16_and_int8(
    workshop: Workshop, changes: dict[str, Any], message: str
) -> None:
    workshop.target(DLA, max_batch=1)
    with pytest.raises(ConfigError, match=message):
        workshop.target(DLA, **{"max_batch": 1} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cuda_graph": True}, r"tensorrt\.cuda_graph is True, expected false for runtime onnxruntime"),
        ({"version_compatible": True}, r"tensorrt\.version_compatible is True"),
        ({"dla_core": 0}, r"tensorrt\.dla_core is 0, expected null for runtime onnxruntime"),
        (
            {"profiles": [BatchProfile(1, 1, 2), BatchProfile(3, 4, 4)]},
            r"tensorrt\.profiles holds 2, expected one",
        ),
    ],
)
def test_plan_that_onnxruntime_could_not_run_is_refused(
    workshop: Workshop, changes: dict[str, Any], message: str
) -> None:
    target = workshop.target(PLAN_IN_ONNXRUNTIME)
    with pytest.raises(ConfigError, match=message):
        replace(target, tensorrt=options_of(target, **changes))


@pytest.mark.parametrize("name", RTX)
def test_target_for_rtx_is_valid_and_compiles_with_its_own_flavour(workshop: Workshop, name: str) -> None:
    target = workshop.target(name)
    assert (target.name, target.compiler, target.device) == (name, Runtime.tensorrt_rtx, "cuda")
    assert target.gpu is not None
    params = compose_params([f"target=[cpu_torch,cuda_torch,{name}]"])
    assert params["pipeline"]["work_pools"][name] == f"gpu-sm{target.gpu.compute_capability.replace('.', '')}"
    assert f"pruned_ptq-{name}" in params["engines"] and name in params["explain"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimization_level": 5}, r"optimization_level is 5, expected 3 .* times no kernel"),
        ({"tactic_sources": [TacticSource.jit_convolutions]}, r"tactic_sources is .*, expected \[\] for"),
        ({"timing_cache": "a"}, r"timing_cache is a, expected null for runtime tensorrt_rtx"),
        ({"num_builds": 3}, r"num_builds is 3, expected 1 for"),
        ({"sparse_weights": True}, r"sparse_weights is True, expected false for .* does not read it"),
        ({"max_aux_streams": 2}, r"max_aux_streams is 2, expected null for"),
        ({"version_compatible": True}, r"version_compatible is True, expected false for .* the version that"),
        ({"dla_core": 0}, r"dla_core is 0, expected null for .* no DLA"),
    ],
)
def test_option_that_does_nothing_for_rtx_is_refused(
    workshop: Workshop, changes: dict[str, Any], message: str
) -> None:
    target = workshop.target(RTX[0])
    with pytest.raises(ConfigError, match=r"tensorrt\." + message):
        replace(target, tensorrt=options_of(target, **changes))


@pytest.mark.parametrize("tensorrt", [{"tf32": True}, {"cuda_graph": False}, {"workspace_mib": 64}])
def test_option_that_rtx_has_is_taken(workshop: Workshop, tensorrt: dict[str, Any]) -> None:
    target = workshop.target(RTX[0])
    replace(target, tensorrt=options_of(target, **tensorrt))


def test_gpu_for_which_rtx_builds_nothing_is_refused(workshop: Workshop) -> None:
    target = workshop.target(RTX[0])
    everywhere = options_of(target, hardware_compatibility=HardwareCompatibility.ampere_plus)
    any_gpu = Gpu("any", "any")
    replace(target, gpu=any_gpu, tensorrt=everywhere)
    replace(target, gpu=Gpu("NVIDIA GeForce RTX 2080 Ti", "7.5"))
    for gpu, options in (
        (Gpu("NVIDIA H200", "9.0"), target.tensorrt),
        (any_gpu, target.tensorrt),
        (Gpu("NVIDIA GeForce RTX 2080 Ti", "7.5"), everywhere),
    ):
        message = rf"gpu\.compute_capability is {gpu.compute_capability}, expected one of .*8\.6, 8\.9, 12\.0"
        with pytest.raises(ConfigError, match=message):
            replace(target, gpu=gpu, tensorrt=options)


def test_plugins_for_rtx_are_refused(workshop: Workshop) -> None:
    plugin = CustomOperators("a.so", "0" * 64, ["test.lab"])
    with pytest.raises(ConfigError, match=r"custom_operators is .*, expected \[\] for runtime tensorrt_rtx"):
        replace(workshop.target(RTX[0]), custom_operators=[plugin])


def test_versions_of_rtx_are_numbers_of_their_own(workshop: Workshop) -> None:
    target = workshop.target(RTX[0])
    check_tensorrt_version(target, "1.7.1.116")
    with pytest.raises(
        TargetMismatch, match=r"needs TensorRT for RTX 1\.7 or later, .* 1\.6\.0.*\(extra rtx\)"
    ):
        check_tensorrt_version(target, "1.6.0.1")


def test_machine_without_the_gpu_is_told_what_it_can_do_for_rtx(workshop: Workshop, tmp_path: Path) -> None:
    target = workshop.target(RTX[1], gpu=Gpu("NVIDIA Imaginary", "12.0"))
    with pytest.raises(TargetMismatch, match=r"its work pool.*`python -m flows\.build_plan`.*is not proved"):
        build_engine(target, model=workshop.graph, images=workshop.images, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_onnxruntime_runs_plans_of_one_major_only(workshop: Workshop) -> None:
    target = workshop.target(PLAN_IN_ONNXRUNTIME)
    check_tensorrt_version(target, "10.16.1.11")
    with pytest.raises(TargetMismatch, match=r"needs TensorRT 10, .* this machine has 11\.4\.0.*tensorrt<11"):
        check_tensorrt_version(target, "11.4.0")


def test_plan_is_held_by_an_operator_that_onnxruntime_knows(workshop: Workshop, tmp_path: Path) -> None:
    """It gets as far as to look for the provider, which is behind the checks of the graph."""
    graph = read_graph(workshop.graph)
    wrapped = wrap_plan(b"\0plan", graph)
    [node] = wrapped.graph.node
    assert {entry.name: onnx.helper.get_attribute_value(entry) for entry in node.attribute} == {
        "embed_mode": 1,
        "ep_cache_context": b"\0plan",
    }
    assert (wrapped.graph.input, wrapped.graph.output) == (graph.graph.input, graph.graph.output)
    write_graph(wrapped, tmp_path / "engine.onnx")
    with pytest.raises(TargetMismatch, match=r"did not load its TensorRT provider.*TensorRT 10"):
        open_session(tmp_path / "engine.onnx", provider="CPUExecutionProvider", num_threads=1)


def test_targets_of_onnxruntime_differ_in_provider_and_compiler(workshop: Workshop) -> None:
    found = {
        name: (provider_of(target), target.compiler)
        for name in ("cpu_onnxruntime", "cuda_onnxruntime", PLAN_IN_ONNXRUNTIME)
        if (target := workshop.target(name))
    }
    assert found == {
        "cpu_onnxruntime": ("CPUExecutionProvider", Runtime.onnxruntime),
        "cuda_onnxruntime": ("CUDAExecutionProvider", Runtime.onnxruntime),
        PLAN_IN_ONNXRUNTIME: ("TensorrtExecutionProvider", Runtime.tensorrt),
    }
    assert (
        "pruned_ptq-" + PLAN_IN_ONNXRUNTIME
        in compose_params([f"target=[cpu_torch,cuda_torch,{PLAN_IN_ONNXRUNTIME}]"])["engines"]
    )


def test_engine_for_a_gpu_that_is_not_here_is_refused_and_says_where_to_run_it(
    workshop: Workshop, tmp_path: Path
) -> None:
    target = workshop.target("h200_tensorrt", gpu=Gpu("NVIDIA Imaginary", "99.0"))
    with pytest.raises(TargetMismatch, match=r"compute capability 99\.0.*NVIDIA Imaginary.*its work pool"):
        build_engine(target, model=workshop.graph, images=workshop.images, out=tmp_path)
    assert not list(tmp_path.iterdir())


def test_gpus_are_described_or_none_is_found(workshop: Workshop) -> None:
    for gpu in find_gpus():
        assert gpu.name and float(gpu.compute_capability) >= 1
    check_gpu(workshop.target("cpu_torch"))


def test_every_stream_is_non_blocking() -> None:
    sources = {path: path.read_text() for path in (REPOSITORY / "tasks").rglob("*.py")}
    made = {path: re.findall(r"(?<!torch\.)cuda\.Stream\(.*\)", text) for path, text in sources.items()}
    found = {path.parent.name: calls for path, calls in made.items() if calls}
    assert found.keys() == {"tensorrt", "frame_engine"}  # those of torch always are
    assert all("cuda.Stream(NON_BLOCKING)" in call for calls in found.values() for call in calls)


def test_commands_say_the_same_as_the_target(workshop: Workshop, tmp_path: Path) -> None:
    target = workshop.target("h200_tensorrt")
    options = options_of(
        target,
        profiles=[BatchProfile(1, 1, 1), BatchProfile(2, 4, 4)],
        hardware_compatibility=HardwareCompatibility.ampere_plus,
        tactic_sources=[TacticSource.jit_convolutions],
        max_aux_streams=2,
        version_compatible=True,
    )
    target = replace(target, tensorrt=options)
    write_commands(tmp_path, target, BUILD)
    lines = (tmp_path / "commands.sh").read_text().splitlines()
    [trtexec] = [shlex.split(line) for line in lines if line.startswith("trtexec") and "--onnx" in line]
    [polygraphy] = [shlex.split(line) for line in lines if line.startswith("polygraphy convert")]
    assert {
        "--onnx=$engine/graph.onnx",
        "--stronglyTyped",
        "--noTF32",
        "--minShapes=images:2x3x64x96",
        "--optShapes=images:4x3x64x96",
        "--hardwareCompatibilityLevel=ampere+",
        "--tacticSources=-CUBLAS,-CUBLAS_LT,-CUDNN,-EDGE_MASK_CONVOLUTIONS,+JIT_CONVOLUTIONS",
        "--maxAuxStreams=2",
        "--versionCompatible",
        "--sparsity=enable",
        f"--timingCacheFile={CACHE}",
    } <= set(trtexec)
    assert trtexec.count("--profile=1") == 1
    assert polygraphy[2] == "$engine/graph.onnx"
    assert "images:[4,3,64,96]" in polygraphy and CACHE in polygraphy


def test_eleven_needs_no_flag_for_strong_types(workshop: Workshop) -> None:
    target = workshop.target("h200_tensorrt")
    for command in (trtexec_command, polygraphy_command):
        assert "strong" not in " ".join(command(target, replace(BUILD, version="11.4.0.106"))).lower()


TOOL = """#!/usr/bin/env bash
echo "${0##*/}|$(IFS='|'; echo "$*")" >> said.txt
if [[ "${0##*/} $1" == "nsys stats" ]]; then
    echo 'NOTICE: Existing SQLite export found: timeline.sqlite'
    echo 'Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name'
    for name in sm80_xmma_fprop '"copyVectorizedKernel"' trt_volta_scudnn pooling; do
        echo "20.0,10221620,26,393139.2,359877.0,358056,680248,64133.1,$name"
    done
fi
"""
"""Takes the place of trtexec, nsys, ncu and polygraphy, which need a GPU; the table is the form of Nsight Systems."""


def run_commands(target: Target, folder: Path, *, has_plan: bool = True) -> list[list[str]]:
    """Run commands.sh with stand-ins for all tools; return the name and the arguments that each was given."""
    engine, tools = folder / "an engine", folder / "tools"
    engine.mkdir()
    tools.mkdir()
    if has_plan:
        (engine / "engine.plan").touch()
    for name in ("trtexec", "nsys", "ncu", "polygraphy"):
        (tools / name).write_text(TOOL)
        (tools / name).chmod(0o755)
    write_commands(engine, target, BUILD)
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    command = ["bash", "an engine/commands.sh"]
    subprocess.run(command, cwd=folder, env={"PATH": path}, check=True, capture_output=True)
    return [line.split("|") for line in (folder / "said.txt").read_text().splitlines()]


def test_commands_profile_the_plan_and_its_three_slowest_kernels(workshop: Workshop, tmp_path: Path) -> None:
    said = run_commands(workshop.target("h200_tensorrt"), tmp_path)
    tools = [" ".join(words[:2]) if words[0] in ("nsys", "polygraphy") else words[0] for words in said]
    builds = ["trtexec", "polygraphy convert"]
    profiles = ["trtexec", "trtexec", "nsys profile", "nsys stats", "ncu"]
    assert tools == [*builds, *profiles, "polygraphy run", "polygraphy run"]
    times, streams, timeline = said[2:5]
    load = ["--loadEngine=an engine/engine.plan", "--shapes=images:1x3x64x96"]
    assert times[1:3] == streams[1:3] == load and set(load) < set(timeline)
    assert {"--separateProfileRun", "--dumpProfile", "--exportTimes=times.json", "--useCudaGraph"} < set(
        times
    )
    assert "--infStreams=2" in streams and "--trace=cuda,nvtx,osrt" in timeline
    kernels = said[6][said[6].index("--kernel-name") + 1 :]
    # the line's separator is the bar, too
    assert kernels[:3] == ["regex:^(sm80_xmma_fprop", "copyVectorizedKernel", "trt_volta_scudnn)$"]


def test_commands_run_the_plan_that_they_build_where_the_engine_holds_it(
    workshop: Workshop, tmp_path: Path
) -> None:
    said = run_commands(workshop.target("h200_tensorrt"), tmp_path, has_plan=False)
    assert "--saveEngine=rebuilt.plan" in said[0] and "--loadEngine=rebuilt.plan" in said[2]


def test_commands_load_a_plan_as_its_options_need_it(workshop: Workshop) -> None:
    target = workshop.target(DLA, max_batch=1)
    target = replace(target, tensorrt=options_of(target, version_compatible=True, dla_core=1))
    for command in (*timing_commands(target, BUILD), kernels_command(target, BUILD)):
        assert {"--versionCompatible", "--useDLACore=1"} < set(command) and "--useCudaGraph" not in command


def test_commands_give_no_shapes_to_a_graph_whose_shapes_are_fixed(workshop: Workshop) -> None:
    target = workshop.target("h200_tensorrt_static", max_batch=1)
    for command in (trtexec_command(target, BUILD), *timing_commands(target, BUILD)):
        assert "shapes" not in " ".join(command).lower()


def test_commands_load_the_plugins_beside_the_engine(workshop: Workshop) -> None:
    plugins = [CustomOperators(f"lib/{name}.so", "0" * 64, [f"{name}.lab"]) for name in ("one", "two")]
    target = replace(workshop.target("h200_tensorrt"), custom_operators=plugins)
    paths = ["$engine/operators/one.so", "$engine/operators/two.so"]
    loading = (
        trtexec_command(target, BUILD),
        *timing_commands(target, BUILD),
        kernels_command(target, BUILD),
    )
    for command in loading:
        assert [word for word in command if "lugins" in word] == [
            f"--dynamicPlugins={path}" for path in paths
        ]
    tool, parser = Convert(), argparse.ArgumentParser()
    tool.setup_parser(parser.add_subparsers())
    assert parser.parse_args(polygraphy_command(target, BUILD)[1:]).plugins == paths
    assert comparing_commands(target, BUILD) == []  # ONNX Runtime lacks the operators


def test_script_passes_shellcheck(workshop: Workshop, tmp_path: Path) -> None:
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("no shellcheck on this machine")
    write_commands(tmp_path, workshop.target("h200_tensorrt"), BUILD)
    subprocess.run([shellcheck, tmp_path / "commands.sh"], check=True)


def test_polygraphy_compares_what_both_runtimes_make_of_the_same_inputs(
    workshop: Workshop, tmp_path: Path
) -> None:
    """ONNX Runtime stands in for TensorRT in the second command."""
    shutil.copyfile(workshop.graph, tmp_path / "graph.onnx")
    reference, plan = comparing_commands(workshop.target("h200_tensorrt"), BUILD)
    assert plan[2:6] == ["$plan", "--model-type", "engine", "--trt"]
    tool, parser = Run(), argparse.ArgumentParser()
    tool.setup_parser(parser.add_subparsers())
    assert parser.parse_args(plan[1:]).snr_threshold == ["30"]
    polygraphy = str(Path(sys.executable).with_name("polygraphy"))
    for words in (reference, [*plan[:2], "graph.onnx", "--onnxrt", *plan[6:]]):
        command = [polygraphy, *(word.replace("$engine/", "") for word in words[1:])]
        run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stdout + run.stderr
    assert "PASSED" in run.stdout


def test_threshold_is_that_of_the_graph_and_bf16_is_not_compared(workshop: Workshop) -> None:
    target = workshop.target("h200_tensorrt")
    assert comparing_commands(target, replace(BUILD, is_quantized=True))[1][-1] == "10"
    assert comparing_commands(replace(target, precision=Precision.bf16), BUILD) == []


TACTIC = (
    "sm80_xmma_fprop_implicit_gemm_interleaved_i8i8_i8i32_f32_nchw_vect_c_32kcrs_vect_c_32_nchw_vect_c_32_"
    "tilesize96x64x64_stage3_warpsize2x2x1_g1_tensor16x8x32_t1r3s3"
)
OF_TEN = {
    "Layers": [
        {
            "Name": "stem + relu",
            "LayerType": "CaskConvolution",
            "Inputs": [
                {"Name": "x", "Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format"}
            ],
            "TacticName": TACTIC,
            "TacticValue": "0x27a40ee9c0a4b3c5",
            "Metadata": "[ONNX Layer: stem/Conv]\u001e[ONNX Layer: stem/Relu]",
        },
        {
            "Name": "Reformatting CopyNode for Input Tensor 0",
            "LayerType": "Reformat",
            "Inputs": [{"Name": "x", "Format/Datatype": "Row major linear FP32"}],
            "Metadata": "",
        },
    ],
    "Bindings": ["images", "logits"],
}
OF_ELEVEN = {
    "Layers": [
        {
            "Name": "stem + relu",
            "LayerType": "CaskConvolution",
            "Inputs": [{"Name": "x", "Format": "CHW32", "DataType": "Int8"}],
            "TacticName": TACTIC,
            "TacticValue": "0x27a40ee9c0a4b3c5",
            "Metadata": "[ONNX Layer: stem/Conv]\u001e[ONNX Layer: stem/Relu]",
        },
        {
            "Name": "Reformatting CopyNode for Input Tensor 0",
            "LayerType": "Reformat",
            "Inputs": [{"Name": "x", "Format": "Linear", "DataType": "FP32"}],
            "Metadata": "",
        },
    ],
    "I/O Tensors": [{"Name": "images"}, {"Name": "logits"}],
}


@pytest.mark.parametrize("said", [OF_TEN, OF_ELEVEN])
def test_inspector_of_either_major_is_read(said: dict[str, Any]) -> None:
    """Written by hand after NVIDIA's description of both forms; none was recorded on a GPU."""
    convolution, reformat = read_layers(json.dumps(said))
    assert (convolution.precision, convolution.nodes) == ("int8", ("stem/Conv", "stem/Relu"))
    assert not convolution.is_conversion and reformat.is_conversion and reformat.precision == "f32"
    assert (convolution.kernel, reformat.kernel) == (f"{TACTIC} (Tensor Cores)", "")
    assert count_precisions([convolution, reformat]) == {"CaskConvolution": {"int8": 1}}


def test_bytes_kernel_and_neighbours_of_layers_are_read() -> None:
    image = {"Name": "x", "Dimensions": [1, 3, 4, 4], "DataType": "FP32"}
    packed = {
        "Name": "y",
        "Dimensions": [1, 3, 4, 4],
        "Format/Datatype": "Thirty-two wide channel vectorized Int8",
    }
    dynamic = {"Name": "z", "Dimensions": [-1, 8, 4, 4], "DataType": "Int8"}
    reformat = {"Name": "pack", "LayerType": "Reformat", "Inputs": [image], "Outputs": [packed]}
    stem = {"Name": "stem", "LayerType": "CaskConvolution", "Inputs": [packed], "Outputs": [dynamic]}
    stem |= {"Weights": {"Type": "Int8", "Count": 216}, "TacticName": "sm80_xmma_fprop_i8"}
    first, second = read_layers(json.dumps({"Layers": [reformat, stem]}))
    assert (first.input_bytes, first.weight_bytes, first.output_bytes, first.reads) == (192, None, 48, ())
    assert (second.input_bytes, second.weight_bytes, second.output_bytes) == (48, 216, None)
    assert (second.reads, second.kernel) == (("pack",), "sm80_xmma_fprop_i8")


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        ("Channel major FP16 format where channel % 8 == 0", "f16"),
        ("Half", "f16"),
        ("BFloat16", "bf16"),
        ("Row major linear FP32", "f32"),
        ("FP8", "fp8"),
        ("Int64", ""),
    ],
)
def test_words_for_precision_are_told_apart(words: str, precision: str) -> None:
    [layer] = read_layers(
        json.dumps({"Layers": [{"Name": "a", "LayerType": "x", "Inputs": [{"DataType": words}]}]})
    )
    assert layer.precision == precision


def test_weights_tell_the_precision_where_shapes_do_not() -> None:
    layer: dict[str, Any] = {
        "Name": "a",
        "LayerType": "CaskConvolution",
        "Weights": {"Type": "Int8", "Count": 9},
    }
    layer["Inputs"] = [{"Name": "x", "Format/Datatype": "N/A due to dynamic shapes"}]
    assert read_layers(json.dumps({"Layers": [layer]}))[0].precision == "int8"


@pytest.mark.parametrize("said", [{"Layers": ["stem", "head"]}, {"Layers": []}, {}])
def test_engine_that_tells_no_precision_is_not_proved(workshop: Workshop, said: dict[str, Any]) -> None:
    precisions = count_precisions(read_layers(json.dumps(said)))
    fault = find_precision_fault(workshop.target("h200_tensorrt"), precisions, LayerCounts(2, 0, 0))
    assert fault == "the runtime does not report the precision of its layers, so it cannot be verified"


@pytest.mark.parametrize(
    ("compatibility", "runs_on"),
    [
        ("none", ["NVIDIA A100"]),
        ("same_compute_capability", ["NVIDIA A100", "NVIDIA A30"]),
        ("ampere_plus", ["NVIDIA A100", "NVIDIA A30", "NVIDIA L4", "NVIDIA Thor"]),
    ],
)
def test_engine_runs_on_the_gpus_that_it_is_compatible_with(compatibility: str, runs_on: list[str]) -> None:
    gpus = [
        Gpu("NVIDIA T4", "7.5"),
        Gpu("NVIDIA A100", "8.0"),
        Gpu("NVIDIA A30", "8.0"),
        Gpu("NVIDIA L4", "8.9"),
        Gpu("NVIDIA Thor", "11.0"),
    ]
    found = [gpu.name for gpu in gpus if _runs_on(HardwareCompatibility(compatibility), gpu, gpus[1])]
    assert found == runs_on


def test_tensorrt_that_is_too_old_is_refused(workshop: Workshop) -> None:
    target = workshop.target("h200_tensorrt", runtime_version="10")
    with pytest.raises(TargetMismatch, match=r"needs TensorRT 10\.12 or later, this machine has 10\.3\.0"):
        check_tensorrt_version(target, "10.3.0")
    check_tensorrt_version(target, "10.12.0.36")
    check_runtime_version(target, "10.12.0.36")
    with pytest.raises(TargetMismatch, match=r"declares tensorrt 10, this machine has 11\.4"):
        check_runtime_version(target, "11.4.0")


def test_tensorrt_without_dla_is_refused(workshop: Workshop) -> None:
    target = workshop.target(DLA, max_batch=1)
    with pytest.raises(TargetMismatch, match=r"needs TensorRT 11\.4\.1 or later for a DLA, .* has 11\.4\.0"):
        check_tensorrt_version(target, "11.4.0.106")
    check_tensorrt_version(target, "11.4.1.2")
