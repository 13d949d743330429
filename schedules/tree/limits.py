"""Transformations of bounds and placement: where statements run, what runs in parallel, marks for passes."""

from __future__ import annotations

from dataclasses import replace

from polydyn.schedules.errors import ScheduleNameError
from polydyn.schedules.tree.names import Coord, MarkName
from polydyn.schedules.tree.nodes import Band, Mark, Tree
from polydyn.schedules.tree.scheduled import Clip, Scheduled, all_of, refuse, rewrite, the, without_marks


def clip(t: Scheduled, axis: str, *statements: str, whole: int = 0) -> Scheduled:
    """Make statements run only where the element of the axis exists.

    ``whole``: the number of least significant digits that are not cut: a vector is copied if its first lane exists.
    Passes cut loops or add masks (``Scheduled.live`` gives the condition).
    isl: a domain's intersection; Halide: GuardWithIf; TVM: a block's predicate.
    Before: c < C, p < P. After: and (c*P + p) < extent.
    Refuses: an unknown axis; a statement without the axis.
    """
    for n in statements:
        if not any(d.axis in t.map.parts(axis) for d in t.view(n).digits):
            raise refuse(f"{n} has no digit of axis {axis}")
    return replace(t, clips=(*t.clips, *(Clip(n, axis, whole) for n in statements)))


def pad(t: Scheduled, *statements: str) -> Scheduled:
    """Make statements also run on points that the group does not have (DietCode's local padding).

    isl: none; Halide: RoundUp; TVM: pad_einsum.
    Before: guards around a tile that is not full. After: none; operands are filled with zeros there.
    Refuses: an unknown statement. The proof checks that nothing wrong is stored (a sum of products, into a local).
    """
    for n in statements:
        if n not in t.map.views:
            raise ScheduleNameError(f"no statement {n}", node=n, rule="transformation")
    return replace(t, padded=t.padded | frozenset(statements))


def assign(t: Scheduled, level: str, *loops: Coord) -> Scheduled:
    """Make loops run in parallel, as ``task`` (blocks of a grid, parts of threads) or ``unit`` (warps, threads).

    isl: coincident members of a band; Halide: parallel, gpu_blocks; TVM: parallel, bind; TC: mapToBlocks.
    Before: band b_i, b_j. After: tasks (b_i, b_j).
    Refuses: a loop of a reduction, whose steps update one sum.
    """
    for s in (x for x in t.group.statements if x.reduce):
        summed = [x for x in s.iterators if not any(x in i.symbols() for i in s.index)]
        reduced = {t.map.iterators[s.name, x] for x in summed}
        for k in loops:
            loop = t.view(s.name).loop(k)
            if loop and any(d.axis in reduced for d in loop.digits):
                raise refuse(f"{k} runs a reduction: its steps update one sum", remedy="split_reduction first")
    return replace(t, parallel=(*t.parallel, (level, loops)))


def mark(t: Scheduled, name: MarkName, at: Coord | None, *statements: str, under: bool = False) -> Scheduled:
    """Add a mark above (or ``under``) the loop ``at`` of each of these statements; the band is cut there.

    Without a loop the mark is above the whole tree. Marks do not change the order. Add them last, because
    transformations look for bands.
    isl: mark; Halide: none; TVM: annotate.
    Before: band i, j. After, at j: band i: mark: band j.
    Refuses: a statement without that loop.
    """
    if at is None:
        return replace(t, tree=Mark(name, t.tree))
    for statement in statements:
        hit: list[Tree] = []

        def f(node: Tree, names: frozenset[str], statement: str = statement, hit: list[Tree] = hit) -> Tree | None:
            if hit or statement not in names or not isinstance(node, Band) or at not in node.members:
                return None
            hit.append(node)
            n = node.members.index(at) + under
            below: Tree = Mark(name, Band(node.members[n:], node.child) if node.members[n:] else node.child)
            return Band(node.members[:n], below) if n else below

        t = replace(t, tree=rewrite(t.tree, all_of(t), f))
        the(hit, f"{statement} has no loop {at}")
    return t


def unmark(t: Scheduled, *names: MarkName) -> Scheduled:
    """Delete the marks of these names. They kept a part of a tree together while others were distributed.

    isl: delete a mark node; Halide: none; TVM: unannotate.
    Before: band i: mark row: A; B. After: band i: A; B.
    Refuses: nothing.
    """
    return replace(t, tree=without_marks(t.tree, names))
