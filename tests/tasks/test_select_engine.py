"""Verdicts, fronts and picks from the reports of the earlier stages; the readable reports."""

import contextlib
import dataclasses
import hashlib
import html
import io
import json
import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from onnx import TensorProto, helper

from flows.result_table import print_result
from tasks import track
from tasks.core.config import typed_config
from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.fingerprint import digest
from tasks.core.reports import write_json
from tasks.parts.builders.report import BuildCost, publish
from tasks.parts.data.accuracy import Accuracy, AccuracyReport
from tasks.parts.data.comparison import RESULTS_FILE, ImageResults, boundaries_of, frames_of, write_results
from tasks.parts.data.input_card import InputCard
from tasks.parts.engines.gpu import Gpu
from tasks.parts.engines.manifest import (
    GRAPH_FILE,
    EngineManifest,
    EngineStatus,
    read_engine_manifest,
    write_engine_manifest,
)
from tasks.parts.engines.runtimes import Precision, Runtime
from tasks.parts.engines.target import Gives, Reads, Target
from tasks.parts.engines.tuning import Tuning
from tasks.parts.layer_diff.report import DiffReport, LayerDifferences
from tasks.parts.layer_diff.table import Layer
from tasks.parts.measuring.batch_latency import BatchLatency, Interval
from tasks.parts.measuring.load_report import (
    Arrivals,
    ArrivalStep,
    EngineLoad,
    LoadCell,
    LoadReport,
    Setting,
    Together,
)
from tasks.parts.measuring.machine_state import Machine, MachineState
from tasks.parts.measuring.pareto import pareto_front
from tasks.parts.measuring.reports import (
    BenchmarkReport,
    EngineMeasurement,
    Latency,
    Race,
    SpeedRatio,
    Throughput,
    Timed,
)
from tasks.parts.measuring.surroundings import Quiet, Surroundings
from tasks.parts.quantization.left_out import Search
from tasks.parts.selection.engine_row import Verdict, flatten, read_rows
from tasks.parts.selection.headline import EXPLAINED, RACE_PENDING
from tasks.select_engine import Config, EngineName, Report, Technique, reads, select_engine
from tests.conftest import checked

CLASSES = ("background", "three", "<b>seven</b>")
REFERENCE = EngineName("distilled", "cpu_torch")

# (mIoU, p50 ms, speed-up over eager) of each engine; the speed-ups are 18.6 ms / p50, as in the field.
MEASURED = {
    ("teacher", "cpu_torch"): (0.68, 93.0, 0.2),
    ("distilled", "cpu_torch"): (0.540, 18.6, 1.0),
    ("distilled", "cpu_onnxruntime"): (0.540, 1.7, 10.9),
    ("pruned", "cpu_onnxruntime"): (0.536, 1.2, 15.5),
    ("pruned_ptq", "cpu_onnxruntime"): (0.510, 0.66, 28.2),
    ("pruned_qat", "cpu_onnxruntime"): (0.533, 0.66, 28.2),
}


LADDER = ["distilled", "pruned", "pruned_ptq", "pruned_partial", "pruned_qat"]


