"""Finals: the model's favourites are measured, and the model is corrected by the results."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from polydyn.errors import BuildError
from polydyn.schedules.decision import choose
from polydyn.schedules.index import Index
from polydyn.search.backbone import GroupKey, Problem, Shape, Tile
from polydyn.search.bench import RecordedBench
from polydyn.search.cost import polydyn as polydyn_cost
from polydyn.search.dispatch.build import build_dispatch
from polydyn.search.explorers.explore import Trial
from polydyn.search.finals import (
    CLASSES,
    FINALISTS,
    OTHER_SIZES,
    SIZES,
    best_explored,
    between,
    corrected,
    finalists,
    size_classes,
    sizes_to_measure,
)
from polydyn.search.hardware import cpu
from polydyn.search.records import Records
from polydyn.search.spaces.loop_model import loop_model
from polydyn.search.strategies import Tuned, strategy, tune
from polydyn.testing.simulated import Simulated, gemm

B, HW = gemm(None, 256, 256), cpu(1)
LENGTHS = tuple((("i", n),) for n in range(1, 101))
PROBLEM = Problem(GroupKey("gemm", B.dtype, HW.name), B, LENGTHS, (1.0,) * 100)
TILES = loop_model(B, HW).tiles[::40][:20]


class Liar(Simulated):
    """A machine on which some tiles take ten times as long as one of their waves promises."""

    def seconds(self, tiles: Sequence[Tile], shape: Shape, turns: int = 1) -> list[float]:
        slow = [10.0 if t == TILES[0] else 1.0 for t in tiles]
        return [x * s for x, s in zip(slow, super().seconds(tiles, shape), strict=True)]


def test_a_model_that_flatters_a_kernel_is_corrected() -> None:
    bench = Liar(B, HW)
    kernels = [bench.kernel(t) for t in TILES[:2]]
    costs = [polydyn_cost(B, HW, k) for k in kernels]
    ran, forms, table = corrected(PROBLEM, bench, kernels, costs, math.inf)
    assert [k.tile for k in ran] == list(TILES[:2]) and table.shape == (2, 100)
    honest = corrected(PROBLEM, Simulated(B, HW), kernels, costs, math.inf)
    at = {"i": 64, "j": 256, "k": 256}
    ratio = [forms[k].evaluate(at) / honest[1][k].evaluate(at) for k in (0, 1)]
    assert ratio == pytest.approx([10.0, 1.0], rel=0.05)
    least = [min(c.evaluate(s) for c in costs) / 1e12 for s in PROBLEM.instances()]
    measured = sizes_to_measure(least, PROBLEM.weights, math.inf)
    assert table[0, measured] == pytest.approx(honest[2][0, measured] / 10)


class Steep(Simulated):
    """A machine on which the first tile is fast up to 50 rows and slow beyond, unknown to every closed form."""

    def seconds(self, tiles: Sequence[Tile], shape: Shape, turns: int = 1) -> list[float]:
        assert turns > 1  # a single reading is not to be trusted
        share = 0.5 if shape["i"] <= 50 else 2.0
        return [(share if t == TILES[0] else 1.0) * 1e-6 * shape["i"] for t in tiles]


def test_what_was_measured_holds_between_sizes_too() -> None:
    bench = Steep(B, HW)
    kernels = [bench.kernel(t) for t in TILES[:2]]
    costs = [polydyn_cost(B, HW, kernels[0])] * 2
    ran, forms, table = corrected(PROBLEM, bench, kernels, costs, math.inf)
    # one factor does not help
    assert forms[0].evaluate({"i": 40}) == pytest.approx(forms[1].evaluate({"i": 40}), rel=0.2)
    better = table.argmax(0)
    assert set(better[:46]) == {0} and set(better[54:]) == {1}
    kept = Tuned(
        "polydyn", "tree", B, tuple(ran), tuple(forms), tuple(PROBLEM.instances()), PROBLEM.weights, table,
        tuple(map(int, better)), (),
    )  # fmt: skip
    decision = build_dispatch(kept)
    assert [choose(decision, B.sizes({"i": n})) for n in (1, 20, 45, 55, 100, 1000)] == [0, 0, 0, 1, 1, 1]


def test_several_loops_take_what_their_neighbours_have() -> None:
    known = [{"i": a, "j": b, "k": 7} for a in (1, 100) for b in (1, 100)]
    logs = np.log(np.array([[1.0, 2.0, 3.0, 4.0]]))
    assert between(known, logs, known) == pytest.approx(np.exp(logs))
    ((middle, corner),) = between(known, logs, [{"i": 10, "j": 10, "k": 7}, {"i": 90, "j": 110, "k": 7}])
    assert 1.8 < middle < 2.7 and 3.5 < corner < 4.0
    assert between(known[:1], logs[:, :1], known[:1]) == pytest.approx(np.ones((1, 1)))  # nothing is dynamic


SECONDS = [n / 100 for n in range(1, 101)]
EVEN = [1.0] * 100


def test_sizes_follow_the_weights_and_stay_short() -> None:
    assert len(sizes_to_measure(SECONDS, EVEN, 1.0)) == SIZES
    assert {0, 1} <= set(sizes_to_measure(SECONDS, [1e6, 1e6, *EVEN[2:]], 1.0))
    assert max(sizes_to_measure(SECONDS, EVEN, 0.1)) == 9
    assert sizes_to_measure(SECONDS, EVEN, 0.0) == []


def test_the_largest_sizes_are_left_out_where_all_together_take_too_long() -> None:
    assert sum(SECONDS[i] for i in sizes_to_measure(SECONDS, EVEN, 1.0)) > 6
    some = sizes_to_measure(SECONDS, EVEN, 1.0, 3.0)
    assert sum(SECONDS[i] for i in some) <= 3.0 and len(some) == SIZES
    assert sizes_to_measure(SECONDS, EVEN, 1.0, 0.0) == []


def test_without_anything_to_measure_the_model_decides() -> None:
    bench = Simulated(B, HW)
    kernels = [bench.kernel(t) for t in TILES[:2]]
    costs = [polydyn_cost(B, HW, k) for k in kernels]
    assert corrected(PROBLEM, bench, kernels, costs, 0.0)[1] == costs


def test_finalists_are_few_and_contain_the_best_on_average() -> None:
    bench = Simulated(B, HW)
    costs = [polydyn_cost(B, HW, bench.kernel(t)) for t in TILES]
    table = np.array([[1e12 / c.evaluate(B.sizes(dict(s))) for s in LENGTHS] for c in costs])
    rows = finalists(table, PROBLEM.weights, TILES)
    assert len(rows) == len(set(rows)) == FINALISTS
    assert int((table / table.max(0)).mean(1).argmax()) in rows


class Failing(Simulated):
    """A machine on which the launches of one tile fail."""

    def seconds(self, tiles: Sequence[Tile], shape: Shape, turns: int = 1) -> list[float]:
        return [math.inf if t == TILES[0] else s for t, s in zip(tiles, super().seconds(tiles, shape), strict=True)]


def test_kernels_that_fail_are_dropped_and_none_is_an_error() -> None:
    bench = Failing(B, HW)
    kernels = [Simulated(B, HW).kernel(t) for t in TILES[:2]]
    costs: list[Index] = [polydyn_cost(B, HW, k) for k in kernels]
    assert [k.tile for k in corrected(PROBLEM, bench, kernels, costs, math.inf)[0]] == [TILES[1]]
    with pytest.raises(BuildError, match="none of 1"):
        corrected(PROBLEM, bench, kernels[:1], costs[:1], math.inf)


def test_launches_that_fail_are_records_of_their_sizes(tmp_path: Path) -> None:
    """They are not tried again, and have no effect on the tile at other sizes."""
    shapes = [B.sizes({"i": n}) for n in (3, 5)]
    with Records.open(tmp_path / "r.db") as r:
        bench = RecordedBench(Failing(B, HW), r, PROBLEM.key, HW)
        failed = bench.seconds(TILES[:2], shapes[0])
        assert [math.isfinite(s) for s in failed] == [False, True]
        assert RecordedBench(Simulated(B, HW), r, PROBLEM.key, HW).seconds(TILES[:2], shapes[0]) == failed
        again = RecordedBench(Simulated(B, HW), r, PROBLEM.key, HW)
        assert all(map(math.isfinite, (*again.per_operation(TILES[:1]), *again.seconds(TILES[:2], shapes[1]))))
        assert math.isfinite(again.kernel(TILES[0]).step)


def test_classes_follow_the_weights_and_the_saturating_instance_has_the_rest() -> None:
    """Likely sizes become classes. Launches that take too long are left to the saturating instance."""
    likely = replace(PROBLEM, shapes=((("i", 7),), (("i", 90),), (("i", 1 << 20),)), weights=(3.0, 1.0, 4.0))
    classes = size_classes(likely, HW, 64)
    assert [s["i"] for s in classes.shapes] == [90, 7], "the largest first"
    assert classes.weights == (1.0, 3.0) and classes.saturating == 4.0
    even = size_classes(PROBLEM, HW, 64)
    assert [s["i"] for s in even.shapes] == [88, 63, 38, 13] and even.weights == (25.0,) * CLASSES
    assert even.saturating == pytest.approx(OTHER_SIZES * 100)
    static = gemm(64, 64, 64)
    fixed = size_classes(Problem(PROBLEM.key, static, ((),), (1.0,)), HW, 64)
    assert fixed.shapes == (static.sizes({}),) and fixed.saturating == 0
    long = size_classes(replace(likely, shapes=((("i", 1 << 20),),), weights=(1.0,)), HW, 64)
    assert long.shapes == () and long.saturating == 1.0


def test_more_trials_leave_less_time_for_each() -> None:
    wide = replace(PROBLEM, shapes=tuple((("i", 1 << n),) for n in range(16)), weights=(1.0,) * 16)
    few, many = (size_classes(wide, HW, n) for n in (8, 512))
    assert max(s["i"] for s in many.shapes) < max(s["i"] for s in few.shapes)
    assert many.saturating > few.saturating


def test_finalists_of_an_exploration_serve_every_class() -> None:
    """Smoothed costs decide. A tile that fails at one class may serve another; tiles that never ran are left out."""
    costs = [(1.0, 9.0), (9.0, 1.0), (math.inf, 0.5), (math.inf, math.inf), (1.1, 1.1)]
    trials = [Trial(t, c) for t, c in zip(TILES, costs, strict=False)]
    assert set(best_explored(trials, (1.0, 1.0))) == {TILES[n] for n in (0, 1, 2, 4)}
    lucky = replace(trials[0], costs=(0.1, 0.1), smoothed=(9.0, 9.0))
    assert best_explored([lucky, trials[4]], (1.0, 1.0))[0] == TILES[4]
    assert best_explored(trials[3:4], (1.0, 1.0)) == []


class Counting(Simulated):
    """A machine that is one per cent faster in each round, and counts the launches of each number of rounds."""

    def seconds(self, tiles: Sequence[Tile], shape: Shape, turns: int = 1) -> list[float]:
        LAUNCHES[turns] += len(tiles)
        return [x * 0.99**turns for x in super().seconds(tiles, shape)]


LAUNCHES = Counter[int]()


def test_finalists_are_measured_again_at_sizes_of_the_exploration(tmp_path: Path) -> None:
    """A record of one round serves the exploration only, so a resumed search repeats its steps."""
    LAUNCHES.clear()
    with Records.open(tmp_path / "r.db") as r:
        first = tune(strategy("polydyn"), PROBLEM, HW, Counting(B, HW), trials=12, records=r)
        launches = dict(LAUNCHES)
        again = tune(strategy("polydyn"), PROBLEM, HW, Counting(B, HW), trials=12, records=r)
        assert dict(LAUNCHES) == launches, "the second search measured"
        bench = RecordedBench(Counting(B, HW), r, PROBLEM.key, HW)
        once, twice = (bench.seconds([first.trials[0].tile], B.sizes({"i": 13}), n) for n in (1, 2))
    assert launches[1] == CLASSES * 12 and launches[2] > 0 and once != twice
    assert again.kernels == first.kernels and again.trials == first.trials


def test_only_polydyn_has_finals() -> None:
    tuned = tune(strategy("polydyn"), PROBLEM, HW, Simulated(B, HW), trials=12)
    assert 1 <= len(tuned.kernels) <= FINALISTS
    assert not strategy("tscompiler").finals
