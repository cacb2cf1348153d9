"""List Pascal VOC 2007 or 2012 as it is downloaded: the folder VOCdevkit/VOC2012, or one that has the same inside.

<root>/JPEGImages/<name>.jpg
<root>/SegmentationClass/<name>.png            palette indices: 0 background, 1 .. 20, 255 the ignored border
<root>/ImageSets/Segmentation/train.txt, val.txt

The labels of the official test split are withheld: the official val split is `test`, and val is taken from train.
Masks that were saved as colours are read by the colours of VOC's palette.
"""

from pathlib import Path

from tasks.core.errors import DataError
from tasks.parts.data.class_table import ClassTable, Colour
from tasks.parts.data.masks import MaskFile
from tasks.parts.sources.class_list import has_class_list, read_class_list
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.file_names import list_files
from tasks.parts.sources.pairs import Listing, Pair, match_masks
from tasks.parts.sources.splits import read_name_list

_NAMES = (
    "background",
    "aeroplane",
    "bicycle",
    "bird",
    "boat",
    "bottle",
    "bus",
    "car",
    "cat",
    "chair",
    "cow",
    "diningtable",
    "dog",
    "horse",
    "motorbike",
    "person",
    "pottedplant",
    "sheep",
    "sofa",
    "train",
    "tvmonitor",
)

_SPLITS = {"train": "train", "val": "test"}
"""Official split -> split of the data set."""


def _voc_colour(index: int) -> Colour:
    """Return the colour of an index in VOC's palette: its bits, three by three, from the top of each channel."""
    channels = [0, 0, 0]
    for position in range(8):
        for channel in range(3):
            channels[channel] |= (index >> (3 * position + channel) & 1) << (7 - position)
    red, green, blue = channels
    return red, green, blue


VOC = ClassTable(
    names=_NAMES,
    place="the 21 classes of VOC",
    ids=tuple((index,) for index in range(len(_NAMES))),
    colours=tuple(_voc_colour(index) for index in range(len(_NAMES))),
    ignore_ids=frozenset({255}),
    ignore_colours=frozenset({_voc_colour(255)}),
)


def list_voc(root: Path, config: FolderConfig) -> Listing:
    """List the images of the official train and val lists."""
    table = read_class_list(root) if has_class_list(root) else VOC
    images = list_files(root / "JPEGImages", (".jpg", ".jpeg", ".png"), root=root)
    files = list_files(root / "SegmentationClass", (".png",), root=root)
    splits = {}
    for official, split in _SPLITS.items():
        path = root / "ImageSets" / "Segmentation" / f"{official}.txt"
        if not path.is_file():
            raise DataError(
                f"{path}: not found. Expected the list of the images of the official {official} split "
                "(prepare_data.root is the folder that holds JPEGImages)."
            )
        splits[split] = read_name_list(path, root, set(images))
    names = sorted({name for listed in splits.values() for name in listed})
    match_masks(
        {name: images[name] for name in names},
        {name: MaskFile(files[name]) for name in names if name in files},
        config=config,
        image_place=f"{root / 'JPEGImages'}/{{name}}.jpg",
        mask_place=f"{root / 'SegmentationClass'}/{{name}}.png",
    )
    pairs = [Pair(name, images[name], MaskFile(files[name]) if name in files else None) for name in names]
    return Listing(table, tuple(pairs), splits)
