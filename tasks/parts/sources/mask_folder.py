"""List a user's own data set: images/, masks/ (masks of the same names) and classes.yaml in one folder.

<root>/images/**/<name>.png|jpg|jpeg|tif|npy   sub-folders and non-ASCII names are allowed
<root>/masks/**/<name>.png|tif                 ids, palette indices, or colours of classes.yaml
<root>/classes.yaml                            see class_list.py
<root>/train.txt, val.txt, test.txt            optional, one name per line; default: chosen by class (splits.py)
<root>/calibration.txt                         optional; default: images of train, chosen by class
<root>/groups.csv                              optional; see splits.py
"""

from pathlib import Path

from tasks.core.errors import DataError
from tasks.parts.data.image_files import IMAGE_SUFFIXES, MASK_SUFFIXES
from tasks.parts.data.masks import MaskFile
from tasks.parts.sources.class_list import read_class_list
from tasks.parts.sources.config import FolderConfig
from tasks.parts.sources.file_names import list_files
from tasks.parts.sources.pairs import Listing, Pair, match_masks


def list_folder(root: Path, config: FolderConfig) -> Listing:
    """List the images and masks of a folder."""
    table = read_class_list(root)
    images = list_files(root / "images", IMAGE_SUFFIXES, root=root)
    files = list_files(root / "masks", MASK_SUFFIXES, root=root)
    masks = {name: MaskFile(path) for name, path in files.items()}
    match_masks(
        images,
        masks,
        config=config,
        image_place=f"{root / 'images'}/{{name}}.png (or .jpg, .tif, .npy)",
        mask_place=f"{root / 'masks'}/{{name}}.png",
    )
    if not images:
        raise DataError(
            f"{root / 'images'}: no images. Expected files {', '.join(IMAGE_SUFFIXES)} (prepare_data.root)."
        )
    return Listing(table, tuple(Pair(name, images[name], masks.get(name)) for name in sorted(images)))
