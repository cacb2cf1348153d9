"""Convert a state dict of torch.save into a file of tensors alone.

``python -m flows.convert_weights weights.pt weights.safetensors`` reads only tensors: a file that needs code to be
loaded is refused. The result is what train.<network>.checkpoint and train.<network>.pretrained.file name.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tasks.core.errors import ConfigError, EnginewrightError


def convert(source: Path, out: Path) -> int:
    """Write the tensors of `source` to a new file and return their number.

    Raises ConfigError for a missing source, an existing `out` or one of another kind, ArtifactError for a source that
    holds no state dict or needs code.
    """
    from safetensors.torch import save

    from tasks.parts.networks.weights_file import read_tensors

    if not source.is_file():
        raise ConfigError(f"{source} is missing, expected a file of torch.save.")
    if out.suffix != ".safetensors" or out.exists():
        raise ConfigError(f"{out}: expected a new file that ends with .safetensors.")
    tensors = read_tensors(source, source.read_bytes(), "source")
    out.write_bytes(save({name: tensor.contiguous().clone() for name, tensor in tensors.items()}))
    return len(tensors)


def main(arguments: Sequence[str]) -> int:
    """Convert and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.convert_weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="a .pt or .pth file with a state dict")
    parser.add_argument("out", type=Path, help="the new .safetensors file")
    options = parser.parse_args(arguments)
    try:
        num_tensors = convert(options.source, options.out)
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(f"{options.out}: {num_tensors} tensors. Use it as train.baseline.checkpoint={options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
