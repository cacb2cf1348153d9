"""Measure how long it takes to see that a large data set is still what its pointer file names.

``python -m benchmarks.unchanged_data`` writes 20 GB in 20,000 sparse files and their pointer into a temporary folder,
digests them once, which reads everything and fills the index, and then in new processes as each stage and flow does
(``tasks.core.fingerprint.digest``). Prints both times and writes ``benchmarks/results/unchanged_data.json``.
"""

import argparse
import hashlib
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

from tasks.core.digest_index import INDEX_FILE
from tasks.core.fingerprint import SOURCE_ROOT, listing_md5
from tasks.parts.engines.machine import read_cpu_model

RESULTS = Path(__file__).parent / "results" / "unchanged_data.json"
_DIGEST = (
    f"import sys, time; sys.path.insert(0, {str(SOURCE_ROOT)!r})\n"
    "from pathlib import Path\n"
    "from tasks.core.fingerprint import digest\n"
    "started = time.perf_counter(); digest(Path('data')); print(time.perf_counter() - started)"
)


def main() -> None:
    """Write the data, measure, print and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=20.0)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_data(folder, options.files, int(options.gigabytes * 1e9) // options.files)
        time.sleep(3)  # a file enters the index when it is older than the tick of a clock
        first_s, *again_s = (measure(folder) for _ in range(1 + options.repeats))
    record = {
        "date": date.today().isoformat(),
        "cpu_model": read_cpu_model(),
        "python": platform.python_version(),
        "gigabytes": options.gigabytes,
        "num_files": options.files,
        "first_s": round(first_s, 2),
        "unchanged_s": round(statistics.median(again_s), 2),
    }
    print(json.dumps(record, indent=2))
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def write_data(folder: Path, num_files: int, size_bytes: int) -> None:
    """Write files of zeros that take no space, and the pointer that ``dvc add`` would write."""
    (folder / INDEX_FILE.parent).mkdir()
    names = [f"{number % 100:02d}/{number:06d}.png" for number in range(num_files)]
    for name in names:
        file = folder / "data" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("wb") as opened:
            opened.truncate(size_bytes)
    one = hashlib.md5(bytes(size_bytes)).hexdigest()
    md5 = listing_md5({"md5": one, "relpath": name} for name in names)
    (folder / "data.dvc").write_text(f"outs:\n- md5: {md5}\n  path: data\n", encoding="utf-8")


def measure(folder: Path) -> float:
    """Return the seconds that a new process takes to digest the data."""
    done = subprocess.run(
        [sys.executable, "-c", _DIGEST], cwd=folder, check=True, capture_output=True, text=True
    )
    return float(done.stdout)


if __name__ == "__main__":
    main()
