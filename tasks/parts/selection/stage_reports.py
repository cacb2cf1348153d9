"""Gather what was built and measured for one engine from the reports of its stages."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.parts.engines.manifest import (
    MANIFEST_FILE,
    EngineManifest,
    EngineStatus,
    read_engine_manifest,
    sha256_of,
)
from tasks.parts.selection.engine_row import EngineRow, SuspectLayer, Verdict

ENGINE_FOLDER = "engine"

REPORT_FILE = "report.json"

_WITHOUT_ENGINE = {EngineStatus.skipped: Verdict.SKIPPED, EngineStatus.failed: Verdict.BUILD_FAILED}


@dataclass(frozen=True)
class StageFolders:
    """The folders of the four stages; below each lies ``<variant>/<target>``."""

    builds: Path
    validations: Path
    benchmarks: Path
    diffs: Path

    def of(self, variant: str, target: str) -> dict[str, Path]:
        """Return the folder of one engine in each stage."""
        return {
            "build_engine": self.builds / variant / target,
            "validate": self.validations / variant / target,
            "benchmark": self.benchmarks / variant / target,
            "diff_layers": self.diffs / variant / target,
        }


def read_row(folders: StageFolders, variant: str, target: str) -> EngineRow:
    """Read the reports of one engine into a row that the gates have not judged yet.

    The verdict is what the build alone says: ACCEPT means only that a sound engine was built and measured.

    Raises ArtifactError when a report is missing or damaged, or when accuracy and latency were measured on
    other files than the one that was built.
    """
    of = folders.of(variant, target)
    manifest = read_engine_manifest(of["build_engine"] / ENGINE_FOLDER)
    if not manifest.is_built:
        return _row_without_engine(variant, target, manifest)
    validation = _read_report(of["validate"])
    benchmark = _read_report(of["benchmark"])
    _check_same_file(variant, target, manifest, of, validation, benchmark)
    build = _read_report(of["build_engine"])
    note, truth = str(build.get("precision_note", "")), build.get("truth") or {}
    return EngineRow(
        variant=variant,
        target=target,
        verdict=Verdict.ACCEPT if manifest.precision_ok else Verdict.PRECISION_MISMATCH,
        reason="" if manifest.precision_ok else note or "the runtime does not compute as declared",
        pareto=False,
        picked=False,
        precision=_precision(manifest),
        macs_share=dict(truth.get("macs_share", {})),
        macs_share_quantized=truth.get("macs_share_quantized"),
        metric=str(_field(validation, "metric", of["validate"])),
        miou=_number(validation, "miou", of["validate"]),
        top1=_number(validation, "top1", of["validate"]),
        score_rel_loss=None,
        pixel_accuracy=_number(validation, "pixel_accuracy", of["validate"]),
        iou=_iou(validation, of["validate"]),
        latency_ms_p50=_number(benchmark, "latency_ms_p50", of["benchmark"]),
        latency_ms_p90=_number(benchmark, "latency_ms_p90", of["benchmark"]),
        latency_ms_p99=_number(benchmark, "latency_ms_p99", of["benchmark"]),
        throughput_per_s=_number(benchmark, "throughput_per_s", of["benchmark"]),
        throughput_per_s_batched=_number(benchmark, "throughput_per_s_batched", of["benchmark"]),
        speedup_vs_reference=_number(benchmark, "speedup_vs_reference", of["benchmark"]),
        speedup_low=_number(benchmark, "speedup_vs_reference_low", of["benchmark"]),
        speedup_high=_number(benchmark, "speedup_vs_reference_high", of["benchmark"]),
        aa_ratio_spread=_number(benchmark, "aa_ratio_spread", of["benchmark"]),
        inconclusive=bool(benchmark.get("inconclusive", False)),
        memory_mib=_number(benchmark, "memory_mib", of["benchmark"]),
        size_bytes=manifest.size_bytes,
        engine_sha256=manifest.sha256,
        reference_sha256=str(_field(benchmark, "reference_sha256", of["benchmark"])),
        suspect_layers=_suspect_layers(of["diff_layers"]),
        conditions=_conditions(benchmark),
    )


def engine_file(folders: StageFolders, row: EngineRow) -> Path:
    """Return the file of a built engine.

    Raises ArtifactError when its bytes are not the ones that were measured.
    """
    folder = folders.of(row.variant, row.target)["build_engine"] / ENGINE_FOLDER
    file = folder / read_engine_manifest(folder).file
    if not file.is_file() or sha256_of(file) != row.engine_sha256:
        raise ArtifactError(
            f"{file} is missing or is not the file that was measured (sha256 differs from the manifest). "
            f"Build it again: dvc repro build_engine@{row.name}."
        )
    return file


def evidence_files(folders: StageFolders, row: EngineRow) -> tuple[tuple[str, Path], ...]:
    """Return (stage, file) of the manifest and of all that the measuring stages wrote for an engine."""
    of = folders.of(row.variant, row.target)
    found = [(ENGINE_FOLDER, of["build_engine"] / ENGINE_FOLDER / MANIFEST_FILE)]
    for stage, folder in of.items():
        if folder.is_dir():
            found += [(stage, file) for file in sorted(folder.iterdir()) if file.is_file()]
    return tuple(found)


def stage_keys(folders: StageFolders, row: EngineRow) -> dict[str, str]:
    """Return the key under which each stage made its output for this engine, as far as recorded."""
    keys = {}
    for stage, folder in folders.of(row.variant, row.target).items():
        if (folder / "key.json").is_file():
            keys[stage] = str(_read_json(folder / "key.json").get("key", ""))
    return keys


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
        metric="",
        miou=None,
        top1=None,
        score_rel_loss=None,
        pixel_accuracy=None,
        iou={},
        latency_ms_p50=None,
        latency_ms_p90=None,
        latency_ms_p99=None,
        throughput_per_s=None,
        throughput_per_s_batched=None,
        speedup_vs_reference=None,
        speedup_low=None,
        speedup_high=None,
        aa_ratio_spread=None,
        inconclusive=False,
        memory_mib=None,
        size_bytes=None,
        engine_sha256=None,
        reference_sha256=None,
        suspect_layers=(),
        conditions={},
    )


def _check_same_file(
    variant: str,
    target: str,
    manifest: EngineManifest,
    of: dict[str, Path],
    validation: dict[str, Any],
    benchmark: dict[str, Any],
) -> None:
    for stage, report in (("validate", validation), ("benchmark", benchmark)):
        if report.get("engine_sha256") != manifest.sha256:
            raise ArtifactError(
                f"{of[stage] / REPORT_FILE} speaks of the engine file {report.get('engine_sha256')}, but "
                f"build_engine made {manifest.sha256}: accuracy and latency must come from the same file. "
                f"Run it again: dvc repro {stage}@{variant}-{target}."
            )


def _precision(manifest: EngineManifest) -> str:
    """Say what the convolutions really run in, most used first: ``int8+f32``."""
    used: dict[str, int] = {}
    for op_type, counts in manifest.precisions.items():
        if "conv" in op_type.lower():
            for precision, count in counts.items():
                used[precision] = used.get(precision, 0) + count
    return "+".join(sorted(used, key=lambda name: (-used[name], name))) or str(manifest.target.precision)


def _suspect_layers(folder: Path) -> tuple[SuspectLayer, ...]:
    if not (folder / REPORT_FILE).is_file():
        return ()
    report = _read_report(folder)
    found = []
    for kind in ("first_collapse", "largest_own_drop"):
        layer = report.get(kind)
        if layer:
            found.append(
                SuspectLayer(
                    kind=kind.replace("_", " "),
                    node=str(layer.get("node") or ""),
                    module=str(layer.get("module") or ""),
                    source=str(layer.get("source") or ""),
                    sqnr_db=layer.get("sqnr_db"),
                    own_sqnr_db=layer.get("own_sqnr_db"),
                )
            )
    return tuple(found)


def _conditions(benchmark: dict[str, Any]) -> dict[str, str]:
    """Name what a reader must know before comparing the latency with another one."""
    options = benchmark.get("options", {})
    found = {
        "CPU": benchmark.get("cpu_model"),
        "Runtime": f"{benchmark.get('runtime')} {benchmark.get('runtime_version')}",
        "Provider": benchmark.get("provider"),
        "Threads": benchmark.get("num_threads"),
        "Options": ", ".join(f"{name}: {value}" for name, value in options.items()),
        "Windows agree": "yes" if benchmark.get("is_stable") else "no",
        "Load before": benchmark.get("load_average_before"),
    }
    return {name: f"{value:.2f}" if isinstance(value, float) else str(value) for name, value in found.items()}


def _number(report: dict[str, Any], name: str, folder: Path) -> float | None:
    value = _field(report, name, folder)
    return None if value is None else float(value)


def _iou(report: dict[str, Any], folder: Path) -> dict[str, float | None]:
    value = _field(report, "iou", folder)
    if not isinstance(value, dict):
        raise ArtifactError(
            f"{folder / REPORT_FILE} has the field 'iou' = {value!r}, expected a number for each class. "
            "Run its stage again."
        )
    return value


def _field(report: dict[str, Any], name: str, folder: Path) -> Any:
    if name not in report:
        raise ArtifactError(
            f"{folder / REPORT_FILE} has no field {name!r}. It is of another version; run its stage again."
        )
    return report[name]


def _read_report(folder: Path) -> dict[str, Any]:
    if not (folder / REPORT_FILE).is_file():
        variant, target = folder.parts[-2:]
        raise ArtifactError(
            f"{folder / REPORT_FILE} is missing, but select_engine.engines lists variant {variant!r} on "
            f"target {target!r}. Run the stage that writes it (`dvc repro`), or take the engine off the list."
        )
    return _read_json(folder / REPORT_FILE)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(
            f"{path} is no valid JSON ({error}). Remove its folder and run its stage again."
        ) from error
    if not isinstance(content, dict):
        raise ArtifactError(
            f"{path} holds a {type(content).__name__}, expected an object. Run its stage again."
        )
    return content
