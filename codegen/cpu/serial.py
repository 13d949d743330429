"""CPU kernels of what comes in an order: scatters, whose updates may meet, and running sums, where each element goes on
from the one before.

Nothing of the loop over steps runs at once. Tasks and lanes are along the axes that initialiser and steps share:
columns of a row that is updated as a whole, lines that are worked on one by one.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from polydyn.codegen.cpu.emit import bound_names, emit
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.ir import Body, Compare, For, If, Let, Node, Store, consume, rewrite
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.lower import Lowering, flat, lower
from polydyn.codegen.passes.bind import bind, fold
from polydyn.codegen.passes.tiles import task_count, tasks, unswitch
from polydyn.codegen.passes.vectorise import vectorise_loop
from polydyn.codegen.pipeline import Step, loops, run
from polydyn.codegen.places import Places
from polydyn.schedules.errors import Declined
from polydyn.schedules.index import ONE, Index, minimum
from polydyn.schedules.model import Group, Statement
from polydyn.schedules.proof.proven import Proven
from polydyn.schedules.tree.names import MarkName, b, extent, it, p
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import serial

COLUMNS = 256
"""Of a task: a row of them is a few cache lines."""


class SerialKernel:
    """Builds the kernel of an initialiser and its steps."""

    def __init__(
        self, name: str, group: Group, band: tuple[str, ...], tiled: bool, conditions: tuple[Compare, ...],
        target: CpuTarget,
    ) -> None:  # fmt: skip
        """``band``: the iterators that both statements share; ``tiled``: vectors run along the last of them.
        ``conditions``: where there is a step, tested in their order.
        """
        self.name, self.group, self.band, self.tiled, self.target = name, group, band, tiled, target
        self.conditions = conditions
        self.notes: list[str] = []

    @cached_property
    def schedule(self) -> Scheduled:
        """Tree and tile map."""
        return serial(self.group, self.band, self.tiled)

    def lowering(self, s: Statement) -> Lowering:
        """What executes a statement's instance."""
        places, guards = Places(self.schedule), self.conditions if s.role != "init" else ()

        def f(a: Mapping[str, Index]) -> Body:
            env = places.env(s.name, a)
            address = self.group.arrays[s.array].address(tuple(i.subs(env) for i in s.index))
            again = s.reduce is None and any(i.fetches() for i in s.index)
            store = Store(s.array, address, flat(self.group, s.value, env, lambda x: None), s.reduce, again=again)
            here = tuple(Compare(c.relation, c.left.subs(env), c.right.subs(env)) for c in guards)
            return (If(here, (store,)),) if here else (store,)

        return f

    @cached_property
    def proven(self) -> Proven:
        """The schedule with its proof."""
        return Proven(self.schedule)

    def build(self) -> Kernel:
        """The kernel."""
        launch = {extent(p("t")): Index.of(COLUMNS)} if self.tiled else {}
        symbols = (*self.group.params, *launch)
        names = bound_names(self.group.arrays, symbols)
        body = run(self.name, loops(self.name, self.proven), self.steps(), names)
        count = task_count(body)
        last = (
            Step("tasks", "the coincident band becomes a range of tasks", lambda x: tasks(x, runs=True)),
            Step("fold", "decided guards and single trips go", fold),
        )
        body = run(self.name, body, last, names)
        kernel = Kernel(self.name, symbols, count, launch=launch, notes=tuple(dict.fromkeys(self.notes)))
        return emit(kernel, body, self.group.arrays, inline_math=True)

    def steps(self) -> tuple[Step, ...]:
        """The passes up to the coincident band."""
        table = {s.name: self.lowering(s) for s in self.group.statements}
        counts = {extent(x): e for x, e in self.schedule.extents().items() if x == b("t")}
        return (
            Step("bind", "the number of tiles", lambda x: bind(x, counts)),
            Step("lower", "statements become stores", lambda x: lower(x, table), ("o_t",)),
            Step("choose", "choices leave the loops that do not decide them", unswitch),
            Step("stages", "the marks of the stages go", lambda x: consume(x, MarkName.STAGE)),
            Step("vectorise", "loops over lanes become vectors", self._vectors),
            Step("tile", "the tile begins and ends where its elements do", self._tiles),
            Step("fold", "decided guards and single trips go", fold),
        )

    def _vectors(self, body: Body) -> Body:
        lanes = {k for _, loops in self.schedule.parallel[1:] for k in loops}

        def f(n: Node) -> Node | Body:
            if not isinstance(n, For) or n.var not in lanes:
                return n
            vectors = vectorise_loop(n, self.target.width)
            if isinstance(vectors, Declined):
                self.notes.append(f"loop {n.var} stays scalar: {vectors}")
                return n
            return vectors

        return rewrite(body, f)

    def _tiles(self, body: Body) -> Body:
        """The tile's first element, and the extent of its live part."""
        tm, sizes = self.schedule.map, self.schedule.extents()

        def f(x: Body) -> Body:
            first = tm.origins["t"].symbol
            live = Let(extent(it("t")), minimum(sizes[it("t")], tm.extents["t"] - first), x)
            one = sizes[b("t")] == ONE
            return (Let(first, tm.origin("t", Index.of(0) if one else Index.of(b("t"))), (live,)),)

        return consume(body, MarkName.TILE, f)
