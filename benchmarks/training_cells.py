"""Define what `benchmarks.training` measures: networks, practices, and one training of some steps in this process.

Heavy packages are imported in the functions: the command starts a process for each training and needs none itself.
"""

import dataclasses
import multiprocessing
import resource
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_cells import MIB, REPOSITORY, stage_config
from tasks.parts.networks.config import NetworkConfig, NetworkName

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tasks.parts.training.config import TrainerConfig
    from tasks.parts.training.module import Batch

Result = dict[str, Any]

PLAIN, CONTROL = "plain", "plain, again"
FIRST, CHILDREN, NESTED = "checkpoints, first stages", "checkpoints, ['*']", "checkpoints, nested"
MAPPED = "own mappings"
SCENES, PHOTOS = "arrays", "JPEGs of 2048x1024"
WARM_UP_STEPS = 3
"""Steps that are not timed: the first ones choose kernels and allocate memory."""


@dataclass(frozen=True)
class Subject:
    """A network, and where its activations can be computed again."""

    config: NetworkConfig
    first_stages: list[str]
    """The modules with the largest maps."""
    nested: list[str]
    """Small modules, of which one at a time is computed again."""


NETWORKS: Mapping[str, Subject] = {
    "deeplabv3plus": Subject(  # the default student
        NetworkConfig(NetworkName.deeplabv3plus, 1.0, 0.5, depthwise=False),
        ["stem", "low"],
        ["stem.*", "low.*", "backbone.*.*", "pyramid.*", "pyramid.atrous.*", "decoder.*"],
    ),
    "mobile_unet": Subject(
        NetworkConfig(NetworkName.mobile_unet, 0.5, 1.0, depthwise=False),
        ["stem", "encoder.0", "encoder.1"],
        ["stem", "encoder.*.*", "decoder.*"],
    ),
    "segformer": Subject(  # B0
        NetworkConfig(NetworkName.segformer, 1.0, 1.0, depthwise=False),
        ["segformer.stages.0"],
        ["segformer.stages.*.patch_embeddings", "segformer.stages.*.blocks.*"],
    ),
}


@dataclass(frozen=True)
class Cell:
    """Some steps of a training, in a process of their own."""

    network: str
    height: int
    width: int
    batch_size: int
    num_steps: int
    practice: str = PLAIN
    source: str = SCENES
    """Where its images come from."""
    num_workers: int | None = 0
    is_mapped: bool = False
    """Whether each tensor from 1 MiB on has pages of its own, which go back to the system with it."""

    @property
    def name(self) -> str:
        """Name of its files."""
        workers = "measured" if self.num_workers is None else self.num_workers
        text = f"{self.network} {self.size} {self.title} {self.source} {workers} {self.num_steps}"
        return "".join(sign if sign.isalnum() else "_" for sign in text.replace("*", "each"))

    @property
    def title(self) -> str:
        """What is practised, and how memory is allocated."""
        return f"{self.practice}, {MAPPED}" if self.is_mapped else self.practice

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its process, for glibc."""
        return {"MALLOC_MMAP_THRESHOLD_": str(MIB)} if self.is_mapped else {}

    @property
    def size(self) -> str:
        """Images of a step."""
        return f"{self.height}x{self.width}x{self.batch_size}"

    @property
    def num_images(self) -> int:
        """Images that all steps take."""
        return self.batch_size * (self.num_steps + 1)

    def trainer(self) -> "TrainerConfig":
        """Return ``train.baseline.trainer`` with this practice."""
        from tasks.parts.training.config import Accelerator, MemoryFormat, Precision

        subject = NETWORKS[self.network]
        practices: dict[str, dict[str, Any]] = {
            PLAIN: {},
            CONTROL: {},
            "bf16_mixed": {"precision": Precision.bf16_mixed},
            "contiguous": {"memory_format": MemoryFormat.contiguous},
            FIRST: {"activation_checkpoints": subject.first_stages},
            CHILDREN: {"activation_checkpoints": ["*"]},
            NESTED: {"activation_checkpoints": subject.nested},
        }
        trainer: TrainerConfig = replace(
            stage_config("train.baseline").trainer,
            **practices[self.practice],
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            max_epochs=1,
            accelerator=Accelerator.cpu,
        )
        return trainer


PRACTICES = (PLAIN, CONTROL, "bf16_mixed", "contiguous", FIRST, CHILDREN, NESTED)
"""What is compared; plain is float32 in channels_last, and its repetition shows the noise of the machine."""


def write_scenes(out: Path, height: int, width: int, num_images: int) -> None:
    """Draw digits on photos as the default data set does."""
    from tasks.prepare_data import prepare_data

    cfg = stage_config("prepare_data")
    scenes = replace(cfg.scenes, num_train=num_images, num_val=8, num_test=8, num_calibration=8)
    prepare_data(replace(cfg, height=height, width=width, scenes=scenes), root=REPOSITORY / cfg.root, out=out)


class Watch:
    """Records the loss of each step, and the memory of the process before the first one."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.before_mib: dict[str, float] = {}
        self.num_workers, self.workers_mib = 0, 0.0

    def train(self, config: Any, *, data: Path, out: Path) -> None:
        """Train as the stage does, and watch its objective."""
        from tasks.parts.training.loop import train_network

        network, objective = new_training(config.network, config.trainer, data)
        objective.register_forward_pre_hook(lambda *_: self._before_step())
        objective.register_forward_hook(lambda _module, _inputs, loss: self.losses.append(loss.detach()))
        train_network(network, objective, data=data, config=config.trainer, out=out)

    def _before_step(self) -> None:
        if not self.losses:
            self.before_mib = resident_mib()
        elif len(self.losses) == WARM_UP_STEPS - 1:
            self.num_workers, self.workers_mib = _data_workers()


