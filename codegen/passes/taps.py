"""Windows in registers: a tile of adjacent outputs is straight-line code that loads every input once.

Adjacent outputs read mostly the same inputs. After unrolling, the taps of all outputs of a tile are consecutive
statements; ``_by_loads`` groups those that read the same element. Every sum adds its taps in the original order. Taps
that several sums have in common, such as a row of a pooling window, are added up once for all of them.

Guards (of padding, or of a partial tile) select a version of the tile. A tile that is fully inside has none. The other
version checks once per element, and keeps the masks of its vectors in registers.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, groupby

from polydyn.codegen import ir
from polydyn.codegen.indices import map_node_indices, mentions
from polydyn.codegen.passes.hoist import arguments, comparison, hoist_masks
from polydyn.codegen.passes.reach import end_of, input_bounds
from polydyn.codegen.passes.registers import keep_loads, registers, share_loads, unroll
from polydyn.codegen.passes.unzip import share_strided_loads
from polydyn.schedules.errors import CodegenError
from polydyn.schedules.expr import Const, FromIndex, Op, Value, conjuncts, const
from polydyn.schedules.index import ZERO, Atom, Index, maximum, minimum

UNROLLED_AT_EDGES = 64
"""Maximum taps that are unrolled where guards are checked too. Longer windows reach these versions a few times in a
line; unrolled, their checks of 256 taps take gcc ten seconds."""
LONG_SUM = 5
"""Minimum taps per iteration of a loop's sum that is split into two chains."""
V = Index.of


@dataclass(frozen=True)
class Window:
    """The description of a tile.

    ``outputs``: the loop over its outputs, ``count`` of them, of which ``live`` exist (None: all). ``loops``: loops of
    the window that are unrolled too; the others stay. ``sums``: buffers of sums and results -> dtype, one vector per
    output. ``moving``: buffers that different outputs read at different coordinates. ``partial``: not all lanes exist.
    ``origin``: the symbol of the first output.
    """

    outputs: str
    count: int
    live: Index | None
    loops: tuple[str, ...]
    sums: Mapping[str, str]
    moving: frozenset[str]
    partial: bool = False
    origin: str = ""


@dataclass(frozen=True)
class _Tap:
    """One addition to a sum.

    ``live``: the number of its output, if that may not exist; ``conditions``: those of its guard; ``key``: the elements
    it reads; ``parts``: values that are added up before.
    """

    node: ir.Set
    live: int
    conditions: tuple[ir.Compare, ...]
    key: tuple[Value, ...]
    parts: tuple[Value, ...] = ()


def specialise_guards(body: ir.Body, window: Window) -> ir.Body:
    """Version the tile by its bounds checks.

    It has no checks if it is fully inside, only lane checks if only lanes may be outside, and otherwise all checks.
    Before: loops over outputs and taps, with results in ``window.sums``. A tap whose guard is false adds nothing to its
    sum (the caller has verified that), so it is skipped.
    """
    taps = math.prod(n.hi.constant or 1 for n in ir.walk(body) if isinstance(n, ir.For) and n.var in window.loops)
    unrolled = _Version.of(body, window, window.loops)
    edge = unrolled if taps <= UNROLLED_AT_EDGES else _Version.of(body, window, ())
    guarded = out = _two_chains(_edge_version(edge.checked, (), window))
    if at_edge := edge.split.lines:
        out = _edge_version(edge.split.body(edge.whole, lines=True), at_edge, window)
    lines, lanes = unrolled.split.lines, unrolled.split.lanes
    if edge is not unrolled:
        out = guarded = _choice(at_edge, out, guarded)
    if (lanes or edge is not unrolled) and not window.partial:
        inside = _edge_version(unrolled.split.body(unrolled.whole, lines=True, lanes=True), (*lines, *lanes), window)
        out = _choice(lanes, inside, out)
    return _choice(lines, out, guarded)


@dataclass(frozen=True)
class _Version:
    """A tile with some of its loops over taps unrolled.

    ``whole``: for a tile whose outputs all exist; ``checked``: with scalar checks around taps. ``split`` knows when no
    check is needed.
    """

    whole: ir.Body
    checked: ir.Body
    split: _Guards

    @classmethod
    def of(cls, body: ir.Body, window: Window, loops: Sequence[str]) -> _Version:
        """Unroll the outputs and the ``loops`` of a tile, and keep its sums in registers."""
        body = unroll(_whole(body, window), (window.outputs, *loops))
        for name, dtype in window.sums.items():
            body = registers(body, name, dtype)
        body = ir.rewrite(body, lambda n: n.then if isinstance(n, ir.If) and _live(n) == 0 else n)  # one output exists
        split = _Guards({n.var: n for n in ir.walk(body) if isinstance(n, ir.For)}, [], [])
        if window.live is not None:
            split.lines.append(window.live - window.count)
        return cls(_without_live(body), split.body(body), split)


