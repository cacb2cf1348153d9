"""Where runs are logged according to params.yaml, and how that address is shown."""

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from tasks.core.config import find_section, read_params, typed_config
from tasks.core.errors import ConfigError

_SQLITE = "sqlite:///"
_CREDENTIALS = re.compile(r"(?<=://)[^\s'\"]*@")
_PASSWORD = re.compile(r"(?i)(password=)[^&\s]+")


@dataclass(frozen=True)
class TrackingConfig:
    """Where runs are logged."""

    enabled: bool
    """False logs nothing, and MLflow is not needed."""
    uri: str
    """The address: ``sqlite:///mlflow.db`` is a file in the working directory, ``http://host:port`` a server."""
    experiment: str
    """The experiment of the runs; it is created if it does not exist."""

    def __post_init__(self) -> None:
        if not self.uri.startswith((_SQLITE, "http://", "https://", "postgresql")):
            raise ConfigError(
                f"select_engine.tracking.uri is {mask_credentials(self.uri)!r}, expected sqlite:///<file>, "
                "http://<host>:<port>, https://... or postgresql://..."
            )
        if not self.experiment.strip():
            raise ConfigError(
                "select_engine.tracking.experiment is empty, expected the name of an experiment."
            )


def read_tracking_config(uri: str | None = None) -> TrackingConfig:
    """Return the tracking configuration of params.yaml, with its address replaced by `uri` if given."""
    section = find_section(read_params(), "select_engine")[1]["tracking"]
    config: TrackingConfig = typed_config(TrackingConfig, section, "select_engine.tracking")
    return config if uri is None else dataclasses.replace(config, uri=uri)


def database_file(uri: str) -> Path | None:
    """Return the file of a SQLite store; None for a server."""
    return Path(uri.removeprefix(_SQLITE)) if uri.startswith(_SQLITE) else None


def mask_credentials(uri: str) -> str:
    """Mask the user and password of a URI, for text that is shown or logged."""
    return _PASSWORD.sub(r"\1***", _CREDENTIALS.sub("***@", uri))


def registered_name(config: TrackingConfig, target: str) -> str:
    """Return the name of the registered model whose versions are the engines of a target."""
    return model_name(f"{config.experiment}-{target}")


def model_name(text: str) -> str:
    """Replace the characters that MLflow does not allow in model names."""
    return re.sub(r"[/:.%\"']", "-", text)


def experiments_page(uri: str) -> str | None:
    """Return the address of a server's experiments page; None for a database."""
    return f"{_CREDENTIALS.sub('', uri).rstrip('/')}/#/experiments" if uri.startswith("http") else None
