"""The schedules of kernels on the CPU: compositions of transformations that begin with the solved schedule matrix.

Axes are called i (rows), j (columns) and k (the blocked reduction) after their roles; batches and further reductions
keep their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.group.polyhedra import read_accesses
from polydyn.schedules.index import Index
from polydyn.schedules.model import SHARE, Group
from polydyn.schedules.solution.reuse import Solver
from polydyn.schedules.tiling import Roles, stages
from polydyn.schedules.tree.buffers import accumulate, carry, promote, spread
from polydyn.schedules.tree.limits import assign, clip, mark, unmark
from polydyn.schedules.tree.loops import (
    Launch,
    Size,
    balance,
    begins,
    distribute,
    fuse,
    interchange,
    pull_out,
    refine,
    sequence_phases,
    tile,
)
from polydyn.schedules.tree.names import LANE, Coord, End, MarkName, Role, a, b, c, extent, it, p
from polydyn.schedules.tree.rewrites import split_reduction
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.space import UNIT
from polydyn.schedules.tree.tilemap import Lines

V = Index.of
INIT, LOAD, ACC, SAVE, PACK, FILL, DONE = "INIT", "LOAD", "ACC", "SAVE", "PACK", "FILL", "DONE"
"""Statements. Epilogues are called DONE and a number."""
SUMS, PANEL, ROWS = "acc", "panel", "rows"
"""Buffers."""
FIRST_ROW, SHARE_ROWS, SHARE_ROWS_END, SHARE_COLUMNS, SHARE_COLUMNS_END = "o_i", "r_lo", "r_hi", "c_lo", "c_hi"
"""The first row of a register tile; the first row and the end of a task's rows; the same for its column tiles."""
VECTOR = Coord("v")
"""Vectors of a panel."""


@dataclass(frozen=True)
class CpuTile:
    """Sizes of a CPU product.

    The register tile has ``rows`` x ``vectors`` of ``lanes`` columns. ``steps``: steps of a block of the reduction.
    ``blocks``: 1 if one block is the whole reduction.
    """

    rows: Size = "P_i"
    vectors: Size = "Q_j"
    lanes: Size = "W"
    steps: Size = "P_k"
    blocks: Size = "B_k"


def in_shares(group: Group, roles: Roles) -> tuple[Group, Roles]:
    """Return a product with a split reduction. The slice is one more batch (``rewrites.split_reduction``)."""
    return split_reduction(group), replace(roles, batch=(*roles.batch, SHARE))


def loop_of(iterator: str) -> Coord:
    """Return the loop of an iterator that is not tiled; the slices of a reduction have ``b_s``."""
    return b("s") if iterator == SHARE else it(iterator)


def start_product(group: Group, roles: Roles) -> Scheduled:
    """Return the solved matrix of a product: initialiser at the first, epilogues at the last step of every reduction.

    If ``roles`` have no steps of sunk statements, the matrix is solved here. ScheduleError: the group is not a product
    of these roles.
    """
    roles = roles if roles.sunk else Solver(group).contract(roles)
    axes = {roles.row: "i", roles.col: "j", roles.block: "k"}
    clash = {*roles.batch, *roles.inner} & set(axes.values())
    if clash:
        raise ScheduleError(f"iterators {sorted(clash)} have the names of axes", node=group.name, rule="names")
    sunk = {n: End(side) for n, side in roles.sunk}
    return fuse(group, (*roles.batch, roles.row, roles.col), (roles.block, *roles.inner), sunk, axes, {SHARE: b("s")})


SYMBOLS = CpuTile()
"""All sizes as symbols."""


