"""Find where an engine loses accuracy: every layer's output against the float graph's, on a few real images.

SQNR of a layer is 10 log10(signal power / noise power) of its output, in dB; the noise of all layers before
it is in it. What a layer adds itself is the rise of noise / signal over its noisiest input.
"""

import contextlib
import csv
import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.core.errors import ArtifactError, ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from onnx import ModelProto
    from torch import nn

    from tasks.parts.runners.contract import EngineManifest, FloatArray

logger = logging.getLogger(__name__)

MAX_SQNR_DB = 120.0
"""Given for tensors that are equal to the last bit of float32."""

_FUSED_BEFORE_QUANTIZE = {"Relu", "Clip"}
_MARKING = {
    "onnxruntime": (
        "Compared tensors are marked as outputs, so the runtime cannot fuse over them and float layers run "
        "one by one. In Q/DQ regions only dequantised tensors are marked, so convolutions keep their int8 "
        "kernels, and a convolution is judged behind its activation. marked_agreement_db tells how far this "
        "is from the engine file."
    ),
    "openvino": (
        "The variant's graph is compiled again with the target's options and the compared tensors as "
        "outputs. The compiler cannot fuse over them; in Q/DQ regions only dequantised tensors are marked, "
        "so that int8 stays. marked_agreement_db tells how far this compilation is from the engine file."
    ),
    "torch": (
        "Eager PyTorch fuses nothing; hooks read the output of each convolution, behind its BatchNorm where "
        "the graph has that folded."
    ),
}


@dataclass(frozen=True)
class Config:
    """What `diff_layers` reads from params.yaml."""

    split: str
    """Split that the images come from. The default, calibration, keeps the test split unseen."""
    num_images: int
    """Images that are compared, evenly spread over the split. More: steadier numbers, slower."""
    collapse_db: float
    """A layer whose SQNR is below this has collapsed: 10 dB is noise of a third of the signal's amplitude."""

    def __post_init__(self) -> None:
        """Raise ConfigError for impossible values."""
        if self.split not in ("train", "val", "test", "calibration"):
            allowed = "train, val, test, calibration"
            raise ConfigError(f"diff_layers.split is {self.split!r}, allowed: {allowed}.")
        if self.num_images < 1:
            raise ConfigError(f"diff_layers.num_images is {self.num_images}, allowed: 1 or more.")
        if not 0 <= self.collapse_db <= MAX_SQNR_DB:
            raise ConfigError(
                f"diff_layers.collapse_db is {self.collapse_db}, allowed: 0..{MAX_SQNR_DB:g} dB."
            )


@dataclass(frozen=True)
class Layer:
    """One compared tensor and the node that makes it."""

    node: str
    op_type: str
    tensor: str
    module: str
    """Dotted torch module; empty if the graph does not say."""
    source: str
    """file:line; empty if the graph does not say."""
    sqnr_db: float
    cosine: float
    input_sqnr_db: float
    """Of the noisiest input."""
    added_noise: float
    """Rise of noise power / signal power from input to output: what this layer adds itself."""


@dataclass(frozen=True)
class Report:
    """The layers to look at first; None where there is no engine."""

    status: str
    """"built", or why there was nothing to compare: "skipped", "failed"."""
    reason: str
    engine_sha256: str
    num_images: int
    num_layers: int
    logits_sqnr_db: float | None
    logits_cosine: float | None
    worst_sqnr_db: float | None
    first_collapse: Layer | None
    """First layer in graph order below diff_layers.collapse_db; None if none is."""
    largest_own_drop: Layer | None
    """Layer that adds most noise relative to its signal; None if none adds any."""
    marking: str
    """What reading the layers changes about the engine."""
    marked_agreement_db: float | None
    """SQNR of the logits of the engine file against those of the run with marked layers."""


