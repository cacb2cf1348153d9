"""Where runs are logged according to params.yaml, and how that address is shown."""

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.core.config import find_section, read_params, typed_config
from tasks.core.errors import ConfigError

_SQLITE = "sqlite:///"
_DEFAULT_URI = f"{_SQLITE}mlflow.db"
_CREDENTIALS = re.compile(r"(?<=://)[^\s'\"]*@")
_PASSWORD = re.compile(r"(?i)(password=)[^&\s]+")


@dataclass(frozen=True)
class TrackingConfig:
    """Where runs are logged."""

    enabled: bool
    """False logs nothing, and MLflow is not needed."""
    uri: str
    """The address: ``sqlite:///mlflow.db`` is a file in the working directory, ``http://host:port`` a server. Empty:
    that of MLFLOW_TRACKING_URI, or the file if this is not set."""
    experiment: str
    """The experiment of the runs; it is created if it does not exist."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "uri", self.uri or os.environ.get("MLFLOW_TRACKING_URI") or _DEFAULT_URI)
        if not self.uri.startswith((_SQLITE, "http://", "https://", "postgresql")):
            raise ConfigError(
                f"track.uri is {mask_credentials(self.uri)!r}, expected sqlite:///<file>, "
                "http://<host>:<port>, https://... or postgresql://..."
            )
        if not self.experiment.strip():
            raise ConfigError("track.experiment is empty, expected the name of an experiment.")


def read_tracking_config(uri: str | None = None) -> TrackingConfig:
    """Return the tracking configuration of params.yaml, with its address replaced by `uri` if given."""
    config = tracking_config(read_params())
    return config if uri is None else dataclasses.replace(config, uri=uri)


def tracking_config(params: Mapping[str, Any]) -> TrackingConfig:
    """Return the tracking configuration in the content of params.yaml."""
    names = {field.name for field in dataclasses.fields(TrackingConfig)}
    section = {name: value for name, value in find_section(params, "track")[1].items() if name in names}
    config: TrackingConfig = typed_config(TrackingConfig, section, "track")
    return config


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