def engine_bytes(variant: str, target: str) -> bytes:
    """Return a graph that differs from engine to engine."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("image", "logits")]
    node = helper.make_node("Identity", ["image"], ["logits"], name="head")
    graph = helper.make_graph([node], f"{variant}{target}", values[:1], values[1:])
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10
    ).SerializeToString()


def batch_latency(latency_ms: float) -> BatchLatency:
    """Return what a benchmark finds at batch 1."""
    return BatchLatency(
        batch=1,
        latency_ms_p50=latency_ms,
        latency_ms_p90=latency_ms * 1.1,
        latency_ms_p95=latency_ms * 1.2,
        latency_ms_p99=latency_ms * 1.3,
        latency_ms_mean=latency_ms,
        latency_ms_intervals={"p50": Interval(latency_ms, latency_ms)},
        device_ms_p50=None,
        device_compute_ms_p50=None,
        throughput_per_s=1000 / latency_ms,
        is_stable=True,
        num_windows=3,
        num_rounds=40,
        num_samples=1200,
    )


def measurement(sha256: str, latency: Latency | None) -> EngineMeasurement:
    return EngineMeasurement(
        status="built",
        reason="",
        engine_sha256=sha256,
        measured_as="",
        latency=latency,
        runtime="onnxruntime",
        runtime_version="1.31.1",
        provider="CPUExecutionProvider",
        num_threads=2,
        options={"cuda_graph": True},
    )


def layer_difference(node: str, module: str, source: str) -> Layer:
    return Layer(node, "Conv", node, module, source, 7.5, 0.9, 1.0, 0.8, 20.0, 0.1, 21.25, None, None)


def diff_report(sha256: str, first_collapse: Layer | None, largest_own_drop: Layer) -> DiffReport:
    differences = LayerDifferences(
        num_images=8,
        num_tensors=30,
        num_layers=20,
        num_fused=9,
        logits_sqnr_db=12.0,
        logits_cosine=0.9,
        variant_logits_sqnr_db=None,
        runtime_logits_sqnr_db=None,
        worst_sqnr_db=7.5,
        first_collapse=first_collapse,
        largest_own_drop=largest_own_drop,
        marking="",
        marked_agreement_db=60.0,
        bisection=None,
    )
    return DiffReport("built", "", sha256, differences)


def inside(report: Any, path: str) -> Any:
    """Return the part of a report that a dotted path names; the whole for an empty one."""
    for key in path.split(".") if path else ():
        report = report[int(key) if key.isdigit() else key]
    return report


def stored_miou(report: Path) -> float | None:
    """Return the mIoU of a report of validate; None for one that a test has damaged."""
    try:
        miou: float | None = json.loads(report.read_text())["accuracy"]["miou"]
    except (ValueError, KeyError, TypeError):
        return None
    return miou


class Artifacts:
    """The output folders of the four earlier stages, with whatever a test wants in them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: list[EngineName] = []
        self.speedups: dict[str, float] = {}
        self.race_changes: dict[str, tuple[float, float]] = {}
        self.scatter: dict[str, float] = {}
        self.unseen: dict[str, float] = {}
        self.unseen_scatter: dict[str, float] = {}
        self.boundaries: dict[str, tuple[float, float]] = {}
        self.frames: dict[str, float] = {}
        self.num_groups = 400
        self.ious: dict[str, tuple[float, float, float]] = {}
        for stage in ("build_engine", "validate", "measured", "diff_layers"):
            (root / stage).mkdir(parents=True)

    def scatter_scores(self, name: str, deviation: float) -> None:
        """Let the IoU of single images deviate from the engine's, so that its loss is uncertain."""
        self.scatter[name] = deviation

    def set_boundary_iou(self, boundary_iou: float, *names: str, deviation: float = 0.0) -> None:
        """Give engines a Boundary IoU, from which single images deviate."""
        for name in names:
            self.boundaries[name] = boundary_iou, deviation
            by_class = {"three": boundary_iou}
            fields = {"boundary_iou": boundary_iou, "boundary_iou_by_class": by_class}
            self.change("validate", name, "accuracy", **fields)

    def set_frame_score(self, score: float | None, *names: str, note: str = "") -> None:
        """Give engines a score on the original files, each of which has it."""
        for name in names:
            if score is not None:
                self.frames[name] = score
            self.change("validate", name, frame_score=score, frame_note=note)

    def _write_images(self) -> None:
        """Write what was right in each of 400 images, the same in all of them unless it is scattered."""
        for name in self.names:
            folder = self.root / "validate" / name.variant / name.target
            if not (folder / "report.json").is_file():
                continue
            miou, address = stored_miou(folder / "report.json"), f"{name.variant}-{name.target}"
            if miou is None:
                continue
            scatter = self.scatter.get(address, 0.0)
            unseen = self.unseen.get(address, miou), self.unseen_scatter.get(address, scatter)
            scores = {"val": (miou, scatter), "test": unseen}
            if address in self.boundaries:
                scores |= dict.fromkeys(map(boundaries_of, ("val", "test")), self.boundaries[address])
            if address in self.frames:
                scores[frames_of("val")] = self.frames[address], 0.0
            splits = {}
            for split, (score, deviation) in scores.items():
                waves = deviation * np.tile([1, -1, 2, -2], 100)
                hits = np.rint(1e6 * (score + waves)).astype(np.int64)[:, None]
                if address in self.ious and split in ("val", "test"):
                    hits = np.rint(1e6 * (np.array(self.ious[address]) + waves[:, None])).astype(np.int64)
                total = np.full_like(hits, 1_000_000)
                splits[split] = ImageResults(hits, total, total, np.arange(400) % self.num_groups)
            write_results(folder / RESULTS_FILE, splits)

    def inputs(self) -> dict[str, Path]:
        self._write_images()
        return {
            "builds": self.root / "build_engine",
            "validations": self.root / "validate",
            "benchmarks": self._write_benchmarks(),
            "diffs": self.root / "diff_layers",
        }

    def selection_inputs(self) -> dict[str, Path]:
        """Return all that select_engine reads; no target is explained, and no answers are kept."""
        unread = {name: self.root / name for name in ("explanations", "loads", "data", "repaired", "partial")}
        return {**self.inputs(), **unread}

    def change_race(self, name: str, low: float, aa_ratio_spread: float = 0.005) -> None:
        """Say how surely a rung is faster than each one below it, and how noisy its target is."""
        self.race_changes[name] = low, aa_ratio_spread

    def _write_benchmarks(self) -> Path:
        """Write what benchmark would have found for each target from what is known of its engines."""
        for target in {name.target for name in self.names}:
            folder = self.root / "benchmark" / target
            folder.mkdir(parents=True, exist_ok=True)
            report = dataclasses.asdict(self._benchmark(target))
            for variant in report["engines"]:
                (folder / variant).mkdir(exist_ok=True)
                (folder / variant / "latencies.csv").write_text("batch,round,latency_ms\n")
                known = json.loads((self.root / "measured" / variant / target / "report.json").read_text())
                report["engines"][variant] = known | {
                    "measured_as": report["engines"][variant]["measured_as"]
                }
            (folder / "report.json").write_text(json.dumps(report))
            (folder / "key.json").write_text(json.dumps({"key": f"key of {target}"}))
        return self.root / "benchmark"

    def _benchmark(self, target: str) -> BenchmarkReport:
        reference = hashlib.sha256(engine_bytes(REFERENCE.variant, REFERENCE.target)).hexdigest()
        engines: dict[str, EngineMeasurement] = {}
        latencies, ratios, spread = {"reference": 18.6}, [], 0.005
        for variant in dict.fromkeys([*LADDER, *(name.variant for name in self.names)]):
            file = self.root / "measured" / variant / target / "report.json"
            if not file.is_file():
                continue  # not built
            known = json.loads(file.read_text())
            sha256, latency_ms = known["engine_sha256"], inside(known, "latency.batches.0")["latency_ms_p50"]
            for earlier, earlier_ms in latencies.items():
                factor = earlier_ms / latency_ms
                if earlier == "reference":
                    factor = self.speedups[f"{variant}-{target}"]
                low, spread = self.race_changes.get(f"{variant}-{target}", (0.99 * factor, spread))
                ratios.append(SpeedRatio(variant, earlier, factor, low, 1.01 * factor))
            twins = [engine.measured_as for engine in engines.values() if engine.engine_sha256 == sha256]
            measured_as = "reference" if sha256 == reference else (twins or [variant])[0]
            engines[variant] = dataclasses.replace(measurement(sha256, None), measured_as=measured_as)
            if measured_as != "reference":
                latencies[variant] = latency_ms
        control = SpeedRatio("control", "first", 1.0, 1 - spread, 1 + spread)
        race = Race(tuple(ratios), control, 0.95, 6, 0.001, (), 18.6, 40, 0, (0,))
        machine = Machine("0123456789abcdef", "A CPU", ("avx2",), None, {})
        state = MachineState(None, None, None, "the target does not use one")
        around = Surroundings(Quiet(True, 0.3, 0.05), 0.002, None, state, state)
        is_inconclusive = spread > 0.05
        return BenchmarkReport(
            engines, reference, REFERENCE.target, Timed.frame, race, is_inconclusive, machine, around
        )

    def change(self, stage: str, name: str, part: str = "", **fields: Any) -> None:
        """Change fields of a report, or of the part of it that a dotted path names."""
        variant, target = name.split("-")
        file = self.root / stage / variant / target / "report.json"
        report = json.loads(file.read_text())
        inside(report, part).update(fields)
        file.write_text(json.dumps(report))

    def add(
        self,
        variant: str,
        target: str,
        miou: float,
        latency_ms: float,
        speedup: float,
        *,
        is_precision_ok: bool = True,
        precision_note: str = "",
        precision: str | None = None,
    ) -> None:
        self.speedups[f"{variant}-{target}"] = speedup
        content = engine_bytes(variant, target)
        sha256 = hashlib.sha256(content).hexdigest()
        used = precision or ("int8" if variant.startswith("pruned_") else "f32")
        manifest = dataclasses.replace(
            self._manifest(target, EngineStatus.built, "", sha256, len(content), is_precision_ok),
            precisions={"Conv": {"f32": 3, used: 5}},
        )
        folder = self._build(variant, target, manifest, precision_note)
        (folder / "engine" / "model.engine").write_bytes(content)
        (folder / "engine" / GRAPH_FILE).write_bytes(content)
        iou = {"background": 0.95, "three": miou, "<b>seven</b>": None}
        accuracy = Accuracy("mIoU", miou=miou, top1=None, pixel_accuracy=0.9, iou=iou)
        self._report(
            "validate", variant, target, AccuracyReport("built", "", sha256, "val", "test", 400, accuracy)
        )
        single = batch_latency(latency_ms)
        batched = dataclasses.replace(single, batch=8, throughput_per_s=1400 / latency_ms)
        latency = Latency(
            batches=(single, batched),
            throughputs=(Throughput(2, 1900 / latency_ms, 1800, 2000, latency_ms, None),),
            phases_ms={"decode": 0.1, "pre": 0.0, "run": latency_ms, "post": 0.0},
            frames_per_s=1000.0 / latency_ms,
            load_ms=12.0,
            first_call_ms=3 * latency_ms,
            memory_mib=40.0,
            memory_total_mib=90.0,
            gpu_memory_mib=None,
            energy_note="no counter here",
        )
        self._report("measured", variant, target, measurement(sha256, latency))
        layer = layer_difference("node_conv_3", "head.conv", "tasks/x.py:12")
        first_collapse = layer if "ptq" in variant else None
        self._report("diff_layers", variant, target, diff_report(sha256, first_collapse, layer))

    def give_file(self, variant: str, owner: str, target: str) -> None:
        """Make the engine of `variant` the file of another variant."""
        folders = [self.root / "build_engine" / name / target for name in (owner, variant)]
        shutil.copytree(folders[0] / "engine", folders[1] / "engine", dirs_exist_ok=True)
        sha256 = hashlib.sha256(engine_bytes(owner, target)).hexdigest()
        for stage in ("validate", "measured"):
            self.change(stage, f"{variant}-{target}", engine_sha256=sha256)

    def add_without_engine(self, variant: str, target: str, status: EngineStatus, reason: str) -> None:
        manifest = self._manifest(target, status, reason, "", 0, False)
        self._build(variant, target, manifest, "")

    def _manifest(
        self,
        target: str,
        status: EngineStatus,
        reason: str,
        sha256: str,
        size_bytes: int,
        is_precision_ok: bool,
    ) -> EngineManifest:
        declared = Target(
            name=target,
            runtime=Runtime.onnxruntime,
            runtime_version="any",
            device="cpu",
            gpu=None,
            cpu_flags=[],
            precision=Precision.f32,
            num_threads=2,
            max_batch=8,
            channel_multiple=16,
            uint8_activations=True,
            pairs_before_activations=False,
            stem_in_float=False,
            token_depthwise_in_float=False,
            resize_as_matmul=False,
            reads=Reads.normalised,
            gives=Gives.logits,
            threshold=None,
            coarse_classes=False,
            opsets=[17, 21],
            min_agreement_db=40.0,
            min_agreement_int8_db=10.0,
            min_int8_macs_share=0.95,
            custom_operators=[],
            tensorrt=None,
        )
        return EngineManifest(
            target=declared,
            status=status,
            reason=reason,
            file="model.engine" if status is EngineStatus.built else "",
            sha256=sha256,
            size_bytes=size_bytes,
            runtime_version="1.31.1",
            tensorrt_version="",
            isa=(),
            gpu=None,
            card=InputCard(CLASSES, (0.5, 0.5, 0.5), (0.2, 0.2, 0.2), 64, 64),
            is_quantized=False,
            precisions={"Conv": {"f32": 3, "int8": 5}},
            is_precision_ok=is_precision_ok,
            provider="CPUExecutionProvider",
        )

    def _build(self, variant: str, target: str, manifest: EngineManifest, note: str) -> Path:
        folder = self.root / "build_engine" / variant / target
        (folder / "engine").mkdir(parents=True)
        cost = BuildCost(1.5, 400, 23_000_000) if manifest.is_built else None
        report = publish(manifest, folder / "engine", agreement_db=60.0, cost=cost)
        report = dataclasses.replace(report, is_precision_ok=manifest.is_precision_ok, precision_note=note)
        write_engine_manifest(folder / "engine", manifest)
        (folder / "report.json").write_text(json.dumps(dataclasses.asdict(report)))
        (folder / "key.json").write_text(json.dumps({"key": f"key of {variant}"}))
        self.names.append(EngineName(variant, target))
        return folder

    def _report(self, stage: str, variant: str, target: str, report: Any) -> None:
        folder = self.root / stage / variant / target
        folder.mkdir(parents=True)
        (folder / "report.json").write_text(json.dumps(dataclasses.asdict(report)))


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    made = Artifacts(tmp_path / "artifacts")
    for (variant, target), numbers in MEASURED.items():
        made.add(variant, target, *numbers)
    return made


def config_for(artifacts: Artifacts, **changes: Any) -> Config:
    config = Config(
        float_reference=REFERENCE,
        max_score_rel_loss=0.02,
        max_parent_rel_loss=0.02,
        max_boundary_iou_rel_loss=None,
        class_limits={},
        class_floors={},
        allow_unproven=False,
        parents={},
        ladder=LADDER,
        min_speedup_factor=1.02,
        max_latency_ms=None,
        min_fps=None,
        techniques=[
            Technique("Pruning", "distilled", "pruned"),
            Technique("Quantization-aware training", "pruned_ptq", "pruned_qat"),
        ],
        engines=artifacts.names,
        explained=[],
        loaded=[],
        searches={},
    )
    return dataclasses.replace(config, **changes)


def run(artifacts: Artifacts, out: Path, **changes: Any) -> tuple[Report, dict[str, dict[str, Any]]]:
    out.mkdir(exist_ok=True)
    report = select_engine(config_for(artifacts, **changes), **artifacts.selection_inputs(), out=out)
    rows = json.loads((out / "engines.json").read_text())
    return report, {f"{row['variant']}-{row['target']}": row for row in rows}


def test_the_fastest_engine_that_is_accurate_enough_is_picked(artifacts, tmp_path) -> None:
    report, rows = run(artifacts, tmp_path / "out")

    picks = json.loads((tmp_path / "out" / "picks.json").read_text())
    assert picks["cpu_onnxruntime"] == rows["pruned_qat-cpu_onnxruntime"]
    read_again = [flatten(row) for row in read_rows(tmp_path / "out")]
    assert json.loads(json.dumps(read_again)) == [*rows.values()]
    assert picks["cpu_torch"]["variant"] == "distilled"
    assert report.best is not None
    assert (report.best.variant, report.best.target) == ("pruned_qat", "cpu_onnxruntime")
    assert (report.num_engines, report.num_accepted) == (6, 5)
    assert report.without_pick == {}


