"""Collect what was built and measured for one engine from the reports of its stages."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.reports import KEY_FILE, REPORT_FILE, ReportT, read_key, read_report
from tasks.parts.builders.executed_layers import ExecutedLayers
from tasks.parts.builders.report import EngineBuild
from tasks.parts.data.accuracy import AccuracyReport
from tasks.parts.data.comparison import RESULTS_FILE, ImageResults, boundaries_of, frames_of, read_results
from tasks.parts.engines.manifest import (
    MANIFEST_FILE,
    EngineManifest,
    EngineStatus,
    read_engine_manifest,
    sha256_of,
)
from tasks.parts.engines.runtimes import CUDA, Runtime
from tasks.parts.layer_diff.report import DiffReport
from tasks.parts.measuring.load_report import LoadReport
from tasks.parts.measuring.reports import REFERENCE, BenchmarkReport, Latency, Timed
from tasks.parts.selection.engine_row import (
    MACHINE,
    REFERENCE_NAME,
    EngineRow,
    Load,
    LoadPoint,
    Measured,
    Speed,
    SuspectLayer,
    Verdict,
)
from tasks.parts.selection.stage_folders import StageFolders

ENGINE_FOLDER = "engine"

RUNTIME, BUILT_WITH = "Runtime", "Built with"
"""Names of conditions that all engines of a target share, as they share the machine."""

_WITHOUT_ENGINE = {EngineStatus.skipped: Verdict.SKIPPED, EngineStatus.failed: Verdict.BUILD_FAILED}


def name_reference(folders: StageFolders, variant: str, target: str) -> str:
    """Return what a reader calls an engine that speed-ups refer to: ``eager PyTorch on the GPU``."""
    declared = read_engine_manifest(folders.of(variant, target)["build_engine"] / ENGINE_FOLDER).target
    if declared.runtime is not Runtime.torch:
        return f"{variant} on {target}"
    return f"eager PyTorch on the {'GPU' if declared.device == CUDA else 'CPU'}"


def read_row(
    folders: StageFolders,
    variant: str,
    target: str,
    benchmark: BenchmarkReport,
    reference: str,
    load: LoadReport | None = None,
) -> EngineRow:
    """Read the reports of one engine into a row that the gates have not judged yet.

    The verdict depends on the build alone: ACCEPT only means that a sound engine was built and measured. `reference`
    is the name of what the benchmark's speed-ups refer to, `load` the report of measure_load for the target.

    Raises ArtifactError if a report is missing or damaged, or if accuracy, latency and speed-up were not measured
    on the file that was built.
    """
    of = folders.of(variant, target)
    manifest = read_engine_manifest(of["build_engine"] / ENGINE_FOLDER)
    if not manifest.is_built:
        return _row_without_engine(variant, target, manifest)
    validation, build = _read(AccuracyReport, of["validate"]), _read(EngineBuild, of["build_engine"])
    fault = (
        ""
        if manifest.is_precision_ok
        else build.precision_note or "the runtime does not compute in the declared precision"
    )
    return EngineRow(
        variant=variant,
        target=target,
        verdict=Verdict.ACCEPT if manifest.is_precision_ok else Verdict.PRECISION_MISMATCH,
        reason=fault,
        pareto=False,
        picked=False,
        precision=_precision(manifest),
        macs_share=build.executed.macs_share if build.executed else {},
        macs_share_quantized=build.executed.macs_share_quantized if build.executed else None,
        measured=_measured(of, manifest, build, validation, benchmark, load),
        suspect_layers=_suspect_layers(of["diff_layers"]),
        conditions=_conditions(benchmark, variant, manifest, reference) | macs_not_counted(build.executed),
    )


@dataclass(frozen=True)
class ValidatedImages:
    """What an engine got right in each image."""

    decisive: ImageResults
    """On the split that decides."""
    unseen: ImageResults
    """On the split that is only reported."""
    unseen_split: str


def read_image_results(folders: StageFolders, row: EngineRow) -> ValidatedImages:
    """Read what validate wrote about each image for a measured engine."""
    folder = folders.of(row.variant, row.target)["validate"]
    report = _read(AccuracyReport, folder)
    assert report.accuracy is not None
    decisive, unseen = (
        read_results(folder / RESULTS_FILE, split) for split in (report.split, report.unseen_split)
    )
    return ValidatedImages(decisive, unseen, report.unseen_split)


def read_classes(folders: StageFolders, variant: str, target: str) -> tuple[str, ...]:
    """Read the names of the classes of an engine; empty for values."""
    return read_engine_manifest(folders.of(variant, target)["build_engine"] / ENGINE_FOLDER).card.classes


def read_boundary_results(folders: StageFolders, row: EngineRow) -> ValidatedImages:
    """Read what validate wrote about the boundaries in each image.

    Raises ConfigError if the model has no masks.
    """
    folder = folders.of(row.variant, row.target)["validate"]
    report = _read(AccuracyReport, folder)
    assert report.accuracy is not None
    if report.accuracy.boundary_iou is None:
        raise ConfigError(
            f"select_engine.max_boundary_iou_rel_loss is set, but {row.name} has no Boundary IoU (its metric is "
            f"{report.accuracy.metric}), expected masks with labels. Set it to null."
        )
    decisive, unseen = (
        read_results(folder / RESULTS_FILE, boundaries_of(split))
        for split in (report.split, report.unseen_split)
    )
    return ValidatedImages(decisive, unseen, report.unseen_split)


def read_frame_results(folders: StageFolders, row: EngineRow) -> ImageResults | None:
    """Read what validate wrote about the original files of the split that decides; None where it had none."""
    folder = folders.of(row.variant, row.target)["validate"]
    report = _read(AccuracyReport, folder)
    if report.frame_score is None:
        return None
    return read_results(folder / RESULTS_FILE, frames_of(report.split))


def engine_file(folders: StageFolders, row: EngineRow) -> Path:
    """Return the file of a built engine.

    Raises ArtifactError if it is missing or is not the file that was measured.
    """
    folder = folders.of(row.variant, row.target)["build_engine"] / ENGINE_FOLDER
    file = folder / read_engine_manifest(folder).file
    if row.measured is None or not file.is_file() or sha256_of(file) != row.measured.engine_sha256:
        raise ArtifactError(
            f"{file} is missing or is not the file that was measured (sha256 differs from the manifest). "
            f"Build it again: dvc repro build_engine@{row.name}."
        )
    return file


def written_files(folders: StageFolders, row: EngineRow) -> tuple[tuple[str, Path], ...]:
    """Return (stage, file) of the manifest and of every file that the stages wrote for an engine."""
    of = folders.of(row.variant, row.target)
    files = [(ENGINE_FOLDER, of["build_engine"] / ENGINE_FOLDER / MANIFEST_FILE)]
    for stage, folder in of.items():
        if folder.is_dir():
            files += [(stage, file) for file in sorted(folder.iterdir()) if file.is_file()]
    tables = of["benchmark"] / row.variant
    files += [("benchmark", file) for file in (sorted(tables.iterdir()) if tables.is_dir() else ())]
    return tuple(files)


def stage_keys(folders: StageFolders, row: EngineRow) -> dict[str, str]:
    """Return the key of each stage's output for this engine, if it was recorded."""
    of = folders.of(row.variant, row.target)
    return {stage: read_key(folder) for stage, folder in of.items() if (folder / KEY_FILE).is_file()}


