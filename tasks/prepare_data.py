"""Check every file of a data set and write it in the canonical layout."""

import logging
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import Between
from tasks.core.environment import versions
from tasks.core.errors import ConfigError
from tasks.parts.data.image_files import ResizeMode
from tasks.parts.sources.config import FolderConfig, ScenesConfig

if TYPE_CHECKING:
    from tasks.parts.data.dataset import Manifest
    from tasks.parts.data.dataset_writer import SplitBatches
    from tasks.parts.data.input_card import Task
    from tasks.parts.data.reading import Reading
    from tasks.parts.data.source_files import ReadingRules, SourceRow
    from tasks.parts.sources.division import Division
    from tasks.parts.sources.duplicates import Duplicates

logger = logging.getLogger(__name__)

SPLITS_FILE = "splits.csv"

_SHEET_SPLITS = ("train", "val", "test")
_SCENES_PER_SPLIT_ON_SHEET = 8


class Source(StrEnum):
    """Where the images come from."""

    digit_scenes = "digit_scenes"
    """Made from scans and photos that scikit-learn ships: tasks/parts/sources/digit_scenes.py."""
    folder = "folder"
    """A user's images and masks: tasks/parts/sources/mask_folder.py."""
    cityscapes = "cityscapes"
    """Cityscapes as it is downloaded: tasks/parts/sources/cityscapes.py."""
    voc = "voc"
    """Pascal VOC as it is downloaded: tasks/parts/sources/voc.py."""
    ade20k = "ade20k"
    """ADE20K as it is downloaded: tasks/parts/sources/ade20k.py."""
    coco = "coco"
    """COCO as it is downloaded, panoptic masks or instances: tasks/parts/sources/coco.py."""
    hf_dataset = "hf_dataset"
    """A Hugging Face data set on disk, Arrow or Parquet files: tasks/parts/sources/hf_dataset.py."""
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
    """Folder with classes.yaml (and a user's images), absolute or relative to the repository."""
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
    copy: bool = True
    """Whether images and masks are written as arrays. False: their files are listed, and read where they are."""
    mean: list[float] | None = None
    """Mean of each channel by which images are normalised, on a 0..1 scale; None takes that of the train split.
    Finished weights need those with which they were trained."""
    std: list[float] | None = None
    """Standard deviation of each channel, likewise."""

    def __post_init__(self) -> None:
        if not self.root or ".." in PurePath(self.root).parts or "\0" in self.root:
            raise ConfigError(
                f"root is {self.root!r}, expected a folder without '..'. Put the data set inside the repository, for "
                "example under data/, or give its absolute path."
            )
        is_drawn = self.source is Source.digit_scenes
        section, value = ("scenes", self.scenes) if is_drawn else ("folder", self.folder)
        if value is None:
            raise ConfigError(
                f"{section} is missing, and source is {self.source}. Choose the file "
                f"conf/data/{self.source}.yaml with data={self.source}."
            )
        self._check_normalisation(3 if self.folder is None else self.folder.channels)
        if self.folder and self.folder.resize_mode is ResizeMode.windows:
            self._check_windows(self.folder)
        if self.folder is not None:
            self._check_folder(self.folder)
        if not self.copy and self.source is Source.digit_scenes:
            raise ConfigError(
                "copy is false, and source is digit_scenes: scenes are drawn, so there are no files to read in place "
                "of a copy. Set copy to true."
            )

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and standard deviation of each channel; None if those of the images are to be taken."""
        return None if self.mean is None or self.std is None else (tuple(self.mean), tuple(self.std))

    def _check_normalisation(self, channels: int) -> None:
        if (self.mean is None) != (self.std is None):
            raise ConfigError(f"mean is {self.mean} and std is {self.std}, expected both or none.")
        if self.mean is None or self.std is None:
            return
        if not len(self.mean) == len(self.std) == channels:
            raise ConfigError(
                f"mean has {len(self.mean)} items and std {len(self.std)}, expected one for each of the {channels} "
                "channels."
            )
        if not all(0 <= mean <= 1 for mean in self.mean) or not all(0 < std <= 1 for std in self.std):
            raise ConfigError(
                f"mean is {self.mean} and std is {self.std}, expected values between 0 and 1, std above 0: divide "
                "those for pixel values of 0 to 255 by 255."
            )

    def _check_windows(self, folder: FolderConfig) -> None:
        if self.source in (Source.class_folder, Source.images):
            raise ConfigError(
                f"folder.resize_mode is windows, and source is {self.source}: windows need masks. Set it to "
                "resize or crop."
            )
        if (folder.window_overlap or 0) >= min(self.height, self.width):
            raise ConfigError(
                f"folder.window_overlap is {folder.window_overlap}, expected less than a window of "
                f"{self.height} x {self.width}. Lower it, or raise height and width."
            )

    def _check_folder(self, folder: FolderConfig) -> None:
        """Check what belongs to one source."""
        owned = {
            Source.coco: ("annotations", folder.annotations),
            Source.hf_dataset: ("columns", folder.columns),
        }
        for source, (key, value) in owned.items():
            if (value is not None) != (self.source is source):
                found = "missing" if value is None else f"of source {source} only"
                raise ConfigError(
                    f"folder.{key} is {found}, and source is {self.source}. Choose the file "
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
    """Number of images per split; of windows, if images are cut into windows."""
    num_unlabelled: int
    """Number of those of train that have no labels."""
    pixel_share: dict[str, dict[str, float]]
    """Share of the pixels that are not ignored, or of the labelled images, by split and class."""
    mean: tuple[float, ...]
    """Mean by which each channel is normalised, on a 0..1 scale."""
    std: tuple[float, ...]
    """Standard deviation by which each channel is normalised."""
    size_bytes: int
    """Size of all arrays together."""
    num_bad_images: int
    """Unreadable files that were skipped."""
    num_duplicates: int
    """Images of val or test whose pixels also occur in another split."""
    num_near_duplicates: int
    """Further images of val or test that are nearly the same as one of another split, by their perceptual hashes."""
    split_origins: dict[str, str]
    """Where each of train, val and test comes from: a list, a folder, or a choice; empty for scenes."""
    num_groups: int
    """Groups of several images, which stay together in one split."""
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class _Loaded:
    """A source that passed its checks; nothing is written yet."""

    task: "Task | None"
    """Task of the labels; None without labels."""
    classes: tuple[str, ...]
    splits: "dict[str, SplitBatches]"
    num_bad_images: int = 0
    duplicates: "Duplicates | None" = None
    division: "Division | None" = None
    warnings: tuple[str, ...] = ()
    types: tuple[str, ...] = ("uint8",)
    """numpy's names of the types of the values in the files."""
    rules: "ReadingRules | None" = None
    """How listed files are read again; None if all are copied and no originals are known."""
    originals: "dict[str, list[SourceRow]] | None" = None
    """Files of the splits that are copied, on which engines are judged, too."""


