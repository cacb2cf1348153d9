"""Start data workers so that a signal which ends the training leaves no traceback of theirs."""

import signal
import sys
from multiprocessing.context import SpawnContext, SpawnProcess
from types import TracebackType

_ENDING: tuple[int, ...] = (signal.SIGINT, signal.SIGTERM)


class DataWorker(SpawnProcess):
    """A process whose start is not interrupted: it would find that what it is to run was cut off."""

    def start(self) -> None:
        """Start the process, and only then handle signals that came meanwhile.

        It inherits that Ctrl-C, which a terminal sends to all, is blocked, until ``prepare_worker``.
        """
        caught: list[int] = []
        handlers = {
            number: signal.signal(number, lambda number, _: caught.append(number)) for number in _ENDING
        }
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        for number in caught:
            signal.raise_signal(number)


class DataWorkers(SpawnContext):
    """The multiprocessing context of a DataLoader whose processes are data workers."""

    Process = DataWorker


def prepare_worker(_worker: int) -> None:
    """Leave Ctrl-C to the training process, and print no traceback when that ends while it takes over a batch.

    A thread of multiprocessing prints it through `sys.excepthook`; the training process reports its own end.
    """

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, OSError | EOFError):
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = show
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
