"""Callbacks that record losses, accuracy, speed and the memory of the data workers during training."""

import contextlib
import csv
import logging
import multiprocessing
import os
import re
import signal
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tasks.parts.training.lightning_imports import Callback, lightning
from tasks.parts.training.module import MIOU, SCORE, SegmentationModule
from tasks.parts.training.plot import BY_MIOU, Score, draw_training
from tasks.parts.training.speed import StepClock, peak_memory_mib

logger = logging.getLogger(__name__)

_DATA_WORKER_DIED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (\d+)[^)]*\) (?:is killed by signal: [\w ]+|exited unexpectedly)"
)

_WORKER_ENDS_WITHIN_S = 5

_MAX_WAIT_SHARE = 0.1
_MIN_WAIT_S = 1.0
"""Shorter waits of an epoch are not worth a warning."""


class History(Callback):
    """Writes one line per validated epoch to a CSV file and to the log, and draws them when the training ends.

    Speed and waits are measured, so they differ from run to run: by the first rank, since the previous line.
    """

    def __init__(self, path: Path, metric: str | None = None) -> None:
        """`metric` names the user's own, which has a column beside that of the mIoU."""
        self._path = path
        self._score = BY_MIOU if metric is None else Score(f"val_{metric}", metric)
        self._clock = StepClock()
        self._is_first_line, self._has_warned = True, False
        self.rows: list[dict[str, float]] = []

    def state_dict(self) -> dict[str, Any]:
        """Keep the rows in the checkpoint, so that a resumed run writes all of them."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the rows of the interrupted run."""
        self.rows = list(state_dict["rows"])

    def on_train_epoch_start(self, *_: Any) -> None:
        """Wait for the first batch."""
        self._clock.resume()

    def on_train_batch_start(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the images of a batch over all ranks, whose batches have the same size."""
        self._clock.start_step(len(batch[0]) * trainer.world_size)

    def on_train_batch_end(self, *_: Any) -> None:
        """Wait for the next batch."""
        self._clock.end_step()

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Add the epoch that was just validated."""
        assert isinstance(pl_module, SegmentationModule)
        row = {
            "epoch": trainer.current_epoch + 1,
            "loss": round(pl_module.epoch_loss(), 6),
            MIOU: round(float(trainer.callback_metrics[MIOU]), 6),
            self._score.column: round(float(trainer.callback_metrics[SCORE]), 6),
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
            "images_per_s": round(self._clock.images_per_s, 2),
            "data_wait_share": round(self._clock.wait_share, 4),
            "peak_memory_mib": round(peak_memory_mib(pl_module.device), 1),
        }
        self.rows.append(row)
        if trainer.is_global_zero:
            logger.info(
                "epoch %d/%s: loss %.4f, val %s %.4f, %.1f images/s",
                row["epoch"],
                trainer.max_epochs,
                row["loss"],
                self._score.title,
                row[self._score.column],
                row["images_per_s"],
            )
            self._warn_of_waits(pl_module.num_workers or 0)
            self._write()
        self._is_first_line = False
        self._clock.reset()
        self._clock.resume()

    def on_fit_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Draw the table, and write it where a run that resumed after the last epoch has none."""
        if trainer.is_global_zero and self.rows:
            if not self._path.exists():
                self._write()
            draw_training(self.rows, self._path.with_name("training.png"), self._score)

    def _warn_of_waits(self, num_workers: int) -> None:
        """Say once that data is the bottleneck. The epoch in which the workers start is not judged."""
        clock = self._clock
        is_starting = self._is_first_line and num_workers > 0
        if (
            self._has_warned
            or is_starting
            or clock.wait_s < _MIN_WAIT_S
            or clock.wait_share <= _MAX_WAIT_SHARE
        ):
            return
        self._has_warned = True
        logger.warning(
            "the training waits for data %.0f %% of the time. Raise trainer.num_workers (now %d, with %d CPU cores); "
            "if that does not help, the disk or the decoding of the images is the limit.",
            100 * clock.wait_share,
            num_workers,
            os.cpu_count(),
        )

    def _write(self) -> None:
        with self._path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(self.rows[-1]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)


class WorkerMemory(Callback):
    """Records the memory of each data worker, which can no longer be read once the worker is killed (Linux)."""

    def __init__(self) -> None:
        self._workers: dict[int, BaseProcess] = {}
        self._rss_mib: dict[int, int] = {}

    def on_train_batch_end(self, *_: Any) -> None:
        """Record the memory of the workers that are alive."""
        for worker in multiprocessing.active_children():
            with contextlib.suppress(OSError):
                num_pages = int(Path(f"/proc/{worker.pid}/statm").read_text(encoding="ascii").split()[1])
                if num_pages and worker.pid:
                    self._workers[worker.pid] = worker
                    self._rss_mib[worker.pid] = num_pages * os.sysconf("SC_PAGE_SIZE") >> 20

    def describe_killed(self, error: Exception) -> str | None:
        """Return a sentence about the worker whose death caused this training error, or None."""
        named = _DATA_WORKER_DIED.match(str(error))
        if named:
            what, pid = named[0], int(named[1])
        elif isinstance(error, OSError | EOFError):
            # A tensor is handed over through a connection, which may break before torch notices the worker's end.
            wait([worker.sentinel for worker in self._workers.values()], timeout=_WORKER_ENDS_WITHIN_S)
            ends = {pid: worker.exitcode or 0 for pid, worker in self._workers.items()}
            pid = next((pid for pid, end in ends.items() if end < 0), 0)
            if not pid:
                return None
            what = f"DataLoader worker (pid {pid}) was killed by {signal.Signals(-ends[pid]).name}"
        else:
            return None
        return f"{what}; it held {self._rss_mib.get(pid, 'an unknown number of')} MiB when last seen."
