"""Print, as JSON, what some Python files use of the TensorRT bindings on the path, and what these lack.

``python -m tests.tensorrt_faults FILE ...``: a process of its own, because only one version can be imported.
"""

import json
import sys
from pathlib import Path

import tensorrt

from tests.tensorrt_use import find_uses_and_faults

report = {}
for name in sys.argv[1:]:
    uses, faults = find_uses_and_faults(Path(name).read_text(encoding="utf-8"), tensorrt)
    report[name] = {"uses": sorted(uses), "faults": [[fault.line, fault.use] for fault in faults]}
sys.stdout.write(json.dumps({"version": tensorrt.__version__, "files": report}))
