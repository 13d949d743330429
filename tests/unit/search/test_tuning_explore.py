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
from polydyn.search.explorers.explore import Explorer, aligned_order, best, by_size, in_order, saturating_shape, spread
from polydyn.search.explorers.trust_region import Regions, trust_region
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


EXPLORERS: dict[str, Callable[[], Explorer]] = {
    "exhaustive": lambda: exhaustive,
    "random": lambda: random_search,
    "aligned": lambda: in_order(order()),
    "trust region": lambda: trust_region(order()),
    "by size": lambda: by_size(
        trust_region(order(), regions=Regions(count=1, start=4, aligned=2, batch=4)), BACKBONE, 3
    ),
}


@pytest.mark.parametrize("name", EXPLORERS)
def test_explorers_measure_each_tuple_once_and_stop(name: str) -> None:
    log = EXPLORERS[name]()(few(), look_up, 1000, 0)
    assert sorted(t.tile for t in log) == list(few().tiles)
    assert best(log).cost == min(costs()[t] for t in few().tiles)
    assert len(EXPLORERS[name]()(few(), look_up, 9, 0)) == 9
    assert EXPLORERS[name]()(few(), look_up, 0, 0) == ()


@pytest.mark.parametrize("name", ["random", "trust region"])
def test_a_seed_decides_everything(name: str) -> None:
    first = EXPLORERS[name]()(every(), look_up, 24, 5)
    assert first == EXPLORERS[name]()(every(), look_up, 24, 5)
    assert first != EXPLORERS[name]()(every(), look_up, 24, 6)


def test_costs_are_only_compared() -> None:
    """A process over costs would see only the outliers; over ranks every increasing function is equivalent."""

    def stretched(tiles: Sequence[Tile]) -> list[float]:
        return [math.inf if c > 5 * optimum() else math.expm1(c / optimum()) for c in look_up(tiles)]

    def plain(tiles: Sequence[Tile]) -> list[float]:
        return [math.inf if c > 5 * optimum() else c for c in look_up(tiles)]

    a, b = (trust_region(order())(every(), f, 36, 2) for f in (stretched, plain))
    assert [t.tile for t in a] == [t.tile for t in b]


def test_a_box_holds_the_next_value_on_every_axis() -> None:
    """This holds for any small box: an axis of two values would never change."""
    sizes = [8 << n for n in range(6)]
    tiles = [Tile((("b.i", i), ("b.j", j), ("w.k", k))) for i in sizes for j in sizes for k in (1, 4)]
    space = Space("two", tuple(sorted(tiles)))

    def cost(tiles: Sequence[Tile]) -> list[float]:
        return [1 + abs(math.log2(t["b.i"] / 64)) + abs(math.log2(t["b.j"] / 32)) + (t["w.k"] == 1) for t in tiles]

    short = [t for t in space.tiles if t["w.k"] == 1]
    one = Regions(count=1, start=4, aligned=4, batch=4)
    log = trust_region(short, regions=one)(space, cost, 32, 0)
    assert {t.tile["w.k"] for t in log[:4]} == {1}
    assert best(log).cost == 1


def test_trust_regions_beat_random_and_aligned_starts() -> None:
    """At 100 trials; 100 seeds on three groups are in benchmarks/explorers.py."""

    def final(explorer: Explorer, seed: int) -> float:
        return regret(explorer(every(), look_up, 100, seed), optimum())[-1]

    ours = [final(trust_region(order()), s) for s in range(2)]
    blind = [final(random_search, s) for s in range(20)]
    assert sum(ours) / 2 < 0.02
    assert max(ours) < sum(blind) / 20
    assert max(ours) < final(in_order(order()), 0)


def test_aligned_order_is_much_better_than_chance_and_starts_are_spread() -> None:
    top = [costs()[t] for t in order()[:50]]
    assert sum(top) / 50 < sorted(costs().values())[len(costs()) // 4]
    starts = spread(every(), order(), 12)
    assert len(set(starts)) == 12
    assert starts[0] == order()[0]
    assert spread(few(), few().tiles, 10_000) == tuple(spread(few(), few().tiles, len(few())))


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

    log = trust_region(order())(every(), picky, 60, 0)
    assert len(log) == 60
    assert best(log).cost < 1.1 * min(c for t, c in costs().items() if t["stages"] != 4)
    nothing = trust_region()(few(), lambda ts: [math.inf] * len(ts), 20, 0)
    assert [t.cost for t in nothing] == [math.inf] * 20


def test_a_resumed_run_measures_only_what_is_missing(tmp_path: Path) -> None:
    whole = trust_region(order())(every(), look_up, 32, 3)
    with Records.open(tmp_path / "r.db") as r:
        stopped = RecordedObjective(look_up, r, KEY, A100)
        trust_region(order())(every(), stopped, 20, 3)
        assert stopped.measured == 20
    with Records.open(tmp_path / "r.db") as r:
        resumed = RecordedObjective(look_up, r, KEY, A100)
        assert trust_region(order())(every(), resumed, 32, 3) == whole
        assert resumed.measured == 12
    with Records.open(tmp_path / "r.db", readonly=True) as r:  # pinned: answers, and measures nothing new here
        pinned = RecordedObjective(lambda ts: pytest.fail("measured"), r, KEY, A100)
        assert trust_region(order())(every(), pinned, 32, 3) == whole


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
        exhaustive(few(), RecordedObjective(look_up, r, KEY, A100), 10)
        with pytest.raises(ArtifactError, match=f"{len(few()) - 10} of {len(few())}"):
            recorded_costs(r, KEY, A100, few())
        exhaustive(few(), RecordedObjective(look_up, r, KEY, A100), 1000)
        assert recorded_costs(r, KEY, A100, few()) == {t: costs()[t] for t in few().tiles}


RUN = """
import sys, time
from polydyn.search.backbone import GroupKey
from polydyn.testing.simulated import gemm
from polydyn.search.bench import RecordedObjective
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
    random_search(space, RecordedObjective(slow, r, GroupKey("gemm", "float16", "cuda:sm_80"), A100), 160, 1)
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
        assert random_search(every(), last, 160, 1) == random_search(every(), cost, 160, 1)
        assert last.measured == 160 - known
