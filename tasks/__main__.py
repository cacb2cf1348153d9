"""Run one stage: ``python -m tasks <address> name=path ...``, the command of every DVC stage and Prefect task."""

import argparse
import errno
import logging
import os
import signal
import sys
from pathlib import Path
from types import FrameType

from tasks.core.config import PARAMS_FILE, read_params
from tasks.core.errors import ConfigError, EnginewrightError
from tasks.core.execute import execute, execute_as_follower, explained_full_disk, prepare_call
from tasks.core.processes import die_with_parent
from tasks.parts.engines.nvtx import nvtx_range
from tasks.parts.training.ranks import SUPERVISOR, is_rank

_ASK_AGAIN_S = 1.0


def main(arguments: list[str]) -> int:
    """Run one stage and return the exit code: 0 if it is done or fresh, 1 for an error that the user can fix."""
    parser = argparse.ArgumentParser(prog="python -m tasks", description="Run one stage of the pipeline.")
    parser.add_argument("address", help="for example export_onnx.pruned")
    parser.add_argument("inputs", nargs="*", metavar="name=path", help="input files of the stage")
    parser.add_argument("--params", type=Path, default=PARAMS_FILE, help="default: params.yaml")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s", datefmt="%H:%M:%S")
    _DEPARTURE.prepare()
    # A rank has nothing to clean up, and only SIGKILL ends it while it waits for another rank.
    death_signal = signal.SIGKILL if is_rank() else signal.SIGTERM
    die_with_parent(int(os.environ.get(SUPERVISOR, os.getppid())), death_signal)
    try:
        params = read_params(options.params, options.address.partition(".")[0])
        call = prepare_call(options.address, _parse_inputs(options.inputs), params)
        with nvtx_range(options.address):
            if is_rank() or int(os.environ.get("LOCAL_RANK", "0")) > 0:
                with explained_full_disk(call.draft):
                    execute_as_follower(call)
            else:
                execute(call)
    except EnginewrightError as error:
        print(f"{options.address}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        if error.errno not in (errno.EROFS, errno.EACCES):
            raise
        print(
            f"{options.address}: cannot access {error.filename or 'a file'}: {error.strerror}. Fix the "
            "permissions; finished stages are kept.",
            file=sys.stderr,
        )
        return 1
    return 0


def _parse_inputs(arguments: list[str]) -> dict[str, Path]:
    inputs: dict[str, Path] = {}
    for argument in arguments:
        name, separator, path = argument.partition("=")
        if not separator or not name.isidentifier() or not path:
            raise ConfigError(
                f"{argument!r} is not an input. Expected name=path, for example data=artifacts/..."
            )
        inputs[name] = Path(path)
    return inputs


class _Departure:
    """Turns SIGTERM and Ctrl-C into an exit that runs every ``finally`` and has the exit code that shells expect.

    SystemExit is lost if it is raised in a callback of the interpreter (the import system has some) or if it is
    turned into another error, so it is raised again every second until something handles it.
    """

    code = 0

    def prepare(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, self._depart)

    def _depart(self, number: int, _frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, _ASK_AGAIN_S)
        if number != signal.SIGALRM:
            self.code = 128 + number
        elif _is_exiting(sys.exception()):
            return
        sys.exit(self.code)


def _is_exiting(handled: BaseException | None) -> bool:
    while handled is not None and not isinstance(handled, SystemExit):
        handled = handled.__context__
    return handled is not None


_DEPARTURE = _Departure()


def _leave(code: int) -> None:
    """End this process at once: everything is published, and training libraries take up to two seconds to unload."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    # Not imported here: a small stage starts faster without it.
    multiprocessing = sys.modules.get("multiprocessing")
    if is_rank() or (multiprocessing and multiprocessing.active_children()):
        sys.exit(code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except BaseException:
        if not _DEPARTURE.code:
            raise
        return _DEPARTURE.code  # even if SystemExit was turned into another error


if __name__ == "__main__":
    _leave(_run(sys.argv[1:]))
