"""The tile map: its lemma by enumeration, element and coordinates as inverses, uneven parts, the interpreter."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.index import Index
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.tree.buffers import accumulate, promote
from polydyn.schedules.tree.gpu import GpuTile, gpu_product
from polydyn.schedules.tree.limits import clip
from polydyn.schedules.tree.loops import interchange, pull_out, tile
from polydyn.schedules.tree.names import Role, b, c, f, it, p, s, w
from polydyn.schedules.tree.strategies import CpuTile, cpu_product, start_product
from polydyn.schedules.tree.tilemap import Digit, Lines, Loop, Origin, Share, TileMap, View, When
from tests.support.scheduled_groups import product, roles, run_product

V = Index.of
SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=3)


def digits(sizes: list[int], extent: int) -> TileMap:
    """Build one axis x of these digits below a counting one, run by a statement S with a loop for each."""
    below = tuple(Digit("x", f"d{n}", V(k)) for n, k in enumerate(sizes))
    all_ = (Digit("x", "top", V("T"), When.COUNT), *below)
    view = View(tuple(Loop(it(d.name), (d,)) for d in all_), Role.MAP)
    return TileMap({"x": all_}, {"x": V(extent)}, {("S", "x"): "x"}, {"S": view}, {}, {})


@given(SIZES, st.integers(0, 40))
def test_digits_are_unique_and_in_the_order_of_elements(sizes: list[int], extent: int) -> None:
    """The mixed-radix lemma: every combination is an element, once, and elements are in lexicographic order."""
    m = digits(sizes, extent)
    size = m.sizes()["T"][1].evaluate({})
    names = [d.name for d in m.axes["x"]]
    points = list(itertools.product(range(size), *map(range, sizes)))
    elements = [m.element("S", "x").evaluate(dict(zip(names, x, strict=True))) for x in points]
    assert elements == list(range(len(points))) and len(points) >= extent


@given(st.integers(0, 60), st.integers(1, 7), st.integers(1, 9))
def test_shares_and_even_tiles_part_an_axis_in_order(extent: int, size: int, blocks: int) -> None:
    """The lemma for uneven parts: they are consecutive, cover all, and none is larger than its digit."""
    tile = Digit("x", "c_x", V("C_x"), When.COUNT)
    ds = (Digit("x", "b_x", V(blocks), When.LAUNCH), tile, Digit("x", "p_x", V(size)))
    view = View((Loop(b("x"), ds[:1]), Loop(c("x"), ds[1:2]), Loop(p("x"), ds[2:])), Role.MAP)
    m = TileMap({"x": ds}, {"x": V(extent)}, {("S", "x"): "x"}, {"S": view}, {"x": Origin(ds[1], "o", True)},
                {"x": Share(ds[0], "lo", "first")})  # fmt: skip
    found, most = [], m.sizes()["C_x"][1].evaluate({})
    for block in range(blocks):
        tiles = range(*(m.share("x", V(block + k)).evaluate({}) for k in (0, 1)))
        assert len(tiles) <= most
        for tile in tiles:
            first, end = (m.origin("x", V(tile + k)).evaluate({}) for k in (0, 1))
            assert end - first <= size
            found += [m.element("S", "x").evaluate({"o": first, "p_x": n}) for n in range(end - first)]
    assert found == list(range(extent))


def test_a_loop_over_permuted_digits_is_a_swizzle() -> None:
    """Three bits in reversed order, as for staged rows."""
    m = digits([2, 2, 2], 8)
    top, *bits = m.axes["x"]
    view = View((Loop(it("top"), (top,)), Loop(it("y"), tuple(reversed(bits)))), Role.MAP)
    m = replace(m, views={"S": view})
    assert [m.element("S", "x").evaluate({"top": 0, "y": y}) for y in range(8)] == [0, 4, 2, 6, 1, 5, 3, 7]


def test_an_element_needs_all_digits_of_its_axis() -> None:
    m = digits([2], 4)
    short = replace(m, views={"S": View(m.views["S"].loops[:1], Role.MAP)})
    with pytest.raises(ScheduleError, match="S has no digit d0:2 of axis x"):
        short.element("S", "x")
    with pytest.raises(ScheduleError, match=r"no nothing"):
        m.digit("x", "nothing")


def test_what_the_map_says_of_a_cpu_product() -> None:
    """Rows begin at the even tile's first row, columns count tiles along the axis, panels begin with the block's."""
    g = product()
    t = cpu_product(g, roles(g), CpuTile(6, 2, 16, 64), pack=True, fill=True)
    said = {n: str(e) for n, e in t.map.environment("ACC").items()}
    assert said == {"n": "n", "i": "(o_i + p_i)", "j": "(32*c_j + p_j)", "k": "(64*b_k + p_k)", "r": "r"}
    assert str(t.cell("ACC", "panel")["j"]) == "(32*c_j - 32*c_lo + p_j)"
    assert str(t.cell("PACK", "panel")["j"]) == "(lane + 16*v)"
    assert str(t.cell("ACC", "rows")["i"]) == "(o_i + p_i - r_lo)"
    assert str(t.map.environment("PACK")["j"]) == "(32*c_lo + lane + 16*v)"
    assert str(t.map.environment("FILL")["i"]) == "(a_i + r_lo)"
    assert [str(a) for a, _ in t.live("PACK")] == ["(a_k + 64*b_k)", "(32*c_lo + 16*v)"]


@pytest.mark.parametrize("M, N, K", [(5, 7, 3), (1, 1, 1), (11, 5, 8), (4, 4, 0), (13, 1, 2), (0, 3, 2)])
@pytest.mark.parametrize("copies", [(False, False), (True, False), (False, True), (True, True)])
def test_cpu_products_compute_at_ragged_sizes(M: int, N: int, K: int, copies: tuple[bool, bool]) -> None:
    g = product()
    t = cpu_product(g, roles(g), CpuTile(2, 2, 2, 2), *copies)
    for blocks in ((1, 1), (3, 2), (7, 5)):
        assert run_product(t, dict(zip(("B_i", "B_j"), blocks, strict=True)), M, N, K)


@pytest.mark.parametrize("length", [1, 2, 5, 9])
@pytest.mark.parametrize("M, N", [(10, 3), (9, 2), (5, 1), (1, 1), (0, 2)])
def test_tiles_of_runs_compute_at_ragged_sizes(M: int, N: int, length: int) -> None:
    g = product()
    t = cpu_product(g, roles(g), CpuTile(4, 2, 2, 2), lines=Lines(V("M"), V(length), 2, 2))
    prove(t)
    assert run_product(t, {"B_i": 2, "B_j": 1}, M, N)


@given(st.integers(0, 70), st.integers(1, 40), st.integers(1, 16))
def test_runs_cover_an_axis_and_stay_in_a_line(extent: int, length: int, most: int) -> None:
    lines = Lines(V(extent), V(length), most, 2)
    starts = [int(lines.start(V(r))) for r in range(int(lines.all_runs) + 1)]
    assert starts[0] == 0 and starts[-1] == extent and starts == sorted(starts)
    longest = int(lines.longest)
    for first, end in itertools.pairwise(starts):
        assert end - first <= longest <= most and (end == first or first // length == (end - 1) // length)
        if extent % length == 0 and end > first:  # as many elements as in the longest run are in the line
            assert (first + longest - 1) // length == first // length


SMALL_MMA = GpuTile((2, 1), (1, 4), (16, 8), (2, 2), (1, 2), staged=True)
SMALL_FMA = GpuTile((2, 2), (2, 2), (1, 1), (4, 1), interleaved=True)


@pytest.mark.parametrize("sizes", [SMALL_MMA, SMALL_FMA], ids=["mma", "fma"])
def test_gpu_products_compute_at_ragged_sizes(sizes: GpuTile) -> None:
    g = product()
    t = gpu_product(g, roles(g), sizes)
    assert run_product(t, {}, M=19, N=33, B=1) and run_product(t, {}, M=1, N=2, K=1, B=1)


def test_neighbouring_threads_have_neighbouring_elements_where_units_are_interleaved() -> None:
    g = product()
    inner, outer = (str(gpu_product(g, roles(g), x).map.element("ACC", "i")) for x in (SMALL_FMA, SMALL_MMA))
    assert inner == "(4*b_i + 2*f_i + p_i + w_i)" and outer == "(32*b_i + 16*f_i + p_i + 16*w_i)"
    assert (w("i"), f("i")) == ("w_i", "f_i")


def test_a_copy_may_run_axes_that_no_subscript_runs() -> None:
    """FILL of a row operand that the columns run too: every column gets a separate copy."""
    g = product()
    t = tile(tile(start_product(g, roles(g)), "i", (b, "B_i"), (p, 2)), "j", (b, "B_j"), (p, 3))
    t = interchange(t, it("n"), b("i"), b("j"), p("i"), p("j"), it("k"), it("r"))
    t = accumulate(pull_out(t, it("k"), it("r")), p("j"))
    t = promote(t, "A", "i", "FILL", "rows", b("j"), ["ACC"],
                {s("i"): (p("i"),), s("j"): (p("j"),), s("k"): ("k",), it("s"): ("r",)}, over=("j",))  # fmt: skip
    for axis in ("i", "j"):
        t = clip(t, axis, "INIT", "ACC", "DONE0", "DONE1")
    assert t.buffer("rows").axes == ("n", "i", "k", "r", "j")
    prove(t)
    assert run_product(t, {}, 5, 7, 3) and run_product(t, {}, 1, 1, 1)
