import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tasks.core.errors import ArtifactError, DataError
from tasks.parts.onnx_graphs.export import export_graph
from tasks.parts.quantization import calibration
from tasks.parts.quantization.calibration import (
    NUM_BINS,
    TensorStatistics,
    check_images,
    choose_range,
    collect_statistics,
    without_blank_images,
)
from tasks.parts.quantization.config import Activations, Calibrator
from tasks.parts.quantization.qdq import TensorRange
from tests.tasks import tiny_networks as tiny


def statistics_of(values: np.ndarray) -> TensorStatistics:
    amax = float(np.abs(values).max())
    counts = np.histogram(np.abs(values), bins=NUM_BINS, range=(0, amax))[0]
    return TensorStatistics(float(values.min()), float(values.max()), counts)


@pytest.mark.slow
def test_statistics_do_not_depend_on_how_images_are_batched() -> None:
    graph = export_graph(tiny.make(tiny.Straight), tiny.card(), height=tiny.SIZE, width=tiny.SIZE, opset=20)
    images_NCHW = tiny.images(6).numpy()
    name = "image"
    one = collect_statistics(graph, lambda: [images_NCHW], [name, "stem.0/Conv"])
    three = collect_statistics(graph, lambda: np.split(images_NCHW, 3), [name, "stem.0/Conv"])
    assert (one[name].low, one[name].high) == (float(images_NCHW.min()), float(images_NCHW.max()))
    assert one[name].counts.sum() == images_NCHW.size
    np.testing.assert_array_equal(one[name].counts, three[name].counts)
    assert one["stem.0/Conv"].counts.sum() == 6 * 8 * 16 * 16


def test_minmax_keeps_everything_and_percentile_the_configured_share() -> None:
    values = np.random.default_rng(0).standard_normal(200_000)
    found = statistics_of(values)
    assert choose_range(found, Calibrator.minmax, percentile=99.0).amax == found.amax
    amax = choose_range(found, Calibrator.percentile, percentile=99.0).amax
    assert amax == pytest.approx(np.percentile(np.abs(values), 99), rel=0.01)
    assert choose_range(found, Calibrator.percentile, percentile=100.0).amax == pytest.approx(found.amax)


def test_entropy_drops_a_lonely_outlier_and_keeps_uniform_values() -> None:
    random = np.random.default_rng(0)
    normal = np.append(random.standard_normal(200_000), 100.0)
    assert choose_range(statistics_of(normal), Calibrator.entropy, percentile=99.0).amax < 20
    uniform = random.uniform(-1, 1, 200_000)
    assert choose_range(statistics_of(uniform), Calibrator.entropy, percentile=99.0).amax > 0.9


def test_entropy_agrees_with_onnxruntime() -> None:
    from onnxruntime.quantization.calibrate import HistogramCollector

    values = np.random.default_rng(0).laplace(size=1_000_000).astype(np.float32)
    reference = HistogramCollector("entropy", True, NUM_BINS, 128, 99.9, None)
    reference.collect({"tensor": [values]})
    expected = float(reference.compute_collection_result()["tensor"][1])
    found = choose_range(statistics_of(values), Calibrator.entropy, percentile=99.0).amax
    assert found < 0.9 * np.abs(values).max()
    assert found == pytest.approx(expected, rel=0.15)


@pytest.mark.parametrize("activations", Activations)
@pytest.mark.parametrize("lowest", [-np.inf, -0.3, 0.0])
def test_mse_takes_the_threshold_with_the_least_error_of_the_levels(
    activations: Activations, lowest: float
) -> None:
    values = np.maximum(np.random.default_rng(0).laplace(size=200_000), lowest)
    found = choose_range(statistics_of(values), Calibrator.mse, percentile=100.0, activations=activations)

    def error(amax: float) -> float:
        """Quantize as the engine does."""
        limits = TensorRange(max(values.min(), -amax), min(values.max(), amax))
        if activations is Activations.int8:
            levels = np.clip(np.rint(values / limits.int8()), -127, 127) * limits.int8()
        else:
            scale, zero_point = limits.uint8()
            levels = np.clip(np.rint(values / scale) + zero_point, 0, 255) - zero_point
            levels = levels * scale
        return float(np.square(values - levels).mean())

    brute = min(np.linspace(1, np.abs(values).max(), 200), key=error)
    assert found.amax < 0.95 * np.abs(values).max()
    assert error(found.amax) <= 1.01 * error(brute)


@pytest.mark.parametrize("calibrator", [Calibrator.mse, Calibrator.entropy])
def test_levels_on_one_side_of_zero_allow_a_wider_range(calibrator: Calibrator) -> None:
    """uint8 has twice as many levels for a tensor that is never negative; for a symmetric one it has as many."""
    values = np.random.default_rng(0).normal(size=200_000) ** 3
    one_sided, both = (
        {
            activations: choose_range(
                statistics_of(seen), calibrator, percentile=100.0, activations=activations
            ).amax
            for activations in Activations
        }
        for seen in (np.abs(values), values)
    )
    assert one_sided[Activations.uint8] > 1.05 * one_sided[Activations.int8]
    assert both[Activations.uint8] == pytest.approx(both[Activations.int8], rel=0.05)


