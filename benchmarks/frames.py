"""Measure what stands around an engine: from a raw frame, or a PNG file, to the mask.

``python -m benchmarks.frames [--sizes 64 256] [--rounds 100]`` after a run of the pipeline. The graph of a variant is
built for cpu_onnxruntime and cpu_openvino at each size, which changes its input only: the default network takes
any. All forms run in the same rounds in one process: the engine alone (normalised images in, logits out), the engine
that reads frames and gives classes, the plain engine with numpy around it, the same as the bundles ran it before
(copies of inputs and outputs, normalisation out of place), PNG bytes to mask, the engine on frames without
normalisation, which is the most that folding it into the first convolution could save, and with coarse classes. Then
frames of a camera are resized by Pillow and by both runtimes. Prints tables and writes
``benchmarks/results/frames.json`` and ``frames.md``.
"""

import argparse
import io
import json
import statistics
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper
from PIL import Image

from benchmarks.runtimes import DATA, in_onnxruntime, in_openvino, stage_config
from tasks.core.execute import ARTIFACTS
from tasks.core.reports import write_json
from tasks.parts.builders.build import build
from tasks.parts.builders.frames import FRAMES as FRAMES_INPUT
from tasks.parts.data.dataset import open_split
from tasks.parts.engines.description import on_frames
from tasks.parts.engines.frame_engine.engine import Engine
from tasks.parts.engines.frame_engine.pixels import scale_and_shift
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.manifest import GRAPH_FILE, plain_engine
from tasks.parts.engines.onnxruntime.runner import ENGINE_FILE
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.engines.rounds import rounds_ms
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.engines.target import Target
from tasks.parts.measuring.intervals import estimate_ratio
from tasks.parts.onnx_graphs.graph import CARD_KEY, read_graph, write_graph

RESULTS = Path(__file__).parent / "results" / "frames.json"
TARGETS = ("cpu_openvino", "cpu_onnxruntime")
ALONE, FRAMES, AROUND, BEFORE, PNG, BARE, COARSE, CONTROL = (
    "engine alone",
    "frame to mask, all in the engine",
    "frame to mask, numpy around it",
    "frame to mask, as before",
    "PNG to mask",
    "... without normalisation (bound)",
    "frame to mask, coarse classes",
    "engine alone, again (A/A)",
)
CAMERAS, RESIZED = ((1080, 1920), (480, 640)), 256


@dataclass(frozen=True)
class Resize:
    """One way to resize a frame."""

    where: str
    height: int
    width: int
    latency_ms_p50: float
    share_different: float
    """Share of the values that differ from Pillow's after rounding."""
    largest_difference: float


@dataclass(frozen=True)
class Row:
    """One form of an engine at one size."""

    target: str
    size: int
    form: str
    latency_ms_p50: float
    latency_ms_p99: float
    ratio: float
    """Time as a multiple of that of the engine alone, median over the rounds."""
    ratio_low: float
    ratio_high: float


