"""Explorers: find the optimum, repeat themselves, resume from records, and beat their baselines."""

from __future__ import annotations

import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest

from polydyn.errors import ArtifactError
from polydyn.search.backbone import GroupKey, Tile
from polydyn.search.bench import RecordedObjective
from polydyn.search.cost import blocks_at, blocks_per_unit
from polydyn.search.explorers.explore import (
    Explorer,
    Objective,
    aligned_order,
    best,
    in_order,
    saturating_shape,
    spread,
)
from polydyn.search.explorers.trust_region import trust_region
from polydyn.search.hardware import cpu
from polydyn.search.records import Records
from polydyn.search.spaces.loop_model import loop_model
from polydyn.search.spaces.space import Space, usage
from polydyn.testing.machines import A100
from polydyn.testing.simulated import Simulated, exhaustive, gemm, random_search, recorded_costs, regret
from tests.support.paths import ROOT

BACKBONE = gemm(None, 3072, 1024, dtype="float16", item=2)
KEY = GroupKey("gemm", "float16", "cuda:sm_80")

# Made by the first test that needs them: every process of a session imports this file, and one runs it.


@cache
def every() -> Space:
    return loop_model(BACKBONE, A100)


@cache
def few() -> Space:
    return Space("few", every().tiles[::60])


@cache
def costs() -> dict[Tile, float]:
    return dict(zip(every().tiles, Simulated(BACKBONE, A100).per_operation(every().tiles), strict=True))


def optimum() -> float:
    return min(costs().values())


@cache
def order() -> tuple[Tile, ...]:
    return tuple(aligned_order(every(), BACKBONE, A100))


def look_up(tiles: Sequence[Tile]) -> list[float]:
    return [costs()[t] for t in tiles]


LOOK_UP = Objective.single(look_up)


EXPLORERS: dict[str, Callable[[], Explorer]] = {
    "exhaustive": lambda: exhaustive,
    "random": lambda: random_search,
    "aligned": lambda: in_order(order()),
    "trust region": lambda: trust_region(order()),
}


@pytest.mark.parametrize("name", EXPLORERS)
def test_explorers_measure_each_tuple_once_and_stop(name: str) -> None:
    log = EXPLORERS[name]()(few(), LOOK_UP, 1000, 0)
    assert sorted(t.tile for t in log) == list(few().tiles)
    assert best(log).cost == min(costs()[t] for t in few().tiles)
    assert len(EXPLORERS[name]()(few(), LOOK_UP, 9, 0)) == 9
    assert EXPLORERS[name]()(few(), LOOK_UP, 0, 0) == ()


@pytest.mark.parametrize("name", ["random", "trust region"])
def test_a_seed_decides_everything(name: str) -> None:
    first = EXPLORERS[name]()(every(), LOOK_UP, 24, 5)
    assert first == EXPLORERS[name]()(every(), LOOK_UP, 24, 5)
    assert first != EXPLORERS[name]()(every(), LOOK_UP, 24, 6)


def test_the_search_beats_random_and_the_analytical_order() -> None:
    """At 100 trials. ``benchmarks.explorers`` has more seeds and recorded spaces."""

    def final(explorer: Explorer, seed: int) -> float:
        return regret(explorer(every(), LOOK_UP, 100, seed), optimum())[-1]

    ours = [final(trust_region(order()), s) for s in range(2)]
    blind = [final(random_search, s) for s in range(20)]
    assert sum(ours) / 2 < 0.02
    assert max(ours) < sum(blind) / 20
    assert max(ours) < final(in_order(order()), 0)


