"""Write the tables of a benchmark: every timed inference, and the time of every layer."""

import csv
from collections.abc import Mapping
from pathlib import Path

from tasks.parts.engines.manifest import LAYERS_FILE
from tasks.parts.measuring.batch_latency import Bursts

LATENCIES_FILE = "latencies.csv"


def write_latencies(bursts_ms: Mapping[int, Bursts], folder: Path) -> None:
    """Write every latency by batch size and round into ``latencies.csv`` of the folder, which may be new."""
    folder.mkdir(exist_ok=True)
    with (folder / LATENCIES_FILE).open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["batch", "round", "latency_ms"])
        for batch, rounds in bursts_ms.items():
            for number, burst in enumerate(rounds):
                writer.writerows([batch, number, f"{value:.5f}"] for value in burst)


def write_layers(engine: Path, layers_ms: Mapping[str, float], folder: Path) -> None:
    """Write the layer table of build_engine with the time of each layer; eager PyTorch has no such table.

    The time is empty if the runtime's profiler does not report the layer.
    """
    if not (engine / LAYERS_FILE).is_file():
        return
    with (
        (engine / LAYERS_FILE).open(encoding="utf-8") as known,
        (folder / LAYERS_FILE).open("w", encoding="utf-8") as timed,
    ):
        reader = csv.DictReader(known)
        writer = csv.DictWriter(timed, [*(reader.fieldnames or ()), "milliseconds"], lineterminator="\n")
        writer.writeheader()
        for row in reader:
            milliseconds = layers_ms.get(row["layer"])
            writer.writerow({**row, "milliseconds": "" if milliseconds is None else f"{milliseconds:.5f}"})
