"""Forget outputs, so that the next flow makes them again: to measure in a quieter hour, for example.

``python -m flows.forget <address> ...``, as ``benchmark.cpu_openvino``; ``benchmark`` stands for all below it.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence

from flows.workspace import hold_workspace
from tasks.core.errors import ConfigError, EnginewrightError
from tasks.core.execute import ARTIFACTS, load_stage
from tasks.core.reports import KEY_FILE, read_key
from tasks.core.store import forget


def forget_outputs(address: str) -> list[str]:
    """Remove the outputs at and below an address from the checkout and the store, and return their addresses.

    Raises ConfigError if there is no such stage or output.
    """
    load_stage(address)
    folder = ARTIFACTS.joinpath(*address.split("."))
    outputs = sorted(file.parent for file in folder.rglob(KEY_FILE))
    if not outputs:
        raise ConfigError(f"{folder} holds no output of a stage, so there is nothing to forget.")
    for output in outputs:
        forget(read_key(output))
        shutil.rmtree(output)
    return [".".join(output.relative_to(ARTIFACTS).parts) for output in outputs]


def main(arguments: Sequence[str]) -> int:
    """Forget outputs and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.forget",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("addresses", nargs="+", metavar="address")
    options = parser.parse_args(arguments)
    try:
        with hold_workspace():
            for address in options.addresses:
                for forgotten in forget_outputs(address):
                    print(f"forgotten: {forgotten}")
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