def test_aligned_order_is_much_better_than_chance_and_starts_are_spread() -> None:
    top = [costs()[t] for t in order()[:50]]
    assert sum(top) / 50 < sorted(costs().values())[len(costs()) // 4]
    rows = [every().position[t] for t in order()]
    starts = spread(every().points, rows, 12)
    assert len(set(starts)) == 12
    assert starts[0] == rows[0]
    assert sorted(spread(few().points, range(len(few())), 10_000)) == list(range(len(few())))


def test_a_saturating_instance_fills_every_unit() -> None:
    for tile in every().tiles[::97]:
        shape = saturating_shape(BACKBONE, A100, tile)
        resident = max(1, blocks_per_unit(usage(BACKBONE, A100, tile), A100))
        assert blocks_at(BACKBONE, tile, shape) >= 2 * 108 * resident
    static = saturating_shape(gemm(8, 8, None), cpu(2), loop_model(gemm(8, 8, None), cpu(2)).tiles[0])
    assert static["i"] == static["j"] == 8


def test_failures_do_not_stop_the_search() -> None:
    def picky(tiles: Sequence[Tile]) -> list[float]:
        return [math.inf if t["stages"] == 4 else costs()[t] for t in tiles]

    log = trust_region(order())(every(), Objective.single(picky), 60, 0)
    assert len(log) == 60
    assert best(log).cost < 1.1 * min(c for t, c in costs().items() if t["stages"] != 4)
    nothing = trust_region()(few(), Objective.single(lambda ts: [math.inf] * len(ts)), 20, 0)
    assert [t.cost for t in nothing] == [math.inf] * 20


def test_a_resumed_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    whole = trust_region(order())(every(), LOOK_UP, 32, 3)
    with Records.open(tmp_path / "r.db") as r:
        stopped = RecordedObjective(look_up, r, KEY, A100)
        trust_region(order())(every(), Objective.single(stopped), 20, 3)
        assert stopped.measured == 20
    with Records.open(tmp_path / "r.db") as r:
        resumed = RecordedObjective(look_up, r, KEY, A100)
        assert trust_region(order())(every(), Objective.single(resumed), 32, 3) == whole
        assert resumed.measured == 12
    with Records.open(tmp_path / "r.db", readonly=True) as r:  # pinned: answers, and measures nothing new here
        pinned = RecordedObjective(lambda ts: pytest.fail("measured"), r, KEY, A100)
        assert trust_region(order())(every(), Objective.single(pinned), 32, 3) == whole


def test_records_of_failures_are_not_tried_again(tmp_path: Path) -> None:
    with Records.open(tmp_path / "r.db") as r:
        first = RecordedObjective(lambda ts: [math.inf] * len(ts), r, KEY, A100)
        assert first(few().tiles[:3]) == [math.inf] * 3
        again = RecordedObjective(look_up, r, KEY, A100)
        assert again(few().tiles[:3]) == [math.inf] * 3
        assert again.measured == 0
        other = RecordedObjective(look_up, r, GroupKey("other", "float16", "cuda:sm_80"), A100)
        assert other(few().tiles[:1]) == [costs()[few().tiles[0]]]


def test_replay_refuses_a_space_with_holes(tmp_path: Path) -> None:
    with Records.open(tmp_path / "r.db") as r:
        exhaustive(few(), Objective.single(RecordedObjective(look_up, r, KEY, A100)), 10)
        with pytest.raises(ArtifactError, match=f"{len(few()) - 10} of {len(few())}"):
            recorded_costs(r, KEY, A100, few())
        exhaustive(few(), Objective.single(RecordedObjective(look_up, r, KEY, A100)), 1000)
        assert recorded_costs(r, KEY, A100, few()) == {t: costs()[t] for t in few().tiles}


RUN = """
import sys, time
from polydyn.search.backbone import GroupKey
from polydyn.testing.simulated import gemm
from polydyn.search.bench import RecordedObjective
from polydyn.search.explorers.explore import Objective
from polydyn.testing.simulated import random_search
from polydyn.testing.machines import A100
from polydyn.search.spaces.loop_model import loop_model
from polydyn.search.records import Records
def slow(tiles):
    time.sleep(0.01)
    return [1.0 / t["b.i"] for t in tiles]
space = loop_model(gemm(None, 3072, 1024, dtype="float16", item=2), A100)
with Records.open(sys.argv[1]) as r:
    print("go", flush=True)
    cost = RecordedObjective(slow, r, GroupKey("gemm", "float16", "cuda:sm_80"), A100)
    random_search(space, Objective.single(cost), 160, 1)
"""


def test_tuning_killed_twice_ends_as_if_never_killed(tmp_path: Path) -> None:
    path = tmp_path / "r.db"

    def cost(tiles: Sequence[Tile]) -> list[float]:
        return [1.0 / t["b.i"] for t in tiles]

    known = 0
    for delay in (0.05, 0.12):
        p = subprocess.Popen([sys.executable, "-c", RUN, str(path)], stdout=subprocess.PIPE, cwd=ROOT)
        assert p.stdout is not None
        p.stdout.readline()
        time.sleep(delay)
        p.send_signal(signal.SIGKILL)
        p.wait()
        p.stdout.close()
        with Records.open(path) as r:
            rows = len(r.rows())
        assert known <= rows < 160
        assert rows % 8 == 0  # whole batches
        known = rows
    with Records.open(path) as r:
        last = RecordedObjective(cost, r, KEY, A100)
        whole = random_search(every(), Objective.single(cost), 160, 1)
        assert random_search(every(), Objective.single(last), 160, 1) == whole
        assert last.measured == 160 - known
