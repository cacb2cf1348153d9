"""Show where the time goes, in an inference of an engine or in the steps of a training.

``python -m flows.profile pruned_qat --target cpu_openvino`` runs some inferences of a built engine, and
``python -m flows.profile --stage train.baseline`` some steps of a training, with its configuration in params.yaml and
its inputs; nothing of it is kept. Both write a trace, which https://ui.perfetto.dev opens.
"""

import argparse
import importlib
import logging
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flows.pipeline import RecordedStages, run_pipeline
from flows.result_table import open_console
from tasks.core.config import read_params
from tasks.core.errors import ArtifactError, ConfigError, EnginewrightError
from tasks.core.execute import ARTIFACTS, explained_full_disk, load_stage, resolve
from tasks.parts.engines.manifest import ENGINE_FOLDER, MANIFEST_FILE

if TYPE_CHECKING:
    from tasks.parts.timelines.trace import Trace
    from tasks.parts.timelines.training import TrainingSummary, TrainingTimeline


def find_engine(variant: str, target: str) -> Path:
    """Return the folder of an engine.

    Raises ConfigError for an engine that the configuration does not have, ArtifactError for one that is not built.
    """
    engine = ARTIFACTS / "build_engine" / variant / target / ENGINE_FOLDER
    if (engine / MANIFEST_FILE).is_file():
        return engine
    engines = [(item["variant"], item["target"]) for item in read_params()["engines"].values()]
    if (variant, target) not in engines:
        variants = ", ".join(dict.fromkeys(name for name, _ in engines))
        targets = ", ".join(dict.fromkeys(name for _, name in engines))
        raise ConfigError(
            f"There is no engine of variant {variant!r} for target {target!r}. params.yaml has the variants "
            f"{variants} and the targets {targets}, of which some have no engine for some variants. Choose from "
            "these, or add the target to the configuration (docs/guide.md)."
        )
    raise ArtifactError(
        f"{engine}: not found, expected an engine. Build it with `make run`, or with `dvc repro "
        f"build_engine@{variant}-{target}`."
    )


def find_training(address: str) -> Mapping[str, Path]:
    """Return the inputs that the pipeline gives to a training.

    Raises ConfigError if the address is no training of the configuration, ArtifactError for an input that is missing.
    """
    stages = RecordedStages()
    run_pipeline(stages, read_params())
    trainings = [call for call in stages.calls if _is_training(call)]
    if address not in trainings:
        found = f"is a stage, but no training{'' if trainings else ' of this configuration'}"
        raise ConfigError(
            f"{address} {found if address in stages.calls else 'is no stage of this configuration'}. Its trainings "
            f"are: {', '.join(trainings) or 'none'}. Choose one of them (--stage)."
        )
    for name, path in stages.calls[address].items():
        if not path.exists():
            raise ArtifactError(
                f"{address} reads {name} from {path}, which does not exist. Run the pipeline up to there with "
                f"`make run`, or make only what it needs with `dvc repro`."
            )
    return stages.calls[address]


def _is_training(address: str) -> bool:
    function, _ = load_stage(address)
    return hasattr(importlib.import_module(function.__module__), "CURVES")


def profile_engine(variant: str, target: str, *, num_inferences: int, batch_size: int, out: Path) -> None:
    """Write the trace of some inferences, and print what it holds."""
    from tasks.parts.timelines.engine import engine_trace, record_engine

    timeline = record_engine(
        find_engine(variant, target), num_inferences=num_inferences, batch_size=batch_size
    )
    _write(out, engine_trace(timeline))
    milliseconds = statistics.median(each.duration_us / 1000 for each in timeline.inferences)
    print(
        f"{variant} on {target}: {len(timeline.inferences)} inferences, the median takes {milliseconds:.3f} ms"
    )
    if timeline.num_layers:
        print(
            f"{timeline.share_in_layers:.0%} of their time is in {timeline.num_layers} layers. "
            f"Times of layers: {timeline.note}"
        )
    else:
        print(timeline.note)


def profile_training(address: str, *, num_steps: int, out: Path) -> None:
    """Write the trace of the first steps of a training, and print its summary."""
    inputs = find_training(address)
    function, config = resolve(address, read_params())
    from tasks.parts.timelines.training import record_training, sum_up, training_trace

    if config.trainer.num_devices * config.trainer.num_nodes > 1:
        print(f"{address} trains on several devices; only one of them is profiled, without the others")
    timeline = record_training(function, config, inputs, num_steps=num_steps)
    _write(out, training_trace(address, timeline))
    show(address, timeline, sum_up(timeline))
    if len(timeline.steps) < num_steps:
        print(
            f"{address} ended after {len(timeline.steps)} steps, as trainer.max_epochs and its data have it"
        )


def show(address: str, timeline: "TrainingTimeline", summary: "TrainingSummary") -> None:
    """Print the phases of a step, and what a training needs."""
    from rich.table import Table

    table = Table("phase", "ms per step", "share", title=address, title_justify="left")
    for phase, milliseconds in summary.ms_per_step.items():
        table.add_row(phase, f"{milliseconds:.2f}", f"{summary.share(phase):.1%}")
    table.add_row("step", f"{sum(summary.ms_per_step.values()):.2f}", "", style="bold")
    open_console().print(table)
    print(
        f"{summary.images_per_s:.1f} images/s in steps of {timeline.images_per_step}; waiting for data takes "
        f"{summary.share('data wait'):.1%}; peak memory {timeline.peak_memory_mib:.0f} MiB "
        f"({timeline.memory_kind})"
    )
    print(f"means over {summary.num_steps} of {len(timeline.steps)} steps; the first one warms up")


def _write(out: Path, trace: "Trace") -> None:
    from tasks.parts.timelines.trace import write_trace

    try:
        with explained_full_disk(out):
            write_trace(out, trace)
    except OSError as error:
        raise ConfigError(
            f"{out} cannot be written ({error.strerror}), expected the name of a file for the trace (--out)."
        ) from error


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flows.profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("variant", nargs="?", help="of the engine, such as pruned_qat")
    parser.add_argument("--target", help="of the engine, a name in conf/target")
    parser.add_argument("--inferences", type=_count, default=5, help="default: 5")
    parser.add_argument("--batch-size", type=_count, default=1, help="images of an inference; default: 1")
    parser.add_argument("--stage", metavar="ADDRESS", help="a training, such as train.baseline")
    parser.add_argument("--steps", type=_count, default=30, help="of the training; default: 30")
    parser.add_argument("--out", type=Path, default=Path("trace.json"), help="default: trace.json")
    options = parser.parse_args(arguments)
    if (options.stage is None) == (options.variant is None) or (options.variant and not options.target):
        parser.error(
            "expected an engine, as in `pruned_qat --target cpu_openvino`, or a training, as in "
            "`--stage train.baseline`"
        )
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}, expected an integer of 1 or more")
    return int(text)


def main(arguments: Sequence[str]) -> int:
    """Profile an engine or a training; return the exit code."""
    options = _parse(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        if options.out.is_dir():
            raise ConfigError(
                f"{options.out} is a folder, expected the name of a file for the trace (--out)."
            )
        if options.stage:
            profile_training(options.stage, num_steps=options.steps, out=options.out)
        else:
            profile_engine(
                options.variant,
                options.target,
                num_inferences=options.inferences,
                batch_size=options.batch_size,
                out=options.out,
            )
        print(f"trace: {options.out}; open it on https://ui.perfetto.dev (the file stays on this machine)")
    except EnginewrightError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
