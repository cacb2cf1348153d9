"""From a torch network to an ONNX graph whose nodes say which module and which line of code they come from.

Exports of one architecture have the same node and tensor names whatever their weights are, so calibrated
ranges, layer comparisons and trained weights can be matched by name.
"""

import ast
import contextlib
import copy
import logging
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxslim
import torch
from onnx import ModelProto, NodeProto, numpy_helper
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils._python_dispatch import TorchDispatchMode

from tasks.core.errors import ArtifactError
from tasks.parts.model_card import ModelCard
from tasks.parts.onnx_graph import CARD_KEY, set_node_source

INPUT_NAME = "image"
OUTPUT_NAME = "logits"
ROOT_MODULE = "network"  # the module name of code that stands in the network's own forward

_REPOSITORY = Path(__file__).resolve().parents[2]
_PACKAGES = Path(sysconfig.get_paths()["purelib"]).resolve()
_NETWORKS = (_REPOSITORY / "tasks" / "parts" / "networks", _PACKAGES / "transformers" / "models")
_LIBRARIES = tuple(
    {str(Path(sysconfig.get_paths()[key]).resolve()) for key in ("stdlib", "purelib", "platlib")}
    | {str(Path(torch.__file__).resolve().parent)}
)
_FRAME = re.compile(r'File "(?P<file>.+?)", line (?P<line>\d+), in ')
_NO_MODULE = "_empty_nn_module_stack"  # torch's name for sizes that it reads ahead of all modules
_MAX_BATCH_OF_EXPORT = 4096


def export_graph(model: nn.Module, card: ModelCard, *, height: int, width: int, opset: int) -> ModelProto:
    """Export a network in eval mode for images of height x width with a dynamic batch.

    BatchNorm is folded into the convolutions before it. The graph is simplified, checked, self-contained, and
    equal for equal weights. Raises ArtifactError for weights that are not finite (ONNX and its checker accept
    them).
    """
    check_finite(model)
    example_NCHW = torch.zeros(2, 3, height, width)
    folded = fold_batchnorm(model, example_NCHW)
    raw = _run_exporter(folded, example_NCHW, opset)
    graph = _simplify(raw)
    _name_nodes(graph, _read_sources(raw))
    _clear_unstable_fields(graph)
    entry = graph.metadata_props.add()
    entry.key, entry.value = CARD_KEY, card.to_json()
    onnx.checker.check_model(graph, full_check=True)
    return graph


def check_finite(model: nn.Module) -> None:
    """Raise ArtifactError that names the tensors with NaN or infinite values."""
    broken = [
        name
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
    ]
    if broken:
        raise ArtifactError(
            f"{len(broken)} weight tensors hold NaN or infinite values (first: '{broken[0]}'), expected "
            "finite numbers. Train again with a lower learning rate, or take an earlier checkpoint."
        )


def fold_batchnorm(model: nn.Module, example_NCHW: Tensor) -> nn.Module:
    """Return a copy in eval mode in which each BatchNorm that alone reads a convolution is part of it.

    Found by watching one forward pass, so it needs no naming rule and no traceable code. Folded BatchNorms
    become Identity: module names stay.
    """
    folded = copy.deepcopy(model).eval()
    for conv_name, norm_name in _conv_norm_pairs(folded, example_NCHW):
        conv, norm = folded.get_submodule(conv_name), folded.get_submodule(norm_name)
        assert isinstance(conv, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d)
        fused = fuse_conv_bn_eval(conv, norm).requires_grad_()  # its new bias would not be trained otherwise
        folded.set_submodule(conv_name, fused)
        folded.set_submodule(norm_name, nn.Identity())
    return folded


class _UseCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts how often each tensor is read, and keeps all alive so that their ids stay unique."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: Counter[int] = Counter()
        self._alive: list[Any] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        self.uses.update(id(leaf) for leaf in leaves if isinstance(leaf, Tensor))
        result = func(*args, **kwargs)
        self._alive.append((leaves, result))
        return result


def _conv_norm_pairs(model: nn.Module, example_NCHW: Tensor) -> list[tuple[str, str]]:
    made_by: dict[int, str] = {}
    read_by: dict[str, int] = {}
    calls: Counter[str] = Counter()
    handles = []

    def after_conv(name: str, output: Tensor) -> None:
        calls[name] += 1
        made_by[id(output)] = name

    def before_norm(name: str, inputs: tuple[Tensor, ...]) -> None:
        calls[name] += 1
        read_by[name] = id(inputs[0])

    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d):
            handles.append(module.register_forward_hook(lambda _m, _i, y, name=name: after_conv(name, y)))
        elif isinstance(module, nn.BatchNorm2d) and module.track_running_stats:
            handles.append(module.register_forward_pre_hook(lambda _m, x, name=name: before_norm(name, x)))
    counter = _UseCounter()
    with torch.no_grad(), counter:
        model(example_NCHW)
    for handle in handles:
        handle.remove()
    return [
        (made_by[tensor_id], norm)
        for norm, tensor_id in read_by.items()
        if tensor_id in made_by
        and counter.uses[tensor_id] == 1
        and calls[norm] == 1
        and calls[made_by[tensor_id]] == 1
    ]


