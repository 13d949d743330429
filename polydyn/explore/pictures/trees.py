"""Schedules: the matrix with its solved unknowns, the tree, two trees before and after a transformation, and code.

Every statement has one colour, by its position in the group, so it is the same in all pictures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polydyn.codegen.ir import Body, For, If, Inst, Mark
from polydyn.codegen.isl_ast import generate
from polydyn.explore.pictures.colours import DARK, GREY, ORANGE
from polydyn.explore.pictures.sheet import MONO, Picture, Sheet, cut
from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.expr import show as show_value
from polydyn.schedules.model import Group
from polydyn.schedules.show import COMBINED
from polydyn.schedules.solution.matrix import Unknown
from polydyn.schedules.solution.patterns import Choice
from polydyn.schedules.tree import nodes
from polydyn.schedules.tree.nodes import Band, Leaf, Tree
from polydyn.schedules.tree.scheduled import Scheduled, flat

STATEMENT = (GREY, "#e09b2d", "#3d8fe0", "#d9609f", "#22a884", "#a36bec", "#d9622b", "#6fae3d")
LINE = 16.5


def statement_colours(group: Group, others: Sequence[str] = ()) -> dict[str, str]:
    """Return the colour of each statement: first the group's own, then those that transformations added."""
    names = dict.fromkeys((*(s.name for s in group.statements), *others))
    return {n: STATEMENT[i % len(STATEMENT)] for i, n in enumerate(names)}


def statement_texts(group: Group) -> dict[str, str]:
    """Return one line of text per statement of a group."""
    return {
        s.name: f"{s.array}[{', '.join(map(str, s.index))}] {COMBINED[s.reduce]} {show_value(s.value)}"
        for s in group.statements
    }


# -- the matrix --------------------------------------------------------------------------------------------------------


def matrix(group: Group, choice: Choice) -> Picture:
    """Draw a schedule matrix: one row per statement, one column per schedule dimension. The band that all statements
    share is shaded; an unknown ``?`` has its solution below it.
    """
    p, colour = choice.pattern, statement_colours(group)
    dims = [d or "phase" for d in p.dims]
    note = f"{p.band} of {len(dims)} dims are loops of all statements; ? were solved"
    s = Sheet(f"{p.name}: the schedule matrix", note)
    rows = [(n, [_cell(r.expr, r.shift, choice) for r in rs]) for n, rs in p.matrix.rows]
    widths = [max([70.0, *(len(t) * 12.5 * MONO + 20 for _, r in rows for t in r[k])]) for k in range(len(dims))]
    left = 12 + max([60.0, *(len(n) * 12.5 * MONO + 34 for n, _ in rows)])
    grow = min(1.0, (s.width - left - 12) / max(1.0, sum(widths)))
    starts = [left + grow * sum(widths[:k]) for k in range(len(dims) + 1)]
    y = s.top + 10
    if p.band:
        s.rect(left, y - 4, starts[p.band] - left, 30 + 38 * len(rows), "currentColor", r=5, opacity=0.06,
               tip="the band: outermost loops that all statements share")  # fmt: skip
    for k, d in enumerate(dims):
        s.text((starts[k] + starts[k + 1]) / 2, y + 14, d, 12.5, "m b", "middle", most=starts[k + 1] - starts[k])
    y += 26
    texts = statement_texts(group)
    for n, cells in rows:
        s.rect(12, y + 2, left - 22, 30, colour[n], r=5, opacity=0.9, tip=texts[n])
        s.text(22, y + 21, n, 12.5, "m b", fill=DARK, most=left - 40)
        for k, (first, second) in enumerate(cells):
            x, wide = (starts[k] + starts[k + 1]) / 2, starts[k + 1] - starts[k]
            if second:
                s.rect(starts[k] + 3, y + 2, wide - 6, 32, ORANGE, ORANGE, r=5, opacity=0.14, dash="3 2",
                       tip=f"{first}, solved: {second}")  # fmt: skip
                s.text(x, y + 15, first, 12, "m", "middle", ORANGE, most=wide - 8)
                s.text(x, y + 29, second, 12, "m b", "middle", most=wide - 8)
            else:
                s.text(x, y + 21, first, 12.5, "m", "middle", most=wide - 8)
        y += 38
    for name, reason in choice.declined:
        y += 17
        s.text(12, y + 8, f"{name} declined: {reason}", 12, "s", most=s.width - 24)
    return s.picture()


