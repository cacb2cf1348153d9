"""Run networks in reduced precision, and report the precision of their layers.

The weights are cast instead of using autocast: the precision of a layer can then be read from its weights, and no
weight is cast again on each run. BatchNorm stays in float32, which its kernels accept beside reduced activations.
"""

from collections import Counter, defaultdict

import torch
from torch import Tensor, nn

from tasks.parts.engines.manifest import Precisions
from tasks.parts.engines.runtimes import Precision

_TYPES = {Precision.f32: torch.float32, Precision.bf16: torch.bfloat16, Precision.f16: torch.float16}
_PRECISIONS = {dtype: str(precision) for precision, dtype in _TYPES.items()}


class CastNetwork(nn.Module):
    """Maps float32 images to float32 logits, whatever the network computes in."""

    def __init__(self, network: nn.Module, precision: Precision) -> None:
        """Cast the weights of `network` in place."""
        super().__init__()
        self.network, self._dtype = network.eval(), _TYPES[precision]
        for module in network.modules():
            if not isinstance(module, nn.BatchNorm2d):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.to(self._dtype)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Return logits_NCHW."""
        logits_NCHW: Tensor = self.network(images_NCHW.to(self._dtype))
        return logits_NCHW.float()


def precisions_of(network: nn.Module) -> Precisions:
    """Count the modules with weights by type and by the type of their weights."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for module in network.modules():
        weight = getattr(module, "weight", None)
        if weight is not None:
            counts[type(module).__name__][_name(weight.dtype)] += 1
    return _sorted(counts)


def precisions_of_program(program: "torch.export.ExportedProgram") -> Precisions:
    """Count the operators of an exported program by kind and by the type of their first input."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for node in program.graph.nodes:
        value = next((maker.meta.get("val") for maker in node.all_input_nodes), None)
        is_operator = isinstance(node.target, torch._ops.OpOverload)
        kind = node.target._schema.name.removeprefix("aten::") if is_operator else ""
        if (
            kind
            and not kind.startswith("_assert")
            and isinstance(value, Tensor)
            and value.is_floating_point()
        ):
            counts[kind][_name(value.dtype)] += 1
    return _sorted(counts)


def _name(dtype: torch.dtype) -> str:
    return _PRECISIONS.get(dtype, str(dtype).removeprefix("torch."))


def _sorted(counts: dict[str, Counter[str]]) -> Precisions:
    return {kind: dict(sorted(by_precision.items())) for kind, by_precision in sorted(counts.items())}
