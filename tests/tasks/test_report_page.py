"""The engine report in a browser without a network: limits, two engines compared, roofs, images, and its size."""

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from benchmarks.picking import CHROMIUM, DRIVER, opened_browser
from tasks.core.reports import write_json
from tasks.parts.data.accuracy import Accuracy, AccuracyReport
from tasks.parts.data.answers import ANSWERS_FILE, Answers, write_answers
from tasks.parts.explain.details import write_details
from tasks.parts.explain.engine_view import EngineView
from tasks.parts.explain.report import explain_engine
from tasks.parts.explain.waterfall import compare
from tasks.parts.measuring.machine_state import Machine
from tasks.parts.measuring.reports import BenchmarkReport, Race, SpeedRatio, Timed
from tasks.parts.selection.engine_row import (
    EngineRow,
    Losses,
    Measured,
    Speed,
    Unseen,
    UnseenVerdict,
    Verdict,
)
from tasks.parts.selection.findings import Findings
from tasks.parts.selection.gallery import make_gallery
from tasks.parts.selection.markdown import render_markdown
from tasks.parts.selection.page import picks_and_fronts_first, render_page
from tasks.parts.selection.page_data import page_data
from tasks.parts.selection.stage_folders import StageFolders
from tasks.parts.selection.verdicts import Reference
from tests.tasks.conftest import Workshop
from tests.tasks.parts.explain.engines import ROOFS, convolutions, quantize, view

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (CHROMIUM.exists() and DRIVER.exists()),
        reason=f"needs {CHROMIUM} and {DRIVER} (Debian: chromium, chromium-driver)",
    ),
]
MACHINE = Machine("0123456789abcdef", "A CPU", ("avx2",), None, {})
MOST_BYTES = 2_000_000
CLASSES = ("background", "three", "<b>seven</b>")


def engine_row(number: int, target: str, num_variants: int) -> EngineRow:
    """An engine of a target: the higher its number, the faster it is; all but every third are on the front."""
    rank = number / num_variants
    is_reduced = number >= num_variants // 2
    latency_ms, loss = 2.0 * 0.2**rank, 0.04 * rank
    is_dominated = number % 3 == 2
    score = 0.6 * (1 - loss) - 0.01 * is_dominated
    loss = 1 - score / 0.6
    verdict = Verdict.ACCEPT if loss + 0.002 < 0.02 else Verdict.TOO_LOSSY
    speed = Speed(
        *(latency_ms, 0.98 * latency_ms, 1.02 * latency_ms, 1.1 * latency_ms, 1.3 * latency_ms),
        *(1000 / latency_ms, 1800 / latency_ms, 20 / latency_ms, 19 / latency_ms, 21 / latency_ms, 0.01),
        is_inconclusive=False,
        frames_per_s=1000.0,
        decode_ms_p50=0.1,
        pre_ms_p50=0.0,
        run_ms_p50=latency_ms,
        post_ms_p50=0.0,
        load_ms=50.0,
        first_call_ms=3 * latency_ms,
        memory_mib=30.0 + number,
        memory_total_mib=130.0 + number,
        gpu_memory_mib=None,
        energy_mj_per_image=None,
    )
    losses = Losses(loss, loss - 0.002, loss + 0.002, "", 0.0, 0.0, 0.0, None, None, None, None)
    iou = {name: score + 0.1 - 0.1 * place for place, name in enumerate(CLASSES)}
    measured = Measured(
        accuracy=Accuracy("mIoU", score, None, 0.9, iou),
        losses=losses,
        unseen=None,
        speed=speed,
        size_bytes=300_000 - 1000 * number,
        compressed_bytes=200_000,
        build_s=1.5,
        macs=23_000_000,
        engine_sha256=f"{number:064x}",
        reference_sha256="0" * 64,
    )
    return EngineRow(
        variant=f"v{number:02}",
        target=target,
        verdict=verdict,
        reason=f"mIoU {score:.4f}, {100 * loss:.2f} % below, allowed are 2 %; p50 {latency_ms:.3g} ms",
        pareto=not is_dominated,
        picked=False,
        precision="int8" if is_reduced else "f32",
        macs_share={},
        macs_share_quantized=None,
        measured=measured,
        suspect_layers=(),
        conditions={"Machine": "0" * 16, "CPU": "A CPU", "Reference": "eager PyTorch on the CPU"},
    )


UNSEEN = Unseen("test", 0.59, 0.01, 0.005, 0.015, UnseenVerdict.confirmed, "")