def cpu_product(
    group: Group, roles: Roles, sizes: CpuTile = SYMBOLS, pack: bool = False, fill: bool = False,
    places: Sequence[str] = (), split: bool = False, lines: Lines | None = None,
) -> Scheduled:  # fmt: skip
    """Schedule a matmul-like group on the CPU (TSCompiler 5.2; BLIS's loops): tasks of register tiles, blocks of K.

    ``pack``: PACK copies the columns of a block into panels. ``fill``: FILL copies its rows, or, given ``places``, a
    footprint, element by element of a box of places. ``split``: tasks have slices of the reduction (split-K).
    ``lines``: tiles of rows do not cross them, except between runs.
    """
    group, roles = in_shares(group, roles) if split else (group, roles)
    batch, inner = tuple(map(loop_of, roles.batch)), tuple(map(it, roles.inner))
    i, j, k = "i", "j", "k"
    t = start_product(group, roles)
    t = tile(t, i, (b, Launch("B_i")), (c, "C_i"), (p, sizes.rows))
    t = tile(t, j, (b, Launch("B_j")), (c, "C_j"), (p, columns(sizes)))
    t = tile(t, k, (b, sizes.blocks), (p, sizes.steps))
    t = refine(t, j, p(j), ("q_j", sizes.vectors), (LANE, sizes.lanes))
    t = begins(balance(t, i, "r_tile", SHARE_ROWS), i, c(i), FIRST_ROW, even=True, lines=lines)
    t = balance(t, j, SHARE_COLUMNS, "c_lo_element")
    t = interchange(t, *batch, b(i), b(j), b(k), c(j), c(i), p(k), *inner, p(i), p(j))
    t = pull_out(t, p(k), *inner)  # INIT and DONE stay in b_k: sunk, guarded
    t = accumulate(t, c(i))
    t = carry(t, b(k))
    own = {x: (x,) for x in inner}
    if pack:
        t = promote(t, operand(group, roles.col), j, PACK, PANEL, b(k), [ACC],
                    {VECTOR: (c(j), "q_j"), a(k): (p(k),), **own, LANE: (LANE,)}, over=(k, *roles.inner))  # fmt: skip
    rows = {a(i): (c(i), p(i)), a(k): (p(k),), **own}
    if fill:
        array, along = row_operand(group, roles)
        hidden = [x for digits in rows.values() for x in digits] if places else []
        t = promote(t, array, along, FILL, ROWS, b(k), [ACC], {} if places else rows, hidden, over=(i, k, *roles.inner))
        t = spread(t, FILL, places) if places else t
    cut = fill and not places
    for axis in (i, j):  # exact loops and masks
        t = clip(t, axis, *statements_along(t, axis))
    t = clip(t, k, ACC, *[PACK] * pack, *[FILL] * cut)
    t = clip(t, j, PACK, whole=1) if pack else t  # whole vectors
    t = clip(t, i, FILL) if cut else t
    t = assign(t, "task", *batch, b(i), b(j))
    t = mark(mark(t, MarkName.TASK, (*batch, b(i))[0], ACC), MarkName.KBLOCK, b(k), ACC)
    t = mark(mark(t, MarkName.MICRO, c(i), ACC, under=True), MarkName.REDUCE, p(k), ACC)
    t = mark(t, MarkName.PROMOTE, VECTOR, PACK) if pack else t
    return mark(t, MarkName.FILL, a(places[0] if places else i), FILL) if fill else t


def columns(x: CpuTile) -> Size:
    """Return the columns of a register tile, as a number if possible."""
    vectors, lanes = (V(n).constant for n in (x.vectors, x.lanes) if not isinstance(n, Launch))
    return "P_j" if vectors is None or lanes is None else vectors * lanes


def statements_along(t: Scheduled, axis: str) -> list[str]:
    """Return the statements that run every digit of an axis, except copies."""
    digits = set(t.map.axes[axis])
    return [n for n, w in t.map.views.items() if digits <= set(w.digits) and w.role is not Role.COPY]


def operand(group: Group, iterator: str) -> str:
    """Return the array that the accumulation reads along an iterator."""
    acc = group.backbone
    accesses = [x for x in read_accesses(acc)[1:] if any(iterator in i.symbols() for i in x.index)]
    if not accesses:
        raise ScheduleError(f"{acc.name} reads nothing along {iterator}", node=acc.name, rule="operands")
    return max(accesses, key=lambda x: len({n for i in x.index for n in i.symbols()} & set(acc.iterators))).array


