"""Score answers to the original files of a split at their own sizes, and say why that differs from its arrays.

H height, W width, C channels (in images) or classes (in results).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tasks.parts.data.accuracy import FRAME_TOLERANCE
from tasks.parts.data.class_table import IGNORE_INDEX
from tasks.parts.data.comparison import ImageResults, compare_with_labels, join_results
from tasks.parts.data.dataset import Manifest, is_listed, open_groups, open_labels, read_manifest
from tasks.parts.data.image_files import fit_image, scale_image
from tasks.parts.data.input_card import InputCard, Task
from tasks.parts.data.metrics import FLOAT_MODEL
from tasks.parts.data.source_files import FileReader, open_originals, originals_name, read_rules
from tasks.parts.data.subsets import open_chosen_images
from tasks.parts.reading.rules import ResizeMode
from tasks.parts.reading.sizes import restore_mask
from tasks.parts.reading.windows import Window, cover, cut_image

AnswerFile = Callable[[NDArray[Any]], NDArray[Any]]
"""Takes values_HWC as a file has them; returns a mask of that size, or a class."""


@dataclass(frozen=True)
class FrameScore:
    """What is right in the original files."""

    results: ImageResults | None
    """One row for each file; None where there are none."""
    note: str
    """Why there are none, or what the score of the arrays does not contain."""


def no_originals(data: Path, manifest: Manifest, split: str, card: InputCard) -> str:
    """Return why an engine cannot be scored on the original files of a split; empty if it can."""
    if manifest.metric is not None:
        return "the data set has a metric of its own, which reads outputs of the engine's size"
    if card.task is Task.values or manifest.source == FLOAT_MODEL:
        return "the labels are answers of the float model, of the engine's size"
    if is_listed(manifest, split):
        return ""
    if originals_name(split) not in manifest.files:
        return (
            f"the images of '{split}' are drawn, or no files of their own, or of a split that is not listed"
        )
    root = Path(read_rules(data).root)
    return "" if root.is_dir() else f"the data set is a copy of files of {root}, which is not here"


def score_frames(data: Path, split: str, card: InputCard, answer: AnswerFile, score: float) -> FrameScore:
    """Run the original files of a split through `answer`; `score` is that of the arrays, and is compared.

    Raises ArtifactError for a file that has changed since prepare_data read it.
    """
    manifest = read_manifest(data)
    if reason := no_originals(data, manifest, split, card):
        return FrameScore(None, reason)
    reader = open_originals(data, split, is_listed=is_listed(manifest, split))
    images_NHWC, labels = open_chosen_images(data, split, None), open_labels(data, split, card.task)
    counts = _Counts(reader, card, manifest.reading.window_overlap)
    firsts, number = [], 0
    for file in range(len(reader)):
        if number == len(images_NHWC):
            break  # those that follow have no labels
        firsts.append(number)
        number += counts.add(file, number, answer, images_NHWC, labels)
    groups_K = np.unique(open_groups(data, split)[firsts], return_inverse=True)[1]
    results = join_results(counts.results, groups_K)
    difference = results.score - score
    note = counts.explain(difference, groups_K) if abs(difference) > FRAME_TOLERANCE else ""
    return FrameScore(results, note)


class _Counts:
    """The results of the files so far, and what tells causes of a difference apart."""

    def __init__(self, reader: FileReader, card: InputCard, overlap: int | None) -> None:
        self._reader, self._card, self._rules, self._overlap = reader, card, reader.rules, overlap
        self.results: list[ImageResults] = []
        self._seen: list[ImageResults] = []
        self._ceiling: list[ImageResults] = []
        self._num_unlike = self._num_unseen = self._num_labelled = 0

    def add(
        self,
        file: int,
        number: int,
        answer: AnswerFile,
        images_NHWC: NDArray[np.uint8],
        labels: NDArray[Any],
    ) -> int:
        """Count a file whose first array has this number; return how many arrays it gave."""
        values_HWC = self._reader.whole_values(file)
        windows = self._windows(values_HWC.shape)
        cut = self._arrays(values_HWC, windows)
        arrays = np.asarray(images_NHWC[number : number + len(cut)])
        self._num_unlike += int(not np.array_equal(arrays, np.stack(cut)))
        found = answer(values_HWC)
        if self._card.task is Task.classification:
            self.results.append(self._compare(found, labels[number]))
            return 1
        mask_HW = self._reader.whole_mask(file)
        self.results.append(self._compare(found, mask_HW))
        is_unseen = (found == IGNORE_INDEX) & (mask_HW != IGNORE_INDEX)
        self._num_unseen += int(is_unseen.sum())
        self._num_labelled += int((mask_HW != IGNORE_INDEX).sum())
        self._seen.append(self._compare(found, np.where(is_unseen, IGNORE_INDEX, mask_HW)))
        if not windows:
            mode = self._rules.resize_mode
            restored_HW = restore_mask(np.asarray(labels[number]), size=mask_HW.shape, mode=mode)
            self._ceiling.append(self._compare(restored_HW, mask_HW))
        return len(cut)

    def explain(self, difference: float, groups_K: NDArray[np.int64]) -> str:
        """Return the causes of a difference, each with a number that shows it."""
        causes = []
        if self._num_unlike:
            causes.append(
                f"{self._num_unlike} of {len(self.results)} files are read otherwise than prepare_data did: run it "
                "again"
            )
        if self._num_unseen:
            seen = join_results(self._seen, groups_K).score
            share = self._num_unseen / self._num_labelled
            causes.append(
                f"crop does not see {share:.1%} of the labelled pixels, which count as wrong here; without them the "
                f"score is {seen:.4f}"
            )
        elif self._ceiling and self._rules.resize_mode is ResizeMode.resize:
            ceiling = join_results(self._ceiling, groups_K).score
            if ceiling < 1 - FRAME_TOLERANCE:
                causes.append(
                    f"masks are judged at the size of the files, where perfect masks of {self._rules.width} x "
                    f"{self._rules.height} would score {ceiling:.4f}"
                )
        text = "; ".join(causes) or "the cause is not known: the engine saw the same pixels"
        return f"frame_score is {difference:+.4f} from the score: {text}"

    def _compare(self, found: NDArray[Any], label: NDArray[Any]) -> ImageResults:
        card = self._card
        return compare_with_labels(
            np.asarray(found)[None], np.asarray(label)[None], len(card.classes), card.task
        )

    def _windows(self, shape: tuple[int, ...]) -> tuple[Window, ...]:
        if self._rules.resize_mode is not ResizeMode.windows:
            return ()
        return cover(
            *shape[:2],
            window_height=self._rules.height,
            window_width=self._rules.width,
            overlap=self._overlap or 0,
            is_owned_once=True,
        )

    def _arrays(self, values_HWC: NDArray[Any], windows: tuple[Window, ...]) -> list[NDArray[np.uint8]]:
        """Return what prepare_data made of a file."""
        rules = self._rules
        size = {"height": rules.height, "width": rules.width}
        image_HWC = scale_image(values_HWC, rules, "a file of the split")
        if windows:
            return [cut_image(image_HWC, window, **size) for window in windows]
        return [fit_image(image_HWC, mode=rules.resize_mode, **size)]
