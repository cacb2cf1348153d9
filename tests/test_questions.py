"""docs/questions.md: every command, path, field and config key that it names exists."""

import ast
import contextlib
import dataclasses
import functools
import importlib
import io
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from flows.params import CONF, compose_params
from tasks.core.reports import REPORT_FILE
from tasks.explain import WATERFALL_FILE
from tasks.parts.engines.manifest import MANIFEST_FILE, EngineManifest
from tasks.parts.explain.layers import ExplainedLayer
from tasks.parts.explain.waterfall import Step as WaterfallStep
from tasks.parts.layer_diff.table import Layer
from tasks.parts.selection.engine_row import ENGINES_FILE, EngineRow, measured_names
from tasks.quantize_ptq import Trial
from tasks.quantize_repaired import Step as RepairStep
from tasks.rank_groups import GroupCut
from tasks.rank_layers import RankedLayer
from tasks.search_pruning import Candidate
from tests.conftest import REPOSITORY, Workspace

PAGE = REPOSITORY / "docs/questions.md"

ROWS: dict[tuple[str, str], type[Any]] = {
    ("explain", "layers.csv"): ExplainedLayer,
    ("explain", WATERFALL_FILE): WaterfallStep,
    ("diff_layers", "layers.csv"): Layer,
    ("quantize_ptq", "calibrators.csv"): Trial,
    ("quantize_repaired", "steps.csv"): RepairStep,
    ("rank_layers", "ranking.csv"): RankedLayer,
    ("rank_groups", "sensitivity.csv"): GroupCut,
    ("search_pruning", "curve.csv"): Candidate,
    ("build_engine", MANIFEST_FILE): EngineManifest,
}
"""Stage and file -> the dataclass of its content or of its rows. Reports are found through their stage."""


@dataclass(frozen=True)
class Place:
    """Where an answer stands: a file and what to look for in it."""

    path: str
    found_in_it: tuple[str, ...]

    @property
    def stage(self) -> str:
        """The stage that writes it, for a path below artifacts/."""
        return self.path.split("/")[1]


@dataclass(frozen=True)
class Question:
    """A question with its commands and the places of the answer."""

    title: str
    commands: tuple[str, ...]
    places: tuple[Place, ...]


def read_questions(text: str) -> Iterator[Question]:
    for section in re.split(r"^### ", text.split("\n## Glossary")[0], flags=re.MULTILINE)[1:]:
        commands = [
            line
            for block in re.findall(r"```bash\n(.*?)```", section, re.DOTALL)
            for line in block.splitlines()
        ]
        places = []
        for item in re.findall(r"^- ((?:.|\n  )*)", section, re.MULTILINE):
            named, _, rest = item.partition("`:")
            found = tuple(name or words for name, words in re.findall(r'`([^`]+)`|"([^"]+)"', rest))
            places += [Place(path, found) for path in re.findall(r"`([^`]+)", named)[::2]]
        yield Question(section.splitlines()[0], tuple(commands), tuple(places))


QUESTIONS = tuple(read_questions(PAGE.read_text(encoding="utf-8")))
PLACES = tuple(dict.fromkeys(place for question in QUESTIONS for place in question.places))
COMMANDS = tuple(dict.fromkeys(command for question in QUESTIONS for command in question.commands))


@functools.cache
def defaults() -> dict[str, Any]:
    return compose_params()


@functools.cache
def words_of_code() -> frozenset[str]:
    """Every string in the code of stages and flows."""
    trees = [
        ast.parse(file.read_text(encoding="utf-8"))
        for folder in ("tasks", "flows")
        for file in (REPOSITORY / folder).rglob("*.py")
    ]
    constants = (node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return frozenset(value for value in constants if isinstance(value, str))


@functools.cache
def outputs() -> tuple[re.Pattern[str], ...]:
    """The outputs that dvc.yaml declares, with anything in place of a template."""
    found = []
    for stage in yaml.safe_load((REPOSITORY / "dvc.yaml").read_text(encoding="utf-8"))["stages"].values():
        for out in stage.get("do", stage)["outs"]:
            path = out if isinstance(out, str) else next(iter(out))
            found.append(re.compile(re.sub(r"\\\$\\{.*?\\}", "[^/]+", re.escape(path)) + "(?:/|$)"))
    return tuple(found)


def is_written(path: str) -> bool:
    """Whether a stage declares the path as its output, or as a file or folder in it that its code names."""
    engines = defaults()["engines"].values()
    names = {item[kind] for item in engines for kind in ("variant", "target")}
    rests = [path[match.end() :] for pattern in outputs() if (match := pattern.match(path))]
    return any(
        all(
            not part or part in names or part in words_of_code() or re.fullmatch(r"(?:<\w+>-*)+", part)
            for part in rest.split("/")
        )
        for rest in rests
    )


def has_field(kind: Any, path: Sequence[str]) -> bool:
    """Follow names through dataclasses; keys of dicts and positions in tuples are left out."""
    if not path:
        return True
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return path[0] in hints and has_field(hints[path[0]], path[1:])
    return any(has_field(part, path) for part in get_args(kind))


def says(place: Place, words: str) -> bool:
    """Whether a file has a field, or text that the code writes."""
    file = Path(place.path).name
    if file in (ENGINES_FILE, "picks.json"):
        return words in (*measured_names(), *(field.name for field in dataclasses.fields(EngineRow)))
    if file == REPORT_FILE:
        return has_field(importlib.import_module(f"tasks.{place.stage}").Report, words.split("."))
    if place.path.startswith("artifacts/") and (kind := ROWS.get((place.stage, file))):
        return has_field(kind, words.split("."))
    if file.endswith((".csv", ".json")):
        return words in words_of_code()
    return any(words in text for text in words_of_code())


def test_there_are_thirty_questions_each_with_a_command_and_a_place() -> None:
    numbers = [int(question.title.partition(".")[0]) for question in QUESTIONS]
    assert numbers == list(range(1, 31))
    assert all(question.title.endswith("?") for question in QUESTIONS)
    assert [question.title for question in QUESTIONS if not (question.commands and question.places)] == []


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.path)
def test_place_exists(place: Place) -> None:
    if place.path.startswith("artifacts/"):
        assert is_written(place.path)
    else:
        assert (REPOSITORY / place.path).exists() or place.path in words_of_code()
    assert [words for words in place.found_in_it if not says(place, words)] == []


