"""Express C leaves (``codegen/leaf``) as loops, so that their memory accesses can be traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polydyn.codegen.ir import Body, Call, Def, FlatLoad, For, Pointer, Store
from polydyn.schedules.expr import ITEMSIZE, Const, FromIndex, Value
from polydyn.schedules.index import ZERO, Index, minimum

PREFIXES_WITHOUT_ACCESSES = (
    "pd_drain", "pd_in_memory", "pd_written_soon", "pd_prefetch", "pd_amx_begin", "pd_amx_end",
    "pd_amx_zero", "pd_amx_add",
)  # fmt: skip
"""Name prefixes of leaves that access no memory."""
WORD_BYTES = 4
"""Bytes of a word of the matrix unit."""
SORT_WORDS_PER_ELEMENT = 4
"""64-bit words of scratch that a sort uses per element."""
FIRST, SECOND = "_r", "_c"
"""Loop variables of a leaf."""
Types = Mapping[str, str]


def as_loops(x: Call, types: Types, width: int) -> Body | None:
    """Return the loops of a call: () if it accesses no memory, None if the leaf is unknown.

    ``types`` maps buffers to dtypes; ``width`` is the number of float32 lanes.
    """
    if x.function.startswith(PREFIXES_WITHOUT_ACCESSES):
        return ()
    if x.function.startswith("pd_first_"):
        return _first(x)
    leaf = LEAVES.get(x.function)
    return leaf(x, types, width) if leaf else None


def _pointer(v: Value) -> Pointer:
    assert isinstance(v, Pointer)
    return v


def _number(v: Value) -> Index:
    assert isinstance(v, FromIndex)
    return v.index


def _square(rows: Index, columns: Index, *body: Any) -> Body:
    return (For(FIRST, ZERO, rows, (For(SECOND, ZERO, columns, body),)),)


def _transpose(x: Call, types: Types, width: int) -> Body:
    """Return ``to[column * pitch + row] = from[row * stride + column]``; without a pitch whole vectors are written."""
    to, source = map(_pointer, x.args[:2])
    stride, rows, columns, *more = map(_number, x.args[2:])
    rows, columns = minimum(rows, width), minimum(columns, width)
    row, column, pitch = Index.of(FIRST), Index.of(SECOND), more[0] if more else Index.of(width)
    read = Def("_", FlatLoad(source.dtype, source.buffer, source.address + row * stride + column))
    written = Store(to.buffer, to.address + column * pitch + row, Const(to.dtype, 0.0))
    return (*_square(rows, columns, read), *_square(rows if more else Index.of(width), columns, written))


def _load_tile(x: Call, types: Types, width: int) -> Body:
    """Load a tile from rows of words that are ``pitch`` elements apart."""
    source, (pitch, rows, words) = _pointer(x.args[1]), map(_number, x.args[2:])
    kind = types[source.buffer]
    at = source.address + Index.of(FIRST) * pitch + Index.of(SECOND)
    return _square(rows, words * (WORD_BYTES // ITEMSIZE[kind]), Def("_", FlatLoad(kind, source.buffer, at)))


def _store_tile(x: Call, types: Types, width: int) -> Body:
    """Store a tile to rows that are ``pitch`` elements apart."""
    to, (pitch, rows, words) = _pointer(x.args[1]), map(_number, x.args[2:])
    at = to.address + Index.of(FIRST) * pitch + Index.of(SECOND)
    return _square(rows, words, Store(to.buffer, at, Const(types[to.buffer], 0)))


def _sums(x: Call, types: Types, width: int) -> Body:
    """Store the lane sums of the other arguments at consecutive addresses."""
    to = _pointer(x.args[0])
    return tuple(Store(to.buffer, to.address + k, v) for k, v in enumerate(x.args[1:]))


def _first(x: Call) -> Body:
    """Read a line, write keys and positions to scratch, then write the requested positions."""
    source, to, room = _pointer(x.args[0]), _pointer(x.args[5]), _pointer(x.args[7])
    stride, count, most, _ = map(_number, x.args[1:5])
    (step,) = map(_number, x.args[6:7])
    i = Index.of(FIRST)
    line = Def("_", FlatLoad(source.dtype, source.buffer, source.address + i * stride))
    keys = Store(room.buffer, room.address + i, Const(room.dtype, 0))
    places = Store(to.buffer, to.address + i * step, Const(to.dtype, 0))
    return (
        For(FIRST, ZERO, count, (line,)), For(FIRST, ZERO, count * SORT_WORDS_PER_ELEMENT, (keys,)),
        For(FIRST, ZERO, most, (places,)),
    )  # fmt: skip


LEAVES: Mapping[str, Callable[[Call, Types, int], Body]] = {
    "pd_transpose_f32": _transpose, "pd_transpose_rows_f32": _transpose, "pd_amx_load": _load_tile,
    "pd_amx_store": _store_tile, "pd_sums_f32": _sums,
}  # fmt: skip
