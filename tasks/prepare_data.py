"""Check every file of a data set and write it in the canonical layout."""

import logging
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import Between
from tasks.core.environment import versions
from tasks.core.errors import ConfigError
from tasks.parts.sources.config import FolderConfig, ScenesConfig

if TYPE_CHECKING:
    from tasks.parts.data.dataset import Manifest
    from tasks.parts.data.dataset_writer import SplitBatches
    from tasks.parts.data.input_card import Task

logger = logging.getLogger(__name__)

_SHEET_SPLITS = ("train", "val", "test")
_SCENES_PER_SPLIT_ON_SHEET = 8


class Source(StrEnum):
    """Where the images come from."""

    digit_scenes = "digit_scenes"
    """Made from scans and photos that scikit-learn ships: tasks/parts/sources/digit_scenes.py."""
    folder = "folder"
    """A user's images and index masks: tasks/parts/sources/mask_folder.py."""
    class_folder = "class_folder"
    """A user's images, one folder per class: tasks/parts/sources/class_folder.py."""
    images = "images"
    """A user's images without labels: tasks/parts/sources/class_folder.py."""


@dataclass(frozen=True)
class Config:
    """Which data set, and the size to which all images are brought."""

    source: Source
    """Loader that reads `root`."""
    root: str
    """Folder with classes.yaml (and a user's images), relative to the repository."""
    seed: Annotated[int, Between(0, 2**32 - 1)]
    """Seed for the choice of scans, the scenes and, if a folder has no lists, the splits."""
    height: Annotated[int, Between(16, 8192)]
    """Rows of every image and mask after this stage; latency grows with height x width."""
    width: Annotated[int, Between(16, 8192)]
    """Columns of every image and mask after this stage."""
    scenes: ScenesConfig | None
    """What the scenes look like, for source digit_scenes only."""
    folder: FolderConfig | None
    """How the user's folder is read, for all sources except digit_scenes."""

    def __post_init__(self) -> None:
        path = PurePath(self.root)
        if not self.root or path.is_absolute() or ".." in path.parts or "\0" in self.root:
            raise ConfigError(
                f"root is {self.root!r}, expected a folder inside the repository, without '..'. "
                "Put the data set there, for example under data/."
            )
        is_drawn = self.source is Source.digit_scenes
        section, value = ("scenes", self.scenes) if is_drawn else ("folder", self.folder)
        if value is None:
            raise ConfigError(
                f"{section} is missing, and source is {self.source}. Choose the file "
                f"conf/data/{self.source}.yaml with data={self.source}."
            )


@dataclass(frozen=True)
class Report:
    """What the data set holds."""

    source: str
    classes: tuple[str, ...]
    height: int
    width: int
    num_images: dict[str, int]
    """Number of images per split."""
    pixel_share: dict[str, dict[str, float]]
    """Share of the pixels that are not ignored, or of the labelled images, by split and class."""
    mean: tuple[float, ...]
    """Mean of each channel in the train split, on a 0..1 scale."""
    std: tuple[float, ...]
    size_bytes: int
    """Size of all arrays together."""
    num_bad_images: int
    """Unreadable files that were skipped."""
    num_duplicates: int
    """Images of val or test that also occur in another split."""
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Loaded:
    """A source that passed its checks; nothing is written yet."""

    task: "Task | None"
    """Task of the labels; None without labels."""
    classes: tuple[str, ...]
    splits: "dict[str, SplitBatches]"
    num_bad_images: int
    num_duplicates: int
    warnings: tuple[str, ...]