@dataclass
class _Sums:
    """Running sums over images, for one tensor."""

    signal: float = 0.0
    noise: float = 0.0
    product: float = 0.0
    found: float = 0.0

    def add(self, expected: "NDArray[np.float32]", found: "NDArray[np.float32]") -> None:
        import numpy as np

        a, b = expected.ravel().astype(np.float64), found.ravel().astype(np.float64)
        # einsum and not @: the threads of BLAS would fight with those of the runtimes.
        self.signal += float(np.einsum("i,i", a, a))
        self.found += float(np.einsum("i,i", b, b))
        self.product += float(np.einsum("i,i", a, b))
        a -= b
        self.noise += float(np.einsum("i,i", a, a))

    @property
    def sqnr_db(self) -> float:
        if self.noise == 0:
            return MAX_SQNR_DB
        if self.signal == 0 or not math.isfinite(self.noise):
            return -MAX_SQNR_DB
        return max(-MAX_SQNR_DB, min(MAX_SQNR_DB, 10 * math.log10(self.signal / self.noise)))

    @property
    def cosine(self) -> float:
        norm = math.sqrt(self.signal * self.found)
        if not math.isfinite(norm):
            return 0.0
        return self.product / norm if norm > 0 else float(self.noise == 0)


@dataclass(frozen=True)
class _Comparison:
    """Float tensor name -> sums; the last one is the logits."""

    sums: dict[str, _Sums] = field(default_factory=dict)
    marked_logits: list["FloatArray"] = field(default_factory=list)


def diff_layers(
    cfg: Config, *, engine: Path, model: Path, float_graph: Path, data: Path, out: Path
) -> Report:
    """Write `layers.csv` and `layers.png`, and name the layers at which `engine` departs from `float_graph`.

    `model` is what the engine was built from. An engine that was skipped or failed gives a report with that
    status; one of TensorRT, whose tensors are not read yet, is skipped. Raises ArtifactError when graph and engine
    have no tensors in common.
    """
    from tasks.parts.onnx_graph import read_graph
    from tasks.parts.runners.contract import read_engine_manifest

    manifest = read_engine_manifest(engine)
    if not manifest.is_built:
        logger.warning("diff_layers: %s has no engine: %s", engine, manifest.reason)
        return _report_without_layers(manifest.status, manifest.reason)
    if manifest.target.runtime not in _MARKING:
        reason = f"the tensors inside an engine of {manifest.target.runtime} are not read yet"
        logger.warning("diff_layers: %s", reason)
        return _report_without_layers("skipped", reason)
    logger.info(
        "diff_layers: %s of target %s, %d images", manifest.file, manifest.target.name, cfg.num_images
    )
    graph = read_graph(float_graph)
    images_NCHW = _read_images(cfg, manifest, data)
    comparison = _compare(manifest, engine, model, graph, images_NCHW)
    layers = rank_layers(graph, comparison.sums)
    _write_layers(layers, out / "layers.csv")
    first_collapse, largest_own_drop = find_guilty(layers, collapse_db=cfg.collapse_db)
    _plot_layers(layers, cfg.collapse_db, first_collapse, largest_own_drop, manifest, out / "layers.png")
    agreement_db = _agreement_with_engine(engine, images_NCHW, comparison.marked_logits)
    logits = layers[-1]
    logger.info("diff_layers: %d layers, logits at %.1f dB", len(layers), logits.sqnr_db)
    return Report(
        status=manifest.status,
        reason="",
        engine_sha256=manifest.sha256,
        num_images=len(images_NCHW),
        num_layers=len(layers),
        logits_sqnr_db=logits.sqnr_db,
        logits_cosine=logits.cosine,
        worst_sqnr_db=min(layer.sqnr_db for layer in layers),
        first_collapse=first_collapse,
        largest_own_drop=largest_own_drop,
        marking=_MARKING[manifest.target.runtime],
        marked_agreement_db=agreement_db,
    )


def _report_without_layers(status: str, reason: str) -> Report:
    return Report(status, reason, "", 0, 0, None, None, None, None, None, "", None)


