"""Disturb a pipeline at random, and check that nothing of it is lost, wrong or made twice.

``python -m benchmarks.chaos --minutes 60 --events 100 --seed 0`` runs the smoke pipeline in a workspace on a disk of
its own (a tmpfs, which needs the right to mount), with all drivers, two configurations and two commits in random
order, one after the other. ``flow`` is ``python -m flows.optimize``, ``repro`` is ``dvc repro``, ``deployed`` is a
Prefect deployment (``benchmarks/chaos_deployed.py``): a worker makes the models in the workspace, and another one the
engines in a checkout for the device, which shares the workspace's DVC cache. Meanwhile events happen at random times:
SIGKILL of a stage, of the driver, of the Prefect server, of a worker or of its run, a full disk, a flipped bit in the
outputs, in their records, in DVC's cache or in a record of the store. ``--trivial`` takes stages that write a few
bytes (``benchmarks/trivial_pipeline.py``), for many events in a short time; they have no deployment.

At the end the first configuration runs to its end with all drivers. Then its outputs must be those of an undisturbed
run in another workspace, no stage call may have finished twice unless an event destroyed its last intact copy, and no
command may have ended in a traceback. A deployed run that is completed leaves what git tracks as it was. Prints every
event, writes ``--results`` and ends with 1 after a violation.
"""

import argparse
import contextlib
import hashlib
import json
import logging
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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.chaos_deployed import end_all, is_run, is_stage, is_worker, processes_of
from benchmarks.trivial_pipeline import REPOSITORY, write_workspace
from tasks.core.execute import ARTIFACTS
from tasks.core.reports import KEY_FILE, REPORT_FILE
from tasks.core.store import Record, object_file, read_record
from tasks.parts.engines.machine import read_cpu_model

RESULTS = Path(__file__).parent / "results" / "chaos.json"
SMOKE = ["debug=smoke"]
CONFIGURATIONS = {"A": [*SMOKE], "B": [*SMOKE, "finetune.trainer.seed=1"]}
MEASURED = (
    *("search_pruning", "benchmark", "measure_machine", "explain"),
    *("select_engine", "track", "race_picks"),
)
"""Stages whose outputs hold times or the place of a run in MLflow."""
WITH_TIMES = (REPORT_FILE, KEY_FILE, "history.csv", "training.png")
_CACHE = Path(".dvc/cache")
_FINISHED = re.compile(r"tasks\.core\.execute (\S+): finished in")
_STARTED = re.compile(r"tasks\.core\.execute (\S+): started")
_STAGE_TRACEBACK = re.compile(r"[^\n]* - Traceback \(most recent call last\).*", re.DOTALL)
"""In the words of a worker: Prefect logs each line of a stage by itself."""
_FLOW_ERROR = re.compile(r"Encountered exception during execution: (\w+)\(.*")
_ERRORS_OF_FLOWS = {
    *("ArtifactError", "ConfigError", "DiskError", "DvcFailed", "ServerUnavailable", "StageFailed"),
    *("TargetsFailed", "WorkspaceBusy"),
}
"""What a deployed flow may fail with: one line that tells what to do."""
_LONGEST_RUN_S = 1800.0
_FULL_DISK_S = 20.0
"""After this somebody makes room, where a deployed run is waiting for it."""
_DISK = {True: "256m", False: "6g"}
DRIVERS = ("flow", "repro", "deployed")


