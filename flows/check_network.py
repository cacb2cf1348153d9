"""Build the networks of a configuration and say what the pipeline can do with them, before anything is trained.

``python -m flows.check_network network@train.baseline.network=custom train.baseline.network.file=my_networks/unet.py
train.baseline.network.factory=build`` prints the size of each network, the layer that computes its logits, the layers
that run in training only, and those that pruning has to leave whole.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from flows.networks import build_declared, network_sections
from flows.params import compose_params
from tasks.core.errors import ConfigError, EnginewrightError

if TYPE_CHECKING:
    from torch import nn


def describe(network: "nn.Module", size: tuple[int, int]) -> Iterator[str]:
    """Yield lines on a network for images of `size` = (height, width)."""
    from tasks.parts.networks.foreign import ForeignNetwork
    from tasks.parts.pruning.channel_groups import layers_kept_whole
    from tasks.parts.pruning.macs import measure_convs, total_macs

    network.eval()
    num_parameters = sum(parameter.numel() for parameter in network.parameters())
    macs = total_macs(measure_convs(network, size))
    yield f"  {num_parameters:,} parameters, {macs / 1e6:,.1f} MMACs at {size[0]}x{size[1]}"
    yield f"  logits: {network.classifier_layer}; the map before them: {network.feature_layer or 'not a module'}"
    if isinstance(network, ForeignNetwork) and network.training_only:
        yield f"  in training only: {', '.join(network.training_only)}"
    kept = layers_kept_whole(network, size)
    yield f"  pruning leaves {len(kept)} convolutions whole{':' if kept else ''}"
    yield from (f"    {layer}, because of {why}" for layer, why in kept.items())


def main(arguments: Sequence[str]) -> int:
    """Print what is found and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.check_network",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", help="as for flows.optimize")
    parser.add_argument("--classes", type=int, help="number of classes, where no classes.yaml tells")
    options = parser.parse_args(arguments)
    try:
        params = compose_params(options.overrides)
        data = params["prepare_data"]
        for name in network_sections(params):
            network = build_declared(params, name, options.classes)
            if network is None:
                raise ConfigError(
                    f"{data['root']} has no classes.yaml, so the number of classes is unknown. Give it: --classes 19."
                )
            print(f"train.{name}.network", *describe(network, (data["height"], data["width"])), sep="\n")
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
