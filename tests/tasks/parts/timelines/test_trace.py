"""A trace holds what the Trace Event Format asks for."""

import itertools
import json

from tasks.parts.timelines.trace import Slice, Trace, Track, write_trace


def test_trace_has_names_and_complete_events_and_starts_at_zero(tmp_path):
    first, second = Slice("one", 1e9, 2.5, {"kind": "Conv"}), Slice("two", 1e9 + 2.5, 1.0)
    path = tmp_path / "new" / "trace.json"
    write_trace(path, Trace("engine", [Track("layers", [first, second])], {"note": "as measured"}))
    content = json.loads(path.read_text())
    assert content["otherData"] == {"note": "as measured"}
    named = {event["name"]: event["args"] for event in content["traceEvents"] if event["ph"] == "M"}
    assert named["process_name"] == {"name": "engine"} and named["thread_name"] == {"name": "layers"}
    assert [event for event in content["traceEvents"] if event["ph"] == "X"] == [
        {"ph": "X", "name": "one", "pid": 1, "tid": 1, "ts": 0.0, "dur": 2.5, "args": {"kind": "Conv"}},
        {"ph": "X", "name": "two", "pid": 1, "tid": 1, "ts": 2.5, "dur": 1.0, "args": {}},
    ]


def test_neighbours_do_not_overlap_after_rounding(tmp_path):
    """0.0006 + 0.0006 ends at 0.0012, but each rounded up to 0.001 would end at 0.002."""
    slices = [Slice(str(number), number * 0.0006, 0.0006) for number in range(100)]
    write_trace(tmp_path / "trace.json", Trace("engine", [Track("layers", slices)], {}))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["ph"] == "X"]
    assert all(end <= start + 1e-9 for (_, end), (start, _) in itertools.pairwise(spans))
