"""A group with its tree and tile map: the value that transformations take and return."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from polydyn.schedules.errors import ScheduleError, ScheduleNameError
from polydyn.schedules.index import ONE, Index, maximum, product
from polydyn.schedules.isl_util import Condition, at_least, between, equals
from polydyn.schedules.model import Group
from polydyn.schedules.tiling import TiledGroup
from polydyn.schedules.tree.names import Coord, End, MarkName, Meets, extent
from polydyn.schedules.tree.nodes import Band, Leaf, Mark, Sequence, TileStatement, Tree
from polydyn.schedules.tree.tilemap import Digit, Loop, TileMap, View, When

V = Index.of
_T = TypeVar("_T")


@dataclass(frozen=True)
class Buffer:
    """Storage inside the kernel for elements of ``array``.

    ``axes``: the axes of the array's dims. ``fixed``: digits that are constant for one set of contents; the other
    digits address the cells. ``scope``: loops (of units) with separate storage for each value. ``storage``: the name of
    the storage if several buffers use the same one, one after another.
    """

    name: str
    array: str
    axes: tuple[str, ...]
    fixed: frozenset[Digit]
    scope: tuple[Coord, ...] = ()
    storage: str = ""

    @property
    def place(self) -> str:
        """The name of its storage."""
        return self.storage or self.name


@dataclass(frozen=True)
class Flow:
    """An access of a statement to a buffer."""

    statement: str
    meets: Meets
    buffer: str


@dataclass(frozen=True)
class Carried:
    """Sums of buffer ``register`` that pass through ``memory`` from one step of ``loop`` to the next."""

    loop: Coord
    register: str
    memory: str


@dataclass(frozen=True)
class Clip:
    """A bound: a statement runs only where the element of an axis exists.

    ``whole``: the number of least significant digits that are not cut (a vector is copied if its first lane exists).
    """

    statement: str
    axis: str
    whole: int = 0


@dataclass(frozen=True)
class Scheduled:
    """A group with a tree and a tile map.

    ``parallel``: (level, loops) that run in parallel. ``padded``: statements that also run on points without an
    element.
    """

    group: Group
    tree: Tree
    map: TileMap
    buffers: tuple[Buffer, ...] = ()
    flow: tuple[Flow, ...] = ()
    carried: tuple[Carried, ...] = ()
    parallel: tuple[tuple[str, tuple[Coord, ...]], ...] = ()
    padded: frozenset[str] = frozenset()
    clips: tuple[Clip, ...] = ()

    def __repr__(self) -> str:
        loops = dict.fromkeys(k.coord for x in self.map.views.values() for k in x.loops)
        return f"<Scheduled {self.group.name}: {len(self.map.views)} statements, loops {', '.join(loops) or 'none'}>"

    def view(self, statement: str) -> View:
        """Return a statement in tile space. ScheduleError: there is none of that name."""
        if statement not in self.map.views:
            raise ScheduleNameError(f"no statement {statement}: {[*self.map.views]}", node=statement)
        return self.map.views[statement]

    def put(self, views: Mapping[str, View]) -> Scheduled:
        """Return a copy with these views added or replaced."""
        return replace(self, map=replace(self.map, views={**self.map.views, **views}))

    def buffer(self, name: str) -> Buffer:
        """Return the buffer of that name. ScheduleError: there is none."""
        for x in self.buffers:
            if x.name == name:
                return x
        raise ScheduleError(f"no buffer {name}: {[x.name for x in self.buffers]}", tensor=name)

    def holding(self, buffers: Iterable[Buffer], axes: set[str]) -> list[Buffer]:
        """Select the buffers, all of one array, that an access along these axes uses: a copy may run other axes too."""
        every = list(buffers)
        return [x for x in every if set(x.axes) == axes] or [x for x in every if axes <= set(x.axes)]

    def cell(self, statement: str, buffer: str, apart: str = "") -> dict[str, Index]:
        """Return the cell that a statement accesses: axis -> offset inside the buffer, in the statement's coordinates.

        ``apart``: the name of a digit that is left out, for buffers that keep it as a dim of its own.
        """
        x = self.buffer(buffer)
        left = {d for axis in x.axes for d in self.map.axes[axis] if d.name == apart}
        return {axis: self.map.element(statement, axis, x.fixed | left) for axis in x.axes}

    def extents(self) -> dict[Coord, Index]:
        """Return the number of steps of every loop. For the first digit of an axis it follows from the extent.

        If several loops have one name, it is that of the last one; ``parameters`` distinguishes them.
        """
        counts = {n: e for n, (_, e) in self.map.sizes().items()}
        return {x.coord: x.extent.subs(counts) for w in self.map.views.values() for x in w.loops}

    def parameters(self) -> dict[str, Index]:
        """Return the parameters of loops in ``tiled`` -> their number of steps."""
        counts = {n: e for n, (_, e) in self.map.sizes().items()}
        return {_parameter(x): x.extent.subs(counts) for w in self.map.views.values() for x in w.loops}

    def parameter(self, statement: str, loop: Coord) -> str:
        """Return the parameter for the number of steps of a statement's loop in ``tiled``."""
        return _parameter(the([x for x in self.view(statement).loops if x.coord == loop], f"no loop {loop}"))

    def shape(self, buffer: str) -> dict[str, Index]:
        """Return axis -> elements of a buffer along it."""
        x = self.buffer(buffer)
        return {axis: product(d.size for d in self.map.axes[axis] if d not in x.fixed) for axis in x.axes}

    def live(self, statement: str) -> tuple[tuple[Index, Index], ...]:
        """Return (element, extent), element < extent, for each axis along which the statement is cut."""
        out = []
        for x in self.clips:
            if x.statement == statement:
                digits, values, weight = self.map.axes.get(x.axis, ()), self.map.values(statement), ONE
                first = self.map.element(statement, x.axis)
                for d in reversed(digits[len(digits) - x.whole :]):
                    first, weight = first - values[d] * weight, weight * d.size
                out.append((first, self.map.extents[x.axis]))
        return tuple(out)

    def tiled(self) -> TiledGroup:
        """Return the input of code generation: the tree with statements over loops, whose extents are parameters."""
        tree, statements = flat(self.tree), []
        for n, view in self.map.views.items():
            order = path(tree, n)
            conditions: list[Condition] = []
            for x in sorted(view.loops, key=lambda x: order.index(x.coord)):
                conditions += between(0, x.coord, V(_parameter(x)))
                if x.at:
                    conditions.append(equals(x.coord, 0 if x.at is End.FIRST else V(_parameter(x)) - 1))
            for k, low, short in view.guard:
                conditions += [at_least(k, low)] * bool(low)
                conditions += [at_least(V(self.parameter(n, k)) - 1 - short, k)] * bool(short)
            coords = tuple(k for k in order if view.loop(k))
            statements.append(TileStatement(n, coords, tuple(conditions)))
        used = dict.fromkeys(_parameter(x) for view in self.map.views.values() for x in view.loops)
        tasks = self.parallel[0][1] if self.parallel else ()
        whole: dict[str, Index] = {}
        for x in (x for view in self.map.views.values() for x in view.loops if x.digits):
            axis = x.digits[0].axis
            if x.digits == self.map.axes[axis] and x.digits[0].when is When.COUNT:  # it runs the whole axis
                empty = self.map.has_empty_step(axis)
                whole[_parameter(x)] = maximum(1, self.map.extents[axis]) if empty else self.map.extents[axis]
        return TiledGroup(self.tree, tuple(statements), tuple(used), tasks, whole)


