"""Disturb a pipeline at random, and check that nothing of it is lost, wrong or made twice.

``python -m benchmarks.chaos --minutes 60 --events 100 --seed 0`` runs the smoke pipeline in a workspace on a disk of
its own (a tmpfs, which needs the right to mount), with both drivers, two configurations and two commits in random
order, one after the other. Meanwhile events happen at random times: SIGKILL of a stage, of the driver or of the
Prefect server, a full disk, a flipped bit in the outputs, in DVC's cache or in a record of the store. ``--trivial``
takes stages that write a few bytes (``benchmarks/trivial_pipeline.py``), for many events in a short time. A worker
that is killed is a case of ``tests/flows/test_deployments.py``.

At the end the first configuration runs to its end with both drivers. Then its outputs must be those of an undisturbed
run in another workspace, no stage call may have finished twice unless an event destroyed its last intact copy, and no
command may have ended in a traceback. Prints every event, writes ``--results`` and ends with 1 after a violation.
"""

import argparse
import contextlib
import hashlib
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.trivial_pipeline import REPOSITORY, write_workspace
from tasks.core.execute import ARTIFACTS
from tasks.core.reports import KEY_FILE, REPORT_FILE
from tasks.parts.engines.machine import read_cpu_model

RESULTS = Path(__file__).parent / "results" / "chaos.json"
SMOKE = ["debug=smoke"]
CONFIGURATIONS = {"A": [*SMOKE], "B": [*SMOKE, "finetune.trainer.seed=1"]}
MEASURED = ("search_pruning", "benchmark", "select_engine", "track", "race_picks")
"""Stages whose outputs hold times or the place of a run in MLflow."""
WITH_TIMES = (REPORT_FILE, KEY_FILE, "history.csv")
_CACHE = Path(".dvc/cache")
_FINISHED = re.compile(r"tasks\.core\.execute (\S+): finished in")
_STARTED = re.compile(r"tasks\.core\.execute (\S+): started")
_LONGEST_RUN_S = 1800.0
_DISK = {True: "256m", False: "3g"}


