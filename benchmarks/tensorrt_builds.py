"""Which graphs do NVIDIA's own parser and builder take, in which types, in what time?

``python -m benchmarks.tensorrt_builds --workspace DIR`` writes the networks of benchmarks/corpus.py as ONNX files,
imports and quantizes them with few images, rewrites the float and the INT8 graph for each of TARGETS, and lets
TensorRT for RTX parse and build them: it needs no GPU, and is installed into the workspace (tensorrt_rtx.py).
Its parser and its strong typing are those of TensorRT; its kernels are not those of the data-centre builder, so that
seconds and sizes say nothing of that one, and no plan is loaded. Each network builds in a process of its own.

Results go to ``benchmarks/results/tensorrt_builds.json`` network by network; a second start measures what is missing.
``--page`` writes docs/tensorrt.md.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import tensorrt_peers
from benchmarks.corpus import (
    NotFinished,
    conditions,
    draw_images,
    network_file,
    overrides_of,
    run_stage,
    stage_calls,
)
from benchmarks.corpus_networks import CORPUS, CorpusNetwork
from benchmarks.gpu_cells import REPOSITORY
from benchmarks.large_weights import SIDE, write_network
from benchmarks.records import open_record, write_record
from benchmarks.tensorrt_rtx import installed_builder, version_of
from benchmarks.zoo import code_of
from flows.params import compose_params
from flows.stage_task import stage_command
from tasks.core.config import typed_config
from tasks.core.errors import EnginewrightError, first_line
from tasks.core.execute import ARTIFACTS
from tasks.parts.engines.target import Target

RESULTS = Path(__file__).parent / "results" / "tensorrt_builds.json"
PEERS = tensorrt_peers.RESULTS
PAGE = REPOSITORY / "docs" / "tensorrt.md"
TARGETS = ("h200_tensorrt", "h200_tensorrt_f32", "h200_tensorrt_static")
STAGES = ("prepare_data", "import_onnx", "label_images")
GRAPHS = {"float": "import_onnx", "INT8": "quantize_ptq"}
LARGE, LARGE_GIB = "linear_layers_2_3_gib", 2.3
SPECS = {**CORPUS, LARGE: CorpusNetwork("Linear layers, 2.3 GiB", None, side=SIDE)}
FEW_IMAGES = ("quantize_ptq.num_images=8", "quantize_ptq.num_val_images=8")
"""Where pairs stand does not depend on their ranges."""
BUILD_S = 900.0

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is missing, write each network at once, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, default=Path("tensorrt_builds"))
    parser.add_argument("--networks", nargs="+", default=list(SPECS), choices=list(SPECS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", action="store_true", help="measure nothing; write the page of the results")
    parser.add_argument("--build", nargs="+", help=argparse.SUPPRESS)  # in the builder's process
    options = parser.parse_args(arguments)
    workspace = options.workspace.resolve()
    if options.page:
        records = [json.loads(file.read_text(encoding="utf-8")) for file in (options.results, PEERS)]
        PAGE.write_text(page(*records), encoding="utf-8")
    elif options.build:
        print(json.dumps([*build_all(workspace, options.build)]))
    else:
        draw_images(workspace / "scenes")
        builder = installed_builder(workspace / "builder")
        record = open_record(options.results, conditions() | {"builder": version_of(builder)}, ["rows"])
        known = {row["network"] for row in record["rows"]}
        for name in options.networks:
            if name not in known:
                row = measure(name, workspace, builder)
                record["rows"].append(row)
                write_record(options.results, record)
                print(f"{name}: {row['fault'] or summary_of(row)}", flush=True)
        print("\n".join(table(record["rows"])))


def measure(name: str, workspace: Path, builder: Path) -> Row:
    """Write the file of a network, quantize it and let the builder build its graphs; return what came of it."""
    spec, kinds = SPECS[name], ["float"] if name == LARGE else [*GRAPHS]
    row: Row = {
        "network": name,
        "family": spec.family,
        "code": code_of(REPOSITORY),
        "fault": "",
        "builds": [],
    }
    try:
        file = large_file(workspace) if name == LARGE else network_file(name, workspace)
        calls = stage_calls([*overrides_of(file, spec, workspace), *FEW_IMAGES], workspace)
        for address in dict.fromkeys([*STAGES, *(GRAPHS[kind] for kind in kinds)]):
            run_stage(address, stage_command(address, calls[address]), workspace, timeout_s=BUILD_S)
    except NotFinished as error:
        return row | {"fault": str(error)}
    try:
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "benchmarks.tensorrt_builds",
                "--workspace",
                str(workspace),
                "--build",
                *kinds,
            ],
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": f"{REPOSITORY}:{builder}"},
            capture_output=True,
            text=True,
            timeout=BUILD_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return row | {"fault": f"not built after {BUILD_S:.0f} s"}
    if done.returncode:
        return row | {"fault": (done.stderr.strip().splitlines() or [f"signal {-done.returncode}"])[-1]}
    return row | {"builds": json.loads(done.stdout.splitlines()[-1])}


def large_file(workspace: Path) -> Path:
    """Return the folder of a network of more weights than one message holds, written unless it is there."""
    folder = workspace / "files" / LARGE
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = folder.with_name("draft")
        shutil.rmtree(draft, ignore_errors=True)
        write_network(LARGE_GIB, draft)
        draft.rename(folder)
    return folder


def build_all(workspace: Path, kinds: Sequence[str]) -> Iterator[Row]:
    """Yield what the builder makes of each graph of these kinds for each target. Needs TensorRT.

    Rewrites are not held against the graph, as `build_engine` does: few images and random weights may drown any
    logits in rounding.
    """
    import tensorrt as trt

    from tasks.parts.builders.contract import GraphSource, read_source
    from tasks.parts.builders.graph_rewrites import rewrite_for, round_rest
    from tasks.parts.builders.tensorrt_network import count_products
    from tasks.parts.builders.tensorrt_plan import build_plan, parse_graph
    from tasks.parts.engines.tensorrt.log import LOG

    artifacts = workspace / ARTIFACTS
    images = artifacts / "label_images" / "dataset" / "calibration_images.npy"
    params = compose_params([f"target=[cpu_torch,cuda_torch,{','.join(TARGETS)}]"])
    for kind in kinds:
        for name in TARGETS:
            declared: Target = typed_config(Target, params["build_engine"][name], f"target.{name}")
            assert declared.tensorrt is not None and declared.gpu is not None
            source = read_source(declared, artifacts / GRAPHS[kind] / "model.onnx", images)
            assert isinstance(source, GraphSource)
            target = replace(
                declared,
                max_batch=source.card.fit_batch(declared.max_batch),
                tensorrt=replace(declared.tensorrt, timing_cache=None),
            )
            num_warnings = len(LOG.warnings)
            found: Row = {"graph": kind, "target": name, "fault": ""}
            try:
                graph = round_rest(target, rewrite_for(target, source.graph), source.images_NCHW)
                found["products"] = count_products(parse_graph(trt.Builder(LOG), graph, target)[0])
                started = time.monotonic()
                plan = build_plan(graph, target, declared.gpu)
                found |= {"seconds": round(time.monotonic() - started, 1), "mb": round(len(plan) / 1e6, 1)}
            except EnginewrightError as error:
                found["fault"] = first_line(error)
            told = Counter(text.strip()[:160] for text in LOG.warnings[num_warnings:])
            yield found | {"warnings": dict(told.most_common(5))}


def summary_of(row: Row) -> str:
    """Return how many plans of a network were built."""
    return f"{sum(not found['fault'] for found in row['builds'])} of {len(row['builds'])} plans"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield a Markdown row for each graph."""
    yield f"| network | graph | {' | '.join(TARGETS)} |"
    yield f"|---|---|{'---|' * len(TARGETS)}"
    for row in sorted(rows, key=lambda row: (str(row["family"]).lower(), row["network"])):
        if row["fault"]:
            yield f"| {row['network']} | {row['fault'].replace('|', '/')[:200]} | {'| ' * len(TARGETS)}"
        for kind in dict.fromkeys(found["graph"] for found in row["builds"]):
            cells = {found["target"]: cell(found) for found in row["builds"] if found["graph"] == kind}
            yield f"| {row['network']} | {kind} | {' | '.join(cells[name] for name in TARGETS)} |"


