"""Image files that a stream of frames is measured with."""

from pathlib import Path


def write_frames(images: Path, folder: Path, *, limit: int) -> None:
    """Write the first images of an array, uint8 [N, H, W, C], as PNG files; as .npy where C is neither 1 nor 3."""
    import numpy as np
    import PIL.Image

    for index, image_HWC in enumerate(np.load(images, mmap_mode="r")[:limit]):
        file = folder / f"{index:06d}"
        if image_HWC.shape[2] in (1, 3):
            image = np.ascontiguousarray(image_HWC if image_HWC.shape[2] == 3 else image_HWC[..., 0])
            PIL.Image.fromarray(image).save(file.with_suffix(".png"))
        else:
            np.save(file.with_suffix(".npy"), image_HWC)
