"""Bring finished weights of a network into the form of a trained one, instead of training it."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import AtLeast
from tasks.core.environment import versions
from tasks.core.errors import ArtifactError
from tasks.parts.networks.config import FOREIGN_PREFIX, NetworkConfig
from tasks.parts.networks.foreign_code import network_facts

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tasks.parts.data.dataset import Manifest
    from tasks.parts.data.reading import Reading
    from tasks.parts.networks.model_card import ModelCard

logger = logging.getLogger(__name__)

_LISTED = 4


@dataclass(frozen=True)
class Config:
    """Which network the weights belong to."""

    network: NetworkConfig
    """Architecture; not read for weights that this pipeline wrote, which say it themselves."""
    batch_size: Annotated[int, AtLeast(1)]
    """Images that are run at once to measure the score."""


@dataclass(frozen=True)
class Report:
    """Result of an import."""

    metric: str
    """Metric of the score: mIoU, or the user's own (model.metric)."""
    val_score: float
    """Score of the network on the validation split."""
    num_parameters: int
    """Weights of the network."""
    num_skipped: int
    """Tensors of the file that only training needs."""


def environment(cfg: Config) -> dict[str, str]:
    """Return what the output depends on besides inputs, configuration and code."""
    return versions("torch", "transformers") | network_facts(cfg.network)


def import_checkpoint(cfg: Config, *, weights: Path, data: Path, out: Path) -> Report:
    """Write ``model.safetensors`` from a file of weights, and measure its score.

    The file holds each tensor of the network under its name there (a state dict, as .safetensors or of torch.save);
    or a stage of this pipeline wrote it. Images are normalised by the mean and standard deviation of the data set.

    Raises ArtifactError for a file that is damaged, lacks tensors or has others, and for classes, size or
    normalisation that are not those of the data set.
    """
    from tasks.parts.data.dataset import read_manifest
    from tasks.parts.data.input_card import Task
    from tasks.parts.data.judge import metric_name
    from tasks.parts.networks.checkpoint import save_checkpoint
    from tasks.parts.training.predict import measure_score, open_labelled_images

    manifest = read_manifest(data)
    if _is_own(weights):
        network, card, num_skipped = *_load_own(weights, manifest), 0
    else:
        network, card, num_skipped = _load_foreign(cfg.network, weights, manifest)
    save_checkpoint(out / "model.safetensors", network, card)
    val_score = measure_score(network, open_labelled_images(data, "val"), card, batch_size=cfg.batch_size)
    metric = metric_name(manifest, Task.segmentation)
    logger.info("%s: val %s %.4f of the weights as they are", weights, metric, val_score)
    return Report(
        metric, val_score, sum(parameter.numel() for parameter in network.parameters()), num_skipped
    )


def _is_own(weights: Path) -> bool:
    """Whether a stage of this pipeline wrote the file."""
    from safetensors import SafetensorError, safe_open

    from tasks.parts.networks.model_card import CARD_KEY

    try:
        with safe_open(weights, framework="pt") as file:
            return CARD_KEY in (file.metadata() or {})
    except (SafetensorError, OSError):  # another kind, or damaged: whoever reads the tensors says so
        return False


def _load_own(weights: Path, manifest: "Manifest") -> "tuple[nn.Module, ModelCard]":
    from tasks.parts.data.input_card import check_same_classes
    from tasks.parts.networks.checkpoint import load_checkpoint

    network, card = load_checkpoint(weights, reading=manifest.reading)
    check_same_classes(weights, card.classes, manifest.classes, "train")
    if (card.height, card.width) != (manifest.height, manifest.width):
        raise ArtifactError(
            f"{weights} was trained on images of {card.height}x{card.width}, prepare_data makes them "
            f"{manifest.height}x{manifest.width}. Set prepare_data.height={card.height} "
            f"prepare_data.width={card.width}."
        )
    if (card.mean, card.std) != (manifest.mean, manifest.std):
        raise ArtifactError(
            f"{weights} was trained on images with mean {list(card.mean)} and std {list(card.std)}, the data set has "
            f"{list(manifest.mean)} and {list(manifest.std)}. Set prepare_data.mean={list(card.mean)} and "
            f"prepare_data.std={list(card.std)}."
        )
    _check_reading(weights, card.reading, manifest.reading)
    return network, card


