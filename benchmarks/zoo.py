"""How does the INT8 ladder do on architectures of others, and against other tools?

``python -m benchmarks.zoo --workspace DIR`` trains well-known networks (zoo_networks.py) for ``--train-s`` seconds of
CPU time each, on images that are drawn (zoo_training.py), and exports them with torch's exporters. One more network
comes trained, with data of its own: that of benchmarks/pages.py. In DIR, a new clone, the pipeline runs on each file
as a user runs it, with ``model=onnx`` for ONNX Runtime and OpenVINO. Other tools quantize the imported float graph at
their best settings (zoo_peers.py); what they write becomes an engine with the batch, threads and options of the
target. The stage ``validate`` measures the accuracy of all. All engines of a target run in one race, as those of
``benchmark`` do: each in its process, on the same CPU.

An engine holds the gate if, as in ``select_engine``, the whole interval of its loss against the float reference is
within ``select_engine.max_score_rel_loss`` on the validation images.

A file takes at most ``--limit-s`` seconds, its last race aside; what is not finished in time is recorded as that.
Results go to ``benchmarks/results/zoo.json`` as soon as a file is done; a second start measures what is missing or
failed. Each has git's digests of the code that it was measured with. ``--race-again`` repeats only the races whose
A/A spread is more than ``benchmark.max_aa_spread``, for another hour on a noisy machine. The tables are printed.
"""

import argparse
import csv
import dataclasses
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.ladder import REPOSITORY
from benchmarks.pages import CLASSES, MODEL, fetch_model, holds_pages, write_list, write_pages
from benchmarks.records import open_record, write_record
from benchmarks.rendered_pages import find_families
from benchmarks.runtimes import stage_config, stage_folders
from benchmarks.zoo_networks import ZOO, ZooNetwork, new_network
from benchmarks.zoo_page import tables
from benchmarks.zoo_peers import PEERS, as_engine, quantized_by
from benchmarks.zoo_training import Exporter, Trained, class_names, export, train, write_images
from tasks.core.config import PARAMS_FILE, read_params
from tasks.core.errors import EnginewrightError, first_line
from tasks.core.execute import ARTIFACTS
from tasks.core.reports import read_report
from tasks.parts.builders.report import EngineBuild
from tasks.parts.data.accuracy import Standing
from tasks.parts.data.comparison import RESULTS_FILE, read_results, score_loss
from tasks.parts.data.input_card import Task
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.manifest import ENGINE_FOLDER, LAYERS_FILE, read_engine_manifest
from tasks.parts.engines.runtimes import CPU
from tasks.parts.measuring.engine_race import open_race
from tasks.parts.measuring.race import RaceOptions
from tasks.parts.measuring.reports import REFERENCE, SpeedRatio
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph
from tasks.parts.onnx_graphs.macs import conv_macs, quantized_layers
from tasks.parts.selection.engine_row import read_rows
from tasks.parts.selection.stage_reports import ValidatedImages, read_image_results
from tasks.validate import validate

RESULTS = Path(__file__).parent / "results" / "zoo.json"
FONTS = Path("/usr/share/fonts/truetype")
TARGETS = ("cpu_onnxruntime", "cpu_openvino")
ZOO_FOLDER = Path("data") / "zoo"
CODE = ("tasks", "flows", "conf")
"""Folders of the product."""
NUM_CALIBRATION = 256
OURS = "Enginewright"
PEER_S = 120.0
"""Seconds for each of the other tools."""

Row = dict[str, Any]


