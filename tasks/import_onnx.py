"""Import an ONNX model of another tool: check it, rewrite it for this pipeline, verify that its outputs are equal."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast, Between, Distinct, LessThan, MinItems, MoreThan, NumItems
from tasks.core.errors import ArtifactError, BuildFailed, GateFailed, first_line
from tasks.parts.data.input_card import InputCard, Task, rgb_triple
from tasks.parts.onnx_graphs.foreign_form import ChannelOrder, InputForm, Layout, Values
from tasks.parts.onnx_graphs.signal_to_noise import Difference

if TYPE_CHECKING:
    from onnx import ModelProto

    from tasks.parts.data.dataset import Manifest
    from tasks.parts.onnx_graphs.foreign_rewrite import Imported

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
    mean: Annotated[list[float], NumItems(3), "RGB, 0..1 scale"]
    """Mean of RGB on a 0..1 scale, for values=normalised: the model reads (value / 255 - mean) / std."""
    std: Annotated[list[Annotated[float, MoreThan(0)]], NumItems(3), "RGB, 0..1 scale"]
    """Standard deviation of RGB on a 0..1 scale, for values=normalised."""
    height: Annotated[int, Between(16, 8192)] | None
    """Rows of the images in pixels, if the graph leaves them open; null: the graph's own."""
    width: Annotated[int, Between(16, 8192)] | None
    """Columns of the images in pixels, if the graph leaves them open; null: the graph's own."""
    output: str | int | None
    """Name of the output with the logits, for models with several; null: the only one."""
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
    seed: Annotated[int, AtLeast(0)]
    """Seed of the random images that are compared."""

    @property
    def form(self) -> InputForm:
        """The declared input of the file."""
        return InputForm(self.layout, self.channel_order, self.values, tuple(self.mean), tuple(self.std))

    @property
    def output_name(self) -> str | None:
        """The output as text, because torch numbers outputs without a name."""
        return None if self.output is None else str(self.output)


@dataclass(frozen=True)
class Report:
    """Properties of the file and of the graph written from it."""

    task: Task
    num_classes: int
    height: int
    width: int
    output: str
    """Name of the output with the logits in the file."""
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
    compared_with: str
    """What was done to the file before the comparison; empty if it was compared as it is."""


def import_onnx(cfg: Config, *, model: Path, data: Path, out: Path) -> Report:
    """Write ``model.onnx``, which computes the same as the ONNX file `model` (or the one in the folder `model`).

    Raises ArtifactError for a file that the pipeline cannot use, GateFailed when the outputs of the written graph
    differ.
    """
    import numpy as np
    from onnx import numpy_helper

    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.onnx_graphs.foreign_file import find_file, read_foreign
    from tasks.parts.onnx_graphs.graph import CARD_KEY, write_graph
    from tasks.parts.onnx_graphs.macs import conv_macs

    path = find_file(model)
    original = read_foreign(model)
    imported, differences, conversion = _rewrite(cfg, original, model)
    graph = imported.graph
    card = _card(cfg, imported, read_manifest(data), data)
    logger.info("importing %s: %s, %d classes", path, card.task, len(card.classes))
    entry = graph.metadata_props.add()
    entry.key, entry.value = CARD_KEY, card.to_json()
    write_graph(graph, out / "model.onnx")
    floats = [
        tensor for tensor in graph.graph.initializer if numpy_helper.to_array(tensor).dtype == np.float32
    ]
    report = Report(
        task=card.task,
        num_classes=len(card.classes),
        height=card.height,
        width=card.width,
        output=imported.tensor,
        opset_before=imported.opset_before,
        opset=graph.opset_import[0].version,
        ir_version_before=original.ir_version,
        num_nodes_before=len(original.graph.node),
        num_nodes=len(graph.graph.node),
        num_parameters=sum(math.prod(tensor.dims) for tensor in floats),
        macs=sum(conv_macs(graph).values()),
        static_batch_before=imported.static_batch,
        max_batch=imported.max_batch,
        rewritten=imported.rewritten,
        size_bytes=(out / "model.onnx").stat().st_size,
        differences=differences,
        compared_with=conversion,
    )
    worst = min(compared.sqnr_db for compared in differences)
    logger.info("%s: %d nodes, SQNR %.1f dB against the file", out / "model.onnx", report.num_nodes, worst)
    return report


def _rewrite(
    cfg: Config, original: "ModelProto", model: Path
) -> tuple["Imported", tuple[Difference, ...], str]:
    """Rewrite the graph with a dynamic batch, or with a batch of 1 if the graph depends on it."""
    from tasks.parts.onnx_graphs.foreign_file import find_file
    from tasks.parts.onnx_graphs.foreign_output import OutputForm
    from tasks.parts.onnx_graphs.foreign_rewrite import FixedBatch, rewrite

    def attempt(is_batch_freed: bool) -> tuple["Imported", tuple[Difference, ...], str]:
        imported = rewrite(
            original,
            path=find_file(model),
            form=cfg.form,
            height=cfg.height,
            width=cfg.width,
            output=OutputForm(cfg.output_name, cfg.output_layout, cfg.threshold),
            is_batch_freed=is_batch_freed,
        )
        return imported, *_compare(cfg, model, imported)

    try:
        return attempt(True)
    except FixedBatch as error:
        logger.warning("trying again with the batch size of the file: %s", error)
        return attempt(False)


