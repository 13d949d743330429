"""Row pointers: compute the start of a row once per tile instead of at every step of its reduction."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TypeGuard

from polydyn.codegen.ir import Body, Compare, FlatLoad, If, Let, map_values
from polydyn.schedules.expr import Value
from polydyn.schedules.index import Atom, Index

V = Index.of


def row_pointers(body: Body, buffer: str, steps: Collection[str], lines: bool = False) -> Body:
    """Bind the part of an address of ``buffer`` that does not depend on the loops ``steps`` to a name around the body.

    Then rows may begin anywhere, an address is affine in its steps, and no division is left in a loop. ``lines``: rows
    of one image row share a name, which leaves registers to more of them.
    """
    names: dict[Index, str] = {}

    def f(v: Value) -> Value:
        if not _reads(v, buffer):
            return v
        start = v.address
        for x in steps:
            _, start = start.split(x)
        if start.is_polynomial:
            return v
        name = names.setdefault(start, f"{buffer}_{len(names)}")
        return replace(v, address=v.address - start + name)

    named = map_values(body, f)
    shared = _in_one_line(list(names)) if lines and len(names) > 1 else None
    apart = named
    for start, name in names.items():
        apart = (Let(name, start, apart),)
    if shared is None:
        return apart
    first, conditions, distances = shared
    begins = {name: V(names[first]) + d for name, d in zip(names.values(), distances, strict=True)}
    together = map_values(named, lambda v: replace(v, address=v.address.subs(begins)) if _reads(v, buffer) else v)
    return (If(conditions, (Let(names[first], first, together),), apart),)


def _reads(v: Value, buffer: str) -> TypeGuard[FlatLoad]:
    return isinstance(v, FlatLoad) and v.buffer == buffer


def _in_one_line(starts: Sequence[Index]) -> tuple[Index, tuple[Compare, ...], list[int]] | None:
    """Return the start of the first of consecutive rows, the conditions for one image row, and their offsets.

    All rows are in one image row if the quotients of the first and of the last row are equal, because quotients
    grow with the row. Return None if starts have other quotients, or distances that are not numbers.
    """
    rows = [{_moving(a): a for a in s.atoms() if isinstance(a, Atom)} for s in starts]
    if any(r.keys() != rows[0].keys() for r in rows):
        return None
    steps = [k for k, a in rows[0].items() if any(r[k] != a for r in rows)]
    offsets = [{_offset(r[k]) for k in steps} for r in rows]
    if any(len(o) != 1 for o in offsets) or any(kind != "floordiv" for kind, *_ in steps):
        return None
    at = [min(o) for o in offsets]
    first, last = at.index(min(at)), at.index(max(at))
    distances = []
    for s, r in zip(starts, rows, strict=True):
        same = {r[k]: Index({(rows[first][k],): 1}) for k in steps}
        distance = (s.map_atoms(lambda a, same=same: same.get(a, Index({(a,): 1}))) - starts[first]).constant  # type: ignore[misc]
        if distance is None:
            return None
        distances.append(distance)
    ends = ((Index({(r[k],): 1}) for r in (rows[first], rows[last])) for k in steps)
    return starts[first], tuple(Compare("==", a, b) for a, b in ends), distances


def _moving(a: Atom) -> tuple[str, Index, tuple[Index, ...]]:
    """Return the part that quotients of different rows have in common."""
    return a.kind, a.args[0] - _offset(a), a.args[1:]


def _offset(a: Atom) -> int:
    return a.args[0].terms.get((), 0)
