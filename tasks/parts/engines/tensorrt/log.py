"""Forward TensorRT's messages to Python's log, and keep its errors and warnings for our own. Needs TensorRT.

TensorRT keeps the first logger that it receives for the whole process, so there is only one.
"""

import logging

import tensorrt as trt

logger = logging.getLogger(__name__)

_LEVELS = {
    trt.ILogger.Severity.INTERNAL_ERROR: logging.ERROR,
    trt.ILogger.Severity.ERROR: logging.ERROR,
    trt.ILogger.Severity.WARNING: logging.WARNING,
    trt.ILogger.Severity.INFO: logging.DEBUG,
    trt.ILogger.Severity.VERBOSE: logging.NOTSET,
}
_SHOWN_ERRORS = 3


class TensorrtLog(trt.ILogger):  # type: ignore[misc]
    """Receives TensorRT's messages."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []
        self.warnings: list[str] = []

    def log(self, severity: "trt.ILogger.Severity", msg: str) -> None:
        """Forward one message."""
        level = _LEVELS[severity]
        if level == logging.ERROR:
            self.errors.append(msg)
        elif level == logging.WARNING:
            if msg in self.warnings:  # TensorRT for RTX says the same of each convolution
                level = logging.DEBUG
            self.warnings.append(msg)
        if level:
            logger.log(level, "TensorRT: %s", msg)


LOG = TensorrtLog()


def describe_errors(errors: list[str]) -> str:
    """Return the first errors in one line."""
    return "; ".join(errors[:_SHOWN_ERRORS]) or "it gave no reason"