@pytest.mark.slow
def test_a_relative_loss_over_the_gate_is_too_lossy_and_the_reason_has_the_numbers(
    artifacts, tmp_path
) -> None:
    _, rows = run(artifacts, tmp_path / "out")

    row = rows["pruned_ptq-cpu_onnxruntime"]
    assert row["verdict"] == "TOO_LOSSY"
    assert row["score_rel_loss"] == pytest.approx(1 - 0.510 / 0.540)
    for number in ("0.5100", "5.56 %", "0.5400", "2 %"):
        assert number in row["reason"]


def test_a_loss_of_exactly_the_gate_passes(artifacts, tmp_path) -> None:
    loss = 1 - 0.510 / 0.540
    _, rows = run(artifacts, tmp_path / "out", max_score_rel_loss=loss)
    assert rows["pruned_ptq-cpu_onnxruntime"]["verdict"] == "ACCEPT"


def test_compression_without_speed_is_not_faster(artifacts, tmp_path) -> None:
    artifacts.add("pruned", "cpu_torch", 0.539, 18.5, 1.005)
    _, rows = run(artifacts, tmp_path / "out")

    row = rows["pruned-cpu_torch"]
    assert row["verdict"] == "NOT_FASTER"
    assert "1.005x as fast as distilled in the same rounds" in row["reason"]
    assert "expected 1.02x" in row["reason"]


def test_a_rung_must_beat_the_last_accepted_one_below_it(artifacts, tmp_path) -> None:
    artifacts.add("pruned_partial", "cpu_onnxruntime", 0.535, 0.80, 23.2)
    artifacts.change_race("pruned_qat-cpu_onnxruntime", low=1.009)
    _, rows = run(artifacts, tmp_path)
    assert rows["pruned_ptq-cpu_onnxruntime"]["verdict"] == "TOO_LOSSY"
    partial, trained = rows["pruned_partial-cpu_onnxruntime"], rows["pruned_qat-cpu_onnxruntime"]
    assert partial["verdict"] == "ACCEPT"
    assert "1.500x as fast as pruned in the same rounds" in partial["reason"]
    assert trained["verdict"] == "INCONCLUSIVE"
    assert "x as fast as pruned_partial in the same rounds" in trained["reason"]
    assert "noise hides whether it is 1.02x or more" in trained["reason"]


@pytest.mark.parametrize(
    ("limit", "found"),
    [
        ({"max_latency_ms": 0.7}, r"allowed are 0\.7 \(max_latency_ms\)"),
        ({"min_fps": 1400.0}, "wanted are 1400"),
    ],
)
def test_engine_that_breaks_a_limit_of_the_user_is_too_slow(
    artifacts, tmp_path, limit: dict[str, float], found: str
) -> None:
    _, free = run(artifacts, tmp_path / "free")
    report, rows = run(artifacts, tmp_path / "limited", **limit)
    pick = rows["pruned_qat-cpu_onnxruntime"]
    assert report.picks["cpu_onnxruntime"].variant == pick["variant"] and pick["verdict"] == "ACCEPT"
    slow = [name for name, row in rows.items() if row["verdict"] == "TOO_SLOW"]
    assert "distilled-cpu_torch" in slow and "cpu_torch" not in report.picks
    for name in slow:
        assert re.search(found, rows[name]["reason"]) and free[name]["verdict"] in ("ACCEPT", "NOT_FASTER")


def test_limit_of_the_user_holds_for_unproven_engines_too(artifacts, tmp_path) -> None:
    artifacts.scatter_scores("pruned_qat-cpu_onnxruntime", 0.1)
    free, _ = run(artifacts, tmp_path / "free", allow_unproven=True)
    assert free.picks["cpu_onnxruntime"].variant == "pruned_qat"
    limited, rows = run(artifacts, tmp_path / "limited", allow_unproven=True, max_latency_ms=0.001)
    assert not limited.picks and rows["pruned_qat-cpu_onnxruntime"]["verdict"] == "TOO_SLOW"


def test_a_rung_that_is_the_same_file_as_a_lower_one_is_not_faster_by_noise(artifacts, tmp_path) -> None:
    artifacts.change("validate", "pruned_ptq-cpu_onnxruntime", "accuracy", miou=0.535)
    artifacts.change("measured", "pruned_qat-cpu_onnxruntime", "latency.batches.0", latency_ms_p50=0.6)
    artifacts.give_file("pruned_qat", "pruned_ptq", "cpu_onnxruntime")
    _, rows = run(artifacts, tmp_path)
    assert rows["pruned_ptq-cpu_onnxruntime"]["verdict"] == "ACCEPT"
    assert rows["pruned_qat-cpu_onnxruntime"]["verdict"] == "NOT_FASTER"
    assert rows["pruned_qat-cpu_onnxruntime"]["reason"] == "the same engine file as pruned_ptq"


