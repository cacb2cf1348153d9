"""Load plugins, the custom operators of TensorRT, for a builder or a runtime. Not run on real hardware."""

from collections.abc import Sequence
from pathlib import Path

import tensorrt as trt

from tasks.core.errors import ArtifactError
from tasks.parts.engines.tensorrt.log import LOG, describe_errors


def load_plugins(registry: "trt.IPluginRegistry", libraries: Sequence[Path]) -> None:
    """Let TensorRT have the plugins of checked libraries; raise ArtifactError for one that it cannot load."""
    for library in libraries:
        num_before = len(LOG.errors)
        if registry.load_library(str(library)) is None:
            raise ArtifactError(
                f"{library}: TensorRT {trt.__version__} cannot load the plugins "
                f"({describe_errors(LOG.errors[num_before:])}). Build the library for this machine and this TensorRT."
            )
