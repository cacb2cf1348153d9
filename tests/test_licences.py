"""LICENSE, and docs/licences.md: a row for each package that the product or a bundle needs, as it declares itself."""

import importlib.metadata
import re
import tomllib

from tasks.parts.engines.runtimes import Runtime
from tests.conftest import REPOSITORY

PAGE = (REPOSITORY / "docs/licences.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
READERS_OF_VIDEOS = {"av", "opencv-python-headless"}
"""Packages of which a bundle imports one if it is there."""


def rows() -> dict[str, tuple[str, str]]:
    """Return what the page says each package declares, and which native libraries its wheel has."""
    lines = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")][1:]
    assert all(len(cells) == 4 for cells in lines)
    return {name: (declared, native) for name, declared, _, native in lines}


def names_of(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in requirements}


def declared_by(package: str) -> str:
    """Return the licence that an installed package declares: as an expression, a class, or a line of text."""
    metadata = importlib.metadata.metadata(package)
    if metadata.get("License-Expression"):
        return str(metadata["License-Expression"])
    classes = [text.split(" :: ") for text in metadata.get_all("Classifier") or []]
    named = [parts[-1] for parts in classes if parts[0] == "License" and parts[-1] != "OSI Approved"]
    return " / ".join(named) or str(metadata["License"]).strip().splitlines()[0]


def test_license_is_apache_2() -> None:
    text = (REPOSITORY / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert "Copyright 2026 The Enginewright Authors" in text and "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0"


def test_each_package_that_is_needed_has_a_row_and_no_other_has() -> None:
    extras = PROJECT["optional-dependencies"]
    needed = names_of(PROJECT["dependencies"]).union(
        *(names_of(extras[extra]) for extra in extras if extra != "dev"), READERS_OF_VIDEOS
    )
    assert set(rows()) == needed
    assert {runtime.traits.distributions[0] for runtime in Runtime} <= set(rows())


def test_rows_say_what_the_installed_packages_declare() -> None:
    installed = {name for name in rows() if _is_installed(name)}
    assert len(installed) > 40
    wrong = {name: declared_by(name) for name in installed if rows()[name][0] != declared_by(name)}
    assert wrong == {}


def test_wheels_with_native_libraries_of_others_name_them() -> None:
    bundled = [
        name
        for name in rows()
        if _is_installed(name)
        and any(".libs" in file.parts[0] for file in importlib.metadata.files(name) or [])
    ]
    assert {"numpy", "scipy", "pillow", "av"} <= set(bundled)
    assert [name for name in bundled if rows()[name][1] == "none"] == []


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
