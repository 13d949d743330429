"""A schedule while it is written: a scheduled group, and what the kernel does with its loops beside their order.

A loop is named after its axis. The loops of a tiled axis are ``i.0``, ``i.1`` and so on, outermost first. An axis alone
stands for its only loop, or for the outer or inner one where a step has a preference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from polydyn.schedules.errors import ScheduleError, ScheduleNameError
from polydyn.schedules.model import Group
from polydyn.schedules.solution.schedule import NestSchedule
from polydyn.schedules.tiling import Roles
from polydyn.schedules.tree.limits import clip
from polydyn.schedules.tree.loops import fuse
from polydyn.schedules.tree.names import Coord, End
from polydyn.schedules.tree.nodes import Band, Tree
from polydyn.schedules.tree.scheduled import Scheduled, all_of, flat, path, relist, rewrite, without_marks
from polydyn.schedules.tree.strategies import nest, start_product, statements_along


@dataclass(frozen=True)
class Draft:
    """A schedule between two steps.

    ``unrolled``: loop -> number of steps to unroll, 0 for all of them. ``vectors``: loops that must become vectors.
    """

    scheduled: Scheduled
    unrolled: dict[Coord, int] = field(default_factory=dict)
    vectors: tuple[Coord, ...] = ()

    @property
    def group(self) -> Group:
        """The computation."""
        return self.scheduled.group

    @property
    def axes(self) -> dict[str, tuple[Coord, ...]]:
        """Axis -> its loops, outermost first, without those of copies."""
        names = {s.name for s in self.group.statements}
        out: dict[str, dict[Coord, int]] = {}
        for axis, digits in self.scheduled.map.axes.items():
            order = {d: n for n, d in enumerate(digits)}
            loops = {
                x.coord: order[x.digits[0]]
                for n, view in self.scheduled.map.views.items() if n in names
                for x in view.loops if x.digits and x.digits[0] in order
            }  # fmt: skip
            out[axis] = loops
        return {axis: tuple(sorted(loops, key=loops.__getitem__)) for axis, loops in out.items()}

    @property
    def names(self) -> dict[Coord, str]:
        """Loop -> its name in steps."""
        every = {axis: loops for axis, loops in self.axes.items() if loops}
        return {
            loop: axis if len(loops) == 1 else f"{axis}.{n}"
            for axis, loops in every.items() for n, loop in enumerate(loops)
        }  # fmt: skip

    def loop(self, name: str, prefer: int | None = None) -> Coord:
        """Return the loop of that name. ``prefer``: the position of the loop that an axis alone stands for.

        ScheduleError: there is no such loop, or an axis has several and the step prefers none.
        """
        known = {n: loop for loop, n in self.names.items()}
        if name in known:
            return known[name]
        loops = self.axes.get(name, ())
        if loops and prefer is not None:
            return loops[prefer]
        listed = ", ".join(known)
        reason = f"{name} has the loops {', '.join(self.names[x] for x in loops)}" if loops else f"no loop {name}"
        kind = ScheduleError if loops else ScheduleNameError
        raise kind(reason, dim=name, rule="names of loops", remedy=f"choose one of {listed}")

    def order(self, statement: str) -> tuple[Coord, ...]:
        """Return the loops around a statement, outermost first."""
        return path(flat(self.scheduled.tree), statement)

    def reordered(self, order: Callable[[Sequence[Coord]], Sequence[Coord]]) -> Draft:
        """Return the draft with the loops of every band in the order that ``order`` gives them."""

        def f(node: Tree, names: frozenset[str]) -> Tree | None:
            if not isinstance(node, Band):
                return None
            return Band(tuple(order(tuple(map(Coord, node.members)))), rewrite(node.child, names, f))

        return self.with_tree(rewrite(flat(self.scheduled.tree), all_of(self.scheduled), f))

    def with_tree(self, tree: Tree) -> Draft:
        """Return the draft with another tree of the same statements."""
        return replace(self, scheduled=replace(self.scheduled, tree=relist(tree)))


def start(group: Group, roles: Roles | None, schedule: NestSchedule | None) -> Draft:
    """Return the draft of a group without a step: the solved schedule matrix as a tree.

    A product has ``roles``; another group the ``schedule`` of its shared loops. A group with one reduction begins with
    all its loops in one band, like a product.
    """
    if roles is not None:
        return _cut_where_empty(start_product(group, roles))
    assert schedule is not None, "a group other than a product has a schedule of its loops"
    if (t := _single_reduction(group, schedule)) is not None:
        return _cut_where_empty(t)
    t = nest(group, schedule.band, schedule.phases, tiled=False)
    return Draft(replace(t, tree=flat(without_marks(t.tree)), parallel=()))


def _cut_where_empty(t: Scheduled) -> Draft:
    """Cut the statements of an axis whose extent may be 0, and which has a step for others all the same."""
    for axis in t.map.axes:
        if t.map.has_empty_step(axis):
            t = clip(t, axis, *statements_along(t, axis))
    return Draft(t)


def _single_reduction(group: Group, schedule: NestSchedule) -> Scheduled | None:
    """Return all loops in one band, or None: a statement other than the only reduction has loops of its own."""
    sums = [s for s in group.statements if s.reduce]
    others = [s for s in group.statements if not s.reduce]
    if len(sums) != 1 or any(s.iterators != schedule.band for s in others):
        return None
    (acc,) = sums
    if acc.iterators[: len(schedule.band)] != schedule.band or not group.statements.index(acc):
        return None
    before = group.statements[: group.statements.index(acc)]
    sunk = {s.name: End.FIRST if s in before else End.LAST for s in others}
    return fuse(group, schedule.band, acc.iterators[len(schedule.band) :], sunk)
