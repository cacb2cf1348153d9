"""What the page and the console say first: what was picked, and what is not proven about it."""

from collections import Counter
from collections.abc import Sequence

from tasks.parts.selection.engine_row import EngineRow, Verdict

RACE_PENDING = (
    "Times and speed-ups of different targets come from different races. Which of these picks is the fastest, only "
    "the race of all picks says (race_picks)."
)
"""Stands on the page of several picks until race_picks has its result."""

EXPLAINED = {
    Verdict.UNPROVEN: (
        "UNPROVEN: a gate lies inside the interval of the engine's loss, so there are too few validation images to "
        "tell whether it holds; the reason says how many would."
    ),
    Verdict.INCONCLUSIVE: (
        "INCONCLUSIVE: the engine holds the accuracy gates, but the machine was too noisy to tell whether it is fast "
        "enough; measure it again while nothing else runs."
    ),
}
"""Verdicts that say what is not known, in a sentence."""

_MOST_WARNINGS = 5


def title_of(rows: Sequence[EngineRow]) -> str:
    """Return the headline: the only pick, or how many there are, or that nothing is accepted."""
    picks = [row for row in rows if row.picked]
    if not picks:
        return "No engine passes"
    if not any(row.verdict is Verdict.ACCEPT for row in rows):
        return "No engine is accepted"
    if len(picks) == 1:
        return f"{picks[0].variant} on {picks[0].target}"
    return f"{len(picks)} picks, one for each target"


def summary_of(rows: Sequence[EngineRow]) -> list[str]:
    """Return the sentences after the headline: what is not proven about the picks, or what became of the engines."""
    picks = [row for row in rows if row.picked]
    if not picks:
        counts = Counter(row.verdict for row in rows)
        fates = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
        return [f"Of {len(rows)} engines: {fates}.", *explanations(rows)]
    sentences = []
    for verdict in EXPLAINED:
        if named := [f"{row.variant} on {row.target}" for row in picks if row.verdict is verdict]:
            are = "is picked, but" if len(named) == 1 else "are picked, but"
            sentences.append(f"{' and '.join(named)} {are} {verdict}.")
    return [*sentences, *explanations(picks)]


def race_note(rows: Sequence[EngineRow]) -> str:
    """Return what stands for the result of the race of the picks; empty where there is nothing to race."""
    return RACE_PENDING if sum(row.picked for row in rows) > 1 else ""


def explanations(rows: Sequence[EngineRow]) -> list[str]:
    """Return what the verdicts among these rows mean that say what is not known."""
    return [text for verdict, text in EXPLAINED.items() if any(row.verdict is verdict for row in rows)]


def frame_finding_of(row: EngineRow) -> str:
    """Return why the score on the original files is another one, or missing, in a sentence; empty if it is equal."""
    measured = row.measured
    if measured is None or not measured.frame_note:
        return ""
    missing = "Not scored on the original files: " if measured.frame_score is None else ""
    return f"{missing}{measured.frame_note}."


def class_warnings_of(row: EngineRow) -> str:
    """Return which classes an engine has lost, in a sentence; empty if none."""
    losses = row.measured.losses if row.measured else None
    warnings = losses.class_warnings if losses else ()
    if not warnings:
        return ""
    more = f"; {len(warnings) - _MOST_WARNINGS} more classes" if len(warnings) > _MOST_WARNINGS else ""
    return f"Warning: {'; '.join(warnings[:_MOST_WARNINGS])}{more}."
