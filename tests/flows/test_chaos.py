"""Random faults for two minutes, with trivial stages; benchmarks/chaos.py takes the smoke pipeline for an hour."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, Workspace


@pytest.mark.slow
@pytest.mark.trial
def test_random_faults_lose_nothing_and_make_nothing_twice(
    tmp_path: Path, mount_disk: Callable[[Path, str], None]
) -> None:
    mount_disk(tmp_path / "probe", "size=1m")  # skips where nothing can be mounted
    results = tmp_path / "chaos.json"
    done = Workspace(REPOSITORY).run(
        *(sys.executable, "-m", "benchmarks.chaos", "--trivial", "--minutes", "1.5", "--events", "30"),
        *("--results", str(results)),
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert json.loads(results.read_text(encoding="utf-8"))["num_events"] >= 20
