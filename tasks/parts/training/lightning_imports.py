"""What trainings use of Lightning, imported without two packages that none of it needs.

Lightning imports torchmetrics, and that imports scipy.signal and the models of transformers for metrics of sound and
of texts. After torch, ``import lightning`` takes 7.1 and 8.7 s of CPU time with them, and this module 3.9 and 5.0 s
(AMD EPYC, Lightning 2.6.6, torchmetrics 1.9.0, 2026-11-27; two runs of
``python -c "import time, torch; s = time.process_time(); import lightning; print(time.process_time() - s)"`` and of
the same with this module). Whoever needs the two imports them afterwards as ever.
"""

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType


class _StandIn(ModuleType):
    """Has whatever is imported from it."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return object


@contextlib.contextmanager
def _left_out(*names: str) -> Iterator[None]:
    stand_ins = {name: _StandIn(name) for name in names if name not in sys.modules}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]


with _left_out("scipy.signal", "transformers"):
    import lightning
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, WeightAveraging
    from lightning.pytorch.callbacks.progress.tqdm_progress import TQDMProgressBar
    from lightning.pytorch.profilers import Profiler

__all__ = [
    "Callback",
    "EarlyStopping",
    "LightningEnvironment",
    "ModelCheckpoint",
    "Profiler",
    "TQDMProgressBar",
    "WeightAveraging",
    "lightning",
]