def main() -> None:
    """Measure all forms and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument(
        "--model",
        type=Path,
        default=ARTIFACTS / "quantize_aware_train" / "model.onnx",
        help="graph of a variant",
    )
    options = parser.parse_args()
    if not options.model.is_file():
        raise SystemExit(f"{options.model} does not exist. Run the pipeline here first: make run")
    rows = []
    for size in options.sizes:
        for target in TARGETS:
            rows += measure(target, options.model, size, options.rounds)
            print(_table([row for row in rows if (row.target, row.size) == (target, size)]), flush=True)
    resizes = [row for size in CAMERAS for row in measure_resizes(*size, num_rounds=options.rounds // 4)]
    print(_resize_table(resizes))
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "versions": {name: version(name) for name in ("openvino", "onnxruntime", "numpy")},
        "model": str(options.model),
        "rounds": options.rounds,
        "rows": [vars(row) for row in rows],
        "resizes": [vars(row) for row in resizes],
    }
    write_json(RESULTS, record)
    RESULTS.with_suffix(".md").write_text(f"{_table(rows)}\n{_resize_table(resizes)}", encoding="utf-8")


def measure(target_name: str, model: Path, size: int, num_rounds: int) -> list[Row]:
    """Return a row for each form of the engine of a target."""
    target = replace(
        stage_config(f"build_engine.pruned_qat.{target_name}"),
        min_agreement_db=0.0,
        min_agreement_int8_db=0.0,
    )
    frames_NHWC = _tiles(size)
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        write_graph(at_size(read_graph(model), size), folder / "model.onnx")
        np.save(folder / "images.npy", frames_NHWC)
        report = build(target, model=folder / "model.onnx", images=folder / "images.npy", out=folder)
        if report.status != "built":
            raise SystemExit(f"{target_name} at {size}: {report.reason}")
        (folder / "coarse").mkdir()
        coarse_target = replace(target, coarse_classes=True)
        build(coarse_target, model=folder / "model.onnx", images=folder / "images.npy", out=folder / "coarse")
        built, frame = folder / "engine", frames_NHWC[:1]
        runner = stack.enter_context(open_engine(built))
        coarse = stack.enter_context(open_engine(folder / "coarse" / "engine"))
        plain = stack.enter_context(open_engine(plain_engine(built)))
        before = _as_before(target.runtime, plain_engine(built) / plain.manifest.file, on_frames(plain))
        calls = {
            **_forms(on_frames(runner), on_frames(plain), before, frame),
            BARE: _without_normalisation(target, built),
            COARSE: on_frames(coarse).answer,
            CONTROL: _call_of(on_frames(plain), frame),
        }
        rounds_ms(calls, frame, 3)  # warm-up
        rounds = rounds_ms(calls, frame, num_rounds)
    return [_row(target_name, size, form, rounds) for form in calls]


def at_size(graph: ModelProto, size: int) -> ModelProto:
    """Return a copy for square images of another size; its scores there mean nothing."""
    changed = ModelProto()
    changed.CopyFrom(graph)
    for value in (*changed.graph.input, *changed.graph.output):
        for axis in (2, 3):
            value.type.tensor_type.shape.dim[axis].dim_value = size
    del changed.graph.value_info[:]
    for entry in changed.metadata_props:
        if entry.key == CARD_KEY:
            entry.value = json.dumps(json.loads(entry.value) | {"height": size, "width": size})
    return changed


def _forms(
    engine: Engine, plain: Engine, before: Callable[[np.ndarray], np.ndarray], frame_NHWC: np.ndarray
) -> Mapping[str, Callable[[np.ndarray], np.ndarray]]:
    png = _as_png(frame_NHWC[0])
    expected = plain.answer(frame_NHWC)
    for answer in (engine.answer(frame_NHWC), before(frame_NHWC), engine.answer(_decode(png))):
        assert (answer == expected).mean() > 0.999
    return {
        ALONE: _call_of(plain, frame_NHWC),
        FRAMES: engine.answer,
        AROUND: plain.answer,
        BEFORE: before,
        PNG: lambda _: engine.answer(_decode(png)),
    }


def _call_of(plain: Engine, frame_NHWC: np.ndarray) -> Callable[[np.ndarray], np.ndarray]:
    """Return the call of an engine alone, with an image that was normalised before."""
    image_NCHW = plain.prepare(frame_NHWC)
    return lambda _: plain.run(image_NCHW)


def _without_normalisation(target: Target, engine: Path) -> Callable[[np.ndarray], np.ndarray]:
    """Return the call of an engine on frames whose pixels are not normalised; its masks mean nothing."""
    is_blob = target.runtime is Runtime.openvino
    graph = read_graph(engine / (GRAPH_FILE if is_blob else ENGINE_FILE))
    first, last = f"{FRAMES_INPUT}/Transpose", f"{FRAMES_INPUT}/Add"
    left = [node for node in graph.graph.node if node.name not in (f"{FRAMES_INPUT}/Mul", last)]
    [image] = next(node for node in graph.graph.node if node.name == last).output
    for node in left:
        node.output[:] = [image if node.name == first else name for name in node.output]
    del graph.graph.node[:]
    graph.graph.node.extend(left)
    return in_openvino(graph, max_batch=target.max_batch) if is_blob else in_onnxruntime(graph)


def measure_resizes(height: int, width: int, *, num_rounds: int) -> list[Resize]:
    """Resize a frame to RESIZED pixels a side by Pillow, as prepare_data does, and in the graph of both runtimes."""
    frame_NHWC = np.asarray(Image.fromarray(_tiles(64)[0]).resize((width, height), Image.Resampling.BICUBIC))[
        None
    ]
    graph = _resizing_graph(height, width)
    calls = {
        "Pillow": lambda frame: np.asarray(
            Image.fromarray(frame[0]).resize((RESIZED, RESIZED), Image.Resampling.BILINEAR)
        )[None],
        "ONNX Runtime": in_onnxruntime(graph),
        "OpenVINO": in_openvino(graph),
    }
    expected = calls["Pillow"](frame_NHWC).astype(np.float32)
    rounds = rounds_ms(calls, frame_NHWC, num_rounds)
    rows = []
    for where, call in calls.items():
        found = call(frame_NHWC)
        found_NHWC = found if found.shape == expected.shape else found.transpose(0, 2, 3, 1)
        differences = np.abs(found_NHWC.astype(np.float32) - expected)
        p50 = float(np.median(np.concatenate(rounds[where])))
        rows.append(
            Resize(
                where,
                height,
                width,
                round(p50, 3),
                float((differences > 0.5).mean()),
                float(differences.max()),
            )
        )
    return rows


def _resizing_graph(height: int, width: int) -> ModelProto:
    """Return a graph that resizes uint8 [1, height, width, 3] to [1, 3, 256, 256] with antialiasing (opset 18)."""
    sizes = numpy_helper.from_array(np.array([RESIZED, RESIZED]), "sizes")
    options = {"mode": "linear", "antialias": 1, "axes": [2, 3]}
    nodes = [
        helper.make_node("Cast", ["frames"], ["floats"], to=TensorProto.FLOAT),
        helper.make_node("Transpose", ["floats"], ["planes"], perm=[0, 3, 1, 2]),
        helper.make_node("Resize", ["planes", "", "", "sizes"], ["small"], **options),
        helper.make_node("Round", ["small"], ["resized"]),
    ]
    frames = helper.make_tensor_value_info("frames", TensorProto.UINT8, [1, height, width, 3])
    resized = helper.make_tensor_value_info("resized", TensorProto.FLOAT, [1, 3, RESIZED, RESIZED])
    graph = helper.make_graph(nodes, "resize", [frames], [resized], [sizes])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


def _as_before(runtime: Runtime, file: Path, plain: Engine) -> Callable[[np.ndarray], np.ndarray]:
    """Return the call of the bundles of earlier versions."""
    card = plain.card
    scale_C, shift_C = scale_and_shift(card["mean"], card["std"])
    run = _open_as_before(runtime, file, card["options"])

    def predict(frames_NHWC: np.ndarray) -> np.ndarray:
        images_NCHW = np.ascontiguousarray(np.moveaxis(frames_NHWC, -1, 1), dtype=np.float32)
        logits = run(images_NCHW * scale_C[:, None, None] + shift_C[:, None, None])
        return np.concatenate([logits.argmax(axis=1).astype(np.uint8)])

    return predict


def _open_as_before(
    runtime: Runtime, file: Path, options: Mapping[str, Any]
) -> Callable[[np.ndarray], np.ndarray]:
    if runtime is Runtime.openvino:
        import openvino

        compiled = openvino.Core().import_model(io.BytesIO(file.read_bytes()), "CPU", options["properties"])
        request = compiled.create_infer_request()
        return lambda images_NCHW: request.infer({0: images_NCHW})[0]
    import onnxruntime

    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads, settings.inter_op_num_threads = options["num_threads"], 1
    session = onnxruntime.InferenceSession(file, settings, providers=[options["provider"]])
    return lambda images_NCHW: session.run(None, {session.get_inputs()[0].name: images_NCHW})[0]


def _tiles(size: int) -> np.ndarray:
    """Return 4 frames [4, size, size, 3] that are tiled from images of the data set."""
    images_NHWC = np.asarray(open_split(DATA, "test")[0][:64])
    height, width = images_NHWC.shape[1:3]
    rows, columns = -(-size // height), -(-size // width)
    frames = []
    for number in range(4):
        tiles = [images_NHWC[(number * rows * columns + i) % len(images_NHWC)] for i in range(rows * columns)]
        lines = [np.concatenate(tiles[i * columns : (i + 1) * columns], axis=1) for i in range(rows)]
        frames.append(np.concatenate(lines)[:size, :size])
    return np.ascontiguousarray(frames)


def _as_png(frame_HWC: np.ndarray) -> bytes:
    content = io.BytesIO()
    Image.fromarray(frame_HWC).save(content, "png")
    return content.getvalue()


def _decode(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))[None]


def _row(target: str, size: int, form: str, rounds: Mapping[str, list[list[float]]]) -> Row:
    medians = {name: [statistics.median(burst) for burst in bursts] for name, bursts in rounds.items()}
    ratio = estimate_ratio([mine / alone for mine, alone in zip(medians[form], medians[ALONE], strict=True)])
    values = np.concatenate(rounds[form])
    p50, p99 = np.percentile(values, [50, 99])
    return Row(
        target, size, form, round(float(p50), 4), round(float(p99), 4), ratio.value, ratio.low, ratio.high
    )


def _table(rows: list[Row]) -> str:
    lines = ["| target | size | form | p50 ms | p99 ms | of the engine alone |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {row.target} | {row.size} | {row.form} | {row.latency_ms_p50:.3f} | {row.latency_ms_p99:.3f} "
        f"| {row.ratio:.3f} ({row.ratio_low:.3f} to {row.ratio_high:.3f}) |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


def _resize_table(rows: list[Resize]) -> str:
    lines = ["| resize to 256x256 | in | p50 ms | values that differ | by up to |", "|---|---|---|---|---|"]
    lines += [
        f"| {row.height}x{row.width} | {row.where} | {row.latency_ms_p50:.2f} | {100 * row.share_different:.1f} % "
        f"| {row.largest_difference:.0f} of 255 |"
        for row in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
