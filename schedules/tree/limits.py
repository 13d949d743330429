"""Transformations of bounds and places: where statements run, what runs at once, marks for passes."""

from __future__ import annotations

from dataclasses import replace

from polydyn.schedules.tree.names import Coord, MarkName
from polydyn.schedules.tree.nodes import Band, Mark, Tree
from polydyn.schedules.tree.scheduled import Clip, Scheduled, all_of, refuse, rewrite, the, without_marks


def clip(t: Scheduled, axis: str, *statements: str, whole: int = 0) -> Scheduled:
    """These statements run where the element of the axis exists.

    ``whole``: so many least significant digits are not cut: a vector is copied when its first lane exists. Passes cut
    loops or add masks (``Scheduled.live`` gives the condition).
    isl: a domain's intersection; Halide: GuardWithIf; TVM: a block's predicate.
    Before: c < C, p < P. After: and (c*P + p) < extent.
    Refuses: an unknown axis; a statement without the axis.
    """
    for n in statements:
        if not any(d.axis in t.map.parts(axis) for d in t.view(n).digits):
            raise refuse(f"{n} has no digit of axis {axis}")
    return replace(t, clips=(*t.clips, *(Clip(n, axis, whole) for n in statements)))


def pad(t: Scheduled, *statements: str) -> Scheduled:
    """These statements also run on points that the group does not have (DietCode's local padding).

    isl: none; Halide: RoundUp; TVM: pad_einsum.
    Before: guards around a tile that is not full. After: none; operands are filled with zeros there.
    Refuses: an unknown statement. That nothing wrong is stored is the proof's (a sum of products, into a local).
    """
    for n in statements:
        if n not in t.map.views:
            raise refuse(f"no statement {n}")
    return replace(t, padded=t.padded | frozenset(statements))


def assign(t: Scheduled, level: str, *loops: Coord) -> Scheduled:
    """These loops run at once: ``task`` (blocks of a grid, parts of threads) or ``unit`` (warps or threads of a block).

    isl: coincident members of a band; Halide: parallel, gpu_blocks; TVM: parallel, bind; TC: mapToBlocks.
    Before: band b_i, b_j. After: tasks (b_i, b_j).
    Refuses: a loop of a reduction, whose steps meet one sum.
    """
    for s in (x for x in t.group.statements if x.reduce):
        summed = [x for x in s.iterators if not any(x in i.symbols() for i in s.index)]
        reduced = {t.map.iterators[s.name, x] for x in summed}
        for k in loops:
            loop = t.view(s.name).loop(k)
            if loop and any(d.axis in reduced for d in loop.digits):
                raise refuse(f"{k} runs a reduction: its steps meet one sum", remedy="split_reduction first")
    return replace(t, parallel=(*t.parallel, (level, loops)))


def mark(t: Scheduled, name: MarkName, at: Coord | None, *statements: str, under: bool = False) -> Scheduled:
    """A mark above (or ``under``) the loop ``at`` of each of these statements; the band is cut there.

    Without a loop the mark is above the whole tree. Marks change no order. They come last: transformations look for
    bands. isl: mark; Halide: none; TVM: annotate. Before: band i, j. After, at j: band i: mark: band j.
    Refuses: a statement without that loop.
    """
    if at is None:
        return replace(t, tree=Mark(name, t.tree))
    for of in statements:
        hit: list[Tree] = []

        def f(node: Tree, names: frozenset[str], of: str = of, hit: list[Tree] = hit) -> Tree | None:
            if hit or of not in names or not isinstance(node, Band) or at not in node.members:
                return None
            hit.append(node)
            n = node.members.index(at) + under
            below: Tree = Mark(name, Band(node.members[n:], node.child) if node.members[n:] else node.child)
            return Band(node.members[:n], below) if n else below

        t = replace(t, tree=rewrite(t.tree, all_of(t), f))
        the(hit, f"{of} has no loop {at}")
    return t


def unmark(t: Scheduled, *names: MarkName) -> Scheduled:
    """The marks of these names go. They held a part of a tree together while others were distributed.

    isl: delete a mark node; Halide: none; TVM: unannotate. Before: band i: mark row: A; B. After: band i: A; B.
    Refuses: nothing.
    """
    return replace(t, tree=without_marks(t.tree, names))
