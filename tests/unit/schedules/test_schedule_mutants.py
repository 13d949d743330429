"""Accepted schedules are right: every mutant of a schedule that the proof accepts computes the group.

The interpreter decides: it executes the mutant at ragged sizes. So no error in a tile map, in a buffer's cells or in a
statement's bounds that changes a result is accepted.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from polydyn.schedules.errors import PolydynError
from polydyn.schedules.index import Index
from polydyn.schedules.interpret import interpret
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.solution.schedule import schedule_nest
from polydyn.schedules.tree.attention import cpu_attention
from polydyn.schedules.tree.few_rows import GemvTile, gemv_schedule
from polydyn.schedules.tree.gpu import gpu_product
from polydyn.schedules.tree.online import OnlineTile, online_attention
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import CpuTile, cpu_product, nest
from polydyn.schedules.tree.warpgroups import WarpgroupTile, warpgroup_product
from polydyn.schedules.tree.windows import blocked_window, window, window_tile
from polydyn.testing.mutants.tilemaps import mutants
from tests.support.marks import slow
from tests.support.polyhedral_groups import depthwise, softmax, turned_depthwise
from tests.support.scheduled_groups import (
    attention,
    online_parts,
    positive,
    product,
    roles,
    run_attention,
    run_online,
    run_product,
    run_shares,
    shared_online_parts,
    single,
)
from tests.unit.schedules.test_tile_map import SMALL_FMA, SMALL_MMA

V = Index.of
CPU_SIZES = {"B_i": 1, "B_j": 1}


def accepted(t: Scheduled) -> bool:
    try:
        prove(t)
    except PolydynError:
        return False
    return True


def right(run: Callable[[], bool]) -> bool:
    try:
        return run()
    except (PolydynError, KeyError, IndexError):
        return False


def cpu() -> tuple[Scheduled, Callable[[Scheduled], bool]]:
    t = cpu_product(product(), roles(product()), CpuTile(2, 2, 2, 2), pack=True, fill=True)
    return t, lambda x: run_product(x, {"B_i": 2, "B_j": 3}, M=11, N=13) and run_product(x, CPU_SIZES, M=1, N=2, K=5)


def fma() -> tuple[Scheduled, Callable[[Scheduled], bool]]:
    t = gpu_product(product(), roles(product()), SMALL_FMA)
    return t, lambda x: run_product(x, {}, M=5, N=5, K=3, B=2)


def mma() -> tuple[Scheduled, Callable[[Scheduled], bool]]:
    t = gpu_product(product(), roles(product()), SMALL_MMA)
    return t, lambda x: run_product(x, {}, M=17, N=33, K=2, B=1)


def lanes() -> tuple[Scheduled, Callable[[Scheduled], bool]]:
    t = gemv_schedule(single(), roles(single()), GemvTile(2, (1, 2), (2, 2), (2, 3)))
    return t, lambda x: run_product(x, {}, M=3, N=9, K=25, B=1) and run_product(x, {}, M=1, N=1, K=1, B=1)


def warpgroups() -> tuple[Scheduled, Callable[[Scheduled], bool]]:
    t = warpgroup_product(single(), roles(single()), WarpgroupTile(1, 2, 1, 2, 4, (2, 2)))
    return t, lambda x: run_product(x, {}, M=33, N=37, K=5, B=1)


def online() -> tuple[Scheduled, Callable[[Scheduled], bool]]:
    t = online_attention(*online_parts(3, 31), OnlineTile(1, 16, 4, 32, 4, 2))
    return t, lambda x: run_online(x, 3, 31, 19, 19)


def shares() -> tuple[Scheduled, Callable[[Scheduled], bool]]:
    t = online_attention(*shared_online_parts(3, 31), OnlineTile(1, 16, 4, 32, 4), shares=True)
    return t, lambda x: run_shares(x, 3, 31, 3, 19)


def rows() -> tuple[Scheduled, Callable[[Scheduled], bool]]:
    g = softmax()
    m = schedule_nest(g, positive(g))
    return nest(g, m.band, m.phases, True), lambda x: run_softmax(x, 5, 7) and run_softmax(x, 8, 1)


def run_softmax(t: Scheduled, rows: int, columns: int) -> bool:
    x = np.random.default_rng(0).standard_normal((rows, columns))
    memory = {"x": x, "y": np.full(x.shape, np.nan), "m": np.full(rows, np.nan), "d": np.full(rows, np.nan)}
    interpret(t, {"R": rows, "L": columns, "P_t": 4}, memory)
    return bool(np.allclose(memory["y"], np.exp(x) / np.exp(x).sum(1, keepdims=True)))


def windows() -> tuple[Scheduled, Callable[[Scheduled], bool]]:
    g = depthwise()
    m = schedule_nest(g, positive(g))
    t = window(g, m.band, m.phases, "h", 2, ("j", "k"), "c")
    return t, lambda x: run_windows(x, 3, 3, 5) and run_windows(x, 1, 1, 1)


def tiles() -> tuple[Scheduled, Callable[[Scheduled], bool]]:
    g = depthwise()
    t = window_tile(g, ("h", "w", "c"), schedule_nest(g, positive(g)).phases, ("h", "w"), (2, 3), ("j", "k"))
    return t, lambda x: run_windows(x, 4, 3, 5) and run_windows(x, 2, 1, 1)


def run_windows(t: Scheduled, channels: int, height: int, width: int) -> bool:
    r = np.random.default_rng(0)
    x, v, b = (r.standard_normal(s) for s in ((channels, height + 2, width + 2), (3, 3, channels), channels))
    memory = {"x": x, "v": v, "b": b} | {n: np.full((channels, height, width), np.nan) for n in "sy"}
    sizes = {"C": channels, "H": height, "W": width, "H2": height + 2, "W2": width + 2, "P_t": 2, "P_p": 2}
    interpret(t, sizes, memory)
    taps = [x[:, j : j + height, k : k + width] * v[j, k, :, None, None] for j in range(3) for k in range(3)]
    return bool(np.allclose(memory["y"], sum(taps) + b[:, None, None]))


def turned() -> tuple[Scheduled, Callable[[Scheduled], bool]]:
    t = blocked_window(turned_depthwise(), ("h", "w"), 2, 2, ("j", "k"))
    return t, lambda x: run_turned(x, 3, 3, 5) and run_turned(x, 1, 1, 1)


def run_turned(t: Scheduled, channels: int, height: int, width: int) -> bool:
    r = np.random.default_rng(0)
    shape = channels, height, width
    x, v, b = r.standard_normal(shape), r.standard_normal((3, 3, channels)), r.standard_normal(channels)
    memory = {"x": x, "v": v, "b": b} | {n: np.full(shape, np.nan) for n in "tsky"}
    interpret(t, {"C": channels, "H": height, "W": width}, memory)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
    taps = [padded[:, j : j + height, k : k + width] * v[j, k, :, None, None] for j in range(3) for k in range(3)]
    return bool(np.allclose(memory["y"], sum(taps) + b[:, None, None]))


def blocks() -> tuple[Scheduled, Callable[[Scheduled], bool]]:
    t = cpu_attention(*attention(), (CpuTile(2, 2, 2, V("K"), 1), CpuTile(2, 1, 2, V("L"), 1)), True)
    return t, lambda x: run_attention(x, {"B_i": 2}, M=7) and run_attention(x, {"B_i": 1}, M=1, L=2, D=1)


def check(family: Callable[[], tuple[Scheduled, Callable[[Scheduled], bool]]], every: int) -> None:
    """Check that every ``every``-th mutant of a family that the proof accepts computes the group."""
    t, run = family()
    assert accepted(t) and right(lambda: run(t))
    kept, wrong, total = [], [], 0
    for what, mutant in itertools.islice(mutants(t), 0, None, every):
        total += 1
        if accepted(mutant):
            (kept if right(lambda m=mutant: run(m)) else wrong).append(what)  # type: ignore[misc]
    print(family.__name__, total, "mutants,", len(kept), "accepted:", *kept, sep="\n  ")
    assert not wrong, f"accepted, and wrong: {wrong}"
    assert total >= 10 and 2 * len(kept) < total


@pytest.mark.parametrize(
    "family, every",
    [
        (cpu, 9), (fma, 9), (mma, 25), (lanes, 9), (warpgroups, 29), slow(online, 70), slow(shares, 70), (rows, 1),
        (windows, 3), (tiles, 1), (turned, 5), (blocks, 9),
    ],
)  # fmt: skip
def test_what_the_proof_accepts_is_right(
    family: Callable[[], tuple[Scheduled, Callable[[Scheduled], bool]]], every: int
) -> None:
    check(family, every)


@pytest.mark.slow
@pytest.mark.parametrize("family", [cpu, fma, mma, lanes, warpgroups, online, blocks])
def test_all_that_the_proof_accepts_is_right(
    family: Callable[[], tuple[Scheduled, Callable[[Scheduled], bool]]],
) -> None:
    check(family, 1)