def cell(found: Row) -> str:
    """Return the types of the products, seconds and size of a build, or why there is none."""
    if found["fault"]:
        return str(found["fault"]).replace("|", "/")[:200]
    types = ", ".join(f"{count} {name}" for name, count in sorted(found["products"].items()))
    return f"{types}; {found['seconds']:.1f} s, {found['mb']:.1f} MB"


def page(record: Row, peers: Row) -> str:
    """Return docs/tensorrt.md: what was built, and where pairs stand beside Model-Optimizer's."""
    rows, conditions = record["rows"], record["conditions"]
    builds = [found for row in rows for found in row["builds"]]
    built = sum(not found["fault"] for found in builds)
    return "\n".join(
        [
            "# Graphs in NVIDIA's own builder",
            "",
            "Written by `python -m benchmarks.tensorrt_builds --page`; measured by "
            f"`python -m benchmarks.tensorrt_builds` on {record['date']}, {conditions['cpu_model']}, "
            f"{conditions['builder']}, onnx {conditions['onnx']}. The networks are those of "
            "[networks of others](networks-of-others.md).",
            "",
            _WHAT_IT_COVERS,
            f"{built} of {len(builds)} plans of {len(rows)} networks were built.",
            "",
            _WHAT_IT_FOUND,
            "## Beside Model-Optimizer",
            "",
            f"Measured by `python -m benchmarks.tensorrt_peers` on {peers['date']}, "
            f"{peers['conditions']['cpu_model']}, {peers['conditions']['peer']} in an environment of its own.",
            "",
            _HOW_THEY_DIFFER,
            *tensorrt_peers.table(peers["rows"]),
            "",
            "## What was built",
            "",
            *table(rows),
            "",
        ]
    )


