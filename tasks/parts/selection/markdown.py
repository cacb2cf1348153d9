"""The engine report as Markdown, for a terminal, a pull request or a chat."""

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.parts.selection.engine_row import EngineRow
from tasks.parts.selection.findings import (
    NOTHING,
    Findings,
    columns,
    milliseconds,
    percent_change,
    shown,
    signed,
    times,
)
from tasks.parts.selection.headline import (
    class_warnings_of,
    explanations,
    frame_finding_of,
    race_note,
    summary_of,
    title_of,
)
from tasks.parts.selection.load_rows import LOAD_HEAD, LOAD_WORDS, TOGETHER_HEAD, load_rows, together_rows
from tasks.parts.selection.markdown_details import next_engines, where_time_goes
from tasks.parts.selection.markdown_table import safe, table
from tasks.parts.selection.verdicts import describe_unseen


def render_markdown(findings: Findings, data: Mapping[str, Any]) -> str:
    """Return the whole report; it refers to one picture beside it, ``pareto.png``.

    `data` is what the page shows, see `page_data`.
    """
    details = list(where_time_goes(findings, data))
    parts = [
        "# Engine report",
        _headline(findings),
        findings.note,
        "## Picks",
        _picks(findings),
        "![Latency and accuracy of every engine](pareto.png)",
        "## What the next engine costs" if findings.picks else "",
        next_engines(data),
        "## All engines",
        " ".join(explanations(findings.rows)),
        _engines(findings),
        "## Cost of each engine",
        "Build, load and first call are single measurements: the load starts with the runtime imported and the file "
        "in the page cache, and the first call is the first inference after it. MB are the engine file, also after "
        "gzip. MiB are the resident memory of runtime, weights and buffers; the peak is that of the whole process, "
        "with Python. What the energy covers, or why it is not known, is under “How it was measured”. MMACs are the "
        "multiply-accumulates of the variant for one image, in millions.",
        _costs(findings),
        "## From image file to answer",
        "Typical time of each phase, one frame after the other, and its share. The images are files of the engine's "
        "size. In a stream the phases overlap.",
        _phases(findings),
        *_loads(findings),
        "## The ladder of each target",
        "A rung must be accurate enough, and faster than the last accepted one below it, or as fast and more "
        "accurate.",
        _ladders(findings),
        "## What each technique gave",
        f"Change of {safe(findings.reference.metric)}, speed, memory, size of the engine file (also after gzip) and "
        "multiply-accumulates on the same target.",
        _techniques(findings),
        _classes(findings),
        "## Where the time of the picks goes" if details else "",
        *details,
        "## Layers that differ most from the float graph",
        _layers(findings),
        "## How it was measured",
        _conditions(findings),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(findings: Findings) -> str:
    reference = findings.reference
    gate = (
        f"An engine is accepted if it loses at most {100 * findings.max_score_rel_loss:g} % of the "
        f"{reference.metric} of {reference.variant} on {reference.target} ({reference.score:.4f}) and, in reduced "
        f"precision, at most {100 * findings.max_parent_rel_loss:g} % of that of its own float graph: both by the "
        "upper end of the loss's 95 % interval over the validation images."
        + findings.boundary_gate
        + findings.class_gate
    )
    rows = findings.rows
    sentences = [f"**{safe(title_of(rows))}.**", *summary_of(rows), race_note(rows), gate]
    return " ".join(sentence for sentence in sentences if sentence)


def _picks(findings: Findings) -> str:
    rows = [
        [
            row.target,
            row.variant,
            f"{cells.p50_ms} ({cells.p50_interval})",
            cells.speedup,
            cells.score,
            f"{cells.change} ({cells.change_interval})",
            cells.unseen_score,
            f"{cells.unseen_change}, {cells.unseen_verdict}",
            cells.size_mb,
        ]
        for row, cells in ((row, shown(row)) for row in findings.picks)
    ]
    metric, unseen = findings.reference.metric, findings.unseen_split
    head = [
        "target",
        "pick",
        "p50 ms",
        "speed-up",
        metric,
        "change",
        f"{unseen} {metric}",
        f"{unseen} change",
        "MB",
    ]
    picks = table(head, rows) if rows else ""
    missing = [f"- {safe(target)}: no pick. {safe(why)}" for target, why in findings.without_pick.items()]
    verdicts = [f"- {safe(row.target)}: {row.verdict}, {_on_unseen(row)}." for row in findings.picks]
    warnings = [
        f"- {safe(row.name)}: {safe(warning)}"
        for row in findings.picks
        if (warning := class_warnings_of(row))
    ]
    warnings += [
        f"- {safe(row.name)}: {safe(text)}" for row in findings.picks if (text := frame_finding_of(row))
    ]
    lists = ("\n".join([*verdicts, *warnings]), "\n".join(missing))
    return "\n\n".join(part for part in (picks, *lists) if part)


def _on_unseen(row: EngineRow) -> str:
    assert row.measured is not None and row.measured.unseen is not None
    return safe(describe_unseen(row.measured.unseen))


def _engines(findings: Findings) -> str:
    boundary = ["Boundary IoU"] if findings.has_boundaries else []
    frames = ["on the original files"] if findings.has_frames else []
    numbers = [
        findings.reference.metric,
        "change",
        "95 %",
        *frames,
        *boundary,
        "p50 ms",
        "p99 ms",
        "speed-up",
        "MB",
    ]
    rows = []
    for row in findings.ordered:
        cells = shown(row)
        shown_numbers = [cells.score, cells.change, cells.change_interval]
        shown_numbers += [cells.frame_score] if findings.has_frames else []
        shown_numbers += (
            [f"{cells.boundary_iou} ({cells.boundary_change})"] if findings.has_boundaries else []
        )
        shown_numbers += [cells.p50_ms, cells.p99_ms, cells.speedup, cells.size_mb]
        front = "yes" if row.pareto else ""
        rows.append([row.variant, row.target, row.verdict, *shown_numbers, front, row.reason])
    return table(["variant", "target", "verdict", *numbers, "front", "why"], rows)


def _costs(findings: Findings) -> str:
    on_gpu = any(row.measured and row.measured.speed.gpu_memory_mib is not None for row in findings.rows)
    head = ["build s", "load ms", "first call ms", "MB", "MB gzipped", "MiB", "MiB peak"]
    head += ["MiB GPU", "mJ/image", "MMACs"] if on_gpu else ["mJ/image", "MMACs"]
    rows = []
    for row in findings.ordered:
        cells = shown(row)
        start = [cells.build_s, cells.load_ms, cells.first_call_ms, cells.size_mb, cells.compressed_mb]
        memory = [cells.memory_mib, cells.memory_total_mib, *([cells.gpu_memory_mib] if on_gpu else [])]
        rows.append([row.variant, row.target, *start, *memory, cells.energy_mj, cells.mmacs])
    return table(["variant", "target", *head], rows)


def _phases(findings: Findings) -> str:
    rows = []
    for row in findings.ordered:
        if row.measured is None:
            continue
        speed = row.measured.speed
        phases_ms = [speed.decode_ms_p50, speed.pre_ms_p50, speed.run_ms_p50, speed.post_ms_p50]
        cells = [f"{milliseconds(ms)} ({100 * ms / sum(phases_ms):.0f} %)" for ms in phases_ms]
        rows.append([row.variant, row.target, *cells, f"{speed.frames_per_s:.0f}"])
    phases = ["decode ms", "before the engine ms", "engine ms", "behind it ms", "frames/s in a stream"]
    return table(["variant", "target", *phases], rows) if rows else ""


def _loads(findings: Findings) -> Iterator[str]:
    if not findings.loaded:
        return
    yield "## Under load"
    yield LOAD_WORDS
    yield table(LOAD_HEAD, load_rows(findings))
    if together := together_rows(findings):
        yield "At the same time, at batch 1 with one lane each:"
        yield table(TOGETHER_HEAD, together)


def _ladders(findings: Findings) -> str:
    rungs = [row for target in findings.targets for row in findings.rungs(target)]
    rows = [
        [row.target, row.variant, cells.change, cells.p50_ms, cells.speedup, row.verdict, row.reason]
        for row, cells in ((row, shown(row)) for row in rungs)
    ]
    rows_of_rungs = table(["target", "rung", "change", "p50 ms", "speed-up", "verdict", "why"], rows)
    ends = [f"- {safe(target)}: {safe(findings.ladder_end(target))}" for target in findings.targets]
    return rows_of_rungs + "\n\n" + "\n".join(ends)


def _techniques(findings: Findings) -> str:
    rows = []
    for name, before, after in findings.techniques:
        for target in findings.targets:
            gain = findings.gain(before, after, target)
            if gain is None:
                continue
            ratios = gain.memory_ratio, gain.size_ratio, gain.compressed_ratio, gain.macs_ratio
            changes = [NOTHING if ratio is None else percent_change(1 - ratio) for ratio in ratios]
            cells = [signed(gain.score_change), times(gain.speed_factor), *changes]
            rows.append([f"{name} ({before} to {after})", target, *cells])
    metric = findings.reference.metric
    return table(["technique", "target", metric, "speed", "memory", "size", "gzipped", "MACs"], rows)


def _classes(findings: Findings) -> str:
    if not findings.ious:
        return ""
    classes = columns(iou for _, iou in findings.ious)
    rows = [
        [row.variant, row.target, *(_decimals(iou.get(name), 3) for name in classes)]
        for row, iou in findings.ious
    ]
    warnings = [
        f"- {safe(row.name)}: {safe(warning)}"
        for row in findings.ordered
        if not row.picked and (warning := class_warnings_of(row))
    ]
    parts = ["## IoU per class", table(["variant", "target", *classes], rows), "\n".join(warnings)]
    return "\n\n".join(part for part in parts if part)


def _layers(findings: Findings) -> str:
    rows = []
    for row in findings.ordered:
        for layer in row.suspect_layers:
            noise = _decimals(layer.sqnr_db, 1), _decimals(layer.own_sqnr_db, 1)
            rows.append([row.variant, row.target, layer.kind, *noise, layer.node, layer.module, layer.source])
    if not rows:
        return "None."
    return table(["variant", "target", "what", "SQNR dB", "own dB", "node", "module", "source"], rows)


def _conditions(findings: Findings) -> str:
    by_target = findings.conditions()
    names = columns(by_target.values())
    rows = [[target, *(values.get(name, NOTHING) for name in names)] for target, values in by_target.items()]
    return table(["target", *names], rows)


def _decimals(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:.{digits}f}"
