"""Refuse a network that was trained for other classes than the data set has."""

from pathlib import Path

from tasks.core.errors import ArtifactError


def check_same_classes(checkpoint: Path, known: tuple[str, ...], data: tuple[str, ...], stage: str) -> None:
    """Raise ArtifactError unless a checkpoint, made by `stage`, knows the classes of the data in their order."""
    if known != data:
        raise ArtifactError(
            f"{checkpoint}: knows the classes {list(known)}, the data {list(data)}. Train it on this data set "
            f"({stage})."
        )
