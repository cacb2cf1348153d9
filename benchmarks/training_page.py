"""Write the results of `benchmarks.training` as tables, with what does not pay."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import median
from typing import Any

from benchmarks.gpu_cells import MIB
from benchmarks.training_cells import CONTROL, NETWORKS, PLAIN

Row = Mapping[str, Any]

SMALLER = 0.95
"""A practice whose memory is above this ratio saves none worth its configuration."""

READING = """\
How to read it: every training ran in a process of its own, and those of a table took turns. A time is the median of
the steps after the first {warm_up_steps}, then over the rounds ({num_rounds}). Ratios are those of a round to the
plain training of the same round, as median (lowest to highest). "plain, again" is the same training once more: what
differs less than it is noise. Memory is the peak of what is resident minus what was resident before the first step,
without pages of files (kernels, images): gradients, optimizer, activations, temporaries, and what malloc does not
give back. "own mappings" is `MALLOC_MMAP_THRESHOLD_=1048576` in the environment of the process: glibc maps each
tensor from 1 MiB on for itself and returns it to the system at once, where its heap would keep holes. The loss is
that of step {num_steps} (of twice as many with data workers); the difference is the largest of all steps, relative
to the plain training. Activation offload and pinned memory are not run on real hardware."""


def page(record: Mapping[str, Any]) -> str:
    """Return the page of a record."""
    shown = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    parts = record["parts"]
    practices = [
        [*rows] for _, rows in groupby(parts["practices"], key=lambda row: (row["network"], size_of(row)))
    ]
    workers = [[*rows] for _, rows in groupby(parts["workers"], key=lambda row: row["source"])]
    lines = [
        "# Practices of training on this machine",
        "",
        f"{record['cpu_model']}, {record['date']}, Python {record['python']}, {shown}; `{record['command']}`. "
        + bfloat16_of(record["isa"]),
    ]
    for rows in practices:
        lines += ["", f"## {rows[0]['network']}, {size_of(rows[0])}", "", *practice_table(rows)]
    for rows in workers:
        lines += ["", f"## Data workers: {rows[0]['network']}, {size_of(rows[0])}, {rows[0]['source']}", ""]
        lines += worker_table(rows)
    if parts["memory"]:
        lines += ["", "## Memory by purpose", "", *memory_table(parts["memory"])]
    if practices or workers:
        lines += [
            "",
            "## What does not pay here",
            "",
            *(losing_lines(practices, workers) or ["Nothing measured."]),
        ]
    if practices:
        lines += ["", "Activation checkpoints were at these modules:", "", *pattern_lines(practices)]
    reading = READING.format(
        warm_up_steps=record["warm_up_steps"],
        num_rounds=record["num_rounds"],
        num_steps=record["num_steps"],
    )
    return "\n".join([*lines, "", reading]) + "\n"


def size_of(row: Row) -> str:
    """Name the images of a step."""
    return f"{row['height']}x{row['width']}, batch {row['batch_size']}"


def bfloat16_of(isa: Sequence[str]) -> str:
    """Say what the CPU has for bfloat16."""
    has = {name: flag in isa for name, flag in {"AVX512-BF16": "avx512_bf16", "AMX-BF16": "amx_bf16"}.items()}
    return (
        f"For bfloat16 this CPU has {' and '.join(name for name in has if has[name]) or 'no instructions'}"
        + (f", not {' or '.join(name for name in has if not has[name])}." if not all(has.values()) else ".")
    )


def step_ms(row: Row) -> list[float]:
    """Return the median time of a step in each round."""
    return [median(found["step_ms"]) for found in row["rounds"]]


def time_ratios(row: Row, plain: Row) -> list[float]:
    """Return the time of a step relative to the plain one of the same round."""
    return [one / other for one, other in zip(step_ms(row), step_ms(plain), strict=True)]


def growth_mib(row: Row) -> float:
    """Return the median growth of memory."""
    return float(median(found["growth_mib"] for found in row["rounds"]))


def loss_difference(row: Row, plain: Row) -> str:
    """Return the largest difference of any step to the plain training, relative to its loss."""
    own, other = row["rounds"][0]["losses"], plain["rounds"][0]["losses"]
    if all(found["losses"] == other for found in row["rounds"]):
        return "none"
    return f"{max(abs(a - b) / abs(b) for a, b in zip(own, other, strict=True)):.1e}"


def spread(values: Sequence[float]) -> str:
    """Show the median with the lowest and the highest value."""
    text = f"{median(values):.2f}"
    return f"{text} ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else text


def practice_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of one network at one size."""
    plain = rows[0]
    yield "| practice | step ms | time | memory MiB | memory | loss | difference |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        yield (
            f"| {row['title']} | {median(step_ms(row)):.1f} | {spread(time_ratios(row, plain))} | "
            f"{growth_mib(row):.0f} | {growth_mib(row) / growth_mib(plain):.2f} | "
            f"{row['rounds'][0]['losses'][-1]:.6f} | {loss_difference(row, plain)} |"
        )


