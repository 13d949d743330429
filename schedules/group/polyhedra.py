"""A group as isl objects: iteration domains, access relations, context, original order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import islpy as isl

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.expr import Const, Load, Op, Value, children, indices, loads, walk
from polydyn.schedules.index import Atom, Index
from polydyn.schedules.isl_util import Condition, Frame, at_least, between, frame, param_set, union_maps, union_sets
from polydyn.schedules.model import Access, Group, Statement


@dataclass(frozen=True)
class Read:
    """A read access. It is ``guarded`` if a ``where`` decides whether the load happens."""

    access: Access
    guarded: bool


def reads(statement: Statement) -> tuple[Read, ...]:
    """Return the reads of a statement with their guards.

    A reduction's accumulator comes first, then the loads of the value and the integers that its subscripts fetch.
    """
    own = (Read(statement.write, False),) if statement.reduce else ()
    found = [Read(_access(x.buffer, x.index), g) for x, g in guarded_loads(statement.value)]
    fetched = {f for i in (*indices(statement.value), *statement.index) for f in i.fetches()}
    return (*own, *found, *(Read(_access(f.name, f.args), True) for f in sorted(fetched, key=str)))


def read_accesses(statement: Statement) -> tuple[Access, ...]:
    """Return ``reads`` without the guards."""
    return tuple(r.access for r in reads(statement))


def padded_read(statement: Statement, array: str) -> Op | None:
    """Return the only read of an array if it is ``where(condition, element, constant)``, as of a padded image.

    None: it is read elsewhere too, in another way, or under a condition that reads an array.
    """
    choices = [v for v in walk(statement.value) if isinstance(v, Op) and v.name == "where"]
    mine = [v for v in choices if isinstance(v.args[1], Load) and v.args[1].buffer == array]
    every = [x for x in loads(statement.value) if x.buffer == array]
    if len(mine) != 1 or len(every) != 1 or any(loads(mine[0].args[0])) or not isinstance(mine[0].args[2], Const):
        return None
    return mine[0]


def _access(array: str, index: tuple[Index, ...]) -> Access:
    return Access(array, index, not _exact(index))


def guarded_loads(v: Value, guarded: bool = False) -> Iterator[tuple[Load, bool]]:
    """Yield the loads of a value, and whether a ``where`` decides if each happens."""
    if isinstance(v, Load):
        yield v, guarded
    for i, c in enumerate(children(v)):
        yield from guarded_loads(c, guarded or (isinstance(v, Op) and v.name == "where" and i > 0))


def is_exact(access: Access) -> bool:
    """Whether isl can express every subscript: affine, floor divisions by constants included.

    Anything else (data dependent, products of symbols) may access any element of its array.
    """
    return _exact(access.index)


def _exact(index: tuple[Index, ...]) -> bool:
    return all(map(_quasi_affine, index))


def _quasi_affine(e: Index) -> bool:
    return all(len(m) <= 1 and all(_simple(a) for a in m) for m in e.terms)


def _simple(a: str | Atom) -> bool:
    if isinstance(a, str):
        return True
    return a.kind == "floordiv" and bool(a.args[1].constant) and _quasi_affine(a.args[0])


def statement_frame(group: Group, statement: Statement) -> Frame:
    """Return the space of a statement's instances."""
    return frame(statement.name, statement.iterators, group.params)


def iteration_domain(group: Group, statement: Statement) -> isl.Set:
    """Return the instances of one statement."""
    box = [c for n, e in statement.iters for c in between(0, n, e)]
    return statement_frame(group, statement).where(box)


def domain(group: Group) -> isl.UnionSet:
    """Return the instances of all statements."""
    return union_sets((iteration_domain(group, s) for s in group.statements), group.params)


def array_box(group: Group, name: str) -> isl.Set:
    """Return the elements of an array. Extents that are not affine (a product of parameters) do not bound their dim."""
    shape = group.arrays[name].shape
    dims = tuple(f"%{i}" for i in range(len(shape)))
    f = frame(name, dims, group.params)
    box: list[Condition] = []
    for d, e in zip(dims, shape, strict=True):
        box += between(0, d, e) if _quasi_affine(e) else between(0, d, 0)[:1]
    return f.where(box)


def access_relation(group: Group, statement: Statement, access: Access, guarded: bool = False) -> isl.Map:
    """Return the relation from instances to elements.

    A subscript that is not exact may have any value. ``guarded``: only elements that exist.
    """
    f = statement_frame(group, statement)
    if access.array not in group.arrays:
        raise ScheduleError(f"{statement.name} accesses {access.array}, which group {group.name} does not have")
    if not is_exact(access):
        known = [k for k, i in enumerate(access.index) if _quasi_affine(i)]
        elements = frame(access.array, tuple(f"%{k}" for k in range(len(access.index))), group.params)
        shown = elements.map_to("", [Index.of(f"%{k}") for k in known])
        box = array_box(group, access.array)
        m = f.map_to("", [access.index[k] for k in known]).apply_range(shown.intersect_domain(box).reverse())
    else:
        m = f.map_to(access.array, access.index)
        if guarded:
            m = m.intersect_range(array_box(group, access.array))
    return m.intersect_domain(iteration_domain(group, statement))


def read_relation(group: Group) -> isl.UnionMap:
    """Return all reads."""
    parts = (access_relation(group, s, r.access, r.guarded) for s in group.statements for r in reads(s))
    return union_maps(parts, group.params)


def write_relation(group: Group, exact: bool = True) -> isl.UnionMap:
    """Return all exact writes, or all others."""
    chosen = (s for s in group.statements if is_exact(s.write) == exact)
    return union_maps((access_relation(group, s, s.write) for s in chosen), group.params)


def context(group: Group, facts: Iterable[Condition] = (), positive: bool = True) -> isl.Set:
    """Return the constraints on a kernel's parameters: the facts, and sizes >= 1 if ``positive``, else >= 0."""
    return param_set(group.params, [*facts, *(at_least(p, 0) for p in group.params)], positive)


def original_order(group: Group) -> isl.UnionMap:
    """Return the schedule that runs one statement after another, each over its whole domain (except ``Group.around``).
    """
    rows: dict[str, tuple[Index, ...]] = {}
    run, before = 0, False
    for i, s in enumerate(group.statements):
        inside = group.around in s.iterators
        run += not (inside and before)
        before = inside
        step = Index.of(group.around) if inside and group.around else Index.of(0)
        rows[s.name] = (Index.of(run), step, Index.of(i), *map(Index.of, s.iterators))
    return rows_to_map(group, rows)


def rows_to_map(group: Group, rows: dict[str, tuple[Index, ...]]) -> isl.UnionMap:
    """Return a schedule map from affine rows per statement, restricted to the domains; short rows are padded with 0."""
    missing = [s.name for s in group.statements if s.name not in rows]
    if missing:
        raise ScheduleError(f"no rows for statements {missing} of group {group.name}")
    depth = max((len(r) for r in rows.values()), default=0)
    parts = []
    for s in group.statements:
        padded = (*rows[s.name], *([Index.of(0)] * (depth - len(rows[s.name]))))
        parts.append(statement_frame(group, s).map_to("", padded).intersect_domain(iteration_domain(group, s)))
    return union_maps(parts, group.params)
