"""Words whose parts are stored one by one: a loop over words of four bytes becomes a loop over bytes.

FILL makes the words of a product's rows. Their parts are consecutive steps, which lie side by side in most tensors, so
that vectors of parts are read, computed and stored as they are, and nothing is put together.
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
"""The loop over the parts of one word."""
WORD = 4
"""Bytes of a word."""


def part_of(v: Value) -> tuple[str, int] | None:
    """The dtype and the number of the parts that a value is made of; None where it is no such word."""
    dtype = PARTS.get(v.name) if isinstance(v, Op) else None
    return None if dtype is None else (dtype, WORD // ITEMSIZE[dtype])


def store_parts(body: Body, buffer: str) -> Body:
    """Loops that store one word to ``buffer``, whose elements are parts, as loops that store its parts.

    Addresses count words before and parts afterwards. Parts that do not move evenly are stored one after another.
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
        together = in_turn(parts, Index.of(var))
        if together is None:
            stores = (Store(buffer, first + k, narrow(v, dtype)) for k, v in enumerate(parts))
            return replace(n, body=tuple(stores))
        inner = For(var, ZERO, Index.of(count), (Store(buffer, first + var, narrow(together, dtype)),))
        return flatten_loops((replace(n, body=(inner,)),), Coord(n.var))

    return rewrite(body, f)


def read_word(v: Value) -> Value:
    """A word whose parts lie side by side in memory, as one load; other values as they are."""
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


def in_turn(values: Sequence[Value], number: Index) -> Value | None:
    """The value that is each of ``values`` where ``number`` is its place; None where they do not move evenly."""
    first, second = (tuple(_indices(v)) for v in values[:2])
    if len(first) != len(second):
        return None
    steps = [b - a for a, b in zip(first, second, strict=True)]
    for k, v in enumerate(values):
        if _with(values[0], [a + s * k for a, s in zip(first, steps, strict=True)]) != v:
            return None
    return _with(values[0], [a + s * number for a, s in zip(first, steps, strict=True)])


def narrow(v: Value, dtype: str) -> Value:
    """The lowest bits of a value of int32, as it was before it was widened; a float rounded where it is stored."""
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
    """The value with other subscripts, in the order of ``_indices``."""
    return _rebuilt(v, iter(indices))


def _rebuilt(v: Value, indices: Iterator[Index]) -> Value:
    """Outermost first, as ``walk_value`` goes."""
    if isinstance(v, FlatLoad):
        return replace(v, address=next(indices))
    if isinstance(v, FromIndex):
        return replace(v, index=next(indices))
    if isinstance(v, Op):
        return replace(v, args=tuple(_rebuilt(a, indices) for a in v.args))
    return v