def _read_images(cfg: Config, manifest: "EngineManifest", data: Path) -> "FloatArray":
    import numpy as np

    from tasks.parts.data import normalise
    from tasks.parts.truth import open_images

    images_NHWC = open_images(data, cfg.split)
    picked = np.unique(np.linspace(0, len(images_NHWC) - 1, cfg.num_images).astype(int))
    return normalise(images_NHWC[picked], manifest.card.mean, manifest.card.std)


def _compare(
    manifest: "EngineManifest", engine: Path, model: Path, graph: "ModelProto", images_NCHW: "FloatArray"
) -> _Comparison:
    """Run float graph and engine side by side, one image at a time, and sum up over the tensors of both."""
    from polygraphy.backend.onnxrt import OnnxrtRunner
    from polygraphy.comparator import Comparator
    from polygraphy.logger import G_LOGGER

    from tasks.parts.encoding import encode_for
    from tasks.parts.onnx_graph import read_graph
    from tasks.parts.runners.onnxruntime import open_session

    image, logits = graph.graph.input[0].name, graph.graph.output[0].name
    num_threads = manifest.target.num_threads
    if manifest.target.runtime == "torch":
        names = match_modules(graph)
        found_runner = _torch_runner(engine / manifest.file, num_threads, image, logits, [*names.values()])
    else:
        is_onnx = manifest.target.runtime == "onnxruntime"
        variant = (
            read_graph(engine / manifest.file) if is_onnx else encode_for(manifest.target, read_graph(model))
        )
        names = match_tensors(graph, variant)
        marked = mark(variant, [name for name in names.values() if name != image])
        if is_onnx:
            found_runner = OnnxrtRunner(
                lambda: open_session(marked, provider=manifest.provider, num_threads=num_threads),
                name="engine",
            )
        else:
            found_runner = _openvino_runner(marked, manifest)
    float_marked = mark(graph, [name for name in names if name != image])
    float_runner = OnnxrtRunner(
        lambda: open_session(
            float_marked, provider="CPUExecutionProvider", num_threads=num_threads, is_optimised=False
        ),
        name="float",
    )
    comparison = _Comparison({name: _Sums() for name in names})
    feeds = [{image: one[None]} for one in images_NCHW]
    with G_LOGGER.verbosity(G_LOGGER.CRITICAL), _torch_left_alone():
        for results in Comparator.run([float_runner, found_runner], data_loader=feeds, streaming=True):
            # Each runner's one iteration; reading by name loads the array.
            expected, found = (
                {name: iterations[0][name] for name in iterations[0]} for _, iterations in results.items()
            )
            feed = feeds[len(comparison.marked_logits)]
            _add(comparison.sums, names, {**expected, image: feed[image]}, found)
            comparison.marked_logits.append(found[names[logits]].copy())
    return comparison


@contextlib.contextmanager
def _torch_left_alone() -> Iterator[None]:
    """Keep Polygraphy from importing torch, for more than a second, only to ask whether an array is a tensor."""
    if "torch" in sys.modules:
        yield
        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's own way to say: not importable
    try:
        yield
    finally:
        del sys.modules["torch"]


def _add(
    sums: dict[str, _Sums], names: Mapping[str, str], expected: Mapping[str, Any], found: Mapping[str, Any]
) -> None:
    """Add one image; tensors that are absent, of another shape or no floats are left out for good."""
    for name, found_name in names.items():
        if name not in sums:
            continue
        a, b = expected.get(name), found.get(found_name)
        if a is None or b is None or a.shape != b.shape or a.dtype.kind != "f" or a.ndim < 2:
            del sums[name]
        else:
            sums[name].add(a, b)


