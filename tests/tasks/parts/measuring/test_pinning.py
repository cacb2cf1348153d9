"""Processes of a race are kept on the same CPUs, and let go again."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tasks.parts.measuring.pinning import choose_cpus, pinned

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="only Linux pins processes")


def describe(cpus: Path, siblings: dict[int, str], mhz: dict[int, int]) -> None:
    for number, text in siblings.items():
        topology = cpus / f"cpu{number}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{text}\n")
        (topology.parent / "cpufreq").mkdir()
        (topology.parent / "cpufreq/cpuinfo_max_freq").write_text(f"{1000 * mhz[number]}\n")


def test_fast_cores_come_first_and_second_threads_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    describe(
        tmp_path,
        {0: "0-1", 1: "0-1", 2: "2,3", 3: "2,3", 4: "4"},
        {0: 5000, 1: 5000, 2: 5000, 3: 5000, 4: 3000},
    )
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    assert choose_cpus(5, tmp_path) == (2, 0, 4, 3, 1)
    assert choose_cpus(1, tmp_path) == (2,)
    assert choose_cpus(6, tmp_path) == ()
    assert choose_cpus(2, tmp_path / "without topology") == (4, 3)


def test_every_thread_is_pinned_and_let_go() -> None:
    code = "import threading, sys; [threading.Thread(target=sys.stdin.read, daemon=True).start() for _ in range(2)]"
    code += "; print(flush=True); threading.Event().wait()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout and process.stdout.readline()
        threads = [int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()]
        assert len(threads) == 3
        before = os.sched_getaffinity(process.pid)
        with pinned({process.pid: 1}) as cpus:
            assert len(cpus) == 1
            assert all(os.sched_getaffinity(thread) == set(cpus) for thread in threads)
        assert all(os.sched_getaffinity(thread) == before for thread in threads)
    finally:
        process.kill()
        process.communicate()


def test_nothing_is_pinned_with_more_threads_than_cpus() -> None:
    before = os.sched_getaffinity(threading.get_native_id())
    with pinned({os.getpid(): len(before) + 1}) as cpus:
        assert cpus == () and os.sched_getaffinity(threading.get_native_id()) == before
