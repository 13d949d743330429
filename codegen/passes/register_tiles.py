"""Sums of a hand-made schedule in registers: its unrolled loops become straight-line code for every number of steps.

A buffer lives in registers where every loop over its cells is unrolled or runs in vectors. The last tile of an axis may
be shorter: an unrolled loop gets one version for each number of steps; a vector loop that is not whole keeps the
buffer in memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from polydyn.codegen import ir
from polydyn.codegen.indices import node_buffers
from polydyn.codegen.passes.bind import fold
from polydyn.codegen.passes.registers import registers, share_loads, unroll
from polydyn.codegen.passes.tiles import variants
from polydyn.codegen.passes.vectorise import tile_in_vectors
from polydyn.schedules.errors import CodegenError, Declined
from polydyn.schedules.index import ZERO, Index

MOST_VERSIONS = 16
"""Maximum versions of one tile."""


def tile_in_registers(
    body: ir.Body, buffer: str, dtype: str, outer: Collection[str], steps: Mapping[str, int], vector: str, width: int,
    name: str,
) -> ir.Body | Declined:  # fmt: skip
    """Keep a buffer in registers.

    ``outer``: loops around all uses of one set of contents. ``steps``: loops to unroll -> their maximum number of
    steps. ``vector``: the loop among them that runs in vectors of ``width``, or "". ``name``: prefix of the functions
    of versions. Declined: a loop over the buffer's cells is neither unrolled nor a vector loop, or there would be too
    many versions.
    """
    return _at_uses(body, buffer, outer, lambda uses: _versions(uses, buffer, dtype, steps, vector, width, name))


def _at_uses(
    body: ir.Body, buffer: str, outer: Collection[str], f: Callable[[ir.Body], ir.Body | Declined]
) -> ir.Body | Declined:
    """Apply ``f`` to the smallest part of a body that holds all uses of one set of contents of a buffer."""
    using = [n for n in body if _uses((n,), buffer)]
    if len(using) == 1 and (isinstance(using[0], (ir.Let, ir.If)) or _is_outer(using[0], outer)):
        inside = [b for b in ir.bodies(using[0]) if _uses(b, buffer)]
        if len(inside) == 1:
            made = _at_uses(inside[0], buffer, outer, f)
            if isinstance(made, Declined):
                return made
            parts = tuple(made if b is inside[0] else b for b in ir.bodies(using[0]))
            return tuple(ir.with_bodies(n, parts) if n is using[0] else n for n in body)
    return f(body)


def _is_outer(n: ir.Node, outer: Collection[str]) -> bool:
    return isinstance(n, ir.For) and n.var in outer


def _uses(body: ir.Body, buffer: str) -> bool:
    return any(buffer in node_buffers(n) for n in ir.walk(body))


def _versions(
    body: ir.Body, buffer: str, dtype: str, steps: Mapping[str, int], vector: str, width: int, name: str
) -> ir.Body | Declined:
    """Return the versions of a body that uses a buffer, and the choice among them."""
    ends: dict[str, Index] = {}
    for n in ir.walk(body):
        if isinstance(n, ir.For) and n.var in steps and (n.lo != ZERO or ends.setdefault(n.var, n.hi) != n.hi):
            return Declined(f"loops {n.var} of its statements differ in their steps")
    known = {x: e.constant for x, e in ends.items() if e.constant is not None}  # an only tile may be less than a whole
    steps = {**steps, **known}
    inside = {n.var for n in ir.walk(body) if isinstance(n, (ir.For, ir.Let))}
    if bound := sorted(x for e in ends.values() for x in e.symbols() & inside):
        return Declined(f"its last tiles depend on loop {bound[0]} inside")
    if vector and steps[vector] % width:
        return Declined(f"{vector} has {steps[vector]} steps, which are no whole vectors of {width}")
    open_ = [x for x, e in ends.items() if e.constant is None and x != vector]
    if math.prod(steps[x] for x in open_) > MOST_VERSIONS:
        return Declined(f"its last tiles have more than {MOST_VERSIONS} sizes")

    def version(counts: Mapping[str, int]) -> ir.Body:
        return _unrolled(body, buffer, dtype, {**steps, **counts}, vector, width)

    def choose(left: list[str], counts: dict[str, int]) -> ir.Body:
        if not left:
            return version(counts)
        x, *rest = left
        made = {n: choose(rest, {**counts, x: n}) for n in range(1, steps[x] + 1)}
        sizes = "_".join(map(str, counts.values()))
        return variants(ends[x], made, f"{name}{sizes and '_'}{sizes}" if not rest else None)

    try:
        whole = choose(open_, {})
    except (CodegenError, _NotWholeError) as e:
        return Declined(str(e))
    end = ends.get(vector)
    if end is None or end.constant is not None:
        return whole
    return (ir.If((ir.Compare(">=", end, Index.of(steps[vector])),), whole, body),)


class _NotWholeError(Exception):
    """A loop does not become vectors."""


def _unrolled(body: ir.Body, buffer: str, dtype: str, steps: Mapping[str, int], vector: str, width: int) -> ir.Body:
    """Return the body with every loop of ``steps`` unrolled, and the buffer in registers."""

    def sized(n: ir.Node) -> ir.Node:
        if isinstance(n, ir.For) and n.var in steps:
            return ir.For(n.var, ZERO, Index.of(steps[n.var]), n.body, n.kind)
        return n

    made = ir.rewrite(body, sized)
    if vector:
        vectors = tile_in_vectors(made, vector, width)
        if isinstance(vectors, Declined):
            raise _NotWholeError(str(vectors))
        made = vectors
    flat = fold(unroll(made, tuple(steps)))
    return share_loads(registers(flat, buffer, dtype))
