"""Describe a target: a runtime and its version, a device, and build options.

A target is declared in `conf/target/<name>.yaml` and never detected, so that an engine's key does not depend on the
machine that computes it. The machine is only checked against the declaration.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Literal

from tasks.core.bounds import AtLeast, Between, LessThan, Matches, MoreThan
from tasks.core.errors import ConfigError
from tasks.parts.custom_operators import CustomOperators
from tasks.parts.engines.gpu import Gpu
from tasks.parts.engines.runtimes import CPU, CUDA, Precision, Runtime
from tasks.parts.engines.tensorrt_options import RTX_CAPABILITIES, HardwareCompatibility, TensorrtOptions

ANY = "any"
_TURING = "7.5"


class Reads(StrEnum):
    """What an engine reads."""

    normalised = "normalised"
    """Float32 [N, C, H, W], (value / 255 - mean) / std."""
    frames = "frames"
    """Uint8 [N, H, W, C], RGB for three channels."""
    bgr_frames = "bgr_frames"
    """Uint8 [N, H, W, 3] in the order blue, green, red, as OpenCV gives them."""


class Gives(StrEnum):
    """What an engine gives."""

    logits = "logits"
    """Float32 [N, C, H, W] or [N, C]."""
    classes = "classes"
    """The class with the largest logit, [N, H, W] or [N]: uint8, or uint16 for more than 256 classes. Values stay as
    they are."""


@dataclass(frozen=True)
class Target:
    """A runtime on a declared device with declared options."""

    name: Annotated[str, Matches(r"[a-z][a-z0-9_]*", "made of lower-case letters, digits and _")]
    """Last part of the addresses of this target's engines."""
    runtime: Runtime
    runtime_version: Annotated[str, Matches(r"\d+(\.\d+)*|" + ANY, 'a prefix such as "1.31", or "any"')]
    """Leading parts of the version that must be installed, such as "2026.4", or "any"."""
    device: str
    """"cpu", or "cuda" for an NVIDIA GPU."""
    gpu: Gpu | None
    """Required GPU, for device cuda. The name may be "any" if only the compute capability matters, which may be "any"
    as well."""
    cpu_flags: list[str]
    """Required flags of /proc/cpuinfo; without them the build is skipped with the reason."""
    precision: Precision
    """Precision of the layers that are not quantized. TensorRT takes it from the graph, which is rewritten for it; an
    FP16 graph (convert_precision) keeps its own."""
    num_threads: Annotated[int, Between(1, 1024)]
    """Threads of one inference. More threads than free cores make latency worse and noisy."""
    max_batch: Annotated[int, Between(1, 4096)]
    """Largest batch that the engine accepts. Engines of ONNX graphs for 1 have fixed shapes, which is faster."""
    channel_multiple: Literal[1, 8, 16, 32, 64]
    """Layer widths should be a multiple of this; pruning keeps multiples of the largest value of all targets.

    16 floats fill an AVX-512 register, 32 int8 channels are one vector of TensorRT's CHW32 format, 64 a row of
    int8 in AMX. 1: any width.
    """
    uint8_activations: bool
    """Activations of Q/DQ graphs are uint8 with a zero point, as written; else they become symmetric int8.

    Int8 has wider steps. With uint8, weights get 7 bits on x86 without VNNI. Both CPU runtimes are faster with uint8
    on CPUs with VNNI, and more accurate (benchmarks/encodings.py).
    """
    pairs_before_activations: bool
    """Keep Q/DQ pairs between a convolution and an activation function, a mean or the like.

    ONNX Runtime runs the convolution in integers only with them. Other runtimes compute convolution and activation in
    one kernel, faster and with one rounding less (benchmarks/placement.py).
    """
    stem_in_float: bool
    """Run convolutions that read the image in float even where the graph is quantized."""
    token_depthwise_in_float: bool
    """Run depthwise convolutions between the linear layers of transformers in float even where the graph is
    quantized. OpenVINO would reorder their maps twice."""
    resize_as_matmul: bool
    """Interpolate the logits by two matrix products if they are small."""
    reads: Reads
    """What the engine reads. Frames: normalisation is part of the graph; else it is done in numpy before each
    inference."""
    gives: Gives
    """What the engine gives. Classes: the argmax is part of the graph; else it is done in numpy behind each
    inference."""
    threshold: Annotated[float, MoreThan(0), LessThan(1)] | None
    """Least probability of the second of two classes; null: the class with the largest logit, of any number."""
    coarse_classes: bool
    """Take the argmax of the logits before their last resize, and repeat the classes. Faster, and coarser along
    edges: validate tells what it costs. Only where the engine gives classes of pixels."""
    opsets: list[int]
    """Lowest and highest ONNX opset that this runtime accepts. Empty for runtimes that read checkpoints."""
    min_agreement_db: Annotated[float, AtLeast(0)]
    """Least signal-to-noise ratio (dB) of the engine's logits against the unoptimised graph, or against the float32
    network on the CPU if the runtime reads checkpoints; below it the build fails."""
    min_agreement_int8_db: Annotated[float, AtLeast(0)]
    """Least signal-to-noise ratio (dB) for Q/DQ graphs; two correct engines differ by quantization noise."""
    min_int8_macs_share: Annotated[float, Between(0, 1)]
    """Least share of the MACs between Q/DQ pairs, as the target's graph has them, that the engine runs in int8. With
    less its precision is not the one that was asked for."""
    custom_operators: list[CustomOperators]
    """Libraries with operators outside standard ONNX: extensions of OpenVINO, plugins of TensorRT. Empty for ONNX
    Runtime, which takes those that the graph declares, and for TensorRT for RTX, which has no plugins."""
    tensorrt: TensorrtOptions | None
    """Options of the plan, for the runtimes tensorrt and tensorrt_rtx, and for ONNX Runtime if it runs a plan; null
    otherwise."""

    def __post_init__(self) -> None:
        traits, runtime = self.runtime.traits, f"for runtime {self.runtime}"
        self._require(self.device in traits.devices, "device", f"{' or '.join(traits.devices)} {runtime}")
        self._require(
            self.precision in self.compiler.traits.precisions,
            "precision",
            f"{', '.join(self.compiler.traits.precisions)} for runtime {self.compiler}",
        )
        self._require((self.gpu is None) == (self.device == CPU), "gpu", "a GPU for cuda, null for cpu")
        may_be_plan = self.device == CUDA and traits.plans != "none"
        self._require(
            may_be_plan if self.tensorrt else traits.plans != "required",
            "tensorrt",
            "options for runtime tensorrt or tensorrt_rtx, options or null for onnxruntime on cuda, null for others",
        )
        is_rtx = self.runtime is Runtime.tensorrt_rtx
        reads_graph = not traits.reads_checkpoints and self.compiler is self.runtime and not is_rtx
        self._require(
            reads_graph or not self.custom_operators,
            "custom_operators",
            f"[] {runtime}, which has none{' in a plan' if self.tensorrt else ''}",
        )
        if self.tensorrt:
            self.tensorrt.check_profiles(self.max_batch)
            switches = (
                "uint8_activations",
                "pairs_before_activations",
                "stem_in_float",
                "token_depthwise_in_float",
                "resize_as_matmul",
                "coarse_classes",
            )
            for switch in switches:
                self._require(not getattr(self, switch), switch, "false for engines of TensorRT")
            if self.runtime is Runtime.onnxruntime:
                self.tensorrt.check_provider()
            if is_rtx and self.gpu:
                self.tensorrt.check_rtx()
                self._require_rtx_gpu(self.gpu, self.tensorrt)
            if self.tensorrt.dla_core is not None:
                self._require(self.max_batch == 1, "max_batch", "1 where tensorrt.dla_core is set")
                is_half = self.precision is Precision.f16
                self._require(is_half, "precision", "f16 where tensorrt.dla_core is set")
        gives_classes = self.gives is Gives.classes
        self._require(
            gives_classes or not self.coarse_classes, "coarse_classes", f"false for gives {self.gives}"
        )
        takes_frames = self.compiler.traits.takes_frames
        self._require(takes_frames or self.reads is Reads.normalised, "reads", f"normalised {runtime}")
        self._require(takes_frames or not gives_classes, "gives", f"logits {runtime}")
        if traits.reads_checkpoints:
            self._require(not self.opsets, "opsets", f"[] {runtime}")
        else:
            are_opsets_ordered = len(self.opsets) == 2 and self.opsets[0] <= self.opsets[1]
            self._require(are_opsets_ordered, "opsets", "[lowest, highest]")

    @property
    def compiler(self) -> Runtime:
        """Runtime that compiles the graph: TensorRT also if ONNX Runtime runs its plan."""
        is_wrapped = self.tensorrt is not None and self.runtime.traits.plans == "optional"
        return Runtime.tensorrt if is_wrapped else self.runtime

    @property
    def operators_key(self) -> str:
        """Key of the configuration that declares its libraries, for errors."""
        return f"target.{self.name}.custom_operators"

    @property
    def is_plain(self) -> bool:
        """Whether its engines read normalised images and give logits."""
        return self.reads is Reads.normalised and self.gives is Gives.logits

    @property
    def plain(self) -> "Target":
        """The same target with engines that read normalised images and give logits."""
        return replace(self, reads=Reads.normalised, gives=Gives.logits, coarse_classes=False)

    def _require_rtx_gpu(self, gpu: Gpu, options: TensorrtOptions) -> None:
        """Raise ConfigError unless TensorRT for RTX builds for the GPU, which it is told and does not look for."""
        known = list(RTX_CAPABILITIES)
        if options.hardware_compatibility is HardwareCompatibility.ampere_plus:
            known = [one for one in known if one != _TURING] + [ANY]
        if gpu.compute_capability not in known:
            raise ConfigError(
                f"gpu.compute_capability is {gpu.compute_capability}, expected one of {', '.join(known)} for runtime "
                f"{self.runtime} with tensorrt.hardware_compatibility={options.hardware_compatibility}."
            )

    def _require(self, is_met: bool, field: str, expected: str) -> None:
        if not is_met:
            raise ConfigError(f"{field} is {getattr(self, field)!s}, expected {expected}.")
