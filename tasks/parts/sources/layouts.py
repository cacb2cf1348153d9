"""The layouts of segmentation data sets, each a function that lists its pairs of image and mask."""

from collections.abc import Callable
from pathlib import Path

from tasks.parts.sources.ade20k import list_ade20k
from tasks.parts.sources.cityscapes import list_cityscapes
from tasks.parts.sources.coco import list_coco
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.hf_dataset import list_hf_dataset
from tasks.parts.sources.mask_folder import list_folder
from tasks.parts.sources.pairs import Listing
from tasks.parts.sources.voc import list_voc

_LAYOUTS: dict[str, Callable[[Path, FolderConfig], Listing]] = {
    "folder": list_folder,
    "cityscapes": list_cityscapes,
    "voc": list_voc,
    "ade20k": list_ade20k,
    "coco": list_coco,
    "hf_dataset": list_hf_dataset,
}


def list_pairs(source: str, root: Path, config: FolderConfig) -> Listing:
    """List the images and masks of a data set; raise DataError if its layout is not as expected."""
    return _LAYOUTS[source](root, config)
