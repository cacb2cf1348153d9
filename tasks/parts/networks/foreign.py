"""Networks that are not in this package: their form is found by running them, and brought to that of ours.

A foreign network returns logits, [N, classes, h, w], of any size: alone, or first in a tuple or mapping, as networks
of torchvision, transformers and segmentation_models_pytorch do. In training it may return auxiliary logits beside
them.
"""

import copy
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from tasks.core.errors import ConfigError, first_line
from tasks.parts.networks.blocks import resize_to, spatial_size
from tasks.parts.networks.config import NetworkConfig, NetworkName
from tasks.parts.networks.depthwise import to_depthwise_separable
from tasks.parts.networks.foreign_code import find_factory, find_file

_LOGITS = ("logits", "out")
"""Under these names transformers and torchvision return logits."""

_CLASSIFIERS = (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)


class ForeignNetwork(nn.Module):
    """A foreign network with logits of the size of the images, and without its auxiliary ones.

    Layers that run in training only are not part of a checkpoint. After `drop_auxiliary` they are gone; then the
    modules that hold others stay in eval mode, so that the network asks for none of them, and only layers train.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.image_channels = 3
        self.feature_layer: str | None = None
        self.classifier_layer = ""
        self.training_only: tuple[str, ...] = ()
        """Names of the modules that run in training only."""
        self.has_auxiliary = False

    def forward(self, images_NCHW: Tensor) -> Tensor:
        return resize_to(_list_maps(self.network(images_NCHW))[0], spatial_size(images_NCHW))

    def all_logits(self, images_NCHW: Tensor) -> list[Tensor]:
        """Return the logits and the auxiliary ones of a training step, all of the size of the images."""
        size = spatial_size(images_NCHW)
        return [resize_to(maps_NCHW, size) for maps_NCHW in _list_maps(self.network(images_NCHW))]

    def train(self, mode: bool = True) -> "ForeignNetwork":
        """Set the mode of all modules; of layers alone if the auxiliary ones were dropped."""
        super().train(mode)
        if mode and self.training_only and not self.has_auxiliary:
            for module in self.network.modules():
                module.training = not any(True for _ in module.children())
        return self

    def drop_auxiliary(self) -> None:
        """Remove the layers that run in training only; auxiliary logits of others stay."""
        for name in self.training_only:
            self.set_submodule(name, nn.Identity())
        self.has_auxiliary = self.has_auxiliary and not self.training_only

    def is_stored(self, key: str) -> bool:
        """Whether a checkpoint holds this tensor."""
        return not any(key.startswith(f"{name}.") for name in self.training_only)


def logits_of(network: nn.Module, images_NCHW: Tensor) -> list[Tensor]:
    """Return the logits of a training step, and after them the auxiliary ones of a foreign network."""
    if isinstance(network, ForeignNetwork) and network.training and network.has_auxiliary:
        return network.all_logits(images_NCHW)
    return [network(images_NCHW)]


def all_logits(network: nn.Module, images_NCHW: Tensor) -> list[Tensor]:
    """Return all that a network computes in the mode in which it is: also auxiliary logits that it has in eval."""
    return network.all_logits(images_NCHW) if isinstance(network, ForeignNetwork) else [network(images_NCHW)]


def own_modules(network: nn.Module) -> nn.Module:
    """Return the network as its author knows it: names of modules in a configuration begin there."""
    return network.network if isinstance(network, ForeignNetwork) else network


def memory_format(network: nn.Module) -> torch.memory_format:
    """Return the layout of maps in which a network runs; foreign code may ask for views of contiguous ones."""
    return torch.contiguous_format if isinstance(network, ForeignNetwork) else torch.channels_last


def build_foreign(
    config: NetworkConfig, num_classes: int, *, size: tuple[int, int], num_channels: int
) -> ForeignNetwork:
    """Build a network, run it once in eval and in training mode, and find its classifier and auxiliary layers.

    It is always built on the CPU, because buffers that no checkpoint holds need their values.
    Raises ConfigError if it cannot be built or run, or returns no logits of `num_classes`.
    """
    with torch.device("cpu"), torch.inference_mode(False):  # which layer leads to the logits, gradients tell
        inner = _construct(config, num_classes)
        if config.depthwise:
            to_depthwise_separable(inner)
        network = ForeignNetwork(inner)
        network.image_channels = num_channels
        names = _Names(config, num_classes, (num_channels, *size))
        # Copies run: results that the user's code keeps could not be copied later.
        run = _run(copy.deepcopy(network).eval(), names)
        classifier = _find_classifier(network, run.calls, names)
        network.classifier_layer, network.feature_layer = classifier.name, classifier.source
        trained = _run(copy.deepcopy(network).train(), names)
        only = {call.name for call in trained.calls} - {call.name for call in run.calls}
        network.training_only = tuple(_outermost(network, only))
        if not _runs_without_auxiliary(network, run, names):
            network.training_only = ()
        network.has_auxiliary = trained.num_maps > 1
    return network.train()


@dataclass(frozen=True)
class _Names:
    """What errors name."""

    config: NetworkConfig
    num_classes: int
    image_CHW: tuple[int, ...]
    """Shape of an image."""

    @property
    def who(self) -> str:
        """The network as the user named it."""
        parts = (self.config.file, self.config.factory, self.config.arguments.get("model_type"))
        return f"network {self.config.name} ({', '.join(str(part) for part in parts if part)})"


@dataclass(frozen=True)
class _Call:
    """A module that ran."""

    name: str
    module: nn.Module
    output: "weakref.ref[Tensor] | None"
    """Its result, if that is one tensor; it is not kept alive."""
    source: str | None
    """Of layers that may compute the logits: the module whose output it read; None if it was none's."""
    leads_to_logits: bool = False
    """Whether the returned logits depend on its result; found in eval mode."""


