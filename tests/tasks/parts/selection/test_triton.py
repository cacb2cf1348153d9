"""Bundles in a Triton server: the masks of infer.py, to the pixel."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
from google.protobuf import text_format
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from tritonclient.grpc import model_config_pb2

from benchmarks.triton import GRPC, HTTP, IN_PROCESS, describe, measure
from benchmarks.triton_server import WHEEL, Installed, TritonServer, install, serve
from tasks.build_engine import build_engine
from tasks.parts.data.dataset import open_split
from tasks.parts.engines.frame_engine.client import ServedModel, open_served
from tasks.parts.engines.frame_engine.engine import load_engine
from tasks.parts.engines.manifest import sha256_of
from tasks.parts.selection.bundle import copy_frame_engine, write_bundle
from tasks.parts.selection.triton import Serving, configure_served, write_served
from tests.services import wait_for
from tests.tasks.conftest import REPOSITORY, TOLD_BY_CI, Workshop
from tests.wheels import unpack_wheel

BATCHED = ("cpu_onnxruntime", "cpu_openvino_batch")
TARGETS = (*BATCHED, "cpu_openvino")
SERVINGS = {
    "cpu_onnxruntime": Serving(instances=2, queue_delay_us=2000),
    "cpu_openvino_batch": Serving(queue_delay_us=20_000),
    "cpu_openvino": Serving(max_batch=4, queue_delay_us=2000),  # an engine for one frame, in a loop
}
PROTOCOLS = ("http", "grpc")


@dataclass(frozen=True)
class Served:
    """Bundles and a server that runs them all."""

    server: TritonServer
    bundles: Mapping[str, Path]
    frames_NHWC: np.ndarray
    expected: Mapping[str, np.ndarray]
    """The masks of infer.py."""

    def url(self, protocol: str) -> str:
        return self.server.grpc if protocol == "grpc" else self.server.http

    def model(self, target: str) -> str:
        return f"quantized-{target}"

    def statistics(self, target: str) -> Any:
        """Return what the server counted for a model."""
        with triton_http.InferenceServerClient(self.server.http) as client:
            return client.get_inference_statistics(self.model(target))["model_stats"][0]

    def settled_statistics(self, target: str, num_counted: int = 0) -> Any:
        """Return the same when nothing is left to count, which the server does after it has answered: a busy
        one takes long over a batch, hence the least ``num_counted`` frames."""
        last = self.statistics(target)

        def is_settled() -> Any:
            nonlocal last
            before, last = last, self.statistics(target)
            is_still = before["inference_count"] == last["inference_count"]
            return last if is_still and int(last["inference_count"]) >= num_counted else None

        return wait_for(is_settled, "the server to count what it answered", every_s=0.8)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    site = unpack_wheel(WHEEL, tmp_path_factory.mktemp("triton"))
    try:
        return install(site)
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def served(
    workshop: Workshop, installed: Installed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Build engines on frames, and serve their bundles and those of two small graphs."""
    root = tmp_path_factory.mktemp("served")
    frames_NHWC = make_frames(workshop, 32)
    np.save(root / "frames.npy", frames_NHWC)
    bundles, expected = {}, {}
    for target in TARGETS:
        bundles[target] = bundle_of(workshop, target, root, SERVINGS[target])
        answers = root / f"{target}.npy"
        done = run_script(bundles[target] / "infer.py", root / "frames.npy", answers)
        assert done.returncode == 0, done.stderr
        expected[target] = np.load(answers)
    for task in ("classification", "values"):
        bundles[task], expected[task] = write_small_bundle(task, root / task, frames_NHWC)
    repositories = [bundle / "triton" for bundle in bundles.values()]
    with serve(installed, repositories, root / "server.log") as server:
        yield Served(server, bundles, frames_NHWC, expected)


def bundle_of(workshop: Workshop, target: str, root: Path, serving: Serving) -> Path:
    built, bundle = root / f"built-{target}", root / f"bundle-{target}"
    built.mkdir()
    declared = workshop.target(
        target, reads="frames", gives="classes", max_batch=32 if target in BATCHED else 1
    )
    report = build_engine(declared, model=workshop.quantized, images=workshop.images, out=built)
    assert report.status == "built", report.reason
    row = {"variant": "quantized", "target": target}
    assert write_bundle(built / "engine", row, bundle, serving)
    return bundle


