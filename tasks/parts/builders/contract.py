"""What the builder of each runtime takes and returns: `build_file(target, source, engine) -> Built`."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tasks.core.errors import ArtifactError, BuildFailed
from tasks.parts.builders.agreement import NUM_MORE_IMAGES, read_probe_images
from tasks.parts.builders.report import NO_LAYERS, LayerCounts, count_layers
from tasks.parts.custom_operators import domains_of
from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.engines.manifest import EngineLayer, FloatArray, Precisions
from tasks.parts.engines.runtimes import Runtime
from tasks.parts.engines.target import Target

if TYPE_CHECKING:
    from onnx import ModelProto
    from torch import nn


@dataclass(frozen=True)
class Built:
    """What a builder made from a model."""

    file: Path
    """The engine file, in the engine's folder."""
    precisions: Precisions
    """Precisions that the runtime chose, by type of operator."""
    graph: "ModelProto | None" = None
    """Graph that the runtime was given, after the target's rewrites (for TensorRT, before its types changed), as
    `light_copy` returns it; None if the source is a checkpoint."""
    layers: tuple[EngineLayer, ...] = ()
    """Layers that the runtime executes; empty if the source is a checkpoint."""
    build_latencies_ms: tuple[float, ...] = ()
    """Median latency of each build, if there were several and the fastest was kept."""
    kernel_units: dict[str, int] | None = None
    """Layers by the units of a GPU on which they multiply, as far as the names of TensorRT's kernels tell; None for
    other runtimes."""


@dataclass(frozen=True)
class GraphSource:
    """The ONNX graph of a variant."""

    file: Path
    """File of the graph."""
    graph: "ModelProto"
    """The graph of the file, in which every node has a name."""
    card: InputCard
    """Card stored in the graph."""
    images_NCHW: FloatArray
    """Images to try the engine on, normalised."""
    more_NCHW: FloatArray | None = None
    """Further images, which tell how large answers usually are; None for classes, whose logits always have a size."""
    _logits: "list[FloatArray]" = field(default_factory=list, init=False, repr=False, compare=False)
    _powers: list[float] = field(default_factory=list, init=False, repr=False, compare=False)
    _rewritten: "dict[tuple[str, ...], ModelProto]" = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def check(self, target: Target) -> None:
        """Raise ArtifactError for a damaged weight, BuildFailed for operators that the runtime lacks."""
        _check_weights(self.graph, self.file)
        _check_operators(self.graph, target)
        _check_size(self.graph, target)

    def compute_logits(self, target: Target) -> FloatArray:
        """Return the logits of the unmodified graph, computed once, image by image, by ONNX Runtime on the CPU."""
        from tasks.parts.onnx_session import open_session

        if not self._logits:
            session = open_session(self.graph, num_threads=target.num_threads, is_optimised=False)
            name = session.get_inputs()[0].name
            runs = [session.run(None, {name: image[None]})[0] for image in self.images_NCHW]
            self._logits.append(np.concatenate(runs))
            if self.more_NCHW is not None:
                more = [session.run(None, {name: image[None]})[0] for image in self.more_NCHW]
                self._powers.append(float(np.mean([np.square(run, dtype=np.float64).mean() for run in more])))
        return self._logits[0]

    @property
    def usual_power(self) -> float:
        """Mean square of the answers for `more_NCHW`, known once the logits are; 0 without these images."""
        return self._powers[0] if self._powers else 0.0

    def rewritten(self, target: Target) -> "ModelProto":
        """Return a copy with the target's rewrites, each of which computes the same on some of the images.

        They are checked once for an engine and its twin. Rewrites that serve speed are left out with a warning where
        they do not; raises BuildFailed for another.
        """
        from onnx import ModelProto

        from tasks.parts.builders.graph_rewrites import rewrites_for
        from tasks.parts.onnx_graphs.checked_rewrite import checked_rewrite

        rewrites = rewrites_for(target, self.graph)
        names = tuple(rewrite.name for rewrite in rewrites)
        if names not in self._rewritten:
            self._rewritten[names] = checked_rewrite(
                self.graph,
                rewrites,
                self.images_NCHW,
                where=f"Target {target.name}",
                min_int8_db=target.min_agreement_int8_db,
                expected=self.compute_logits(target),
            )
        rewritten = ModelProto()
        rewritten.CopyFrom(self._rewritten[names])
        return rewritten

    def with_logits(self, target: Target) -> "GraphSource":
        """Return the source with its logits computed, and without those weights that `light_copy` leaves out."""
        from tasks.parts.onnx_graphs.graph import light_copy

        light = replace(self, graph=light_copy(self.graph))
        light._logits.append(self.compute_logits(target))
        light._powers.extend(self._powers)
        return light

    @property
    def choice(self) -> str:
        """First node that picks some of the graph's own values, as detectors do; empty if there is none."""
        nodes = (node for node in self.graph.graph.node if node.op_type in ("TopK", "NonMaxSuppression"))
        return next((f"{node.op_type} '{node.name}'" for node in nodes), "")

    @property
    def is_quantized(self) -> bool:
        """Whether the graph holds Q/DQ pairs."""
        from tasks.parts.onnx_graphs.graph import is_quantized

        return is_quantized(self.graph)

    def count_layers(self) -> LayerCounts:
        """Count the layers by the precision that the graph declares."""
        return count_layers(self.graph)

    def count_macs(self) -> int:
        """Return the multiply-accumulates of the convolutions and matrix products for one image."""
        from tasks.parts.onnx_graphs.macs import conv_macs

        return sum(conv_macs(self.graph).values())