def test_the_report_draws_the_ladder_of_each_target_and_says_where_it_ends(artifacts, tmp_path) -> None:
    run(artifacts, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    ladder = text.split("## The ladder of each target")[1].split("##")[0]
    rungs = [line.split(" | ")[1] for line in ladder.splitlines() if line.startswith("| cpu_onnxruntime")]
    assert rungs == ["distilled", "pruned", "pruned_ptq", "pruned_qat"]
    assert "cpu_onnxruntime: pruned_qat is the last rung that is accepted." in ladder
    assert "artifacts/check_int8/checklist.md" in ladder  # pruned_ptq is too lossy
    assert "cpu_torch: No compression is worth it" in ladder
    run(artifacts, tmp_path / "strict", max_score_rel_loss=0.0)
    ladder = (tmp_path / "strict" / "report.md").read_text(encoding="utf-8")
    assert (
        "cpu_onnxruntime: No reduced precision is acceptable for this model on this target: distilled stays."
        in ladder
    )


def test_float_rungs_alone_end_the_ladder_with_no_reduced_precision(artifacts, tmp_path) -> None:
    for variant in ("pruned_ptq", "pruned_qat"):
        artifacts.change("validate", f"{variant}-cpu_onnxruntime", "accuracy", miou=0.4)
    artifacts.add("pruned", "cpu_torch", 0.539, 12.0, 1.5)
    artifacts.add("distilled", "cpu_openvino_bf16", 0.540, 1.7, 10.9, precision="bf16")
    artifacts.add("pruned", "cpu_openvino_bf16", 0.539, 1.2, 15.5, precision="bf16")
    run(artifacts, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    end = "No reduced precision is acceptable for this model on this target: pruned stays."
    assert f"cpu_onnxruntime: {end} See artifacts/check_int8/checklist.md" in text
    assert (
        "- cpu_torch: pruned is the last rung that is accepted.\n" in text
    )  # no other precision was tried there
    assert "- cpu_openvino_bf16: pruned is the last rung that is accepted.\n" in text
    assert end in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_float_rung_that_is_too_lossy_does_not_point_to_the_int8_checklist(artifacts, tmp_path) -> None:
    artifacts.change("validate", "pruned-cpu_onnxruntime", "accuracy", miou=0.4)
    artifacts.change("validate", "pruned_ptq-cpu_onnxruntime", "accuracy", miou=0.54)
    run(artifacts, tmp_path)
    assert "check_int8" not in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_the_speed_gate_uses_the_ratio_over_the_rounds_and_not_that_of_the_medians(
    artifacts, tmp_path
) -> None:
    artifacts.add("pruned", "cpu_torch", 0.539, 25.0, 1.27)  # some slow rounds
    artifacts.change_race("pruned-cpu_torch", low=1.25)
    report, rows = run(artifacts, tmp_path / "out")
    assert rows["pruned-cpu_torch"]["verdict"] == "ACCEPT"
    assert report.picks["cpu_torch"].variant == "pruned"  # the last accepted rung, whatever the medians say


def test_a_rung_whose_interval_reaches_the_gate_is_inconclusive(artifacts, tmp_path) -> None:
    artifacts.add("pruned", "cpu_torch", 0.539, 17.9, 1.05)
    artifacts.change_race("pruned-cpu_torch", low=1.009)
    _, rows = run(artifacts, tmp_path / "out")
    assert rows["pruned-cpu_torch"]["verdict"] == "INCONCLUSIVE"
    assert "as fast as distilled in the same rounds (1.009 to" in rows["pruned-cpu_torch"]["reason"]
    assert "noise hides whether it is 1.02x or more" in rows["pruned-cpu_torch"]["reason"]


def test_a_difference_within_the_control_is_said_to_be_none(artifacts, tmp_path) -> None:
    artifacts.add("pruned", "cpu_torch", 0.539, 18.0, 1.03)
    artifacts.change_race("pruned-cpu_torch", low=1.021, aa_ratio_spread=0.04)
    _, rows = run(artifacts, tmp_path / "out")
    assert rows["pruned-cpu_torch"]["verdict"] == "INCONCLUSIVE"
    assert "less than the 4.0 % that count as a difference" in rows["pruned-cpu_torch"]["reason"]


def test_as_fast_and_certainly_more_accurate_is_accepted_and_picked(artifacts, tmp_path) -> None:
    artifacts.change("validate", "pruned_ptq-cpu_onnxruntime", "accuracy", miou=0.531)
    report, rows = run(artifacts, tmp_path / "out")
    assert rows["pruned_ptq-cpu_onnxruntime"]["verdict"] == "ACCEPT"
    assert rows["pruned_qat-cpu_onnxruntime"]["verdict"] == "ACCEPT"
    assert "certainly more accurate than pruned_ptq" in rows["pruned_qat-cpu_onnxruntime"]["reason"]
    assert report.picks["cpu_onnxruntime"].variant == "pruned_qat"


def test_too_few_images_to_tell_is_unproven_with_the_number_that_would_decide(artifacts, tmp_path) -> None:
    artifacts.scatter_scores("pruned_qat-cpu_onnxruntime", 0.1)
    report, rows = run(artifacts, tmp_path / "out")
    row = rows["pruned_qat-cpu_onnxruntime"]
    assert row["verdict"] == "UNPROVEN"
    assert row["score_rel_loss_low"] < row["score_rel_loss"] < 0.02 < row["score_rel_loss_high"]
    assert f"400 validation images do not tell; about {row['images_needed']} would" in row["reason"]
    assert row["images_needed"] > 400
    assert report.picks["cpu_onnxruntime"].variant == "pruned"
    allowed, _ = run(artifacts, tmp_path / "allowed", allow_unproven=True)
    assert allowed.picks["cpu_onnxruntime"].variant == "pruned_qat"


def test_few_groups_are_unproven_with_the_number_of_groups_that_would_decide_c1(artifacts, tmp_path) -> None:
    artifacts.scatter_scores("pruned_qat-cpu_onnxruntime", 0.01)
    _, rows = run(artifacts, tmp_path / "images")
    assert rows["pruned_qat-cpu_onnxruntime"]["verdict"] == "ACCEPT"
    artifacts.num_groups = 4
    _, rows = run(artifacts, tmp_path / "groups")
    row = rows["pruned_qat-cpu_onnxruntime"]
    assert row["verdict"] == "UNPROVEN" and row["images_needed"] is None
    more = row["groups_needed"] - 4
    assert f"400 validation images in 4 groups do not tell; about {more} more groups would" in row["reason"]
    assert 4 < more < 100
    artifacts.num_groups = 1
    _, rows = run(artifacts, tmp_path / "one")
    row = rows["pruned_qat-cpu_onnxruntime"]
    assert row["verdict"] == "UNPROVEN" and row["groups_needed"] is None
    assert "400 validation images of one group do not tell what others lose; add groups" in row["reason"]


def test_reduced_precision_is_also_held_against_its_own_float_graph(artifacts, tmp_path) -> None:
    parents = {"pruned_ptq": "pruned", "pruned_qat": "pruned"}
    report, rows = run(artifacts, tmp_path / "out", parents=parents, max_parent_rel_loss=0.005)
    row = rows["pruned_qat-cpu_onnxruntime"]
    assert row["verdict"] == "TOO_LOSSY" and row["parent"] == "pruned-cpu_onnxruntime"
    assert row["parent_rel_loss"] == pytest.approx(1 - 0.533 / 0.536)
    assert "allowed are 0.5 % (max_parent_rel_loss)" in row["reason"]
    assert report.picks["cpu_onnxruntime"].variant == "pruned"


def give_boundaries(artifacts: Artifacts, boundary_iou: float, deviation: float = 0.0) -> None:
    """Give the fastest engine another Boundary IoU than the 0.40 of all others."""
    others = [f"{variant}-{target}" for variant, target in MEASURED if variant != "pruned_qat"]
    artifacts.set_boundary_iou(0.40, *others)
    artifacts.set_boundary_iou(boundary_iou, "pruned_qat-cpu_onnxruntime", deviation=deviation)


def test_lost_boundaries_are_too_lossy_if_there_is_a_gate_for_them(artifacts, tmp_path) -> None:
    give_boundaries(artifacts, 0.36)
    name = "pruned_qat-cpu_onnxruntime"
    report, rows = run(artifacts, tmp_path / "without")
    assert rows[name]["verdict"] == "ACCEPT" and report.picks["cpu_onnxruntime"].variant == "pruned_qat"
    assert "Boundary IoU" not in rows[name]["reason"]
    assert rows[name]["boundary_iou_rel_loss"] == pytest.approx(0.1)
    assert rows[name]["boundary_iou_rel_loss_high"] is None

    report, rows = run(artifacts, tmp_path / "gate", max_boundary_iou_rel_loss=0.05)
    assert rows[name]["verdict"] == "TOO_LOSSY" and report.picks["cpu_onnxruntime"].variant == "pruned"
    assert (
        "Boundary IoU 0.3600, 10.00 % below distilled-cpu_torch (0.4000, 95 %: -10.00 to -10.00 %), "
        "allowed are 5 % (max_boundary_iou_rel_loss)"
    ) in rows[name]["reason"]
    assert rows[name]["boundary_iou_rel_loss_low"] == pytest.approx(0.1)
    assert rows["pruned-cpu_onnxruntime"]["verdict"] == "ACCEPT"
    assert "Boundary IoU 0.4000, equal to distilled-cpu_torch" in rows["pruned-cpu_onnxruntime"]["reason"]
    for page in ("report.md", "report.html"):
        text = html.unescape((tmp_path / "gate" / page).read_text(encoding="utf-8"))
        assert "It may lose at most 5 % of the reference's Boundary IoU, in the same way." in text


def test_an_engine_that_loses_on_the_original_files_alone_is_too_lossy_a1(artifacts, tmp_path) -> None:
    name, note = (
        "pruned_qat-cpu_onnxruntime",
        "frame_score is -0.1400 from the score: masks are judged elsewhere",
    )
    artifacts.set_frame_score(0.40, *(f"{variant}-{target}" for variant, target in MEASURED))
    report, rows = run(artifacts, tmp_path / "equal")
    assert report.picks["cpu_onnxruntime"].variant == "pruned_qat" and rows[name]["frame_score"] == 0.40

    artifacts.set_frame_score(0.36, name)
    artifacts.set_frame_score(0.40, "pruned-cpu_onnxruntime", note=note)
    report, rows = run(artifacts, tmp_path / "lost")
    assert rows[name]["verdict"] == "TOO_LOSSY" and report.picks["cpu_onnxruntime"].variant == "pruned"
    assert rows[name]["frame_rel_loss_high"] == pytest.approx(0.1)
    assert (
        "on the original files 0.3600, 10.00 % below distilled-cpu_torch (0.4000, 95 %: -10.00 to -10.00 %), "
        "allowed are 2 % (max_score_rel_loss on the original files)"
    ) in rows[name]["reason"]
    for page in ("report.md", "report.html"):
        assert note in html.unescape((tmp_path / "lost" / page).read_text(encoding="utf-8")).replace("\\", "")
    assert " 95 % | on the original files | p50 ms " in (tmp_path / "lost" / "report.md").read_text()


def test_pages_say_of_a_pick_that_the_original_files_are_not_here_a1(artifacts, tmp_path, caplog) -> None:
    note = "the data set is a copy of files of /data/scans, which is not here"
    artifacts.set_frame_score(None, *(f"{variant}-{target}" for variant, target in MEASURED), note=note)
    with caplog.at_level("INFO"):
        report, _ = run(artifacts, tmp_path)
    assert report.picks and caplog.text.count(f"Not scored on the original files: {note}.") == len(
        report.picks
    )
    for page in ("report.md", "report.html"):
        text = html.unescape((tmp_path / page).read_text(encoding="utf-8")).replace("\\", "")
        assert text.count(f"Not scored on the original files: {note}.") == len(report.picks)


def give_classes(artifacts: Artifacts, lost: float) -> str:
    """Give every engine an IoU of each class; in the fastest one the last class loses, and the mean does not."""
    for variant, target in MEASURED:
        artifacts.ious[f"{variant}-{target}"] = (0.54,) * 3 if variant != "pruned_ptq" else (0.50,) * 3
    name = "pruned_qat-cpu_onnxruntime"
    artifacts.ious[name] = (0.54 + lost / 2, 0.54 + lost / 2, 0.54 - lost)
    for address, ious in artifacts.ious.items():
        artifacts.change("validate", address, "accuracy", miou=sum(ious) / 3)
    return name


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (
            {"class_limits": {"<b>seven</b>": 0.05}},
            "IoU of <b>seven</b> 0.4860, 10.00 % below distilled-cpu_torch (0.5400, 95 %: -10.00 to -10.00 %), "
            "allowed are 5 % (class_limits.<b>seven</b>)",
        ),
        ({"class_limits": {"*": 0.05}}, "(0.5400, 98.33 %: -10.00 to -10.00 %), allowed are 5 %"),
        ({"class_floors": {"<b>seven</b>": 0.5}}, "wanted are 0.5 (class_floors.<b>seven</b>)"),
    ],
)
def test_a_class_that_breaks_its_limit_is_named_in_the_verdict_c2(artifacts, tmp_path, limits, words) -> None:
    name = give_classes(artifacts, 0.054)
    report, rows = run(artifacts, tmp_path / "without")
    assert rows[name]["verdict"] == "ACCEPT" and report.picks["cpu_onnxruntime"].variant == "pruned_qat"
    assert rows[name]["class_losses"] == {} and rows[name]["class_warnings"] == []

    report, rows = run(artifacts, tmp_path / "gate", **limits)
    assert rows[name]["verdict"] == "TOO_LOSSY" and report.picks["cpu_onnxruntime"].variant == "pruned"
    assert words in rows[name]["reason"]
    [lost] = [loss for loss in rows[name]["class_losses"].values() if loss["high"] > loss["max_rel_loss"]]
    assert lost["rel_loss"] == pytest.approx(0.1 if "class_limits" in limits else 1 - 0.486)
    held = rows["pruned-cpu_onnxruntime"]
    assert held["verdict"] == "ACCEPT"
    assert (
        f"{len(held['class_losses'])} of {len(held['class_losses'])} limits of classes hold" in held["reason"]
    )
    for page in ("report.md", "report.html"):
        assert "Single classes, by IoU or recall: " in (tmp_path / "gate" / page).read_text(encoding="utf-8")
    read_again = [flatten(row) for row in read_rows(tmp_path / "gate")]
    assert json.loads(json.dumps(read_again)) == [*rows.values()]


def test_too_few_images_to_tell_what_a_class_loses_are_unproven_c2(artifacts, tmp_path) -> None:
    name = give_classes(artifacts, 0.0216)
    artifacts.scatter_scores(name, 0.1)
    _, rows = run(artifacts, tmp_path / "out", max_score_rel_loss=0.1, class_limits={"<b>seven</b>": 0.05})
    row = rows[name]
    assert row["verdict"] == "UNPROVEN" and row["images_needed"] > 400
    assert "class_limits.<b>seven</b>" in row["reason"]


