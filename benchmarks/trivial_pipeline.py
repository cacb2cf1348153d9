"""Run the pipeline with trivial stages, so that only orchestration takes time.

A workspace holds unmodified copies of ``flows``, ``tasks/core``, ``tasks/parts`` and ``tasks/__main__.py``. Its
stages are modules that write a few bytes derived from their inputs. There, ``python -m
benchmarks.trivial_pipeline`` plans and runs the flow, as ``python -m flows.optimize`` does with the configuration
of conf/.
"""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from flows import local_server
from flows.flow_record import recorded_flow
from flows.optimize import optimize, run_flow
from flows.params import write_params
from flows.pipeline import RecordedStages, run_pipeline
from flows.workspace import hold_workspace
from tasks.core.config import PARAMS_FILE, find_section, read_params
from tasks.core.environment import ENVIRONMENT_FILE
from tasks.core.errors import EnginewrightError
from tasks.core.execute import ARTIFACTS

REPOSITORY = Path(__file__).resolve().parents[1]

OUTPUTS = {
    "prepare_data": ("dataset/calibration_images.npy", "splits.csv"),
    "import_onnx": ("model.onnx",),
    "convert_precision": ("model.onnx",),
    "quantize_ptq": ("model.onnx", "ranges.json", "calibrators.csv", "images.npz"),
    "rank_layers": ("ranking.csv",),
    "check_int8": ("checklist.md",),
    "quantize_repaired": ("model.onnx", "float.onnx", "ranges.json", "images.npz", "left_out.txt"),
    "quantize_partial": ("model.onnx", "left_out.txt"),
    "build_engine": ("engine/model.bin",),
    "validate": ("scores.csv",),
    "diff_layers": ("layers.csv",),
    "benchmark": ("times.csv",),
    "select_engine": ("report.md", "report.html", "picks.json"),
    "track": ("run.txt",),
    "race_picks": ("ranking.md",),
}
"""Output files of each stage, which later stages read."""

LIBRARIES = {
    "prepare_data": "numpy",
    "import_onnx": "onnx",
    "quantize_ptq": "onnx",
    "build_engine": "onnxruntime",
    "benchmark": "psutil",
}
"""The library whose version shapes the output of a stage."""

_STAGE = '''"""A stage that writes its inputs."""

import time
from dataclasses import dataclass
from pathlib import Path

from tasks.core.environment import versions


@dataclass(frozen=True)
class Config:
    salt: int
    seconds: float
    gpu: str | None
    root: str | None
    enabled: bool | None
    uri: str | None
    experiment: str | None


@dataclass(frozen=True)
class Report:
    started_s: float
    finished_s: float
    without_pick: dict[str, str]
    run: None


{environment}def {stage}(cfg: Config, *, out: Path, **inputs: Path) -> Report:
    started_s = time.monotonic()
    time.sleep(cfg.seconds)
    read = [path.read_bytes() for path in inputs.values() if path.is_file()]
    read += [(path / "model.bin").read_bytes() for path in inputs.values() if (path / "model.bin").is_file()]
    for name in {outputs}:
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_bytes(b"|".join([b"{stage} %d" % cfg.salt, *read]))
    return Report(started_s, time.monotonic(), {{}}, None)
'''

_ENVIRONMENT = """def environment(_: Config) -> dict[str, str]:
    return versions("{library}")


"""


