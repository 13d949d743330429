"""Which iterators of different statements are the same loop.

Two iterators are the same when both are the whole subscript of one dim of an array that one statement writes and the
other reads or writes (BladeDISC 4: the group-dims; TSCompiler 5.2: mapping types).
"""

from __future__ import annotations

from dataclasses import dataclass

from polydyn.schedules.model import Access, Group, Statement


@dataclass(frozen=True)
class Alignment:
    """``dims[statement][iterator]`` is the iterator of the dominant statement that it equals.

    Iterators without a counterpart are missing. ``conflicts``: dims that some statement would meet twice.
    """

    dominant: str
    dims: dict[str, dict[str, str]]
    conflicts: frozenset[str]

    def common(self, group: Group) -> tuple[str, ...]:
        """The dominant statement's iterators that every statement has, in its order."""
        shared = set(group.statement(self.dominant).iterators) - self.conflicts
        for s in group.statements:
            shared &= set(self.dims[s.name].values())
        return tuple(i for i in group.statement(self.dominant).iterators if i in shared)


def align(group: Group, dominant: Statement) -> Alignment:
    """Propagates the dominant statement's iterators along written arrays until nothing changes."""
    dims: dict[str, dict[str, str]] = {s.name: {} for s in group.statements}
    dims[dominant.name] = {i: i for i in dominant.iterators}
    conflicts: set[str] = set()
    links = _links(group)
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
    return Alignment(dominant.name, dims, frozenset(conflicts))


def _links(group: Group) -> list[tuple[str, str, str, str]]:
    """(statement, iterator, statement, iterator) that subscript the same dim of a written array, both ways."""
    links = []
    writes = [(s, s.write) for s in group.statements]
    for s, w in writes:
        for t in group.statements:
            for a in (t.write, *t.reads):
                if a.array == w.array and (t is not s or a is not w):
                    links += [(s.name, i, t.name, j) for i, j in same_iterators(s, w, t, a)]
    return links + [(t, j, s, i) for s, i, t, j in links]


def same_iterators(s: Statement, a: Access, t: Statement, b: Access) -> list[tuple[str, str]]:
    """Iterators of ``s`` and ``t`` that are the whole subscript of one dim and have equal extents."""
    if a.opaque or b.opaque:
        return []
    left, right = dict(s.iters), dict(t.iters)
    return [
        (str(x), str(y))
        for x, y in zip(a.index, b.index, strict=True)
        if x.is_symbol and y.is_symbol and str(x) in left and str(y) in right and left[str(x)] == right[str(y)]
    ]
