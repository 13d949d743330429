"""CPU kernels for element-wise and stitch groups: a coincident band, phases inside, vector loops.

Vectors run along the last iterator of the band (element-wise, reductions over outer axes) or along the innermost
iterator of every stage (row reductions: softmax, norms), whichever accesses memory with unit stride and fills vectors.

A local is stored in a register of the vector loop if all readers share the loop, in a row register if it has one
element per row, else in a row buffer. If rows are lanes, their buffers are interleaved. Row buffers have versions
(BladeDISC 4.2; docs/cpu.md 4): on the stack if the row is a short constant; in scratch if all of them fit the L2 cache;
or none, in which case every pass over the row recomputes its elements from the inputs. Rows of unknown length get both
of the last two and choose at run time, so that scratch is bounded for every row length. Stores of outputs bypass the
caches if a launch moves more than they hold; the launch passes the number of bytes (``STREAM``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from polydyn.codegen import ir
from polydyn.codegen.cpu.band import Band
from polydyn.codegen.cpu.choices import Choices, with_default
from polydyn.codegen.cpu.emit import bound_names, emit, ranges
from polydyn.codegen.cpu.streaming import CACHE, STREAM, STREAMS, moved_bytes, reading_order
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.family import Family, Form, Rule, Variant, build, keep
from polydyn.codegen.kernel import Kernel
from polydyn.codegen.lower import Lowering, flat, scratch_bytes
from polydyn.codegen.passes.announce import prefetch_for_write, without_announcements
from polydyn.codegen.passes.jam import copy_of, jam
from polydyn.codegen.passes.segments import vectorise
from polydyn.codegen.passes.transpose import by_blocks, transpose_loads
from polydyn.codegen.places import Places
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import ITEMSIZE, Load, Value
from polydyn.schedules.index import ONE, ZERO, Index, maximum, minimum, product
from polydyn.schedules.model import Group, Statement, row_major
from polydyn.schedules.proof.obligations import vectors_inside
from polydyn.schedules.proof.proven import Obligation, Proven
from polydyn.schedules.tree.loops import Size
from polydyn.schedules.tree.names import MarkName, b, extent, it, p
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import nest

MAP_TILE = 1024
"""Elements per task of an element-wise group: about half a microsecond of work."""
TRANSPOSE_TILE = (16, 512)
"""Elements of a task's tile along the output's rows, and along the rows of a transposed operand. The latter are read
in long runs, a few rows at a time, so that hardware prefetchers follow."""
MAP_TILES = tuple(1 << n for n in range(6, 15))
TRANSPOSE_TILES = (16, 32, 64), (128, 256, 512, 1024)
"""Search choices instead of these defaults."""
REDUCE_TILE = 64
"""Elements per task if every element has a reduction of its own."""
STACK_BYTES = 8192
"""Maximum bytes of all row buffers of constant size on the stack."""
CHAINS = 4
"""Independent accumulators of a reduction, over all rows that are processed together."""
ROWS_IN_FLIGHT = 2
"""Rows of an attention that are processed together, so that the end of one row overlaps with the other."""
SHORT_ROW, MIN_PAIRED_ROW, PAIRED_BYTES = 1024, 128, 10 << 20
"""Limits for processing two rows together.

