"""What a builder of kernels asks of a schedule: where an instance is, at the coordinates that the loop IR gives it.

Nothing else in code generation says what element of the group a coordinate stands for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from polydyn.schedules.index import ZERO, Index, product
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.space import UNIT

Coordinates = Mapping[str, Index]


class Places:
    """Answers of a schedule's tile map. Coordinates that are not given, and digits that an instruction hides, are 0."""

    def __init__(self, schedule: Scheduled) -> None:
        self.schedule, self.map = schedule, schedule.map
        views = self.map.views.values()
        self._zero = {x.coord: ZERO for w in views for x in w.loops} | {d.name: ZERO for w in views for d in w.hidden}
        units = {k for level, loops in schedule.parallel if level == UNIT for k in loops}
        self.units = {d for w in views for x in w.loops if x.coord in units for d in x.digits}
        self._environments: dict[str, dict[str, Index]] = {}

    def env(self, statement: str, a: Coordinates) -> dict[str, Index]:
        """Iterators of the group."""
        if statement not in self._environments:
            self._environments[statement] = self.map.environment(statement)
        at = {**self._zero, **a}
        return {x: e.subs(at) for x, e in self._environments[statement].items()}

    def element(self, statement: str, axis: str, a: Coordinates, without: Iterable[str] = ()) -> Index:
        """The element of an axis; ``without``: names of digits that do not count."""
        left = {d for x in self.map.parts(axis) for d in self.map.axes[x] if d.name in set(without)}
        return self.map.element(statement, axis, left).subs({**self._zero, **a})

    def cell(self, statement: str, buffer: str, a: Coordinates, apart: str = "") -> dict[str, Index]:
        """The place in a buffer, by axis, also by one that a rewrite took apart; ``apart``: a digit that the buffer
        keeps as a dim of its own.
        """
        at = {**self._zero, **a}
        out = {x: e.subs(at) for x, e in self.schedule.cell(statement, buffer, apart).items()}
        whole = {x: e.subs(out) for x, e in self.map.joined.items() if out.keys() >= set(self.map.parts(x))}
        return {**out, **whole}

    def number(self, statement: str, buffer: str, axis: str, a: Coordinates, size: int) -> Index:
        """Which piece of ``size`` elements of a unit's part of a buffer an instance meets, along an axis."""
        left = {*self.schedule.buffer(buffer).fixed, *self.units}
        below = 1
        for d in reversed([d for d in self.map.axes[axis] if d not in left]):
            if below < size:
                below, left = below * int(d.size), left | {d}
        return self.map.element(statement, axis, left).subs({**self._zero, **a})

    def pieces(self, buffer: str, axis: str, size: int) -> int:
        """The number of such pieces."""
        left = {*self.schedule.buffer(buffer).fixed, *self.units}
        return int(product(d.size for d in self.map.axes[axis] if d not in left)) // size

    def digit(self, statement: str, axis: str, name: str, a: Coordinates) -> Index:
        """The value of one digit."""
        return self.map.values(statement)[self.map.digit(axis, name)].subs({**self._zero, **a})

    def left(self, statement: str, axis: str, a: Coordinates) -> Index:
        """Elements of an axis from an instance on; of all of it where a rewrite took it apart."""
        whole = next((n for n in self.map.joined if axis in self.map.parts(n)), axis)
        return self.map.extents[whole] - self.element(statement, whole, a)

    def remaining(self, statement: str, axis: str, loop: str) -> Index:
        """Elements of an axis from the first step of a loop on, in the coordinates of the loops around it."""
        loops = self.schedule.view(statement).loops
        around: dict[str, Index] = {x.coord: Index.of(x.coord) for x in loops if x.coord != loop}
        return self.left(statement, axis, around)
