"""A network and a stage of one's own, from the files that CONTRIBUTING names and no other.

A runtime of one's own is added in tests/tasks/parts/builders/test_new_runtime.py.
"""

import pytest

from tests.conftest import SMOKE, Workspace

NETWORK = '''\
"""Three plain convolutions."""

from torch import Tensor, nn

from tasks.parts.networks.blocks import ConvNormRelu, resize_to, scale_channels, spatial_size


class Plain(nn.Module):
    """One convolution that shrinks the image, one more, the classifier."""

    feature_layer = "body"
    classifier_layer = "classifier"

    def __init__(self, num_classes: int, *, width: float) -> None:
        super().__init__()
        channels = scale_channels(32, width)
        self.stem = ConvNormRelu(3, channels, stride=2)
        self.body = ConvNormRelu(channels, channels)
        self.classifier = nn.Conv2d(channels, num_classes, 1)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        size = spatial_size(images_NCHW)
        return resize_to(self.classifier(self.body(self.stem(images_NCHW))), size)
'''

STAGE = '''\
"""Count the images of a data set."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tasks.core.bounds import AtLeast


@dataclass(frozen=True)
class Config:
    """What is counted."""

    min_images: Annotated[int, AtLeast(1)]
    """Splits with fewer images are left out."""


@dataclass(frozen=True)
class Report:
    """How many images there are."""

    num_images: int
    """Images of all splits that count."""


def count_images(cfg: Config, *, data: Path, out: Path) -> Report:
    """Read the manifest and add up its splits."""
    from tasks.parts.data.dataset import read_manifest

    counts = read_manifest(data).counts.values()
    return Report(sum(count for count in counts if count >= cfg.min_images))
'''

ONE_WAY = "trained and not tried and not load or linter or composes"
"""Of tests/test_agreement.py: what the default configuration says, and what holds for all."""

DVC_STAGE = """\
  count_images:
    cmd: python -m tasks count_images
      data=${pipeline.data}
    params:
    - count_images
    - artifacts/environment.json:
      - checked
    deps:
    - ${pipeline.data}
    - tasks/count_images.py
    - tasks/core/bounds.py
    - tasks/core/errors.py
    - tasks/parts/data
    - tasks/parts/reading
    outs:
    - artifacts/count_images

"""


def add(space: Workspace, name: str, text: str) -> None:
    file = space.path / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def insert(space: Workspace, name: str, before: str, text: str) -> None:
    file = space.path / name
    content = file.read_text()
    assert content.count(before) == 1, (name, before)
    file.write_text(content.replace(before, text + before))


def add_stage(space: Workspace, dvc_stage: str) -> None:
    add(space, "tasks/count_images.py", STAGE)
    add(space, "conf/count_images/default.yaml", "min_images: 1\n")
    insert(space, "conf/config.yaml", "  - rank_groups: default\n", "  - count_images: default\n")
    insert(
        space,
        "flows/pipeline.py",
        '    for name, weights in pipeline["checkpoints"].items():\n',
        '    stages.run("count_images", data=data)\n',
    )
    insert(space, "dvc.yaml", "  rank_groups:\n", dvc_stage)


def touched(space: Workspace) -> set[str]:
    status = space.run("git", "status", "--porcelain", "--untracked-files=all").stdout
    return {line[3:] for line in status.splitlines()} - {"params.yaml"}


def run(space: Workspace, *command: str) -> str:
    done = space.run("python", "-m", *command, PYTHONPATH=str(space.path))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_network_of_four_files_is_trained_and_exported(workspace: Workspace) -> None:
    networks = "tasks/parts/networks"
    add(workspace, f"{networks}/plain.py", NETWORK)
    insert(workspace, f"{networks}/config.py", '    fast_scnn = "fast_scnn"\n', '    plain = "plain"\n')
    insert(
        workspace,
        f"{networks}/build.py",
        "        case NetworkName.fast_scnn:\n",
        "        case NetworkName.plain:\n"
        "            from tasks.parts.networks.plain import Plain\n\n"
        "            network = Plain(num_classes, width=config.width)\n",
    )
    text = (workspace.path / "conf/network/fast_scnn.yaml").read_text()
    add(workspace, "conf/network/plain.yaml", text.replace("name: fast_scnn", "name: plain"))
    run(workspace, "flows.params", *SMOKE, "network@train.baseline.network=plain")
    expected = {f"{networks}/{name}.py" for name in ("plain", "config", "build")} | {
        "conf/network/plain.yaml"
    }
    assert touched(workspace) == expected

    run(workspace, "tasks", "prepare_data", "root=data/digit_scenes")
    run(workspace, "tasks", "train.baseline", "data=artifacts/prepare_data/dataset")
    run(workspace, "tasks", "export_onnx.baseline", "checkpoint=artifacts/train/baseline/model.safetensors")
    assert (workspace.path / "artifacts/export_onnx/baseline/model.onnx").is_file()


@pytest.mark.slow
def test_stage_of_six_files_runs_and_both_drivers_know_it(workspace: Workspace) -> None:
    add_stage(workspace, DVC_STAGE)
    insert(workspace, "pyproject.toml", "tasks.rank_groups | ", "tasks.count_images | ")
    run(workspace, "flows.params")
    assert touched(workspace) == {
        "tasks/count_images.py",
        "conf/count_images/default.yaml",
        "conf/config.yaml",
        "flows/pipeline.py",
        "dvc.yaml",
        "pyproject.toml",
    }
    agreement = ("-q", "-rN", "-k", ONE_WAY, "-p", "no:cacheprovider")
    assert " passed" in run(workspace, "pytest", "tests/test_agreement.py", *agreement)

    run(workspace, "flows.params", *SMOKE)
    run(workspace, "tasks", "prepare_data", "root=data/digit_scenes")
    output = run(workspace, "tasks", "count_images", "data=artifacts/prepare_data/dataset")
    assert "finished" in output
    assert '"num_images": 160' in (workspace.path / "artifacts/count_images/report.json").read_text()


@pytest.mark.slow
def test_agreement_names_what_a_new_stage_forgot(workspace: Workspace) -> None:
    add_stage(workspace, DVC_STAGE.replace("    - tasks/parts/data\n", ""))
    run(workspace, "flows.params")
    done = workspace.run(
        "python",
        "-m",
        "pytest",
        "tests/test_agreement.py",
        "-q",
        "-k",
        ONE_WAY,
        PYTHONPATH=str(workspace.path),
    )
    assert done.returncode == 1
    for forgotten in ("count_images", "tasks/parts/data", "pyproject.toml"):
        assert forgotten in done.stdout
