"""CUDA kernels for element-wise and stitch groups, from the CPU's tree of phases mapped to threads.

Mappings of the shared rows (the coincident band) and of the loops inside them:

- ``thread``: a thread per element of the band, inner reductions serial (element-wise, reductions over outer axes);
- ``wide``: a thread per 16 bytes of adjacent elements, without reductions, if addresses allow it;
- ``warp``: a warp per row, inner loops mapped to lanes, row results combined by shuffles;
- ``block``: a block per row, combined through shared memory as well;
- ``lanes``: eight lanes per row, for rows that leave most of a warp idle;
- ``warp_wide``, ``block_wide``, ``lanes_wide``: like the above, by 16 bytes of adjacent elements of a row, if addresses
  allow it;
- ``columns``: a lane per element of the band, whose long inner reductions are split over the warps of a block and
  combined through shared memory: for few columns of many rows.

Rows that later phases read again are stored in shared memory, or recomputed (``recompute``) for rows of any length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import inf

from polydyn.codegen import ir
from polydyn.codegen.cpu.rows import NestKernel
from polydyn.codegen.cpu.target import CpuTarget
from polydyn.codegen.cuda.emit import bound_names, emit, narrow_indices_first
from polydyn.codegen.cuda.row_loops import (
    THREADS,
    in_flight,
    inlined,
    loads_first,
    local_type,
    moved_by,
    on_rows,
    partials,
    unroll_mapped,
)
from polydyn.codegen.cuda.work import UNROLLED_LOADS, row_work
from polydyn.codegen.family import Family, Rule, Variant, build, keep
from polydyn.codegen.indices import substitute
from polydyn.codegen.kernel import Block, Kernel
from polydyn.codegen.lower import Lowering
from polydyn.codegen.passes.threads import (
    WARP,
    combine_block,
    combine_columns,
    combine_lanes,
    map_to_threads,
    one_each,
    reductions,
    register,
)
from polydyn.codegen.passes.widen import Multiples, widen
from polydyn.codegen.pipeline import Step
from polydyn.codegen.printers.cuda import LANES
from polydyn.schedules.expr import ITEMSIZE
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike, minimum, product
from polydyn.schedules.model import Group, stored
from polydyn.schedules.proof.proven import Proven
from polydyn.schedules.tiling import inner_iterators
from polydyn.schedules.tree.names import MarkName, b, it
from polydyn.schedules.tree.names import extent as extent_of

V = Index.of
MOST_LANES = 8
"""Maximum elements of a vector. 16 bytes would fit, but that is too much consecutive arithmetic for one thread."""
REGISTERS = 40
"""Registers of a thread (``docs/adr/0005-cuda.md``: 18 to 40)."""
WIDE_BLOCKS = 4
"""Targeted blocks per multiprocessor if lanes have several vectors of a row in flight."""
MAX_SHORT_ROW, MAX_KEPT_ROWS, MIN_LONG_COLUMN = 256, 4, 64
"""Maximum elements of a short row; maximum rows that each warp can keep; minimum elements of a long column."""
TASKS = {
    "thread": (THREADS, V("tid")), "lanes": (THREADS // LANES, V("tid") // LANES), "warp": (THREADS // WARP, V("warp")),
    "block": (1, ZERO), "columns": (WARP, V("lane")),
}  # fmt: skip
"""Mapping -> rows of a block, and the row of a thread."""
MAPPINGS_WITH_BARRIERS = ("lanes", "columns")
"""Mappings in which threads of different rows share a shuffle or a barrier, so that none may exit early."""
SCALAR = CpuTarget("scalar", 1)
RequiredMultiples = dict[tuple[Index, int], None]
"""Required multiples: (expression, number), each once."""


class CudaNestKernel:
    """Builds the versions of one element-wise or stitch group."""

    def __init__(self, name: str, group: Group, prefix: tuple[str, ...], phases: dict[str, int]) -> None:
        self.name, self.group, self.prefix, self.phases = name, group, prefix, phases
        self.plain = NestKernel(name, group, prefix, phases, SCALAR, rows=True)

    def versions(self) -> tuple[Kernel, ...]:
        """Return all versions, the preferred ones first; the last one fits every shape."""
        light = self.recompute_rows()
        inner = any(inner_iterators(s, self.prefix) for s in self.group.statements)
        along = NestKernel(self.name, light.group, self.prefix, light.phases, SCALAR).tiled
        if (not inner or along or self._short()) and not light.rows():
            return narrow_indices_first((*light.wide(), *light._column_versions(), *light.build("thread")))
        short = self._longest() <= MAX_SHORT_ROW and len(self.rows()) <= MAX_KEPT_ROWS  # warps suffice
        mappings = ("warp",) if short else ("warp", "block")
        rest = [k for mapping in mappings for k in self._row_versions(mapping, light)]
        return narrow_indices_first([*light._lane_versions(), *rest])

    def _lane_versions(self) -> tuple[Kernel, ...]:
        """Return the version with several rows per warp, if rows may be short and none is stored."""
        if self.rows() or not any(n is None or n <= MAX_SHORT_ROW for n in self._lengths()):
            return ()
        return (self.build("lanes", self._vector()) or self.build("lanes"))[:1]

    def _column_versions(self) -> tuple[Kernel, ...]:
        """Return the version of columns with reductions split over warps, if these may be long."""
        return self.build("columns")[:1] if self.prefix and self._longest() >= MIN_LONG_COLUMN else ()

    def _lengths(self) -> list[int | None]:
        """Return the iterations of each statement's inner loops, as far as they are known."""
        inner = [s.iters[len(self.prefix) :] for s in self.group.statements]
        return [product(e for _, e in iters).constant for iters in inner if iters]

    def _longest(self) -> float:
        return max((inf if n is None else n for n in self._lengths()), default=1)

    def _row_versions(self, mapping: str, light: CudaNestKernel) -> Iterator[Kernel]:
        """Return the versions of a mapping of rows.

        They use vectors if no row is stored (``light``). If the vectors have no alignment requirements, there are no
        others.
        """
        again = not light.rows()
        wide = light.build(mapping, light._vector()) if again else ()
        restricted = any(k.multiples for k in wide)
        yield from wide[:1] if restricted else wide
        if restricted or not wide:
            yield from self.build(mapping)
        if (restricted or not wide) and mapping == "block" and again and self.rows():
            yield from (replace(k, version=k.version.replace("block", "block recompute")) for k in light.build("block"))

    def _vector(self) -> int:
        """Return the elements of a vector: at most 16 bytes of results."""
        outputs = [a for a in self.group.arrays.values() if a.role == "output"]
        return min(MOST_LANES, 16 // max(ITEMSIZE[a.dtype] for a in outputs))

    def _short(self) -> bool:
        """Whether the inner loops are certainly too short for a warp."""
        nests = [[e for _, e in s.iters[len(self.prefix) :]] for s in self.group.statements]
        return all((size := product(n).constant) is not None and size <= WARP // 2 for n in nests)

    def rows(self) -> list[str]:
        """Return the locals that need a whole row."""
        return [n for n, where in self.plain.place.items() if where == "scratch"]

    def recompute_rows(self) -> CudaNestKernel:
        """Return the group with every row that one map statement computes recomputed by its readers."""
        kernel = self
        while True:
            single = [n for n in kernel.rows() if kernel.plain.writer(n) is not None]
            if not single:
                return kernel
            kernel = CudaNestKernel(
                self.name + "_again", inlined(kernel.group, single[0]), self.prefix, kernel._phases_without(single[0])
            )

    def _phases_without(self, array: str) -> dict[str, int]:
        return {s.name: self.phases[s.name] for s in self.group.statements if s.array != array}

    # -- one version ---------------------------------------------------------------------------------------------

    def _vectors(self, lanes: int) -> NestKernel:
        """Return the nest with a vector of the band's last iterator per thread."""
        return NestKernel(self.name, self.group, self.prefix, self.phases, SCALAR, rows=True, tiled=True, size=lanes)

    def build(self, mapping: str, lanes: int = 1) -> tuple[Kernel, ...]:
        """Build the kernel of one mapping, with indices of both widths.

        Return nothing if vectors (``lanes`` of more than one element) are requested but no loop has them.
        """
        of = Version(self, mapping + "_wide" * (lanes > 1), mapping, lanes, self.plain)
        body, count = build(ROWS, of)
        wide = f"_wide<{lanes}>"
        if lanes > 1 and not any(isinstance(n, ir.Call) and n.function.endswith(wide) for n in ir.walk(body)):
            return ()
        return self._kernels(of, body, count, tuple(of.required))

    def wide(self) -> tuple[Kernel, ...]:
        """Build a thread per vector of the band's last iterator; return nothing if results cannot be stored as vectors.
        """
        lanes = self._vector()
        extent = self.plain.extents[self.prefix[-1]] if self.prefix else ONE
        if lanes == 1 or (extent.constant or 0) % lanes:
            return ()
        of = Version(self, "wide", "thread", lanes, self._vectors(lanes))
        body, count = build(self.of_vectors, of)
        if not of.alignments:
            return ()
        multiples = (*(((extent, lanes),) if extent.constant is None else ()), *of.alignments[0])
        return self._kernels(of, body, count, tuple(dict.fromkeys(multiples)))

    @property
    def of_vectors(self) -> Family[Version]:
        """The tables of the kernel of vectors."""
        return WIDE

    bound: tuple[str, ...] = ()
    """Names that ``around`` binds, in addition to loops."""

    def around(self, body: ir.Body) -> ir.Body:
        """Wrap the vectors of a thread."""
        return body

    def _kernels(
        self, of: Version, body: ir.Body, count: Index, multiples: tuple[tuple[Index, int], ...]
    ) -> tuple[Kernel, ...]:
        rows, lanes = TASKS[of.mapping][0], of.lanes
        grid = count.ceildiv(rows)
        limits = {x: self.plain.extents[x] for x in self.prefix} | {"task": count + THREADS}
        if self.prefix:
            limits[b("t")] = self.plain.extents[self.prefix[-1]]
        per = THREADS // rows  # threads per row
        across = per * (lanes if per > 1 else 1)
        held = 1 < lanes < across and self._longest() <= UNROLLED_LOADS * across
        work = row_work(self.group, self.prefix, THREADS, across, lanes, REGISTERS, held)
        block = Block(THREADS, work=work)
        kernel = Kernel(of.name, of.symbols, grid, version=of.version, multiples=multiples, block=block)
        return emit(kernel, body, self.group.arrays, limits, WIDE_BLOCKS if lanes > 1 < per else 1)

    def stage(self, body: ir.Body, version: str, lanes: int, required: RequiredMultiples) -> ir.Body:
        """Map a stage of a row to threads by the mapping ``version``; add the requirements of vectors to ``required``.
        """
        if version == "thread":
            return ir.rewrite(body, in_flight)
        loops_of_lanes: ir.Body = map_to_threads(body, version)
        if lanes > 1:
            loops_of_lanes = ir.rewrite(loops_of_lanes, lambda n: self._by_vectors(n, version, lanes, required))
            loops_of_lanes = ir.rewrite(loops_of_lanes, lambda n: loads_first(unroll_mapped(n, version), version))
        results: ir.Body = ()
        for reg, update in reductions(body).items():
            assert update.reduce is not None
            partial = f"partial_{update.value.dtype}"
            if version in ("warp", "lanes"):
                lanes_of_row = WARP if version == "warp" else LANES
                results += combine_lanes(reg, register(update), update.reduce, lanes_of_row)
            else:
                combine = combine_block if version == "block" else combine_columns
                results += combine(reg, register(update), update.reduce, THREADS // WARP, partial)
        if any(isinstance(n, ir.Store) and n.buffer in self.rows() for n in ir.walk(body)):
            results += (ir.Call("pd_syncwarp" if version == "warp" else "pd_syncthreads"),)
        return (*loops_of_lanes, *results)

    def _by_vectors(self, n: ir.Node, kind: str, lanes: int, required: RequiredMultiples) -> ir.Node:
        """Return the thread-mapped loop by vectors, if it has them: its iterations are independent."""
        if not (isinstance(n, ir.For) and n.kind == kind) or n.lo != ZERO or (n.hi.constant or 0) % lanes:
            return n
        body = substitute(n.body, {n.var: V(n.var) * lanes + "v"})
        names = frozenset((*self.prefix, *(x.var for x in ir.walk((n,)) if isinstance(x, ir.For)), *self._iterators()))
        vectors = widen(body, "v", lanes, stored(self.group.arrays), names)
        if vectors is None:
            return n
        required |= dict.fromkeys((*(((n.hi, lanes),) if n.hi.constant is None else ()), *vectors[1]))
        return replace(n, hi=n.hi // lanes, body=vectors[0])

    def _iterators(self) -> set[str]:
        return {i for s in self.group.statements for i in s.iterators}

    def row(self, body: ir.Body, version: str) -> ir.Body:
        """Let one lane store the elements that exist once per row."""
        if version == "thread":
            return body
        number = {"warp": V("lane"), "lanes": V("lane") % LANES, "block": V("tid"), "columns": V("warp")}[version]
        first = ir.Compare("==", number, V(0))
        return tuple(ir.If((first,), (n,)) if isinstance(n, ir.Store) and not partials(n) else n for n in body)

    def guard_store(self, n: ir.Node, live: ir.Compare) -> ir.Node:
        """Guard a store to memory: only rows that exist are stored."""
        call = isinstance(n, ir.Call) and n.function.startswith("pd_stg")
        return ir.If((live,), (n,)) if call or (isinstance(n, ir.Store) and n.buffer in self.group.arrays) else n

    def shared(self, body: ir.Body, version: str) -> ir.Body:
        """Allocate rows (one per warp) and the warps' partial results."""
        dtypes = {x.dtype: x for n in ir.walk(body) for x in partials(n)}
        for dtype in dtypes:
            every = V(THREADS if version == "columns" else THREADS // WARP)
            body = (ir.Alloc(f"partial_{dtype}", local_type(dtype), every, "shared", body),)
        for n in self.rows():
            a = self.group.arrays[n]
            size = product(a.shape[len(self.prefix) :])
            if version == "warp":
                body = moved_by(body, n, V("warp") * size)
                size = size * (THREADS // WARP)
            body = (ir.Alloc(n, local_type(a.dtype), size, "shared", body),)
        return body


@dataclass
class Version(Variant):
    """One kernel of a nest. ``mapping``: rows to threads. ``lanes``: elements of a thread's vector.

    ``required``, ``alignments``: the requirements of the vectors, once they are built.
    """

    of: CudaNestKernel
    version: str
    mapping: str
    lanes: int
    nest: NestKernel
    required: RequiredMultiples = field(default_factory=dict)
    alignments: list[Multiples] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The kernel's name."""
        return f"{self.of.name}_{self.version}"

    @property
    def group(self) -> Group:
        """The computation of the kernel."""
        return self.of.group

    @property
    def proven(self) -> Proven:
        """The schedule with its proof."""
        return self.nest.proven

    def table(self) -> dict[str, Lowering]:
        """Return the lowering of each statement."""
        return {s.name: self.nest.lowering(s) for s in self.group.statements}

    def stage(self, body: ir.Body) -> ir.Body:
        """Map loops to threads and combine their results."""
        return self.of.stage(body, self.mapping, self.lanes, self.required)

    def row(self, body: ir.Body) -> ir.Body:
        """Let one lane store the elements that exist once per row."""
        return self.of.row(body, self.mapping)

    def shared(self, body: ir.Body) -> ir.Body:
        """Allocate the rows in shared memory."""
        return self.of.shared(body, self.version)

    def band(self, count: Index) -> tuple[Step, ...]:
        """Return the steps that map a task to a thread, some lanes, a warp or a block."""
        rows, inside = TASKS[self.mapping]
        task, together = V("bid") * rows + inside, self.mapping in MAPPINGS_WITH_BARRIERS
        live = ir.Compare("<", task, count)
        at = minimum(task, count - 1) if together else task  # a surplus row repeats the last one

        def guard(b: ir.Body) -> ir.Body:
            return ir.rewrite(b, lambda n: self.of.guard_store(n, live)) if together else (ir.If((live,), b),)

        return (
            Step("tasks", "a thread, some lanes, a warp or a block is a task", lambda b: one_each(b, at)),
            *((Step("guard", "the last block has fewer tasks", guard),) if rows > 1 else ()),
        )

    # -- vectors of the band's last iterator -------------------------------------------------------------------------

    def _extent(self) -> Index:
        return self.of.plain.extents[self.of.prefix[-1]]

    def sizes(self) -> dict[str, IndexLike]:
        """Return the numbers of vectors and of their elements."""
        return {extent_of(b("t")): self._extent() // self.lanes, extent_of(it("t")): self.lanes}

    def origin(self, body: ir.Body) -> ir.Body:
        """Bind the first element of a vector; a single vector has no loop."""
        return substitute(body, {"o_t": ZERO if self._extent() == self.lanes else V(b("t")) * self.lanes})

    def widen(self, body: ir.Body) -> ir.Body:
        """Combine adjacent elements into a vector."""
        (loop,) = body
        names = (*self.of.prefix, b("t"), "t", *self.of.bound)
        buffers = stored(self.group.arrays)
        vectors = widen(loop.body, "t", self.lanes, buffers, names) if isinstance(loop, ir.For) else None
        if vectors is None:
            return body
        self.alignments.append(vectors[1])
        return self.of.around(ir.rewrite(vectors[0], in_flight))


ROWS: Family[Version] = Family(
    names=bound_names,
    marks=(Rule("declare", "registers of a row", lambda x, body: on_rows(body, x.nest.row)),),
    statements=Version.table,
    opened=lambda x: tuple(x.of.rows()),
    stores=(
        Rule("stage", "loops are mapped to threads, their results combined", Version.stage, MarkName.STAGE,
             opens=tuple(f"partial_{d}" for d in ITEMSIZE)),
        Rule("row", "one lane stores results of a row", Version.row, MarkName.ROW),
    ),
    band=Version.band,
    around=(Rule("shared", "rows in shared memory", Version.shared),),
)  # fmt: skip
WIDE: Family[Version] = Family(
    names=bound_names,
    sizes=Version.sizes,
    marks=(Rule("declare", "registers of a row", lambda x, body: x.nest.row(body), MarkName.ROW),),
    statements=Version.table,
    opened=lambda _: ("o_t",),
    stores=(
        Rule("stage", "marks of stages are removed", keep, MarkName.STAGE),
        Rule("origin", "the first element of a vector", Version.origin),
        Rule("widen", "adjacent elements become a vector", Version.widen, MarkName.TILE),
    ),
    band=Version.band,
    around=(Rule("shared", "rows in shared memory", Version.shared),),
)
