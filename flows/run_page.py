"""What the page of a Prefect run shows besides its logs: the engines, the progress, the link to MLflow."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.events import emit_event

from tasks import track
from tasks.core.execute import ARTIFACTS
from tasks.core.reports import read_report
from tasks.core.tracking.config import experiments_page, tracking_config
from tasks.parts.selection.headline import RACE_PENDING
from tasks.select_engine import Report

_PICTURES = re.compile(r"!\[[^]]*\]\([^)]*\)\n*")  # image files beside the report, which the page cannot show

GATE_FAILED_EVENT = "enginewright.gate-failed"
"""The event that is sent for each target without a pick, for automations that notify people."""


def publish_result(
    folder: Path, ranking: Path, params: Mapping[str, Any], outcomes: Mapping[str, str]
) -> None:
    """Attach the engine report, the race of the picks and the outcome of each target to the run.

    Sends an event per target without a pick.
    """
    result = read_report(Report, folder)
    race = (ranking / "ranking.md").read_text(encoding="utf-8")
    report = _PICTURES.sub("", (folder / "report.md").read_text(encoding="utf-8"))
    report = report.replace(RACE_PENDING, race.partition("\n")[0])
    pools = "".join(f"- {target}: {words}\n" for target, words in outcomes.items())
    create_markdown_artifact(key="engines", markdown=f"{pools}\n{report}" if pools else report)
    create_markdown_artifact(key="picks", markdown=race)
    tracking = tracking_config(params)
    if tracking.enabled and (page := experiments_page(tracking.uri)):
        run = read_report(track.Report, ARTIFACTS / "track").run
        link = f"{page}/{run}" if run else page
        create_link_artifact(key="mlflow", link=link, link_text="MLflow")
    for target, reason in result.without_pick.items():
        emit_event(
            GATE_FAILED_EVENT,
            resource={"prefect.resource.id": f"enginewright.target.{target}"},
            payload={"reason": reason},
        )


def publish_progress() -> Callable[[int, int], None]:
    """Attach a progress bar to the run; return the function that sets it from the stages done and all stages."""
    bar = create_progress_artifact(progress=0.0, key="stages", description="stages done")
    assert isinstance(bar, UUID)  # not a coroutine

    is_moving = True

    def move(num_done: int, num_all: int) -> None:
        nonlocal is_moving
        if is_moving:
            try:
                update_progress_artifact(bar, progress=100.0 * num_done / num_all)
            except httpx.HTTPError:  # after a minute of attempts; the flow goes on while its server is down
                is_moving = False

    return move
