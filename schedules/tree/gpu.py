"""The schedules of products on a GPU, as compositions; like the CPU's, they begin with the solved schedule matrix.

The levels are TSCompiler 5.2's block, warp and instruction tiles. A *unit* executes one instruction tile: a warp
(tensor cores) or a thread (CUDA cores, an instruction of 1 x 1 x 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.index import Index, IndexLike, product
from polydyn.schedules.model import Group
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.buffers import accumulate, keep, promote, send
from polydyn.schedules.tree.limits import assign, clip, mark, pad
from polydyn.schedules.tree.loops import Launch, Size, distribute, interchange, pull_out, refine, regroup, rename, tile
from polydyn.schedules.tree.names import Coord, MarkName, b, c, e, extent, f, g, p, s, w
from polydyn.schedules.tree.nodes import Sequence as Row
from polydyn.schedules.tree.nodes import Tree
from polydyn.schedules.tree.parts import start_in_parts
from polydyn.schedules.tree.rewrites import CLEAR, PART, PARTS, POINT, ROUND, SUM, merge
from polydyn.schedules.tree.scheduled import Scheduled, all_of, flat, refuse, rewrite
from polydyn.schedules.tree.strategies import ACC, INIT, in_shares, loop_of, operand, row_operand, start_product
from polydyn.schedules.tree.tilemap import Digit

V = Index.of
COPY_A, COPY_B, FRAG_A, FRAG_B, STAGE = "COPY_A", "COPY_B", "FRAG_A", "FRAG_B", "STAGE"
SLAB, STAGED = 32, 16
"""Columns and rows of the sums of a warp that are in shared memory at a time, on their way to the epilogues."""
PLACES = ("r3", "r0", "r1", "r2")
"""Digits of a position among the staged rows, for row r3 r2 r1 r0: row bits of a group of eight in reversed order."""


def place_of_row(row: IndexLike) -> Index:
    """Return the position of a fragment's row among the staged rows. The reversal is its own inverse."""
    rest, digits = V(row), dict[str, Index]()
    for name in ("r0", "r1", "r2"):
        digits[name], rest = rest % 2, rest // 2
    digits["r3"], out = rest, V(0)
    for name in PLACES:
        out = out * 2 + digits[name]
    return out


@dataclass(frozen=True)
class GpuTile:
    """Sizes of a GPU product along rows (i), columns (j) and the reduction (k).

    ``units``, ``fragments``, ``points``: for i and j; ``steps``: fragments and points of k; ``filled``: fragments that
    one load fills. ``interleaved``: neighbouring units have neighbouring elements. ``staged``: sums pass through shared
    memory, so that epilogues run along rows.
    """

    units: tuple[Size, Size] = ("W_i", "W_j")
    fragments: tuple[Size, Size] = ("F_i", "F_j")
    points: tuple[Size, Size] = ("P_i", "P_j")
    steps: tuple[Size, Size] = ("F_k", "P_k")
    filled: tuple[int, int] = (1, 1)
    interleaved: bool = False
    staged: bool = False


