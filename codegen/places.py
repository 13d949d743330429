"""Coordinates of instances: the elements of the group that the coordinates in the loop IR represent.

Code generation takes them only from here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from polydyn.schedules.index import ZERO, Index, product
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.space import UNIT

Coordinates = Mapping[str, Index]


class Places:
    """Queries of a schedule's tile map. Coordinates that are not given, and digits that an instruction hides, are 0."""

    def __init__(self, schedule: Scheduled) -> None:
        self.schedule, self.map = schedule, schedule.map
        views = self.map.views.values()
        self._zero = {x.coord: ZERO for w in views for x in w.loops} | {d.name: ZERO for w in views for d in w.hidden}
        units = {k for level, loops in schedule.parallel if level == UNIT for k in loops}
        self.units = {d for w in views for x in w.loops if x.coord in units for d in x.digits}
        self._environments: dict[str, dict[str, Index]] = {}

    def env(self, statement: str, a: Coordinates) -> dict[str, Index]:
        """Return the values of the group's iterators."""
        if statement not in self._environments:
            self._environments[statement] = self.map.environment(statement)
        at = {**self._zero, **a}
        return {x: e.subs(at) for x, e in self._environments[statement].items()}

    def element(self, statement: str, axis: str, a: Coordinates, without: Iterable[str] = ()) -> Index:
        """Return the element of an axis; ``without``: names of digits that count as 0."""
        left = {d for x in self.map.parts(axis) for d in self.map.axes[x] if d.name in set(without)}
        return self.map.element(statement, axis, left).subs({**self._zero, **a})

    def cell(self, statement: str, buffer: str, a: Coordinates, apart: str = "") -> dict[str, Index]:
        """Return the offset in a buffer, by axis, also by an axis that a rewrite split.

        ``apart``: a digit that the buffer keeps as a dim of its own.
        """
        at = {**self._zero, **a}
        out = {x: e.subs(at) for x, e in self.schedule.cell(statement, buffer, apart).items()}
        whole = {x: e.subs(out) for x, e in self.map.joined.items() if out.keys() >= set(self.map.parts(x))}
        return {**out, **whole}

    def number(self, statement: str, buffer: str, axis: str, a: Coordinates, size: int) -> Index:
        """Return the number of the piece of ``size`` elements that an instance accesses on an axis."""
        left = {*self.schedule.buffer(buffer).fixed, *self.units}
        below = 1
        for d in reversed([d for d in self.map.axes[axis] if d not in left]):
            if below < size:
                below, left = below * int(d.size), left | {d}
        return self.map.element(statement, axis, left).subs({**self._zero, **a})

    def pieces(self, buffer: str, axis: str, size: int) -> int:
        """Return the number of such pieces."""
        left = {*self.schedule.buffer(buffer).fixed, *self.units}
        return int(product(d.size for d in self.map.axes[axis] if d not in left)) // size

    def digit(self, statement: str, axis: str, name: str, a: Coordinates) -> Index:
        """Return the value of one digit."""
        return self.map.values(statement)[self.map.digit(axis, name)].subs({**self._zero, **a})

    def left(self, statement: str, axis: str, a: Coordinates) -> Index:
        """Return the elements of an axis from an instance on; for a part of a split axis, of the whole axis."""
        whole = next((n for n in self.map.joined if axis in self.map.parts(n)), axis)
        return self.map.extents[whole] - self.element(statement, whole, a)

    def remaining(self, statement: str, axis: str, loop: str) -> Index:
        """Return the number of elements of an axis from the first step of a loop on, in the outer loops' coordinates.
        """
        loops = self.schedule.view(statement).loops
        around: dict[str, Index] = {x.coord: Index.of(x.coord) for x in loops if x.coord != loop}
        return self.left(statement, axis, around)
