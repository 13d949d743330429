"""The loop IR's checker: each kind of broken code is named."""

from __future__ import annotations

import pytest

from polydyn.codegen.check import verify_body
from polydyn.codegen.ir import (
    Alloc,
    Body,
    Call,
    Def,
    FlatLoad,
    For,
    Inst,
    Let,
    Mark,
    Outline,
    Reg,
    Set,
    Store,
    map_values,
)
from polydyn.codegen.isl_ast import name_loops
from polydyn.codegen.lower import lower, scratch_bytes
from polydyn.codegen.show import show
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import FromIndex, const, load
from polydyn.schedules.index import ZERO, Index, fetch

ix = Index.of
ONE_F = const(1.0, "float32")
GOOD = For("i", ZERO, ix("n"), (Def("r", FlatLoad("float32", "x", ix("i"))), Store("y", ix("i"), Reg("float32", "r"))))


def test_good_code_passes() -> None:
    verify_body((GOOD,), ("n",), ("x", "y"))


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ((Store("y", ix("k"), ONE_F),), "unbound"),
        ((For("i", ZERO, ix("i"), ()),), "unbound"),
        ((For("n", ZERO, ix(4), ()),), "bound twice"),
        ((Let("i", ZERO, (For("i", ZERO, ix("n"), ()),)),), "bound twice"),
        ((Store("z", ZERO, ONE_F),), "store to unknown buffer"),
        ((Store("y", ZERO, FlatLoad("float32", "z", ZERO)),), "load from unknown buffer"),
        ((Store("y", ZERO, FromIndex("float32", fetch("z", (0,)))),), "fetch from unknown buffer"),
        ((Alloc("y", "float32", ix(4), "stack", ()),), "allocated twice"),
        ((Store("y", ZERO, Reg("float32", "r")),), "register r"),
        ((Set("r", ONE_F),), "register r is set"),
        ((Def("r", ONE_F, 8), Store("y", ZERO, Reg("float32", "r"))), "register r is used with 1 lanes"),
        ((Def("r", ONE_F), Outline("f", (Set("r", ONE_F),))), "register r is set"),
        ((For("i", ZERO, ix("n"), (Def("r", ONE_F),)), Set("r", ONE_F)), "register r is set"),
        ((Store("y", ZERO, FlatLoad("float32", "x", ZERO, 8)),), "8 lanes assigned to 1"),
        ((Store("y", ZERO, load("x", (0,), "float32")),), "was not lowered"),
        ((Inst("S", ()),), "S was not consumed"),
        ((Mark("row", ()),), "row was not consumed"),
    ],
)
def test_broken_code_is_named(body: Body, reason: str) -> None:
    with pytest.raises(CodegenError, match=reason):
        verify_body(body, ("n",), ("x", "y"))


def test_instances_become_what_the_table_says() -> None:
    body: Body = (For("c0", ZERO, ix("n"), (Inst("S", (ix("c0"), ix(3))),)),)
    named = name_loops(body, {"S": ("i", "k")})
    out = lower(named, {"S": lambda a: (Store("y", a["i"] * 4 + a["k"], ONE_F),)})
    assert show(out) == "serial i in [0, n)\n  y[(4*i + 3)] = 1.0\n"
    with pytest.raises(CodegenError, match="S was not consumed"):
        verify_body(named, ("n",), ("y",))


def test_values_that_do_not_change_leave_their_nodes() -> None:
    body: Body = (GOOD, Call("f", (Reg("float32", "r"),)))
    assert map_values(body, lambda v: v) is body
    assert map_values(body, lambda v: ONE_F if isinstance(v, FlatLoad) else v)[1] is body[1]


def test_scratch_counts_every_allocation_rounded_up() -> None:
    inner = Alloc("b", "int64", ix("n"), "scratch", ())
    assert scratch_bytes((Alloc("a", "float32", ix(5), "scratch", (inner,)),)) == ix("n") * 8 + 20 + 128
    assert scratch_bytes((Alloc("a", "float32", ix(5), "stack", ()),)) == 0
