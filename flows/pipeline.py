"""The DAG as plain calls, the same as in dvc.yaml."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from tasks.core.execute import ARTIFACTS
from tasks.parts.quantization.left_out import LEFT_OUT_FILE

Calls = Mapping[str, Mapping[str, Path]]
"""Stage calls: address to input name to path."""


class Stages(Protocol):
    """Runs stage calls."""

    def run(self, address: str, **inputs: Path) -> Path:
        """Run one stage call and return its output folder."""
        ...

    def run_side_by_side(self, calls: Calls) -> None:
        """Run stage calls that do not depend on each other."""
        ...


class RecordedStages:
    """Records the calls and runs nothing."""

    def __init__(self) -> None:
        self.calls: dict[str, dict[str, Path]] = {}

    def run(self, address: str, **inputs: Path) -> Path:
        """Record a call; return the folder that it would fill."""
        assert address not in self.calls
        self.calls[address] = inputs
        return ARTIFACTS.joinpath(*address.split("."))

    def run_side_by_side(self, calls: Calls) -> None:
        """Record several calls."""
        for address, inputs in calls.items():
            self.run(address, **inputs)


def run_pipeline(stages: Stages, params: Mapping[str, Any]) -> Path:
    """Call every stage in order and return the folder of ``select_engine``."""
    run_models(stages, params)
    run_targets(stages, params, params["build_engine"])
    selection = run_selection(stages, params)
    stages.run(
        "track",
        selection=selection,
        builds=ARTIFACTS / "build_engine",
        validations=ARTIFACTS / "validate",
        benchmarks=ARTIFACTS / "benchmark",
        diffs=ARTIFACTS / "diff_layers",
        data=Path(params["pipeline"]["data"]),
        splits=ARTIFACTS / "prepare_data" / "splits.csv",
    )
    stages.run(
        "race_picks",
        builds=ARTIFACTS / "build_engine" / "*" / "*" / "engine",
        picks=selection / "picks.json",
        page=selection / "report.html",
        reference=Path(params["pipeline"]["reference_engine"]),
    )
    return selection


def run_selection(stages: Stages, params: Mapping[str, Any]) -> Path:
    """Pick an engine of each target and return the folder of ``select_engine``."""
    return stages.run(
        "select_engine",
        builds=ARTIFACTS / "build_engine",
        validations=ARTIFACTS / "validate",
        benchmarks=ARTIFACTS / "benchmark",
        diffs=ARTIFACTS / "diff_layers",
        explanations=Path(params["pipeline"]["explanations"]),
        loads=Path(params["pipeline"]["loads"]),
        data=Path(params["pipeline"]["data"]),
        repaired=ARTIFACTS / "quantize_repaired" / LEFT_OUT_FILE,
        partial=ARTIFACTS / "quantize_partial" / LEFT_OUT_FILE,
    )


def run_models(stages: Stages, params: Mapping[str, Any]) -> None:
    """Make the graph of every variant; none of this depends on a target."""
    data = stages.run("prepare_data", root=Path(params["prepare_data"]["root"])) / "dataset"
    pipeline = params["pipeline"]
    if pipeline["imports"]:
        _run_import(stages, pipeline, data)
    else:
        _attach_metrics(stages, pipeline)
        _run_training(stages, pipeline, data)
    _run_quantization(stages, pipeline, Path(pipeline["data"]))


def _attach_metrics(stages: Stages, pipeline: Mapping[str, Any]) -> None:
    """Add the user's metric to the data set, if there is one."""
    for item in pipeline["metrics"].values():
        stages.run("attach_metric", metric=Path(item["file"]), data=Path(item["data"]))


def _run_training(stages: Stages, pipeline: Mapping[str, Any], images: Path) -> None:
    """Train, distill and prune the networks, as far as the pipeline does that, and export them.

    A recording depends on the images alone, all else on the metric too.
    """
    data = Path(pipeline["data"])
    for name, weights in pipeline["checkpoints"].items():
        stages.run(f"import_checkpoint.{name}", weights=Path(weights), data=data)
    for name in pipeline["networks"]:
        stages.run(f"train.{name}", data=data)
    for checkpoint in pipeline["recordings"].values():
        stages.run("record_teacher", teacher=Path(checkpoint), data=images)
    for item in pipeline["distillation"].values():
        stages.run("distill", teacher=Path(item["teacher"]), start=Path(item["start"]), data=data)
    for item in pipeline["pruning"].values():
        student = Path(item["checkpoint"])
        stages.run("rank_groups", checkpoint=student, data=data)
        table = Path(item["sensitivity"])
        search = stages.run("search_pruning", checkpoint=student, sensitivity=table, data=data)
        stages.run("prune", checkpoint=student, choice=search / "choice.json", sensitivity=table, data=data)
        narrowed = ARTIFACTS / "prune" / "model.safetensors"
        stages.run("finetune", checkpoint=narrowed, teacher=Path(item["teacher"]), data=data)
    stages.run_side_by_side(
        {
            f"export_onnx.{variant}": {"checkpoint": Path(checkpoint)}
            for variant, checkpoint in pipeline["exports"].items()
        }
    )


