"""Skeletons: a group without its constants, so that one proof serves every group that is an instance of it.

Extents that are numbers become parameters (equal numbers the same one). Everything that proofs ignore is dropped: the
arithmetic on elements, reads of arrays that the group does not write, memory layouts. A proof holds for all values of
the parameters under the skeleton's facts. It is valid for a group that is its skeleton with parameters replaced by
values (``instantiate`` gives exactly the group's form) for which the facts hold. Both conditions are checked for every
group, without isl.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from polydyn.schedules.errors import LegalityError
from polydyn.schedules.expr import PRODUCTS, Const, FromIndex, Load, Op, Value, indices, loads, transform
from polydyn.schedules.group.polyhedra import guarded_loads
from polydyn.schedules.index import Index, fetch
from polydyn.schedules.isl_util import Condition, at_least
from polydyn.schedules.model import Array, Group, Statement

OUTSIDE = Array("outside", "float32", (), "input", ())
"""Replaces every array that a group reads and does not write."""

_ANY = fetch(OUTSIDE.name, ())
"""Replaces a subscript that is read from a tensor."""

_RELEVANT_OPS = ("where", *PRODUCTS)
"""Operations that proofs look at: guards of reads, and products."""


@dataclass(frozen=True)
class Form:
    """The part of a group that dependences and schedules depend on; hashable. Equal forms have equal proofs."""

    params: tuple[str, ...]
    arrays: tuple[Array, ...]
    statements: tuple[Statement, ...]
    around: str | None = None

    def group(self) -> Group:
        """Return the form as a group of its own."""
        arrays = {a.name: a for a in (*self.arrays, OUTSIDE)}
        return Group("skeleton", self.params, arrays, self.statements, self.around)

    def subs(self, env: Mapping[str, Index]) -> tuple[tuple[Array, ...], tuple[Statement, ...]]:
        """Return arrays and statements with parameters replaced."""
        arrays = tuple(replace(a, shape=tuple(e.subs(env) for e in a.shape)) for a in self.arrays)
        return arrays, tuple(_rename(s, env) for s in self.statements)


@dataclass(frozen=True)
class Skeleton:
    """``form`` under ``facts``; ``env`` gives its parameters' values in one group: numbers, or parameters of the group.
    """

    form: Form
    facts: tuple[Condition, ...]
    env: tuple[tuple[str, Index], ...]


def skeleton(group: Group) -> Skeleton | None:
    """Return the skeleton of a group, or None if it reads its own results at positions known only at run time."""
    plain = form(group)
    if plain is None:
        return None
    names: dict[Index, str] = {}

    def name(e: Index) -> Index:
        if e not in names:
            number = e.constant is not None
            names[e] = f"{'k' if number else 'n'}{sum((x.constant is not None) == number for x in names)}"
        return Index.of(names[e])

    own = frozenset(plain.params)
    for s in plain.statements:
        for _, e in s.iters:
            name(e)
    extents = dict(names)
    for s in plain.statements:
        for i in (*s.index, *(i for x in _own_reads(s) for i in x.index)):
            for x in sorted(i.symbols() & own):
                name(Index.of(x))
    for a in plain.arrays:
        for e in a.shape:
            for x in sorted(e.symbols()):
                name(Index.of(x))
    env = {str(e): Index.of(n) for e, n in names.items() if e.is_symbol}

    def extent(e: Index) -> Index:
        return Index.of(extents[e]) if e in extents else e.subs(env)

    statements = tuple(
        replace(_rename(s, env), iters=tuple((x, extent(e)) for x, e in s.iters)) for s in plain.statements
    )
    arrays = tuple(replace(a, shape=tuple(map(extent, a.shape))) for a in plain.arrays)
    values = tuple((n, e) for e, n in names.items())
    facts = tuple(at_least(n, 0) for n, e in values if e.constant is not None)
    return Skeleton(Form(tuple(names.values()), arrays, statements, plain.around), facts, values)


def check_instance(s: Skeleton, group: Group) -> None:
    """Check that a proof about the skeleton covers the group; LegalityError otherwise.

    The group's form must be the skeleton's with the parameters replaced, and the facts must hold for the replacements.
    """
    env, own = dict(s.env), form(group)
    if own is None or s.form.subs(env) != (own.arrays, own.statements):
        raise LegalityError(
            f"group {group.name} is not an instance of its skeleton with {env}", rule="proof reuse"
        )
    for c in s.facts:
        value = c.expr.subs(env).constant
        if value is None or (value != 0 if c.equality else value < 0):
            raise LegalityError(f"the proof assumes {c}; here it is {c.expr.subs(env)}", rule="proof reuse")


def form(group: Group) -> Form | None:
    """Return the group without what proofs ignore, in canonical names.

    Return None if the group reads its own results at a fetched position, or if they decide one.
    """
    written = {n: f"w{k}" for k, n in enumerate(dict.fromkeys(s.array for s in group.statements))}
    statements = []
    for s in group.statements:
        index = tuple(_ANY if i.fetches() else i for i in s.index)
        bare = replace(s, value=transform(s.value, lambda v: _bare(v, written)), array=written[s.array], index=index)
        if any(i.fetches() for x in _own_reads(bare) for i in x.index):
            return None
        statements.append(bare)
    for s in group.statements:
        if any(f.name in written for i in (*indices(s.value), *s.index) for f in i.fetches()):
            return None
    arrays = tuple(Array(w, "float32", group.arrays[n].shape, group.arrays[n].role, ()) for n, w in written.items())
    return Form(group.params, arrays, tuple(statements), group.around)


def accesses(form: Form) -> Form:
    """Return the form without arithmetic: each value only reads what it reads, in a canonical order.

    Dependences and proofs depend on accesses alone, so forms whose epilogues differ share them.
    """

    def value(s: Statement) -> Value:
        found = dict.fromkeys((x, guarded) for x, guarded in guarded_loads(s.value) if x.buffer != OUTSIDE.name)
        always, sometimes = (sorted((x for x, g in found if g == guarded), key=str) for guarded in (False, True))
        choice = Op("float32", "where", (Const("float32", 0.0), *sometimes))
        return Op("float32", "any", (*always, choice) if sometimes else tuple(always))

    return replace(form, statements=tuple(replace(s, value=value(s)) for s in form.statements))


def _bare(v: Value, written: Mapping[str, str]) -> Value:
    """Keep only the leaves that proofs look at: reads of arrays that the group writes."""
    if isinstance(v, Load):
        return Load("float32", written[v.buffer], v.index) if v.buffer in written else Load("float32", OUTSIDE.name, ())
    if isinstance(v, (Const, FromIndex)):
        return Const("float32", 0.0)
    return Op("float32", v.name if v.name in _RELEVANT_OPS else "any", v.args) if isinstance(v, Op) else v


def _own_reads(s: Statement) -> list[Load]:
    return [x for x in loads(s.value) if x.buffer != OUTSIDE.name]


def _rename(s: Statement, env: Mapping[str, Index]) -> Statement:
    def f(v: Value) -> Value:
        return replace(v, index=tuple(i.subs(env) for i in v.index)) if isinstance(v, Load) else v

    return replace(
        s,
        iters=tuple((n, e.subs(env)) for n, e in s.iters),
        index=tuple(i.subs(env) for i in s.index),
        value=transform(s.value, f),
    )