def match_tensors(graph: "ModelProto", variant: "ModelProto") -> dict[str, str]:
    """Return float tensor -> tensor of the variant with the same meaning, in graph order.

    A tensor that the variant quantizes is compared behind its DequantizeLinear. An int8 convolution whose only
    readers are activations is left out, and the activation is judged: marking between the two would forbid the
    fused int8 kernel.
    """
    readers: dict[str, list[Any]] = {}
    for node in variant.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    makers = {name: node for node in variant.graph.node for name in node.output}
    dequantizers = {name for name, node in makers.items() if node.op_type == "DequantizeLinear"}

    def dequantised(name: str) -> str | None:
        for quantize in (node for node in readers.get(name, []) if node.op_type == "QuantizeLinear"):
            for reader in readers.get(quantize.output[0], []):
                if reader.op_type == "DequantizeLinear":
                    return str(reader.output[0])
        return None

    def is_fused(name: str) -> bool:
        users, maker = readers.get(name, []), makers.get(name)
        is_int8 = maker is not None and bool(dequantizers.intersection(maker.input))
        return bool(users) and all(
            user.op_type in _FUSED_BEFORE_QUANTIZE and (is_int8 or dequantised(user.output[0]))
            for user in users
        )

    names: dict[str, str] = {}
    logits = graph.graph.output[0].name
    for name in _activations(graph):
        twin = dequantised(name)
        if name == logits:
            names[name] = variant.graph.output[0].name
        elif twin is not None:
            names[name] = twin
        elif name in makers and not is_fused(name):
            names[name] = name
    if len(names) < 2:
        raise ArtifactError(
            f"The engine's graph '{variant.graph.name}' and the float graph '{graph.graph.name}' have no "
            "tensor names in common but the logits, so layers cannot be compared. Give diff_layers the "
            "float graph that this variant was quantized from."
        )
    return names


def _activations(graph: "ModelProto") -> Iterator[str]:
    """Yield the image and all float tensors that depend on it, in graph order."""
    import onnx

    inferred = onnx.shape_inference.infer_shapes(graph).graph
    types = {value.name: value.type.tensor_type.elem_type for value in inferred.value_info}
    dependent = {graph.graph.input[0].name}
    yield graph.graph.input[0].name
    for node in graph.graph.node:
        if node.op_type in ("Shape", "Constant") or not dependent.intersection(node.input):
            continue
        dependent.update(node.output)
        if types.get(node.output[0], onnx.TensorProto.FLOAT) == onnx.TensorProto.FLOAT:
            yield node.output[0]


def mark(graph: "ModelProto", names: Sequence[str]) -> bytes:
    """Return the graph with `names` (the logits among them) as its outputs."""
    from polygraphy.backend.onnx import ModifyOutputs
    from polygraphy.logger import G_LOGGER

    with G_LOGGER.verbosity(G_LOGGER.CRITICAL):
        marked = ModifyOutputs(graph, outputs=list(names), copy=True)()
    content: bytes = marked.SerializeToString()
    return content


def match_modules(graph: "ModelProto") -> dict[str, str]:
    """Return the output of each convolution of the graph -> the torch module it comes from, and the
    logits."""
    from tasks.parts.onnx_graph import node_sources

    sources = node_sources(graph)
    names: dict[str, str] = {}
    for node in graph.graph.node:
        module = sources.get(node.name, ("", ""))[0]
        if node.op_type in ("Conv", "ConvTranspose", "Gemm") and module and module not in names.values():
            names[node.output[0]] = module
    logits = graph.graph.output[0].name
    names.pop(logits, None)
    return {**names, logits: logits}


def _openvino_runner(marked: bytes, manifest: "EngineManifest") -> Any:
    """Return a Polygraphy runner of the marked graph, compiled with the options of the target."""
    import numpy as np
    from polygraphy.backend.base import BaseRunner
    from polygraphy.common import TensorMetadata

    from tasks.parts.runners.openvino import compile_graph

    class OpenvinoMarkedRunner(BaseRunner):  # type: ignore[misc]
        """All marked tensors of one compiled graph, by name."""

        def activate_impl(self) -> None:
            self._compiled = compile_graph(marked, manifest.target)

        def get_input_metadata_impl(self) -> Any:
            port = self._compiled.input(0)
            shape = (None, 3, manifest.card.height, manifest.card.width)
            return TensorMetadata().add(port.any_name, np.float32, shape)

        def infer_impl(self, feed_dict: Any) -> dict[str, Any]:
            results = self._compiled([*feed_dict.values()])
            self.inference_time = 0.0
            return {name: results[port] for port in self._compiled.outputs for name in port.names}

        def deactivate_impl(self) -> None:
            del self._compiled

    return OpenvinoMarkedRunner(name="engine")


