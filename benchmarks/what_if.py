"""Hold predicted changes of engines against measured ones: several networks on both CPU runtimes.

``python -m benchmarks.what_if`` takes the project's own networks and small ones of other kinds at 64x64, with random
weights, because only time matters. Each is built in float and in INT8 for both CPU targets. As in the stage
`try_changes`, changes of each engine are predicted, and the most promising ones are built and raced against the
unchanged engine; here also all other kinds of changes, and two runs of layers drawn at random, so that predicted
losses are tried as well. Prints how often the sign of the prediction was right and how far it was off, over changes
that certainly save at least 5 %. Writes ``benchmarks/results/what_if.json`` engine by engine, so that a second start
continues. Builds and roofs are kept under ``artifacts/benchmarks/what_if``.
"""

import argparse
import dataclasses
import itertools
import json
import logging
import random
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from onnx import ModelProto
from torch import Tensor, nn

from benchmarks.placement import IMAGES, MEAN, SIDE, STD, conv_norm, draw_images, imported, quantized
from benchmarks.placement import NETWORKS as OPERATOR_NETWORKS
from benchmarks.records import open_record
from flows.params import compose_params
from tasks.core.config import typed_config
from tasks.core.execute import ARTIFACTS
from tasks.core.reports import read_report, write_json
from tasks.parts.builders.build import build
from tasks.parts.data.dataset import normalise
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.explain.engine_view import EngineView
from tasks.parts.networks.build import build_network
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.model_card import ModelCard
from tasks.parts.onnx_graphs.export import export_graph
from tasks.parts.onnx_graphs.graph import name_nodes, read_graph, write_graph
from tasks.parts.roofs.measure import Effort, measure_roofs
from tasks.parts.roofs.roofs import Roofs
from tasks.parts.what_if.change import Change
from tasks.parts.what_if.predict import FloatRuns, other_changes, predict_changes
from tasks.parts.what_if.report import sum_up
from tasks.parts.what_if.timing import time_engines
from tasks.parts.what_if.trial import try_changes
from tasks.try_changes import Config

RESULTS = Path(__file__).parent / "results" / "what_if.json"
WORKSPACE = ARTIFACTS / "benchmarks" / "what_if"
TARGETS = ("cpu_onnxruntime", "cpu_openvino")
FLOAT, INT8 = "float", "int8"
REAL = 0.05
"""Changes that certainly save time, and at least this share of it, are counted."""
CLASSES = ("background", "one", "two", "three", "four", "five")

_WORKING_SETS_KIB = (64, 512, 4096, 32768)


class Widths(nn.Module):
    """Convolutions of given widths, or inverted residual blocks without the sums (Sandler et al., CVPR 2018)."""

    def __init__(
        self,
        widths: Sequence[int],
        activation: Callable[[], nn.Module] = nn.ReLU,
        *,
        is_inverted: bool = False,
    ) -> None:
        super().__init__()
        layers = [conv_norm(3, widths[0], activation, stride=2)]
        for number, (read, written) in enumerate(itertools.pairwise(widths)):
            stride = 2 if number % 2 == 0 else 1
            if is_inverted:
                inner = 4 * read
                layers += [
                    conv_norm(read, inner, activation, kernel=1),
                    conv_norm(inner, inner, activation, stride=stride, groups=inner),
                    conv_norm(inner, written, None, kernel=1),
                ]
            else:
                layers.append(conv_norm(read, written, activation, stride=stride))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Linear(widths[-1], len(CLASSES))

    def forward(self, images_NCHW: Tensor) -> Tensor:
        return self.classifier(self.features(images_NCHW).mean((2, 3)))


def project_network(name: NetworkName, width: float, depth: float) -> ModelProto:
    """Export an untrained network of the project."""
    config = NetworkConfig(name, width, depth, depthwise=False)
    torch.manual_seed(0)
    network = build_network(config, len(CLASSES)).train()
    with torch.no_grad():
        for _ in range(8):  # statistics of BatchNorm
            network(torch.randn(8, 3, SIDE, SIDE))
    card = ModelCard(config, CLASSES, MEAN, STD, SIDE, SIDE)
    return export_graph(network.eval(), card, height=SIDE, width=SIDE, opset=20)


