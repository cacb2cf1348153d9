"""benchmarks/load.py: OpenVINO's benchmark_app beside our runner, and its tables."""

import random
import shutil
from pathlib import Path

import pytest

from benchmarks.load import AGAIN, APP, OURS, app_command, compare, read_app, run_round
from tasks.build_engine import build_engine
from tasks.parts.engines.manifest import read_engine_manifest
from tests.tasks.conftest import Workshop, workshop

__all__ = ["workshop"]


@pytest.mark.parametrize(("reads", "max_batch"), [("frames", 4), ("normalised", 1)])
def test_benchmark_app_runs_the_graph_of_an_engine(
    workshop: Workshop, tmp_path: Path, reads: str, max_batch: int
) -> None:
    target = workshop.target("cpu_openvino", reads=reads, max_batch=max_batch)
    build_engine(target, model=workshop.quantized, images=workshop.images, out=tmp_path)
    engine = tmp_path / "engine"
    found = run_round(engine, read_engine_manifest(engine), 0.2, random.Random(0))
    assert list(found) == [OURS, AGAIN, APP]
    for run in found.values():
        assert run["latency_ms_p50"] > 0 and run["throughput_per_s"] > 0
        # one call after the other: no more images than fit between the medians, but for slower calls
        assert run["throughput_per_s"] * run["latency_ms_p50"] < 1500


def test_app_that_fails_says_why(workshop: Workshop, tmp_path: Path) -> None:
    engine = Path(shutil.copytree(workshop.engine("quantized", "cpu_openvino"), tmp_path / "engine"))
    (engine / "graph.onnx").unlink()
    with pytest.raises(SystemExit, match="benchmark_app failed"):
        from benchmarks.load import run_app

        run_app(engine, read_engine_manifest(engine), 1.0)


def test_app_has_the_options_of_the_target(workshop: Workshop) -> None:
    engine = workshop.engine("quantized", "cpu_openvino")
    words = app_command(engine, read_engine_manifest(engine), 1.2)
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options["-nthreads"] == options["-nstreams"] == "1" and options["-t"] == "2"
    assert (options["-shape"], options["-data_shape"]) == ("[1..4,3,64,96]", "[1,3,64,96]")
    assert (options["-ip"], options["-infer_precision"]) == ("f32", "f32")


def test_numbers_of_the_app_are_in_milliseconds_whatever_it_prints() -> None:
    text = "[ INFO ]    Median:        {} \n[ INFO ] Throughput:   2237.34 FPS"
    assert read_app(text.format("120.5 us")).latency_ms_p50 == pytest.approx(0.1205)
    assert read_app(text.format("12.5 ms")).latency_ms_p50 == 12.5
    with pytest.raises(SystemExit, match="no median"):
        read_app("[ INFO ] Throughput: 3 FPS")


@pytest.mark.parametrize(("app_ms", "verdict"), [(1.001, "yes"), (1.2, "no")])
def test_difference_is_held_against_that_of_two_equal_runs(app_ms: float, verdict: str) -> None:
    rounds = [
        {
            OURS: {"latency_ms_p50": 1.0, "throughput_per_s": 1000.0},
            AGAIN: {"latency_ms_p50": again, "throughput_per_s": 1000.0 / again},
            APP: {"latency_ms_p50": app_ms, "throughput_per_s": 1000.0 / app_ms},
        }
        for again in (0.99, 1.01) * 6
    ]
    lines = compare(rounds).splitlines()
    assert [line.endswith(f"| {verdict} |") for line in lines[4:]] == [True, True]
