"""Dependences of groups, and the safe isl layer below them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import islpy as isl
import pytest

from polydyn.schedules import isl_util
from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.expr import const
from polydyn.schedules.group.dependence import _analyse, analyse
from polydyn.schedules.index import Index, fetch
from polydyn.schedules.isl_util import child, equals, frame, limits, maps, pair
from polydyn.schedules.model import Group, Statement
from tests.support.polyhedral_groups import PAD_CONV_FACTS, F, array, group, ld, matmul, pad_conv, softmax, statement


def pairs(u: object) -> set[tuple[str, str]]:
    return {pair(m) for m in maps(u)}


def without(g: Group, name: str) -> Group:
    return replace(g, statements=tuple(s for s in g.statements if s.name != name))


def test_reductions_are_kept_apart() -> None:
    d = analyse(matmul())
    assert pairs(d.flow) == {("S2", "S3"), ("S3", "S4")}
    assert pairs(d.reduction) == {("S3", "S3")}
    assert "k = -1 + K] -> S4" in str(d.flow), "exact: only the last accumulation reaches the epilogue"


def test_stages_of_softmax() -> None:
    d = analyse(softmax())
    assert pairs(d.flow) == {("M0", "M1"), ("M1", "D1"), ("M1", "Y"), ("D0", "D1"), ("D1", "Y")}
    assert d.anti.is_empty()


def test_overwriting_gives_anti_and_output_dependences() -> None:
    x = [array("x", "input", "M"), array("t", "local", "M"), array("y", "output", "M")]
    i: dict[str, Index | int | str] = {"i": "M"}
    g = group(
        "reuse", "M", x,
        [statement("A", i, "t", "i", ld("x", "i")), statement("B", i, "y", "i", ld("t", "i")),
         statement("C", i, "t", "i", const(1, F))],
    )  # fmt: skip
    d = analyse(g)
    assert pairs(d.anti) == {("B", "C")} and pairs(d.output) == {("A", "C")}


def test_missing_initialiser_is_found_with_a_witness() -> None:
    with pytest.raises(LegalityError, match=r"D is read before anything is written there: S3(.|\n)*for example"):
        analyse(without(matmul(), "S2"))


def test_padding_one_short_is_found() -> None:
    analyse(pad_conv(), PAD_CONV_FACTS)
    with pytest.raises(LegalityError, match="Ap is read before anything is written"):
        analyse(pad_conv(), PAD_CONV_FACTS[:1])  # nothing ties the padded width to W


def test_opaque_read_of_an_intermediate_waits_for_all_of_it() -> None:
    at = fetch("idx", ["i"])
    g = group(
        "gather", "M", [array("idx", "input", "M"), array("t", "local", "M"), array("y", "output", "M")],
        [statement("A", {"i": "M"}, "t", "i", const(1, F)), statement("B", {"i": "M"}, "y", "i", ld("t", at))],
    )  # fmt: skip
    d = analyse(g)
    (m,) = maps(d.flow)
    assert "A[i] -> B[i']" in str(m), "any element of the producer may be read by any instance"


def test_division_by_a_constant_is_exact() -> None:
    """Split heads: the consumer's element (h, c) is read from the producer's column 64 h + c, and no other."""
    i = Index.of("i")
    g = group(
        "split", "M MM", [array("t", "local", "M", 64), array("y", "output", "MM")],
        [statement("A", {"h": "M", "c": 64}, "t", "h c", const(1, F)),
         statement("B", {"i": "MM"}, "y", "i", ld("t", i // 64, i % 64))],
    )  # fmt: skip
    d = analyse(g, [equals("MM", 64 * Index.of("M"))])
    (m,) = maps(d.flow)
    assert m.is_injective() and m.is_bijective()


def test_fetched_subscripts_are_reads() -> None:
    """The gather's index is computed in the same group: it must be ready before."""
    g = group(
        "index", "M", [array("x", "input", "M"), array("n", "local", "M"), array("y", "output", "M")],
        [statement("A", {"i": "M"}, "n", "i", const(1, F)),
         statement("B", {"i": "M"}, "y", "i", ld("x", fetch("n", ["i"])))],
    )  # fmt: skip
    assert pairs(analyse(g).flow) == {("A", "B")}
    wrong = replace(g, arrays={n: a for n, a in g.arrays.items() if n != "n"}, statements=g.statements[1:])
    with pytest.raises(ScheduleError, match="accesses n, which group index does not have"):
        analyse(wrong)


def test_scatter_orders_everything_after_it() -> None:
    out = (fetch("idx", ["i"]),)
    scatter = Statement("B", (("i", Index.of("M")),), "y", out, const(1, F))
    g = group(
        "scatter", "M", [array("idx", "input", "M"), array("y", "output", "M")],
        [statement("A", {"i": "M"}, "y", "i", const(0, F)), scatter],
    )  # fmt: skip
    d = analyse(g)
    assert pairs(d.output) == {("A", "B"), ("B", "B")}, "two instances may hit one element"


def test_operation_limit_stops_isl_and_leaves_it_usable() -> None:
    _analyse.cache_clear()  # earlier analyses take no operations
    with pytest.raises(ScheduleError, match="more than 100 operations"), limits(100):
        analyse(softmax())
    analyse(softmax())


def test_isl_is_used_safely() -> None:
    """One module touches positions; no module registers callbacks (an exception in one corrupts the heap)."""
    for path in Path(isl_util.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert not re.search(r"foreach_|every_|at_each_domain|_bottom_up|_top_down|set_create_leaf|_each_for", text), (
            path
        )
        assert path.name == "isl_util.py" or "dim_type" not in text, path


def test_child_is_bounds_checked() -> None:
    node = isl.Schedule.from_domain(isl.UnionSet("{ A[] }")).get_root()
    with pytest.raises(ScheduleError, match="1 children"):
        child(node, 5)


def test_affine_conversion() -> None:
    f = frame("S", ("i", "j"), ("N",))
    i = Index.of("i")
    assert str(f.aff(2 * i - "N" + 3)).endswith("[(3 - N + 2i)] }")
    assert "floor" in str(f.aff(i % 8)) or "mod" in str(f.aff(i % 8))
    for wrong in (i * "j", Index.of("q"), i // "N"):
        with pytest.raises(ScheduleError, match="not affine"):
            f.aff(wrong)
