"""Parts of a graph with steps of the host: levels, guards, inputs of each part (docs/adr/0027-parts.md)."""

from __future__ import annotations

from dataclasses import replace

import onnx
import onnx.parser
import pytest

from polydyn.errors import PolydynError
from polydyn.graph.cut import Part, Parts, cut, verify_parts
from polydyn.graph.expand import import_parts
from polydyn.graph.ir import HostStep, size_input
from polydyn.schedules.names import internal_name


def parts_of(text: str) -> Parts:
    return cut(import_parts(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]>\n{text}')))


MASK = """
g (float[H, W] x, float[B] z) => (float[M] y, float[H, W] e) {
    zero = Constant <value = float {0}> ()
    m = Greater (x, zero)
    e = Exp (x)
    i = NonZero (m)
    t = Transpose <perm = [1, 0]> (i)
    v = GatherND (e, t)
    y = Add (v, z)
}
"""


def test_a_part_for_each_level_with_the_guards_that_it_can_ask() -> None:
    parts = parts_of(MASK)
    first, step, second = parts.order
    assert isinstance(first, Part) and isinstance(step, HostStep) and isinstance(second, Part)
    assert first.graph.inputs == ("x", "z") and {"m", "e"} <= set(first.graph.outputs)
    assert step.kind == "non_zero" and step.symbols == (internal_name("NonZero_3.n"),)
    assert [str(g.left) for g in first.graph.guards] == [] and len(second.graph.guards) == 1
    assert {str(second.graph.guards[0].left), str(second.graph.guards[0].right)} == {"B", internal_name("NonZero_3.n")}
    early = {s for t in first.graph.tensors.values() for d in t.shape for s in d.symbols()}
    assert early <= {"H", "W", "B"}, "nothing early is a late size"
    verify_parts(parts)


def test_steps_of_one_level_share_a_part() -> None:
    parts = parts_of("""
    g (bool[N] a, bool[N] b, float[N] x) => (float[P] y, float[Q] z) {
        y = Compress (x, a)
        z = Compress (x, b)
    }""")
    assert [type(p).__name__ for p in parts.order] == ["HostStep", "HostStep", "Part"], "one barrier for both"


def test_what_costs_nothing_moves_to_its_reader() -> None:
    parts = parts_of("""
    g (float[H, W] x, int64[2] s) => (float[A, C] y) {
        t = Transpose <perm = [1, 0]> (x)
        r = Reshape (t, s)
        y = Neg (r)
    }""")
    (part,) = [p for p in parts.order if isinstance(p, Part)]
    assert {n.output for n in part.graph.nodes} == {"t", "r", "y"}, "the view is read where it is used"
    assert len(part.sizes) == 2 and part.graph.inputs[0] == "x", "H and W show along axes, the new sizes do not"


def test_a_size_that_no_axis_shows_comes_in_by_itself() -> None:
    parts = parts_of("""
    g (int64[1] k, float[1] one) => (float[N] y) {
        e = Expand (one, k)
        y = Exp (e)
    }""")
    (part,) = [p for p in parts.order if isinstance(p, Part)]
    size = internal_name("Expand_0.shape0")
    assert part.sizes == {size_input(size): size}


def test_parts_that_read_too_early_or_give_too_little_are_found() -> None:
    parts = parts_of(MASK)
    with pytest.raises(PolydynError, match="before it is there"):
        verify_parts(replace(parts, order=tuple(reversed(parts.order))))
    with pytest.raises(PolydynError, match="before it is there"):
        verify_parts(replace(parts, order=tuple(p for p in parts.order if isinstance(p, Part))))
    with pytest.raises(PolydynError, match="gives an output"):
        verify_parts(replace(parts, order=parts.order[:1]))
