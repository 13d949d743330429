"""Prefetching: a tile's reduction asks for the memory of the next tile while it computes.

A register tile reads several short rows side by side. From beyond the second-level cache each of them is a stream of
its own that ends before a hardware prefetcher has learnt it. The rows of the next tile are known, so they are asked
for by line, spread over the loop. A prefetch reads nothing and may name any address.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import Body, Call, Def, FlatLoad, For, Let, Node, Pointer, Set, Store, rewrite, walk, walk_value
from polydyn.codegen.passes.epilogues import COLUMN, ROW
from polydyn.schedules.index import ONE, ZERO, Index, maximum, minimum

LEAF, FAR, WRITE = "pd_prefetch", "pd_prefetch_far", "pd_prefetch_write"
"""Into the first cache, into the second, and into the first to be written."""
TYPES = {"float32": "f32", "int32": "i32"}
"""What is prefetched: four bytes an element."""
FIRST, END = "far_lo", "far_hi"
ASKED = "ask_lo", "ask_hi"
"""The first line that a row tile asks for of every plane of the next strip, and the end of those."""
LINE = 16
"""Elements of a cache line."""
AHEAD = 4096
"""Elements of rows between what is used and what is prefetched: a memory's latency times its bandwidth, and more."""
STREAM = 12288
"""Bytes of panels that are one stream between what is used and what is asked for."""


def prefetch_next(
    body: Body,
    var: str,
    following: Mapping[str, Index],
    panel: Mapping[str, Index] | None = None,
    whole: bool = False,
) -> Body:
    """Loops ``var`` prefetch their loads of four bytes for the next tile, line by line.

    ``following``: what symbols stand for in the next tile; loads that depend on none of them are left alone, and so are
    those that are not dense along ``var``, or move with a loop inside it. A loop over vectors prefetches for every
    vector, one over elements in strips of a line.

    ``panel``: what symbols stand for in the panel of columns that follows when all row tiles have used this one. The
    tiles share the work of asking for it: each strip asks for its steps [``FIRST``, ``END``). ``whole``: the loop is a
    whole number of strips, whatever its bound looks like.
    """

    def f(n: Node) -> Node | Body:
        if not (isinstance(n, For) and n.var == var and n.lo == ZERO):
            return n
        inside = {x.var for x in walk(n.body) if isinstance(x, For)}
        loads = [v for v in dict.fromkeys(_loads(n)) if not v.address.symbols() & inside]
        near = [v for v in loads if following.keys() & v.address.symbols() and _dense(v, var)]
        far = [v for v in loads if panel and panel.keys() & v.address.symbols() and _lines(v, var)]
        if not near and not far:
            return n
        if n.kind == "vector":
            return replace(n, body=(*_calls(LEAF, near, following), *n.body))
        return _strips(n, _calls(LEAF, near, following), _calls(FAR, far, panel or {}), whole)

    return rewrite(body, f)


