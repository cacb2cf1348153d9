"""Build, check, measure and explain the engines of a finished run on a machine that has nothing but their runtimes.

The models and data come from a run elsewhere, such as ``make run`` on a machine without a GPU. There write
params.yaml for the targets of the GPU machine::

    python -m flows.params 'target=[cuda_torch,cuda_aotinductor,cuda_onnxruntime]' \
        select_engine.float_reference.target=cuda_torch measure_machine.checkpoint_targets=true

Copy the repository with params.yaml, ``artifacts/prepare_data`` and the models onto the GPU machine and run
``python -m benchmarks.gpu_ladder`` there. It runs the calls of ``flows.pipeline.run_targets`` and ``select_engine``
as ``python -m tasks``, without Prefect, Hydra and DVC. Variants whose model was not copied are left out. A stage that
fails costs only those that need its output, and ``python -m benchmarks.gpu_ladder`` again repeats no finished one.
"""

import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import yaml

from flows.pipeline import Calls, run_selection, run_targets
from tasks.core.config import PARAMS_FILE
from tasks.core.execute import ARTIFACTS

PARAMS = ARTIFACTS / "gpu_ladder.yaml"
LOGS = ARTIFACTS / "gpu_ladder"
NUM_SIDE_BY_SIDE = 6


class Commands:
    """Runs stage calls as commands, one after the other or side by side."""

    def __init__(self, params: Path) -> None:
        self._params = params
        self.failed: list[str] = []

    def run(self, address: str, **inputs: Path) -> Path:
        """Run a stage; print how long it took, and the end of its output if it failed."""
        command = [
            sys.executable,
            "-m",
            "tasks",
            address,
            *(f"{name}={path}" for name, path in inputs.items()),
        ]
        start = time.monotonic()
        with (LOGS / f"{address}.log").open("w", encoding="utf-8") as log:
            done = subprocess.run(
                [*command, "--params", str(self._params)], stdout=log, stderr=log, check=False
            )
        outcome = "ok" if done.returncode == 0 else f"FAILED with exit status {done.returncode}"
        print(f"{address}: {outcome}, {time.monotonic() - start:.1f} s", flush=True)
        if done.returncode:
            self.failed.append(address)
            print((LOGS / f"{address}.log").read_text(encoding="utf-8")[-2000:], flush=True)
        return ARTIFACTS.joinpath(*address.split("."))

    def run_side_by_side(self, calls: Calls) -> None:
        """Run calls that do not depend on each other."""
        with ThreadPoolExecutor(NUM_SIDE_BY_SIDE) as pool:
            for future in [pool.submit(self.run, address, **inputs) for address, inputs in calls.items()]:
                future.result()


def with_copied_models(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of the engines whose model is on this machine."""
    engines = {name: item for name, item in params["engines"].items() if Path(item["model"]).is_file()}

    def of(target: str, variants: list[str]) -> list[str]:
        return [variant for variant in variants if f"{variant}-{target}" in engines]

    benchmark = {
        target: section | {"variants": of(target, section["variants"])}
        for target, section in params["benchmark"].items()
    }
    explain = {
        target: section
        | {
            "variants": of(target, section["variants"]),
            "pairs": [pair for pair in section["pairs"] if len(of(target, [*pair.values()])) == 2],
        }
        for target, section in params["explain"].items()
    }
    select = params["select_engine"] | {
        "engines": [{"variant": item["variant"], "target": item["target"]} for item in engines.values()]
    }
    return {**params, "engines": engines, "benchmark": benchmark, "explain": explain, "select_engine": select}


def main() -> int:
    """Run everything from the builds to the picks; return the exit status."""
    params = with_copied_models(yaml.safe_load(PARAMS_FILE.read_text(encoding="utf-8")))
    LOGS.mkdir(parents=True, exist_ok=True)
    PARAMS.write_text(yaml.safe_dump(params, sort_keys=False), encoding="utf-8")
    commands = Commands(PARAMS)
    run_targets(commands, params, params["build_engine"])
    report = run_selection(commands, params) / "report.md"
    if report.is_file():
        print(report.read_text(encoding="utf-8"))
    return 1 if commands.failed else 0


if __name__ == "__main__":
    sys.exit(main())
