"""Runners for Polygraphy's Comparator that expose the inner tensors of a graph or an engine."""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import ModelProto, TensorProto, numpy_helper
from polygraphy.backend.base import BaseRunner
from polygraphy.backend.onnxrt import OnnxrtRunner
from polygraphy.common import TensorMetadata

from tasks.parts.engines.manifest import GRAPH_FILE, EngineManifest, copy_libraries
from tasks.parts.engines.openvino.compile import compile_graph
from tasks.parts.engines.tensorrt_flavour import choose_tensorrt
from tasks.parts.layer_diff.matching import mark
from tasks.parts.onnx_graphs.graph import is_too_large, write_graph
from tasks.parts.onnx_session import copy_without, large_constants, open_session

if TYPE_CHECKING:
    from torch import nn


def plain_runner(
    graph: ModelProto,
    names: Sequence[str],
    *,
    num_threads: int,
    name: str,
    large: Mapping[str, TensorProto] | None = None,
) -> Any:
    """Return a runner that computes an unmodified graph node by node on the CPU.

    `large` are constants that the graph lacks.
    """
    how = {"provider": "CPUExecutionProvider", "num_threads": num_threads, "is_optimised": False}
    return OnnxrtRunner(_session_of(graph, names, large or {}, **how), name=name)


def onnxruntime_runner(graph: ModelProto, names: Sequence[str], manifest: EngineManifest) -> Any:
    """Return a runner of the graph, optimised like the engine as far as the marked outputs allow."""
    how = {"provider": manifest.provider, "num_threads": manifest.target.num_threads}
    return OnnxrtRunner(_session_of(graph, names, {}, **how), name="engine")


def _session_of(
    graph: ModelProto, names: Sequence[str], large: Mapping[str, TensorProto], **how: Any
) -> Callable[[], Any]:
    """Return what opens a session with tensors as outputs, which shares large constants with the graph."""
    large = {**large_constants(graph), **large}
    marked = mark(copy_without(graph, large), names)
    return lambda: open_session(marked, weights=large, **how)


class OpenvinoMarkedRunner(BaseRunner):  # type: ignore[misc]
    """All marked tensors of one compiled graph, by name, compiled with the options of the target."""

    def __init__(self, graph: ModelProto, names: Sequence[str], manifest: EngineManifest) -> None:
        super().__init__(name="engine")
        self._marked, self._manifest = mark(graph, names), manifest

    def activate_impl(self) -> None:
        """Compile the graph."""
        if not is_too_large(self._marked):
            self._compiled = compile_graph(self._marked.SerializeToString(), self._manifest.target)
            return
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, GRAPH_FILE)
            write_graph(self._marked, file)
            self._compiled = compile_graph(file, self._manifest.target)

    def get_input_metadata_impl(self) -> Any:
        """Describe the image."""
        return _metadata(self._compiled.input(0).any_name, self._manifest)

    def infer_impl(self, feed_dict: Any) -> dict[str, Any]:
        """Return the marked tensors."""
        results = self._compiled([*feed_dict.values()])
        self.inference_time = 0.0
        return {name: results[port] for port in self._compiled.outputs for name in port.names}

    def deactivate_impl(self) -> None:
        """Free the graph."""
        del self._compiled


class TorchHookedRunner(BaseRunner):  # type: ignore[misc]
    """The output of each named module of an eager network, by module name, and the logits."""

    def __init__(
        self, checkpoint: Path, names: Mapping[str, str], graph: ModelProto, manifest: EngineManifest
    ) -> None:
        from tasks.parts.engines.torch.eager import load_network
        from tasks.parts.engines.torch.runner import set_up_torch

        super().__init__(name="engine")
        set_up_torch(manifest.target)
        self._manifest = manifest
        self._image, self._logits = graph.graph.input[0].name, graph.graph.output[0].name
        self._model = load_network(checkpoint, manifest.target)
        self._outputs: dict[str, Any] = {}
        _hook_modules(self._model.network, set(names.values()), self._outputs)

    def get_input_metadata_impl(self) -> Any:
        """Describe the image."""
        return _metadata(self._image, self._manifest)

    def infer_impl(self, feed_dict: Any) -> dict[str, Any]:
        """Return the outputs that the hooks recorded."""
        import torch

        self._outputs.clear()
        with torch.inference_mode():
            answer = self._model(torch.from_numpy(feed_dict[self._image]).to(self._manifest.target.device))
        self.inference_time = 0.0
        return {**self._outputs, self._logits: answer.cpu().numpy()}


