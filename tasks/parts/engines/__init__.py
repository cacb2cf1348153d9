"""What an engine is, what a target declares, and how an engine runs; one package per runtime.

Each import of OpenVINO sends an event to its maker, from a forked process that can outlive the engine's. It has no
switch for that, but does without if the package that sends it is missing.
"""

import sys

sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
