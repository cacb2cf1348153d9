"""Callbacks that record losses, accuracy and the memory of the data workers during training."""

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
from tasks.parts.training.module import SegmentationModule

logger = logging.getLogger(__name__)

_DATA_WORKER_DIED = re.compile(
    r"DataLoader worker \(pid(?:\(s\))? (\d+)[^)]*\) (?:is killed by signal: [\w ]+|exited unexpectedly)"
)

_WORKER_ENDS_WITHIN_S = 5


class History(Callback):
    """Writes one line per epoch to a CSV file and to the log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.rows: list[dict[str, float]] = []

    def state_dict(self) -> dict[str, Any]:
        """Keep the rows in the checkpoint, so that a resumed run writes all of them."""
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the rows of the interrupted run."""
        self.rows = list(state_dict["rows"])

    def on_validation_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Add the epoch that was just validated."""
        assert isinstance(pl_module, SegmentationModule)
        row = {
            "epoch": trainer.current_epoch + 1,
            "loss": round(pl_module.epoch_loss(), 6),
            "val_miou": round(float(trainer.callback_metrics["val_miou"]), 6),
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
        }
        self.rows.append(row)
        if not trainer.is_global_zero:
            return
        logger.info(
            "epoch %d/%s: loss %.4f, val mIoU %.4f",
            row["epoch"],
            trainer.max_epochs,
            row["loss"],
            row["val_miou"],
        )
        with self._path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(row), lineterminator="\n")
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