def write_small_bundle(task: str, bundle: Path, frames_NHWC: np.ndarray) -> tuple[Path, np.ndarray]:
    """Write a bundle of an engine on normalised images whose outputs are the means of the channels; return it with
    its answers."""
    import onnxruntime

    axes = numpy_helper.from_array(np.array([2, 3]), "axes")
    means = helper.make_node("ReduceMean", ["image", "axes"], ["means"], keepdims=0)
    shape = ["batch", 3, *frames_NHWC.shape[1:3]]
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, shape)
    output = helper.make_tensor_value_info("means", TensorProto.FLOAT, ["batch", 3])
    graph = helper.make_graph([means], "means", [image], [output], [axes])
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])
    copy_frame_engine(bundle)
    (bundle / "engine.onnx").write_bytes(model.SerializeToString())
    card = {
        "runtime": "onnxruntime",
        "package": "onnxruntime",
        "runtime_version": onnxruntime.__version__,
        "file": "engine.onnx",
        "sha256": sha256_of(bundle / "engine.onnx"),
        "task": task,
        "classes": ["red", "green", "blue"],
        "height": frames_NHWC.shape[1],
        "width": frames_NHWC.shape[2],
        "logits_shape": [3],
        "mean": [0.5, 0.5, 0.5],
        "reading": {"types": ["uint8"], "value_range": None, "resize_mode": "resize", "window_overlap": None},
        "std": [0.25, 0.25, 0.25],
        "reads": "normalised",
        "gives": "logits",
        "threshold": None,
        "batches": [[1, 8]],
        "options": {
            "provider": "CPUExecutionProvider",
            "provider_options": {},
            "num_threads": 1,
            "needs_vnni": False,
        },
    }
    (bundle / "model.json").write_text(json.dumps(card))
    write_served(bundle / "triton" / f"quantized-{task}", f"quantized-{task}", card, Serving())
    means_NC = (frames_NHWC.mean(axis=(1, 2)) / 255 - 0.5) / 0.25
    return bundle, means_NC if task == "values" else means_NC.argmax(axis=1)


def make_frames(workshop: Workshop, count: int) -> np.ndarray:
    """Return frames of the test split, shifted so that no two are equal."""
    images_NHWC = np.asarray(open_split(workshop.data, "test")[0])
    return np.stack([np.roll(images_NHWC[i % len(images_NHWC)], 3 * i, axis=(0, 1)) for i in range(count)])


