"""Run an engine, its variant's graph and the float graph side by side, and measure the tensors of all three."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import ModelProto
from polygraphy.comparator import Comparator
from polygraphy.logger import G_LOGGER

from tasks.parts.engines.manifest import GRAPH_FILE, EngineManifest, FloatArray
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.layer_diff.matching import (
    Match,
    Twinned,
    add_exact_twins,
    match_modules,
    match_tensors,
)
from tasks.parts.layer_diff.measures import PairSums
from tasks.parts.layer_diff.readers import (
    OpenvinoMarkedRunner,
    TensorrtDebugRunner,
    TorchHookedRunner,
    onnxruntime_runner,
    plain_runner,
)
from tasks.parts.layer_diff.table import Compared
from tasks.parts.onnx_graphs.graph import read_graph
from tasks.parts.onnx_graphs.signal_to_noise import MAX_SQNR_DB, sqnr_db


@dataclass
class _TensorSums:
    engine: PairSums = field(default_factory=PairSums)
    variant: PairSums = field(default_factory=PairSums)
    runtime: PairSums = field(default_factory=PairSums)
    own_noise: float | None = None

    def compared(self) -> Compared:
        has_variant = self.variant.histograms is not None
        return Compared(
            engine=self.engine.difference,
            variant=self.variant.difference if has_variant else None,
            runtime=self.runtime.difference if has_variant else None,
            own_sqnr_db=None if self.own_noise is None else sqnr_db(self.engine.signal, self.own_noise),
        )


@dataclass(frozen=True)
class Comparison:
    """Result of the passes over the images."""

    match: Match
    compared: dict[str, Compared]
    """Tensor of the float graph -> its differences, for tensors that match and have the same shape."""
    marked_logits: list[FloatArray]
    """Logits of the engine with readable tensors, one array per image."""

    @property
    def num_fused(self) -> int:
        """Count the tensors that are compared with the layer that they are fused into."""
        return sum(behind in self.compared for behind in self.match.fused.values())

    def own_sqnr_db(self, tensor: str) -> float:
        """Return the SQNR of the variant's layer that computes a tensor or fuses with it; MAX_SQNR_DB if unknown."""
        compared = self.compared.get(tensor) or self.compared.get(self.match.fused.get(tensor, ""))
        return MAX_SQNR_DB if compared is None or compared.own_sqnr_db is None else compared.own_sqnr_db


def compare(
    manifest: EngineManifest, engine: Path, model: Path, graph: ModelProto, images_NCHW: FloatArray
) -> Comparison:
    """Run all side by side, image by image; only one image's tensors are in memory at a time.

    `model` is the variant from which the engine was built. If it is the float graph itself or a checkpoint, the
    engine is compared only with the float graph.
    """
    image, logits = graph.graph.input[0].name, graph.graph.output[0].name
    num_threads = manifest.target.num_threads
    variant = None if manifest.target.runtime is Runtime.torch else read_graph(model)
    if variant == graph:
        variant = graph  # one in memory
    match, engine_runner = _open_engine(manifest, engine, variant, graph)
    names, runners = match.names, [engine_runner]
    twins, twinned = dict[str, str](), Twinned(graph, {}, {})
    if variant is not None and variant is not graph:
        in_variant = match_tensors(graph, variant).names
        twins = {name: in_variant[name] for name in names if name in in_variant}
        twinned = add_exact_twins(graph, variant, twins)
        shown = [name for name in twins.values() if name != image]
        runners.append(plain_runner(variant, shown, num_threads=num_threads, name="variant"))
    shown = [name for name in [*names, *twinned.noise_of.values()] if name != image]
    runners.append(
        plain_runner(twinned.graph, shown, num_threads=num_threads, name="float", large=twinned.large)
    )
    sums = {name: _TensorSums() for name in names}
    marked_logits: list[FloatArray] = []
    feeds = [{image: image_CHW[None]} for image_CHW in images_NCHW]
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL), _torch_left_alone():
        for results in Comparator.run(runners, data_loader=feeds, streaming=True):
            # Each runner has one iteration; reading by name loads the array.
            tensors = {
                runner: {name: iterations[0][name] for name in iterations[0]}
                for runner, iterations in results.items()
            }
            expected = {**tensors["float"], **feeds[len(marked_logits)]}
            engine_by_name, variant_by_name = (
                {name: tensors.get(runner, {}).get(twin) for name, twin in matched.items()}
                for runner, matched in (("engine", names), ("variant", twins))
            )
            _add(sums, expected, engine_by_name, variant_by_name)
            for name in twinned.noise_of.keys() & sums.keys():
                noise = float(expected[twinned.noise_of[name]])
                sums[name].own_noise = (sums[name].own_noise or 0.0) + noise
            marked_logits.append(tensors["engine"][names[logits]].copy())
            del results, tensors, expected, engine_by_name, variant_by_name  # before the next image runs
    return Comparison(
        match, {name: tensor_sums.compared() for name, tensor_sums in sums.items()}, marked_logits
    )


def _open_engine(
    manifest: EngineManifest, engine: Path, variant: ModelProto | None, graph: ModelProto
) -> tuple[Match, Any]:
    """Return the tensors of the float graph that the engine exposes, and the runner that reads them."""
    if variant is None:
        match = match_modules(graph)
        return match, TorchHookedRunner(engine / manifest.file, match.names, graph, manifest)
    is_graph = manifest.target.compiler is Runtime.onnxruntime
    encoded = read_graph(engine / (manifest.file if is_graph else GRAPH_FILE))
    match = match_tensors(graph, encoded)
    if manifest.target.tensorrt is not None:
        return match, TensorrtDebugRunner(encoded, match.names, manifest)
    shown = [name for name in match.names.values() if name != graph.graph.input[0].name]
    if manifest.target.compiler is Runtime.onnxruntime:
        return match, onnxruntime_runner(encoded, shown, manifest)
    return match, OpenvinoMarkedRunner(encoded, shown, manifest)


def _add(
    sums: dict[str, _TensorSums],
    expected: Mapping[str, Any],
    engine: Mapping[str, Any],
    variant: Mapping[str, Any],
) -> None:
    """Add one image; drop tensors that are missing, have another shape or are not floats."""
    for name in list(sums):
        a, b, c = expected.get(name), engine.get(name), variant.get(name)
        if a is None or b is None or a.shape != b.shape or a.dtype.kind != "f" or a.ndim < 2:
            del sums[name]
            continue
        sums[name].engine.add(a, b)
        if c is not None:
            sums[name].variant.add(a, c)
            sums[name].runtime.add(c, b)


@contextlib.contextmanager
def _torch_left_alone() -> Iterator[None]:
    """Keep Polygraphy from importing torch (over a second) only to check whether an array is a tensor."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own way to say: not importable
    try:
        yield
    finally:
        del sys.modules["torch"]
