"""A loop over keys in two passes: tiles before a mask's end, then the others if a row of the block needs them.

A mask of a large negative number hides keys only from rows that have a larger logit (``schedules/laws/masks.py``).
Warps vote on it between the passes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from polydyn.codegen.cuda.instructions import LANE
from polydyn.codegen.cuda.softmax import THREAD_ROW, OnlineRows
from polydyn.codegen.ir import Body, Compare, Def, FlatLoad, For, If, Let, Reg, Set, Store
from polydyn.codegen.passes.threads import combine_lanes
from polydyn.schedules.expr import Const, FromIndex, Value, const, op
from polydyn.schedules.index import ONE, ZERO, Index

V = Index.of
VOTES, KEY_PASS, MORE = "votes", "turn", "more"
"""The warps' votes in shared memory; the loop over the passes; 1 in a second pass that is needed, else 0."""


def two_pass_loop(tiles: For, end: Index, warps: int, decide: Body, walk: Callable[[For], Body]) -> Body:
    """Run ``walk`` over the tiles before ``end``. Run it over the rest if any of ``warps`` votes for it.

    ``decide``: statements before the votes are read.
    """
    zero, one = const(0, "int32"), const(1, "int32")
    votes: Value = zero
    for n in range(warps):
        votes = op("add", votes, FlatLoad("int32", VOTES, V(n)))
    needed = op("and", op("gt", FromIndex("int32", V(KEY_PASS)), zero), op("gt", votes, zero))
    last = end + V(MORE) * (tiles.hi - end)
    turn: Body = (
        If((Compare("==", V(KEY_PASS), ONE),), decide),
        Def(MORE, op("where", needed, one, zero)),
        Let("first", V(KEY_PASS) * end, (Let("last", last, walk(replace(tiles, lo=V("first"), hi=V("last")))),)),
    )
    return (For(KEY_PASS, ZERO, V(2), turn, "unroll1"),)


def vote(online: OnlineRows, least: float, row: Index, warp: Index) -> Body:
    """Vote 1 if masked logits may count in a row of a warp: all its logits so far are below ``least``.

    ``row``: the first row of the warp; ``warp``: its position among the votes.
    """
    seen = Reg("float32", "seen")
    top = op("mul", FlatLoad("float32", "top", THREAD_ROW), Const("float32", online.factor))
    exists = Compare("<", row + LANE // 4 + THREAD_ROW * 8, online.scores.of.M)
    enough = op("where", op("ge", seen, Const("float32", least)), const(0, "int32"), const(1, "int32"))
    return (
        Def("seen", Const("float32", float("inf"))),
        *online.each_row((If((exists,), (Set("seen", top, 1, "min"),)),)),
        *combine_lanes("seen", seen, "min"),
        If((Compare("==", LANE, ZERO),), (Store(VOTES, warp, enough),)),
    )
