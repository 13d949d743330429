"""Set selection, and the instances it is made for."""

from __future__ import annotations

import numpy as np
import pytest

from polydyn.errors import ScheduleError
from polydyn.tuning.backbone import Tile, gemm
from polydyn.tuning.select import (
    assign,
    cover,
    fastest,
    joint,
    near_best,
    quality,
    sample_free_shapes,
    shapes_from_log,
    shapes_in_ranges,
    top_n,
    top_ranked,
    vote,
    winners,
)

# rows: a specialist per pair of instances, and an all-rounder at 96 %
TABLE = np.array([[9, 9, 1, 1, 1, 1], [1, 1, 9, 9, 1, 1], [1, 1, 1, 1, 9, 9], [8.64] * 6], float)
EVEN = [1.0] * 6


def test_voting_for_one_keeps_the_specialists_and_for_two_the_all_rounder() -> None:
    assert vote(TABLE, EVEN, 1).kept == (0, 1, 2)
    assert vote(TABLE, EVEN, 2).kept == (3,)
    assert quality(TABLE, vote(TABLE, EVEN, 2), EVEN) == pytest.approx((0.96, 0.96))


def test_voting_follows_the_weights() -> None:
    clash = np.array([[10.0, 4.0], [8.0, 10.0]])
    assert vote(clash, [1, 1], 2).kept == (1,)
    assert vote(clash, [10, 1], 2).kept == (0,)
    assert vote(clash, [0, 0], 1).kept == (0, 1)  # without any weight every instance is still served


def test_the_joint_objective_trades_performance_for_size() -> None:
    assert joint(TABLE, EVEN, lambda perf, size: perf)[0].kept == (0, 1, 2)
    assert joint(TABLE, EVEN, lambda perf, size: perf - 0.05 * size) == (vote(TABLE, EVEN, 2), 2)


def test_near_best_is_97_per_cent() -> None:
    assert not near_best(TABLE)[3].any()
    assert near_best(TABLE, 0.95)[3].all()
    assert top_n(TABLE, 1, share=0.95).kept == (3,)
    assert top_n(np.array([[0.98, 1, 1], [1.0, 0, 0], [0.9, 0.98, 1]]), 2).kept == (0, 2)


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
        assert len(chosen.kept) <= tuples
        assert len({tiles[m].compile for m in chosen.kept}) <= binaries
    wide, narrow = (quality(table, cover(table, [1.0] * 40, tiles, n), [1.0] * 40)[0] for n in (4, 1))
    assert wide > narrow
    alike = np.array([[1.0] * 8 + [0.1] * 2, [0.99] * 8 + [0.1] * 2, [0.2] * 8 + [1.0] * 2])
    assert cover(alike, [1.0] * 10, tiles[:3]).kept == (0, 2)  # where top-n keeps (0, 1)


def test_rows_of_the_other_papers() -> None:
    assert winners(TABLE).kept == (0, 1, 2)
    assert fastest(TABLE, 2).kept == (0, 1)
    assert 3 in top_ranked(TABLE, 1, 2).kept


def test_instances_without_samples_have_odd_and_aligned_sizes() -> None:
    shapes, weights = sample_free_shapes(gemm(None, 8, 8))
    sizes = [dict(s)["i"] for s in shapes]
    assert {1, 2, 3, 64, 97, 4096} <= set(sizes)
    assert len(weights) == len(sizes)
    assert len(sample_free_shapes(gemm(None, None, None), 100)[0]) <= 100
    assert sample_free_shapes(gemm(8, 8, 8)) == (((),), (1.0,))


def test_ranges_and_traffic_make_weights_of_operations() -> None:
    b = gemm(None, 8, 8)
    shapes, weights = shapes_in_ranges(b, {"i": (1, 512)}, 10)
    assert (dict(shapes[0])["i"], dict(shapes[-1])["i"]) == (1, 512)
    assert weights[-1] == 512 * weights[0]
    assert shapes_in_ranges(b, {"i": (0, 0)})[0] == ((("i", 1),),)
    with pytest.raises(KeyError):
        shapes_in_ranges(b, {})
    seen = {(("i", 7),): 3, (("i", 2),): 1}
    assert shapes_from_log(b, seen) == (((("i", 2),), (("i", 7),)), (256.0, 3 * 7 * 128.0))
