"""Race the picks of all targets against each other, on the machine that they were measured on.

``benchmark`` compares the engines of one target. The latencies of different targets come from different minutes; here
all picks and the reference run in the same rounds, so that the order of the targets rests on one race. The engine
report gets the result in its headline.
"""

import html
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.core.errors import ArtifactError
from tasks.parts.engines.runtimes import CPU, CUDA
from tasks.parts.measuring.machine_state import Machine, measuring_environment, read_machine, read_machine_id
from tasks.parts.measuring.race import RaceOptions, engine_folder
from tasks.parts.measuring.reports import REFERENCE, Race, SpeedRatio
from tasks.parts.measuring.surroundings import Surroundings

if TYPE_CHECKING:
    from tasks.parts.selection.engine_row import EngineRow

logger = logging.getLogger(__name__)

Config = RaceOptions


@dataclass(frozen=True)
class RankedPick:
    """The pick of a target, and its speed in the race of all picks."""

    target: str
    variant: str
    engine_sha256: str
    vs_reference: SpeedRatio
    """How many times as fast as the reference engine."""
    lag: SpeedRatio | None
    """How many times as fast the fastest pick is; None for the fastest itself."""
    is_slower: bool
    """Whether it is certainly slower than the fastest pick. If not, noise hides which of the two is faster."""


@dataclass(frozen=True)
class Report:
    """The picks of this machine in order of speed at batch 1."""

    ranking: tuple[RankedPick, ...]
    """Fastest first; empty without a race."""
    elsewhere: dict[str, str]
    """Target -> id of the other machine that its pick was measured on."""
    race: Race | None
    """Its engines have the names of their targets. None if fewer than two picks were measured on this machine."""
    is_inconclusive: bool
    """Whether the A/A spread stayed above max_aa_spread: the machine was too noisy."""
    machine: Machine
    surroundings: Surroundings | None
    """None without a race."""


def environment(_: Config) -> dict[str, str]:
    """Return the machine."""
    return measuring_environment()


def measures(_: Config) -> bool:
    """Return True: while this runs, nothing else may be measured on this machine."""
    return True


def reads(_: Config, *, builds: Path, picks: Path, **_others: Path) -> dict[str, list[Path]]:
    """Return the engines that were picked."""
    from tasks.parts.selection.engine_row import read_picks

    rows = read_picks(picks)
    return {"builds": [engine_folder(builds, row.variant, target) for target, row in rows.items()]}


def race_picks(cfg: Config, *, builds: Path, picks: Path, page: Path, reference: Path, out: Path) -> Report:
    """Run the picks of this machine and the reference engine in the same rounds; write ranking.md and report.html.

    ``builds`` has a ``*`` in place of the variant and of the target: engine folders, and nothing beside them.
    ``picks`` and ``page`` are picks.json and report.html of select_engine; the written page is the same with the
    result of the race. A pick that was measured on another machine takes no part. Raises
    ArtifactError if a picked engine is not the file that was measured, or if a process dies.
    """
    from tasks.parts.engines.manifest import read_engine_manifest
    from tasks.parts.selection.engine_row import MACHINE, read_picks
    from tasks.parts.selection.headline import RACE_PENDING

    rows, machine_id = read_picks(picks), read_machine_id()
    measured_on = {target: row.conditions[MACHINE] for target, row in rows.items()}
    elsewhere = {target: found for target, found in measured_on.items() if found != machine_id}
    rows = {target: row for target, row in rows.items() if target not in elsewhere}
    engines = {target: engine_folder(builds, row.variant, target) for target, row in rows.items()}
    device = CPU
    for target, engine in engines.items():
        manifest = read_engine_manifest(engine)
        _check_measured(rows[target], manifest.sha256, engine)
        device = CUDA if manifest.target.device == CUDA else device
    race, surroundings = _race(cfg, engines, reference, device)
    ranking = _rank(race, rows) if race else ()
    is_inconclusive = race is not None and race.aa_ratio.spread > cfg.max_aa_spread
    headline = describe_race(ranking, elsewhere, race, is_inconclusive=is_inconclusive)
    (out / "ranking.md").write_text(_describe(headline, ranking, elsewhere), encoding="utf-8")
    shown = page.read_text(encoding="utf-8").replace(RACE_PENDING, html.escape(headline, quote=False))
    (out / "report.html").write_text(shown, encoding="utf-8")
    logger.info("race_picks: %d picks raced, %d measured on other machines", len(ranking), len(elsewhere))
    return Report(ranking, elsewhere, race, is_inconclusive, read_machine(device), surroundings)


