"""Open plans of TensorRT for RTX, which compiles kernels on the GPU that it finds, and keep these in a file.

Not run on real hardware. Sources: "Working with Runtime Cache", "Working with Dynamic Shapes" and "Working with RTX
CUDA Graphs" of NVIDIA's documentation of TensorRT for RTX 1.7.
"""

import logging
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorrt_rtx as trt

logger = logging.getLogger(__name__)

SUFFIX = ".kernels"
DRAFT = ".draft-"


def kernels_file(folder: Path, *, gpu: str, capability: str, version: str, driver: int, sha256: str) -> Path:
    """Return the file for the kernels of a plan with this sha256: one per GPU, version and CUDA driver (13020)."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    machine = f"{name}-sm{capability.replace('.', '')}-rtx{version}-cuda{driver}"
    return folder / f"{machine}-{sha256}{SUFFIX}"


def user_folder() -> Path | None:
    """Return the folder for the kernels of bundles, among this user's caches; None for a user without a home."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "enginewright"
    except RuntimeError:
        return None


def read_kernels(file: Path | None) -> bytes:
    """Return what was kept in a file; nothing if it is not there or cannot be read."""
    try:
        return file.read_bytes() if file is not None else b""
    except FileNotFoundError:
        return b""
    except OSError as error:
        logger.warning("%s: cannot be read (%s), so kernels are compiled again", file, error)
        return b""


def write_kernels(file: Path, content: bytes) -> None:
    """Write a file at once, so that no process reads half of it; where that cannot be, only tell it."""
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=DRAFT, dir=file.parent) as folder:
            draft = Path(folder, file.name)
            draft.write_bytes(content)
            draft.replace(file)
    except OSError as error:
        logger.warning(
            "%s: cannot be written (%s), so the next start compiles its kernels again", file, error
        )


class JitContexts:
    """Opens the execution contexts of a loaded plan; they share their kernels.

    Kernels for a batch size are compiled when it first runs, all of them and before the answer, so that what is
    measured is what runs from then on: by default a slower kernel for any size would answer meanwhile.
    """

    def __init__(
        self, engine: "trt.ICudaEngine", file: Path | None, error: type[Exception] = ValueError
    ) -> None:
        """Take the kernels of an earlier process from `file`, in a current CUDA context.

        TensorRT refuses those of another GPU, driver or version, or damaged ones. Calls that fail raise `error`.
        """
        self._engine = engine
        self._file, self._error = file, error
        config = engine.create_runtime_config()
        self._require(config is not None, "a runtime configuration")
        cache = config.create_runtime_cache()
        self._require(cache is not None, "a runtime cache")
        self._cache: trt.IRuntimeCache = cache
        self._batches: set[int] = set()
        self._kept = read_kernels(file)
        self.are_kernels_read = False
        """Whether the file had kernels for this GPU."""
        if self._kept:
            self.are_kernels_read = cache.deserialize(self._kept)
            if not self.are_kernels_read:
                logger.warning("%s: TensorRT refuses these kernels, and they are compiled again", file)

    def open(self, *, cuda_graph: bool) -> "trt.IExecutionContext":
        """Return a context.

        With `cuda_graph` TensorRT itself launches the kernels of a batch size as one graph, from its third run on.
        The stream must not be the default one, and must not be captured.
        """
        import tensorrt_rtx as trt

        config = self._engine.create_runtime_config()
        self._require(config is not None, "a runtime configuration")
        self._require(config.set_runtime_cache(self._cache), "the runtime cache")
        strategy = trt.CudaGraphStrategy.WHOLE_GRAPH_CAPTURE if cuda_graph else trt.CudaGraphStrategy.DISABLED
        config.cuda_graph_strategy = strategy
        self._require(config.cuda_graph_strategy == strategy, f"the CUDA graph strategy {strategy}")
        config.dynamic_shapes_kernel_specialization_strategy = (
            trt.DynamicShapesKernelSpecializationStrategy.EAGER
        )
        context = self._engine.create_execution_context(runtime_config=config)
        if context is None:
            raise self._error(
                "TensorRT has too little GPU memory for the engine. End other processes on the GPU."
            )
        return context

    def keep(self, batch: int) -> None:
        """Write the kernels when a batch size has run for the first time and its work is done."""
        if self._file is None or batch in self._batches:
            return
        self._batches.add(batch)
        memory = self._cache.serialize()
        self._require(memory is not None, "to serialize the runtime cache")
        content = bytes(memory)
        if content != self._kept:
            write_kernels(self._file, content)
            self._kept = content

    def _require(self, is_accepted: bool, call: str) -> None:
        if not is_accepted:
            raise self._error(f"TensorRT for RTX refuses {call}. Build the engine again here.")
