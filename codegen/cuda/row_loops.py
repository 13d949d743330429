"""Parts of bodies of CUDA kernels of rows: thread-mapped loops, loads in flight, rows in shared memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from polydyn.codegen import ir
from polydyn.codegen.cuda.work import SERIAL_LOADS, UNROLLED_LOADS
from polydyn.codegen.indices import substitute
from polydyn.codegen.passes.threads import (
    WARP,
)
from polydyn.codegen.printers.cuda import LANES
from polydyn.codegen.printers.cuda_values import HALF
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import Load, Value, transform
from polydyn.schedules.expr import substitute as substitute_in
from polydyn.schedules.index import ZERO, Index
from polydyn.schedules.model import Group
from polydyn.schedules.tree.names import MarkName

V = Index.of
THREADS = 256
LOADS_BEFORE_STORES = 4
"""Vectors that a lane loads before it stores any. More would not fit the registers at this occupancy."""
STARTS = {"lanes": (V("lane") % LANES, LANES), "warp": (V("lane"), WARP), "block": (V("tid"), THREADS)}
"""Mapping -> the first iteration of a thread in a thread-mapped loop, and the distance to its next one."""


def on_rows(body: ir.Body, f: Callable[[ir.Body], ir.Body]) -> ir.Body:
    """Transform the body under the row mark; a later pass consumes the mark."""
    return ir.rewrite(
        body, lambda n: replace(n, body=f(n.body)) if isinstance(n, ir.Mark) and n.name == MarkName.ROW else n
    )


def unroll_mapped(n: ir.Node, kind: str) -> ir.Node:
    """Unroll a thread-mapped loop of a few iterations: the compiler then reads a row once and keeps it in registers."""
    if not (isinstance(n, ir.For) and n.kind == kind and n.hi.constant is not None):
        return n
    first, step = STARTS[kind]
    trips, at = -(-int(n.hi) // step), first + V(n.var) * step
    if trips > UNROLLED_LOADS:
        return n
    body = substitute(n.body, {n.var: at})
    return replace(
        n, hi=V(trips), kind="unroll", body=(ir.If((ir.Compare("<", at, n.hi),), body),) if int(n.hi) % step else body
    )


def loads_first(n: ir.Node, kind: str) -> ir.Node:
    """Group the loads of several iterations of a thread-mapped loop with unknown trip count before its stores.

    Compilers do not move a load before a store, because they may alias.
    Before: for i: in = x[i]; y[i] = f(in). After: for i by 4: in[u] = x[i + u]; y[i + u] = f(in[u]), for each u.
    """
    if not (isinstance(n, ir.For) and n.kind == kind and n.hi.constant is None and n.lo == ZERO):
        return n
    arrays, body = list[ir.Alloc](), n.body
    while len(body) == 1 and isinstance(body[0], ir.Alloc):
        arrays.append(body[0])
        body = body[0].body
    loads = tuple(x for x in body if _is_call(x, "pd_ldg_wide"))
    trips, stores = LOADS_BEFORE_STORES // max(1, len(loads)), [x for x in body if _is_call(x, "pd_stg_wide")]
    if not loads or trips < 2 or not stores or {_at(x, 1) for x in loads} & {_at(x, 0) for x in stores}:
        return n  # a row that is read and written keeps its order
    loaded = {_at(x, 0) for x in loads}
    first, step = STARTS[kind]

    def trip(part: ir.Body, u: int) -> ir.Body:
        at = first + (V(n.var) * trips + u) * step
        moved = substitute(part, {n.var: at})
        for x in arrays:
            moved = moved_by(moved, x.buffer, x.size * u) if x.buffer in loaded else moved
        return (ir.If((ir.Compare("<", at, n.hi),), moved),)

    rest = tuple(x for x in body if x not in loads)
    out = tuple(x for part in (loads, rest) for u in range(trips) for x in trip(part, u))
    for x in reversed(arrays):
        out = (replace(x, size=x.size * (trips if x.buffer in loaded else 1), body=out),)
    return replace(n, hi=n.hi.ceildiv(step * trips), kind="serial", body=out)


def _is_call(n: ir.Node, function: str) -> bool:
    return isinstance(n, ir.Call) and n.function.startswith(function)


def _at(n: ir.Node, argument: int) -> str:
    """Return the buffer of a pointer argument of a vector load or store (0: destination, 1: source)."""
    x = n.args[argument] if isinstance(n, ir.Call) else None
    return x.buffer if isinstance(x, ir.Pointer) else ""


def in_flight(n: ir.Node) -> ir.Node:
    """Unroll a thread's loop with unknown trip count, to have several loads in flight.

    The loop must be innermost, except for loops over lanes of a vector.
    """
    inside = (
        [x for x in ir.walk(n.body) if isinstance(x, ir.For) and x.kind != "unroll"] if isinstance(n, ir.For) else []
    )
    counted = isinstance(n, ir.For) and n.hi.constant is None and not inside
    return replace(n, kind=f"unroll{SERIAL_LOADS}") if counted and isinstance(n, ir.For) else n


def local_type(dtype: str) -> str:
    """Return the type inside a kernel: 16-bit floats are kept as float."""
    return "float32" if dtype in HALF else dtype


def partials(n: ir.Node) -> list[Value]:
    """Return the value of a store to the partial results of warps; an empty list for another node."""
    return [n.value] if isinstance(n, ir.Store) and n.buffer.startswith("partial_") else []


def moved_by(body: ir.Body, buffer: str, by: Index) -> ir.Body:
    """Add ``by`` to every address of a buffer."""

    def value(v: Value) -> Value:
        return (
            replace(v, address=v.address + by) if isinstance(v, (ir.FlatLoad, ir.Pointer)) and v.buffer == buffer else v
        )

    def f(n: ir.Node) -> ir.Node:
        if isinstance(n, (ir.Store, ir.Def, ir.Set)):
            n = replace(n, value=ir.map_value(n.value, value))
        if isinstance(n, ir.Store) and n.buffer == buffer:
            n = replace(n, address=n.address + by)
        return replace(n, args=tuple(ir.map_value(a, value) for a in n.args)) if isinstance(n, ir.Call) else n

    return ir.rewrite(body, f)


def inlined(group: Group, array: str) -> Group:
    """Return the group without a local: its only writer's value replaces every read."""
    (writer,) = (s for s in group.statements if s.array == array)
    names = [str(i) for i in writer.index]
    if any(not i.is_symbol for i in writer.index) or set(names) != set(writer.iterators):
        raise CodegenError(f"{array} cannot be recomputed: it is written at {writer.index}")

    def f(v: Value) -> Value:
        if not (isinstance(v, Load) and v.buffer == array):
            return v
        return substitute_in(writer.value, dict(zip(names, v.index, strict=True)))

    others = [s for s in group.statements if s is not writer]
    arrays = {n: a for n, a in group.arrays.items() if n != array}
    return replace(group, arrays=arrays, statements=tuple(replace(s, value=transform(s.value, f)) for s in others))
