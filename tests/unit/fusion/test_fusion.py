"""Primitives that share a kernel, and the reasons."""

from __future__ import annotations

import pytest

from polydyn.fusion.pipeline import fusion_plan
from polydyn.schedules.expr import const, op
from tests.support.graphs import Sheet, matmul, wrong


def groups(s: Sheet, *outputs: str) -> list[tuple[str, list[str]]]:
    return [(g.kind, [n.output for n in g.nodes]) for g in fusion_plan(s.graph(*outputs)).groups]


def softmax(s: Sheet, x: str, name: str = "y") -> None:
    rows, n = s.tensors[x].shape
    s.let("top", (rows, 1), s.at(x, "d0", "r0"), (n,), "max")
    s.let("e", (rows, n), op("exp", op("sub", s.at(x, "d0", "d1"), s.at("top", "d0", 0))))
    s.let("total", (rows, 1), s.at("e", "d0", "r0"), (n,), "sum")
    s.let(name, (rows, n), op("div", s.at("e", "d0", "d1"), s.at("total", "d0", 0)))


def test_softmax_is_one_stitch() -> None:
    s = Sheet(x=("A", "N"))
    softmax(s, "x")
    assert groups(s, "y") == [("nest", ["top", "e", "total", "y"])]


def test_an_epilogue_joins_its_product_with_a_reason() -> None:
    s = Sheet(a=("M", "K"), b=("K", "N"), c=("N",))
    matmul(s, "x", "a", "b")
    s.let("y", ("M", "N"), op("max", op("add", s.at("x", "d0", "d1"), s.at("c", "d1")), const(0, "float32")))
    plan = fusion_plan(s.graph("x", "y"))
    assert [(g.kind, g.outputs) for g in plan.groups] == [("contract", ("x", "y"))]
    assert "y: element-wise on the contraction's output (epilogue)" in plan.groups[0].reasons


@pytest.mark.compiler
def test_a_diamond_makes_no_cycle() -> None:
    """y reads the product and a sum over it: it cannot be the product's epilogue."""
    s = Sheet(a=("M", "K"), b=("K", "N"))
    matmul(s, "x", "a", "b")
    s.let("t", ("N",), s.at("x", "r0", "d0"), ("M",), "sum")
    s.let("y", ("M", "N"), op("sub", s.at("x", "d0", "d1"), s.at("t", "d1")))
    found = groups(s, "y")
    assert found[0] == ("contract", ["x"]) and [m for _, names in found for m in names] == ["x", "t", "y"]
    assert not wrong(s.graph("y"), {"M": 5, "N": 33, "K": 3})


def test_a_transpose_is_read_in_place() -> None:
    s = Sheet(x=("A", "N"))
    s.let("t", ("N", "A"), s.at("x", "d1", "d0"))
    s.let("y", ("N", "A"), op("exp", s.at("t", "d0", "d1")))
    assert groups(s, "y") == [("nest", ["y"])]


def heads() -> Sheet:
    """Build a product, a map of it (a cast in 16 bits), and the map in another order."""
    s = Sheet(a=("B", "M", "K"), b=("B", "K", 4))
    s.let("x", ("B", "M", 4), op("mul", s.at("a", "d0", "d1", "r0"), s.at("b", "d0", "r0", "d2")), ("K",), "sum")
    s.let("m", ("B", "M", 4), op("max", s.at("x", "d0", "d1", "d2"), const(0, "float32")))
    s.let("t", ("M", "B", 4), s.at("m", "d1", "d0", "d2"))
    return s


@pytest.mark.compiler
def test_a_product_is_computed_in_the_order_that_its_reader_wants() -> None:
    s = heads()
    assert groups(s, "t") == [("contract", ["x", "t"])]
    assert not wrong(s.graph("t"), {"B": 3, "M": 5, "K": 7})


@pytest.mark.compiler
def test_a_product_that_others_read_keeps_its_order() -> None:
    s = heads()
    s.let("z", ("B", "M", 4), op("exp", s.at("x", "d0", "d1", "d2")))
    assert groups(s, "t", "z")[0] == ("contract", ["x", "z"])
    assert not wrong(s.graph("t", "z"), {"B": 3, "M": 5, "K": 7})


@pytest.mark.compiler
def test_parts_of_a_concatenation_are_written_in_place() -> None:
    s = Sheet(x=("A", 3), z=("A", 2))
    s.let("p", ("A", 3), op("exp", s.at("x", "d0", "d1")))
    s.concat("y", ["p", "z"], 1)
    plan = fusion_plan(s.graph("y"))
    assert plan.windows["p"].offset == 0 and plan.windows["y/1"].offset == 3
    assert [n.output for g in plan.groups for n in g.nodes] == ["p", "y/1"]  # only the input is copied
    assert not wrong(s.graph("y"), {"A": 4})