def _read(report_class: type[ReportT], folder: Path) -> ReportT:
    if not (folder / REPORT_FILE).is_file():
        variant, target = folder.parts[-2:]
        raise ArtifactError(
            f"{folder / REPORT_FILE} is missing, but select_engine.engines lists variant {variant!r} on "
            f"target {target!r}. Run the stage that writes it (`dvc repro`), or remove the engine from the list."
        )
    return read_report(report_class, folder)


def _row_without_engine(variant: str, target: str, manifest: EngineManifest) -> EngineRow:
    return EngineRow(
        variant=variant,
        target=target,
        verdict=_WITHOUT_ENGINE[manifest.status],
        reason=manifest.reason,
        pareto=False,
        picked=False,
        precision=manifest.target.precision,
        macs_share={},
        macs_share_quantized=None,
        measured=None,
        suspect_layers=(),
        conditions={},
    )


def _measured(
    of: dict[str, Path],
    manifest: EngineManifest,
    build: EngineBuild,
    validation: AccuracyReport,
    benchmark: BenchmarkReport,
    load: LoadReport | None,
) -> Measured:
    variant, target = of["build_engine"].parts[-2:]
    engine = benchmark.engines.get(variant)
    for stage, sha256, command in (
        ("validate", validation.engine_sha256, f"validate@{variant}-{target}"),
        ("benchmark", engine.engine_sha256 if engine else "none", f"benchmark@{target}"),
    ):
        if sha256 != manifest.sha256:
            raise ArtifactError(
                f"{of[stage] / REPORT_FILE} is about the engine file {sha256} of {variant}-{target}, but "
                f"build_engine wrote {manifest.sha256}: accuracy and latency must come from the same file. "
                f"Run it again: dvc repro {command}."
            )
    accuracy, latency = validation.accuracy, engine.latency if engine else None
    if accuracy is None or latency is None or not accuracy.scores:
        name = f"{variant}-{target}"
        raise ArtifactError(
            f"{name} was built, but has no score or no latency. Run it again: "
            f"dvc repro validate@{name} benchmark@{target}."
        )
    if build.cost is None:
        raise ArtifactError(
            f"{of['build_engine'] / REPORT_FILE} says that no engine was built, but the manifest names one. Run it "
            f"again: dvc repro build_engine@{variant}-{target}."
        )
    return Measured(
        accuracy=accuracy,
        losses=None,
        unseen=None,
        speed=_speed(latency, benchmark, variant),
        load=_load(load, variant, manifest.sha256),
        size_bytes=manifest.size_bytes,
        compressed_bytes=build.cost.compressed_bytes,
        build_s=build.cost.build_s,
        macs=build.cost.macs,
        engine_sha256=manifest.sha256,
        reference_sha256=benchmark.reference_sha256,
        frame_score=validation.frame_score,
        frame_note=validation.frame_note,
    )


