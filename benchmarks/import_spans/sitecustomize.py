"""Print every import of this process when it ends; Python runs this file at startup if its folder is in PYTHONPATH.

One line on stderr: ``import-span <process> <parent process> <start> <end>``, in seconds of the system's monotonic
clock. Nested imports belong to the outermost one. A stage's process also prints its stage: ``stage-process
<process> <address>``.
"""

import builtins
import os
import sys
import threading
import time
from typing import Any

_MIN_SECONDS = 0.0005
_plain_import = builtins.__import__
_nesting = threading.local()


def _timed_import(*arguments: Any, **keywords: Any) -> Any:
    if getattr(_nesting, "is_inside", False):
        return _plain_import(*arguments, **keywords)
    _nesting.is_inside = True
    start = time.monotonic()
    try:
        return _plain_import(*arguments, **keywords)
    finally:
        _nesting.is_inside = False
        end = time.monotonic()
        if end - start > _MIN_SECONDS:
            sys.stderr.write(f"import-span {os.getpid()} {os.getppid()} {start:.4f} {end:.4f}\n")


builtins.__import__ = _timed_import
if sys.orig_argv[1:3] == ["-m", "tasks"]:
    sys.stderr.write(f"stage-process {os.getpid()} {sys.orig_argv[3]}\n")
