"""A new runtime is one package in engines/, one module in builders/, one target and one entry of `Runtime`."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tasks.core.fingerprint import code_digests
from tests.conftest import REPOSITORY, Workspace
from tests.tasks.conftest import Workshop

PARTS = Path("tasks/parts")
TABLE = PARTS / "engines/runtimes.py"
TARGET = Path("conf/target/cpu_reference.yaml")
ENTRY = '    reference = "reference", RuntimeTraits((CPU,), (Precision.f32,), ("onnx",), "onnx")\n'
FIRST_ENTRY = '    torch = "torch", '
ADDED = {
    PARTS / "engines/reference/__init__.py",
    PARTS / "engines/reference/runner.py",
    PARTS / "builders/reference.py",
    TARGET,
}
ADDRESS = "baseline.cpu_reference"


@pytest.fixture
def extended(workspace: Workspace) -> Workspace:
    """A workspace with one runtime more: ONNX's reference evaluator, which computes in numpy."""
    sources = Path(__file__).parent / "new_runtime"
    package = workspace.path / PARTS / "engines/reference"
    package.mkdir()
    (package / "__init__.py").write_text('"""ONNX\'s reference evaluator."""\n')
    shutil.copyfile(sources / "engine_runner.py", package / "runner.py")
    shutil.copyfile(sources / "builder.py", workspace.path / PARTS / "builders/reference.py")
    table = workspace.path / TABLE
    text = table.read_text()
    assert text.count(FIRST_ENTRY) == 1
    table.write_text(text.replace(FIRST_ENTRY, ENTRY + FIRST_ENTRY))
    target = (REPOSITORY / "conf/target/cpu_onnxruntime.yaml").read_text()
    target = target.replace("cpu_onnxruntime", "cpu_reference").replace(
        "runtime: onnxruntime", "runtime: reference"
    )
    target = target.replace("reads: frames", "reads: normalised").replace("gives: classes", "gives: logits")
    (workspace.path / TARGET).write_text(target.replace('"1.31"', "any"))
    return workspace


def run(space: Workspace, *command: str) -> None:
    done = space.run("python", "-m", *command, PYTHONPATH=str(space.path))
    assert done.returncode == 0, done.stdout + done.stderr


def report_of(space: Workspace, stage: str) -> dict[str, Any]:
    file = space.path / "artifacts" / stage / ADDRESS.replace(".", "/") / "report.json"
    report: dict[str, Any] = json.loads(file.read_text())
    return report


@pytest.mark.slow
def test_runtime_of_four_additions_builds_validates_and_is_measured(
    extended: Workspace, workshop: Workshop
) -> None:
    changes = extended.run("git", "status", "--porcelain", "--untracked-files=all").stdout.splitlines()
    assert {line[3:] for line in changes if line.startswith("??")} == {path.as_posix() for path in ADDED}
    assert [line for line in changes if not line.startswith("??")] == [f" M {TABLE}"]

    run(extended, "flows.params", "debug=smoke", "target=[cpu_torch,cpu_reference]")
    run(extended, "tasks", f"build_engine.{ADDRESS}", f"model={workshop.graph}", f"images={workshop.images}")
    report = report_of(extended, "build_engine")
    assert (report["status"], report["runtime"], report["provider"]) == ("built", "reference", "numpy")
    assert report["agreement_db"] > 60 and report["is_precision_ok"]
    assert report["executed"]["macs_share"] == {"f32": 1.0}
    engine = f"artifacts/build_engine/{ADDRESS.replace('.', '/')}/engine"
    run(extended, "tasks", f"validate.{ADDRESS}", f"engine={engine}", f"data={workshop.data}")
    validation = report_of(extended, "validate")
    assert validation["status"] == "built" and validation["num_images"] == 4
    inputs = (f"builds={engine}", f"reference={engine}", f"images={workshop.images}")
    run(extended, "tasks", f"benchmark.{TARGET.stem}", *inputs)
    report_file = extended.path / "artifacts/benchmark" / TARGET.stem / "report.json"
    measured = json.loads(report_file.read_text())["engines"]["baseline"]
    assert (measured["status"], measured["engine_sha256"]) == ("built", report["engine_sha256"])


def test_new_runtime_is_in_the_keys_of_stages_and_in_the_choices(extended: Workspace) -> None:
    program = "import json; from tasks.core.fingerprint import code_digests as d; "
    program += "print(json.dumps([d('tasks.build_engine'), d('tasks.validate')]))"
    done = extended.run("python", "-c", program, PYTHONPATH=str(extended.path))
    for stage, digests in zip(("build_engine", "validate"), json.loads(done.stdout), strict=True):
        before = code_digests(f"tasks.{stage}")
        changed = {name for name, md5 in digests.items() if before.get(name) != md5}
        assert digests.keys() == before.keys()  # so dvc.yaml names its dependencies as before
        assert changed == {"tasks/parts/engines"} | ({"tasks/parts/builders"} & before.keys())
    target = extended.path / TARGET
    target.write_text(target.read_text().replace("runtime: reference", "runtime: imaginary"))
    done = extended.run(
        "python", "-m", "flows.params", "target=[cpu_torch,cpu_reference]", PYTHONPATH=str(extended.path)
    )
    known = "reference, torch, onnxruntime, openvino, tensorrt, tensorrt_rtx, aotinductor"
    assert done.returncode == 1 and f"runtime is 'imaginary', expected one of {known}" in done.stderr
