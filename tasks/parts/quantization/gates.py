"""The accuracy gates of select_engine, for graphs that are evaluated on validation images."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from onnx import ModelProto

from tasks.parts.data.accuracy import ScoreLoss, Standing, worst
from tasks.parts.data.class_limits import ClassCheck, ClassLimits, check_classes
from tasks.parts.data.comparison import ImageResults, read_results, score_loss
from tasks.parts.onnx_graphs.graph import read_card_of_graph
from tasks.parts.quantization.config import Activations
from tasks.parts.quantization.evaluation import Evaluation, GraphEvaluator, open_evaluator

REFERENCE, FLOAT, INT8 = "reference", "float", "int8"
"""Names of what stages write about each validation image: the reference, the float graph and its INT8 graph."""

_FEWEST_GROUPS = 6
"""With fewer groups of images a loss that is worth a search can hardly be told from one that is not."""


@dataclass(frozen=True)
class AccuracyGates:
    """Limits of the losses against the reference and against the float graph, and of single classes.

    A gate holds if the upper end of the loss's 95 % interval is within it, as in select_engine. If there are too few
    images to prove that even for the float graph, or fewer than six groups of them, the measured losses decide.
    """

    reference: ImageResults
    max_score_rel_loss: float
    """Share of the reference's score that may be lost."""
    parent: ImageResults
    """Results of the float graph that is quantized."""
    max_parent_rel_loss: float
    classes: Sequence[str] = ()
    """Names of the classes, in the order of the model."""
    class_limits: ClassLimits = field(default_factory=lambda: ClassLimits({}, {}))

    @cached_property
    def standing_of_float(self) -> Standing:
        """Standing of the float graph itself; unproven with few groups, whatever its own loss is."""
        found = self.standing(self.parent)
        has_few = self.parent.num_groups < _FEWEST_GROUPS
        return Standing.unproven if has_few and found is Standing.within else found

    def score_rel_loss(self, results: ImageResults) -> ScoreLoss:
        """Return the loss against the reference."""
        return score_loss(results, self.reference)

    def parent_rel_loss(self, results: ImageResults) -> ScoreLoss:
        """Return the loss against the float graph."""
        return score_loss(results, self.parent)

    def check_classes(self, results: ImageResults) -> list[ClassCheck]:
        """Hold single classes against their limits; empty without any."""
        if not self.class_limits:
            return []
        return check_classes(results, self.reference, self.classes, self.class_limits, "the float reference")

    def standing(self, results: ImageResults) -> Standing:
        """Return the worst of the standings at all gates."""
        return worst(
            (
                self.score_rel_loss(results).standing(self.max_score_rel_loss),
                self.parent_rel_loss(results).standing(self.max_parent_rel_loss),
                *(check.standing for check in self.check_classes(results)),
            )
        )

    def hold(self, results: ImageResults) -> bool:
        """Return whether all gates hold."""
        if self.standing_of_float is Standing.within:
            return self.standing(results) is Standing.within
        return self._excess_of_classes(results) == 0 and all(
            results.score >= base.score * (1 - limit)
            for base, limit in (
                (self.reference, self.max_score_rel_loss),
                (self.parent, self.max_parent_rel_loss),
            )
        )

    def why_no_search(self, results: ImageResults) -> str:
        """Return why no layers have to be found that stay in float; empty if that has to be."""
        if self.standing_of_float is Standing.beyond:
            return "the float graph itself is certainly beyond a gate"
        if not self.hold(results):
            return ""
        if self.standing(results) is Standing.within:
            return "INT8 holds all gates for certain"
        return "INT8 holds all gates as measured, and there are too few validation images to prove it"

    def rank(self, evaluation: Evaluation, evaluator: GraphEvaluator) -> tuple[float, ...]:
        """Return what makes one graph better than another, larger is better: first its classes, then all else.

        Without limits of classes the evaluator's rank decides. Else a search for the best score would leave a class
        beyond its limit that hardly moves the score.
        """
        return -self._excess_of_classes(evaluation.results), *evaluator.rank(evaluation)

    def open_classes(self, results: ImageResults) -> tuple[str, ...]:
        """Return the limits of classes that do not hold for certain, in words."""
        checks = self.check_classes(results)
        return tuple(str(check) for check in checks if check.standing is not Standing.within)

    def _excess_of_classes(self, results: ImageResults) -> float:
        """Return how far classes are beyond their limits as measured, added up; 0 without such limits.

        A search has to lower this before it raises the score, which a class beyond its limit hardly moves.
        """
        return sum(check.excess for check in self.check_classes(results))


def read_gates(
    file: Path,
    classes: Sequence[str],
    *,
    max_score_rel_loss: float,
    max_parent_rel_loss: float,
    class_limits: ClassLimits,
    stage: str,
) -> tuple[AccuracyGates, ImageResults]:
    """Return the gates, and the INT8 graph's results, from what quantize_repaired wrote about each image.

    Nothing runs. Raises ArtifactError for a file that is missing or damaged, ConfigError for a limit of `stage` on a
    class that the model does not have.
    """
    class_limits.check_names(classes, stage)
    reference, parent, int8 = (
        read_results(file, name, stage="quantize_repaired") for name in (REFERENCE, FLOAT, INT8)
    )
    return AccuracyGates(
        reference, max_score_rel_loss, parent, max_parent_rel_loss, classes, class_limits
    ), int8


def open_gates(
    graph: ModelProto,
    reference: ModelProto,
    data: Path,
    *,
    max_score_rel_loss: float,
    max_parent_rel_loss: float,
    class_limits: ClassLimits,
    stage: str,
    num_images: int,
    batch_size: int,
    activations: Sequence[Activations],
) -> tuple[GraphEvaluator, AccuracyGates]:
    """Run the float graph and the reference on the validation images; return what INT8 graphs are judged with.

    If both are the same object, it runs once. Raises ConfigError for a limit of `stage` on a class that the model
    does not have.
    """
    classes = read_card_of_graph(graph).classes
    class_limits.check_names(classes, stage)
    evaluator, *others = (
        open_evaluator(
            float_graph, data, num_images=num_images, batch_size=batch_size, activations=activations
        )
        for float_graph in ([graph] if reference is graph else [graph, reference])
    )
    return evaluator, AccuracyGates(
        others[0].float_results if others else evaluator.float_results,
        max_score_rel_loss,
        evaluator.float_results,
        max_parent_rel_loss,
        classes,
        class_limits,
    )
