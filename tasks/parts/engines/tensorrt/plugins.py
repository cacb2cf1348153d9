"""Load plugins, the custom operators of TensorRT, for a builder or a runtime. Not run on real hardware."""

from collections.abc import Sequence
from pathlib import Path

import tensorrt as trt

from tasks.core.errors import ArtifactError
from tasks.parts.engines.tensorrt.log import LOG, describe_errors


def load_plugins(registry: "trt.IPluginRegistry", libraries: Sequence[Path]) -> None:
    """Let TensorRT have its own plugins and those of checked libraries; raise ArtifactError for any that fail."""
    num_before = len(LOG.errors)
    if not trt.init_libnvinfer_plugins(LOG, ""):
        raise ArtifactError(
            f"TensorRT {trt.__version__} cannot load its own plugins ({describe_errors(LOG.errors[num_before:])}). "
            "Install it again, with its plugin library."
        )
    for library in libraries:
        num_before = len(LOG.errors)
        if registry.load_library(str(library)) is None:
            raise ArtifactError(
                f"{library}: TensorRT {trt.__version__} cannot load the plugins "
                f"({describe_errors(LOG.errors[num_before:])}). Build the library for this machine and this TensorRT."
            )
