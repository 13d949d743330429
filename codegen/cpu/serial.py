"""CPU kernels of ordered steps: scatters, whose updates may collide, and running sums.

The loop over steps is sequential. Tasks and lanes run along the axes that initialiser and steps share: columns of a row
that is updated as a whole, lines that are processed one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from polydyn.codegen.cpu.emit import bound_names, emit, ranges
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.family import Family, Rule, Variant, build, keep
from polydyn.codegen.ir import Body, Compare, For, If, Let, Node, Store, rewrite
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.lower import Lowering, flat
from polydyn.codegen.passes.segments import vectorise
from polydyn.codegen.passes.tiles import unswitch
from polydyn.codegen.places import Places
from polydyn.schedules.errors import Declined
from polydyn.schedules.index import ONE, Index, minimum
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.tree.names import MarkName, b, extent, it, p
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import serial

COLUMNS = 256
"""Columns of a task: a row of them is a few cache lines."""


class SerialKernel(Variant):
    """Builds the kernel of an initialiser and its steps."""

    def __init__(
        self, name: str, group: Group, band: tuple[str, ...], tiled: bool, conditions: tuple[Compare, ...],
        target: CpuTarget,
    ) -> None:  # fmt: skip
        """Plan the kernel.

        ``band``: the iterators that both statements share; ``tiled``: vectors run along the last of them.
        ``conditions``: the conditions of a step, tested in order.
        """
        self.name, self.group, self.band, self.tiled, self.target = name, group, band, tiled, target
        self.conditions = conditions
        self.notes: list[str] = []

    @cached_property
    def schedule(self) -> Scheduled:
        """Tree and tile map."""
        return serial(self.group, self.band, self.tiled)

    def lowering(self, s: Statement) -> Lowering:
        """Return the lowering of a statement."""
        places, guards = Places(self.schedule), self.conditions if s.role != "init" else ()

        def f(a: Mapping[str, Index]) -> Body:
            env = places.env(s.name, a)
            address = self.group.arrays[s.array].address(tuple(i.subs(env) for i in s.index))
            again = s.reduce is None and any(i.fetches() for i in s.index)
            store = Store(s.array, address, flat(self.group, s.value, env, lambda x: None), s.reduce, again=again)
            here = tuple(Compare(c.relation, c.left.subs(env), c.right.subs(env)) for c in guards)
            return (If(here, (store,)),) if here else (store,)

        return f

    @property
    def launch(self) -> dict[str, Index]:
        """The size of a task."""
        return {extent(p("t")): Index.of(COLUMNS)} if self.tiled else {}

    @property
    def symbols(self) -> tuple[str, ...]:
        """The kernel's parameters."""
        return (*self.group.params, *self.launch)

    def build(self) -> Kernel:
        """Build the kernel."""
        body, count = build(SERIAL, self)
        kernel = Kernel(self.name, self.symbols, count, launch=self.launch, notes=tuple(dict.fromkeys(self.notes)))
        return emit(kernel, body, self.group.arrays, inline_math=True)

    def tile_count(self) -> dict[str, Index]:
        """Return the number of tiles along the last axis of the band, if there are tiles."""
        return {extent(x): e for x, e in self.schedule.extents().items() if x == b("t")}

    def vectors(self, body: Body) -> Body:
        """Vectorise loops over lanes; the others stay scalar, with a note."""
        lanes = {k for _, loops in self.schedule.parallel[1:] for k in loops}

        def f(n: Node) -> Node | Body:
            if not isinstance(n, For) or n.var not in lanes:
                return n
            vectors = vectorise(n, self.target.width)
            if isinstance(vectors, Declined):
                self.notes.append(f"loop {n.var} stays scalar: {vectors}")
                return n
            return vectors

        return rewrite(body, f)

    def tile(self, body: Body) -> Body:
        """Bind the tile's first element, and the extent of its live part."""
        tm, sizes = self.schedule.map, self.schedule.extents()
        first = tm.origins["t"].symbol
        live = Let(extent(it("t")), minimum(sizes[it("t")], tm.extents["t"] - first), body)
        one = sizes[b("t")] == ONE
        return (Let(first, tm.origin("t", Index.of(0) if one else Index.of(b("t"))), (live,)),)


SERIAL: Family[SerialKernel] = Family(
    names=bound_names,
    sizes=SerialKernel.tile_count,
    statements=lambda x: {s.name: x.lowering(s) for s in x.group.statements},
    opened=lambda _: ("o_t",),
    stores=(
        Rule("choose", "invariant choices are moved out of loops", lambda _, body: unswitch(body)),
        Rule("stages", "marks of stages are removed", keep, MarkName.STAGE),
        Rule("vectorise", "loops over lanes become vectors", SerialKernel.vectors),
        Rule("tile", "the first element of a tile and the extent of its live part", SerialKernel.tile, MarkName.TILE),
    ),
    band=lambda *_: ranges(),
)
