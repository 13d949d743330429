"""The proof of schedules: right ones are accepted for all sizes at once, wrong ones are rejected with a witness."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from polydyn.schedules.errors import LegalityError, PolydynError, ScheduleError
from polydyn.schedules.index import Index
from polydyn.schedules.model import SHARE, SHARES, Group
from polydyn.schedules.proof import prove as module
from polydyn.schedules.proof.prove import prove
from polydyn.schedules.solution.schedule import schedule_contract, schedule_nest
from polydyn.schedules.tree import Band, Mark, Sequence, Tree
from polydyn.schedules.tree.gpu import GpuTile, gpu_product
from polydyn.schedules.tree.limits import pad
from polydyn.schedules.tree.loops import distribute
from polydyn.schedules.tree.names import Coord, End, b, c, f, it, p, w
from polydyn.schedules.tree.scheduled import Scheduled, flat
from polydyn.schedules.tree.strategies import CpuTile, cpu_product, nest, start_product
from polydyn.schedules.tree.tilemap import Digit, Lines, Loop
from tests.support.polyhedral_groups import array, layer_norm, softmax
from tests.support.scheduled_groups import positive, product, roles

V = Index.of
G = product()
ROLES = roles(G)
MMA = GpuTile((2, 2), (2, 8), (16, 8), (2, 8), (1, 2), staged=True)
FMA = GpuTile((16, 16), (8, 8), (1, 1), (8, 1), interleaved=True)


def cpu() -> Scheduled:
    return cpu_product(G, ROLES, pack=True, fill=True)


def gpu() -> Scheduled:
    return gpu_product(G, ROLES, GpuTile())


def staged() -> Scheduled:
    return gpu_product(G, ROLES, MMA)


def stitch(make: Callable[[], Group] = softmax, tiled: bool = True) -> Scheduled:
    g = make()
    m = schedule_nest(g, positive(g))
    return nest(g, m.band, m.phases, tiled)


# -- correct schedules are accepted -----------------------------------------------------------------------------------


def test_the_steps_of_sunk_statements_come_from_the_solved_matrix() -> None:
    assert dict(ROLES.sunk) == {"INIT": "first", "DONE0": "last", "DONE1": "last"}
    with pytest.raises(ScheduleError, match="are not the loops"):
        schedule_contract(G, replace(ROLES, row="j", col="i", block="i"), positive(G))


@pytest.mark.parametrize("copies", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sizes", [CpuTile(), CpuTile(6, 2, 16, 64), CpuTile(4, 3, 1, V("K"), 1)])
def test_cpu_products(sizes: CpuTile, copies: tuple[bool, bool]) -> None:
    prove(cpu_product(G, ROLES, sizes, *copies))


@pytest.mark.parametrize("sizes", [GpuTile(), MMA, FMA], ids=["symbols", "mma", "fma"])
def test_gpu_products(sizes: GpuTile) -> None:
    prove(gpu_product(G, ROLES, sizes))


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("make", [softmax, layer_norm])
def test_rows(make: Callable[[], Group], tiled: bool) -> None:
    prove(stitch(make, tiled))


def test_one_proof_serves_all_sizes_and_extents() -> None:
    prove(cpu())
    before = module._prove.cache_info().misses
    for sizes in (CpuTile(6, 2, 16, 64), CpuTile(1, 1, 4, 3), CpuTile(14, 4, 1, 768)):
        prove(cpu_product(G, ROLES, sizes, True, True))
    assert module._prove.cache_info().misses == before


def test_other_orders_that_are_legal() -> None:
    """Register tiles by rows instead of columns, fragments inside points, another order of an axis' digits."""
    prove(bands(cpu(), lambda ms: tuple({c("i"): c("j"), c("j"): c("i")}.get(Coord(m), Coord(m)) for m in ms)))
    prove(bands(gpu(), lambda ms: tuple({f("i"): p("i"), p("i"): f("i")}.get(Coord(m), Coord(m)) for m in ms)))
    t = gpu()
    prove(axis(t, "i", 0, 3, 1, 2))