def _hook_modules(model: "nn.Module", names: set[str], outputs: dict[str, Any]) -> None:
    """Copy the output of each named leaf module; if a BatchNorm that the graph has folded reads it directly, copy
    that one's output instead."""
    import torch
    from torch import nn

    made_by: dict[int, str] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            made_by[id(output)] = name
            outputs[name] = output.detach().to("cpu", torch.float32, copy=True).numpy()

        return hook

    def replace(_module: Any, inputs: Any, output: Any) -> None:
        name = made_by.get(id(inputs[0]))
        if name is not None:
            outputs[name] = output.detach().to("cpu", torch.float32, copy=True).numpy()

    for name, module in model.named_modules():
        if name in names and not any(True for _ in module.children()):
            module.register_forward_hook(keep(name))
        elif isinstance(module, nn.BatchNorm2d):
            module.register_forward_hook(replace)
    model.register_forward_pre_hook(lambda *_: made_by.clear())


class TensorrtDebugRunner(BaseRunner):  # type: ignore[misc]
    """Tensors of a plan that survive fusion, under the names of `names`. Not run on real hardware.

    A separate plan is built: marking changes no fusion, but the engine file itself exposes no tensors.
    """

    def __init__(self, graph: ModelProto, names: Mapping[str, str], manifest: EngineManifest) -> None:
        super().__init__(name="engine")
        self._graph, self._names, self._manifest = graph, names, manifest

    def activate_impl(self) -> None:
        """Build the plan and load it."""
        choose_tensorrt(self._manifest.target.compiler)
        from tasks.parts.builders.tensorrt_plan import build_plan
        from tasks.parts.engines.gpu import find_gpus
        from tasks.parts.engines.tensorrt.runner import TensorrtRunner

        target = self._manifest.target
        assert target.tensorrt is not None
        target = replace(target, tensorrt=replace(target.tensorrt, error_on_timing_cache_miss=False))
        plan = build_plan(self._graph, target, find_gpus()[0], are_tensors_marked=True)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / self._manifest.file
            file.write_bytes(plan)
            copy_libraries(target, file.parent)
            self._runner = TensorrtRunner(file, self._manifest).__enter__()

    def get_input_metadata_impl(self) -> Any:
        """Describe the image."""
        return _metadata(self._graph.graph.input[0].name, self._manifest)

    def infer_impl(self, feed_dict: Any) -> dict[str, Any]:
        """Return the tensors that the plan exposes."""
        [images_NCHW] = feed_dict.values()
        self.inference_time = 0.0
        return named_as(self._names, self._graph, self._runner.infer_tensors(images_NCHW))

    def deactivate_impl(self) -> None:
        """Free the plan."""
        self._runner.__exit__(None, None, None)


def named_as(
    names: Mapping[str, str], graph: ModelProto, tensors_by_name: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Return the tensors that a fused engine exposes, by the values of `names`, in float32.

    A tensor that the graph quantizes may appear as int8 levels, after DequantizeLinear, or before quantization.
    """
    constants = {tensor.name: tensor for tensor in graph.graph.initializer}
    makers = {name: node for node in graph.graph.node for name in node.output}
    tensors = {}
    for original, twin in names.items():
        dequantize = makers.get(twin)
        levels = dequantize.input[0] if dequantize and dequantize.op_type == "DequantizeLinear" else ""
        if levels in tensors_by_name:
            assert dequantize is not None
            scale = numpy_helper.to_array(constants[dequantize.input[1]])
            tensors[twin] = tensors_by_name[levels].astype(np.float32) * scale
        elif twin in tensors_by_name or original in tensors_by_name:
            tensors[twin] = tensors_by_name[twin if twin in tensors_by_name else original].astype(np.float32)
    return tensors


def _metadata(name: str, manifest: EngineManifest) -> Any:
    return TensorMetadata().add(name, np.float32, (None, *manifest.card.image_shape))