def row_operand(group: Group, roles: Roles, steps: str = "k") -> tuple[str, str]:
    """Return the array that the accumulation reads along rows, and an axis that identifies its read.

    A product of one row reads nothing along rows: then it is the array that runs over the reduction but over no column.
    ``steps``: the axis of the reduction, or its innermost part if it was split.
    """
    acc = group.backbone
    if any(roles.row in i.symbols() for x in read_accesses(acc)[1:] for i in x.index):
        return operand(group, roles.row), "i"
    for x in read_accesses(acc)[1:]:
        used = {n for i in x.index for n in i.symbols()}
        if roles.block in used and roles.col not in used:
            return x.array, steps
    raise ScheduleError(f"{acc.name} reads nothing along {roles.row}", node=acc.name, rule="operands")


def nest(
    group: Group,
    band: Sequence[str],
    phases: dict[str, int],
    tiled: bool,
    across: str | None = None,
    size: Size | None = None,
    in_flight: bool = False,
) -> Scheduled:
    """Schedule element-wise and stitch groups: the shared band as tasks, stages one after another inside (BladeDISC 4).

    ``band``, ``phases``: those of the solved matrix. ``tiled``: tasks have tiles of the last iterator of the band (axis
    t), and with ``across`` of that iterator too (axis u). ``size``: elements of a tile; by default an argument of the
    kernel. The points of a tile are lanes: they run in parallel too. ``in_flight``: tasks have tiles of the last
    iterator too, of a size that is an argument, and each point of them runs all stages.
    """
    in_tiles = tiled or in_flight
    axes = {**({band[-1]: "t"} if in_tiles else {}), **({across: "u"} if across else {})}
    t = sequence_phases(group, band, [[s.name for s in x] for x in stages(group, tuple(band), phases)], axes)
    head = [it(x) for x in band if x not in axes]
    blocks, points = [b(x) for x in axes.values()], [it(x) for x in axes.values()]
    for x in axes.values():
        t = begins(tile(t, x, (b, f"B_{x}"), (it, size or Launch(extent(p(x))))), x, b(x), f"o_{x}")
        t = clip(t, x, *t.map.views)
    first, task = group.statements[0].name, [*head, *blocks]
    t = interchange(t, *task, *points) if in_tiles else t
    t = assign(assign(t, "task", *task), "lane", *points)
    shared = [*task, *points]
    t = mark(t, MarkName.ROW, shared[-1] if shared else None, first, under=True)
    t = mark(t, MarkName.TILE, points[0], first) if in_tiles else t
    return mark(t, MarkName.TASK, shared[0] if shared else None, first)


def serial(group: Group, band: Sequence[str], tiled: bool) -> Scheduled:
    """Schedule an initialiser and steps that keep their order: tasks share no element.

    ``band``: the iterators that both have. ``tiled``: the last one is innermost, in tiles (axis t) of a size that is an
    argument of the kernel; its points are lanes. Otherwise the last loop of the initialiser has lanes.
    """
    axes = {band[-1]: "t"} if tiled else {}
    t = sequence_phases(group, band, [[s.name] for s in group.statements], axes)
    task = [it(x) for x in band if x not in axes]
    if tiled:
        t = begins(tile(t, "t", (b, "B_t"), (it, Launch(extent(p("t"))))), "t", b("t"), "o_t")
        t = distribute(clip(t, "t", *t.map.views), it("t"), group.statements[0].name)
        t = unmark(t, MarkName.STAGE)
        for s in group.statements:
            own = [it(x) for x in s.iterators[len(band) :]]
            t = interchange(t, *own, it("t")) if own else t
        task.append(b("t"))
    first, initial = group.statements[0].name, group.statements[0].iterators[len(band) :]
    t = assign(t, "task", *task)
    if tiled:
        t = mark(assign(t, "lane", it("t")), MarkName.TILE, task[-1], first, under=True)
    elif initial:
        t = assign(t, UNIT, it(initial[-1]))
    return mark(t, MarkName.TASK, task[0] if task else None, first)
