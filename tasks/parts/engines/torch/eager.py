"""Eager PyTorch, the reference. The engine file is the checkpoint itself."""

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.parts.engines.target import Target

if TYPE_CHECKING:
    from tasks.parts.engines.torch.precision import CastNetwork

ENGINE_FILE = "engine.safetensors"


def load_network(checkpoint: Path, target: Target) -> "CastNetwork":
    """Rebuild a network on the target's device, computing in its precision."""
    from tasks.parts.engines.torch.precision import CastNetwork
    from tasks.parts.networks.checkpoint import load_checkpoint

    network, _ = load_checkpoint(checkpoint)
    return CastNetwork(network, target.precision).to(target.device)