def _edge_version(body: ir.Body, edges: Sequence[Index], window: Window) -> ir.Body:
    """Return a version with its guards split, for a tile in which all ``edges`` are >= 0."""
    body = _constants_first(_arranged(_without_extremes(body, tuple(_tightest(edges))), window, count()))
    body = _hoist_common_loads(body, window)
    return keep_loads(share_loads(ir.rewrite(body, lambda n: hoist_masks(n, "mask") if isinstance(n, ir.For) else n)))


def _choice(edges: Sequence[Index], then: ir.Body, orelse: ir.Body) -> ir.Body:
    """Run ``then`` if all ``edges`` are >= 0."""
    conditions = tuple(ir.Compare(">=", e, ZERO) for e in _tightest(edges))
    if any(c.decided() is False for c in conditions):
        return orelse
    return (ir.If(conditions, then, orelse),) if conditions else then


def _whole(body: ir.Body, window: Window) -> ir.Body:
    """Give loops over outputs a constant extent; guard memory accesses by ``live``."""

    def f(n: ir.Node) -> ir.Node:
        if not (isinstance(n, ir.For) and n.var == window.outputs):
            return n
        touches = any(
            (isinstance(x, ir.Store) and x.buffer not in window.sums)
            or (
                isinstance(x, (ir.Store, ir.Def, ir.Set))
                and any(isinstance(v, ir.FlatLoad) for v in ir.walk_value(x.value))
            )
            for x in ir.walk(n.body)
        )
        live = window.live if touches else None
        inner: ir.Body = n.body if live is None else (ir.If((ir.Compare("<", V(n.var), live),), n.body),)
        return replace(n, lo=ZERO, hi=V(window.count), body=inner)

    return ir.rewrite(body, f)


def _live(n: ir.Node) -> int | None:
    """Return the number of the output that the node checks, or None if it is not such a check."""
    if not isinstance(n, ir.If) or len(n.cond) != 1 or n.cond[0].relation != "<" or n.orelse:
        return None
    return n.cond[0].left.constant


def _without_live(body: ir.Body) -> ir.Body:
    return ir.rewrite(body, lambda n: n.then if isinstance(n, ir.If) and _live(n) is not None else n)


# -- guards ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Guards:
    """Removes guards from values.

    ``loops``: loops that stay. ``lines`` and ``lanes`` collect expressions that are >= 0 if the guards hold: ``lines``
    for guards that are uniform over lanes, ``lanes`` for ranges of lanes, in every iteration of these loops.
    """

    loops: Mapping[str, ir.For]
    lines: list[Index]
    lanes: list[Index]

    def body(self, body: ir.Body, lines: bool = False, lanes: bool = False) -> ir.Body:
        """Put sets under ``If`` with the scalar part of their guards.

        ``lines``, ``lanes``: these hold, and are dropped.
        """

        def f(n: ir.Node) -> ir.Node:
            if not isinstance(n, ir.Set) or n.reduce is None:
                return n
            conditions: list[ir.Compare] = []
            value = ir.map_value(n.value, lambda v: self._part(v, lines, lanes, conditions))
            new = replace(n, value=value)
            return ir.If(tuple(dict.fromkeys(conditions)), (new,)) if conditions else new

        return ir.rewrite(body, f)

    def _part(self, v: Value, lines: bool, lanes: bool, conditions: list[ir.Compare]) -> Value:
        if isinstance(v, ir.FlatLoad) and v.guard is not None:
            left = self._split(v.guard, lines, lanes, conditions)
            if left is None or v.mask is None:
                return replace(v, guard=left)
            return replace(v, mask=None, guard=replace(left, high=minimum(left.high, v.mask)))
        if isinstance(v, Op) and v.name in ("where", "select") and _has_loads(v):
            left = self._split(v.args[0], lines, lanes, conditions)
            return v.args[1] if left is None else replace(v, name="select", args=(left, *v.args[1:]))
        return v

    def _split(self, guard: Value, lines: bool, lanes: bool, conditions: list[ir.Compare]) -> ir.Between | None:
        """Return the lane-dependent rest of a guard; conditions that are uniform over lanes go to ``conditions``."""
        left: list[ir.Between] = []
        for part in conjuncts(guard):
            if isinstance(part, ir.Between):
                ends = [-x for x in arguments(part.low, "max")] + [x - part.lanes for x in arguments(part.high, "min")]
                least = [self._least(e) for e in ends]
                fixed = not any(map(self._varies, least))
                self.lanes.extend(least if fixed else [])
                left += [] if fixed and lanes else [part]
                continue
            c = comparison(part)
            if c is None:
                raise CodegenError(f"a guard of a tap is not a conjunction of comparisons: {part}")
            e = end_of(c)
            fixed = not self._varies(e)
            self.lines.extend([e] if fixed else [])
            conditions += [] if fixed and lines else [c]
        if not left:
            return None
        low, high = maximum(*(b.low for b in left)), minimum(*(b.high for b in left))
        return replace(left[0], low=low, high=high)

    def _varies(self, e: Index) -> bool:
        return not e.symbols().isdisjoint(self.loops)

    def _least(self, e: Index) -> Index:
        """Return the smallest value over loops along which the expression moves by a constant."""
        for x in e.symbols() & self.loops.keys():
            step, rest = e.split(x)
            if step.constant is not None and x not in rest.symbols():
                loop = self.loops[x]
                e = rest + step * (loop.lo if step.constant > 0 else loop.hi - 1)
        return e


