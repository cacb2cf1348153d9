"""The benchmark of the practices of training: its cells, what it measures of one, and its page."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.training import PARTS, finished, groups, main
from benchmarks.training_cells import CHILDREN, CONTROL, MIB, NESTED, NETWORKS, PLAIN, PRACTICES, Cell
from benchmarks.training_page import page
from tasks.parts.networks.build import build_network
from tasks.parts.training.activations import fitting_modules

TINY = Cell("mobile_unet", 32, 32, 4, 5)
SIZES = [(64, 64, 16), (256, 256, 8)]
ACCOUNT = {
    **{"weight_bytes": 2 * MIB, "gradient_bytes": 2 * MIB, "optimizer_bytes": 4 * MIB, "average_bytes": 0},
    **{"activation_bytes": 34 * MIB, "recomputed_bytes": 0, "total_bytes": 42 * MIB},
}


def row(
    cell: Cell, step_ms: list[float], growth_mib: float, losses: list[float], **more: Any
) -> dict[str, Any]:
    """What the benchmark records of a cell: a round for each time."""
    rounds = [
        {
            **{"step_ms": [time], "data_wait_ms": [time / 10], "losses": losses, "growth_mib": growth_mib},
            **{"num_workers": cell.num_workers or 0, "workers_mib": 0.0},
        }
        for time in step_ms
    ]
    return {**asdict(cell), "title": cell.title, "rounds": rounds, **more}


def written(**parts: list[dict[str, Any]]) -> str:
    """The page of records that were written by hand."""
    return page(
        {
            **{
                "date": "2000-01-01",
                "cpu_model": "some CPU",
                "isa": ["avx2", "avx512_bf16"],
                "python": "3.11",
            },
            **{"versions": {"torch": "2.13.0"}, "command": "python -m benchmarks.training", "num_rounds": 2},
            **{"num_steps": 5, "warm_up_steps": 3, "parts": {name: parts.get(name, []) for name in PARTS}},
        }
    )


def test_page_says_what_pays_and_what_does_not() -> None:
    losses = [1.5, 1.0]
    practices = [
        row(TINY, [100.0, 200.0], 40, losses),
        row(replace(TINY, practice=CONTROL), [105.0, 196.0], 40, losses),
        row(replace(TINY, practice="bf16_mixed"), [50.0, 90.0], 24, [1.5, 1.01]),
        row(replace(TINY, practice="contiguous"), [110.0, 198.0], 40, losses),
        row(replace(TINY, practice=CHILDREN), [150.0, 300.0], 30, losses),
        row(replace(TINY, practice=NESTED), [130.0, 260.0], 20, losses),
    ]
    text = written(practices=practices)
    assert "2000-01-01" in text and "has AVX512-BF16, not AMX-BF16." in text
    assert "| bf16_mixed | 70.0 | 0.47 (0.45 to 0.50) | 24 | 0.60 | 1.010000 | 1.0e-02 |" in text
    assert f"| {NESTED} | 195.0 | 1.30 (1.30 to 1.30) | 20 | 0.50 | 1.000000 | none |" in text
    losing = text.partition("## What does not pay here")[2].partition("Activation checkpoints were")[0]
    assert "contiguous: 1.04 times the time and 1.00 times the memory; the plain time varies by 5%" in losing
    assert f"{CHILDREN}: 1.50 times the time" in losing and f"and {NESTED} takes less of both" in losing
    assert "bf16_mixed" not in losing and f"{NESTED}: " not in losing


def test_page_shows_waiting_and_the_number_that_null_becomes() -> None:
    workers = [
        row(replace(TINY, num_workers=number), [time], 40, [1.0])
        for number, time in ((0, 100.0), (1, 120.0), (None, 101.0))
    ]
    text = written(workers=workers)
    assert "| null | 0 | 101.0 | 1.01 | 10.0% | 0 | none |" in text
    assert "data workers; no number of them is faster than none." in text


def test_page_puts_the_account_beside_the_peak() -> None:
    large = {**ACCOUNT, "activation_bytes": 68 * MIB, "total_bytes": 76 * MIB}
    memory = [
        row(TINY, [1.0], 50, [1.0], account=ACCOUNT),
        row(replace(TINY, batch_size=8), [1.0], 90, [1.0], account=large),
    ]
    text = written(memory=memory)
    assert "| mobile_unet | plain | 4 | 2.0 | 2.0 | 4.0 | 34.0 | 0.0 | 40.0 | 50.0 | 1.25 |" in text
    assert "one more image takes 10.0 MiB, counted 8.5 (ratio 1.18)" in text


def test_cells_have_files_of_their_own() -> None:
    found = {part: [*groups(part, list(NETWORKS), SIZES, 10)] for part in PARTS}
    assert [len(found[part]) for part in PARTS] == [6, 2, 3]
    distinct = {cell for part in PARTS for cells in found[part] for cell in cells}
    assert len({cell.name for cell in distinct}) == len(distinct)
    assert all(cells[0].title == PLAIN for cells in found["practices"])


@pytest.mark.parametrize("name", NETWORKS)
def test_modules_of_the_checkpoints_exist(name: str) -> None:
    subject = NETWORKS[name]
    network = build_network(subject.config, 6)
    for patterns in (subject.first_stages, subject.nested):
        assert [*fitting_modules(network, patterns, "activation_checkpoints")]


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--steps", "3"])
    assert "--steps is 3, expected more than the 3 that warm up" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cell_is_measured_once_and_keeps_at_least_its_account(tmp_path: Path) -> None:
    cell = replace(TINY, practice=NESTED)
    found = finished(cell, "measure", 0, tmp_path)
    assert len(found["step_ms"]) == 2 and len(found["losses"]) == 5 and found["num_workers"] == 0
    counted = finished(cell, "account", 0, tmp_path)
    assert found["peak_mib"] > found["before_mib"] > 0
    assert found["growth_mib"] > (counted["total_bytes"] - counted["weight_bytes"]) / MIB > 0
    [file] = tmp_path.glob("*_measure_0.json")
    file.write_text(json.dumps({"kept": True}))
    assert finished(cell, "measure", 0, tmp_path) == {"kept": True}


@pytest.mark.slow
@pytest.mark.trial
def test_practices_change_no_loss_but_by_rounding(tmp_path: Path) -> None:
    results = tmp_path / "training.json"
    sizes = ["--sizes", "32x32x4", "--steps", "5", "--rounds", "1", "--parts", "practices"]
    main(["--networks", "mobile_unet", *sizes, "--workspace", str(tmp_path), "--results", str(results)])
    rows = json.loads(results.read_text())["parts"]["practices"]
    losses = {found["title"]: found["rounds"][0]["losses"] for found in rows}
    assert set(PRACTICES) < set(losses)
    for title, own in losses.items():
        if title == "bf16_mixed":
            assert own != losses[PLAIN] and own == pytest.approx(losses[PLAIN], rel=0.1)
        elif title == "contiguous":
            assert own == pytest.approx(losses[PLAIN], rel=1e-2)
        else:
            assert own == losses[PLAIN], title
    assert "## What does not pay here" in results.with_suffix(".md").read_text()
