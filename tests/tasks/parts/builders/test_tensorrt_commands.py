"""The commands beside a plan, held against the tools that packages have: Polygraphy, Nsight Systems, Nsight Compute.

Debian's packages hold the command lines of the two Nsight tools, which run without a GPU. No package has trtexec.
"""

import argparse
import os
import sqlite3
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from polygraphy.tools.base import Tool
from polygraphy.tools.convert.convert import Convert
from polygraphy.tools.run.run import Run

from tasks.parts.builders.tensorrt_commands import (
    Build,
    comparing_commands,
    polygraphy_command,
    timing_commands,
    trtexec_command,
    write_commands,
)
from tasks.parts.custom_operators import CustomOperators
from tasks.parts.engines.gpu import Gpu
from tasks.parts.engines.target import Target
from tasks.parts.engines.tensorrt_options import BatchProfile, HardwareCompatibility, TacticSource
from tests.conftest import REPOSITORY
from tests.tasks.conftest import Workshop
from tests.wheels import unpack_debian

TARGETS = [
    file.stem
    for file in sorted((REPOSITORY / "conf" / "target").glob("*.yaml"))
    if yaml.safe_load(file.read_text()).get("tensorrt")
]
TEN, ELEVEN = (
    Build("images", (3, 64, 96), Gpu("NVIDIA H200", "9.0"), version, is_quantized=False)
    for version in ("10.16.1.11", "11.4.0.106")
)
EVERYTHING: dict[str, Any] = {
    "profiles": [BatchProfile(1, 1, 1), BatchProfile(2, 4, 4)],
    "tactic_sources": [TacticSource.jit_convolutions],
    "version_compatible": True,
    "hardware_compatibility": HardwareCompatibility.same_compute_capability,
    "error_on_timing_cache_miss": True,
    "max_aux_streams": 2,
    "tf32": True,
    "sparse_weights": True,
    "num_builds": 1,
}
NSIGHT = ("nsight-systems-target", "nsight-compute-target")
RELEASE = "trixie"
"""Its Nsight Systems is of 2023, when the reports got the names that they have now."""
TRTEXEC = """#!/usr/bin/env bash
(IFS='|'; echo "$*") > trtexec_was_given.txt
"""


def with_everything(target: Target) -> Target:
    assert target.tensorrt is not None
    plugins = [CustomOperators("lib/lab.so", "0" * 64, ["lab"])]
    return replace(target, tensorrt=replace(target.tensorrt, **EVERYTHING), custom_operators=plugins)


def parse(tool: Tool, command: list[str]) -> argparse.Namespace:
    """Read a command as Polygraphy does: its parser ends the process at a flag that it does not know."""
    parser = argparse.ArgumentParser()
    tool.setup_parser(parser.add_subparsers())
    found = parser.parse_args(command[1:])
    tool.parse(found)
    return found


@pytest.mark.parametrize("build", [TEN, ELEVEN], ids=["10", "11"])
@pytest.mark.parametrize("name", TARGETS)
def test_polygraphy_takes_the_commands_of_every_target(workshop: Workshop, name: str, build: Build) -> None:
    target = workshop.target(name, max_batch=1) if name.endswith("_dla") else workshop.target(name)
    assert target.tensorrt is not None
    found = parse(Convert(), polygraphy_command(target, build))
    assert bool(found.strongly_typed) is (build is TEN)
    assert found.builder_optimization_level == target.tensorrt.optimization_level
    assert bool(found.use_dla) is (target.tensorrt.dla_core is not None)
    for command in comparing_commands(target, build):
        parse(Run(), command)


def test_polygraphy_takes_every_option(workshop: Workshop) -> None:
    target = with_everything(workshop.target("h200_tensorrt"))
    found = parse(Convert(), polygraphy_command(target, TEN))
    assert found.tf32 and found.sparse_weights and found.version_compatible
    assert (found.max_aux_streams, found.tactic_sources) == (2, ["jit_convolutions"])
    assert found.hardware_compatibility_level == "same_compute_capability"
    assert found.error_on_timing_cache_miss and found.load_timing_cache
    assert len(found.trt_opt_shapes) == 2 and found.plugins == ["$engine/operators/lab.so"]
    with pytest.raises(SystemExit):
        parse(Convert(), [*polygraphy_command(target, TEN), "--imaginary"])