_LIBRARIES = {Source.coco: ("pycocotools",), Source.hf_dataset: ("pyarrow",)}
"""Libraries that shape the output of one source only."""


def environment(cfg: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    files = () if cfg.source is Source.digit_scenes else ("imagecodecs", "tifffile", "imagehash", "scipy")
    return versions("numpy", "pillow", "scikit-learn", *files, *_LIBRARIES.get(cfg.source, ()))


def prepare_data(cfg: Config, *, root: Path, out: Path) -> Report:
    """Write `dataset/` (see tasks/parts/data/dataset.py), `splits.csv` and, if there are masks, `contact_sheet.png`.

    `splits.csv` has a line for each image file: its path below the root, its split and its group.

    Raises:
        DataError: a file of the source is missing, is damaged or contradicts another; nothing is written.
        ConfigError: more classes are configured than classes.yaml lists.
    """
    from tasks.parts.data.dataset_writer import write_dataset
    from tasks.parts.data.input_card import Task
    from tasks.parts.sources.division import write_division

    logger.info("%s from %s, %d x %d pixels", cfg.source, root, cfg.height, cfg.width)
    loaders = {
        Source.digit_scenes: _load_scenes,
        Source.class_folder: _load_images,
        Source.images: _load_images,
    }
    loaded = loaders.get(cfg.source, _load_pairs)(cfg, root)
    manifest = write_dataset(
        out / "dataset",
        task=loaded.task,
        classes=loaded.classes,
        height=cfg.height,
        width=cfg.width,
        source=str(cfg.source),
        splits=loaded.splits,
        channels=3 if cfg.folder is None else cfg.folder.channels,
        normalisation=cfg.normalisation,
        rules=loaded.rules,
        reading=_reading(cfg.folder, loaded.types),
        originals=loaded.originals,
    )
    absent: tuple[str, ...] = ()
    if loaded.task is Task.segmentation:
        _draw_samples(out)
        absent = _absent_class_warnings(manifest)
    write_division(out / SPLITS_FILE, loaded.division.rows if loaded.division else ())
    warnings = (*loaded.warnings, *absent, *_flat_image_warnings(manifest))
    return _report(manifest, out, loaded, warnings)


def _reading(folder: FolderConfig | None, types: tuple[str, ...]) -> "Reading | None":
    """Return how files become images; None for scenes, which are drawn at their size."""
    from tasks.parts.data.reading import Reading

    if folder is None:
        return None
    low_high = folder.value_range
    return Reading(
        types=types,
        value_range=None if low_high is None else (low_high[0], low_high[1]),
        resize_mode=folder.resize_mode,
        window_overlap=folder.window_overlap if folder.resize_mode is ResizeMode.windows else None,
    )


def _report(manifest: "Manifest", out: Path, loaded: _Loaded, warnings: tuple[str, ...]) -> Report:
    division, duplicates = loaded.division, loaded.duplicates
    origins = division.origins if division else {}
    for split, origin in origins.items():
        logger.info("%s: %s", split, origin)
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
        num_unlabelled=manifest.num_unlabelled,
        pixel_share={
            split: dict(zip(manifest.classes, shares, strict=True)) if shares else {}
            for split, shares in manifest.pixel_share.items()
        },
        mean=manifest.mean,
        std=manifest.std,
        size_bytes=size_bytes,
        num_bad_images=loaded.num_bad_images,
        num_duplicates=duplicates.num_equal if duplicates else 0,
        num_near_duplicates=duplicates.num_near if duplicates else 0,
        split_origins=origins,
        num_groups=division.num_groups if division else 0,
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
    return _Loaded(Task.segmentation, names[: scenes.num_digits + 1], splits)


def _load_pairs(cfg: Config, root: Path) -> _Loaded:
    """Load images and masks of a layout."""
    from tasks.parts.data.input_card import Task
    from tasks.parts.sources.batches import copied_splits, listed_splits, refuse_embedded, rules_of_pairs
    from tasks.parts.sources.layouts import list_pairs
    from tasks.parts.sources.listed_files import Size
    from tasks.parts.sources.originals import originals_of_pairs
    from tasks.parts.sources.pairs import check_pairs

    folder = cfg.folder
    assert folder is not None
    listing = list_pairs(str(cfg.source), root, folder)
    if not cfg.copy:
        refuse_embedded(listing)
    content = check_pairs(root, listing, folder, seed=cfg.seed)
    size = Size(cfg.height, cfg.width)
    originals = originals_of_pairs(content, root) if cfg.copy else {}
    return _Loaded(
        Task.segmentation,
        content.table.names,
        copied_splits(content, folder, size) if cfg.copy else listed_splits(content, folder, size, root),
        content.num_bad_images,
        content.duplicates,
        content.division,
        content.warnings,
        content.types,
        None if cfg.copy and not originals else rules_of_pairs(content, folder, size, root),
        originals,
    )


def _load_images(cfg: Config, root: Path) -> _Loaded:
    """Load images with one folder per class, or images without labels."""
    from tasks.parts.data.input_card import Task
    from tasks.parts.sources.class_folder import scan_images, split_images
    from tasks.parts.sources.listed_files import COPIED, Size, reading_rules
    from tasks.parts.sources.originals import originals_of_images

    folder, task = cfg.folder, Task.classification if cfg.source is Source.class_folder else None
    assert folder is not None
    content = scan_images(root, folder, seed=cfg.seed, is_labelled=task is not None)
    size = Size(cfg.height, cfg.width)
    splits = {
        split: split_images(content, split, folder, size, root=None if cfg.copy or split in COPIED else root)
        for split in content.splits
    }
    return _Loaded(
        task,
        content.classes,
        splits,
        content.num_bad_images,
        content.duplicates,
        content.division,
        content.warnings,
        content.types,
        reading_rules(folder, size, root, None, None),
        originals_of_images(content, root) if cfg.copy else {},
    )


def _draw_samples(out: Path) -> None:
    from tasks.parts.data.contact_sheet import draw_contact_sheet
    from tasks.parts.data.dataset import open_split, read_manifest

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
    from tasks.parts.sources.class_list import in_quotes

    warnings = []
    for split, shares in manifest.pixel_share.items():
        absent = [name for name, share in zip(manifest.classes, shares, strict=True) if share == 0]
        if absent:
            effect = {"train": "cannot be learned", "calibration": "is not calibrated for"}.get(
                split, "is left out of the mean IoU"
            )
            warnings.append(f"split {split} has no pixel of {in_quotes(absent)}: an absent class {effect}.")
    return tuple(warnings)
