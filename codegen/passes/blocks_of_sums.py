"""Sums in blocks: the rounding error of a long sum grows with the length of its chain, so a long chain begins again.

Mean errors of x[R, K] @ w[K, 256] in one chain, over those of chains of 256 steps: 1.6 for K = 768, 3.0 for K = 3072
(docs/notes/0012-cpu-kernels.md). The total of the blocks waits in memory, because the tile needs all registers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

from polydyn.codegen import ir
from polydyn.schedules.expr import neutral
from polydyn.schedules.index import ZERO, Index, minimum

STEPS = 128
"""Steps of a chain, as in convolutions of ONNX Runtime; its products have 256. Each block adds one load, one addition
and one store to every sum."""
IN_MEMORY = "pd_in_memory_f32"
"""The leaf that keeps the totals in memory. gcc would move them to registers and spill sums inside the loop (8 %)."""
V = Index.of


def sum_in_blocks(body: ir.Body, total: str, inner: int = 1, began: bool = False, steps: int = STEPS) -> ir.Body:
    """Let reductions of more than ``steps`` steps add blocks of so many steps to a total.

    Before: ``for k: s += x[k]``. After: ``for block: total = s; s = 0; for k in block: s += x[k]; s += total``.

    ``body``: a tile whose float32 sums are registers. ``total``: the name of the memory of the totals. ``inner``: most
    steps of one trip whose inner loops have no constant length. ``began``: the sums hold earlier steps when the body
    begins, so that a short reduction is a block too.
    """
    out: list[ir.Node] = []
    for n in body:
        if not isinstance(n, ir.For):
            out.append(ir.with_bodies(n, tuple(sum_in_blocks(b, total, inner, began, steps) for b in ir.bodies(n))))
            continue
        sums, longest = _sums(n), _most_steps(n.body) or inner
        trips = (n.hi - n.lo).constant
        if not sums or n.kind == "vector":
            out.append(n)
        elif longest > steps:
            out.append(replace(n, body=sum_in_blocks(n.body, total, inner, True, steps)))
        elif trips is not None and trips * longest <= steps and not began:
            out.append(n)
        else:
            out.append(_blocks(n, sums, total, max(1, steps // longest)))
    return tuple(out)


def _sums(loop: ir.For) -> dict[str, ir.Set]:
    """Return the float32 sums that a loop adds to and does not declare, in their order."""
    own = {x.reg for x in ir.walk(loop.body) if isinstance(x, ir.Def)}
    sets = (x for x in ir.walk(loop.body) if isinstance(x, ir.Set) and x.reduce == "sum" and x.reg not in own)
    return {x.reg: x for x in sets if x.value.dtype == "float32"}


def _most_steps(body: ir.Body) -> int | None:
    """Return the number of steps of a body, that of its longest loop; None if a loop's length is not a number."""
    lengths = list(_lengths(body))
    return None if None in lengths else max((x for x in lengths if x is not None), default=1)


def _lengths(body: ir.Body) -> Iterator[int | None]:
    for n in body:
        if isinstance(n, ir.For) and not any(isinstance(x, ir.Set) for x in ir.walk(n.body)):
            continue  # it prefetches
        if isinstance(n, ir.For):
            trips, inner = (n.hi - n.lo).constant, _most_steps(n.body)
            yield None if trips is None or inner is None else trips * inner
        else:
            yield from (_most_steps(b) for b in ir.bodies(n))


def _blocks(loop: ir.For, sums: dict[str, ir.Set], total: str, trips: int) -> ir.Node:
    """Return a loop in blocks of ``trips`` trips."""
    block = f"{loop.var}_block"
    length = loop.hi - loop.lo
    first = loop.lo + V(block) * trips
    whole = (length % trips) == ZERO
    places = dict(zip(sums, accumulate((x.lanes for x in sums.values()), initial=0), strict=False))
    steps = replace(loop, lo=first, hi=first + trips if whole else minimum(first + trips, loop.hi))
    body: ir.Body = (
        *(ir.Store(total, V(places[r]), ir.Reg("float32", r, x.lanes), lanes=x.lanes) for r, x in sums.items()),
        ir.Call(IN_MEMORY, (ir.Pointer("float32", total, ZERO),)),
        *(ir.Set(r, neutral("sum", "float32"), x.lanes) for r, x in sums.items()),
        steps,
        *(ir.Set(r, ir.FlatLoad("float32", total, V(places[r]), x.lanes), x.lanes, "sum") for r, x in sums.items()),
    )
    size = V(sum(x.lanes for x in sums.values()))
    return ir.Alloc(total, "float32", size, "stack", (ir.For(block, ZERO, length.ceildiv(trips), body),))