def make_findings(num_variants: int, num_targets: int) -> Findings:
    """Engines of several targets, of which the fastest accepted one is picked."""
    rows: list[EngineRow] = []
    for target in (f"target_{number:02}" for number in range(num_targets)):
        engines = [engine_row(number, target, num_variants) for number in range(num_variants)]
        best = [row for row in engines if row.verdict is Verdict.ACCEPT and row.pareto][-1]
        assert best.measured is not None
        unseen = dataclasses.replace(best.measured, unseen=UNSEEN)
        picked = dataclasses.replace(best, picked=True, measured=unseen)
        rows += [picked if row is best else row for row in engines]
    reference = Reference("v00", "target_00", "mIoU", 0.6, None)
    return Findings(rows, {}, ["v00", "v01"], [], reference, 0.02, 0.02, None, "test", {})


def measured_report(names: list[str]) -> BenchmarkReport:
    """The ratios of all pairs; a later engine is 1.1 times as fast as the one before it."""
    ratios = tuple(
        SpeedRatio(second, first, 1.1 ** (names.index(second) - names.index(first)), 1.0, 9.0)
        for first, second in itertools.combinations(names, 2)
    )
    race = Race(
        ratios, SpeedRatio("control", "first", 1.0, 0.99, 1.01), 0.95, 6, 0.001, (), 18.6, 40, 0, (0,)
    )
    return BenchmarkReport({}, "0" * 64, "cpu_torch", Timed.frame, race, False, MACHINE, None)


Report = Callable[[int, int], Path]


@pytest.fixture(scope="module")
def layers(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineView, EngineView]:
    """A float engine and a quantized one, really built and timed."""
    folder, model = tmp_path_factory.mktemp("layers"), convolutions(16, 32, 32, 32, has_sum=True)
    target = workshop.target("cpu_onnxruntime")
    return (
        view(model, target, folder, name="float"),
        view(quantize(model, float_nodes={"conv2"}), target, folder, name="int8"),
    )


def views_of(findings: Findings, layers: tuple[EngineView, EngineView], target: str) -> dict[str, EngineView]:
    """The two real engines under the names and with the latencies of all engines of a target."""
    found = {}
    for row in (row for row in findings.rows if row.target == target and row.measured):
        assert row.measured is not None
        base = layers[row.precision == "int8"]
        manifest = dataclasses.replace(base.manifest, sha256=row.measured.engine_sha256)
        latency_ms = row.measured.speed.latency_ms_p50
        found[row.variant] = dataclasses.replace(
            base, name=row.variant, manifest=manifest, latency_ms=latency_ms
        )
    return found


@pytest.fixture(scope="module")
def write_report(
    workshop: Workshop, layers: tuple[EngineView, EngineView], tmp_path_factory: pytest.TempPathFactory
) -> Report:
    """Write the page of so many variants on so many targets."""

    def write(num_variants: int, num_targets: int) -> Path:
        root = tmp_path_factory.mktemp("report")
        findings = make_findings(num_variants, num_targets)
        explanations: dict[str, Path] = {}
        for target in findings.targets:
            views = views_of(findings, layers, target)
            explanations[target] = root / "explain" / target
            explanations[target].mkdir(parents=True)
            explained = {name: explain_engine(engine, None) for name, engine in views.items()}
            write_details(explanations[target], explained, views, ROOFS, measured_report(list(views)))
        folders = StageFolders(*(root / name for name in ("builds", "validations", "benchmarks", "diffs")))
        write_masks(findings, folders, workshop.data)
        gallery = make_gallery(picks_and_fronts_first(findings.rows), folders, workshop.data, "v00-target_00")
        file = root / "report.html"
        data = page_data(findings, explanations, gallery)
        file.write_text(render_page(findings, data), encoding="utf-8")
        (root / "report.md").write_text(render_markdown(findings, data), encoding="utf-8")
        return file

    return write


