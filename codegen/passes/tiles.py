"""Exact tiles for the CPU: balanced parts of tile loops, exact row variants, exact serial reductions, task ranges.

Instead of padding (DietCode's local padding, right for GPUs) the CPU binds the extent of the current tile exactly:
``ceil(M/T)`` row tiles of ``q`` or ``q+1`` rows, a switch around the micro-kernel's variants (docs/cpu.md 2 and 7).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from polydyn.codegen.indices import node_indices, substitute
from polydyn.codegen.ir import Alloc, Body, For, If, Let, Mark, Node, Outline, Switch, consume, rewrite, walk
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.index import ZERO, Index, IndexLike, maximum, minimum, product
from polydyn.schedules.tree.names import Coord, MarkName, b, p

ROW, COLUMN, BLOCK = p("i"), p("j"), b("k")
"""Loops of a product: rows and columns of a register tile, blocks of the reduction."""
TASK = Coord("task")
"""The loop over tasks."""
OWN_CASES = 2
"""Up to this many numbers of rows have a function each."""


def balance(body: Body, var: Coord, total: IndexLike, shares: IndexLike, share: IndexLike) -> Body:
    """Restrict tile loop ``var`` to part number ``share`` of ``shares`` nearly equal parts of ``total`` tiles.

    The parts ``[total*s // n, total*(s+1) // n)`` partition ``[0, total)`` for any n >= 1.
    """
    t, n, s = Index.of(total), Index.of(shares), Index.of(share)

    def f(x: Node) -> Node:
        return replace(x, lo=t * s // n, hi=t * (s + 1) // n) if isinstance(x, For) and x.var == var else x

    return rewrite(body, f)


def share_steps(body: Body, var: str, first: Index, end: Index) -> Body:
    """Restrict loops ``var`` to the steps from ``first`` up to ``end``; they still count from 0.

    Before: ``for k: s += x[k]``; after: ``for k < end - first: s += x[k + first]``.
    """

    def f(x: Node) -> Node:
        if not (isinstance(x, For) and x.var == var):
            return x
        return replace(x, hi=end - first, body=substitute(x.body, {var: first + var}))

    return rewrite(body, f)


def clip(body: Body, loops: Collection[Coord], extent: Index) -> Body:
    """Clip serial loops over a tile to the extent of the current tile: ``min(hi, extent)``."""

    def f(n: Node) -> Node:
        return replace(n, hi=minimum(n.hi, extent)) if isinstance(n, For) and n.var in loops else n

    return rewrite(body, f)


def flatten_loops(body: Body, outer: Coord) -> Body:
    """Fuse the loop ``outer`` and the loop directly inside it if every index allows it.

    This requires that a step of ``outer`` moves an index ``extent(inner)`` times as far as a step of the inner loop.
    """

    def f(n: Node) -> Node:
        if not (isinstance(n, For) and n.var == outer and len(n.body) == 1 and isinstance(n.body[0], For)):
            return n
        inner = n.body[0]
        alike = all(_alike(i, n.var, inner) for x in walk(inner.body) for i in node_indices(x))
        if n.lo != ZERO or inner.lo != ZERO or not alike or n.var in inner.hi.symbols():
            return n
        body = substitute(inner.body, {inner.var: n.var, n.var: ZERO})
        return For(n.var, ZERO, n.hi * inner.hi, body, n.kind)

    return rewrite(body, f)


def _alike(i: Index, outer: str, inner: For) -> bool:
    a, rest = i.split(outer)
    b, rest = rest.split(inner.var)
    names = {outer, inner.var}
    return not names & (a.symbols() | b.symbols() | rest.symbols()) and a == b * inner.hi


def variants(on: Index, cases: Mapping[int, Body], outline: str | None = None) -> Body:
    """Switch on ``on`` over exact variants; with ``outline`` each becomes a separate function.

    A value between two keys takes the next larger one, whose masks then cover the rest. A single case needs no switch.
    """
    bodies = {k: (Outline(f"{outline}_{k}", b),) if outline else b for k, b in cases.items()}
    if len(bodies) == 1:
        return next(iter(bodies.values()))
    return (Switch(on, tuple(bodies.items())),)


def pieces(rows: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Map each number of rows of a tile to the numbers of rows of the functions that compute it, one after another.

    Tiles are even, so long axes use the two largest numbers only. These and powers of two have a function of their own;
    the others call several. A function for each number would be two thirds more text, and gcc's time is most of a first
    start.
    """
    own = rows if len(rows) <= OWN_CASES else [r for r in rows if r.bit_count() == 1 or r >= rows[-2]]

    def cut(r: int) -> tuple[int, ...]:
        largest = max(x for x in own if x <= r)
        return (largest, *cut(r - largest)) if r > largest else (r,)

    return {r: cut(r) for r in rows}


def in_pieces(rows: Sequence[int], first: Index, piece: Callable[[Index, int], Body]) -> dict[int, Body]:
    """Map each number of rows of a tile to its pieces. ``piece``: (its first row, its rows) -> its body."""

    def body(sizes: Sequence[int]) -> Body:
        starts = accumulate(sizes[:-1], initial=0)
        return tuple(n for at, size in zip(starts, sizes, strict=True) for n in piece(first + at, size))

    return {r: body(sizes) for r, sizes in pieces(rows).items()}


def unswitch(body: Body) -> Body:
    """Move a choice that is the whole body of a loop and does not depend on its variable out of the loop."""

    def f(n: Node) -> Node:
        if not (isinstance(n, For) and len(n.body) == 1 and isinstance(n.body[0], If)):
            return n
        choice = n.body[0]
        if any(n.var in (c.left.symbols() | c.right.symbols()) for c in choice.cond):
            return n
        return If(choice.cond, (replace(n, body=choice.then),), (replace(n, body=choice.orelse),))

    return rewrite(body, f)


def task_count(body: Body) -> Index:
    """Return the number of tasks that ``tasks`` will create: the points in the coincident band."""
    marks = [n for n in walk(body) if isinstance(n, Mark) and n.name == MarkName.TASK]
    if len(marks) != 1:
        raise CodegenError(f"{len(marks)} task marks in one kernel")
    return product(x.hi for x in parallel_band(marks[0].body)[0])


def tasks(body: Body, runs: bool = False, order: Sequence[str] = ()) -> Body:
    """Turn the nest of coincident loops under the mark ``task`` into a linear range of tasks [begin, end).

    The loops directly below the mark, one inside the other, are the coincident band; all must start at 0. With ``runs``
    they stay loops, each over its part of the range, so that no task divides its number into coordinates. ``order``:
    the numbering order of the band's loops, outermost first (any order is correct: the band is coincident); by default
    the order of the loops.
    """

    task_count(body)  # there is one band

    def f(b: Body) -> Body:
        band, inner = parallel_band(b)
        if any(x.lo != ZERO for x in band):
            raise CodegenError("a task loop does not start at 0")
        band.sort(key=lambda x: order.index(x.var) if x.var in order else -1)
        if runs and len(band) > 1:
            return _ranges(band, inner)
        return (For(TASK, Index.of("begin"), Index.of("end"), _split(Index.of(TASK), band, inner), "serial"),)

    return consume(body, MarkName.TASK, f)


def parallel_band(body: Body) -> tuple[list[For], Body]:
    """Return the parallel loops at the top of a body, one inside the other, and the body inside all of them."""
    band: list[For] = []
    while len(body) == 1 and isinstance(body[0], For) and body[0].kind == "parallel":
        band.append(body[0])
        body = body[0].body
    return band, body


def _ranges(band: list[For], body: Body) -> Body:
    """Return loops over the points of the band that are tasks [begin, end), each over those that contain a task."""
    counts = [x.hi if x.hi.constant is not None else Index.of(f"{x.var}_count") for x in band]
    before = [ZERO]  # for each loop: tasks before the point of the loops around it
    for k, x in enumerate(band):
        before.append(before[k] + Index.of(x.var) * product(counts[k + 1 :]))
    for k, x in reversed(list(enumerate(band))):
        inside, first = product(counts[k + 1 :]), before[k]
        lo, hi = (Index.of("begin") - first) // inside, (Index.of("end") - first).ceildiv(inside)
        if k:
            lo, hi = maximum(0, lo), minimum(counts[k], hi)
        stop = f"{x.var}_stop"
        body = (Let(stop, hi, (For(x.var, lo, Index.of(stop), body, "serial"),)),)
    for x, count in zip(band, counts, strict=True):
        if count.constant is None:
            body = (Let(str(count), x.hi, body),)
    return body


def _split(number: Index, band: list[For], body: Body) -> Body:
    """Bind the coordinates of the band's loops from the number of a point in it."""
    for i, x in enumerate(reversed(band)):
        outermost = i == len(band) - 1
        body = (Let(x.var, number if outermost else number % x.hi, body),)
        number = number // x.hi
    return body


def mark_parallel(body: Body, loops: Collection[str]) -> Body:
    """Declare the named loops parallel (they belong to the coincident band)."""

    def f(n: Node) -> Node:
        return replace(n, kind="parallel") if isinstance(n, For) and n.var in loops else n

    return rewrite(body, f)


def first_columns(nest: For, columns: Index) -> Body:
    """End the column loops of a nest early."""
    return rewrite((nest,), lambda n: replace(n, hi=columns) if isinstance(n, For) and n.var == COLUMN else n)


def one_vector(nest: For, before: Index, width: int) -> Body:
    """Move the column loops of a nest to the ``width`` columns after the first ones."""

    def f(n: Node) -> Node:
        if not (isinstance(n, For) and n.var == COLUMN):
            return n
        return replace(n, hi=Index.of(width), body=substitute(n.body, {COLUMN: Index.of(COLUMN) + before}))

    return rewrite((nest,), f)


def shorten(body: Body, var: str, extent: Index, ends: tuple[Index, Index]) -> Body:
    """Restrict loops ``var`` over all of ``extent`` to the range ``ends``, which is computed once, around the body."""
    names = f"{var}_lo", f"{var}_hi"
    lo, hi = map(Index.of, names)

    def f(n: Node) -> Node:
        return replace(n, lo=lo, hi=hi) if isinstance(n, For) and (n.var, n.lo, n.hi) == (var, ZERO, extent) else n

    found = rewrite(body, f)
    if found != body:
        for name, end in zip(names, ends, strict=True):
            found = (Let(name, end, found),)
    return found


def allocated(body: Body, buffer: str, dtype: str, size: Index) -> Body:
    """Allocate scratch inside the loop over reduction blocks, so that checked builds detect reads of older data."""

    def new(b: Body) -> Body:
        return (Alloc(buffer, dtype, size, "scratch", b),)

    blocks = rewrite(body, lambda n: replace(n, body=new(n.body)) if isinstance(n, For) and n.var == BLOCK else n)
    return new(body) if blocks is body else blocks