def _load(report: LoadReport | None, variant: str, engine_sha256: str) -> Load | None:
    engine = report.engines.get(variant) if report else None
    if report is None or engine is None:
        return None
    if engine.engine_sha256 != engine_sha256:
        raise ArtifactError(
            f"measure_load of target {report.target} measured the engine file {engine.engine_sha256} of {variant}, "
            f"but build_engine wrote {engine_sha256}. Run it again: dvc repro measure_load@{report.target}."
        )
    best, arrivals = engine.best, engine.arrivals
    tuning = {} if best is None else dataclasses.asdict(best.setting.tuning)
    options = {} if best is None else {"batch": best.setting.batch, "lanes": best.setting.lanes, **tuning}
    return Load(
        load_max_p99_ms=report.max_p99_ms,
        load_setting=best.setting.describe() if best else "",
        load_options=options,
        throughput_per_s_within_p99=best.throughput_per_s if best else None,
        throughput_ms_p99=best.latency_ms_p99 if best else None,
        knee_per_s=arrivals.knee_per_s if arrivals else None,
        knee_max_p99_ms=arrivals.max_p99_ms if arrivals else None,
        load_front=tuple(
            LoadPoint(cell.throughput_per_s, cell.latency_ms_p99, cell.setting.describe())
            for cell in engine.front
        ),
    )


def _speed(latency: Latency, benchmark: BenchmarkReport, variant: str) -> Speed:
    single, over_reference = latency.at_batch_1, benchmark.ratio(variant, REFERENCE)
    return Speed(
        latency_ms_p50=single.latency_ms_p50,
        latency_ms_p50_low=single.latency_ms_intervals["p50"].low,
        latency_ms_p50_high=single.latency_ms_intervals["p50"].high,
        latency_ms_p90=single.latency_ms_p90,
        latency_ms_p99=single.latency_ms_p99,
        throughput_per_s=single.throughput_per_s,
        throughput_per_s_batched=latency.throughput_per_s_batched,
        frames_per_s=latency.frames_per_s,
        decode_ms_p50=latency.phases_ms["decode"],
        pre_ms_p50=latency.phases_ms["pre"],
        run_ms_p50=latency.phases_ms["run"],
        post_ms_p50=latency.phases_ms["post"],
        speedup_vs_reference=over_reference.factor,
        speedup_low=over_reference.low,
        speedup_high=over_reference.high,
        aa_ratio_spread=benchmark.aa_ratio_spread,
        is_inconclusive=benchmark.is_inconclusive,
        load_ms=latency.load_ms,
        first_call_ms=latency.first_call_ms,
        memory_mib=latency.memory_mib,
        memory_total_mib=latency.memory_total_mib,
        gpu_memory_mib=latency.gpu_memory_mib,
        energy_mj_per_image=latency.energy_mj_per_image,
    )


