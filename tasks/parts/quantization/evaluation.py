"""Evaluate quantized graphs on validation images, in the same way for every stage that quantizes.

N images.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto

from tasks.parts.cpu import int8_sums_saturate
from tasks.parts.data.comparison import ImageResults, energies, energy, score_loss
from tasks.parts.data.dataset import normalised_batches
from tasks.parts.data.judge import Judge, answers_of, open_judge
from tasks.parts.data.lazy_array import part_of
from tasks.parts.data.subsets import open_chosen_images
from tasks.parts.onnx_graphs.graph import read_card_of_graph
from tasks.parts.onnx_graphs.int8_activations import activations_to_int8
from tasks.parts.onnx_graphs.int8_weights import weights_to_7_bits
from tasks.parts.onnx_graphs.live_memory import MAX_BYTES, images_that_fit
from tasks.parts.onnx_graphs.predict import Agreement, agreement, run_batches
from tasks.parts.onnx_graphs.variants import with_variants
from tasks.parts.onnx_session import CPU_PROVIDER, open_session, run_session
from tasks.parts.quantization.config import Activations

_LOOKS = (4, 2)
"""A candidate is held against its rival behind a quarter and behind half of the images."""
_SURE = 0.999
"""Level of the intervals that end an evaluation early: it is looked at more than once."""
_FEWEST_IMAGES = 8
"""A part with fewer images decides nothing."""
AS_GOOD_REL_LOSS = 0.001
"""Largest measured loss of a graph that may count as none, if its interval says that it can be chance."""


@dataclass(frozen=True)
class Evaluation:
    """The predictions of a graph, compared with the labels and with the float graph."""

    results: ImageResults
    agreement: float
    """Share of pixels, or of images, with the class of the float graph, 0..1; 1 - noise / signal of values."""
    activations: Activations
    """Type of the activations with which the graph was evaluated."""
    rows_N: NDArray[np.int64] | None = None
    """Numbers of the images that it is of, where it ended early; None if it is of all."""

    @cached_property
    def score(self) -> float:
        """Score in the metric of the data set, 0..1."""
        return self.results.score

    @property
    def is_complete(self) -> bool:
        """Whether it is of all images."""
        return self.rows_N is None


@dataclass(frozen=True)
class GraphEvaluator:
    """Validation images with their labels, and what the float graph answers for them."""

    images_NHWC: NDArray[Any]
    judge: Judge
    float_answers: NDArray[Any]
    """Classes that the float graph predicts, or its values."""
    float_results: ImageResults
    """What the float graph gets right in the same images."""
    batch_size: int
    activations: tuple[Activations, ...]
    """Types of activations in the engines that graphs are evaluated for."""
    provider: str
    """Provider of ONNX Runtime on which all of them run."""

    @property
    def metric(self) -> str:
        """Name of the metric of the scores."""
        return self.judge.metric

    @property
    def float_score(self) -> float:
        """Score of the float graph on the same images."""
        return self.float_results.score

    def evaluate(self, quantized: ModelProto, *, rival: Evaluation | None = None) -> Evaluation:
        """Evaluate a graph in ONNX Runtime with each type of activations; return the worst evaluation by `rank`.

        It ends early, and is of some images alone, where these show that the graph is certainly worse than both a
        rival and the float graph: the paired intervals of its losses say so, on images spread over the split.
        """
        evaluations = []
        for activations in self.activations:
            encoded = with_activations(quantized, activations)
            if rival is not None:
                evaluations.append(self._race(encoded, activations, rival))
                if not evaluations[-1].is_complete:
                    return evaluations[-1]
                continue
            evaluations.append(self._evaluate_all(encoded, activations))
        return min(evaluations, key=self.rank)

    def _evaluate_all(self, encoded: ModelProto, activations: Activations) -> Evaluation:
        """Evaluate a graph on all images in their order."""
        parts, same = [], Agreement()
        start = 0
        for answers, part in _answers(encoded, self.images_NHWC, self.judge, self.batch_size, self.provider):
            same.add(answers, self.float_answers[start : start + len(answers)])
            parts.append(part)
            start += len(answers)
        return Evaluation(self.judge.join(parts), same.share, activations)

    def _race(self, encoded: ModelProto, activations: Activations, rival: Evaluation) -> Evaluation:
        """Evaluate a graph on evenly spaced images first; end early if it is certainly worse than its rival."""
        rows_N = _spread_first(len(self.images_NHWC))
        looks = [len(rows_N) // share for share in _LOOKS]
        parts, same = [], Agreement()
        seen = 0
        images_NHWC, judge = part_of(self.images_NHWC, rows_N), self.judge.of_images(rows_N)
        for answers, part in _answers(encoded, images_NHWC, judge, self.batch_size, self.provider):
            same.add(answers, self.float_answers[rows_N[seen : seen + len(answers)]])
            parts.append(part)
            seen += len(answers)
            if _FEWEST_IMAGES <= seen < len(rows_N) and looks and seen >= looks[0]:
                looks = [look for look in looks if look > seen]
                first_N = rows_N[:seen]
                results = self.judge.of_images(first_N).join(parts)
                if self._is_lost(results, first_N, rival):
                    return Evaluation(results, same.share, activations, first_N)
        back_N = np.argsort(rows_N)
        return Evaluation(judge.join(parts).of_images(back_N), same.share, activations)

    def _is_lost(self, results: ImageResults, rows_N: NDArray[np.int64], rival: Evaluation) -> bool:
        return all(
            score_loss(results, base.of_images(rows_N), level=_SURE).low > 0
            for base in (rival.results, self.float_results)
        )

    def evaluate_together(
        self, model: ModelProto, make: Callable[[str], ModelProto], names: Sequence[str]
    ) -> list[Evaluation]:
        """Evaluate the Q/DQ graphs that `make` makes of a float graph for these names, in one session.

        What they share with the float graph runs once, so that graphs which differ from it late cost little. The
        float graph is held twice, and further the weights that are its own for each name. Raises BuildFailed if one
        of them does not run.
        """
        found: list[list[Evaluation]] = [[] for _ in names]
        for activations in self.activations:
            variants = (with_activations(make(name), activations) for name in names)
            merged, outputs = with_variants(model, variants)
            for evaluations, (results, share) in zip(
                found, self._answers_together(merged, outputs), strict=True
            ):
                evaluations.append(Evaluation(results, share, activations))
        return [min(evaluations, key=self.rank) for evaluations in found]

    def noise_together(
        self, model: ModelProto, make: Callable[[str], ModelProto], names: Sequence[str], num_images: int
    ) -> list[float]:
        """Return what share of the energy of the outputs each graph of `evaluate_together` changes, on a few images.

        They are spread over the split; of several types of activations the one that changes most counts. Raises
        BuildFailed if one of the graphs does not run.
        """
        rows_N = np.unique(np.linspace(0, len(self.images_NHWC) - 1, num_images).astype(np.int64))
        images_NHWC, kinds = part_of(self.images_NHWC, rows_N), []
        for activations in self.activations:
            merged, outputs = with_variants(
                model, [model, *(with_activations(make(name), activations) for name in names)]
            )
            card, session = read_card_of_graph(merged), open_session(merged, provider=self.provider)
            totals = np.zeros((len(names), 2))
            for images_NCHW in normalised_batches(images_NHWC, card, self.batch_size):
                exact, *found = run_session(session, outputs, {session.get_inputs()[0].name: images_NCHW})
                totals += [[part.sum() for part in energies(values, exact)] for values in found]
            kinds.append([noise / signal if signal else float(noise > 0) for signal, noise in totals])
        return [max(shares) for shares in zip(*kinds, strict=True)]

    def _answers_together(
        self, merged: ModelProto, outputs: Sequence[str]
    ) -> Iterator[tuple[ImageResults, float]]:
        """Yield for each output what is right in each image, and the agreement with the float graph."""
        card, session = read_card_of_graph(merged), open_session(merged, provider=self.provider)
        name, start = session.get_inputs()[0].name, 0
        parts: list[list[ImageResults]] = [[] for _ in outputs]
        shares: list[list[float]] = [[] for _ in outputs]
        sizes: list[float] = []
        for images_NCHW in normalised_batches(self.images_NHWC, card, self.batch_size):
            found = run_session(session, outputs, {name: images_NCHW})
            known = self.float_answers[start : start + len(images_NCHW)]
            for place, values in enumerate(found):
                answers = answers_of(values, card)
                parts[place].append(self.judge.compare(values, answers, start))
                shares[place].append(1 - agreement(answers, known))
            sizes.append(_weight(known))
            start += len(images_NCHW)
        for results, differing in zip(parts, shares, strict=True):
            yield self.judge.join(results), 1 - float(np.average(differing, weights=sizes))

    def rank(self, evaluation: Evaluation) -> tuple[float, float]:
        """Return what candidates are compared by, larger is better: how far the score is below float, then agreement.

        A score above that of the float graph is no merit of a quantized one: its errors happened to hit the right
        answers of these images. So all candidates that are as good as the float graph are equal in score, and the one
        that changes fewest answers is the best. As good are scores at or above that of the float graph, and those at
        most `AS_GOOD_REL_LOSS` below it whose 95 % interval of the loss includes 0.
        """
        base = self.float_results_of(evaluation)
        if _is_as_good(evaluation.results, base):
            return 0.0, evaluation.agreement
        return evaluation.score - base.score, evaluation.agreement

    def float_results_of(self, evaluation: Evaluation) -> ImageResults:
        """Return what the float graph gets right in the images of an evaluation."""
        if evaluation.rows_N is None:
            return self.float_results
        return self.float_results.of_images(evaluation.rows_N)


def with_activations(quantized: ModelProto, activations: Activations) -> ModelProto:
    """Return a Q/DQ graph of `insert_qdq` as targets with this type of activations run it on this CPU."""
    if activations is Activations.int8:
        return activations_to_int8(quantized)
    return weights_to_7_bits(quantized) if weight_bits(activations) < 8 else quantized


def weight_bits(activations: Activations) -> int:
    """Return the bits of the weights beside this type of activations in engines that this CPU builds."""
    return 7 if activations is Activations.uint8 and int8_sums_saturate() else 8


def open_evaluator(
    graph: ModelProto,
    data: Path,
    *,
    num_images: int,
    batch_size: int,
    activations: Sequence[Activations] = (Activations.uint8,),
    provider: str = CPU_PROVIDER,
    num_together: int = 1,
) -> GraphEvaluator:
    """Run the float graph on `num_images` of the validation split (subsets.py chooses them); 0 takes all.

    Quantized graphs are evaluated with each type of activations, and on the CPU, whose integers are those of engines.
    Another provider is for float graphs, and for stages whose key names it (onnx_graphs/judging.py). `batch_size` is
    lowered where the activations of so many images take too much memory, of `num_together` graphs at once.

    Raises ArtifactError when the graph has other classes than the data.
    """
    batch_size = images_that_fit(graph, most=batch_size, max_bytes=MAX_BYTES // num_together)
    images_NHWC = open_chosen_images(data, "val", num_images or None)
    judge = open_judge(data, "val", read_card_of_graph(graph), num_images=num_images or None)
    answers, results = None, []
    start = 0
    for found, part in _answers(graph, images_NHWC, judge, batch_size, provider):
        if answers is None:
            answers = np.empty((len(images_NHWC), *found.shape[1:]), found.dtype)
        answers[start : start + len(found)] = found
        results.append(part)
        start += len(found)
    assert answers is not None
    return GraphEvaluator(
        images_NHWC, judge, answers, judge.join(results), batch_size, tuple(activations), provider
    )


def _weight(answers: NDArray[Any]) -> float:
    """Return what a batch counts in an agreement: its classes, or the energy of its values."""
    return float(energy(answers).sum()) if answers.dtype.kind == "f" else float(answers.size)


def _is_as_good(results: ImageResults, base: ImageResults) -> bool:
    if results.score >= base.score:
        return True
    if results.score < base.score * (1 - AS_GOOD_REL_LOSS):
        return False
    return score_loss(results, base).low <= 0


def _spread_first(num_images: int) -> NDArray[np.int64]:
    """Return the numbers of all images in an order whose first quarter and first half are evenly spaced."""
    return np.concatenate([np.arange(first, num_images, step) for first, step in ((0, 4), (2, 4), (1, 2))])


def _answers(
    graph: ModelProto, images_NHWC: NDArray[Any], judge: Judge, batch_size: int, provider: str
) -> Iterator[tuple[NDArray[Any], ImageResults]]:
    """Yield the answers of a graph batch by batch, and what is right in them."""
    card, start = read_card_of_graph(graph), 0
    for outputs in run_batches(graph, images_NHWC, batch_size=batch_size, provider=provider):
        answers = answers_of(outputs, card)
        yield answers, judge.compare(outputs, answers, start)
        start += len(outputs)
