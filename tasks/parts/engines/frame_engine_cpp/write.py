"""Write the C++ program that runs a bundle's engine without Python.

engine.txt             what the program needs to know: lines of `key value`; `property.NAME` is one of OpenVINO's,
                       `plugins.NUMBER` the sha256 and the file of a library for TensorRT
cpp/infer.cpp          the program in one file: the runtime's infer.cpp here, its includes of our headers replaced by
                       their text. bundle.hpp is what the class Engine needs, reading.hpp makes of any frame what
                       it reads, program.hpp uses both
cpp/CMakeLists.txt     makes <bundle>/infer
"""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from tasks.parts.engines.frame_engine.pixels import lead_of_first, scale_and_shift

FOLDER = Path(__file__).parent


def write_cpp(card: dict[str, Any], out: Path) -> bool:
    """Write engine.txt and cpp/ into the bundle `out`; return False for an engine that has no C++ program.

    `card` is the content of model.json. Programs exist for TensorRT's plans, and for engines that take raw frames and
    give answers, with OpenVINO or with ONNX Runtime on the CPU, and without custom operators.
    """
    runtime = card["runtime"]
    if runtime != "tensorrt" and not _answers_frames_on_cpu(card):
        return False
    (out / "engine.txt").write_text(describe_for_cpp(card), encoding="utf-8")
    (out / "cpp").mkdir()
    (out / "cpp" / "infer.cpp").write_text(_source(FOLDER / runtime / "infer.cpp"), encoding="utf-8")
    shutil.copyfile(FOLDER / runtime / "CMakeLists.txt", out / "cpp" / "CMakeLists.txt")
    return True


def _answers_frames_on_cpu(card: dict[str, Any]) -> bool:
    is_on_cpu = card["runtime"] == "openvino" or card["options"].get("provider") == "CPUExecutionProvider"
    gives_answers = card["gives"] == "classes" or card["task"] == "values"
    return is_on_cpu and gives_answers and card["reads"] != "normalised" and not card.get("custom_operators")


def _source(file: Path) -> str:
    """Return the text of a C++ file with that of our headers in place of their includes."""
    return re.sub(
        r'^#include "(.+)"\n',
        lambda found: (file.parent / found[1]).read_text(encoding="utf-8"),
        file.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )


def describe_for_cpp(card: dict[str, Any]) -> str:
    """Return the content of engine.txt."""
    options = card["options"]
    reading = card["reading"]
    values = {key: card[key] for key in ("runtime_version", "file", "sha256", "reads", "task")}
    values |= {"resize_mode": reading["resize_mode"], "types": " ".join(reading["types"])}
    if reading["resize_mode"] == "windows":
        values["window_overlap"] = reading["window_overlap"]
    if reading["value_range"] is not None:
        values["value_range"] = " ".join(map(repr, reading["value_range"]))
    if card["runtime"] == "openvino":
        values["isa"] = ", ".join(options["isa"])
        values |= {f"property.{name}": _property(value) for name, value in options["properties"].items()}
    elif card["runtime"] == "tensorrt":
        values |= _describe_plan(card)
    else:
        values["num_threads"] = options["num_threads"]
        values["needs_vnni"] = _property(options["needs_vnni"])
    return "".join(f"{key} {value}\n" for key, value in values.items())


def _describe_plan(card: dict[str, Any]) -> dict[str, Any]:
    """Return what the program of a plan needs to know beside what every program does."""
    options, threshold = card["options"], card["threshold"]
    values = {
        "gives": card["gives"],
        "gpu": options["gpu"]["name"],
        "compute_capability": options["gpu"]["compute_capability"],
        "hardware_compatibility": options["hardware_compatibility"],
        "version_compatible": _property(options["version_compatible"]),
        "cuda_graph": _property(options["cuda_graph"]),
        "profile": next(index for index, (lowest, _) in enumerate(card["batches"]) if lowest == 1),
    }
    for key, factors_C in zip(("scale", "shift"), scale_and_shift(card["mean"], card["std"]), strict=True):
        values[key] = " ".join(map(str, factors_C))
    values["lead"] = 0 if threshold is None else np.float32(lead_of_first(threshold))
    libraries = enumerate(card["custom_operators"])
    return values | {f"plugins.{index:03}": f"{one['sha256']} {one['file']}" for index, one in libraries}


def _property(value: Any) -> str:
    """Return a value as OpenVINO reads it from text."""
    return {True: "YES", False: "NO"}[value] if isinstance(value, bool) else str(value)
