"""Reading params.yaml."""

from pathlib import Path

import pytest

from tasks.core.config import find_section, read_params
from tasks.core.errors import ConfigError


def test_one_section_is_the_same_as_in_the_whole_file(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    text = "first: &values {epochs: 3, name: ~}\nsecond:\n  <<: *values\n  name: [1, 2]\nthird: 1\n"
    file.write_text(text, encoding="utf-8")
    whole = read_params(file)
    assert whole["second"] == {"epochs": 3, "name": [1, 2]}
    for name in whole:
        assert read_params(file, name) == {other: whole[other] if other == name else None for other in whole}


@pytest.mark.parametrize("text", ["", "first", "- first", "first: [", "first: 1\nsecond: *unknown"])
@pytest.mark.parametrize("section", [None, "second"])
def test_file_that_is_no_mapping_is_named(tmp_path: Path, text: str, section: str | None) -> None:
    file = tmp_path / "params.yaml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"(?s)params.yaml is not .*Write it with `python -m flows.params`"):
        read_params(file, section)


def test_missing_section_is_named_with_those_that_are_there(tmp_path: Path) -> None:
    file = tmp_path / "params.yaml"
    file.write_text("first: {}\nsecond: {}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"no section 'third' for third\. Found: first, second"):
        find_section(read_params(file, "third"), "third")