def _run_exporter(model: nn.Module, example_NCHW: Tensor, opset: int) -> ModelProto:
    batch = torch.export.Dim("batch", min=1, max=_MAX_BATCH_OF_EXPORT)
    with _quiet_exporter():
        program = torch.onnx.export(
            model,
            (example_NCHW,),
            dynamo=True,
            opset_version=opset,
            input_names=[INPUT_NAME],
            output_names=[OUTPUT_NAME],
            dynamic_shapes=({0: batch},),
            verbose=False,
        )
    assert program is not None
    proto: ModelProto = program.model_proto
    return proto


@contextlib.contextmanager
def _quiet_exporter() -> Iterator[None]:
    """Hold back what the exporter says about packages that we do not use."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _read_sources(raw: ModelProto) -> dict[str, tuple[str, str]]:
    """Tensor name -> (module, file:line) from the metadata of torch's exporter, in order of execution."""
    sources = {}
    for node in raw.graph.node:
        entries = {entry.key: entry.value for entry in node.metadata_props}
        scopes = ast.literal_eval(entries.get("pkg.torch.onnx.name_scopes", "[]"))
        line = _line_of_ours(entries.get("pkg.torch.onnx.stack_trace", ""))
        if scopes and line:
            module = scopes[-2] if len(scopes) > 1 and scopes[-2] else ROOT_MODULE
            if module.startswith(_NO_MODULE):
                continue
            sources.update(dict.fromkeys(node.output, (module, line)))
    return sources


def _line_of_ours(stack_trace: str) -> str | None:
    """Return file:line of the innermost frame in a network's code, else in code that is no library."""
    frames = [(Path(match["file"]).resolve(), match["line"]) for match in _FRAME.finditer(stack_trace)]
    in_networks = [frame for frame in frames if any(frame[0].is_relative_to(root) for root in _NETWORKS)]
    own = [frame for frame in frames if not str(frame[0]).startswith(_LIBRARIES)]
    if not in_networks and not own:
        return None
    file, line = (in_networks or own)[-1]
    root = next((root for root in (_PACKAGES, _REPOSITORY) if file.is_relative_to(root)), file.parent)
    return f"{file.relative_to(root).as_posix()}:{line}"


def _simplify(raw: ModelProto) -> ModelProto:
    """Simplify; then write what only depends on the batch (Shape, Concat) as plain constants."""
    bare = ModelProto()
    bare.CopyFrom(raw)
    with _quiet_exporter():
        slim = onnxslim.slim(bare)
        slim = onnx.shape_inference.infer_shapes(slim, data_prop=True)
    shapes = _static_shapes(slim)
    for node in slim.graph.node:
        if node.op_type == "Resize":
            _resize_by_scales(slim, node, shapes)
        elif node.op_type == "ReduceMean":
            _mean_as_global_pool(slim, node, shapes)
    _drop_dead_nodes(slim)
    return slim


def _static_shapes(model: ModelProto) -> dict[str, list[int | None]]:
    shapes: dict[str, list[int | None]] = {}
    for value in [*model.graph.value_info, *model.graph.input, *model.graph.output]:
        dims = value.type.tensor_type.shape.dim
        shapes[value.name] = [dim.dim_value if dim.HasField("dim_value") else None for dim in dims]
    return shapes


def _resize_by_scales(model: ModelProto, node: NodeProto, shapes: dict[str, list[int | None]]) -> None:
    """Give Resize constant scales: the exporter computes `sizes` from the batch by Shape and Concat."""
    if len(node.input) < 4 or not node.input[3]:
        return
    source, target = shapes.get(node.input[0], []), shapes.get(node.output[0], [])
    if len(source) != 4 or len(target) != 4 or None in source[1:] or None in target[1:]:
        return
    scales = np.ones(4, dtype=np.float32)
    for axis in (2, 3):
        before, after = source[axis], target[axis]
        assert before is not None and after is not None
        scales[axis] = np.float32(after) / np.float32(before)
        if int(np.floor(np.float32(before) * scales[axis])) != after:
            return
    name = f"{node.output[0]}:scales"
    model.graph.initializer.append(numpy_helper.from_array(scales, name))
    del node.input[3]
    node.input[2] = name


