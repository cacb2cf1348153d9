import dataclasses
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tasks.core.errors import ArtifactError, BuildFailed, ConfigError, DataError, TargetMismatch
from tasks.parts.data.dataset import normalise, open_split
from tasks.parts.engines import open_engine as opening
from tasks.parts.engines.frame_engine.sessions import BoundBatch
from tasks.parts.engines.manifest import read_engine_manifest, write_engine_manifest
from tasks.parts.engines.onnxruntime.layers import find_nodes_elsewhere, record_nodes, without_profiler
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.engines.runner import OperatorTime
from tasks.parts.engines.runtimes import Precision, Runtime
from tasks.parts.onnx_session import open_session
from tests.tasks.conftest import AOTINDUCTOR, TOLD_BY_CI

FLOAT_TARGETS = ["cpu_torch", "cpu_onnxruntime", "cpu_openvino", AOTINDUCTOR]
DECLARED_TARGETS = ["cpu_torch", "cpu_onnxruntime", "cpu_openvino", "cpu_openvino_bf16", "cpu_aotinductor"]


@pytest.fixture(name="images_NCHW", scope="module")
def draw_images(workshop):
    card = read_engine_manifest(workshop.engine("float", "cpu_onnxruntime")).card
    return normalise(open_split(workshop.data, "test")[0][:4], card.mean, card.std)


def copy_of(engine: Path, folder: Path) -> Path:
    copied = folder / "engine"
    copied.mkdir()
    for file in engine.iterdir():
        (copied / file.name).write_bytes(file.read_bytes())
    return copied


@pytest.mark.parametrize("target", FLOAT_TARGETS)
@pytest.mark.parametrize("batch", [1, 3, 4])
def test_all_runtimes_give_the_logits_of_the_checkpoint(workshop, images_NCHW, target, batch):
    import torch

    from tasks.parts.networks.checkpoint import load_checkpoint

    network, _ = load_checkpoint(workshop.checkpoint)
    with torch.inference_mode():
        expected = network(torch.from_numpy(images_NCHW[:batch])).numpy()
    with open_engine(workshop.engine("float", target)) as runner:
        logits_NCHW = runner.infer(images_NCHW[:batch])
    assert logits_NCHW.shape == expected.shape
    np.testing.assert_allclose(logits_NCHW, expected, atol=1e-3 * np.abs(expected).max())


@pytest.mark.parametrize(
    "module", ["tasks.parts.builders.build", "tasks.parts.measuring.engine_process", "benchmarks"]
)
def test_openvino_tells_its_maker_nothing(tmp_path, module):
    environment = {name: value for name, value in os.environ.items() if name not in TOLD_BY_CI}
    command = [sys.executable, "-c", f"import {module}; import openvino"]
    subprocess.run(command, env=environment | {"HOME": str(tmp_path)}, check=True)
    assert not (tmp_path / "intel").exists()  # where it would keep the number of this user


CLOSES_IN_A_THREAD = """
import gc, signal, subprocess, sys, threading
from pathlib import Path
from tasks.parts.engines.open_engine import open_engine

def close():
    engine.pop().__exit__(None, None, None)
    gc.collect()

engine = [open_engine(Path(sys.argv[1])).__enter__()]
thread = threading.Thread(target=close)
thread.start()
thread.join()
signal.signal(signal.SIGCHLD, lambda *_: print("told"))
subprocess.run(["true"])
"""


def test_openvino_reads_what_is_in_the_array_at_each_call(workshop, images_NCHW):
    """It is bound once: changed in place, another one, one that cannot be shared, and the first one again."""
    engine = workshop.engine("float", "cpu_openvino")
    first, second = images_NCHW[:1].copy(), images_NCHW[1:2].copy()
    with open_engine(engine) as runner, open_engine(engine) as plain:
        logits = [plain.infer(each) for each in (first, second)]
        assert np.abs(logits[0] - logits[1]).max() > 1e-3
        places = [first, first, second, first]
        for array, content, expected in zip(places, (0, 1, 1, 0), (0, 1, 1, 0), strict=True):
            array[...] = images_NCHW[content : content + 1]
            np.testing.assert_array_equal(runner.run(array), logits[expected])
        frozen, strided = first.copy(), np.asfortranarray(images_NCHW[1:2])
        frozen.flags.writeable = False
        for _ in range(2):
            np.testing.assert_array_equal(runner.run(frozen), logits[0])
            np.testing.assert_array_equal(runner.run(strided), logits[1])
        strided[...] = images_NCHW[:1]
        np.testing.assert_array_equal(runner.run(strided), logits[0])
        np.testing.assert_array_equal(runner.run(images_NCHW[:2]), plain.infer(images_NCHW[:2]))


