"""Find which keys of an attention have weight, from the expression of its logits.

Every point (row, key) gets an upper bound of its logit. isl decides conditions that are affine in row, key and sizes;
for other conditions (a padding that is read) both outcomes are possible. Two bounds matter:

- -inf: the weight is 0, whatever else the row contains. Such tiles are never visited.
- a large negative number: the weight is 0 only if the row has a logit that is larger by ``NEGLIGIBLE`` (a row without
  other keys gives it weight). Such tiles are visited last, if any row of the block needs them.

A tile in which a mask hides nothing is *open*: its logits need no mask.

A value that is read, for example a score, is assumed to be -inf or at most ``REACH`` times the largest number of its
dtype: products must not overflow. Only masks that are added rely on this; masks that replace a score do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import islpy as isl

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.expr import FLOATS, INTEGERS, ITEMSIZE, Const, FromIndex, Load, Op, Value, loads, transform
from polydyn.schedules.group.witness import set_error
from polydyn.schedules.index import Index, minimum
from polydyn.schedules.isl_util import (
    Condition,
    Frame,
    at_least,
    below,
    between,
    condition,
    equals,
    frame,
    param_set,
    without_last,
)

RELATIONS = ("lt", "le", "gt", "ge", "eq", "ne")
LARGEST = {"float16": 65504.0, "bfloat16": 2.0**128 - 2.0**120, "float32": 2.0**128 - 2.0**104, "float64": 2.0**1023}
REACH = 0.25
NEGLIGIBLE = 128.0
"""exp of minus this is 0 in float32; it is 0 from 104 on."""
LOW = -1000.0
"""Bounds above this mask nothing."""


@dataclass(frozen=True)
class Axis:
    """Rows or keys: the iterator of the logit, its extent, the elements of a tile, the coordinate that counts tiles."""

    iterator: str
    extent: Index
    size: int
    tile: str


@dataclass(frozen=True)
class Logits:
    """The logits of an attention, a value over ``batch``, ``row`` and ``key``, and the tiles they are computed in.

    ``scores`` has the array of scores, and the dtype of the scores in the model, in case the kernel keeps more bits.
    """

    value: Value
    batch: tuple[str, ...]
    row: Axis
    key: Axis
    params: tuple[str, ...]
    scores: tuple[str, str] = ("", "")

    @property
    def points(self) -> Frame:
        """Tiles and the logits in them: (batch.., tile of rows, tile of keys, row, key)."""
        axes = (self.row.tile, self.key.tile, self.row.iterator, self.key.iterator)
        return frame("", (*self.batch, *axes), self.params)

    def inside(self) -> isl.Set:
        """Return the logits in their tiles. An extent that is a product of symbols bounds nothing."""
        out: list[Condition] = []
        for a in (self.row, self.key):
            start = Index.of(a.tile) * a.size
            out += [*between(start, a.iterator, start + a.size), at_least(a.iterator, 0)]
            try:
                self.points.aff(a.extent)
                out.append(below(a.iterator, a.extent))
            except ScheduleError:
                pass
        return self.points.where(out)

    def bounds(self) -> dict[float, isl.Set]:
        """Return the upper bounds of the logits that are at most ``LOW``, with the points where they hold."""
        out: dict[float, isl.Set] = {}
        for span, s in _Spans(self.points, self.scores).of(self.value).items():
            if span.high <= LOW:  # false for NaN, the unknown bound
                out[span.high] = out[span.high].union(s) if span.high in out else s
        return out

    def shown(self, condition: Value, truth: bool) -> isl.Set:
        """Return the points at which a condition certainly has the value ``truth``."""
        return _Spans(self.points, self.scores).truth(condition)[0 if truth else 1]

    def hidden(self) -> isl.Set:
        """Return the points whose logit is certainly -inf."""
        none: isl.Set = isl.Set.empty(self.points.space)
        return self.bounds().get(-math.inf, none)


@dataclass(frozen=True)
class Visits:
    """The tiles of keys that a block of rows visits.

    ``live``: conditions on tiles that may have a visible key. If ``least`` is None, only these are visited. Otherwise
    the tiles before ``end`` are visited first, and the rest only if some row has no logit of at least ``least``.
    """

    live: tuple[Condition, ...] = ()
    least: float | None = None
    end: Index | None = None


def visits(logits: Logits) -> Visits:
    """Return the visits that the masks in the logits allow.

    A check proves that no tile with a visible key is skipped.
    """
    bounds = logits.bounds()
    none: isl.Set = isl.Set.empty(logits.points.space)
    hidden = bounds.get(-math.inf, none)
    live = tile_conditions(logits, hidden)
    if live:
        check_conditions(logits, live, hidden)
        return Visits(live)
    low = none
    for s in bounds.values():
        low = low.union(s)
    end, kept = _end(logits, tile_conditions(logits, low))
    if end is None:
        return Visits()
    check_conditions(logits, kept, low)
    most = max(bounds)
    return Visits((), most + max(NEGLIGIBLE, abs(most) * 2.0**-20), end)


def tile_conditions(logits: Logits, hidden: isl.Set) -> tuple[Condition, ...]:
    """Return conditions that hold for every tile with a key outside ``hidden``; none if any tile may have such keys.

    Conditions are affine over the tiles, ``batch`` and ``params``: the simple hull of the projection. So tiles that
    satisfy them may still be entirely hidden.
    """
    if hidden.is_empty():
        return ()
    box, first = logits.inside(), len(logits.batch) + 2
    whole, live = (without_last(s, first) for s in (box, box.subtract(hidden)))
    hull = live.simple_hull().remove_divs().gist(whole.simple_hull().remove_divs())
    return tuple(map(condition, hull.get_constraints()))


def check_conditions(logits: Logits, live: tuple[Condition, ...], hidden: isl.Set) -> None:
    """Check that tiles that violate the conditions have only hidden keys. LegalityError names a visible key."""
    seen = logits.inside().subtract(logits.points.where(live)).subtract(hidden)
    if not seen.is_empty():
        raise set_error("a tile with a visible key is not visited", seen, "ACC1", param_set(logits.params))


def open_logit(logits: Logits) -> tuple[Value, tuple[Condition, ...]]:
    """Return the logit for tiles in which masks hide no key, and the conditions for such tiles.

    The conditions are affine over the tiles, ``batch`` and ``params``. Without conditions all logits need the same
    masks. A mask that is read from a tensor, such as a padding, is always applied.
    """
    masks = _Masks(logits)
    value = transform(logits.value, masks.opened)
    return value, tuple(dict.fromkeys(masks.conditions))


def check_open(logits: Logits, conditions: tuple[Condition, ...], shown: isl.Set) -> None:
    """Check that tiles that satisfy the conditions have only points of ``shown``. LegalityError names another point."""
    seen = logits.inside().intersect(logits.points.where(conditions)).subtract(shown)
    if not seen.is_empty():
        raise set_error("a tile with a hidden key is called open", seen, "LOGIT", param_set(logits.params))


class _Masks:
    """Removes masks that are constant in a tile; ``conditions`` lists the assumptions made so far."""

    def __init__(self, logits: Logits) -> None:
        self.logits, self.conditions = logits, list[Condition]()
        self.spans = _Spans(logits.points, logits.scores)

    def opened(self, v: Value) -> Value:
        """Simplify a choice that masks: drop the conditions that are constant in a tile."""
        if not isinstance(v, Op):
            return v
        if v.name in ("where", "select") and v.dtype in FLOATS:
            for hides, wanted in ((2, True), (1, False)):
                if _hides(v.args[hides]):
                    asked = self._remaining(v.args[0], wanted)
                    return v.args[3 - hides] if asked == _TRUTHS[wanted] else replace(v, args=(asked, *v.args[1:]))
        if v.dtype in FLOATS and not loads(v):
            return self._shown_number(v)
        if v.name == "add" and (zero := next((x for x in v.args if _number(x) == 0), None)):
            return v.args[1] if v.args[0] is zero else v.args[0]
        return v

    def _remaining(self, c: Value, truth: bool) -> Value:
        """Return the part of a condition that must still be evaluated if it should have the value ``truth``."""
        if not isinstance(c, Op):
            return c
        yes, no = self.spans.truth(c)
        if yes.union(no).is_equal(self.logits.points.universe()):
            return _TRUTHS[truth] if self._granted(yes if truth else no) else c
        if c.name == "not":
            x = self._remaining(c.args[0], not truth)
            return _TRUTHS[truth] if x == _TRUTHS[not truth] else replace(c, args=(x,))
        if c.name == ("and" if truth else "or"):
            left = [x for x in (self._remaining(a, truth) for a in c.args) if x != _TRUTHS[truth]]
            return replace(c, args=tuple(left)) if len(left) == 2 else left[0] if left else _TRUTHS[truth]
        return c

    def _shown_number(self, v: Value) -> Value:
        """Return the value of an added mask that hides nothing."""
        pieces = self.spans.of(v)
        shown = [(span, s) for span, s in pieces.items() if not span.high <= LOW]
        if len(pieces) > len(shown) == 1:
            ((span, points),) = shown
            if span.low == span.high and self._granted(points):
                return Const(v.dtype, span.low)
        return v

    def _granted(self, shown: isl.Set) -> bool:
        """Whether some tiles have only points of ``shown``; adds their conditions to ``conditions``.

        Points past the last row or key count too.
        """
        x, first = self.logits, len(self.logits.batch) + 2
        starts = ((a, Index.of(a.tile) * a.size) for a in (x.row, x.key))
        box = x.points.where([c for a, start in starts for c in between(start, a.iterator, start + a.size)])
        tiles = without_last(x.points.universe(), first).subtract(without_last(box.subtract(shown), first))
        found = tuple(map(condition, tiles.simple_hull().remove_divs().get_constraints()))
        if tiles.is_empty() or not found:
            return False
        check_open(x, found, shown)
        self.conditions += found
        return True


_TRUTHS = {truth: Const("bool", truth) for truth in (False, True)}


def _number(v: Value) -> float | None:
    """Return the number that a value is, converted or not."""
    while isinstance(v, Op) and v.name == "cast":
        (v,) = v.args
    return float(v.value) if isinstance(v, Const) and v.dtype in FLOATS else None


def _hides(v: Value) -> bool:
    number = _number(v)
    return number is not None and number <= LOW


def _end(logits: Logits, live: tuple[Condition, ...]) -> tuple[Index | None, tuple[Condition, ...]]:
    """Return the first tile of keys from which on all are hidden, and the conditions that imply it."""
    ends, kept = [], []
    for c in live:
        step, rest = c.expr.split(logits.key.tile)
        n = step.constant
        if n is not None and n < 0 and not c.equality:
            ends.append(rest // -n + 1)
            kept.append(c)
    return (minimum(*ends) if ends else None), tuple(kept)


# -- bounds ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """The range of a float that is not NaN."""

    low: float
    high: float


UNKNOWN = Span(math.nan, math.nan)
"""Any value, including NaN."""
Spans = dict[Span, isl.Set]
"""A partition of the points."""


class _Spans:
    def __init__(self, points: Frame, scores: tuple[str, str]) -> None:
        self.points, self.scores = points, scores

    def of(self, v: Value) -> Spans:
        """Return a partition of the points by the range of the value."""
        whole = self.points.universe()
        if isinstance(v, Const) and v.dtype in FLOATS:
            x = float(v.value)
            return {UNKNOWN if math.isnan(x) else Span(x, x): whole}
        if isinstance(v, Load) and v.dtype in FLOATS:
            return {_read(self.scores[1] if v.buffer == self.scores[0] else v.dtype): whole}
        if not isinstance(v, Op):
            return {UNKNOWN: whole}
        if v.name == "cast":
            return self._cast(v)
        if v.name in ("where", "select"):
            return self._choice(v)
        if v.name in ("add", "sub", "mul", "div", "max", "min"):
            a, b = map(self.of, v.args)
            pairs = ((_corners(v.name, x, y, v.dtype), s.intersect(t))
                     for x, s in a.items() for y, t in b.items())  # fmt: skip
            return _united(pairs)
        return {UNKNOWN: whole}

    def _cast(self, v: Op) -> Spans:
        x = v.args[0]
        if x.dtype in FLOATS and v.dtype in FLOATS:
            return _united((_converted(span, x.dtype, v.dtype), s) for span, s in self.of(x).items())
        whole = self.points.universe()
        if x.dtype == "bool" and v.dtype in FLOATS:
            yes, no = self.truth(x)
            rest = whole.subtract(yes).subtract(no)
            return _united(((Span(1.0, 1.0), yes), (Span(0.0, 0.0), no), (Span(0.0, 1.0), rest)))
        far = v.dtype == "float16" and not isinstance(x, Load)  # subscripts may be beyond its largest number
        return {_read(v.dtype) if x.dtype in INTEGERS and v.dtype in FLOATS and not far else UNKNOWN: whole}

    def _choice(self, v: Op) -> Spans:
        yes, no = self.truth(v.args[0])
        rest = self.points.universe().subtract(yes).subtract(no)
        then, other = map(self.of, v.args[1:])
        return _united((
            *((span, s.intersect(yes)) for span, s in then.items()),
            *((span, s.intersect(no)) for span, s in other.items()),
            *((_hull(x, y), s.intersect(t).intersect(rest)) for x, s in then.items() for y, t in other.items()),
        ))  # fmt: skip

    def truth(self, v: Value) -> tuple[isl.Set, isl.Set]:
        """Return the points where a condition certainly holds, and where it certainly does not."""
        none: isl.Set = isl.Set.empty(self.points.space)
        if isinstance(v, Const):
            whole = self.points.universe()
            return (whole, none) if v.value else (none, whole)
        if not isinstance(v, Op):
            return none, none
        if v.name in ("and", "or", "not"):
            found = [self.truth(x) for x in v.args]
            if v.name == "not":
                return found[0][1], found[0][0]
            (a, not_a), (b, not_b) = found
            if v.name == "and":
                return a.intersect(b), not_a.union(not_b)
            return a.union(b), not_a.intersect(not_b)
        if v.name in ("where", "select") and v.dtype == "bool":
            (c, not_c), (a, not_a), (b, not_b) = map(self.truth, v.args)
            sure = c.intersect(a), not_c.intersect(b), a.intersect(b)
            never = c.intersect(not_a), not_c.intersect(not_b), not_a.intersect(not_b)
            return sure[0].union(sure[1]).union(sure[2]), never[0].union(never[1]).union(never[2])
        if v.name == "cast" and v.args[0].dtype == "bool":  # a number that is 0 or 1
            return self.truth(v.args[0])
        if v.name == "cast" and v.dtype == "bool" and isinstance(v.args[0], Op) and v.args[0].name == "cast":
            return self.truth(v.args[0])
        holds = self._holds(v)
        return (none, none) if holds is None else (holds, holds.complement())

    def _holds(self, v: Op) -> isl.Set | None:
        """Return exactly the points where integers are in this relation, or None if isl cannot express it."""
        if v.name not in RELATIONS:
            return None
        a, b = (_integer(x) for x in v.args)
        if a is None or b is None:
            return None
        one = {"lt": below(a, b), "le": at_least(b, a), "gt": below(b, a), "ge": at_least(a, b)}
        try:
            found = self.points.where((one.get(v.name, equals(a, b)),))
        except ScheduleError:
            return None
        return found.complement() if v.name == "ne" else found


def _united(pieces: Iterator[tuple[Span, isl.Set]] | tuple[tuple[Span, isl.Set], ...]) -> Spans:
    out: Spans = {}
    for span, s in pieces:
        if not s.is_empty():
            out[span] = out[span].union(s) if span in out else s
    return out


def _read(dtype: str) -> Span:
    return Span(-math.inf, LARGEST[dtype] * REACH)


def _hull(a: Span, b: Span) -> Span:
    return UNKNOWN if UNKNOWN in (a, b) else Span(min(a.low, b.low), max(a.high, b.high))


def _corners(name: str, a: Span, b: Span, dtype: str) -> Span:
    """Return the range of an operation. Its result is rounded, unless it is a 16-bit type in a float32 register."""
    if UNKNOWN in (a, b):
        return UNKNOWN
    if name in ("max", "min"):
        pick = max if name == "max" else min
        return Span(pick(a.low, b.low), pick(a.high, b.high))
    if name == "sub":
        name, b = "add", Span(-b.high, -b.low)
    if name == "add":
        low, high = a.low + b.low, a.high + b.high
        mixed = math.isnan(a.low + b.high) or math.isnan(a.high + b.low)
    else:
        if name == "div":
            if b.low != b.high or b.low == 0:
                return UNKNOWN
            b = Span(1 / b.low, 1 / b.low)
        ends = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        low, high = min(ends), max(ends)
        zero = a.low < 0 < a.high, b.low < 0 < b.high
        mixed = any(map(math.isnan, ends)) or (zero[0] and _infinite(b)) or (zero[1] and _infinite(a))
    return UNKNOWN if mixed or math.isnan(low) or math.isnan(high) else _rounded(low, high, dtype)


def _infinite(x: Span) -> bool:
    return math.isinf(x.low) or math.isinf(x.high)


def _rounded(low: float, high: float, dtype: str) -> Span:
    """Round a range to a dtype. A number slightly above the largest one becomes the largest one or infinity."""
    largest, loss = LARGEST[dtype], 2.0**-8 if ITEMSIZE[dtype] == 2 else 2.0**-24
    low = low - abs(low) * loss if math.isfinite(low) else low
    high = high + abs(high) * loss if math.isfinite(high) else high
    if high < -1.5 * largest:
        return Span(-math.inf, -math.inf)
    return Span(-math.inf if low < -largest else min(low, largest), math.inf if high > largest else max(high, -largest))


def _converted(x: Span, source: str, dtype: str) -> Span:
    """Return the range after rounding to a dtype. Values that are read do not overflow; literals may."""
    if x == UNKNOWN or ITEMSIZE[source] < ITEMSIZE[dtype]:
        return x
    found = _rounded(x.low, x.high, dtype)
    if x.low == x.high or x.high == math.inf or found.high < 0:
        return found
    return Span(found.low, min(found.high, LARGEST[dtype] * REACH))


def _integer(v: Value) -> Index | None:
    """Return an integer value as an Index, or None if it is read from memory or narrower than 64 bits."""
    if v.dtype != "int64":
        return None
    if isinstance(v, FromIndex):
        return v.index
    if isinstance(v, Const):
        return Index.of(int(v.value))
    if not isinstance(v, Op) or v.name not in ("add", "sub", "mul"):
        return None
    a, b = (_integer(x) for x in v.args)
    if a is None or b is None:
        return None
    return a + b if v.name == "add" else a - b if v.name == "sub" else a * b