def prefetch_ahead(body: Body, var: str, far: int) -> Body:
    """Vectors of four bytes that move with loop ``var`` are asked for when those ``far`` bytes before them are loaded,
    in the innermost loop that they move with.

    The steps of ``var`` that are between are the same for all: those of what moves most.
    """

    def moving(n: For) -> list[FlatLoad]:
        inside = {x.var for x in walk(n.body) if isinstance(x, For)}
        loads = (v for v in _loads(n) if v.lanes > 1 and v.stride == ONE)
        return [v for v in dict.fromkeys(loads) if {var, n.var} <= (own := v.address.symbols()) and not own & inside]

    strides = [v.address.split(var)[0].constant or 1 for n in walk(body) if isinstance(n, For) for v in moving(n)]
    steps = Index.of(var) + max(1, far // (4 * max(strides, default=1)))
    return rewrite(body, lambda n: _first(n, _calls(LEAF, moving(n), {var: steps})) if isinstance(n, For) else n)


def _first(n: For, calls: Body) -> For:
    return replace(n, body=(*calls, *n.body))


def share_panel(body: Body, number: Index, tiles: Index) -> Body:
    """Around a row tile, ``number`` of ``tiles``: its steps of every strip.

    None when it is the only one, which has nothing to overlap with, or one of more than a strip has steps: then the
    rows, which are read again for every panel, need the cache more.
    """
    tiles = maximum(1, tiles)
    several = minimum(1, tiles - 1) * minimum(1, maximum(0, LINE + 1 - tiles))
    for name, k in ((FIRST, 0), (END, 1)):
        body = (Let(name, several * ((number + k) * LINE // tiles), body),)
    return body


def share_lines(body: Body, number: Index, tiles: Index, lines: Index) -> Body:
    """Around a row tile, ``number`` of ``tiles``: its share of the ``lines`` of each plane of the next strip."""
    for k, name in enumerate(ASKED):
        body = (Let(name, (number + k) * lines // maximum(1, tiles), body),)
    return body


def prefetch_lines(body: Body, var: str, planes: Sequence[FlatLoad]) -> Body:
    """The loop ``var`` over planes asks in each for the lines of its tile's share; ``planes``: their first element."""
    line = Index.of("line")
    calls = _calls(FAR, [replace(v, address=v.address + line * LINE) for v in planes], {})
    asked = For("line", Index.of(ASKED[0]), Index.of(ASKED[1]), calls)
    return rewrite(body, lambda n: _first(n, (asked,)) if isinstance(n, For) and n.var == var else n)


def prefetch_results(stores: Sequence[Store], rows: Index, columns: Index, number: Index, tiles: Index) -> Body:
    """What row tile ``number`` of ``tiles`` asks for, of the results that are stored when all of them are there.

    ``stores``: of one element at ``ROW`` and ``COLUMN``, dense along rows. Each column is a stream of its own that ends
    after a few lines: stores would wait for every one of them.
    """
    line = Index.of("line")
    asked = (Pointer("float32", s.buffer, s.address.subs({ROW: line * LINE})) for s in stores)
    lines = For("line", ZERO, rows.ceildiv(LINE), tuple(Call(f"{WRITE}_f32", (x,)) for x in asked))
    return (For(COLUMN, number * columns // tiles, (number + 1) * columns // tiles, (lines,)),)


def _loads(n: For) -> Iterator[FlatLoad]:
    for x in walk(n.body):
        if isinstance(x, (Def, Set, Store)):
            yield from (v for v in walk_value(x.value) if isinstance(v, FlatLoad) and v.dtype in TYPES)


def _lines(v: FlatLoad, var: str) -> bool:
    """Whether a load moves by whole lines."""
    stride = v.address.split(var)[0]
    return stride != ZERO and stride % LINE == ZERO


def _dense(v: FlatLoad, var: str) -> bool:
    stride, rest = v.address.split(var)
    along = stride == ONE if v.lanes == 1 else v.stride == ONE and stride.constant is not None
    return along and var not in rest.symbols()


def _calls(leaf: str, loads: list[FlatLoad], env: Mapping[str, Index]) -> Body:
    return tuple(Call(f"{leaf}_{TYPES[v.dtype]}", (Pointer(v.dtype, v.buffer, v.address.subs(env)),)) for v in loads)


def _strips(n: For, calls: Body, far: Body, exact: bool) -> Body:
    """The loop in strips of a line's elements and what is left over, each begun by the calls."""
    strip, step, whole = f"{n.var}_line", f"{n.var}_far", n.hi // LINE
    start = Index.of(strip) * LINE
    first = substitute(calls, {n.var: start})
    if far:
        first += (For(step, Index.of(FIRST), Index.of(END), tuple(substitute(far, {n.var: start + step}))),)
    strips = For(strip, ZERO, whole, (*first, For(n.var, start, start + LINE, n.body, n.kind)))
    if exact or n.hi % LINE == ZERO:
        return (strips,)
    rest = substitute(calls, {n.var: whole * LINE})
    return (strips, *rest, For(n.var, whole * LINE, n.hi, n.body, n.kind))