@pytest.mark.parametrize("calibrator", Calibrator)
@pytest.mark.filterwarnings("error")
def test_tensor_of_zeros_has_an_empty_range(calibrator: Calibrator) -> None:
    zeros = TensorStatistics(0.0, 0.0, np.zeros(NUM_BINS, np.int64))
    assert choose_range(zeros, calibrator, percentile=99.9).amax == 0


def test_range_of_a_relu_keeps_its_sign() -> None:
    values = np.maximum(np.random.default_rng(0).standard_normal(100_000), 0)
    found = choose_range(statistics_of(values), Calibrator.percentile, percentile=99.9)
    assert found.low == 0
    assert 3 < found.high < 4


def test_images_that_would_spoil_ranges_are_refused() -> None:
    good_NCHW = tiny.images(4).numpy()
    check_images(good_NCHW, max_abs=20.0)
    outlier_NCHW = good_NCHW.copy()
    outlier_NCHW[2, 1, 5, 5] = 1e6
    with pytest.raises(DataError, match=r"reach 1e\+06 .*max_abs_input"):
        check_images(outlier_NCHW, max_abs=20.0)
    outlier_NCHW[2, 1, 5, 5] = np.nan
    with pytest.raises(DataError, match="NaN"):
        check_images(outlier_NCHW, max_abs=20.0)


def test_a_blank_frame_is_left_out_and_counted_c4(caplog: pytest.LogCaptureFixture) -> None:
    images_NHWC = np.random.default_rng(0).integers(256, size=(5, 8, 8, 3)).astype(np.uint8)
    assert without_blank_images(images_NHWC) is images_NHWC
    images_NHWC[3], images_NHWC[4] = (0, 10, 20), 0
    assert (without_blank_images(images_NHWC) == images_NHWC[:3]).all()
    assert "2 of 5 calibration images hold one value only" in caplog.text and "number 3" in caplog.text
    with pytest.raises(DataError, match=r"all 2 calibration images hold one value only.*calibration\.txt"):
        without_blank_images(images_NHWC[3:])


def test_one_nan_in_a_later_batch_is_found() -> None:
    graph = export_graph(tiny.make(tiny.Straight), tiny.card(), height=tiny.SIZE, width=tiny.SIZE, opset=20)
    good_NCHW, bad_NCHW = tiny.images(1).numpy(), tiny.images(1).numpy().copy()
    bad_NCHW[0, 0, 0, 0] = np.nan
    with pytest.raises(ArtifactError, match="tensor 'image'"):
        collect_statistics(graph, lambda: [good_NCHW, bad_NCHW, good_NCHW], ["image"])


def test_a_tensor_that_is_not_finite_is_named() -> None:
    graph = export_graph(tiny.make(tiny.Straight), tiny.card(), height=tiny.SIZE, width=tiny.SIZE, opset=20)
    for tensor in graph.graph.initializer:
        if tensor.name == "classifier/Conv:bias":
            tensor.CopyFrom(numpy_helper.from_array(np.full(3, np.nan, dtype=np.float32), tensor.name))
    with pytest.raises(ArtifactError, match=r"tensor 'classifier/Conv'.* finite"):
        collect_statistics(graph, lambda: [tiny.images(1).numpy()], ["image", "classifier/Conv"])


def test_windows_folded_into_the_batch_count_for_the_limit_of_memory_b8(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 windows of an image become 16 rows of an axis that is open in the graph, as in Swin."""
    shape = numpy_helper.from_array(np.array([-1, 12]), "shape")
    weight = numpy_helper.from_array(np.eye(12, dtype=np.float32), "weight")
    image, values = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes)
        for name, sizes in (("image", ["batch", 3, 8, 8]), ("values", [None, 12]))
    )
    nodes = [
        helper.make_node("Reshape", ["image", "shape"], ["windows"], "windows"),
        helper.make_node("MatMul", ["windows", "weight"], ["hidden"], "hidden"),
        helper.make_node("Relu", ["hidden"], ["values"], "values"),
    ]
    graph = helper.make_graph(nodes, "windows", [image], [values], [shape, weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    bytes_of_one_image = 2 * 4 * 3 * 8 * 8
    monkeypatch.setattr(calibration, "_MAX_BYTES", 2 * bytes_of_one_image)
    images_NCHW = np.random.default_rng(0).standard_normal((5, 3, 8, 8)).astype(np.float32)
    read = calibration._tensor_reader(onnx.shape_inference.infer_shapes(model), ["windows", "hidden"])
    found = [(name, len(values)) for name, values in read(images_NCHW)]
    assert found == [("windows", 32), ("hidden", 32)] * 2 + [("windows", 16), ("hidden", 16)]
