"""Find out which stages give the same bytes on other CPUs, as far as libraries let one CPU stand in for another.

``python -m benchmarks.same_bytes --workspace DIR``: DIR is a workspace with a finished run (``debug=smoke`` will do).
Every stage that makes models or graphs runs again on the inputs of that run, into a temporary folder: as it is, with
one thread, and with the instruction sets of torch, oneDNN, OpenBLAS and NumPy limited to AVX2, one at a time. ONNX
Runtime has no such switch, so stages that use it alone tell only about threads. Prints which files differ from those
of the run, and writes ``benchmarks/results/same_bytes.json``.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path

from flows.pipeline import RecordedStages, run_models
from tasks.core.config import read_params
from tasks.core.execute import output_folder, prepare_call
from tasks.core.fingerprint import digest
from tasks.core.reports import KEY_FILE, REPORT_FILE
from tasks.parts.engines.machine import read_cpu_model

RESULTS = Path(__file__).parent / "results" / "same_bytes.json"
MACHINES: Mapping[str, Mapping[str, str]] = {
    "again": {},
    "one thread": {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    "torch in AVX2": {"ATEN_CPU_CAPABILITY": "avx2"},
    "oneDNN in AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    "matrix products in AVX2": {"MKL_ENABLE_INSTRUCTIONS": "AVX2", "OPENBLAS_CORETYPE": "Haswell"},
    "NumPy in AVX2": {
        "NPY_DISABLE_CPU_FEATURES": "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL"
    },
}
LEFT_OUT = ("search_pruning",)
"""It reports latencies."""
_WITH_TIMES = (REPORT_FILE, KEY_FILE, "history.csv", "training.png")


def main() -> None:
    """Compare all stages, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--stage", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.chdir(options.workspace)
    plan = RecordedStages()
    run_models(plan, read_params())
    if options.stage:
        call = prepare_call(options.stage, plan.calls[options.stage], read_params())
        call.function(call.config, **call.inputs, out=options.out)
        return
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        "versions": {name: version(name) for name in ("torch", "numpy", "onnxruntime")},
        "differing": {},
    }
    for address in plan.calls:
        if address.split(".")[0] in LEFT_OUT:
            continue
        record["differing"][address] = {
            machine: differing_files(address, environment) for machine, environment in MACHINES.items()
        }
        print(address, record["differing"][address], flush=True)
        RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def differing_files(address: str, environment: Mapping[str, str]) -> list[str]:
    """Run a stage in an environment and return its files that are not those of the finished run."""
    published = output_folder(address)
    names = [path.relative_to(published) for path in published.rglob("*") if path.is_file()]
    with tempfile.TemporaryDirectory() as folder:
        command = (sys.executable, "-m", "benchmarks.same_bytes", "--workspace", ".")
        subprocess.run(
            [*command, "--stage", address, "--out", folder],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), **environment},
            check=True,
            capture_output=True,
        )
        return sorted(
            str(name)
            for name in names
            if name.name not in _WITH_TIMES and digest(published / name) != digest(Path(folder) / name)
        )


if __name__ == "__main__":
    main()
