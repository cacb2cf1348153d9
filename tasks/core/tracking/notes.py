"""The descriptions of runs on MLflow's page: how to go on from a curve or an engine to code, data and bytes."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from tasks.core.tracking.records import RunRecord

_BYTES = (
    "Bytes: `key.json` of a training's run names the md5 of every file of its output; DVC's cache holds the file as "
    "`.dvc/cache/files/md5/<first 2 digits>/<the others>`."
)
_ENGINE = "`python -m flows.reproduce <engine_sha256>`"

_MAX_LINES, _MAX_NAMES, _MAX_CHARS = 20, 10, 40
"""Of changes, of names in one of them, and of a value: MLflow cuts a description after 5,000 characters."""
_ABSENT = "none"


@dataclass(frozen=True)
class Origin:
    """What the run of a pipeline was made from, and the engines that came of it."""

    commit: str
    data_digest: str
    params: Mapping[str, str]
    trainings: Mapping[str, str]
    """Key by address."""
    engines: Mapping[str, str]
    """The sha256 of each engine that was built, by the name of its run."""


def training_tag(address: str) -> str:
    """Return the tag of a pipeline's run that holds the key of one of its trainings."""
    return f"key_{address}"


def describe_training(address: str, key: str, commit: str) -> str:
    """Describe the run of a training."""
    return "\n\n".join(
        (
            f"Code: commit `{commit}`. Configuration: the parameters. Data: the input, whose digest is DVC's md5.",
            _BYTES,
            f"Pipelines with it: runs with ``tags.`{training_tag(address)}` = '{key}'``; none if an earlier run has "
            "the same engines, which are logged once. Their child runs are the engines; the tag `engine_sha256` is "
            f"that of the file. To build one again: {_ENGINE}.",
        )
    )


def describe_pipeline(pipeline: RunRecord, changes: str = "") -> str:
    """Describe the run of a pipeline."""
    parts = [
        f"Code: commit `{pipeline.commit}`. Configuration: the parameters, and `params.yaml`. Data: the input, whose "
        "digest is DVC's md5.",
        f"Engines: the child runs; the tag `engine_sha256` is that of the file. To build one again: {_ENGINE}.",
    ]
    if pipeline.trainings:
        trainings = [
            f"- {name}: ``tags.`key` = '{key}'``" for name, key in sorted(pipeline.trainings.items())
        ]
        shown = "Trainings, by the filter of their runs (one of a few seconds has none):"
        parts += ["\n".join((shown, *trainings)), _BYTES]
    return "\n\n".join((*parts, *([changes] if changes else [])))


def describe_changes(run_id: str, before: Origin, now: Origin) -> str:
    """Describe what is different from the previous run of a pipeline."""
    lines = list(_changes(before, now))
    if not lines:
        return (
            f"Changed since the run `{run_id}`: no code, data, parameter or engine, only what was measured."
        )
    if len(lines) > _MAX_LINES:
        more = f"and {len(lines) - _MAX_LINES + 1} other parameters"
        lines = [*lines[: _MAX_LINES - 1], more]
    return "\n".join((f"Changed since the run `{run_id}`:", *(f"- {line}" for line in lines)))


def _changes(before: Origin, now: Origin) -> Iterator[str]:
    if before.commit != now.commit:
        yield f"commit `{before.commit}` -> `{now.commit}`"
    if before.data_digest != now.data_digest:
        yield f"data digest `{before.data_digest}` -> `{now.data_digest}`"
    if trainings := _different(before.trainings, now.trainings):
        yield f"trainings with another key: {_listed(trainings)}"
    engines = _different(before.engines, now.engines)
    for kind, names in (
        (
            "engines with other bytes",
            [name for name in engines if name in before.engines and name in now.engines],
        ),
        ("new engines", [name for name in engines if name not in before.engines]),
        ("engines no longer there", [name for name in engines if name not in now.engines]),
    ):
        if names:
            yield f"{kind}: {_listed(names)}"
    for name in _different(before.params, now.params):
        yield f"`{name}`: {_short(before.params.get(name))} -> {_short(now.params.get(name))}"


def _different(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


def _listed(names: Collection[str]) -> str:
    shown = [f"`{name}`" for name in list(names)[:_MAX_NAMES]]
    return ", ".join(shown) + (f" and {len(names) - _MAX_NAMES} others" if len(names) > _MAX_NAMES else "")


def _short(value: str | None) -> str:
    if value is None:
        return _ABSENT
    return f"`{value if len(value) <= _MAX_CHARS else value[: _MAX_CHARS - 3] + '...'}`"
