"""Versions of the packages that code of the user's own imports."""

from pathlib import Path

import pytest

from tasks import attach_metric
from tasks.core import environment
from tasks.core.environment import imported_versions
from tasks.core.execute import prepare_call

IMPORTS = """
import os.path, faketimm.models as models
from .sibling import thing

def late():
    import importlib
    from fakescipy import ndimage
    importlib.import_module("fakeplugin.extra")
    import found_nowhere
"""


def install(site: Path, name: str, version: str, *, module: str) -> None:
    """Install a package of one module, or another version of it, in place of the one before."""
    stem = name.replace("-", "_")
    for old in site.glob(f"{stem}-*.dist-info"):
        for file in old.iterdir():
            file.unlink()
        old.rmdir()
    info = site / f"{stem}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "top_level.txt").write_text(f"{module}\n")
    (site / f"{module}.py").write_text("")
    environment._version.cache_clear()  # as in another process
    environment._providers.cache_clear()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    site = tmp_path / "site"
    install(site, "fake-timm", "1.0", module="faketimm")
    install(site, "fake-scipy", "2.0", module="fakescipy")
    install(site, "fake-plugin", "3.0", module="fakeplugin")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    return site


def test_packages_that_a_file_imports_anywhere_are_found_a10(site: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(IMPORTS)
    (tmp_path / "broken.py").write_text("import faketimm(")
    found = imported_versions([tmp_path / "own.py", tmp_path / "broken.py"])
    assert found == {"fake-timm": "1.0", "fake-scipy": "2.0", "fake-plugin": "3.0"}
    assert "fake-scipy" not in imported_versions([tmp_path / "own.py"], without=["fakescipy"])


def test_files_are_parsed_once_and_again_after_an_edit_a10(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key of each stage with a network asks for them: 500 files took some 5 s each time."""
    own, parsed = tmp_path / "own.py", []
    parse = environment.ast.parse
    monkeypatch.setattr(environment.ast, "parse", lambda content: parsed.append(content) or parse(content))
    own.write_text("import faketimm")
    for _ in range(3):
        assert imported_versions([own]) == {"fake-timm": "1.0"}
    assert len(parsed) == 1
    own.write_text("import fakescipy as other")
    assert imported_versions([own]) == {"fake-scipy": "2.0"}


def test_metric_is_attached_again_after_an_update_of_what_it_imports_a10(site: Path, tmp_path: Path) -> None:
    (tmp_path / "metrics.py").write_text("import fakescipy\n\ndef dice(outputs, labels): ...\n")
    (tmp_path / "data").mkdir()
    params = {"attach_metric": {"function": "dice", "file": "metrics.py"}}
    inputs = {"metric": Path("metrics.py"), "data": Path("data")}
    before = prepare_call("attach_metric", inputs, params)
    assert before.environment == {"fake-scipy": "2.0"}
    install(site, "fake-timm", "1.1", module="faketimm")
    assert prepare_call("attach_metric", inputs, params).key == before.key
    install(site, "fake-scipy", "2.1", module="fakescipy")
    assert prepare_call("attach_metric", inputs, params).key != before.key
    missing = attach_metric.Config("dice", "absent.py")
    assert attach_metric.environment(missing) == {}