def write_workspace(folder: Path, *, num_variants: int, num_targets: int, seconds: float) -> None:
    """Write a git and DVC repository with one engine per variant and target."""
    for name in ("flows", "tasks/core", "tasks/parts"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("benchmarks", ".dvc", "data", "models"):
        (folder / name).mkdir()
    for name in (
        "tasks/__init__.py",
        "tasks/__main__.py",
        "benchmarks/__init__.py",
        ".dvc/config",
        ".gitignore",
        ".dvcignore",
    ):
        shutil.copy(REPOSITORY / name, folder / name)
    shutil.copy(__file__, folder / "benchmarks")
    for stage, outputs in OUTPUTS.items():
        environment = _ENVIRONMENT.format(library=LIBRARIES[stage]) if stage in LIBRARIES else ""
        (folder / f"tasks/{stage}.py").write_text(
            _STAGE.format(stage=stage, outputs=outputs, environment=environment), encoding="utf-8"
        )
    params = compose_trivial(num_variants=num_variants, num_targets=num_targets, seconds=seconds)
    (folder / "data/image").write_bytes(b"image")
    for name in ("float", *(f"v{number:02d}" for number in range(1, num_variants))):
        (folder / f"models/{name}.onnx").write_text(name, encoding="utf-8")
    write_params(params, folder / PARAMS_FILE)
    (folder / "dvc.yaml").write_text(yaml.safe_dump({"stages": dvc_stages(params)}), encoding="utf-8")
    author = ("-c", "user.name=Benchmark", "-c", "user.email=benchmark@localhost")
    for command in (
        ("git", "init", "-q"),
        ("git", "add", "--all"),
        ("git", *author, "commit", "-q", "-m", "Trivial stages"),
    ):
        subprocess.run(command, cwd=folder, check=True)


def compose_trivial(*, num_variants: int, num_targets: int, seconds: float) -> dict[str, Any]:
    """Return the content of params.yaml: the sections that flows/pipeline.py reads, and one for each stage."""
    quantized = "artifacts/quantize_ptq/model.onnx"
    variants = {f"v{number:02d}": f"models/v{number:02d}.onnx" for number in range(num_variants)} | {
        "v00": quantized
    }
    targets = [f"t{number:02d}" for number in range(num_targets)]
    section = {
        "salt": 0,
        "seconds": seconds,
        "gpu": None,
        "root": None,
        "enabled": None,
        "uri": None,
        "experiment": None,
    }
    sections: dict[str, Any] = {stage: dict(section) for stage in OUTPUTS}
    for stage in ("build_engine", "benchmark"):
        sections[stage] = {target: {**section, "salt": number} for number, target in enumerate(targets)}
    sections["prepare_data"]["root"] = "data"
    sections["track"] |= {"enabled": False, "uri": "sqlite:///mlflow.db", "experiment": "trivial"}
    engines = {
        f"{variant}-{target}": {
            "variant": variant,
            "target": target,
            "model": model,
            "float_graph": "artifacts/import_onnx/model.onnx",
        }
        for variant, model in variants.items()
        for target in targets
    }
    reference = {"target": targets[0], "engine": f"artifacts/build_engine/v00/{targets[0]}/engine"}
    pipeline = {
        "imports": {"model": "models/float.onnx"},
        "unlabelled": {},
        "metrics": {},
        "networks": [],
        "checkpoints": {},
        "distillation": {},
        "pruning": {},
        "quantization_aware": {},
        "exports": {},
        "data": "artifacts/prepare_data/dataset",
        "graph": "artifacts/import_onnx/model.onnx",
        "reference_graph": "artifacts/import_onnx/model.onnx",
        "reference_engine": reference["engine"],
        "references": dict.fromkeys(targets, reference),
        "explanations": "artifacts/benchmark",
        "loads": "artifacts/benchmark",
    }
    return {**sections, "engines": engines, "pipeline": pipeline}


def dvc_stages(params: dict[str, Any]) -> dict[str, Any]:
    """Return the stages of dvc.yaml for the calls that the flow makes."""
    from flows.stage_task import stage_command  # imported late, because Prefect reads its settings on import

    plan = RecordedStages()
    run_pipeline(plan, params)
    looked_up = {
        "cmd": "python -m flows.environment",
        "always_changed": True,
        "outs": [ENVIRONMENT_FILE.as_posix()],
    }
    return {"environment": looked_up} | {
        address.replace(".", "-"): {
            "cmd": shlex.join(stage_command(address, inputs)),
            "params": _sections(address, find_section(params, address)[0]),
            "deps": [
                *(str(path).partition("/*")[0] for path in inputs.values()),
                f"tasks/{address.split('.')[0]}.py",
            ],
            "outs": [ARTIFACTS.joinpath(*address.split(".")).as_posix()],
        }
        for address, inputs in plan.calls.items()
    }


def _sections(address: str, section: str) -> list[Any]:
    """Return what a stage reads of params.yaml and of the facts of its surroundings."""
    has_facts = address.split(".")[0] in LIBRARIES
    return [section, {ENVIRONMENT_FILE.as_posix(): [section if has_facts else "checked"]}]


def main(arguments: list[str]) -> int:
    """Run the flow of the workspace in the working directory and return the exit code."""
    try:
        if "--without-commit" in arguments:
            with hold_workspace():
                local_server.prepare_environment()
                local_server.begin_start()
                local_server.wait_until_ready()
                with recorded_flow():
                    optimize(read_params())
        else:
            run_flow(read_params())
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    local_server.leave(main(sys.argv[1:]))
