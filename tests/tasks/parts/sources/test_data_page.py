"""docs/data.md: its commands compose, its class tables are read, and it names every source and key."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from flows.params import compose_params
from tasks.parts.sources.class_list import read_class_list
from tasks.parts.sources.config import FolderConfig
from tasks.prepare_data import Source
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs/data.md").read_text(encoding="utf-8")
COMMANDS = [line for line in PAGE.splitlines() if line.startswith("python -m flows.params")]


@pytest.mark.parametrize("command", COMMANDS)
def test_command_composes(command: str) -> None:
    overrides = shlex.split(command)[3:]
    assert f"data={compose_params(overrides)['prepare_data']['source']}" in overrides


@pytest.mark.parametrize("number", range(3))
def test_class_table_is_read(tmp_path: Path, number: int) -> None:
    tables = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert len(tables) == 3
    (tmp_path / "classes.yaml").write_text(tables[number])
    assert len(read_class_list(tmp_path).names) == 2


def test_every_source_and_key_is_named() -> None:
    described_elsewhere = {"annotations", "columns", "val_share", "test_share", "num_calibration"}
    keys = {field.name for field in dataclasses.fields(FolderConfig)} - described_elsewhere
    assert [name for name in (*Source, *keys) if f"`{name}`" not in PAGE] == []


def test_commands_of_conf_compose() -> None:
    for file in sorted((REPOSITORY / "conf/data").glob("*.yaml")):
        [command] = re.findall(r"^#   python -m flows\.optimize (.*)$", file.read_text(), re.MULTILINE)
        overrides = [word for word in shlex.split(command) if not word.startswith("model")]
        needs_model = file.stem in ("class_folder", "images")
        extra = ["model=onnx", "model.path=mine.onnx"] if needs_model else []
        assert compose_params([*overrides, *extra])["prepare_data"]["source"] == file.stem
