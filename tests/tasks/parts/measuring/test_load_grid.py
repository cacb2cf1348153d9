"""Which cell is the best, and whether a tuning pays: windows of known speeds instead of engines."""

from collections.abc import Mapping

import numpy as np
import pytest
import yaml

from tasks.core.config import typed_config
from tasks.parts.engines.target import Target
from tasks.parts.engines.tuning import Tuning
from tasks.parts.measuring.load_grid import LoadOptions, Measure, Window, measure_grid, plan_grid, tune
from tasks.parts.measuring.load_report import EngineLoad, LoadCell, Setting, front_of
from tasks.parts.measuring.reports import Timed
from tests.conftest import REPOSITORY

OPTIONS = LoadOptions(
    max_p99_ms=20.0,
    unloaded_factor=3.0,
    batches=[1, 4, 16],
    lanes=[1, 2, 4],
    threads=[1, 2],
    window_s=0.5,
    num_rounds=3,
    num_tuning_rounds=20,
    budget_cell_s=20.0,
    arrival_shares=[0.5, 1.0],
    num_refinements=2,
    min_arrivals_s=1.0,
    max_arrivals_s=10.0,
    seed=0,
    warm_up_ms=0.0,
    timed=Timed.frame,
    timeout_s=60.0,
)


def target(name: str = "cpu_onnxruntime", **changes: object) -> Target:
    fields = yaml.safe_load((REPOSITORY / "conf" / "target" / f"{name}.yaml").read_text(encoding="utf-8"))
    del fields["work_pool"]
    declared: Target = typed_config(Target, fields | changes, f"target.{name}")
    return declared


class Engine:
    """Takes 1 ms for a call and 1 ms more for each image; lanes beyond two only wait; tunings change the speed."""

    def __init__(self, gains: Mapping[Tuning, float] | None = None, noise: float = 0.0) -> None:
        self._gains, self._noise = gains or {}, noise
        self._random = np.random.default_rng(0)
        self.num_windows: dict[Setting, int] = {}

    def __call__(self, setting: Setting, number: int) -> Window:
        self.num_windows[setting] = self.num_windows.get(setting, 0) + 1
        call_ms = (1 + setting.batch) * max(1.0, setting.lanes / 2) / self._gains.get(setting.tuning, 1.0)
        call_ms *= self._random.lognormal(0, self._noise)
        per_s = 1000 * setting.lanes / call_ms
        latencies_ns = np.full(round(per_s * OPTIONS.window_s), 1e6 * call_ms).astype(np.int64)
        latencies_ns[::50] *= 3  # 2 % of the calls
        return Window(setting.batch * per_s, latencies_ns.tolist())


def grid(measure: Measure, options: LoadOptions = OPTIONS) -> list[LoadCell]:
    return measure_grid(measure, plan_grid(target(max_batch=16), options, num_cpus=2), options)


def with_bound(max_p99_ms: float | None) -> LoadOptions:
    return LoadOptions(**(vars(OPTIONS) | {"max_p99_ms": max_p99_ms}))


@pytest.mark.parametrize(
    ("max_p99_ms", "batch", "lanes"),
    [
        (None, 16, 2),
        (60.0, 16, 2),  # 17 ms, and 51 ms for 2 % of the calls
        (50.0, 4, 2),
        (15.5, 4, 2),
        (7.0, 1, 2),
    ],
)
def test_best_cell_has_the_most_images_per_second_within_the_bound(
    max_p99_ms: float | None, batch: int, lanes: int
) -> None:
    engine, options = Engine(), with_bound(max_p99_ms)
    tuned = tune(engine, grid(engine, options), options, target("cpu_torch"))
    assert tuned is not None
    setting = tuned.best.setting
    assert (setting.batch, setting.lanes) == (batch, lanes)
    assert tuned.best.throughput_per_s == pytest.approx(1000 * lanes * batch / (1 + batch))
    assert tuned.best.latency_ms_p99 == pytest.approx(3 * (1 + batch), rel=0.01)


def test_bound_that_no_cell_holds_has_no_best_cell() -> None:
    engine, options = Engine(), with_bound(5.0)
    assert tune(engine, grid(engine, options), options, target()) is None


def test_only_cells_that_could_be_the_best_are_measured_until_their_p99_is_known() -> None:
    engine = Engine()
    cells = grid(engine)
    assert [cell.throughput_per_s for cell in cells] == sorted(
        (cell.throughput_per_s for cell in cells), reverse=True
    )
    known = {cell.setting for cell in cells if cell.latency_ms_p99 is not None}
    longer = {setting for setting, count in engine.num_windows.items() if count > OPTIONS.num_rounds}
    assert {cell.setting for cell in front_of(cells)} <= known
    assert any(setting.batch == 16 for setting in longer)
    slow = Setting(16, 1, Tuning(1))
    assert slow not in longer and slow not in known