@dataclass(frozen=True)
class _Run:
    """What a network did with two images."""

    calls: list[_Call]
    """In the order in which the modules ended."""
    logits_NCHW: Tensor
    num_maps: int
    """The logits and the auxiliary ones."""


def _runs_without_auxiliary(network: ForeignNetwork, run: _Run, names: _Names) -> bool:
    """Whether eval mode needs nothing of the layers that run in training only, such as the weights of a branch."""
    smaller = copy.deepcopy(network).eval()
    smaller.drop_auxiliary()
    try:
        found_NCHW = _run(smaller, names).logits_NCHW
    except ConfigError:
        return False
    return torch.equal(found_NCHW, run.logits_NCHW)


def _construct(config: NetworkConfig, num_classes: int) -> nn.Module:
    make: Callable[[], object]
    if config.name is NetworkName.transformers:

        def make() -> object:
            return _from_transformers(config, num_classes)
    else:
        factory = find_factory(config)

        def make() -> object:
            return factory(num_classes=num_classes, **config.arguments)

    try:
        network = make()
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(
            f"{_Names(config, num_classes, ()).who} cannot be built with num_classes={num_classes} and "
            f"{dict(config.arguments)}: {type(error).__name__}: {first_line(error)} (network.arguments)."
        ) from error
    if not isinstance(network, nn.Module):
        raise ConfigError(
            f"{config.file or ''} {config.factory}() returned {type(network).__name__}, expected a torch.nn.Module "
            "(network.factory)."
        )
    return network


def _from_transformers(config: NetworkConfig, num_classes: int) -> nn.Module:
    from transformers import AutoConfig, AutoModelForSemanticSegmentation

    values = json.loads(find_file(config).read_text(encoding="utf-8")) if config.file else {}
    values = {**values, **config.arguments, "num_labels": num_classes}
    for key in ("id2label", "label2id"):  # those of the file's own classes, which num_labels contradicts
        values.pop(key, None)
    declared = AutoConfig.for_model(values.pop("model_type"), **values)
    network: nn.Module = AutoModelForSemanticSegmentation.from_config(  # type: ignore[no-untyped-call]
        declared, attn_implementation="eager"
    )
    return network


