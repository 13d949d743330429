"""Index-set splitting: a loop becomes consecutive segments, in each of which its subscripts are affine.

A subscript with a minimum, a maximum or a quotient of the loop's iterator, as in Pad or Tile, is affine between the
iterations where the minimum changes its side or the quotient its value. Segments may be empty. An address that depends
on data, or on a product of iterators, cannot be split.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from polydyn.codegen import ir
from polydyn.codegen.indices import map_node_indices, node_indices, substitute
from polydyn.codegen.passes.vectorise import vectorise_loop
from polydyn.schedules.errors import Declined
from polydyn.schedules.index import ONE, ZERO, Atom, Index, floordiv, maximum, minimum

MOST_SEGMENTS = 8
"""Maximum number of loops that one loop becomes: each one is compiled."""
V = Index.of


def vectorise(loop: ir.For, width: int, chains: int = 4) -> ir.Body | Declined:
    """Vectorise a loop of any extent as a whole, or by its segments. Declined: neither is possible."""
    whole = vectorise_loop(loop, width, chains)
    if not isinstance(whole, Declined):
        return whole
    segments = vectorise_segments(loop, width)
    return segments if not isinstance(segments, Declined) else Declined(f"{whole}; {segments}")


def vectorise_segments(loop: ir.For, width: int) -> ir.Body | Declined:
    """Split a loop from 0 to at least 0 that carries no register from step to step, and vectorise each segment.

    Declined: a subscript cannot be split, or a segment cannot be vectorised.
    """
    inside = {n.reg for n in ir.walk(loop.body) if isinstance(n, ir.Def)}
    if any(isinstance(n, ir.Set) and n.reg not in inside for n in ir.walk(loop.body)):
        return Declined(f"a register is carried by the loop {loop.var}")
    try:
        if _innermost(loop.body, loop.var, width) is None:
            return Declined(f"{loop.var} has one segment")
        return _Split(loop, width).segment(loop.body, ZERO, loop.hi)
    except _NoSegmentsError as e:
        return Declined(str(e))


class _NoSegmentsError(Exception):
    """A loop cannot be split. Never leaves this file."""


@dataclass
class _Split:
    """The state of a split: numbers of new names and of loops so far."""

    loop: ir.For
    width: int
    made: int = 0
    numbers: Iterator[int] = field(default_factory=count)

    def segment(self, body: ir.Body, low: Index, high: Index) -> ir.Body:
        """Return the loops for the iterations from ``low`` to ``high``, which is not smaller."""
        found = _innermost(body, self.loop.var, self.width)
        if found is None:
            return self._vectors(body, low, high)
        if found.kind == "floordiv":
            return self._runs(body, low, high, found)
        return self._sides(body, low, high, found)

    def _vectors(self, body: ir.Body, low: Index, high: Index) -> ir.Body:
        """Return the vectors of a segment whose subscripts are affine."""
        self.made += 1
        if self.made > MOST_SEGMENTS:
            raise _NoSegmentsError(f"{self.loop.var} has more than {MOST_SEGMENTS} segments")
        var = self.loop.var
        moved = substitute(body, {var: V(var) + low})
        vectors = vectorise_loop(ir.For(var, ZERO, high - low, moved, self.loop.kind), self.width)
        if isinstance(vectors, Declined):
            raise _NoSegmentsError(vectors.reason)
        return vectors

    def _sides(self, body: ir.Body, low: Index, high: Index, a: Atom) -> ir.Body:
        """Split where the first two arguments of a minimum or maximum are equal."""
        first, second, *others = a.args
        unit, step, rest = self._line(first - second)
        # the first value of the unit at which the order of the two is the one that holds at the end
        turn = floordiv(-rest, V(step)) + 1 if step > 0 else rest.ceildiv(V(-step))
        change = turn if unit is None else turn * unit.args[1] - unit.args[0].split(self.loop.var)[1]
        small_first = (first, second) if step > 0 else (second, first)
        small_last = small_first[::-1]
        at = 0 if a.kind == "min" else 1
        extreme = minimum if a.kind == "min" else maximum
        before, after = (_with(body, a, extreme(side[at], *others)) for side in (small_first, small_last))
        name = self._name()
        inside = (*self.segment(before, low, V(name)), *self.segment(after, V(name), high))
        return (ir.Let(name, maximum(low, minimum(high, change)), inside),)

    def _line(self, x: Index) -> tuple[Atom | None, int, Index]:
        """Return (unit, c, rest) with ``x == c * unit + rest``; the unit is the iterator (None) or a quotient of it."""
        var = self.loop.var
        slope, rest = x.split(var)
        units = [a for a in rest.atoms() if isinstance(a, Atom) and var in Index({(a,): 1}).symbols()]
        if not units and slope.constant:
            return None, slope.constant, rest
        step = rest.terms.get((units[0],)) if len(units) == 1 and slope == ZERO and is_run(units[0], var) else None
        if step is None or var in (rest := rest - Index({(units[0],): step})).symbols():
            raise _NoSegmentsError(f"{x} is not affine in {var}")
        return units[0], step, rest

    def _runs(self, body: ir.Body, low: Index, high: Index, a: Atom) -> ir.Body:
        """Split where a quotient changes, by a loop over its values."""
        slope, rest = a.args[0].split(self.loop.var)
        step, divisor = slope.constant, a.args[1]
        if step != 1:
            raise _NoSegmentsError(f"{a} does not move by one with {self.loop.var}")
        size = maximum(divisor, 1)  # an empty tensor is never read
        first = floordiv(low + rest, size)
        run, start, end = self._name(), self._name(), self._name()
        quotient = first + V(run)
        inside = self.segment(_with(body, a, quotient), V(start), V(end))
        bounds = ir.Let(start, maximum(low, quotient * size - rest),
                        (ir.Let(end, minimum(high, (quotient + 1) * size - rest), inside),))  # fmt: skip
        return (ir.For(run, ZERO, floordiv(high + rest - 1, size) - first + 1, (bounds,)),)

    def _name(self) -> str:
        return f"{self.loop.var}_s{next(self.numbers)}"


def _innermost(body: ir.Body, var: str, width: int) -> Atom | None:
    """Return a part of a subscript that is not affine in ``var`` although its own arguments are; None: there is none.

    Quotients that change within a vector of ``width`` lanes are no such parts. _NoSegmentsError: the part depends on
    data, or on a name that the body itself binds, such as the iterator of an inner loop.
    """
    bound = {n.var for n in ir.walk(body) if isinstance(n, (ir.For, ir.Let))}
    for n in ir.walk(body):
        for i in node_indices(n):
            if var in i.symbols() and (found := _part(i, var, width)):
                if inner := sorted(Index({(found,): 1}).symbols() & bound):
                    raise _NoSegmentsError(f"{found} depends on {inner[0]}, which the loop {var} binds")
                return found
    return None


def _part(i: Index, var: str, width: int) -> Atom | None:
    for a in i.atoms():
        if not isinstance(a, Atom) or var not in Index({(a,): 1}).symbols():
            continue
        for x in a.args:
            if var in x.symbols() and (found := _part(x, var, width)):
                return found
        if a.kind == "fetch":
            raise _NoSegmentsError(f"{a} depends on data")
        if a.kind == "floordiv" and var in a.args[1].symbols():
            raise _NoSegmentsError(f"{a} divides by {var}")
        if a.kind == "floordiv" and a.args[0].split(var)[0].constant is None:
            raise _NoSegmentsError(f"{a} is not affine in {var}")
        if not (is_run(a, var) and int(a.args[1]) <= width):
            return a
    return None


def is_run(a: Atom, var: str) -> bool:
    """Check whether an atom is a quotient by a constant that changes once in so many steps of ``var``."""
    if a.kind != "floordiv" or a.args[1].constant is None:
        return False
    slope, rest = a.args[0].split(var)
    return slope == ONE and var not in rest.symbols()


def _with(body: ir.Body, old: Atom, new: Index) -> ir.Body:
    """Replace a part of all subscripts."""

    def part(a: Atom) -> Index:
        return new if a == old else a.normal()

    def g(i: Index) -> Index:
        return i.rebuild(part)

    return ir.rewrite(body, lambda n: map_node_indices(n, g))
