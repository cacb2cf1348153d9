"""Give a data set a metric of the user's own: a Python function that scores each image."""

import logging
from dataclasses import dataclass
from pathlib import Path

from tasks.core.environment import imported_versions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """Which function of the file."""

    function: str
    """Name of the function: (outputs [N, ...], labels [N, ...]) -> scores [N], 0..1."""
    file: str
    """The file, as the input: versions of the packages that it imports are in the key."""


@dataclass(frozen=True)
class Report:
    """The data set with the metric."""

    metric: str
    """Name of the metric in every report."""
    sha256: str
    """Of the file."""
    num_images: dict[str, int]
    """Number of images per split."""


def environment(cfg: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return imported_versions(
        file for file in [Path(cfg.file)] if file.is_file()
    )  # a missing input is told later


def attach_metric(cfg: Config, *, metric: Path, data: Path, out: Path) -> Report:
    """Write ``dataset/``: a copy of `data` with the file `metric`, whose function then scores everything.

    The file is a part of the data, and so are the versions of the packages that it imports: each stage that evaluates
    has their digests in its key.

    Raises ConfigError if the file has no such function.
    """
    from tasks.parts.data.dataset import METRIC_FILE
    from tasks.parts.data.dataset_writer import write_with_metric
    from tasks.parts.data.own_metric import open_metric

    open_metric(metric, cfg.function)
    manifest = write_with_metric(
        data, out / "dataset", metric, cfg.function, packages=imported_versions([metric])
    )
    logger.info("attach_metric: %s of %s", cfg.function, metric)
    return Report(cfg.function, manifest.files[METRIC_FILE], manifest.counts)
