"""Replaying explorers on recorded spaces, and the figures of a tree that chooses kernels, from stored tables."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from benchmarks import classifier, explorers, spaces
from benchmarks.classifier import Measured, figures
from benchmarks.explorers import (
    ALIGNED_FIRST,
    RANDOM,
    REGIONS,
    Curves,
    Replayed,
    as_json,
    curve,
    draw,
    error,
    needed,
    replay,
)
from benchmarks.spaces import Recorded
from polydyn.testing.simulated import random_search, regret
from tests.support.paths import TESTS

TABLE_FILE = TESTS / "data" / "spaces_small.json.gz"


def test_the_trust_region_wins_on_a_recorded_space() -> None:
    _, group = spaces.load(TABLE_FILE)
    assert len(group.space) == len(group.costs) >= 400
    done = replay(group, seeds=4, trials=48)
    assert done.curves[ALIGNED_FIRST].shape == (1, 48) and done.curves[REGIONS].shape == (4, 48)
    assert all((np.diff(c, axis=1) <= 0).all() and (c >= 0).all() for c in done.curves.values())
    assert done.beaten, {n: c[:, -1].mean() for n, c in done.curves.items()}


def test_replaying_is_a_function_of_table_and_seeds() -> None:
    group = spaces.load(TABLE_FILE)[0]
    a, b = (replay(group, seeds=2, trials=16).curves for _ in range(2))
    assert all((a[n] == b[n]).all() for n in a)
    assert not (a[RANDOM][0] == a[RANDOM][1]).all()


def test_a_replay_stops_with_the_batch_that_has_the_optimum() -> None:
    group = spaces.load(TABLE_FILE)[0]
    found = curve(random_search, group.space, group.costs, 1000, 3)
    first = found.index(0.0)
    assert len(found) == (first // 8 + 1) * 8 and set(found[first:]) == {0.0}
    every = regret(
        random_search(group.space, lambda ts: [group.costs[t] for t in ts], 1000, 3), min(group.costs.values())
    )
    assert every[: len(found)] == found and set(every[first:]) == {0.0}


def test_of_equals_at_the_optimum_the_quicker_one_wins() -> None:
    quick, slow, lost = np.array([[0.5, 0.0, 0.0]]), np.array([[0.5, 0.5, 0.0]]), np.array([[0.5, 0.5, 0.1]])
    group = spaces.load(TABLE_FILE)[0]

    def wins(ours: Curves, aligned: Curves) -> bool:
        return Replayed(group, {RANDOM: lost, ALIGNED_FIRST: aligned, REGIONS: ours}, {}).beaten

    assert wins(quick, slow) and wins(slow, lost)
    assert not wins(slow, quick) and not wins(slow, slow) and not wins(lost, slow)


def test_needed_trials_and_standard_errors() -> None:
    curves = np.array([[0.1, 0.001, 0.0], [0.3, 0.2, 0.002]])
    assert needed(curves).tolist() == [2, 4]
    assert error(curves)[0] == pytest.approx(0.1)
    assert (error(curves[:1]) == 0).all()


def test_tables_come_back_and_equal_ones_have_equal_bytes(tmp_path: Path) -> None:
    group = spaces.load(TABLE_FILE)[0]
    failed = Recorded(group.name, group.order, group.costs | {group.order[3]: math.inf})
    for name in "ab":
        spaces.save(tmp_path / name, [failed])
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    (again,) = spaces.load(tmp_path / "a")
    assert again.order == group.order and math.isinf(again.costs[group.order[3]])
    assert again.costs[group.order[0]] == pytest.approx(group.costs[group.order[0]], rel=1e-4)


def test_curves_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [as_json(replay(spaces.load(TABLE_FILE)[0], seeds=2, trials=12))]
    assert draw(rows, tmp_path / "curves.png") and (tmp_path / "curves.png").stat().st_size > 1000


def test_a_lost_replay_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(explorers.record, "SCRATCH", tmp_path)
    monkeypatch.setattr(explorers, "draw", lambda rows, path: True)
    monkeypatch.setattr(explorers, "AT", (12,))
    monkeypatch.setattr(explorers.sys, "argv", ["explorers", "--records", str(TABLE_FILE), "--seeds", "1"])
    for beaten, code in ((True, 0), (False, 1)):
        monkeypatch.setattr(explorers.Replayed, "beaten", property(lambda _, b=beaten: b))
        assert explorers.main() == code


def table() -> Measured:
    """Build a table in which kernel k is best for M in [60 k, 60 k + 60), by a tenth per step; two more are never near
    best.
    """
    shapes = tuple({"M": m} for m in range(1, 300))
    seconds = np.array([[1 + 0.1 * abs(m["M"] // 60 - k) for m in shapes] for k in range(7)])
    seconds[5:] += 1
    return Measured("made", tuple("abcdefg"), shapes, (1,) * len(shapes), (seconds, seconds))


def test_a_learnable_table_is_learned() -> None:
    rows = figures(table())
    assert rows["measured again"] == {"accuracy": 1.0, "mean_share": 1.0, "within_5_percent": 1.0}
    for name in ("classifier (BladeDISC)", "tree by lost throughput (polydyn)"):
        assert rows[name]["accuracy"] > 0.97 and rows[name]["mean_share"] > 0.99, rows[name]
    assert rows["one kernel for all"]["accuracy"] < 0.4


def test_measured_tables_come_back(tmp_path: Path) -> None:
    classifier.save(tmp_path / "t.gz", [table()])
    (again,) = classifier.load(tmp_path / "t.gz")
    assert again.shapes == table().shapes and again.tiles == table().tiles
    np.testing.assert_allclose(again.halves[0], table().halves[0], rtol=1e-4)