def environment(_: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("numpy", "pillow", "scikit-learn")


def prepare_data(cfg: Config, *, root: Path, out: Path) -> Report:
    """Write `dataset/` (see tasks/parts/data/dataset.py) and, if there are masks, `contact_sheet.png`.

    Raises:
        DataError: a file of the source is missing, is damaged or contradicts another; nothing is written.
        ConfigError: more classes are configured than classes.yaml lists.
    """
    from tasks.parts.data.dataset_writer import write_dataset
    from tasks.parts.data.input_card import Task

    logger.info("%s from %s, %d x %d pixels", cfg.source, root, cfg.height, cfg.width)
    load = {Source.digit_scenes: _load_scenes, Source.folder: _load_folder}.get(cfg.source, _load_images)
    loaded = load(cfg, root)
    manifest = write_dataset(
        out / "dataset",
        task=loaded.task,
        classes=loaded.classes,
        height=cfg.height,
        width=cfg.width,
        source=str(cfg.source),
        splits=loaded.splits,
        channels=3 if cfg.folder is None else cfg.folder.channels,
    )
    absent: tuple[str, ...] = ()
    if loaded.task is Task.segmentation:
        _draw_samples(out)
        absent = _absent_class_warnings(manifest)
    warnings = (*loaded.warnings, *absent, *_flat_image_warnings(manifest))
    return _report(manifest, out, loaded.num_bad_images, loaded.num_duplicates, warnings)


def _report(
    manifest: "Manifest", out: Path, num_bad_images: int, num_duplicates: int, warnings: tuple[str, ...]
) -> Report:
    for warning in warnings:
        logger.warning("%s", warning)
    size_bytes = sum((out / "dataset" / name).stat().st_size for name in manifest.files)
    logger.info("%d images, %.1f MB, in %s", sum(manifest.counts.values()), size_bytes / 1e6, out / "dataset")
    return Report(
        source=manifest.source,
        classes=manifest.classes,
        height=manifest.height,
        width=manifest.width,
        num_images=manifest.counts,
        pixel_share={
            split: dict(zip(manifest.classes, shares, strict=True)) if shares else {}
            for split, shares in manifest.pixel_share.items()
        },
        mean=manifest.mean,
        std=manifest.std,
        size_bytes=size_bytes,
        num_bad_images=num_bad_images,
        num_duplicates=num_duplicates,
        warnings=warnings,
    )


def _load_scenes(cfg: Config, root: Path) -> _Loaded:
    from tasks.parts.data.dataset import SPLITS
    from tasks.parts.data.dataset_writer import SplitBatches
    from tasks.parts.data.input_card import Task
    from tasks.parts.sources.class_list import read_class_list
    from tasks.parts.sources.digit_scenes import draw_scenes

    scenes = cfg.scenes
    assert scenes is not None
    names = read_class_list(root).names
    if scenes.num_digits > len(names) - 1:
        raise ConfigError(
            f"prepare_data.scenes.num_digits = {scenes.num_digits}: {root / 'classes.yaml'} lists the "
            f"background and {len(names) - 1} digits. Lower the number or add names."
        )
    splits = {
        split: SplitBatches(
            scenes.num_scenes(split),
            draw_scenes(split, scenes, height=cfg.height, width=cfg.width, seed=cfg.seed),
        )
        for split in SPLITS
    }
    return _Loaded(Task.segmentation, names[: scenes.num_digits + 1], splits, 0, 0, ())


def _load_folder(cfg: Config, root: Path) -> _Loaded:
    from tasks.parts.data.dataset_writer import SplitBatches
    from tasks.parts.data.input_card import Task
    from tasks.parts.sources.mask_folder import read_batches, scan_folder

    folder = cfg.folder
    assert folder is not None
    content = scan_folder(root, folder, seed=cfg.seed)
    splits = {
        split: SplitBatches(
            len(pairs),
            read_batches(pairs, content.class_list, folder, height=cfg.height, width=cfg.width),
            content.groups[split],
        )
        for split, pairs in content.splits.items()
    }
    return _Loaded(
        Task.segmentation,
        content.class_list.names,
        splits,
        content.num_bad_images,
        content.num_duplicates,
        content.warnings,
    )


def _load_images(cfg: Config, root: Path) -> _Loaded:
    """Load images with one folder per class, or images without labels."""
    from tasks.parts.data.dataset_writer import SplitBatches
    from tasks.parts.data.input_card import Task
    from tasks.parts.sources.class_folder import read_image_batches, scan_images

    folder, task = cfg.folder, Task.classification if cfg.source is Source.class_folder else None
    assert folder is not None
    content = scan_images(root, folder, seed=cfg.seed, is_labelled=task is not None)
    splits = {
        split: SplitBatches(
            len(files),
            read_image_batches(files, folder, height=cfg.height, width=cfg.width),
            content.groups[split],
        )
        for split, files in content.splits.items()
    }
    return _Loaded(
        task, content.classes, splits, content.num_bad_images, content.num_duplicates, content.warnings
    )


def _draw_samples(out: Path) -> None:
    from tasks.parts.data.dataset import open_split, read_manifest
    from tasks.parts.sources.contact_sheet import draw_contact_sheet

    samples = {}
    for split in _SHEET_SPLITS:
        images_NHWC, masks_NHW = open_split(out / "dataset", split)
        samples[split] = images_NHWC[:_SCENES_PER_SPLIT_ON_SHEET], masks_NHW[:_SCENES_PER_SPLIT_ON_SHEET]
    draw_contact_sheet(
        out / "contact_sheet.png", classes=read_manifest(out / "dataset").classes, samples=samples
    )


def _flat_image_warnings(manifest: "Manifest") -> tuple[str, ...]:
    from tasks.parts.data.dataset_writer import MIN_STD

    if max(manifest.std) > MIN_STD:
        return ()
    return ("all pixels of the train images have the same colour: check how the images were exported.",)


def _absent_class_warnings(manifest: "Manifest") -> tuple[str, ...]:
    """Return one warning for each split in which some class has no pixel."""
    warnings = []
    for split, shares in manifest.pixel_share.items():
        absent = [name for name, share in zip(manifest.classes, shares, strict=True) if share == 0]
        if absent:
            effect = {"train": "cannot be learned", "calibration": "is not calibrated for"}.get(
                split, "is left out of the mean IoU"
            )
            warnings.append(f"split {split} has no pixel of {', '.join(absent)}: an absent class {effect}.")
    return tuple(warnings)
