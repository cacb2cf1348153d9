"""Errors that a user of the pipeline can act upon.

Each message says what was found, what was expected, what to do, and which config key to touch.

    EnginewrightError
    ├── ConfigError           a value in conf/ or params.yaml is unknown, of the wrong type or impossible
    ├── DataError             the data set is incomplete or contradicts itself
    ├── ArtifactError         a checkpoint, ONNX file, engine or output folder is missing, damaged or unsuitable
    ├── TrainingDiverged      the loss became NaN or infinite
    ├── ProcessDied           a data worker or a rank of a training was killed or failed
    ├── GateFailed            a measured value is beyond its limit
    ├── BuildFailed           a runtime cannot make an engine from a graph
    ├── TargetMismatch        this machine is not the one that a target declares
    ├── TrackingUnavailable   MLflow does not answer
    ├── TrackingRefused       MLflow answers, and does not take what is logged
    ├── DiskError             an output cannot be written: the disk is full, or its folder is read-only
    └── WorkspaceBusy         another run holds the same output folder or workspace
"""


class EnginewrightError(Exception):
    """Root of all errors raised on purpose; the command line prints it without a traceback."""


class ConfigError(EnginewrightError):
    """A configuration value is unknown, of the wrong type or impossible."""


class DataError(EnginewrightError):
    """The data set is incomplete or contradicts itself."""


class ArtifactError(EnginewrightError):
    """A checkpoint, ONNX file, engine or output folder is missing, damaged or unsuitable."""


class TrainingDiverged(EnginewrightError):
    """The loss became NaN or infinite."""


class GateFailed(EnginewrightError):
    """A measured value is beyond its limit."""


class BuildFailed(EnginewrightError):
    """A runtime cannot make an engine from a graph."""


class TargetMismatch(EnginewrightError):
    """This machine is not the one that a target declares."""


class TrackingUnavailable(EnginewrightError):
    """MLflow does not answer."""


class TrackingRefused(EnginewrightError):
    """MLflow answers, and does not take what is logged."""


class WorkspaceBusy(EnginewrightError):
    """Another run holds the same output folder or workspace."""


class DiskError(EnginewrightError):
    """An output cannot be written: the disk is full, or its folder is read-only."""


class ProcessDied(EnginewrightError):
    """A data worker or a rank of a training was killed or failed."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, shortened to fit into another message."""
    lines = str(error).strip().splitlines() or [repr(error)]
    return lines[0][:400]