def _cell(expr: object, shift: object, choice: Choice) -> tuple[str, str]:
    """Return a cell's text, and the solution of its unknown."""
    if not isinstance(shift, Unknown):
        return (str(expr) if str(shift) == "0" else str(shift) if str(expr) == "0" else f"{expr} + {shift}"), ""
    try:
        value = str(choice.solved.shift(shift.name))
    except ScheduleError:  # piecewise
        value = str(choice.solved.shifts[shift.name])
    fixed = "" if str(expr) == "0" else f"{expr} + "
    return f"{fixed}{shift}", f"= {fixed}{value}"


# -- trees -------------------------------------------------------------------------------------------------------------


def tree(t: Scheduled, title: str = "") -> Picture:
    """Draw a schedule tree from the top, with its statements in columns; parallel bands have a thick border."""
    s = Sheet(title or "schedule tree", "a bar is a sequence, its parts run from left to right")
    draw = _Drawing(s, t, frozenset())
    step = min(110.0, (s.width - 24) / max(1, _leaves(draw.tree)))
    y = draw.below(draw.tree, frozenset(t.map.views), 12, s.top + 6, step)
    _statements(s, t.group, draw.colour, 12, y + 34)
    return s.picture()


def change(before: Scheduled, after: Scheduled, title: str = "") -> Picture:
    """Draw two schedules of a group side by side; parts that only one of them has are outlined."""
    s = Sheet(title or "the tree before and after", "outlined: what the other tree does not have")
    half, y = (s.width - 36) / 2, s.top + 22
    ends = []
    for k, (t, other, name) in enumerate(((before, after, "before"), (after, before, "after"))):
        x = 12 + k * (half + 12)
        s.text(x, s.top + 6, name, 13, "b")
        draw = _Drawing(s, t, _parts(flat(t.tree)) - _parts(flat(other.tree)))
        ends.append(draw.below(draw.tree, frozenset(t.map.views), x, y, min(110.0, half / max(1, _leaves(draw.tree)))))
    s.path(f"M{s.width / 2},{s.top - 6}V{max(ends):.1f}", cls="g")
    added = tuple(n for t in (before, after) for n in t.map.views)
    _statements(s, before.group, statement_colours(before.group, added), 12, max(ends) + 34)
    return s.picture()


def loops(t: Scheduled, title: str = "") -> Picture:
    """Draw a tree and its loops (isl's AST, before statements are lowered), in the colours of statements."""
    lines = [Line(d, text, n) for d, text, n in _code(generate(t.tiled()), 0)]
    return beside(t, lines, title or "the tree and its loops")


@dataclass(frozen=True)
class Line:
    """A line of code. ``statement``: the statement that it computes; empty if it belongs to several."""

    depth: int
    text: str
    statement: str = ""


def beside(t: Scheduled, lines: Sequence[Line], title: str, note: str = "") -> Picture:
    """Draw a tree at the left and code at the right, in the colours of statements; long runs of one are cut."""
    s = Sheet(title, note or "one colour a statement; lines without one are shared")
    draw = _Drawing(s, t, frozenset())
    step = min(84.0, 430 / max(1, _leaves(draw.tree)))
    bottom = draw.below(draw.tree, frozenset(t.map.views), 12, s.top + 6, step)
    x, y = 24 + step * _leaves(draw.tree), s.top + 14.0
    shown = _shortened(lines)
    s.path(f"M{x},{s.top - 4}V{max(bottom, s.top + len(shown) * LINE):.1f}", cls="g")
    for n in shown:
        if n.statement:
            s.rect(x + 6, y - 12, s.width - x - 14, 16, draw.colour.get(n.statement, GREY), r=3, opacity=0.2)
            s.rect(x + 6, y - 12, 4, 16, draw.colour.get(n.statement, GREY))
        left = x + 16 + n.depth * 10.5
        s.text(left, y, n.text, 11.5, "m b" if n.statement else "m s", most=max(60.0, s.width - left - 10))
        y += LINE
    _statements(s, t.group, draw.colour, 12, max(bottom, y) + 30)
    return s.picture()


