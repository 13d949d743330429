"""Tiles of large windows: rejections, and statements outside of bounds checks."""

from __future__ import annotations

import pytest

from polydyn.codegen.cuda.window_tiles import check_sums
from polydyn.codegen.ir import Body, FlatLoad, For, Let, Store
from polydyn.codegen.passes.hoist import divide_before
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import Const, Value
from polydyn.schedules.index import ONE, Index
from polydyn.schedules.model import Array

V = Index.of
F = "float32"
ARRAYS = {n: Array(n, F, (ONE,), role, (ONE,)) for n, role in (("s", "local"), ("y", "output"))}
PRODUCT = FlatLoad(F, "x", V("row"))


def add(cell: int, value: Value = PRODUCT, reduce: str | None = "sum", buffer: str = "s") -> Store:
    return Store(buffer, V(cell) + "t", value, reduce)


REJECTIONS = {
    "a sum of two lines": ([add(0)], [add(0)]),
    "a sum of what another line adds to": ([add(0)], [add(2, FlatLoad(F, "s", V(0)))]),
    "no sum": ([add(0)], [add(2, reduce=None)]),
    "a sum in memory": ([add(0)], [add(2, buffer="y")]),
}


@pytest.mark.parametrize("case", REJECTIONS)
def test_lines_have_sums_of_their_own(case: str) -> None:
    """Otherwise they cannot be reordered."""
    check_sums([[(add(0), ()), (add(4), ())], [(add(2), ())]], ARRAYS)
    with pytest.raises(CodegenError, match="sums of their own"):
        check_sums([[(s, ()) for s in line] for line in REJECTIONS[case]], ARRAYS)


def test_quotients_of_sizes_are_named_once() -> None:
    """Quotients by constants too, but no expressions that depend on a thread's number."""
    address = V("u") * ((V("n") + 1) // 2) + V("tid") // 3
    body: Body = (For("u", V(0), V(7), (Store("y", address, Const(F, 0.0)),)),)
    assert divide_before(body, "q") == body
    (named,) = divide_before(body, "q", ("n",))
    assert isinstance(named, Let) and named.value == (V("n") + 1) // 2
    (loop,) = named.body
    assert isinstance(loop, For) and loop.body == (Store("y", V("u") * named.var + V("tid") // 3, Const(F, 0.0)),)
