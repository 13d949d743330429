"""Each transformation of (tree, tile map): its result, as a golden text, and its rejections."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.index import Index
from polydyn.schedules.model import Group
from polydyn.schedules.show import show_group
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.buffers import accumulate, carry, keep, promote, send, spread
from polydyn.schedules.tree.gpu import GpuTile, gpu_product, stage_sums
from polydyn.schedules.tree.limits import assign, clip, mark, pad, unmark
from polydyn.schedules.tree.loops import (
    Launch,
    balance,
    begins,
    distribute,
    fuse,
    interchange,
    join_parts,
    pull_out,
    refine,
    regroup,
    rename,
    sequence_phases,
    tile,
)
from polydyn.schedules.tree.names import End, MarkName, a, b, c, e, it, p, s
from polydyn.schedules.tree.rewrites import deal_reduction, merge, pad_reduction, permute_reduction, split_reduction
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import ROWS, VECTOR, start_product
from tests.support.polyhedral_groups import matmul, softmax
from tests.support.schedule_text import text
from tests.support.scheduled_groups import product, roles

Golden = Callable[[str, str], None]
V = Index.of


def whole() -> Scheduled:
    return start_product(product(), roles(product()))


def tiled() -> Scheduled:
    t = tile(whole(), "i", (b, "B_i"), (c, Launch("C_i")), (p, 4))
    return tile(tile(t, "j", (b, "B_j"), (p, 8)), "k", (b, "B_k"), (p, 16))


def pulled() -> Scheduled:
    t = interchange(tiled(), it("n"), b("i"), b("j"), b("k"), c("i"), p("k"), it("r"), p("i"), p("j"))
    return pull_out(t, p("k"), it("r"))


def phases() -> Scheduled:
    return sequence_phases(softmax(), ("r",), [["M0"], ["M1"], ["D0"], ["D1"], ["Y"]])


HIDDEN = [c("i"), p("i"), p("k"), "r"]
"""Iterators of A that one step of b_k reads."""

MADE: dict[str, Callable[[], Scheduled]] = {
    "fuse": whole,
    "sequence_phases": phases,
    "tile": tiled,
    "refine": lambda: refine(tiled(), "j", p("j"), ("q_j", "Q"), ("lane", 4)),
    "interchange": lambda: interchange(whole(), it("i"), it("j"), it("n"), it("k"), it("r")),
    "pull_out": pulled,
    "accumulate": lambda: accumulate(pulled(), c("i")),
    "carry": lambda: carry(accumulate(pulled(), c("i")), b("k")),
    "promote": lambda: promote(pulled(), "A", "i", "FILL", ROWS, b("k"), ["ACC"],
                               {s("i"): (c("i"), p("i")), a("k"): (p("k"),)}, ["r"]),
    "send": lambda: send(pulled(), "DONE0", "SEND", "out", c("i"), {s("i"): [p("i")]}),
    "regroup": lambda: regroup(pulled(), ["DONE0"], [p("i"), p("j")], {e("v"): (p("j"), p("i"))}),
    "distribute": lambda: distribute(whole(), it("k"), "ACC"),
    "rename": lambda: rename(distribute(whole(), it("k"), "ACC"), ["DONE0"], {it("k"): p("k")}),
    "keep": lambda: keep(phases(), "m", "peak", it("r")),
    "clip": lambda: clip(tiled(), "i", "INIT", "ACC", whole=1),
    "pad": lambda: pad(tiled(), "ACC"),
    "assign": lambda: assign(tiled(), "task", b("i"), b("j")),
    "mark": lambda: mark(mark(tiled(), MarkName.MICRO, b("k"), "ACC"), MarkName.TASK, None),
    "unmark": lambda: unmark(MADE["mark"](), MarkName.TASK),
    "balance": lambda: balance(tiled(), "i", "first_tile", "first_row"),
    "begins": lambda: begins(tiled(), "i", c("i"), "o_i", even=True),
    "spread": lambda: spread(promote(pulled(), "A", "i", "FILL", ROWS, b("k"), ["ACC"], {}, HIDDEN), "FILL", "yx"),
    "join_parts": lambda: join_parts(softmax(), [it("r")], *(
        sequence_phases(replace(softmax(), statements=softmax().statements[n]), ("r",), stages)
        for n, stages in ((slice(0, 2), [["M0"], ["M1"]]), (slice(2, 5), [["D0"], ["D1"], ["Y"]])))),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_what_a_transformation_makes(name: str, golden: Golden) -> None:
    golden(f"transformations/{name}.txt", text(MADE[name]()))


REWRITTEN: dict[str, Callable[[], Group]] = {
    "merge": lambda: merge(product(), ("k", "r"), "step")[0],
    "pad_reduction": lambda: pad_reduction(_few_steps(), "r", V(8)),
    "permute_reduction": lambda: permute_reduction(product(), ("r", "k")),
    "split_reduction": lambda: split_reduction(product(), "share", "shares"),
    "deal_reduction": lambda: deal_reduction(merge(product(), ("k", "r"), "step")[0], "step", 32, 4)[0],
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_what_a_rewrite_of_the_group_makes(name: str, golden: Golden) -> None:
    golden(f"transformations/{name}.txt", show_group(REWRITTEN[name]()))


TRANSFORMATIONS: tuple[Callable[..., object], ...] = (
    accumulate, assign, balance, begins, join_parts, carry, clip, deal_reduction, distribute, fuse, interchange, keep,
    mark, merge, pad, pad_reduction, permute_reduction, promote, pull_out, refine, regroup, rename, send,
    sequence_phases, split_reduction, spread, stage_sums, tile, unmark,
)  # fmt: skip


@pytest.mark.parametrize("f", TRANSFORMATIONS, ids=lambda f: f.__name__)
def test_a_transformation_says_what_it_is_elsewhere_what_it_makes_and_what_it_refuses(f: Callable[..., object]) -> None:
    missing = [x for x in ("isl", "Halide", "TVM", "Before", "After", "Refuses") if x not in (f.__doc__ or "")]
    assert not missing and {*MADE, *REWRITTEN} <= {x.__name__ for x in TRANSFORMATIONS}


REJECTIONS: dict[str, tuple[str, Callable[[], object]]] = {
    "fuse": ("S2 has no iterator k and no step", lambda: fuse(matmul(), "ij", "k", {})),
    "start_product": ("are not the loops", lambda: start_product(product(), Roles(("n",), "k", "j", "i", ("r",)))),
    "start_product by another name": ("have the names of axes", lambda: start_product(
        product(), Roles(("n", "i"), "x", "j", "k", ("r",), (("INIT", "first"),)))),
    "rename": ("has loops .*b_i.* already", lambda: rename(tiled(), ["INIT"], {p("i"): b("i")})),
    "tile an unknown axis": ("no axis x", lambda: tile(whole(), "x", (b, "B"), (p, 4))),
    "tile twice": ("is tiled already", lambda: tile(tiled(), "i", (b, "X"), (p, 4))),
    "tile of nothing": ("the size of p_i is 0", lambda: tile(whole(), "i", (b, "B_i"), (p, 0))),
    "refine": ("3 does not divide p_j:8", lambda: refine(tiled(), "j", p("j"), ("q_j", "Q"), ("lane", 3))),
    "refine nothing": ("no x", lambda: refine(tiled(), "j", "x", ("q_j", "Q"), ("lane", 2))),
    "interchange": ("no band has exactly", lambda: interchange(whole(), it("i"), it("j"))),
    "pull_out": ("no band has the loops", lambda: pull_out(tiled(), c("i"))),
    "pull_out behind": ("come after a part that runs later", lambda: pull_out(
        fuse(product(), "nij", "kr", {"INIT": End.LAST, "DONE0": End.FIRST, "DONE1": End.LAST}), it("k"), it("r"))),
    "keep": ("b_k is not a loop of INIT", lambda: keep(_outside(), "D", "acc", b("k"))),
    "carry": ("no initialiser is sunk into c_i", lambda: carry(accumulate(pulled(), c("i")), c("i"))),
    "send": ("k is not a loop of DONE0", lambda: send(pulled(), "DONE0", "SEND", "out", it("k"), {})),
    "send what is above": ("runs the digits .'b_i'.", lambda: send(
        pulled(), "DONE0", "SEND", "out", c("i"), {s("i"): [b("i")]})),
    "send what is read": ("access m, which M0 has not sent", lambda: send(phases(), "M0", "SEND", "out", it("r"), {})),
    "carry nothing": ("the sums have no buffer", lambda: carry(pulled(), b("k"))),
    "promote": ("copies the digits", lambda: promote(pulled(), "A", "i", "FILL", ROWS, b("k"), ["ACC"],
                                                     {s("i"): (p("i"),), a("k"): (p("k"),)})),
    "promote nowhere": ("is not a loop of ACC", lambda: promote(pulled(), "A", "i", "FILL", ROWS, VECTOR, ["ACC"], {})),
    "promote another": ("does not read C", lambda: promote(pulled(), "C", "j", "FILL", ROWS, b("k"), ["ACC"], {})),
    "regroup": ("does not run the digits", lambda: regroup(pulled(), ["DONE0"], [p("i")], {e("v"): (p("j"),)})),
    "regroup apart": ("are not loops of one band", lambda: regroup(pulled(), ["ACC"], [b("i"), p("i")],
                                                                   {e("v"): (b("i"), p("i"))})),
    "distribute": ("has no loop v over a sequence", lambda: distribute(whole(), VECTOR, "ACC")),
    "join_parts": ("does not begin with the loops", lambda: join_parts(product(), [it("x")], whole())),
    "balance": ("no tiles to share", lambda: balance(whole(), "i", "lo", "first")),
    "begins": ("no x", lambda: begins(tiled(), "i", it("x"), "o_i")),
    "clip": ("INIT has no digit of axis k", lambda: clip(tiled(), "k", "INIT")),
    "clip nothing": ("no statement X", lambda: clip(tiled(), "i", "X")),
    "pad": ("no statement X", lambda: pad(tiled(), "X")),
    "assign": ("runs a reduction", lambda: assign(tiled(), "task", b("k"))),
    "mark": ("DONE0 has no loop v", lambda: mark(tiled(), MarkName.TASK, VECTOR, "DONE0")),
    "merge": ("accesses D at a reduction step", lambda: merge(_summed_in_place(), ("k", "r"), "step")),
    "pad_reduction": ("is not a sum of products that None steps", lambda: pad_reduction(product(), "r", V(8))),
    "pad_reduction by less": ("that 5 steps could extend to 4", lambda: pad_reduction(_few_steps(), "r", V(4))),
    "permute_reduction": ("prod may not be reassociated", lambda: permute_reduction(_reduced("prod"), ("r", "k"))),
    "permute_reduction of others": ("are not the iterators", lambda: permute_reduction(product(), ("k", "j"))),
    "split_reduction": ("prod may not be reassociated", lambda: split_reduction(_reduced("prod"), "share", "S")),
    "spread": ("FILL has loops of its own", lambda: spread(MADE["promote"](), "FILL", ("y", "x"))),
    "deal_reduction": ("max cannot be split over lanes", lambda: deal_reduction(_reduced("max"), "k", 32, 4)),
    "deal_reduction of several": ("sums over more than k", lambda: deal_reduction(product(), "k", 32, 4)),
    "whole fragments": ("does not divide", lambda: gpu_product(
        product(), roles(product()), GpuTile((2, 2), (2, 6), (16, 8), (2, 8), (1, 2), staged=True))),
    "sums of threads": ("instructions of 16 rows", lambda: gpu_product(product(), roles(product()),
                                                                       GpuTile(staged=True))),
}  # fmt: skip


@pytest.mark.parametrize("name", REJECTIONS)
def test_what_a_transformation_refuses(name: str) -> None:
    why, make = REJECTIONS[name]
    with pytest.raises(ScheduleError, match=why):
        make()


def _outside() -> Scheduled:
    return pull_out(tiled(), b("k"), p("k"), it("r"))


def _few_steps() -> Group:
    g = product()
    iters = tuple((x, V(5) if x == "r" else e) for x, e in g.backbone.iters)
    return replace(g, statements=tuple(replace(x, iters=iters) if x.reduce else x for x in g.statements))


def _reduced(by: str) -> object:
    g = product()
    return replace(g, statements=tuple(replace(x, reduce=by) if x.reduce else x for x in g.statements))


def _summed_in_place() -> object:
    g = product()
    index = (V("n"), V("i"), V("k"))
    return replace(g, statements=tuple(replace(x, index=index) if x.reduce else x for x in g.statements))