def _precision(manifest: EngineManifest) -> str:
    """Return the precisions that the convolutions run in, most used first: ``int8+f32``."""
    used: dict[str, int] = {}
    for op_type, counts in manifest.precisions.items():
        if "conv" in op_type.lower():
            for precision, count in counts.items():
                used[precision] = used.get(precision, 0) + count
    return "+".join(sorted(used, key=lambda name: (-used[name], name))) or str(manifest.target.precision)


def _suspect_layers(folder: Path) -> tuple[SuspectLayer, ...]:
    if not (folder / REPORT_FILE).is_file():
        return ()
    differences = read_report(DiffReport, folder).differences
    if differences is None:
        return ()
    suspects = (
        ("first collapse", differences.first_collapse),
        ("largest own drop", differences.largest_own_drop),
    )
    return tuple(
        SuspectLayer(kind, layer.node, layer.module, layer.source, layer.sqnr_db, layer.own_sqnr_db)
        for kind, layer in suspects
        if layer is not None
    )


def _conditions(
    benchmark: BenchmarkReport, variant: str, manifest: EngineManifest, reference: str
) -> dict[str, str]:
    """Return what a reader must know before comparing the latency with another one."""
    engine = benchmark.engines[variant]
    around, race = benchmark.surroundings, benchmark.race
    busy_cores = around.quiet.busy_cores if around else None
    steal_share = around.steal_share if around else None
    is_stable = engine.latency is not None and engine.latency.at_batch_1.is_stable
    return {
        MACHINE: benchmark.machine.id,
        "CPU": benchmark.machine.cpu_model,
        REFERENCE_NAME: reference,
        RUNTIME: f"{engine.runtime} {engine.runtime_version}",
        BUILT_WITH: f"{manifest.target.runtime} {manifest.runtime_version}",
        "Provider": engine.provider,
        "Threads": str(engine.num_threads),
        "Options": ", ".join(f"{name}: {value}" for name, value in engine.options.items()),
        "Timed": "frame to answer" if benchmark.timed is Timed.frame else "engine alone",
        "Rounds": str(race.num_rounds if race else 0),
        "Windows agree": "yes" if is_stable else "no",
        "Cores busy before": "unknown" if busy_cores is None else f"{busy_cores:.2f}",
        "Time stolen": "unknown" if steal_share is None else f"{100 * steal_share:.1f} %",
        "A/A spread": f"{100 * benchmark.aa_ratio_spread:.1f} %",
        "Energy": engine.latency.energy_note if engine.latency else "not measured",
    }


def macs_not_counted(executed: ExecutedLayers | None) -> dict[str, str]:
    """Return the operators whose MACs are in no number of the report as one more condition, if there are any."""
    found = executed.uncounted_operators if executed else {}
    return {"MACs not counted": ", ".join(f"{num} {name}" for name, num in found.items())} if found else {}


def check_conditions(rows: Sequence[EngineRow]) -> None:
    """Raise ArtifactError if latencies of one target come from different machines or versions of the runtime."""
    for target in dict.fromkeys(row.target for row in rows):
        for name in (MACHINE, RUNTIME, BUILT_WITH):
            by_value = {
                row.conditions[name]: row.name for row in rows if row.target == target and row.conditions
            }
            if len(by_value) > 1:
                found = ", ".join(f"{engine}: {value}" for value, engine in by_value.items())
                raise ArtifactError(
                    f"The engines of {target} have different values of {name!r} ({found}), so their latencies cannot "
                    f"be compared. Build and measure all of them on one machine with one version: dvc repro --force "
                    f"{' '.join(f'build_engine@{row.name}' for row in rows if row.target == target)} "
                    f"benchmark@{target}."
                )
