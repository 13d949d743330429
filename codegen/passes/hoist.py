"""Hoisting: move computations and decisions that are invariant in an inner loop out of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import reduce
from itertools import takewhile

from polydyn.codegen import ir
from polydyn.codegen.indices import map_node_indices, mentions, node_indices
from polydyn.schedules.expr import Op, Value, conjuncts, integer
from polydyn.schedules.index import ZERO, Atom, Index, maximum, minimum

V = Index.of


def hoist_guards(loop: ir.For) -> ir.Body:
    """Turn a loop that stores one guarded value into a choice between two loops, by the invariant part of the guard."""
    store = loop.body[0] if len(loop.body) == 1 else None
    if not isinstance(store, ir.Store) or not (isinstance(store.value, Op) and store.value.name == "where"):
        return (loop,)
    guard, then, orelse = store.value.args
    outside: list[ir.Compare] = []
    inside: list[Value] = []
    for part in conjuncts(guard):
        c = comparison(part)
        fixed = c is not None and loop.var not in c.left.symbols() | c.right.symbols()
        outside += [c] if c is not None and fixed else []
        inside += [] if fixed else [part]
    if not outside:
        return (loop,)
    value = then
    if inside:
        value = replace(store.value, args=(reduce(lambda a, b: Op("bool", "and", (a, b)), inside), then, orelse))
    loops = ((replace(loop, body=(replace(store, value=v),)),) for v in (value, orelse))
    return (ir.If(tuple(outside), *loops),)


def hoist_masks(loop: ir.For, prefix: str) -> ir.For:
    """Move guards of vector loads that are invariant in the inner loops into registers at the top of the loop."""
    inner = {x.var for x in ir.walk(loop.body) if isinstance(x, (ir.For, ir.Let))}
    masks: dict[Value, ir.Reg] = {}

    def f(v: Value) -> Value:
        if not isinstance(v, ir.FlatLoad) or not isinstance(v.guard, ir.Between):
            return v
        if (v.guard.low.symbols() | v.guard.high.symbols()) & inner:
            return v
        reg = masks.setdefault(v.guard, ir.Reg("bool", f"{prefix}{len(masks)}", v.lanes))
        return replace(v, guard=reg)

    body = ir.map_values(loop.body, f)
    return replace(loop, body=(*(ir.Def(r.name, g, r.lanes) for g, r in masks.items()), *body))


def split_guards(loop: ir.For) -> ir.Body:
    """Split a loop over vectors whose loads have one guard, a range of elements.

    The vectors that are fully inside it get a loop of their own, without guards, between those before and after it.
    """
    writes = (n for n in ir.walk(loop.body) if isinstance(n, (ir.Store, ir.Def, ir.Set)))
    values = (v for n in writes for v in ir.walk_value(n.value))
    guards = {v.guard for v in values if isinstance(v, ir.FlatLoad) and v.guard is not None}
    guard = guards.pop() if len(guards) == 1 else None
    if not isinstance(guard, ir.Between):
        return (loop,)
    first, last, width = loop.lo, loop.hi, guard.lanes
    inside = [-x for x in arguments(guard.low, "max")] + [x - width for x in arguments(guard.high, "min")]
    for slack in inside:  # at least 0 if no lane is outside
        step, rest = slack.split(loop.var)
        if loop.var in rest.symbols() or step not in (ZERO, V(width), V(-width)):
            return (loop,)
        if step == ZERO and (rest.constant is None or rest.constant < 0):
            return (loop,)
        if step == width:
            first = maximum(first, (-rest).ceildiv(width))
        if step == -width:
            last = minimum(last, rest // width + 1)
    first = minimum(first, loop.hi)
    last = maximum(first, last)
    whole = ir.map_values(loop.body, lambda v: replace(v, guard=None) if isinstance(v, ir.FlatLoad) else v)
    return replace(loop, hi=first), replace(loop, lo=first, hi=last, body=whole), replace(loop, lo=last)


def arguments(i: Index, kind: str) -> tuple[Index, ...]:
    """Return the arguments of a maximum or minimum, or the expression itself."""
    if len(i.terms) == 1:
        ((m, c),) = i.terms.items()
        if c == 1 and len(m) == 1 and isinstance(m[0], Atom) and m[0].kind == kind:
            return m[0].args
    return (i,)


def hoist_choice(loop: ir.For) -> ir.Body:
    """Move an invariant choice or invariant registers at the start of a loop before it."""
    n = loop.body[0] if len(loop.body) == 1 else None
    if isinstance(n, ir.If) and loop.var not in mentions(n)[0]:
        then, orelse = (hoist_choice(replace(loop, body=x)) if x else () for x in (n.then, n.orelse))
        return (replace(n, then=then, orelse=orelse),)
    fixed = tuple(takewhile(lambda x: isinstance(x, ir.Def) and _is_fixed(x, loop.var), loop.body))
    return (*fixed, replace(loop, body=loop.body[len(fixed) :]))


def _is_fixed(n: ir.Def, var: str) -> bool:
    read = any(isinstance(x, (ir.FlatLoad, ir.Reg, ir.Undefined)) for x in ir.walk_value(n.value))
    return not read and var not in mentions(n)[0]


def comparison(v: Value) -> ir.Compare | None:
    """Return a comparison of integers that are not read from tensors, or None."""
    relation = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}.get(v.name) if isinstance(v, Op) else None
    if relation is None or not isinstance(v, Op):
        return None
    left, right = map(integer, v.args)
    return None if left is None or right is None else ir.Compare(relation, left, right)


def hoist_divisions(body: ir.Body, prefix: str) -> ir.Body:
    """Compute every floor division once per iteration of the innermost loop that it depends on.

    The quotients get the names ``<prefix><n>``. Divisions that depend on no loop of the body stay in place.
    """
    names: dict[Atom, str] = {}

    def inside(b: ir.Body) -> ir.Body:
        return tuple(loop(n) if isinstance(n, ir.For) else n for n in b)

    def loop(n: ir.For) -> ir.Node:
        body, divisions = _extract_divisions(n.body, lambda i: _varying(i, n.var), prefix, names)
        return replace(n, body=_named_before(divisions, inside(body)))

    return inside(body)


def divide_before(body: ir.Body, prefix: str, sizes: Collection[str] = ()) -> ir.Body:
    """Compute floor divisions by sizes that depend on no loop of the body before it, with names as above.

    With ``sizes``, do so for divisions of these sizes alone, also by numbers. The C compiler would keep divisions
    inside the bounds checks, because a divisor might be 0.
    """

    def of_sizes(i: Index) -> Iterator[Atom]:
        return (a for x in sorted(sizes) for a in _varying(i, x) if _symbols(a) <= set(sizes))

    body, divisions = _extract_divisions(body, of_sizes if sizes else _by_sizes, prefix, {})
    return _named_before(divisions, body)


def hoist_rows(body: ir.Body, prefix: str) -> ir.Body:
    """Hoist invariant computations of rows out of a body that runs often.

    These are costly floor divisions that depend on no name that the body binds, and the parts of addresses and
    conditions in its loops' calls that contain them.
    """
    inner = {x.var for x in ir.walk(body) if isinstance(x, (ir.For, ir.Let))}
    body, divisions = _extract_divisions(body, costly_divisions, f"{prefix}q_", {})
    quotients, sums = {name for name, _ in divisions}, dict[Index, str]()

    def named(i: Index) -> Index:
        fixed = Index({m: c for m, c in i.terms.items() if m and inner.isdisjoint(Index({m: 1}).symbols())})
        if len(fixed.terms) < 2 or quotients.isdisjoint(fixed.symbols()):
            return i
        return i - fixed + sums.setdefault(fixed, f"{prefix}{len(sums)}")

    def in_loop(n: ir.Node) -> ir.Node:  # statements that run once do not need a name
        return replace(n, body=ir.rewrite(n.body, of_call)) if isinstance(n, ir.For) else n

    def of_call(n: ir.Node) -> ir.Node:
        return map_node_indices(n, named) if isinstance(n, ir.Call) else n

    body = ir.rewrite(body, in_loop)
    return _named_before([*divisions, *((name, i) for i, name in sums.items())], body)


def costly_divisions(i: Index) -> Iterator[Atom]:
    """Yield floor divisions by anything except powers of two, without nested ones."""
    for a in i.atoms():
        if isinstance(a, Atom):
            inner = [x for arg in a.args for x in costly_divisions(arg)]
            yield from inner
            n = a.args[1].constant if a.kind == "floordiv" else 1
            if (n is None or n & (n - 1)) and not inner:
                yield a


def _extract_divisions(
    body: ir.Body, atoms_of: Callable[[Index], Iterator[Atom]], prefix: str, names: dict[Atom, str]
) -> tuple[ir.Body, list[tuple[str, Index]]]:
    """Return the body with names for the divisions that depend on no name that it binds, and the values of the names.
    """
    inner = {x.var for x in ir.walk(body) if isinstance(x, (ir.For, ir.Let))}
    divisions: list[tuple[str, Index]] = []
    now = {i: i for x in ir.walk(body) for i in node_indices(x)}  # unrolled bodies repeat their expressions
    while True:
        a = next((a for i in now.values() for a in atoms_of(i) if not _symbols(a) & inner), None)
        if a is None:
            break
        name = names.setdefault(a, f"{prefix}{len(names)}")
        divisions.append((name, Index({(a,): 1})))
        now = {i: _put(x, a, name) for i, x in now.items()}
    return ir.rewrite(body, lambda n: map_node_indices(n, now.__getitem__)) if divisions else body, divisions


def _named_before(divisions: list[tuple[str, Index]], body: ir.Body) -> ir.Body:
    for name, value in reversed(divisions):
        body = (ir.Let(name, value, body),)
    return body


def _by_sizes(i: Index) -> Iterator[Atom]:
    """Yield floor divisions by anything except numbers, without nested ones."""
    for a in i.atoms():
        if isinstance(a, Atom):
            inner = [x for arg in a.args for x in _by_sizes(arg)]
            yield from inner
            if a.kind == "floordiv" and a.args[1].constant is None and not inner:
                yield a


def _varying(i: Index, var: str) -> Iterator[Atom]:
    """Yield floor divisions that depend on ``var`` and contain no others that do."""
    for a in i.atoms():
        if isinstance(a, Atom) and var in _symbols(a):
            inner = [x for arg in a.args for x in _varying(arg, var)]
            yield from inner
            if a.kind == "floordiv" and not inner:
                yield a


def _symbols(a: Atom) -> frozenset[str]:
    return frozenset(s for i in a.args for s in i.symbols())


def _put(i: Index, a: Atom, name: str) -> Index:
    return i.rebuild(lambda b: Index.of(name) if b == a else Index({(b,): 1}))
