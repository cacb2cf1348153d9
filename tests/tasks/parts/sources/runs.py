"""What the tests of all layouts share: a configuration of conf/, a run of the stage, and the arrays that it wrote."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from tasks.core.config import typed_config
from tasks.core.errors import EnginewrightError
from tasks.parts.data.dataset import open_split
from tasks.prepare_data import Config, Report, prepare_data
from tests.conftest import REPOSITORY

HEIGHT, WIDTH = 16, 24


def section_of(source: str) -> dict[str, Any]:
    """Return the content of a file of conf/data, at the size of the samples."""
    content = yaml.safe_load((REPOSITORY / f"conf/data/{source}.yaml").read_text(encoding="utf-8"))
    return content | {"height": HEIGHT, "width": WIDTH}


def config_of(source: str, **changes: Any) -> Config:
    """Return the configuration of conf/data; `changes` are of its section folder."""
    content = section_of(source)
    content["folder"] |= {"num_calibration": 2} | changes
    config: Config = typed_config(Config, content, "prepare_data")
    return config


def run(source: str, root: Path, out: Path, **changes: Any) -> Report:
    out.mkdir()
    return prepare_data(config_of(source, **changes), root=root, out=out)


def fails(
    source: str,
    root: Path,
    out: Path,
    match: str,
    kind: type[EnginewrightError] = EnginewrightError,
    **changes: Any,
) -> None:
    """Expect an error of the product, and nothing written."""
    with pytest.raises(kind, match=match):
        run(source, root, out, **changes)
    assert list(out.iterdir()) == []


def masks_of(out: Path, split: str) -> dict[bytes, np.ndarray]:
    """Return the masks of a split by the bytes of their images, which identify them whatever their order."""
    images_NHWC, masks_NHW = open_split(out / "dataset", split)
    return {image.tobytes(): mask for image, mask in zip(images_NHWC, masks_NHW, strict=True)}


def pixels(path: Path) -> bytes:
    return np.asarray(Image.open(path).convert("RGB")).tobytes()


def write_image(path: Path, seed: int) -> None:
    """Write an image that differs from all of other seeds."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = np.random.default_rng(seed).integers(256, size=(HEIGHT, WIDTH, 3)).astype(np.uint8)
    Image.fromarray(content).save(path, quality=95)


def write_mask(path: Path, values: Any, palette: list[int] | None = None) -> None:
    """Write a mask: grey, colours, or indices of a palette."""
    path.parent.mkdir(parents=True, exist_ok=True)
    mask = Image.fromarray(np.asarray(values))
    if palette is not None:
        mask.putpalette(palette)
    mask.save(path)


def halves(left: int, right: int, dtype: type[np.generic] = np.uint8) -> np.ndarray:
    """Return a mask of two values."""
    mask = np.full((HEIGHT, WIDTH), left, dtype)
    mask[:, WIDTH // 2 :] = right
    return mask
