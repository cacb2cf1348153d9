"""Tests that run where NVIDIA's builder is on the path as `tensorrt`, in the checkout of a run of the pipeline."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import tensorrt as trt
import yaml

from flows.params import compose_params
from tasks.core.config import typed_config
from tasks.parts.builders.contract import GraphSource, read_source
from tasks.parts.builders.frames import fit_frames
from tasks.parts.builders.graph_rewrites import round_rest
from tasks.parts.builders.tensorrt_network import count_products
from tasks.parts.builders.tensorrt_plan import build_plan, parse_graph
from tasks.parts.engines.target import Gives, Reads, Target
from tasks.parts.engines.tensorrt.log import LOG

RUN = Path(os.environ["RUN"])
PARAMS = yaml.safe_load((RUN / "params.yaml").read_text(encoding="utf-8"))
GRAPHS = {
    engine["variant"]: RUN / engine["model"]
    for engine in PARAMS["engines"].values()
    if engine["model"].endswith(".onnx")
}
IMAGES = RUN / PARAMS["pipeline"]["data"] / "calibration_images.npy"


@pytest.mark.parametrize("name", ["h200_tensorrt", "h200_tensorrt_static"])
@pytest.mark.parametrize("variant", GRAPHS)
def test_rung_is_built_as_a_plan_of_frames_and_as_one_of_images(variant: str, name: str) -> None:
    params = compose_params([f"target=[cpu_torch,cuda_torch,{name}]"])
    target: Target = typed_config(Target, params["build_engine"][name], f"target.{name}")
    assert target.tensorrt is not None and target.gpu is not None
    target = replace(target, tensorrt=replace(target.tensorrt, timing_cache=None))
    source = read_source(target, GRAPHS[variant], IMAGES)
    assert isinstance(source, GraphSource)
    target = replace(target, max_batch=source.card.fit_batch(target.max_batch))
    on_frames = replace(target, reads=Reads.frames, gives=Gives.classes)
    for each in (target, on_frames):
        graph = round_rest(each, source.rewritten(each), source.images_NCHW)
        graph = fit_frames(each, graph, source.card)
        assert len(build_plan(graph, each, target.gpu)) > 10_000
        products = count_products(parse_graph(trt.Builder(LOG), graph, each)[0])
        assert "f32" not in products
        assert ("int8" in products) == source.is_quantized
