"""Transformations of loops: functions from a scheduled group to a scheduled group, or a ScheduleError with the reason.

They refuse structural errors (a loop does not exist, a digit is lost). The proof (``polydyn.schedules.proof.prove``)
decides once, at the end, whether the result computes the group: a schedule may be wrong on the way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from polydyn.schedules.errors import ScheduleNameError
from polydyn.schedules.index import Index, IndexLike
from polydyn.schedules.model import Group
from polydyn.schedules.tree.names import Coord, End, Level, MarkName, Role, it
from polydyn.schedules.tree.nodes import Band, Leaf, Mark, Sequence, Tree
from polydyn.schedules.tree.scheduled import Scheduled, all_of, flat, path, refuse, rewrite, the
from polydyn.schedules.tree.tilemap import Digit, Lines, Loop, Origin, Share, TileMap, View, When

V = Index.of


@dataclass(frozen=True)
class Launch:
    """A size that is an argument of the kernel."""

    size: IndexLike


Size = Index | str | int | Launch
"""A number of elements or parts: a number, a symbol that is bound when the kernel is built, or an argument of the
kernel."""


# -- schedules to begin with -----------------------------------------------------------------------------------------


def fuse(
    group: Group,
    band: Iterable[str],
    reduction: Iterable[str],
    sunk: Mapping[str, End],
    axes: Mapping[str, str] | None = None,
    loops: Mapping[str, Coord] | None = None,
) -> Scheduled:
    """Turn the solved schedule matrix of a contraction into a tree: all statements in one band (TSCompiler 5.2).

    ``band``, ``reduction``: iterators, outermost first. ``sunk``: statement -> the step of the reduction where it runs,
    its solved shifts (0 is ``first``, K-1 is ``last``). ``axes``: iterator -> name of its axis (several may have the
    same); ``loops``: iterator -> its loop.

    isl: band over sequence; Halide: compute_at the innermost loop; TVM: compute_at, reverse_compute_at.
    Before: INIT; ACC; DONE, one after another. After::

        band i, j, k
          sequence INIT at k = 0; ACC; DONE at k = K-1

    Refuses: a statement that neither runs a loop nor has a step for it.
    """
    order, axis, named = (*band, *reduction), dict(axes or {}), dict(loops or {})
    coords = {x: named.get(x, it(axis.get(x, x))) for x in order}
    tm = _map(group, axis)
    views = {}
    for s in group.statements:
        inside = []
        for x in order:
            digits = tm.axes[axis.get(x, x)]
            if x in s.iterators:
                inside.append(Loop(coords[x], digits))
            elif s.name in sunk:
                inside.append(Loop(coords[x], digits, sunk[s.name]))
            else:
                raise refuse(f"{s.name} has no iterator {x} and no step of the matrix")
        views[s.name] = View(tuple(inside), Role(s.role))
    leaves = Sequence(tuple((frozenset((s.name,)), Leaf()) for s in group.statements))
    return Scheduled(group, Band(tuple(coords[x] for x in order), leaves), replace(tm, views=views))


def sequence_phases(
    group: Group,
    band: Seq[str],
    stages: Iterable[Seq[str]],
    axes: Mapping[str, str] | None = None,
    loops: Mapping[str, Coord] | None = None,
) -> Scheduled:
    """Turn the solved matrix of a stitch into a tree: shared loops, in them stages with loops of their own.

    The sources are BladeDISC 4 and TSCompiler 5.2's phase row. ``stages``: names of statements that share their inner
    loops; ``axes``, ``loops`` as for ``fuse``.
    isl: sequence below a band; Halide, TVM: compute_at the shared loops.
    Before: statements one after another. After::

        band r
          sequence
          - mark stage, band l: M1
          - mark stage, band l: Y

    Refuses: nothing; the proof finds a stage whose statements differ in their loops.
    """
    axis, named = dict(axes or {}), dict(loops or {})
    tm = _map(group, axis)

    def coord(x: str) -> Coord:
        return named.get(x, it(axis.get(x, x)))

    views = {
        s.name: View(tuple(Loop(coord(x), tm.axes[axis.get(x, x)]) for x in s.iterators), Role(s.role))
        for s in group.statements
    }
    children: list[tuple[frozenset[str], Tree]] = []
    for names in map(tuple, stages):
        inner = tuple(map(coord, group.statement(names[0]).iterators[len(band) :]))
        leaf: Tree = Sequence(tuple((frozenset((n,)), Leaf()) for n in names)) if len(names) > 1 else Leaf()
        children.append((frozenset(names), Mark(MarkName.STAGE, Band(inner, leaf)) if inner else leaf))
    body = Sequence(tuple(children)) if len(children) > 1 else children[0][1]
    return Scheduled(group, Band(tuple(map(coord, band)), body) if band else body, replace(tm, views=views))


def join_parts(group: Group, band: Seq[Coord], *parts: Scheduled) -> Scheduled:
    """Join parts that share their outermost loops, one after another inside them (the matrix' phase row).

    ``group``: the group of all statements; ``band``: the shared loops.
    isl: sequence below a band; Halide: compute_with; TVM: none.
    Before: band i, j: A; band i, d: B. After: band i: sequence (band j: A), (band d: B).
    Refuses: a part that does not begin with these loops; one axis with different digits in two parts.
    """
    shared, children = tuple(band), []
    out = TileMap({}, {}, {}, {}, {}, {})
    for x in parts:
        tree = flat(x.tree)
        if not isinstance(tree, Band) or tree.members[: len(shared)] != shared:
            raise refuse(f"a part does not begin with the loops {list(shared)}")
        rest = tree.members[len(shared) :]
        for ax, ds in x.map.axes.items():
            if out.axes.get(ax, ds) != ds:
                raise refuse(f"axis {ax} has the digits {out.axes[ax]} and {ds}")
        several = len(x.map.views) > 1
        below = Band(rest, tree.child) if rest else Mark(MarkName.ROW, tree.child) if several else Leaf()
        children.append((frozenset(x.map.views), below))
        out = TileMap(
            {**out.axes, **x.map.axes}, {**out.extents, **x.map.extents}, {**out.iterators, **x.map.iterators},
            {**out.views, **x.map.views}, {}, {},
        )  # fmt: skip
    return Scheduled(group, Band(shared, Sequence(tuple(children))), out)


def _map(group: Group, axis: Mapping[str, str]) -> TileMap:
    """Return the map of untiled axes. The first iterator on an axis determines its extent."""
    extents: dict[str, Index] = {}
    for s in group.statements:
        for x, e in s.iters:
            extents.setdefault(axis.get(x, x), e)
    axes = {x: (Digit(x, it(x), V(f"E_{x}"), When.COUNT),) for x in extents}
    iterators = {(s.name, x): axis.get(x, x) for s in group.statements for x in s.iterators}
    return TileMap(axes, extents, iterators, {}, {}, {})


# -- tiling ----------------------------------------------------------------------------------------------------------


def tile(t: Scheduled, axis: str, *levels: tuple[Level | str, Size]) -> Scheduled:
    """Split a loop into several: its axis becomes a number with these digits.

    ``levels``: (level, size) outermost first, a level or its letter; sizes count steps of the level below. The first
    level counts the rest.
    (If its size is an argument of the kernel, the second level counts; if it is a number, it is that number.)
    isl: band_tile (strip-mining; ``interchange`` moves the point loops inwards). Halide, TVM: split; exo: divide_loop.
    Before: band i. After, for ``(b, "B"), (c, "C"), (p, 4)``: band b_i, c_i, p_i with i = (b_i*C + c_i)*4 + p_i.
    Refuses: an unknown axis, one that is tiled already, a size below 1. TSCompiler 5.2; Vortex 4.1 (levels).
    """
    if axis not in t.map.axes:
        raise ScheduleNameError(f"no axis {axis}: {sorted(t.map.axes)}", dim=axis, rule="transformation")
    if len(t.map.axes[axis]) != 1:
        raise refuse(f"{axis} is tiled already: {t.map.axes[axis]}", remedy="refine one of its digits")
    named = [(Level(x) if isinstance(x, str) else x, size) for x, size in levels]
    first, digits = levels[0][1], []
    count = 1 if isinstance(first, Launch) else -1 if V(first).constant is not None else 0
    for n, (level, size) in enumerate(named):
        value = V(size.size if isinstance(size, Launch) else size)
        if value.constant is not None and value.constant < 1:
            raise refuse(f"the size of {level(axis)} is {value}")
        launch = When.LAUNCH if isinstance(size, Launch) else When.BUILD
        digits.append(Digit(axis, level(axis), value, When.COUNT if n == count else launch))
    (whole,) = t.map.axes[axis]
    tm = t.map.refine(whole, tuple(digits))
    old, new = it(axis), [level(axis) for level, _ in named]

    def split(x: Loop) -> tuple[Loop, ...]:  # loops of aligned iterators stay whole, over the same digits
        if x.coord != old:
            return (x,)
        return tuple(Loop(k, (d,), x.at) for k, d in zip(new, digits, strict=True))

    views = {n: replace(w, loops=tuple(y for x in w.loops for y in split(x))) for n, w in tm.views.items()}
    return replace(t, tree=_members(t.tree, {old: new}), map=replace(tm, views=views))


def refine(t: Scheduled, axis: str, digit: str, *parts: tuple[str, Size]) -> Scheduled:
    """Split a digit into several, in all statements; loops do not change and now run all of them.

    ``parts``: (name, size), most significant first; if all are numbers, the size of the first is the quotient.
    isl: band_tile of a member; Halide, TVM: split.
    Before: digit p:12. After, for ``("q", 3), ("lane", 4)``: digits q:3, lane:4, and a loop over p runs both.
    Refuses: sizes that do not divide the digit. (A digit whose size is a symbol *is* the product of its parts.)
    """
    old = t.map.digit(axis, digit)
    rest = old.size
    for _, size in parts[1:]:
        n, d = rest.constant, V(_plain(size)).constant
        if n is None or d is None:
            rest = V(_plain(parts[0][1]))
            break
        if n % d:
            raise refuse(f"{size} does not divide {old}", rule="whole tiles")
        rest = V(n // d)
    new = (Digit(axis, parts[0][0], rest, old.when), *(Digit(axis, n, V(_plain(x))) for n, x in parts[1:]))
    buffers = tuple(
        replace(x, fixed=frozenset(y for d in x.fixed for y in (new if d == old else (d,)))) for x in t.buffers
    )
    return replace(t, map=t.map.refine(old, new), buffers=buffers)


def _plain(size: Size) -> IndexLike:
    return size.size if isinstance(size, Launch) else size


def balance(t: Scheduled, axis: str, tiles: str, elements: str) -> Scheduled:
    """Distribute the tiles of an axis nearly equally over its blocks: block b of B has ``[n*b // B, n*(b+1) // B)``.

    The first digit counts blocks, the second tiles; the loop of the tiles then counts along the whole axis. ``tiles``,
    ``elements``: the kernels' symbols for the first tile and element of the current block. DietCode and Vortex pad
    uneven sizes; this is exact. isl, Halide, TVM: none.
    Before: block b has tiles [C*b, C*b + C). After: [n*b // B, n*(b+1) // B).
    Refuses: an axis of fewer than two digits.
    """
    digits = t.map.axes[axis]
    if len(digits) < 2:
        raise refuse(f"{axis} has the digits {digits}: no tiles to share")
    shares = {**t.map.shares, axis: Share(digits[0], tiles, elements)}
    return replace(t, map=replace(t.map, shares=shares))


def begins(
    t: Scheduled, axis: str, tile: Coord, symbol: str, even: bool = False, lines: Lines | None = None
) -> Scheduled:  # fmt: skip
    """Let kernels keep the first element of the current tile of an axis in ``symbol``.

    ``even``: the n = ceil(extent / size) tiles have nearly equal sizes; tile c is ``[E*c // n, E*(c+1) // n)``.
    ``lines``: tiles consist of runs that do not cross a line.
    isl: none; Halide: a loop's min; TVM: the binding of a block's iterator.
    Before: c*P + p in subscripts. After: o + p.
    Refuses: an axis without that digit.
    """
    origins = {**t.map.origins, axis: Origin(t.map.digit(axis, tile), symbol, even, lines)}
    return replace(t, map=replace(t.map, origins=origins))


# -- order -----------------------------------------------------------------------------------------------------------


def interchange(t: Scheduled, *order: Coord) -> Scheduled:
    """Reorder the loops of the band that has exactly these loops.

    isl: a band's partial schedule; Halide, TVM: reorder; exo: reorder_loops.
    Before: band i, j. After: band j, i.
    Refuses: there is no such band.
    """
    hit: list[Tree] = []

    def f(node: Tree, _: frozenset[str]) -> Tree | None:
        if hit or not isinstance(node, Band) or set(node.members) != set(order):
            return None
        hit.append(node)
        return Band(tuple(order), node.child)

    tree = rewrite(flat(t.tree), all_of(t), f)
    the(hit, f"no band has exactly the loops {list(order)}")
    return replace(t, tree=tree)


def pull_out(t: Scheduled, *loops: Coord, together: bool = False) -> Scheduled:
    """Move statements that run at the first or last step of these loops out of them, before or after them.

    In loops that are not named they stay, guarded by their step: they are *sunk* there (TSCompiler 5.2). The CPU names
    the steps of a block, the GPU all steps of the reduction. ``together``: statements of the last step share their
    loops.
    isl: order_before, order_after; Halide: none, an update is separate; TVM: decompose_reduction; exo: fission.
    Before: band i, k: INIT at k = 0; ACC. After: band i: INIT; band k: ACC.
    Refuses: no band has the loops over such statements; a statement at another step, or whose position in the sequence
    contradicts its step.
    """
    hit: list[Band] = []

    def f(node: Tree, _: frozenset[str]) -> Tree | None:
        if not isinstance(node, Band) or not isinstance(node.child, Sequence) or not set(loops) <= set(node.members):
            return None
        if not any((x := t.view(m).loop(k)) and x.at for part, _ in node.child.children for m in part for k in loops):
            return None  # another part of the tree may have a loop of that name
        hit.append(node)
        n = min(node.members.index(x) for x in loops)
        body = Sequence(tuple(_outside(t, node.members[n:], loops, node.child, together)))
        return Band(node.members[:n], body) if n else body

    tree = rewrite(flat(t.tree), all_of(t), f)
    the(hit, f"no band has the loops {list(loops)} over statements that run at their first or last step")
    views = {n: replace(w, loops=tuple(x for x in w.loops if not (x.at and x.coord in loops)))
             for n, w in t.map.views.items()}  # fmt: skip
    return replace(t, tree=tree, map=replace(t.map, views=views))


def _outside(
    t: Scheduled, members: tuple[str, ...], loops: Seq[Coord], body: Sequence, together: bool
) -> list[tuple[frozenset[str], Tree]]:
    """Return the parts of a sequence in loops ``members``; those at a first or last step without ``loops``."""
    order, seen = [End.FIRST, None, End.LAST], 0
    kept = tuple(x for x in members if x not in loops)
    out: list[tuple[frozenset[str], Tree]] = []
    for part, sub in body.children:
        ends = {x.at for m in part for y in loops if (x := t.view(m).loop(y))}
        if len(ends) != 1:
            raise refuse(f"{sorted(part)} run at {ends} of {list(loops)}")
        (end,) = ends
        if order.index(end) < seen:
            raise refuse(f"{sorted(part)} run at the {end} step but come after a part that runs later")
        if together and end is End.LAST and seen == 2:
            names, before = out.pop()
            assert isinstance(before, Band)
            inner = before.child if isinstance(before.child, Sequence) else Sequence(((names, before.child),))
            out.append((names | part, Band(kept, Sequence((*inner.children, (part, sub))))))
        else:
            out.append((part, Band(kept if end else members, sub)))
        seen = order.index(end)
    return out


def regroup(t: Scheduled, statements: Iterable[str], old: Seq[Coord], new: Mapping[Coord, Seq[str]]) -> Scheduled:
    """Replace loops of these statements by other loops over the same digits: joined, split or permuted.

    ``new``: loop -> names of its digits, most significant first; a permuted tuple is a swizzle.
    isl: a band's partial schedule; Halide, TVM: fuse and split; exo: mult_loops.
    Before: band e_f, p_j. After: band e_j with (e_f, p_j).
    Refuses: a digit is lost or run twice; ``old`` are not loops of one band of these statements.
    """
    names = tuple(statements)
    views = {}
    for n in names:
        view = t.view(n)
        had = {d.name: d for x in view.loops if x.coord in old for d in x.digits}
        if sorted(had) != sorted(d for ds in new.values() for d in ds):
            raise refuse(f"{dict(new)} does not run the digits {tuple(had)} of {list(old)} once")
        put = tuple(Loop(k, tuple(had[d] for d in ds)) for k, ds in new.items())
        at = min(i for i, x in enumerate(view.loops) if x.coord in old)
        rest = [x for x in view.loops if x.coord not in old]
        views[n] = replace(view, loops=(*rest[:at], *put, *rest[at:]))
    hit: list[Tree] = []

    def f(node: Tree, inside: frozenset[str]) -> Tree | None:
        if not isinstance(node, Band) or not inside <= frozenset(names) or not set(old) <= set(node.members):
            return None
        hit.append(node)
        at = min(node.members.index(x) for x in old)
        rest = [m for m in node.members if m not in old]
        return Band((*rest[:at], *new, *rest[at:]), rewrite(node.child, inside, f))

    tree = rewrite(flat(t.tree), all_of(t), f)
    the(hit, f"{list(old)} are not loops of one band of {list(names)}")
    return replace(t.put(views), tree=tree)


def distribute(t: Scheduled, at: Coord, of: str) -> Scheduled:
    """Distribute the loops from ``at`` inwards over the parts of the sequence below them (around ``of``).

    isl: a band's distribution; Halide, TVM: none; exo: fission.
    Before: band i: A; B. After: band i: A; band i: B.
    Refuses: ``of`` has no such loop over a sequence.
    """
    hit: list[Tree] = []

    def f(node: Tree, names: frozenset[str]) -> Tree | None:
        if of not in names or not isinstance(node, Band) or at not in node.members:
            return None
        if not isinstance(node.child, Sequence):
            return None
        hit.append(node)
        n = node.members.index(at)
        each = Sequence(tuple((m, Band(node.members[n:], x)) for m, x in node.child.children))
        return Band(node.members[:n], each) if n else each

    tree = rewrite(flat(t.tree), all_of(t), f)
    the(hit, f"{of} has no loop {at} over a sequence: {list(path(flat(t.tree), of))}")
    return replace(t, tree=tree)


def rename(t: Scheduled, statements: Iterable[str], new: Mapping[Coord, Coord]) -> Scheduled:
    """Rename loops of these statements, which are variables of the kernel; digits do not change.

    Parts of one sequence may use one name for different loops, as functions may for their variables.
    isl: an identifier; Halide: a Var's name; TVM: a loop variable's.
    Before: band c_d: B. After: band c_j: B.
    Refuses: a new name that one of the statements has already.
    """
    names, views = frozenset(statements), {}
    for n in names:
        view = t.view(n)
        twice = {x.coord for x in view.loops} & set(new.values())
        if twice:
            raise refuse(f"{n} has loops {sorted(twice)} already")
        views[n] = replace(view, loops=tuple(replace(x, coord=new.get(x.coord, x.coord)) for x in view.loops))

    def f(node: Tree, inside: frozenset[str]) -> Tree | None:
        if not isinstance(node, Band) or not inside <= names:
            return None
        members = tuple(new.get(Coord(m), Coord(m)) for m in node.members)
        return Band(members, rewrite(node.child, inside, f))

    return replace(t.put(views), tree=rewrite(t.tree, all_of(t), f))


def _members(tree: Tree, new: Mapping[Coord, Seq[Coord]]) -> Tree:
    """Return the tree with loops replaced in all bands."""
    if isinstance(tree, Band):
        members = tuple(y for m in tree.members for y in new.get(Coord(m), (Coord(m),)))
        return Band(members, _members(tree.child, new))
    if isinstance(tree, Mark):
        return Mark(tree.name, _members(tree.child, new))
    return Sequence(tuple((n, _members(x, new)) for n, x in tree.children)) if isinstance(tree, Sequence) else tree
