"""Which keys of an attention have weight, from the expression of its logits.

A logit that is -inf whatever the score is (``where(column <= row, score, -inf)``) has weight 0: a tile of scores in
which every logit is so need not be computed. isl projects what is left to tiles; nothing asks for a mask's name. Only
-inf itself counts (a large negative number has weight where a row holds nothing else), and only where it replaces the
score (added, it would let NaN through).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import islpy as isl

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.expr import FLOATS, Const, FromIndex, Op, Value
from polydyn.schedules.index import Index
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
from polydyn.schedules.witness import set_error

RELATIONS = ("lt", "le", "gt", "ge", "eq", "ne")


@dataclass(frozen=True)
class Axis:
    """Rows or keys: the iterator of the logit, its extent, elements of a tile, the coordinate that counts tiles."""

    iterator: str
    extent: Index
    size: int
    tile: str


@dataclass(frozen=True)
class Logits:
    """The logits of an attention, a value over ``batch``, ``row`` and ``key``, and the tiles they are computed in."""

    value: Value
    batch: tuple[str, ...]
    row: Axis
    key: Axis
    params: tuple[str, ...]

    @property
    def points(self) -> Frame:
        """Tiles and the logits in them: (batch.., tile of rows, tile of keys, row, key)."""
        axes = (self.row.tile, self.key.tile, self.row.iterator, self.key.iterator)
        return frame("", (*self.batch, *axes), self.params)

    def inside(self) -> isl.Set:
        """Logits in their tiles; an extent that is a product of symbols bounds nothing."""
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

    def hidden(self) -> isl.Set:
        """Points whose logit is surely -inf."""
        return _hidden(self.value, self.points)


def tile_conditions(logits: Logits) -> tuple[Condition, ...]:
    """What holds of every tile that has a key with weight; nothing when all may have.

    Conditions are affine over the tiles, ``batch`` and ``params``: the simple hull of the projection, so tiles that
    satisfy them may still be all masked.
    """
    hidden = logits.hidden()
    if hidden.is_empty():
        return ()
    box, first = logits.inside(), len(logits.batch) + 2
    whole, live = (without_last(s, first) for s in (box, box.subtract(hidden)))
    hull = live.simple_hull().remove_divs().gist(whole.simple_hull().remove_divs())
    return tuple(map(condition, hull.get_constraints()))


def check_conditions(logits: Logits, live: tuple[Condition, ...]) -> None:
    """Tiles that do not satisfy the conditions hold hidden keys only. LegalityError with a visible one."""
    seen = logits.inside().subtract(logits.points.where(live)).subtract(logits.hidden())
    if not seen.is_empty():
        raise set_error("a tile with a visible key is not visited", seen, "ACC1", param_set(logits.params))


def _hidden(v: Value, points: Frame) -> isl.Set:
    """Points where the value is surely -inf."""
    none: isl.Set = isl.Set.empty(points.space)
    if isinstance(v, Const) and v.dtype in FLOATS and float(v.value) == -math.inf:
        return points.universe()
    if not isinstance(v, Op):
        return none
    if v.name == "cast" and v.args[0].dtype in FLOATS:
        return _hidden(v.args[0], points)
    if v.name in ("where", "select"):
        then, other = (_hidden(x, points) for x in v.args[1:])
        chosen = _holds(v.args[0], points)
        if chosen is None:
            return then.intersect(other)
        return then.intersect(chosen).union(other.subtract(chosen))
    return none


def _holds(v: Value, points: Frame) -> isl.Set | None:
    """Exactly the points where a condition holds; None when isl cannot say."""
    if not isinstance(v, Op):
        return None
    if v.name in ("and", "or"):
        a, b = (_holds(x, points) for x in v.args)
        if a is None or b is None:
            return None
        return a.intersect(b) if v.name == "and" else a.union(b)
    if v.name == "not":
        a = _holds(v.args[0], points)
        return None if a is None else a.complement()
    if v.name not in RELATIONS:
        return None
    left, right = (_integer(x) for x in v.args)
    if left is None or right is None:
        return None
    a, b = left, right
    one = {"lt": below(a, b), "le": at_least(b, a), "gt": below(b, a), "ge": at_least(a, b)}.get(v.name, equals(a, b))
    try:
        found = points.where((one,))
    except ScheduleError:
        return None
    return found.complement() if v.name == "ne" else found


def _integer(v: Value) -> Index | None:
    """An integer value as an Index; None when it is read from memory, or narrower than 64 bits."""
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
