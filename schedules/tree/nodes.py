"""Schedule trees over tile space: typed, immutable, convertible to isl.

A ``TileStatement`` is a statement whose instances are indexed by tile-space coordinates; their ranges may mention
symbolic tile counts and tile sizes, so one tree serves every tile size (TSCompiler 5.2, Vortex's levels).
The node names are isl's: band, sequence, mark, leaf.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import islpy as isl

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.index import Index
from polydyn.schedules.isl_util import Condition, Frame, child, frame, union_sets


@dataclass(frozen=True)
class TileStatement:
    """Instances ``name[coords]`` that satisfy the conditions (affine over coordinates and parameters)."""

    name: str
    coords: tuple[str, ...]
    conditions: tuple[Condition, ...]


def bind_statement(s: TileStatement, env: Mapping[str, Index]) -> TileStatement:
    """Return the statement with parameters replaced."""
    return replace(s, conditions=tuple(replace(c, expr=c.expr.subs(env)) for c in s.conditions))


@dataclass(frozen=True)
class Leaf:
    """The end of the ordering: one instance."""


@dataclass(frozen=True)
class Band:
    """Loops over ``members``, outermost first.

    A member is the name of a coordinate. For a statement without that coordinate, ``defaults`` has ``(statement,
    member, value)``, with the value affine over the statement's coordinates and the parameters.
    """

    members: tuple[str, ...]
    child: Tree = field(default_factory=Leaf)
    defaults: tuple[tuple[str, str, Index], ...] = ()


@dataclass(frozen=True)
class Sequence:
    """The children, executed one after another, each with its statements."""

    children: tuple[tuple[frozenset[str], Tree], ...]


@dataclass(frozen=True)
class Mark:
    """A named position in the tree, which does not change the order. Exactly one pass of codegen consumes each mark."""

    name: str
    child: Tree = field(default_factory=Leaf)


Tree: TypeAlias = Leaf | Band | Sequence | Mark


def sequence(*children: tuple[Seq[str] | str, Tree]) -> Sequence:
    """Return a Sequence from (statement names, child) pairs; a single name may be given as a string."""
    return Sequence(tuple((frozenset((s,) if isinstance(s, str) else s), c) for s, c in children))


def verify_tree(tree: Tree, statements: Seq[TileStatement], params: tuple[str, ...]) -> None:
    """Check the invariants of a tree; ScheduleError otherwise.

    Statement names are unique. Every band member is a coordinate or has a default. No coordinate is scheduled twice. A
    sequence splits its statements into disjoint, non-empty, known parts. A leaf has one statement, and each of its
    coordinates was scheduled or is fixed by an equality.
    """
    names = [s.name for s in statements]
    if len(set(names)) != len(names):
        raise ScheduleError(f"statement names repeat: {sorted(n for n in set(names) if names.count(n) > 1)}")
    for s in statements:
        frame(s.name, s.coords, params).where(s.conditions)  # raises when not affine or unknown
    _verify(tree, {s.name: s for s in statements}, {s.name: frozenset() for s in statements})


def _verify(tree: Tree, scope: Mapping[str, TileStatement], done: Mapping[str, frozenset[str]]) -> None:
    if isinstance(tree, Mark):
        _verify(tree.child, scope, done)
    elif isinstance(tree, Band):
        defaults = {(s, m) for s, m, _ in tree.defaults}
        for s in scope.values():
            for m in tree.members:
                if m not in s.coords and (s.name, m) not in defaults:
                    what = f"band member {m} is not a coordinate of {s.name} and has no default"
                    raise ScheduleError(what, node=s.name)
                if m in done[s.name]:
                    raise ScheduleError(f"coordinate {m} of {s.name} is scheduled twice", node=s.name)
        _verify(tree.child, scope, {n: d | set(tree.members) for n, d in done.items()})
    elif isinstance(tree, Sequence):
        listed = [n for part, _ in tree.children for n in sorted(part)]
        if sorted(listed) != sorted(scope) or not all(part for part, _ in tree.children):
            raise ScheduleError(
                f"sequence over {sorted(listed)} does not split {sorted(scope)}", rule="filters partition"
            )
        for part, below in tree.children:
            _verify(below, {n: scope[n] for n in part}, {n: done[n] for n in part})
    else:
        _verify_leaf(scope, done)


def _verify_leaf(scope: Mapping[str, TileStatement], done: Mapping[str, frozenset[str]]) -> None:
    if len(scope) != 1:
        raise ScheduleError(f"the order of {sorted(scope)} is not given at a leaf", remedy="put them in a sequence")
    ((name, s),) = scope.items()
    for c in s.coords:
        fixed = any(k.equality and abs(k.expr.terms.get((c,), 0)) == 1 for k in s.conditions)
        if c not in done[name] and not fixed:
            raise ScheduleError(f"coordinate {c} of {name} is never scheduled", node=name)


def domain(statements: Seq[TileStatement], params: tuple[str, ...]) -> isl.UnionSet:
    """Return all instances."""
    return union_sets((frame(s.name, s.coords, params).where(s.conditions) for s in statements), params)


def to_isl(tree: Tree, statements: Seq[TileStatement], params: tuple[str, ...]) -> isl.Schedule:
    """Return the isl schedule tree, after ``verify_tree``."""
    verify_tree(tree, statements, params)
    frames = {s.name: frame(s.name, s.coords, params) for s in statements}
    root = isl.Schedule.from_domain(domain(statements, params)).get_root()
    return _insert(tree, child(root, 0), frames).get_schedule()


def _insert(tree: Tree, node: isl.ScheduleNode, scope: Mapping[str, Frame]) -> isl.ScheduleNode:
    """Insert the tree at a node; return the node at the same position."""
    if isinstance(tree, Mark):
        return _insert(tree.child, child(node.insert_mark(isl.Id(tree.name)), 0), scope).parent()
    if isinstance(tree, Band):
        return _insert(tree.child, child(node.insert_partial_schedule(_partial(tree, scope)), 0), scope).parent()
    if isinstance(tree, Sequence):
        filters = isl.UnionSetList.alloc(isl.DEFAULT_CONTEXT, len(tree.children))
        for part, _ in tree.children:
            filters = filters.add(union_sets(scope[n].universe() for n in sorted(part)))
        node = node.insert_sequence(filters)
        for i, (part, below) in enumerate(tree.children):
            inner = child(child(node, i), 0)
            node = _insert(below, inner, {n: scope[n] for n in part}).parent().parent()
        return node
    return node


def _partial(band: Band, scope: Mapping[str, Frame]) -> isl.MultiUnionPwAff:
    values = {(s, m): v for s, m, v in band.defaults}
    rows = [
        {n: values.get((n, m), Index.of(m)) if m not in f.dims else Index.of(m) for n, f in scope.items()}
        for m in band.members
    ]
    return partial_schedule(rows, scope)


def partial_schedule(rows: Seq[Mapping[str, Index]], scope: Mapping[str, Frame]) -> isl.MultiUnionPwAff:
    """Return the isl form of affine rows: for each row, statement name -> expression over the statement's frame."""
    params = next(iter(scope.values())).params
    out = isl.UnionPwAffList.alloc(isl.DEFAULT_CONTEXT, len(rows))
    for row in rows:
        u = isl.UnionPwAff.empty_space(frame("", (), params).space.params())
        for n, f in scope.items():
            u = u.union_add(isl.UnionPwAff.from_aff(f.aff(row[n])))
        out = out.add(u)
    space = frame("", tuple(f"%{i}" for i in range(len(rows))), params).space
    return isl.MultiUnionPwAff.from_union_pw_aff_list(space, out)