def test_openvino_that_was_closed_in_another_thread_leaves_signals_alone(workshop):
    """Its plugin, unloaded there, would leave this thread a stack for signals that is gone."""
    command = [sys.executable, "-c", CLOSES_IN_A_THREAD, str(workshop.engine("float", "cpu_openvino"))]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "told\n"


@pytest.mark.parametrize("target", FLOAT_TARGETS)
def test_infer_hands_out_memory_of_its_own(workshop, images_NCHW, target):
    with open_engine(workshop.engine("float", target)) as runner:
        first = runner.infer(images_NCHW[:1])
        kept = first.copy()
        runner.infer(images_NCHW[1:2])
    np.testing.assert_array_equal(first, kept)


@pytest.mark.parametrize("target", FLOAT_TARGETS)
def test_description_and_profile_come_from_the_runtime(workshop, images_NCHW, target):
    with open_engine(workshop.engine("float", target)) as runner:
        description = runner.describe()
        times = runner.profile(images_NCHW[:1], num_iterations=3)
    assert description.runtime == runner.manifest.target.runtime
    assert description.num_threads == runner.manifest.target.num_threads
    assert description.provider == runner.manifest.provider and description.options
    assert any("conv" in time.op_type.lower() for time in times)
    assert times[0].milliseconds >= times[-1].milliseconds > 0 or times[-1].milliseconds == 0


@pytest.mark.parametrize("target", FLOAT_TARGETS)
def test_lanes_that_work_at_the_same_time_do_not_disturb_each_other(workshop, images_NCHW, target):
    with open_engine(workshop.engine("float", target)) as runner:
        expected = [runner.infer(image[None]) for image in images_NCHW[:3]]
        barrier = threading.Barrier(3)

        def drive(lane, image_CHW):
            with lane:
                barrier.wait()
                return [lane.run(image_CHW[None]).copy() for _ in range(20)]

        with ThreadPoolExecutor(3) as pool:
            found = list(pool.map(drive, runner.open_concurrent(3), images_NCHW[:3]))
        for logits, right in zip(found, expected, strict=True):
            np.testing.assert_allclose(logits, [right] * 20, rtol=1e-4, atol=1e-4)
        assert runner.time_on_device(images_NCHW[:1], 2) is None


@pytest.mark.parametrize("target", FLOAT_TARGETS)
def test_batch_that_does_not_fit_is_refused_with_both_shapes(workshop, images_NCHW, target):
    with open_engine(workshop.engine("float", target)) as runner:
        with pytest.raises(DataError, match=r"float64.*expected float32 \[1\.\.4, 3, 64, 96\]"):
            runner.infer(images_NCHW.astype(np.float64))
        with pytest.raises(DataError, match=r"\[1, 64, 96, 3\]"):
            runner.infer(np.zeros((1, 64, 96, 3), np.float32))
        with pytest.raises(DataError, match=rf"batch of 5.*target\.{target}\.max_batch"):
            runner.infer(np.zeros((5, 3, 64, 96), np.float32))
        with pytest.raises(DataError, match="batch of 0"):
            runner.infer(np.zeros((0, 3, 64, 96), np.float32))


def test_nan_in_an_image_is_refused_with_its_index(workshop, images_NCHW):
    broken = images_NCHW.copy()
    broken[2, 0, 5, 5] = np.nan
    with (
        open_engine(workshop.engine("float", "cpu_onnxruntime")) as runner,
        pytest.raises(DataError, match="NaN or infinity in image 2"),
    ):
        runner.infer(broken)


@pytest.mark.parametrize("target", FLOAT_TARGETS)
def test_changed_or_truncated_engine_is_never_loaded(workshop, tmp_path, target, monkeypatch):
    engine = copy_of(workshop.engine("float", target), tmp_path)
    file = engine / read_engine_manifest(engine).file
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(ArtifactError, match=r"sha256 .* the manifest says .* is not loaded"):
        open_engine(engine)
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ArtifactError, match="sha256"):
        open_engine(engine)
    file.unlink()
    with pytest.raises(ArtifactError, match="not found"):
        open_engine(engine)


