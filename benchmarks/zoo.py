"""How does the INT8 ladder do on architectures of others, and against other tools?

``python -m benchmarks.zoo --workspace DIR`` trains nine well-known networks (see zoo_networks.py) for ``--train-s``
seconds of CPU time each, on images that are drawn (see zoo_training.py), and exports each with both exporters of
torch. In DIR, a new clone, the pipeline runs on each file as a user runs it, with ``model=onnx`` for ONNX Runtime and
OpenVINO. Other tools quantize the float graph of the first file at their best settings (see zoo_peers.py). All
engines of a file then run in one interleaved race in one process, with the same batch, threads and options.

A tool holds the gate if, as in ``select_engine``, the whole interval of its loss against the float reference is
within ``select_engine.max_score_rel_loss`` on the validation images. Ratios over 1 mean that ours takes longer.

A network takes at most ``--limit-s`` seconds, the last race aside. The pipeline gets half of them for the first
file; what is not finished in time is recorded as that. For the second file no layer is tried in float. Results go to
``benchmarks/results/zoo.json`` as soon as a file is done; a second start measures what is missing or failed. The
tables are printed, and written beside it as Markdown.
"""

import argparse
import csv
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.ladder import REPOSITORY
from benchmarks.pages import read_engines
from benchmarks.runtimes import stage_config, stage_folders
from benchmarks.zoo_networks import ZOO, ZooNetwork, new_network, num_parameters
from benchmarks.zoo_page import tables
from benchmarks.zoo_peers import PEERS, open_peer, quantized_by
from benchmarks.zoo_training import Exporter, Trained, class_names, export, scenes_of, train, write_images
from tasks.core.config import PARAMS_FILE, read_params
from tasks.core.errors import EnginewrightError, first_line
from tasks.core.execute import ARTIFACTS
from tasks.core.reports import read_report
from tasks.parts.builders.report import EngineBuild
from tasks.parts.data.accuracy import Standing
from tasks.parts.data.comparison import ImageResults, compare_with_labels, score_loss
from tasks.parts.data.dataset import normalise, open_images, open_labels
from tasks.parts.data.input_card import Task
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.manifest import ENGINE_FOLDER, LAYERS_FILE
from tasks.parts.engines.open_engine import open_engine
from tasks.parts.engines.rounds import Network, rounds_ms
from tasks.parts.measuring.intervals import Estimate, estimate_ratio
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph
from tasks.parts.onnx_graphs.macs import conv_macs, quantized_layers
from tasks.parts.selection.engine_row import read_rows
from tasks.parts.selection.stage_reports import read_image_results

RESULTS = Path(__file__).parent / "results" / "zoo.json"
TARGETS = ("cpu_onnxruntime", "cpu_openvino")
ZOO_FOLDER = Path("data") / "zoo"
FLOAT = "imported"
CODE = ("tasks", "flows", "conf")
"""Folders of the product; results of other versions of them are not continued."""
NUM_CALIBRATION = 256
MOST_LAYERS = 12
"""Layers in float that the results name, most MACs first."""

Row = dict[str, Any]


class NotFinished(Exception):
    """The pipeline failed, or took longer than it may."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What has to be the same for all results of one file."""

    train_s: float
    num_train: int
    num_val: int
    num_test: int
    num_rounds: int
    overrides: tuple[str, ...]
    """More Hydra overrides for the pipeline."""

    @property
    def num_images(self) -> dict[str, int]:
        """Images of the splits in the workspace."""
        return {"calibration": NUM_CALIBRATION, "val": self.num_val, "test": self.num_test}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, write each result at once, print and write the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workspace", type=Path, required=True, help="a new folder, or one of an earlier run"
    )
    parser.add_argument("--networks", nargs="+", default=list(ZOO), choices=list(ZOO))
    parser.add_argument("--exporters", nargs="+", default=list(Exporter), choices=list(Exporter))
    parser.add_argument("--train-s", type=float, default=300.0, help="seconds of CPU time for each network")
    parser.add_argument("--train", type=int, default=8192, help="training images")
    parser.add_argument("--val", type=int, default=1000, help="validation images, which decide")
    parser.add_argument("--test", type=int, default=400, help="test images, which are only reported")
    parser.add_argument("--rounds", type=int, default=60, help="rounds of the race")
    parser.add_argument("--limit-s", type=float, default=1200.0, help="wall-clock seconds for each network")
    parser.add_argument("--peer-s", type=float, default=120.0, help="of these, for each of the other tools")
    parser.add_argument("--overrides", nargs="*", default=[], help="more Hydra overrides, as debug=smoke")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    settings = Settings(
        options.train_s, options.train, options.val, options.test, options.rounds, tuple(options.overrides)
    )
    workspace = options.workspace.resolve()
    if not workspace.exists():
        subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(workspace)], check=True)
    record = open_record(options.results, conditions_of(workspace, settings))
    deadlines: dict[str, float] = {}
    try:
        for name, exporter in missing_files(record["rows"], options.networks, options.exporters):
            deadline = deadlines.setdefault(name, time.monotonic() + options.limit_s)
            peer_s = options.peer_s if exporter == options.exporters[0] else None
            row = measure(workspace, name, exporter, settings, deadline=deadline, peer_s=peer_s)
            record["rows"] = [*without(record["rows"], name, exporter), row]
            write_record(options.results, record)
            page = tables(record["rows"]) + "\n"
            options.results.with_suffix(".md").write_text(page, encoding="utf-8")
            print(f"{name} {exporter}: {row['fault'] or 'done'}, {row['seconds']:.0f} s", flush=True)
    finally:
        stop_server(workspace)
    print(tables(record["rows"]))


