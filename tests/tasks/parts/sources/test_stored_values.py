"""What is said about values of more than 8 bits, alpha and files of other formats before anything is written (C4)."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from tasks.core.errors import DataError
from tasks.parts.data.dataset import read_manifest
from tasks.parts.sources.stored_values import DeepValues, proposed_range
from tests.tasks.parts.data.test_tiff import deep_png
from tests.tasks.parts.sources.runs import HEIGHT, WIDTH, fails, halves, run, write_image, write_mask


def values(low: int, high: int, seed: int = 0, dtype: Any = np.uint16) -> np.ndarray:
    content = np.linspace(low, high, HEIGHT * WIDTH)
    return np.random.default_rng(seed).permutation(content).reshape(HEIGHT, WIDTH).astype(dtype)


def write(path: Path, content: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".npy":
        np.save(path, content)
    elif path.suffix == ".tif":
        tifffile.imwrite(path, content)
    else:
        Image.fromarray(content).save(path)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Make masks of ten images; tests write the images."""
    for number in range(10):
        write_mask(tmp_path / f"mine/masks/{number}.png", halves(0, 1))
    (tmp_path / "mine/classes.yaml").write_text("[road, car]\n")
    return tmp_path / "mine"


@pytest.mark.parametrize("suffix", ["png", "tif", "npy"])
def test_12_bits_without_a_range_are_refused_with_the_range_to_set_c4(
    root: Path, tmp_path: Path, suffix: str
) -> None:
    for number in range(10):
        write(root / f"images/{number}.{suffix}", values(0, 3200, number))
    fails(
        "folder",
        root,
        tmp_path / "out",
        rf"0\.{suffix}: values of more than 8 bits, in 10 image\(s\) \(10 of uint16\).* from 0 to 3200, and "
        r"99\.8 % lie between 3\.064 and 3196\.55\. Set prepare_data\.folder\.value_range=\[0, 4095\]",
        DeepValues,
        channels=1,
    )
    report = run("folder", root, tmp_path / "set", channels=1, value_range=[0, 4095])
    manifest = read_manifest(tmp_path / "set/dataset")
    assert (manifest.reading.types, manifest.reading.value_range) == (("uint16",), (0, 4095))
    assert report.warnings == ()


@pytest.mark.parametrize(
    ("low", "high", "dtype", "expected"),
    [
        (0, 1000, np.uint16, (0, 1023)),
        (0, 300, np.uint16, (0, 511)),
        (0, 65535, np.uint16, (0, 65535)),
        (-1000, 2000, np.int16, (-997, 1997)),  # negative values: percentiles
        (100_000, 200_000, np.uint32, (100_100, 199_900)),  # more than 16 bits: percentiles
        (0.0, 1.0, np.float32, (0.001, 0.999)),
    ],
)
def test_range_is_of_whole_bits_where_values_fill_them_c4(
    root: Path, tmp_path: Path, low: float, high: float, dtype: Any, expected: tuple[float, float]
) -> None:
    content = np.linspace(low, high, HEIGHT * WIDTH).reshape(HEIGHT, WIDTH).astype(dtype)
    for number in range(10):
        write(root / f"images/{number}.npy", np.roll(content, number, axis=0))
    shown = rf"value_range=\[{expected[0]:.6g}, {expected[1]:.6g}\]"
    fails("folder", root, tmp_path / "out", shown, DeepValues, channels=1)


def test_few_outliers_do_not_widen_the_range_c4(root: Path, tmp_path: Path) -> None:
    for number in range(10):
        content = np.full((64, 64), 500, np.uint16)
        content[:, :32], content[0, 0] = 100, 65535
        write(root / f"images/{number}.png", content)
    text = r"from 100 to 65535, and 99\.8 % lie between 100 and 500\. Set .*value_range=\[100, 500\]"
    fails("folder", root, tmp_path / "out", text, DeepValues)


@pytest.mark.parametrize(
    ("value_range", "match"),
    [
        ([0, 65535], r"10 of 10 .* fill less than an eighth of .*\[0, 65535\].* from 0 to 4095.*\[0, 4095\]"),
        ([0, 1023], r"10 of 10 .* have over 1 % of their values outside .*\[0, 1023\].* from 0 to 4095"),
    ],
)
def test_range_that_does_not_fit_the_values_is_warned_of_c4(
    root: Path, tmp_path: Path, value_range: list[int], match: str
) -> None:
    for number in range(10):
        write(root / f"images/{number}.png", values(0, 4095, number))
    report = run("folder", root, tmp_path / "out", value_range=value_range)
    [warning] = report.warnings
    assert re.search(match, warning), warning