def test_manifest_that_names_a_file_elsewhere_is_refused(workshop, tmp_path):
    engine = copy_of(workshop.engine("float", "cpu_onnxruntime"), tmp_path)
    manifest = read_engine_manifest(engine)
    write_engine_manifest(engine, dataclasses.replace(manifest, file=f"../engine/{manifest.file}"))
    with pytest.raises(ArtifactError, match="expected a plain file name"):
        open_engine(engine)


def test_damaged_manifest_is_named(tmp_path):
    with pytest.raises(ArtifactError, match=r"manifest\.json: not found"):
        read_engine_manifest(tmp_path)
    (tmp_path / "manifest.json").write_text('{"target": {}}', encoding="utf-8")
    with pytest.raises(ArtifactError, match="damaged or of another version"):
        read_engine_manifest(tmp_path)


@pytest.mark.parametrize("target", ["cpu_openvino", AOTINDUCTOR])
def test_engine_of_another_runtime_version_is_refused_before_its_file_is_read(workshop, tmp_path, target):
    engine = copy_of(workshop.engine("float", target), tmp_path)
    runtime = target.removeprefix("cpu_")
    manifest = read_engine_manifest(engine)
    (engine / manifest.file).write_bytes(b"never read")
    write_engine_manifest(engine, dataclasses.replace(manifest, runtime_version="2025.1.0"))
    with pytest.raises(TargetMismatch, match=rf"compiled by {runtime} 2025\.1\.0, this machine has \d"):
        open_engine(engine)
    declared = dataclasses.replace(manifest.target, runtime_version="2024.6")
    write_engine_manifest(engine, dataclasses.replace(manifest, target=declared))
    with pytest.raises(TargetMismatch, match=rf"declares {runtime} 2024\.6.*worker of its work pool"):
        open_engine(engine)


@pytest.mark.parametrize("target", ["cpu_openvino", AOTINDUCTOR])
def test_native_code_of_another_cpu_is_refused(workshop, tmp_path, target):
    engine = copy_of(workshop.engine("float", target), tmp_path)
    manifest = read_engine_manifest(engine)
    write_engine_manifest(engine, dataclasses.replace(manifest, isa=("avx2", "amx_imaginary")))
    with pytest.raises(TargetMismatch, match=r"avx2, amx_imaginary.*Build it again here"):
        open_engine(engine)


def test_int8_engine_of_a_cpu_with_vnni_is_refused_without_it(workshop, tmp_path, monkeypatch):
    engine = copy_of(workshop.engine("quantized", "cpu_onnxruntime"), tmp_path)
    manifest = read_engine_manifest(engine)
    write_engine_manifest(engine, dataclasses.replace(manifest, isa=("avx2", "avx_vnni")))
    monkeypatch.setattr("tasks.parts.cpu.read_cpu_flags", lambda: frozenset({"ssse3", "avx2"}))
    with pytest.raises(TargetMismatch, match=r"built on a CPU with VNNI; .*Build it again here"):
        open_engine(engine)
    write_engine_manifest(engine, dataclasses.replace(manifest, isa=("avx2",)))
    with open_engine(engine):
        pass


def test_version_prefix_ends_at_a_dot(workshop):
    from tasks.parts.engines.machine import check_runtime_version

    target = workshop.target("cpu_onnxruntime", runtime_version="1.3")
    check_runtime_version(target, "1.3.1")
    check_runtime_version(target, "1.3")
    with pytest.raises(TargetMismatch, match=r"declares onnxruntime 1\.3, this machine has 1\.31\.1"):
        check_runtime_version(target, "1.31.1")


def test_absent_provider_is_an_error_and_no_silent_fallback(workshop):
    with pytest.raises(TargetMismatch, match=r"no provider CUDAExecutionProvider; .*: .*CPUEx"):
        open_session(workshop.graph, provider="CUDAExecutionProvider", num_threads=1)