def _parameter(x: Loop) -> str:
    """Name a loop's parameter. Loops of one digit are named after it, so that equal names may run different digits."""
    return extent(Coord(x.digits[0].name) if len(x.digits) == 1 else x.coord)


# -- walking trees ---------------------------------------------------------------------------------------------------


def flat(tree: Tree) -> Tree:
    """Merge bands directly below bands, and sequences directly below sequences."""
    if isinstance(tree, Band):
        below = flat(tree.child)
        if isinstance(below, Band):
            return Band((*tree.members, *below.members), below.child)
        return Band(tree.members, below) if tree.members else below
    if isinstance(tree, Mark):
        return Mark(tree.name, flat(tree.child))
    if isinstance(tree, Sequence):
        out: list[tuple[frozenset[str], Tree]] = []
        for names, x in tree.children:
            x = flat(x)
            out += list(x.children) if isinstance(x, Sequence) else [(names, x)]
        return Sequence(tuple(out))
    return tree


def path(tree: Tree, statement: str) -> tuple[Coord, ...]:
    """Return the loops around a statement, outermost first."""
    if isinstance(tree, Band):
        return (*map(Coord, tree.members), *path(tree.child, statement))
    if isinstance(tree, Mark):
        return path(tree.child, statement)
    if isinstance(tree, Sequence):
        return next((path(x, statement) for names, x in tree.children if statement in names), ())
    return ()


def rewrite(tree: Tree, names: frozenset[str], f: Callable[[Tree, frozenset[str]], Tree | None]) -> Tree:
    """Replace nodes by the result of ``f(node, statements below it)``, outermost first.

    If the result is None, the node stays and its children are rewritten.
    """
    new = f(tree, names)
    if new is not None:
        return new
    if isinstance(tree, Sequence):
        return Sequence(tuple((n, rewrite(x, n, f)) for n, x in tree.children))
    if isinstance(tree, (Band, Mark)):
        return replace(tree, child=rewrite(tree.child, names, f))
    return tree


def below(tree: Tree) -> frozenset[str]:
    """Return the statements that sequences list below a node; empty if there is no sequence."""
    if isinstance(tree, Sequence):
        return frozenset(x for names, y in tree.children for x in (below(y) or names))
    return frozenset() if isinstance(tree, Leaf) else below(tree.child)


def relist(tree: Tree) -> Tree:
    """Update the statements that sequences list, after statements were added."""
    if isinstance(tree, Sequence):
        return Sequence(tuple((below(x) or names, relist(x)) for names, x in tree.children))
    return tree if isinstance(tree, Leaf) else replace(tree, child=relist(tree.child))


def without_marks(tree: Tree, names: Collection[MarkName] | None = None) -> Tree:
    """Remove the marks of these names, by default all marks."""
    if isinstance(tree, Mark) and (names is None or tree.name in names):
        return without_marks(tree.child, names)
    if isinstance(tree, Sequence):
        return Sequence(tuple((n, without_marks(x, names)) for n, x in tree.children))
    return tree if isinstance(tree, Leaf) else replace(tree, child=without_marks(tree.child, names))


def all_of(t: Scheduled) -> frozenset[str]:
    """Return all statements."""
    return frozenset(t.map.views)


def refuse(reason: str, remedy: str | None = None, rule: str = "transformation") -> ScheduleError:
    """Return the error of a transformation that does not fit."""
    return ScheduleError(reason, rule=rule, remedy=remedy)


def the(matches: list[_T], reason: str) -> _T:
    """Return the first match; refuse with the reason if there is none."""
    if not matches:
        raise refuse(reason)
    return matches[0]