def build_ast(schedule: isl.Schedule, context: isl.Set) -> isl.AstNode:
    """Build the isl AST under a context (see ``isl_util.param_set``). Its user nodes carry the statement's coordinates.

    isl may distribute a band over the sequence directly below it (ignoring marks between them) if the order allows it.
    An initialiser guarded by ``b_k = 0`` then runs before the ``b_k`` loop instead of inside it, and a mark in between
    appears once per part. A band in between, with loops that all parts share, prevents it.
    """
    return isl.AstBuild.from_context(context).node_from_schedule(schedule)


def show(tree: Tree, indent: int = 0) -> str:
    """Return the tree as indented text, one node per line."""
    pad = "  " * indent
    if isinstance(tree, Leaf):
        return f"{pad}leaf\n"
    if isinstance(tree, Mark):
        return f"{pad}mark {tree.name}\n" + show(tree.child, indent + 1)
    if isinstance(tree, Band):
        extra = "".join(f"; {s}.{m} = {v}" for s, m, v in tree.defaults)
        return f"{pad}band {', '.join(tree.members)}{extra}\n" + show(tree.child, indent + 1)
    lines = [f"{pad}sequence\n"]
    for part, below in tree.children:
        lines.append(f"{pad}- {', '.join(sorted(part))}\n" + show(below, indent + 1))
    return "".join(lines)
