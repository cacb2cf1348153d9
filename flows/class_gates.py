"""Check the limits of single classes before the first stage: a wrong name would show after the training."""

from pathlib import Path
from typing import Any

from tasks.core.config import typed_config
from tasks.parts.data.class_limits import FLOORS, LIMITS, ClassLimits
from tasks.prepare_data import Config

STAGES = ("select_engine", "quantize_partial", "quantize_repaired", "rank_layers")
"""The stages that hold classes against limits."""


def name_classes(params: dict[str, Any]) -> None:
    """Make the names of limited classes strings: classes named 0 and 1 are numbers in YAML."""
    for section in (params[stage] for stage in STAGES if stage in params):
        for key in (LIMITS, FLOORS):
            if isinstance(section.get(key), dict):
                section[key] = {str(name): limit for name, limit in section[key].items()}


def check_class_gates(params: dict[str, Any]) -> None:
    """Raise ConfigError for limits of classes that the data set does not have, and DataError if it names none.

    Nothing is read without such limits. What this machine does not know, the stages check: the classes of a model
    that labels its own images, and of data that only the machine of a work pool has.
    """
    limits = {
        stage: ClassLimits(params[stage][LIMITS], params[stage][FLOORS])
        for stage in STAGES
        if stage in params
    }
    if not any(limits.values()):
        return
    classes = _read_classes(params)
    if classes is not None:
        for stage, of_stage in limits.items():
            of_stage.check_names(classes, stage)


def _read_classes(params: dict[str, Any]) -> tuple[str, ...] | None:
    from tasks.parts.sources.class_names import read_class_names

    imported = params.get("import_onnx", {})
    if imported.get("output_kind") == "values":
        return ()
    if imported.get("classes"):
        return tuple(map(str, imported["classes"]))
    cfg: Config = typed_config(Config, params["prepare_data"], "prepare_data")
    root = Path(cfg.root)
    if not root.is_dir():
        return None  # prepare_data reports it
    return read_class_names(str(cfg.source), root, scenes=cfg.scenes, folder=cfg.folder)
