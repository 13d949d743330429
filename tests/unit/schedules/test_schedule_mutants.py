"""What the proof accepts is right: every mutant of a schedule that it accepts computes the group.

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
from polydyn.schedules.tree.gpu import gpu_product
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import CpuTile, cpu_product, nest
from tests.support.mutants import mutants
from tests.support.polyhedral_groups import softmax
from tests.support.scheduled_groups import attention, positive, product, roles, run_attention, run_product
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


def rows() -> tuple[Scheduled, Callable[[Scheduled], bool]]:
    g = softmax()
    m = schedule_nest(g, positive(g))
    return nest(g, m.band, m.phases, True), lambda x: run_softmax(x, 5, 7) and run_softmax(x, 8, 1)


def run_softmax(t: Scheduled, rows: int, columns: int) -> bool:
    x = np.random.default_rng(0).standard_normal((rows, columns))
    memory = {"x": x, "y": np.full(x.shape, np.nan), "m": np.full(rows, np.nan), "d": np.full(rows, np.nan)}
    interpret(t, {"R": rows, "L": columns, "P_t": 4}, memory)
    return bool(np.allclose(memory["y"], np.exp(x) / np.exp(x).sum(1, keepdims=True)))


def blocks() -> tuple[Scheduled, Callable[[Scheduled], bool]]:
    t = cpu_attention(*attention(), (CpuTile(2, 2, 2, V("K"), 1), CpuTile(2, 1, 2, V("L"), 1)), True)
    return t, lambda x: run_attention(x, {"B_i": 2}, M=7) and run_attention(x, {"B_i": 1}, M=1, L=2, D=1)


def check(family: Callable[[], tuple[Scheduled, Callable[[Scheduled], bool]]], every: int) -> None:
    """Every ``every``-th mutant of a family that the proof accepts computes the group."""
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


@pytest.mark.parametrize("family, every", [(cpu, 9), (fma, 9), (mma, 25), (rows, 1), (blocks, 9)])
def test_what_the_proof_accepts_is_right(
    family: Callable[[], tuple[Scheduled, Callable[[Scheduled], bool]]], every: int
) -> None:
    check(family, every)


@pytest.mark.slow
@pytest.mark.parametrize("family", [cpu, fma, mma, blocks])
def test_all_that_the_proof_accepts_is_right(
    family: Callable[[], tuple[Scheduled, Callable[[Scheduled], bool]]],
) -> None:
    check(family, 1)
