"""Do networks of others reach a table and a pick, or a refusal that is right?

``python -m benchmarks.corpus --workspace DIR`` writes the files of benchmarks/corpus_networks.py, random weights and
all, and runs the stages of ``model=onnx`` on each as ``dvc repro`` does: every stage a process of its own, whose
seconds and peak memory are kept. What a network answers counts as numbers, so that an INT8 engine is judged by the
signal-to-noise ratio of its logits, and no near-tie of classes decides. Images are drawn scenes. The other tools of
benchmarks/zoo_peers.py that need no labels quantize the same float graph with the same images; their logits are
compared with the same float answers, and their latency with that of the float engine, in the same rounds.

A network takes at most ``--limit-s`` seconds; what is not finished is recorded as that. Results go to
``benchmarks/results/corpus.json`` network by network; a second start measures what is missing, and what failed with
``--again``. With ``--import-only`` a network ends behind its import, and a later start without it goes on. Prints a
table; ``--page`` writes it to docs/networks-of-others.md.
"""

import argparse
import json
import math
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino
import torch
from onnxruntime.quantization import QuantFormat
from PIL import Image

from benchmarks.corpus_networks import CORPUS, CorpusNetwork, write_file
from benchmarks.corpus_writers import NotWritten, described, write_with
from benchmarks.gpu_cells import REPOSITORY
from benchmarks.peers import compiled, quantize_with_onnxruntime
from benchmarks.records import open_record, write_record
from benchmarks.runtimes import in_onnxruntime, requests_of, stage_config
from benchmarks.zoo import code_of
from benchmarks.zoo_peers import PEERS, quantized_by
from flows.params import compose_params, write_params
from flows.pipeline import RecordedStages, run_pipeline
from flows.stage_task import stage_command
from tasks.core.config import PARAMS_FILE, read_params
from tasks.core.errors import BuildFailed, EnginewrightError, first_line
from tasks.core.execute import ARTIFACTS
from tasks.core.fingerprint import file_md5
from tasks.parts.builders.graph_rewrites import rewrite_for
from tasks.parts.data.dataset import normalise, open_images
from tasks.parts.engines.machine import read_cpu_model
from tasks.parts.engines.openvino.compile import compile_graph
from tasks.parts.engines.rounds import Network, rounds_ms
from tasks.parts.engines.target import Target
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph
from tasks.parts.onnx_graphs.signal_to_noise import difference
from tasks.parts.selection.engine_row import read_rows
from tasks.parts.sources.config import ScenesConfig
from tasks.parts.sources.digit_scenes import draw_scenes

RESULTS = Path(__file__).parent / "results" / "corpus.json"
PAGE = REPOSITORY / "docs" / "networks-of-others.md"
TARGETS = ("cpu_onnxruntime", "cpu_openvino")
FLOAT = "imported"
TOOLS = ("quantize_static", "NNCF mixed")
LEFT_OUT = ("track", "race_picks", "convert_precision")
"""Stages that tell nothing more about a network."""
SHORTER = (
    "benchmark.budget_s=3",
    "benchmark.min_rounds=9",
    "benchmark.batch_sizes=[]",
    "benchmark.concurrencies=[]",
    "benchmark.quiet.max_wait_s=0",
)
"""Times are compared within rounds; how a network is served is not asked for."""
RUNGS = ("imported_ptq", "imported_repaired", "imported_partial")
"""Rungs beside the float graph. FP16 is left out, because these targets compute it in float32."""
NUM_IMAGES = {"train": 64, "val": 48, "test": 16}
SIDE_DRAWN = 256
NUM_ROUNDS = 15
TOOL_S = 180.0
"""Seconds for each of the other tools."""
GATE_DB = 17.0
"""What max_score_rel_loss=0.02 asks of values: noise of at most 2 % of the signal."""
NEAR_DB = 3.0
"""An INT8 engine is good if its logits are within this of the best of the other tools."""

Row = dict[str, Any]


class NotFinished(Exception):
    """A stage refused the network or failed, or time was up."""