NETWORKS: dict[str, Callable[[], ModelProto]] = {
    "deeplabv3plus": partial(project_network, NetworkName.deeplabv3plus, 0.5, 0.5),
    "fast_scnn": partial(project_network, NetworkName.fast_scnn, 0.5, 0.34),
    "mobile_unet": partial(project_network, NetworkName.mobile_unet, 0.5, 1.0),
    "widths_24_56": partial(imported, partial(Widths, (24, 24, 56, 56, 120))),
    "widths_20_40_72": partial(imported, partial(Widths, (20, 40, 40, 72, 72))),
    "widths_even": partial(imported, partial(Widths, (16, 32, 32, 64, 64))),
    "leaky_relu": partial(imported, partial(Widths, (16, 32, 32, 64, 64), partial(nn.LeakyReLU, 0.1))),
    "inverted_relu6": partial(imported, partial(Widths, (16, 24, 24, 40, 40), nn.ReLU6, is_inverted=True)),
    "inverted_hardswish": partial(
        imported, partial(Widths, (16, 16, 24, 24, 32), nn.Hardswish, is_inverted=True)
    ),
    "channel_shuffle": partial(imported, OPERATOR_NETWORKS["channel_shuffle"]),
}


def main() -> None:
    """Measure what is missing, print and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="*", help=f"of: {', '.join(NETWORKS)}; none: all")
    parser.add_argument("--budget-s", type=float, default=10.0, help="time of a race")
    parser.add_argument("--changes", type=int, default=3, help="most promising changes of each engine")
    parser.add_argument("--max-wait-s", type=float, default=5.0, help="how long to wait for a quiet machine")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    if unknown := set(options.networks) - NETWORKS.keys():
        parser.error(f"unknown networks: {', '.join(sorted(unknown))}")
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    conditions = {
        "cpu_model": read_cpu_model(),
        "onnxruntime": version("onnxruntime"),
        "openvino": version("openvino"),
        "budget_s": options.budget_s,
        "num_changes": options.changes,
    }
    record = open_record(options.results, conditions, ["rows"])
    for network in options.networks or NETWORKS:
        for target in TARGETS:
            for variant in (INT8, FLOAT):
                key = {"network": network, "target": target, "variant": variant}
                if not any(row.items() >= key.items() for row in record["rows"]):
                    row = {**key, **measure(network, target, variant, options)}
                    record["rows"].append(row)
                    options.results.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
                    print(describe(row), flush=True)
    record["summary"] = summary(record["rows"])
    options.results.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record["summary"], indent=2))


def measure(network: str, target: str, variant: str, options: argparse.Namespace) -> dict[str, Any]:
    """Predict and try changes of one engine; the reason says why there is none."""
    folder = WORKSPACE / network
    reasons = [engine_of(folder, each, target) for each in (FLOAT, INT8)]
    if reason := reasons[variant == INT8]:
        return {"reason": reason, "tried": []}
    params = compose_params(
        [
            *(*_OWN, "try_changes.variant=imported_ptq"),
            *(f"benchmark.budget_s={options.budget_s}", f"benchmark.quiet.max_wait_s={options.max_wait_s}"),
            *("benchmark.burst_ms=10.0", "benchmark.max_aa_spread=0.08"),
        ]
    )
    cfg = typed_config(Config, params["try_changes"][target], f"try_changes.{target}")
    names = (INT8, FLOAT) if variant == INT8 else (FLOAT,)
    engines = {name: folder / "build_engine" / name / target / "engine" for name in names}
    reached, graph = read_report(Roofs, roofs_of(cfg)), read_graph(folder / f"{variant}.onnx")
    name_nodes(graph)
    views = time_engines(engines, reached, cfg, device=cfg.target.device, num_turns=cfg.num_turns)
    changes = choose_changes(
        views[variant], views[FLOAT] if variant == INT8 else None, graph, options.changes
    )
    with tempfile.TemporaryDirectory() as place:
        trials = try_changes(
            changes,
            engines[variant],
            graph,
            cfg.target,
            images=folder / IMAGES,
            folder=Path(place),
            options=cfg,
        )
    report = sum_up(views[variant], target, changes, trials)
    return json.loads(json.dumps(dataclasses.asdict(report))) | {"variant": variant}


def choose_changes(
    engine: EngineView, twin: EngineView | None, graph: ModelProto, num_changes: int
) -> list[Change]:
    """Return the most promising changes, and beside them all other kinds and two runs of layers drawn at random."""
    runs = FloatRuns(engine, twin, graph) if twin is not None else None
    changes = [*predict_changes(engine, twin, graph)[:num_changes], *other_changes(engine, runs, graph)]
    if runs is not None and len(runs.places) > 1:
        draw = random.Random(0)
        for _ in range(2):
            first, last = sorted(draw.sample(range(len(runs.places)), 2))
            run = frozenset(runs.places[first:last])
            if runs.is_possible(run):
                changes.append(runs.change(run))
    return list({change.title: change for change in changes}.values())


_OWN = ("model=onnx", "model.path=model.onnx", "data=images")


def engine_of(folder: Path, variant: str, target: str) -> str:
    """Build an engine unless it is there; return why it was not built."""
    if not (folder / f"{INT8}.onnx").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        images_NHWC, graph = draw_images(16), NETWORKS[folder.name]()
        np.save(folder / IMAGES, images_NHWC)
        write_graph(graph, folder / f"{FLOAT}.onnx")
        write_graph(quantized(graph, normalise(images_NHWC, MEAN, STD)), folder / f"{INT8}.onnx")
    out = folder / "build_engine" / variant / target
    if not (out / "reason").is_file():
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        params = compose_params([*_OWN, "try_changes.variant=imported_ptq"])
        cfg = typed_config(Config, params["try_changes"][target], f"try_changes.{target}")
        report = build(cfg.target, model=folder / f"{variant}.onnx", images=folder / IMAGES, out=out)
        (out / "reason").write_text(report.reason, encoding="utf-8")
    return (out / "reason").read_text(encoding="utf-8")


def roofs_of(cfg: Config) -> Path:
    """Return the folder of the target's roofs, which are measured once."""
    folder = WORKSPACE / "roofs" / cfg.target.name
    if not (folder / "report.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        effort = Effort(5, [1024 * size for size in _WORKING_SETS_KIB])
        write_json(folder / "report.json", dataclasses.asdict(measure_roofs(cfg.target, effort)))
    return folder


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return how good the predictions are, over all kinds of changes and for each kind."""
    tried = [
        {**change, "engine": f"{row['network']} {row['variant']} on {row['target']}"}
        for row in rows
        for change in row["tried"]
        if change["measured_saving"] is not None
    ]
    kinds = sorted({change["kind"] for change in tried})
    return {
        "all": _summary_of(tried),
        **{kind: _summary_of([change for change in tried if change["kind"] == kind]) for kind in kinds},
    }


def _summary_of(tried: Sequence[dict[str, Any]]) -> dict[str, Any]:
    real = [change for change in tried if change["measured_saving"] >= REAL and change["measured_low"] > 0]
    promised = [change for change in tried if change["predicted_saving"] >= REAL]
    errors = sorted(((_error(change), change) for change in real), key=lambda item: item[0])
    harmful = min(promised, key=lambda change: change["measured_saving"], default=None)
    return {
        "num_tried": len(tried),
        "num_real": len(real),
        "right_sign": _share([change["predicted_saving"] > 0 for change in real]),
        "median_error": statistics.median(error for error, _ in errors) if errors else None,
        "worst": _name(errors[-1][1]) if errors else None,
        "num_promised": len(promised),
        "promised_that_save": _share([change["measured_saving"] > 0 for change in promised]),
        "worst_promised": _name(harmful) if harmful else None,
    }


def _error(change: dict[str, Any]) -> float:
    """Return the relative error of the predicted saving."""
    return abs(change["predicted_saving"] / change["measured_saving"] - 1)


def _share(flags: Sequence[bool]) -> float | None:
    return sum(flags) / len(flags) if flags else None


def _name(change: dict[str, Any]) -> str:
    return (
        f"{change['engine']}: {change['title']}: predicted {change['predicted_saving']:+.1%}, "
        f"measured {change['measured_saving']:+.1%} ({change['measured_low']:+.1%} to {change['measured_high']:+.1%})"
    )


def describe(row: dict[str, Any]) -> str:
    """Return a row as text."""
    head = f"{row['network']} {row['variant']} on {row['target']}: {row['reason'] or ''}"
    lines = [
        _name({**change, "engine": " "}) for change in row["tried"] if change["measured_saving"] is not None
    ]
    return "\n".join([head, *lines])


if __name__ == "__main__":
    main()
