"""Record what two networks and their INT8 graphs get right in each frame of 200 videos.

``python -m benchmarks.video_records`` takes ten minutes. It writes ``benchmarks/results/video_records/<engine>.npz``
in the form of validate's ``images.npz``, from which ``benchmarks.coverage`` draws. A video is a window that moves
over one scene of handwritten digits on a photo, while the light changes. It has 4 to 24 frames, so frames of a video
are alike, and videos have different sizes. The stages prepare_data, train, export_onnx and quantize_ptq run on them:
the student (``float``), its INT8 graph (``int8``) and a network of half the width (``narrow``). Three epochs leave
both networks far from what they could score; what counts here is how much their losses differ from video to video.
"""

import argparse
import csv
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from flows.params import compose_params
from tasks.core.config import find_section, typed_config
from tasks.core.execute import load_stage
from tasks.parts.data.comparison import ImageResults, write_results
from tasks.parts.onnx_graphs.graph import read_graph
from tasks.parts.quantization.evaluation import open_evaluator
from tasks.parts.sources.config import ScenesConfig
from tasks.parts.sources.digit_scenes import draw_scenes

RECORDS = Path(__file__).parent / "results" / "video_records"
SPLIT = "val"
NUM_VIDEOS = {"train": 120, "val": 200, "test": 2}
FRAMES = (4, 24)
"""Fewest and most frames of a video."""
SIDE = 64
_SCENE_SIDE = 112
_MOST_SHIFT = 5
"""Pixels that the window moves from frame to frame, at most."""
CALIBRATORS = ("minmax", "percentile")
MAX_EPOCHS = 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the videos, train, quantize and write the records."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=RECORDS)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        records = record(Path(name))
    options.records.mkdir(parents=True, exist_ok=True)
    for engine, results in records.items():
        print(
            f"{engine}: mIoU {results.score:.4f} in {results.num_groups} videos, {results.num_images} frames"
        )
        write_results(options.records / f"{engine}.npz", {SPLIT: results})


def record(folder: Path) -> dict[str, ImageResults]:
    """Run the stages in a folder; return the results by engine."""
    write_videos(folder / "videos")
    params = compose_params(
        [
            "data=folder",
            f"prepare_data.root={folder / 'videos'}",
            f"prepare_data.height={SIDE}",
            f"prepare_data.width={SIDE}",
        ]
    )

    def run(address: str, out: str, changes: dict[str, Any] | None = None, **inputs: Path) -> Path:
        function, config_class = load_stage(address)[:2]
        name, section = find_section(params, address)
        path = folder / out
        path.mkdir()
        function(typed_config(config_class, section | (changes or {}), name), **inputs, out=path)
        return path

    data = run("prepare_data", "data", root=folder / "videos") / "dataset"
    graphs = {}
    params["train"]["baseline"]["trainer"]["max_epochs"] = MAX_EPOCHS
    for name, width in (("float", 1.0), ("narrow", 0.5)):
        network = params["train"]["baseline"]["network"] | {"width": width}
        trained = run("train.baseline", f"train_{name}", {"network": network}, data=data)
        exported = run("export_onnx.baseline", f"export_{name}", checkpoint=trained / "model.safetensors")
        graphs[name] = exported / "model.onnx"
    evaluators = {
        name: open_evaluator(read_graph(graph), data, num_images=0, batch_size=64)
        for name, graph in graphs.items()
    }
    records = {name: evaluator.float_results for name, evaluator in evaluators.items()}
    made = run("quantize_ptq", "ptq", {"calibrators": list(CALIBRATORS)}, model=graphs["float"], data=data)
    return records | {"int8": evaluators["float"].evaluate(read_graph(made / "model.onnx")).results}


def write_videos(root: Path) -> None:
    """Write the frames, their masks, the lists of the splits, the groups and the classes."""
    scenes = ScenesConfig(5, *NUM_VIDEOS.values(), 1, 6, 14, 0.16, 0.3, 15.0, 0.65, 10.0)
    groups = []
    for split, num_videos in NUM_VIDEOS.items():
        batches = draw_scenes(split, scenes, height=_SCENE_SIDE, width=_SCENE_SIDE, seed=0)
        scenes_of_split = (pair for images, masks in batches for pair in zip(images, masks, strict=True))
        generator = np.random.default_rng([0, num_videos])
        names = []
        for video, (scene_HWC, mask_HW) in enumerate(scenes_of_split):
            for frame, (image_HWC, labels_HW) in enumerate(draw_frames(generator, scene_HWC, mask_HW)):
                name = f"{split}{video:03d}/{frame:02d}"
                write_png(root / "images" / f"{name}.png", image_HWC)
                write_png(root / "masks" / f"{name}.png", labels_HW)
                groups.append((name, f"{split}{video:03d}"))
                names.append(name)
        (root / f"{split}.txt").write_text("\n".join(names) + "\n", encoding="utf-8")
    with (root / "groups.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("image", "group"), *groups])
    classes = "".join(f"{number}: {name}\n" for number, name in enumerate(("background", *"abcde")))
    (root / "classes.yaml").write_text(classes, encoding="utf-8")


def draw_frames(
    generator: np.random.Generator, scene_HWC: NDArray[np.uint8], mask_HW: NDArray[np.uint8]
) -> list[tuple[NDArray[np.uint8], NDArray[np.uint8]]]:
    """Return the frames and masks of one video."""
    place_2, frames = generator.integers(0, _SCENE_SIDE - SIDE + 1, 2), []
    light = generator.uniform(0.6, 1.1)
    for _ in range(generator.integers(FRAMES[0], FRAMES[1] + 1)):
        here = tuple(slice(start, start + SIDE) for start in place_2)
        noise_HWC = generator.normal(0, 6, (SIDE, SIDE, 3))
        image_HWC = np.clip(light * scene_HWC[here] + noise_HWC, 0, 255).astype(np.uint8)
        frames.append((image_HWC, mask_HW[here]))
        step_2 = generator.integers(-_MOST_SHIFT, _MOST_SHIFT + 1, 2)
        place_2 = np.clip(place_2 + step_2, 0, _SCENE_SIDE - SIDE)
        light = float(np.clip(light + generator.normal(0, 0.03), 0.5, 1.2))
    return frames


def write_png(path: Path, pixels: NDArray[np.uint8]) -> None:
    """Write an image or a mask."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


if __name__ == "__main__":
    main()
