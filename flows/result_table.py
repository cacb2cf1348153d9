"""The table of engines that a flow prints at its end."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.reports import read_report
from tasks.parts.selection.engine_row import Measured, read_rows
from tasks.parts.selection.findings import latency_ms, note_on, score_of
from tasks.parts.selection.headline import class_warnings_of, summary_of, title_of
from tasks.select_engine import Report

if TYPE_CHECKING:
    from rich.console import Console


def print_result(folder: Path) -> None:
    """Print every engine, what is true of all picks, and the pick of each target."""
    from rich.table import Table

    rows = read_rows(folder)
    metric = next((row.measured.accuracy.metric for row in rows if row.measured), "score")
    table = Table(
        "target", "variant", metric, "loss %", "95 %", "p50 ms", "p99 ms", "x ref.", "MB", "verdict"
    )
    for row in sorted(rows, key=lambda row: (row.target, latency_ms(row))):
        table.add_row(
            row.target,
            row.variant,
            *_numbers(row.measured),
            f"{row.verdict}{'  <- pick' if row.picked else ''}",
            style="bold green" if row.picked else None,
        )
    console = open_console()
    console.print(table)
    for sentence in (f"{title_of(rows)}.", *summary_of(rows)):
        console.print(sentence, highlight=False)
    if note := note_on(metric):
        console.print(note, highlight=False)
    for row in rows:
        if row.picked:
            console.print(f"{row.target}: {row.variant}, {row.verdict}. {row.reason}", highlight=False)
            if warning := class_warnings_of(row):
                console.print(f"{row.target}: {warning}", highlight=False, style="bold red")
    for target, reason in read_report(Report, folder).without_pick.items():
        console.print(f"{target}: no pick. {reason}", highlight=False)


def print_ranking(folder: Path) -> None:
    """Print which pick is the fastest by the race of the picks, and the path of the report that says so."""
    from rich.markdown import Markdown

    console = open_console()
    console.print(Markdown((folder / "ranking.md").read_text(encoding="utf-8")))
    console.print(f"report: {(folder / 'report.html').resolve()}", highlight=False, soft_wrap=True)


def _numbers(measured: Measured | None) -> tuple[str, ...]:
    if measured is None:
        return ("-",) * 7
    speed, losses = measured.speed, measured.losses
    low, high = (losses.score_rel_loss_low, losses.score_rel_loss_high) if losses else (None, None)
    return (
        score_of(measured.accuracy),
        format_number(losses.score_rel_loss if losses else None, 2, scale=100),
        f"{format_number(low, 2, scale=100)} to {format_number(high, 2, scale=100)}",
        format_number(speed.latency_ms_p50, 3),
        format_number(speed.latency_ms_p99, 3),
        format_number(speed.speedup_vs_reference, 1),
        format_number(measured.size_bytes, 2, scale=1e-6),
    )


def format_number(value: float | None, digits: int, *, scale: float = 1.0) -> str:
    """Return a number times `scale` with `digits` decimals, or "-" for None."""
    return "-" if value is None else f"{value * scale:.{digits}f}"


def open_console() -> "Console":
    """Return the console for tables, 120 columns wide if the output is not a terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)
