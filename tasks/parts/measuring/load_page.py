"""What engines do under load, as Markdown."""

from collections.abc import Iterator

from tasks.parts.measuring.load_report import Arrivals, EngineLoad, LoadCell, LoadReport

NOTHING = "–"  # noqa: RUF001


def write_page(report: LoadReport) -> str:
    """Return the whole report: for each engine the grid, what tuning gave, and the arrivals."""
    bound = "no bound" if report.max_p99_ms is None else f"p99 of {report.max_p99_ms:g} ms or less"
    parts = [f"# Under load: {report.target}", f"{bound}, on {report.num_cpus} CPUs."]
    for variant, load in report.engines.items():
        parts += [f"## {variant}", *describe_engine(load)]
    if report.together:
        parts += ["## Engines that ran at the same time", _together(report)]
    return "\n\n".join(parts) + "\n"


def describe_engine(load: EngineLoad) -> Iterator[str]:
    """Yield the paragraphs and tables of one engine."""
    if load.best is None:
        yield "**No cell of the grid holds the bound.**"
    else:
        yield (
            f"**{load.best.throughput_per_s:.4g} images/s** with {load.best.setting.describe()}, p99 "
            f"{_ms(load.best.latency_ms_p99)} ms, measured again after the cell was chosen."
        )
    yield _grid(load)
    if load.best is not None:
        yield _tried(load)
    if load.arrivals is not None:
        yield from _arrivals(load.arrivals)


def _grid(load: EngineLoad) -> str:
    lines = [
        "| batch | lanes | threads | images/s | of the windows | p50 ms | p99 ms | calls |",
        "|---:|---:|---:|---:|---|---:|---:|---:|",
    ]
    lines += [f"| {_cell(cell)} |" for cell in load.cells]
    return "\n".join(lines)


def _cell(cell: LoadCell) -> str:
    setting = cell.setting
    numbers = [str(setting.batch), str(setting.lanes), str(setting.tuning.num_threads)]
    numbers += [
        f"{cell.throughput_per_s:.4g}",
        f"{cell.throughput_per_s_low:.4g} to {cell.throughput_per_s_high:.4g}",
        _ms(cell.latency_ms_p50),
        _ms(cell.latency_ms_p99),
        str(cell.num_calls),
    ]
    return " | ".join(numbers)


def _tried(load: EngineLoad) -> str:
    lines = [f"Two processes of the best cell differ by up to {load.aa_spread or 0.0:.1%}."]
    if load.tried:
        lines += ["", "| in the best cell | images/s | 95 % | p99 ms | kept |", "|---|---:|---|---:|---|"]
    lines += [
        f"| {one.tuning.describe()} | {one.factor - 1:+.1%} | {one.low - 1:+.1%} to {one.high - 1:+.1%} "
        f"| {_ms(one.latency_ms_p99)} | {'yes' if one.is_accepted else 'no'} |"
        for one in load.tried
    ]
    return "\n".join(lines)


def _arrivals(arrivals: Arrivals) -> Iterator[str]:
    knee = (
        "no knee" if arrivals.knee_per_s is None else f"knee at **{arrivals.knee_per_s:.4g} images/s**"
    ) + (f" ({arrivals.note})" if arrivals.note else "")
    yield (
        f"Open arrivals, {arrivals.setting.describe()}: {knee}. A closed loop reaches "
        f"{arrivals.capacity_per_s:.4g} images/s; the bound is a p99 of {_ms(arrivals.max_p99_ms)} ms."
    )
    if arrivals.steps:
        head = "| images/s | answered | p50 ms | p99 ms | p99 of the call | late by | arrivals | holds |"
        lines = [head, "|---:|---:|---:|---:|---:|---:|---:|---|"]
        lines += [
            f"| {step.rate_per_s:.4g} | {step.achieved_per_s:.4g} | {_ms(step.latency_ms_p50)} "
            f"| {_ms(step.latency_ms_p99)} | {_ms(step.service_ms_p99)} | {_ms(step.late_ms_p99)} "
            f"| {step.num_arrivals} | {'yes' if step.is_held else 'no'} |"
            for step in arrivals.steps
        ]
        yield "\n".join(lines)


def _together(report: LoadReport) -> str:
    lines = [
        "Batch 1, one lane each, alone and all at once.",
        "",
        "| variant | images/s alone | p99 ms alone | images/s together | p99 ms together |",
        "|---|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {one.variant} | {one.alone_per_s:.4g} | {_ms(one.alone_ms_p99)} | {one.together_per_s:.4g} "
        f"| {_ms(one.together_ms_p99)} |"
        for one in report.together
    ]
    return "\n".join(lines)


def _ms(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.3g}"
