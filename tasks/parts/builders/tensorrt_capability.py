"""Aim a plan of TensorRT for RTX at the declared GPU, which its builder does not look for. Needs TensorRT for RTX."""

from typing import TYPE_CHECKING

from tasks.core.errors import BuildFailed
from tasks.parts.engines.target import Target
from tasks.parts.engines.tensorrt_options import HardwareCompatibility

if TYPE_CHECKING:
    import tensorrt_rtx as trt


def aim_at_gpu(config: "trt.IBuilderConfig", target: Target) -> None:
    """Build for the compute capability of the target's GPU only.

    With hardware_compatibility ampere_plus the plan is for every GPU since Ampere that TensorRT for RTX supports,
    which is its default. Raises BuildFailed if the builder refuses the compute capability.
    """
    import tensorrt_rtx as trt

    assert target.gpu is not None and target.tensorrt is not None
    if target.tensorrt.hardware_compatibility is HardwareCompatibility.ampere_plus:
        return
    name = f"SM{target.gpu.compute_capability.replace('.', '')}"
    config.num_compute_capabilities = 1
    if not config.set_compute_capability(trt.ComputeCapability.__members__[name], 0):
        raise BuildFailed(
            f"Target {target.name}: TensorRT for RTX {trt.__version__} refuses the compute capability {name} "
            f"(target.{target.name}.gpu.compute_capability). Install a version that has it."
        )
