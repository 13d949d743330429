"""The start of a schedule for a product whose reduction is split into parts (``deal_reduction``).
Parts are lanes and warps of a block (``few_rows``), or blocks of a cluster (``gpu``, ``warpgroups``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polydyn.schedules.model import Group, Statement
from polydyn.schedules.solution.reuse import Solver
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.loops import fuse, join_parts
from polydyn.schedules.tree.names import End, b, it, p
from polydyn.schedules.tree.rewrites import CLEAR, PART, POINT, ROUND, SUM, deal_reduction
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import ACC, INIT


def start_in_parts(group: Group, roles: Roles, parts: int, points: int) -> Scheduled:
    """Return the solved matrix of each part's sums, of their sum, and of each epilogue, in the shared loops i, j.

    A part has ``points`` consecutive steps in every round.
    """
    roles = roles if roles.sunk else Solver(group).contract(roles)
    whole, derived = deal_reduction(group, roles.block, parts, points)
    band, axes = (*roles.batch, roles.row, roles.col), {roles.row: "i", roles.col: "j"}
    ends, loops = {n: End(side) for n, side in roles.sunk}, {ROUND: b("k"), POINT: p("k")}

    def part(names: Sequence[str]) -> Group:
        kept: tuple[Statement, ...] = tuple(map(whole.statement, names))
        return replace(whole, statements=kept)

    t = join_parts(
        whole, [*map(it, roles.batch), it("i"), it("j")],
        fuse(part([INIT, ACC]), (*band, PART), (ROUND, POINT), {INIT: ends[INIT]}, axes, loops),
        fuse(part([CLEAR, SUM]), band, (PART,), {CLEAR: ends[INIT]}, axes),
        *(fuse(part([x.name]), band, (), {}, axes) for x in group.epilogues),
    )  # fmt: skip
    steps, step = dict(group.backbone.iters)[roles.block], derived[roles.block]
    extents = {**t.map.extents, ROUND: steps.ceildiv(parts * points), "k": steps}
    return replace(t, map=replace(t.map, derived=derived, joined={"k": step}, extents=extents))
