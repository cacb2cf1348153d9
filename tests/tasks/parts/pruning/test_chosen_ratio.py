from pathlib import Path

import pytest

from tasks.core.errors import ArtifactError, GateFailed
from tasks.parts.pruning.chosen_ratio import read_choice, write_choice


def test_choice_is_read_as_it_was_written(tmp_path: Path) -> None:
    write_choice(tmp_path / "choice.json", 0.35)
    assert read_choice(tmp_path / "choice.json") == 0.35


def test_a_search_without_choice_says_why(tmp_path: Path) -> None:
    write_choice(tmp_path / "choice.json", None, "all are slower")
    with pytest.raises(GateFailed, match=r"chose no ratio: all are slower\. Set prune\.from_search=false"):
        read_choice(tmp_path / "choice.json")


@pytest.mark.parametrize(
    "content",
    [
        None,
        "",
        "{}",
        "[]",
        '{"target_macs_ratio": null}',
        '{"target_macs_ratio": 1.0}',
        '{"target_macs_ratio": NaN}',
        '{"target_macs_ratio": "half"}',
    ],
)
def test_file_without_a_usable_ratio_says_what_to_do(content: str | None, tmp_path: Path) -> None:
    path = tmp_path / "choice.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(ArtifactError, match=r"choice\.json: no chosen ratio .*Run search_pruning again"):
        read_choice(path)
