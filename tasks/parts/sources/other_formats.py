"""Recognise image files that are not read, by their names and their first bytes, and say what to do with them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tasks.core.errors import DataError
from tasks.parts.data.image_files import EncodedImage

_DICOM_SUFFIXES = (".dcm", ".dicom")
_NIFTI_SUFFIXES = (".nii", ".nii.gz")
_DICOM_MAGIC, _DICOM_MAGIC_AT = b"DICM", 128

_ADVICE = {
    "DICOM": "Save each image as TIFF or with numpy.save as [height, width, channels] (pydicom reads it; apply its "
    "rescale slope and intercept)",
    "NIfTI": "Save each slice as TIFF or with numpy.save as [height, width, channels] (nibabel reads it)",
}


class OtherFormat(DataError):
    """A file is an image of a format that is not read."""


def refuse_other_formats(folder: Path, paths: Iterable[Path]) -> None:
    """Raise OtherFormat if files of a folder, which are not read by their endings, are DICOM or NIfTI."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        name = path.name.lower()
        if name.endswith(_NIFTI_SUFFIXES):
            found.setdefault("NIfTI", []).append(path)
        elif name.endswith(_DICOM_SUFFIXES) or _is_dicom(path):
            found.setdefault("DICOM", []).append(path)
    for kind, files in found.items():
        raise OtherFormat(
            f"{min(files)}: a {kind} file, one of {len(files)} in {folder}, which are not read. {_ADVICE[kind]}, and "
            "set prepare_data.folder.value_range to the lowest and highest value, such as [-160, 240] for soft "
            "tissue in CT; or move such files out of the folder."
        )


def name_other_format(image: EncodedImage) -> None:
    """Raise OtherFormat for a file that is DICOM in spite of its name."""
    if isinstance(image, Path) and _is_dicom(image):
        raise OtherFormat(
            f"{image}: its content is DICOM, whatever its name says, which is not read. {_ADVICE['DICOM']}, and "
            "set prepare_data.folder.value_range to the lowest and highest value, such as [-160, 240] for soft "
            "tissue in CT."
        )


def _is_dicom(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            head = file.read(_DICOM_MAGIC_AT + len(_DICOM_MAGIC))
    except OSError:
        return False  # decoding names what cannot be read
    return head[_DICOM_MAGIC_AT:] == _DICOM_MAGIC