def _shortened(lines: Sequence[Line], most: int = 5, total: int = 110) -> list[Line]:
    """Cut long runs of one statement at one depth, and the end of long code."""
    out: list[Line] = []
    k = 0
    while k < len(lines):
        n = k
        while n < len(lines) and lines[n].statement == lines[k].statement != "" and lines[n].depth == lines[k].depth:
            n += 1
        if n - k > most:
            out += [*lines[k : k + 3], Line(lines[k].depth, f"… {n - k - 3} more lines", lines[k].statement)]
        else:
            out += lines[k : max(n, k + 1)]
        k = max(n, k + 1)
    return out if len(out) <= total else [*out[:total], Line(0, f"… {len(out) - total} more lines")]


def _statements(s: Sheet, group: Group, colour: Mapping[str, str], x: float, y: float) -> None:
    """Draw a line of text per statement."""
    texts = statement_texts(group)
    for n, c in colour.items():
        s.rect(x, y - 10, 13, 13, c, r=3, opacity=0.9)
        s.text(x + 22, y + 1, f"{n}: {texts.get(n, 'added by a transformation')}", 11.5, "m s", most=s.width - x - 34)
        y += 18


def _leaves(t: Tree) -> int:
    if isinstance(t, nodes.Sequence):
        return sum(_leaves(c) for _, c in t.children)
    return 1 if isinstance(t, Leaf) else _leaves(t.child)


def _parts(t: Tree, scope: tuple[str, ...] = ()) -> frozenset[tuple[object, ...]]:
    """Return the parts of a tree, with the statements below: members of bands, marks, parts of sequences."""
    if isinstance(t, nodes.Sequence):
        inside = [_parts(c, tuple(sorted(part))) | {("part", *sorted(part))} for part, c in t.children]
        return frozenset[tuple[object, ...]]().union(*inside)
    if isinstance(t, Leaf):
        return frozenset()
    here = {("mark", t.name, scope)} if isinstance(t, nodes.Mark) else {("band", t.members, scope)}
    return _parts(t.child, scope) | here