@dataclass
class Chaos:
    """A workspace that is disturbed, and what was seen."""

    folder: Path
    is_trivial: bool
    rng: random.Random
    commits: dict[str, str] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    """Key -> address of every stage call that finished."""
    excused: set[str] = field(default_factory=set)
    """Keys whose last intact copy an event of an earlier run destroyed."""
    excused_now: set[str] = field(default_factory=set)
    """Those of the current run, in which the output may have been made before or after the event."""
    events: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    driver: str = ""
    """Which one runs."""

    def prepare(self) -> None:
        """Write the workspace, with a second commit in which a stage has another comment."""
        write_pipeline(self.folder, self.is_trivial)
        self.commits["1"] = self._git("rev-parse", "HEAD")
        file = self.folder / "tasks/validate.py"
        file.write_text(file.read_text(encoding="utf-8") + "\n# Another version\n", encoding="utf-8")
        self._git("-c", "user.name=Chaos", "-c", "user.email=chaos@localhost", "commit", "-qam", "Second")
        self.commits["2"] = self._git("rev-parse", "HEAD")

    def disturb(self, num_events: int, minutes: float) -> None:
        """Run drivers in random states of the workspace, while events happen at random times."""
        began = time.monotonic()
        times = sorted(began + 60 * self.rng.uniform(0, minutes) for _ in range(num_events))
        while times:
            configuration, commit = self.rng.choice("AB"), self.rng.choice("12")
            self.enter(configuration, commit)
            self.run(self.rng.choice(("flow", "repro")), configuration, times)

    def enter(self, configuration: str, commit: str) -> None:
        """Check out a commit and write the configuration."""
        self._git("checkout", "-qf", self.commits[commit])
        write_configuration(self.folder, configuration, self.is_trivial)

    def run(self, driver: str, configuration: str, event_times: list[float]) -> tuple[int, str]:
        """Run a driver to its end, with the events that fall into its time; note what finished, and a traceback."""
        self.driver = driver
        self.excused |= self.excused_now
        self.excused_now = set()
        command = driver_command(driver, configuration, self.is_trivial)
        started = time.monotonic()
        with tempfile.TemporaryFile("w+") as said:
            process = psutil.Popen(
                command, cwd=self.folder, env=environment(), stdout=said, stderr=subprocess.STDOUT
            )
            while True:
                due = event_times[0] if event_times else started + _LONGEST_RUN_S
                with contextlib.suppress(psutil.TimeoutExpired):
                    code = process.wait(max(0.0, due - time.monotonic()))
                    break
                if event_times:
                    event_times.pop(0)
                    self._do_any(process, f"{driver} of {configuration}")
                else:
                    self._violate(f"{driver} did not end within {_LONGEST_RUN_S / 60:.0f} minutes")
                    process.kill()
            self._await_stages()
            said.seek(0)
            text = said.read()
        (self.folder / "filler").unlink(missing_ok=True)
        if "Traceback (most recent call last)" in text:
            self._violate(f"a traceback: {text[text.index('Traceback') :][:3000]}")
        for address in _FINISHED.findall(text):
            self._note_finished(address)
        return code, text

    def check(self, reference: Path) -> None:
        """Run the first configuration to its end with both drivers and compare its outputs with the reference."""
        self.enter("A", "1")
        code, text = self.run("flow", "A", [])
        if code != 0:
            self._violate(f"the last flow ended with {code}: {text[-2000:]}")
        code, text = self.run("repro", "A", [])
        if code != 0 or _STARTED.search(text):
            self._violate(f"dvc repro after the last flow ended with {code}: {text[-2000:]}")
        expected, found = outputs(reference), outputs(self.folder)
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                self._violate(f"{name} is not what the undisturbed run made")

    def _do_any(self, process: psutil.Process, where: str) -> None:
        events = (
            self._kill_stage,
            self._kill_driver,
            self._kill_server,
            self._fill_disk,
            self._flip_output,
            self._flip_cache,
            self._flip_record,
        )
        with contextlib.suppress(psutil.NoSuchProcess):
            self.events.append(f"{where}: {self.rng.choice(events)(process)}")
            print(f"{len(self.events):4d}  {self.events[-1]}", flush=True)

    def _kill_stage(self, _: psutil.Process) -> str:
        stages = self._stages()
        if not stages:
            return "no stage to kill"
        stage = self.rng.choice(stages)
        address = stage.cmdline()[3]
        stage.kill()
        return f"killed {address}"

    def _kill_driver(self, process: psutil.Process) -> str:
        process.kill()
        return "killed the driver"

    def _kill_server(self, _: psutil.Process) -> str:
        file = self.folder / ".prefect/server.json"
        if not file.is_file():
            return "no server to kill"
        psutil.Process(json.loads(file.read_text(encoding="utf-8"))["pid"]).kill()
        return "killed the Prefect server"

    def _fill_disk(self, _: psutil.Process) -> str:
        with contextlib.suppress(OSError), (self.folder / "filler").open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        return "filled the disk"

    def _flip_output(self, _: psutil.Process) -> str:
        return self._flip(
            path for path in (self.folder / ARTIFACTS).glob("[!.]*/**/*") if path.name != KEY_FILE
        )

    def _flip_cache(self, _: psutil.Process) -> str:
        return self._flip((self.folder / _CACHE / "files").rglob("*"))

    def _flip_record(self, _: psutil.Process) -> str:
        return self._flip((self.folder / _CACHE / "keys").rglob("*.json"))

    def _flip(self, files: Iterator[Path]) -> str:
        """Flip a bit in the middle of one of these files, and note what is lost by it."""
        found = sorted(path for path in files if path.is_file() and path.stat().st_size)
        if not found:
            return "nothing to damage"
        file = self.rng.choice(found)
        content = bytearray(file.read_bytes())
        before = hashlib.md5(content).hexdigest()
        content[len(content) // 2] ^= 1
        file.chmod(0o644)
        file.write_bytes(content)
        records = self._records()
        if file.parent.parent.name == "keys":
            key = file.parent.name + file.stem
            outputs_of_key = [place for place in records.get(key, {}) if place.name == KEY_FILE]
            if self.driver == "repro" or not outputs_of_key:  # DVC deletes outputs that it makes anew
                self.excused_now.add(key)
        self.excused_now |= {
            key
            for key, places in records.items()
            if any(before in md5s.values() for md5s in places.values())
            and not self._has_intact_copy(before, {} if self.driver == "repro" else places)
        }
        return f"damaged {file.relative_to(self.folder)}"

    def _records(self) -> dict[str, dict[Path, dict[str, str]]]:
        """Return key -> place -> md5 by name of all records, of outputs and of the store."""
        files = [*(self.folder / ARTIFACTS).rglob(KEY_FILE), *(self.folder / _CACHE / "keys").rglob("*.json")]
        found: dict[str, dict[Path, dict[str, str]]] = {}
        for file in files:
            with contextlib.suppress(ValueError, OSError, KeyError, AttributeError):
                record = json.loads(file.read_text(encoding="utf-8"))
                found.setdefault(str(record["key"]), {})[file] = dict(record["files"])
        return found

    def _has_intact_copy(self, md5: str, places: dict[Path, dict[str, str]]) -> bool:
        """Return whether the cache or one of these outputs holds a file."""
        copies = [self.folder / _CACHE / "files/md5" / md5[:2] / md5[2:]]
        for file, names in places.items():
            if file.name == KEY_FILE:
                copies += [file.parent / name for name, of_file in names.items() if of_file == md5]
        return any(copy.is_file() and _md5(copy) == md5 for copy in copies)

    def _note_finished(self, address: str) -> None:
        file = self.folder / ARTIFACTS.joinpath(*address.split(".")) / KEY_FILE
        with contextlib.suppress(OSError, ValueError):
            key = str(json.loads(file.read_text(encoding="utf-8"))["key"])
            is_excused = key in self.excused | self.excused_now
            if key in self.finished and not is_excused and address != "track":
                self._violate(f"{address} finished twice, and nothing had destroyed its output")
            self.finished[key] = address
            self.excused.discard(key)

    def _violate(self, words: str) -> None:
        self.violations.append(f"after event {len(self.events)} ({'; '.join(self.events[-2:])}): {words}")
        print(f"VIOLATION {self.violations[-1]}", flush=True)

    def _stages(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.cmdline()[1:3] == ["-m", "tasks"] and process.cwd() == str(self.folder):
                    found.append(process)
        return found

    def _await_stages(self) -> None:
        """Wait for stages whose driver was killed: they end by themselves."""
        psutil.wait_procs(self._stages(), timeout=60)

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=self.folder, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()


def write_pipeline(folder: Path, is_trivial: bool) -> None:
    """Write a workspace in its first configuration."""
    if is_trivial:
        write_workspace(folder, num_variants=2, num_targets=2, seconds=0.2)
    else:
        subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(folder)], check=True)
    write_configuration(folder, "A", is_trivial)