def test_types_of_all_files_are_in_the_manifest_c4(root: Path, tmp_path: Path) -> None:
    for number in range(5):
        write_image(root / f"images/{number}.jpg", number)
    for number in range(5, 9):
        write(root / f"images/{number}.tif", values(0, 4095, number))
    write(root / "images/9.npy", values(0, 4095, 9, np.float32)[..., None].repeat(3, axis=2))
    report = run("folder", root, tmp_path / "out", value_range=[0, 4095])
    assert read_manifest(tmp_path / "out/dataset").reading.types == ("float32", "uint16", "uint8")
    assert any("5 image(s) have 8 bits and 5 more" in text for text in report.warnings)


def test_plain_images_of_many_bits_are_refused_too_c4(tmp_path: Path) -> None:
    for number in range(8):
        write(tmp_path / f"mine/images/{number}.png", values(0, 4095, number))
    fails("images", tmp_path / "mine", tmp_path / "out", r"value_range=\[0, 4095\]", DeepValues)


def test_deep_colours_of_png_are_named_with_the_way_out_c4(root: Path, tmp_path: Path) -> None:
    (root / "images").mkdir()
    for number in range(10):
        deep_png(root / f"images/{number}.png")
    text = r"value_range=\[0, 4095\].* Save .*0\.png and other PNG files with colours or alpha of 16 bits as TIFF"
    fails("folder", root, tmp_path / "out", text, DeepValues)


def test_values_of_oversized_images_are_not_looked_at_c4(root: Path, tmp_path: Path) -> None:
    for number in range(10):
        write(root / f"images/{number}.tif", values(0, 4095, number))
    text = r"values of more than 8 bits, in 10 image.* Set it to the lowest and the highest value"
    fails("folder", root, tmp_path / "out", text, DeepValues, max_megapixels=0.0001)


def test_range_of_one_value_is_still_a_range_c4() -> None:
    from tasks.parts.sources.stored_values import _Extent

    flat = _Extent(7.5, 7.5, 7.5, 7.5, is_whole=False, share_outside=0)
    low, high = proposed_range([flat])
    assert low < high


@pytest.mark.parametrize(
    ("name", "content"), [("a.dcm", b"x"), ("IM0001", b"\0" * 128 + b"DICM" + b"\0" * 9)]
)
def test_dicom_is_named_c4(root: Path, tmp_path: Path, name: str, content: bytes) -> None:
    for number in range(10):
        write_image(root / f"images/{number}.png", number)
    (root / "images" / name).write_bytes(content)
    text = rf"{name}: a DICOM file, one of 1 in .*images, which are not read\. .*value_range"
    fails("folder", root, tmp_path / "out", text, DataError)


def test_dicom_that_is_called_png_is_named_c4(root: Path, tmp_path: Path) -> None:
    for number in range(10):
        write_image(root / f"images/{number}.png", number)
    (root / "images/3.png").write_bytes(b"\0" * 128 + b"DICM" + b"\0" * 99)
    fails(
        "folder", root, tmp_path / "out", r"3\.png: its content is DICOM, whatever its name says", DataError
    )


@pytest.mark.parametrize("name", ["scan.nii", "scan.nii.gz"])
def test_nifti_is_named_c4(root: Path, tmp_path: Path, name: str) -> None:
    (root / "images").mkdir()
    (root / "images" / name).write_bytes(b"x")
    text = rf"{name.replace('.', '.')}: a NIfTI file, .*Save each slice as TIFF .*nibabel"
    fails("folder", root, tmp_path / "out", text, DataError)


def test_files_of_an_unread_kind_are_counted_where_there_is_no_image_c4(root: Path, tmp_path: Path) -> None:
    (root / "images").mkdir()
    for number in range(3):
        Image.new("RGB", (8, 8)).save(root / f"images/{number}.bmp")
    fails("folder", root, tmp_path / "out", r"images: no images among its files \(3 \.bmp\)", DataError)


def test_alpha_is_counted_and_open_pixels_are_named_c4(root: Path, tmp_path: Path) -> None:
    for number in range(10):
        write_image(root / f"images/{number}.png", number)
    for number, alpha in ((0, 255), (1, 255), (2, 40)):
        image = Image.open(root / f"images/{number}.png").convert("RGBA")
        image.putalpha(alpha)
        image.save(root / f"images/{number}.png")
    [warning] = run("folder", root, tmp_path / "out").warnings
    assert warning.startswith("3 image(s) have an alpha channel") and "1 of them are not opaque" in warning
    assert f"{root}/images/2.png" in warning
    write_image(root / "images/2.png", 2)
    [warning] = run("folder", root, tmp_path / "opaque").warnings
    assert "all their pixels are opaque" in warning


