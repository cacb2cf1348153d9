"""Write slices of time in the Trace Event Format of Chrome, which Perfetto (https://ui.perfetto.dev) opens."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PROCESS = 1
_NS_DIGITS = 3
"""Digits of a microsecond that are kept."""


@dataclass(frozen=True)
class Slice:
    """Something that took some time."""

    name: str
    start_us: float
    duration_us: float
    details: Mapping[str, Any] = field(default_factory=dict)
    """What Perfetto shows of the slice when it is clicked on."""

    @property
    def end_us(self) -> float:
        """When it ended."""
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class Track:
    """A row of slices that do not overlap."""

    name: str
    slices: Sequence[Slice]


@dataclass(frozen=True)
class Trace:
    """The tracks of one process, from the top."""

    process: str
    tracks: Sequence[Track]
    notes: Mapping[str, str]
    """What has to be known to read it; Perfetto lists it under "Info and stats"."""


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace whose first slice starts at 0; folders on the way are made."""
    origin_us = min((each.start_us for track in trace.tracks for each in track.slices), default=0.0)
    events: list[dict[str, Any]] = [_named("process_name", 0, name=trace.process)]
    for place, track in enumerate(trace.tracks, start=1):
        events += [
            _named("thread_name", place, name=track.name),
            _named("thread_sort_index", place, sort_index=place),
        ]
        events += [_event(each, place, origin_us) for each in track.slices]
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(trace.notes)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")


def _named(kind: str, track: int, **names: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": _PROCESS, "tid": track, "args": names}


def _event(each: Slice, track: int, origin_us: float) -> dict[str, Any]:
    """Round both ends, not the duration, so that neighbours do not overlap."""
    start_us = round(each.start_us - origin_us, _NS_DIGITS)
    end_us = round(each.end_us - origin_us, _NS_DIGITS)
    return {
        "ph": "X",
        "name": each.name,
        "pid": _PROCESS,
        "tid": track,
        "ts": start_us,
        "dur": round(end_us - start_us, _NS_DIGITS),
        "args": dict(each.details),
    }
