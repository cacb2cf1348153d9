"""Simulate INT8 in a torch network that can still be trained.

Convolutions and linear layers get the quantizers of nvidia-modelopt (inputs per tensor, weights per output
channel, straight-through gradients). modelopt leaves functions (additions, concatenations, resizing, pooling) in
float; operators that are INT8 only at inference would cost accuracy, so the inputs of these functions are rounded
here too, with the same ranges. NCHW: batch, channels, rows, columns.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from onnx import ModelProto
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from tasks.core.errors import ArtifactError
from tasks.parts.onnx_graphs.graph import node_sources
from tasks.parts.onnx_graphs.node_names import ROOT_MODULE
from tasks.parts.quantization.qdq import (
    INT8_MAX,
    TensorRange,
    check_ranges,
    float_readers,
    quantizable_tensors,
)

_OPERATORS: dict[Callable[..., Any], str] = {
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), "Add"),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), "Mul"),
    **dict.fromkeys((torch.cat, torch.concat), "Concat"),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, F.sigmoid), "Sigmoid"),
    F.interpolate: "Resize",
    F.avg_pool2d: "AveragePool",
    F.max_pool2d: "MaxPool",
}
_LAYERS: dict[str, type[nn.Module]] = {"Conv": nn.Conv2d, "MatMul": nn.Linear, "Gemm": nn.Linear}
_GLOBAL_POOLS = (F.adaptive_avg_pool2d, torch.mean, Tensor.mean)


def fake_quantize(
    network: nn.Module, graph: ModelProto, ranges: Mapping[str, TensorRange], *, op_types: Sequence[str]
) -> nn.Module:
    """Add simulated INT8 to a network with folded BatchNorm, in place; `ranges` belong to its float export `graph`.

    Parameters keep their names. Weight ranges follow the weights, activation ranges stay as calibrated.
    """
    amax = _amax_of_inputs(graph, ranges, op_types)
    layers, functions = {}, {}
    for op_type, amax_of_nodes in amax.items():
        for name, values in amax_of_nodes.items():
            if op_type in _LAYERS:
                layers[name] = values[0]
            else:
                functions[op_type, name] = values
    _quantize_layers(network, layers, op_types)
    _round_functions(network, functions)
    return network


def float_weights(fake_quantized: nn.Module) -> dict[str, Tensor]:
    """Return the trained weights without the quantizers."""
    return {name: value for name, value in fake_quantized.state_dict().items() if "_quantizer." not in name}


def _amax_of_inputs(
    graph: ModelProto, ranges: Mapping[str, TensorRange], op_types: Sequence[str]
) -> dict[str, dict[str, list[float | None]]]:
    """Return operator -> node (for layers: module) -> largest magnitude of each input that is quantized."""
    names = set(quantizable_tensors(graph, op_types))
    check_ranges({name: ranges.get(name) for name in sorted(names)})
    amax_of_inputs: dict[str, dict[str, list[float | None]]] = {}
    sources, in_float = node_sources(graph), float_readers(graph, op_types)
    for node in graph.graph.node:
        amax = [ranges[name].amax if name in names else None for name in node.input]
        if any(amax) and node.name not in in_float:
            name = sources[node.name][0] if node.op_type in _LAYERS else node.name
            if amax_of_inputs.setdefault(node.op_type, {}).setdefault(name, amax) != amax:
                raise ArtifactError(
                    f"node '{node.name}' is another call of the layer '{name}' with another range, expected one "
                    "range per layer, which has one quantizer in training. Use a separate layer for each call."
                )
    return amax_of_inputs


def _quantize_layers(network: nn.Module, amax: Mapping[str, float | None], op_types: Sequence[str]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about transformers versions; its support for them is not used
        import modelopt.torch.quantization as mtq

    kinds = sorted({_LAYERS[op_type].__name__ for op_type in op_types if op_type in _LAYERS})
    rules: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for kind in kinds:
        for role, axis in (("input", None), ("weight", 0)):
            rules.append(
                {
                    "quantizer_name": f"*{role}_quantizer",
                    "parent_class": f"nn.{kind}",
                    "cfg": {"num_bits": 8, "axis": axis},
                }
            )
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        mtq.quantize(network, {"quant_cfg": rules, "algorithm": "max"})
    types = tuple(_LAYERS[op_type] for op_type in op_types if op_type in _LAYERS)
    layers = {name: module for name, module in network.named_modules() if isinstance(module, types)}
    missing = sorted(layers.keys() ^ amax.keys())
    if missing:
        raise ArtifactError(
            f"layer '{missing[0]}' is INT8 in only one of graph and network, expected the same layers in both. "
            "Run quantize_ptq, with the same op_types, on the graph that was exported from this checkpoint."
        )
    for name, module in layers.items():
        _quantizer(module, "input").amax = torch.tensor(amax[name], dtype=torch.float32)
        module.register_forward_pre_hook(_follow_weights)


def _follow_weights(layer: nn.Module, _inputs: Any) -> None:
    """Set the weight range to that of the current weights, as the exporter does."""
    assert isinstance(layer, nn.Conv2d | nn.Linear)
    others = tuple(range(1, layer.weight.ndim))
    amax_O = layer.weight.detach().abs().amax(dim=others, keepdim=True)
    _quantizer(layer, "weight").amax = torch.where(amax_O > 0, amax_O, 1.0)


def _quantizer(layer: nn.Module, role: str) -> Any:
    return layer.get_submodule(f"{role}_quantizer")


def _round_functions(network: nn.Module, amax: Mapping[tuple[str, str], Sequence[float | None]]) -> None:
    """Wrap the forward pass so that its functions read rounded inputs."""
    path: list[str] = []
    for name, module in network.named_modules():
        if name and "quantizer" not in name:
            module.register_forward_pre_hook(lambda _m, _x, name=name: path.append(name))
            module.register_forward_hook(lambda _m, _x, _y: path.pop() and None)
    plain_forward = network.forward

    def forward(images_NCHW: Tensor) -> Any:
        path[:] = [ROOT_MODULE]
        with _FunctionRounding(amax, path) as rounding:
            logits_NCHW = plain_forward(images_NCHW)
        missed = sorted(name for _, name in amax.keys() - rounding.rounded)
        if missed:
            raise ArtifactError(
                f"{len(missed)} INT8 nodes of the graph have no function in the network (first: "
                f"'{missed[0]}'), expected none. Export this checkpoint with export_onnx and calibrate its graph."
            )
        return logits_NCHW

    network.forward = forward


class _FunctionRounding(TorchFunctionMode):
    """Rounds the inputs of each function to the INT8 levels of its node in the ONNX graph.

    The node is found by name: `<module>/<operator>`, counted in the order of execution, as export names nodes.
    """

    def __init__(self, amax: Mapping[tuple[str, str], Sequence[float | None]], path: Sequence[str]) -> None:
        super().__init__()
        self._amax = amax
        self._path = path
        self._calls: Counter[str] = Counter()
        self.rounded: set[tuple[str, str]] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operator = _OPERATORS.get(func) or ("GlobalAveragePool" if func in _GLOBAL_POOLS else None)
        if operator is None or "quantizer" in self._path[-1]:
            return func(*args, **kwargs)
        base = f"{self._path[-1]}/{operator}"
        self._calls[base] += 1
        name = base if self._calls[base] == 1 else f"{base}_{self._calls[base]}"
        limits = self._amax.get((operator, name))
        if limits is not None:
            self.rounded.add((operator, name))
            args = tuple(_rounded(args, limits))
        return func(*args, **kwargs)


def _rounded(args: tuple[Any, ...], limits: Sequence[float | None]) -> Iterator[Any]:
    """Yield the arguments with their leading tensors rounded; torch.cat takes them as a list."""
    if isinstance(args[0], (list, tuple)):
        yield [_round(item, limit) for item, limit in zip(args[0], limits, strict=False)]
        yield from args[1:]
        return
    for index, item in enumerate(args):
        yield _round(item, limits[index]) if index < len(limits) else item


def _round(item: Any, amax: float | None) -> Any:
    if amax is None or not isinstance(item, Tensor):
        return item
    return torch.fake_quantize_per_tensor_affine(item, amax / INT8_MAX, 0, -INT8_MAX - 1, INT8_MAX)