@dataclass(frozen=True)
class StageCost:
    """What a stage of one network took."""

    seconds: float
    peak_mb: int


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, write each network at once, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--workspace", type=Path, default=Path("corpus"), help="a new folder, or that of an earlier run"
    )
    parser.add_argument("--networks", nargs="+", default=list(CORPUS), choices=list(CORPUS))
    parser.add_argument("--limit-s", type=float, default=900.0, help="wall-clock seconds for each network")
    parser.add_argument("--again", action="store_true", help="repeat what did not reach a table")
    parser.add_argument("--import-only", action="store_true", help="end each network behind its import")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page of the results")
    options = parser.parse_args(arguments)
    if options.page:
        PAGE.write_text(page(json.loads(options.results.read_text(encoding="utf-8"))), encoding="utf-8")
        return
    workspace = options.workspace.resolve()
    draw_images(workspace / "scenes")
    record = open_record(options.results, conditions(), ["rows"])
    last = "import_onnx" if options.import_only else None
    known = {
        row["network"]
        for row in record["rows"]
        if (row["fault"] and not options.again) or "graphs" in row or (last and not row["fault"])
    }
    for name in options.networks:
        if name in known:
            continue
        row = measure(name, workspace, deadline=time.monotonic() + options.limit_s, last=last)
        record["rows"] = [*(old for old in record["rows"] if old["network"] != name), row]
        write_record(options.results, record)
        print(f"{name}: {row['fault'] or 'done'}, {row['seconds']:.0f} s", flush=True)
    print("\n".join(table(record["rows"])))
    print("\n".join(summary(record["rows"])))


def conditions() -> Row:
    """Return what has to be the same for all rows of one file."""
    names = ("torch", "transformers", "onnx", "onnxruntime", "openvino", "nncf")
    return {
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        **{name: version(name) for name in names},
        "num_images": NUM_IMAGES,
    }


def draw_images(root: Path) -> None:
    """Write scenes as PNG files, a folder for each split, unless they are there."""
    if root.is_dir():
        return
    counts = {f"num_{split}": count for split, count in {"calibration": 1, **NUM_IMAGES}.items()}
    scenes = compose_params()["prepare_data"]["scenes"] | counts
    config: ScenesConfig = ScenesConfig(**scenes)
    draft = root.with_name("drawing")
    for split in NUM_IMAGES:
        folder = draft / "images" / split
        folder.mkdir(parents=True, exist_ok=True)
        number = 0
        for images_NHWC, _ in draw_scenes(split, config, height=SIDE_DRAWN, width=SIDE_DRAWN, seed=0):
            for image_HWC in images_NHWC:
                Image.fromarray(image_HWC).save(folder / f"{number:04d}.png")
                number += 1
    draft.rename(root)


def measure(name: str, workspace: Path, *, deadline: float, last: str | None = None) -> Row:
    """Write the file of a network, run stages (up to the `last`) and other tools, and return what came of it."""
    started, spec = time.monotonic(), CORPUS[name]
    row: Row = {"network": name, "family": spec.family, "code": code_of(REPOSITORY), "fault": "", "at": ""}
    if spec.writer:
        row["written_by"] = described(spec.writer)
    stages: dict[str, StageCost] = {}
    try:
        file = network_file(name, workspace)
        row["size_mb"] = round(file.stat().st_size / 1e6, 1)
        for address, inputs in stage_calls(overrides_of(file, spec, workspace), workspace).items():
            if address in LEFT_OUT:
                continue
            row["at"] = address
            timeout_s = deadline - time.monotonic()
            stages[address] = run_stage(
                address, stage_command(address, inputs), workspace, timeout_s=timeout_s
            )
            if address == "import_onnx":
                row |= read_import(workspace)
            if address == last:
                break
        else:
            row["at"] = ""
            row["engines"] = read_engines(workspace)
            row["graphs"] = compare_graphs(workspace, file.parent / "tools", deadline)
    except NotFinished as error:
        row["fault"] = str(error)
    row["stages"] = {
        address: [round(cost.seconds, 1), cost.peak_mb]
        for address, cost in stages.items()
        if not address.startswith(("prepare_data", "measure_machine"))  # the same for all networks
    }
    return row | {"seconds": round(time.monotonic() - started, 1)}


