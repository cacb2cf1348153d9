"""Take a network with external weights through import and FP16 to engines, and measure time and memory of each stage.

``python -m benchmarks.large_weights --gib 0.4 2.3``. The network is a chain of linear layers of 4096 channels with
drawn weights, in a folder with its weights in a file of their own. Each stage runs in a process of its own. Prints
and writes ``benchmarks/results/large_weights.json``: wall seconds, and the largest resident memory, also as a
multiple of the file's size; files that are mapped into memory count.
"""

import argparse
import json
import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import openvino
from onnx import TensorProto, helper, numpy_helper

from benchmarks.foreign import config
from flows.params import compose_params
from tasks.build_engine import build_engine
from tasks.convert_precision import convert_precision
from tasks.import_onnx import import_onnx
from tasks.parts.data.dataset_writer import SplitBatches, write_dataset
from tasks.parts.data.input_card import Task
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.onnx_session import refer

RESULTS = Path(__file__).parent / "results" / "large_weights.json"
WIDTH, SIDE, NUM_IMAGES = 4096, 16, 4
CLASSES = tuple("01234567")
BUILDS = {"float": ("cpu_onnxruntime", "cpu_openvino"), "fp16": ("cpu_openvino", "cpu_onnxruntime")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure networks of some sizes, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, nargs="+", default=[0.4, 2.3])
    parser.add_argument("--import-only", action="store_true", help="leave out FP16 and the engines")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "onnx": onnx.__version__,
        "onnxruntime": onnxruntime.__version__,
        "openvino": openvino.__version__,
        "rows": [],
    }
    for gib in options.gib:
        with tempfile.TemporaryDirectory(dir=options.results.parent) as folder:
            for row in measure_network(gib, Path(folder), 1 if options.import_only else None):
                print(row, flush=True)
                record["rows"].append(row)
                options.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def measure_network(gib: float, folder: Path, num_stages: int | None) -> Iterator[dict[str, Any]]:
    """Yield a row for each of the first stages of a network with so many GiB of weights."""
    data = write_images(folder)
    out: dict[str, Path] = {}
    in_process(write_network, gib, folder / "network")
    params = compose_params(["model=onnx", f"model.path={folder / 'network'}", "data=images"])
    importing = replace(config(params, "import_onnx"), height=SIDE, width=SIDE, batch_sizes=[1, 2])
    calls: dict[str, Callable[[Path], Any]] = {
        "import_onnx": lambda made: import_onnx(importing, model=folder / "network", data=data, out=made),
        "convert_precision": lambda made: convert_precision(
            replace(config(params, "convert_precision"), num_images=2, num_val_images=2, batch_size=2),
            model=out["import_onnx"] / "model.onnx",
            data=data,
            out=made,
        ),
    }

    def build(variant: str, target: str, made: Path) -> Any:
        stage = "import_onnx" if variant == "float" else "convert_precision"
        declared = replace(config(params, f"build_engine.{target}"), max_batch=2)
        images = data / "calibration_images.npy"
        return build_engine(declared, model=out[stage] / "model.onnx", images=images, out=made)

    for variant, targets in BUILDS.items():
        calls |= {f"build {variant} {target}": partial(build, variant, target) for target in targets}
    for stage, call in list(calls.items())[:num_stages]:
        out[stage] = folder / stage.replace(" ", "_")
        out[stage].mkdir()
        report, wall_s, peak_gib = in_process(call, out[stage])
        yield (
            {"gib": gib, "stage": stage, "wall_s": round(wall_s, 1), "peak_gib": round(peak_gib, 2)}
            | {"peak_over_size": round(peak_gib / gib, 1)}
            | {name: str(getattr(report, name)) for name in ("status", "reason") if hasattr(report, name)}
        )


def in_process(call: Callable[..., Any], *arguments: Any) -> tuple[Any, float, float]:
    """Run a function in a process of its own; return what it returns, its wall seconds and its peak in GiB."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        start = time.monotonic()
        result = call(*arguments)
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        sender.send((result, time.monotonic() - start, peak_kib / 2**20))

    process = context.Process(target=run)
    process.start()
    sender.close()
    try:
        found: tuple[Any, float, float] = receiver.recv()
    except EOFError as error:
        process.join()
        raise SystemExit(f"the stage ended with {process.exitcode}") from error
    process.join()
    return found


def write_network(gib: float, folder: Path) -> None:
    """Write ``model.onnx`` and ``weights.bin``."""
    folder.mkdir()
    random = np.random.default_rng(0)
    drawn = random.standard_normal((WIDTH, WIDTH)).astype(np.float32) * np.float32((2 / WIDTH) ** 0.5)
    flat = 3 * SIDE * SIDE
    nodes = [helper.make_node("Flatten", ["image"], ["flat"], "flat")]
    nodes.append(helper.make_node("MatMul", ["flat", "first"], ["hidden"], "in"))
    tensors, source, offset = [], "hidden", 0
    with (folder / "weights.bin").open("wb") as file:
        for index in range(-1, round(gib * 2**30 / drawn.nbytes)):
            name, values = f"weight{index}", np.roll(drawn, 7 * index, axis=0)
            if index < 0:
                name, values = "first", drawn[:flat]
            else:
                nodes.append(helper.make_node("MatMul", [source, name], [f"product{index}"], f"layer{index}"))
                source = f"relu{index}"
                nodes.append(helper.make_node("Relu", [f"product{index}"], [source], source))
            tensor = TensorProto(data_type=TensorProto.FLOAT, dims=values.shape)
            tensors.append(refer(name, tensor, "weights.bin", offset, values.nbytes))
            offset += file.write(values.tobytes())
    last = numpy_helper.from_array(drawn[:, :8], "last")
    nodes.append(helper.make_node("MatMul", [source, "last"], ["values"], "out"))
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, SIDE, SIDE])
    given = helper.make_tensor_value_info("values", TensorProto.FLOAT, ["n", 8])
    graph = helper.make_graph(nodes, "large", [image], [given], [*tensors, last])
    model = helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)])
    (folder / "model.onnx").write_bytes(model.SerializeToString())


def write_images(folder: Path) -> Path:
    """Write a data set of a few images with labels; return its folder."""
    random, labels_N = np.random.default_rng(0), np.arange(NUM_IMAGES, dtype=np.uint16)
    splits = {
        split: SplitBatches(
            NUM_IMAGES, [(random.integers(0, 256, (NUM_IMAGES, SIDE, SIDE, 3), np.uint8), labels_N)]
        )
        for split in ("train", "val", "test", "calibration")
    }
    write_dataset(
        folder / "dataset",
        task=Task.classification,
        classes=CLASSES,
        height=SIDE,
        width=SIDE,
        source="images",
        splits=splits,
    )
    return folder / "dataset"


if __name__ == "__main__":
    main()
