"""Facts of the surroundings that shape an output: a part of its key.

A stage declares them by a function ``environment(cfg)`` in its module, which returns facts by name, or None if this
machine is not the one that ``cfg`` declares. Without the function, only inputs, configuration and code count.
"""

import functools
from collections.abc import Mapping
from pathlib import Path

Facts = Mapping[str, str]
"""Facts by name, such as ``{"torch": "2.13.0+cpu"}``."""

ENVIRONMENT_FILE = Path("artifacts/environment.json")
"""The facts of all stages, by section of params.yaml. DVC compares them with those of dvc.lock."""


def versions(*distributions: str) -> dict[str, str]:
    """Return the versions of those of these Python packages that are installed."""
    found = {name: _version(name) for name in distributions}
    return {name: version for name, version in found.items() if version}


@functools.cache
def _version(distribution: str) -> str:
    import importlib.metadata  # late, so that a small stage starts faster

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
