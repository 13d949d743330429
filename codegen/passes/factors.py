"""Hoist loop-invariant factors out of sums: ``sum(x * (v * s)) = sum(x * v) * s``.

The remaining sums may be of small integers: bytes times 4-bit integers, which are exact in int32 and eight to a word.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from polydyn.codegen import ir
from polydyn.schedules.expr import NIBBLE, NIBBLES, FromIndex, Op, Value, cast, const, neutral, op
from polydyn.schedules.index import ONE, ZERO, Index

EIGHTS = const(-0x77777778, "int32")
"""A word whose 4-bit elements are all 8."""


def hoist_factors(body: ir.Body) -> ir.Body:
    """Give outermost loops that contain only sums of such products their own sums, which are scaled after the loop.

    Before: ``for k: s += x[k] * (v[k] * f)``; after: ``p = 0; for k: p += x[k] * v[k]; s += p * f``. In floating point
    the sum is rounded differently, as with any other order of its terms.
    """
    out: list[ir.Node] = []
    for n in body:
        made = _scaled(n) if isinstance(n, ir.For) else None
        out += [replace(n, body=hoist_factors(n.body)) if isinstance(n, ir.For) else n] if made is None else made
    return tuple(out)


def _scaled(loop: ir.For) -> ir.Body | None:
    inside = [x for x in ir.walk((loop,)) if not isinstance(x, ir.For)]
    loops = {x.var for x in ir.walk((loop,)) if isinstance(x, ir.For)}
    sums = {x.reg: found for x in inside if isinstance(x, ir.Set) and (found := _factor(x, loops))}
    if len(sums) < len(inside):
        return None

    def f(n: ir.Node) -> ir.Node:
        return replace(n, reg=_part(n.reg), value=sums[n.reg][0]) if isinstance(n, ir.Set) else n

    sets = {x.reg: x for x in inside if isinstance(x, ir.Set)}
    first = tuple(ir.Def(_part(r), neutral("sum", n.value.dtype), n.lanes) for r, n in sets.items())
    last = tuple(
        replace(n, value=op("mul", ir.Reg(n.value.dtype, _part(r), n.lanes), sums[r][1])) for r, n in sets.items()
    )
    return (*first, *ir.rewrite((loop,), f), *last)


def _part(reg: str) -> str:
    return f"{reg}_part"


def _factor(n: ir.Set, loops: Collection[str]) -> tuple[Value, Value] | None:
    """Return the added value without its factors, and their product: loads that are invariant in all of the loops."""
    if n.reduce != "sum" or not (isinstance(n.value, Op) and n.value.name == "mul"):
        return None
    factors, rest = [], []
    for v in n.value.args:
        scaled = isinstance(v, Op) and v.name == "mul" and _loaded(v.args[1]) and _fixed(v.args[1], loops)
        rest.append(v.args[0] if scaled and isinstance(v, Op) else v)
        factors += [v.args[1]] if scaled and isinstance(v, Op) else []
    return (replace(n.value, args=tuple(rest)), reduce(lambda a, b: op("mul", a, b), factors)) if factors else None


def _loaded(v: Value) -> bool:
    """Whether a value is an element of memory, possibly with its bits as another type."""
    return isinstance(v.args[0] if isinstance(v, Op) and v.name == "bitcast" else v, ir.FlatLoad)


def _fixed(v: Value, loops: Collection[str]) -> bool:
    indices: list[Index] = []
    for x in ir.walk_value(v):
        indices += [x.address] if isinstance(x, ir.FlatLoad) else [x.index] if isinstance(x, FromIndex) else []
    return not any(i.symbols() & set(loops) for i in indices)


def in_integers(body: ir.Body) -> ir.Body:
    """Compute sums of bytes times 4-bit integers in int32, a word at a time, and convert them where they are read.

    Before: ``p = 0.0; for t < 8: p += float(x[e + t]) * (nibble(w, t) - z)``; after: ``p = m = 0; p += dot(w, X); m +=
    dot(8's, X)`` with the words X of x at e, read as ``p - m * (1 + z / 8)``. All columns share m. A sum is rewritten
    if it adds nothing else. It belongs to one block and stays below 2^24, like sums of thousands of steps, so it is
    exact.
    """
    body = tuple(replace(n, body=in_integers(n.body)) if isinstance(n, ir.For) else n for n in body)
    loops = {x.var for x in ir.walk(body) if isinstance(x, ir.For)}
    dots = [d for x in ir.walk(body) if isinstance(x, ir.For) for d in _dots(x, loops)]
    every = [n.reg for n in ir.walk(body) if isinstance(n, ir.Set)]
    own = {n.reg: n for n in body if isinstance(n, ir.Def)}
    sums = {d.reg: d for d in dots if d.reg in own and every.count(d.reg) == 1}
    moved = {x: f"moved_{k}" for k, x in enumerate(dict.fromkeys(d.words for d in sums.values()))}
    if not sums:
        return body

    def value(v: Value) -> Value:
        if not (isinstance(v, ir.Reg) and v.name in sums):
            return v
        d = sums[v.name]
        p, m = (replace(v, dtype="int32", name=n) for n in (v.name, moved[d.words]))
        if d.zero is None:
            return cast(op("sub", p, m), "float32")
        eighths = op("add", const(1, "float32"), op("mul", const(0.125, "float32"), d.zero))
        return op("sub", cast(p, "float32"), op("mul", cast(m, "float32"), eighths))

    def f(n: ir.Node) -> ir.Node | ir.Body:
        if isinstance(n, ir.For):
            found = _dots(n, loops)
            return _by_words(found, moved, own) if found and all(d.reg in sums for d in found) else n
        if isinstance(n, ir.Def) and n.reg in sums:
            return replace(n, value=neutral("sum", "int32"))
        return replace(n, value=ir.map_value(n.value, value)) if isinstance(n, (ir.Set, ir.Store)) else n

    lanes = max(own[r].lanes for r in sums)
    first = tuple(ir.Def(m, neutral("sum", "int32"), lanes) for m in moved.values())
    return (*first, *ir.rewrite(body, f))


@dataclass(frozen=True)
class _Dot:
    """``reg += sum of the bytes of two words times (the nibbles of one - zero)``."""

    reg: str
    nibbles: Value
    words: tuple[ir.FlatLoad, ...]
    zero: Value | None


def _by_words(dots: Sequence[_Dot], moved: Mapping[tuple[ir.FlatLoad, ...], str], own: Mapping[str, ir.Def]) -> ir.Body:
    lanes = max(own[d.reg].lanes for d in dots)
    sums = tuple(ir.Set(d.reg, op("dot_nibbles", d.nibbles, *d.words), own[d.reg].lanes, "sum") for d in dots)
    words = dict.fromkeys(d.words for d in dots)
    return (*sums, *(ir.Set(moved[x], op("dot_nibbles", EIGHTS, *x), lanes, "sum") for x in words))


def _dots(loop: ir.For, loops: Collection[str]) -> tuple[_Dot, ...]:
    """Return the sums of a loop over the steps of one word; empty for any other loop."""
    if loop.lo != ZERO or loop.hi != NIBBLES:
        return ()
    found = [_dot(n, loop.var, loops) for n in loop.body]
    return tuple(d for d in found if d) if all(found) else ()


def _dot(n: ir.Node, step: str, loops: Collection[str]) -> _Dot | None:
    if not (isinstance(n, ir.Set) and n.reduce == "sum" and isinstance(n.value, Op) and n.value.name == "mul"):
        return None
    for v, w in (n.value.args, n.value.args[::-1]):
        x, zero = _byte(v), None
        if isinstance(w, Op) and w.name == "sub" and _fixed(w.args[1], loops):
            w, zero = w.args
        if x is None or not (
            isinstance(w, Op) and w.name == NIBBLE and w.args[1] == FromIndex("int32", Index.of(step))
        ):
            continue
        stride, first = x.address.split(step)
        if stride == ONE and step not in first.symbols():
            words = tuple(replace(x, dtype="int32", address=first + k) for k in (0, NIBBLES // 2))
            return _Dot(n.reg, w.args[0], words, zero)
    return None


def _byte(v: Value) -> ir.FlatLoad | None:
    """Return the signed byte that a float was converted from, or None."""
    while isinstance(v, Op) and v.name == "cast":
        v = v.args[0]
    return v if isinstance(v, ir.FlatLoad) and v.dtype == "int8" and v.lanes == 1 else None