def _mean_as_global_pool(model: ModelProto, node: NodeProto, shapes: dict[str, list[int | None]]) -> None:
    """Write the mean over height and width as GlobalAveragePool, which runtimes have INT8 kernels for."""
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    keep = next((attribute.i for attribute in node.attribute if attribute.name == "keepdims"), 1)
    if len(node.input) < 2 or node.input[1] not in constants or not keep:
        return
    axes = sorted(int(axis) % 4 for axis in numpy_helper.to_array(constants[node.input[1]]).ravel())
    if len(shapes.get(node.input[0], [])) == 4 and axes == [2, 3]:
        node.op_type = "GlobalAveragePool"
        del node.input[1]
        del node.attribute[:]


def _drop_dead_nodes(model: ModelProto) -> None:
    graph = model.graph
    needed = {value.name for value in graph.output}
    kept: list[NodeProto] = []
    for node in reversed(graph.node):
        if needed & set(node.output):
            needed.update(node.input)
            kept.append(node)
    nodes = [copy.deepcopy(node) for node in reversed(kept)]
    del graph.node[:]
    graph.node.extend(nodes)
    constants = [copy.deepcopy(tensor) for tensor in graph.initializer if tensor.name in needed]
    del graph.initializer[:]
    graph.initializer.extend(constants)


def _name_nodes(model: ModelProto, sources: dict[str, tuple[str, str]]) -> None:
    """Name nodes and tensors `<module>/<operator>` and attach module and file:line to every node."""
    graph = model.graph
    origins = _complete_origins(graph.node, sources)
    kept_names = {value.name for value in [*graph.input, *graph.output]}
    parameters = {tensor.name for tensor in graph.initializer}
    executed = {name: index for index, name in enumerate(sources)}
    order = sorted(
        range(len(graph.node)), key=lambda index: executed.get(graph.node[index].output[0], len(executed))
    )
    renamed: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for position in order:
        node, (module, source) = graph.node[position], origins[position]
        base = f"{module}/{node.op_type}"
        counts[base] += 1
        node.name = base if counts[base] == 1 else f"{base}_{counts[base]}"
        set_node_source(node, module, source)
        for index, name in enumerate(node.output):
            if name and name not in kept_names:
                renamed[name] = node.name if len(node.output) == 1 else f"{node.name}:{index}"
        for index, name in enumerate(node.input):
            if name in parameters and name not in renamed:
                renamed[name] = f"{node.name}:{_input_role(node, index)}"
    for node in graph.node:
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for item in [*graph.initializer, *graph.value_info]:
        item.name = renamed.get(item.name, item.name)


def _input_role(node: NodeProto, index: int) -> str:
    roles: dict[str, Sequence[str]] = {
        "Conv": ("x", "weight", "bias"),
        "Gemm": ("x", "weight", "bias"),
        "Clip": ("x", "min", "max"),
        "Resize": ("x", "roi", "scales", "sizes"),
    }
    names = roles.get(node.op_type, ())
    return names[index] if index < len(names) else f"constant{index}"


def _complete_origins(
    nodes: Sequence[NodeProto], sources: dict[str, tuple[str, str]]
) -> list[tuple[str, str]]:
    """Give nodes that simplification made the origin of the node that reads them, else of the one before."""
    found: list[tuple[str, str] | None] = [
        next((sources[name] for name in node.output if name in sources), None) for node in nodes
    ]
    made_by = {name: index for index, node in enumerate(nodes) for name in node.output}
    for index in reversed(range(len(nodes))):
        for name in nodes[index].input:
            producer = made_by.get(name)
            if producer is not None and found[producer] is None:
                found[producer] = found[index]
    for index, node in enumerate(nodes):
        if found[index] is None:
            before = [found[made_by[name]] for name in node.input if name in made_by]
            found[index] = next((origin for origin in before if origin), (ROOT_MODULE, "unknown:0"))
    return [origin for origin in found if origin is not None]


def _clear_unstable_fields(model: ModelProto) -> None:
    """Drop what holds paths, versions of tools or counters, so that equal networks give equal bytes."""
    del model.metadata_props[:]
    del model.functions[:]
    model.doc_string = ""
    model.graph.doc_string = ""
    model.graph.name = "enginewright"
    del model.graph.metadata_props[:]
    for item in [*model.graph.node, *model.graph.initializer]:
        item.doc_string = ""
    values = [*model.graph.value_info, *model.graph.input, *model.graph.output]
    for value in values:
        value.doc_string = ""
        del value.metadata_props[:]
    for value in [*model.graph.input, *model.graph.output]:
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    used = {name for node in model.graph.node for name in node.output}
    kept = [copy.deepcopy(value) for value in model.graph.value_info if value.name in used]
    del model.graph.value_info[:]
    model.graph.value_info.extend(sorted(kept, key=lambda value: value.name))
