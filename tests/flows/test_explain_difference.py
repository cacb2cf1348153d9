"""flows.explain: the difference of any two engines of a target."""

from pathlib import Path

import pytest

from flows.explain import main
from tests.tasks.conftest import workshop
from tests.tasks.test_explain import TARGET, Measured, measured

__all__ = ["measured", "workshop"]


@pytest.fixture
def in_workspace(measured: Measured, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work where the engines were measured."""
    root = measured.roofs.parents[2]
    monkeypatch.chdir(root)
    return root


@pytest.mark.usefixtures("in_workspace")
def test_difference_is_printed_with_its_layers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["float", "quantized", "--target", TARGET]) == 0
    text = capsys.readouterr().out
    assert text.startswith(("quantized brings ", "quantized is "))
    assert "| float to quantized, ms |" in text and "  ->  " in text
    assert main(["quantized", "float", "--target", TARGET]) == 0
    assert "| quantized to float, ms |" in capsys.readouterr().out


@pytest.mark.usefixtures("in_workspace")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["float", "pruned", "--target", TARGET], "pruned is not a measured engine of cpu_onnxruntime"),
        (
            ["float", "float", "--target", "cpu_torch"],
            "--target is cpu_torch, which was not explained. Found: cpu",
        ),
    ],
)
def test_what_is_unknown_is_named_with_what_there_is(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert capsys.readouterr().err.startswith(f"ConfigError: {message}")