def test_bound_buffers_give_the_logits_of_a_plain_run(workshop, images_NCHW):
    session = open_session(workshop.graph, provider="CPUExecutionProvider", num_threads=1)
    zeros_NCHW = np.zeros((2, 3, 64, 96), np.float32)
    bound = BoundBatch(session, "cpu", zeros_NCHW, zeros_NCHW)
    for start in (0, 2, 1):
        batch_NCHW = images_NCHW[start : start + 2]
        expected = session.run(None, {session.get_inputs()[0].name: batch_NCHW})[0]
        np.testing.assert_array_equal(bound.run(batch_NCHW), expected)


@pytest.mark.parametrize(
    ("profiled_ms", "nodes_ms", "own_ms"),
    [
        ([10.0, 10.0, 10.0], 21.0, [7.0, 7.0, 7.0]),  # 3 ms each were the profiler's
        ([10.0, 10.0, 1.0], 12.0, [5.95, 5.95, 0.1]),  # one can give 0.9 only, the others the rest
        ([10.0, 5.0], 16.0, [10.0, 5.0]),  # nothing was added
        ([10.0, 5.0], 0.0, [1.0, 0.5]),
        ([], 1.0, []),
    ],
)
def test_what_the_profiler_adds_is_taken_off_all_nodes(profiled_ms, nodes_ms, own_ms):
    profiled = [OperatorTime(f"node{index}", "Conv", value) for index, value in enumerate(profiled_ms)]
    found = without_profiler(profiled, nodes_ms)
    assert [time.milliseconds for time in found] == pytest.approx(own_ms)
    assert [time.name for time in found] == [time.name for time in profiled]


def test_nodes_that_another_provider_ran_are_found_in_the_record_of_a_run(workshop, images_NCHW):
    events = record_nodes(workshop.graph, images_NCHW[:1], 1, provider="CPUExecutionProvider", num_threads=1)
    assert find_nodes_elsewhere(events, "CPUExecutionProvider") == {}
    found = find_nodes_elsewhere(events, "CUDAExecutionProvider")
    assert sum("Conv" in kind for kind in found.values()) > 10


def test_session_of_a_torn_graph_is_a_typed_error(workshop):
    with pytest.raises(BuildFailed, match=r"ONNX Runtime .* refuses the graph"):
        open_session(workshop.graph.read_bytes()[:-500], provider="CPUExecutionProvider", num_threads=1)


def test_opening_an_engine_imports_no_other_runtime(workshop):
    program = (
        "import sys; from pathlib import Path; from tasks.parts.engines.open_engine import open_engine\n"
        "with open_engine(Path(sys.argv[1])): pass\n"
        "print([m for m in ('torch', 'onnx', 'onnxruntime', 'openvino', 'lightning') if m in sys.modules])"
    )
    root = Path(opening.__file__).resolve().parents[3]
    for target, expected in (("cpu_onnxruntime", "['onnxruntime']"), ("cpu_openvino", "['openvino']")):
        command = [sys.executable, "-c", program, str(workshop.engine("float", target))]
        assert subprocess.check_output(command, cwd=root, text=True).strip() == expected


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "Cpu Torch", r"name is 'Cpu Torch', expected a string that is made of lower-case"),
        ("runtime_version", "new", r"runtime_version is 'new'"),
        ("device", "tpu", r"device is tpu, expected cpu or cuda for runtime onnxruntime"),
        ("device", "cuda", r"gpu is None, expected a GPU for cuda"),
        ("num_threads", 0, r"num_threads is 0, expected an integer from 1 to 1024"),
        ("max_batch", -1, r"max_batch is -1"),
        ("channel_multiple", 12, r"channel_multiple is 12, expected one of 1, 8, 16, 32, 64"),
        ("opsets", [20], r"opsets is \[20\], expected \[lowest, highest\]"),
        ("min_agreement_db", -1.0, r"min_agreement_db is -1\.0"),
        ("precision", Precision.bf16, r"precision is bf16, expected f32 for runtime onnxruntime"),
    ],
)
def test_impossible_target_is_refused_with_its_key(workshop, field, value, message):
    with pytest.raises(ConfigError, match=message):
        workshop.target("cpu_onnxruntime", **{field: value})


def test_every_declared_target_is_valid(workshop):
    found = {name: workshop.target(name).runtime for name in DECLARED_TARGETS}
    in_test_tensorrt = {Runtime.tensorrt, Runtime.tensorrt_rtx}
    assert set(found.values()) == set(Runtime) - in_test_tensorrt
