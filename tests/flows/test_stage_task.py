"""What stage calls say on the terminal."""

import subprocess
import sys
from collections import Counter

_PRINT_SIDE_BY_SIDE = """
import sys
from concurrent.futures import ThreadPoolExecutor

from flows.stage_task import print_line

sys.setswitchinterval(1e-6)  # threads change as often as they can
with ThreadPoolExecutor(8) as threads:
    list(threads.map(print_line, [f"stage {number}: running" for number in range(2000)]))
"""


def test_lines_of_stages_side_by_side_stay_whole() -> None:
    printed = subprocess.run(
        [sys.executable, "-c", _PRINT_SIDE_BY_SIDE], capture_output=True, text=True, check=True
    )
    expected = Counter(f"stage {number}: running" for number in range(2000))
    assert Counter(printed.stdout.splitlines()) == expected