SHORT_ROW: maximum elements of a row whose end still matters. MIN_PAIRED_ROW: minimum rows, for which half as many
tasks are enough for any machine. PAIRED_BYTES: maximum bytes of a launch. In larger launches rows are better read
one after another: two adjacent rows share pages, in which hardware prefetches only one stream."""
MOST_OPERATIONS = 64
"""Maximum operations of a value that is recomputed in every pass."""
V = Index.of


class NestKernel(Variant):
    """Builds the kernel of one group from its shared iterators and phases."""

    def __init__(
        self,
        name: str,
        group: Group,
        prefix: tuple[str, ...],
        phases: dict[str, int],
        target: CpuTarget,
        rows: bool = False,
        rows_in_flight: int = 1,
        tiled: bool | None = None,
        size: Size | None = None,
        paired: bool = False,
    ) -> None:
        """Plan the kernel.

        ``rows``: vectors must run along the rows (the nest is a part of an attention). ``rows_in_flight``: rows
        that are processed together. ``tiled``: whether vectors run along the band; by default the strides
        decide. ``size``: elements of a tile, if they are not an argument of the kernel. ``paired``: tasks may
        be pairs of rows.
        """
        self.name, self.group, self.prefix, self.phases, self.target = name, group, prefix, phases, target
        self.band = Band(group, prefix, phases, target)
        self.extents = self.band.extents
        self.size = size
        self.tiled = not rows and bool(prefix) and self.band.runs_along() if tiled is None else tiled
        self.across = self.band.across() if self.tiled and not rows else None
        arrays = group.arrays.values()
        self.streams = not rows and any(a.role == "output" and a.dtype == "float32" for a in arrays)
        self.place = {n: self._place(n) for n, a in group.arrays.items() if a.role == "local"}
        self.notes: list[str] = []
        self.in_pairs = paired and not self.tiled and self._at_once() != ONE
        self.rows_in_flight = ROWS_IN_FLIGHT if self.in_pairs else rows_in_flight

    def _at_once(self) -> Index:
        """Return the rows of a task, over the group's parameters: pairs if rows are short, many and fit the caches.

        The number of threads has no influence, because sums of paired rows have other chains. Rows of a known length
        stay single: the compiler unrolls their loops, and the processor overlaps them.
        """
        steps = [product(e for _, e in s.iters[len(self.prefix) :]) for s in self.group.statements if s.reduce]
        inside = [e for e in steps if e != ONE]
        if not self.prefix or all(e.constant is not None for e in inside):
            return ONE
        rows = product(self.extents[x] for x in self.prefix)
        room = (SHORT_ROW - maximum(*inside), rows - MIN_PAIRED_ROW, PAIRED_BYTES - moved_bytes(self.group))
        return 1 + product(minimum(1, maximum(0, x + 1)) for x in room)

    def _maps(self) -> bool:
        """Whether every statement computes one element of the band, in vectors along it."""
        return self.tiled and self.band.maps

    def reading_order(self) -> tuple[str, ...]:
        """Return the task loops in the operands' memory order, outermost first; empty if it is the output's."""
        head = tuple(x for x in self.prefix[:-1] if x != self.across)
        if self.across:
            return (*head, b("u"), b("t"))
        order = reading_order(self.group, head)
        return (*order, b("t")) if order else ()

    def _place(self, array: str) -> str:
        """Return the storage of a local: ``loop`` register, ``row`` register, or ``scratch``."""
        return self.band.place_of(array)

    # -- lowering ------------------------------------------------------------------------------------------------

    @cached_property
    def schedule(self) -> Scheduled:
        """Tree and tile map."""
        return nest(self.group, self.prefix, self.phases, self.tiled, self.across, self.size, self.in_pairs)

    @cached_property
    def places(self) -> Places:
        """The coordinates of instances."""
        return Places(self.schedule)

    def _local(self, reader: Statement, x: Load, env: Mapping[str, Index], recompute: bool) -> Value | None:
        """Return the value of a read of a local. In the loop that computes it, a buffered row is also a register."""
        where = self.place.get(x.buffer)
        if where is None:
            return None
        if where == "row" or self._in_loop(reader, x, env):
            return ir.Reg(x.dtype, f"v_{x.buffer}")
        if not recompute:
            return ir.FlatLoad(x.dtype, x.buffer, self._row_address(x, env))
        writer = self.writer(x.buffer)
        assert writer is not None, "verified by _can_repeat"
        at = {str(i): e for i, e in zip(writer.index, x.index, strict=True)}
        return flat(self.group, writer.value, at, lambda y: self._local(reader, y, env, recompute))

    def _can_repeat(self) -> bool:
        """Whether every row buffer can be recomputed by its readers: no reduction computes it, and it is cheap."""
        size: dict[str, int] = {}
        for s in self.group.statements:
            if self.place.get(s.array) not in ("scratch", "loop"):
                continue
            if self.writer(s.array) is None or not all(i.is_symbol for i in s.index):
                return False
            if {str(i) for i in s.index} != {n for n, _ in s.iters}:
                return False
            size[s.array] = sum(size.get(v.buffer, 0) if isinstance(v, Load) else 1 for v in ir.walk_value(s.value))
        return all(n <= MOST_OPERATIONS for n in size.values())

    def _in_loop(self, reader: Statement, x: Load, env: Mapping[str, Index]) -> bool:
        writer = self.writer(x.buffer)
        if writer is None or self.band.stage_of[writer.name] != self.band.stage_of[reader.name]:
            return False
        return tuple(i.subs(env) for i in writer.index) == x.index

    def writer(self, array: str) -> Statement | None:
        """Return the only statement that writes an array, if it is not a reduction."""
        writers = [s for s in self.group.statements if s.array == array]
        return writers[0] if len(writers) == 1 and writers[0].reduce is None else None

    def _row_address(self, x: Load, env: Mapping[str, Index]) -> Index:
        """Return the offset of an element in a row buffer. If rows are lanes, they are interleaved."""
        array = self.group.arrays[x.buffer]
        inner = len(self.prefix)
        strides = row_major(array.shape[inner:])
        at = sum((i * s for i, s in zip(x.index[inner:], strides, strict=True)), ZERO)
        if not self.tiled:
            return at
        return at * self._lanes() + (env[self.prefix[-1]] - self.schedule.map.origins["t"].symbol) % self._lanes()

    def _lanes(self) -> int:
        """Return the number of rows of a vector."""
        return self.target.width if self.tiled else 1

    def lowering(self, s: Statement, again: bool = False) -> Lowering:
        """Return the lowering of a statement. ``again``: rows are recomputed by their readers instead of stored."""
        where = self.place.get(s.array)

        def f(a: Mapping[str, Index]) -> ir.Body:
            env = self.places.env(s.name, a)
            value = flat(self.group, s.value, env, lambda x: self._local(s, x, env, again))
            target = Load(s.value.dtype, s.array, tuple(i.subs(env) for i in s.index))
            if where == "loop":
                return (ir.Def(f"v_{s.array}", value),)
            if where == "row":
                return (ir.Set(f"v_{s.array}", value, 1, s.reduce),)
            if where == "scratch":
                address = self._row_address(target, env)
                if self.writer(s.array) is None:
                    return (ir.Store(s.array, address, value, s.reduce),)
                register = ir.Reg(value.dtype, f"v_{s.array}")
                if again:
                    return (ir.Def(register.name, value),)
                return (ir.Def(register.name, value), ir.Store(s.array, address, register))
            address = self.group.arrays[s.array].address(target.index)
            return (ir.Store(s.array, address, value, s.reduce, stream=V("stream") if self.streams else None),)

        return f

    def row(self, body: ir.Body) -> ir.Body:
        """Declare row registers at the top of a row."""
        rows = [n for n, where in self.place.items() if where == "row"]
        defs = tuple(ir.Def(f"v_{n}", ir.Undefined(self.group.arrays[n].dtype)) for n in rows)
        return (*defs, *body)

    def scratch(self, body: ir.Body) -> ir.Body:
        """Allocate the row buffers around a body."""
        total = self._row_bytes().constant
        scope = "stack" if total is not None and total * self.rows_in_flight <= STACK_BYTES else "scratch"
        for n, copy in self.row_buffers():
            body = (ir.Alloc(copy, self.group.arrays[n].dtype, self._row_size(n), scope, body),)
        return body

    def row_buffers(self) -> tuple[tuple[str, str], ...]:
        """Return (local, the buffer of its rows), one for each row that is processed together."""
        return tuple((n, copy_of(n, c)) for n in self._buffered() for c in range(self.rows_in_flight))

    def _buffered(self) -> list[str]:
        return [n for n, where in self.place.items() if where == "scratch"]

    def _row_size(self, array: str) -> Index:
        return product(self.group.arrays[array].shape[len(self.prefix) :]) * self._lanes()

    def _row_bytes(self) -> Index:
        """Return the bytes of all row buffers."""
        return sum((self._row_size(n) * ITEMSIZE[self.group.arrays[n].dtype] for n in self._buffered()), ZERO)

    # -- vector loops --------------------------------------------------------------------------------------------

    def vector_stages(self, body: ir.Body, rows_in_flight: int) -> ir.Body:
        """Vectorise every innermost loop of the stages that permits it. ``rows_in_flight``: rows per jammed loop."""

        def f(n: ir.Node) -> ir.Node | ir.Body:
            if not isinstance(n, ir.For) or any(isinstance(x, ir.For) for x in ir.walk(n.body)):
                return n
            return self._vector(n, CHAINS // rows_in_flight)

        return ir.consume(body, MarkName.STAGE, lambda b: ir.rewrite(b, f))

    def _vector(self, n: ir.For, chains: int = CHAINS) -> ir.Node | ir.Body:
        vectors = vectorise(n, self.target.width, chains)
        if isinstance(vectors, Declined):
            self.notes.append(f"loop {n.var} stays scalar: {vectors}")
            return without_announcements(n)
        return vectors

    # -- the whole kernel ----------------------------------------------------------------------------------------

    def obligations(self) -> tuple[Obligation, ...]:
        """Loops inside the band may run as vectors."""
        return (vectors_inside(self.group, self.prefix, self.phases),)

    def build(self) -> Kernel:
        """Build the kernel."""
        body, count = build(self.family, NestForm(self))
        kernel = Kernel(
            self.name, self.symbols, count, self.scratch_of(body), self.launch, tuple(dict.fromkeys(self.notes))
        )
        return emit(kernel, body, self.group.arrays, inline_math=True)

    @property
    def family(self) -> Family[NestForm]:
        """The tables of the kernel."""
        return NEST

    @property
    def symbols(self) -> tuple[str, ...]:
        """The kernel's parameters."""
        return tuple(dict.fromkeys((*self.group.params, *self.launch)))

    def tile_counts(self) -> dict[str, Index]:
        """Return the numbers of tiles."""
        extents = self.schedule.extents()
        return {extent(b(x)): extents[b(x)] for x in self.schedule.map.origins}

    def forms(self) -> Iterator[Form[NestForm]]:
        """Yield the bodies of the kernel: with row buffers, without, or both with a choice at run time.

        An element-wise group that streams may run its tasks in the memory order of the operands, because its writes
        need no order then.
        """
        kept = NestForm(self)
        if not self._buffered() or not self._can_repeat():
            order = self.reading_order() if self.streams and self._maps() and not self.across else ()
            if order:
                yield Form(replace(kept, order=order), STREAMS, "ordered")
            yield Form(kept)
            return
        fits = self._rows_fit()
        if fits.decided() is not False:
            yield Form(kept, None if fits.decided() else fits)
        if fits.decided():
            return
        most = self.target.core.l2
        choice = f"rows are kept in scratch up to {most} bytes, beyond it computed again in every pass"
        self.notes.append("several passes over every row, nothing is kept" if fits.decided() is False else choice)
        yield Form(replace(kept, again=True), part="again")

    def _rows_fit(self) -> ir.Compare:
        """Return the condition under which the row buffers fit the cache."""
        return ir.Compare("<=", self._row_bytes() * self.rows_in_flight, V(self.target.core.l2))

    def scratch_of(self, body: ir.Body) -> Index:
        """Return the bytes of scratch memory. If rows may be recomputed, row buffers are no larger than the cache."""
        size = scratch_bytes(body)
        if size == ZERO or not self._can_repeat() or self._rows_fit().decided():
            return size
        return minimum(size, V(self.target.core.l2 + 64 * len(self.row_buffers())))

    def jam_rows(self, body: ir.Body, *loops: str) -> ir.Body:
        """Process ``rows_in_flight`` rows together: the band is coincident, and every row keeps its own locals."""

        def f(n: ir.Node) -> ir.Node | ir.Body:
            return self.run_together(n, self.rows_in_flight) if isinstance(n, ir.For) and n.var in loops else n

        return ir.rewrite(body, f)

    def run_together(self, loop: ir.For, rows: int, alone: ir.For | None = None) -> ir.Body:
        """Run ``rows`` iterations of a loop together, or one by one where they differ."""
        made = jam(loop, rows, self._buffered(), alone)
        if isinstance(made, Declined):
            self.notes.append(f"rows run one by one: {made}")
            return (alone or loop,)
        return made

    def pair(self, body: ir.Body) -> ir.Body:
        """Build the rows of a task: two together, or one."""
        (both,), (alone,) = (self.vector_stages(body, n) for n in (ROWS_IN_FLIGHT, 1))
        assert isinstance(both, ir.For) and isinstance(alone, ir.For), "the tree has a loop over the rows of a task"
        return live_part(self.schedule, "t", self.run_together(both, ROWS_IN_FLIGHT, alone))

    def vector_tile(self, body: ir.Body) -> ir.Body:
        """Vectorise the tile's loop, and bind the tile's first element and the extent of its live part."""

        def f(n: ir.Node) -> ir.Node | ir.Body:
            return self._vector(n) if isinstance(n, ir.For) and n.var == "t" else n

        body = ir.rewrite(body, f)
        if self.across:
            body = transpose_loads(by_blocks(body, "u", self.target.width), "u", self.target.width)
            body = live_part(self.schedule, "u", body)
        return live_part(self.schedule, "t", body)

    def choices(self) -> Choices:
        """Return the sizes that a search may choose: elements of a task. Row reductions have none."""
        if not self.tiled:
            return Choices({}, {})
        if self.across:
            values = map(with_default, TRANSPOSE_TILE, TRANSPOSE_TILES)
            return Choices({}, dict(zip(("along", "across"), values, strict=True)))
        return Choices({}, {"along": with_default(self._elements(), MAP_TILES)})

    def _elements(self) -> int:
        """Return the elements of a task along the band."""
        return REDUCE_TILE if any(s.reduce for s in self.group.statements) else MAP_TILE

    def resized(self, name: str, built: Mapping[str, int]) -> NestKernel:
        """Return the kernel under another name, with other build-time sizes."""
        return NestKernel(name, self.group, self.prefix, self.phases, self.target)

    def launched(self, sizes: Mapping[str, int]) -> dict[str, Index]:
        """Return ``launch`` with other sizes of a task."""
        names = {"along": extent(p("t")), "across": extent(p("u"))}
        return self.launch | {names[n]: V(v) for n, v in sizes.items()}

    @property
    def launch(self) -> dict[str, Index]:
        """The values of the launch-time symbols, over the group's parameters."""
        tile, long = TRANSPOSE_TILE if self.across else (self._elements(), 0)
        launch = {extent(p("t")): V(tile)} if self.tiled else {}
        launch |= {extent(p("t")): self._at_once()} if self.in_pairs else {}
        launch |= {extent(p("u")): V(long)} if self.across else {}
        if not self.streams:
            return launch
        # rows that are written in arbitrary order are fetched one by one: streaming pays from half the size on
        return launch | {STREAM: moved_bytes(self.group) * (2 if self._maps() and self.reading_order() else 1)}