# -- rejections -------------------------------------------------------------------------------------------------------


def bands(t: Scheduled, change: Callable[[tuple[str, ...]], tuple[str, ...]]) -> Scheduled:
    """Change the members of every band."""

    def go(node: Tree) -> Tree:
        if isinstance(node, Sequence):
            return Sequence(tuple((n, go(x)) for n, x in node.children))
        if isinstance(node, Band):
            return Band(change(node.members), go(node.child))
        return Mark(node.name, go(node.child)) if isinstance(node, Mark) else node

    return replace(t, tree=go(flat(t.tree)))


def swapped(t: Scheduled, m: str, n: str) -> Scheduled:
    """Exchange the parts of the sequence that hold only statements m and n."""

    def go(node: Tree) -> Tree:
        if isinstance(node, Sequence):
            kids = [(k, go(x)) for k, x in node.children]
            at = {next(iter(k)): i for i, (k, _) in enumerate(kids) if len(k) == 1}
            if m in at and n in at:
                kids[at[m]], kids[at[n]] = kids[at[n]], kids[at[m]]
            return Sequence(tuple(kids))
        return replace(node, child=go(node.child)) if isinstance(node, (Band, Mark)) else node

    return replace(t, tree=go(flat(t.tree)))


def late(t: Scheduled, copy: str) -> Scheduled:
    """Move a copy after its readers."""

    def go(node: Tree) -> Tree:
        if isinstance(node, Sequence):
            kids = tuple((k, go(x)) for k, x in node.children)
            first = [x for x in kids if x[0] == {copy}]
            return Sequence((*(x for x in kids if x[0] != {copy}), *first))
        return replace(node, child=go(node.child)) if isinstance(node, (Band, Mark)) else node

    return replace(t, tree=go(flat(t.tree)))


def loop(t: Scheduled, n: str, coord: Coord, new: Loop) -> Scheduled:
    view = t.view(n)
    return t.put({n: replace(view, loops=tuple(new if x.coord == coord else x for x in view.loops))})


def axis(t: Scheduled, name: str, *order: int) -> Scheduled:
    digits = tuple(t.map.axes[name][n] for n in order)
    return replace(t, map=replace(t.map, axes={**t.map.axes, name: digits}))


def fixed(t: Scheduled, buffer: str, *more: Digit) -> Scheduled:
    put = tuple(replace(x, fixed=x.fixed | set(more)) if x.name == buffer else x for x in t.buffers)
    return replace(t, buffers=put)


def unscoped(t: Scheduled, buffer: str) -> Scheduled:
    return replace(t, buffers=tuple(replace(x, scope=()) if x.name == buffer else x for x in t.buffers))


def guarded(t: Scheduled, n: str, *guard: tuple[Coord, int, int]) -> Scheduled:
    return t.put({n: replace(t.view(n), guard=guard)})


def uncut(t: Scheduled, n: str, along: str) -> Scheduled:
    return replace(t, clips=tuple(x for x in t.clips if (x.statement, x.axis) != (n, along)))


def padded_maximum() -> Scheduled:
    t = uncut(stitch(), "M1", "t")
    return pad(t, "M1")


