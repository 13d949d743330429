"""A small instance of a schedule: the order of its instances, its tiles, dependences, and the elements that a task
accesses.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from polydyn.errors import InputError
from polydyn.explore.pictures.colours import DARK, HUES, ORANGE, RED, scale
from polydyn.explore.pictures.sheet import Picture, Sheet
from polydyn.explore.reference import elements
from polydyn.schedules.expr import ITEMSIZE
from polydyn.schedules.group.dependence import is_accumulation
from polydyn.schedules.index import Index
from polydyn.schedules.interpret import Instance, instances
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.tree.scheduled import Scheduled

MOST_INSTANCES, MOST_CELLS, MOST_ELEMENTS = 20_000, 64, 8192
Point = tuple[int, ...]


def domain(t: Scheduled, sizes: Mapping[str, int], statement: str = "", title: str = "") -> Picture:
    """Draw the instances of a statement, coloured by order; gaps are tile borders, numbers are tasks.

    ``sizes``: the group's parameters, and tile sizes that are symbols. ``statement``: by default the one with the most
    iterators. With more than two iterators, the first two are drawn, and the second with the third. Arrows are
    dependences of the statement on itself. Dependences between statements are counted; violated ones are red and
    listed. InputError: the instance is too large to draw, or a size is missing.
    """
    _check_small(t, sizes)
    group, run = t.group, instances(t, sizes)
    chosen = _statement(group, statement)
    here = [x for x in run if x.statement == chosen.name]
    bounds = ", ".join(f"{n} < {e.evaluate(sizes)}" for n, e in chosen.iters)
    found = dependences(group, sizes)
    wrong = violated(found, run)
    verdict = f"{len(wrong)} of {len(found)} dependences VIOLATED" if wrong else f"all {len(found)} dependences hold"
    s = Sheet(title or f"{chosen.name}: {bounds}", f"{len(here)} instances in their order; {verdict}")
    if not here or not chosen.iters:
        s.text(12, s.top + 16, "one instance" if here else "nothing runs: an extent is 0", 13)
        return s.picture(_listed(wrong))
    parallel = [c for _, cs in t.parallel for c in cs]
    draw = _Panels(s, t, chosen, here, parallel)
    y = s.top + 34
    first, *more = _planes(chosen)
    right, bottom = draw.panel(12, y, first, 560 if more else s.width - 24)
    recurrences = [d for d in found if d.source[0] == d.sink[0] == chosen.name]
    draw.arrows(first, recurrences, wrong)
    draw.tasks(first)
    if more:
        bottom = max(bottom, draw.panel(right + 46, y, more[0], s.width - right - 58)[1])
        draw.arrows(more[0], recurrences, wrong)
    for n in range(60):
        s.rect(12 + n * 5, bottom + 26, 5.5, 11, scale(n / 59))
    s.text(12, bottom + 52, "runs first", 12, "s")
    s.text(312, bottom + 52, f"last (number {len(here) - 1})", 12, "s", "end")
    s.text(336, bottom + 36, "gaps: borders of tiles, wider ones outside; a number: a task's first instance", 12, "s")
    s.text(336, bottom + 52, "arrows: the next one needs the one before; orange: from tile to tile", 12, "s")
    return s.picture(_listed(wrong))


def footprint(t: Scheduled, sizes: Mapping[str, int], at: Mapping[str, int] | None = None, title: str = "") -> Picture:
    """Draw the memory elements that instances with given coordinates access, by array; locals are not in memory.

    ``at`` maps a loop to its step; by default the first task. Memory is drawn in rows as long as the largest stride.
    InputError: an array is too large to draw, or no instance has these coordinates.
    """
    _check_small(t, sizes)
    group, statements = t.group, {s.name: s for s in t.group.statements}
    run = [x for x in instances(t, sizes) if x.statement in statements]
    parallel = [c for _, cs in t.parallel for c in cs]
    if at is None:
        at = {c: run[0].at[c] for c in parallel if c in run[0].at} if run else {}
    here = [x for x in run if all(x.at.get(c) == v for c, v in at.items())]  # type: ignore[call-overload]
    if run and not here:
        raise InputError(f"nothing runs at {dict(at)}", rule="footprint", remedy="use steps of the loops")
    reads: dict[str, Counter[int]] = defaultdict(Counter)
    writes: dict[str, Counter[int]] = defaultdict(Counter)
    for x in here:
        statement, env = statements[x.statement], {**sizes, **x.iterators}
        for access, into in ((statement.write, writes), *((r, reads) for r in statement.reads)):
            array = group.arrays[access.array]
            if array.role != "local" and not access.opaque:
                into[access.array][array.address(access.index).evaluate(env)] += 1
    where = ", ".join(f"{c}={v}" for c, v in at.items()) or "all of it"
    s = Sheet(title or f"what is touched at {where}", f"{len(here)} instances; blue: read, orange: written")
    y: float = s.top + 8
    for name, a in group.arrays.items():
        if a.role != "local":
            y = _memory(s, t, name, sizes, (reads[name], writes[name]), y)
    return s.picture()


def _memory(
    s: Sheet, t: Scheduled, name: str, sizes: Mapping[str, int], touched: tuple[Counter[int], Counter[int]], y: float
) -> float:
    """Draw an array as a grid of its elements; return the lower end."""
    read, written = touched
    whole = elements(t.group, name, sizes)
    if whole > MOST_ELEMENTS:
        raise InputError(f"{name} has {whole} elements", tensor=name, rule=f"at most {MOST_ELEMENTS} are drawn",
                         remedy="take smaller sizes")  # fmt: skip
    every = read + written
    each = f", {sum(every.values()) / len(every):.3g} times each" if every else ""
    size = ITEMSIZE[t.group.arrays[name].dtype]
    s.text(12, y + 12, f"{name}: {len(every)} of {whole} elements, {len(every) * size} bytes{each}", 12.5, "m b")
    wide = _row_length(t.group, name, sizes, whole)
    c = min(14.0, (s.width - 24) / max(1, wide))
    y += 20
    for e in range(whole):
        colour, n = (ORANGE, written[e]) if written[e] else (HUES[0], read[e])
        x, yy = 12 + e % wide * c, y + e // wide * c
        if n:
            s.rect(x, yy, c - 0.8, c - 0.8, colour, tip=f"{name}[{e}]: {read[e]} reads, {written[e]} writes")
        else:
            s.rect(x, yy, c - 0.8, c - 0.8, "currentColor", opacity=0.07)
    return y + -(-whole // wide) * c + 18


def _row_length(group: Group, name: str, sizes: Mapping[str, int], whole: int) -> int:
    """Return the largest stride of an iterator that is smaller than the whole array."""
    strides = [1]
    for s in group.statements:
        for access in (s.write, *s.reads):
            if access.array == name and not access.opaque:
                address, zero = group.arrays[name].address(access.index), dict.fromkeys(s.iterators, 0)
                start = address.evaluate({**sizes, **zero})
                strides += [abs(address.evaluate({**sizes, **zero, i: 1}) - start) for i in s.iterators]
    fitting = [x for x in strides if x <= min(whole, 200)]
    longest = max(fitting, default=1)
    return longest if longest > 1 else min(max(whole, 1), 64)


# -- dependences of a small instance -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dependence:
    """An instance that must run before another one. ``kind``: ``flow``, ``anti``, ``output``, or ``sum`` (two terms of
    one sum in their original order, which may change).
    """

    kind: str
    source: tuple[str, Point]
    sink: tuple[str, Point]
    array: str


def dependences(group: Group, sizes: Mapping[str, int]) -> list[Dependence]:
    """Return all dependences of a group at given sizes, from a run in original order that records memory accesses.

    It uses neither isl nor the schedule, so that a picture is an independent check. Opaque accesses are left out.
    """
    found: dict[Dependence, None] = {}
    writer: dict[tuple[str, Point], tuple[str, Point]] = {}
    terms: dict[tuple[str, Point], list[tuple[str, Point]]] = defaultdict(list)
    readers: dict[tuple[str, Point], list[tuple[str, Point]]] = defaultdict(list)
    for s in group.statements:
        sums = is_accumulation(s)
        for point in product(*(range(e.evaluate(sizes)) for _, e in s.iters)):
            me, env = (s.name, point), {**sizes, **dict(zip(s.iterators, point, strict=True))}
            target = s.array, _element(s.index, env)
            cells = [(r.array, _element(r.index, env)) for r in s.reads[1 if sums else 0 :] if not r.opaque]
            for cell in cells:
                for w in (*([writer[cell]] if cell in writer else []), *terms[cell]):
                    found[Dependence("flow", w, me, cell[0])] = None
                readers[cell].append(me)
            for r in readers[target]:
                if r != me:
                    found[Dependence("anti", r, me, s.array)] = None
            if target in writer:
                found[Dependence("flow" if sums else "output", writer[target], me, s.array)] = None
            if sums and terms[target]:
                found[Dependence("sum", terms[target][-1], me, s.array)] = None
            if sums:
                terms[target].append(me)
            else:
                for w in terms.pop(target, []):
                    found[Dependence("output", w, me, s.array)] = None
                writer[target], readers[target] = me, []
    return list(found)


def violated(found: Sequence[Dependence], run: Sequence[Instance]) -> list[Dependence]:
    """Return the dependences that an order breaks: the source is missing or not before its sink; sums may reorder."""
    first: dict[tuple[str, Point], int] = {}
    last: dict[tuple[str, Point], int] = {}
    for n, x in enumerate(run):
        me = x.statement, tuple(x.iterators.values())
        first.setdefault(me, n)
        last[me] = n
    late = len(run)
    return [d for d in found if d.kind != "sum" and last.get(d.source, late) >= first.get(d.sink, late)]


def _element(index: Sequence[Index], env: Mapping[str, int]) -> Point:
    return tuple(i.evaluate(env) for i in index)


def _listed(wrong: Sequence[Dependence]) -> tuple[tuple[str, str], ...]:
    if not wrong:
        return ()
    lines = [f"{d.kind} of {d.array}: {_name(d.source)} must run before {_name(d.sink)}" for d in wrong[:200]]
    return ((f"{len(wrong)} violated dependences", "\n".join(lines)),)


def _name(x: tuple[str, Point]) -> str:
    return f"{x[0]}({', '.join(map(str, x[1]))})"


# -- drawing -----------------------------------------------------------------------------------------------------------


def _check_small(t: Scheduled, sizes: Mapping[str, int]) -> None:
    missing = set(t.group.params) - set(sizes)
    if missing:
        raise InputError(f"no size is given for {min(missing)}", dim=min(missing), remedy="give it in sizes")
    total = 0
    for s in t.group.statements:
        count = 1
        for n, e in s.iters:
            if e.evaluate(sizes) > MOST_CELLS:
                raise InputError(f"{n} runs to {e.evaluate(sizes)}", node=s.name,
                                 rule=f"at most {MOST_CELLS} are drawn", remedy="take smaller sizes")  # fmt: skip
            count *= e.evaluate(sizes)
        total += count
    if total > MOST_INSTANCES:
        raise InputError(f"there are {total} instances", rule=f"at most {MOST_INSTANCES} are drawn",
                         remedy="take smaller sizes")  # fmt: skip


def _statement(group: Group, name: str) -> Statement:
    return group.statement(name) if name else max(group.statements, key=lambda s: len(s.iters))


def _planes(s: Statement) -> list[tuple[str, str]]:
    """Return (vertical, horizontal) iterators of the panels; an empty name means one row."""
    it = s.iterators
    return [("", it[0])] if len(it) == 1 else [(it[0], it[1])] if len(it) == 2 else [(it[0], it[1]), (it[1], it[2])]


class _Panels:
    """Draws planes of a statement's instances on a sheet."""

    def __init__(
        self, s: Sheet, t: Scheduled, statement: Statement, here: Sequence[Instance], parallel: Sequence[str]
    ) -> None:
        self.s, self.t, self.statement, self.here, self.parallel = s, t, statement, here, parallel
        self.order = {tuple(x.iterators.values()): n for n, x in enumerate(here)}
        self.low = {i: min(x.iterators[i] for x in here) for i in statement.iterators}
        self.digits: dict[str, dict[int, tuple[int, ...]]] = defaultdict(dict)
        for x in here:
            for i in statement.iterators:
                self.digits[i][x.iterators[i]] = x.digits.get(t.map.iterators.get((statement.name, i), i), ())
        self.places: dict[tuple[str, str], tuple[dict[int, float], dict[int, float], float]] = {}

    def _offsets(self, iterator: str) -> dict[int, float]:
        """Return the gap before each value: one step per digit that changes there, except the last."""
        out, gap, previous = {}, 0.0, None
        for v, ds in sorted(self.digits[iterator].items()):
            if previous is not None:
                gap += next((3.0 + 4.0 * (len(ds) - 2 - k) for k in range(len(ds) - 1) if ds[k] != previous[k]), 0.0)
            out[v], previous = gap, ds
        return out

    def _plane(self, plane: tuple[str, str]) -> list[Instance]:
        """Return the instances of a plane, with all other iterators at their minimum."""
        return [x for x in self.here if all(x.iterators[i] == v for i, v in self.low.items() if i not in plane)]

    def panel(self, x: float, y: float, plane: tuple[str, str], room: float) -> tuple[float, float]:
        """Draw a plane; return the right and the lower end."""
        s, (down, across) = self.s, plane
        columns, rows = self._offsets(across), self._offsets(down) if down else {0: 0.0}
        left = x + 26
        cell = min(24.0, (room - 30 - max(columns.values())) / len(columns))
        px = {v: left + k * cell + gap for k, (v, gap) in enumerate(columns.items())}
        py = {v: y + k * cell + gap for k, (v, gap) in enumerate(rows.items())}
        self.places[plane] = px, py, cell
        fixed = ", ".join(f"{i} = {v}" for i, v in self.low.items() if i not in plane)
        s.text(x, y - 24, f"{down} ↓, " * bool(down) + f"{across} →" + f"   at {fixed}" * bool(fixed), 12.5, "b")
        last = max(1, len(self.order) - 1)
        for i in self._plane(plane):
            n = self.order[tuple(i.iterators.values())]
            coords = ", ".join(f"{c}={v}" for c, v in i.at.items())
            tip = f"({', '.join(f'{k}={v}' for k, v in i.iterators.items())}) is number {n}: {coords}"
            s.rect(px[i.iterators[across]] + 0.5, py[i.iterators[down] if down else 0] + 0.5, cell - 1, cell - 1,
                   scale(n / last), r=2, tip=tip)  # fmt: skip
        every = max(1, round(22 / max(cell, 1)))
        for k, v in enumerate(px):
            if k % every == 0:
                s.text(px[v] + cell / 2, y - 7, str(v), 11, "m s", "middle")
        for k, v in enumerate(py if down else ()):
            if k % max(1, round(14 / max(cell, 1))) == 0:
                s.text(left - 6, py[v] + cell / 2 + 4, str(v), 11, "m s", "end")
        return max(px.values()) + cell, max(py.values()) + cell

    def tasks(self, plane: tuple[str, str]) -> None:
        """Draw the number of each task at its first instance."""
        px, py, cell = self.places[plane]
        seen: dict[tuple[int, ...], None] = {}
        for i in self._plane(plane):
            task = tuple(i.at[c] for c in self.parallel if c in i.at)  # type: ignore[index]
            if task and task not in seen and len(seen) < 60 and cell > 8:
                cx = px[i.iterators[plane[1]]] + cell / 2
                cy = py[i.iterators[plane[0]] if plane[0] else 0] + cell / 2
                self.s.dot(cx, cy, min(9.0, cell / 2 - 1), "#ffffff", f"task {task}", stroke=DARK)
                self.s.text(cx, cy + 4, str(len(seen)), min(11.0, cell / 2), "b", "middle", DARK)
                seen[task] = None

    def arrows(self, plane: tuple[str, str], recurrences: Sequence[Dependence], wrong: Sequence[Dependence]) -> None:
        """Draw dependences inside a plane: those of one row in the middle, and all violated ones."""
        px, py, cell = self.places[plane]
        names = self.statement.iterators
        down, across = (names.index(p) if p else -1 for p in plane)
        others = [k for k in range(len(names)) if k not in (down, across)]
        middle = sorted(py)[min(len(py) - 1, 2)]
        bad = {(d.source, d.sink) for d in wrong}
        drawn = 0
        for d in (*recurrences, *(w for w in wrong if w.source[0] == w.sink[0] == self.statement.name)):
            a, b = d.source[1], d.sink[1]
            inside = all(p[k] == self.low[names[k]] for p in (a, b) for k in others)
            red = (d.source, d.sink) in bad
            row = down < 0 or a[down] == b[down] == middle
            if not inside or not (red or row) or a[across] not in px or b[across] not in px or drawn > 120:
                continue
            drawn += 1
            crosses = self.digits[plane[1]][a[across]][:-1] != self.digits[plane[1]][b[across]][:-1]
            colour = RED if red else ORANGE if crosses else "#ffffff"
            ends = ((px[p[across]] + cell / 2, py[p[down] if down >= 0 else 0] + cell / 2) for p in (a, b))
            (x1, y1), (x2, y2) = ends
            self.s.dot(x1, y1, min(3, cell / 5), colour, _name(d.source))
            self.s.path(f"M{x1:.1f},{y1:.1f}L{x2:.1f},{y2:.1f}", colour, 2.4 if crosses or red else 1.6, arrow=True,
                        tip=f"{_name(d.source)} before {_name(d.sink)}: {d.kind}")  # fmt: skip
