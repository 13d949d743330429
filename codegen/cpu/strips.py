"""Footprint buffers: the footprint of a task's rows in scratch, a box of places, padding included (docs/adr/0010).

Rows of a register tile are any consecutive pixels. Each starts somewhere in the buffer, and the steps of the reduction
have the same offsets for all of them.
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
"""The first place of a task along the buffer's main axis, and the number of places that are copied."""
HW_PREFETCH_BYTES = 8192
"""Minimum bytes of a buffer in one plane (two pages) that the hardware prefetcher follows. Shorter ones are
prefetched."""
V = Index.of


class FootprintBuffer(Scratch):
    """Panels as in ``Scratch``; instead of rows the box of places that their windows read, in the order of the places.
    """

    def __init__(self, product: Contraction, plan: Plan, places: Places) -> None:
        super().__init__(product, plan, places)
        assert product.footprint is not None, "the product has a footprint"
        self.footprint = product.footprint

    @cached_property
    def _counts(self) -> dict[str, Index]:
        """Place -> the number of coordinates that the copy of a task runs over."""
        f = self.footprint
        return {x: V(LINES) if x == f.strip else n.subs(f.sizes()) for x, (_, n) in f.box().items()}

    def _first(self, place: str) -> Index:
        return V(FIRST_LINE) if place == self.footprint.strip else ZERO

    def _address(self, at: dict[str, Index]) -> Index:
        """Return the offset of the element at these places."""
        out, stride = ZERO, ONE
        for x, _ in reversed(self.footprint.places):
            out, stride = out + (at[x] - self._first(x)) * stride, stride * self._counts[x]
        return out

    def row(self, statement: str, at: Coordinates) -> Index:
        """Return the offset in the buffer of the element that an instance reads."""
        return self._address(self.footprint.read(self.places.env(statement, at)))

    def filled(self, at: Coordinates) -> tuple[Index, Value]:
        """Return the address and the value of FILL's store: the element of its places."""
        of = {x: V(a(x)).subs(at) + self._first(x) for x, _ in self.footprint.places}
        batch = {x: self.places.element(FILL, x, at) for x in self.product.roles.batch}
        value = flat(self.product.group, self.footprint.value, {**batch, **of}, lambda x: None)
        return self._address(of), narrow(value, self.footprint.dtype) if self.footprint.word else value

    def fill(self, body: Body) -> Body:
        """Lower FILL as in ``Scratch``, and store 0 in the elements past the box that the last word reads."""
        end = product(self._counts.values())
        none = const(0, self.footprint.dtype)
        return (*super().fill(body), *(Store(ROWS, end + k, none) for k in range(self.footprint.beyond)))

    def following(self) -> dict[str, Index]:
        """Return the coordinates of the next plane. Each plane has its own stream of image rows."""
        (outer, _), *_ = self.footprint.places
        return {} if outer == self.footprint.strip else {a(outer): V(a(outer)) + 1}

    def next_strip(self, at: Coordinates) -> tuple[FlatLoad, ...]:
        """Return the loads that the next task's copy begins with in plane ``p_k``, if a buffer has rows of many planes.

        ``at``: coordinates of the accumulation. The first image rows of the next image follow the last of this one.
        """
        f, x = self.footprint, self.product
        (outer, plane), *_ = f.places
        short = (x.steps.constant or 0) >= x.target.core.strip // HW_PREFETCH_BYTES
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
        """Return the cache lines that a task's buffer has in each plane."""
        (outer, _), *_ = self.footprint.places
        return product(n for x, n in self._counts.items() if x != outer).ceildiv(LINE)

    def taps(self, rows: int) -> dict[str, tuple[Index, Index]]:
        """Return reduction -> the range of steps that a tile of ``rows`` rows from ``FIRST_ROW`` on needs.

        The other taps read zero padding. Along an image row, a tap can be skipped only if it is outside for all rows of
        the tile.
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
        """Return the dtype and parts as in ``Scratch``; addresses count single steps."""
        return self.footprint.dtype, 1

    def box(self) -> dict[str, Index]:
        """Return the sizes of the loops that FILL runs."""
        return {extent(a(x)): n for x, n in self._counts.items()}

    def around(self, body: Body) -> Body:
        """Bind the task's image rows, from the first that its first row reads to the last that its last row reads."""
        f = self.footprint
        first, count = f.box()[f.strip]
        ends = {LOW: V(SHARE_ROWS) // f.line, HIGH: (maximum(1, SHARE_ROWS_END) - 1) // f.line} | f.sizes()
        return (Let(FIRST_LINE, first.subs(ends), (Let(LINES, count.subs(ends), body),)),)

    def rows_size(self, share: Index) -> Index:
        """Return the elements for ``share`` row tiles: n rows span ``(n + line - 2) // line + 1`` image rows."""
        f = self.footprint
        high = (share * self.plan.rows + f.line - 2) // f.line
        return product(n.subs({LOW: ZERO, HIGH: high}) for _, n in f.box().values()).subs(f.sizes()) + f.beyond

    def tiles(self) -> ContractTiles:
        """Return the sizes as in ``Scratch``, with the properties of the buffer that the proof needs."""
        f, tiles = self.footprint, super().tiles()
        loops = {x: a(x) for x, _ in f.places}
        strip = Strip(f, FILL, loops, f.box(), self.rows_size(V("S")), self.plan.rows, f.taps())
        return ContractTiles(**{**vars(tiles), "strip": strip})
