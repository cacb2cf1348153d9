"""List Cityscapes as it is downloaded (leftImg8bit_trainvaltest.zip and gtFine_trainvaltest.zip).

<root>/leftImg8bit/<train|val>/<city>/<city>_<sequence>_<frame>_leftImg8bit.png
<root>/gtFine/<train|val>/<city>/<city>_<sequence>_<frame>_gtFine_labelIds.png

The labels of the official test split are withheld, so its folder is not read: the official val split is `test`, and
val is taken from the official train split. Images of one sequence are a group.
"""

from pathlib import Path

from tasks.core.errors import DataError
from tasks.parts.data.class_table import ClassTable
from tasks.parts.data.masks import MaskFile
from tasks.parts.sources.class_list import has_class_list, read_class_list
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.file_names import list_files
from tasks.parts.sources.pairs import Listing, Pair, match_masks

_ROWS = (
    ("road", 7, (128, 64, 128)),
    ("sidewalk", 8, (244, 35, 232)),
    ("building", 11, (70, 70, 70)),
    ("wall", 12, (102, 102, 156)),
    ("fence", 13, (190, 153, 153)),
    ("pole", 17, (153, 153, 153)),
    ("traffic light", 19, (250, 170, 30)),
    ("traffic sign", 20, (220, 220, 0)),
    ("vegetation", 21, (107, 142, 35)),
    ("terrain", 22, (152, 251, 152)),
    ("sky", 23, (70, 130, 180)),
    ("person", 24, (220, 20, 60)),
    ("rider", 25, (255, 0, 0)),
    ("car", 26, (0, 0, 142)),
    ("truck", 27, (0, 0, 70)),
    ("bus", 28, (0, 60, 100)),
    ("train", 31, (0, 80, 100)),
    ("motorcycle", 32, (0, 0, 230)),
    ("bicycle", 33, (119, 11, 32)),
)
"""Name, id and colour of the 19 classes that are evaluated, in the order of their train ids."""

CITYSCAPES = ClassTable(
    names=tuple(name for name, _, _ in _ROWS),
    place="the 19 classes of Cityscapes",
    ids=tuple((number,) for _, number, _ in _ROWS),
    colours=tuple(colour for _, _, colour in _ROWS),
    ignore_ids=frozenset({*range(34), 255} - {number for _, number, _ in _ROWS}),
    is_rest_ignored=False,
)

_SPLITS = {"train": "train", "val": "test"}
"""Official split -> split of the data set."""


def list_cityscapes(root: Path, config: FolderConfig) -> Listing:
    """List the official train and val splits."""
    table = read_class_list(root) if has_class_list(root) else CITYSCAPES
    pairs: list[Pair] = []
    splits: dict[str, tuple[str, ...]] = {}
    for official, split in _SPLITS.items():
        images_at, masks_at = root / "leftImg8bit" / official, root / "gtFine" / official
        images = list_files(images_at, ("_leftImg8bit.png",), root=root)
        files = list_files(masks_at, ("_gtFine_labelIds.png",), root=root)
        masks = {name: MaskFile(path) for name, path in files.items()}
        match_masks(
            images,
            masks,
            config=config,
            image_place=f"{images_at}/{{name}}_leftImg8bit.png",
            mask_place=f"{masks_at}/{{name}}_gtFine_labelIds.png",
        )
        if not images:
            raise DataError(f"{images_at}: no images, expected <city>/*_leftImg8bit.png (prepare_data.root).")
        listed = [
            Pair(f"{official}/{name}", images[name], masks.get(name), _sequence(name))
            for name in sorted(images)
        ]
        pairs += listed
        splits[split] = tuple(pair.name for pair in listed)
    return Listing(table, tuple(pairs), splits, group_kind="sequences")


def _sequence(name: str) -> str:
    """Return <city>_<sequence> of <city>/<city>_<sequence>_<frame>."""
    return name.rpartition("/")[2].rpartition("_")[0]
