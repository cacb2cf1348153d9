"""What `flows.reproduce` does before it builds; tests/test_smoke.py builds."""

import pytest

from flows.reproduce import _check_metric, main
from tasks.core.errors import ArtifactError
from tasks.parts.engines.manifest import sha256_of


def test_engine_is_looked_up_where_the_option_says(tmp_path, capsys) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert main(["0123456789abcdef", "--tracking-uri", uri]) == 1
    assert f"MLflow at {uri} has no engine with sha256 0123456789abcdef" in capsys.readouterr().err


def test_commit_with_another_metric_than_the_measured_one_is_refused(tmp_path) -> None:
    file = tmp_path / "metrics.py"
    file.write_text("def dice(outputs, labels): ...\n")
    _check_metric(file, sha256_of(file), 40 * "a")
    measured = sha256_of(file)
    file.write_text("def dice(outputs, labels): return 1\n")
    with pytest.raises(ArtifactError, match=r"commit aaaaaaaaaaaa holds another metric .*not committed"):
        _check_metric(file, measured, 40 * "a")
    with pytest.raises(ArtifactError, match=r"none was logged"):
        _check_metric(file, "", 40 * "a")
    file.unlink()
    with pytest.raises(ArtifactError, match=r"sha256 no such file"):
        _check_metric(file, measured, 40 * "a")