class NotFinished(Exception):
    """A step failed, or took longer than it may."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How networks are trained, and what has to be the same for all results of one file."""

    train_s: float
    num_train: int
    num_val: int
    num_test: int
    overrides: tuple[str, ...]
    """More Hydra overrides for the pipeline."""

    @property
    def num_images(self) -> dict[str, int]:
        """Images of the splits in the workspace."""
        return {"calibration": NUM_CALIBRATION, "val": self.num_val, "test": self.num_test}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, write each result at once, and print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workspace", type=Path, required=True, help="a new folder, or one of an earlier run"
    )
    parser.add_argument("--networks", nargs="+", default=list(ZOO), choices=list(ZOO))
    parser.add_argument("--train-s", type=float, default=300.0, help="seconds of CPU time for each network")
    parser.add_argument("--train", type=int, default=8192, help="training images")
    parser.add_argument("--val", type=int, default=1000, help="validation images, which decide, 4 a page")
    parser.add_argument("--test", type=int, default=400, help="test images, which are only reported")
    parser.add_argument("--limit-s", type=float, default=1200.0, help="wall-clock seconds for each file")
    parser.add_argument("--overrides", nargs="*", default=[], help="more Hydra overrides, as debug=smoke")
    parser.add_argument(
        "--race-again", action="store_true", help="repeat the noisy races, measure nothing else"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    settings = Settings(options.train_s, options.train, options.val, options.test, tuple(options.overrides))
    workspace = options.workspace.resolve()
    if not workspace.exists():
        subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(workspace)], check=True)
    code = code_of(workspace)
    if code != code_of(REPOSITORY):
        parser.error(f"{workspace} has other code than the last commit of {REPOSITORY}. Pull there.")
    record = open_record(options.results, conditions_of(settings), ["rows"])
    if options.race_again:
        for row in record["rows"]:
            if not row["fault"]:
                row["engines"], row["races"] = race_all(workspace, row["engines"], row["races"])
                write_record(options.results, record)
        print(tables(record["rows"]))
        return
    try:
        for name, exporter in missing_files(record["rows"], options.networks):
            deadline = time.monotonic() + options.limit_s
            row = measure(workspace, name, exporter, settings, deadline=deadline) | {"code": code}
            record["rows"] = [*without(record["rows"], name, exporter), row]
            write_record(options.results, record)
            print(f"{name} {exporter}: {row['fault'] or 'done'}, {row['seconds']:.0f} s", flush=True)
    finally:
        subprocess.run([sys.executable, "-m", "flows.local_server", "--stop"], cwd=workspace, check=False)
    print(tables(record["rows"]))


def conditions_of(settings: Settings) -> Row:
    """Return what has to be the same for all results of one file; how long a network was trained is in its row."""
    names = ("torch", "transformers", "onnx", "onnxruntime", "openvino", "nncf")
    return {
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
        "num_images": settings.num_images,
        "overrides": list(settings.overrides),
    }


def code_of(repository: Path) -> dict[str, str]:
    """Return git's digests of the product's folders at the last commit."""
    command = ["git", "-C", str(repository), "rev-parse", *(f"HEAD:{name}" for name in CODE)]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return dict(zip(CODE, found, strict=True))


def missing_files(rows: Sequence[Row], networks: Sequence[str]) -> list[tuple[str, Exporter]]:
    """Return network and exporter of each file that has no results, or failed; second files of a network last."""
    known = {(row["network"], row["exporter"]) for row in rows if not row["fault"]}
    wanted = [
        file for name in networks for file in enumerate((name, exporter) for exporter in ZOO[name].exporters)
    ]
    return [file for _, file in sorted(wanted, key=lambda numbered: numbered[0]) if file not in known]


def without(rows: Sequence[Row], network: str, exporter: str) -> list[Row]:
    """Return the rows of all other files."""
    return [row for row in rows if (row["network"], row["exporter"]) != (network, exporter)]


def measure(workspace: Path, name: str, exporter: Exporter, settings: Settings, *, deadline: float) -> Row:
    """Make the file unless it is there, run pipeline, tools and races, and return the results."""
    started, spec = time.monotonic(), ZOO[name]
    row: Row = {"network": name, "exporter": str(exporter), "fault": "", "engines": [], "races": []}
    try:
        file, trained = network_file(workspace, name, exporter, settings)
        row |= {"training": trained and dataclasses.asdict(trained), "size_bytes": file.stat().st_size}
        images = image_folder(workspace, spec, settings)
        run_pipeline(workspace, file, images, spec, settings, timeout_s=deadline - time.monotonic())
        row["import"] = read_import(workspace)
        folder = file.with_suffix("")
        ours, peers = read_ours(workspace, folder), measure_peers(workspace, folder, deadline)
        row["engines"], row["races"] = race_all(workspace, [*ours, *peers])
    except NotFinished as error:
        row["fault"] = str(error)
    return row | {"seconds": round(time.monotonic() - started, 1)}


