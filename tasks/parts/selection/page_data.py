"""What the page of the engine report computes with: numbers of engines, their layers, images on which they differ."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.core.errors import ArtifactError
from tasks.parts.selection.engine_row import EngineRow, Verdict
from tasks.parts.selection.findings import Findings
from tasks.parts.selection.plots import colours

DETAILS_FILE = "details.json"
"""What `explain` wrote for this page."""

_MOST_BYTES_OF_DETAILS = 900_000
"""What the details of all targets may take together, so that the page stays below 2 MB."""
_NEVER_PICKED = (Verdict.TOO_SLOW, Verdict.PRECISION_MISMATCH, Verdict.BUILD_FAILED, Verdict.SKIPPED)


def page_data(
    findings: Findings, explanations: Mapping[str, Path], gallery: dict[str, Any] | None
) -> dict[str, Any]:
    """Return what the page's script reads.

    `explanations` are the outputs of `explain` by target (see parts/explain/details.py). Targets whose details find
    no room are named in ``without_details``.
    """
    details: dict[str, Any] = {}
    left_out, room = [], _MOST_BYTES_OF_DETAILS
    for target in dict.fromkeys([*(row.target for row in findings.picks), *findings.targets]):
        if target not in explanations or not (file := explanations[target] / DETAILS_FILE).is_file():
            continue  # its engines have no layers, or none was built
        if file.stat().st_size > room:
            left_out.append(target)
            continue
        room -= file.stat().st_size
        details[target] = _read(file)
    reference = findings.reference
    engines = [_engine(row, findings) for row in findings.ordered]
    fields = dict.fromkeys(field for engine in engines for field in engine)
    return {
        "metric": reference.metric,
        "reference": f"{reference.variant}-{reference.target}",
        "max_loss": findings.max_score_rel_loss,
        "max_parent_loss": findings.max_parent_rel_loss,
        "colours": colours(findings.rows),
        "classes": list(dict.fromkeys(name for _, iou in findings.ious for name in iou)),
        "engine_fields": list(fields),
        "engines": [[engine.get(field) for field in fields] for engine in engines],
        "details": details,
        "without_details": left_out,
        "gallery": gallery,
    }


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{file}: not readable ({error}). Run explain again: `dvc repro`.") from error


def _engine(row: EngineRow, findings: Findings) -> dict[str, Any]:
    """Return the numbers of an engine, rounded to what they are known to."""
    known = {
        "variant": row.variant,
        "target": row.target,
        "verdict": row.verdict,
        "picked": row.picked,
        "front": row.pareto,
    }
    if row.measured is None:
        return known
    speed, losses, accuracy = row.measured.speed, row.measured.losses, row.measured.accuracy
    load = row.measured.load
    assert losses is not None
    numbers = {
        "score": accuracy.score,
        "loss": losses.score_rel_loss,
        "loss_low": losses.score_rel_loss_low,
        "loss_high": losses.score_rel_loss_high,
        "parent_loss_high": losses.parent_rel_loss_high,
        "frame_loss_high": losses.frame_rel_loss_high,
        "frame_score": row.measured.frame_score,
        "boundary_iou": accuracy.boundary_iou,
        "p50": speed.latency_ms_p50,
        "p50_low": speed.latency_ms_p50_low,
        "p50_high": speed.latency_ms_p50_high,
        "p99": speed.latency_ms_p99,
        "per_s": speed.throughput_per_s,
        "per_s_batched": speed.throughput_per_s_batched,
        "frames_per_s": speed.frames_per_s,
        "decode_ms": speed.decode_ms_p50,
        "pre_ms": speed.pre_ms_p50,
        "run_ms": speed.run_ms_p50,
        "post_ms": speed.post_ms_p50,
        "per_s_within_p99": load.throughput_per_s_within_p99 if load else None,
        "knee_per_s": load.knee_per_s if load else None,
        "energy_mj": speed.energy_mj_per_image,
        "memory_mib": speed.memory_mib,
        "memory_total_mib": speed.memory_total_mib,
        "size_mb": row.measured.size_bytes / 1e6,
        "compressed_mb": row.measured.compressed_bytes / 1e6,
        "build_s": row.measured.build_s,
        "load_ms": speed.load_ms,
        "first_call_ms": speed.first_call_ms,
        "mmacs": row.measured.macs / 1e6,
    }
    dominating = None if row.pareto else _dominating(row, findings.rows)
    return known | {
        "may_ship": row.verdict not in _NEVER_PICKED and _holds_fixed_limits(row, findings),
        "dominated_by": dominating and dominating.variant,
        "iou": [_short(value) for value in accuracy.iou.values()],
        **{name: _short(value) for name, value in numbers.items()},
    }


def _holds_fixed_limits(row: EngineRow, findings: Findings) -> bool:
    """Return whether an engine keeps the limits of Boundary IoU and of classes, which no slider moves."""
    limit = findings.max_boundary_iou_rel_loss
    losses = row.measured.losses if row.measured else None
    if losses and any(lost.high > lost.max_rel_loss for lost in losses.class_losses.values()):
        return False
    loss = losses.boundary_iou_rel_loss_high if losses else None
    return limit is None or (loss is not None and loss <= limit)


def _dominating(row: EngineRow, rows: Sequence[EngineRow]) -> EngineRow | None:
    """Return the fastest engine of the front that is as fast and as accurate, and better in one of the two."""
    assert row.measured is not None
    speedup, score = row.measured.speed.speedup_vs_reference, row.measured.accuracy.score
    better = [
        other
        for other in rows
        if other.target == row.target
        and other.pareto
        and other.measured
        and other.measured.speed.speedup_vs_reference >= speedup
        and other.measured.accuracy.score >= score
    ]
    return max(
        better,
        key=lambda other: other.measured.speed.speedup_vs_reference if other.measured else 0,
        default=None,
    )


def _short(value: float | None) -> float | None:
    """Return a number with five significant digits."""
    return None if value is None else float(f"{value:.5g}")
