"""A walk over keys in two turns: tiles before a mask's end, then the others if a row of the block needs them.

A mask of a large negative number hides keys from rows that have seen larger logits, and only from those
(``schedules/laws/masks.py``): warps vote on it between the turns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from polydyn.codegen.cuda.instructions import LANE
from polydyn.codegen.cuda.softmax import OWN, OnlineRows
from polydyn.codegen.ir import Body, Compare, Def, FlatLoad, For, If, Let, Reg, Set, Store
from polydyn.codegen.passes.threads import combine_lanes
from polydyn.schedules.expr import Const, FromIndex, Value, const, op
from polydyn.schedules.index import ONE, ZERO, Index

V = Index.of
VOTES, TURN, MORE = "votes", "turn", "more"
"""The warps' votes in shared memory; the loop over turns; 1 in a turn over the other tiles that is wanted, else 0."""


def turns(tiles: For, end: Index, warps: int, decide: Body, walk: Callable[[For], Body]) -> Body:
    """``walk`` over the tiles before ``end``, then over the others if one of ``warps`` has voted for it.

    ``decide``: what is done before the votes are read.
    """
    zero, one = const(0, "int32"), const(1, "int32")
    votes: Value = zero
    for n in range(warps):
        votes = op("add", votes, FlatLoad("int32", VOTES, V(n)))
    wanted = op("and", op("gt", FromIndex("int32", V(TURN)), zero), op("gt", votes, zero))
    last = end + V(MORE) * (tiles.hi - end)
    turn: Body = (
        If((Compare("==", V(TURN), ONE),), decide),
        Def(MORE, op("where", wanted, one, zero)),
        Let("first", V(TURN) * end, (Let("last", last, walk(replace(tiles, lo=V("first"), hi=V("last")))),)),
    )
    return (For(TURN, ZERO, V(2), turn, "unroll1"),)


def vote(online: OnlineRows, least: float, row: Index, warp: Index) -> Body:
    """Whether a warp has a row for which masked logits may count, all it has seen being below ``least``: 1 or 0.

    ``row``: the first one of the warp; ``warp``: its place among the votes.
    """
    seen = Reg("float32", "seen")
    top = op("mul", FlatLoad("float32", "top", OWN), Const("float32", online.factor))
    exists = Compare("<", row + LANE // 4 + OWN * 8, online.scores.of.M)
    enough = op("where", op("ge", seen, Const("float32", least)), const(0, "int32"), const(1, "int32"))
    return (
        Def("seen", Const("float32", float("inf"))),
        *online.each_row((If((exists,), (Set("seen", top, 1, "min"),)),)),
        *combine_lanes("seen", seen, "min"),
        If((Compare("==", LANE, ZERO),), (Store(VOTES, warp, enough),)),
    )
