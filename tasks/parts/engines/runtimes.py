"""List the runtimes and their traits, which hold on any machine.

A new runtime is one entry of `Runtime`, a package `tasks/parts/engines/<runtime>` whose module `runner` has
`open_runner(file, manifest)`, a module `tasks/parts/builders/<runtime>.py` with `build_file(target, source, engine)`,
and a target that names it in `conf/target/`.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self

from tasks.parts.onnx_session import ONNXRUNTIME

CPU, CUDA = "cpu", "cuda"


class Precision(StrEnum):
    """Precision of unquantized layers; Q/DQ layers are always int8."""

    f32 = "f32"
    bf16 = "bf16"
    f16 = "f16"


@dataclass(frozen=True)
class RuntimeTraits:
    """Properties of a runtime that hold on any machine."""

    devices: tuple[str, ...]
    """Devices that it can run on."""
    precisions: tuple[Precision, ...]
    """Precisions that a target may declare for it."""
    distributions: tuple[str, ...]
    """Python packages that provide it."""
    module: str
    """Python module to import before a build or the loading of an engine is timed."""
    reads_checkpoints: bool = False
    """Whether its engines are built from a checkpoint, not an ONNX graph; then Q/DQ variants have none."""
    is_native_code: bool = False
    """Whether its engines load only with the version, CPU and GPU that compiled them."""
    takes_frames: bool = False
    """Whether its graphs may read frames and give classes (builders/frames.py)."""
    plans: Literal["none", "optional", "required"] = "none"
    """Whether it runs TensorRT plans on a GPU; its targets then declare the options of the plan."""


class Runtime(StrEnum):
    """The library that runs an engine."""

    traits: RuntimeTraits

    def __new__(cls, name: str, traits: RuntimeTraits) -> Self:
        """Create a member that equals its name."""
        member = str.__new__(cls, name)
        member._value_, member.traits = name, traits
        return member

    torch = "torch", RuntimeTraits((CPU, CUDA), tuple(Precision), ("torch",), "torch", reads_checkpoints=True)
    onnxruntime = (
        "onnxruntime",
        RuntimeTraits(
            (CPU, CUDA), (Precision.f32,), ONNXRUNTIME, "onnxruntime", takes_frames=True, plans="optional"
        ),
    )
    openvino = (
        "openvino",
        RuntimeTraits(
            (CPU,),
            (Precision.f32, Precision.bf16),
            ("openvino",),
            "openvino",
            is_native_code=True,
            takes_frames=True,
        ),
    )
    tensorrt = (
        "tensorrt",
        RuntimeTraits(
            (CUDA,), tuple(Precision), ("tensorrt",), "tensorrt", takes_frames=True, plans="required"
        ),
    )
    tensorrt_rtx = (
        "tensorrt_rtx",
        RuntimeTraits(
            (CUDA,),
            tuple(Precision),
            ("tensorrt_rtx_cu13",),
            "tensorrt_rtx",
            takes_frames=True,
            plans="required",
        ),
    )
    aotinductor = (
        "aotinductor",
        RuntimeTraits(
            (CPU, CUDA),
            tuple(Precision),
            ("torch",),
            "torch._inductor.package",
            reads_checkpoints=True,
            is_native_code=True,
        ),
    )


CHECKPOINT_RUNTIMES = tuple(runtime for runtime in Runtime if runtime.traits.reads_checkpoints)