def gpu_product(group: Group, roles: Roles, sizes: GpuTile, split: bool = False) -> Scheduled:
    """Schedule a matmul-like group on a GPU in blocks of units.

    Operands are copied from global to shared memory once per tile of the reduction, and from there to registers once
    per instruction step. ``split``: K is split over blocks.
    """
    steps = product(dict(group.backbone.iters)[x] for x in (roles.block, *roles.inner))
    group, old = merge(group, (roles.block, *roles.inner), roles.block)
    roles = replace(roles, inner=())
    i, j, k = "i", "j", "k"
    group, roles = in_shares(group, roles) if split else (group, roles)
    t = start_product(group, roles)
    block, unit = (*map(loop_of, roles.batch), b(i), b(j)), (w(i), w(j))
    t = replace(t, map=replace(t.map, derived=old, extents={**t.map.extents, k: steps}))
    for n, x in enumerate((i, j)):
        levels = ((w, sizes.units[n]), (f, sizes.fragments[n]), (p, sizes.points[n]))
        inside = (levels[1], levels[0], levels[2]) if sizes.interleaved else levels
        t = tile(t, x, (b, f"B_{x}"), *inside)
    t = tile(t, k, (b, "B_k"), (f, sizes.steps[0]), (p, sizes.steps[1]))
    loads: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for x, filled in zip((i, j), sizes.filled, strict=True):
        t, loads[x] = _filled(t, x, filled)
    t = interchange(t, *block, b(k), *unit, f(k), f(i), f(j), p(i), p(j), p(k))
    t = pull_out(t, b(k), f(k), p(k), together=sizes.staged)  # out of the whole reduction
    t = accumulate(t, b(j), scope=unit)
    inner = {x: [d.name for d in t.map.axes[x] if d.name != b(x)] for x in (i, j, k)}
    t = _promoted(t, group, roles, inner, loads, (k,), p(k), (), unit)
    t = stage_sums(t, unit, (*unit, f(i)), (f(j),), group.backbone.array) if sizes.staged else t
    t = assign(assign(t, "task", *block), "unit", *unit)
    t = pad(t, INIT, ACC)  # copies fill with zeros; epilogues are guarded
    done = [x.name for x in group.epilogues]
    t = clip(clip(t, i, *done), j, *done)
    return _marks(t, block[0], done, sizes.staged)


def gpu_parts(group: Group, roles: Roles, sizes: GpuTile, parts: int) -> Scheduled:
    """Schedule a product whose K is split over N blocks of a task: block n has every N-th step, from step n on.

    The blocks are units (``c_k``), and all of them are a task. They store their sums where one of them reads them
    (``add_parts``).
    Refuses: several reductions; tiles of steps that are not numbers.
    """
    if roles.inner:
        raise refuse(f"one reduction is split, not {(roles.block, *roles.inner)}")
    i, j, k = "i", "j", "k"
    block, done = (*map(loop_of, roles.batch), b(i), b(j)), [x.name for x in group.epilogues]
    numbers = [V(n) for n in sizes.steps if not isinstance(n, Launch)]
    t = start_in_parts(group, roles, parts, int(product(numbers)))
    loads: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {}
    for n, x in enumerate((i, j)):
        t = tile(t, x, (b, f"B_{x}"), (w, sizes.units[n]), (f, sizes.fragments[n]), (p, sizes.points[n]))
        t, loads[x] = _filled(t, x, sizes.filled[n])
    inside = (w(i), w(j), f(i), f(j), p(i), p(j))
    t = distribute(interchange(t, *block, *inside), w(i), ACC)
    t = tile(tile(t, PART, (c, parts)), POINT, (f, sizes.steps[0]), (p, sizes.steps[1]))
    t = rename(t, [INIT, ACC], {c(PART): c(k)})
    t = pull_out(interchange(t, c(k), b(k), *inside, p(k)), b(k), p(k))
    whole, point = f(POINT), p(POINT)
    t = regroup(t, [ACC], [p(k)], {f(k): [whole], p(k): [point]})
    t = interchange(t, b(k), w(i), w(j), f(k), f(i), f(j), p(i), p(j), p(k))
    t = keep(keep(t, PARTS, "acc", b(j)), group.backbone.array, "sums", b(j))
    unit = (c(k), w(i), w(j))
    inner = {x: [d.name for d in t.map.axes[x] if d.name != b(x)] for x in (i, j)} | {k: [whole, point]}
    t = _promoted(t, group, roles, inner, loads, (ROUND, PART, POINT), point, unit[:1], unit)
    t = add_parts(t, b(j), 1, {w(i): e("w"), w(j): e("u")}, f(i), (f(j),))
    t = assign(assign(t, "task", *block), "unit", *unit)
    t = pad(t, INIT, ACC)
    for axis in (i, j):
        t = clip(t, axis, CLEAR, SUM, *done)
    t = mark(mark(t, MarkName.TASK, block[0], ACC), MarkName.PIPELINE, b("k"), ACC)
    t = mark(mark(t, MarkName.COPY, s("i"), COPY_A), MarkName.COPY, s("k"), COPY_B)
    t = mark(mark(t, MarkName.MULTIPLY, w("i"), ACC), MarkName.EPILOGUE, w(i), STAGE)
    t = mark(mark(t, MarkName.COMBINE, e("w"), SUM), MarkName.STORE, e("i"), *done)
    return mark(t, MarkName.INSTRUCTION, p("i"), INIT, ACC, STAGE)


