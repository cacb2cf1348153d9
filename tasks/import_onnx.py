"""Import an ONNX model of another tool: check it, rewrite it for this pipeline, verify that its outputs are equal."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast, Between, Distinct, LessThan, MinItems, MoreThan
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError, ConfigError
from tasks.parts.custom_operators import CustomOperators, check_libraries
from tasks.parts.data.input_card import MAX_CHANNELS, InputCard, Task
from tasks.parts.onnx_graphs.foreign_form import ChannelOrder, InputForm, Layout, Values
from tasks.parts.onnx_graphs.foreign_output import ALL_OUTPUTS, OutputForm, OutputKind
from tasks.parts.onnx_graphs.signal_to_noise import Difference
from tasks.parts.onnx_session import ONNXRUNTIME

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tasks.parts.data.dataset import Manifest
    from tasks.parts.onnx_graphs.foreign_compare import Comparison, Gate
    from tasks.parts.onnx_graphs.foreign_output import Head
    from tasks.parts.onnx_graphs.foreign_rewrite import Imported, Quantization

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """What the file does not state itself, and how far the written graph may differ from it."""

    classes: Annotated[list[str], MinItems(2), Distinct()] | None
    """Class names in the order of the logits; null: those of the data set, or numbers if it has none."""
    layout: Layout
    """Order of the axes of the input."""
    channel_order: ChannelOrder
    """Order of the channels of the input."""
    values: Values
    """Scale of the values of the input."""
    mean: Annotated[list[float], MinItems(1), "one for each channel, 0..1 scale"]
    """Mean of each channel of the images (of RGB for three) on a 0..1 scale, for values=normalised: the model reads
    (value / 255 - mean) / std. The number of items is that of the channels."""
    std: Annotated[list[Annotated[float, MoreThan(0)]], MinItems(1), "one for each channel, 0..1 scale"]
    """Standard deviation of each channel on a 0..1 scale, for values=normalised."""
    height: Annotated[int, Between(16, 8192)] | None
    """Rows of the images in pixels, if the graph leaves them open; null: the graph's own."""
    width: Annotated[int, Between(16, 8192)] | None
    """Columns of the images in pixels, if the graph leaves them open; null: the graph's own."""
    output: str | int | None
    """Name of the output with the logits, for models with several; null: the only one. "*": all of them, as values,
    each flattened and joined to the next."""
    output_kind: OutputKind
    """What the output means."""
    output_layout: Layout
    """Order of the axes of an output with four."""
    threshold: float | None
    """For outputs of one channel: the value above which an image or a pixel is of the second class."""
    batch_sizes: Annotated[list[Annotated[int, Between(1, 1024)]], MinItems(1)]
    """Batches on which the file and the written graph are compared; two or more prove that the batch is dynamic."""
    min_sqnr_db: Annotated[float, AtLeast(0), LessThan(200)]
    """Gate: minimum signal-to-noise ratio of the logits against the file in ONNX Runtime, dB. Float32 reaches 100."""
    min_half_sqnr_db: Annotated[float, AtLeast(0), LessThan(200)]
    """The same gate for files with float16 parts, whose own rounding is a part of the difference, dB."""
    is_quantized: bool
    """Whether the file is a Q/DQ graph."""
    min_quantized_sqnr_db: Annotated[float, AtLeast(0), LessThan(200)]
    """Gate of a Q/DQ graph against its file, dB. Values that lie between two steps may be rounded to either."""
    min_float_form_sqnr_db: Annotated[float, AtLeast(0), LessThan(200)]
    """Gate of the float form against its Q/DQ file, dB: what the file's rounding costs."""
    custom_operators: list[CustomOperators]
    """Libraries for ONNX Runtime that have the operators of the file outside standard ONNX."""

    def __post_init__(self) -> None:
        if not len(self.mean) == len(self.std) <= MAX_CHANNELS:
            raise ConfigError(
                f"mean has {len(self.mean)} items and std {len(self.std)}, expected one for each channel of the "
                f"images, at most {MAX_CHANNELS}."
            )
        if self.channel_order is ChannelOrder.bgr and len(self.mean) != 3:
            raise ConfigError(
                f"channel_order is bgr, and mean has {len(self.mean)} items, expected 3. Other channels are read in "
                "the order of the data set: set channel_order=rgb."
            )
        if self.output_kind is OutputKind.values and self.classes is not None:
            raise ConfigError(
                f"output_kind is values, and classes is {self.classes[:8]}, expected null: values have no classes."
            )
        if self.output == ALL_OUTPUTS and self.output_kind is not OutputKind.values:
            raise ConfigError(
                f"output is '{ALL_OUTPUTS}', which keeps all outputs, and output_kind is {self.output_kind}; "
                "expected values: agreement is measured for each output. Or name the output with the classes."
            )

    @property
    def form(self) -> InputForm:
        """The declared input of the file."""
        return InputForm(self.layout, self.channel_order, self.values, tuple(self.mean), tuple(self.std))

    @property
    def output_form(self) -> OutputForm:
        """The declared output of the file."""
        return OutputForm(self.output_name, self.output_layout, self.threshold, self.output_kind)

    @property
    def output_name(self) -> str | None:
        """The output as text, because torch numbers outputs without a name."""
        return None if self.output is None else str(self.output)