def _has_loads(v: Value) -> bool:
    return any(isinstance(x, ir.FlatLoad) for x in ir.walk_value(v))


def _tightest(edges: Sequence[Index]) -> Iterator[Index]:
    """Yield the smallest of expressions that differ by a constant."""
    least: dict[Index, int] = {}
    for e in edges:
        c = e.terms.get((), 0)
        base = e - c
        least[base] = min(c, least.get(base, c))
    for base, c in least.items():
        if base.terms or c < 0:
            yield base + c


def _without_extremes(body: ir.Body, edges: Collection[Index]) -> ir.Body:
    """Resolve minima and maxima that are decided if all ``edges`` are >= 0, mostly counts of taps."""
    least = {e - e.terms.get((), 0): -e.terms.get((), 0) for e in edges}

    def above(a: Index, b: Index) -> bool:
        rest = (a - b).terms.get((), 0)
        base = a - b - rest
        return rest >= 0 if not base.terms else base in least and least[base] + rest >= 0

    def atom(a: Atom) -> Index:
        if a.kind not in ("min", "max"):
            return Index({(a,): 1})
        args = list(a.args)
        for x in a.args:
            others = [y for y in args if y is not x]
            if any(above(x, y) if a.kind == "min" else above(y, x) for y in others):
                args = others
        return minimum(*args) if a.kind == "min" else maximum(*args)

    def value(v: Value) -> Value:
        if not (isinstance(v, Op) and v.name in ("min", "max") and isinstance(v.args[0], ir.Ramp)):
            return v
        ramp, bound = v.args[0], v.args[1]
        if not isinstance(bound, (FromIndex, Const)):
            return v
        limit = bound.index if isinstance(bound, FromIndex) else V(int(bound.value))
        ends = (ramp.start, ramp.start + ramp.step * (ramp.lanes - 1))
        outside = all(above(e, limit) if v.name == "min" else above(limit, e) for e in ends)
        return bound if outside else v

    def indices(i: Index) -> Index:
        return i.rebuild(atom)

    return ir.map_values(ir.rewrite(body, lambda n: map_node_indices(n, indices)), value)


def _constants_first(body: ir.Body) -> ir.Body:
    """Move loop-invariant vectors and quotients into registers at the top of the tile: masks, counts of taps."""
    loops = {n.var for n in ir.walk(body) if isinstance(n, ir.For)}
    found: dict[Value, ir.Reg] = {}

    def replaced(v: Value) -> Value:
        parts = list(ir.walk_value(v))
        symbols, fetched = mentions(ir.Def("", v))
        fixed = not (symbols & loops or fetched or any(isinstance(x, (ir.FlatLoad, ir.Reg)) for x in parts))
        if fixed and (ir.lanes_of(v) > 1 or any(isinstance(x, Op) and x.name == "div" for x in parts)):
            return found.setdefault(v, ir.Reg(v.dtype, f"fixed{len(found)}", ir.lanes_of(v)))
        if isinstance(v, ir.FlatLoad) and v.guard is not None:
            return replace(v, guard=replaced(v.guard))
        if not isinstance(v, (Op, ir.Apply)):
            return v
        args = tuple(map(replaced, v.args))
        return v if all(map(operator.is_, args, v.args)) else replace(v, args=args)

    def f(n: ir.Node) -> ir.Node:
        if not isinstance(n, (ir.Store, ir.Def, ir.Set)):
            return n
        value = replaced(n.value)
        return n if value is n.value else replace(n, value=value)

    out = ir.rewrite(body, f)
    return (*(ir.Def(r.name, v, r.lanes) for v, r in found.items()), *out)


