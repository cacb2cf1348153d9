"""One engine file in Python, in C++ and in a Triton server: the same mask of a file, to the pixel."""

import json
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from benchmarks.triton_server import WHEEL, install, serve
from tasks.parts.data.image_files import read_values
from tasks.parts.engines.frame_engine_cpp.write import write_cpp
from tasks.parts.selection.bundle import CLIENT
from tasks.parts.selection.triton import Serving, write_served
from tests.cpp_programs import build_program
from tests.tasks.parts.engines.test_frame_reading import KINDS, Config, infer, write_bundle
from tests.tasks.parts.selection.test_triton import run_script
from tests.wheels import unpack_wheel

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Programs:
    """A bundle for each kind of image, what runs them all, and the images."""

    bundles: dict[str, Path]
    images: dict[str, Path]
    cpp: Path
    """The C++ program; it takes the folder of any of the bundles."""
    url: str
    """Of the Triton server."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    root = tmp_path_factory.mktemp("programs")
    bundles, images = {}, {}
    for number, (kind, (suffix, channels, reading, write)) in enumerate(KINDS.items()):
        images[kind] = root / f"photo{number}.{suffix}"
        write(images[kind])
        bundles[kind] = bundle = write_bundle(root / f"bundle{number}", channels, reading)
        card = json.loads((bundle / "model.json").read_text())
        assert write_cpp(card, bundle)
        write_served(bundle / "triton" / f"image{number}-cpu", f"image{number}-cpu", card, Serving())
        (bundle / "client.py").write_text(CLIENT)
        (bundle / "report.json").write_text(json.dumps({"variant": f"image{number}", "target": "cpu"}))
    cpp = build_program(next(iter(bundles.values())), "onnxruntime")
    try:
        installed = install(unpack_wheel(WHEEL, tmp_path_factory.mktemp("triton")))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    repositories = [bundle / "triton" for bundle in bundles.values()]
    with serve(installed, repositories, root / "server.log") as server:
        yield Programs(bundles, images, cpp, server.http)


@pytest.mark.parametrize("kind", KINDS)
def test_python_cpp_and_triton_give_the_same_mask_a1(programs: Programs, tmp_path: Path, kind: str) -> None:
    bundle, image = programs.bundles[kind], programs.images[kind]
    _, channels, reading, _ = KINDS[kind]
    name = "mask.tif" if image.suffix == ".tif" else "mask.png"

    done = infer(bundle, image, tmp_path / name)
    assert done.returncode == 0, done.stderr
    of_python_HW = open_mask(tmp_path / name)

    low_high = None if reading.value_range is None else list(reading.value_range)
    np.save(tmp_path / "frames.npy", np.atleast_3d(read_values(image, Config(channels, low_high)))[None])
    command = [programs.cpp, tmp_path / "frames.npy", tmp_path / "cpp.npy", "--bundle", bundle]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr

    sent = run_script(bundle / "client.py", image, "--out", tmp_path / "masks", "--url", programs.url)
    assert sent.returncode == 0, sent.stderr
    [of_triton] = (tmp_path / "masks").iterdir()

    assert len(np.unique(of_python_HW)) >= 3, "a mask of one class shows nothing"
    np.testing.assert_array_equal(np.load(tmp_path / "cpp.npy")[0], of_python_HW)
    np.testing.assert_array_equal(open_mask(of_triton), of_python_HW)


def open_mask(path: Path) -> Array:
    return tifffile.imread(path) if path.suffix == ".tif" else np.asarray(Image.open(path))