def test_a_limit_of_an_unknown_class_is_refused_with_the_known_ones_c2(artifacts, tmp_path) -> None:
    with pytest.raises(
        ConfigError, match=r"select_engine\.class_floors names eight, expected some of background"
    ):
        run(artifacts, tmp_path / "out", class_floors={"eight": 0.1})


def test_a_pick_that_does_not_find_a_class_is_warned_of_without_any_key_c2(artifacts, tmp_path) -> None:
    name = give_classes(artifacts, 0.54)
    report, rows = run(artifacts, tmp_path / "out")
    assert report.picks["cpu_onnxruntime"].variant == "pruned_qat"
    assert rows[name]["class_warnings"] == ["IoU of <b>seven</b> is 0"]
    for page in ("report.md", "report.html"):
        text = html.unescape((tmp_path / "out" / page).read_text(encoding="utf-8"))
        assert "Warning: IoU of <b>seven</b> is 0." in text.replace("\\<", "<"), page


def test_too_few_images_to_tell_what_boundaries_lose_are_unproven(artifacts, tmp_path) -> None:
    give_boundaries(artifacts, 0.39, deviation=0.1)
    _, rows = run(artifacts, tmp_path / "out", max_boundary_iou_rel_loss=0.03)
    row = rows["pruned_qat-cpu_onnxruntime"]
    assert row["verdict"] == "UNPROVEN" and row["images_needed"] > 400
    assert row["boundary_iou_rel_loss_low"] < 0.025 < 0.03 < row["boundary_iou_rel_loss_high"]
    assert row["boundary_iou_rel_loss"] == pytest.approx(0.025)


def test_a_gate_for_boundaries_is_refused_for_a_model_without_masks(artifacts, tmp_path) -> None:
    with pytest.raises(
        ConfigError, match=r"max_boundary_iou_rel_loss is set, but teacher-cpu_torch has no .* null"
    ):
        run(artifacts, tmp_path / "out", max_boundary_iou_rel_loss=0.05)


def test_boundary_iou_is_one_column_of_the_engines_of_masks_and_of_no_others(artifacts, tmp_path) -> None:
    def engines_of(name: str) -> str:
        run(artifacts, tmp_path / name)
        return (tmp_path / name / "report.md").read_text(encoding="utf-8").split("## All engines")[1]

    assert "Boundary" not in engines_of("without")
    give_boundaries(artifacts, 0.3612)
    artifacts.add_without_engine("pruned", "cpu_openvino", EngineStatus.skipped, "no such CPU")
    table = engines_of("with").split("##")[0].strip().splitlines()
    assert " 95 % | Boundary IoU | p50 ms " in table[0]
    assert any("| 0.3612 (−9.7 %) | 0.660 |" in line for line in table)  # noqa: RUF001
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1
    page = (tmp_path / "with" / "report.html").read_text(encoding="utf-8")
    assert ">0.3612<small>−9.7 %</small></td>" in page  # noqa: RUF001
    assert next(flatten(row) for row in read_rows(tmp_path / "with"))["boundary_iou"] == 0.40


@pytest.mark.parametrize(
    ("score", "deviation", "verdict", "why"),
    [
        (0.535, 0.0, "confirmed", ""),
        (0.531, 0.1, "not confirmed", "1.67 % below distilled-cpu_torch (0.5400, 95 %: -"),
        (
            0.50,
            0.0,
            "refuted",
            "7.41 % below distilled-cpu_torch (0.5400, 95 %: -7.41 to -7.41 %), allowed are 2 %",
        ),
    ],
)
def test_the_unseen_split_confirms_or_refutes_a_pick_in_these_words_c6(
    artifacts, tmp_path, score, deviation, verdict, why
) -> None:
    name = "pruned_qat-cpu_onnxruntime"
    artifacts.unseen[name], artifacts.unseen_scatter[name] = score, deviation
    report, rows = run(artifacts, tmp_path / "out")
    row = rows[name]
    pick = report.picks["cpu_onnxruntime"]
    assert pick.unseen_score == pytest.approx(score)
    assert row["picked"] and row["unseen_rel_loss"] == pytest.approx(1 - score / 0.54, abs=1e-4)
    assert (row["unseen_verdict"], pick.unseen_verdict) == (verdict, verdict)
    assert f"; {verdict} on test" in row["reason"] and why in row["unseen_reason"] and why in row["reason"]
    assert rows["pruned-cpu_onnxruntime"]["unseen_verdict"] is None
    for page in ("report.md", "report.html"):
        text = html.unescape((tmp_path / "out" / page).read_text(encoding="utf-8"))
        assert f"{verdict} on test" in text, page


def test_the_unseen_split_is_held_against_every_gate_of_a_pick_c6(artifacts, tmp_path) -> None:
    """The score itself holds; the float graph that it was made from scores far more on the unseen images."""
    artifacts.unseen |= {"pruned_qat-cpu_onnxruntime": 0.54, "pruned-cpu_onnxruntime": 0.60}
    _, rows = run(artifacts, tmp_path / "out", parents={"pruned_qat": "pruned"})
    row = rows["pruned_qat-cpu_onnxruntime"]
    assert row["picked"] and row["unseen_verdict"] == "refuted"
    assert "10.00 % below pruned-cpu_onnxruntime" in row["unseen_reason"]
    assert "max_parent_rel_loss" in row["unseen_reason"]


def shown_texts(folder: Path, report: Report) -> dict[str, str]:
    """Return what the page, the Markdown and the console say first, as plain text."""
    write_json(folder / "report.json", dataclasses.asdict(report))
    page = html.unescape((folder / "report.html").read_text(encoding="utf-8"))
    head = re.search(r"<header>(.*?)</header>", page, re.DOTALL)
    assert head is not None
    markdown = (folder / "report.md").read_text(encoding="utf-8").partition("## Picks")[0]
    with capture_console() as printed:
        print_result(folder)
    return {"page": " ".join(re.sub(r"<[^>]*>", " ", head[1]).split()), "markdown": markdown, **printed}


@contextlib.contextmanager
def capture_console() -> Iterator[dict[str, str]]:
    """Collect what is printed, with its lines joined."""
    told: dict[str, str] = {}
    with contextlib.redirect_stdout(io.StringIO()) as stream:
        yield told
    told["console"] = " ".join(stream.getvalue().split())


def test_several_picks_name_no_fastest_one_before_their_race_e1(artifacts, tmp_path) -> None:
    """Their latencies are from different races: 1.1 ms here and 1.0 ms there order nothing."""
    report, _ = run(artifacts, tmp_path / "out")
    texts = shown_texts(tmp_path / "out", report)
    for name, text in texts.items():
        assert "2 picks, one for each target" in text, name
        assert "The fastest engine that passes" not in text and "Best pick" not in text, name
    for name in ("page", "markdown"):
        assert RACE_PENDING in texts[name]
    assert "0.660 ms" not in texts["page"], "no milliseconds of one target above the cards of all"


def test_with_nothing_accepted_the_headline_says_so_and_what_unproven_means_e1(artifacts, tmp_path) -> None:
    for name in artifacts.names:
        if name != REFERENCE:
            artifacts.scatter_scores(f"{name.variant}-{name.target}", 0.4)
    report, rows = run(artifacts, tmp_path / "out", allow_unproven=True, max_score_rel_loss=0.0)
    picked = rows[f"{report.picks['cpu_onnxruntime'].variant}-cpu_onnxruntime"]
    assert picked["verdict"] == "UNPROVEN"
    for name, text in shown_texts(tmp_path / "out", report).items():
        assert f"{picked['variant']} on cpu_onnxruntime is picked, but UNPROVEN." in text, name
        assert EXPLAINED[Verdict.UNPROVEN] in text, name


def test_a_race_that_was_too_noisy_is_told_in_the_headline_e1(artifacts, tmp_path) -> None:
    for name in artifacts.names:
        artifacts.change_race(f"{name.variant}-{name.target}", 0.2, aa_ratio_spread=0.2)
    report, _ = run(artifacts, tmp_path / "out")
    assert report.num_accepted == 0 and report.picks
    for name, text in shown_texts(tmp_path / "out", report).items():
        assert "No engine is accepted" in text, name
        assert "are picked, but INCONCLUSIVE." in text and EXPLAINED[Verdict.INCONCLUSIVE] in text, name


def test_without_a_pick_the_headline_counts_the_verdicts_e1(artifacts, tmp_path) -> None:
    report, _ = run(artifacts, tmp_path / "out", max_latency_ms=0.001)
    assert report.picks == {}
    for name, text in shown_texts(tmp_path / "out", report).items():
        assert "No engine passes" in text and "Of 6 engines: 5 TOO_SLOW, 1 TOO_LOSSY." in text, name


def test_engines_of_a_target_that_was_not_measured_are_refused(artifacts, tmp_path) -> None:
    inputs = artifacts.selection_inputs()
    file = inputs["benchmarks"] / "cpu_onnxruntime" / "report.json"
    content = json.loads(file.read_text())
    del content["engines"]["pruned"]
    file.write_text(json.dumps(content))
    (tmp_path / "out").mkdir()
    with pytest.raises(
        ArtifactError,
        match=r"about the engine file none of pruned-cpu_onnxruntime.*benchmark@cpu_onnxruntime\.",
    ):
        select_engine(config_for(artifacts), **inputs, out=tmp_path / "out")
    file.unlink()
    with pytest.raises(ArtifactError, match=r"report\.json is missing\. Run the stage that writes it"):
        select_engine(config_for(artifacts), **inputs, out=tmp_path / "out")


@pytest.mark.parametrize("is_build", [True, False])
def test_engines_of_a_target_with_different_versions_of_the_runtime_are_refused(
    artifacts, tmp_path, is_build: bool
) -> None:
    engine = artifacts.root / "build_engine" / "pruned" / "cpu_onnxruntime" / "engine"
    if is_build:
        manifest = read_engine_manifest(engine)
        write_engine_manifest(engine, dataclasses.replace(manifest, runtime_version="1.30.0"))
    else:
        artifacts.change("measured", "pruned-cpu_onnxruntime", runtime_version="1.30.0")
    name = "Built with" if is_build else "Runtime"
    command = r"dvc repro --force build_engine@distilled-cpu_onnxruntime .*benchmark@cpu_onnxruntime\."
    with pytest.raises(
        ArtifactError, match=rf"cpu_onnxruntime have different values of '{name}' .*1\.30\.0.*{command}"
    ):
        run(artifacts, tmp_path / "out")