def _data_workers() -> tuple[int, float]:
    """Return their number, and the MiB that they share with no other process."""
    import psutil

    workers = [psutil.Process(process.pid) for process in multiprocessing.active_children()]
    return len(workers), sum(worker.memory_full_info().uss for worker in workers) / MIB


def resident_mib() -> dict[str, float]:
    """Return what is resident of this process: its own pages (RssAnon), those of files (RssFile), and their sum."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    values = dict(line.split(":", 1) for line in lines)
    return {key: int(values[key].split()[0]) / 1024 for key in ("VmRSS", "RssAnon", "RssFile")}


def new_training(
    network: NetworkConfig, trainer: "TrainerConfig", data: Path
) -> "tuple[nn.Module, nn.Module]":
    """Return network and objective as ``train`` makes them."""
    import torch

    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.networks.build import build_network
    from tasks.parts.training.losses import build_label_loss
    from tasks.parts.training.module import LabelObjective

    manifest = read_manifest(data)
    torch.manual_seed(trainer.seed)
    built = build_network(network, len(manifest.classes), size=(manifest.height, manifest.width))
    return built, LabelObjective(build_label_loss(trainer, manifest))


def measure(cell: Cell, data: Path) -> Result:
    """Train for the steps of a cell; return the times of the later ones, all losses, and memory.

    `growth_mib` is the peak minus what was resident before the first step, without pages of files: kernels and images
    that are first touched later are mapped from files.
    """
    from tasks.parts.timelines.training import Phase, record_training

    watch = Watch()
    config = replace(
        stage_config("train.baseline"), network=NETWORKS[cell.network].config, trainer=cell.trainer()
    )
    timeline = record_training(watch.train, config, {"data": data}, num_steps=cell.num_steps)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    files_mib = resident_mib()["RssFile"] - watch.before_mib["RssFile"]
    timed = timeline.steps[WARM_UP_STEPS:]
    waits_us = [
        sum(phase.duration_us for phase in step.phases if phase.name == Phase.data_wait) for step in timed
    ]
    return {
        "step_ms": [round((step.end_us - step.start_us) / 1000, 3) for step in timed],
        "data_wait_ms": [round(wait_us / 1000, 3) for wait_us in waits_us],
        "losses": [loss.item() for loss in watch.losses],
        "peak_mib": round(peak_mib, 1),
        "before_mib": round(watch.before_mib["VmRSS"], 1),
        "growth_mib": round(peak_mib - watch.before_mib["VmRSS"] - max(0.0, files_mib), 1),
        "num_workers": watch.num_workers,
        "workers_mib": round(watch.workers_mib, 1),
    }


def account(cell: Cell, data: Path) -> Result:
    """Count the memory of a cell's training by purpose, in bytes."""
    from tasks.parts.training.memory_account import account_memory

    trainer = cell.trainer()
    network, objective = new_training(NETWORKS[cell.network].config, trainer, data)
    found = account_memory(network, objective, first_batch(trainer, data), trainer)
    return dataclasses.asdict(found) | {"total_bytes": found.total_bytes}


def first_batch(trainer: "TrainerConfig", data: Path) -> "Batch":
    """Return the images of a step as the objective sees them."""
    import torch

    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.training.augmentation import Views
    from tasks.parts.training.module import Batch
    from tasks.parts.training.split_dataset import SplitDataset

    manifest = read_manifest(data)
    loaded = SplitDataset(data, "train", manifest).__getitems__([*range(trainer.batch_size)])
    views_N = torch.zeros_like(loaded[2])
    images_NCHW, masks_NHW = Views(trainer, manifest)(*loaded, views_N=views_N)
    return Batch(images_NCHW, masks_NHW, loaded[2], views_N)
