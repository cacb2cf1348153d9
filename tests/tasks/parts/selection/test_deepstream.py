"""The configuration of DeepStream's Gst-nvinfer, as its own parser would read it. Not run on real hardware."""

from configparser import ConfigParser
from dataclasses import replace
from pathlib import Path

import numpy as np

from tasks.parts.data.dataset import normalise
from tasks.parts.data.input_card import Task
from tasks.parts.engines.manifest import EngineManifest
from tasks.parts.engines.runtimes import Precision
from tasks.parts.engines.target import Gives
from tasks.parts.engines.tensorrt_options import BatchProfile
from tasks.parts.reading.rules import Reading
from tasks.parts.selection.deepstream import configure_nvinfer, find_obstacle, write_deepstream
from tests.tasks.conftest import Workshop
from tests.tasks.parts.selection.test_bundle import plan_manifest

DOCUMENTED = {
    "gpu-id",
    "gie-unique-id",
    "model-engine-file",
    "labelfile-path",
    "batch-size",
    "infer-dims",
    "model-color-format",
    "net-scale-factor",
    "offsets",
    "maintain-aspect-ratio",
    "network-mode",
    "network-type",
    "num-detected-classes",
    "segmentation-output-order",
    "segmentation-threshold",
    "output-tensor-meta",
}
"""Keys of the group `property` that are used; read in gstnvinfer_property_parser.h of DeepStream 9.0 and 9.1."""


def fitting(workshop: Workshop) -> EngineManifest:
    """A plan of a network that was trained with one std for all channels."""
    manifest = plan_manifest(workshop, profiles=[BatchProfile(1, 2, 3), BatchProfile(4, 4, 4)])
    card = replace(manifest.card, mean=(0.2, 0.4, 0.6), std=(0.25, 0.25, 0.25))
    return replace(manifest, card=card)


def read(text: str) -> dict[str, str]:
    parser = ConfigParser(interpolation=None)
    parser.read_string(text)
    assert parser.sections() == ["property"]
    return dict(parser["property"])


def test_values_are_those_of_the_card(workshop: Workshop, tmp_path: Path) -> None:
    manifest = fitting(workshop)
    assert write_deepstream(manifest, tmp_path) == ""
    text = (tmp_path / "deepstream" / "config_infer.txt").read_text()
    values = read(text)
    assert values.keys() == DOCUMENTED
    assert text.splitlines()[1] == "# Not run on real hardware."
    assert "TensorRT 11.4.0.1 on NVIDIA H200 (9.0)" in text
    assert values["model-engine-file"] == "../engine.plan" and values["batch-size"] == "3"
    assert values["infer-dims"] == "3;64;96" and values["model-color-format"] == "0"
    assert values["network-type"] == "2" and values["segmentation-output-order"] == "0"
    assert values["num-detected-classes"] == str(len(manifest.card.classes)) == "3"
    labels = (tmp_path / "deepstream" / values["labelfile-path"]).read_text().splitlines()
    assert labels == list(manifest.card.classes)


def test_its_arithmetic_is_the_normalisation_of_the_card(workshop: Workshop) -> None:
    manifest = fitting(workshop)
    values = read(configure_nvinfer(manifest))
    frames_NHWC = np.random.default_rng(0).integers(0, 256, (1, 64, 96, 3), np.uint8)
    offsets_C = np.array([float(value) for value in values["offsets"].split(";")])
    found_NHWC = float(values["net-scale-factor"]) * (frames_NHWC - offsets_C)
    expected_NCHW = normalise(frames_NHWC, manifest.card.mean, manifest.card.std)
    np.testing.assert_allclose(found_NHWC.transpose(0, 3, 1, 2), expected_NCHW, atol=1e-5)


def test_grey_images_and_precisions(workshop: Workshop) -> None:
    manifest = replace(fitting(workshop), is_quantized=False)
    grey = replace(manifest, card=replace(manifest.card, mean=(0.5,), std=(0.2,)))
    assert read(configure_nvinfer(grey))["model-color-format"] == "2"
    modes = {}
    for precision in Precision:
        plan = replace(manifest, target=replace(manifest.target, precision=precision))
        modes[precision] = read(configure_nvinfer(plan)).get("network-mode")
    assert modes == {Precision.f32: "0", Precision.f16: "2", Precision.bf16: None}
    assert read(configure_nvinfer(replace(manifest, is_quantized=True)))["network-mode"] == "1"


def test_plans_that_it_cannot_run_get_no_file_but_a_reason(workshop: Workshop, tmp_path: Path) -> None:
    manifest = fitting(workshop)
    unlike = replace(manifest, card=replace(manifest.card, std=(0.25, 0.25, 0.3)))
    assert "its std differs between channels (0.25, 0.25, 0.3)" in write_deepstream(unlike, tmp_path)
    assert not list(tmp_path.iterdir())
    classes = replace(manifest, target=replace(manifest.target, gives=Gives.classes))
    assert "set target.h200_tensorrt.reads=normalised target.h200_tensorrt.gives=logits" in find_obstacle(
        classes
    )
    labels = replace(manifest, card=replace(manifest.card, task=Task.classification))
    assert find_obstacle(labels) == "it is not the plan of a segmentation network"
    many = replace(manifest, card=replace(manifest.card, mean=(0.5,) * 4, std=(0.2,) * 4))
    assert "4 channels" in find_obstacle(many)
    deep = replace(manifest.card, reading=Reading(("uint16",), (0.0, 4095.0)))
    assert (
        find_obstacle(replace(manifest, card=deep))
        == "it was trained on images of uint16, and video has 8 bits"
    )


def test_it_says_that_it_cuts_no_windows_a1(workshop: Workshop) -> None:
    manifest = fitting(workshop)
    assert "were read by" not in configure_nvinfer(manifest)
    cut = replace(manifest.card, reading=Reading(resize_mode="windows", window_overlap=8))
    text = configure_nvinfer(replace(manifest, card=cut))
    assert "The images of the training were not: they were read by windows\n" in text
    assert "report.json is about frames of 96x64 alone" in text
    assert read(text) == read(configure_nvinfer(manifest))
