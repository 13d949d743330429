"""Passes for the GPU: map loops to threads, combine across lanes, build the asynchronous pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from polydyn.codegen import ir
from polydyn.codegen.indices import substitute
from polydyn.codegen.passes.bind import bind, fold
from polydyn.codegen.passes.tiles import parallel_band, task_count, tasks
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import Value, const
from polydyn.schedules.index import ONE, Index, IndexLike, minimum

V = Index.of
WARP = 32
WORKER, ROUND = "worker", "round"
"""Symbols of a band that is distributed over workers: the number of a worker, and of a task of this worker."""


def assign(body: ir.Body, places: Mapping[str, IndexLike]) -> ir.Body:
    """Let the hardware run loops: each named loop's variable becomes the given expression (of block, warp, lane).

    A loop of one step keeps its first value: there is one unit.
    """

    def f(n: ir.Node) -> ir.Node | ir.Body:
        if isinstance(n, ir.For) and n.var in places:
            return substitute(n.body, {n.var: n.lo if n.hi - n.lo == ONE else n.lo + places[n.var]})
        return n

    return ir.rewrite(body, f)


def unrolled(body: ir.Body, kinds: Mapping[str, str]) -> ir.Body:
    """Declare loops ``unroll`` (over registers: completely) or ``unroll<n>``; their extents must be constants."""

    def f(n: ir.Node) -> ir.Node:
        if not (isinstance(n, ir.For) and n.var in kinds):
            return n
        if (n.hi - n.lo).constant is None:
            raise CodegenError(f"{n.var} in [{n.lo}, {n.hi}) has no constant extent to unroll")
        return replace(n, kind=kinds[n.var])

    return ir.rewrite(body, f)


def one_each(body: ir.Body, number: IndexLike = "bid") -> ir.Body:
    """Let every block (thread, warp) with the given ``number`` run one task of the coincident band."""
    return bind(tasks(body), {"begin": number, "end": Index.of(number) + 1})


def rounds(body: ir.Body, workers: IndexLike) -> ir.Body:
    """Distribute the coincident band cyclically over ``workers``: each gets every ``workers``-th task.

    Before: parallel t: body. After: for round < ceil((T - worker) / workers): body at t = worker + round * workers.
    """
    last = (task_count(body) - V(WORKER)).ceildiv(workers)
    return (ir.For(ROUND, V(0), last, one_each(body, V(WORKER) + V(ROUND) * workers)),)


def rasterise(body: ir.Body, rows: str, columns: str, height: int) -> ir.Body:
    """Order blocks so that they share operands: strips of ``height`` rows, column by column inside a strip.

    The two parallel loops, ``columns`` directly inside ``rows``, become one. Loops directly inside (blocks of a
    cluster) stay inside it; other nests do not change.
    """

    def f(n: ir.Node) -> ir.Node | ir.Body:
        band, body = parallel_band((n,))
        if [x.var for x in band[:2]] != [rows, columns]:
            return n
        outer, inner = band[:2]
        number, first, live = V("block"), V("strip"), V("strip_rows")
        within = number - first * inner.hi
        for var, value in (
            (columns, within // live), (rows, first + within % live), ("strip_rows", minimum(height, outer.hi - first)),
            ("strip", number // (inner.hi * height) * height),
        ):  # fmt: skip
            body = (ir.Let(var, value, body),)
        for x in reversed(band[2:]):
            body = (replace(x, body=body),)
        return ir.For("block", V(0), outer.hi * inner.hi, body, outer.kind)

    return ir.rewrite(body, f)


def spread(body: ir.Body, inner: str, threads: int, kind: str, thread: str = "tid") -> ir.Body:
    """Distribute a nest of two loops of constant extents over ``threads`` threads, with loop ``inner`` running fastest.

    ``thread`` counts them: ``tid`` in a block, ``lane`` in a warp. A thread gets a loop of the given ``kind``; a
    remainder is guarded.
    """
    (first,) = body
    nest = [first, *first.body] if isinstance(first, ir.For) else []
    pair = [n for n in nest if isinstance(n, ir.For)]
    if len(pair) != 2 or inner not in (pair[0].var, pair[1].var):
        raise CodegenError("a copy is not a nest of two loops")
    fast, slow = sorted(pair, key=lambda n: n.var != inner)
    trips = int(fast.hi) * int(slow.hi)
    leaf = pair[1].body

    def at(round_: IndexLike) -> ir.Body:
        linear = V(thread) + Index.of(round_) * threads
        return substitute(leaf, {fast.var: linear % fast.hi, slow.var: linear // fast.hi})

    whole, rest = divmod(trips, threads)
    out: ir.Body = (ir.For("u", V(0), V(whole), at("u"), kind),) if whole else ()
    if rest:
        out += (ir.If((ir.Compare("<", V(thread), V(rest)),), at(whole)),)
    return out


def one_of_each(body: ir.Body, mine: str, thread: str = "tid") -> ir.Body:
    """Distribute a nest of two loops over as many threads as loop ``mine`` has iterations, one per thread.

    The other loop is unrolled, so that all threads are at the same iteration of it.
    """
    loops = [n for n in ir.walk(body) if isinstance(n, ir.For)]
    if len(loops) != 2 or mine not in (n.var for n in loops):
        raise CodegenError("a copy is not a nest of two loops")
    (other,) = (n for n in loops if n.var != mine)
    leaf = substitute(loops[1].body, {mine: V(thread), other.var: V("u")})
    return (ir.For("u", V(0), other.hi, leaf, "unroll"),)


def map_to_threads(body: ir.Body, kind: str) -> ir.Body:
    """Map the innermost possible loop of a nest to threads (``kind``, of ``printers.cuda.THREAD_MAPPINGS``).

    A loop may be mapped if no two of its iterations write the same element, except for reductions into a register,
    which the caller combines. Other loops stay serial.
    """
    nest, leaf = [], body
    while len(leaf) == 1 and isinstance(leaf[0], ir.For):
        nest.append(leaf[0])
        leaf = leaf[0].body
    allowed = [x.var for x in nest if all(_independent(n, x.var) for n in ir.walk(leaf))]
    if not allowed:
        raise CodegenError(f"no loop of {[x.var for x in nest]} can be mapped to threads")
    return ir.rewrite(body, lambda n: replace(n, kind=kind) if isinstance(n, ir.For) and n.var == allowed[-1] else n)


def _independent(n: ir.Node, var: str) -> bool:
    if isinstance(n, ir.Store):
        return n.reduce is None or var in n.address.symbols()
    return not isinstance(n, ir.Set) or n.reduce is not None


def combine_lanes(reg: str, value: Value, reduce: str, lanes: int = WARP) -> ir.Body:
    """Combine the registers of ``lanes`` adjacent lanes; each of these lanes gets the result."""
    steps = [o for o in (16, 8, 4, 2, 1) if o < lanes]
    return tuple(
        ir.Set(reg, ir.Apply(value.dtype, "pd_shfl_xor", (value, const(o, "int32"))), 1, reduce) for o in steps
    )


def combine_block(reg: str, value: Value, reduce: str, warps: int, partial: str) -> ir.Body:
    """Combine registers over the block; every thread gets the result.

    ``partial``: a shared array with an element per warp.
    """
    first = combine_lanes(reg, value, reduce)
    keep = ir.If((ir.Compare("==", V("lane"), V(0)),), (ir.Store(partial, V("warp"), value),))
    read = tuple(ir.Set(reg, ir.FlatLoad(value.dtype, partial, V(w)), 1, reduce if w else None) for w in range(warps))
    return (*first, keep, ir.Call("pd_syncthreads"), *read, ir.Call("pd_syncthreads"))


def combine_columns(reg: str, value: Value, reduce: str, warps: int, partial: str) -> ir.Body:
    """Combine the same lane of all warps; each lane gets the result. ``partial``: shared, one element per thread."""
    keep = ir.Store(partial, V("tid"), value)
    every = (V("lane") + WARP * w for w in range(warps))
    read = tuple(
        ir.Set(reg, ir.FlatLoad(value.dtype, partial, at), 1, reduce if w else None) for w, at in enumerate(every)
    )
    return (keep, ir.Call("pd_syncthreads"), *read, ir.Call("pd_syncthreads"))


def pipeline(body: ir.Body, var: str, stages: int, split: Callable[[ir.Body], tuple[ir.Body, ir.Body]]) -> ir.Body:
    """Multi-buffering with asynchronous copies (TSCompiler 5.4).

    ``for var: copy(var); use(var)`` becomes: the copies of the first ``stages - 1`` iterations; then iteration ``var``
    waits for its own copies, has a barrier, issues the copies of iteration ``var + stages - 1``, and uses its slot.
    ``split`` separates the loop's body into (copies, uses). Addresses select the slots (``var % stages``).
    """
    wait = ir.Call(f"pd_cp_async_wait<{stages - 2}>")
    commit = ir.Call("pd_cp_async_commit")

    def f(n: ir.Node) -> ir.Node | ir.Body:
        if not (isinstance(n, ir.For) and n.var == var):
            return n
        copies, uses = split(n.body)

        def ahead(at: Index) -> ir.Body:
            return (ir.If((ir.Compare("<", at, n.hi),), substitute(copies, {var: at})), commit)

        before = tuple(x for s in range(stages - 1) for x in ahead(n.lo + s))
        now = (wait, ir.Call("pd_syncthreads"), *ahead(V(var) + (stages - 1)), *uses)
        return (*before, replace(n, body=now), ir.Call("pd_cp_async_wait<0>"))

    return fold(ir.rewrite(body, f))


def reductions(body: ir.Body) -> dict[str, ir.Set]:
    """Return the registers that a nest accumulates into -> one of their updates."""
    return {n.reg: n for n in ir.walk(body) if isinstance(n, ir.Set) and n.reduce is not None}


def register(n: ir.Set) -> ir.Reg:
    """Return the register that an update writes."""
    return ir.Reg(n.value.dtype, n.reg)
