"""Explain where the time of a target's engines goes, and what makes two of them differ."""

import logging
from dataclasses import dataclass
from pathlib import Path

from tasks.parts.explain.report import Explanation

logger = logging.getLogger(__name__)

EXPLANATION_FILE = "explain.md"
WATERFALL_FILE = "waterfall.csv"


@dataclass(frozen=True)
class Pair:
    """Two variants that are compared."""

    before: str
    after: str


@dataclass(frozen=True)
class Config:
    """Which engines are explained."""

    target: str
    """Name of the target of the engines."""
    variants: list[str]
    """Variants that are built for the target."""
    parents: dict[str, str]
    """Variant of lower precision -> the float variant that it was made from."""
    pairs: list[Pair]
    """Variants that are compared: each rung of the ladder with the one below it and with its parent."""


Report = Explanation


def reads(cfg: Config, *, builds: Path, **_: Path) -> dict[str, list[Path]]:
    """Return the engines of this configuration; another one may have left more of them."""
    from tasks.parts.measuring.race import engine_folder

    return {"builds": [engine_folder(builds, variant) for variant in cfg.variants]}


def explain(cfg: Config, *, builds: Path, benchmark: Path, roofs: Path, out: Path) -> Report:
    """Write explain.md, layers.csv into a folder for each variant and waterfall.csv into one for each pair.

    details.json holds the same for the engine report, with each two engines compared (see parts/explain/details.py).

    ``builds`` has a ``*`` in place of the variant. `benchmark` and `roofs` are the outputs of benchmark and
    measure_machine for the target. Raises ArtifactError for outputs of another version.
    """
    from tasks.core.reports import read_report
    from tasks.parts.explain.details import write_details
    from tasks.parts.explain.engine_view import view_engines
    from tasks.parts.explain.markdown import write_explanation
    from tasks.parts.explain.report import explain_engine, explain_pair
    from tasks.parts.explain.waterfall import compare
    from tasks.parts.measuring.reports import BenchmarkReport
    from tasks.parts.roofs.roofs import Roofs
    from tasks.parts.tables import write_table

    reached = read_report(Roofs, roofs)
    measured = read_report(BenchmarkReport, benchmark)
    views = view_engines(cfg.variants, builds, benchmark, measured, reached)
    reason = "" if views else reached.reason or "no engine of this target was built"
    pairs = []
    for name, view in views.items():
        write_table(_folder(out, name) / "layers.csv", view.rows)
    compared: set[tuple[str, str]] = set()
    for pair in cfg.pairs:
        if pair.before not in views or pair.after not in views:
            continue
        before, after = views[pair.before], views[pair.after]
        files = before.manifest.sha256, after.manifest.sha256
        if files[0] == files[1] or files in compared:  # identical files are one engine
            continue
        compared.add(files)
        steps = compare(before, after)
        pairs.append(explain_pair(before, after, steps, measured))
        write_table(_folder(out, f"{pair.before}--{pair.after}") / WATERFALL_FILE, steps)
    explanation = Explanation(
        target=cfg.target,
        engines={
            name: explain_engine(view, views.get(cfg.parents.get(name, ""))) for name, view in views.items()
        },
        pairs=tuple(pairs),
        reason=reason,
    )
    if views:
        write_details(out, explanation.engines, views, reached, measured)
    (out / EXPLANATION_FILE).write_text(write_explanation(explanation, views, reached), encoding="utf-8")
    for each in pairs:
        logger.info("explain: %s: %s", cfg.target, each.advice)
    return explanation


def _folder(out: Path, name: str) -> Path:
    folder = out / name
    folder.mkdir(exist_ok=True)
    return folder