def network_file(name: str, workspace: Path) -> Path:
    """Return the ONNX file of a network, written unless it is there.

    Raises NotFinished if the package or the exporter refuses the network.
    """
    file = workspace / "files" / name / "model.onnx"
    if file.is_file():
        return file
    file.parent.mkdir(parents=True, exist_ok=True)
    draft, spec = file.with_name("draft.onnx"), CORPUS[name]
    given = network_file(spec.quantized_from, workspace) if spec.quantized_from else None
    images_NCHW = read_images(workspace, "train", side_of(spec))
    try:
        if spec.writer:
            environments = workspace / "environments"
            write_with(spec.writer, str(given or spec.architecture), images_NCHW, draft, environments)
        elif given:
            quantize_with_onnxruntime(given, images_NCHW, draft, QuantFormat[spec.quantized_form])
        else:
            write_file(name, draft, torch.from_numpy(images_NCHW))
    except NotWritten as error:
        raise NotFinished(f"the file was not written: {error}") from error
    except (RuntimeError, TypeError, ValueError, ImportError, AttributeError) as error:
        raise NotFinished(f"the file was not written: {type(error).__name__}: {first_line(error)}") from error
    draft.rename(file)
    return file


def side_of(spec: CorpusNetwork) -> int:
    """Return height and width of the images of an entry."""
    return CORPUS[spec.quantized_from].side if spec.quantized_from else spec.side


def read_images(workspace: Path, split: str, side: int) -> np.ndarray:
    """Return float32 [N, 3, side, side] as model.values=normalised has them."""
    files = sorted((workspace / "scenes" / "images" / split).glob("*.png"))
    images_NHWC = np.stack([np.asarray(Image.open(file).resize((side, side))) for file in files])
    model = compose_params(["model=onnx", "model.path=x.onnx", "data=images"])["import_onnx"]
    return normalise(images_NHWC, model["mean"], model["std"])


def overrides_of(file: Path, spec: CorpusNetwork, workspace: Path) -> list[str]:
    """Return what a user would set for a file, and what makes the run shorter."""
    model = "onnx_quantized" if spec.quantized_from else "onnx"
    ladder = [FLOAT, *(["imported_quantized"] if spec.quantized_from else []), *RUNGS]
    return [
        *(f"model={model}", f"model.path={file.relative_to(workspace)}", f"model.layout={spec.layout}"),
        "model.output_kind=values",
        *("data=images", "prepare_data.root=scenes", f"target=[{','.join(TARGETS)}]"),
        *(f"prepare_data.{axis}={side_of(spec)}" for axis in ("height", "width")),
        *("~variants.imported_fp16", f"select_engine.ladder=[{','.join(ladder)}]"),
        *(f"prepare_data.folder.num_calibration={NUM_IMAGES['train']}", *SHORTER),
    ]


def stage_calls(overrides: Sequence[str], workspace: Path) -> dict[str, Mapping[str, Path]]:
    """Write params.yaml into a workspace; return the inputs of each stage by its address, in their order.

    Raises NotFinished if the configuration is refused.
    """
    before = Path.cwd()
    os.chdir(workspace)  # paths of the configuration begin here
    try:
        params = compose_params(overrides)
        write_params(params, workspace / PARAMS_FILE)
    except EnginewrightError as error:
        raise NotFinished(f"flows.params: {first_line(error)}") from error
    finally:
        os.chdir(before)
    plan = RecordedStages()
    run_pipeline(plan, params)
    return dict(plan.calls)


