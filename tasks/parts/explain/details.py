"""What the engine report shows of a target: the layers of its engines under the roofs, and each two engines compared.

Names, operators and sources of layers occur in every engine, so they are written once and referred to by number.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.parts.explain.engine_view import EngineView
from tasks.parts.explain.layers import ExplainedLayer
from tasks.parts.explain.report import EngineExplanation, explain_pair
from tasks.parts.explain.waterfall import Part, Step, compare
from tasks.parts.measuring.reports import BenchmarkReport
from tasks.parts.roofs.roofs import Roofs

DETAILS_FILE = "details.json"

_MOST_ENGINES = 30
"""Engines whose layers are written: the fastest ones. Each two of them are compared."""
_MOST_CAUSES = 6
_LAYER_FIELDS = (
    "layer",
    "operators",
    "precision",
    "milliseconds",
    "bound",
    "macs",
    "bytes",
    "attainable_ms",
    "is_conversion",
    "module",
    "source",
)


class _Names:
    """Numbers for texts that occur more than once."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}

    def number(self, text: str) -> int:
        return self.texts.setdefault(text, len(self.texts))


def write_details(
    folder: Path,
    explained: Mapping[str, EngineExplanation],
    views: Mapping[str, EngineView],
    roofs: Roofs,
    measured: BenchmarkReport,
) -> None:
    """Write details.json: roofs, layers of each engine and the steps between each two engines.

    Of identical files, which are one engine, only the first is in it. Of two engines, "before" is the one in higher
    precision, else the slower one.
    """
    names = _Names()
    by_file: dict[str, EngineView] = {}
    for view in views.values():
        by_file.setdefault(view.manifest.sha256, view)
    fastest = sorted(by_file.values(), key=lambda view: view.latency_ms)[:_MOST_ENGINES]
    ordered = sorted(fastest, key=lambda view: (view.manifest.is_quantized, -view.latency_ms))
    pairs = [_pair(before, after, measured) for before, after in itertools.combinations(ordered, 2)]
    engines = {view.name: _engine(explained[view.name], view, names) for view in ordered}
    details = {
        "same_file": {view.name: by_file[view.manifest.sha256].name for view in views.values()},
        "roofs": _roofs(roofs),
        "layer_fields": _LAYER_FIELDS,
        "parts": [part.value for part in Part],
        "engines": engines,
        "pairs": pairs,
        "texts": list(names.texts),
    }
    text = json.dumps(details, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    (folder / DETAILS_FILE).write_text(text + "\n", encoding="utf-8")


def _roofs(roofs: Roofs) -> dict[str, Any]:
    return {
        "macs_per_s": {roof.name: _short(roof.macs_per_s.value) for roof in roofs.compute},
        "bytes_per_s": [[roof.working_set_bytes, _short(roof.bytes_per_s.value)] for roof in roofs.memory],
        "layer_ms": roofs.layer_ms.value if roofs.layer_ms else None,
        "call_ms": roofs.call_ms.value if roofs.call_ms else None,
        "machine": roofs.machine.cpu_model,
        "num_threads": roofs.num_threads,
    }


def _engine(explained: EngineExplanation, view: EngineView, names: _Names) -> dict[str, Any]:
    return {
        "latency_ms": _short(explained.latency_ms),
        "call_ms": _short(explained.call_ms),
        "remainder_ms": _short(explained.remainder_ms),
        "attainable_ms": _short(explained.attainable_ms),
        "share_by_bound": {name: _short(share) for name, share in explained.share_by_bound.items()},
        "layers": [_layer(row, view, names) for row in view.rows],
        "causes": [
            [str(cause.kind), cause.layer, cause.detail, _short(cause.milliseconds)]
            for cause in explained.causes[:_MOST_CAUSES]
        ],
        "num_causes": len(explained.causes),
    }


def _layer(row: ExplainedLayer, view: EngineView, names: _Names) -> list[Any]:
    """Return the values of `_LAYER_FIELDS`, with numbers for texts."""
    moved = sum(size or 0 for size in (row.input_bytes, row.weight_bytes, row.output_bytes))
    return [
        names.number(row.layer),
        names.number(row.operators or row.kind),
        names.number(row.precision),
        _short(row.milliseconds),
        names.number(str(row.bound)),
        row.macs,
        moved,
        _short(row.attainable_ms),
        int(row.is_conversion),
        names.number(row.module),
        names.number(row.source),
    ]


def _pair(before: EngineView, after: EngineView, measured: BenchmarkReport) -> dict[str, Any]:
    steps = compare(before, after)
    found = explain_pair(before, after, steps, measured)
    places = [{layer.name: place for place, layer in enumerate(view.layers)} for view in (before, after)]
    return {
        "before": before.name,
        "after": after.name,
        "advice": found.advice,
        "parts_ms": [_short(value) for value in found.parts_ms.values()],
        "steps": [_step(step, places) for step in steps if step.before or step.after],
    }


def _step(step: Step, places: Sequence[Mapping[str, int]]) -> list[Any]:
    """Return the number of the part, the numbers of the layers before and after, and the difference in ms."""
    layers = [
        [place[name] for name in names.split("\t") if name]
        for place, names in zip(places, (step.before, step.after), strict=True)
    ]
    return [list(Part).index(step.part), *layers, _short(step.milliseconds)]


def _short(value: float | None) -> float | None:
    """Return a number with four significant digits."""
    return None if value is None else float(f"{value:.4g}")
