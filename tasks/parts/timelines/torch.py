"""Record inferences of eager PyTorch with its profiler: the operators that modules call, in order.

On a GPU these are the launches, and the kernels are a track of their own. Not run on real hardware there.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tasks.parts.engines.manifest import FloatArray
from tasks.parts.engines.runner import Runner
from tasks.parts.engines.runtimes import CUDA
from tasks.parts.timelines.inference import Inference
from tasks.parts.timelines.trace import Slice

HOW = "torch.profiler's own timestamps; it makes an eager network slower"

_INFERENCE = "enginewright inference"
_MODULE = "enginewright module "
_OPERATORS = "aten::"


@dataclass(frozen=True)
class TorchRecord:
    """Inferences, and what ran on the GPU meanwhile."""

    inferences: tuple[Inference, ...]
    kernels: tuple[Slice, ...]
    """Empty on a CPU."""


def record(runner: Runner, images_NCHW: FloatArray, num_inferences: int) -> TorchRecord:
    """Record inferences of a loaded network that has run before."""
    from torch.profiler import ProfilerActivity, profile, record_function

    target = runner.manifest.target
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if target.device == CUDA else [])]
    with profile(activities=activities) as profiler, _marked_modules():
        for _ in range(num_inferences):
            with record_function(_INFERENCE):
                runner.run(images_NCHW)
    events = sorted(profiler.events(), key=lambda event: float(event.time_range.start))
    on_cpu = [event for event in events if event.device_type.name == "CPU"]
    calls = [event for event in on_cpu if event.name == _INFERENCE]
    operators = [event for event in on_cpu if event.name.startswith(_OPERATORS) and _is_outermost(event)]
    inferences = tuple(
        Inference(
            call.time_range.start,
            call.time_range.end,
            tuple(
                _operator_slice(event, target.precision) for event in operators if _top(event).id == call.id
            ),
        )
        for call in calls
    )
    kernels = tuple(
        Slice(event.name, event.time_range.start, event.time_range.end - event.time_range.start)
        for event in events
        if event.device_type.name == "CUDA" and not event.is_user_annotation
    )
    return TorchRecord(inferences, kernels)


@contextlib.contextmanager
def _marked_modules() -> Iterator[None]:
    """Let the profiler see each call of a module, by its name in the network that is called."""
    from torch import nn
    from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
    from torch.profiler import record_function

    names: dict[nn.Module, str] = {}
    marks: list[Any] = []

    def enter(module: nn.Module, _: Any) -> None:
        if not marks:
            names.update((each, name) for name, each in module.named_modules())
        marks.append(record_function(_MODULE + names.get(module, type(module).__name__)))
        marks[-1].__enter__()

    def leave(*_: Any) -> None:
        marks.pop().__exit__(None, None, None)

    handles = [
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_outermost(event: Any) -> bool:
    """Whether an operator is called by a module or by the inference itself, and not by another operator."""
    return event.cpu_parent is not None and event.cpu_parent.name.startswith((_MODULE, _INFERENCE))


def _top(event: Any) -> Any:
    while event.cpu_parent is not None:
        event = event.cpu_parent
    return event


def _operator_slice(event: Any, precision: str) -> Slice:
    kind = event.name.removeprefix(_OPERATORS)
    module = event.cpu_parent.name.removeprefix(_MODULE).removeprefix(_INFERENCE).removeprefix("network.")
    duration_us = event.time_range.end - event.time_range.start
    details = {
        "kind": kind,
        "precision": precision,
        "module": module,
        "onnx_nodes": [],
        "duration_us": duration_us,
    }
    return Slice(f"{module}/{kind}" if module else kind, event.time_range.start, duration_us, details)