def test_an_inconclusive_latency_is_said_in_the_reason(artifacts, tmp_path) -> None:
    artifacts.add("pruned", "cpu_torch", 0.539, 12.0, 1.5)
    artifacts.change_race("pruned-cpu_torch", low=1.5, aa_ratio_spread=0.083)
    _, rows = run(artifacts, tmp_path / "out")
    assert "inconclusive" in rows["pruned-cpu_torch"]["reason"]
    assert "8.3 %" in rows["pruned-cpu_torch"]["reason"]


def test_teacher_and_baseline_need_no_speed_but_accuracy(artifacts, tmp_path) -> None:
    artifacts.add("baseline", "cpu_torch", 0.50, 18.6, 1.0)
    _, rows = run(artifacts, tmp_path / "out")
    assert rows["teacher-cpu_torch"]["verdict"] == "ACCEPT"
    assert rows["baseline-cpu_torch"]["verdict"] == "TOO_LOSSY"


def test_an_engine_that_is_not_what_it_claims_is_neither_picked_nor_on_the_front(artifacts, tmp_path) -> None:
    artifacts.add(
        "pruned_qat", "cpu_openvino", 0.54, 0.1, 186.0, is_precision_ok=False, precision_note="no int8"
    )
    report, rows = run(artifacts, tmp_path / "out")

    row = rows["pruned_qat-cpu_openvino"]
    assert row["verdict"] == "PRECISION_MISMATCH"
    assert row["reason"].startswith("no int8")
    assert not row["pareto"]
    assert "cpu_openvino" not in report.picks


def test_each_pick_has_a_bundle(artifacts, tmp_path) -> None:
    report, _ = run(artifacts, tmp_path / "out")
    bundles = {path.name for path in (tmp_path / "out" / "bundles").iterdir()}
    assert bundles == set(report.picks)
    for target, pick in report.picks.items():
        card = json.loads((tmp_path / "out" / "bundles" / target / "model.json").read_text())
        assert card["sha256"] == pick.engine_sha256


def write_load(artifacts: Artifacts, name: str, **changes: Any) -> None:
    """Write what measure_load would have found for one engine."""
    variant, target = name.split("-")
    setting = Setting(4, 2, Tuning(1, is_pinned=True))
    best = LoadCell(setting, 512.3, 500.0, 520.0, 14.0, 17.5, 1200)
    light = LoadCell(Setting(1, 1, Tuning(1)), 130.0, 130.0, 130.0, 7.0, 8.0, 1200)
    step = ArrivalStep(200.0, 199.0, 198.0, 8.0, 16.0, 8.0, 0.1, 1100, True)
    arrivals = Arrivals(dataclasses.replace(setting, batch=1), 300.0, 20.0, (step,), 234.5, "")
    sha256 = hashlib.sha256(engine_bytes(variant, target)).hexdigest()
    load = EngineLoad(sha256, variant, (best, light), 0.01, (), best, arrivals)
    report = LoadReport(
        target=target,
        max_p99_ms=20.0,
        timed=Timed.frame,
        num_cpus=2,
        engines={variant: dataclasses.replace(load, **changes)},
        together=(Together(variant, 130.0, 8.0, 77.7, None),),
        machine=Machine("0123456789abcdef", "A CPU", ("avx2",), None, {}),
        surroundings=None,
    )
    folder = artifacts.root / "loads" / target
    folder.mkdir(parents=True)
    (folder / "report.json").write_text(json.dumps(dataclasses.asdict(report)))


def test_engine_under_load_is_in_the_report_and_in_its_bundle(artifacts, tmp_path) -> None:
    name = "pruned_qat-cpu_onnxruntime"
    write_load(artifacts, name)
    before, without = run(artifacts, tmp_path / "without")
    report, rows = run(artifacts, tmp_path / "out", loaded=["cpu_onnxruntime"])
    assert report == before  # it decides nothing
    assert without[name]["load_setting"] is None is rows["distilled-cpu_torch"]["knee_per_s"]
    row = rows[name]
    assert (row["throughput_per_s_within_p99"], row["throughput_ms_p99"], row["knee_per_s"]) == (
        512.3,
        17.5,
        234.5,
    )
    assert [point["latency_ms_p99"] for point in row["load_front"]] == [17.5, 8.0]
    assert [flatten(each) for each in read_rows(tmp_path / "out")] == [*map(as_tuples, rows.values())]
    card, plain = (
        json.loads((tmp_path / folder / "bundles" / "cpu_onnxruntime" / "model.json").read_text())
        for folder in ("out", "without")
    )
    settings = {"batch": 4, "lanes": 2, "num_threads": 1, "is_pinned": True, "has_arena": True}
    assert card.pop("load").items() >= (settings | {"throughput_per_s": 512.3, "knee_per_s": 234.5}).items()
    assert card == plain
    markdown, page = ((tmp_path / "out" / f"report.{kind}").read_text("utf-8") for kind in ("md", "html"))
    assert (
        "| pruned_qat | cpu_onnxruntime | 512.3 | 17.5 | 20.0 | batch 4, 2 lanes of 1 thread, pinned | 234.5 |"
        in markdown
    )
    assert "| pruned_qat | cpu_onnxruntime | 130 | 8.00 | 77.7 |" in markdown
    assert "<h2>Under load</h2>" in page and "batch 4, 2 lanes of 1 thread, pinned" in page
    for kind in ("md", "html"):
        assert "Under load" not in (tmp_path / "without" / f"report.{kind}").read_text("utf-8")


