"""Read masks as their files hold them: ids, palette indices or colours. H height, W width."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from tasks.core.errors import DataError
from tasks.parts.data.class_table import MAX_ID, ClassTable, StoredMask
from tasks.parts.data.image_files import EncodedImage, decoded, png_depth

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image


_WHITE = 255
_SUBFILE_TYPE, _BITS_PER_SAMPLE = 254, 258
"""Tags of TIFF."""


class ColourMask(DataError):
    """A mask holds colours instead of class indices."""


class UnsuitableMask(DataError):
    """A mask is stored in a way in which its file does not tell its ids."""


class MaskReader(Protocol):
    """A mask that can be read; as text it names its place."""

    def read(self, table: ClassTable, *, max_pixels: int) -> StoredMask:
        """Decode the mask."""


@dataclass(frozen=True)
class MaskFile:
    """A mask in an image file."""

    source: EncodedImage

    def __str__(self) -> str:
        return str(self.source)

    def read(self, table: ClassTable, *, max_pixels: int) -> StoredMask:
        """Decode the mask; raise UnreadableImage, OversizedImage, UnsuitableMask or ColourMask.

        EXIF orientation is applied, as to images. Grey values and palette indices are ids. Only where the table has
        no ids, they stand for their colours.
        """
        import numpy as np
        from PIL import ImageOps

        with decoded(self.source, max_pixels) as image:
            _refuse_pages(self.source, image)
            ImageOps.exif_transpose(image, in_place=True)
            if image.mode in ("1", "L", "P") and table.ids is not None:
                _refuse_few_bits(self.source, image, table)
                return StoredMask(np.asarray(image).astype(np.int32), is_colour=False)
            if image.mode.startswith("I") and table.ids is not None:
                # Larger or negative values are no ids; the largest id that is none stands for them.
                values = np.asarray(image).astype(np.int64)
                is_id = (values >= 0) & (values <= MAX_ID)
                return StoredMask(np.where(is_id, values, MAX_ID + 1).astype(np.int32), is_colour=False)
            if image.mode in ("1", "L", "P", "RGB", "RGBA") and table.colours is not None:
                return StoredMask(_packed_colours(image), is_colour=True)
            raise ColourMask(_colour_mask_text(self.source, image, table))


def _refuse_pages(source: EncodedImage, image: Image.Image) -> None:
    """Raise UnsuitableMask for several pages; smaller copies of the first one, as in TIFF of maps, are none."""
    from PIL.TiffImagePlugin import TiffImageFile

    num_pages = num_frames = int(getattr(image, "n_frames", 1))
    if num_frames > 1 and isinstance(image, TiffImageFile):
        num_pages = 0
        for number in range(num_frames):
            image.seek(number)
            num_pages += not image.tag_v2.get(_SUBFILE_TYPE, 0) & 1
        image.seek(0)
    if num_pages > 1:
        raise UnsuitableMask(
            f"{source}: a mask of {num_pages} pages, expected one. Save the page with the ids as a file of its own."
        )


def _refuse_few_bits(source: EncodedImage, image: Image.Image, table: ClassTable) -> None:
    """Raise UnsuitableMask for grey of 2 or 4 bits, which Pillow scales, and of 1 bit if white may stand for 255."""
    num_bits = 8 if image.mode == "P" else _num_bits(source, image)
    known = table.ignore_ids.union(*table.ids or ())
    if num_bits in (2, 4):
        raise UnsuitableMask(
            f"{source}: grey of {num_bits} bits, which is read as brightness and not as ids, expected 8 or 16 bits. "
            "Save the mask as 8-bit grey."
        )
    if num_bits == 1 and _WHITE in known:
        raise UnsuitableMask(
            f"{source}: grey of 1 bit, whose white is the id 1, and {table.place} knows the id {_WHITE}, which white "
            "may be meant to be. Save the mask as 8-bit grey."
        )


def _num_bits(source: EncodedImage, image: Image.Image) -> int:
    """Return the bits of a grey value in the file."""
    from PIL.TiffImagePlugin import TiffImageFile

    if image.mode == "1":
        return 1
    if isinstance(image, TiffImageFile):
        return int(image.tag_v2[_BITS_PER_SAMPLE][0])
    depth = png_depth(source)
    return depth[0] if depth else 8


def _packed_colours(image: Image.Image) -> NDArray[np.int32]:
    import numpy as np

    colours_HWC = np.asarray(image.convert("RGB")).astype(np.int32)
    return (colours_HWC[..., 0] << 16) + (colours_HWC[..., 1] << 8) + colours_HWC[..., 2]


def _colour_mask_text(source: EncodedImage, image: Image.Image, table: ClassTable) -> str:
    if image.mode == "F" and table.ids is not None:
        return (
            f"{source}: holds float values, expected whole numbers, which are the ids of {table.place}. Save the "
            "mask as 8-bit or 16-bit grey."
        )
    if image.mode not in ("RGB", "RGBA", "CMYK", "YCbCr", "LA", "PA"):
        return (
            f"{source}: a {image.mode} image, expected colours, since {table.place} gives no ids. Add ids to its "
            "rows, or save the mask as RGB."
        )
    colours = image.convert("RGB").getcolors(maxcolors=4096)
    if colours is None:
        content = "more than 4096 colours (is it a photo?)"
    else:
        most = sorted(colours, key=lambda entry: (-entry[0], entry[1]))[:6]
        content = f"{len(colours)} colours, such as " + ", ".join(str(colour) for _, colour in most)
    return (
        f"{source}: a {image.mode} image with {content}; expected one channel with the class index of each "
        "pixel. Map each colour to its index by rows of classes.yaml, such as {name: road, colour: [128, 64, 128]}, "
        "or save the mask as 8-bit grey."
    )
