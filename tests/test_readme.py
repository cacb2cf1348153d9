"""Every command of the README and of the guides runs, in the smoke configuration."""

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, SMOKE, Workspace

pytestmark = pytest.mark.slow

PAGES = ("README.md", "docs/guide.md", "docs/outputs.md")
COMMANDS = [
    line
    for page in PAGES
    for block in re.findall(r"```bash\n(.*?)```", (REPOSITORY / page).read_text(), re.DOTALL)
    for line in block.splitlines()
    if line and not line.startswith("#")
]


@pytest.fixture(scope="module")
def ready(smoke_run: tuple[Workspace, str]) -> Iterator[Workspace]:
    """The workspace of the smoke run, with the environment that `make` expects and a small data set to bring."""
    space, _ = smoke_run
    if not (space.path / ".venv").exists():
        (space.path / ".venv").symlink_to(sys.prefix)
    make_folder_data(space.path / "data" / "cells")
    yield space
    space.flow()  # back to what the other tests of the session expect


def make_folder_data(root: Path) -> None:
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for folder in ("images", "masks"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for index in range(24):
        mask_HW = np.zeros((80, 96), np.uint8)
        top, left = generator.integers(0, 40, 2)
        mask_HW[top : top + 30, left : left + 30] = 1
        image_HWC = generator.integers(0, 90, (80, 96, 3), dtype=np.uint8)
        image_HWC[mask_HW == 1] += 120
        Image.fromarray(image_HWC).save(root / "images" / f"{index}.png")
        Image.fromarray(mask_HW).save(root / "masks" / f"{index}.png")
    (root / "classes.yaml").write_text("classes: [background, cell]\n")


def test_pages_have_commands() -> None:
    assert "make run" in COMMANDS and len(COMMANDS) == 15


def test_links_of_the_pages_lead_somewhere() -> None:
    for page in [
        REPOSITORY / "README.md",
        REPOSITORY / "CONTRIBUTING.md",
        *(REPOSITORY / "docs").glob("*.md"),
    ]:
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs(ready: Workspace, command: str) -> None:
    environment = {}
    if command.startswith("make"):  # without the flags of a `make test` around it
        environment = {"ARGS": " ".join(shlex.quote(part) for part in SMOKE), "MAKEFLAGS": ""}
    words = shlex.split(command, comments=True)
    if "flows.params" in command and "data=folder" not in command:
        words += SMOKE
    finished = ready.run(*words, **environment)
    assert finished.returncode == 0, finished.stdout[-3000:] + finished.stderr[-3000:]
    assert "Traceback" not in finished.stdout + finished.stderr
