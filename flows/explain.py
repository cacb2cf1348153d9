"""Explain the difference of any two engines of a target, after a run of the pipeline.

``python -m flows.explain pruned pruned_ptq --target cpu_openvino`` prints a sentence, the waterfall in milliseconds
and the layers that make it up. The pairs of the ladder are in artifacts/explain/<target>/explain.md.
"""

import argparse
import sys
from collections.abc import Sequence

from tasks.core.errors import ConfigError, EnginewrightError
from tasks.core.execute import ARTIFACTS
from tasks.core.reports import read_report
from tasks.parts.explain.engine_view import EngineView, view_engines
from tasks.parts.explain.markdown import waterfall_lines
from tasks.parts.explain.report import explain_pair
from tasks.parts.explain.waterfall import Step, compare
from tasks.parts.measuring.reports import BenchmarkReport
from tasks.parts.roofs.roofs import Roofs

_MOST_STEPS = 20


def explain_difference(before: str, after: str, target: str) -> str:
    """Return what makes one engine of a target faster or slower than another one.

    Raises ConfigError for a target or a variant without an explanation, ArtifactError for missing outputs.
    """
    folder = ARTIFACTS / "measure_machine" / target
    if not folder.is_dir():
        known = sorted(path.name for path in folder.parent.glob("*/"))
        raise ConfigError(
            f"--target is {target}, which was not explained. Found: {', '.join(known) or 'none'}. Run the pipeline "
            "for it first: `make run`; targets that run checkpoints have no layers to explain."
        )
    roofs, benchmark = read_report(Roofs, folder), ARTIFACTS / "benchmark" / target
    measured = read_report(BenchmarkReport, benchmark)
    builds = ARTIFACTS / "build_engine" / "*" / target / "engine"
    views = view_engines(list(measured.engines), builds, benchmark, measured, roofs)
    for name in (before, after):
        if name not in views:
            raise ConfigError(
                f"{name} is not a measured engine of {target}. Found: {', '.join(views) or 'none'}."
            )
    first, second = views[before], views[after]
    steps = compare(first, second)
    pair = explain_pair(first, second, steps, measured)
    return "\n".join([*waterfall_lines(pair), "", *_steps(steps, second)])


def _steps(steps: Sequence[Step], after: EngineView) -> list[str]:
    """Return the largest steps as lines of a table."""
    largest = sorted(steps, key=lambda step: -abs(step.milliseconds))[:_MOST_STEPS]
    sources = {layer.name: layer.source for layer in after.layers}
    rows = [
        f"{step.milliseconds:+8.3f} ms  {step.part:<15} {step.before.replace(chr(9), ' + ') or '-'}  ->  "
        f"{step.after.replace(chr(9), ' + ') or '-'}  {sources.get(step.after, '')}".rstrip()
        for step in largest
        if step.before or step.after
    ]
    num_more = sum(bool(step.before or step.after) for step in steps) - len(rows)
    return [*rows, *([f"and {num_more} smaller ones"] if num_more > 0 else [])]


def main(arguments: Sequence[str]) -> int:
    """Print the explanation and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flows.explain", description="Explain the difference of two engines of a target."
    )
    parser.add_argument("before", help="a variant, for example pruned")
    parser.add_argument("after", help="another variant, for example pruned_ptq")
    parser.add_argument("--target", required=True, help="for example cpu_openvino")
    options = parser.parse_args(arguments)
    try:
        print(explain_difference(options.before, options.after, options.target))
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