def run_stage(address: str, command: Sequence[str], workspace: Path, *, timeout_s: float) -> StageCost:
    """Run a stage and return its cost; raise NotFinished with its last line if it fails or takes too long."""
    log, started = workspace / "stage.log", time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, *command[1:]],
            cwd=workspace,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        peak_mb = 0
        while process.poll() is None:
            peak_mb = max(peak_mb, resident_mb(process.pid))
            if time.monotonic() - started > timeout_s:
                process.kill()
                process.wait()
                raise NotFinished(
                    f"{address}: not finished when time was up, after {timeout_s:.0f} s of its own"
                )
            time.sleep(0.05)
    if process.returncode:
        lines = [line for line in log.read_text(encoding="utf-8").splitlines() if line.strip()]
        kept = log.with_name(f"{address}.failed.log")
        kept.write_text("\n".join(lines), encoding="utf-8")
        ended = f"{address} was ended by signal {-process.returncode}: " if process.returncode < 0 else ""
        raise NotFinished(ended + (lines or ["no message"])[-1][:600])
    return StageCost(time.monotonic() - started, peak_mb)


def resident_mb(pid: int) -> int:
    """Return the largest resident memory that a process had, 0 once it ended (proc_pid_status(5)).

    A child's getrusage would count what its parent held when it was started.
    """
    found = re.search(
        r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"), re.MULTILINE
    )
    return int(found.group(1)) // 1024 if found else 0


def read_import(workspace: Path) -> Row:
    """Return what import_onnx says of the file."""
    report = json.loads((workspace / ARTIFACTS / "import_onnx" / "report.json").read_text(encoding="utf-8"))
    differences = [found["sqnr_db"] for found in report["differences"]]
    return {
        "import_db": round(min(differences), 1) if differences else None,
        **{name: report[name] for name in ("num_parameters", "macs", "num_nodes")},
    }


def read_engines(workspace: Path) -> list[Row]:
    """Return verdict, precision and agreement of each engine."""
    rows = []
    for row in read_rows(workspace / ARTIFACTS / "select_engine"):
        folder = workspace / ARTIFACTS / "build_engine" / row.variant / row.target
        build = json.loads((folder / "report.json").read_text(encoding="utf-8"))
        found: Row = {
            "variant": row.variant,
            "target": row.target,
            "verdict": str(row.verdict),
            "picked": row.picked,
            "reason": row.reason,
            "precision": row.precision,
            "int8_share": round(row.macs_share.get("int8", 0.0), 3),
            "agreement_db": build["agreement_db"] and round(build["agreement_db"], 1),
        }
        if row.measured:
            found |= {
                "score": round(row.measured.accuracy.score, 4),
                "p50_ms": round(row.measured.speed.latency_ms_p50, 3),
            }
        rows.append(found)
    return rows


def compare_graphs(workspace: Path, folder: Path, deadline: float) -> list[Row]:
    """Return signal-to-noise ratio and time against float of our INT8 graphs and those of the other tools, by target.

    A graph that a runtime refuses, and a tool that fails, has a row with the reason.
    """
    params = read_params(workspace / PARAMS_FILE)
    graph, data = (workspace / params["pipeline"][name] for name in ("reference_graph", "data"))
    card = read_card_of_graph(read_graph(graph))
    images_NCHW = normalise(open_images(data, "val"), card.mean, card.std)
    rows: list[Row] = []
    for target in TARGETS:
        engines = [engine for engine in params["engines"].values() if engine["target"] == target]
        files = {
            engine["variant"]: workspace / engine["model"] for engine in engines if engine["variant"] != FLOAT
        }
        # A rung that had nothing to do has the graph of the one before.
        first_of = {file_md5(file): name for name, file in reversed(files.items())}
        networks: dict[str, Network] = {FLOAT: opened(graph, target, workspace)}
        quantized, faults = {name: files[name] for name in reversed(first_of.values())}, {}
        for name in (name for name in TOOLS if PEERS[name].target == target):
            timeout_s = min(TOOL_S, deadline - time.monotonic())
            quantized[name], _, faults[name] = quantized_by(
                name, graph, data, 0.02, folder / name, timeout_s=timeout_s
            )
        for name, file in quantized.items():
            try:
                if not faults.get(name):
                    networks[name] = opened(file, target, workspace)
            except BuildFailed as error:
                faults[name] = first_line(error)
        rows += [{"name": name, "target": target, "fault": fault} for name, fault in faults.items() if fault]
        rows += [{"target": target, **row} for row in compared(networks, images_NCHW)]
    return rows


