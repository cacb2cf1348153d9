"""The table of engines that a flow prints at its end."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def print_result(folder: Path) -> None:
    """Print every engine, the pick of each target, and where to look further."""
    from rich.table import Table

    engines = json.loads((folder / "engines.json").read_text(encoding="utf-8"))
    picks = json.loads((folder / "picks.json").read_text(encoding="utf-8"))
    metric = next((row["metric"] for row in engines if row["metric"]), "score")
    table = Table("target", "variant", metric, "loss %", "p50 ms", "p99 ms", "x ref.", "MB", "verdict")
    for row in sorted(engines, key=lambda row: (row["target"], row["latency_ms_p50"] or float("inf"))):
        picked = picks.get(row["target"], {}).get("variant") == row["variant"]
        table.add_row(
            row["target"],
            row["variant"],
            format_number(row["top1"] if row["miou"] is None else row["miou"], 4),
            format_number(row["score_rel_loss"], 2, scale=100),
            format_number(row["latency_ms_p50"], 3),
            format_number(row["latency_ms_p99"], 3),
            format_number(row["speedup_vs_reference"], 1),
            format_number(row["size_bytes"] or None, 2, scale=1e-6),
            f"{row['verdict']}{'  <- pick' if picked else ''}",
            style="bold green" if picked else None,
        )
    console = open_console()
    console.print(table)
    for target, row in picks.items():
        console.print(
            f"{target}: {row.get('variant') or 'no pick'}. {row.get('reason', '')}", highlight=False
        )
    console.print(f"report: {(folder / 'report.html').resolve()}", highlight=False, soft_wrap=True)


def format_number(value: float | None, digits: int, *, scale: float = 1.0) -> str:
    """Return a number times `scale` with that many decimals, and "-" for None."""
    return "-" if value is None else f"{value * scale:.{digits}f}"


def open_console() -> "Console":
    """Return the console for tables, 120 columns wide where the output is no terminal."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 120)