ERRORS: dict[str, tuple[str, Callable[[], Scheduled]]] = {
    "a loop runs another's digit": ("run by no loop", lambda: loop(
        cpu(), "ACC", c("i"), Loop(c("i"), (cpu().map.digit("i", p("i")),)))),
    "a lost digit": ("run by no loop", lambda: loop(cpu(), "INIT", p("j"), Loop(p("j"), cpu().map.axes["j"][2:3]))),
    "blocks and tiles change places": ("runs|place", lambda: loop(
        loop(cpu(), "DONE0", b("j"), Loop(b("j"), cpu().map.axes["j"][1:2])),
        "DONE0", c("j"), Loop(c("j"), cpu().map.axes["j"][:1]))),
    "initialised at the last block": ("backwards|where nothing was written|another epoch", lambda: loop(
        cpu(), "INIT", b("k"), replace(cpu().view("INIT").loop(b("k")), at=End.LAST))),  # type: ignore[type-var]
    "an epilogue at the first block": ("backwards: ACC -> DONE0", lambda: loop(
        cpu(), "DONE0", b("k"), replace(cpu().view("DONE0").loop(b("k")), at=End.FIRST))),  # type: ignore[type-var]
    "digits of the reduction in another order": ("backwards: ACC -> ACC", lambda: axis(gpu(), "k", 0, 2, 1)),
    "a sum in another order": ("backwards: ACC -> ACC", lambda: bands(cpu(), lambda ms: tuple(
        {p("k"): it("r"), it("r"): p("k")}.get(Coord(m), Coord(m)) for m in ms) if p("k") in ms else ms)),
    "sums saved too early": ("SAVE", lambda: swapped(cpu(), "SAVE", "ACC")),
    "sums loaded too late": ("acc", lambda: swapped(cpu(), "LOAD", "ACC")),
    "sums loaded one block late": ("LOAD|acc", lambda: guarded(cpu(), "LOAD", (b("k"), 2, 0))),
    "sums that were not saved": ("LOAD reads memory", lambda: guarded(cpu(), "SAVE", (b("k"), 0, 2))),
    "sums of all tasks in one cell": ("memory has no cell for each value", lambda: fixed(
        cpu(), "memory", cpu().map.digit("i", b("i")))),
    "sums in memory without an axis": ("memory has the axes", lambda: replace(cpu(), buffers=tuple(
        replace(x, axes=x.axes[1:]) if x.name == "memory" else x for x in cpu().buffers))),
    "an empty reduction whose steps are not cut": ("neither cut there nor padded", lambda: start_product(G, ROLES)),
    "a step too few is copied": ("ACC reads panel where nothing", lambda: guarded(
        cpu_product(G, ROLES, CpuTile(steps=V("K"), blocks=1), True), "PACK", (Coord("a_k"), 0, 1))),
    "panels too late": ("ACC reads panel", lambda: late(cpu(), "PACK")),
    "rows too late": ("ACC reads rows", lambda: late(cpu(), "FILL")),
    "fragments too late": ("ACC reads a_frag", lambda: late(gpu(), "FRAG_A")),
    "a tile too late": ("FRAG_B reads tile_b", lambda: late(gpu(), "COPY_B")),
    "registers of one fragment": ("acc", lambda: fixed(gpu(), "acc", gpu().map.digit("j", f("j")))),
    "staged rows shared by warps": ("share a cell of stage|another epoch", lambda: unscoped(staged(), "stage")),
    "a panel without its steps": ("panel", lambda: fixed(cpu(), "panel", cpu().map.digit("k", p("k")))),
    "blocks of the reduction as tasks": ("two instances of task", lambda: replace(
        cpu(), parallel=(("task", (it("n"), b("i"), b("j"), b("k"))),))),
    "units along the reduction": ("two instances of unit", lambda: replace(
        gpu(), parallel=(gpu().parallel[0], ("unit", (w("i"), w("j"), f("k")))))),
    "a store beyond the rows": ("neither cut there nor padded", lambda: uncut(gpu(), "DONE0", "i")),
    "read where nothing is written": ("reads it beyond", lambda: uncut(pad(cpu(), "INIT", "ACC"), "ACC", "j")),
    "a padded maximum": ("padding is not neutral for M1", padded_maximum),
    "values before their sum": ("backwards: D1 -> Y", lambda: swapped(stitch(), "D1", "Y")),
    "stages apart": ("backwards|where nothing|epoch|before", lambda: distribute(_unmarked(cpu()), b("k"), "ACC")),
    "runs of another axis": ("runs cover N elements, i has M", lambda: _runs(Lines(V("N"), V(3), 16, 2))),
    "runs longer than a tile": ("3 runs of 16 elements do not fit a tile of 32", lambda: _runs(
        Lines(V("M"), V(3), 16, 3))),
    "a buffer at a digit that is not there": ("which it lacks", lambda: fixed(
        gpu(), "tile_a", gpu().map.digit("j", f("j")))),
}  # fmt: skip


