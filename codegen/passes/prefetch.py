"""Prefetching: a tile's reduction prefetches the memory of the next tile while it computes.

A register tile reads several short rows at the same time. If they do not fit L2, each of them is a separate stream that
ends before a hardware prefetcher has detected it. The rows of the next tile are known, so they are prefetched by cache
line, spread over the loop. A prefetch reads nothing and may have any address.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import Body, Call, Def, FlatLoad, For, Let, Node, Pointer, Set, Store, rewrite, walk, walk_value
from polydyn.codegen.passes.epilogues import COLUMN, ROW
from polydyn.schedules.index import ONE, ZERO, Index, maximum, minimum

PREFETCH_L1, PREFETCH_L2, PREFETCH_FOR_WRITE = "pd_prefetch", "pd_prefetch_far", "pd_prefetch_write"
"""Prefetch into L1, into L2, and into L1 for a write."""
TYPES = {"float32": "f32", "int32": "i32"}
"""Dtypes that are prefetched, of four bytes, with the suffix of the leaf."""
FIRST, END = "far_lo", "far_hi"
PREFETCH_RANGE = "ask_lo", "ask_hi"
"""The first line of every plane of the next footprint that a row tile prefetches, and the end of its range."""
LINE = 16
"""float32 elements of a cache line."""
PREFETCH_DISTANCE = 4096
"""Prefetch distance in elements of rows: more than memory latency times bandwidth."""
STREAM = 12288
"""Prefetch distance in bytes of panels that are one stream."""


def prefetch_next(
    body: Body,
    var: str,
    following: Mapping[str, Index],
    panel: Mapping[str, Index] | None = None,
    whole: bool = False,
) -> Body:
    """Let loops ``var`` prefetch their four-byte loads for the next tile, line by line.

    ``following``: the values of symbols in the next tile. Loads that depend on none of them are skipped, and so are
    loads that are not dense along ``var`` or that move with an inner loop. A loop over vectors prefetches for every
    vector, a loop over elements once per line.

    ``panel``: the values of symbols in the panel of columns that follows when all row tiles have used this one. The
    tiles split its prefetches: each line's iteration prefetches its steps [``FIRST``, ``END``). ``whole``: the loop is
    a whole number of lines, whatever its bound looks like.
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
            return replace(n, body=(*_calls(PREFETCH_L1, near, following), *n.body))
        return _by_lines(n, _calls(PREFETCH_L1, near, following), _calls(PREFETCH_L2, far, panel or {}), whole)

    return rewrite(body, f)


def prefetch_ahead(body: Body, var: str, far: int) -> Body:
    """Prefetch vectors of four-byte elements that move with loop ``var``, ``far`` bytes ahead of their loads.

    The prefetches are in the innermost loop that the vectors move with. The distance in steps of ``var`` is the same
    for all: that of the vector with the largest stride.
    """

    def moving(n: For) -> list[FlatLoad]:
        inside = {x.var for x in walk(n.body) if isinstance(x, For)}
        loads = (v for v in _loads(n) if v.lanes > 1 and v.stride == ONE)
        return [v for v in dict.fromkeys(loads) if {var, n.var} <= (own := v.address.symbols()) and not own & inside]

    strides = [v.address.split(var)[0].constant or 1 for n in walk(body) if isinstance(n, For) for v in moving(n)]
    steps = Index.of(var) + max(1, far // (4 * max(strides, default=1)))
    return rewrite(body, lambda n: _first(n, _calls(PREFETCH_L1, moving(n), {var: steps})) if isinstance(n, For) else n)


def _first(n: For, calls: Body) -> For:
    return replace(n, body=(*calls, *n.body))


def share_panel(body: Body, number: Index, tiles: Index) -> Body:
    """Bind the range of steps that row tile ``number`` of ``tiles`` prefetches per line.

    The range is empty for a single tile, which has no work to overlap with. It is also empty if there are more tiles
    than steps of a line: then the rows, which are read again for every panel, need the cache more.
    """
    tiles = maximum(1, tiles)
    several = minimum(1, tiles - 1) * minimum(1, maximum(0, LINE + 1 - tiles))
    for name, k in ((FIRST, 0), (END, 1)):
        body = (Let(name, several * ((number + k) * LINE // tiles), body),)
    return body


def share_lines(body: Body, number: Index, tiles: Index, lines: Index) -> Body:
    """Bind row tile ``number``'s range, of ``tiles``, of the ``lines`` of each plane of the next footprint."""
    for k, name in enumerate(PREFETCH_RANGE):
        body = (Let(name, (number + k) * lines // maximum(1, tiles), body),)
    return body


def prefetch_lines(body: Body, var: str, planes: Sequence[FlatLoad]) -> Body:
    """Let the loop ``var`` over planes prefetch the tile's range of lines in each; ``planes``: their first elements."""
    line = Index.of("line")
    calls = _calls(PREFETCH_L2, [replace(v, address=v.address + line * LINE) for v in planes], {})
    asked = For("line", Index.of(PREFETCH_RANGE[0]), Index.of(PREFETCH_RANGE[1]), calls)
    return rewrite(body, lambda n: _first(n, (asked,)) if isinstance(n, For) and n.var == var else n)


def prefetch_results(stores: Sequence[Store], rows: Index, columns: Index, number: Index, tiles: Index) -> Body:
    """Return the prefetches of row tile ``number`` of ``tiles`` for results stored after the last tile.

    ``stores``: those of one element at ``ROW`` and ``COLUMN``, dense along rows. Each column is a separate stream that
    ends after a few lines: stores would wait for every one of them.
    """
    line = Index.of("line")
    asked = (Pointer("float32", s.buffer, s.address.subs({ROW: line * LINE})) for s in stores)
    lines = For("line", ZERO, rows.ceildiv(LINE), tuple(Call(f"{PREFETCH_FOR_WRITE}_f32", (x,)) for x in asked))
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


def _by_lines(n: For, calls: Body, far: Body, exact: bool) -> Body:
    """Return the loop in parts of one line's elements, and the rest. Each part begins with the calls."""
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
