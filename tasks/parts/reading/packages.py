"""Import the packages that decode images, or say which one is missing."""

from typing import Any

from .rules import MissingPackage


def pillow() -> Any:
    """Return PIL with its modules Image and ImageOps; raise MissingPackage."""
    try:
        import PIL
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise MissingPackage("image files and other sizes need Pillow. Run pip install pillow.") from error
    return PIL


def tifffile() -> Any:
    """Return tifffile; raise MissingPackage."""
    try:
        import tifffile
    except ImportError as error:
        raise MissingPackage("TIFF files need tifffile. Run pip install tifffile imagecodecs.") from error
    return tifffile
