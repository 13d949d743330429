"""Which iterators of different statements are the same loop.

Two iterators are the same if both are the whole subscript of one dim of an array that one statement writes and the
other reads or writes (BladeDISC 4: the group-dims; TSCompiler 5.2: mapping types). Inputs are read at flat addresses:
iterators of such reads are the same if both addresses are equal up to renaming.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from polydyn.schedules.group.polyhedra import read_accesses
from polydyn.schedules.index import Index
from polydyn.schedules.model import Access, Group, Statement


@dataclass(frozen=True)
class Alignment:
    """``dims[statement][iterator]`` is the iterator of the dominant statement that it equals.

    Iterators without a counterpart are missing. ``conflicts``: dims that some statement would have twice.
    """

    dominant: str
    dims: dict[str, dict[str, str]]
    conflicts: frozenset[str]

    def common(self, group: Group) -> tuple[str, ...]:
        """Return the dominant statement's iterators that every statement has, in its order."""
        shared = set(group.statement(self.dominant).iterators) - self.conflicts
        for s in group.statements:
            shared &= set(self.dims[s.name].values())
        return tuple(i for i in group.statement(self.dominant).iterators if i in shared)


def align(group: Group, dominant: Statement) -> Alignment:
    """Propagate the dominant statement's iterators along written arrays, until nothing changes.

    Statements that are not reached (siblings that only read the same input) are aligned through inputs.
    """
    dims: dict[str, dict[str, str]] = {s.name: {} for s in group.statements}
    dims[dominant.name] = {i: i for i in dominant.iterators}
    conflicts: set[str] = set()
    _propagate(_links(group, written=True), dims, conflicts)
    unreached = {n for n, d in dims.items() if not d}
    if unreached:
        links = _links(group, written=False)
        _propagate([x for x in links if unreached & {x[0], x[2]}], dims, conflicts)
        _propagate(_links(group, written=True), dims, conflicts)
    return Alignment(dominant.name, dims, frozenset(conflicts))


_Link: TypeAlias = tuple[str, str, str, str]
"""(statement, iterator, statement, iterator) that subscript the same dim of one array."""


def _propagate(links: list[_Link], dims: dict[str, dict[str, str]], conflicts: set[str]) -> None:
    changed = True
    while changed:
        changed = False
        for s, i, t, j in links:
            dim = dims[s].get(i)
            if dim is None or dims[t].get(j) == dim:
                continue
            if j in dims[t] or dim in dims[t].values():
                conflicts.add(dim)
            else:
                dims[t][j] = dim
                changed = True


def _links(group: Group, written: bool) -> list[_Link]:
    """Return all links through arrays that the group writes, or through the others, in both directions."""
    stored = {s.array for s in group.statements}
    links = []
    for s in group.statements:
        for a in (s.write,) if written else read_accesses(s):
            if (a.array in stored) == written:
                for t in group.statements:
                    for b in (t.write, *read_accesses(t)):
                        if a.array == b.array and t.name != s.name:
                            same = same_iterators(s, a, t, b) or ([] if written else _renamed(s, a, t, b))
                            links += [(s.name, i, t.name, j) for i, j in same]
    return links + [(t, j, s, i) for s, i, t, j in links]


def _renamed(s: Statement, a: Access, t: Statement, b: Access) -> list[tuple[str, str]]:
    """Return the pairs of iterators with equal extents that turn the address of ``a`` into that of ``b``.

    Symbolic strides make an address a product, which isl cannot express, but not another address.
    """
    if len(a.index) != len(b.index):
        return []
    left, right, same = dict(s.iters), dict(t.iters), dict[str, str]()
    for x, y in zip(a.index, b.index, strict=True):
        steps = {str(y.split(j)[0]): j for j in sorted(y.symbols() & right.keys())}
        for i in sorted(x.symbols() & left.keys()):
            j = steps.get(str(x.split(i)[0]))
            if j is not None and left[i] == right[j]:
                same[i] = j
        if x.subs({i: Index.of(j) for i, j in same.items()}) != y:
            return []
    return list(same.items())


def same_iterators(s: Statement, a: Access, t: Statement, b: Access) -> list[tuple[str, str]]:
    """Return pairs of iterators of ``s`` and ``t`` that are the whole subscript of one dim and have equal extents."""
    if a.opaque or b.opaque:
        return []
    left, right = dict(s.iters), dict(t.iters)
    return [
        (str(x), str(y))
        for x, y in zip(a.index, b.index, strict=True)
        if x.is_symbol and y.is_symbol and str(x) in left and str(y) in right and left[str(x)] == right[str(y)]
    ]
