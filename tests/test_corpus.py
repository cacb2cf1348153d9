"""Networks of benchmarks/corpus.py become engines; `make test` takes a few, `make test-trials` the others."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from benchmarks import corpus, corpus_writers
from benchmarks.corpus import TARGETS, NotFinished, draw_images, network_file, overrides_of, stage_calls
from benchmarks.corpus_networks import CORPUS
from benchmarks.corpus_writers import WRITERS, Writer, described
from tasks.core.execute import execute, prepare_call

ALWAYS = {
    "crnn": "sequences, an LSTM whose MACs count",
    "espcn": "sub-pixel convolutions",
    "onnx_squeezenet": "an old opset, weights that are inputs as well",
    "segformer_b0_torchscript": "sizes that the graph computes, Resize, GELU, attention",
    "superpoint": "an image whose first channel alone is read",
    "unet_group_norm": "GroupNorm, transposed convolutions",
    "vgg_11_qoperator": "operators that compute with integers themselves",
    "vgg_11_qdq": "a file of quantize_static, whose ranges replace each ReLU",
}
"""Why each is among the few."""
STAGES = re.compile(
    r"prepare_data|import_onnx|label_images|quantize_ptq|build_engine\.imported(_ptq|_quantized)?\..*"
)
LEAST_DB = {"float": 60.0, "int8": 10.0}
"""Eight images give rough ranges, and an engine rounds at other places than its graph."""


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A workspace with fewer images."""
    folder = tmp_path_factory.mktemp("corpus")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "NUM_IMAGES", {"train": 8, "val": 8, "test": 2})
        draw_images(folder / "scenes")
        yield folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.trial) for name in CORPUS]
)
def test_network_becomes_engines_that_compute_what_its_graphs_say(
    name: str, space: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(space)
    writer = CORPUS[name].writer
    if writer and not WRITERS[writer].is_here:
        pytest.skip(f"{described(writer)} needs an environment of its own, which benchmarks/corpus.py makes")
    file = network_file(name, space)
    calls = stage_calls(overrides_of(file, CORPUS[name], space), space)
    params = yaml.safe_load((space / "params.yaml").read_text())
    for address, inputs in calls.items():
        if STAGES.fullmatch(address):
            execute(prepare_call(address, inputs, params))
    builds = [address.split(".")[1:] for address in calls if STAGES.fullmatch(address) and "build" in address]
    assert {target for _, target in builds} == set(TARGETS)
    for variant, target in builds:
        report = json.loads((space / "artifacts/build_engine" / variant / target / "report.json").read_text())
        assert report["status"] == "built", report["reason"]
        assert report["is_precision_ok"], report["precision_note"]
        assert report["agreement_db"] > LEAST_DB["float" if variant == "imported" else "int8"]


@pytest.mark.trial
def test_tool_that_cannot_be_installed_is_named_in_the_row(
    space: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = Writer("./no-such-folder", lambda given, images, out: None)
    monkeypatch.setitem(corpus_writers.WRITERS, "paddle2onnx", missing)
    with pytest.raises(NotFinished) as found:
        network_file("paddle_resnet_18", space)
    begins, _, reason = str(found.value).partition("was not installed: ")
    assert begins == "the file was not written: ./no-such-folder "
    assert "File './no-such-folder' does not exist" in reason