def live_part(schedule: Scheduled, x: str, body: ir.Body) -> ir.Body:
    """Bind the first element of a tile along axis ``x``, and the extent of its live part."""
    tm, extents = schedule.map, schedule.extents()
    first, size = tm.origins[x].symbol, extents[it(x)]
    live = ir.Let(extent(it(x)), minimum(size, tm.extents[x] - first), body)
    return (ir.Let(first, tm.origin(x, ZERO if extents[b(x)] == ONE else V(b(x))), (live,)),)


@dataclass(frozen=True)
class NestForm(Variant):
    """A body of a nest. ``again``: it recomputes rows instead of storing them.

    ``order``: the order of the task loops.
    """

    of: NestKernel
    again: bool = False
    order: tuple[str, ...] = ()

    @cached_property
    def name(self) -> str:
        """The kernel's name."""
        return self.of.name

    @property
    def group(self) -> Group:
        """Return the group that the kernel computes."""
        return self.of.group

    @property
    def symbols(self) -> tuple[str, ...]:
        """The kernel's parameters."""
        return self.of.symbols

    @property
    def proven(self) -> Proven:
        """The schedule with its proof."""
        return self.of.proven

    def announce(self, body: ir.Body) -> ir.Body:
        """Prefetch for write the cache lines of the outputs that the next pass stores."""
        return prefetch_for_write(body, MarkName.STAGE, [n for n, a in self.group.arrays.items() if a.role == "output"])