def write_masks(findings: Findings, folders: StageFolders, data: Path) -> None:
    """Let each engine be wrong in the first pixels of an image, more of them the higher its number."""
    from tasks.parts.data.dataset import open_split

    masks_NHW = np.asarray(open_split(data, "val")[1])
    for row in findings.rows:
        folder = folders.of(row.variant, row.target)["validate"]
        folder.mkdir(parents=True)
        wrong_NHW, count = np.array(masks_NHW), int(row.variant.removeprefix("v"))
        wrong_NHW[0, 0, :count] = (wrong_NHW[0, 0, :count] + 1) % len(CLASSES)
        answers = Answers.of(len(CLASSES))
        answers.add(wrong_NHW)
        write_answers(folder / ANSWERS_FILE, answers)
        report = AccuracyReport("built", "", "0" * 64, "val", "test", len(masks_NHW), None)
        write_json(folder / "report.json", dataclasses.asdict(report))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Chrome"]:
    with opened_browser(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def page_of_30(write_report: Report) -> Path:
    return write_report(10, 3)


def opened(browser: "Chrome", page: Path, state: str = "") -> None:
    """Load the page anew and check that its script raised nothing."""
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(f"{page.as_uri()}#{state}")
    assert not [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def text_of(browser: "Chrome", selector: str) -> str:
    return str(browser.execute_script("return document.querySelector(arguments[0]).textContent", selector))


def move(browser: "Chrome", control: str, value: Any, event: str) -> None:
    """Set a control to a value, as a person would."""
    browser.execute_script(
        "const c = document.getElementById(arguments[0]); c.value = arguments[1];"
        "c.dispatchEvent(new Event(arguments[2]))",
        *(control, value, event),
    )


def number_of(browser: "Chrome", selector: str) -> int:
    return int(browser.execute_script("return document.querySelectorAll(arguments[0]).length", selector))


def test_30_engines_fit_and_the_pick_is_shown_first(browser: "Chrome", page_of_30: Path) -> None:
    assert page_of_30.stat().st_size < MOST_BYTES
    opened(browser, page_of_30)
    picks = {row.target: row.variant for row in make_findings(10, 3).rows if row.picked}
    assert text_of(browser, "#choice strong") == picks["target_00"]
    assert "python -m flows.pick --target target_00 --download target_00" in text_of(browser, "#choice code")
    assert number_of(browser, ".point") == 30 and number_of(browser, "table.sortable tbody tr") == 30
    titles = browser.execute_script(
        "return [...document.querySelectorAll('.point title')].map(t => t.textContent)"
    )
    [dominated] = [text for text in titles if text.startswith("v05 on target_00")]
    assert re.search(r"dominated by v0[69]", dominated)


def test_limits_pick_anew_and_say_what_the_next_one_costs(browser: "Chrome", page_of_30: Path) -> None:
    opened(browser, page_of_30, "target=target_01")
    chosen = text_of(browser, "#choice strong")
    move(browser, "loss", 200, "input")
    faster = text_of(browser, "#choice strong")
    assert faster == "v09" and faster > chosen
    assert "None of the front is faster" in text_of(browser, "#choice")
    assert "Next more accurate" in text_of(browser, "#choice")
    move(browser, "loss", 0, "input")
    assert text_of(browser, "#choice").startswith("No engine is within these limits") or (
        text_of(browser, "#choice strong") == "v00"
    )
    kept = browser.current_url
    assert "target=target_01" in kept and "loss=0" in kept
    opened(browser, page_of_30, kept.split("#")[1].replace("loss=0", "loss=1"))
    assert text_of(browser, "#choice strong") == "v09"


def test_limit_of_the_loss_holds_on_the_original_files_too_a1(
    browser: "Chrome", page_of_30: Path, tmp_path: Path
) -> None:
    text = page_of_30.read_text(encoding="utf-8")
    start = text.index(">", text.index('id="report-data"')) + 1
    data, end = json.JSONDecoder().raw_decode(text, start)
    variant, loss = (data["engine_fields"].index(name) for name in ("variant", "frame_loss_high"))
    for engine in data["engines"]:
        engine[loss] = 0.5 if engine[variant] == "v09" else None
    (tmp_path / "page.html").write_text(text[:start] + json.dumps(data) + text[end:], encoding="utf-8")
    opened(browser, tmp_path / "page.html", "target=target_01&loss=0.1")
    assert text_of(browser, "#choice strong") not in ("", "v09")


def test_limit_in_milliseconds_leaves_out_slower_engines(browser: "Chrome", page_of_30: Path) -> None:
    opened(browser, page_of_30, "target=target_00&ms=0.6")
    rows = {row.variant: row for row in make_findings(10, 3).rows if row.target == "target_00"}
    text = text_of(browser, "#choice")
    fitting = [
        row
        for row in rows.values()
        if row.measured
        and row.measured.losses
        and row.measured.speed.latency_ms_p50_high <= 0.6
        and row.measured.losses.score_rel_loss_high <= 0.02
    ]
    assert not fitting and text.startswith("No engine is within these limits. The most accurate one, v00")
    opened(browser, page_of_30, "target=target_00&ms=0.6&loss=0.05")
    chosen = rows[text_of(browser, "#choice strong")].measured
    assert chosen is not None and chosen.speed.latency_ms_p50_high <= 0.6


def test_two_engines_are_compared_as_explain_does(
    browser: "Chrome", page_of_30: Path, layers: tuple[EngineView, EngineView]
) -> None:
    opened(browser, page_of_30, "target=target_00&a=v00&b=v09")
    views = views_of(make_findings(10, 3), layers, "target_00")
    steps = compare(views["v00"], views["v09"])
    bars = browser.execute_script(
        "return [...document.querySelectorAll('#pair svg g')].map(g => "
        "[...g.querySelectorAll('text')].map(t => t.textContent))"
    )
    assert bars[0][0] == "v00" and bars[-1][0] == "v09"
    shown = {name: float(value.replace("\N{MINUS SIGN}", "-")) for name, value in bars[1:-1]}
    for part in {step.part for step in steps}:
        expected = sum(step.milliseconds for step in steps if step.part is part)
        assert shown.get(part.value.replace("_", " "), 0.0) == pytest.approx(expected, abs=2e-3)
    assert sum(shown.values()) == pytest.approx(views["v09"].latency_ms - views["v00"].latency_ms, abs=4e-3)
    assert "v09 brings 2.36x over v00" in text_of(browser, "#pair p")

    captions = browser.execute_script(
        "return [...document.querySelectorAll('#pair caption')].map(c => c.textContent)"
    )
    num_steps = sum(bool(step.before or step.after) for step in steps)
    assert f"Layers, {num_steps} of {num_steps} shown" in captions
    assert any(caption.startswith("Precision transitions") for caption in captions)
    assert any(caption.startswith("IoU of each class") for caption in captions)
    assert "<b>seven</b>" in text_of(browser, "#pair")

    largest = max(abs(step.milliseconds) for step in steps if step.before or step.after)
    move(browser, "delta", largest, "input")
    captions = browser.execute_script(
        "return [...document.querySelectorAll('#pair caption')].map(c => c.textContent)"
    )
    [shown_layers] = [caption for caption in captions if caption.startswith("Layers")]
    assert int(shown_layers.split()[1]) < num_steps
    assert "delta=" in browser.current_url


def test_swapped_engines_give_the_same_steps_the_other_way_round(browser: "Chrome", page_of_30: Path) -> None:
    def steps() -> dict[str, float]:
        bars = browser.execute_script(
            "return [...document.querySelectorAll('#pair svg g')].map(g => "
            "[...g.querySelectorAll('text')].map(t => t.textContent))"
        )
        return {name: float(value.replace("\N{MINUS SIGN}", "-")) for name, value in bars[1:-1]}

    opened(browser, page_of_30, "target=target_00&a=v00&b=v09")
    forth = steps()
    opened(browser, page_of_30, "target=target_00&a=v09&b=v00")
    assert steps() == pytest.approx({name: -value for name, value in forth.items()})


def test_images_on_which_two_engines_differ_are_side_by_side(browser: "Chrome", page_of_30: Path) -> None:
    opened(browser, page_of_30, "target=target_00&a=v00&b=v09")
    assert number_of(browser, "#images .answers") == 1
    assert (
        number_of(browser, "#images .answers canvas") == 4 and number_of(browser, "#images .answers img") == 1
    )
    assert "of the pixels differ" in text_of(browser, "#images")
    changed = browser.execute_script(
        "const c = document.querySelectorAll('#images canvas')[3];"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
        "let n = 0; for (let i = 0; i < d.length; i += 4) n += d[i + 1] < 100; return n"
    )
    assert 0 < changed <= 9


def test_roofs_show_a_dot_for_each_layer_with_multiply_adds(
    browser: "Chrome", page_of_30: Path, layers: tuple[EngineView, EngineView]
) -> None:
    opened(browser, page_of_30, "target=target_00&a=v00&b=v09")
    dots = [row for row in layers[1].rows if row.macs and row.macs_per_byte and row.milliseconds > 0]
    assert number_of(browser, "#roofs circle") == len(dots)
    assert "100 GMAC/s" in text_of(browser, "#roofs") and "5.0 GB/s" in text_of(browser, "#roofs")


def test_markdown_tells_the_same(page_of_30: Path, layers: tuple[EngineView, EngineView]) -> None:
    text = page_of_30.with_name("report.md").read_text(encoding="utf-8")
    findings = make_findings(10, 3)
    pick = next(row for row in findings.picks if row.target == "target_00")
    costs = text.split("## What the next engine costs")[1].split("##")[0].strip().splitlines()
    assert len(costs) == 2 + 3 and "loses up to" in costs[2]
    assert f"### {pick.variant} on target_00" in text
    views = views_of(findings, layers, "target_00")
    slowest = max(views.values(), key=lambda engine: engine.latency_ms)
    assert f"{pick.variant} brings" in text and f"over {slowest.name}" in text
    assert "| remainder | " in text and "of those that the report keeps: 0." in text


def test_1000_engines_fit_with_picks_and_fronts_first(browser: "Chrome", write_report: Report) -> None:
    page = write_report(50, 20)
    assert page.stat().st_size < MOST_BYTES
    opened(browser, page)
    assert number_of(browser, "table.sortable tbody tr") == 50 and number_of(browser, ".point") == 1000
    shown = browser.execute_script(
        "return [...document.querySelectorAll('table.sortable tbody tr .chip')].map(c => c.textContent)"
    )
    assert shown[:20] == ["pick"] * 20
    browser.execute_script("document.getElementById('more').click()")
    assert number_of(browser, "table.sortable tbody tr") == 1000 and number_of(browser, "#more") == 0
    move(browser, "target", "target_19", "change")
    assert "target=target_19" in browser.current_url
