"""A candidate that is certainly worse than its rival is not evaluated to the end."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import numpy_helper

from tasks.parts.data.comparison import score_loss
from tasks.parts.data.dataset import open_split
from tasks.parts.data.dataset_writer import SplitBatches, batches_of, write_dataset
from tasks.parts.data.input_card import Task
from tasks.parts.onnx_graphs.graph import read_card_of_graph, read_graph
from tasks.parts.quantization.config import Activations
from tasks.parts.quantization.evaluation import GraphEvaluator, open_evaluator
from tests.tasks.conftest import Workshop

NUM_IMAGES = 40


@pytest.fixture(scope="module")
def evaluator(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> GraphEvaluator:
    """Forty images."""
    graph, (images_NHWC, masks_NHW) = read_graph(workshop.graph), open_split(workshop.data, "val")
    card = read_card_of_graph(graph)
    random = np.random.default_rng(0)
    rows_N = np.arange(NUM_IMAGES) % len(images_NHWC)
    noise_NHWC = random.integers(0, 24, (NUM_IMAGES, *images_NHWC.shape[1:]))
    noisy_NHWC = np.clip(images_NHWC[rows_N] + noise_NHWC, 0, 255).astype(np.uint8)
    many = SplitBatches(NUM_IMAGES, [*batches_of(noisy_NHWC, masks_NHW[rows_N])])
    data = tmp_path_factory.mktemp("many") / "dataset"
    write_dataset(
        data,
        task=Task.segmentation,
        classes=card.classes,
        height=images_NHWC.shape[1],
        width=images_NHWC.shape[2],
        source="test",
        splits=dict.fromkeys(("train", "val", "test", "calibration"), many),
    )
    return open_evaluator(
        graph,
        data,
        num_images=0,
        batch_size=5,
        activations=(Activations.uint8, Activations.int8),
    )


def spoiled(file: Path) -> Any:
    """Return a graph whose last weight is 0."""
    graph = read_graph(file)
    last = [node for node in graph.graph.node if node.op_type == "Conv"][-1]
    makers = {name: node for node in graph.graph.node for name in node.output}
    name = makers[last.input[1]].input[0]
    weight = next(item for item in graph.graph.initializer if item.name == name)
    weight.CopyFrom(numpy_helper.from_array(np.zeros_like(numpy_helper.to_array(weight)), name))
    return graph


def test_graph_that_is_certainly_worse_is_judged_on_a_part_of_the_images(
    workshop: Workshop, evaluator: GraphEvaluator
) -> None:
    good, bad = read_graph(workshop.quantized), spoiled(workshop.quantized)
    rival, whole = evaluator.evaluate(good), evaluator.evaluate(bad)
    assert rival.is_complete and whole.is_complete
    part = evaluator.evaluate(bad, rival=rival)
    assert part.rows_N is not None and not part.is_complete
    np.testing.assert_array_equal(part.rows_N, np.arange(0, NUM_IMAGES, 4))
    np.testing.assert_array_equal(part.results.hits_NC, whole.results.hits_NC[part.rows_N])
    assert evaluator.rank(part) < evaluator.rank(rival)
    loss = score_loss(part.results, evaluator.float_results_of(part))
    assert 0 < loss.low < loss.high


def test_graph_that_is_not_worse_is_judged_on_all_images_in_their_order(
    workshop: Workshop, evaluator: GraphEvaluator
) -> None:
    for graph in (read_graph(workshop.quantized), spoiled(workshop.quantized)):
        alone = evaluator.evaluate(graph)
        raced = evaluator.evaluate(graph, rival=alone)
        assert raced.is_complete and raced.agreement == alone.agreement
        for found, expected in zip(raced.results.counts, alone.results.counts, strict=True):
            np.testing.assert_array_equal(found, expected)