@dataclass(frozen=True)
class Quantized:
    """The Q/DQ graph of a quantized file, as it is; `differences` of the report are those of its float form."""

    rewritten: tuple[str, ...]
    """One sentence for each change."""
    size_bytes: int
    """Size of quantized.onnx."""
    differences: tuple[Difference, ...]
    """The file against this graph, one per batch size."""


@dataclass(frozen=True)
class Report:
    """Properties of the file and of the graph written from it."""

    task: Task
    num_classes: int
    """0 for values that are no classes."""
    height: int
    width: int
    outputs: tuple[str, ...]
    """Name of the output with the logits in the file, or of all that are kept."""
    opset_before: int
    opset: int
    ir_version_before: int
    num_nodes_before: int
    num_nodes: int
    num_parameters: int
    """Number of values in the float constants of the written graph."""
    macs: int
    """Multiply-accumulates of convolutions and matrix products for one image."""
    static_batch_before: int | None
    """Fixed batch size of the file; None if it is dynamic."""
    max_batch: int | None
    """1 if the written graph keeps a fixed batch of 1; None if its batch is dynamic."""
    rewritten: tuple[str, ...]
    """One sentence for each change."""
    size_bytes: int
    """Size of model.onnx."""
    differences: tuple[Difference, ...]
    """The file against the written graph, one per batch size."""
    spread_db: float | None
    """How much the file agrees with itself, with and without ONNX Runtime's optimisations; None: the gate held."""
    same_answers: float | None
    """Least share of images or pixels that have the same class in the file and in the graph; None for values."""
    compared_with: str
    """What was done to the file before the comparison; empty if it was compared as it is."""
    quantized: Quantized | None
    """The Q/DQ graph of the file; None for a float file."""


