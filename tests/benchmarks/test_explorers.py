"""Replaying explorers on recorded spaces, and the figures of a tree that chooses kernels, from stored tables."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import classifier, explorers, row_spaces, spaces
from benchmarks.classifier import Measured, figures
from benchmarks.explorers import METHODS, ORDER, OURS, RANDOM, Replayed, regret, replay, summary, table
from benchmarks.recorded_spaces import SPACES, read_spaces
from benchmarks.spaces import Recorded
from polydyn.search.explorers.trust_region import Region
from polydyn.search.hardware import cpu
from tests.support.paths import TESTS

TABLE_FILE = TESTS / "data" / "spaces_small.json.gz"


@pytest.mark.parametrize("name", ["attention", "window", "bytes"])
def test_the_search_finds_the_best_tile_of_recorded_spaces(name: str) -> None:
    """With every seed, as in the table of docs/notes/0007-tuning.md."""
    (space,) = read_spaces([SPACES / f"{name}.csv.gz"])
    costs = space.tables()["one cost"]
    for seed in range(2):
        curve = regret(costs, METHODS[OURS](space, costs, 64, seed), 64)
        assert len(curve) == 64 and (np.diff(curve) <= 0).all() and curve[-1] == 0


def test_files_of_both_kinds_are_read() -> None:
    (window,), small = read_spaces([SPACES / "window.csv.gz"]), read_spaces([TABLE_FILE])
    assert window.points.shape == (200, 3) and list(window.costs) == ["P7", "P14", "P28", "P56", "P112"]
    assert {n: c.shape for n, c in window.tables().items()} == {"one cost": (200, 1), "several sizes": (200, 5)}
    assert (window.tables()["one cost"][:, 0] == window.costs["P28"]).all()
    assert [list(s.tables()) for s in small] == [["one cost"]] * 2
    assert all(sorted(s.order) == list(range(len(s.points))) for s in (window, *small))
    assert len(read_spaces([SPACES])) == 11


def test_replaying_is_a_function_of_files_and_seeds() -> None:
    (space,) = read_spaces([SPACES / "attention.csv.gz"])
    costs = space.tables()["several sizes"]
    a, b = (replay(space, "several sizes", costs, seeds=2) for _ in range(2))
    assert all((a.curves[n] == b.curves[n]).all() for n in METHODS) and table([a]) == table([b])
    assert a.curves[ORDER].shape == (1, 128) and not (a.curves[RANDOM][0] == a.curves[RANDOM][1]).all()
    assert a.unmet() == [] and a.mean(OURS, 64) == (0.0, 0.0), "64 trials measure all 28 tiles"


def test_every_method_measures_each_row_once() -> None:
    (space,) = read_spaces([SPACES / "window.csv.gz"])
    costs = space.tables()["several sizes"]
    for name, method in METHODS.items():
        rows = method(space, costs, 40, 1)
        assert len(rows) == len(set(rows)) == 40, name


@pytest.mark.parametrize("name", ["skinny", "pointwise", "columns"])
def test_spaces_with_rows_are_searched_as_tune_searches_them(name: str) -> None:
    """Every row is among the first four trials, and the best tile of each size is found after 64."""
    (space,) = read_spaces([SPACES / f"{name}.csv.gz"])
    assert len(np.unique(space.points[list(space.order[:4]), 0])) == len(np.unique(space.points[:, 0])) > 1
    costs = space.tables()["several sizes"]
    curve = regret(costs, METHODS[OURS](space, costs, 64, 0), 64)
    assert curve[-1] < 0.5 < regret(costs, METHODS[RANDOM](space, costs, 8, 0), 8)[-1]


def test_a_space_with_rows_is_listed_and_written(tmp_path: Path) -> None:
    """Without measuring: the tiles of all rows, their numbers, and a file that replays read."""
    hardware, problem = cpu(1, lanes=8), row_spaces.PROBLEMS["pointwise"]
    placed = row_spaces.task_of(problem, hardware)
    names, numbers, every = row_spaces.listed(placed.task, hardware, 20)
    assert names[0] == "row" and len(numbers) == 20 + len(placed.task.row_tiles) < every
    assert row_spaces.shapes_of(placed, {"P6": {"N": 1, "H": 2, "W": 3}})["P6"].keys() == placed.extents.keys()
    rows = [[*x, k, 5.0 + k] for k, x in enumerate(numbers.values())]
    lines = row_spaces.head(problem, placed.task, len(numbers), every, 2, {"P6": row_spaces.spread([[1.0, 1.5]])})
    row_spaces.write(tmp_path / "some.csv.gz", lines, [*names, "rank", "P6"], rows)
    (space,) = read_spaces([tmp_path])
    assert len(space.points) == len(numbers) and space.order[0] == 0 and space.single == "P6"
    assert any("transposed product" in line for line in lines) and any("P6=50.0%" in line for line in lines)


def test_the_summary_names_the_worst_space() -> None:
    (tiles,) = read_spaces([SPACES / "tiles.csv.gz"])
    curves = {x: dict.fromkeys(METHODS, np.full((2, 128), x)) for x in (1.0, 3.0)}
    made = [Replayed(replace(tiles, name=n), "one cost", curves[x]) for n, x in (("a", 1.0), ("b", 3.0))]
    assert summary(made).splitlines()[-1].count("2.00, 3.00 (b)") == 4


def test_conditions_that_do_not_hold_are_named() -> None:
    (space,) = read_spaces([SPACES / "window.csv.gz"])
    still = Region(0, 128, 1.0)

    def judged(ours: float, drawn: float, ordered: float, region: Region) -> list[str]:
        curves = {n: np.full((2, 128), x) for n, x in ((OURS, ours), (RANDOM, drawn), (ORDER, ordered))}
        return Replayed(space, "one cost", curves, [[region]] * 2).unmet()

    assert judged(1.0, 1.1, 0.6, replace(still, shrunk=1)) == []
    (random,) = judged(1.0, 0.9, 0.6, replace(still, grown=1))
    (order,) = judged(1.2, 1.3, 0.6, replace(still, restarted=1))
    (regions,) = judged(1.0, 1.1, 0.6, still)
    assert "random 0.90 %" in random and "analytical order 0.60 %" in order and "in 2 of 2 runs" in regions


def test_the_command_prints_tables_and_fails_with_a_condition(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explorers.record, "SCRATCH", tmp_path)
    monkeypatch.setattr(explorers.sys, "argv", ["explorers", str(SPACES / "attention.csv.gz"), "--seeds", "2"])
    assert explorers.main() == 0
    shown = capsys.readouterr().out
    assert "| 64 | trust region | 0.00 ± 0.00 |" in shown and "| attention, one cost |" in shown
    assert (tmp_path / "explorers.json").exists()
    monkeypatch.setattr(explorers.Replayed, "unmet", lambda self: ["a condition"])
    assert explorers.main() == 1 and "not met after 64 trials: a condition" in capsys.readouterr().out


def test_tables_come_back_and_equal_ones_have_equal_bytes(tmp_path: Path) -> None:
    group = spaces.load(TABLE_FILE)[0]
    failed = Recorded(group.name, group.order, group.costs | {group.order[3]: math.inf})
    for name in "ab":
        spaces.save(tmp_path / name, [failed])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    (again,) = spaces.load(tmp_path / "a")
    assert again.order == group.order and math.isinf(again.costs[group.order[3]])
    assert again.costs[group.order[0]] == pytest.approx(group.costs[group.order[0]], rel=1e-4)


def measured() -> Measured:
    """Build a table in which kernel k is best for M in [60 k, 60 k + 60), by a tenth per step; two more are never near
    best.
    """
    shapes = tuple({"M": m} for m in range(1, 300))
    seconds = np.array([[1 + 0.1 * abs(m["M"] // 60 - k) for m in shapes] for k in range(7)])
    seconds[5:] += 1
    return Measured("made", tuple("abcdefg"), shapes, (1,) * len(shapes), (seconds, seconds))


def test_a_learnable_table_is_learned() -> None:
    rows = figures(measured())
    assert rows["measured again"] == {"accuracy": 1.0, "mean_share": 1.0, "within_5_percent": 1.0}
    for name in ("classifier (BladeDISC)", "tree by lost throughput (polydyn)"):
        assert rows[name]["accuracy"] > 0.97 and rows[name]["mean_share"] > 0.99, rows[name]
    assert rows["one kernel for all"]["accuracy"] < 0.4


def test_measured_tables_come_back(tmp_path: Path) -> None:
    classifier.save(tmp_path / "t.gz", [measured()])
    (again,) = classifier.load(tmp_path / "t.gz")
    assert again.shapes == measured().shapes and again.tiles == measured().tiles
    np.testing.assert_allclose(again.halves[0], measured().halves[0], rtol=1e-4)
