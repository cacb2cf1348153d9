"""Read a dvc.lock, and know one that is damaged: DVC writes it in place, so a kill or a full disk cuts it off."""

import re
from pathlib import Path
from typing import Any

import yaml

from tasks.core.errors import ArtifactError

LOCK_FILE = Path("dvc.lock")

_OURS = ("python -m tasks ", "python -m flows.")
_MD5 = re.compile(r"[0-9a-f]{32}(\.dir)?")


def read_lock(file: Path = LOCK_FILE) -> dict[str, Any]:
    """Return the content of a dvc.lock.

    Raises ArtifactError if DVC would refuse it, or if a stage of this pipeline has no outputs, or one without an md5.
    """
    from dvc.schema import COMPILED_LOCKFILE_SCHEMA
    from voluptuous import Invalid

    try:
        lock: dict[str, Any] = COMPILED_LOCKFILE_SCHEMA(
            yaml.load(file.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
        )
        found = _find_gap(lock)
    except (ValueError, yaml.YAMLError, Invalid) as error:
        found = " ".join(str(error).split())
    if found:
        raise ArtifactError(
            f"{file} is damaged ({found}), expected the command and the outputs of each stage. The next flow writes "
            f"it anew; without a flow, `git checkout {LOCK_FILE}`, or remove it."
        )
    return lock


def _find_gap(lock: dict[str, Any]) -> str:
    """Return what a dvc.lock lacks that DVC does not ask for; empty if nothing."""
    if "stages" not in lock:
        return "it has no stages"
    for name, stage in lock["stages"].items():
        if not str(stage["cmd"]).startswith(_OURS):
            continue  # stages that users add need no outputs
        if not stage.get("outs"):
            return f"{name} has no outputs"
        for output in stage["outs"]:
            if not _MD5.fullmatch(str(output.get("md5"))):
                return f"{output['path']} of {name} has no md5"
    return ""