def _hoist_common_loads(body: ir.Body, window: Window) -> ir.Body:
    """Read loads that taps under several checks have in common, such as weights, once before all checks."""
    body = tuple(ir.with_bodies(n, tuple(_hoist_common_loads(b, window) for b in ir.bodies(n))) for n in body)
    asked = [n for n in body if isinstance(n, ir.If)]
    readers, wide = Counter[ir.FlatLoad](), dict[ir.FlatLoad, int]()
    for n in asked:
        sets = [x for x in ir.walk((n,)) if isinstance(x, ir.Set)]
        found = {
            v: x.lanes for x in sets for v in ir.walk_value(x.value) if isinstance(v, ir.FlatLoad) and v.guard is None
        }
        readers.update(found.keys())
        wide |= found
    alike = [v for v in readers if readers[v] > 1 and v.buffer not in window.moving]
    held: dict[Value, ir.Reg] = {v: ir.Reg(v.dtype, f"held{k}", wide[v]) for k, v in enumerate(alike)}
    if not held:
        return body
    first = (
        ir.Def(held[v].name, v if v.lanes == wide[v] else ir.Broadcast(v.dtype, v, wide[v]), wide[v]) for v in alike
    )
    at = body.index(asked[0])
    return (*body[:at], *first, *ir.map_values(body[at:], lambda v: held.get(v, v)))


def _two_chains(body: ir.Body) -> ir.Body:
    """Split sums of loops over taps into two chains each.

    At an edge few sums have all taps, so latency would be visible.
    """
    each = (
        _chained(n) if isinstance(n, ir.For) else (ir.with_bodies(n, tuple(map(_two_chains, ir.bodies(n)))),)
        for n in body
    )
    return tuple(n for nodes in each for n in nodes)


def _chained(loop: ir.For) -> ir.Body:
    """Let every other addition to a sum in a loop over taps go to a second register, which is added after the loop."""
    inside = {x.reg for x in ir.walk(loop.body) if isinstance(x, ir.Def)}
    taps, second = Counter[str](), dict[ir.Reg, str]()

    def f(x: ir.Node) -> ir.Node:
        if not (isinstance(x, ir.Set) and x.reduce == "sum" and x.value.dtype == "float32" and x.reg not in inside):
            return x
        taps[x.reg] += 1
        if taps[x.reg] % 2:
            return x
        register = ir.Reg("float32", f"{x.reg}_second", x.lanes)
        second[register] = x.reg
        return replace(x, reg=register.name)

    (new,) = ir.rewrite((loop,), f)
    if max(taps.values(), default=0) < LONG_SUM:
        return (loop,)
    zeros = (ir.Def(r.name, ir.Broadcast("float32", const(0, "float32"), r.lanes), r.lanes) for r in second)
    return (*zeros, new, *(ir.Set(sum_, r, r.lanes, "sum") for r, sum_ in second.items()))


# -- order -----------------------------------------------------------------------------------------------------------


def _arranged(body: ir.Body, window: Window, fresh: Iterator[int]) -> ir.Body:
    """Group runs of taps that read the same elements, under one check each."""
    out: list[ir.Node] = []
    run: list[_Tap] = []
    for n in body:
        tap = _tap(n, window)
        if tap is not None:
            run.append(tap)
            continue
        out += _emitted(_by_loads(_partial_sums(_unzipped(run, window))), window, fresh)
        run = []
        out.append(ir.with_bodies(n, tuple(_arranged(b, window, fresh) for b in ir.bodies(n))))
    return (*out, *_emitted(_by_loads(_partial_sums(_unzipped(run, window))), window, fresh))


def _tap(n: ir.Node, window: Window) -> _Tap | None:
    live, conditions = 0, tuple[ir.Compare, ...]()
    while isinstance(n, ir.If):
        if n.orelse or len(n.then) != 1:
            return None
        asked = _live(n)
        live, conditions = (live, (*conditions, *n.cond)) if asked is None else (max(live, asked), conditions)
        n = n.then[0]
    if not isinstance(n, ir.Set) or n.reduce is None:
        return None
    return _Tap(n, live, conditions, _key(n, window))


