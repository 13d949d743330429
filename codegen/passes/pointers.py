"""Rows as pointers: where a row begins is computed once for a tile, not at every step of its reduction."""

from __future__ import annotations

from collections.abc import Collection

from polydyn.codegen.ir import Body, FlatLoad, Let, map_values
from polydyn.schedules.expr import Value
from polydyn.schedules.index import Index


def row_pointers(body: Body, buffer: str, steps: Collection[str]) -> Body:
    """What an address of ``buffer`` is besides its multiples of the loops ``steps`` gets a name around the body.

    So rows may begin anywhere, an address is affine in its steps, and no division is left in a loop.
    """
    names: dict[Index, str] = {}

    def f(v: Value) -> Value:
        if not (isinstance(v, FlatLoad) and v.buffer == buffer):
            return v
        start = v.address
        for x in steps:
            _, start = start.split(x)
        if start.is_polynomial:
            return v
        name = names.setdefault(start, f"{buffer}_{len(names)}")
        return FlatLoad(v.dtype, buffer, v.address - start + name, v.lanes, v.stride, v.mask, v.guard)

    body = map_values(body, f)
    for start, name in names.items():
        body = (Let(name, start, body),)
    return body