def _card(cfg: Config, imported: "Imported", data: "Manifest", path: Path) -> InputCard:
    """Return the card of the graph; raise ArtifactError if the data set does not match the graph."""
    from tasks.parts.data.dataset import open_labels

    sizes = [axis.dim_value for axis in imported.graph.graph.input[0].type.tensor_type.shape.dim]
    height, width = sizes[2:]
    if (data.height, data.width) != (height, width):
        raise ArtifactError(
            f"{path}: the images are {data.height}x{data.width}, the model reads {height}x{width}. Set "
            f"prepare_data.height={height} prepare_data.width={width}."
        )
    numbers = tuple(str(index) for index in range(imported.head.num_classes))
    classes = tuple(cfg.classes) if cfg.classes is not None else data.classes or numbers
    if len(classes) != imported.head.num_classes:
        where = "model.classes" if cfg.classes is not None else f"the data set {path}"
        raise ArtifactError(
            f"the model has {imported.head.num_classes} classes, but {where} names {len(classes)}. Name all of them, "
            "in the order of the logits (model.classes, or classes.yaml of the data set)."
        )
    if data.classes and classes != data.classes:
        raise ArtifactError(
            f"model.classes is {list(classes)[:8]}, but the data set {path} has {list(data.classes)[:8]}. Names and "
            "order must be equal; set model.classes=null to take those of the data set."
        )
    if data.classes:
        open_labels(path, "val", imported.head.task)  # masks for a segmentation, labels for a classification
    return InputCard(
        classes=classes,
        mean=rgb_triple(imported.mean),
        std=rgb_triple(imported.std),
        height=height,
        width=width,
        task=imported.head.task,
        max_batch=imported.max_batch,
    )


def _compare(cfg: Config, model: Path, imported: "Imported") -> tuple[tuple[Difference, ...], str]:
    """Compare the logits for each batch size; return the differences, and what was done to the file before.

    Raises GateFailed, or FixedBatch, at the first batch that differs too much.
    """
    import numpy as np
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    from tasks.parts.data.dataset import normalise
    from tasks.parts.onnx_graphs.foreign_file import open_original
    from tasks.parts.onnx_graphs.foreign_rewrite import FixedBatch, with_output
    from tasks.parts.onnx_graphs.signal_to_noise import difference
    from tasks.parts.onnx_session import open_session

    original = open_original(model, cfg.form, imported.tensor, imported.static_batch)
    stop = GateFailed if imported.static_batch is None or imported.max_batch else FixedBatch
    failures = (
        state.Fail,
        state.InvalidArgument,
        state.InvalidGraph,
        state.NotImplemented,
        state.RuntimeException,
    )
    try:
        session = open_session(with_output(imported.graph, imported.head.tensor))
    except BuildFailed as error:
        raise stop(
            f"ONNX Runtime refuses the written graph ({first_line(error)}). {_dynamic_batch_hint(imported)}"
        ) from error
    image = imported.graph.graph.input[0]
    height, width = (axis.dim_value for axis in image.type.tensor_type.shape.dim[2:])
    gate, key = cfg.min_sqnr_db, "min_sqnr_db"
    if imported.is_half:
        gate, key = cfg.min_half_sqnr_db, "min_half_sqnr_db"
    generator = np.random.default_rng(cfg.seed)
    differences = []
    for batch_size in cfg.batch_sizes:
        shape = (batch_size, height, width, cfg.form.num_channels)
        images_NHWC = generator.integers(0, 256, shape, np.uint8)
        images_NCHW = normalise(images_NHWC, imported.mean, imported.std)
        try:
            expected = original.answer(images_NHWC)
        except failures as error:
            raise ArtifactError(
                f"{model}: the file itself fails on a batch of {batch_size} ({first_line(error)}), though it "
                f"declares {imported.static_batch or 'a dynamic batch'}. Export it with a batch that it supports."
            ) from error
        try:
            parts = np.split(images_NCHW, batch_size) if imported.max_batch else [images_NCHW]
            logits = np.concatenate([session.run(None, {image.name: part})[0] for part in parts])
            found = imported.head.to_answer(logits)
        except failures as error:
            raise stop(
                f"batch of {batch_size}: ONNX Runtime fails on the written graph ({first_line(error)}). "
                f"{_dynamic_batch_hint(imported)}"
            ) from error
        if not np.isfinite(expected).all():
            raise ArtifactError(
                f"{model}: returns NaN or infinity for random images, expected finite logits. Take another "
                "checkpoint of the model."
            )
        if found.shape != expected.shape:
            raise stop(
                f"batch of {batch_size}: the logits of the written graph are {list(found.shape)}, those of the file "
                f"{list(expected.shape)}. {_dynamic_batch_hint(imported)}"
            )
        result = difference(expected, found)
        if not result.sqnr_db >= gate:
            raise stop(
                f"batch of {batch_size}: the written graph differs from the file by {result.max_abs:.3g} (SQNR "
                f"{result.sqnr_db:.1f} dB), expected at least {gate} dB (import_onnx.{key}). "
                f"{_dynamic_batch_hint(imported)}"
            )
        differences.append(result)
    return tuple(differences), original.conversion


def _dynamic_batch_hint(imported: "Imported") -> str:
    if imported.static_batch is None or imported.max_batch:
        return "An operator behaves differently in the opset that it was converted to; export with a newer opset."
    return f"The file fixes its batch at {imported.static_batch}; export it again with a dynamic batch."