def _drained(_: NestForm, body: ir.Body) -> ir.Body:
    """Read once whether the kernel streams, and wait for its streaming stores at the end."""
    drain = ir.If((STREAMS,), (ir.Call("pd_drain"),))
    return (ir.Let("stream", V(STREAM) // CACHE, (*body, drain)),)


NEST: Family[NestForm] = Family(
    names=bound_names,
    sizes=lambda x: x.of.tile_counts(),
    forms=lambda x: x.of.forms(),
    marks=(Rule("declare", "registers of a row", lambda x, body: x.of.row(body), MarkName.ROW),),
    statements=lambda x: {s.name: x.of.lowering(s, x.again) for s in x.group.statements},
    opened=lambda x: ("stream", "o_t", "o_u", *(copy for _, copy in x.of.row_buffers())),
    stores=(
        Rule("stages", "marks of stages are removed", keep, MarkName.STAGE, where=lambda x: x.of.tiled),
        Rule("tile", "the tile's loop becomes vectors", lambda x, body: x.of.vector_tile(body), MarkName.TILE,
             where=lambda x: x.of.tiled),
        Rule("announce", "prefetch of the lines that the next pass writes", NestForm.announce,
             where=lambda x: not x.of.tiled),
        Rule("pairs", "loops inside a row become vectors, two rows together", lambda x, body: x.of.pair(body),
             MarkName.TILE, where=lambda x: x.of.in_pairs),
        Rule("vectorise", "loops inside a row become vectors",
             lambda x, body: x.of.vector_stages(body, x.of.rows_in_flight),
             where=lambda x: not (x.of.tiled or x.of.in_pairs)),
    ),
    band=lambda x, _: ranges(x.order or (x.of.reading_order() if x.of.across else ())),
    around=(Rule("scratch", "row buffers around all tasks", lambda x, body: x.of.scratch(body),
                 where=lambda x: not x.again),),
    last=(Rule("drain", "streams end with a fence", _drained, where=lambda x: x.of.streams),),
)  # fmt: skip
