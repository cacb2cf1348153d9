"""The images and compose.yaml hold what we ask of them; no Docker engine is needed."""

import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from docker.utils.build import exclude_paths

from tests.conftest import REPOSITORY, Workspace

DOCKER = REPOSITORY / "docker"
DOCKERFILES = sorted(DOCKER.glob("*.Dockerfile"))
COMPOSE: dict[str, Any] = yaml.safe_load((DOCKER / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]

SECRET_WORDS = re.compile(r"PASSWORD|SECRET|TOKEN|_KEY$", re.IGNORECASE)

dockerfiles = pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
services = pytest.mark.parametrize("name", SERVICES)


def instructions(file: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile, each with what follows it in one line."""
    text = "\n".join(line for line in file.read_text().splitlines() if not line.lstrip().startswith("#"))
    joined = re.sub(r"\\\n\s*", " ", text)
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined.splitlines() if line.strip()]


def stages(file: Path) -> list[list[tuple[str, str]]]:
    """Return the instructions of each stage; the first of each is its FROM."""
    found: list[list[tuple[str, str]]] = []
    for name, value in instructions(file):
        if name == "FROM":
            found.append([])
        if found:
            found[-1].append((name, value))
    return found


def variables(file: Path, *names: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for name, value in instructions(file):
        if name in names:
            pairs |= dict(pair.partition("=")[::2] for pair in value.split())
    return pairs


def test_there_are_the_images_of_the_compose_file() -> None:
    built = {
        DOCKER.parent / service["build"]["dockerfile"] for service in SERVICES.values() if "build" in service
    }
    assert built == set(DOCKERFILES)
    for service in SERVICES.values():
        if "target" in service.get("build", {}):
            names = [
                stage[0][1].split(" AS ")[-1] for stage in stages(REPOSITORY / service["build"]["dockerfile"])
            ]
            assert service["build"]["target"] in names


@dockerfiles
def test_base_images_are_pinned(file: Path) -> None:
    arguments = variables(file, "ARG")
    names: set[str] = set()
    for stage in stages(file):
        image, _, name = stage[0][1].partition(" AS ")
        if image not in names:
            resolved = re.sub(r"\$\{(\w+)\}", lambda match: arguments[match[1]], image)
            tag = resolved.rpartition(":")[2]
            assert re.match(r"\d+\.\d+", tag), resolved
        names.add(name)


@dockerfiles
def test_hadolint_finds_nothing(file: Path) -> None:
    command = [find_program("hadolint"), "--config", DOCKER / "hadolint.yaml", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@dockerfiles
def test_images_end_as_a_user_without_rights(file: Path) -> None:
    made = set(re.findall(r"useradd --uid (1\d{4}) ", file.read_text()))
    for stage in stages(file):
        if not stage[0][1].split(" AS ")[-1].startswith(("build", "base")):
            assert [value for name, value in stage if name == "USER"][-1] in made


@dockerfiles
def test_images_hold_no_secret_and_nothing_from_the_web_unchecked(file: Path) -> None:
    assert not [name for name in variables(file, "ENV", "ARG") if SECRET_WORDS.search(name)]
    for name, value in instructions(file):
        assert name != "ADD", value
        assert not re.search(r"\b(curl|wget|sudo)\b", value), value


@dockerfiles
def test_only_what_the_context_holds_is_copied(file: Path) -> None:
    context = context_of(REPOSITORY)
    copied = {
        source
        for name, value in instructions(file)
        if name == "COPY" and "--from=" not in value
        for source in [word for word in value.split() if not word.startswith("--")][:-1]
    }
    assert copied <= context


@dockerfiles
def test_what_pip_is_told_by_name_is_in_the_lock_file_or_has_a_version(file: Path) -> None:
    locked = {
        line.partition("==")[0].lower().replace("_", "-")
        for line in (REPOSITORY / "requirements.lock").read_text().splitlines()
    }
    for stage in stages(file):
        for _, value in stage:
            for call in re.findall(r"pip install ([^&]*)", value):
                assert stage[0][1].endswith(" AS build") or stage[0][1].startswith("build AS ")
                for word in re.sub(r"\$\{[^}]*\}|\"\$\(.*\)\"", "", call).split():
                    plain = word.strip('"').lower()
                    assert plain.startswith(".") or "==" in plain or plain in locked, plain
    [build] = [stage for stage in stages(file) if stage[0][1].endswith(" AS build")]
    assert "PIP_CONSTRAINT=/build/requirements.lock" in " ".join(
        value for name, value in build if name == "ENV"
    )


def context_of(root: Path) -> set[str]:
    """Return the files that the Docker client would send."""
    patterns = [
        line
        for line in (root / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    return {path for path in exclude_paths(str(root), patterns) if (root / path).is_file()}


def test_context_of_the_images_holds_no_secret_and_no_code(workspace: Workspace) -> None:
    planted = [
        "docker/secrets/s3_secret_key",
        ".dvc/config.local",
        ".env",
        "params.yaml",
        "data/a.png",
        ".git/config",
    ]
    for name in planted:
        (workspace.path / name).parent.mkdir(parents=True, exist_ok=True)
        (workspace.path / name).write_text("planted")
    assert context_of(workspace.path) == {
        ".dockerignore",
        "README.md",
        "docker/start_worker.sh",
        "docker/with_secrets.sh",
        "pyproject.toml",
        "requirements.lock",
    }


@services
def test_service_is_watched_restarted_and_pinned(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"][0] == "CMD" and service["restart"] == "unless-stopped"
    image, _, tag = service["image"].partition(":")
    assert image and re.fullmatch(r"\d+\.\d+[\w.-]*", tag)


@services
def test_service_is_reached_from_this_machine_only(name: str) -> None:
    for port in SERVICES[name].get("ports", []):
        assert port.startswith("127.0.0.1:"), port
    assert not {"network_mode", "privileged", "pid"} & set(SERVICES[name])


@services
def test_service_waits_for_those_it_needs_until_they_answer(name: str) -> None:
    for needed, how in SERVICES[name].get("depends_on", {}).items():
        assert needed in SERVICES and how == {"condition": "service_healthy"}


@services
def test_secrets_of_a_service_are_files_that_it_uses(name: str) -> None:
    service = SERVICES[name]
    declared = set(service.get("secrets", []))
    assert declared <= set(COMPOSE["secrets"])
    named = {value for value in service["environment"].values() if value.startswith("/run/secrets/")}
    in_scripts = {"prefect_database_password", "mlflow_database_password"} if name == "postgres" else set()
    assert {Path(value).name for value in named} | in_scripts == declared
    for variable, value in service["environment"].items():
        if SECRET_WORDS.search(variable):
            assert value.startswith("/run/secrets/"), variable
        assert not re.search(r"://[^/\s]*:[^/\s]*@", value), variable


def test_workers_hold_no_password_of_an_administrator() -> None:
    workers = [service for service in SERVICES.values() if "WORK_POOL" in service["environment"]]
    assert len(workers) == 3
    for worker in workers:
        assert set(worker["secrets"]) == {"prefect_auth_string", "mlflow_worker_password", "s3_secret_key"}
        assert worker["environment"]["MLFLOW_TRACKING_USERNAME"] == "worker"


def test_every_secret_is_a_file_outside_of_git_and_used() -> None:
    used = {secret for service in SERVICES.values() for secret in service.get("secrets", [])}
    assert used == set(COMPOSE["secrets"])
    for name, source in COMPOSE["secrets"].items():
        assert source == {"file": f"secrets/{name}"}
        ignored = ["git", "check-ignore", "--quiet", f"docker/secrets/{name}"]
        assert subprocess.run(ignored, cwd=REPOSITORY, check=False).returncode == 0


def test_data_of_the_services_lie_in_named_volumes() -> None:
    mounts = [mount.split(":") for service in SERVICES.values() for mount in service.get("volumes", [])]
    named = {mount[0] for mount in mounts if not mount[0].startswith((".", "/etc/machine-id"))}
    assert named == set(COMPOSE["volumes"])
    for source, _, *mode in mounts:
        assert not source.startswith(".") or mode == ["ro"]
        assert not source.startswith(".") or (DOCKER / source).exists()


def test_only_the_gpu_worker_has_to_be_asked_for() -> None:
    assert [name for name, service in SERVICES.items() if "profiles" in service] == ["gpu-worker"]
    pools = {
        yaml.safe_load(file.read_text())["work_pool"] for file in (REPOSITORY / "conf/target").glob("*.yaml")
    }
    asked = {
        service["environment"]["WORK_POOL"].removeprefix("${GPU_WORK_POOL:-").rstrip("}")
        for service in SERVICES.values()
        if "WORK_POOL" in service["environment"]
    }
    assert asked == {"pipeline", "cpu", "gpu-sm90"} and asked - {"pipeline"} <= pools


def test_secrets_are_made_once_and_closed_to_others(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    make = ["sh", str(DOCKER / "make_secrets.sh"), str(folder)]
    subprocess.run(make, check=True)
    made = {file.name: file.read_text() for file in folder.iterdir()}
    assert set(made) == set(COMPOSE["secrets"])
    assert len(set(made.values())) == len(made)
    for name, secret in made.items():
        user = "enginewright:" if name == "prefect_auth_string" else ""
        assert re.fullmatch(rf"{user}[\w-]{{32}}", secret)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    (folder / "s3_secret_key").unlink()
    subprocess.run(make, check=True)
    again = {file.name: file.read_text() for file in folder.iterdir()}
    assert {name for name in made if made[name] != again[name]} == {"s3_secret_key"}


def test_command_gets_its_secrets_from_files_and_says_which_is_missing(tmp_path: Path) -> None:
    (tmp_path / "password").write_text('it\'s "quoted" & $odd\n')
    command = ["sh", str(DOCKER / "with_secrets.sh"), "printenv", "PGPASSWORD"]
    environment = {**os.environ, "SECRET_PGPASSWORD": str(tmp_path / "password")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == 'it\'s "quoted" & $odd\n'
    (tmp_path / "password").unlink()
    failed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert failed.returncode == 1 and not failed.stdout
    assert f"SECRET_PGPASSWORD names {tmp_path / 'password'}" in failed.stderr


def test_scripts_are_plain_shell() -> None:
    for script in DOCKER.glob("*.sh"):
        assert os.access(script, os.X_OK) and script.read_text().startswith("#!/bin/sh\n")
        subprocess.run(["sh", "-n", script], check=True)


def test_dependencies_are_installed_without_the_code(tmp_path: Path) -> None:
    """What `pip install .` makes of the files of the context: a package of no modules, with our requirements."""
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(REPOSITORY / name, tmp_path / name)
    program = "from setuptools import build_meta; print(build_meta.prepare_metadata_for_build_wheel('.'))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    metadata = next(tmp_path.glob("*.dist-info/METADATA")).read_text()
    assert "Requires-Dist: mlflow" in metadata


def test_compose_file_keeps_to_the_specification() -> None:
    program = find_program("check-jsonschema")
    command = [program, "--builtin-schema", "vendor.compose-spec", DOCKER / "compose.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_client_of_docker_resolves_the_compose_file(tmp_path: Path) -> None:
    """By the client alone: `config` needs no engine. The old client, which Debian has, knows all but the name."""
    client = find_compose_client()
    folder = tmp_path / "docker"
    shutil.copytree(DOCKER, folder, ignore=shutil.ignore_patterns("secrets"))
    if client == ["docker-compose"]:
        text = (folder / "compose.yaml").read_text()
        (folder / "compose.yaml").write_text(text.replace("name: enginewright\n", "", 1))
    subprocess.run(["sh", folder / "make_secrets.sh"], check=True)
    command = [*client, "--file", "docker/compose.yaml", "--profile", "gpu", "config"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(yaml.safe_load(done.stdout)["services"]) == set(SERVICES)
    for secret in (folder / "secrets").iterdir():
        assert secret.read_text() not in done.stdout


def find_compose_client() -> list[str]:
    for client in (["docker", "compose"], ["docker-compose"]):
        if (
            shutil.which(client[0])
            and not subprocess.run([*client, "version"], capture_output=True, check=False).returncode
        ):
            return client
    return [find_program("docker-compose")]


def find_program(name: str) -> str:
    """Return where a program is; without it skip the test, in CI fail it."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        lack = f"{name} is not installed: `make test-services` installs it"
        if "CI" in os.environ:
            pytest.fail(lack)
        pytest.skip(lack)
    return found