def _runs(lines: Lines) -> Scheduled:
    return cpu_product(G, ROLES, CpuTile(32, 2, 16, 64), lines=lines)


def _unmarked(t: Scheduled) -> Scheduled:
    def go(node: Tree) -> Tree:
        if isinstance(node, Mark):
            return go(node.child)
        if isinstance(node, Sequence):
            return Sequence(tuple((n, go(x)) for n, x in node.children))
        return replace(node, child=go(node.child)) if isinstance(node, Band) else node

    return replace(t, tree=flat(go(t.tree)))


@pytest.mark.parametrize("name", ERRORS)
def test_what_is_wrong_is_refused(name: str) -> None:
    what, make = ERRORS[name]
    with pytest.raises(PolydynError, match=what):
        prove(make())


def test_a_witness_names_statements_storage_and_an_instance() -> None:
    with pytest.raises(LegalityError) as caught:
        prove(late(cpu(), "PACK"))
    text = str(caught.value)
    assert (caught.value.node, caught.value.tensor) == ("ACC", "panel") or caught.value.tensor == "panel"
    assert "violated: [" in text and "for example " in text and "size_b_i" in text


def test_a_witness_says_elements() -> None:
    """At the schedule's own tile sizes: a register tile of 6 rows, columns of 32, blocks of 64 steps."""
    t = cpu_product(G, ROLES, CpuTile(6, 2, 16, 64), True, True)
    row = r"n = \d+, i = \d+, j = \d+"
    with pytest.raises(LegalityError, match=rf"in elements: ACC at {row}, k = \d+, r = \d+; DONE0 at {row}\n"):
        prove(swapped(replace(t, buffers=(), flow=(), carried=()), "INIT", "DONE0"))
    with pytest.raises(LegalityError) as caught:  # LOAD leaves out the second block
        prove(guarded(t, "LOAD", (b("k"), 2, 0)))
    said = str(caught.value).split("in elements")[1]
    source, sink = (int(x) for x in re.findall(r" k = (\d+)", said))
    assert max(source, sink) >= 64, "an element of the second block"


def test_an_initialiser_of_all_shares_is_no_split_reduction() -> None:
    """Blocks of a split-K product may not store the same element: each stores its part in the workspace."""
    for t in (gpu_product(G, ROLES, MMA, split=True), cpu_product(G, ROLES, CpuTile(6, 2, 16, 64), split=True)):
        with pytest.raises(LegalityError, match="two instances of task"):
            prove(t)
    stored = replace(G.arrays["E"], name="parts", shape=(V(SHARES), *G.arrays["E"].shape))
    done = replace(G.statement("DONE1"), name="DONE0", array="parts", index=(V(SHARE), V("n"), V("i"), V("j")))
    parts = replace(G, params=(*G.params, SHARES), arrays={**G.arrays, "parts": stored},
                    statements=(*G.statements[:2], done))  # fmt: skip
    sunk = replace(ROLES, sunk=ROLES.sunk[:2])
    prove(gpu_product(parts, sunk, MMA, split=True))
    prove(cpu_product(parts, sunk, CpuTile(6, 2, 16, "K", 1), split=True))


def test_a_local_outside_its_row() -> None:
    g = softmax()
    wide = replace(g, arrays={**g.arrays, "m": array("m", "local", "L")})
    moved = tuple(replace(x, iters=(("l", V("L")),), index=(V("l"),)) if x.name == "M0" else x for x in wide.statements)
    with pytest.raises(PolydynError, match=r"outside its own row|no coordinate|lack|without"):
        prove(nest(replace(wide, statements=moved), ("r",), {"M0": 0, "M1": 0, "D0": 1, "D1": 1, "Y": 2}, False))