def environment(_: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("onnx", "onnxslim", *ONNXRUNTIME)


def import_onnx(cfg: Config, *, model: Path, data: Path, out: Path) -> Report:
    """Write ``model.onnx``, which computes the same as the ONNX file `model` (or the one in the folder `model`).

    Of a Q/DQ file this is the float form, and ``quantized.onnx`` computes the same as the file.

    Raises ArtifactError for a file or a library that the pipeline cannot use, GateFailed when the outputs of a
    written graph differ.
    """
    import numpy as np
    from onnx import numpy_helper

    from tasks.parts.onnx_graphs.foreign_file import find_file
    from tasks.parts.onnx_graphs.foreign_rewrite import Quantization
    from tasks.parts.onnx_graphs.macs import conv_macs

    logger.info("importing %s", find_file(model))
    check_libraries(cfg.custom_operators, "model.custom_operators")
    quantized = None
    if cfg.is_quantized:
        kept, compared = _rewrite(cfg, model, data, Quantization.kept)
        size_bytes = _write(cfg, kept, compared, data, out / "quantized.onnx")[1]
        quantized = Quantized(kept.rewritten, size_bytes, compared.differences)
    quantization = Quantization.removed if cfg.is_quantized else Quantization.none
    imported, comparison = _rewrite(cfg, model, data, quantization)
    card, size_bytes = _write(cfg, imported, comparison, data, out / "model.onnx")
    graph = imported.graph
    floats = [
        tensor for tensor in graph.graph.initializer if numpy_helper.to_array(tensor).dtype == np.float32
    ]
    report = Report(
        task=card.task,
        num_classes=len(card.classes),
        height=card.height,
        width=card.width,
        outputs=imported.tensors,
        opset_before=imported.opset_before,
        opset=graph.opset_import[0].version,
        ir_version_before=imported.ir_version_before,
        num_nodes_before=imported.num_nodes_before,
        num_nodes=len(graph.graph.node),
        num_parameters=sum(math.prod(tensor.dims) for tensor in floats),
        macs=sum(conv_macs(graph).values()),
        static_batch_before=imported.static_batch,
        max_batch=imported.max_batch,
        rewritten=imported.rewritten,
        size_bytes=size_bytes,
        differences=comparison.differences,
        spread_db=comparison.spread_db,
        same_answers=comparison.same_answers,
        compared_with=comparison.conversion,
        quantized=quantized,
    )
    worst = min(compared.sqnr_db for compared in comparison.differences)
    logger.info(
        "%s: %s, %d classes, %d nodes, SQNR %.1f dB against the file",
        out / "model.onnx",
        report.task,
        report.num_classes,
        report.num_nodes,
        worst,
    )
    return report


def _rewrite(
    cfg: Config, model: Path, data: Path, quantization: "Quantization"
) -> tuple["Imported", "Comparison"]:
    """Rewrite the graph with a dynamic batch, or with a batch of 1 if the graph depends on it."""
    from tasks.parts.data.dataset import normalise
    from tasks.parts.onnx_graphs.foreign_compare import compare
    from tasks.parts.onnx_graphs.foreign_file import find_file, read_foreign
    from tasks.parts.onnx_graphs.foreign_qdq import float_form
    from tasks.parts.onnx_graphs.foreign_rewrite import (
        FixedBatch,
        Quantization,
        rewrite,
        with_equal_operators,
        with_output,
    )

    def attempt(is_batch_freed: bool) -> tuple["Imported", "Comparison"]:
        imported = rewrite(
            read_foreign(model),
            path=find_file(model),
            form=cfg.form,
            height=cfg.height,
            width=cfg.width,
            output=cfg.output_form,
            quantization=quantization,
            is_batch_freed=is_batch_freed,
            libraries=cfg.custom_operators,
        )
        _check_size(cfg, imported, data)
        gate, images_NHWC = _gate(cfg, imported, quantization), _images(cfg, data)
        compared = compare(model, imported, cfg.form, gate, images_NHWC, cfg.batch_sizes)
        if quantization is not Quantization.none:
            rounded = imported.graph
            if quantization is Quantization.kept:
                rounded = float_form(with_output(rounded, imported.head.tensor))
            exact = replace(imported, graph=rounded)
            gate = _gate(cfg, imported, Quantization.none)
            compare(model, exact, cfg.form, gate, images_NHWC, cfg.batch_sizes[:1], is_float_form=True)
        images_NCHW = normalise(images_NHWC, imported.mean, imported.std)
        return with_equal_operators(imported, images_NCHW, find_file(model)), compared

    try:
        return attempt(True)
    except FixedBatch as error:
        logger.warning("trying again with a fixed batch: %s", error)
        return attempt(False)


def _gate(cfg: Config, imported: "Imported", quantization: "Quantization") -> "Gate":
    from tasks.parts.onnx_graphs.foreign_compare import Gate
    from tasks.parts.onnx_graphs.foreign_rewrite import Quantization

    name = {
        Quantization.kept: "min_quantized_sqnr_db",
        Quantization.removed: "min_float_form_sqnr_db",
        Quantization.none: "min_half_sqnr_db" if imported.is_half else "min_sqnr_db",
    }[quantization]
    advice = None
    if quantization is Quantization.removed:
        advice = (
            "So much does the rounding of the file itself cost: take the float file (model=onnx), or set the limit "
            "lower to measure what this one gives."
        )
    return Gate(getattr(cfg, name), f"import_onnx.{name}", advice)


def _images(cfg: Config, data: Path) -> "NDArray[np.uint8]":
    """Return as many calibration images as the largest batch; beyond their ranges a Q/DQ graph clips."""
    import numpy as np

    from tasks.parts.data.dataset import open_images

    images_NHWC = open_images(data, "calibration")
    return images_NHWC[np.arange(max(cfg.batch_sizes)) % len(images_NHWC)]


def _check_size(cfg: Config, imported: "Imported", data: Path) -> None:
    """Raise ArtifactError if the images of the data set are not those that the graph reads."""
    from tasks.parts.data.dataset import read_manifest

    found = read_manifest(data)
    dims = imported.graph.graph.input[0].type.tensor_type.shape.dim
    height, width = (axis.dim_value for axis in dims[2:])
    if (found.height, found.width) != (height, width):
        raise ArtifactError(
            f"{data}: the images are {found.height}x{found.width}, the model reads {height}x{width}. Set "
            f"prepare_data.height={height} prepare_data.width={width}."
        )
    if found.num_channels != cfg.form.num_channels:
        raise ArtifactError(
            f"{data}: the images have {found.num_channels} channels, model.mean has {cfg.form.num_channels} items. "
            f"Set prepare_data.folder.channels={cfg.form.num_channels}, or one mean and std for each channel."
        )


def _write(
    cfg: Config, imported: "Imported", compared: "Comparison", data: Path, path: Path
) -> tuple[InputCard, int]:
    """Write a graph with its card; return the card and the size of the file in bytes."""
    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.onnx_graphs.graph import CARD_KEY, write_graph

    shapes = dict(zip(imported.tensors, compared.shapes, strict=True))
    card = _card(cfg, imported, shapes, read_manifest(data), data)
    entry = imported.graph.metadata_props.add()
    entry.key, entry.value = CARD_KEY, card.to_json()
    write_graph(imported.graph, path)
    return card, path.stat().st_size


def _card(
    cfg: Config,
    imported: "Imported",
    shapes: Mapping[str, tuple[int, ...]],
    data: "Manifest",
    path: Path,
) -> InputCard:
    """Return the card of a graph, whose file's outputs have these shapes for one image.

    Raises ArtifactError if the data set does not match the graph.
    """
    sizes = [axis.dim_value for axis in imported.graph.graph.input[0].type.tensor_type.shape.dim]
    height, width = sizes[2:]
    values_shape = None
    if imported.head.task is Task.values:
        dims = imported.graph.graph.output[0].type.tensor_type.shape.dim
        values_shape = tuple(axis.dim_value for axis in dims[1:])
    return InputCard(
        classes=() if values_shape else _classes(cfg, imported.head, data, path),
        mean=imported.mean,
        std=imported.std,
        height=height,
        width=width,
        task=imported.head.task,
        max_batch=imported.max_batch,
        values_shape=values_shape,
        outputs=dict(shapes) if len(shapes) > 1 else {},
        reading=data.reading,
    )


def _classes(cfg: Config, head: "Head", data: "Manifest", path: Path) -> tuple[str, ...]:
    """Return the names of the classes; raise ArtifactError if configuration, data set and graph differ."""
    from tasks.parts.data.dataset import open_labels

    numbers = tuple(str(index) for index in range(head.num_classes))
    classes = tuple(cfg.classes) if cfg.classes is not None else data.classes or numbers
    if len(classes) != head.num_classes:
        where = "model.classes" if cfg.classes is not None else f"the data set {path}"
        raise ArtifactError(
            f"the model has {head.num_classes} classes, but {where} names {len(classes)}. Name all of them, "
            "in the order of the logits (model.classes, or classes.yaml of the data set)."
        )
    if data.classes and classes != data.classes:
        raise ArtifactError(
            f"model.classes is {list(classes)[:8]}, but the data set {path} has {list(data.classes)[:8]}. Names and "
            "order must be equal; set model.classes=null to take those of the data set."
        )
    if data.classes:
        open_labels(path, "val", head.task)  # masks for a segmentation, labels for a classification
    return classes