def _list_maps(output: object) -> list[Tensor]:
    """Return the logits first, then all other tensors of four axes that a network returned."""
    if isinstance(output, Tensor):
        return [output] if output.ndim == 4 else []
    if isinstance(output, Mapping):
        first = next((name for name in _LOGITS if name in output), None)
        values = [output[first]] if first else []
        values += [value for name, value in output.items() if name != first]
    else:
        values = list(output) if isinstance(output, tuple | list) else []
    return [maps_NCHW for value in values for maps_NCHW in _list_maps(value)]


def _run(network: ForeignNetwork, names: _Names) -> _Run:
    """Run two images and check the logits."""
    calls: list[_Call] = []
    results: dict[int, Tensor] = {}  # of the layers that may compute the logits, by number of the call

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            read = inputs[0] if inputs and isinstance(module, _CLASSIFIERS) else None
            source = next(
                (call.name for call in reversed(calls) if call.output and call.output() is read), None
            )
            result = weakref.ref(output) if isinstance(output, Tensor) else None
            if isinstance(output, Tensor) and _num_outputs(module) == names.num_classes:
                results[len(calls)] = output
            calls.append(_Call(name, module, result, source if read is not None else None))

        return keep

    handles = [module.register_forward_hook(watch(name)) for name, module in network.named_modules() if name]
    images_NCHW = torch.zeros(2, *names.image_CHW)
    mode = "training" if network.training else "eval"
    try:
        with torch.set_grad_enabled(not network.training), torch.random.fork_rng(devices=[]):
            found = network.all_logits(images_NCHW)
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(
            f"{names.who} cannot run images {list(images_NCHW.shape)} in {mode} mode: {type(error).__name__}: "
            f"{first_line(error)}."
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if not found:
        raise ConfigError(
            f"{names.who} returned no tensor of four axes in {mode} mode, expected logits "
            f"[N, {names.num_classes}, h, w]."
        )
    for maps_NCHW in found:
        if maps_NCHW.shape[1] != names.num_classes:
            raise ConfigError(
                f"{names.who} returned [N, {maps_NCHW.shape[1]}, h, w] in {mode} mode, expected logits of "
                f"{names.num_classes} classes, [N, {names.num_classes}, h, w], and nothing else of four axes."
            )
    results = {number: result for number, result in results.items() if result.requires_grad}
    if results and found[0].requires_grad:
        gradients = torch.autograd.grad(found[0].sum(), list(results.values()), allow_unused=True)
        for number, gradient in zip(results, gradients, strict=True):
            calls[number] = replace(calls[number], leads_to_logits=gradient is not None)
    return _Run(calls, found[0].detach(), len(found))


def _find_classifier(network: ForeignNetwork, runs: list[_Call], names: _Names) -> _Call:
    """Return the call of the last layer with as many channels as there are classes of which the logits depend."""
    named = getattr(network.network, "classifier_layer", None)
    for call in reversed(runs):
        if call.leads_to_logits if named is None else call.name == f"network.{named}":
            return call
    if named is not None:
        raise ConfigError(
            f"{names.who}: classifier_layer is {named}, which is no module that runs in eval mode."
        )
    raise ConfigError(
        f"{names.who}: no convolution or linear layer computes {names.num_classes} channels, so the layer that "
        "computes the logits is unknown. Give the network an attribute classifier_layer with its dotted name."
    )


def _num_outputs(layer: nn.Module) -> int | None:
    if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
        return layer.out_channels
    return layer.out_features if isinstance(layer, nn.Linear) else None


def _outermost(network: nn.Module, names: set[str]) -> Iterator[str]:
    """Yield those of these modules that have tensors and lie in no other of them."""
    for name in sorted(names):
        parents = [name.rpartition(".")[0]]
        while parents[-1]:
            parents.append(parents[-1].rpartition(".")[0])
        if not names.intersection(parents) and network.get_submodule(name).state_dict():
            yield name