def as_tuples(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as it is before JSON makes lists of its tuples."""
    front = row["load_front"]
    return row | {
        "load_front": front if front is None else tuple(front),
        "class_warnings": tuple(row["class_warnings"]),
        "suspect_layers": tuple(row["suspect_layers"]),
    }


def test_engine_that_holds_no_bound_says_so(artifacts, tmp_path) -> None:
    write_load(artifacts, "pruned_qat-cpu_onnxruntime", best=None, arrivals=None, aa_spread=None)
    _, rows = run(artifacts, tmp_path / "out", loaded=["cpu_onnxruntime"])
    row = rows["pruned_qat-cpu_onnxruntime"]
    assert (row["load_setting"], row["load_options"], row["throughput_per_s_within_p99"]) == ("", {}, None)
    assert "no cell holds the bound" in (tmp_path / "out" / "report.md").read_text("utf-8")
    card = tmp_path / "out" / "bundles" / "cpu_onnxruntime" / "model.json"
    assert "load" not in json.loads(card.read_text())


def test_load_of_another_file_is_refused(artifacts, tmp_path) -> None:
    write_load(artifacts, "pruned_qat-cpu_onnxruntime", engine_sha256="0" * 64)
    with pytest.raises(ArtifactError, match="dvc repro measure_load@cpu_onnxruntime"):
        run(artifacts, tmp_path / "out", loaded=["cpu_onnxruntime"])


@pytest.mark.parametrize(
    ("status", "verdict"), [(EngineStatus.skipped, "SKIPPED"), (EngineStatus.failed, "BUILD_FAILED")]
)
def test_without_an_engine_numbers_are_null_and_the_reason_is_kept(
    artifacts, tmp_path, status, verdict
) -> None:
    artifacts.add_without_engine("pruned", "cpu_openvino_bf16", status, "this CPU lacks avx512_bf16")
    report, rows = run(artifacts, tmp_path / "out")

    row = rows["pruned-cpu_openvino_bf16"]
    assert row["verdict"] == verdict
    assert row["reason"] == "this CPU lacks avx512_bf16"
    assert row["miou"] is row["latency_ms_p50"] is row["engine_sha256"] is row["size_bytes"] is None
    assert "avx512_bf16" in report.without_pick["cpu_openvino_bf16"]
    assert "cpu_openvino_bf16" not in json.loads((tmp_path / "out" / "picks.json").read_text())


def test_suspect_layers_are_named_in_both_reports_with_their_own_noise(artifacts, tmp_path) -> None:
    run(artifacts, tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "| first collapse | 7.5 | 21.2 | node_conv_3 | head.conv | tasks/x.py:12 |" in text
    assert "<td>7.5</td><td>21.2</td>" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")


def test_a_target_whose_engines_all_fail_is_named_in_both_reports(artifacts, tmp_path) -> None:
    artifacts.add("baseline", "cpu_openvino", 0.3, 1.0, 18.0)
    run(artifacts, tmp_path / "out")
    assert "cpu_openvino: no pick" in (tmp_path / "out" / "report.md").read_text()
    assert "No pick" in (tmp_path / "out" / "report.html").read_text()


def test_between_equally_fast_engines_the_more_accurate_is_picked(artifacts, tmp_path) -> None:
    artifacts.add("baseline", "cpu_openvino", 0.535, 1.0, 18.6)
    artifacts.add("distilled", "cpu_openvino", 0.538, 1.0, 18.6)
    report, _ = run(artifacts, tmp_path / "out")
    assert report.picks["cpu_openvino"].variant == "distilled"


def test_the_front_is_drawn_for_each_target_by_itself(artifacts, tmp_path) -> None:
    _, rows = run(artifacts, tmp_path / "out")
    front = {name for name, row in rows.items() if row["pareto"]}
    assert front == {
        "teacher-cpu_torch",  # most accurate there
        "distilled-cpu_torch",
        "distilled-cpu_onnxruntime",
        "pruned-cpu_onnxruntime",
        "pruned_qat-cpu_onnxruntime",  # as fast as pruned_ptq and more accurate
    }


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([], ()),
        ([(1.0, 0.5)], (True,)),
        ([(1.0, 0.5), (2.0, 0.6)], (True, True)),
        ([(1.0, 0.5), (2.0, 0.5)], (True, False)),
        ([(1.0, 0.5), (1.0, 0.4)], (True, False)),
        ([(1.0, 0.5), (1.0, 0.5)], (True, True)),
        ([(1.0, 0.5), (1.0, 0.5), (0.9, 0.5)], (False, False, True)),
    ],
)
def test_pareto_front(points, front) -> None:
    assert pareto_front(points) == front


@pytest.mark.parametrize(
    ("stage", "command"),
    [("validate", "validate@pruned-cpu_onnxruntime"), ("measured", "benchmark@cpu_onnxruntime")],
)
def test_accuracy_and_latency_of_another_file_are_refused(artifacts, tmp_path, stage, command) -> None:
    artifacts.change(stage, "pruned-cpu_onnxruntime", engine_sha256="0" * 64)
    with pytest.raises(ArtifactError, match=f"dvc repro {command}"):
        run(artifacts, tmp_path / "out")


def test_speedups_over_different_references_are_refused(artifacts, tmp_path) -> None:
    inputs = artifacts.selection_inputs()
    file = inputs["benchmarks"] / "cpu_onnxruntime" / "report.json"
    content = json.loads(file.read_text())
    file.write_text(json.dumps(content | {"reference_sha256": "another"}))
    with pytest.raises(ArtifactError, match="2 different reference engines"):
        select_engine(config_for(artifacts), **inputs, out=tmp_path)


def test_each_speed_up_names_its_reference_and_those_of_two_devices_are_not_ranked_together(
    artifacts, tmp_path
) -> None:
    """An engine on a GPU is far less above eager PyTorch there than one on a CPU above eager PyTorch on the CPU."""
    artifacts.add("distilled", "cuda_torch", 0.54, 0.9, 1.0)
    for target, device, gpu in (("cpu_torch", "cpu", None), ("cuda_torch", "cuda", Gpu("any", "any"))):
        for engine in (artifacts.root / "build_engine").glob(f"*/{target}/engine"):
            manifest = read_engine_manifest(engine)
            eager = dataclasses.replace(
                manifest.target, runtime=Runtime.torch, device=device, gpu=gpu, opsets=[]
            )
            write_engine_manifest(engine, dataclasses.replace(manifest, target=eager))
    artifacts.add("pruned", "cuda_onnxruntime", 0.536, 0.3, 3.0)
    inputs = artifacts.selection_inputs()
    for target in ("cuda_torch", "cuda_onnxruntime"):
        file = inputs["benchmarks"] / target / "report.json"
        content = json.loads(file.read_text()) | {
            "reference_target": "cuda_torch",
            "reference_sha256": "another",
        }
        file.write_text(json.dumps(content))
    out = tmp_path / "out"
    out.mkdir()
    report = select_engine(config_for(artifacts), **inputs, out=out)
    rows = {
        f"{row['variant']}-{row['target']}": row for row in json.loads((out / "engines.json").read_text())
    }
    on_cpu, on_gpu = (rows[name] for name in ("pruned_qat-cpu_onnxruntime", "pruned-cuda_onnxruntime"))
    assert on_cpu["conditions"]["Reference"] == "eager PyTorch on the CPU"
    assert on_gpu["conditions"]["Reference"] == "eager PyTorch on the GPU"
    assert "28.2x the speed of eager PyTorch on the CPU" in on_cpu["reason"]
    assert "3x the speed of eager PyTorch on the GPU" in on_gpu["reason"]
    assert on_cpu["speedup_vs_reference"] > on_gpu["speedup_vs_reference"]
    assert report.best is not None and report.best.target == "cuda_onnxruntime"
    assert list(report.picks)[:2] == ["cuda_onnxruntime", "cuda_torch"]
    cards = (out / "report.html").read_text(encoding="utf-8").partition('class="picks"')[2]
    assert "3.00× eager PyTorch on the GPU" in cards and "28.2× eager PyTorch on the CPU" in cards  # noqa: RUF001


def test_a_missing_report_names_the_engine(artifacts, tmp_path) -> None:
    (artifacts.root / "validate" / "pruned" / "cpu_onnxruntime" / "report.json").unlink()
    with pytest.raises(ArtifactError, match=r"'pruned' on target 'cpu_onnxruntime'.*dvc repro"):
        run(artifacts, tmp_path / "out")


def test_a_damaged_report_is_named(artifacts, tmp_path) -> None:
    inputs = artifacts.selection_inputs()
    file = inputs["benchmarks"] / "cpu_onnxruntime" / "report.json"
    file.write_text('{"latency')
    with pytest.raises(ArtifactError, match=re.escape(str(file))):
        select_engine(config_for(artifacts), **inputs, out=tmp_path)


@pytest.mark.parametrize(
    ("stage", "part", "field", "path"),
    [
        (
            "measured",
            "latency.batches.0",
            "device_ms_p50",
            "engines.pruned.latency.batches.0.device_ms_p50",
        ),  # it may be null
        ("measured", "latency.batches.0", "latency_ms_p90", ""),
        ("measured", "", "engine_sha256", ""),
        ("validate", "accuracy", "iou", "accuracy.iou"),
    ],
)
def test_a_report_of_an_older_version_is_refused(artifacts, tmp_path, stage, part, field, path) -> None:
    inputs = artifacts.selection_inputs()
    if stage == "measured":
        file = inputs["benchmarks"] / "cpu_onnxruntime" / "report.json"
        part = f"engines.pruned.{part}".rstrip(".")
    else:
        file = artifacts.root / stage / "pruned" / "cpu_onnxruntime" / "report.json"
    report = json.loads(file.read_text())
    del inside(report, part)[field]
    file.write_text(json.dumps(report))
    with pytest.raises(ArtifactError, match=f"{file} has no field '{re.escape(path)}.*dvc repro"):
        select_engine(config_for(artifacts), **inputs, out=tmp_path)


def test_a_report_with_an_unknown_field_is_refused(artifacts, tmp_path) -> None:
    artifacts.change("measured", "pruned-cpu_onnxruntime", latency_ms_p50=1.2)
    with pytest.raises(ArtifactError, match=r"damaged or from another version .*latency_ms_p50"):
        run(artifacts, tmp_path / "out")


def test_classes_without_numbers_are_refused(artifacts, tmp_path) -> None:
    artifacts.change("validate", "pruned-cpu_onnxruntime", "accuracy", iou=None)
    with pytest.raises(ArtifactError, match=r"has the field 'accuracy\.iou' = None, expected dict"):
        run(artifacts, tmp_path / "out")


def test_a_reference_without_accuracy_is_refused(artifacts, tmp_path) -> None:
    artifacts.change("validate", "distilled-cpu_torch", "accuracy", miou=0.0)
    with pytest.raises(ArtifactError, match=r"select_engine\.float_reference"):
        run(artifacts, tmp_path / "out")


def test_the_same_inputs_give_the_same_bytes(artifacts, tmp_path) -> None:
    run(artifacts, tmp_path / "one")
    run(artifacts, tmp_path / "two")
    files = [path.relative_to(tmp_path / "one") for path in (tmp_path / "one").rglob("*") if path.is_file()]
    assert len(files) > 5
    for file in files:
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes(), file


class _Tags(HTMLParser):
    """Collects what a browser would load or show as markup."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)
        self.addresses += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_well_formed_loads_nothing_and_escapes_names(artifacts, tmp_path) -> None:
    artifacts.add_without_engine("pruned", "cpu_openvino", EngineStatus.failed, "<script>alert(1)</script>")
    run(artifacts, tmp_path / "out")

    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.addresses == []
    assert "&lt;b&gt;seven&lt;/b&gt;" in page
    assert "<script>alert" not in page
    assert "<b>seven" not in page
    for name in MEASURED:
        assert name[0] in page and name[1] in page


def test_the_page_holds_the_numbers_of_every_measured_engine(artifacts, tmp_path) -> None:
    run(artifacts, tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    embedded = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page)
    assert embedded is not None
    data = json.loads(embedded[1])
    engines = [dict(zip(data["engine_fields"], values, strict=True)) for values in data["engines"]]
    assert {(row["variant"], row["target"]): row["p50"] for row in engines} == {
        name: latency for name, (_, latency, _) in MEASURED.items()
    }
    assert {row["variant"]: row["dominated_by"] for row in engines if row["target"] == "cpu_onnxruntime"} == {
        "distilled": None,
        "pruned": None,
        "pruned_ptq": "pruned_qat",
        "pruned_qat": None,
    }


def test_the_markdown_has_a_row_for_every_engine_and_no_broken_cell(artifacts, tmp_path) -> None:
    artifacts.add_without_engine("pruned", "cpu_openvino", EngineStatus.failed, "a | b\nc <i>d</i>")
    run(artifacts, tmp_path / "out")

    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    table = text.split("## All engines")[1].split("##")[0].strip().splitlines()
    assert len(table) == 2 + 7
    bars = {len(re.findall(r"(?<!\\)\|", line)) for line in table}
    assert len(bars) == 1
    assert "a \\| b c &lt;i&gt;d&lt;/i&gt;" in text


def test_a_p99_of_too_few_samples_is_a_dash(artifacts, tmp_path) -> None:
    artifacts.change("measured", "pruned_qat-cpu_onnxruntime", "latency.batches.0", latency_ms_p99=None)
    _, rows = run(artifacts, tmp_path / "out")
    assert rows["pruned_qat-cpu_onnxruntime"]["latency_ms_p99"] is None
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    line = next(
        line for line in text.splitlines() if line.startswith("| pruned_qat | cpu_onnxruntime | ACCEPT")
    )
    assert "| 0.660 | – | 28.2" in line  # noqa: RUF001
    assert (
        json.loads((tmp_path / "out" / "picks.json").read_text())["cpu_onnxruntime"]["latency_ms_p99"] is None
    )
    assert ", p99 –</small>" in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")  # noqa: RUF001


def test_the_report_tells_what_each_technique_gave(artifacts, tmp_path) -> None:
    artifacts.speedups["pruned_qat-cpu_onnxruntime"] = 40.0  # the reference's noise is not a gain
    run(artifacts, tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    line = next(line for line in text.splitlines() if line.startswith("| Quantization-aware training"))
    assert "+0.0230" in line  # 0.533 - 0.510
    assert "1.00" in line and "1.42" not in line  # 0.66 ms / 0.66 ms, not 40.0 / 28.2


def test_gain_in_memory_size_and_macs_stands_beside_score_and_speed(artifacts, tmp_path) -> None:
    name = "pruned-cpu_onnxruntime"
    artifacts.change("measured", name, "latency", memory_mib=30.0)  # of 40
    artifacts.change(
        "build_engine", name, "cost", compressed_bytes=100, macs=11_500_000
    )  # of 400 and 23 million
    manifest = artifacts.root / "build_engine/pruned/cpu_onnxruntime/engine"
    write_engine_manifest(manifest, dataclasses.replace(read_engine_manifest(manifest), size_bytes=1))
    run(artifacts, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8").split("## What each technique gave")[1]
    size = 1 / len(engine_bytes("distilled", "cpu_onnxruntime"))
    change = f"−{100 * (1 - size):.1f} %"  # noqa: RUF001
    changes = f"−25.0 % | {change} | −75.0 % | −50.0 %"  # noqa: RUF001
    assert f"| Pruning (distilled to pruned) | cpu_onnxruntime | −0.0040 | 1.42× | {changes} |" in text  # noqa: RUF001
    assert "| Pruning (distilled to pruned) | cpu_torch |" not in text  # pruned has no engine there


def test_memory_of_engines_on_a_gpu_is_that_on_the_gpu(artifacts, tmp_path) -> None:
    for variant, gpu_memory_mib in (("distilled", 400.0), ("pruned", 300.0)):
        artifacts.change(
            "measured",
            f"{variant}-cpu_onnxruntime",
            "latency",
            gpu_memory_mib=gpu_memory_mib,
            memory_mib=900.0,
        )
    run(artifacts, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| cpu_onnxruntime | −0.0040 | 1.42× | −25.0 % |" in text  # noqa: RUF001
    costs = text.split("## Cost of each engine")[1].split("##")[0]
    assert "| MiB | MiB peak | MiB GPU | mJ/image |" in costs and "| 900 | 90 | 300 | – |" in costs  # noqa: RUF001


def test_the_report_tells_what_each_engine_costs(artifacts, tmp_path) -> None:
    name = "pruned_qat-cpu_onnxruntime"
    artifacts.change("measured", name, "latency.throughputs.0", energy_mj_per_image=12.345)
    artifacts.change(
        "measured", name, "latency", load_ms=0.5, memory_total_mib=123.4, energy_note="RAPL of package-0"
    )
    artifacts.change("build_engine", name, "cost", build_s=0.123, compressed_bytes=43_000, macs=11_500_000)
    artifacts.add_without_engine("pruned", "cpu_openvino", EngineStatus.skipped, "no such CPU")
    _, rows = run(artifacts, tmp_path)
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    table = text.split("## Cost of each engine")[1].split("##")[0].strip().splitlines()[2:]
    head, lines = table[0], table[2:]
    names = "build s | load ms | first call ms | MB | MB gzipped | MiB | MiB peak | mJ/image | MMACs"
    assert head == f"| variant | target | {names} |"
    assert (
        "| pruned_qat | cpu_onnxruntime | 0.12 | 0.500 | 1.98 | 0.00 | 0.04 | 40 | 123 | 12.3 | 11.5 |"
        in lines
    )
    assert "| pruned | cpu_openvino | – | – | – | – | – | – | – | – | – |" in lines  # noqa: RUF001
    assert "| distilled | cpu_torch | 1.5 | 12.0 | 55.8 | 0.00 | 0.00 | 40 | 90 | – | 23.0 |" in lines  # noqa: RUF001
    assert len(lines) == 7
    measured = text.split("## How it was measured")[1]
    assert "| Energy |" in measured and "RAPL of package-0" in measured and "no counter here" in measured
    assert {
        key: rows[name][key] for key in ("energy_mj_per_image", "load_ms", "first_call_ms", "build_s")
    } == {
        "energy_mj_per_image": 12.345,
        "load_ms": 0.5,
        "first_call_ms": pytest.approx(1.98),
        "build_s": 0.123,
    }
    assert (rows[name]["compressed_bytes"], rows[name]["macs"]) == (43_000, 11_500_000)
    assert rows["pruned-cpu_openvino"]["macs"] is rows["pruned-cpu_openvino"]["load_ms"] is None


def test_a_build_report_without_the_engine_of_the_manifest_is_refused(artifacts, tmp_path) -> None:
    artifacts.change("build_engine", "pruned-cpu_onnxruntime", cost=None)
    with pytest.raises(
        ArtifactError, match=r"no engine was built.*dvc repro build_engine@pruned-cpu_onnxruntime"
    ):
        run(artifacts, tmp_path)


def test_the_picture_is_a_png_of_a_size_for_a_readme(artifacts, tmp_path) -> None:
    from PIL import Image

    run(artifacts, tmp_path / "out")
    with Image.open(tmp_path / "out" / "pareto.png") as image:
        assert image.format == "PNG"
        assert image.width >= 1000


def test_an_engine_file_changed_after_it_was_measured_is_not_handed_out(artifacts, tmp_path) -> None:
    file = artifacts.root / "build_engine" / "pruned_qat" / "cpu_onnxruntime" / "engine" / "model.engine"
    file.write_bytes(b"other code")
    with pytest.raises(ArtifactError, match="not the file that was measured"):
        run(artifacts, tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"engines": []}, "engines is empty"),
        ({"engines": [REFERENCE, REFERENCE]}, "engines repeats distilled-cpu_torch"),
        ({"float_reference": EngineName("distilled", "gpu")}, "float_reference is distilled-gpu"),
        ({"max_score_rel_loss": 1.0}, "max_score_rel_loss is 1.0"),
        ({"max_score_rel_loss": -0.1}, "max_score_rel_loss is -0.1"),
        ({"max_score_rel_loss": float("nan")}, "max_score_rel_loss is nan"),
        ({"max_boundary_iou_rel_loss": 1.0}, "max_boundary_iou_rel_loss is 1.0"),
        ({"min_speedup_factor": 0.5}, "min_speedup_factor is 0.5"),
        ({"ladder": []}, "ladder is []"),
        ({"ladder": ["pruned", "pruned"]}, "ladder is ['pruned', 'pruned']"),
    ],
)
def test_impossible_values_are_refused_with_their_key(artifacts, changes, key) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"select_engine.{key}")):
        checked(config_for(artifacts), "select_engine", **changes)


