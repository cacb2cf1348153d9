"""Prepare a flow before its first stage: check for what would stop it later, and send pending runs."""

import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows import local_server
from flows.networks import check_metrics, check_networks
from flows.pipeline import RecordedStages, run_pipeline
from tasks.core.config import typed_config
from tasks.core.errors import ConfigError
from tasks.core.execute import ARTIFACTS, check_writable
from tasks.core.store import cache_folder
from tasks.core.tracking.config import database_file, tracking_config
from tasks.core.tracking.pending import has_pending
from tasks.parts.custom_operators import check_libraries
from tasks.parts.engines.machine import check_gpu
from tasks.parts.engines.target import Target
from tasks.prepare_data import Config as PrepareConfig

if TYPE_CHECKING:
    from tasks.import_onnx import Config as ImportConfig


def check_folders(params: dict[str, Any]) -> None:
    """Check before the first stage that the flow can write all its files.

    Raises DiskError.
    """
    outputs = _outputs(params)
    check_writable(*outputs, *(output.parent for output in outputs))
    check_writable(*(ARTIFACTS / name for name in (".drafts", ".locks")), local_server.HOME)
    check_writable(cache_folder(), cache_folder() / "files/md5", Path(".dvc/tmp"))
    tracking = tracking_config(params)
    database = database_file(tracking.uri)
    if tracking.enabled and database:
        check_writable(database, database.parent, database.with_name("mlruns"))


def check_gpus(params: dict[str, Any], targets: Collection[str]) -> None:
    """Check before the first stage that this machine has the GPU of these targets.

    Raises TargetMismatch.
    """
    for name in targets:
        section = params["build_engine"][name]
        if section["gpu"] is not None:
            check_gpu(typed_config(Target, section, f"target.{name}"))


def check_operators(params: dict[str, Any], targets: Collection[str]) -> None:
    """Check before the first stage that the libraries of these targets are those that were declared.

    Raises ArtifactError.
    """
    for name in targets:
        target: Target = typed_config(Target, params["build_engine"][name], f"target.{name}")
        check_libraries(target.custom_operators, target.operators_key)


def check_models(params: dict[str, Any]) -> None:
    """Check before the first stage that the user's networks, weights, metric and model can be read and fit.

    Raises ConfigError, ArtifactError, DataError.
    """
    for name, weights in params["pipeline"]["checkpoints"].items():
        if not Path(weights).is_file():
            raise ConfigError(
                f"{weights} is missing, expected a file with the weights of a network (train.{name}.checkpoint)."
            )
    check_networks(params)
    check_metrics(params)
    for name in params["pipeline"]["imports"].values():
        if not Path(name).exists():
            raise ConfigError(f"{name} is missing, expected an ONNX file, or a folder with one (model.path).")
        from tasks.import_onnx import Config

        cfg: Config = typed_config(Config, params["import_onnx"], "import_onnx")
        check_libraries(cfg.custom_operators, "model.custom_operators")
        from tasks.parts.onnx_graphs.foreign_rewrite import read_interface

        data = params["prepare_data"]
        (height, width), sizes = read_interface(
            Path(name),
            form=cfg.form,
            height=cfg.height,
            width=cfg.width,
            output=cfg.output_form,
            is_quantized=cfg.is_quantized,
            libraries=cfg.custom_operators,
        )
        channels = data["folder"]["channels"]
        if channels != cfg.form.num_channels:
            raise ConfigError(
                f"prepare_data.folder.channels is {channels}, but model.mean has {cfg.form.num_channels} items, one "
                "for each channel of the images. Set one of them."
            )
        if (data["height"], data["width"]) != (height, width):
            raise ConfigError(
                f"{name} reads images of {height}x{width}, but prepare_data makes them "
                f"{data['height']}x{data['width']}. Set prepare_data.height={height} prepare_data.width={width}."
            )
        _check_classes(cfg, sizes, data, Path(name))


def _check_classes(cfg: "ImportConfig", sizes: list[int], data: Mapping[str, Any], file: Path) -> None:
    """Raise ConfigError unless the names are as many as the classes of the model, as far as both are known."""
    from tasks.parts.onnx_graphs.foreign_form import Layout
    from tasks.parts.onnx_graphs.foreign_output import OutputKind
    from tasks.parts.sources.class_names import read_class_names

    if cfg.output_kind is OutputKind.values or len(sizes) not in (2, 4):
        return
    found = sizes[-1 if len(sizes) == 4 and cfg.output_layout is Layout.nhwc else 1]
    if cfg.threshold is not None and found == 1:
        found = 2
    prepare: PrepareConfig = typed_config(PrepareConfig, dict(data), "prepare_data")
    root, listed = Path(prepare.root), None
    if root.is_dir():  # else only the machine of a work pool has it
        listed = read_class_names(str(prepare.source), root, scenes=prepare.scenes, folder=prepare.folder)
    for names, where in ((cfg.classes, "model.classes"), (listed, f"the data set {root}")):
        if found and names is not None and len(names) != found:
            raise ConfigError(
                f"{file} has {found} classes, but {where} names {len(names)}. Name all of them, in the order of the "
                "logits (model.classes, or classes.yaml of the data set)."
            )


def send_pending_runs(params: dict[str, Any]) -> None:
    """Send the pending runs of earlier flows to MLflow; the command reports the result."""
    if tracking_config(params).enabled and has_pending():
        subprocess.run([sys.executable, "-m", "tasks.core.tracking"], check=False)


def count_calls(params: dict[str, Any]) -> int:
    """Return how many stage calls the pipeline has."""
    return len(_outputs(params))


def _outputs(params: dict[str, Any]) -> list[Path]:
    plan = RecordedStages()
    run_pipeline(plan, params)
    return [ARTIFACTS.joinpath(*address.split(".")) for address in plan.calls]
