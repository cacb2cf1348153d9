"""The engine report as one HTML file that needs no network: picks, limits to move, two engines compared, tables."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from tasks.parts.selection.engine_row import EngineRow, Measured, Verdict
from tasks.parts.selection.findings import (
    NOTHING,
    Findings,
    Shown,
    columns,
    percent_change,
    shown,
    signed,
    times,
)
from tasks.parts.selection.headline import (
    EXPLAINED,
    class_warnings_of,
    explanations,
    frame_finding_of,
    race_note,
    summary_of,
    title_of,
)
from tasks.parts.selection.load_rows import LOAD_HEAD, LOAD_WORDS, TOGETHER_HEAD, load_rows, together_rows
from tasks.parts.selection.plots import colours
from tasks.parts.selection.verdicts import describe_unseen

_TEMPLATES = Path(__file__).parent / "templates"

_MOST_ROWS = 50
"""Rows of a table that stand in the page from the start: picks and fronts first."""
_CHIPS = {
    Verdict.ACCEPT: "good",
    Verdict.TOO_LOSSY: "bad",
    Verdict.PRECISION_MISMATCH: "bad",
    Verdict.BUILD_FAILED: "bad",
    Verdict.TOO_SLOW: "mild",
    Verdict.NOT_FASTER: "mild",
    Verdict.UNPROVEN: "mild",
    Verdict.INCONCLUSIVE: "mild",
    Verdict.SKIPPED: "off",
}
_WIDEST_HEAT = 0.42
_FIGURES = (
    {"key": "p50", "name": "latency p50, ms", "digits": 3, "lower": True},
    {"key": "p99", "name": "latency p99, ms", "digits": 3, "lower": True},
    {"key": "per_s", "name": "images per second", "digits": 0, "lower": False},
    {"key": "per_s_batched", "name": "images per second, largest batch", "digits": 0, "lower": False},
    {"key": "frames_per_s", "name": "frames per second, from image files", "digits": 0, "lower": False},
    {"key": "decode_ms", "name": "decode, ms", "digits": 3, "lower": True},
    {"key": "pre_ms", "name": "before the engine, ms", "digits": 3, "lower": True},
    {"key": "run_ms", "name": "engine, ms", "digits": 3, "lower": True},
    {"key": "post_ms", "name": "behind the engine, ms", "digits": 3, "lower": True},
    {
        "key": "per_s_within_p99",
        "name": "images per second within the p99 bound",
        "digits": 0,
        "lower": False,
    },
    {"key": "knee_per_s", "name": "images per second that may arrive, knee", "digits": 0, "lower": False},
    {"key": "score", "name": "score", "digits": 4, "lower": False},
    {"key": "frame_score", "name": "score on the original files", "digits": 4, "lower": False},
    {"key": "boundary_iou", "name": "Boundary IoU", "digits": 4, "lower": False},
    {"key": "energy_mj", "name": "energy per image, mJ", "digits": 2, "lower": True},
    {"key": "memory_mib", "name": "memory, MiB", "digits": 1, "lower": True},
    {"key": "memory_total_mib", "name": "peak memory of the process, MiB", "digits": 1, "lower": True},
    {"key": "size_mb", "name": "engine file, MB", "digits": 3, "lower": True},
    {"key": "compressed_mb", "name": "engine file after gzip, MB", "digits": 3, "lower": True},
    {"key": "build_s", "name": "build, s", "digits": 2, "lower": True},
    {"key": "load_ms", "name": "load, ms", "digits": 1, "lower": True},
    {"key": "first_call_ms", "name": "first call, ms", "digits": 2, "lower": True},
    {"key": "mmacs", "name": "multiply-accumulates of an image, millions", "digits": 2, "lower": True},
)
"""Numbers that are compared between two engines: key in the data of the page, and how they are shown."""


@dataclass(frozen=True)
class Cell:
    """A cell of the table of all engines."""

    text: str
    small: str = ""
    kind: str = "num"
    """CSS class of the cell."""
    value: str | float | None = None
    """What the column is sorted by; None for the text."""
    chip: str | None = None
    """CSS class of a chip around the text; None for no chip."""
    target: str | None = None
    """Target whose coloured dot stands before the small print; None for no dot."""


def render_page(findings: Findings, data: Mapping[str, Any]) -> str:
    """Return the whole page; `data` is what its script reads, see `page_data`."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    ordered: Sequence[EngineRow] = findings.ordered
    if len(ordered) > _MOST_ROWS:
        ordered = picks_and_fronts_first(ordered)
    first = ordered[:_MOST_ROWS]
    ious = [(row, iou) for row, iou in findings.ious if row in first]
    classes = columns(iou for _, iou in ious)
    more_rows = [[astuple(cell) for cell in cells(row, findings)] for row in ordered[_MOST_ROWS:]]
    return environment.get_template("page.html").render(
        findings=findings,
        reference=findings.reference,
        first=first,
        most_rows=_MOST_ROWS,
        cells=cells,
        ious=ious,
        heat={name: _shares([iou.get(name) for _, iou in ious]) for name in classes},
        conditions=findings.conditions(),
        condition_names=columns(findings.conditions().values()),
        colours=colours(findings.rows),
        chips=_CHIPS,
        nothing=NOTHING,
        load_words=LOAD_WORDS,
        load_tables=[
            (head, rows)
            for head, rows in (
                (LOAD_HEAD, load_rows(findings)),
                (TOGETHER_HEAD, together_rows(findings)),
            )
            if rows
        ],
        title=title_of(findings.rows),
        summary=summary_of(findings.rows),
        race_note=race_note(findings.rows),
        explanations=explanations(findings.rows),
        explained=EXPLAINED,
        class_warnings_of=class_warnings_of,
        frame_finding_of=frame_finding_of,
        describe_unseen=describe_unseen,
        shown=shown,
        signed=signed,
        times=times,
        percent_change=percent_change,
        data={**data, "figures": _FIGURES, "more_rows": more_rows},
    )


