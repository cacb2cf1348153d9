"""Simulate INT8 in a torch network that can still be trained.

Weights of convolutions and linear layers get the quantizers of nvidia-modelopt (per output channel, straight-through
gradients). Inputs are rounded here, because modelopt has no zero points for them and leaves functions (additions,
concatenations, resizing, pooling) in float; operators that are INT8 only at inference would cost accuracy. NCHW:
batch, channels, rows, columns.
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
from tasks.parts.onnx_graphs.graph import index_graph, node_sources
from tasks.parts.onnx_graphs.node_names import ROOT_MODULE
from tasks.parts.quantization.config import Activations
from tasks.parts.quantization.qdq import (
    INT8_MAX,
    UINT8_MAX,
    TensorRange,
    check_ranges,
    place_pairs,
    quantizable_nodes,
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
_Levels = tuple[float, int, int, int]
"""Scale, zero point, lowest and highest level."""
_GLOBAL_POOLS = (F.adaptive_avg_pool2d, torch.mean, Tensor.mean)


def fake_quantize(
    network: nn.Module,
    graph: ModelProto,
    ranges: Mapping[str, TensorRange],
    *,
    op_types: Sequence[str],
    activations: Activations = Activations.uint8,
    weight_bits: int = 8,
) -> nn.Module:
    """Add simulated INT8 to a network with folded BatchNorm, in place; `ranges` belong to its float export `graph`.

    Parameters keep their names. Weight ranges follow the weights, activation ranges stay as calibrated. Weights of 7
    bits are rounded to 8 first, as in a graph that is stored with 8.
    """
    layers, functions = {}, {}
    for op_type, limits_of_nodes in _limits_of_inputs(graph, ranges, op_types).items():
        for name, limits in limits_of_nodes.items():
            levels = [None if limit is None else _levels(limit, activations) for limit in limits]
            if op_type in _LAYERS:
                layers[name] = levels[0]
            else:
                functions[op_type, name] = levels
    _quantize_layers(network, layers, op_types, weight_bits)
    for name, limit in _limits_of_outputs(graph, ranges, op_types).items():
        output_levels = _levels(limit, activations)
        network.get_submodule(name).register_forward_hook(
            lambda _layer, _inputs, output, levels=output_levels: _round(output, levels)
        )
    _round_functions(network, functions)
    return network


def _levels(limits: TensorRange, activations: Activations) -> _Levels:
    if activations is Activations.int8:
        return float(limits.int8()), 0, -INT8_MAX - 1, INT8_MAX
    scale, zero_point = limits.uint8()
    return float(scale), int(zero_point), 0, UINT8_MAX


def float_weights(fake_quantized: nn.Module) -> dict[str, Tensor]:
    """Return the trained weights without the quantizers."""
    return {name: value for name, value in fake_quantized.state_dict().items() if "_quantizer." not in name}


def _limits_of_inputs(
    graph: ModelProto, ranges: Mapping[str, TensorRange], op_types: Sequence[str]
) -> dict[str, dict[str, list[TensorRange | None]]]:
    """Return operator -> node (for layers: module) -> range of each input, None for those that stay float."""
    placement = place_pairs(graph, op_types)
    check_ranges({name: ranges.get(name) for name in placement.range_of.values()})
    limits_of_inputs: dict[str, dict[str, list[TensorRange | None]]] = {}
    sources = node_sources(graph)
    for node in quantizable_nodes(graph, op_types):
        limits = [
            ranges[placement.range_of[name]] if node.name in placement.readers.get(name, ()) else None
            for name in node.input
        ]
        if any(limits):
            name = sources[node.name][0] if node.op_type in _LAYERS else node.name
            if limits_of_inputs.setdefault(node.op_type, {}).setdefault(name, limits) != limits:
                raise ArtifactError(
                    f"node '{node.name}' is another call of the layer '{name}' with another range, expected one "
                    "range per layer, which has one quantizer in training. Use a separate layer for each call."
                )
    return limits_of_inputs


def _limits_of_outputs(
    graph: ModelProto, ranges: Mapping[str, TensorRange], op_types: Sequence[str]
) -> dict[str, TensorRange]:
    """Return convolution (its module) -> range of its output, where a pair stands that no INT8 operator reads.

    A ReLU between them changes nothing: the lowest level of its range is 0.
    """
    placement, sources = place_pairs(graph, op_types), node_sources(graph)
    makers = index_graph(graph.graph).makers
    read = {name for node in quantizable_nodes(graph, op_types) for name in node.input}
    limits = {}
    for name, known in placement.range_of.items():
        node = makers.get(name)
        while node is not None and node.op_type in ("Relu", "Clip"):
            node = makers.get(node.input[0])
        if node is not None and node.op_type == "Conv" and name not in read:
            limits[sources[node.name][0]] = ranges[known]
    return limits


def _quantize_layers(
    network: nn.Module, levels: Mapping[str, _Levels | None], op_types: Sequence[str], weight_bits: int
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about transformers versions; its support for them is not used
        import modelopt.torch.quantization as mtq

    kinds = sorted({_LAYERS[op_type].__name__ for op_type in op_types if op_type in _LAYERS})
    rules: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for kind in kinds:
        rules.append(
            {
                "quantizer_name": "*weight_quantizer",
                "parent_class": f"nn.{kind}",
                "cfg": [{"num_bits": bits, "axis": 0} for bits in range(8, weight_bits - 1, -1)],
            }
        )
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        mtq.quantize(network, {"quant_cfg": rules, "algorithm": "max"})
    types = tuple(_LAYERS[op_type] for op_type in op_types if op_type in _LAYERS)
    layers = {name: module for name, module in network.named_modules() if isinstance(module, types)}
    missing = sorted(layers.keys() ^ levels.keys())
    if missing:
        raise ArtifactError(
            f"layer '{missing[0]}' is INT8 in only one of graph and network, expected the same layers in both. "
            "Run quantize_ptq, with the same op_types, on the graph that was exported from this checkpoint."
        )
    for name, module in layers.items():
        module.register_forward_pre_hook(_follow_weights)
        module.register_forward_pre_hook(
            lambda _layer, inputs, level=levels[name]: (_round(inputs[0], level), *inputs[1:])
        )


def _follow_weights(layer: nn.Module, _inputs: Any) -> None:
    """Set the weight range to that of the current weights, as the exporter does."""
    assert isinstance(layer, nn.Conv2d | nn.Linear)
    others = tuple(range(1, layer.weight.ndim))
    amax_O = layer.weight.detach().abs().amax(dim=others, keepdim=True)
    for quantizer in layer.get_submodule("weight_quantizer").children():
        quantizer.amax = torch.where(amax_O > 0, amax_O, 1.0)


def _round_functions(network: nn.Module, levels: Mapping[tuple[str, str], Sequence[_Levels | None]]) -> None:
    """Wrap the forward pass so that its functions read rounded inputs."""
    path: list[str] = []
    for name, module in network.named_modules():
        if name and "quantizer" not in name:
            module.register_forward_pre_hook(lambda _m, _x, name=name: path.append(name))
            module.register_forward_hook(lambda _m, _x, _y: path.pop() and None)
    plain_forward = network.forward

    def forward(images_NCHW: Tensor) -> Any:
        path[:] = [ROOT_MODULE]
        with _FunctionRounding(levels, path) as rounding:
            logits_NCHW = plain_forward(images_NCHW)
        missed = sorted(name for _, name in levels.keys() - rounding.rounded)
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

    def __init__(
        self, levels: Mapping[tuple[str, str], Sequence[_Levels | None]], path: Sequence[str]
    ) -> None:
        super().__init__()
        self._levels = levels
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
        levels = self._levels.get((operator, name))
        if levels is not None:
            self.rounded.add((operator, name))
            args = tuple(_rounded(args, levels))
        return func(*args, **kwargs)


def _rounded(args: tuple[Any, ...], levels: Sequence[_Levels | None]) -> Iterator[Any]:
    """Yield the arguments with their leading tensors rounded; torch.cat takes them as a list."""
    if isinstance(args[0], (list, tuple)):
        yield [_round(item, level) for item, level in zip(args[0], levels, strict=False)]
        yield from args[1:]
        return
    for index, item in enumerate(args):
        yield _round(item, levels[index]) if index < len(levels) else item


def _round(item: Any, levels: _Levels | None) -> Any:
    if levels is None or not isinstance(item, Tensor):
        return item
    return torch.fake_quantize_per_tensor_affine(item, *levels)
