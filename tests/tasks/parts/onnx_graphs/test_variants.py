"""Variants of a graph in one session, and the memory of activations."""

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tasks.parts.onnx_graphs.live_memory import images_that_fit, live_bytes
from tasks.parts.onnx_graphs.variants import with_variants
from tasks.parts.onnx_session import open_session


def chain(*, size: int = 4, batch: str | int = "N") -> ModelProto:
    """Three multiplications of [N, 2, size, size] by constants, and a sum of the first and the last."""
    nodes = [
        helper.make_node("Mul", ["image", "two"], ["first"], name="first"),
        helper.make_node("Mul", ["first", "three"], ["second"], name="second"),
        helper.make_node("Mul", ["second", "two"], ["third"], name="third"),
        helper.make_node("Add", ["first", "third"], ["sum"], name="sum"),
    ]
    image, total = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, 2, size, size])
        for name in ("image", "sum")
    )
    constants = [
        numpy_helper.from_array(np.float32(value), name) for name, value in (("two", 2), ("three", 3))
    ]
    graph = helper.make_graph(nodes, "chain", [image], [total], constants)
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 20)])


def changed(place: int, factor: float) -> ModelProto:
    """Return the chain with another constant in one multiplication."""
    model = chain()
    model.graph.node[place].input[1] = "factor"
    model.graph.initializer.append(numpy_helper.from_array(np.float32(factor), "factor"))
    return model


def test_what_variants_share_with_the_graph_is_computed_once_b1() -> None:
    variants = [changed(1, 5.0), changed(2, 7.0), chain()]
    merged, names = with_variants(chain(), variants)
    assert names == ["sum@0", "sum@1", "sum"]
    made = [name for node in merged.graph.node for name in node.output]
    own = {"second@0", "third@0", "sum@0", "third@1", "sum@1"}
    assert sorted(made) == sorted({"first", "second", "third", "sum"} | own)
    image = np.random.default_rng(0).random((2, 2, 4, 4), dtype=np.float32)
    found = open_session(merged).run(names, {"image": image})
    for values, variant in zip(found, variants, strict=True):
        np.testing.assert_array_equal(values, open_session(variant).run(None, {"image": image})[0])


def test_nodes_and_constants_that_no_variant_reads_are_left_out_b1() -> None:
    merged, names = with_variants(chain(), [changed(0, 1.0)])
    assert names == ["sum@0"]
    assert [node.name for node in merged.graph.node] == ["first@0", "second@0", "third@0", "sum@0"]
    assert {tensor.name for tensor in merged.graph.initializer} == {"factor@0", "two", "three"}


@pytest.mark.parametrize("batch", ["N", 1, 8])
def test_the_memory_of_one_image_is_that_of_the_tensors_alive_at_once_b1(batch: str | int) -> None:
    """While `third` is computed, `first` waits for the sum, and `second` is read."""
    one = 2 * 16 * 16 * 4
    assert live_bytes(chain(size=16, batch=batch)) == 3 * one
    assert images_that_fit(chain(size=16), most=32, max_bytes=7 * 3 * one) == 7
    assert images_that_fit(chain(size=16), most=32, max_bytes=1) == 1
    assert images_that_fit(chain(size=16), most=32) == 32
