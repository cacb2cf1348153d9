"""Engines for eager PyTorch: the checkpoint itself."""

import shutil
from pathlib import Path

from tasks.parts.builders.contract import Built, CheckpointSource
from tasks.parts.engines.target import Target
from tasks.parts.engines.torch.eager import ENGINE_FILE, load_network
from tasks.parts.engines.torch.precision import precisions_of
from tasks.parts.engines.torch.runner import set_up_torch


def build_file(target: Target, source: CheckpointSource, engine: Path) -> Built:
    """Copy the checkpoint, and read the precision of its network on the target's device."""
    set_up_torch(target)
    file = engine / ENGINE_FILE
    shutil.copyfile(source.file, file)
    return Built(file, precisions_of(load_network(file, target)))