@dataclass
class Chaos:
    """A workspace that is disturbed, and what was seen."""

    folder: Path
    is_trivial: bool
    drivers: list[str]
    rng: random.Random
    commits: dict[str, str] = field(default_factory=dict)
    finished: dict[str, str] = field(default_factory=dict)
    """Key -> address of every stage call that finished."""
    excused: set[tuple[Path, str]] = field(default_factory=set)
    """Checkouts and the keys of which an event of an earlier run destroyed the last intact copy for them."""
    excused_now: set[tuple[Path, str]] = field(default_factory=set)
    """Those of the current run, in which the output may have been made before or after the event."""
    events: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    driver: str = ""
    """Which one runs."""
    filled_s: float | None = None
    """When the disk was filled."""

    @property
    def device(self) -> Path:
        """The checkout of the device."""
        return self.folder.with_name("device")

    @property
    def checkouts(self) -> list[Path]:
        """The workspace and, if there is one, the checkout of the device."""
        return [self.folder, *([self.device] if self.device.is_dir() else [])]

    def prepare(self) -> None:
        """Write the workspace, with a second commit in which a stage has another comment, and the device's."""
        write_pipeline(self.folder, self.is_trivial)
        self.commits["1"] = self._git("rev-parse", "HEAD")
        file = self.folder / "tasks/validate.py"
        file.write_text(file.read_text(encoding="utf-8") + "\n# Another version\n", encoding="utf-8")
        self._git(
            "-c",
            "user.name=Chaos",
            "-c",
            "user.email=chaos@localhost",
            "commit",
            "-qm",
            "Second",
            "--",
            str(file),
        )
        self.commits["2"] = self._git("rev-parse", "HEAD")
        if "deployed" in self.drivers:
            write_device(self.folder, self.device)

    def disturb(self, num_events: int, minutes: float) -> None:
        """Run drivers in random states of the workspace, while events happen at random times."""
        began = time.monotonic()
        times = sorted(began + 60 * self.rng.uniform(0, minutes) for _ in range(num_events))
        while times:
            driver = self.rng.choice(self.drivers)
            configuration, commit = self.rng.choice("AB"), self.rng.choice("12")
            self.enter(driver, configuration, commit)
            self.run(driver, configuration, times)

    def enter(self, driver: str, configuration: str, commit: str) -> None:
        """Check out a commit and write the configuration; a deployed run writes it by itself.

        What a killed deployed run left in the device's checkout stays there.
        """
        self._git("checkout", "-qf", self.commits[commit])
        if self.device in self.checkouts:
            self._git("checkout", "-q", self.commits[commit], checkout=self.device)
        if driver != "deployed":
            write_configuration(self.folder, configuration, self.is_trivial)

    def run(self, driver: str, configuration: str, event_times: list[float]) -> tuple[int, str]:
        """Run a driver to its end, with the events that fall into its time; note what finished, and a traceback."""
        self.driver = driver
        carried = self.excused | self.excused_now
        self.excused = {(checkout, key) for checkout, key in carried if not self._has_intact(checkout, key)}
        self.excused_now = set()
        began_s = time.time()
        with tempfile.TemporaryDirectory() as said:
            logs = {self.folder: Path(said, "driver.log"), self.device: Path(said, "device.log")}
            command = driver_command(driver, configuration, self.is_trivial, self.device, logs[self.device])
            with logs[self.folder].open("w") as log:
                process = psutil.Popen(
                    command, cwd=self.folder, env=environment(), stdout=log, stderr=subprocess.STDOUT
                )
            try:
                code = self._await(process, f"{driver} of {configuration}", event_times)
            finally:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
                end_all(self.folder)
                self._await_stages()
                self._empty_disk()
            texts = {
                checkout: log.read_text(encoding="utf-8", errors="replace")
                for checkout, log in logs.items()
                if log.is_file()
            }
        for checkout, text in texts.items():
            self._find_traceback(text)
            for address in self._addresses_finished(checkout, text, began_s):
                self._note_finished(checkout, address)
        if driver == "deployed" and code == 0:
            for checkout in self.checkouts:
                if changed := self._git("status", "--porcelain", checkout=checkout):
                    self._violate(f"a deployed run left changes in {checkout.name}: {changed}")
        return code, "\n".join(texts.values())

    def _await(self, process: psutil.Popen, where: str, event_times: list[float]) -> int:
        """Let events happen until a driver ends, and return its exit code."""
        last_s = time.monotonic() + _LONGEST_RUN_S
        while True:
            due_s = event_times[0] if event_times else last_s
            if self.filled_s is not None and self.driver == "deployed":
                due_s = min(due_s, self.filled_s + _FULL_DISK_S)
            with contextlib.suppress(psutil.TimeoutExpired):
                return int(process.wait(max(0.0, min(due_s, last_s) - time.monotonic())))
            now_s = time.monotonic()
            if now_s >= last_s:
                self._violate(f"{where} did not end within {_LONGEST_RUN_S / 60:.0f} minutes")
                process.kill()
            elif event_times and now_s >= event_times[0]:
                event_times.pop(0)
                self._do_any(process, where)
            else:
                self._empty_disk()

    def check(self, reference: Path) -> None:
        """Run the first configuration to its end with all drivers and compare its outputs with the reference."""
        self.enter("flow", "A", "1")
        code, text = self.run("flow", "A", [])
        if code != 0:
            self._violate(f"the last flow ended with {code}: {text[-2000:]}")
        code, text = self.run("repro", "A", [])
        if code != 0 or _STARTED.search(text):
            self._violate(f"dvc repro after the last flow ended with {code}: {text[-2000:]}")
        if self.device in self.checkouts:
            self.enter("deployed", "A", "1")
            code, text = self.run("deployed", "A", [])
            started = set(_STARTED.findall(text)) - {"track"}
            if code != 0 or started:
                self._violate(f"the last deployed run started {started}, ended with {code}: {text[-3000:]}")
        expected = outputs(reference)
        for checkout in self.checkouts:
            found = outputs(checkout)
            for name in sorted(expected.keys() | found.keys() if checkout == self.folder else found.keys()):
                if expected.get(name) != found.get(name):
                    self._violate(f"{name} in {checkout.name} is not what the undisturbed run made")

    def _do_any(self, process: psutil.Process, where: str) -> None:
        """Let one of the events happen that are possible now; without one, or if the driver just ended, none."""
        events = (
            self._kill_stage,
            self._kill_driver,
            self._kill_server,
            self._kill_worker,
            self._fill_disk,
            self._flip_output,
            self._flip_key,
            self._flip_cache,
            self._flip_record,
        )
        for event in self.rng.sample(events, len(events)):
            with contextlib.suppress(psutil.Error, FileNotFoundError):  # it ended, or was replaced, just now
                if words := event(process):
                    self.events.append(f"{where}: {words}")
                    print(f"{len(self.events):4d}  {self.events[-1]}", flush=True)
                    return

    def _kill_stage(self, _: psutil.Process) -> str | None:
        stages = self._stages()
        if not stages:
            return None
        stage = self.rng.choice(stages)
        address = stage.cmdline()[3]
        stage.kill()
        return f"killed {address}"

    def _kill_driver(self, process: psutil.Process) -> str | None:
        process.kill()
        end_all(self.folder)  # what a deployed one started ends with it, as with the power
        return "killed the driver"

    def _kill_server(self, _: psutil.Process) -> str | None:
        file = self.folder / ".prefect/server.json"
        server = psutil.Process(json.loads(file.read_text(encoding="utf-8"))["pid"])
        if server.cmdline()[1:3] != ["-m", "prefect"] or server.status() == psutil.STATUS_ZOMBIE:
            return None
        server.kill()
        return "killed the Prefect server"

    def _kill_worker(self, _: psutil.Process) -> str | None:
        """Kill a worker with all that it started, or only it, or only its run."""
        found = processes_of(self.folder)
        workers, runs = list(filter(is_worker, found)), list(filter(is_run, found))
        if not workers:
            return None
        how = self.rng.choice(("worker and all it started", "worker", *(["run"] if runs else [])))
        victim = self.rng.choice(runs if how == "run" else workers)
        place = victim.cwd().rpartition("/")[2]
        started = victim.children(recursive=True) if how == "worker and all it started" else []
        victim.kill()
        for child in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        return f"killed the {how} in {place}"

    def _fill_disk(self, _: psutil.Process) -> str | None:
        if self.filled_s is not None:
            return None
        self.filled_s = time.monotonic()
        with contextlib.suppress(OSError), (self.folder / "filler").open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        return "filled the disk"

    def _empty_disk(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)
        self.filled_s = None

    def _flip_output(self, _: psutil.Process) -> str | None:
        return self._flip(path for path in self._published() if path.name != KEY_FILE)

    def _flip_key(self, _: psutil.Process) -> str | None:
        return self._flip(path for path in self._published() if path.name == KEY_FILE)

    def _flip_cache(self, _: psutil.Process) -> str | None:
        return self._flip((self.folder / _CACHE / "files").rglob("*"))

    def _flip_record(self, _: psutil.Process) -> str | None:
        return self._flip((self.folder / _CACHE / "keys").rglob("*.json"))

    def _flip(self, files: Iterable[Path]) -> str | None:
        """Flip a bit in the middle of one of these files, and note what is lost by it."""
        found = sorted(path for path in files if path.is_file() and path.stat().st_size)
        if not found:
            return None
        file = self.rng.choice(found)
        before = self._records()
        file.chmod(0o644)
        status = file.stat()
        with file.open("r+b") as opened:  # what it holds now, even if it is replaced in this moment
            content = opened.read()
            opened.seek(len(content) // 2)
            opened.write(bytes([content[len(content) // 2] ^ 1]))
        md5 = hashlib.md5(content).hexdigest()
        if file.name == KEY_FILE:
            os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))  # else it looks as if it was made now
        affected = {
            record["key"]
            for place, record in before.items()
            if place == file or md5 in record["files"].values()
        }
        self.excused_now |= {
            (checkout, key)
            for checkout in self.checkouts
            for key in affected
            if not self._has_intact(
                checkout, key, is_repro=self.driver == "repro" and checkout == self.folder
            )
        }
        return f"damaged {file.relative_to(self.folder.parent)}"

    def _published(self) -> Iterator[Path]:
        for checkout in self.checkouts:
            yield from (checkout / ARTIFACTS).glob("[!.]*/**/*")

    def _records(self) -> dict[Path, Record]:
        """Return the intact records of all outputs and of the store by their file."""
        files = [path for path in self._published() if path.name == KEY_FILE]
        files += (self.folder / _CACHE / "keys").rglob("*.json")
        found = {file: read_record(file) for file in files}
        return {file: record for file, record in found.items() if record is not None}

    def _has_intact(self, checkout: Path, key: str, *, is_repro: bool = False) -> bool:
        """Return whether the store and the outputs of a checkout have all of what was published under a key.

        While DVC runs, outputs do not count: it deletes those that it makes anew.
        """
        outputs_of_key = {
            file: record
            for file, record in self._records().items()
            if record["key"] == key and (checkout / ARTIFACTS) in file.parents and not is_repro
        }
        stored = read_record(self.folder / _CACHE / "keys" / key[:2] / f"{key[2:]}.json")
        records = [*([stored] if stored else []), *outputs_of_key.values()]
        return bool(records) and all(
            any(
                _is_intact(copy, md5)
                for copy in (
                    object_file(self.folder / _CACHE, md5),
                    *(file.parent / name for file in outputs_of_key),
                )
            )
            for name, md5 in records[0]["files"].items()
        )

    def _addresses_finished(self, checkout: Path, text: str, began_s: float) -> list[str]:
        """Return the addresses of the calls that finished in a run, by their last words or by their output.

        Where a worker's run was killed, it passes the last words of a stage on no more.
        """
        said = _FINISHED.findall(text)
        silent = [
            address
            for address in sorted(set(_STARTED.findall(text)) - set(said))
            if (file := key_file(checkout, address)).is_file() and file.stat().st_mtime >= began_s
        ]
        return [*said, *silent]

    def _note_finished(self, checkout: Path, address: str) -> None:
        record = read_record(key_file(checkout, address))
        if record is None:
            return
        key = record["key"]
        is_excused = (checkout, key) in self.excused | self.excused_now
        if key in self.finished and not is_excused and address != "track":
            self._violate(f"{address} finished twice, and nothing had destroyed its output")
        self.finished[key] = address
        self.excused -= {(place, key) for place in self.checkouts}

    def _find_traceback(self, text: str) -> None:
        """Note a traceback; Prefect prints one for each flow that fails, where the name of the error counts."""
        if self.driver != "deployed":
            if "Traceback (most recent call last)" in text:
                self._violate(f"a traceback: {text[text.index('Traceback') :][:3000]}")
            return
        if found := _STAGE_TRACEBACK.search(text):
            self._violate(f"a traceback: {found[0][:6000]}")
        for found in _FLOW_ERROR.finditer(text):
            if found[1] not in _ERRORS_OF_FLOWS:
                self._violate(f"a flow failed: {text[found.start() :][:6000]}")

    def _violate(self, words: str) -> None:
        self.violations.append(f"after event {len(self.events)} ({'; '.join(self.events[-2:])}): {words}")
        print(f"VIOLATION {self.violations[-1]}", flush=True)

    def _stages(self) -> list[psutil.Process]:
        places = [str(checkout) for checkout in self.checkouts]
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if is_stage(process) and process.cwd() in places:
                    found.append(process)
        return found

    def _await_stages(self) -> None:
        """Wait for stages whose driver was killed: they end by themselves."""
        psutil.wait_procs(self._stages(), timeout=60)

    def _git(self, *arguments: str, checkout: Path | None = None) -> str:
        place = checkout or self.folder
        done = subprocess.run(["git", *arguments], cwd=place, check=False, capture_output=True, text=True)
        if done.returncode:
            free_bytes = shutil.disk_usage(place).free
            raise RuntimeError(f"git {arguments} in {place} ({free_bytes:,} bytes free): {done.stderr}")
        return done.stdout.strip()


def key_file(checkout: Path, address: str) -> Path:
    """Return where the record of an output is."""
    return checkout / ARTIFACTS.joinpath(*address.split(".")) / KEY_FILE


def _is_intact(file: Path, md5: str) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return _md5(file) == md5
    return False


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


def write_device(workspace: Path, device: Path) -> None:
    """Clone a workspace for a device; let both share the cache and have a DVC remote."""
    subprocess.run(["git", "clone", "-q", str(workspace), str(device)], check=True)
    remote = device.with_name("remote")
    settings = (
        f"[core]\n    remote = folder\n['remote \"folder\"']\n    url = {remote}\n"
        f"[cache]\n    dir = {workspace / _CACHE}\n"
    )
    for checkout in (workspace, device):
        (checkout / ".dvc/config.local").write_text(settings, encoding="utf-8")


def driver_command(driver: str, configuration: str, is_trivial: bool, device: Path, log: Path) -> list[str]:
    """Return the command line of a driver; the last two are the deployed one's."""
    if driver == "deployed":
        options = ["--device", str(device), "--device-log", str(log)]
        return [sys.executable, "-m", "benchmarks.chaos_deployed", *options, *CONFIGURATIONS[configuration]]
    if driver == "repro":
        return [sys.executable, "-m", "dvc", "repro"]
    if is_trivial:
        return [sys.executable, "-m", "benchmarks.trivial_pipeline"]
    return [sys.executable, "-m", "flows.optimize", *CONFIGURATIONS[configuration]]


def environment() -> dict[str, str]:
    """Return the environment of the drivers; dvc.yaml calls `python`."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "MLFLOW_"))}
    own.pop("PYTHONPATH", None)
    return {
        **own,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        # Of the server, which any driver may start: for how long a killed deployed run keeps the next one waiting.
        "PREFECT_SERVER_CONCURRENCY_INITIAL_DEPLOYMENT_LEASE_DURATION": "30",
    }


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
        if (folder / "workspace").is_dir():
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
    parser.add_argument(
        "--drivers",
        nargs="+",
        choices=DRIVERS,
        default=DRIVERS,
        help="what is drawn from; often: name it twice",
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    drivers = [name for name in options.drivers if name != "deployed" or not options.trivial]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    logging.getLogger("tasks.core.store").setLevel(logging.ERROR)  # damaged records are no news
    size = _DISK[options.trivial]
    with own_disk(size) as undisturbed, own_disk(size) as folder:
        reference = Chaos(undisturbed, options.trivial, ["flow"], random.Random(0))
        reference.prepare()
        reference.enter("flow", "A", "1")
        code, text = reference.run("flow", "A", [])
        if code:
            sys.exit(f"the undisturbed run ended with {code}: {text[-3000:]}")
        chaos = Chaos(folder, options.trivial, drivers, random.Random(options.seed))
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
        "drivers": drivers,
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
