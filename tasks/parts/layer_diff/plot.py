"""Plot how the error grows from layer to layer."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tasks.parts.layer_diff.table import Layer
from tasks.parts.onnx_graphs.signal_to_noise import MAX_SQNR_DB

_RED, _BROWN = "#b3261e", "#b06000"


def plot_growth(
    path: Path,
    layers: Sequence[Layer],
    *,
    title: str,
    collapse_db: float,
    first_collapse: Layer | None,
    largest_own_drop: Layer | None,
) -> None:
    """Plot SQNR over depth: the error accumulated up to each layer, and what the layer adds itself."""
    figure = Figure(figsize=(min(24, max(9, 0.16 * len(layers) + 3)), 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sqnr_db = [layer.sqnr_db for layer in layers]
    axes.plot(range(len(layers)), sqnr_db, color="#8a97a8", linewidth=1, zorder=1)
    is_conv = ["Conv" in layer.op_type or layer.op_type == "Gemm" for layer in layers]
    for wanted, colour, label in ((True, "#1f5fa8", "convolution"), (False, "#9fb8d6", "other layer")):
        points = [index for index, is_wanted in enumerate(is_conv) if is_wanted is wanted]
        axes.scatter(points, [sqnr_db[index] for index in points], s=22, color=colour, label=label, zorder=2)
    _draw_variant(axes, layers)
    axes.axhline(collapse_db, color=_RED, linestyle="--", linewidth=1, label=f"collapse, {collapse_db:g} dB")
    for layer, what, colour, height in (
        (first_collapse, "first collapse", _RED, 0.10),
        (largest_own_drop, "largest own drop", _BROWN, 0.93),
    ):
        if layer is not None:
            _annotate(axes, layers.index(layer), layer, what, colour, height)
    step = max(1, math.ceil(len(layers) / 60))
    ticks = range(0, len(layers), step)
    labels = [layers[index].module or layers[index].node or layers[index].op_type for index in ticks]
    axes.set_xticks(list(ticks), [label[-32:] for label in labels], rotation=90, fontsize=7)
    axes.set_ylabel("SQNR against the float graph (dB)")
    axes.set_title(title)
    axes.grid(axis="y", alpha=0.3)
    axes.margins(y=0.18)
    figure.legend(loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": ""})


def _draw_variant(axes: Any, layers: Sequence[Layer]) -> None:
    """Add the effect of precision alone: the variant's graph, and its layers fed with exact inputs."""
    points = [(index, layer.variant.sqnr_db) for index, layer in enumerate(layers) if layer.variant]
    if points:
        label = "the graph alone, without the runtime"
        axes.plot(*zip(*points, strict=True), color="#2e7d4f", linewidth=1, linestyle=":", label=label)
    own = [
        (index, layer.own_sqnr_db)
        for index, layer in enumerate(layers)
        if layer.own_sqnr_db is not None and layer.own_sqnr_db < MAX_SQNR_DB
    ]
    if own:
        label = "the layer alone, fed with exact inputs"
        axes.scatter(*zip(*own, strict=True), s=26, color=_BROWN, marker="_", label=label, zorder=2)


def _annotate(axes: Any, index: int, layer: Layer, what: str, colour: str, height: float) -> None:
    name = " ".join(part for part in (layer.module or layer.node or layer.tensor, layer.source) if part)
    own = "" if layer.own_sqnr_db is None else f", {layer.own_sqnr_db:.1f} dB of its own"
    is_right = index > axes.get_xlim()[1] / 2
    axes.annotate(
        f"{what}: {name}\n{layer.input_sqnr_db:.1f} dB in, {layer.sqnr_db:.1f} dB out{own}",
        xy=(index, layer.sqnr_db),
        xytext=(0.35 if is_right else 0.05, height),
        textcoords="axes fraction",
        fontsize=8,
        color=colour,
        va="center",
        arrowprops={"arrowstyle": "->", "color": colour},
    )
