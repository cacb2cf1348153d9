"""Define what `benchmarks.gpu` measures: one function per kind of cell, and the list of cells, most valuable first.

Heavy packages are imported in the functions: the command lists the cells on machines that lack some of them.
"""

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from benchmarks.gpu_kernels import KernelCase, measure_kernels

if TYPE_CHECKING:
    from tasks.parts.data.dataset import Manifest
    from tasks.parts.engines.target import Target
    from tasks.parts.measuring.engine_process import EngineProcess

REPOSITORY = Path(__file__).parents[1]
CLASSES = ("background", "zero", "one", "two", "three", "four")
ENGINE, CONTROL, EAGER = "engine", "control", "eager"
NUM_ROUNDS, BURST_MS, WARM_UP_S = 40, 20.0, 0.3
CONCURRENCY, LOAD_S, LOAD_WINDOWS = 2, 0.3, 3
TIMED_ON_DEVICE = 50
WARM_UP_STEPS = 4
MIB = 1 << 20

Result = dict[str, Any]


class CellSkippedError(Exception):
    """This machine lacks what the cell needs."""


@dataclass(frozen=True)
class Cell:
    """One measurement, in its own process."""

    name: str
    kind: Literal["tests", "engine", "training", "kernels"]
    """Kind of cell, which determines the keys of its result."""
    limit_s: float
    """Time limit after which the cell is stopped."""
    measure: Callable[[], Result]
    """Must be picklable, because a new process runs it."""


@dataclass(frozen=True)
class EngineCase:
    """An engine of a network with random weights."""

    network: str
    """Section of `train` that configures it: teacher, or baseline for the student."""
    height: int
    width: int
    target: str
    precision: str

    @property
    def name(self) -> str:
        """Name of the cell."""
        return f"{self.network}-{self.height}x{self.width}-{self.target}-{self.precision}"

    @property
    def max_batch(self) -> int:
        """Batch of the throughput measurement; page-locked buffers of this size must fit at 1024x2048, too."""
        return 16 if self.height * self.width <= 256 * 256 else 4


@dataclass(frozen=True)
class TrainingCase:
    """A training on random images."""

    network: str
    height: int
    width: int
    precision: str
    gradient_checkpointing: bool
    device: str
    num_steps: int

    @property
    def name(self) -> str:
        """Name of the cell."""
        checkpointing = "checkpointing" if self.gradient_checkpointing else "plain"
        return f"train-{self.network}-{self.height}x{self.width}-{self.precision}-{checkpointing}"


def list_cells() -> list[Cell]:
    """Return all cells, most valuable first."""
    first = [
        ("cuda_torch", "f32"),
        ("cuda_torch", "f16"),
        ("cuda_onnxruntime", "f32"),
        ("cuda_aotinductor", "f16"),
    ]
    later = [
        ("cuda_onnxruntime", "f16"),
        ("cuda_aotinductor", "f32"),
        ("cuda_aotinductor", "bf16"),
        ("cuda_torch", "bf16"),
    ]
    small, middle, large = (64, 64), (256, 256), (1024, 2048)
    trainings = [
        TrainingCase("teacher", *middle, precision, is_checkpointing, "cuda", 24)
        for precision in ("fp32", "bf16_mixed", "fp16_mixed")
        for is_checkpointing in (False, True)
    ]
    kernels = [KernelCase(*middle), KernelCase(*large)]
    return [
        Cell("tests", "tests", 300, run_gpu_tests),
        *_engine_cells([middle], first),
        *(Cell(case.name, "kernels", 120, partial(measure_kernels, case)) for case in kernels),
        *(Cell(case.name, "training", 120, partial(measure_training, case)) for case in trainings),
        *_engine_cells([large, small], first),
        *_engine_cells([middle, large, small], later),
    ]


def _engine_cells(sizes: list[tuple[int, int]], kinds: list[tuple[str, str]]) -> list[Cell]:
    cases = [
        EngineCase(network, *size, *kind)
        for size in sizes
        for kind in kinds
        for network in ("baseline", "teacher")
    ]
    return [Cell(case.name, "engine", 180, partial(measure_engine, case)) for case in cases]