class _Drawing:
    """Draws a tree on a sheet. ``new``: parts with an outline."""

    def __init__(self, s: Sheet, t: Scheduled, new: frozenset[tuple[object, ...]]) -> None:
        self.s, self.new = s, new
        self.tree = flat(t.tree)
        self.colour = statement_colours(t.group, tuple(t.map.views))
        self.tasks = {c: level for level, cs in t.parallel for c in cs}
        self.all = frozenset(t.map.views)

    def below(
        self, t: Tree, scope: frozenset[str], x: float, y: float, step: float, above: float | None = None
    ) -> float:
        """Draw a node over the columns of its leaves; return the lower end."""
        w, s = step * _leaves(t), self.s
        cx = x + w / 2
        hue = self.colour[next(iter(scope))] if len(scope) == 1 else ""
        if above is not None:
            s.path(f"M{cx:.1f},{above:.1f}V{y:.1f}", hue, 1.6, opacity=0.6)
        named = () if scope == self.all else tuple(sorted(scope))
        if isinstance(t, nodes.Sequence):
            return self._sequence(t, x, y, step)
        if isinstance(t, Leaf):
            s.dot(cx, y + 3, 4, hue or GREY, "leaf: one instance")
            return y + 9
        if isinstance(t, nodes.Mark):
            tw = min(w - 6, len(t.name) * 11.5 * MONO + 18)
            outline = ORANGE if ("mark", t.name, named) in self.new else hue or "currentColor"
            s.rect(cx - tw / 2, y, tw, 19, "none", outline, r=9.5, dash="3 2.5", tip=f"mark {t.name}")
            s.text(cx, y + 13.5, t.name, 11.5, "m s", "middle", most=w)
            return self.below(t.child, scope, x, y + 30, step, y + 19)
        tall = self._band(t, ("band", t.members, named) in self.new, hue, cx, y, w)
        return self.below(t.child, scope, x, y + tall + 11, step, y + tall)

    def _band(self, t: Band, new: bool, hue: str, cx: float, y: float, w: float) -> float:
        s, rows, room = self.s, list[str](), max(6, int((w - 12) / (12 * MONO)))
        for m in t.members:  # a narrow column needs several lines
            text = f"{rows[-1]}, {m}" if rows else m
            if rows and len(text) <= room:
                rows[-1] = text
            else:
                rows.append(cut(m, room))
        parallel = [m for m in t.members if m in self.tasks]
        tall = 9 + 16 * max(1, len(rows))
        tw = min(w - 6, max(46, max(map(len, rows), default=0) * 12 * MONO + 22))
        tip = f"band {', '.join(t.members)}" + (f"; {', '.join(parallel)} at once" if parallel else "")
        stroke = ORANGE if new else hue or "currentColor"
        s.rect(cx - tw / 2, y, tw, tall, hue or "currentColor", stroke, r=5, opacity=0.17 if hue else 0.07,
               line=2.4 if parallel or new else 1.2, tip=tip)  # fmt: skip
        for n, r in enumerate(rows):
            s.text(cx, y + 17 + 16 * n, r, 12, "m b", "middle", most=tw)
        if parallel and w - tw > 120:
            s.text(cx + tw / 2 + 6, y + 17, f"parallel: {', '.join(parallel)}", 11.5, "s", most=(w - tw) / 2)
        return tall

    def _sequence(self, t: nodes.Sequence, x: float, y: float, step: float) -> float:
        s, w = self.s, step * _leaves(t)
        first, last = t.children[0][1], t.children[-1][1]
        begin, stop = x + step / 2 * _leaves(first), x + w - step / 2 * _leaves(last)
        s.path(f"M{begin:.1f},{y}H{stop:.1f}", line=2.4, opacity=0.8)
        end, left = y, x
        for part, child in t.children:
            n, mid = _leaves(child), left + step * _leaves(child) / 2
            alone = len(part) == 1
            c = self.colour[next(iter(part))] if alone else "currentColor"
            names = ", ".join(k for k in self.colour if k in part)
            s.path(f"M{mid:.1f},{y}V{y + 14}", c, 1.8)
            outline = ORANGE if ("part", *sorted(part)) in self.new else ""
            s.rect(left + 3, y + 14, step * n - 6, 25, c, outline, r=12.5, opacity=1 if alone else 0.2, line=2.4,
                   tip=f"filter {names}")  # fmt: skip
            s.text(mid, y + 31, names, 12, "m b", "middle", DARK if alone else "", most=step * n - 10)
            end = max(end, self.below(child, part, left, y + 50, step, y + 39))
            left += step * n
        return end


def _code(body: Body, depth: int) -> list[tuple[int, str, str]]:
    """Return loops as lines: (depth, text, statement)."""
    out: list[tuple[int, str, str]] = []
    for n in body:
        if isinstance(n, For):
            out += [(depth, f"for {n.var} in [{n.lo}, {n.hi})", ""), *_code(n.body, depth + 1)]
        elif isinstance(n, Inst):
            out.append((depth, f"{n.statement}({', '.join(map(str, n.args))})", n.statement))
        elif isinstance(n, If):
            condition = " and ".join(f"{c.left} {c.relation} {c.right}" for c in n.cond)
            out += [(depth, f"if {condition}", ""), *_code(n.then, depth + 1)]
            out += [(depth, "else", ""), *_code(n.orelse, depth + 1)] if n.orelse else []
        elif isinstance(n, Mark):
            out += [(depth, f"// {n.name}", ""), *_code(n.body, depth)]
    return out