def _check_reading(weights: Path, trained: "Reading", found: "Reading") -> None:
    """Raise ArtifactError for a data set that is read in another way than the images of the training."""
    for key in ("value_range", "resize_mode", "window_overlap"):
        before, now = getattr(trained, key), getattr(found, key)
        if before != now:
            before, now = (
                "null" if value is None else list(value) if isinstance(value, tuple) else value
                for value in (before, now)
            )
            raise ArtifactError(
                f"{weights} was trained on images with {key} {before}, the data set has {now}. Set "
                f"prepare_data.folder.{key}={before}."
            )
    other = sorted(set(found.types) - set(trained.types))
    if other:
        raise ArtifactError(
            f"{weights} was trained on files with values of type {', '.join(trained.types)}, the data set has "
            f"{', '.join(other)}, too. Convert these files, or train on them."
        )


def _load_foreign(
    config: NetworkConfig, weights: Path, manifest: "Manifest"
) -> "tuple[nn.Module, ModelCard, int]":
    """Build the network and load every tensor of it; return how many of the file it has no use for."""
    from tasks.parts.networks.build import build_for_data
    from tasks.parts.networks.checkpoint import stored_tensors
    from tasks.parts.networks.foreign import ForeignNetwork
    from tasks.parts.networks.model_card import ModelCard

    network = build_for_data(config, manifest)
    prefix, expected = FOREIGN_PREFIX if config.name.is_foreign else "", stored_tensors(network)
    found = _read(weights, {name.removeprefix(prefix) for name in expected})
    tensors = {f"{prefix}{name}": tensor for name, tensor in found.items()}
    _check_fit(weights, config, tensors, expected, all_names=set(network.state_dict()))
    if isinstance(network, ForeignNetwork):
        network.drop_auxiliary()
    network.load_state_dict(
        {name: tensor for name, tensor in tensors.items() if name in expected}, strict=False
    )
    num_skipped = len(set(tensors) - set(expected))
    return network.eval(), ModelCard.for_data(config, manifest), num_skipped


def _read(weights: Path, known: set[str]) -> "dict[str, Tensor]":
    from tasks.parts.networks.weights_file import read_tensors, without_wrappers

    try:
        content = weights.read_bytes()
    except OSError as error:
        raise ArtifactError(
            f"{weights} (train.<network>.checkpoint) cannot be read: {error.strerror}."
        ) from error
    return without_wrappers(read_tensors(weights, content, "train.<network>.checkpoint"), known)


def _check_fit(
    weights: Path,
    config: NetworkConfig,
    tensors: "dict[str, Tensor]",
    expected: "dict[str, Tensor]",
    *,
    all_names: set[str],
) -> None:
    """Raise ArtifactError unless the file has each tensor of the network, and none that no part of it has."""
    import torch

    def listed(names: set[str] | list[str]) -> str:
        shown = [name.removeprefix(FOREIGN_PREFIX) for name in sorted(names)]
        return ", ".join(shown[:_LISTED]) + (", ..." if len(shown) > _LISTED else "")

    problems = []
    counters = {name for name in expected if name.endswith("num_batches_tracked")}  # old files lack them
    if missing := set(expected) - set(tensors) - counters:
        problems.append(f"{len(missing)} of the {len(expected)} tensors are missing: {listed(missing)}")
    if unknown := set(tensors) - all_names:
        problems.append(f"{len(unknown)} belong to nothing in the network: {listed(unknown)}")
    shared = sorted(set(expected) & set(tensors))
    if other := [name for name in shared if tensors[name].shape != expected[name].shape]:
        first = other[0]
        problems.append(
            f"{len(other)} have another shape: {listed(other)} ({list(tensors[first].shape)} in the file, "
            f"{list(expected[first].shape)} in the network)"
        )
    if broken := [name for name in shared if not bool(torch.isfinite(tensors[name]).all())]:
        problems.append(f"{len(broken)} are not finite: {listed(broken)}")
    if problems:
        raise ArtifactError(
            f"{weights} (train.<network>.checkpoint) does not fit the network {config.name}: {'; '.join(problems)}. "
            "Set train.<network>.network to the network that was trained, with its classes in classes.yaml; or train "
            "further from a part of the tensors: train.<network>.pretrained.file."
        )