def test_trtexec_of_eleven_is_told_what_changed_with_it(workshop: Workshop) -> None:
    """It captures CUDA graphs and profiles apart unless it is told, and knows no cuBLAS and cuDNN."""
    target = workshop.target("h200_tensorrt")
    assert target.tensorrt is not None and target.tensorrt.cuda_graph
    without = replace(target, tensorrt=replace(target.tensorrt, cuda_graph=False))
    for build, wanted, unwanted in ((TEN, "--useCudaGraph", ""), (ELEVEN, "", "--noCudaGraph")):
        for one, flag in ((target, wanted), (without, unwanted)):
            for command in timing_commands(one, build):
                assert [word for word in command if "CudaGraph" in word] == [flag][: bool(flag)]
        [layers, _] = timing_commands(target, build)
        assert ("--separateProfileRun" in layers) is (build is TEN)
    chosen = with_everything(target)
    signs = [word for word in trtexec_command(chosen, ELEVEN) if word.startswith("--tacticSources")]
    assert signs == ["--tacticSources=-EDGE_MASK_CONVOLUTIONS,+JIT_CONVOLUTIONS"]


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nsys and ncu of NVIDIA, and a trtexec that writes down what it was given."""
    folder = tmp_path_factory.mktemp("nsight")
    site = unpack_debian(NSIGHT, RELEASE, folder)
    (tools := folder / "tools").mkdir()
    for name in ("nsys", "ncu"):
        [program] = (path for path in site.rglob(name) if path.is_file())
        (tools / name).symlink_to(program)
    # The files behind --set are in another package of 230 MB; without their folder, ncu does not start.
    (tools / "ncu").resolve().parents[2].joinpath("sections").mkdir()
    (tools / "trtexec").write_text(TRTEXEC)
    (tools / "trtexec").chmod(0o755)
    return tools


def section_of(target: Target, build: Build, folder: Path, comment: str) -> str:
    """Return the lines of commands.sh below a comment."""
    write_commands(folder, target, build)
    sections = (folder / "commands.sh").read_text().split("\n\n")
    [found] = (section for section in sections if section.startswith(comment))
    return found


def run(script: str, folder: Path, tools: Path) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "HOME": str(folder)}
    script = f"set -u\nplan=engine.plan\n{script}"
    return subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def test_nsight_systems_records_a_timeline(workshop: Workshop, tools: Path, tmp_path: Path) -> None:
    """Its importer, which makes timeline.nsys-rep of the record, is in another package of 150 MB."""
    script = section_of(workshop.target("h200_tensorrt"), ELEVEN, tmp_path, "# A timeline")
    done = run(script, tmp_path, tools)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "timeline.qdstrm").stat().st_size > 0
    given = (tmp_path / "trtexec_was_given.txt").read_text().strip().split("|")
    assert given[0] == "--loadEngine=engine.plan" and given[-1] == "--iterations=50"
    assert "--noCudaGraph" in given
    wrong = run(script.replace("osrt", "imaginary"), tmp_path, tools)
    assert wrong.returncode and "Illegal --trace argument 'imaginary'" in wrong.stdout + wrong.stderr


KERNELS = {"sm80_xmma_fprop": 9, "copyVectorizedKernel": 7, "trt_volta_scudnn": 5, "pooling": 3}
"""Name of a kernel -> its time in nanoseconds."""


def test_three_slowest_kernels_of_its_table_reach_nsight_compute(
    workshop: Workshop, tools: Path, tmp_path: Path
) -> None:
    """The record is written here, in the tables of SQLite that it exports, as no kernel runs without a GPU."""
    with sqlite3.connect(tmp_path / "timeline.sqlite") as record:
        record.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        columns = ("start", "end", "shortName", "demangledName", "mangledName")
        record.execute(f"CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL ({' INTEGER, '.join(columns)} INTEGER)")
        for number, (name, time_ns) in enumerate(KERNELS.items()):
            record.execute("INSERT INTO StringIds VALUES (?, ?)", (number, name))
            row = (0, time_ns, number, number, number)
            record.executemany("INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?)", [row] * 2)
    record.close()
    script = section_of(workshop.target("h200_tensorrt"), ELEVEN, tmp_path, "# The three slowest")
    assert "--force-export [true|false]" in run("nsys stats --help", tmp_path, tools).stdout
    read = script.replace("--force-export=true ", "").replace("timeline.nsys-rep", "timeline.sqlite")
    done = run(f'{read}\necho "kernels: $kernels"', tmp_path, tools)
    assert "kernels: sm80_xmma_fprop|copyVectorizedKernel|trt_volta_scudnn\n" in done.stdout
    # It starts the program, which runs no kernel.
    assert "No kernels were profiled" in done.stdout + done.stderr
    assert "==ERROR== unrecognised option" not in done.stdout + done.stderr
    wrong = run(read.replace("--launch-count", "--imaginary"), tmp_path, tools)
    assert "==ERROR== unrecognised option '--imaginary'" in wrong.stdout + wrong.stderr
