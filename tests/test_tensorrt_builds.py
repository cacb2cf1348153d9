"""The benchmark that lets NVIDIA's builder take the corpus, for one network and one target of its table."""

import json
from pathlib import Path

import pytest

from benchmarks import tensorrt_builds


@pytest.mark.trial
def test_one_network_is_built_for_every_target(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    arguments = ["--workspace", str(tmp_path / "space"), "--results", str(results)]
    tensorrt_builds.main([*arguments, "--networks", "unet_transposed"])
    [row] = json.loads(results.read_text(encoding="utf-8"))["rows"]
    assert not row["fault"]
    found = {(build["graph"], build["target"]): build for build in row["builds"]}
    assert found.keys() == {
        (kind, name) for kind in tensorrt_builds.GRAPHS for name in tensorrt_builds.TARGETS
    }
    assert not any(build["fault"] for build in found.values()), found
    assert found["float", "h200_tensorrt"]["products"] == {"f16": 18}
    assert found["float", "h200_tensorrt_f32"]["products"] == {"f32": 18}
    assert found["INT8", "h200_tensorrt_static"]["products"] == {"int8": 18}


def test_page_names_what_was_refused() -> None:
    build = {"graph": "INT8", "target": "h200_tensorrt", "fault": "refuses | this", "warnings": {}}
    assert tensorrt_builds.cell(build) == "refuses / this"
    row = {"network": "crnn", "family": "CRNN", "fault": "flows.params: no", "builds": []}
    assert "| crnn | flows.params: no | | | | " in list(tensorrt_builds.table([row]))
