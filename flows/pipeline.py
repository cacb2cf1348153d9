"""The DAG, as plain calls: the same picture as dvc.yaml."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Stage(Protocol):
    """Runs one stage call and returns its output folder."""

    def __call__(self, address: str, **inputs: Path) -> Path: ...


def run_pipeline(stage: Stage, params: Mapping[str, Any]) -> Path:
    """Call every stage in order and return the folder of ``select_engine``."""
    data = stage("prepare_data", root=Path(params["prepare_data"]["root"])) / "dataset"
    teacher = stage("train.teacher", data=data) / "model.safetensors"
    baseline = stage("train.baseline", data=data) / "model.safetensors"
    distilled = stage("distill", teacher=teacher, data=data) / "model.safetensors"
    narrowed = stage("prune", checkpoint=distilled) / "model.safetensors"
    pruned = stage("finetune", checkpoint=narrowed, teacher=teacher, data=data) / "model.safetensors"

    stage("export_onnx.teacher", checkpoint=teacher)
    stage("export_onnx.baseline", checkpoint=baseline)
    stage("export_onnx.distilled", checkpoint=distilled)
    graph = stage("export_onnx.pruned", checkpoint=pruned) / "model.onnx"
    ranges = stage("quantize_ptq", model=graph, data=data) / "ranges.json"
    stage("quantize_aware_train", checkpoint=pruned, teacher=teacher, model=graph, ranges=ranges, data=data)

    # Three loops, so that nothing else runs beside a measurement.
    engines = params["engines"].values()
    folders: dict[str, Path] = {}
    for item in engines:
        name = f"{item['variant']}.{item['target']}"
        model = Path(item["model"])
        engine = folders[name] = stage(f"build_engine.{name}", model=model) / "engine"
        stage(f"validate.{name}", engine=engine, data=data)
    for item in engines:
        name = f"{item['variant']}.{item['target']}"
        stage(
            f"diff_layers.{name}",
            engine=folders[name],
            model=Path(item["model"]),
            float_graph=Path(item["float_graph"]),
            data=data,
        )
    for item in engines:
        name = f"{item['variant']}.{item['target']}"
        stage(f"benchmark.{name}", engine=folders[name], reference=folders["distilled.cpu_torch"])
    artifacts = Path("artifacts")
    return stage(
        "select_engine",
        builds=artifacts / "build_engine",
        validations=artifacts / "validate",
        benchmarks=artifacts / "benchmark",
        diffs=artifacts / "diff_layers",
    )