def _check_measured(row: "EngineRow", sha256: str, engine: Path) -> None:
    if row.measured is None or sha256 != row.measured.engine_sha256:
        raise ArtifactError(
            f"{engine} holds the file {sha256 or '(none)'}, but another one was measured and picked. Select again: "
            "dvc repro select_engine."
        )


def _race(
    cfg: Config, engines: Mapping[str, Path], reference: Path, device: str
) -> tuple[Race | None, Surroundings | None]:
    from tasks.parts.measuring.engine_race import open_race

    if len(engines) < 2:
        return None, None
    with open_race(cfg, {REFERENCE: reference, **engines}, device=device) as race:
        return race.run(contenders=list(engines)).race, race.surroundings()


def _rank(race: Race, rows: Mapping[str, "EngineRow"]) -> tuple[RankedPick, ...]:
    fastest, *others = sorted(rows, key=lambda target: -race.ratio(target, REFERENCE).factor)
    ranking = []
    for target in (fastest, *others):
        row, lag = rows[target], race.ratio(fastest, target) if target != fastest else None
        assert row.measured is not None
        ranking.append(
            RankedPick(
                target=target,
                variant=row.variant,
                engine_sha256=row.measured.engine_sha256,
                vs_reference=race.ratio(target, REFERENCE),
                lag=lag,
                is_slower=lag is not None and lag.is_faster(race.smallest_difference),
            )
        )
    return tuple(ranking)


def describe_race(
    ranking: tuple[RankedPick, ...],
    elsewhere: Mapping[str, str],
    race: Race | None,
    *,
    is_inconclusive: bool,
) -> str:
    """Return which pick is the fastest, or why that is not known, in a sentence."""
    if race is None:
        return (
            f"Fewer than two picks were measured on this machine, so there was no race of picks: "
            f"{'which is the fastest is not known' if elsewhere else 'there is nothing to compare'}."
        )
    if is_inconclusive:
        return (
            "Which pick is the fastest is not known: the machine was too noisy in the race of the picks, two "
            f"processes of the same engine differed by up to {100 * race.aa_ratio.spread:.1f} %."
        )
    fastest, *others = ranking
    as_fast = [f"{pick.variant} on {pick.target}" for pick in others if not pick.is_slower]
    name = f"{fastest.variant} on {fastest.target}"
    speed = f"{_in_words(fastest.vs_reference)} as the reference"
    if as_fast:
        return (
            f"Noise hides which pick is the fastest: in one race of all picks {name} came first, {speed}, and "
            f"{' and '.join(as_fast)} {'is' if len(as_fast) == 1 else 'are'} not certainly slower."
        )
    second = others[0]
    assert second.lag is not None
    return (
        f"The fastest pick is {name}: in one race of all picks {speed}, and {_in_words(second.lag)} as "
        f"{second.variant} on {second.target}, the next one."
    )


def _describe(headline: str, ranking: tuple[RankedPick, ...], elsewhere: Mapping[str, str]) -> str:
    notes = [
        f"The pick of {target} took no part: it was measured on another machine ({machine_id})."
        for target, machine_id in elsewhere.items()
    ]
    return "\n\n".join([headline, *([_table(ranking)] if ranking else []), *notes]) + "\n"


def _table(ranking: tuple[RankedPick, ...]) -> str:
    lines = ["| target | pick | against the reference | the fastest pick is |", "|---|---|---|---|"]
    for pick in ranking:
        lag = "this one" if pick.lag is None else _in_words(pick.lag)
        noise = "" if pick.lag is None or pick.is_slower else ", within noise"
        lines.append(f"| {pick.target} | {pick.variant} | {_in_words(pick.vs_reference)} | {lag}{noise} |")
    return "\n".join(lines)


def _in_words(ratio: SpeedRatio) -> str:
    return f"{ratio.factor:.2f}x as fast ({ratio.low:.2f} to {ratio.high:.2f})"
