"""Leaves of kernels as loops: what the C of ``codegen/leaf`` does to memory, for those that no loop IR says it for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from polydyn.codegen.ir import Body, Call, Def, FlatLoad, For, Pointer, Store
from polydyn.schedules.expr import ITEMSIZE, Const, FromIndex, Value
from polydyn.schedules.index import ZERO, Index, minimum

QUIET = ("pd_drain", "pd_written_soon", "pd_prefetch", "pd_amx_begin", "pd_amx_end", "pd_amx_zero", "pd_amx_add")
"""Beginnings of names of leaves that read and write no memory."""
WORD = 4
"""Bytes of a word of a matrix unit."""
ROOM = 4
"""Numbers of eight bytes that a sort uses for each element."""
FIRST, SECOND = "_r", "_c"
"""Loops of a leaf."""
Types = Mapping[str, str]


def as_loops(x: Call, types: Types, width: int) -> Body | None:
    """The loops that a call is; () where it touches no memory; None: there is no such leaf.

    ``types``: of the buffers; ``width``: lanes of a vector of float32.
    """
    if x.function.startswith(QUIET):
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
    """``to[column * pitch + row] = from[row * stride + column]``; without a pitch whole vectors are written."""
    to, source = map(_pointer, x.args[:2])
    stride, rows, columns, *more = map(_number, x.args[2:])
    rows, columns = minimum(rows, width), minimum(columns, width)
    row, column, pitch = Index.of(FIRST), Index.of(SECOND), more[0] if more else Index.of(width)
    read = Def("_", FlatLoad(source.dtype, source.buffer, source.address + row * stride + column))
    written = Store(to.buffer, to.address + column * pitch + row, Const(to.dtype, 0.0))
    return (*_square(rows, columns, read), *_square(rows if more else Index.of(width), columns, written))


def _load_tile(x: Call, types: Types, width: int) -> Body:
    """Rows of words, ``pitch`` elements apart, into a tile."""
    source, (pitch, rows, words) = _pointer(x.args[1]), map(_number, x.args[2:])
    kind = types[source.buffer]
    at = source.address + Index.of(FIRST) * pitch + Index.of(SECOND)
    return _square(rows, words * (WORD // ITEMSIZE[kind]), Def("_", FlatLoad(kind, source.buffer, at)))


def _store_tile(x: Call, types: Types, width: int) -> Body:
    """A tile to rows that are ``pitch`` elements apart."""
    to, (pitch, rows, words) = _pointer(x.args[1]), map(_number, x.args[2:])
    at = to.address + Index.of(FIRST) * pitch + Index.of(SECOND)
    return _square(rows, words, Store(to.buffer, at, Const(types[to.buffer], 0)))


def _sums(x: Call, types: Types, width: int) -> Body:
    """A sum of the lanes of each of the other arguments, one behind the other."""
    to = _pointer(x.args[0])
    return tuple(Store(to.buffer, to.address + k, v) for k, v in enumerate(x.args[1:]))


def _first(x: Call) -> Body:
    """Reads a line, writes down keys and places, and then the places that are asked for."""
    source, to, room = _pointer(x.args[0]), _pointer(x.args[5]), _pointer(x.args[7])
    stride, count, most, _ = map(_number, x.args[1:5])
    (step,) = map(_number, x.args[6:7])
    i = Index.of(FIRST)
    line = Def("_", FlatLoad(source.dtype, source.buffer, source.address + i * stride))
    keys = Store(room.buffer, room.address + i, Const(room.dtype, 0))
    places = Store(to.buffer, to.address + i * step, Const(to.dtype, 0))
    return (
        For(FIRST, ZERO, count, (line,)), For(FIRST, ZERO, count * ROOM, (keys,)), For(FIRST, ZERO, most, (places,)),
    )  # fmt: skip


LEAVES: Mapping[str, Callable[[Call, Types, int], Body]] = {
    "pd_transpose_f32": _transpose, "pd_transpose_rows_f32": _transpose, "pd_amx_load": _load_tile,
    "pd_amx_store": _store_tile, "pd_sums_f32": _sums,
}  # fmt: skip