def conditions_of(workspace: Path, settings: Settings) -> Row:
    """Return what has to be the same for all results of one file; exit if the workspace has other code than here."""
    code, here = (code_of(folder) for folder in (workspace, REPOSITORY))
    if other := [name for name in CODE if code[name] != here[name]]:
        raise SystemExit(
            f"{workspace} has another {', '.join(other)} than the last commit of {REPOSITORY}. Name a new folder "
            "with --workspace, or pull there."
        )
    names = ("torch", "transformers", "onnx", "onnxruntime", "openvino", "nncf")
    return {
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
        "code": code,
        **dataclasses.asdict(settings) | {"overrides": list(settings.overrides)},
    }


def code_of(repository: Path) -> dict[str, str]:
    """Return git's digests of the product's folders at the last commit."""
    command = ["git", "-C", str(repository), "rev-parse", *(f"HEAD:{name}" for name in CODE)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return dict(zip(CODE, found, strict=True))


def open_record(results: Path, conditions: Mapping[str, Any]) -> Row:
    """Return what was measured so far; exit if it was measured under other conditions."""
    if not results.is_file():
        return {"date": date.today().isoformat(), "conditions": conditions, "rows": []}
    record: Row = json.loads(results.read_text(encoding="utf-8"))
    if other := [name for name, value in conditions.items() if record["conditions"].get(name) != value]:
        raise SystemExit(
            f"{results} was measured with other {', '.join(other)} than there are now. Delete it to begin again, or "
            "name another file with --results."
        )
    return record


def write_record(results: Path, record: Mapping[str, Any]) -> None:
    """Write the results; a kill leaves the old file or the new one."""
    draft = results.with_suffix(".draft")
    draft.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    draft.replace(results)


def missing_files(
    rows: Sequence[Row], networks: Sequence[str], exporters: Sequence[str]
) -> list[tuple[str, Exporter]]:
    """Return network and exporter of each file that has no results, or failed."""
    known = {(row["network"], row["exporter"]) for row in rows if not row["fault"]}
    wanted = [(name, Exporter(exporter)) for name in networks for exporter in exporters]
    return [file for file in wanted if file not in known]


def without(rows: Sequence[Row], network: str, exporter: str) -> list[Row]:
    """Return the rows of all other files."""
    return [row for row in rows if (row["network"], row["exporter"]) != (network, exporter)]


def measure(
    workspace: Path,
    name: str,
    exporter: Exporter,
    settings: Settings,
    *,
    deadline: float,
    peer_s: float | None,
) -> Row:
    """Train and export the network unless it is, run pipeline, tools and race, and return the results of the file.

    The tools have `peer_s` seconds each, none of them runs if it is None, and nothing starts after the deadline.
    """
    started, spec, has_peers = time.monotonic(), ZOO[name], peer_s is not None
    row: Row = {
        "network": name,
        "exporter": str(exporter),
        "fault": "",
        "has_peers": has_peers,
        "num_parameters": num_parameters(new_network(name, spec.num_classes)),
        **{part: [] for part in ("engines", "peers", "against_peers")},
    }
    try:
        file, trained = trained_file(workspace, name, exporter, settings)
        row |= {"training": dataclasses.asdict(trained), "size_bytes": file.stat().st_size}
        left_s = max(0.0, deadline - time.monotonic())
        timeout_s = left_s / 2 if has_peers else left_s
        run_pipeline(workspace, file, spec, settings, has_search=has_peers, timeout_s=timeout_s)
        row |= {"import": read_import(workspace), "engines": engine_rows(workspace)}
        row["peers"] = peer_rows(workspace, file.parent, deadline, peer_s) if peer_s is not None else []
        row |= race(workspace, file.parent, row["engines"], row["peers"], settings.num_rounds)
    except NotFinished as error:
        row["fault"] = str(error)
    return row | {"seconds": round(time.monotonic() - started, 1)}


def trained_file(workspace: Path, name: str, exporter: Exporter, settings: Settings) -> tuple[Path, Trained]:
    """Return the ONNX file of a trained network, and how it was trained; what is there is kept.

    Raises NotFinished if the exporter refuses the network.
    """
    spec, folder = ZOO[name], workspace / ZOO_FOLDER / name
    wanted = {"train_s": settings.train_s, "num_train": settings.num_train, "side": spec.side}
    kept, weights = folder / "training.json", folder / "weights.pt"
    file = folder / f"{exporter}.onnx"
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    num_classes = len(class_names(spec.task, scenes_of(spec.task, {})))
    network = new_network(name, num_classes)
    if known.get("settings") != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.onnx"):
            old.unlink()
        torch.set_num_threads(os.cpu_count() or 1)
        trained = train(network, spec, num_images=settings.num_train, budget_s=settings.train_s)
        torch.save(network.state_dict(), weights)
        known = {"settings": wanted, "training": dataclasses.asdict(trained)}
        kept.write_text(json.dumps(known), encoding="utf-8")  # last: it says that the weights are there
    if not file.is_file():
        network.load_state_dict(torch.load(weights, weights_only=True))
        draft = file.with_suffix(".draft")
        try:
            export(network.eval(), draft, exporter, side=spec.side)
        except RuntimeError as error:
            raise NotFinished(f"the exporter failed: {first_line(error)}") from error
        draft.replace(file)
    return file, Trained(**known["training"])


def run_pipeline(
    workspace: Path,
    file: Path,
    spec: ZooNetwork,
    settings: Settings,
    *,
    has_search: bool,
    timeout_s: float,
) -> None:
    """Run the flow on a file, logged beside it; raise NotFinished with the last line if it fails or is too slow."""
    folder = "-".join((spec.task, str(spec.side), *map(str, settings.num_images.values())))
    root = workspace / ZOO_FOLDER / "images" / folder
    if not (root / "classes.yaml").is_file():
        write_images(root, spec.task, spec.side, settings.num_images)
    source = "class_folder" if spec.task is Task.classification else "folder"
    command = [
        *(sys.executable, "-m", "flows.optimize", "model=onnx", f"target=[{','.join(TARGETS)}]"),
        *(f"model.path={file.relative_to(workspace)}", f"data={source}"),
        f"prepare_data.root={root.relative_to(workspace)}",
        *(f"prepare_data.{axis}={spec.side}" for axis in ("height", "width")),
        *([] if has_search else ["quantize_partial.max_float_layers=0"]),
        *settings.overrides,
    ]
    log = file.with_suffix(".log")
    with log.open("w", encoding="utf-8") as output:
        try:
            done = subprocess.run(
                command,
                cwd=workspace,
                env={**os.environ, "PYTHONPATH": str(workspace)},
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NotFinished(f"the pipeline was not finished after {timeout_s:.0f} s") from error
    if done.returncode:
        lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
        raise NotFinished(f"the pipeline failed: {(lines or ['no message'])[-1]}")


def stop_server(workspace: Path) -> None:
    """Stop the Prefect server of the workspace."""
    subprocess.run([sys.executable, "-m", "flows.local_server", "--stop"], cwd=workspace, check=False)


def read_import(workspace: Path) -> Row:
    """Return what import_onnx says about the file."""
    file = workspace / ARTIFACTS / "import_onnx" / "report.json"
    report = json.loads(file.read_text(encoding="utf-8"))
    return {name: report[name] for name in ("num_parameters", "macs", "num_nodes_before", "num_nodes")}


def engine_rows(workspace: Path) -> list[Row]:
    """Return score, verdict and executed precisions of each engine of the run."""
    params = read_params(workspace / PARAMS_FILE)
    found = {row.name: row for row in read_rows(workspace / ARTIFACTS / "select_engine")}
    rows = []
    for row in read_engines(workspace):
        name = f"{row['variant']}-{row['target']}"
        measured, graph = found[name].measured, workspace / params["engines"][name]["model"]
        folder = stage_folders(workspace).of(row["variant"], row["target"])["build_engine"]
        report = read_report(EngineBuild, folder)
        executed = report.executed
        rows.append(
            row
            | {
                "score": None if measured is None else measured.accuracy.score,
                "precision_note": report.precision_note,
                "macs_share": {} if executed is None else executed.macs_share,
                "macs_share_quantized": None if executed is None else executed.macs_share_quantized,
                "int8_share_of_quantized": None if executed is None else executed.int8_share_of_quantized,
                "float_layers": layers_in_float(folder, report, graph) if report.is_quantized else [],
            }
        )
    return rows


def layers_in_float(build: Path, report: EngineBuild, graph: Path) -> list[Row]:
    """Return the convolutions and matrix products of a quantized variant that do not run in int8, and why.

    The reason is that of the runtime, if the target's graph has the layer between Q/DQ pairs; that of the target, if
    only the variant's graph has; else that of the stage which wrote the variant's graph.
    """
    model = read_graph(graph)
    macs = conv_macs(model)
    types = {node.name: node.op_type for node in model.graph.node}
    quantized = {node.name for node in quantized_layers(model)}
    with (build / ENGINE_FOLDER / LAYERS_FILE).open(encoding="utf-8", newline="") as file:
        precisions = {
            node: layer["precision"] for layer in csv.DictReader(file) for node in layer["nodes"].split()
        }
    refused = set() if report.executed is None else {node.node for node in report.executed.not_in_int8}
    stage = json.loads((graph.parent / "report.json").read_text(encoding="utf-8"))
    reasons = {layer["node"]: layer["reason"] for layer in stage.get("float_layers", [])}
    found = []
    for node in sorted(macs, key=lambda node: -macs[node]):
        precision = precisions.get(node, "unknown")
        if precision == "int8":
            continue
        if node in refused:
            reason = f"between Q/DQ, but the runtime computes it in {precision}"
        elif node in quantized:
            reason = "left in float by the target"
        else:
            reason = reasons.get(node, "not quantized in the variant's graph")
        share = round(macs[node] / (sum(macs.values()) or 1), 4)
        found.append({"node": node, "op_type": types[node], "macs_share": share, "reason": reason})
    return found[:MOST_LAYERS]


def peer_rows(workspace: Path, folder: Path, deadline: float, peer_s: float) -> list[Row]:
    """Quantize the run's float graph with each of the other tools, and return scores and losses of each.

    A tool that fails, or is not finished after `peer_s` seconds or at the deadline, has a row with the reason.
    """
    gate = stage_config("select_engine", workspace).max_score_rel_loss
    graph = workspace / read_params(workspace / PARAMS_FILE)["pipeline"]["reference_graph"]
    data = workspace / read_params(workspace / PARAMS_FILE)["pipeline"]["data"]
    references = reference_results(workspace)
    rows = []
    for name, peer in PEERS.items():
        timeout_s = min(peer_s, deadline - time.monotonic())
        row: Row = {"name": name, "target": peer.target, "fault": "no time was left"}
        if timeout_s > 0:
            file, seconds, fault = quantized_by(name, graph, data, gate, folder, timeout_s=timeout_s)
            row |= {"fault": fault, "seconds": round(seconds, 1), "file": file.name}
        if not row["fault"]:
            try:
                network = open_peer(file, stage_config(f"build_engine.{peer.target}", workspace))
                row |= losses_of(network, graph, data, references, gate)
            except (RuntimeError, EnginewrightError) as error:
                row["fault"] = f"its file does not run: {first_line(error)}"
        rows.append(row)
    return rows


def reference_results(workspace: Path) -> dict[str, ImageResults]:
    """Return the results of the float reference by split: that which decides and that which is only reported."""
    reference = stage_config("select_engine", workspace).float_reference
    validation = stage_config("validate", workspace)
    for row in read_rows(workspace / ARTIFACTS / "select_engine"):
        if (row.variant, row.target) == (reference.variant, reference.target) and row.measured:
            found = read_image_results(stage_folders(workspace), row)
            return {validation.split: found.decisive, validation.unseen_split: found.unseen}
    raise NotFinished(f"the float reference {reference.variant} on {reference.target} was not built")


def losses_of(
    network: Network, graph: Path, data: Path, references: Mapping[str, ImageResults], gate: float
) -> Row:
    """Return the score of a peer on the images that decide, and its losses on these and on the unseen ones."""
    card = read_card_of_graph(read_graph(graph))
    found: Row = {}
    for prefix, (split, reference) in zip(("", "unseen_"), references.items(), strict=True):
        classes = [
            network(normalise(image_HWC[None], card.mean, card.std)).argmax(axis=1)[0]
            for image_HWC in open_images(data, split)
        ]
        labels = np.asarray(open_labels(data, split, card.task))
        results = compare_with_labels(np.stack(classes), labels, len(card.classes), card.task)
        loss = score_loss(results, reference)
        found |= {f"{prefix}score": results.score, f"{prefix}loss": dataclasses.asdict(loss)}
        found[f"{prefix}standing"] = str(loss.standing(gate))
    return found


def race(
    workspace: Path, folder: Path, engines: Sequence[Row], peers: Sequence[Row], num_rounds: int
) -> dict[str, list[Row]]:
    """Time all engines and peers in one race; return their rows with latencies, and the comparison of each target."""
    graph = workspace / read_params(workspace / PARAMS_FILE)["pipeline"]["reference_graph"]
    data = workspace / read_params(workspace / PARAMS_FILE)["pipeline"]["data"]
    card = read_card_of_graph(read_graph(graph))
    with ExitStack() as stack:
        networks: dict[str, Network] = {}
        for row in engines:
            if row["score"] is not None:
                built = stage_folders(workspace).of(row["variant"], row["target"])["build_engine"]
                networks[key_of(row)] = stack.enter_context(open_engine(built / ENGINE_FOLDER)).run
        for row in peers:
            if not row["fault"]:
                target = stage_config(f"build_engine.{row['target']}", workspace)
                networks[key_of(row)] = open_peer(folder / row["file"], target)
        image_NCHW = normalise(open_images(data, "test")[:1], card.mean, card.std)
        bursts = rounds_ms(networks, image_NCHW, num_rounds)
    return compare(engines, peers, bursts)


def compare(
    engines: Sequence[Row], peers: Sequence[Row], bursts: Mapping[str, Sequence[Sequence[float]]]
) -> dict[str, list[Row]]:
    """Add p50 and time against float on the same target to each row, and compare the picks with the peers.

    The latencies are in milliseconds, by key of a row and by round.
    """
    medians = {name: np.array([np.median(burst) for burst in found]) for name, found in bursts.items()}

    def timed(row: Row) -> Row:
        key, base = key_of(row), f"{FLOAT} {row['target']}"
        ratio = estimate_ratio(medians[key] / medians[base]) if {key, base} <= medians.keys() else None
        p50 = round(float(np.median(np.concatenate(bursts[key]))), 4) if key in bursts else None
        return row | {"latency_ms_p50": p50, "time_vs_float": rounded(ratio)}

    engines, peers = [timed(row) for row in engines], [timed(row) for row in peers]
    against = []
    for target in dict.fromkeys(row["target"] for row in engines):
        pick = next((row for row in engines if row["target"] == target and row["picked"]), None)
        rivals = [row for row in peers if row["target"] == target and row.get("standing") == Standing.within]
        best = min(rivals, key=lambda row: float(np.median(medians[key_of(row)])), default=None)
        ratio = estimate_ratio(medians[key_of(pick)] / medians[key_of(best)]) if pick and best else None
        against.append(
            {
                "target": target,
                "pick": pick and pick["variant"],
                "fastest_peer": best and best["name"],
                "time_vs_peer": rounded(ratio),
            }
        )
    return {"engines": engines, "peers": peers, "against_peers": against}


def key_of(row: Mapping[str, Any]) -> str:
    """Return the name of an engine or a peer in the race."""
    return f"{row.get('variant') or row['name']} {row['target']}"


def rounded(ratio: Estimate | None) -> dict[str, float] | None:
    """Return a ratio with its interval."""
    if ratio is None:
        return None
    return {name: round(value, 4) for name, value in dataclasses.asdict(ratio).items()}


if __name__ == "__main__":
    main()
