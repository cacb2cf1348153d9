"""What `flows.reproduce` does before it builds; tests/test_smoke.py builds."""

import pytest
import yaml

from flows.reproduce import _check_metric, main, prepare
from tasks.core.errors import ArtifactError
from tasks.core.tracking.records import TrackedEngine
from tasks.parts.engines.manifest import sha256_of
from tests.conftest import Workspace


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


@pytest.mark.parametrize("place", [("pruned-cpu_torch", "variant"), ("pruned-cpu_torch", "model")])
def test_params_that_were_changed_in_mlflow_reach_no_shell(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, place: tuple[str, str]
) -> None:
    monkeypatch.chdir(workspace.path)
    params = yaml.safe_load((workspace.path / "params.yaml").read_text())
    name, key = place
    params["engines"][name][key] = f"x; touch {workspace.path}/touched; echo"
    with pytest.raises(
        ArtifactError,
        match=rf"params\.yaml of the run was changed in MLflow: engines\.{name}\.{key} is 'x; touch",
    ):
        prepare(logged(workspace), yaml.safe_dump(params), "{}", workspace.path / "again")
    assert not (workspace.path / "again").exists()


@pytest.mark.parametrize("tag", ["variant", "target"])
def test_tag_that_would_lead_out_of_the_checkout_is_refused(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tag: str
) -> None:
    monkeypatch.chdir(workspace.path)
    params = (workspace.path / "params.yaml").read_text()
    with pytest.raises(ArtifactError, match=rf"The run's {tag} is '\.\./\.\./\.\.', expected letters"):
        prepare(logged(workspace, **{tag: "../../.."}), params, "{}", workspace.path / "again")


def logged(space: Workspace, **tags: str) -> TrackedEngine:
    """Return an engine as MLflow tells of it."""
    commit = space.run("git", "rev-parse", "HEAD").stdout.strip()
    return TrackedEngine(
        "1", "a" * 32, {"variant": "pruned", "target": "cpu_torch", "git_commit": commit, **tags}, {}
    )
