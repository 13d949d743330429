"""Scheduled groups with one change in the tile map, the buffers or the bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from polydyn.schedules.tree.names import End
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.tilemap import Loop, When


def mutants(t: Scheduled) -> Iterator[tuple[str, Scheduled]]:
    """Yield (description of the change, changed schedule): digits in another order, lost, run twice, of another size,
    moved between loops and axes; other steps, guards, cells, epochs, cuts, beginnings of parts.
    """
    yield from _axes(t)
    yield from _loops(t)
    yield from _steps(t)
    yield from _buffers(t)
    yield from _bounds(t)


def _axes(t: Scheduled) -> Iterator[tuple[str, Scheduled]]:
    for axis, ds in t.map.axes.items():
        for n in range(len(ds) - 1):
            order = (*ds[:n], ds[n + 1], ds[n], *ds[n + 2 :])
            tm = replace(t.map, axes={**t.map.axes, axis: order})
            yield f"axis {axis}: {ds[n].name} and {ds[n + 1].name} change places", replace(t, map=tm)
        for d in ds[1:]:
            left = tuple(x for x in ds if x != d)
            yield f"axis {axis} without {d.name}", replace(t, map=replace(t.map, axes={**t.map.axes, axis: left}))
            wide = tuple(replace(x, size=x.size + 1) if x == d else x for x in ds)
            tm = replace(t.map, axes={**t.map.axes, axis: wide})
            yield f"axis {axis}: {d.name} is larger there than in loops", replace(t, map=tm)
    for (s, x), axis in t.map.iterators.items():
        others = [a for a in t.map.axes if a != axis]
        tm = replace(t.map, iterators={**t.map.iterators, (s, x): others[0]})
        yield f"{s}: iterator {x} is axis {others[0]}", replace(t, map=tm)


def _replace_loop(t: Scheduled, n: str, old: Loop, *new: Loop) -> Scheduled:
    view = t.view(n)
    return t.put({n: replace(view, loops=tuple(y for x in view.loops for y in (new if x == old else (x,))))})


def _loops(t: Scheduled) -> Iterator[tuple[str, Scheduled]]:
    for n, view in t.map.views.items():
        tiled = [x for x in view.loops if x.digits and not x.at and len(t.map.axes[x.digits[0].axis]) > 1]
        for k, x in enumerate(tiled):
            yield f"{n}: {x.coord} runs nothing", _replace_loop(t, n, x, replace(x, digits=()))
            if len(x.digits) > 1:
                yield f"{n}: {x.coord} permutes its digits", _replace_loop(t, n, x, replace(x, digits=x.digits[::-1]))
                yield f"{n}: {x.coord} loses a digit", _replace_loop(t, n, x, replace(x, digits=x.digits[1:]))
            y = tiled[(k + 1) % len(tiled)]
            if y != x:
                u = _replace_loop(t, n, x, replace(x, digits=y.digits))
                yield f"{n}: {x.coord} runs what {y.coord} runs", u
                yield f"{n}: {x.coord} and {y.coord} change digits", _replace_loop(u, n, y, replace(y, digits=x.digits))
        for d in view.hidden:
            hidden = tuple(x for x in view.hidden if x != d)
            yield f"{n}: the instruction leaves out {d.name}", t.put({n: replace(view, hidden=hidden)})


def _steps(t: Scheduled) -> Iterator[tuple[str, Scheduled]]:
    for n, view in t.map.views.items():
        for x in view.loops:
            if x.at:
                other = End.LAST if x.at is End.FIRST else End.FIRST
                yield f"{n} runs at the {other} step of {x.coord}", _replace_loop(t, n, x, replace(x, at=other))
                yield f"{n} runs at every step of {x.coord}", _replace_loop(t, n, x, replace(x, at=None))
        for k, low, short in view.guard:
            for guard in ((), ((k, low + 1, short),), ((k, low, short + 1),)):
                yield f"{n} is guarded by {guard}", t.put({n: replace(view, guard=guard)})


def _buffers(t: Scheduled) -> Iterator[tuple[str, Scheduled]]:
    for x in t.buffers:
        for axis in x.axes:
            for d in t.map.axes[axis]:
                fixed = x.fixed ^ {d}
                what = "is no part of the cell" if d not in x.fixed else "is a part of the cell"
                yield f"{x.name}: {d.name} {what}", _buffer(t, x.name, fixed)
    for x in t.buffers:
        if x.scope:
            put = tuple(replace(y, scope=()) if y.name == x.name else y for y in t.buffers)
            yield f"{x.name} is one for all units", replace(t, buffers=put)


def _buffer(t: Scheduled, name: str, fixed: frozenset[object]) -> Scheduled:
    put = tuple(replace(y, fixed=fixed) if y.name == name else y for y in t.buffers)  # type: ignore[arg-type]
    return replace(t, buffers=put)


def _bounds(t: Scheduled) -> Iterator[tuple[str, Scheduled]]:
    for n, x in enumerate(t.clips):
        rest = t.clips[:n] + t.clips[n + 1 :]
        yield f"{x.statement} is not cut along {x.axis}", replace(t, clips=rest)
        digits = len(t.map.axes.get(x.axis, ()))
        coarse = replace(x, whole=x.whole + 1)
        if x.whole + 1 < digits:
            yield f"{x.statement} is cut along {x.axis} in larger pieces", replace(t, clips=(*rest, coarse))
    for axis, joined in t.map.joined.items():
        for part in t.map.parts(axis):
            tm = replace(t.map, joined={**t.map.joined, axis: joined + part})
            yield f"axis {axis} counts {part} once more", replace(t, map=tm)
            more = {**t.map.extents, part: t.map.extents[part] + 1}
            yield f"axis {axis}: {part} has one more value", replace(t, map=replace(t.map, extents=more))
    for name in t.padded:
        yield f"{name} is neither cut nor padded", replace(t, padded=t.padded - {name})
    for axis, share in t.map.shares.items():
        other = t.map.axes[axis][1]
        tm = replace(t.map, shares={**t.map.shares, axis: replace(share, block=other)})
        yield f"blocks of {axis} are counted by {other.name}", replace(t, map=tm)
    for axis, origin in t.map.origins.items():
        other = t.map.axes[axis][-1]
        tm = replace(t.map, origins={**t.map.origins, axis: replace(origin, tile=other)})
        yield f"tiles of {axis} are counted by {other.name}", replace(t, map=tm)
    for axis, ds in t.map.axes.items():
        if ds[0].when is When.COUNT and len(ds) > 1:
            put = {axis: (replace(ds[0], when=When.BUILD), *ds[1:])}
            yield f"axis {axis} does not count", replace(t, map=replace(t.map, axes={**t.map.axes, **put}))