@dataclass(frozen=True)
class CheckpointSource:
    """The checkpoint of a float variant."""

    file: Path
    """File of the checkpoint."""
    card: InputCard
    """Card stored in the checkpoint."""
    images_NCHW: FloatArray
    """Images to try the engine on, normalised."""
    usual_power: float = 0.0
    """Not asked for: its networks give classes."""
    is_quantized: bool = False
    """Whether its network holds Q/DQ pairs; no checkpoint does."""
    choice: str = ""
    """Not looked for in a network."""

    def check(self, target: Target) -> None:
        """Do nothing: loading already checks a checkpoint."""

    def with_logits(self, target: Target) -> "CheckpointSource":
        """Return the source itself."""
        return self

    def compute_logits(self, target: Target) -> FloatArray:
        """Return the logits of the network in float32, computed on the CPU."""
        import torch

        from tasks.parts.networks.checkpoint import load_checkpoint

        with torch.inference_mode():
            logits_NCHW: FloatArray = load_checkpoint(self.file)[0](
                torch.from_numpy(self.images_NCHW)
            ).numpy()
        return logits_NCHW

    def count_layers(self) -> LayerCounts:
        """Return no counts: a network declares no precision per layer."""
        return NO_LAYERS

    def count_macs(self) -> int:
        """Return the multiply-accumulates of the convolutions and matrix products for one image."""
        from tasks.parts.networks.checkpoint import load_checkpoint

        return macs_of_network(load_checkpoint(self.file)[0], self.card.image_shape)


def read_source(target: Target, file: Path, images: Path) -> GraphSource | CheckpointSource:
    """Read the source that the target's runtime needs, and the images to try the engine on.

    Raises ArtifactError for a source of another kind, or for damaged files.
    """
    if not target.runtime.traits.reads_checkpoints:
        from tasks.parts.onnx_graphs.graph import name_nodes, read_card_of_graph, read_graph

        graph = read_graph(file)
        name_nodes(graph)
        card = read_card_of_graph(graph)
        more = read_probe_images(images, card, NUM_MORE_IMAGES) if card.task is Task.values else None
        return GraphSource(file, graph, card, read_probe_images(images, card), more)
    if file.suffix == ".onnx":
        raise ArtifactError(
            f"{file}: an ONNX graph, expected a .safetensors checkpoint: target {target.name} of runtime "
            f"{target.runtime} is built from the network. Quantized variants have no such engine; "
            "remove them from this target's variants."
        )
    from tasks.parts.networks.model_card import read_card

    card = read_card(file).for_input()
    return CheckpointSource(file, card, read_probe_images(images, card))


def macs_of_network(network: "nn.Module", image_shape: tuple[int, int, int]) -> int:
    """Return the multiply-accumulates of convolutions, linear layers and attention for one image (C, H, W)."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:  # it does not know the CPU's fused attention
        network(torch.zeros(1, *image_shape))
    return int(counter.get_total_flops()) // 2


def _check_weights(graph: "ModelProto", path: Path) -> None:
    """Raise ArtifactError for NaN weights, which ONNX, its checker and the runtimes accept."""
    from onnx import numpy_helper

    for tensor in graph.graph.initializer:
        values = numpy_helper.to_array(tensor)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ArtifactError(
                f"{path}: weight '{tensor.name}' holds NaN or infinity, expected finite values. Its "
                "training diverged: lower the learning rate and train again."
            )


def _check_size(graph: "ModelProto", target: Target) -> None:
    """Raise BuildFailed for a graph that the runtime would have to read from one message of 2 GiB or more."""
    from tasks.parts.onnx_graphs.graph import is_too_large, size_of_constants

    if target.runtime is Runtime.onnxruntime and is_too_large(graph):
        raise BuildFailed(
            f"Target {target.name}: the graph has {size_of_constants(graph) / 2**30:.1f} GiB of weights. An engine "
            f"of {target.runtime} is built from one ONNX file, which holds less than 2. Build the variant fp16 for "
            "it (convert_precision), or this one for a target of runtime openvino."
        )


def _check_operators(graph: "ModelProto", target: Target) -> None:
    """Raise BuildFailed for an opset or an operator that the target's runtime does not support."""
    lowest, highest = target.opsets
    opset = next(entry.version for entry in graph.opset_import if entry.domain in ("", "ai.onnx"))
    if not lowest <= opset <= highest:
        raise BuildFailed(
            f"Target {target.name}: the graph has opset {opset}, allowed are {lowest}..{highest} "
            f"(target.{target.name}.opsets). Export it with export_onnx.opset in that range."
        )
    own = {(function.domain, function.name) for function in graph.functions}
    foreign = [
        f"{node.domain}::{node.op_type} ('{node.name}')"
        for node in graph.graph.node
        if node.domain not in ("", "ai.onnx", *domains_of(target.custom_operators))
        and (node.domain, node.op_type) not in own
    ]
    if foreign:
        raise BuildFailed(
            f"Target {target.name}: {target.runtime} does not support {len(foreign)} nodes of the graph: "
            f"{', '.join(foreign[:5])}. Replace these operators by standard ONNX ones in the network, or declare the "
            f"library that has them for this runtime (target.{target.name}.custom_operators)."
        )
