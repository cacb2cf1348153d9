"""tasks/parts/data/metrics.py, held against torchmetrics."""

import numpy as np
import pytest
import torch
from scipy.ndimage import binary_erosion
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix, MulticlassJaccardIndex

from tasks.core.errors import DataError
from tasks.parts.data.metrics import boundaries, boundary_width, confusion_matrix, scores


def draw_masks(num_classes: int, *, ignored_share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    prediction = rng.integers(num_classes, size=(3, 17, 23))
    mask = np.where(
        rng.uniform(size=prediction.shape) < 0.5, prediction, rng.integers(num_classes, size=prediction.shape)
    )
    mask[rng.uniform(size=mask.shape) < ignored_share] = 255
    return prediction, mask.astype(np.uint8)


@pytest.mark.parametrize("ignored_share", [0.0, 0.3])
def test_scores_equal_torchmetrics(ignored_share: float) -> None:
    prediction, mask = draw_masks(6, ignored_share=ignored_share, seed=1)
    result = scores(confusion_matrix(prediction, mask, 6))

    given = torch.from_numpy(prediction), torch.from_numpy(mask.astype(np.int64))
    settings = {"num_classes": 6, "ignore_index": 255}
    assert result.iou == pytest.approx(
        MulticlassJaccardIndex(**settings, average=None)(*given).tolist(), abs=1e-6
    )
    assert result.miou == pytest.approx(MulticlassJaccardIndex(**settings)(*given).item(), abs=1e-6)
    accuracy = MulticlassAccuracy(**settings, average="micro")(*given).item()
    assert result.pixel_accuracy == pytest.approx(accuracy, abs=1e-6)


def test_confusion_matrix_has_truth_in_rows_as_torchmetrics() -> None:
    prediction, mask = draw_masks(4, ignored_share=0.1, seed=2)
    expected = MulticlassConfusionMatrix(4, ignore_index=255)(
        torch.from_numpy(prediction), torch.from_numpy(mask.astype(np.int64))
    )
    assert confusion_matrix(prediction, mask, 4).tolist() == expected.tolist()


def test_class_absent_from_truth_and_prediction_is_left_out_of_the_mean() -> None:
    prediction, mask = draw_masks(3, ignored_share=0.2, seed=3)
    result = scores(confusion_matrix(prediction, mask, 5))
    expected = MulticlassJaccardIndex(5, ignore_index=255)(
        torch.from_numpy(prediction), torch.from_numpy(mask.astype(np.int64))
    )
    assert result.iou[3:] == (None, None)
    assert result.miou == pytest.approx(expected.item(), abs=1e-6)


def test_class_that_no_label_has_is_not_averaged() -> None:
    result = scores(confusion_matrix(np.array([[[0, 1]]]), np.array([[[0, 0]]]), 2))
    assert result.iou == (0.5, 0.0)
    assert result.miou == 0.5


def test_all_pixels_ignored_leaves_every_score_undefined() -> None:
    result = scores(confusion_matrix(np.zeros((1, 4, 4), np.int64), np.full((1, 4, 4), 255, np.uint8), 2))
    assert (result.miou, result.iou, result.pixel_accuracy) == (None, (None, None), None)


def test_matrices_of_batches_add_up() -> None:
    prediction, mask = draw_masks(4, ignored_share=0.1, seed=4)
    in_parts = sum(confusion_matrix(prediction[n : n + 1], mask[n : n + 1], 4) for n in range(3))
    assert (in_parts == confusion_matrix(prediction, mask, 4)).all()


def test_label_outside_the_classes_is_refused_instead_of_growing_the_matrix() -> None:
    prediction, mask = np.zeros((1, 2, 2), np.int64), np.zeros((1, 2, 2), np.uint8)
    mask[0, 0, 0] = 7
    with pytest.raises(DataError, match="masks hold labels from 0 to 7, expected 0 to 2"):
        confusion_matrix(prediction, mask, 3)
    with pytest.raises(DataError, match="predictions hold labels"):
        confusion_matrix(prediction - 1, np.zeros_like(mask), 3)


def test_shapes_that_differ_are_refused() -> None:
    with pytest.raises(DataError, match=r"\(1, 2, 2\).*\(1, 2, 3\)"):
        confusion_matrix(np.zeros((1, 2, 2)), np.zeros((1, 2, 3)), 2)


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(10, 10, 1), (64, 64, 2), (96, 128, 3), (1024, 2048, 46)],  # 0.28, 1.81, 3.2 and 45.8 pixels
)
def test_a_boundary_is_two_per_cent_of_the_diagonal_wide_and_at_least_one_pixel(
    height: int, width: int, expected: int
) -> None:
    assert boundary_width(height, width) == expected


@pytest.mark.parametrize("shape", [(9, 11), (64, 64), (96, 128), (3, 200), (1, 1)])
def test_boundaries_are_the_masks_without_their_erosion_as_in_the_reference_implementation(
    shape: tuple[int, int],
) -> None:
    """mask_to_boundary of github.com/bowenc0221/boundary-iou-api pads a mask with 0 and erodes it d times by 3x3."""
    coarse_NHW = np.random.default_rng(5).integers(0, 4, (3, -(-shape[0] // 8), -(-shape[1] // 8)))
    classes_NHW = coarse_NHW.repeat(8, axis=1).repeat(8, axis=2)[:, : shape[0], : shape[1]].astype(np.uint8)
    found_NHW = boundaries(classes_NHW)
    for classes_HW, found_HW in zip(classes_NHW, found_NHW, strict=True):
        for index in range(4):
            mask_HW = classes_HW == index
            eroded_HW = binary_erosion(mask_HW, np.ones((3, 3)), iterations=boundary_width(*shape))
            assert ((mask_HW & ~eroded_HW) == (mask_HW & found_HW)).all()


@pytest.mark.parametrize("border", [40, 64])
def test_there_is_no_contour_along_ignored_pixels_nor_at_an_edge_that_is_ignored(border: int) -> None:
    """Left of a border everything is known, from it on nothing: as in a window that owns a part of an image."""
    classes_NHW = np.zeros((1, 64, 64), np.uint8)
    classes_NHW[0, 30:34, 10:14] = 1
    is_ignored_NHW = np.broadcast_to(np.arange(64) >= border, classes_NHW.shape)
    found_HW = boundaries(classes_NHW, is_ignored_NHW)[0]
    known_HW = boundaries(classes_NHW)[0]
    assert (found_HW[2:-2, 2 : min(border, 62)] == known_HW[2:-2, 2 : min(border, 62)]).all()
    assert found_HW[:, :2].all(), "the outside is a contour beside known pixels"
    assert found_HW[:, border - 1].sum() == (4 if border == 40 else 64)  # at the top and at the bottom


def test_ignored_pixels_hide_no_contour_behind_them() -> None:
    classes_NHW = np.zeros((1, 64, 64), np.uint8)
    classes_NHW[..., 33:] = 1
    is_ignored_NHW = np.zeros(classes_NHW.shape, np.bool_)
    is_ignored_NHW[..., 32] = True
    found_HW = boundaries(classes_NHW, is_ignored_NHW)[0]
    assert found_HW[32].nonzero()[0].tolist() == [0, 1, 31, 32, 33, 62, 63]