def run_gpu_tests() -> Result:
    """Run the GPU tests and return their outcome."""
    if find_spec("pytest") is None:
        raise CellSkippedError("pytest is not installed")
    command = ["-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    # None of its tests is marked gpu, and its imports need OpenVINO.
    command.append("--ignore=tests/gpu/test_tensorrt_engines.py")
    lines = []
    with subprocess.Popen(
        [sys.executable, *command, "tests/gpu"], cwd=REPOSITORY, text=True, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)  # on a timeout the log shows how far it got
            lines.append(line.strip())
    summary = next((line.strip("= ") for line in reversed(lines) if line), "")
    if " passed" not in summary and " failed" not in summary:
        raise CellSkippedError(f"no test ran: pytest ended with {process.returncode}, {summary}")
    outcomes = [line for line in lines if line.startswith(("FAILED", "ERROR", "SKIPPED"))]
    return {"exit_code": process.returncode, "summary": summary, "outcomes": outcomes}


def measure_engine(case: EngineCase) -> Result:
    """Build an engine and time it in the same rounds as eager PyTorch in float32 on the same device."""
    import psutil  # noqa: F401  # engines' processes need it, whose errors would not say so

    target = declared_target(case)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        checkpoint = root / "model.safetensors"
        write_checkpoint(case, checkpoint)
        write_random_dataset(
            root / "dataset", case.height, case.width, {"train": 1, "val": 1, "calibration": 1}
        )
        model = checkpoint if target.runtime.traits.reads_checkpoints else export(case, checkpoint, root)
        engine, built = build(target, model, root / "dataset", root / ENGINE)
        eager = replace(case, target=f"{target.device}_torch", precision="f32")
        reference, _ = build(declared_target(eager), checkpoint, root / "dataset", root / EAGER)
        speed = measure_speed(engine, reference, max_batch=case.max_batch, device=target.device)
        return asdict(case) | built | speed


def stage_config(address: str) -> Any:
    """Return the typed configuration of a stage call; benchmarks.runtimes would also import ONNX packages."""
    from tasks.core.config import PARAMS_FILE, find_section, read_params, typed_config
    from tasks.core.execute import load_stage

    name, section = find_section(read_params(REPOSITORY / PARAMS_FILE), address)
    return typed_config(load_stage(address)[1], section, name)


def declared_target(case: EngineCase) -> "Target":
    """Return a target of conf/target for the precision of a case and any version of its runtime.

    ONNX Runtime takes FP16 from the graph, so its target stays float32.
    """
    import yaml

    from tasks.core.config import typed_config
    from tasks.parts.engines.runtimes import Precision, Runtime
    from tasks.parts.engines.target import Target

    file = REPOSITORY / "conf" / "target" / f"{case.target}.yaml"
    fields = yaml.safe_load(file.read_text(encoding="utf-8"))
    del fields["work_pool"]
    fields |= {"runtime_version": "any", "max_batch": case.max_batch, "min_agreement_db": 0.0}
    target: Target = typed_config(Target, fields, f"target.{case.target}")
    is_onnxruntime = target.runtime is Runtime.onnxruntime
    return target if is_onnxruntime else replace(target, precision=Precision(case.precision))


def write_checkpoint(case: EngineCase, file: Path) -> None:
    """Write a network as `train` configures it, with random weights and BatchNorm statistics of random images."""
    import torch

    from tasks.parts.networks.build import build_network
    from tasks.parts.networks.checkpoint import save_checkpoint
    from tasks.parts.networks.model_card import ModelCard

    config = stage_config(f"train.{case.network}").network
    torch.manual_seed(0)
    network = build_network(config, len(CLASSES)).train()
    with torch.no_grad():
        for _ in range(20):
            network(torch.randn(8, 3, 64, 64))
    card = ModelCard(config, CLASSES, (0.5,) * 3, (0.25,) * 3, case.height, case.width)
    save_checkpoint(file, network.eval(), card)


def export(case: EngineCase, checkpoint: Path, root: Path) -> Path:
    """Return the ONNX graph of a checkpoint, for precision f16 as convert_precision makes it."""
    from tasks.convert_precision import convert_precision
    from tasks.parts.networks.checkpoint import load_checkpoint
    from tasks.parts.onnx_graphs.export import export_graph
    from tasks.parts.onnx_graphs.graph import write_graph

    network, card = load_checkpoint(checkpoint)
    opset = stage_config("export_onnx").opset
    file = root / "model.onnx"
    write_graph(export_graph(network, card, height=case.height, width=case.width, opset=opset), file)
    if case.precision == "f32":
        return file
    config = replace(stage_config("convert_precision"), batch_size=1)
    (root / "f16").mkdir()
    convert_precision(config, model=file, data=root / "dataset", out=root / "f16")
    return root / "f16" / "model.onnx"


def build(target: "Target", model: Path, data: Path, out: Path) -> tuple[Path, Result]:
    """Build an engine; return its folder and values of the report."""
    from tasks.build_engine import build_engine
    from tasks.core.errors import BuildFailed
    from tasks.parts.data.dataset import calibration_images
    from tasks.parts.engines.manifest import EngineStatus

    out.mkdir()
    start = time.monotonic()
    report = build_engine(target, model=model, images=calibration_images(data), out=out)
    if report.status is not EngineStatus.built:
        raise BuildFailed(report.reason)
    found = {
        "build_s": time.monotonic() - start,
        "size_bytes": report.size_bytes,
        "agreement_db": report.agreement_db,
        "is_precision_ok": report.is_precision_ok,
        "provider": report.provider,
    }
    return out / "engine", found


def measure_speed(engine: Path, eager: Path, *, max_batch: int, device: str) -> Result:
    """Return latency, ratio to eager PyTorch, throughput and memory of an engine.

    The stage `benchmark` cannot be used: it identifies engines by file, and eager PyTorch has the same file in two
    precisions.
    """
    from tasks.parts.measuring.engine_process import open_processes

    free_before_mib = free_gpu_memory_mib() if device == "cuda" else None
    with open_processes({ENGINE: engine}, timeout_s=120) as alone:
        alone[ENGINE].wait_until_loaded()
        alone[ENGINE].warm_up(1, seconds=WARM_UP_S)
        memory_mib = None if free_before_mib is None else free_before_mib - free_gpu_memory_mib()
        with open_processes({CONTROL: engine, EAGER: eager}, timeout_s=120) as others:
            for process in others.values():
                process.wait_until_loaded()
                process.warm_up(1, seconds=WARM_UP_S)
            latency = race({**alone, **others})
        return latency | measure_throughput(alone[ENGINE], max_batch) | {"gpu_memory_mib": memory_mib}


def free_gpu_memory_mib() -> float:
    """Return the free memory of the GPU, also in containers where NVML attributes no memory to processes."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    return free / MIB


def race(processes: "dict[str, EngineProcess]") -> Result:
    """Time engine, control and eager PyTorch in the same rounds."""
    from tasks.parts.measuring.batch_latency import Windows, summarise
    from tasks.parts.measuring.engine_process import run_round
    from tasks.parts.measuring.race import compare_all

    shuffler = random.Random(0)
    rounds = [run_round(processes, 1, shuffler, burst_ms=BURST_MS, min_calls=1) for _ in range(NUM_ROUNDS)]
    found = summarise(
        [bursts[ENGINE] for bursts in rounds],
        batch=1,
        windows=Windows(num_rounds=2, tolerance=0.05),
        device=processes[ENGINE].time_on_device(1, num_iterations=TIMED_ON_DEVICE),
    )
    by_name = {name: [bursts[name] for bursts in rounds] for name in (EAGER, ENGINE, CONTROL)}
    [speedup], control = compare_all(by_name, controlled=ENGINE, num_comparisons=1)
    return {
        "latency_ms_p50": found.latency_ms_p50,
        "device_ms_p50": found.device_ms_p50,
        "aa_ratio_spread": control.spread,
        "eager_ms_p50": statistics.median(value for bursts in rounds for value in bursts[EAGER]),
        "speedup": speedup.factor,
        "speedup_low": speedup.low,
        "speedup_high": speedup.high,
    }


def measure_throughput(process: "EngineProcess", batch: int) -> Result:
    """Return images per second with several concurrent requests, and with one batch after the other."""
    load = process.load(1, concurrency=CONCURRENCY, seconds=LOAD_S, num_windows=LOAD_WINDOWS)
    process.warm_up(batch, seconds=WARM_UP_S)
    batch_ns = statistics.median(process.burst(batch, seconds=LOAD_S, min_calls=3))
    return {
        "concurrency": CONCURRENCY,
        "throughput_per_s": statistics.median(load.calls_per_s),
        "batch": batch,
        "batch_throughput_per_s": 1e9 * batch / batch_ns,
    }


def measure_training(case: TrainingCase) -> Result:
    """Train for some steps as `train` does; return the time per step and the peak GPU memory."""
    import torch

    from tasks.core.errors import TargetMismatch
    from tasks.parts.networks.build import build_network
    from tasks.parts.training.config import Accelerator, Precision
    from tasks.parts.training.loop import train_network

    is_gpu = case.device == "cuda"
    if is_gpu and not torch.cuda.is_available():
        raise TargetMismatch(f"torch {torch.__version__} finds no GPU that it can use")
    section = stage_config(f"train.{case.network}")
    trainer = replace(
        section.trainer,
        max_epochs=1,
        precision=Precision(case.precision),
        activation_checkpoints=["*"] if case.gradient_checkpointing else [],
        accelerator=Accelerator.gpu if is_gpu else Accelerator.cpu,
    )
    with tempfile.TemporaryDirectory() as folder:
        data, num_images = Path(folder, "dataset"), case.num_steps * trainer.batch_size
        manifest = write_random_dataset(data, case.height, case.width, {"train": num_images, "val": 1})
        torch.manual_seed(0)
        network = build_network(section.network, len(CLASSES))
        watch = StepWatch(is_gpu)
        train_network(network, watch.watched(manifest, trainer), data=data, config=trainer, out=Path(folder))
    peak = torch.cuda.max_memory_allocated() / MIB if is_gpu else None
    found = {"batch_size": trainer.batch_size, "peak_gpu_memory_mib": peak}
    return asdict(case) | found | watch.medians_ms()


class StepWatch:
    """Records when each training step begins and when its optimizer has finished."""

    def __init__(self, is_gpu: bool) -> None:
        self._is_gpu = is_gpu
        self._starts: list[float] = []
        self._computed_ms: list[float] = []

    def watched(self, manifest: "Manifest", trainer: Any) -> Any:
        """Return the objective of `train`, whose call marks the beginning of a step."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        from tasks.parts.training.losses import build_label_loss
        from tasks.parts.training.module import LabelObjective

        objective = LabelObjective(build_label_loss(trainer, manifest))
        objective.register_forward_pre_hook(lambda *_: self._starts.append(time.perf_counter()))
        register_optimizer_step_post_hook(lambda *_: self._end_step())
        return objective

    def medians_ms(self) -> Result:
        """Return the time of a whole step including its images, and of forward, backward and optimizer alone."""
        steps = [
            1000 * (later - start)
            for start, later in zip(
                self._starts[WARM_UP_STEPS:], self._starts[WARM_UP_STEPS + 1 :], strict=False
            )
        ]
        return {
            "step_ms_p50": statistics.median(steps),
            "compute_ms_p50": statistics.median(self._computed_ms[WARM_UP_STEPS:-1]),
        }

    def _end_step(self) -> None:
        import torch

        if self._is_gpu:
            torch.cuda.synchronize()
        self._computed_ms.append(1000 * (time.perf_counter() - self._starts[-1]))


def write_random_dataset(dataset: Path, height: int, width: int, counts: dict[str, int]) -> "Manifest":
    """Write a data set of noise; only its size matters."""
    import numpy as np

    from tasks.parts.data.dataset_writer import SplitBatches, batches_of, write_dataset
    from tasks.parts.data.input_card import Task

    generator = np.random.default_rng(0)
    splits = {}
    for split, count in counts.items():
        images_NHWC = generator.integers(0, 256, (count, height, width, 3), np.uint8)
        masks_NHW = generator.integers(0, len(CLASSES), (count, height, width), np.uint8)
        splits[split] = SplitBatches(count, [*batches_of(images_NHWC, masks_NHW)])
    return write_dataset(
        dataset,
        task=Task.segmentation,
        classes=CLASSES,
        height=height,
        width=width,
        source="noise",
        splits=splits,
    )