_WHAT_IT_COVERS = """This is TensorRT for RTX, which builds without a GPU. What it covers: the parser of ONNX graphs,
strong typing (each tensor has the type that the graph gives it, or the build fails), optimization profiles, and where
Q/DQ pairs may stand. What it does not cover: kernels, tactics, seconds and sizes of the data-centre builder, the
loading of a plan, and accuracy. Nothing of it was run on a GPU.

A cell has the precisions in which convolutions and matrix products were parsed (`int8`: between Q/DQ pairs), seconds
of the build and size of the plan.
"""

_WHAT_IT_FOUND = """## What NVIDIA's code found

Assumptions of ours that were wrong, or that nobody had tried, and what became of them:

- `hardware_compatibility_level` was set to none, which is the default: that builder warns of it. It is set only where
  a target asks for it.
- A graph above 2 GiB cannot be parsed from one message: it reaches the parser as a file with its weights beside it.
- TensorRT's own plugins were loaded nowhere (`init_libnvinfer_plugins`): builder, runner and bundle do so now.
- A zero point other than 0 is refused by the parser, as the documentation says: targets of TensorRT have symmetric
  INT8 (`uint8_activations: false`), and a test holds that the parser refuses the other one.
- Around INT8 in FP16 this builder says that it converts scales of convolutions to FP32. `QuantizeLinear` takes an
  input and a scale of one type, so the graph has them in FP16.
- `Col2Im` (torch's `fold`, in MobileViT V2) has no importer: the build is refused with the names of the nodes.
- The parser of TensorRT for RTX ends the process where a plugin is created. Its registry loads libraries of plugins,
  which a test does; its targets take none.
"""

_HOW_THEY_DIFFER = """Both quantized the same file on the same 16 images, with the largest magnitudes as ranges, and
both have FP16 around INT8. Logits are those of the graphs as they are written, against the float file: every tensor
is rounded to its type between two operators; the order in which a kernel adds is not modelled. The weights are
random, and in EfficientNet-B0 rounding drowns the logits of either.

Where both agree: all layers but the classifier run in INT8, and a residual addition of convolutions reads one pair,
two behind a SiLU. Where they differ, and why:

- **Attention** (ViT-B): its products, the residual additions and the inputs of LayerNormalization stay in FP16 here
  (`quantize_ptq=products` quantizes the products as well); there they read pairs, 143 in place of 52, which costs
  7 dB with these ranges. A LayerNormalization has no INT8 kernel and converts its input back.
- **Squeeze-and-excitation** (the 32 other vector products of EfficientNet-B0): FP16 here, INT8 there. Model-Optimizer
  leaves matrix products of one row in float, and takes 1x1 convolutions of one pixel, which compute the same, for
  layers. They wait for their weights either way.
- **Concat** (YOLOv8n's backbone): one scale for its inputs and its output here; a scale for each input and no pair
  behind it there, so its output is FP16 or rounded once more.
- **Pools**: the global pool reads INT8 here, which costs ResNet-18 1 dB and gains little; there in EfficientNet-B0
  alone, and this parser refuses that pool.
"""


if __name__ == "__main__":
    main()