def picks_and_fronts_first(rows: Sequence[EngineRow]) -> list[EngineRow]:
    """Return the picks, then the fronts, then the other rows, each in the given order."""
    return sorted(rows, key=lambda row: (not row.picked, not row.pareto, row.measured is None))


def cells(row: EngineRow, findings: Findings) -> list[Cell]:
    """Return the cells of an engine in the table of all engines."""
    numbers = shown(row)
    word = "pick" if row.picked else row.verdict.lower().replace("_", " ")
    front = "on the front" if row.pareto else ""
    return [
        Cell(row.variant, row.target, "name", row.name, target=row.target),
        Cell(word, front, "name", word, _CHIPS[row.verdict]),
        *_number_cells(row.measured, row.precision, numbers, has_boundaries=findings.has_boundaries),
        Cell(row.reason, kind="why"),
    ]


def _number_cells(
    measured: Measured | None, precision: str, numbers: Shown, *, has_boundaries: bool
) -> list[Cell]:
    if measured is None:
        return [Cell(NOTHING, value="")] * (5 if has_boundaries else 4)
    accuracy, speed = measured.accuracy, measured.speed
    boundary = "" if accuracy.boundary_iou is None else accuracy.boundary_iou
    return [
        Cell(numbers.score, f"{numbers.change} ({numbers.change_interval})", value=accuracy.score),
        *([Cell(numbers.boundary_iou, numbers.boundary_change, value=boundary)] if has_boundaries else []),
        Cell(numbers.p50_ms, f"{numbers.p50_interval}, p99 {numbers.p99_ms}", value=speed.latency_ms_p50),
        Cell(
            numbers.speedup,
            f"{speed.speedup_low:.3g} to {speed.speedup_high:.3g}",
            value=speed.speedup_vs_reference,
        ),
        Cell(numbers.size_mb, precision, value=measured.size_bytes),
    ]


def _shares(values: Sequence[float | None]) -> list[float | None]:
    """Return the strength of each value's colour: 0 for the lowest, the most for the highest."""
    known = [value for value in values if value is not None]
    low, span = (min(known), (max(known) - min(known)) or 1.0) if known else (0.0, 1.0)
    return [None if value is None else _WIDEST_HEAT * (value - low) / span for value in values]
