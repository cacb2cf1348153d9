"""The first stage of dvc.yaml, under a real ``dvc repro``."""

from typing import Any

import pytest
import yaml

from tests.conftest import Workspace

BAD = "x; touch hacked"
CHANGES: dict[str, dict[str, Any]] = {
    "train": {"networks": [BAD]},
    "attach_metric": {"metrics": {"own": {"file": BAD, "data": "data/digit_scenes"}}},
    "track": {"data": BAD},
}
"""By a stage whose command it is in. The file of a metric is no output of any stage."""


@pytest.mark.slow
@pytest.mark.parametrize("stage", CHANGES)
@pytest.mark.parametrize("options", [(), ("--keep-going",), ("--glob", "{stage}*")])
def test_edited_params_reach_no_shell(workspace: Workspace, stage: str, options: tuple[str, ...]) -> None:
    (workspace.path / BAD).touch()  # DVC starts a stage whose dependencies are there
    file = workspace.path / "params.yaml"
    params = yaml.safe_load(file.read_text())
    params["pipeline"] |= CHANGES[stage]
    params["engines"] = {}  # so that nothing comes before `track`
    params.setdefault("attach_metric", {"function": "dice", "file": "metrics.py"})
    file.write_text(yaml.safe_dump(params))
    done = workspace.run("dvc", "repro", *(option.format(stage=stage) for option in options))
    assert done.returncode != 0 and not (workspace.path / "hacked").exists(), done.stdout + done.stderr
    assert f"is {BAD!r}, which becomes part of a command" in done.stderr
    assert "python -m tasks" not in done.stdout  # no other stage was started
