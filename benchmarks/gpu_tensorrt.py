"""Try TensorRT for RTX on a machine with an NVIDIA GPU and no network, within a quarter of an hour.

On a machine with a network, in a repository where the default pipeline has run (``make run``)::

    python -m benchmarks.gpu_tensorrt --pack DIR

fetches the wheels of TensorRT for RTX with the hashes in tensorrt_rtx.txt, and copies the models and the data of the
run with a params.yaml for the targets of the GPU machine; no file has more than 60 MiB. Then there, in a
copy of the repository::

    python -m benchmarks.gpu_tensorrt --packed DIR --out OUT --budget-s 540

installs the wheels into OUT; asks whether they take this GPU (parse, build, load); runs the GPU tests of TensorRT for
RTX and of the kernels; and builds, validates and races FP16 against INT8 against eager and
compiled PyTorch (benchmarks/gpu_ladder.py; AOTInductor builds the default student there, which crashed torch 2.11).
Each step has a log in OUT and a line in OUT/steps.json; a second call goes on with the step that the budget cut.
Without a GPU the first step says what the wheels do there, and the others are left out.

Needs torch with CUDA, pycuda and what benchmarks/gpu_ladder.py needs; no Prefect, Hydra and DVC.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.gpu_cells import REPOSITORY
from benchmarks.tensorrt_rtx import REQUIREMENTS
from tasks.core.config import PARAMS_FILE
from tasks.parts.engines.gpu import find_gpus

PART_BYTES = 60 << 20
WHEELS, RUN, STEPS = "wheels", "run", "steps.json"
TARGETS = ("cuda_torch", "cuda_aotinductor", "rtx4090_tensorrt_rtx")
OVERRIDES = (
    f"target=[{','.join(TARGETS)}]",
    "select_engine.float_reference.target=cuda_torch",
    "measure_machine.checkpoint_targets=true",
    *(f"target.{name}.runtime_version=any" for name in ("cuda_torch", "cuda_aotinductor")),
    *(f"target.rtx4090_tensorrt_rtx.gpu.{field}=any" for field in ("name", "compute_capability")),
    "target.rtx4090_tensorrt_rtx.tensorrt.hardware_compatibility=ampere_plus",
)
"""For whatever GPU and torch are there."""
_PIP = (sys.executable, "-m", "pip")
SHORTEST_S = 20.0
"""No step is started with less budget left."""
_GPU_TESTS = ("tests/gpu/test_tensorrt_rtx_engines.py", "tests/gpu/test_kernels_on_a_gpu.py")
_TRIAL = """
import sys
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.engines.tensorrt_flavour import choose_tensorrt
choose_tensorrt(Runtime.tensorrt_rtx)
import tensorrt as trt
from tasks.parts.builders.tensorrt_trial import build_smallest_plan
plan = build_smallest_plan()
print(f"TensorRT for RTX {trt.__version__} built a plan of {len(plan)} bytes")
engine = trt.Runtime(trt.Logger(trt.Logger.WARNING)).deserialize_cuda_engine(plan)
sys.exit("it loads no plan here" if engine is None or engine.create_execution_context() is None else 0)
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Pack, or run what is packed; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pack", type=Path, metavar="DIR", help="collect what the GPU machine needs")
    parser.add_argument("--packed", type=Path, metavar="DIR", help="where that lies, on the GPU machine")
    parser.add_argument("--out", type=Path, help="where wheels are installed, and logs go")
    parser.add_argument("--budget-s", type=float, default=540.0, help="end after this many seconds")
    options = parser.parse_args(arguments)
    if options.pack is not None:
        pack(options.pack)
        return 0
    if options.packed is None or options.out is None:
        parser.error("expected --pack DIR, or --packed DIR and --out OUT")
    return run(options.packed.resolve(), options.out.resolve(), time.monotonic() + options.budget_s)


