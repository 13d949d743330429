"""Compile values to Python functions. A value is a numpy scalar, or an array with one element per lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polydyn.codegen import ir
from polydyn.graph.dtypes import numpy_dtype
from polydyn.schedules.expr import OPS, REDUCTIONS, WIDENED, Const, FromIndex, Op, Value
from polydyn.testing.loops.indices import Env, Indices, Run
from polydyn.testing.loops.rooms import Broken, poisoned, value_dtype

REDUCE: Mapping[str, Callable[..., Any]] = {n: OPS[o].numpy for n, o in REDUCTIONS.items()}


class Values:
    """Compiles values. ``load`` compiles reads of memory, ``apply`` calls of leaf functions."""

    def __init__(
        self, indices: Indices, load: Callable[[ir.FlatLoad], Run], apply: Callable[[ir.Apply, list[Run]], Run]
    ) -> None:
        self.indices, self.load, self.apply = indices, load, apply

    def compile(self, v: Value) -> Run:
        """Return the function that evaluates a value."""
        kind = value_dtype(v.dtype)
        if isinstance(v, Const):
            constant = np.asarray(v.value).astype(kind)[()]
            return lambda e: constant
        if isinstance(v, ir.Reg):
            name = v.name
            return lambda e: e[name]
        if isinstance(v, ir.FlatLoad):
            return self.load(v)
        if isinstance(v, FromIndex):
            index = self.indices.compile(v.index)
            return lambda e: np.asarray(index(e)).astype(kind)[()]
        if isinstance(v, ir.Undefined):
            poison = poisoned((), WIDENED.get(v.dtype, v.dtype))[()]
            return lambda e: poison
        if isinstance(v, Op):
            return self._op(v, kind)
        if isinstance(v, ir.Apply):
            return self.apply(v, [self.compile(a) for a in v.args])
        return self._lanes(v, kind)

    def _lanes(self, v: Value, kind: np.dtype[Any]) -> Run:
        if isinstance(v, ir.Broadcast):
            inner, lanes = self.compile(v.value), v.lanes
            return lambda e: fit(inner(e), lanes)
        if isinstance(v, ir.Horizontal):
            inner, combine = self.compile(v.value), REDUCE[v.reduction]
            return lambda e: _combined(combine, inner(e))
        if isinstance(v, ir.Blend):
            new, old, count, lanes = (
                self.compile(v.new),
                self.compile(v.old),
                self.indices.compile(v.count),
                ir.lanes_of(v),
            )
            lane = np.arange(lanes)
            return lambda e: np.where(lane < count(e), fit(new(e), lanes), fit(old(e), lanes))
        if isinstance(v, ir.Ramp):
            start, step, lane = self.indices.compile(v.start), self.indices.compile(v.step), np.arange(v.lanes)
            return lambda e: (start(e) + step(e) * lane).astype(kind)
        if isinstance(v, ir.Between):
            low, high, lane = self.indices.compile(v.low), self.indices.compile(v.high), np.arange(v.lanes)
            return lambda e: (lane >= low(e)) & (lane < high(e))
        raise Broken(f"a value without meaning: {v!r}")

    def _op(self, v: Op, kind: np.dtype[Any]) -> Run:
        lanes, args = ir.lanes_of(v), [self.compile(a) for a in v.args]
        if v.name in ("where", "select"):
            return self._choice(args, lanes, kind)
        if v.name in ("and", "or") and lanes == 1:
            return self._both(args, v.name == "and")
        if v.name == "cast":
            return _cast(v, args[0], kind)
        if v.name == "bitcast":
            stored, target = numpy_dtype(v.args[0].dtype), numpy_dtype(v.dtype)
            return lambda e: np.asarray(args[0](e)).astype(stored).view(target).astype(kind)[()]
        meaning = OPS[v.name].numpy
        if lanes == 1:
            return lambda e: np.asarray(meaning(*[a(e) for a in args])).astype(kind)[()]
        return lambda e: np.asarray(meaning(*[fit(a(e), lanes) for a in args])).astype(kind)

    def _both(self, args: list[Run], need: bool) -> Run:
        """Combine two conditions. The second is evaluated if the first leaves the result open: it guards its reads."""
        first, second = args
        return lambda e: np.bool_(second(e)) if bool(first(e)) == need else np.bool_(not need)

    def _choice(self, args: list[Run], lanes: int, kind: np.dtype[Any]) -> Run:
        """Choose: of a single condition only the chosen branch is evaluated."""
        condition, yes, no = args

        def choose(e: Env) -> Any:
            c = condition(e)
            if np.ndim(c) == 0:
                return (yes if c else no)(e)
            return np.where(c, fit(yes(e), lanes), fit(no(e), lanes)).astype(kind)

        return choose


def _combined(combine: Callable[..., Any], values: Any) -> Any:
    total = values[0]
    for x in values[1:]:
        total = combine(total, x)
    return total


def _cast(v: Op, inner: Run, kind: np.dtype[Any]) -> Run:
    """Convert numbers; a dtype of memory only rounds."""
    source, stored = v.args[0].dtype, numpy_dtype(v.dtype)
    whole = value_dtype(source).kind == "f" and kind.kind in "iu"
    if source == v.dtype:
        return inner
    if v.dtype in WIDENED:
        return lambda e: np.asarray(inner(e)).astype(stored).astype(kind)[()]
    if not whole:
        return lambda e: np.asarray(inner(e)).astype(kind)[()]
    least, most = float(np.iinfo(kind).min), float(np.iinfo(kind).max)

    def cut(e: Env) -> Any:
        x = np.asarray(inner(e)).astype(np.float64)
        inside = np.where(np.isnan(x), 0, np.clip(x, least, most))
        return np.where(inside >= most, np.iinfo(kind).max, np.where(inside >= most, 0, inside).astype(kind))[
            ()
        ].astype(kind)

    return cut


def fit(x: Any, lanes: int) -> Any:
    """Return ``lanes`` lanes: a scalar in each, the first lanes of a wider vector, poison behind a narrower one."""
    if lanes == 1 or np.shape(x) == (lanes,):
        return x
    if np.ndim(x) == 0:
        return np.full(lanes, x)
    if len(x) > lanes:
        return x[:lanes]
    more = np.full(lanes - len(x), np.nan) if x.dtype.kind == "f" else np.full(lanes - len(x), 0x5A)
    return np.concatenate([x, more.astype(x.dtype)])
