"""Integer tensors that are formulas of the position: iotas, sizes, and arithmetic on them.

Exporters write views as gathers (position ids, masks read at ``b * L + j``). If the fetched integer is a formula, the
subscript becomes the formula, and the apparent gather of unknown elements is a view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from polydyn.graph.intervals import Intervals
from polydyn.graph.ir import Compute, Concat, Dim, dim_name
from polydyn.schedules.expr import Array, Const, FromIndex, Load, Op, Value
from polydyn.schedules.index import ZERO, Atom, Index, fetch
from polydyn.schedules.ranges import Ranges

MAX_TERMS = 16
"""Maximum terms of a formula. Longer ones stay tensors."""
MAX_POSITION = 1 << 48
"""Maximum magnitude of a constant that has a formula. Differences of larger ones may overflow."""
FORMULA_DTYPES = ("int64", "int32")
"""Dtypes of formulas. Overflow is not modelled, as for all sizes."""


class Positions:
    """Formulas of the tensors so far."""

    def __init__(self) -> None:
        self.intervals = Intervals()
        self._formulas: dict[str, Index] = {}
        self._concats: dict[str, tuple[Concat, tuple[Dim, ...]]] = {}

    def learn(self, node: Compute) -> None:
        """Record the formula of a Compute, if it is one, and the interval of its elements."""
        self.intervals.learn(node)
        formula = self._formula(node.body) if node.reduce is None and node.body.dtype in FORMULA_DTYPES else None
        if formula is not None and len(formula.terms) <= MAX_TERMS:
            self._formulas[node.output] = formula

    def learn_concat(self, node: Concat, lengths: tuple[Dim, ...]) -> None:
        """Record the parts of a concatenation. ``lengths``: sizes of the parts along the axis.

        Exporters write tuples of subscripts in this form, each component as a part of length 1.
        """
        self.intervals.learn_concat(node)
        self._concats[node.output] = node, lengths

    def learn_constant(self, name: str, array: Array) -> None:
        """Record the formula of a constant that is affine in its position (iotas, equal numbers), and its interval."""
        self.intervals.learn_constant(name, array)
        if str(array.dtype) not in FORMULA_DTYPES or array.size == 0:
            return
        if max(-int(array.min()), int(array.max())) > MAX_POSITION:
            return
        origin = (0,) * array.ndim
        formula, values = Index.of(int(array[origin])), np.full(array.shape, array[origin])
        for a, n in enumerate(array.shape):
            if n > 1:
                step = int(array[tuple(int(a == b) for b in range(array.ndim))]) - int(array[origin])
                formula = formula + Index.of(dim_name(a)) * step
                values = values + step * np.arange(n).reshape([-1 if a == b else 1 for b in range(array.ndim)])
        if (values == array).all():
            self._formulas[name] = formula

    def resolve(self, i: Index, aliases: Mapping[str, str], wraps: list[tuple[Index, Index]]) -> Index:
        """Replace every fetched integer in a subscript by its formula if it has one.

        ``wraps`` collects ``(x, n)`` where a formula x was wrapped into an axis of size n (``x - n * (x // n)``).
        """
        if not i.fetches():
            return i

        def atom(a: Atom) -> Index:
            args = tuple(self.resolve(x, aliases, wraps) for x in a.args)
            if a.kind == "floordiv" and not args[0].fetches() and a.args[0].fetches():
                wraps.append((args[0], args[1]))
            if a.kind != "fetch":
                return Index({(Atom(a.kind, args),): 1})
            return self._at(aliases.get(a.name, a.name), args)

        return i.map_atoms(atom)

    def _at(self, name: str, at: tuple[Index, ...]) -> Index:
        if name in self._concats:
            name, at = self._part(name, at)
        formula = self._formulas.get(name)
        if formula is None:
            return fetch(name, at)
        found = formula.subs({dim_name(k): x for k, x in enumerate(at)})
        return self.resolve(found, {}, []) if found.fetches() else found  # a known position may select a part now

    def _part(self, name: str, at: tuple[Index, ...]) -> tuple[str, tuple[Index, ...]]:
        """Return the part of a concatenation that holds the element at a known position along the axis."""
        node, lengths = self._concats[name]
        place = at[node.axis].constant
        for part, length in zip(node.parts, lengths, strict=True):
            n = length.constant
            if place is None or n is None:
                break
            if place < n:
                return part, (*at[: node.axis], Index.of(place), *at[node.axis + 1 :])
            place -= n
        return name, at

    def _formula(self, v: Value) -> Index | None:
        if isinstance(v, FromIndex):
            return v.index
        if isinstance(v, Const):
            return Index.of(int(v.value))
        if isinstance(v, Load):
            return self._at(v.buffer, v.index) if v.dtype in FORMULA_DTYPES else None
        if not isinstance(v, Op) or v.dtype not in FORMULA_DTYPES:
            return None
        args = [self._formula(a) for a in v.args]
        if v.name == "cast" and v.args[0].dtype in FORMULA_DTYPES:
            return args[0]
        known = [a for a in args if a is not None]
        if len(known) != len(args) or v.name not in ("add", "sub", "mul", "neg"):
            return None
        if v.name == "neg":
            return ZERO - known[0]
        a, b = known
        return a + b if v.name == "add" else a - b if v.name == "sub" else a * b


def at_the_end(x: Index, ranges: Ranges, nonnegative: Callable[[Index], bool]) -> Index:
    """Set each iterator whose factor is a nonnegative difference of sizes to its last value.

    ``b * (L // 5) - b`` grows with ``b`` because a convolution's window fits into L.
    """
    for v, extent in ranges.items():
        factor, rest = x.split(v)
        if len(factor.terms) < 2 or v in factor.symbols() | rest.symbols():
            continue
        if factor.symbols().isdisjoint(ranges) and nonnegative(factor):
            x = rest + factor * (extent - 1)
    return x
