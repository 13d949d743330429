"""Footprints: what the windows of neighbouring rows read, as a box of coordinates.

The row operand of a convolution reads an element through ``s*h + d*kh``. Overlapping windows read the same elements.
The *places* of an element are these sums, and the operand is a function of its places alone. So a copy of a box of
places, image rows with the padding around them, holds every element once. A row's window starts at its first place, and
each step of the reduction adds an offset.

    operand(row, steps)  ==  value(places(pixels(row), steps))

If the product multiplies packed words of several steps, the operand is a word of these values, and the box holds the
single steps. The steps of a word are contiguous, wherever it begins.

Extents are symbols here (``size``), so a proof about a footprint holds for all sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from polydyn.schedules.expr import (
    INTEGERS,
    OPS,
    PARTS,
    Const,
    FromIndex,
    Load,
    Op,
    Value,
    at_least_zero,
    conjuncts,
    neutral,
    substitute,
    walk,
)
from polydyn.schedules.group.words import word
from polydyn.schedules.index import ONE, ZERO, Index, minimum, product
from polydyn.schedules.model import Statement

V = Index.of
Axis = tuple[str, Index]
LOW, HIGH = "line_lo", "line_hi"
"""Symbols: the first pixel iterator in the first and in the last row of a task's rows."""
MOST_STEPS = 6
"""Maximum dilation and stride of a window iterator that moves together with an output iterator."""


def size(iterator: str) -> str:
    """Return the symbol for an iterator's extent."""
    return f"size.{iterator}"


def first(pixel: str) -> str:
    """Return the symbol for the smallest value of a pixel iterator in a run of rows."""
    return f"first.{pixel}"


def last(pixel: str) -> str:
    """Return the symbol for the largest value of a pixel iterator in a run of rows."""
    return f"last.{pixel}"