def _torch_runner(checkpoint: Path, num_threads: int, image: str, logits: str, modules: Sequence[str]) -> Any:
    """Return a Polygraphy runner of the eager network whose tensors are named after its modules."""
    import numpy as np
    import torch
    from polygraphy.backend.base import BaseRunner
    from polygraphy.common import TensorMetadata

    from tasks.parts.checkpoint import load_checkpoint

    class TorchHookedRunner(BaseRunner):  # type: ignore[misc]
        """The output of each named module, by module name."""

        def activate_impl(self) -> None:
            torch.set_num_threads(num_threads)
            self._model, _ = load_checkpoint(checkpoint)
            self._outputs: dict[str, Any] = {}
            _hook_convolutions(self._model, set(modules), self._outputs)

        def get_input_metadata_impl(self) -> Any:
            return TensorMetadata().add(image, np.float32, (None, 3, None, None))

        def infer_impl(self, feed_dict: Any) -> dict[str, Any]:
            self._outputs.clear()
            with torch.inference_mode():
                answer = self._model(torch.from_numpy(feed_dict[image]))
            self.inference_time = 0.0
            return {**self._outputs, logits: answer.numpy()}

        def deactivate_impl(self) -> None:
            del self._model

    return TorchHookedRunner(name="engine")


def _hook_convolutions(model: "nn.Module", names: set[str], outputs: dict[str, Any]) -> None:
    """Keep a copy of each named module's output; where a BatchNorm reads it directly, the BatchNorm's
    instead."""
    from torch import nn

    made_by: dict[int, str] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            made_by[id(output)] = name
            outputs[name] = output.detach().clone().numpy()

        return hook

    def replace(_module: Any, inputs: Any, output: Any) -> None:
        name = made_by.get(id(inputs[0]))
        if name is not None:
            outputs[name] = output.detach().clone().numpy()

    for name, module in model.named_modules():
        if name in names:
            module.register_forward_hook(keep(name))
        elif isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(replace)
    model.register_forward_pre_hook(lambda *_: made_by.clear())


def rank_layers(graph: "ModelProto", sums: Mapping[str, _Sums]) -> list[Layer]:
    """Return one Layer per compared tensor in graph order, with the noise of its nearest compared inputs."""
    from tasks.parts.onnx_graph import node_sources

    sources = node_sources(graph)
    image = graph.graph.input[0].name
    nearest: dict[str, float] = {image: sums[image].sqnr_db if image in sums else MAX_SQNR_DB}
    layers: list[Layer] = []
    if image in sums and sums[image].noise > 0:
        layers.append(_layer("", "Input", image, ("", ""), sums[image], MAX_SQNR_DB))
    for node in graph.graph.node:
        known = [nearest[name] for name in node.input if name in nearest]
        if not known:
            continue
        tensor = node.output[0]
        if tensor in sums:
            origin = sources.get(node.name, ("", ""))
            layers.append(_layer(node.name, node.op_type, tensor, origin, sums[tensor], min(known)))
            nearest[tensor] = sums[tensor].sqnr_db
        else:
            nearest.update(dict.fromkeys(node.output, min(known)))
    if not layers or layers[-1].tensor != graph.graph.output[0].name:
        layers.sort(key=lambda layer: layer.tensor == graph.graph.output[0].name)
    return layers


def _layer(
    node: str, op_type: str, tensor: str, origin: tuple[str, str], sums: _Sums, input_sqnr_db: float
) -> Layer:
    added = 10 ** (-sums.sqnr_db / 10) - 10 ** (-input_sqnr_db / 10)
    return Layer(
        node=node,
        op_type=op_type,
        tensor=tensor,
        module=origin[0],
        source=origin[1],
        sqnr_db=sums.sqnr_db,
        cosine=sums.cosine,
        input_sqnr_db=input_sqnr_db,
        added_noise=max(0.0, added),
    )