def run_script(script: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script of a bundle as a user would, away from the repository."""
    command = [sys.executable, "-I", str(script), *map(str, arguments)]
    environment = {
        name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", *TOLD_BY_CI}
    }
    return subprocess.run(
        command, cwd=script.parent.parent, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("target", TARGETS)
def test_client_gets_the_masks_of_infer(served: Served, tmp_path: Path, target: str, protocol: str) -> None:
    np.save(tmp_path / "frames.npy", served.frames_NHWC)
    flags = ["--grpc"] if protocol == "grpc" else []
    found = tmp_path / "found.npy"
    done = run_script(
        served.bundles[target] / "client.py",
        tmp_path / "frames.npy",
        *("--out", found, "--url", served.url(protocol), *flags),
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(found), served.expected[target])
    assert len(np.unique(served.expected[target])) > 1


def test_client_sends_images_and_writes_masks_named_after_them(served: Served, tmp_path: Path) -> None:
    for number in (3, 4):
        Image.fromarray(served.frames_NHWC[number]).save(tmp_path / f"frame-{number}.png")
    done = run_script(
        served.bundles["cpu_onnxruntime"] / "client.py",
        *(tmp_path / f"frame-{number}.png" for number in (4, 3)),
        *("--out", tmp_path / "masks", "--url", served.server.http, "--profile"),
    )
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in (tmp_path / "masks").iterdir()) == ["frame-3.png", "frame-4.png"]
    for number in (3, 4):
        mask_HW = np.asarray(Image.open(tmp_path / "masks" / f"frame-{number}.png"))
        np.testing.assert_array_equal(mask_HW, served.expected["cpu_onnxruntime"][number])
    assert "2 frames, " in done.stderr and re.search(r"^run +\d", done.stderr, re.MULTILINE)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("task", ["classification", "values"])
def test_classes_of_images_and_values_are_served(served: Served, task: str, protocol: str) -> None:
    card = json.loads((served.bundles[task] / "model.json").read_text())
    is_grpc = protocol == "grpc"
    with open_served(card, served.model(task), served.url(protocol), is_grpc=is_grpc, at_once=8) as engine:
        found = engine.answer(served.frames_NHWC)
    assert found.shape == served.expected[task].shape
    np.testing.assert_allclose(found, served.expected[task], atol=1e-5)


@pytest.mark.parametrize("target", TARGETS)
def test_requests_that_wait_run_in_one_batch(served: Served, target: str) -> None:
    before = served.settled_statistics(target)
    client = triton_grpc.InferenceServerClient(served.server.grpc)

    def ask(first: int) -> np.ndarray:
        """Send one or two frames."""
        frames_NHWC = served.frames_NHWC[first : first + 1 + first % 2]
        tensor = triton_grpc.InferInput("frames", list(frames_NHWC.shape), "UINT8")
        tensor.set_data_from_numpy(frames_NHWC)
        answers_NHW = client.infer(served.model(target), [tensor]).as_numpy("classes")
        np.testing.assert_array_equal(answers_NHW, served.expected[target][first : first + len(frames_NHWC)])
        return answers_NHW

    with ThreadPoolExecutor(8) as pool:
        num_frames = sum(map(len, pool.map(ask, [*range(31)] * 4)))
    client.close()
    after = served.settled_statistics(target, int(before["inference_count"]) + num_frames)
    counted = {name: int(after[name]) - int(before[name]) for name in ("inference_count", "execution_count")}
    assert counted["inference_count"] == num_frames
    assert counted["execution_count"] < num_frames
    sizes = {int(batch["batch_size"]) for batch in after["batch_stats"]}
    assert max(sizes) > 2, "more than one request, as no request holds more than two frames"
    assert max(sizes) <= (SERVINGS[target].max_batch or 32)


def test_both_instances_are_warm_and_work(served: Served) -> None:
    test_requests_that_wait_run_in_one_batch(served, "cpu_onnxruntime")
    log = served.server.log.read_text()
    for instance in ("quantized-cpu_onnxruntime_0_0", "quantized-cpu_onnxruntime_0_1"):
        for size in (1, 31, 32):
            assert f"instance {instance} is running warmup sample 'batch of {size}'" in log
        executed = re.findall(
            rf"model {instance}, instance \S+, executing (\d+) requests", log
        ) or re.findall(rf"instance {instance}, executing (\d+) requests", log)
        assert len(executed) > 32, "more than the warm-up"
    assert "Traceback" not in log and "failed to run warmup" not in log


def test_server_tells_why_a_model_cannot_be_loaded(
    served: Served, installed: Installed, tmp_path: Path
) -> None:
    """One repository was copied out of its bundle, the engine of the other one was changed."""
    copied, damaged = tmp_path / "copied", tmp_path / "damaged"
    shutil.copytree(served.bundles["cpu_onnxruntime"] / "triton", copied)
    shutil.copytree(served.bundles["cpu_openvino"], damaged)
    engine = damaged / "engine.blob"
    engine.write_bytes(engine.read_bytes()[:-1])
    log, before = tmp_path / "server.log", set(Path("/dev/shm").iterdir())
    with (
        pytest.raises(RuntimeError, match="tritonserver is not ready"),
        serve(installed, [copied, damaged / "triton"], log),
    ):
        pass
    assert not [path for path in Path("/dev/shm").glob("triton-*") if path not in before]
    told = log.read_text()
    assert "holds no frame_engine, expected the bundle that this model was written with" in told
    assert "was changed or truncated and is not loaded. Copy the bundle again." in told


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("size", [(121, 157), (32, 40)])
def test_frames_of_another_size_get_masks_of_that_size_a1(
    served: Served, protocol: str, size: tuple[int, int]
) -> None:
    """As those of infer.py, whose code the server's model runs; the client's way gives the same."""
    bundle = served.bundles["cpu_openvino"]
    frames_NHWC = np.random.default_rng(0).integers(0, 256, (2, *size, 3), np.uint8)
    card = json.loads((bundle / "model.json").read_text())
    expected = [load_engine(bundle).answer_image(frame) for frame in frames_NHWC]
    url, is_grpc = served.url(protocol), protocol == "grpc"
    model = ServedModel(served.model("cpu_openvino"), card["task"], url, is_grpc=is_grpc)
    found = model.infer(frames_NHWC)
    model.disconnect()
    assert found.shape == (2, *size) and len(np.unique(found)) > 1
    np.testing.assert_array_equal(found, expected)
    with open_served(card, served.model("cpu_openvino"), url, is_grpc=is_grpc, at_once=2) as engine:
        np.testing.assert_array_equal(engine.answer_image(frames_NHWC[0]), expected[0])


def test_server_refuses_frames_of_other_channels(served: Served) -> None:
    card = json.loads((served.bundles["cpu_openvino"] / "model.json").read_text())
    with (
        open_served(
            card, served.model("cpu_openvino"), served.server.http, is_grpc=False, at_once=1
        ) as engine,
        pytest.raises(ValueError, match=r"the server gave no answer \(.*unexpected shape for input 'frames'"),
    ):
        engine.answer(np.zeros((1, 64, 96, 4), np.uint8))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_client_says_what_is_wrong_in_one_line(served: Served, tmp_path: Path, protocol: str) -> None:
    bundle = Path(shutil.copytree(served.bundles["cpu_onnxruntime"], tmp_path / "bundle"))
    flags = ["--out", "masks.npy", *(["--grpc"] if protocol == "grpc" else [])]
    np.save(tmp_path / "frames.npy", served.frames_NHWC[:1])

    def fails(*arguments: str) -> str:
        done = run_script(bundle / "client.py", *arguments, *flags)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
        assert not (tmp_path / "masks.npy").exists()
        return done.stderr

    assert "no Triton server answers" in fails("frames.npy", "--url", "127.0.0.1:9")
    url = ("--url", served.url(protocol))
    card = json.loads((bundle / "model.json").read_text())
    (bundle / "model.json").write_text(json.dumps(card | {"sha256": "0" * 64}))
    assert "model.json here says 000000000000... Copy the same bundle to both sides." in fails(
        "frames.npy", *url
    )
    (bundle / "report.json").write_text(json.dumps({"variant": "other", "target": "cpu"}))
    assert "the server has no model other-cpu that is ready" in fails("frames.npy", *url)
    assert "masks.txt: is no image file" in fails("frames.npy", "masks.txt", *url)


def test_configuration_has_what_serving_says() -> None:
    card = {
        "task": "segmentation",
        "classes": [str(number) for number in range(300)],
        "height": 64,
        "width": 96,
        "mean": [0.5],
        "sha256": "abc",
        "batches": [[1, 1], [4, 8]],
        "options": {"gpu": {}},
    }
    text = configure_served("name", card, Serving(instances=3, queue_delay_us=500))
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert (config.name, config.backend, config.max_batch_size) == ("name", "python", 8)
    assert list(config.input[0].dims) == [-1, -1, 1] and list(config.output[0].dims) == [-1, -1]
    names = model_config_pb2.DataType
    assert (config.input[0].data_type, config.output[0].data_type) == (
        names.Value("TYPE_UINT8"),
        names.Value("TYPE_UINT16"),
    )
    assert config.dynamic_batching.max_queue_delay_microseconds == 500
    [group] = config.instance_group
    assert (group.kind, group.count, list(group.gpus)) == (
        model_config_pb2.ModelInstanceGroup.KIND_GPU,
        3,
        [0],
    )
    assert [sample.batch_size for sample in config.model_warmup] == [*range(1, 9)]
    assert config.parameters["sha256"].string_value == "abc"
    text = configure_served("name", card | {"options": {"properties": {}}}, Serving(max_batch=2))
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert config.max_batch_size == 2
    assert config.instance_group[0].kind == model_config_pb2.ModelInstanceGroup.KIND_CPU


def test_server_ends_with_the_process_that_started_it(installed: Installed, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    program = (
        "import sys, time; from pathlib import Path; from benchmarks.triton_server import Installed, serve\n"
        "installed = Installed(Path(sys.argv[1]), {'LD_LIBRARY_PATH': sys.argv[2]})\n"
        "with serve(installed, [Path('empty')], Path('server.log')): print('ready', flush=True); time.sleep(600)"
    )
    libraries = installed.environment["LD_LIBRARY_PATH"]
    starter = subprocess.Popen(
        [sys.executable, "-c", program, str(installed.folder), libraries],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None and starter.stdout.readline() == "ready\n"
    [server] = psutil.Process(starter.pid).children()
    assert server.name() == "tritonserver"
    starter.kill()
    starter.communicate()
    wait_for(lambda: not server.is_running() or server.status() == psutil.STATUS_ZOMBIE, "the server to end")


def test_benchmark_measures_each_form_once(served: Served) -> None:
    bundle = served.bundles["cpu_onnxruntime"]
    record: dict[str, Any] = {"capacities": [{"bundle": bundle.name, "capacity_per_s": 1000.0}], "rows": []}
    options = {"shares": [0.05], "seconds": 0.4, "num_rounds": 2, "num_lanes": 2}
    for _ in measure(bundle, served.server, record, **options):
        pass
    cells = [(row["round"], row["form"]) for row in record["rows"]]
    assert cells == [*((0, form) for form in (IN_PROCESS, HTTP, GRPC)), (1, HTTP), (1, GRPC), (1, IN_PROCESS)]
    for number in (0, 1):
        rows = [row for row in record["rows"] if row["round"] == number]
        assert len({row["num_frames"] for row in rows}) == 1 and rows[0]["num_frames"] > 0
        assert all(row["mean_batch"] >= 1 for row in rows if row["form"] != IN_PROCESS)
    assert [*measure(bundle, served.server, record, **options)] == []
    assert describe(record).count("| 50 (5% of one lane) |") == 3