@dataclass(frozen=True)
class Footprint:
    """The footprint of the row operand.

    ``value``: the operand over places (and iterators that all rows of a task have in common). ``places``: (name, affine
    expression over pixels and steps, coefficients >= 1), in the order of the copy's layout, outermost first; each pixel
    and each step is in exactly one. ``pixels``: (name, extent) of the iterators whose mixed-radix number is the
    iterator ``row`` of the group. ``steps``: (name, extent) of the group's reductions, in single steps. ``word``: the
    operation (in ``PARTS``) that packs values into the group's words; the last reduction of the group counts words
    then.
    """

    value: Value
    places: tuple[Axis, ...]
    pixels: tuple[Axis, ...]
    steps: tuple[Axis, ...]
    row: str
    word: str = ""

    @property
    def parts(self) -> int:
        """The number of steps in a word; 1 without packing."""
        return OPS[self.word].arity if self.word else 1

    @property
    def dtype(self) -> str:
        """The dtype of the copied elements."""
        return PARTS[self.word] if self.word else self.value.dtype

    @property
    def beyond(self) -> int:
        """The number of elements past the end of the box that the last word of a window may read."""
        return -int(self.steps[-1][1]) % self.parts if self.word else 0

    @property
    def mistake(self) -> str:
        """The reason why the box does not hold whole words wherever one begins; empty if it does."""
        (_, inner), (last, _) = self.places[-1], self.steps[-1]
        if self.word and inner.split(last)[0] != ONE:
            return f"the parts of a word, steps {last}, do not lie side by side in {dict(self.places)}"
        if self.beyond and self.dtype not in INTEGERS:
            return f"a last word of {self.dtype} may hold NaN, which columns of 0 do not make 0"
        return ""

    @property
    def strip(self) -> str:
        """The place that moves with the first pixel iterator.

        A task copies a range of it, and all values of the other places.
        """
        return next(x for x, at in self.places if self.pixels[0][0] in at.symbols())

    @property
    def line(self) -> Index:
        """The number of rows with one value of the first pixel iterator."""
        return product(e for _, e in self.pixels[1:])

    def sizes(self) -> dict[str, Index]:
        """Return the values of the symbols that ``size`` returns."""
        return {size(x): e for x, e in (*self.pixels, *self.steps)}

    def at(self, env: Mapping[str, Index]) -> dict[str, Index]:
        """Return place -> the coordinate that an instance reads; ``env`` has values of the group's iterators."""
        digits, rest = {}, V(self.row).subs(env)
        for x, e in reversed(self.pixels[1:]):
            digits[x], rest = rest % e, rest // e
        known = {**env, **digits, self.pixels[0][0]: rest}
        return {x: i.subs(known) for x, i in self.places}

    def read(self, env: Mapping[str, Index]) -> dict[str, Index]:
        """Return ``at`` for the first step of a word."""
        last = self.steps[-1][0]
        return self.at({**env, last: env[last] * self.parts})

    def operand(self) -> Value:
        """Return the operand over the group's iterators."""
        value, (last, steps) = substitute(self.value, self.at({})), self.steps[-1]
        return word(self.word, value, last, int(steps)) if self.word else value

    def box(self) -> dict[str, tuple[Index, Index]]:
        """Return place -> (first coordinate, count) of a task's copy, over ``LOW``, ``HIGH`` and sizes.

        It is the hull of what the windows read: coordinates outside it might be outside the tensor.
        """
        first, out = self.pixels[0][0], {}
        for x, at in self.places:
            step, _ = at.split(first)
            last = at.subs({n: V(size(n)) - 1 for n in at.symbols() if n != first} | {first: V(HIGH) - LOW})
            out[x] = step * LOW, last + ONE
        return out

    def inside(self) -> dict[str, tuple[Index, Index]]:
        """Return place -> (low, high): the value is 0 outside low <= place < high, for all other places."""
        v, out = self.value, dict[str, tuple[Index, Index]]()
        outside = v.args[2] if isinstance(v, Op) and v.name == "where" else None
        if self.word or not (isinstance(v, Op) and isinstance(outside, Const) and outside.value == 0):
            return out
        slacks = [i for part in conjuncts(v.args[0]) if (i := at_least_zero(part)) is not None]
        for slack, (x, at) in itertools.product(slacks, self.places):
            step, rest = slack.split(x)
            if step in (ONE, -ONE) and rest.symbols().isdisjoint(dict(self.places)):
                low, high = out.get(x, (ZERO, at.subs({n: V(size(n)) - 1 for n in at.symbols()}) + 1))
                out[x] = (-rest, high) if step == ONE else (low, rest + 1)
        return out

    def taps(self) -> dict[str, tuple[Index, Index]]:
        """Return step -> (low, high): other steps read zeros, for pixels from ``first`` to ``last``.

        Only steps that share a place with pixels are in it.
        """
        out = {}
        for x, (low, high) in self.inside().items():
            at = dict(self.places)[x]
            steps = [n for n, _ in self.steps if n in at.symbols()]
            if len(steps) == 1 and at.symbols() - {*steps}:
                apart, begin = at.split(steps[0])
                least, most = (begin.subs({n: V(f(n)) for n in begin.symbols()}) for f in (first, last))
                out[steps[0]] = ((low - most).ceildiv(apart), (high - 1 - least) // apart + 1)
        return out

    def span(self, low: Index, high: Index) -> dict[str, Index]:
        """Return the values of ``first`` and ``last`` for the rows from ``low`` to ``high``.

        A pixel has its own values if all rows agree on the pixels outside it; otherwise it has all values.
        """
        out, inner = dict[str, Index](), ONE
        for n, (x, e) in enumerate(reversed(self.pixels)):
            a, b = low // inner, high // inner
            if n < len(self.pixels) - 1:
                begin = a // e * e
                a, b = (a - begin) * (1 - minimum(1, b // e - a // e)), minimum(b - begin, e - 1)
            out |= {first(x): a, last(x): b}
            inner = inner * e
        return out

    def elements(self, lines: Index) -> Index:
        """Return the number of elements of the box for ``lines`` values of the first pixel iterator."""
        counts = (count.subs({LOW: ZERO, HIGH: lines - 1}) for _, count in self.box().values())
        return product(counts).subs(self.sizes())


def together(tap: Index, step: Index) -> Fraction | None:
    """Return d / s if a tap moves d / s times as far in memory as an output, with small d and s; otherwise None."""
    if not tap.terms or tap.terms.keys() != step.terms.keys():
        return None
    ratios = {Fraction(c, step.terms[m]) for m, c in tap.terms.items()}
    ratio = ratios.pop()
    return ratio if not ratios and 0 < ratio.numerator <= MOST_STEPS >= ratio.denominator else None


def adds_nothing_outside(s: Statement) -> bool:
    """Whether a tap whose guard is false leaves the result unchanged, and the guard can be split.

    A sum of products skips zeros, whatever the other factor is; 16-bit zeros are widened.
    """
    choices = [v for v in walk(s.value) if isinstance(v, Op) and v.name in ("where", "select")]
    if not choices:
        return True
    v = s.value
    while isinstance(v, Op) and v.name in ("mul", "cast") and s.reduce == "sum":
        held = [a for a in v.args if any(x is choices[0] for x in walk(a))]
        if len(held) != 1:
            return False
        v = held[0]
    outside = v.args[2] if isinstance(v, Op) and v is choices[0] and len(choices) == 1 else None
    return isinstance(outside, Const) and outside == neutral(str(s.reduce), v.dtype) and _is_box(choices[0])


def _is_box(choice: Op) -> bool:
    """Whether a guard is a conjunction of integer comparisons that do not read tensors."""
    parts = list(walk(choice.args[0]))
    names = {v.name for v in parts if isinstance(v, Op)}
    return (
        names <= {"and", "ge", "gt", "le", "lt"}
        and not any(isinstance(v, Load) for v in parts)
        and not any(v.index.fetches() for v in parts if isinstance(v, FromIndex))
    )
