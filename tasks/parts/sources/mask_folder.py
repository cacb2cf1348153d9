"""List a user's own data set: images/, masks/ (masks of the same names) and classes.yaml in one folder.

<root>/images/**/<name>.png|jpg|jpeg|tif|npy   sub-folders and non-ASCII names are allowed
<root>/masks/**/<name>.png|tif                 ids, palette indices, or colours of classes.yaml
<root>/classes.yaml                            see class_list.py
<root>/train.txt, val.txt, test.txt            optional, one name per line; default: chosen by class (splits.py)
<root>/calibration.txt                         optional; default: images of train, chosen by class
<root>/groups.csv                              optional; see splits.py

Folders that are called as splits keep their images: images/<train|val|test>/**, or <train|val|test>/images/** beside
<train|val|test>/masks/**. Images of one sub-folder are a group.
"""

from collections import Counter
from pathlib import Path

from tasks.core.errors import DataError
from tasks.parts.data.image_files import IMAGE_SUFFIXES, MASK_SUFFIXES
from tasks.parts.data.masks import MaskFile
from tasks.parts.sources.class_list import read_class_list
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.declared_splits import declared_splits, split_of_folder, sub_folder
from tasks.parts.sources.file_names import list_files
from tasks.parts.sources.mask_neighbours import (
    refuse_masks_among_images,
    refuse_mixed_folder,
    refuse_renamed_masks,
)
from tasks.parts.sources.pairs import Listing, Pair, match_masks


def list_folder(root: Path, config: FolderConfig) -> Listing:
    """List the images and masks of a folder."""
    parents = [path.parent.name for path in root.glob("*/images") if path.is_dir()]
    folders = sorted(name for name in parents if split_of_folder(name))
    if folders and not (root / "images").exists():
        images: dict[str, Path] = {}
        masks: dict[str, MaskFile] = {}
        for folder in folders:
            of_folder = _list_files(root, root / folder, config)
            images |= {f"{folder}/{name}": path for name, path in of_folder[0].items()}
            masks |= {f"{folder}/{name}": mask for name, mask in of_folder[1].items()}
        place = root
    else:
        images, masks = _list_files(root, root, config)
        place = root / "images"
    splits = declared_splits(images, root=root, place=place)
    pairs = tuple(
        Pair(name, images[name], masks.get(name), sub_folder(name, num_passed_over=bool(splits)))
        for name in sorted(images)
    )
    return Listing(
        read_class_list(root), pairs, splits, group_kind="sub-folders", split_place=f"the folders of {place}"
    )


def _list_files(
    root: Path, folder: Path, config: FolderConfig
) -> tuple[dict[str, Path], dict[str, MaskFile]]:
    """Return the images and masks below `folder`, by their names."""
    images_at, masks_at = folder / "images", folder / "masks"
    if not images_at.exists():
        refuse_mixed_folder(folder)
    images = list_files(images_at, IMAGE_SUFFIXES, root=root)
    files = list_files(masks_at, MASK_SUFFIXES, root=root)
    if not images:
        raise DataError(
            f"{images_at}: no images{_found_instead(images_at)}. Expected files {', '.join(IMAGE_SUFFIXES)} "
            "(prepare_data.root)."
        )
    refuse_masks_among_images(images, files, folder)
    refuse_renamed_masks(images, files)
    masks = {name: MaskFile(path) for name, path in files.items()}
    match_masks(
        images,
        masks,
        config=config,
        image_place=f"{images_at}/{{name}}.png (or .jpg, .tif, .npy)",
        mask_place=f"{masks_at}/{{name}}.png",
    )
    return images, masks


def _found_instead(folder: Path) -> str:
    """Return the endings of the files that a folder holds, as text; empty if it holds none."""
    counts = Counter(path.suffix or "without an ending" for path in folder.rglob("*") if path.is_file())
    shown = ", ".join(f"{count} {ending}" for ending, count in counts.most_common(3))
    return f" among its files ({shown})" if shown else ""