def opened(file: Path, target: str, workspace: Path) -> Network:
    """Open a graph as a target does, or a file of NNCF in OpenVINO. Raises BuildFailed if the runtime refuses it."""
    config: Target = stage_config(f"build_engine.{target}", workspace)
    if file.suffix == ".xml":
        try:
            return requests_of(compiled(openvino.Core().read_model(file), replace(config, max_batch=1)))
        except RuntimeError as error:
            raise BuildFailed(f"OpenVINO refuses the graph: {error}") from error
    graph = rewrite_for(config, read_graph(file))
    if target == "cpu_onnxruntime":
        return in_onnxruntime(graph)
    return requests_of(compile_graph(graph.SerializeToString(), replace(config, max_batch=1)))


def compared(networks: Mapping[str, Network], images_NCHW: np.ndarray) -> Iterator[Row]:
    """Yield dB and time of each network against the first, the float one."""
    answers = {
        name: np.concatenate([np.array(network(image_CHW[None])) for image_CHW in images_NCHW])
        for name, network in networks.items()
    }
    rounds = rounds_ms(networks, images_NCHW[:1], NUM_ROUNDS)
    times = {
        name: statistics.median(statistics.median(burst) for burst in found) for name, found in rounds.items()
    }
    for name in networks:
        if name != FLOAT:
            yield {
                "name": name,
                "fault": "",
                "logits_db": round(difference(answers[FLOAT], answers[name]).sqnr_db, 1),
                "time_vs_float": round(times[name] / times[FLOAT], 3),
            }


def is_honest(row: Row, target: str) -> bool | None:
    """Say whether a network has a good INT8 engine on a target (True), or a refusal that is right (None).

    Good: an engine that may be picked, with logits within NEAR_DB of those of the best of the other tools. A
    refusal is right where each of those fails, is slower than float, or is beyond the gate too. Anything else is
    False.
    """
    tools = [found for found in row["graphs"] if found["target"] == target and found["name"] in TOOLS]
    ours = [found for found in row["graphs"] if found["target"] == target and found["name"] not in TOOLS]
    accepted = {
        engine["variant"]
        for engine in row["engines"]
        if engine["target"] == target and engine["verdict"] in ("ACCEPT", "NOT_FASTER", "INCONCLUSIVE")
    }
    best_db = max((found["logits_db"] for found in tools if not found["fault"]), default=-math.inf)
    if any(
        not found["fault"] and found["name"] in accepted and found["logits_db"] >= best_db - NEAR_DB
        for found in ours
    ):
        return True
    fail_too = all(
        found["fault"] or found["time_vs_float"] >= 1 or found["logits_db"] < GATE_DB for found in tools
    )
    return None if fail_too else False


def page(record: Row) -> str:
    """Return the page on which a user looks his architecture up."""
    rows, conditions = record["rows"], record["conditions"]
    versions = ", ".join(f"{name} {conditions[name]}" for name in ("torch", "transformers", "onnxruntime"))
    codes = ", ".join(sorted({row["code"]["tasks"][:7] for row in rows}))
    tools = ", ".join(dict.fromkeys(row["written_by"] for row in rows if "written_by" in row))
    return "\n".join(
        [
            "# Networks of others",
            "",
            "Written by `python -m benchmarks.corpus --page`; measured by `python -m benchmarks.corpus` on "
            f"{record['date']}, {conditions['cpu_model']}, {versions}, openvino {conditions['openvino']}, nncf "
            f"{conditions['nncf']}; files of others by {tools}; git's digests of tasks/: {codes}. Look your "
            "architecture up: does its ONNX file go through, and what does INT8 bring?",
            "",
            *(f"- {line}" for line in summary(rows)),
            "",
            *table(rows),
            "",
            _HOW_TO_READ,
        ]
    )


