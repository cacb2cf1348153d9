"""Report what this machine can do, and how to fix what is missing.

``python -m flows.doctor [--all] [hydra override ...]`` checks the CPU, the GPUs, the runtimes, the targets of the
run, the disk, the servers and the DVC remote; with ``--all`` every target in conf/. It changes nothing. The exit code
is 1 if something is missing that a run with these overrides needs.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import yaml

from flows import local_server
from flows.params import CONF, compose_params
from flows.result_table import open_console
from tasks.core.config import typed_config
from tasks.core.errors import EnginewrightError
from tasks.core.tracking.config import database_file, mask_credentials, tracking_config
from tasks.parts.engines.gpu import find_gpus
from tasks.parts.engines.machine import check_gpu, check_versions, missing_cpu_flags, read_cpu_model, read_isa
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.engines.target import Target

_PACKAGES = dict.fromkeys([*(name for runtime in Runtime for name in runtime.traits.distributions), "pycuda"])
_HOW_TO_INSTALL = {
    "onnxruntime-gpu": "pip install onnxruntime-gpu in place of onnxruntime, on a machine with a GPU.",
    "tensorrt": "pip install -e '.[gpu]' on a machine with a GPU.",
    "tensorrt_rtx_cu13": "pip install -e '.[rtx]' on a machine with an RTX GPU.",
    "pycuda": "pip install -e '.[gpu]' on a machine with a GPU.",
}
_NEEDED_GB = 3
"""A run with the defaults takes 0.8 GB, including DVC's cache and MLflow's copies of the engines."""
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_TIMEOUT_S = 10
_BUILDER_TIMEOUT_S = 120
"""The first builder of a process loads gigabytes of libraries."""
_DEFAULT_REMOTE = "core.remote"


class State(StrEnum):
    """The result of a check."""

    ok = "ok"
    missing = "missing"
    """Something is missing that this run does not use."""
    skipped = "skipped"
    """The run skips this and goes on."""
    needed = "NEEDED"
    """Something is missing that this run needs."""


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    state: State
    subject: str
    text: str
    mend: str = ""
    """How the user can fix it; empty if nothing is missing."""


def examine(params: Mapping[str, Any], *, all_targets: bool) -> Iterator[Finding]:
    """Yield the findings, cheap checks first; ``params`` is the configuration of a run."""
    flags = ", ".join(read_isa()) or "no CPU flags that change kernels"
    yield Finding(State.ok, "CPU", f"{read_cpu_model()}; {flags}")
    references = {item["target"] for item in params["pipeline"]["references"].values()}
    for name, section in params["build_engine"].items():
        lack = State.needed if name in references else State.skipped
        yield _examine_target(name, section, without_gpu=State.needed, without_flags=lack)
    others = sorted({file.stem for file in (CONF / "target").glob("*.yaml")} - set(params["build_engine"]))
    yield _examine_gpus()
    for package in _PACKAGES:
        yield _examine_package(package)
    needs_builder = any(
        section.get("tensorrt") and section["runtime"] != Runtime.tensorrt_rtx
        for section in params["build_engine"].values()
    )
    yield _examine_builder(State.needed if needs_builder else State.missing)
    if all_targets:
        for name in others:
            yield _examine_other_target(name)
    elif others:
        yield Finding(
            State.ok, "other targets", f"{', '.join(others)}: not part of this run (--all checks them)"
        )
    yield _examine_disk()
    yield _examine_prefect()
    tracking = tracking_config(params)
    yield (_examine_mlflow(tracking.uri) if tracking.enabled else Finding(State.ok, "MLflow", "turned off"))
    yield _examine_remote()


def _examine_gpus() -> Finding:
    gpus = find_gpus()
    if not gpus:
        return Finding(
            State.missing,
            "GPU",
            "no NVIDIA GPU, or no driver (libcuda.so.1)",
            "Install NVIDIA's driver; in a container, start it with --gpus all.",
        )
    named = ", ".join(f"{gpu.name} (sm_{gpu.compute_capability.replace('.', '')})" for gpu in gpus)
    driver = _DRIVER_FILE.read_text(encoding="utf-8").splitlines()[0] if _DRIVER_FILE.is_file() else ""
    return Finding(State.ok, "GPU", "; ".join(filter(None, [named, driver])))


def _examine_package(package: str) -> Finding:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return Finding(
            State.missing,
            package,
            "not installed",
            _HOW_TO_INSTALL.get(package, "pip install -e ."),
        )
    return Finding(State.ok, package, f"{version}{_cuda_of_torch() if package == 'torch' else ''}")


def _cuda_of_torch() -> str:
    import torch

    return f", CUDA {torch.version.cuda}" if torch.version.cuda else ", built without CUDA"


def _examine_builder(lack: State) -> Finding:
    """Let TensorRT build the smallest plan in a process, which a library that does not fit the driver may end."""
    subject = "TensorRT's builder"
    if importlib.util.find_spec("tensorrt") is None:
        return Finding(lack, subject, "TensorRT is not installed", _HOW_TO_INSTALL["tensorrt"])
    command = [sys.executable, "-m", "tasks.parts.builders.tensorrt_trial"]
    try:
        asked = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_BUILDER_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        problem = f"no answer in {_BUILDER_TIMEOUT_S} s"
    else:
        if asked.returncode == 0:
            version = asked.stdout.strip().rpartition("\n")[2]
            return Finding(State.ok, subject, f"{version} parses and builds plans here")
        said = (asked.stdout + asked.stderr).strip().rpartition("\n")[2]
        problem = f"{said or 'it said nothing'} (its process ended with {asked.returncode})"
    mend = "TensorRT needs an NVIDIA GPU and a driver for its CUDA version, which `nvidia-smi` shows"
    return Finding(lack, subject, problem, f"{mend}: {_HOW_TO_INSTALL['tensorrt']}")


def _examine_other_target(name: str) -> Finding:
    """Check a target as its file declares it."""
    try:
        section = yaml.safe_load((CONF / f"target/{name}.yaml").read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        return Finding(State.missing, f"target {name}", "its file is not valid YAML", str(error))
    return _examine_target(name, section, without_gpu=State.missing, without_flags=State.missing)


def _examine_target(
    name: str, section: Mapping[str, Any], *, without_gpu: State, without_flags: State
) -> Finding:
    """Check a target; the states apply if this machine lacks its GPU or library, or its CPU flags."""
    subject = f"target {name}"
    options = dict(section)
    pool = options.pop("work_pool", None)
    try:
        target: Target = typed_config(Target, options, subject)
        check_gpu(target)
        version = check_versions(target)
    except EnginewrightError as error:
        return Finding(without_gpu, subject, "cannot be built here", str(error))
    flags = missing_cpu_flags(target)
    if flags:
        return Finding(
            without_flags,
            subject,
            f"this CPU lacks {', '.join(flags)}",
            f"Run it on a worker of pool {pool}.",
        )
    return Finding(
        State.ok, subject, f"{target.runtime} {version}, {target.precision}, {target.num_threads} threads"
    )


def _examine_disk() -> Finding:
    free_gb = shutil.disk_usage(Path.cwd()).free / 1e9
    text = f"{free_gb:.1f} GB free under {Path.cwd()}"
    if free_gb >= _NEEDED_GB:
        return Finding(State.ok, "disk", text)
    return Finding(
        State.needed,
        "disk",
        text,
        f"Free some space: {_NEEDED_GB} GB are needed. `make gc` removes what neither this checkout nor a picked "
        "engine needs.",
    )


def _examine_prefect() -> Finding:
    url = os.environ.get("PREFECT_API_URL")
    if url is None:
        return Finding(State.ok, "Prefect", "a local server, which a run starts")
    shown = mask_credentials(url)
    if local_server.answers(url):
        return Finding(State.ok, "Prefect", shown)
    return Finding(
        State.needed,
        "Prefect",
        f"no answer from {shown}",
        "Start it, or unset PREFECT_API_URL to use a local one.",
    )


def _examine_mlflow(uri: str) -> Finding:
    shown = mask_credentials(uri)
    if file := database_file(uri):
        folder = file.resolve().parent
        if folder.is_dir() and os.access(folder, os.W_OK):
            return Finding(State.ok, "MLflow", f"the file {shown}")
        return Finding(State.needed, "MLflow", f"{folder} cannot be written", "Correct track.uri.")
    if not uri.startswith("http"):
        return Finding(State.ok, "MLflow", f"{shown}, not checked")
    problem = local_server.find_problem(f"{uri.rstrip('/')}/health", _TIMEOUT_S)
    if problem is None:
        return Finding(State.ok, "MLflow", shown)
    return Finding(
        State.missing,
        "MLflow",
        f"no answer from {shown} ({problem})",
        "Start it, or correct track.uri. A run goes on without it and sends its records later.",
    )


def _examine_remote() -> Finding:
    """Check the remote through DVC, which knows the kinds of remotes and their credentials."""
    name = _dvc("config", _DEFAULT_REMOTE).stdout.strip()
    if not name:
        return Finding(
            State.missing,
            "DVC remote",
            "none: artifacts stay on this machine",
            "dvc remote add --default <name> <folder or s3://bucket/path>",
        )
    program = (
        "from dvc.repo import Repo; store = Repo().cloud.get_remote_odb(); print(store.fs.exists(store.path))"
    )
    try:
        asked = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=False,
            timeout=6 * _TIMEOUT_S,
        )
        problem = (asked.stderr.strip().splitlines() or ["no message"])[-1] if asked.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"no answer in {6 * _TIMEOUT_S} s"
    if problem:
        return Finding(
            State.missing,
            "DVC remote",
            f"{name} cannot be reached: {mask_credentials(problem)}",
            f"Check `dvc remote list` and the credentials of {name} in .dvc/config.local.",
        )
    is_there = asked.stdout.strip() == "True"
    return Finding(
        State.ok, "DVC remote", name if is_there else f"{name}, empty: the first push creates its folder"
    )


def _dvc(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "dvc", *arguments], capture_output=True, text=True, check=False
    )


def show(findings: Sequence[Finding]) -> None:
    """Print one line for each finding, and below it how to fix what is missing."""
    from rich.markup import escape
    from rich.table import Table

    colours = {
        State.ok: "green",
        State.missing: "yellow",
        State.skipped: "yellow",
        State.needed: "bold red",
    }
    table = Table.grid("", "", "", padding=(0, 2))
    for finding in findings:
        text = escape(finding.text) + (f"\n[dim]{escape(finding.mend)}[/dim]" if finding.mend else "")
        table.add_row(f"[{colours[finding.state]}]{finding.state}[/]", finding.subject, text)
    open_console().print(table)


def main(arguments: Sequence[str]) -> int:
    """Print the diagnosis and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m flows.doctor", description="What this machine can do.")
    parser.add_argument("--all", action="store_true", help="check every target in conf/")
    parser.add_argument("overrides", nargs="*", help="as for flows.optimize")
    options = parser.parse_intermixed_args(arguments)
    try:
        findings = list(examine(compose_params(options.overrides), all_targets=options.all))
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    show(findings)
    return int(any(finding.state is State.needed for finding in findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
