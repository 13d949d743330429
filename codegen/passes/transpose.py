"""Turn strided vector loads into transposes in registers: blocks of W rows of W elements, accessed in whole rows.

A load whose lanes are ``stride`` elements apart, in a loop along which the memory is dense, touches W cache lines for
every W elements. W iterations of that loop need the W x W block between them, which the leaf ``pd_transpose_f32`` reads
by rows. Both passes look only at strides.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from polydyn.codegen import ir
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.indices import substitute
from polydyn.schedules.expr import FromIndex, Op, Value
from polydyn.schedules.index import ONE, ZERO, Index, minimum

LEAF = "pd_transpose_f32"
ROWS_LEAF = "pd_transpose_rows_f32"


def has_transposes(target: CpuTarget) -> bool:
    """Whether the leaf exists for the target's vectors."""
    return target.width in (4, 8, 16)


def dense_along(v: Value, var: str, width: int) -> bool:
    """Whether ``v`` is a strided float32 vector load of all lanes that is dense along the loop ``var``."""
    if not isinstance(v, ir.FlatLoad) or v.dtype != "float32" or v.lanes != width or v.guard or v.stride in (ZERO, ONE):
        return False
    along, rest = v.address.split(var)
    elsewhere = {var} & (rest.symbols() | v.stride.symbols() | (v.mask.symbols() if v.mask is not None else set()))
    return along == ONE and not elsewhere


def by_blocks(body: ir.Body, var: str, width: int) -> ir.Body:
    """Split loops ``var`` into blocks of ``width`` iterations; the last block may be shorter."""

    def f(n: ir.Node) -> ir.Node:
        if not (isinstance(n, ir.For) and n.var == var and n.lo == ZERO):
            return n
        first = Index.of(f"{var}_block") * width
        inner = ir.For(var, ZERO, minimum(width, n.hi - first), substitute(n.body, {var: first + var}), n.kind)
        return ir.For(f"{var}_block", ZERO, n.hi.ceildiv(width), (inner,))

    return ir.rewrite(body, f)


def transpose_loads(body: ir.Body, var: str, width: int) -> ir.Body:
    """Let loops ``var`` of at most ``width`` iterations read such loads from transposed blocks on the stack.

    Before: ``for u: ... x[s*lane + u] ...``; after: ``block = transpose(x); for u: ... block[W*u + lane] ...``. A loop
    that only copies such a load is transposed directly to its destination: ``y[p*u ...] = transpose(x)``.
    """

    def f(n: ir.Node) -> ir.Node | ir.Body:
        if not (isinstance(n, ir.For) and n.var == var):
            return n
        if (copy := _copied_rows(n, width)) is not None:
            return copy
        stored = {x.buffer for x in ir.walk(n.body) if isinstance(x, ir.Store)}
        candidates = [v for v in _unguarded(n.body) if dense_along(v, var, width) and v.buffer not in stored]
        out: ir.Body = (n,)
        for k, v in enumerate(dict.fromkeys(candidates)):
            name = f"block{k}"
            here = {v: ir.FlatLoad(v.dtype, name, Index.of(var) * width, width)}
            replaced = ir.map_values(out, partial(_swap, here))
            call = _call(ir.Pointer(v.dtype, name, ZERO), v, n.lo, n.hi - n.lo, width, var)
            out = (ir.Alloc(name, v.dtype, Index.of(width * width), "stack", (call, *replaced)),)
        return out

    return ir.rewrite(body, f)


def transpose_copies(body: ir.Body, var: str, width: int) -> ir.Body:
    """Turn loops ``var`` that only copy such a load to rows of W elements into loops over transposed blocks.

    Before: ``for k: panel[W*k + lane] = x[s*lane + k]``; after: ``for k: transpose(panel[W*W*k ...], x[W*k ...])``.
    """

    def f(n: ir.Node) -> ir.Node | ir.Body:
        if not (isinstance(n, ir.For) and n.var == var and n.lo == ZERO and len(n.body) == 1):
            return n
        store = n.body[0]
        if not isinstance(store, ir.Store) or store.reduce or store.mask is not None or store.stride != ONE:
            return n
        along, at = store.address.split(var)
        v = store.value
        if along != width or var in at.symbols() or not dense_along(v, var, width):
            return n
        assert isinstance(v, ir.FlatLoad)
        first = Index.of(var) * width
        target = ir.Pointer(v.dtype, store.buffer, at + first * width)
        call = _call(target, v, first, minimum(width, n.hi - first), width, var)
        return ir.For(var, ZERO, n.hi.ceildiv(width), (call,))

    return ir.rewrite(body, f)


def _copied_rows(n: ir.For, width: int) -> ir.Call | None:
    """Return the call that replaces a loop that only copies such a load to rows of stride 1, or None."""
    store = n.body[0] if len(n.body) == 1 else None
    if not isinstance(store, ir.Store) or store.reduce or store.stride != ONE or n.lo != ZERO:
        return None
    v, (pitch, at) = store.value, store.address.split(n.var)
    if n.var in pitch.symbols() | at.symbols() or not dense_along(v, n.var, width):
        return None
    assert isinstance(v, ir.FlatLoad)
    if store.mask != v.mask or store.buffer == v.buffer:
        return None
    call = _call(ir.Pointer(v.dtype, store.buffer, at), v, ZERO, n.hi, width, n.var)
    more = (FromIndex("int64", x) for x in (pitch, ZERO if store.stream is None else store.stream))
    return ir.Call(ROWS_LEAF, (*call.args, *more))


def _swap(table: Mapping[ir.FlatLoad, Value], v: Value) -> Value:
    return table.get(v, v) if isinstance(v, ir.FlatLoad) else v


def _call(to: ir.Pointer, v: ir.FlatLoad, first: Index, columns: Index, width: int, var: str) -> ir.Call:
    """Return the call for ``to[W*c + l] = v at var = first + c, lane l``, for all live lanes and columns."""
    source = ir.Pointer(v.dtype, v.buffer, v.address.subs({var: first}))
    rows = Index.of(width) if v.mask is None else v.mask
    return ir.Call(LEAF, (to, source, *(FromIndex("int64", x) for x in (v.stride, rows, columns))))


def _unguarded(body: ir.Body) -> list[ir.FlatLoad]:
    """Return the loads that every iteration executes, except those of statements with guarded loads."""
    values = [n.value for n in body if isinstance(n, (ir.Store, ir.Def, ir.Set))]
    plain = [v for v in values if not any(isinstance(x, Op) and x.name == "where" for x in ir.walk_value(v))]
    return [x for v in plain for x in ir.walk_value(v) if isinstance(x, ir.FlatLoad)]