def pack(folder: Path) -> None:
    """Write wheels in parts, models, data and params.yaml into a new folder. Raises SystemExit without a run."""
    from flows.params import compose_params, write_params

    params = compose_params(OVERRIDES)
    models = sorted({Path(engine["model"]) for engine in params["engines"].values()})
    missing = [str(path) for path in (Path(params["pipeline"]["data"]), *models) if not path.exists()]
    if missing:
        raise SystemExit(f"{', '.join(missing)}: not found. Run the default pipeline first (`make run`).")
    wheels = folder / WHEELS
    wheels.mkdir(parents=True)
    command = [*_PIP, "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--require-hashes", "-r", str(REQUIREMENTS), "-d", str(wheels)]
    subprocess.run(command, check=True)
    [version] = set(re.findall(r"==(\S+)", REQUIREMENTS.read_text(encoding="utf-8")))
    package = f"tensorrt_rtx_cu13=={version}"  # has no wheel, but two lines that import the bindings
    subprocess.run([*_PIP, "wheel", "--quiet", "--no-deps", "-w", str(wheels), package], check=True)
    (folder / RUN).mkdir()
    write_params(params, folder / RUN / PARAMS_FILE)
    for path in models:
        (folder / RUN / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / RUN / path)
    shutil.copytree(params["pipeline"]["data"], folder / RUN / params["pipeline"]["data"])
    for file in [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > PART_BYTES]:
        split(file)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size / 1e6:.0f} MB in parts of up to {PART_BYTES >> 20} MiB")


def split(file: Path) -> None:
    """Replace a file by parts ``<name>.part0`` and so on."""
    with file.open("rb") as whole:
        for number, content in enumerate(iter(lambda: whole.read(PART_BYTES), b"")):
            file.with_name(f"{file.name}.part{number}").write_bytes(content)
    file.unlink()


def join(folder: Path) -> list[Path]:
    """Put together the files whose parts lie below a folder."""
    joined = []
    for first in sorted(folder.rglob("*.part0")):
        file = first.with_suffix("")
        parts = sorted(file.parent.glob(f"{file.name}.part*"), key=lambda path: int(path.suffix[5:]))
        file.write_bytes(b"".join(part.read_bytes() for part in parts))
        for part in parts:
            part.unlink()
        joined.append(file)
    return joined


def install(packed: Path, out: Path) -> Path:
    """Install the wheels; return a folder for PYTHONPATH that has them."""
    site = out / "site"
    if not site.is_dir():
        draft = out / "installing"
        shutil.rmtree(draft, ignore_errors=True)
        command = [*_PIP, "install", "--quiet", "--no-deps", "--no-index"]
        shutil.copytree(packed / WHEELS, out / WHEELS, dirs_exist_ok=True)
        join(out / WHEELS)
        files = map(str, (out / WHEELS).glob("*.whl"))
        subprocess.run([*command, "--target", str(draft), *files], check=True)
        draft.rename(site)
    return site


def run(packed: Path, out: Path, deadline: float) -> int:
    """Run the steps that have not ended yet; return 0 if none failed."""
    site = install(packed, out)
    workspace = out / RUN
    if not workspace.is_dir():
        draft = out / "copying"
        shutil.rmtree(draft, ignore_errors=True)
        shutil.copytree(packed / RUN, draft)
        join(draft)
        draft.rename(workspace)
    steps = {"takes this GPU": (workspace, [sys.executable, "-c", _TRIAL])}
    if find_gpus():
        steps["GPU tests"] = (REPOSITORY, [sys.executable, "-m", "pytest", "-q", "-m", "gpu", *_GPU_TESTS])
        steps["ladder"] = (workspace, [sys.executable, "-m", "benchmarks.gpu_ladder"])
    state = out / STEPS
    ended: dict[str, dict[str, object]] = json.loads(state.read_text()) if state.is_file() else {}
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{site}"}
    for name, (folder, command) in steps.items():
        left_s = deadline - time.monotonic()
        if name in ended or left_s < SHORTEST_S:
            continue
        log, started = out / f"{name.replace(' ', '_')}.log", time.monotonic()
        with log.open("a", encoding="utf-8") as output:
            try:
                done = subprocess.run(
                    command,
                    cwd=folder,
                    env=environment,
                    stdout=output,
                    stderr=output,
                    timeout=left_s,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                print(f"{name}: cut by the end of the budget; the same command goes on")
                continue
        ended[name] = {"exit status": done.returncode, "seconds": round(time.monotonic() - started, 1)}
        state.write_text(json.dumps(ended, indent=1) + "\n", encoding="utf-8")
        last = (log.read_text(encoding="utf-8").strip().splitlines() or ["no output"])[-1]
        print(f"{name}: exit status {done.returncode}, {ended[name]['seconds']} s: {last}", flush=True)
    return int(any(step["exit status"] for step in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
