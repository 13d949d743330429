"""Store packed words element by element, so that loads, conversions and stores vectorise over bytes.

FILL computes the packed words of a product's rows. Their elements are consecutive steps, contiguous in most tensors.
Vectors of elements can be loaded, computed and stored directly, without packing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from polydyn.codegen.ir import Body, FlatLoad, For, Node, Store, rewrite, walk_value
from polydyn.codegen.passes.tiles import flatten_loops
from polydyn.schedules.expr import ITEMSIZE, PARTS, WIDENED, Const, FromIndex, Op, Value, const
from polydyn.schedules.index import ZERO, Index
from polydyn.schedules.tree.names import Coord

PART = "part"
"""The loop over the elements of one word."""
WORD = 4
"""Bytes of a word."""


def part_of(v: Value) -> tuple[str, int] | None:
    """Return the dtype and the number of the elements that a value packs, or None for other values."""
    dtype = PARTS.get(v.name) if isinstance(v, Op) else None
    return None if dtype is None else (dtype, WORD // ITEMSIZE[dtype])


def store_parts(body: Body, buffer: str) -> Body:
    """Turn loops that store one word to ``buffer`` into loops that store its elements.

    Addresses count words before and elements afterwards. Elements without a constant stride are stored one after
    another.
    """

    def f(n: Node) -> Node | Body:
        if not (isinstance(n, For) and len(n.body) == 1 and isinstance(store := n.body[0], Store)):
            return n
        found = part_of(store.value)
        if store.buffer != buffer or found is None:
            return n
        (dtype, count), var = found, f"{n.var}_{PART}"
        assert isinstance(store.value, Op)
        parts, first = store.value.args, store.address * count
        together = select_by_number(parts, Index.of(var))
        if together is None:
            stores = (Store(buffer, first + k, narrow(v, dtype)) for k, v in enumerate(parts))
            return replace(n, body=tuple(stores))
        inner = For(var, ZERO, Index.of(count), (Store(buffer, first + var, narrow(together, dtype)),))
        return flatten_loops((replace(n, body=(inner,)),), Coord(n.var))

    return rewrite(body, f)


def read_word(v: Value) -> Value:
    """Return a word whose elements are contiguous in memory as one load; return other values unchanged."""
    found = part_of(v)
    if found is None:
        return v
    assert isinstance(v, Op)
    parts = [narrow(x, found[0]) for x in v.args]
    first = parts[0]
    if not isinstance(first, FlatLoad) or parts != [
        replace(first, address=first.address + k) for k in range(len(parts))
    ]:
        return v
    return replace(first, dtype=v.dtype)


def select_by_number(values: Sequence[Value], number: Index) -> Value | None:
    """Return an expression for ``values[number]``, for every ``number``; None if the strides are not constant."""
    first, second = (tuple(_indices(v)) for v in values[:2])
    if len(first) != len(second):
        return None
    steps = [b - a for a, b in zip(first, second, strict=True)]
    for k, v in enumerate(values):
        if _with(values[0], [a + s * k for a, s in zip(first, steps, strict=True)]) != v:
            return None
    return _with(values[0], [a + s * number for a, s in zip(first, steps, strict=True)])


def narrow(v: Value, dtype: str) -> Value:
    """Return the lowest bits of an int32 value, as before it was widened; a float is rounded where it is stored."""
    if isinstance(v, Op) and v.name == "cast" and v.args[0].dtype == dtype:
        return v.args[0]
    if dtype in WIDENED:
        return Op(dtype, "cast", (v,))
    if isinstance(v, Const):
        return const(v.value, dtype)
    if isinstance(v, Op) and v.name in ("where", "select"):
        return Op(dtype, v.name, (v.args[0], *(narrow(a, dtype) for a in v.args[1:])))
    return Op(dtype, "cast", (v,))


def _indices(v: Value) -> Iterator[Index]:
    for x in walk_value(v):
        if isinstance(x, FlatLoad):
            yield x.address
        elif isinstance(x, FromIndex):
            yield x.index


def _with(v: Value, indices: Sequence[Index]) -> Value:
    """Return the value with other subscripts, in the order of ``_indices``."""
    return _rebuilt(v, iter(indices))


def _rebuilt(v: Value, indices: Iterator[Index]) -> Value:
    """Rebuild a value outermost first, in the order of ``walk_value``."""
    if isinstance(v, FlatLoad):
        return replace(v, address=next(indices))
    if isinstance(v, FromIndex):
        return replace(v, index=next(indices))
    if isinstance(v, Op):
        return replace(v, args=tuple(_rebuilt(a, indices) for a in v.args))
    return v
