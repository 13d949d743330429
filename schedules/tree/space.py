"""A scheduled group in digit space, as the proof uses it. Sizes are separate symbols, one for each digit."""

from __future__ import annotations

from dataclasses import dataclass, replace

import islpy as isl

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.expr import Load, Value, transform
from polydyn.schedules.group.dependence import Dependences
from polydyn.schedules.group.skeleton import OUTSIDE
from polydyn.schedules.group.witness import dependence_error
from polydyn.schedules.index import Index
from polydyn.schedules.isl_util import Condition, at_least, between, equals, frame, pair, param_set, union_maps
from polydyn.schedules.model import Array, Group, Statement
from polydyn.schedules.tree.names import Coord, End
from polydyn.schedules.tree.nodes import Band, Sequence, TileStatement, Tree
from polydyn.schedules.tree.scheduled import Buffer, Carried, Flow, Scheduled, flat, path, without_marks
from polydyn.schedules.tree.tilemap import Digit, Loop, View, When

V = Index.of
UNIT = "unit"
"""The level of parallelism inside a block: warps or threads, which barriers order."""


@dataclass(frozen=True)
class Structure:
    """The part of a scheduled group, besides its form, that the proof depends on. It has no sizes. Hashable."""

    tree: Tree
    axes: tuple[tuple[str, tuple[Digit, ...]], ...]
    iterators: tuple[tuple[tuple[str, str], str], ...]
    views: tuple[tuple[str, View], ...]
    buffers: tuple[Buffer, ...]
    flow: tuple[Flow, ...]
    carried: tuple[Carried, ...]
    parallel: tuple[tuple[str, tuple[Coord, ...]], ...]


def structure(t: Scheduled) -> Structure:
    """Return the structure of a scheduled group, in which every digit's size is a symbol of its own."""

    def free(d: Digit) -> Digit:
        return Digit(d.axis, d.name, V(f"size_{d.name}"), d.when)

    def loops(x: Loop) -> Loop:
        return replace(x, digits=tuple(map(free, x.digits)))

    views = {
        n: replace(w, loops=tuple(map(loops, w.loops)), hidden=tuple(map(free, w.hidden)))
        for n, w in t.map.views.items()
    }
    return Structure(
        flat(without_marks(t.tree)), tuple((n, tuple(map(free, ds))) for n, ds in t.map.axes.items()),
        tuple(t.map.iterators.items()), tuple(views.items()),
        tuple(replace(x, fixed=frozenset(map(free, x.fixed))) for x in t.buffers),
        t.flow, t.carried, t.parallel,
    )  # fmt: skip


