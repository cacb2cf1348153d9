import base64
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from flows import doctor
from flows.doctor import State, examine, main
from flows.local_server import find_problem
from flows.params import compose_params
from tests.conftest import REPOSITORY

CLOSED = "http://user:secret@127.0.0.1:9"
"""Port 9 (discard) answers nobody."""


def found(subject, *overrides):
    findings = examine(compose_params(overrides), all_targets=False)
    [finding] = [one for one in findings if one.subject == subject]
    return finding


def found_first(subject, *overrides):
    """Return a finding without the checks behind it."""
    findings = examine(compose_params(overrides), all_targets=False)
    return next(one for one in findings if one.subject == subject)


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """An empty repository of git and DVC."""
    folder = tmp_path_factory.mktemp("repository")
    for command in (["git", "init", "-q"], [sys.executable, "-m", "dvc", "init", "-q"]):
        subprocess.run(command, cwd=folder, check=True)
    return folder


@pytest.fixture
def checkout(repository, tmp_path, monkeypatch):
    """A copy of the empty repository, without the servers of the environment."""
    shutil.copytree(repository, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    return tmp_path


def add_remote(url):
    subprocess.run(
        [sys.executable, "-m", "dvc", "remote", "add", "-q", "--default", "store", url], check=True
    )


def states(*overrides, all_targets):
    findings = examine(compose_params(overrides), all_targets=all_targets)
    return {one.subject: one.state for one in findings}


def test_this_machine_has_all_that_the_defaults_need(checkout):
    assert main([]) == 0
    found_states = states(all_targets=False)
    assert found_states["target cpu_onnxruntime"] == found_states["target cpu_torch"] == State.ok
    assert list(found_states).index("target cpu_torch") < list(found_states).index("GPU")


@pytest.mark.slow
def test_targets_that_nobody_asked_for_are_one_line_unless_all_are_wanted(checkout, capsys):
    assert "target thor_tensorrt" not in states(all_targets=False)
    assert "thor_tensorrt" in found("other targets").text
    shown = states(all_targets=True)
    names = {file.stem for file in (REPOSITORY / "conf/target").glob("*.yaml")}
    assert {one.removeprefix("target ") for one in shown if one.startswith("target ")} == names
    assert shown["target thor_tensorrt"] is State.missing and "other targets" not in shown
    assert main(["--all"]) == 0 and "compute capability 11.0" in capsys.readouterr().out.replace("\n", " ")


def test_target_of_the_run_that_cannot_be_built_here_fails_and_says_why(checkout, capsys):
    overrides = ["target=[cpu_torch,cuda_torch,thor_tensorrt]"]
    thor = found("target thor_tensorrt", *overrides)
    assert thor.state is State.needed and "compute capability 11.0" in thor.mend
    assert main(overrides) == 1
    assert "thor_tensorrt" in capsys.readouterr().out


def test_target_that_the_run_skips_for_want_of_cpu_flags_is_no_failure(checkout, capsys):
    flags = "target.cpu_openvino_bf16.cpu_flags=[avx_imaginary]"
    bf16 = found("target cpu_openvino_bf16", flags)
    assert bf16.state is State.skipped and "avx_imaginary" in bf16.text
    assert main([flags]) == 0
    assert "skipped" in capsys.readouterr().out


def test_target_of_the_reference_is_never_skipped(checkout):
    flags = "target.cpu_torch.cpu_flags=[avx_imaginary]"
    assert found("target cpu_torch", flags).state is State.needed
    assert main([flags]) == 1
    gpu = ["target=[cpu_torch,cuda_torch,thor_tensorrt]", "target.cuda_torch.gpu.name=imaginary"]
    assert found("target cuda_torch", *gpu).state is State.needed


def import_as_tensorrt(source, folder, monkeypatch):
    """Let this process and those that it starts find a module as `tensorrt`."""
    (folder / "tensorrt.py").write_text(source)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{REPOSITORY}")


FAULTS = {
    "cannot open shared object file": "import ctypes\nctypes.CDLL('libnvinfer.so.imaginary')\n",
    "it said nothing (its process ended with -11)": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
}


@pytest.mark.parametrize("problem", FAULTS)
def test_tensorrt_that_does_not_work_here_is_told_with_what_it_said(checkout, monkeypatch, problem):
    import_as_tensorrt(FAULTS[problem], checkout, monkeypatch)
    builder = found_first("TensorRT's builder")
    assert builder.state is State.missing and problem in builder.text
    assert "NVIDIA GPU" in builder.mend and "pip install -e '.[gpu]'" in builder.mend


def test_tensorrt_that_never_answers_is_needed_by_a_run_on_its_target(checkout, monkeypatch):
    import_as_tensorrt("import time\ntime.sleep(60)\n", checkout, monkeypatch)
    monkeypatch.setattr(doctor, "_BUILDER_TIMEOUT_S", 1)
    builder = found_first("TensorRT's builder", "target=[cpu_torch,cuda_torch,thor_tensorrt]")
    assert (builder.state, builder.text) == (State.needed, "no answer in 1 s")


def test_tensorrt_that_is_not_installed_is_told(checkout):
    if importlib.util.find_spec("tensorrt") is not None:
        pytest.skip("TensorRT is installed here")
    builder = found_first("TensorRT's builder")
    assert (builder.state, builder.text) == (State.missing, "TensorRT is not installed")
    assert builder.mend.startswith("pip install -e '.[gpu]'")


def test_run_for_rtx_needs_no_other_builder(checkout):
    builder = found_first("TensorRT's builder", "target=[cpu_torch,cuda_torch,rtx4090_tensorrt_rtx]")
    assert builder.state in (State.ok, State.missing)


def test_silent_servers_are_told_without_their_passwords(checkout, monkeypatch):
    monkeypatch.setenv("PREFECT_API_URL", f"{CLOSED}/api")
    prefect = found("Prefect")
    assert prefect.state is State.needed and "no answer" in prefect.text
    mlflow = found("MLflow", f"track.uri={CLOSED}")
    assert mlflow.state is State.missing and "no answer" in mlflow.text
    assert "secret" not in f"{prefect}{mlflow}"


@pytest.mark.slow
def test_remote_is_asked_and_a_missing_one_is_told(checkout):
    assert found("DVC remote").state is State.missing
    add_remote(str(checkout / "store"))
    assert "empty" in found("DVC remote").text
    (checkout / "store/files/md5").mkdir(parents=True)
    assert found("DVC remote").text == "store"


def test_remote_without_its_package_tells_what_to_install(checkout):
    add_remote("gs://bucket/path")  # dvc-s3 is installed with the tests
    remote = found("DVC remote")
    assert remote.state is State.missing and "dvc-gs" in remote.text


def test_impossible_override_is_an_error_of_one_line(checkout, capsys):
    assert main(["benchmark.min_rounds=1"]) == 1
    assert capsys.readouterr().err.startswith("ConfigError")


def test_user_and_password_of_an_address_are_sent_and_never_shown():
    asked = []

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.headers["Authorization"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert find_problem(f"http://user:se%2Fcret@127.0.0.1:{server.server_port}/health") is None
        server.shutdown()
    assert base64.b64decode(asked[0].removeprefix("Basic ")) == b"user:se/cret"
    for address in ("http://user:secret@127.0.0.1:9/health", "http://user:secret@[/health"):
        problem = find_problem(address)
        assert problem and "secret" not in problem