def network_file(
    workspace: Path, name: str, exporter: Exporter, settings: Settings
) -> tuple[Path, Trained | None]:
    """Return the ONNX file of a network, and how it was trained if it was trained here; what is there is kept.

    Raises NotFinished if the exporter refuses the network.
    """
    spec, folder = ZOO[name], workspace / ZOO_FOLDER / name
    if spec.build is None:
        fetch_model(workspace / MODEL)
        return workspace / MODEL, None
    wanted = {"train_s": settings.train_s, "num_train": settings.num_train, "side": spec.side}
    kept, weights = folder / "training.json", folder / "weights.pt"
    file = folder / f"{exporter}.onnx"
    known = json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}
    network = new_network(name, len(class_names(spec.task)))
    if known.get("settings") != wanted:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.onnx"):
            old.unlink()
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


def image_folder(workspace: Path, spec: ZooNetwork, settings: Settings) -> Path:
    """Return a folder of images and labels as a user has it, drawn unless it is there."""
    kind = "pages" if spec.build is None else f"{spec.task}-{spec.side}"
    root = workspace / ZOO_FOLDER / "images" / "-".join((kind, *map(str, settings.num_images.values())))
    if spec.build is not None:
        if not (root / "classes.yaml").is_file():
            write_images(root, spec.task, spec.side, settings.num_images)
        return root
    num_pages = {split: count // len(CLASSES) for split, count in settings.num_images.items()}
    if not holds_pages(root, num_pages["val"]):
        num_drawn = {"train": num_pages["calibration"], "val": num_pages["val"], "test": num_pages["test"]}
        write_pages(root, num_drawn, find_families([FONTS]))
    for split in ("val", "test"):
        write_list(root, split, settings.num_images[split])
    return root


def run_pipeline(
    workspace: Path, file: Path, images: Path, spec: ZooNetwork, settings: Settings, *, timeout_s: float
) -> None:
    """Run the flow on a file, logged beside it; raise NotFinished with the last line if it fails or is too slow."""
    source = "class_folder" if spec.task is Task.classification else "folder"
    command = [
        *(sys.executable, "-m", "flows.optimize", "model=onnx", f"target=[{','.join(TARGETS)}]"),
        *(f"model.path={file.relative_to(workspace)}", f"data={source}"),
        f"prepare_data.root={images.relative_to(workspace)}",
        *(f"prepare_data.{axis}={spec.side}" for axis in ("height", "width")),
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
                timeout=max(0.0, timeout_s),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise NotFinished(f"the pipeline was not finished after {max(0.0, timeout_s):.0f} s") from error
    if done.returncode:
        lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
        raise NotFinished(f"the pipeline failed: {(lines or ['no message'])[-1]}")


def read_import(workspace: Path) -> Row:
    """Return what import_onnx says about the file."""
    file = workspace / ARTIFACTS / "import_onnx" / "report.json"
    report = json.loads(file.read_text(encoding="utf-8"))
    return {name: report[name] for name in ("num_parameters", "macs", "num_nodes_before", "num_nodes")}


def read_ours(workspace: Path, folder: Path) -> list[Row]:
    """Keep the float and the INT8 engines of the run; return verdict, accuracy and executed precisions of each."""
    params, folders = read_params(workspace / PARAMS_FILE), stage_folders(workspace)
    reference = float_results(workspace)
    found = []
    for row in read_rows(workspace / ARTIFACTS / "select_engine"):
        build_folder = folders.of(row.variant, row.target)["build_engine"]
        report = read_report(EngineBuild, build_folder)
        graph = workspace / params["engines"][row.name]["model"]
        if not report.is_quantized and row.variant != params["select_engine"]["float_reference"]["variant"]:
            continue
        executed = report.executed
        engine: Row = {
            "name": row.variant,
            "tool": OURS,
            "target": row.target,
            "verdict": str(row.verdict),
            "reason": row.reason,
            "picked": row.picked,
            "fault": report.reason,
            "precision_note": report.precision_note,
            "int8_share_of_quantized": executed and executed.int8_share_of_quantized,
            "int8_share_of_all": executed and executed.macs_share.get("int8", 0.0),
            "float_layers": layers_in_float(build_folder, report, graph) if report.is_quantized else [],
        }
        if row.measured is not None:
            engine |= accuracy_of(read_image_results(folders, row), reference, gate_of(workspace))
            kept = folder / row.name
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(build_folder / ENGINE_FOLDER, kept)
            engine["folder"] = str(kept.relative_to(workspace))
        found.append(engine)
    return found


def layers_in_float(build: Path, report: EngineBuild, graph: Path) -> list[Row]:
    """Count the convolutions and matrix products of a quantized variant that do not run in int8, by their reason.

    The reason is that of the runtime, if the target's graph has the layer between Q/DQ pairs; that of the target, if
    only the variant's graph has; else that of the stage which wrote the variant's graph.
    """
    if report.executed is None:
        return []
    model = read_graph(graph)
    macs, quantized = conv_macs(model), {node.name for node in quantized_layers(model)}
    refused = {node.node: node.precision for node in report.executed.not_in_int8}
    stage = json.loads((graph.parent / "report.json").read_text(encoding="utf-8"))
    reasons = {layer["node"]: layer["reason"] for layer in stage.get("float_layers", [])}
    with (build / ENGINE_FOLDER / LAYERS_FILE).open(encoding="utf-8", newline="") as file:
        in_int8 = {
            node
            for layer in csv.DictReader(file)
            if layer["precision"] == "int8"
            for node in layer["nodes"].split()
        }
    count: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for node in macs.keys() - in_int8:
        if node in refused:
            reason = f"between Q/DQ, but computed in {refused[node]}"
        elif node in quantized:
            reason = "left in float by the target"
        else:
            reason = reasons.get(node, "not quantized in the variant's graph")
        count[reason] += 1
        total[reason] += macs[node]
    whole = sum(macs.values()) or 1
    return [
        {"reason": reason, "num": count[reason], "macs_share": round(total[reason] / whole, 4)}
        for reason in sorted(total, key=lambda reason: -total[reason])
    ]


def float_results(workspace: Path) -> ValidatedImages:
    """Return the results of the float reference; raise NotFinished without it."""
    reference = stage_config("select_engine", workspace).float_reference
    for row in read_rows(workspace / ARTIFACTS / "select_engine"):
        if (row.variant, row.target) == (reference.variant, reference.target) and row.measured:
            return read_image_results(stage_folders(workspace), row)
    raise NotFinished(f"the float reference {reference.variant} on {reference.target} was not built")


def gate_of(workspace: Path) -> float:
    """Return the share of the float score that may be lost."""
    gate: float = stage_config("select_engine", workspace).max_score_rel_loss
    return gate


def accuracy_of(results: ValidatedImages, reference: ValidatedImages, gate: float) -> Row:
    """Return the scores of an engine, its losses, and whether it holds the gate."""
    loss = score_loss(results.decisive, reference.decisive)
    unseen = score_loss(results.unseen, reference.unseen)
    return {
        "score": round(results.decisive.score, 4),
        "loss": rounded((loss.rel_loss, loss.low, loss.high)),
        "standing": str(loss.standing(gate)),
        "unseen_score": round(results.unseen.score, 4),
        "unseen_loss": rounded((unseen.rel_loss, unseen.low, unseen.high)),
    }


def measure_peers(workspace: Path, folder: Path, deadline: float) -> list[Row]:
    """Quantize the imported float graph with each of the other tools, and return the accuracy of each.

    A tool that fails, or is not finished in time, has a row with the reason.
    """
    params, gate, reference = (
        read_params(workspace / PARAMS_FILE),
        gate_of(workspace),
        float_results(workspace),
    )
    graph, data = (workspace / params["pipeline"][name] for name in ("reference_graph", "data"))
    card, validation = read_card_of_graph(read_graph(graph)), stage_config("validate", workspace)
    rows = []
    for name, peer in PEERS.items():
        timeout_s = min(PEER_S, deadline - time.monotonic())
        out = folder / name.replace(" ", "_")
        row: Row = {"name": name, "tool": name, "target": peer.target, "fault": "no time was left"}
        if timeout_s > 0:
            file, row["seconds"], row["fault"] = quantized_by(
                name, graph, data, gate, out, timeout_s=timeout_s
            )
        if not row["fault"]:
            target = stage_config(f"build_engine.{peer.target}", workspace)
            try:
                engine = as_engine(file, target, card, out)
                validate(validation, engine=engine, data=data, out=out)
            except (RuntimeError, EnginewrightError) as error:
                row["fault"] = f"its file does not run: {first_line(error)}"
            else:
                splits = (validation.split, validation.unseen_split)
                decisive, unseen = (read_results(out / RESULTS_FILE, split) for split in splits)
                results = ValidatedImages(decisive, unseen, validation.unseen_split)
                row |= accuracy_of(results, reference, gate)
                row["folder"] = str(engine.relative_to(workspace))
        rows.append(row)
    return rows


def race_all(
    workspace: Path, engines: Sequence[Row], known: Sequence[Row] = ()
) -> tuple[list[Row], list[Row]]:
    """Race the engines of each target; return their rows with latencies, and what each race says of the picks.

    Of the races that are known, those with a small A/A spread are not repeated.
    """
    rows: list[Row] = []
    races = []
    for target in TARGETS:
        own = [row for row in engines if row["target"] == target]
        options = stage_config(f"benchmark.{target}", workspace)
        before = next((race for race in known if race["target"] == target), None)
        if (
            before is not None
            and before["aa_spread"] is not None
            and before["aa_spread"] <= options.max_aa_spread
        ):
            rows += own
            races.append(before)
            continue
        timed, found = race(workspace, own, options)
        ratios = found.pop("ratios")
        rows += timed
        races.append({"target": target} | found | against_peers(timed, ratios))
    return rows, races


def race(workspace: Path, engines: Sequence[Row], options: RaceOptions) -> tuple[list[Row], Row]:
    """Race the engines of a target; return their rows with p50 and time against float, and the ratios of all pairs.

    Engines with the same file are measured once. The first engine is the float graph.
    """
    folders = {row["name"]: workspace / row["folder"] for row in engines if "folder" in row}
    if len(folders) < 2:
        return [*engines], {"aa_spread": None, "num_rounds": 0, "ratios": {}}
    digests = {name: read_engine_manifest(folder).sha256 for name, folder in folders.items()}
    first = {digest: name for name, digest in reversed(digests.items())}
    base = next(iter(folders))
    racing = {REFERENCE if name == base else name: folders[name] for name in first.values()}
    ordered = {REFERENCE: racing.pop(REFERENCE)} | racing
    with open_race(options, ordered, device=CPU) as opened:
        rounds = opened.run(contenders=list(ordered))
    found = {(ratio.faster, ratio.slower): ratio for ratio in rounds.race.ratios}
    measured = {
        name: REFERENCE if first[digest] == base else first[digest] for name, digest in digests.items()
    }
    ratios = {
        (one, other): time_of(found, measured[one], measured[other]) for one in folders for other in folders
    }
    timed = []
    for row in engines:
        name = row["name"]
        if name in measured:
            bursts = rounds.bursts_ms[measured[name]]
            p50 = statistics.median(value for burst in bursts for value in burst)
            row = row | {"latency_ms_p50": round(p50, 4), "time_vs_float": ratios[name, base]}
        timed.append(row)
    return timed, {
        "aa_spread": round(rounds.race.aa_ratio.spread, 4),
        "num_rounds": rounds.race.num_rounds,
        "ratios": ratios,
    }


def time_of(ratios: Mapping[tuple[str, str], SpeedRatio], one: str, other: str) -> list[float]:
    """Return the time of one engine as a share of that of another, with its interval."""
    if one == other:
        return [1.0, 1.0, 1.0]
    ratio = ratios[one, other].inverse if (one, other) in ratios else ratios[other, one]
    return rounded((ratio.factor, ratio.low, ratio.high))


def against_peers(engines: Sequence[Row], ratios: Mapping[tuple[str, str], list[float]]) -> Row:
    """Compare our pick and our fastest INT8 engine that holds the gate with the fastest tool that holds it.

    None where there is no such engine.
    """
    timed = [row for row in engines if "latency_ms_p50" in row]
    ours = [row for row in timed if row["tool"] == OURS]
    pick = next((row["name"] for row in ours if row["picked"]), None)
    peer = fastest([row for row in timed if row["tool"] != OURS])
    int8 = fastest([row for row in ours[1:] if not row["precision_note"]])
    return {
        "pick": pick,
        "int8": int8,
        "peer": peer,
        "pick_vs_peer": ratios[pick, peer] if pick and peer else None,
        "int8_vs_peer": ratios[int8, peer] if int8 and peer else None,
    }


def fastest(engines: Sequence[Row]) -> str | None:
    """Return the name of the fastest engine that holds the gate."""
    holding = [row for row in engines if row["standing"] == Standing.within]
    return min(holding, key=lambda row: row["latency_ms_p50"])["name"] if holding else None


def rounded(values: Sequence[float]) -> list[float]:
    """Return a value and the ends of its interval with four decimals."""
    return [round(value, 4) for value in values]


if __name__ == "__main__":
    main()