def _filled(t: Scheduled, x: str, filled: int) -> tuple[Scheduled, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Group the fragments of an axis that one load fills.

    Return the digits that count loads, and those inside a load.
    """
    if filled == 1:
        return t, ((f(x),), (p(x),))
    return refine(t, x, f(x), (f"g_{x}", "G"), (f"h_{x}", filled)), ((f"g_{x}",), (f"h_{x}", p(x)))


def _promoted(
    t: Scheduled, group: Group, roles: Roles, inner: Mapping[str, list[str]],
    loads: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]], steps: tuple[str, ...], point: str,
    block: tuple[Coord, ...], unit: tuple[Coord, ...],
) -> Scheduled:  # fmt: skip
    """Copy both operands to shared memory once per tile of the reduction, and to registers once per step.

    ``inner``: digits inside a tile, by axis; ``loads``: the digits that ``_filled`` returns; ``steps``: the axes of the
    reduction, which all copies run over, even if an operand is the same at every step; ``point``: the digit of an
    instruction's steps; ``block``, ``unit``: loops that have tiles and fragments of their own.
    """
    i, j, k = "i", "j", "k"
    rows, columns = row_operand(group, roles, steps[-1]), (operand(group, roles.col), j)
    for name, into, (array, along), x in ((COPY_B, "tile_b", columns, j), (COPY_A, "tile_a", rows, i)):
        order = (x, k) if name == COPY_A else (k, x)
        t = promote(t, array, along, name, into, b(k), [ACC], {s(y): inner[y] for y in order}, (), block, (x, *steps))
    for name, into, (array, along), x in ((FRAG_B, "b_frag", columns, j), (FRAG_A, "a_frag", rows, i)):
        hidden = (*loads[x][1], point)
        t = promote(t, array, along, name, into, f(k), [ACC], {g(x): loads[x][0]}, hidden, unit, (x, *steps))
    return t


def stage_sums(
    t: Scheduled, unit: tuple[Coord, ...], outer: tuple[Coord, ...], fragments: tuple[Coord, ...], sums: str,
    j: str = "j", whole: bool = False,
) -> Scheduled:  # fmt: skip
    """Pass sums through shared memory: one fragment's rows and ``SLAB`` columns of a unit at a time, rows bit-reversed.

    ``whole``: all slabs are staged first, in loops of their own, so that the following part can be a loop over slabs.
    Such a loop cannot read the sums themselves, because they are registers.

    ``unit``: loops over units; ``outer``, ``fragments``: loops of the epilogues around slabs, and over fragments of the
    columns, which are axis ``j``; ``sums``: their array. The fragment's rows are the digits r3:2 r2:2 r1:2 r0:2. A
    position among the staged rows has them in the order ``PLACES``, so that neither writes nor reads have bank
    conflicts.
    isl: graft; Halide: compute_at with GPUShared; TVM: cache_write to shared.
    Before: band e_i, e_j: DONE reads registers. After: band e_s: STAGE writes stage; band: DONE reads stage.
    Refuses: fragments of another height than ``STAGED``.
    """
    i, done = "i", [x.name for x in t.group.epilogues]
    points = t.map.digit(j, p(j)).size
    if points.constant is None or t.map.digit(i, p(i)).size != STAGED:
        raise ScheduleError("sums are staged by instructions of 16 rows", rule="whole tiles")
    t, slabs, columns = _slabs(t, [d for k in fragments for d in _loop(t, done[0], k)], SLAB // points.constant)
    t = regroup(t, done, fragments, {e("s"): slabs, e("f"): columns})
    t = refine(t, i, p(i), ("r3", 2), ("r2", 2), ("r1", 2), ("r0", 2))
    t = interchange(t, *outer, e("s"), e("f"), p(i), p(j))
    cell: dict[Coord, list[str]] = {e("f"): columns, p(i): ["r3", "r2", "r1", "r0"], p(j): [p(j)]}
    cell = {e("g"): slabs, **cell} if whole else cell
    t = promote(t, sums, j, STAGE, "stage", outer[-1] if whole else e("s"), done, cell, scope=unit)
    places: dict[Coord, list[str]] = {e(i): list(PLACES), e("j"): [*columns, p(j)], e("v"): []}
    t = regroup(t, done, [e("f"), p(i), p(j)], places)
    return distribute(t, e(i), done[0]) if len(done) > 1 else t


def add_parts(
    t: Scheduled, below: Coord, parts: int, units: Mapping[Coord, Coord], rows: Coord, fragments: tuple[Coord, ...]
) -> Scheduled:  # fmt: skip
    """Add the partial sums of a split reduction through memory that all blocks of a task can access.

    Block ``c_k`` stages the sums of its part, and each of ``parts`` blocks adds and finishes some results.

    ``units``: loops over units -> those of the epilogues over the same digits, which are not units: the data that warps
    stage is read by the same warps of all blocks, after a cluster barrier. ``rows``: the loop over rows of instructions
    of a unit; ``fragments``: loops over fragments of the columns. Each block has slabs (``e_c``), and rows of a
    fragment (``e_r``) if there are too few slabs. isl: graft; Halide, TVM: rfactor. Before: band c_k: ACC; band: SUM
    and DONE on registers. After: band c_k: ACC; STAGE; band e_c, e_r: SUM reads stage; band e_c, e_r: DONE. Refuses:
    numbers of blocks that do not divide slabs and rows.
    """
    i, j, done = "i", "j", [x.name for x in t.group.epilogues]
    after = [CLEAR, SUM, *done]
    t = pull_out(t, c(PART))

    def names(loop: Coord) -> list[str]:
        return [d.name for d in _loop(t, SUM, loop)]

    points = t.map.digit(j, p(j)).size.constant
    if points is None or t.map.digit(i, p(i)).size != STAGED:
        raise refuse("sums are staged by instructions of 16 rows", rule="whole tiles")
    t, slabs, columns = _slabs(t, [d for k in fragments for d in _loop(t, SUM, k)], SLAB // points)
    t = refine(t, i, p(i), ("r3", 2), ("r2", 2), ("r1", 2), ("r0", 2))
    cell: dict[Coord, list[str]] = {c("k"): [d.name for d in t.map.axes[PART]], **{x: names(x) for x in units}}
    cell |= {rows: names(rows), e("g"): slabs, e("f"): columns, p(i): ["r3", "r2", "r1", "r0"], p(j): [p(j)]}
    for old, new in units.items():
        t = regroup(t, after, [old], {new: names(old)})
    t = promote(t, PARTS, j, STAGE, "stage", below, [SUM], cell)
    t = replace(t, tree=_move_behind(t, STAGE, ACC))
    digits = [t.map.digit(j, n) for n in slabs]
    several = int(product(d.size for d in digits))
    each = max(1, several // parts)
    t, dealt, rest = _slabs(t, digits, each, (e("c"), e("q")))
    lines = PLACES[: (parts * each // several).bit_length() - 1]
    if several // each * 2 ** len(lines) != parts or several % each:
        raise refuse(f"{several} slabs of {STAGED} rows do not split into {parts} equal parts", rule="whole tiles")
    places: dict[Coord, Sequence[str]] = {e("c"): dealt, e("s"): rest, e("r"): lines, e(i): PLACES[len(lines) :]}
    return regroup(t, after, [*fragments, p(i), p(j)], {**places, e("j"): [*columns, p(j)], e("v"): []})


def _move_behind(t: Scheduled, name: str, after: str) -> Tree:
    """Return the tree with one part of a sequence moved after the part that contains ``after``."""

    def f(node: Tree, _: frozenset[str]) -> Tree | None:
        if not isinstance(node, Row) or not any(names == {name} for names, _ in node.children):
            return None
        moved = [x for x in node.children if x[0] == {name}]
        rest = [x for x in node.children if x[0] != {name}]
        at = next(n for n, (names, _) in enumerate(rest) if after in names) + 1
        return Row((*rest[:at], *moved, *rest[at:]))

    return rewrite(flat(t.tree), all_of(t), f)


def send_boxes(t: Scheduled, unit: tuple[Coord, ...], columns: int) -> Scheduled:
    """Send the results of the epilogues after ``stage_sums`` as boxes of a fragment's rows and ``columns`` columns.

    isl: graft; Halide: a Func's in(); TVM: cache_write.
    Before: band e_s, ...: DONE writes memory. After: band e_p: band e_s, ...: DONE writes out; SEND reads out.
    Refuses: what ``send`` refuses; columns that are not whole slabs.
    """
    done = [x.name for x in t.group.epilogues]
    if columns % SLAB:
        raise refuse(f"boxes of {columns} columns are not whole slabs of {SLAB}", rule="whole tiles")
    t, boxes, slabs = _slabs(t, list(_loop(t, done[0], e("s"))), columns // SLAB, (e("p"), e("q")))
    t = regroup(t, done, [e("s")], {e("p"): boxes, e("s"): slabs})
    for x, (name, into) in zip(done, senders(t.group), strict=True):
        t = send(t, x, name, into, e("p"), {}, unit)
    return t


def senders(group: Group) -> list[tuple[str, str]]:
    """Return the statements that send the results of each epilogue, and the buffers that hold these until then."""
    return [(f"SEND{n}", f"out{n}") for n in range(len(group.epilogues))]


def _loop(t: Scheduled, statement: str, loop: Coord) -> tuple[Digit, ...]:
    """Return the digits of a loop."""
    x = t.view(statement).loop(loop)
    if x is None:
        raise refuse(f"{statement} has no loop {loop}")
    return x.digits


def _slabs(
    t: Scheduled, fragments: list[Digit], slab: int, names: tuple[Coord, Coord] = (e("s"), e("f"))
) -> tuple[Scheduled, list[str], list[str]]:
    """Group fragments into slabs of ``slab``. Return the names of the digits that count slabs, and of those inside one.

    ``names``: the names of the two parts of a digit that a slab boundary splits.
    """
    inside: list[str] = []
    while len(fragments) > 1 and slab > 1:  # least significant digits first: loads fill several fragments
        *fragments, last = fragments
        if last.size.constant is None or slab % last.size.constant:
            fragments.append(last)
            break
        inside, slab = [last.name, *inside], slab // last.size.constant
    if slab > 1:
        last = fragments.pop()
        outer, inner = names[0], "e_g" if inside else names[1]
        t = refine(t, last.axis, last.name, (outer, extent(outer)), (inner, slab))
        return t, [*(d.name for d in fragments), outer], [inner, *inside]
    return t, [d.name for d in fragments], inside


def _marks(t: Scheduled, outermost: Coord, done: list[str], staged: bool) -> Scheduled:
    t = mark(mark(t, MarkName.TASK, outermost, ACC), MarkName.PIPELINE, b("k"), ACC)
    t = mark(mark(t, MarkName.COPY, s("i"), COPY_A), MarkName.COPY, s("k"), COPY_B)
    t = mark(t, MarkName.MULTIPLY, w("i"), ACC)
    t = mark(t, MarkName.EPILOGUE, w("i"), *(done[:1] if staged else done))
    t = mark(t, MarkName.STORE, e("i"), *done) if staged else t
    return mark(t, MarkName.INSTRUCTION, p("i"), INIT, ACC, *([STAGE] if staged else done))