def test_the_default_values_in_conf_fit_the_config() -> None:
    section = yaml.safe_load(Path("conf/select_engine/default.yaml").read_text(encoding="utf-8"))
    section |= {
        "engines": [{"variant": "distilled", "target": "cpu_torch"}],
        "parents": {},
        "explained": [],
        "loaded": [],
        "searches": {},
    }
    config = typed_config(Config, section, "select_engine")
    assert config.max_score_rel_loss == 0.02 and config.max_boundary_iou_rel_loss is None
    assert config.float_reference == REFERENCE


def test_what_a_search_left_out_is_said_beside_its_engine_b1(artifacts, tmp_path) -> None:
    for name, text in (("repaired", "no repair was tried: all is well"), ("partial", "")):
        (artifacts.root / name).write_text(text, encoding="utf-8")
    searches = {"pruned_qat": Search.quantize_repaired, "pruned_ptq": Search.quantize_partial}
    _, rows = run(artifacts, tmp_path / "plain")
    _, told = run(artifacts, tmp_path / "out", searches=searches)
    before, after = rows["pruned_qat-cpu_onnxruntime"], told["pruned_qat-cpu_onnxruntime"]
    expected = "; ".join(part for part in (before["reason"], "no repair was tried: all is well") if part)
    assert after == before | {"reason": expected}
    assert told["pruned_ptq-cpu_onnxruntime"] == rows["pruned_ptq-cpu_onnxruntime"]
    for name in ("report.md", "report.html"):
        assert "no repair was tried: all is well" in (tmp_path / "out" / name).read_text(encoding="utf-8")
    (artifacts.root / "repaired").unlink()
    with pytest.raises(ArtifactError, match="repaired: not readable"):
        run(artifacts, tmp_path / "gone", searches=searches)


def test_equal_reasons_of_a_target_without_a_pick_are_said_once(artifacts, tmp_path) -> None:
    for variant in ("distilled", "pruned"):
        artifacts.add_without_engine(variant, "cpu_openvino_bf16", EngineStatus.skipped, "no such CPU")
    report, _ = run(artifacts, tmp_path / "out")
    assert report.without_pick == {"cpu_openvino_bf16": "distilled, pruned: SKIPPED, no such CPU"}


def test_engines_that_another_configuration_left_do_not_change_the_keys(artifacts, tmp_path) -> None:
    """As those of two more targets do when the smoke run comes after the nightly one."""
    mine, selection = config_for(artifacts, engines=list(artifacts.names)), tmp_path / "selection"
    run(artifacts, selection)

    def keys() -> list[dict[str, dict[str, str]]]:
        inputs = artifacts.inputs()
        read = reads(mine, **artifacts.selection_inputs())
        assert read.pop("explanations") == read.pop("loads") == []
        found = read, track.reads(None, selection=selection, **inputs, data=tmp_path)
        return [{name: {str(p): digest(p) for p in paths} for name, paths in read.items()} for read in found]

    before = keys()
    artifacts.add("teacher", "cuda_torch", 0.7, 90.0, 0.3)
    assert keys() == before and len(before[0]["builds"]) == len(mine.engines)
    assert before[0].keys() == before[1].keys() == artifacts.inputs().keys()
    (artifacts.root / "validate/teacher/cpu_torch/more").touch()
    assert all(now["validations"] != then["validations"] for now, then in zip(keys(), before, strict=True))
