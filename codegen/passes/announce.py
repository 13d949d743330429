"""Prefetch for write: while one pass over a row runs, prefetch the cache lines that the next pass stores.

The last pass of a softmax or norm stores faster than memory responds. The pass before it computes, so the lines arrive
in the meantime. Prefetches are only hints: no value depends on them. Lines of streaming stores are never cached, so the
leaf has an argument for streaming stores.
"""

from __future__ import annotations

from collections.abc import Collection

from polydyn.codegen.ir import Body, Call, For, Mark, Node, Pointer, Store, bodies, rewrite, walk, with_bodies
from polydyn.schedules.expr import FromIndex
from polydyn.schedules.index import ONE, ZERO, Index
from polydyn.schedules.tree.names import MarkName

ANNOUNCE = "pd_written_soon"
"""Leaf: the element will be stored soon."""


def prefetch_for_write(body: Body, mark: MarkName, outputs: Collection[str]) -> Body:
    """Prefetch for write, among the marked loops of one body, the dense stores to ``outputs``.

    The marked loop before the stores prefetches them, if it runs over the same elements.
    """
    out: list[Node] = []
    last: int | None = None
    for n in body:
        n = with_bodies(n, tuple(prefetch_for_write(b, mark, outputs) for b in bodies(n)))
        if isinstance(n, Mark) and n.name == mark:
            if last is not None:
                before = bodies(out[last])[0]
                if _loops(before) and _loops(before) == _loops(n.body):
                    out[last] = Mark(mark, _with_prefetches(before, n.body, outputs))
            last = len(out)
        out.append(n)
    return tuple(out)


def _loops(body: Body) -> list[tuple[str, Index, Index]]:
    """Return (variable, low, high) of the loops of a perfect nest; empty if the body is not one."""
    ranges = []
    while len(body) == 1 and isinstance(body[0], For):
        ranges.append((body[0].var, body[0].lo, body[0].hi))
        body = body[0].body
    return ranges


def _with_prefetches(before: Body, after: Body, outputs: Collection[str]) -> Body:
    """Add prefetches of the dense stores of ``after``, over the same elements, to the innermost loop of ``before``."""
    inner = _loops(before)[-1][0]
    stores = [n for n in walk(after) if isinstance(n, Store) and n.buffer in outputs]
    dense = [n for n in stores if n.address.split(inner)[0] == ONE]
    calls = tuple(Call(ANNOUNCE, (Pointer(n.value.dtype, n.buffer, n.address), _streams(n))) for n in dense)

    def f(n: Node) -> Node:
        return with_bodies(n, ((*n.body, *calls),)) if isinstance(n, For) and n.var == inner else n

    return rewrite(before, f)


def _streams(n: Store) -> FromIndex:
    return FromIndex("int64", ZERO if n.stream is None else n.stream)


def without_announcements(loop: For) -> For:
    """Remove the prefetches from a loop: one element after another needs none."""
    body = rewrite(loop.body, lambda n: () if isinstance(n, Call) and n.function == ANNOUNCE else n)
    return For(loop.var, loop.lo, loop.hi, body, loop.kind)
