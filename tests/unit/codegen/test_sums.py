"""Sums in registers: several chains for one, horizontal sums of many vectors together."""

from __future__ import annotations

from polydyn.codegen.ir import Alloc, Call, Def, FlatLoad, For, Horizontal, Node, Reg, Set, walk
from polydyn.codegen.passes.registers import split_chains
from polydyn.codegen.passes.sums import sum_together
from polydyn.schedules.index import ZERO, Index


def total(i: int, reduction: str = "sum", dtype: str = "float32") -> Set:
    return Set(f"r{i}", Horizontal(dtype, reduction, Reg(dtype, f"v{i}", 16)), 1, reduction)


def test_eight_sums_are_made_together() -> None:
    body: tuple[Node, ...] = tuple(map(total, range(13)))
    first, second = sum_together(body)
    assert isinstance(first, Alloc) and isinstance(second, Alloc)
    sets = [n for a in (first, second) for n in a.body if isinstance(n, Set)]
    assert [n.reg for n in sets] == [f"r{i}" for i in range(13)]
    calls = [n for a in (first, second) for n in a.body if isinstance(n, Call)]
    assert [len(c.args) for c in calls] == [9, 9], "the last vector fills the places that are left"
    assert first.buffer != second.buffer


def test_few_sums_and_other_reductions_stay() -> None:
    for body in (
        tuple(map(total, range(3))),
        tuple(total(i, "max") for i in range(8)),
        tuple(total(i, "sum", "int32") for i in range(8)),
    ):
        assert sum_together(body) == body


def loop(*body: Node) -> For:
    return For("k", ZERO, Index.of("K"), body)


def test_chains_take_turns() -> None:
    load = FlatLoad("float32", "x", Index.of("k") * 16, 16)
    out = split_chains((loop(Def("t", load, 16), Set("s", Reg("float32", "t", 16), 16, "sum")),), "k", 3)
    assert [n.reg for n in out if isinstance(n, Def)] == ["s_1", "s_2"]
    main, rest = (n for n in out if isinstance(n, For))
    whole = Index.of("K") // 3
    assert (main.hi, rest.hi) == (whole, Index.of("K") - whole * 3)
    assert [n.reg for n in walk(main.body) if isinstance(n, Set)] == ["s", "s_1", "s_2"]
    assert [n.reg for n in out if isinstance(n, Set)] == ["s", "s"], "the chains are added up after the loop"


def test_one_chain_changes_nothing() -> None:
    body = (loop(Set("s", FlatLoad("float32", "x", Index.of("k")), 1, "sum")),)
    assert split_chains(body, "k", 1) == body
    assert split_chains(body, "j", 4) == body