def find_guilty(layers: Sequence[Layer], *, collapse_db: float) -> tuple[Layer | None, Layer | None]:
    """Return the first layer below `collapse_db`, and the one that adds most noise itself."""
    first = next((layer for layer in layers if layer.sqnr_db < collapse_db), None)
    worst = max(layers, key=lambda layer: layer.added_noise)
    return first, worst if worst.added_noise > 0 else None


def _agreement_with_engine(
    engine: Path, images_NCHW: "FloatArray", marked_logits: Iterable["FloatArray"]
) -> float:
    """Return the SQNR of the engine file's logits against the run with marked layers."""
    from tasks.parts.runners.open_engine import open_engine

    sums = _Sums()
    with open_engine(engine) as runner:
        for image, logits in zip(images_NCHW, marked_logits, strict=True):
            sums.add(logits, runner.infer(image[None]))
    return sums.sqnr_db


def _write_layers(layers: Sequence[Layer], path: Path) -> None:
    names = list(Layer.__dataclass_fields__)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for layer in layers:
            values = [getattr(layer, name) for name in names]
            writer.writerow([f"{value:.6g}" if isinstance(value, float) else value for value in values])


def _plot_layers(
    layers: Sequence[Layer],
    collapse_db: float,
    first_collapse: Layer | None,
    largest_own_drop: Layer | None,
    manifest: "EngineManifest",
    path: Path,
) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(min(24, max(9, 0.16 * len(layers) + 3)), 6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sqnr_db = [layer.sqnr_db for layer in layers]
    axes.plot(range(len(layers)), sqnr_db, color="#8a97a8", linewidth=1, zorder=1)
    is_conv = ["Conv" in layer.op_type or layer.op_type == "Gemm" for layer in layers]
    for wanted, colour, label in ((True, "#1f5fa8", "convolution"), (False, "#9fb8d6", "other layer")):
        points = [index for index, found in enumerate(is_conv) if found is wanted]
        axes.scatter(points, [sqnr_db[index] for index in points], s=22, color=colour, label=label, zorder=2)
    axes.axhline(
        collapse_db, color="#b3261e", linestyle="--", linewidth=1, label=f"collapse, {collapse_db:g} dB"
    )
    for layer, what, colour, height in (
        (first_collapse, "first collapse", "#b3261e", 0.10),
        (largest_own_drop, "largest own drop", "#b06000", 0.93),
    ):
        if layer is not None:
            _annotate(axes, layers.index(layer), layer, what, colour, height)
    step = max(1, math.ceil(len(layers) / 60))
    ticks = range(0, len(layers), step)
    labels = [layers[index].module or layers[index].node or layers[index].op_type for index in ticks]
    axes.set_xticks(list(ticks), [label[-32:] for label in labels], rotation=90, fontsize=7)
    axes.set_ylabel("SQNR against the float graph (dB)")
    axes.set_title(f"Layers of {manifest.file}, target {manifest.target.name}: higher is closer to float")
    axes.grid(axis="y", alpha=0.3)
    axes.margins(y=0.18)
    axes.legend(loc="upper right", fontsize=8)
    figure.savefig(path, dpi=110, metadata={"Software": ""})


def _annotate(axes: Any, index: int, layer: Layer, what: str, colour: str, height: float) -> None:
    name = " ".join(part for part in (layer.module or layer.node or layer.tensor, layer.source) if part)
    is_right = index > axes.get_xlim()[1] / 2
    axes.annotate(
        f"{what}: {name}\n{layer.input_sqnr_db:.1f} dB in, {layer.sqnr_db:.1f} dB out",
        xy=(index, layer.sqnr_db),
        xytext=(0.35 if is_right else 0.05, height),
        textcoords="axes fraction",
        fontsize=8,
        color=colour,
        va="center",
        arrowprops={"arrowstyle": "->", "color": colour},
    )