def write_configuration(folder: Path, configuration: str, is_trivial: bool) -> None:
    """Write params.yaml."""
    if not is_trivial:
        command = [sys.executable, "-m", "flows.params", *CONFIGURATIONS[configuration]]
        subprocess.run(command, cwd=folder, env=environment(), check=True, capture_output=True)
        return
    file = folder / "params.yaml"
    params = yaml.safe_load(file.read_text(encoding="utf-8"))
    params["quantize_ptq"]["salt"] = "AB".index(configuration)
    file.write_text(yaml.safe_dump(params), encoding="utf-8")


def driver_command(driver: str, configuration: str, is_trivial: bool) -> list[str]:
    """Return the command line of a driver."""
    if driver == "repro":
        return [sys.executable, "-m", "dvc", "repro"]
    if is_trivial:
        return [sys.executable, "-m", "benchmarks.trivial_pipeline"]
    return [sys.executable, "-m", "flows.optimize", *CONFIGURATIONS[configuration]]


def environment() -> dict[str, str]:
    """Return the environment of the drivers; dvc.yaml calls `python`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    own.pop("PYTHONPATH", None)
    return {**own, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def outputs(workspace: Path) -> dict[str, str]:
    """Return the md5 of each published file that holds no times."""
    root = workspace / ARTIFACTS
    return {
        str(path.relative_to(root)): _md5(path)
        for path in root.glob("[!.]*/**/*")
        if path.is_file() and path.name not in WITH_TIMES and path.relative_to(root).parts[0] not in MEASURED
    }


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


@contextlib.contextmanager
def own_disk(size: str) -> Iterator[Path]:
    """Mount a file system of its own for a workspace."""
    folder = Path(tempfile.mkdtemp(prefix="enginewright-chaos-"))
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "chaos", str(folder)], check=True)
    try:
        yield folder / "workspace"
    finally:
        subprocess.run(
            [sys.executable, "-m", "flows.local_server", "--stop"],
            cwd=folder / "workspace",
            env=environment(),
            check=False,
            capture_output=True,
        )
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        shutil.rmtree(folder)


def main() -> int:
    """Disturb, check, write the record and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trivial", action="store_true", help="stages that write a few bytes")
    parser.add_argument("--minutes", type=float, default=60.0, help="the time in which the events happen")
    parser.add_argument("--events", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    size = _DISK[options.trivial]
    with own_disk(size) as undisturbed, own_disk(size) as folder:
        reference = Chaos(undisturbed, options.trivial, random.Random(0))
        reference.prepare()
        reference.enter("A", "1")
        code, text = reference.run("flow", "A", [])
        if code:
            sys.exit(f"the undisturbed run ended with {code}: {text[-3000:]}")
        chaos = Chaos(folder, options.trivial, random.Random(options.seed))
        chaos.prepare()
        began = time.monotonic()
        chaos.disturb(options.events, options.minutes)
        chaos.check(undisturbed)
    record: dict[str, Any] = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        "pipeline": "trivial" if options.trivial else "smoke",
        "seed": options.seed,
        "minutes": round((time.monotonic() - began) / 60, 1),
        "num_events": len(chaos.events),
        "num_stage_calls_finished": len(chaos.finished),
        "events": chaos.events,
        "violations": chaos.violations,
    }
    options.results.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(
        f"{len(chaos.events)} events, {len(chaos.finished)} stage calls, {len(chaos.violations)} violations"
    )
    return int(bool(chaos.violations))


if __name__ == "__main__":
    sys.exit(main())
