"""Table of the layers of an engine beside those of its float graph."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.parts.onnx_graphs.signal_to_noise import MAX_SQNR_DB

if TYPE_CHECKING:
    from onnx import ModelProto


@dataclass(frozen=True)
class Difference:
    """How two versions of one tensor differ over all compared images."""

    sqnr_db: float
    """10 log10(signal power / noise power)."""
    cosine: float
    max_abs: float
    """Largest absolute difference of one value; the largest float32 if it is not finite."""
    histogram_overlap: float
    """Intersection of the two normalised histograms over common bins (Swain & Ballard, "Color indexing", IJCV 7,
    1991): 1 for equal distributions, 0 for disjoint ones. It separates a shifted or clipped tensor from a noisy
    one."""


@dataclass(frozen=True)
class Compared:
    """All measurements of one tensor."""

    engine: Difference
    """The engine against the float graph."""
    variant: Difference | None
    """The variant's graph against the float graph; None if it is the float graph, or has no such tensor."""
    runtime: Difference | None
    """The engine against the variant's graph; None as above."""
    own_sqnr_db: float | None
    """The variant's layer against the float one, both fed the exact inputs; None as above."""


@dataclass(frozen=True)
class Layer:
    """One compared tensor and the node that computes it."""

    node: str
    op_type: str
    tensor: str
    module: str
    """Dotted torch module; empty if the graph does not name it."""
    source: str
    """file:line; empty if the graph does not name it."""
    sqnr_db: float
    """The engine against the float graph, like the next three: what precision and runtime changed so far."""
    cosine: float
    max_abs: float
    histogram_overlap: float
    input_sqnr_db: float
    """SQNR of the noisiest input."""
    added_noise: float
    """Rise of noise power / signal power from input to output: an estimate of what this layer adds itself."""
    own_sqnr_db: float | None
    """SQNR of the variant's layer fed with exact inputs: what it adds itself; None if the variant is float."""
    variant: Difference | None
    """The variant's graph against the float graph: what precision alone changed so far. None as above."""
    runtime: Difference | None
    """The engine against the variant's graph: what the runtime alone changed so far. None as above."""


def list_layers(graph: "ModelProto", compared: Mapping[str, Compared]) -> list[Layer]:
    """Return one Layer per compared tensor of the float graph, in its order, the logits last."""
    from tasks.parts.onnx_graphs.graph import node_sources

    sources = node_sources(graph)
    image, logits = graph.graph.input[0].name, graph.graph.output[0].name
    nearest: dict[str, float] = {image: compared[image].engine.sqnr_db if image in compared else MAX_SQNR_DB}
    layers: list[Layer] = []
    if image in compared and compared[image].engine.max_abs > 0:
        layers.append(_layer("", "Input", image, ("", ""), compared[image], MAX_SQNR_DB))
    for node in graph.graph.node:
        known = [nearest[name] for name in node.input if name in nearest]
        if not known:
            continue
        tensor = node.output[0]
        if tensor in compared:
            origin = sources.get(node.name, ("", ""))
            layers.append(_layer(node.name, node.op_type, tensor, origin, compared[tensor], min(known)))
            nearest.update(dict.fromkeys(node.output, compared[tensor].engine.sqnr_db))
        else:
            nearest.update(dict.fromkeys(node.output, min(known)))
    layers.sort(key=lambda layer: layer.tensor == logits)
    return layers


def _layer(
    node: str, op_type: str, tensor: str, origin: tuple[str, str], compared: Compared, input_sqnr_db: float
) -> Layer:
    difference = compared.engine
    added = 10 ** (-difference.sqnr_db / 10) - 10 ** (-input_sqnr_db / 10)
    return Layer(
        node=node,
        op_type=op_type,
        tensor=tensor,
        module=origin[0],
        source=origin[1],
        sqnr_db=difference.sqnr_db,
        cosine=difference.cosine,
        max_abs=difference.max_abs,
        histogram_overlap=difference.histogram_overlap,
        input_sqnr_db=input_sqnr_db,
        added_noise=max(0.0, added),
        own_sqnr_db=compared.own_sqnr_db,
        variant=compared.variant,
        runtime=compared.runtime,
    )


def find_suspects(layers: Sequence[Layer], *, collapse_db: float) -> tuple[Layer | None, Layer | None]:
    """Return the first layer below `collapse_db`, and the one that adds most noise itself.

    The second is measured with exact inputs if the variant is not the float graph, otherwise by the rise of noise.
    """
    first = next((layer for layer in layers if layer.sqnr_db < collapse_db), None)
    fed_exactly = [layer for layer in layers if layer.own_sqnr_db is not None]
    if fed_exactly:
        worst = min(fed_exactly, key=lambda layer: (layer.own_sqnr_db, -layer.added_noise))
        return first, worst if worst.own_sqnr_db != MAX_SQNR_DB else None
    worst = max(layers, key=lambda layer: layer.added_noise)
    return first, worst if worst.added_noise > 0 else None


def write_layers(path: Path, layers: Sequence[Layer]) -> None:
    """Write one row per layer; each measure of a comparison has its own column, such as `variant_sqnr_db`."""
    nested = ("variant", "runtime")
    names = [field.name for field in fields(Layer) if field.name not in nested]
    measures = [field.name for field in fields(Difference)]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(
            [*names, *(f"{comparison}_{measure}" for comparison in nested for measure in measures)]
        )
        for layer in layers:
            values = [getattr(layer, name) for name in names]
            values += [
                getattr(getattr(layer, comparison), measure, None)
                for comparison in nested
                for measure in measures
            ]
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in values])
