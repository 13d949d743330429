"""Text forms: every form of every IR has one, no text is a Python repr, and every field is in it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_type_hints

import pytest

from polydyn.codegen import ir
from polydyn.codegen.ir import (
    Alloc,
    Apply,
    Between,
    Blend,
    Body,
    Broadcast,
    Call,
    Compare,
    Def,
    FlatLoad,
    For,
    Horizontal,
    If,
    Inst,
    Let,
    Mark,
    Outline,
    Parameter,
    Pointer,
    Ramp,
    Reg,
    Set,
    Store,
    Switch,
    Tile,
    Undefined,
)
from polydyn.codegen.show import show, value
from polydyn.schedules.expr import Const, FromIndex, Load, Op, Value, const, load, op
from polydyn.schedules.group.dependence import analyse
from polydyn.schedules.index import ONE, Index
from polydyn.schedules.show import show_choice, show_group
from polydyn.schedules.solution.patterns import choose
from tests.support.polyhedral_groups import matmul

ix = Index.of
X = FlatLoad("float32", "x", ix("i"))
COND = (Compare("<", ix("i"), ix("n")),)
PUT: Body = (Store("y", ix("i"), X),)
VALUES: list[Value] = [
    FlatLoad("float32", "x", ix("i"), 8, ix("s"), ix("m"), Between("bool", ix(1), ix(3), 8)),
    Reg("float32", "r", 8),
    Undefined("float32"),
    Broadcast("float32", X, 8),
    Horizontal("float32", "sum", X),
    Blend("float32", X, const(0, "float32"), ix("m")),
    Ramp("int32", ix("i"), ix(2), 8),
    Between("bool", ix("a"), ix("b"), 8),
    Apply("float32", "pd_shfl_xor", (X, const(4, "int32"))),
    Tile("float32", "tile", ix("s"), ix("r"), ix("c"), 64, 4),
    Pointer("float32", "x", ix("i")),
    Parameter("uint64", "map_a"),
    op("add", X, const(1, "float32")),
    load("x", ("i", "j"), "float32"),
    FromIndex("int32", ix("i")),
    const(2, "int32"),
]
NODES: list[ir.Node] = [
    For("i", ix(0), ix("n"), PUT, "unroll4"),
    If(COND, PUT, (Store("z", ONE, X),)),
    Let("o", ix("n") * 2, PUT),
    Mark("tile", PUT),
    Inst("ACC", (ix("i"), ix("k") + 1), ("i", "k")),
    Switch(ix("n"), ((1, ()), (4, PUT))),
    Alloc("b", "float32", ix("n"), "scratch", PUT),
    Store("y", ix("i"), X, "sum", 8, ix("s"), ix("m"), ix("stream")),
    Def("r", X, 8),
    Set("r", X, 8, "max"),
    Call("pd_sts_wide<2>", (Pointer("float32", "x", ix("i")), const(1, "int32"))),
    Outline("f_1", PUT),
]
UNSAID = {"dtype"}
"""The buffer or the register gives the dtype, except if a form changes it."""


def texts(x: Any) -> str:
    return value(x) if isinstance(x, Value) else show((x,))


def other(v: Any) -> Any:
    """Return another value of the same kind."""
    if isinstance(v, Index):
        return v + 1
    if isinstance(v, str):
        return "min" if v in ("sum", "max") else f"{v}2"
    if isinstance(v, Value):
        return Reg(v.dtype, "another")
    if isinstance(v, tuple):
        return (*v[:-1], other(v[-1]))
    if isinstance(v, Compare):
        return replace(v, relation=">")
    return v + 1 if isinstance(v, int) else Call("another")


def forms() -> set[type]:
    return {c for c in vars(ir).values() if isinstance(c, type) and issubclass(c, Value) and c is not Value} - {
        Const, FromIndex, Load, Op
    }  # fmt: skip


def test_there_is_an_example_of_every_form() -> None:
    assert {type(v) for v in VALUES} >= forms()
    assert {type(n).__name__ for n in NODES} == set(str(ir.Node).split(" | "))


@pytest.mark.parametrize("x", [*VALUES, *NODES], ids=lambda x: type(x).__name__)
def test_a_text_is_no_repr_and_says_every_field(x: Any) -> None:
    text = texts(x)
    assert not any(f"{c.__name__}(" in text for c in (*forms(), *map(type, NODES)))
    said = get_type_hints(type(x), vars(ir))
    for f in (f for f in fields(x) if f.name in said and f.name not in UNSAID and getattr(x, f.name) is not None):
        changed = replace(x, **{f.name: other(getattr(x, f.name))})
        assert texts(changed) != text, f"{f.name} is not in {text}"


def test_a_group_and_its_schedule_are_tables() -> None:
    group = matmul()
    assert show_group(group) == (
        "group matmul(M, N, K)\n"
        "  input A: float32[M, K] by (K, 1)\n"
        "  constant B: float32[K, N] by (N, 1)\n"
        "  constant C: float32[N] by (1)\n"
        "  local D: float32[M, N] by (N, 1)\n"
        "  output E: float32[M, N] by (N, 1)\n"
        "  map S2[i < M, j < N]: D[i, j] = 0.0\n"
        "  map S3[i < M, j < N, k < K]: D[i, j] += mul(A[i, k], B[k, j])\n"
        "  map S4[i < M, j < N]: E[i, j] = max(add(D[i, j], C[j]), 0.0)\n"
    )
    text = show_choice(choose(group, analyse(group)))
    assert text.startswith("pattern matmul-like, a band of 2: i, j\n")
    assert "S3  i  j  k\n" in text and "= (K - 1)\n" in text