def test_names_that_do_not_exist_are_found() -> None:
    assert not is_written("artifacts/benchmark/<target>/latency.csv")
    assert not is_written("artifacts/benchmarks/<target>/report.json")
    report = Place("artifacts/benchmark/<target>/report.json", ())
    assert says(report, "engines.latency.batches.latency_ms_p99")
    assert not says(report, "engines.latency.latency_ms_p99")
    assert not says(Place("artifacts/rank_layers/ranking.csv", ()), "miou_drop")


@functools.cache
def help_of(module: str) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as out, pytest.raises(SystemExit):
        importlib.import_module(module).main(["--help"])
    return out.getvalue()


def check_module(module: str, arguments: list[str]) -> None:
    if module in ("flows.optimize", "flows.params"):
        compose_params(arguments)
        return
    known = set(re.findall(r"--[a-z0-9-]+", help_of(module)))
    assert {word for word in arguments if word.startswith("--")} <= known
    items = defaults()["engines"].values()
    engines = {(item["variant"], item["target"]) for item in items}
    if module in ("flows.explain", "flows.profile") and "--target" in arguments:
        target = arguments[arguments.index("--target") + 1]
        variants = arguments[: 2 if module == "flows.explain" else 1]
        assert {(variant, target) for variant in variants} <= engines
    elif "--target" in arguments:
        assert arguments[arguments.index("--target") + 1] in {target for _, target in engines}
    if module == "flows.forget":
        assert all(is_written(f"artifacts/{address.replace('.', '/')}") for address in arguments)


def check_stages(names: Sequence[str]) -> None:
    """Check names of DVC's stages, such as explain@cpu_openvino, or explain for all of them."""
    stages = yaml.safe_load((REPOSITORY / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    for name in names:
        stage, _, item = name.partition("@")
        assert stage in stages
        if item:
            items: Any = defaults()
            for key in stages[stage]["foreach"][2:-1].split("."):
                items = items[key]
            assert item in items


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists(command: str) -> None:
    words = shlex.split(command.removeprefix("time "))
    if words[:2] == ["python", "-m"]:
        check_module(words[2], words[3:])
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text("utf-8"), re.MULTILINE)
        assert set(words[1:]) <= set(targets)
    elif words[:2] == ["dvc", "repro"]:
        check_stages(words[2:])
    else:
        paths = re.findall(r"artifacts/[\w./]+", command)
        assert paths and all(map(is_written, paths))


def test_config_keys_exist() -> None:
    with initialize_config_dir(str(CONF), version_base="1.3"):
        configuration = compose("config")
    text = re.sub(r"```.*?```", "", PAGE.read_text("utf-8"), flags=re.DOTALL)
    prose = re.sub(r"^- (?:.|\n  )*", "", text, flags=re.MULTILINE)
    keys = [
        span.partition("=")[0].replace("<name>", "cpu_openvino")
        for span in re.findall(r"`([a-z_]+(?:\.[a-z_0-9<>]+)+(?:=[^`]*)?)`", prose)
    ]
    files = (".csv", ".json", ".md", ".py")
    keys = [key for key in keys if not key.endswith(files) and not key.startswith("flows.")]
    reports = [place for place in PLACES if Path(place.path).name == REPORT_FILE]
    missing = object()
    wrong = [
        key
        for key in keys
        if OmegaConf.select(configuration, key, default=missing) is missing
        and not any(says(report, key) for report in reports)
    ]
    assert len(keys) > 15 and wrong == []


def test_glossary_has_each_term_once_in_order() -> None:
    glossary = PAGE.read_text("utf-8").split("\n## Glossary")[1]
    terms = [line.split("|")[1].strip() for line in glossary.splitlines() if line.startswith("| ")][1:]
    assert len(terms) > 40
    assert len({term.lower() for term in terms}) == len(terms)
    letters = [re.sub(r"[^a-z]", "", term.lower()) for term in terms]
    assert letters == sorted(letters)


@pytest.mark.slow
def test_run_leaves_every_file(smoke_run: tuple[Workspace, str]) -> None:
    space, _ = smoke_run
    without = ("import_onnx",)  # of a user's own model
    patterns = [
        re.sub(r"<\w+>", "*", place.path)
        for place in PLACES
        if place.path.startswith("artifacts/") and place.stage not in without
    ]
    assert [pattern for pattern in patterns if not any(space.path.glob(pattern))] == []
