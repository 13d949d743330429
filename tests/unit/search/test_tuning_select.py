"""Set selection, and the instances it is made for."""

from __future__ import annotations

import numpy as np
import pytest

from polydyn.errors import ScheduleError
from polydyn.search.backbone import Tile
from polydyn.search.select import (
    assign,
    cover,
    expected_shapes,
    fastest,
    joint,
    near_best,
    quality,
    sample_free_shapes,
    top_n,
    top_ranked,
    vote,
    winners,
)
from polydyn.shapes.sizes import Sizes
from polydyn.testing.simulated import gemm

# rows: a specialist per pair of instances, and an all-rounder at 96 %
TABLE = np.array([[9, 9, 1, 1, 1, 1], [1, 1, 9, 9, 1, 1], [1, 1, 1, 1, 9, 9], [8.64] * 6], float)
EVEN = [1.0] * 6


def test_voting_for_one_keeps_the_specialists_and_for_two_the_all_rounder() -> None:
    assert vote(TABLE, EVEN, 1).kernels == (0, 1, 2)
    assert vote(TABLE, EVEN, 2).kernels == (3,)
    assert quality(TABLE, vote(TABLE, EVEN, 2), EVEN) == pytest.approx((0.96, 0.96))


def test_voting_follows_the_weights() -> None:
    clash = np.array([[10.0, 4.0], [8.0, 10.0]])
    assert vote(clash, [1, 1], 2).kernels == (1,)
    assert vote(clash, [10, 1], 2).kernels == (0,)
    assert vote(clash, [0, 0], 1).kernels == (0, 1)  # without any weight every instance is still served


def test_the_joint_objective_trades_performance_for_size() -> None:
    assert joint(TABLE, EVEN, lambda perf, size: perf)[0].kernels == (0, 1, 2)
    assert joint(TABLE, EVEN, lambda perf, size: perf - 0.05 * size) == (vote(TABLE, EVEN, 2), 2)


def test_near_best_is_97_per_cent() -> None:
    assert not near_best(TABLE)[3].any()
    assert near_best(TABLE, 0.95)[3].all()
    assert top_n(TABLE, 1, share=0.95).kernels == (3,)
    assert top_n(np.array([[0.98, 1, 1], [1.0, 0, 0], [0.9, 0.98, 1]]), 2).kernels == (0, 2)


def test_a_selection_serves_every_instance_or_says_so() -> None:
    guarded = np.array([[5.0, 0.0], [1.0, 1.0]])
    with pytest.raises(ScheduleError, match="1 instances"):
        assign(guarded, [0])
    assert assign(guarded, [0, 1]).assigned == (0, 1)


def test_cover_keeps_within_both_budgets_and_adds_what_is_missing() -> None:
    tiles = [Tile((("w", w),), (("b", b),)) for w in range(4) for b in range(3)]
    rng = np.random.default_rng(0)
    table = rng.random((12, 40))
    for binaries, tuples in ((1, 24), (2, 3), (4, 24)):
        chosen = cover(table, [1.0] * 40, tiles, binaries, tuples)
        assert len(chosen.kernels) <= tuples
        assert len({tiles[m].compile for m in chosen.kernels}) <= binaries
    wide, narrow = (quality(table, cover(table, [1.0] * 40, tiles, n), [1.0] * 40)[0] for n in (4, 1))
    assert wide > narrow
    alike = np.array([[1.0] * 8 + [0.1] * 2, [0.99] * 8 + [0.1] * 2, [0.2] * 8 + [1.0] * 2])
    assert cover(alike, [1.0] * 10, tiles[:3]).kernels == (0, 2)  # top-n keeps (0, 1) here


def test_rows_of_the_other_papers() -> None:
    assert winners(TABLE).kernels == (0, 1, 2)
    assert fastest(TABLE, 2).kernels == (0, 1)
    assert 3 in top_ranked(TABLE, 1, 2).kernels


def test_instances_without_samples_have_odd_and_aligned_sizes() -> None:
    shapes, weights = sample_free_shapes(gemm(None, 8, 8))
    sizes = [dict(s)["i"] for s in shapes]
    assert {1, 2, 3, 64, 97, 4096} <= set(sizes)
    assert len(weights) == len(sizes)
    assert len(sample_free_shapes(gemm(None, None, None), 100)[0]) <= 100
    assert sample_free_shapes(gemm(8, 8, 8)) == (((),), (1.0,))


def test_ranges_give_sizes_that_are_allowed_and_stand_for_all() -> None:
    shapes = expected_shapes({"L": Sizes(7, 512, 8)})
    sizes = [s["L"] for s, _ in shapes]
    assert sizes[0] == 8 and sizes[-1] == 512 and all(n % 8 == 0 for n in sizes)
    assert sum(p for _, p in shapes) == pytest.approx(1)
    assert [s["L"] for s, _ in expected_shapes({"L": Sizes(1, 4)})] == [1, 2, 3, 4]
    assert expected_shapes({"L": Sizes(0, 0)}) == [({"L": 0}, 1.0)]
    assert expected_shapes({}) == [({}, 1.0)]


def test_likely_sizes_weigh_most_and_restrict_nothing() -> None:
    sizes = Sizes(1, 512, likely=(384, 128), probabilities=(0.25, 0.75))
    chances = {s["L"]: p for s, p in expected_shapes({"L": sizes})}
    assert chances[128] == pytest.approx(3 * chances[384], rel=0.1) and chances[128] + chances[384] > 0.9
    assert {1, 512} <= set(chances) and sum(chances.values()) == pytest.approx(1)
    equal = {s["L"]: p for s, p in expected_shapes({"L": Sizes(1, 512, likely=(100, 200))})}
    assert equal[100] == equal[200] == 0.45


def test_shapes_of_several_symbols_are_thinned_by_probability() -> None:
    dims = {"B": Sizes(1, None, likely=(4,)), "L": Sizes(1, 512, likely=(128,)), "M": Sizes()}
    shapes = expected_shapes(dims, 100)
    assert len(shapes) <= 100 and sum(p for _, p in shapes) == pytest.approx(1)
    share = sum(p for s, p in shapes if s["B"] == 4 and s["L"] == 128)
    assert share == pytest.approx(0.82, abs=0.03)  # 0.9 squared and the spaced 128
    assert len({s["M"] for s, _ in shapes}) > 10
