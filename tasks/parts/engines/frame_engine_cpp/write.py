"""Write the C++ program that runs a bundle's engine without Python.

engine.txt          what the program needs to know: lines of `key value`, and of `option NAME VALUE` for the runtime
cpp/                its source, and a CMakeLists.txt that makes <bundle>/infer
"""

import shutil
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SHARED = ("bundle.hpp", "frames.hpp", "program.hpp")
OWN = ("infer.cpp", "CMakeLists.txt")
_RAW_FRAMES = {"frames": "RGB", "bgr_frames": "BGR"}


def write_cpp(card: dict[str, Any], out: Path) -> bool:
    """Write engine.txt and cpp/ into the bundle `out`; return False for an engine that has no C++ program.

    `card` is the content of model.json. Programs exist for engines that take raw frames and give answers, with
    OpenVINO or with ONNX Runtime on the CPU, and without custom operators.
    """
    runtime, options = card["runtime"], card["options"]
    has_program = runtime == "openvino" or options.get("provider") == "CPUExecutionProvider"
    gives_answers = card["gives"] == "classes" or card["task"] == "values"
    if (
        card.get("custom_operators")
        or not has_program
        or not gives_answers
        or card["reads"] not in _RAW_FRAMES
    ):
        return False
    (out / "engine.txt").write_text(describe_for_cpp(card), encoding="utf-8")
    (out / "cpp").mkdir()
    for source in (*(FOLDER / name for name in SHARED), *(FOLDER / str(runtime) / name for name in OWN)):
        shutil.copyfile(source, out / "cpp" / source.name)
    return True


def describe_for_cpp(card: dict[str, Any]) -> str:
    """Return the content of engine.txt."""
    options = card["options"]
    values = {key: card[key] for key in ("runtime_version", "file", "sha256", "reads", "height", "width")}
    values["channels"] = len(card["mean"])
    if card["runtime"] == "openvino":
        values["isa"] = ", ".join(options["isa"])
        of_runtime = options["properties"]
    else:
        of_runtime = {key: options[key] for key in ("num_threads", "needs_vnni")}
    lines = [f"{key} {value}" for key, value in values.items()]
    lines += [f"option {key} {_option(value)}" for key, value in of_runtime.items()]
    return "\n".join(lines) + "\n"


def _option(value: Any) -> str:
    """Return a value as OpenVINO reads it from text."""
    return {True: "YES", False: "NO"}[value] if isinstance(value, bool) else str(value)