def _key(n: ir.Set, window: Window) -> tuple[Value, ...]:
    return tuple(v for v in ir.walk_value(n.value) if isinstance(v, ir.FlatLoad) and v.buffer in window.moving)


def _unzipped(run: Sequence[_Tap], window: Window) -> list[_Tap]:
    """Return the taps with even/odd vectors extracted from whole vectors, which taps with equal conditions share."""
    found: dict[tuple[ir.Compare, ...], list[ir.FlatLoad]] = {}
    for t in run:
        found.setdefault(t.conditions, []).extend(v for v in ir.walk_value(t.node.value) if isinstance(v, ir.FlatLoad))
    halves = {c: share_strided_loads(loads) for c, loads in found.items()}

    def f(t: _Tap) -> _Tap:
        of = halves[t.conditions]
        value = ir.map_value(t.node.value, lambda v: of.get(v, v) if isinstance(v, ir.FlatLoad) else v)
        node = replace(t.node, value=value)
        return replace(t, node=node, key=_key(node, window))

    return [f(t) for t in run] if any(halves.values()) else list(run)


def _partial_sums(run: Sequence[_Tap]) -> list[_Tap]:
    """Merge adjacent taps that the same sums add into one tap, which adds their sum."""
    readers: dict[tuple[Value, tuple[ir.Compare, ...]], set[str]] = {}
    sums: dict[str, list[_Tap]] = {}
    for t in run:
        readers.setdefault((t.node.value, t.conditions), set()).add(t.node.reg)
        sums.setdefault(t.node.reg, []).append(t)
    out: list[_Tap] = []
    for taps in sums.values():
        for (regs, _), group in groupby(taps, lambda t: (readers[t.node.value, t.conditions], t.conditions)):
            alike = list(group)
            values = tuple(t.node.value for t in alike)
            several = len(regs) > 1 and len(values) > 1
            out += [replace(alike[0], key=values, parts=values)] if several else alike
    return out


def _by_loads(run: Sequence[_Tap]) -> list[list[_Tap]]:
    """Group taps that read the same elements under the same conditions.

    The first sum that is not complete leads; all others whose next tap reads the same follow. The taps of one sum keep
    their order.
    """
    left: dict[str, list[_Tap]] = {}
    for t in reversed(run):
        left.setdefault(t.node.reg, []).append(t)
    order, groups = list(dict.fromkeys(t.node.reg for t in run)), list[list[_Tap]]()
    while order:
        lead = left[order[0]][-1]
        alike = [r for r in order if (left[r][-1].key, left[r][-1].conditions) == (lead.key, lead.conditions)]
        members = [left[r].pop() for r in alike]
        groups.append(members)
        order = [r for r in order if left[r]]
    return groups


def _emitted(groups: Sequence[Sequence[_Tap]], window: Window, fresh: Iterator[int]) -> ir.Body:
    """Emit groups under their conditions.

    Common conditions of all groups are checked once, those of adjacent groups too.
    """
    if not groups:
        return ()
    # elements that a live output reads may be read: dead outputs of the tile add them too, but are not stored
    first = [(min(t.live for t in g), g[0].conditions) for g in groups]
    asked = input_bounds(first, window.live, window.count, window.origin)
    common = tuple(c for c in asked[0] if all(c in x for x in asked))
    out: list[ir.Node] = []
    for g, conditions in zip(groups, asked, strict=True):
        rest = tuple(c for c in conditions if c not in common)
        nodes = _additions(g, fresh)
        last = out[-1] if out else None
        if rest and isinstance(last, ir.If) and last.cond == rest:
            out[-1] = replace(last, then=(*last.then, *nodes))
        else:
            out += [ir.If(rest, nodes)] if rest else nodes
    return (ir.If(common, tuple(out)),) if common else tuple(out)


def _additions(group: Sequence[_Tap], fresh: Iterator[int]) -> ir.Body:
    """Return the additions of taps that read the same elements."""
    parts = group[0].parts
    if not parts:
        return tuple(t.node for t in group)
    first, lanes = group[0].node, group[0].node.lanes
    part = ir.Reg(first.value.dtype, f"part{next(fresh)}", lanes)
    sums = tuple(ir.Set(part.name, v, lanes, first.reduce) for v in parts[1:])
    return (ir.Def(part.name, parts[0], lanes), *sums, *(replace(t.node, value=part) for t in group))