class Space:
    """A scheduled group over digits: every iterator and every loop becomes its digits."""

    def __init__(self, bare: Group, x: Structure) -> None:
        self.bare, self.x = bare, x
        self.axes, self.iterators, self.views = dict(x.axes), dict(x.iterators), dict(x.views)
        self.paths = {n: path(x.tree, n) for n in self.views}
        stepped = {d for w in self.views.values() for y in w.loops if y.at for d in y.digits}
        sizes = {d: str(d.size) for ds in self.axes.values() for d in ds}
        self.params = tuple(sorted(dict.fromkeys(sizes.values())))
        empty = {sizes[d] for ds in self.axes.values() for d in ds[:1] if d.when is When.COUNT and d not in stepped}
        low = [at_least(n, 0 if n in empty else 1) for n in self.params]
        self.context = param_set(self.params, low, positive=False)
        self.group = self._group()
        self.statements = [self._statement(n) for n in self.views]
        self.coords = {s.name: s.coords for s in self.statements}

    def digits(self, s: Statement) -> tuple[Digit, ...]:
        """Return the digits of a statement's iterators."""
        return tuple(d for x in s.iterators for d in self.axes[self.iterators[s.name, x]])

    def _group(self) -> Group:
        """Return the group over digits. Subscripts only appear in messages: dependences come from the group itself."""
        statements = []
        for s in self.bare.statements:

            def value(v: Value, s: Statement = s) -> Value:
                return replace(v, index=self._spread(s, v.index)) if isinstance(v, Load) and v.index else v

            iters = tuple((d.name, d.size) for d in self.digits(s))
            moved = transform(s.value, value)
            statements.append(replace(s, iters=iters, index=self._spread(s, s.index), value=moved))
        arrays = {n: Array(n, a.dtype, (), a.role, ()) for n, a in self.bare.arrays.items() if n != OUTSIDE.name}
        return Group("digits", self.params, {**arrays, OUTSIDE.name: OUTSIDE}, tuple(statements))

    def _spread(self, s: Statement, index: tuple[Index, ...]) -> tuple[Index, ...]:
        names = [str(i) for i in index if i.is_symbol and (s.name, str(i)) in self.iterators]
        return tuple(V(d.name) for n in names for d in self.axes[self.iterators[s.name, n]])

    def _statement(self, n: str) -> TileStatement:
        view, coords = self.views[n], []
        conditions: list[Condition] = []
        for k in self.paths[n]:
            x = view.loop(k)
            for d in x.digits if x else ():
                coords.append(d.name)
                conditions += between(0, d.name, d.size)
                if x and x.at:
                    conditions.append(equals(d.name, 0 if x.at is End.FIRST else d.size - 1))
        for k, low, short in view.guard:
            x = view.loop(k)
            if x is None or len(x.digits) != 1:
                raise LegalityError(f"{n} is guarded along {k}, which is not a single digit", node=n, rule="tile map")
            (d,) = x.digits
            conditions += [at_least(d.name, low), at_least(d.size - 1 - short, d.name)]
        return TileStatement(n, tuple(coords), tuple(conditions))

    def tree(self) -> Tree:
        """Return the tree with every loop as the loops of its digits."""

        def go(node: Tree, names: frozenset[str]) -> Tree:
            if isinstance(node, Sequence):
                return Sequence(tuple((n, go(x, n)) for n, x in node.children))
            if not isinstance(node, Band):
                return node
            members = tuple(d for k in node.members for d in self._run(Coord(k), names))
            below = go(node.child, names)
            return Band(members, below) if members else below

        return go(self.x.tree, frozenset(self.views))

    def _run(self, loop: Coord, names: frozenset[str]) -> tuple[str, ...]:
        """Return the digits of a loop, which are the same for all statements in it."""
        runs = {n: tuple(d.name for d in x.digits) for n in sorted(names) if (x := self.views[n].loop(loop))}
        if len(runs) < len(names) or len(set(runs.values())) != 1:
            raise LegalityError(
                f"loop {loop} runs {runs}; statements without it: {sorted(names - set(runs))}", rule="tile map"
            )
        return next(iter(runs.values()))

    def images(self) -> isl.UnionMap:
        """Return digit instance of the group -> tile-space instance.

        They differ only in the steps of sunk statements.
        """
        parts = []
        for s in self.group.statements:
            exprs: list[Index] = []
            for k in self.paths[s.name]:
                x = self.views[s.name].loop(k)
                for d in x.digits if x else ():
                    end = x.at if x else None
                    exprs.append(_at(d, end))
            space = frame(s.name, s.iterators, self.params)
            parts.append(space.map_to(s.name, exprs).intersect_domain(self._box(s)))
        return union_maps(parts, self.params)

    def _box(self, s: Statement) -> isl.Set:
        return frame(s.name, s.iterators, self.params).where([c for n, e in s.iters for c in between(0, n, e)])

    def dependences(self, deps: Dependences) -> Dependences:
        """Return a superset of the group's dependences over digits.

        Equal iterators are equal digits, and iterators that move forwards lexicographically do so in digits. Nothing
        else is restricted.
        """
        moved = union_maps((self._moved(m) for m in deps.pairs), self.params)
        none = isl.UnionMap.empty(self.context.get_space())
        return Dependences(self.context, moved, none, none, none)

    def _moved(self, m: isl.Map) -> isl.Map:
        a, b = pair(m)
        u, w = self.bare.statement(a), self.bare.statement(b)
        of = [{self.iterators[s.name, n]: n for n in s.iterators} for s in (u, w)]  # axis -> iterator
        common = [n for n in of[0] if n in of[1]]
        fa, fb = frame(a, u.iterators, self.bare.params), frame(b, w.iterators, self.bare.params)

        def row(names: list[str]) -> tuple[isl.Map, isl.Map]:
            return fa.map_to("", [V(of[0][n]) for n in names]), fb.map_to("", [V(of[1][n]) for n in names])

        same: list[str] = []
        rest: list[str] = []
        for n in common:
            r = row([n])
            (same if m.subtract(r[0].apply_range(r[1].reverse())).is_empty() else rest).append(n)
        r = row(rest)
        forwards = bool(rest) and m.subtract(r[0].lex_lt_map(r[1])).is_empty()
        onwards = bool(rest) and not forwards and a != b and m.subtract(r[0].lex_le_map(r[1])).is_empty()
        x, y = self.group.statement(a), self.group.statement(b)
        ga, gb = frame(a, x.iterators, self.params), frame(b, y.iterators, self.params)

        def values(names: list[str]) -> list[Index]:
            return [V(d.name) for n in names for d in self.axes[n]]

        out = ga.map_to("", values(same)).apply_range(gb.map_to("", values(same)).reverse())
        if forwards:
            out = out.intersect(ga.map_to("", values(rest)).lex_lt_map(gb.map_to("", values(rest))))
        elif onwards:
            out = out.intersect(ga.map_to("", values(rest)).lex_le_map(gb.map_to("", values(rest))))
        elif a == b:
            raise LegalityError(f"{a} depends on itself along {rest}, not forwards", node=a, rule="digit space")
        return out.intersect_domain(self._box(x)).intersect_range(self._box(y))

    def place(self, n: str, level: str) -> list[Index] | None:
        """Return the task or unit of an instance of a statement, as values of digits, or None if it has none.

        Several sets of loops may define a level: a warp has one over all warps, an instruction of a warpgroup one over
        warpgroups, in which the warp is a digit of its rows. A statement with one of these sets has the digits of all.
        """
        entries = [loops for of, loops in self.x.parallel if of == level]
        view = self.views[n]
        if not any(all(view.loop(k) for k in loops) for loops in entries):
            return None
        loops_of = {x.coord: x.digits for w in self.views.values() for x in w.loops}
        digits = dict.fromkeys(d for loops in entries for k in loops for d in loops_of.get(k, ()))
        ends = {d: x.at for x in view.loops for d in x.digits} | dict.fromkeys(view.hidden)
        for d in digits:
            if d not in ends:
                raise LegalityError(f"{n} is of a {level}, but runs no digit {d.name} of it", node=n, rule="tile map")
        return [_at(d, ends[d]) for d in digits]

    def check_parallel(self, deps: Dependences) -> None:
        """Check that no dependence leads from one task to another, or from one unit of a block to another.

        Statements without a unit belong to the whole block: a barrier separates them from statements of units.
        """
        for level in dict.fromkeys(level for level, _ in self.x.parallel):
            rows = {}
            for s in self.group.statements:
                place = self.place(s.name, level)
                if place is not None:
                    rows[s.name] = frame(s.name, s.iterators, self.params).map_to("", place)
            for m in deps.pairs:
                a, b = pair(m)
                if level == UNIT and (a not in rows or b not in rows):
                    continue
                bad = m.subtract(rows[a].apply_range(rows[b].reverse())) if a in rows and b in rows else m
                bad = bad.intersect_params(self.context)
                if not bad.is_empty():
                    loops = [str(k) for of, ks in self.x.parallel if of == level for k in ks]
                    what = f"two instances of {level} {loops} meet one element"
                    raise dependence_error(what, bad, self.group, self.context)


def _at(d: Digit, end: End | None) -> Index:
    """Return the value of a digit. For a statement at an end of its loop it is the first or last value."""
    return V(d.name) if end is None else V(0) if end is End.FIRST else d.size - 1
