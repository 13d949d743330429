"""Generated mutants of tile maps, kernels, plans and guards: the check of each subject kills planted ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from random import Random

import onnx.parser
import pytest

from polydyn.codegen.ir import Body
from polydyn.schedules.index import ONE
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.testing.kernel_graphs import graph
from polydyn.testing.loops import sizes
from polydyn.testing.loops.check import Case
from polydyn.testing.loops.mutants import mutants as changed_loops
from polydyn.testing.loops.score import planted
from polydyn.testing.loops.sizes import cases_by_kernel
from polydyn.testing.mutants import guards, kernels, schedules
from polydyn.testing.mutants.__main__ import MIN_PERCENT, SUBJECTS, main
from polydyn.testing.mutants.score import Score, table
from polydyn.testing.mutants.tilemaps import mutants as changed_maps
from polydyn.testing.plan.check import sizes_in_shares
from polydyn.testing.plan.mistakes import ON_LAUNCHES, ON_SLOTS
from polydyn.testing.plan.planned import Planned, plans_of
from polydyn.testing.plan.plant import first_fault, trial

SPLIT = """<ir_version: 10, opset_import: ["" : 21]>
g (float[A, B] x, float[B, 20] y) => (float[A, 20] o) { t = Tanh (x) o = MatMul (t, y) }"""
"""A model whose product is split along a long reduction."""
MUTANTS = 6
"""Number of mutants of a subject that are planted here."""


@cache
def row_schedules() -> list[Scheduled]:
    return schedules.schedules_of(schedules.TARGET, ("rows",))


def test_a_changed_tile_map_is_refused_or_computes_something_else() -> None:
    """A loop that runs no digit or the digits of another loop, an axis without a digit, a bound that is not checked."""
    t = next(t for t in row_schedules() if len(t.group.statements) == 3 and "P_t" in t.map.sizes())
    calls = schedules.Calls(t, 0)
    assert calls.at and schedules.accepted(t) and calls.right(t)
    for kind in ("runs nothing", " runs what ", " without ", "is not cut along", "is larger there", "change places"):
        what, mutant = next((w, m) for w, m in changed_maps(t) if kind in w)
        assert not (schedules.accepted(mutant) and calls.right(mutant)), what


def test_the_interpreter_alone_sees_most_changes_of_a_schedule() -> None:
    t = next(t for t in row_schedules() if len(t.group.statements) == 1)
    calls = schedules.Calls(t, 0)
    assert len([w for w, m in changed_maps(t) if not calls.right(m)]) >= MUTANTS


@pytest.fixture(scope="module")
def tables() -> Planned:
    return first_group(plans_of(graph("tables"), target=kernels.TARGET)[0])


def first_group(plan: Planned, statements: int = 0) -> Planned:
    """Return a plan of the first kernels whose group has ``statements`` statements. 0: any number."""
    first = next(p for p in plan.kernels.placed if statements in (0, len(p.lowered.group.statements)))
    return replace(plan, kernels=replace(plan.kernels, placed=[first]))


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "DRAWS", 7)


def test_changed_loops_compute_something_else(tables: Planned) -> None:
    ((_, cases),) = cases_by_kernel([tables], 1.0, Counter()).items()
    tried = list(planted(cases, tables.loops, MUTANTS, 0, Counter()))
    assert len(tried) >= MUTANTS
    assert [text for text, kills in tried if not kills()] == []


def test_sizes_execute_tails() -> None:
    """The model of an elementwise kernel makes only whole vectors. Other parameters and tile sizes leave a rest."""
    plan = first_group(plans_of(graph("rounded"), target=kernels.TARGET)[0], 1)
    ((name, cases),) = cases_by_kernel([plan], 1.0, Counter()).items()
    every = changed_loops(plan.loops[name], 200, 0, _all(cases, plan.loops))
    tails = [m for m in every if "is taken the other way" in m.text]
    assert tails
    assert all(any(c.run({**plan.loops, name: m.body}) for c in cases) for m in tails)


def _all(cases: Sequence[Case], loops: Mapping[str, Body]) -> set[Hashable]:
    executed = set[Hashable]()
    for c in cases:
        c.run(loops, executed)
    return executed


def test_changed_plans_are_seen() -> None:
    plan = plans_of(onnx.parser.parse_model(SPLIT), target=kernels.TARGET)[0]
    shares = sizes_in_shares(plan)
    assert shares, "the launch that adds partial sums runs"
    assert first_fault(plan, shares=shares) is None
    tried = [(m, made) for m in (*ON_LAUNCHES, *ON_SLOTS) if (made := m(plan, Random(0)))][:MUTANTS]
    assert len(tried) >= MUTANTS - 2
    assert [made[0] for m, made in tried if not trial(m, *made, shares).seen] == []


@pytest.mark.parametrize("name", ["sum", "rows", "window", "space"])
def test_changed_guards_contradict_onnx(name: str) -> None:
    """Each guard that is left out, and each side that is one more or less."""
    calls = guards.Calls(name, 0)
    assert calls.guards and not calls.wrong and not calls.kills(calls.guards)
    alive = [w for w, g in guards.changes(calls.guards, sorted(calls.symbols.values())) if not calls.kills(g)]
    assert not alive


def test_a_guard_that_is_too_strong_is_seen() -> None:
    calls = guards.Calls("window", 0)
    stronger = tuple(replace(g, left=g.left + ONE) for g in calls.guards)
    assert calls.kills(stronger)


def test_the_table_has_a_row_for_each_subject(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "MODELS", {"sum": guards.MODELS["sum"]})
    one = Score("one")
    one.add("dead", lambda: True)
    one.add("alive", lambda: False)
    assert one.survivors == ["alive"]
    assert [x.split()[1:4] for x in table([one]).splitlines()[1:]] == [["2", "1", "50.0"]] * 2
    assert main(["guards", "--each", "3"]) == 0
    assert capsys.readouterr().out.count("guards ") == 2


@pytest.mark.slow
@pytest.mark.parametrize("subject", SUBJECTS)
def test_scores_are_high(subject: str) -> None:
    found = SUBJECTS[subject](4, 0)
    assert found.percent >= MIN_PERCENT, found.survivors
