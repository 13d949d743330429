"""Evaluate scalar expressions for all instances of a statement at once. Iterators are broadcast arrays."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from polydyn.graph.dtypes import numpy_dtype
from polydyn.schedules.expr import OPS, Array, Const, FromIndex, Load, Op, Value
from polydyn.schedules.index import Index
from polydyn.testing.plan.arithmetic import Integers, value_of

Env: TypeAlias = Mapping[str, Integers]
LoadFrom: TypeAlias = Callable[[str, tuple[Index, ...], Env, "Array | None"], Array]
"""Function that returns the elements of an array at subscripts, where a mask is true."""


class Evaluator:
    """Evaluates expressions. ``load`` is the function that reads elements of arrays."""

    def __init__(self, load: LoadFrom) -> None:
        self.load = load

    def index(self, i: Index, env: Env, mask: Array | None = None) -> Integers:
        """Evaluate a subscript; integers that it fetches are read where ``mask`` is true."""

        def fetch(name: str, at: tuple[Index, ...], where: Env) -> Array:
            return self.load(name, at, where, mask).astype(np.int64)

        return value_of(i, env, fetch)

    def value(self, v: Value, env: Env, mask: Array | None) -> Array:
        """Evaluate a value, without the branch that ``where`` does not take and without masked elements."""
        kind = numpy_dtype(v.dtype)
        if isinstance(v, Const):
            return np.asarray(v.value).astype(kind)
        if isinstance(v, FromIndex):
            return np.asarray(self.index(v.index, env, mask)).astype(kind)
        if isinstance(v, Load):
            return self.load(v.buffer, v.index, env, mask).astype(kind)
        assert isinstance(v, Op)
        with np.errstate(all="ignore"):
            if v.name == "where":
                c = self.value(v.args[0], env, mask).astype(bool)
                yes, no = (c, ~c) if mask is None else (mask & c, mask & ~c)
                branches = self.value(v.args[1], env, yes), self.value(v.args[2], env, no)
                return np.asarray(np.where(c, *branches)).astype(kind)
            args = [self.value(x, env, mask) for x in v.args]
            if v.name == "bitcast":
                return np.ascontiguousarray(args[0]).view(kind).reshape(args[0].shape)
            return np.asarray(OPS[v.name].numpy(*args)).astype(kind)


def symbols_in(v: Value) -> set[str]:
    """Return the symbols of all subscripts and integers of a value."""
    if isinstance(v, Load):
        return {x for i in v.index for x in i.symbols()}
    own = set(v.index.symbols()) if isinstance(v, FromIndex) else set[str]()
    return own.union(*map(symbols_in, v.args)) if isinstance(v, Op) else own


def factors_of(v: Value) -> list[Value]:
    """Return the factors of a product; other values are their only factor."""
    found = [v]
    while any(isinstance(f, Op) and f.name == "mul" for f in found):
        found = [g for f in found for g in (f.args if isinstance(f, Op) and f.name == "mul" else (f,))]
    return found


def sum_of_products(parts: Sequence[Array], full: Sequence[int], free: Sequence[int]) -> Array:
    """Return the sum over the axes ``free`` of a product of arrays that broadcast to the shape ``full``.

    These axes stay with size 1, and so do all axes that no part has.
    """
    operands: list[Any] = []
    for p in parts:
        whole = p.reshape((1,) * (len(full) - p.ndim) + p.shape)
        axes = [k for k in range(len(full)) if whole.shape[k] > 1]
        operands += [whole.astype(_wide(p.dtype)).reshape([whole.shape[k] for k in axes]), axes]
    seen = {k for axes in operands[1::2] for k in axes}
    total: Array = np.einsum(*operands, sorted(seen - {*free}), optimize=True)
    total = total * math.prod(full[k] for k in free if k not in seen)
    kept = [full[k] if k in seen and k not in free else 1 for k in range(len(full))]
    with np.errstate(all="ignore"):
        return np.asarray(total.reshape(kept).astype(parts[0].dtype))


def _wide(kind: np.dtype[Any]) -> np.dtype[Any]:
    """Return the accumulator type of sums."""
    if kind == np.float32:
        return np.dtype(np.float64)
    return np.dtype(np.int64) if kind.kind in "iu" else kind
