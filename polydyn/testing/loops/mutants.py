"""Plant one mistake in the loop IR of a kernel: mutants, which the interpreter must tell from the original.

A mistake is a change of one node or of one value: a bound, an address, a mask, a condition, an operation, a missing
barrier, two neighbours in the other order. Not planted are changes that have no effect, whatever the inputs:

- nodes without an effect on results (prefetches, hints of caches and registers) are left alone;
- a condition that asks if a whole number of vectors leaves a rest is not dropped: masks then leave out all lanes;
- neighbours that do not depend on each other stay in their order (``_depend``), like sums of the same kind;
- a reduction into a register that holds its identity element does not become an assignment (``_first_sums``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from operator import is_

from polydyn.codegen import ir
from polydyn.schedules.expr import FLOATS, Const, FromIndex, Op, Value

HINTS = (
    "pd_drain", "pd_in_memory", "pd_written_soon", "pd_prefetch", "pd_fetch", "pd_grid_begin", "pd_reg_",
    "pd_tma_fetch", "pd_wgmma_keep", "pd_amx_end",
)  # fmt: skip
"""Prefixes of leaves without an effect on results."""
NEIGHBOURS: Mapping[str, str] = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
OTHER_OP: Mapping[str, str] = {
    "add": "sub", "sub": "add", "mul": "add", "div": "mul", "max": "min", "min": "max", "lt": "le", "le": "lt",
    "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq", "and": "or", "or": "and",
}  # fmt: skip
OTHER_REDUCTION: Mapping[str, str] = {"sum": "max", "max": "min", "min": "max", "prod": "sum"}
IDENTITY: Mapping[str, float] = {"sum": 0.0, "max": -math.inf, "min": math.inf, "prod": 1.0}
"""The value that a reduction begins with."""
STREAM = "stream"
"""Name of the number that says whether stores go around the caches."""
Variants = Iterator[tuple[str, "ir.Node | ir.Body | Value"]]


@dataclass(frozen=True)
class Mutant:
    """A body with one mistake. ``text`` says which."""

    text: str
    body: ir.Body


def mutants(body: ir.Body, count: int, seed: int, executed: Collection[Hashable]) -> list[Mutant]:
    """Return at most ``count`` different mutants of a body, drawn at random.

    ``executed``: identities of the nodes that some case executes; the others are left alone.
    """
    places = [(k, j) for k, many in enumerate(_counts(body, executed)) for j in range(many)]
    chosen = random.Random(seed).sample(places, min(count, len(places)))
    return [_mutant(body, k, j) for k, j in chosen]


def _counts(body: ir.Body, executed: Collection[Hashable]) -> list[int]:
    """Return the number of mutations at every place, in the order in which ``_visit`` comes to them."""
    found: list[int] = []

    def count(n: ir.Node, variants: Callable[[], Variants]) -> None:
        found.append(sum(1 for _ in variants()) if id(n) in executed else 0)

    _visit(body, count)
    return found


def _mutant(body: ir.Body, at: int, which: int) -> Mutant:
    seen, text = 0, ""

    def change(n: ir.Node, variants: Callable[[], Variants]) -> ir.Node | ir.Body | Value | None:
        nonlocal seen, text
        seen += 1
        if seen - 1 != at:
            return None
        text, new = list(variants())[which]
        return new

    changed = _visit(body, change)
    return Mutant(text, changed)


Change = Callable[["ir.Node", Callable[[], Variants]], "ir.Node | ir.Body | Value | None"]
"""Function of a node and of the mutations at a place in it, which returns what takes its place, None: it stays."""


def _visit(body: ir.Body, change: Change) -> ir.Body:
    """Call ``change`` for every node, for every value of a node, and for the order of every block."""

    def node(n: ir.Node) -> ir.Node | ir.Body:
        def value(v: Value) -> Value:
            new = change(n, lambda: _of_value(v))
            return v if new is None else new  # type: ignore[return-value]

        made = n
        if isinstance(n, (ir.Store, ir.Def, ir.Set)):
            whole = ir.map_value(n.value, value)
            made = n if whole is n.value else replace(n, value=whole)
        elif isinstance(n, ir.Call) and not n.function.startswith(HINTS):
            args = tuple(ir.map_value(a, value) for a in n.args)
            made = n if all(map(is_, args, n.args)) else replace(n, args=args)
        new = change(n, lambda: _of_node(made, id(n) in firsts))
        return made if new is None else new  # type: ignore[return-value]

    firsts = set(_first_sums(body))
    local = {n.buffer for n in ir.walk(body) if isinstance(n, ir.Alloc)}

    def block(b: ir.Body) -> ir.Body:
        new = change(b[0], lambda: _order(b, local)) if len(b) > 1 else None
        return b if new is None else new  # type: ignore[return-value]

    def nested(n: ir.Node) -> ir.Node | ir.Body:
        done = node(n)
        if not isinstance(done, (ir.For, ir.Let)):
            return done
        inner = block(done.body)
        return done if inner is done.body else replace(done, body=inner)

    return block(ir.rewrite(body, nested))


def _order(b: ir.Body, local: Collection[str]) -> Variants:
    """Swap two neighbours if one needs the other. ``local``: buffers that the kernel allocates."""
    for k, (x, y) in enumerate(pairwise(b)):
        if _depend(x, y, local):
            yield f"{_name(x)} and {_name(y)} in the other order", (*b[:k], y, x, *b[k + 2 :])


def _depend(x: ir.Node, y: ir.Node, local: Collection[str]) -> bool:
    """Whether two nodes access one register or buffer, and one of them writes it.

    Two nodes that only store into a buffer in memory commute, unless a store combines or replaces: no element is stored
    twice without being read in between (``Store.again``), so they store different elements. The interpreter checks it.
    """
    if (kinds := _accumulates(x)) and kinds == _accumulates(y):  # sums of the same kind in any order
        return False
    (read, written), (later, changed) = _accesses(x), _accesses(y)
    both = {n for n in written & changed if n in local or not (_stores_once(x, n) and _stores_once(y, n))}
    return bool(both or written & later or read & changed)


def _stores_once(n: ir.Node, buffer: str) -> bool:
    """Whether all writes of a buffer in a node are stores that neither combine nor replace."""
    stores = [s for s in ir.walk((n,)) if isinstance(s, ir.Store) and s.buffer == buffer]
    calls = [c for c in ir.walk((n,)) if isinstance(c, ir.Call) and not c.function.startswith(HINTS)]
    return bool(stores) and not calls and not any(s.reduce or s.again for s in stores)


def _accumulates(n: ir.Node) -> set[str]:
    """Return the reductions of a node that only accumulates into registers, else an empty set."""
    nodes = [x for x in ir.walk((n,)) if not isinstance(x, (ir.For, ir.If, ir.Let))]
    kinds = {x.reduce if isinstance(x, ir.Set) else None for x in nodes}
    return set() if None in kinds else {k for k in kinds if k}


def _accesses(n: ir.Node) -> tuple[set[str], set[str]]:
    """Return the names of the registers and buffers that a node reads, and those that it writes."""
    read, written = set[str](), set[str]()
    for x in ir.walk((n,)):
        if isinstance(x, ir.Call) and not x.function.startswith(HINTS):
            names = {a.buffer for a in x.args if isinstance(a, (ir.Pointer, ir.Tile))}
            read |= names
            written |= names
        if isinstance(x, (ir.Store, ir.Def, ir.Set)):
            name = x.buffer if isinstance(x, ir.Store) else x.reg
            written.add(name)
            read |= {name} if isinstance(x, (ir.Store, ir.Set)) and x.reduce else set()
            parts = list(ir.walk_value(x.value))
            read |= {v.name for v in parts if isinstance(v, ir.Reg)}
            read |= {v.buffer for v in parts if isinstance(v, (ir.FlatLoad, ir.Tile))}
    return read, written


def _name(n: ir.Node) -> str:
    text = {ir.For: "var", ir.Let: "var", ir.Store: "buffer", ir.Def: "reg", ir.Set: "reg", ir.Call: "function"}.get(
        type(n), ""
    )
    return f"{type(n).__name__} {getattr(n, text) if text else ''}".strip()


def _first_sums(body: ir.Body) -> Iterator[int]:
    """Yield the identities of reductions into a register that holds the identity element of the reduction.

    An assignment in their place computes the same, because ``identity combined with x`` is ``x``.
    """
    fresh: dict[str, float] = {}
    for n in body:
        if isinstance(n, ir.Set) and n.reduce and n.reg in fresh and fresh[n.reg] == IDENTITY[n.reduce]:
            yield id(n)
        for x in ir.walk((n,)):
            if isinstance(x, (ir.Def, ir.Set)):
                fresh.pop(x.reg, None)
        if isinstance(n, (ir.Def, ir.Set)) and isinstance(n.value, Const) and not (isinstance(n, ir.Set) and n.reduce):
            fresh[n.reg] = float(n.value.value)
        for b in ir.bodies(n):
            yield from _first_sums(b)


def _of_node(n: ir.Node, first: bool = False) -> Variants:
    name = _name(n)
    if isinstance(n, ir.For):
        yield f"{name} ends one later", replace(n, hi=n.hi + 1)
        yield f"{name} ends one earlier", replace(n, hi=n.hi - 1)
        yield f"{name} begins one later", replace(n, lo=n.lo + 1)
    elif isinstance(n, ir.Let) and n.var != STREAM:
        yield f"{name} is one more", replace(n, value=n.value + 1)
    elif isinstance(n, ir.If) and not _hints((*n.then, *n.orelse)):
        yield f"{_condition(n)} is taken the other way", replace(n, then=n.orelse, orelse=n.then)
        if all(map(_of_tail, n.cond)):  # without work to do, masks leave out all lanes
            return
        yield f"{_condition(n)} is not asked", (*n.then,)
        for k, c in enumerate(n.cond):
            other = replace(c, relation=NEIGHBOURS[c.relation])
            yield f"{c.left} {other.relation} {c.right}", replace(n, cond=(*n.cond[:k], other, *n.cond[k + 1 :]))
    elif isinstance(n, ir.Switch):
        for k in range(len(n.cases) - 1):
            (a, x), (b, y) = n.cases[k : k + 2]
            yield (
                f"cases {a} and {b} are exchanged",
                replace(n, cases=(*n.cases[:k], (a, y), (b, x), *n.cases[k + 2 :])),
            )
    elif isinstance(n, ir.Store):
        yield from _of_store(n, name)
    elif isinstance(n, ir.Set):
        yield f"{name} is missing", ()
        if n.reduce:
            if not first:
                yield f"{name} replaces", replace(n, reduce=None)
            yield f"{name} combines by {OTHER_REDUCTION[n.reduce]}", replace(n, reduce=OTHER_REDUCTION[n.reduce])
    elif isinstance(n, ir.Call) and not n.function.startswith(HINTS):
        yield f"{name} is missing", ()


def _of_tail(c: ir.Compare) -> bool:
    """Whether a condition asks if a whole number of vectors leaves a rest."""
    return c.relation == ">" and any(f"({c.left} // " in str(i) for i in (c.right,))


def _hints(body: ir.Body) -> bool:
    """Whether a body has no effect on results."""
    return all(isinstance(n, ir.Call) and n.function.startswith(HINTS) for n in body)


def _condition(n: ir.If) -> str:
    return " and ".join(f"{c.left} {c.relation} {c.right}" for c in n.cond)


def _of_store(n: ir.Store, name: str) -> Variants:
    yield f"{name} is missing", ()
    yield f"{name} stores one further", replace(n, address=n.address + 1)
    if n.reduce:
        yield f"{name} replaces", replace(n, reduce=None)
    if n.mask is not None:
        yield f"{name} stores all lanes", replace(n, mask=None)
        yield f"{name} stores a lane less", replace(n, mask=n.mask - 1)
    if n.lanes > 1 and n.stride != 1:
        yield f"{name} stores one apart", replace(n, stride=n.stride + 1)


def _of_value(v: Value) -> Variants:
    if isinstance(v, ir.FlatLoad):
        yield f"{v.buffer} is read one further", replace(v, address=v.address + 1)
        yield f"{v.buffer} is read one before", replace(v, address=v.address - 1)
        if v.mask is not None:
            yield f"{v.buffer}: all lanes are read", replace(v, mask=None)
            yield f"{v.buffer}: a lane less is read", replace(v, mask=v.mask - 1)
        if v.guard is not None:
            yield f"{v.buffer} is read unguarded", replace(v, guard=None)
        if v.lanes > 1:
            yield f"{v.buffer} is read one apart", replace(v, stride=v.stride + 1)
    elif isinstance(v, ir.Pointer):
        yield f"the pointer to {v.buffer} is one further", replace(v, address=v.address + 1)
    elif isinstance(v, ir.Tile):
        yield f"the tile {v.buffer} is met a row below", replace(v, row=v.row + 1)
        yield f"the tile {v.buffer} is met a chunk to the right", replace(v, column=v.column + v.chunk)
    elif isinstance(v, Op):
        yield from _of_op(v)
    elif isinstance(v, Const):
        if v.dtype == "bool":
            yield f"{v.value} is {not v.value}", replace(v, value=not v.value)
        elif v.value == v.value and abs(v.value) != float("inf"):
            new = v.value + 1.0 if v.dtype in FLOATS else 2 * v.value + 1
            yield f"{v.value} is {new}", replace(v, value=new)
    elif isinstance(v, FromIndex):
        yield f"{v.index} is one more", replace(v, index=v.index + 1)
    elif isinstance(v, ir.Blend):
        yield "a lane more is new", replace(v, count=v.count + 1)
        yield "new and old are exchanged", replace(v, new=v.old, old=v.new)
    elif isinstance(v, ir.Between):
        yield "lanes begin one later", replace(v, low=v.low + 1)
        yield "lanes end one later", replace(v, high=v.high + 1)
    elif isinstance(v, ir.Ramp):
        yield "a ramp begins one higher", replace(v, start=v.start + 1)
    elif isinstance(v, ir.Horizontal):
        yield (
            f"lanes are combined by {OTHER_REDUCTION[v.reduction]}",
            replace(v, reduction=OTHER_REDUCTION[v.reduction]),
        )
    elif isinstance(v, ir.Apply) and v.function != "vkeep_f32" and v.args:
        yield f"{v.function} is left out", v.args[0]


def _of_op(v: Op) -> Variants:
    if v.name in OTHER_OP:
        yield f"{v.name} is {OTHER_OP[v.name]}", replace(v, name=OTHER_OP[v.name])
    if v.name in ("sub", "div", "pow") and v.args[0] != v.args[1]:
        yield f"the sides of {v.name} are exchanged", replace(v, args=v.args[::-1])
    if v.name in ("where", "select") and v.args[1] != v.args[2]:
        yield f"the branches of {v.name} are exchanged", replace(v, args=(v.args[0], v.args[2], v.args[1]))
    if len(v.args) == 1 and v.args[0].dtype == v.dtype:
        yield f"{v.name} is left out", v.args[0]