def _run_import(stages: Stages, pipeline: Mapping[str, Any], data: Path) -> None:
    """Import the user's model, let it label images that have no labels, and add the user's metric."""
    for path in pipeline["imports"].values():
        graph = stages.run("import_onnx", model=Path(path), data=data) / "model.onnx"
        for images in pipeline["unlabelled"].values():
            stages.run("label_images", model=graph, data=Path(images))
    _attach_metrics(stages, pipeline)


def _run_quantization(stages: Stages, pipeline: Mapping[str, Any], data: Path) -> None:
    """Make every rung of the ladder from its float graph; the last one is trained, if there is a network to train."""
    graph = Path(pipeline["graph"])
    ptq, ranges = ARTIFACTS / "quantize_ptq", ARTIFACTS / "quantize_ptq" / "ranges.json"
    ranking = ARTIFACTS / "rank_layers" / "ranking.csv"
    stages.run_side_by_side(
        {name: {"model": graph, "data": data} for name in ("convert_precision", "quantize_ptq")}
    )
    calibrated = {"model": graph, "ranges": ranges, "data": data}
    trained = {}
    for item in pipeline["quantization_aware"].values():
        networks = {"checkpoint": Path(item["checkpoint"]), "teacher": Path(item["teacher"])}
        trained["quantize_aware_train"] = {**networks, **calibrated}
    judged = {"model": graph, "reference": Path(pipeline["reference_graph"])}
    repaired = ARTIFACTS / "quantize_repaired"
    # What it gets right says whether layers have to be ranked and kept in float.
    stages.run("quantize_repaired", **judged, ranges=ranges, results=ptq / "images.npz", data=data)
    results = repaired / "images.npz"
    stages.run_side_by_side({**trained, "rank_layers": {**calibrated, "results": results}})
    stages.run_side_by_side(
        {
            "check_int8": {
                "model": graph,
                "quantized": ptq / "model.onnx",
                "ranges": ranges,
                "trials": ptq / "calibrators.csv",
                "ranking": ranking,
                "data": data,
            },
            "quantize_partial": {
                **judged,
                "repaired": repaired / "float.onnx",
                "ranges": repaired / "ranges.json",
                "results": results,
                "ranking": ranking,
                "data": data,
            },
        }
    )


def run_targets(stages: Stages, params: Mapping[str, Any], targets: Collection[str]) -> None:
    """Build, check and measure every engine of these targets; nothing else runs beside a measurement."""
    builds: dict[str, dict[str, Path]] = {}
    checks: dict[str, dict[str, Path]] = {}
    data = Path(params["pipeline"]["data"])
    for item in params["engines"].values():
        if item["target"] not in targets:
            continue
        name = f"{item['variant']}.{item['target']}"
        model = Path(item["model"])
        engine = ARTIFACTS / "build_engine" / item["variant"] / item["target"] / "engine"
        builds[f"build_engine.{name}"] = {"model": model, "images": data / "calibration_images.npy"}
        checks[f"validate.{name}"] = {"engine": engine, "data": data}
        checks[f"diff_layers.{name}"] = {
            "engine": engine,
            "model": model,
            "float_graph": Path(item["float_graph"]),
            "data": data,
        }
    tuned = [
        address for address in builds if params["build_engine"][address.split(".")[2]]["gpu"] is not None
    ]
    stages.run_side_by_side({address: builds[address] for address in builds if address not in tuned})
    for address in tuned:  # builders for GPUs time kernels
        stages.run(address, **builds[address])
    stages.run_side_by_side(checks)
    for target in targets:
        built = ARTIFACTS / "build_engine" / "*" / target / "engine"
        reference = Path(params["pipeline"]["references"][target]["engine"])
        images = data / "calibration_images.npy"
        measured = stages.run(f"benchmark.{target}", builds=built, reference=reference, images=images)
        if target in params.get("measure_machine", ()):
            roofs = stages.run(f"measure_machine.{target}")
            if target in params["explain"]:  # its runtime reports layers
                stages.run(f"explain.{target}", builds=built, benchmark=measured, roofs=roofs)
        if target in params.get("measure_load", ()):
            stages.run(f"measure_load.{target}", builds=built)
        if target in params["pipeline"].get("trials", ()):
            stages.run(
                f"try_changes.{target}",
                builds=built,
                roofs=roofs,
                model=Path(params["pipeline"]["trials"][target]),
                images=images,
            )
