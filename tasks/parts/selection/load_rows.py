"""What the report tells of engines under load, as far as measure_load ran; for the page and for Markdown."""

from tasks.parts.selection.findings import NOTHING, Findings, milliseconds, number

LOAD_WORDS = (
    "Images per second in a closed loop, in the best cell of batch, lanes and threads whose p99 is within the bound. "
    "The knee is the largest rate of images that arrive one by one, on their own time, whose p99 holds its bound "
    "(docs/load.md)."
)
LOAD_HEAD = ("variant", "target", "images/s", "p99 ms", "bound ms", "with", "knee images/s", "its bound ms")
TOGETHER_HEAD = (
    "variant",
    "target",
    "images/s alone",
    "p99 ms alone",
    "images/s together",
    "p99 ms together",
)


def load_rows(findings: Findings) -> list[list[str]]:
    """Return the cells of LOAD_HEAD for each engine, most images per second first."""
    rows = []
    for row in findings.loaded:
        load = row.measured.load if row.measured else None
        assert load is not None
        rows.append(
            [
                row.variant,
                row.target,
                number(load.throughput_per_s_within_p99, ".4g"),
                _ms(load.throughput_ms_p99),
                _ms(load.load_max_p99_ms),
                load.load_setting or "no cell holds the bound",
                number(load.knee_per_s, ".4g"),
                _ms(load.knee_max_p99_ms),
            ]
        )
    return rows


def together_rows(findings: Findings) -> list[list[str]]:
    """Return the cells of TOGETHER_HEAD for each engine that ran beside others."""
    return [
        [
            one.variant,
            target,
            number(one.alone_per_s, ".4g"),
            _ms(one.alone_ms_p99),
            number(one.together_per_s, ".4g"),
            _ms(one.together_ms_p99),
        ]
        for target, report in findings.loads.items()
        for one in report.together
    ]


def _ms(value: float | None) -> str:
    return NOTHING if value is None else milliseconds(value)
