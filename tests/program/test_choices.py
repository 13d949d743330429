"""A launch that chooses among kernels: the generated C and explain follow the decision."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from polydyn.errors import PolydynError, ScheduleError
from polydyn.graph.ir import SymbolSource
from polydyn.program.assemble import build_program
from polydyn.program.evaluation import Evaluation
from polydyn.program.plan import Block, Candidate, HostPlan
from polydyn.schedules.decision import ArgMin, Decision, Entry, Leaf, Split, choose
from polydyn.schedules.index import Index, maximum, minimum
from tests.support.programs import B, L, buffers, feeds, kernel, launch

KERNELS = tuple(
    kernel(f"tag{k}", 2, 1, f"float *y = buf[1]; for (int64_t i = begin; i < end; i++) y[i] = {k}000 + sym[0];")
    for k in range(3)
)
"""Kernel k writes 1000 k + its symbol."""


def plan(decision: Decision, variants: int = 3) -> HostPlan:
    """Plan ``y[B]`` that shows which candidate ran, with a different symbol for each."""
    symbols = [Index.of(7), B + 1, (L + 3) // 4]
    several = tuple(Candidate(f"tag{k}", ("x", "y"), (symbols[k],), B) for k in range(variants))
    one = replace(launch(KERNELS[0], "x y", (0,), B, B), candidates=several, decision=decision)
    return HostPlan(
        name="choices",
        inputs=("x",),
        outputs=("y",),
        buffers=buffers(("x", "float32", (B, L), "input"), ("y", "float32", (B,), "output")),
        constants={},
        sources=(SymbolSource("B", "x", 0), SymbolSource("L", "x", 1)),
        guards=(),
        kernels=KERNELS,
        launches=(one,),
    )


def random_index(r: random.Random) -> Index:
    a, b = r.choice([B, L, B * L]), Index.of(r.randrange(1, 9))
    return r.choice([a * b, a // b, minimum(a, b), maximum(a - 5, b), a.ceildiv(b) * 3 + L])


def random_decision(r: random.Random, depth: int = 3) -> Decision:
    kind = r.randrange(3) if depth else 0
    if kind == 0:
        return Leaf(r.randrange(3))
    if kind == 1:
        low, high = random_decision(r, depth - 1), random_decision(r, depth - 1)
        return Split(random_index(r), r.randrange(-2, 12), low, high)
    return ArgMin(tuple(Entry(r.randrange(3), random_index(r)) for _ in range(3)))


@pytest.mark.parametrize("seed", range(6))
def test_c_and_explain_take_the_same_variant(seed: int) -> None:
    decision = random_decision(random.Random(seed))
    p = plan(decision)
    program = build_program(p, threads=2)
    for b, length in ((1, 1), (2, 7), (9, 3), (5, 31), (3, 0), (1, 7)):
        x = feeds(b, length)["x"]
        k = choose(decision, {"B": b, "L": length, "nth": 2})
        wanted = np.full(b, 1000 * k + [7, b + 1, (length + 3) // 4][k], np.float32)
        np.testing.assert_array_equal(program.run({"x": x})["y"], wanted)
        (explained,) = program.explain(B=b, L=length).launches
        assert explained.kernel == f"tag{k}" and explained.selection
        (timed,) = program.profile({"x": x})
        assert timed.kernel == f"tag{k}"


def test_launches_of_equal_shapes_share_their_selection() -> None:
    decision = ArgMin((Entry(0, B * 7), Entry(1, L * 5), Entry(2, B + L)))
    values = Evaluation(["B", "L"])
    options, rows = [(B, Index.of(0), B * k) for k in range(3)], (0, 1, 2)
    choice = values.choose(decision)
    first, lines = values.select(choice, rows, options), len(values.lines)
    assert values.choose(ArgMin(decision.entries)) == choice and values.select(choice, rows, options) == first
    assert len(values.lines) == lines
    assert values.choose(Leaf(1)) != choice and values.select(choice, rows, options[::-1]) != first
    assert values.choose(decision, [[(B, "<=", L)], [], []]) != choice, "another may be launched"
    assert values.choose(decision, rows=(0, 2, 3)) != choice


def test_a_choice_must_be_total_and_fit_its_launch() -> None:
    with pytest.raises(ScheduleError, match="kernel 2 of 2"):
        build_program(plan(Leaf(2), variants=2))
    p = plan(Leaf(0))
    (one,) = p.launches
    first, *others = one.candidates
    for bad, why in (
        (replace(first, symbols=()), "passes 2 buffers and 0 symbols"),
        (replace(first, kernel="none"), "which is not in the plan"),
        (replace(first, conditions=((B, "<=", L),)), "a CPU runs every candidate at every size"),
        (replace(first, block=Block(32)), "is not for cpu"),
        (replace(first, tasks=Index.of("Q")), "uses a symbol without a source"),
        (replace(first, names=("a", "b")), "has 2 names of 1 symbols"),
    ):
        with pytest.raises(PolydynError, match=why):
            build_program(replace(p, launches=(replace(one, candidates=(bad, *others)),)))