def worker_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the lines of one source of images."""
    plain = rows[0]
    yield "| trainer.num_workers | workers | step ms | time | waiting for data | MiB of the workers | difference |"
    yield "|---|---|---|---|---|---|---|"
    for row in rows:
        waiting = median(sum(found["data_wait_ms"]) / sum(found["step_ms"]) for found in row["rounds"])
        chosen = "null" if row["num_workers"] is None else row["num_workers"]
        first = row["rounds"][0]
        yield (
            f"| {chosen} | {first['num_workers']} | {median(step_ms(row)):.1f} | {spread(time_ratios(row, plain))} | "
            f"{waiting:.1%} | {first['workers_mib']:.0f} | {loss_difference(row, plain)} |"
        )


def memory_table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield account and peak of each training; the weights are there before the first step."""
    yield (
        "The peak is that of own mappings. Weights are resident before the first step, so the ratio is that of the "
        "peak to the other parts: above 1 by temporaries, below 1 where some activations are gone when others are "
        "computed again. SGD keeps half of what AdamW does; `ema_decay` keeps the weights once more."
    )
    yield ""
    yield (
        "| network | practice | batch | weights MiB | gradients | AdamW | activations | computed again | "
        "sum without weights | peak | ratio |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    keys = ("weight_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes", "recomputed_bytes")
    for row in rows:
        found = row["account"]
        counted_mib = (found["total_bytes"] - found["weight_bytes"]) / MIB
        parts = " | ".join(f"{found[key] / MIB:.1f}" for key in keys)
        yield (
            f"| {row['network']} | {row['practice']} | {row['batch_size']} | {parts} | {counted_mib:.1f} | "
            f"{growth_mib(row):.1f} | {growth_mib(row) / counted_mib:.2f} |"
        )
    yield ""
    yield from slope_lines(rows)


def slope_lines(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what one more image of a batch takes, counted and measured."""
    for (network, practice), found in groupby(rows, key=lambda row: (row["network"], row["practice"])):
        by_batch = sorted(found, key=lambda row: int(row["batch_size"]))
        low, high = by_batch[0], by_batch[-1]
        images = high["batch_size"] - low["batch_size"]
        if images:
            counted = (high["account"]["total_bytes"] - low["account"]["total_bytes"]) / MIB / images
            measured = (growth_mib(high) - growth_mib(low)) / images
            yield (
                f"- {network}, {practice}: one more image takes {measured:.1f} MiB, counted {counted:.1f} "
                f"(ratio {measured / counted:.2f})."
            )


def losing_lines(practices: Sequence[Sequence[Row]], workers: Sequence[Sequence[Row]]) -> list[str]:
    """List what is neither faster than the noise nor smaller, and checkpoints that others surpass in both."""
    lines = []
    for rows in practices:
        plain, control = rows[0], next(row for row in rows if row["title"] == CONTROL)
        noise = max(abs(ratio - 1) for ratio in time_ratios(control, plain))
        for row in rows:
            if row["title"] in (PLAIN, CONTROL):
                continue
            time, memory = median(time_ratios(row, plain)), growth_mib(row) / growth_mib(plain)
            where = f"- {row['network']}, {size_of(row)}: {row['title']}"
            costs = f"{time:.2f} times the time and {memory:.2f} times the memory"
            if time > 1 - noise and memory > SMALLER:
                lines.append(f"{where}: {costs}; the plain time varies by {noise:.0%}.")
            elif better := _surpassing(row, rows):
                lines.append(f"{where}: {costs}, and {better['title']} takes less of both.")
    for rows in workers:
        best = min(rows, key=lambda row: median(step_ms(row)))
        if best["num_workers"] in (0, None):
            lines.append(
                f"- {rows[0]['network']}, {size_of(rows[0])}, {rows[0]['source']}: data workers; no number of them "
                "is faster than none."
            )
    return lines


def _surpassing(row: Row, rows: Sequence[Row]) -> Row | None:
    if not row["title"].startswith("checkpoints"):
        return None
    others = [other for other in rows if other["title"].startswith("checkpoints") and other is not row]
    return next(
        (
            other
            for other in others
            if median(step_ms(other)) < median(step_ms(row)) and growth_mib(other) < growth_mib(row)
        ),
        None,
    )


def pattern_lines(practices: Sequence[Sequence[Row]]) -> Iterator[str]:
    """Yield the names of the modules of each network."""
    for name in dict.fromkeys(rows[0]["network"] for rows in practices):
        subject = NETWORKS[name]
        yield f"- {name}: first stages `{subject.first_stages}`, nested `{subject.nested}`"