_HOW_TO_READ = f"""How to read it:

- Weights are random, scaled layer by layer to outputs of unit variance, and the answers count as numbers
  (`model.output_kind=values`). Trained networks of the same architecture may lose more or less: the
  [zoo](results.md) has some.
- Files named `_qdq` and `_qoperator` are quantized by `quantize_static`, `_nncf` by NNCF, `_aimet` by AIMET (INT8)
  and `_modelopt` by Model-Optimizer with its defaults, which are FP16 beside INT8.
- `keras_` are exported by tf2onnx, with images [N, H, W, C] (`model.layout=nhwc`), and `paddle_` by paddle2onnx. They
  have the random weights of their packages, and the statistics of BatchNorm alone are those of the images.
- *import*: signal-to-noise ratio of what the imported graph answers against the file in ONNX Runtime; for quantized
  files that of their float form, which is what their own rounding costs.
- *ours*: the INT8 graph of PTQ, repair or partial quantization with the best logits: their signal-to-noise ratio
  against the float graph on {NUM_IMAGES["val"]} images that no range was taken from, and the median time as a
  multiple of the float graph's in the same runtime, in {NUM_ROUNDS} interleaved rounds.
- *tool*: the same for `quantize_static` of ONNX Runtime (uint8 and int8, per channel, preprocessed) and for NNCF's
  mixed preset in OpenVINO; `-` where the tool failed.
- *pick*: what `select_engine` would ship; `float` where INT8 is slower or loses too much.
- A good INT8 engine is one that may be picked and whose logits are within {NEAR_DB:.0f} dB of the tool's. A refusal
  is right where the tool fails too: its file does not run, is slower than float, or is below the {GATE_DB:.0f} dB
  that the gate of 2 % (`max_score_rel_loss`) asks of both.
- The last column: minutes from file to pick with all tools, on a machine that others used, and the largest resident
  memory of a stage.
"""


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a Markdown row for each network."""
    yield "| network | file | import | ONNX Runtime: ours | tool | pick | OpenVINO: ours | tool | pick | min, MB |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for row in sorted(rows, key=lambda row: (str(row["family"]).lower(), row["network"])):
        imported = f"{row['import_db']:.0f} dB" if row.get("import_db") else "-"
        head = f"| {row['family']} | {row['network']} | {imported} |"
        if row["fault"]:
            yield f"{head} {row['fault'].replace('|', '/')[:200]} | | | | | | |"
        elif "graphs" not in row:
            yield f"{head} not measured | | | | | | |"
        else:
            cells = [cell for target in TARGETS for cell in cells_of(row, target)]
            peak_mb = max(peak for _, peak in row["stages"].values())
            yield f"{head} {' | '.join(cells)} | {row['seconds'] / 60:.0f}, {peak_mb} |"


def cells_of(row: Row, target: str) -> tuple[str, str, str]:
    """Return our best INT8 graph, that of the other tool, and the pick of a target."""
    picks = [
        engine["variant"].removeprefix(f"{FLOAT}_")
        for engine in row["engines"]
        if engine["target"] == target and engine["picked"]
    ]
    pick = "none" if not picks else "float" if picks == [FLOAT] else picks[0]
    ours = graph_cell(row, target, ["imported_quantized", *RUNGS])
    return ours, graph_cell(row, target, TOOLS), pick


def graph_cell(row: Row, target: str, names: Sequence[str]) -> str:
    """Return dB and time against float of the graph with the best logits among some."""
    found = [
        graph
        for graph in row["graphs"]
        if graph["target"] == target and graph["name"] in names and not graph["fault"]
    ]
    if not found:
        return "-"
    best = max(found, key=lambda graph: graph["logits_db"])
    return f"{best['logits_db']:.1f} dB {best['time_vs_float']:.2f}x"


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what share was imported, and what share has a good INT8 engine on each runtime."""
    imported = [row for row in rows if "import_db" in row]
    finished = [row for row in rows if "graphs" in row]
    yield f"imported: {len(imported)} of {len(rows)}; with a table: {len(finished)}"
    for target in TARGETS:
        good = [is_honest(row, target) for row in finished]
        yield (
            f"{target}: {good.count(True)} good INT8 engines, {good.count(None)} refusals that are right, "
            f"{good.count(False)} others"
        )


if __name__ == "__main__":
    main()
