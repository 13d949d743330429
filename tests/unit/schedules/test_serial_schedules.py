"""Scatters and running sums: ordered updates stay in order, and tasks share no element."""

from __future__ import annotations

from dataclasses import replace

import pytest

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.expr import FromIndex, cast, const, load, op
from polydyn.schedules.index import Index, fetch
from polydyn.schedules.laws.order import before, counts_before
from polydyn.schedules.model import Array, Group, Statement, row_major
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.tree import Band, Mark, Sequence, Tree
from polydyn.schedules.tree.limits import assign, unmark
from polydyn.schedules.tree.names import MarkName, it
from polydyn.schedules.tree.scheduled import Scheduled, flat
from polydyn.schedules.tree.strategies import serial

V = Index.of
N, D, R, E = map(V, ("n0", "n1", "n2", "n3"))


def group(reduce: str | None = "sum", row: Index | None = None) -> Group:
    """Build ``out[row, i[b, r], e] += u[b, r, e]`` after ``out[b, d, e] = 0``; the row is b by default."""
    out = Array("out", "float32", (N, D, E), "output", row_major((N, D, E)))
    given = {n: Array(n, t, (V(1),), "input", (V(1),)) for n, t in (("i", "int64"), ("u", "float32"))}
    number, rows = V("b") * R + "r", (("b", N), ("e", E))
    update = load("u", (number * E + "e",), "float32")
    place = (V("b") if row is None else row, fetch("i", (number,)), V("e"))
    start = Statement("S0", (*rows, ("d", D)), "out", (V("b"), V("d"), V("e")), const(0, "float32"), role="init")
    statements = (start, Statement("S1", (*rows, ("r", R)), "out", place, update, reduce))
    return Group("g", ("n0", "n1", "n2", "n3"), {"out": out, **given}, statements)


def running() -> Group:
    """Build ``out[b, r + 1, e] = out[b, r, e] + u[b, r, e]`` after ``out[b, 0, e] = 0``."""
    g, rows = group(), (("b", N), ("e", E))
    update = g.statements[1].value
    total = op("add", load("out", ("b", "r", "e"), "float32"), update)
    start = Statement("S0", rows, "out", (V("b"), V(0), V("e")), const(0, "float32"), role="init")
    step = Statement("S1", (*rows, ("r", R)), "out", (V("b"), V("r") + 1, V("e")), total)
    return replace(g, statements=(start, step))


@pytest.mark.parametrize("tiled", [True, False])
def test_running_sums_go_on_from_the_element_before(tiled: bool) -> None:
    prove(serial(running(), ("b", "e"), tiled))


@pytest.mark.parametrize("reduce", ["sum", None])
@pytest.mark.parametrize("tiled", [True, False])
def test_rows_and_columns_are_tasks_and_updates_are_in_order(tiled: bool, reduce: str | None) -> None:
    t = serial(group(reduce), ("b", "e"), tiled)
    assert t.parallel[0][1] == (("b", "b_t") if tiled else ("b", "e"))
    prove(t)


def updates_at_once(t: Scheduled) -> Scheduled:
    return assign(t, "unit", it("r"))


def updates_first(t: Scheduled) -> Scheduled:
    def turn(x: Tree) -> Tree:
        if isinstance(x, Sequence):
            return Sequence(tuple(reversed(x.children)))
        return replace(x, child=turn(x.child)) if isinstance(x, (Band, Mark)) else x

    return replace(t, tree=turn(flat(t.tree)))


@pytest.mark.parametrize("wrong", [updates_at_once, updates_first])
@pytest.mark.parametrize("g", [group(), group(None), running()], ids=["sum", "last", "running"])
def test_other_orders_are_refused(wrong: object, g: Group) -> None:
    t = unmark(serial(g, ("b", "e"), False), MarkName.STAGE)
    with pytest.raises(LegalityError):
        prove(wrong(t))  # type: ignore[operator]


def test_rows_that_data_decide_are_no_tasks() -> None:
    with pytest.raises(LegalityError):
        prove(serial(group(row=fetch("i", (V("r"),))), ("b", "e"), False))


def test_only_counts_in_a_total_order_are_places() -> None:
    a, b = (load("x", (V(i),), "float32") for i in ("r", "d"))
    earlier = op("lt", FromIndex("int64", V("r")), FromIndex("int64", V("d")))
    for largest in (True, False):
        assert counts_before(cast(before(a, b, largest, earlier), "int32"), "d", "r") == (a, largest)
    later = op("le", *earlier.args)  # type: ignore[attr-defined]
    for other in (before(a, b, True, later), before(a, load("y", (V("d"),), "float32"), True, earlier), earlier):
        assert counts_before(cast(other, "int32"), "d", "r") is None
