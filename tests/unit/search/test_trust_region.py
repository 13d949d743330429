"""The trust-region search on rows of a space, and its Gaussian process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest

from polydyn.search.explorers import gaussian_process as gp
from polydyn.search.explorers.explore import aligned_order
from polydyn.search.explorers.trust_region import Result, Rules, search_rows
from polydyn.search.spaces.loop_model import loop_model
from polydyn.testing.machines import A100
from polydyn.testing.simulated import Simulated, gemm
from tests.support.paths import ROOT

BACKBONE = gemm(None, 1024, 1024, dtype="float16", item=2)
Matrix = gp.Matrix


@cache
def points() -> Matrix:
    return loop_model(BACKBONE, A100).points


@cache
def order() -> list[int]:
    space = loop_model(BACKBONE, A100)
    return [space.position[t] for t in aligned_order(space, BACKBONE, A100)]


@cache
def costs() -> Matrix:
    """Return the times of every tile at three sizes of the dynamic loop."""
    space, machine = loop_model(BACKBONE, A100), Simulated(BACKBONE, A100)
    return np.array([machine.seconds(space.tiles, BACKBONE.sizes({"i": n})) for n in (16, 300, 4096)]).T


def run(classes: Sequence[int], trials: int = 64, seed: int = 0, table: Matrix | None = None) -> Result:
    chosen = (costs() if table is None else table)[:, list(classes)]
    return search_rows(points(), lambda rows: chosen[list(rows)], trials, order=order(), seed=seed)


def reached(result: Result) -> list[float]:
    return list(result.costs.min(0))


def test_regions_grow_shrink_and_begin_again_in_a_run_of_64_trials() -> None:
    """The bottom of this bowl is found early: the region grows on the way, shrinks there, and begins again."""
    grid = np.array([(x, y) for x in range(16) for y in range(16)]) / 15
    bowl = 1 + np.abs(grid - 0.4).sum(1, keepdims=True)
    for s in range(2):
        (region,) = search_rows(grid, lambda rows: bowl[list(rows)], 64, order=range(16), seed=s).regions
        assert region.grown and region.shrunk and region.restarted
    for s in range(2):
        (region,) = run([1], seed=s).regions
        assert region.grown and region.shrunk


def test_each_class_keeps_its_best_while_the_others_improve() -> None:
    for trials in (16, 32, 64):
        result = run([0, 2], trials)
        for s, region in enumerate(result.regions):
            assert region.best == result.costs[:, s].min()
            if region.at_best:
                assert region.centre == result.rows[int(result.costs[:, s].argmin())]
    optimum = costs()[:, [0, 2]].min(0)
    assert all(c < 1.05 * o for c, o in zip(reached(run([0, 2])), optimum, strict=True))


def test_a_class_without_weight_chooses_nothing() -> None:
    table = costs().copy()
    table[:, 0] = np.random.default_rng(0).random(len(table))
    weighted = search_rows(
        points(), lambda rows: table[list(rows)][:, [2, 0]], 64, order=order(), weights=(1.0, 0.0), seed=0
    )
    assert weighted.costs[:, 0].min() < 1.05 * table[:, 2].min()


def test_equal_seeds_give_equal_runs_and_a_shorter_run_is_a_prefix() -> None:
    first = run([0, 1], seed=5)
    assert run([0, 1], seed=5).rows == first.rows != run([0, 1], seed=6).rows
    assert run([0, 1], 40, seed=5).rows == first.rows[:40]
    assert len(set(first.rows)) == 64


SCRIPT = """
import numpy as np
from polydyn.search.explorers.trust_region import search_rows
points = np.random.default_rng(0).random((2000, 6))
costs = 1 + ((points - 0.3) ** 2).sum(1, keepdims=True)
print(search_rows(points, lambda rows: costs[list(rows)], 48, order=range(50), seed=1).rows)
"""


def test_the_number_of_threads_of_numpy_changes_nothing() -> None:
    environment = {n: v for n, v in os.environ.items() if not n.endswith("_NUM_THREADS")}
    rows = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=ROOT, check=True, capture_output=True, text=True,
            env=environment | {"OPENBLAS_NUM_THREADS": n, "OMP_NUM_THREADS": n},
        ).stdout
        for n in ("1", "2")
    }  # fmt: skip
    assert len(rows) == 1


def test_a_power_of_the_cost_leaves_the_starts_and_the_optimum() -> None:
    plain, cubed = run([1]), run([1], table=costs() ** 3)
    assert plain.rows[:8] == cubed.rows[:8]
    assert reached(cubed)[0] <= (1.02 * reached(plain)[0]) ** 3
    scaled = run([1], table=1024.0 * costs())
    assert scaled.rows == plain.rows


def test_every_batch_has_tiles_of_the_analytical_order() -> None:
    rules = Rules()
    rows = run([1]).rows
    assert list(rows[: rules.leading]) == order()[: rules.leading]
    for begin in range(rules.starts, 64, rules.batch):
        count = rules.ordered * (2 if begin < rules.early else 1)
        batch = rows[begin : begin + rules.batch]
        following = [i for i in order() if i not in rows[: begin + rules.batch - count]][:count]
        assert list(batch[-count:]) == following


def test_failures_of_all_tiles_or_of_one_class_do_not_stop_the_search() -> None:
    nothing = run([0, 1], 24, table=np.full_like(costs(), np.inf))
    assert len(nothing.rows) == 24 and np.isinf(nothing.costs).all() and np.isfinite(nothing.smoothed).all()
    table = costs().copy()
    table[:, 0] = np.inf
    one = run([0, 2], table=table)
    assert one.costs[:, 1].min() < 1.05 * table[:, 2].min()
    some = costs().copy()
    some[::3] = np.inf
    assert reached(run([1], table=some))[0] < 1.05 * some[:, 1].min()


@pytest.mark.parametrize("count", [1, 5])
def test_a_space_of_few_tiles_is_measured_once(count: int) -> None:
    few = np.linspace(0, 1, count)[:, None] if count > 1 else np.zeros((1, 0))
    result = search_rows(few, lambda rows: np.array([[1.0 + r] for r in rows]), 64, order=range(count))
    assert sorted(result.rows) == list(range(count))
    assert search_rows(few, lambda rows: pytest.fail("measured"), 0).rows == ()


def test_smoothed_costs_are_nearer_to_the_truth_than_single_measurements() -> None:
    noise = np.exp(0.05 * np.random.default_rng(1).standard_normal(costs().shape))
    result = run([1], table=costs() * noise)
    truth = np.log(costs()[list(result.rows), 1])
    measured, smoothed = np.log(result.costs[:, 0]) - truth, np.log(result.smoothed[:, 0]) - truth
    near = result.costs[:, 0] < 1.3 * result.costs[:, 0].min()
    assert near.sum() > 10 and smoothed[near].std() < measured[near].std()


# -- the process -------------------------------------------------------------------------------------------------------


def test_factor_and_solutions_are_those_of_linear_algebra() -> None:
    r = np.random.default_rng(0)
    x = r.random((40, 3))
    covariance = gp.matern(x, x, np.array([0.3, 0.5, 2.0])) + 1e-2 * np.eye(40)
    lower, right = gp.cholesky(covariance), r.random((40, 7))
    np.testing.assert_allclose(lower, np.linalg.cholesky(covariance), atol=1e-10)
    np.testing.assert_allclose(gp.solve_lower(lower, right), np.linalg.solve(lower, right), atol=1e-10)


def test_a_process_learns_which_axes_matter_for_all_outputs() -> None:
    r = np.random.default_rng(2)
    x = r.random((60, 3))
    y = np.stack([np.sin(6 * x[:, 0]), np.cos(5 * x[:, 0])], axis=1)
    mean, scale = y.mean(0), y.std(0)
    process = gp.GaussianProcess(3, np.random.default_rng(0))
    for _ in range(8):
        process.fit(x, (y - mean) / scale)
    assert process.lengths[0] < 0.5 * process.lengths[1:].min() and process.noise < 0.05
    other = r.random((30, 3))
    predicted, deviation = process.predict(other)
    truth = np.stack([np.sin(6 * other[:, 0]), np.cos(5 * other[:, 0])], axis=1)
    np.testing.assert_allclose(predicted * scale + mean, truth, atol=0.15)
    assert deviation.shape == (30, 2) and (deviation < process.predict(x + 5.0)[1].min()).all()


def test_expected_improvement_is_the_integral_of_the_improvement() -> None:
    samples = np.random.default_rng(0).standard_normal(400_000)
    for mean, deviation in ((0.0, 1.0), (1.0, 0.5), (-2.0, 0.3), (3.0, 1.0)):
        (gain,) = gp.expected_improvement(np.array([mean]), np.array([deviation]), np.array([0.2]))
        assert gain == pytest.approx(np.maximum(0.2 - (mean + deviation * samples), 0).mean(), rel=0.05, abs=1e-5)