def test_budget_ends_a_cell_that_never_gets_its_p99() -> None:
    engine, options = Engine({Tuning(1): 0.1, Tuning(2): 0.1}), with_bound(None)
    cells = grid(engine, options)
    most = round(OPTIONS.budget_cell_s / OPTIONS.window_s)
    assert max(engine.num_windows.values()) <= most
    assert not [cell for cell in cells if cell.setting.batch == 16 and cell.latency_ms_p99 is not None]


@pytest.mark.parametrize(
    ("gain", "noise", "is_accepted"),
    [(1.2, 0.005, True), (1.0, 0.005, False), (0.8, 0.005, False), (1.02, 0.2, False)],
)
def test_tuning_is_kept_only_if_it_certainly_pays(gain: float, noise: float, is_accepted: bool) -> None:
    better = Tuning(1, has_arena=False)
    engine, options = Engine({better: gain}, noise), with_bound(None)
    options = LoadOptions(**(vars(options) | {"threads": [1]}))
    tuned = tune(engine, grid(engine, options), options, target())
    assert tuned is not None
    found = {one.tuning: one for one in tuned.tried}[better]
    assert found.is_accepted == is_accepted
    assert tuned.best.setting.tuning.has_arena != is_accepted
    if noise < 0.1:
        assert found.factor == pytest.approx(gain, rel=0.02) and tuned.aa_spread < 0.02


def test_tuning_that_breaks_the_bound_is_not_kept() -> None:
    better = Tuning(1, has_arena=False)

    def measure(setting: Setting, number: int) -> Window:
        if setting.tuning == better:  # twice as fast, and rarely very slow
            return Window(2000.0, [500_000] * 980 + [90_000_000] * 20)
        return Window(1000.0, [1_000_000] * 1000)

    cell = LoadCell(Setting(1, 1, Tuning(1)), 1000.0, 1000.0, 1000.0, 1.0, 1.0, 1000)
    tuned = tune(measure, [cell], OPTIONS, target())
    assert tuned is not None and tuned.best.setting.tuning == Tuning(1)
    assert {one.tuning: (one.factor, one.is_accepted) for one in tuned.tried}[better] == (2.0, False)


def test_cell_that_holds_the_bound_only_once_gives_way_to_the_next() -> None:
    lucky, next_best = (Setting(batch, 1, Tuning(1)) for batch in (4, 1))

    def measure(setting: Setting, number: int) -> Window:
        slow_ms = 50 if setting.batch == 4 else 5
        return Window(100.0 * setting.batch, [1_000_000 * slow_ms] * 1000)

    cells = [
        LoadCell(setting, 100.0 * setting.batch, 1.0, 1.0, 1.0, 10.0, 1000) for setting in (lucky, next_best)
    ]
    tuned = tune(measure, cells, OPTIONS, target("cpu_torch"))
    assert tuned is not None and tuned.best.setting.batch == 1


def test_grid_leaves_out_what_the_target_or_the_machine_cannot_do() -> None:
    settings = plan_grid(target(max_batch=4), OPTIONS, num_cpus=2)
    assert {setting.batch for setting in settings} == {1, 4}
    threads = {(setting.lanes, setting.tuning.num_threads) for setting in settings}
    assert threads == {(1, 1), (1, 2), (2, 1), (2, 2), (4, 1)}  # four lanes of two would be four per CPU
    assert plan_grid(target(max_batch=1), with_lanes([64]), num_cpus=2) == [Setting(1, 1, Tuning(1))]
    on_gpu = plan_grid(target("cuda_torch"), OPTIONS, num_cpus=2)
    assert {setting.tuning for setting in on_gpu} == {Tuning(target("cuda_torch").num_threads)}


def with_lanes(lanes: list[int]) -> LoadOptions:
    return LoadOptions(**(vars(OPTIONS) | {"lanes": lanes}))


def test_front_is_what_nothing_beats_and_the_best_cell_stands_in_place_of_its_cell() -> None:
    def cell(batch: int, per_s: float, p99_ms: float | None) -> LoadCell:
        return LoadCell(Setting(batch, 1, Tuning(1)), per_s, per_s, per_s, 1.0, p99_ms, 1000)

    cells = [
        cell(16, 900, 40.0),
        cell(8, 800, 45.0),
        cell(4, 700, 10.0),
        cell(2, 600, None),
        cell(1, 300, 2.0),
    ]
    assert [one.setting.batch for one in front_of(cells)] == [16, 4, 1]
    again = cell(4, 690, 11.0)
    load = EngineLoad("sha", "float", tuple(cells), 0.01, (), again, None)
    assert load.front == (cells[0], again, cells[4])
    unknown = cell(32, 950, None)
    assert EngineLoad("sha", "float", tuple(cells), 0.01, (), unknown, None).front[0] == unknown