@pytest.mark.parametrize(("max_megapixels", "match"), [(0.001, "megapixels are allowed"), (1, None)])
def test_large_images_with_alpha_are_judged_by_the_own_limit_c4(
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_megapixels: float,
    match: str | None,
) -> None:
    """Beyond twice this number Pillow refuses to open an image, by an exception that is no OSError."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 700)
    for number in range(10):
        write(root / f"images/{number}.png", np.full((HEIGHT * 2, WIDTH * 2, 4), 20 * number, np.uint8))
        write_mask(root / f"masks/{number}.png", np.kron(halves(0, 1), np.ones((2, 2), np.uint8)))
    if match:
        fails("folder", root, tmp_path / "out", match, DataError, max_megapixels=max_megapixels)
        return
    report = run("folder", root, tmp_path / "out", max_megapixels=max_megapixels)
    assert any("10 image(s) have an alpha channel" in warning for warning in report.warnings)


def test_range_for_images_of_8_bits_alone_is_warned_of_c4(root: Path, tmp_path: Path) -> None:
    for number in range(10):
        write_image(root / f"images/{number}.png", number)
    report = run("folder", root, tmp_path / "out", value_range=[0, 4095])
    assert any(
        "value_range is [0, 4095], and all images have 8 bits" in warning for warning in report.warnings
    )


def test_masks_among_the_images_are_named_c4(tmp_path: Path) -> None:
    root = tmp_path / "mine"
    (root / "masks").mkdir(parents=True)
    (root / "classes.yaml").write_text("[road, car]\n")
    for number in range(3):
        write_image(root / f"images/{number}.png", number)
        write_mask(root / f"images/{number}_mask.png", halves(0, 1))
    text = (
        r"0_mask\.png: looks like the mask of 0\.png beside it, and so do 2 more file\(s\)\. Expected .*move it to "
        r".*mine/masks/0\.png, and likewise the others"
    )
    fails("folder", root, tmp_path / "out", text, DataError)


@pytest.mark.parametrize("ending", ["_mask", "_label", "-seg"])
def test_masks_beside_images_in_one_folder_are_named_c4(tmp_path: Path, ending: str) -> None:
    root = tmp_path / "mine"
    root.mkdir()
    (root / "classes.yaml").write_text("[road, car]\n")
    for number in range(3):
        write_image(root / f"{number}.jpg", number)
        write_mask(root / f"{number}{ending}.png", halves(0, 1))
    text = rf"0{ending}\.png: looks like the mask of 0\.jpg .*images in .*mine/images and .*mine/masks/0\.png"
    fails("folder", root, tmp_path / "out", text, DataError)


def test_masks_of_other_names_are_named_c4(root: Path, tmp_path: Path) -> None:
    for number in range(10):
        write_image(root / f"images/{number}.png", number)
        (root / f"masks/{number}.png").rename(root / f"masks/{number}_seg.png")
    text = r"0_seg\.png: looks like the mask of .*images/0\.png, and so do 9 more.* Rename it to 0\.png"
    fails("folder", root, tmp_path / "out", text, DataError)


@pytest.mark.parametrize("ignored", ["", "ignore_index: 255\n"])
def test_masks_of_0_and_255_get_the_table_to_write_c4(root: Path, tmp_path: Path, ignored: str) -> None:
    (root / "classes.yaml").write_text(f"classes: [Hintergrund, 'Ödem, groß']\n{ignored}", encoding="utf-8")
    for number in range(10):
        write_image(root / f"images/{number}.png", number)
        write_mask(root / f"masks/{number}.png", halves(0, 255))
    table = "[{name: 'Hintergrund', ids: [0]}, {name: 'Ödem, groß', ids: [255]}]"
    with pytest.raises(DataError, match="255") as caught:
        run("folder", root, tmp_path / "none")
    assert table in str(caught.value)
    (root / "classes.yaml").write_text(table, encoding="utf-8")
    report = run("folder", root, tmp_path / "out")
    assert (
        report.classes == ("Hintergrund", "Ödem, groß") and report.pixel_share["train"]["Ödem, groß"] == 0.5
    )


def test_class_names_of_any_script_are_shown_in_quotes_c4(root: Path, tmp_path: Path) -> None:
    names = ["Ödem, groß", "腫瘍", "нож 2"]
    (root / "classes.yaml").write_text("\n".join(f"- '{name}'" for name in names), encoding="utf-8")
    for number in range(10):
        write_image(root / f"images/{number}.png", number)
    report = run("folder", root, tmp_path / "out")
    assert report.classes == tuple(names)
    assert any("split train has no pixel of 'нож 2': an absent class" in text for text in report.warnings)


def test_messages_name_no_python_objects_c4(root: Path, tmp_path: Path) -> None:
    for number in range(10):
        write_image(root / f"images/{number}.png", number)
    (root / "images/3.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"3\.png: cannot be decoded as PNG") as caught:
        run("folder", root, tmp_path / "out")
    assert "BytesIO" not in str(caught.value)
    write_image(root / "images/3.png", 3)
    write_mask(root / "masks/4.png", np.zeros((8, 8), np.uint8))
    with pytest.raises(DataError, match="its mask") as mismatch:
        run("folder", root, tmp_path / "again")
    assert not type(mismatch.value).__name__.startswith("_")
