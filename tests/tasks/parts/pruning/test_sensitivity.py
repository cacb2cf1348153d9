"""What channels cost, from tables written here."""

from pathlib import Path

import pytest

from tasks.core.errors import ArtifactError
from tasks.parts.pruning.sensitivity import GroupCost, check_costs, read_costs

HEADER = "group,layers,channels,channels_removed,ratio,macs_saved_share,score_drop\n"


def table_of(folder: Path, *cuts: tuple[str, int, float]) -> Path:
    """Write cuts (group, channels removed, drop) of groups of 64 channels."""
    path = folder / "sensitivity.csv"
    rows = [f"{group},{group},64,{removed},{removed / 64},0.1,{drop}\n" for group, removed, drop in cuts]
    path.write_text(HEADER + "".join(rows), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("drops", "corners"),
    [
        ((0.01, 0.03, 0.1), ((0, 16, 32, 48), (0, 0.01, 0.03, 0.1))),  # convex as it is
        ((0.02, 0.03, 0.1), ((0, 32, 48), (0, 0.03, 0.1))),  # the second half is cheaper than the first
        ((-0.01, 0.02, 0.01), ((0, 16, 48), (0, 0, 0.01))),  # noise: it may neither be negative nor fall
        ((-0.01, -0.02, -0.01), ((0, 16, 32, 48), (0, 0, 0, 0))),
    ],
)
def test_cost_is_convex_below_the_measured_drops(
    drops: tuple[float, ...], corners: tuple[tuple[float, ...], tuple[float, ...]], tmp_path: Path
) -> None:
    cuts = [("a", removed, drop) for removed, drop in zip((16, 32, 48), drops, strict=True)]
    cost = read_costs(table_of(tmp_path, *cuts))["a"]
    assert cost == GroupCost(64, *corners)


def test_cost_between_measured_cuts_is_interpolated(tmp_path: Path) -> None:
    cost = read_costs(table_of(tmp_path, ("a", 16, 0.01), ("b", 8, 0.5), ("a", 32, 0.03)))["a"]
    assert cost.between(0, 8) == pytest.approx(0.005)
    assert cost.between(8, 24) == pytest.approx(0.015)
    assert cost.between(32, 32) == 0


def test_table_that_is_missing_damaged_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ArtifactError, match=r"no table of cuts .*Run rank_groups again, or set prune\.ranking"
    ):
        read_costs(tmp_path / "nowhere.csv")
    path = table_of(tmp_path, ("a", 16, 0.01))
    path.write_text(path.read_text().replace("0.01\n", "much\n"))
    with pytest.raises(ArtifactError, match=r"sensitivity\.csv: no table of cuts .*'much'"):
        read_costs(path)
    path.write_bytes(b"\x93\x00safetensors")
    with pytest.raises(ArtifactError, match=r"no table of cuts"):
        read_costs(path)
    with pytest.raises(ArtifactError, match=r"no rows.*report of rank_groups says why.*to across_layers"):
        read_costs(table_of(tmp_path))


def test_table_of_another_network_is_refused(tmp_path: Path) -> None:
    costs = read_costs(table_of(tmp_path, ("a", 16, 0.01)))
    check_costs(costs, {"a": 64, "narrow": 8})
    with pytest.raises(ArtifactError, match=r"group 'a' of 64 channels, but the network has no such group"):
        check_costs(costs, {"b": 64})
    with pytest.raises(
        ArtifactError, match=r"the network has 48 channels: .*Run rank_groups on the checkpoint"
    ):
        check_costs(costs, {"a": 48})
