"""Check the networks of a configuration that are not in this package, before anything runs."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from tasks.core.config import typed_config
from tasks.core.errors import ArtifactError, ConfigError
from tasks.core.execute import ARTIFACTS
from tasks.parts.data.dataset import read_manifest
from tasks.parts.data.own_metric import open_metric, try_on_masks
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.foreign_code import code_sha256, find_factory
from tasks.parts.sources.cityscapes import CITYSCAPES
from tasks.parts.sources.class_list import has_class_list, read_class_list
from tasks.parts.sources.voc import VOC

if TYPE_CHECKING:
    from torch import nn

_SECTIONS = (("train", "teacher"), ("train", "baseline"), ("distill",))
_READERS = (*_SECTIONS, ("import_checkpoint", "teacher"), ("import_checkpoint", "baseline"))
_SIZES = ("width", "depth")
_OWN_TABLES = {"cityscapes": CITYSCAPES, "voc": VOC}
_FOREIGN = [str(name) for name in NetworkName if name.is_foreign]


def complete_networks(params: dict[str, Any], overrides: Sequence[str]) -> None:
    """Take width and depth from foreign networks, and from ours of a named size; check that git tracks foreign code.

    conf/train and debug=smoke set both whatever the network is; what `overrides` set stays.
    """
    for place in _SECTIONS:
        section = params
        for name in place:
            section = section[name]
        network, key = section["network"], ".".join((*place, "network"))
        if not isinstance(network, dict):
            raise ConfigError(
                f"{key} is {network!r}, expected one of the files in conf/network. They are chosen by "
                f"network@{key}=segformer, for example, and sized by {key}.width=0.5."
            )
        is_foreign = network["name"] in _FOREIGN
        if not (is_foreign or network.get("arguments")):
            continue
        keys = [key]
        if place == ("distill",) and not is_foreign:  # its network is that of the baseline
            keys.append("train.baseline.network")
        for size in _SIZES:
            named = tuple(f"{key}.{size}=" for key in keys)
            if not any(override.lstrip("+").startswith(named) for override in overrides):
                network[size] = None if is_foreign else 1.0
        file = network.get("file")
        if is_foreign and isinstance(file, str) and Path(file).is_file():  # else a later check says more
            check_tracked(PurePath(file), f"{key}.file")
            if network["name"] == NetworkName.custom:
                _check_folder(PurePath(file).parent, f"{key}.file")


def check_networks(params: Mapping[str, Any]) -> None:
    """Build the foreign networks, as no stage before their training does.

    Raises ConfigError for what a training would refuse.
    """
    for name, section in network_sections(params).items():
        if section["network"]["name"] in _FOREIGN:
            build_declared(params, name)


def network_sections(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> section of each network that is trained or imported; none for an ONNX file of the user."""
    return {**params.get("train", {}), **params.get("import_checkpoint", {})}


def build_declared(
    params: Mapping[str, Any], name: str, num_classes: int | None = None
) -> "nn.Module | None":
    """Build a network for the images of the data set; None if the number of its classes is not known yet.

    Raises ConfigError, with the key of the network.
    """
    section = network_sections(params)[name]
    config: NetworkConfig = typed_config(NetworkConfig, section["network"], f"train.{name}.network")
    num_classes = num_classes or _num_classes(params["prepare_data"])
    data = params["prepare_data"]
    try:
        if num_classes is None:
            if config.name is not NetworkName.transformers:
                find_factory(config)
            return None
        from tasks.parts.networks.build import build_network

        channels = data["folder"]["channels"] if data["folder"] else 3
        return build_network(config, num_classes, size=(data["height"], data["width"]), num_channels=channels)
    except ConfigError as error:
        raise ConfigError(f"train.{name}.network: {error}") from error


def _num_classes(data: Mapping[str, Any]) -> int | None:
    """Return the number of classes of a data set as far as it is known before all files are read."""
    if data["scenes"]:
        return int(data["scenes"]["num_digits"]) + 1
    if has_class_list(Path(data["root"])):
        return len(read_class_list(Path(data["root"])).names)
    if (table := _OWN_TABLES.get(data["source"])) is not None:
        return len(table.names)
    dataset = ARTIFACTS / "prepare_data" / "dataset"
    if not dataset.is_dir() or (manifest := read_manifest(dataset)).source != data["source"]:
        return None
    return len(manifest.classes)


def check_metrics(params: Mapping[str, Any]) -> None:
    """Open a metric of the user's own and try it, as no stage before the first validation does.

    Raises ConfigError, or DataError for scores that are none.
    """
    data = params["prepare_data"]
    for item in params["pipeline"]["metrics"].values():
        score_images = open_metric(Path(item["file"]), params["attach_metric"]["function"])
        num_classes = _num_classes(data)
        if num_classes is not None and not params["pipeline"]["imports"]:
            try_on_masks(score_images, num_classes, data["height"], data["width"])


def check_recorded(params: Mapping[str, Any], facts: Mapping[str, Any], folder: Path, commit: str) -> None:
    """Raise ArtifactError unless a checkout holds the code of foreign networks as a run recorded it.

    `facts` are those of the run's surroundings (artifacts/environment.json), by section of its `params`.
    """
    for place in _READERS:
        section, recorded = _find(params, place), _find(facts, place).get("network")
        if recorded is None:
            continue
        config = typed_config(NetworkConfig, section["network"], ".".join((*place, "network")))
        try:
            found = code_sha256(config, folder)
        except ConfigError:
            found = None
        if found != recorded:
            raise ArtifactError(
                f"{config.file}: commit {commit[:12]} holds other code of the network (sha256 {str(found)[:12]} of "
                f"its folder and imported packages) than that of the run ({recorded[:12]}), because it was changed "
                "and not committed, or a package that it imports has another version here. Commit the folder and run "
                "the pipeline again, or install the versions of artifacts/environment.json."
            )


def _find(content: Mapping[str, Any], place: Sequence[str]) -> Mapping[str, Any]:
    """Return a nested section; an empty one if it is missing."""
    for name in place:
        content = content.get(name) or {}
    return content


def check_tracked(file: PurePath, key: str) -> None:
    """Raise ConfigError unless git tracks a file that the configuration names."""
    command = ["git", "ls-files", "--error-unmatch", "--", str(file)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        raise ConfigError(
            f"{file} is not tracked by git, so nobody could make the same again ({key}). Add and commit it: "
            f"git add {file}."
        )


def _check_folder(folder: PurePath, key: str) -> None:
    """Raise ConfigError for files of a network's folder that git does not track: they are part of its code."""
    command = ["git", "ls-files", "--others", "-z", "--", str(folder)]
    listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout.split("\0")
    untracked = [name for name in listed if name and "__pycache__" not in PurePath(name).parts]
    if untracked:
        raise ConfigError(
            f"{untracked[0]} is not tracked by git, but all files of {folder} count as the network's code ({key}). "
            f"Add and commit it (git add {untracked[0]}), or move it elsewhere."
        )
