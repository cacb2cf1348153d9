"""Where runs are logged is checked, and shown without passwords."""

import pytest

from tasks.core.errors import ConfigError
from tasks.core.tracking.config import TrackingConfig, mask_credentials


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("http://user:pass@host:5000/x", "http://***@host:5000/x"),
        ("http://host:5000", "http://host:5000"),
        ("http://user:p/w@host", "http://***@host"),
        ("http://user:p@ss@host", "http://***@host"),
        ("postgresql://host/db?user=me&password=secret&x=1", "postgresql://host/db?user=me&password=***&x=1"),
        ("sqlite:///mlflow.db", "sqlite:///mlflow.db"),
    ],
)
def test_credentials_are_masked(uri: str, shown: str) -> None:
    assert mask_credentials(uri) == shown


@pytest.mark.parametrize("uri", ["mlruns", "file:///mlruns", "ftp://host"])
def test_an_unknown_kind_of_store_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match=r"track\.uri"):
        TrackingConfig(enabled=True, uri=uri, experiment="engines")
