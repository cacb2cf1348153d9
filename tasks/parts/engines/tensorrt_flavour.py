"""The two flavours of TensorRT, one of which a process runs.

TensorRT for RTX has nearly the interface of TensorRT under another name (`tensorrt_rtx`), so one set of modules
serves both. They import `tensorrt`, which stands for the flavour of the first target that a process builds or opens.
"""

import importlib
import sys

from tasks.core.errors import TargetMismatch
from tasks.parts.engines.runtimes import Runtime

_NAME = Runtime.tensorrt.traits.module


def choose_tensorrt(runtime: Runtime) -> None:
    """Let `import tensorrt` give a flavour from here on; call it before the modules that import it.

    Stages never need both: a process opens the engines of one target. Raises TargetMismatch in a process that runs
    the other one.
    """
    wanted = runtime.traits.module
    loaded = sys.modules.setdefault(_NAME, importlib.import_module(wanted))
    if loaded.__name__ != wanted:
        raise TargetMismatch(
            f"This process runs plans of {loaded.__name__} and cannot run those of {wanted} as well. Build or open "
            "the engines of the two runtimes in a process each."
        )
