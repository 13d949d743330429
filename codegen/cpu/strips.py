"""Strips: the footprint of a share of rows in scratch, a box of places, padding included (docs/adr/0010).

Rows of a register tile are any pixels one after another: each begins somewhere in the strip, and from there on the
steps of the reduction lie alike for all of them.
"""

from __future__ import annotations

from functools import cached_property

from polydyn.codegen.cpu.contraction import Contraction
from polydyn.codegen.cpu.plan import Plan
from polydyn.codegen.cpu.scratch import Scratch
from polydyn.codegen.ir import Body, FlatLoad, Let, Store, walk_value
from polydyn.codegen.lower import flat
from polydyn.codegen.passes.parts import narrow
from polydyn.codegen.passes.prefetch import LINE, TYPES
from polydyn.codegen.places import Coordinates, Places
from polydyn.schedules.expr import Value, const
from polydyn.schedules.group.footprint import HIGH, LOW
from polydyn.schedules.index import ONE, ZERO, Index, maximum, minimum, product
from polydyn.schedules.proof.boxes import ContractTiles
from polydyn.schedules.proof.footprints import Strip
from polydyn.schedules.tree.names import a, extent, p
from polydyn.schedules.tree.strategies import FILL, FIRST_ROW, ROWS, SHARE_ROWS, SHARE_ROWS_END

FIRST_LINE, LINES = "s_lo", "s_n"
"""The first place of a share along the axis of its strip, and how many are copied."""
FOLLOWED = 8192
"""Bytes of a strip in one plane, two pages, from which the processor follows it by itself: others are asked for."""
V = Index.of


class Strips(Scratch):
    """Panels as ``Scratch``; instead of rows the box of places that their windows read, in the order of the places."""

    def __init__(self, product: Contraction, plan: Plan, places: Places) -> None:
        super().__init__(product, plan, places)
        assert product.footprint is not None, "strips are of a footprint"
        self.footprint = product.footprint

    @cached_property
    def _counts(self) -> dict[str, Index]:
        """Place -> how many of them the copy of a share runs."""
        f = self.footprint
        return {x: V(LINES) if x == f.strip else n.subs(f.sizes()) for x, (_, n) in f.box().items()}

    def _first(self, place: str) -> Index:
        return V(FIRST_LINE) if place == self.footprint.strip else ZERO

    def _address(self, at: dict[str, Index]) -> Index:
        """Where the element of these places lies."""
        out, stride = ZERO, ONE
        for x, _ in reversed(self.footprint.places):
            out, stride = out + (at[x] - self._first(x)) * stride, stride * self._counts[x]
        return out

    def row(self, statement: str, at: Coordinates) -> Index:
        """Where the strip holds the element that an instance reads."""
        return self._address(self.footprint.read(self.places.env(statement, at)))

    def filled(self, at: Coordinates) -> tuple[Index, Value]:
        """Where FILL stores, and what: the element of its places."""
        of = {x: V(a(x)).subs(at) + self._first(x) for x, _ in self.footprint.places}
        batch = {x: self.places.element(FILL, x, at) for x in self.product.roles.batch}
        value = flat(self.product.group, self.footprint.value, {**batch, **of}, lambda x: None)
        return self._address(of), narrow(value, self.footprint.dtype) if self.footprint.word else value

    def fill(self, body: Body) -> Body:
        """As ``Scratch``; what the last word reaches behind the box is 0."""
        end = product(self._counts.values())
        none = const(0, self.footprint.dtype)
        return (*super().fill(body), *(Store(ROWS, end + k, none) for k in range(self.footprint.beyond)))

    def following(self) -> dict[str, Index]:
        """The next plane: of each a strip is some lines, a stream of its own."""
        (outer, _), *_ = self.footprint.places
        return {} if outer == self.footprint.strip else {a(outer): V(a(outer)) + 1}

    def next_strip(self, at: Coordinates) -> tuple[FlatLoad, ...]:
        """What the copy of the next share reads first of plane ``p_k``, where a strip is lines of many planes.

        ``at``: coordinates of the accumulation. After the last lines of an image come the first ones of the next.
        """
        f, x = self.footprint, self.product
        (outer, plane), *_ = f.places
        short = (x.steps.constant or 0) >= x.target.core.strip // FOLLOWED
        if outer == f.strip or plane != V(x.roles.block) or f.word or not short:
            return ()
        more = minimum(1, maximum(0, x.rows - SHARE_ROWS_END))
        batch = {n: self.places.element(x.accumulation.name, n, at) for n in x.roles.batch}
        if x.roles.batch:
            batch[x.roles.batch[-1]] += 1 - more
        places = dict.fromkeys(dict(f.places), ZERO) | {outer: V(p("k")), f.strip: more * (V(FIRST_LINE) + LINES)}
        value = flat(x.group, f.value, batch | places, lambda y: None)
        read = (v for v in walk_value(value) if isinstance(v, FlatLoad) and v.dtype in TYPES)
        return tuple(v for v in read if p("k") in v.address.symbols())

    def lines(self) -> Index:
        """Lines of the cache that the strip of a share has in each plane."""
        (outer, _), *_ = self.footprint.places
        return product(n for x, n in self._counts.items() if x != outer).ceildiv(LINE)

    def taps(self, rows: int) -> dict[str, tuple[Index, Index]]:
        """Reduction -> the first step that a tile of so many rows from ``FIRST_ROW`` on needs, and the end of those.

        Others read zeros. Along a line they do for all rows of a tile only where they are further apart than these.
        """
        f, first = self.footprint, V(FIRST_ROW)
        env, steps = f.span(first, first + rows - 1) | f.sizes(), dict(f.steps)
        out = {}
        for step, (low, high) in f.taps().items():
            x, at = next((x, at) for x, at in f.places if step in at.symbols())
            apart, of_pixels = at.split(step)
            reach = int(apart * (steps[step] - 1))
            if x == f.strip or reach >= 2 * rows * max(of_pixels.terms.values()):
                out[step] = maximum(ZERO, low.subs(env)), minimum(steps[step], high.subs(env))
        return out

    def rows_parts(self) -> tuple[str, int]:
        """As ``Scratch``: addresses count single steps."""
        return self.footprint.dtype, 1

    def box(self) -> dict[str, Index]:
        """Sizes of the loops that FILL runs."""
        return {extent(a(x)): n for x, n in self._counts.items()}

    def around(self, body: Body) -> Body:
        """The share's lines: from those that its first row reads to those that its last one does."""
        f = self.footprint
        first, count = f.box()[f.strip]
        ends = {LOW: V(SHARE_ROWS) // f.line, HIGH: (maximum(1, SHARE_ROWS_END) - 1) // f.line} | f.sizes()
        return (Let(FIRST_LINE, first.subs(ends), (Let(LINES, count.subs(ends), body),)),)

    def rows_size(self, share: Index) -> Index:
        """Elements allocated for at most ``share`` row tiles: n rows meet ``(n + line - 2) // line + 1`` lines."""
        f = self.footprint
        high = (share * self.plan.rows + f.line - 2) // f.line
        return product(n.subs({LOW: ZERO, HIGH: high}) for _, n in f.box().values()).subs(f.sizes()) + f.beyond

    def tiles(self) -> ContractTiles:
        """As ``Scratch``, with what is to be proven of the strip."""
        f, tiles = self.footprint, super().tiles()
        loops = {x: a(x) for x, _ in f.places}
        strip = Strip(f, FILL, loops, f.box(), self.rows_size(V("S")), self.plan.rows, f.taps())
        return ContractTiles(**{**vars(tiles), "strip": strip})
