"""Products on sm_90a: wgmma from shared memory, fed by TMA through a ring of mbarriers, warp-specialised.

One warpgroup is the producer: a single thread waits until a slot of the ring is empty and lets TMA fill it, tails with
zeros. The others are consumers: a warpgroup's whole step of the reduction is one group of asynchronous instructions on
64 rows. A slot is released when the group after it has been issued and its own has retired. Tensor maps carry extents
and pitches, so one kernel serves every shape whose pitches are multiples of 16 bytes.

A tile belongs to all consumers of a block, or to one of them (ping-pong). In the ping-pong form there are as many
blocks as multiprocessors, each loops over tiles, the consumers alternate, and the epilogue of one overlaps the products
of the other. Blocks of a cluster share an operand: each loads half of it, into both.

A step is 128 bytes of the reduction, an instruction 32: 16 float16 or bfloat16, 8 tf32, 32 bytes in any combination of
signs, or 32 8-bit floats in any combination. Operands are K-major. Columns of 16 bits may be contiguous along
themselves (the instruction transposes only those: PTX ISA, wgmma.mma_async). TMA rounds float32 to tf32, which the
instruction would truncate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial

from polydyn.codegen import ir
from polydyn.codegen.cuda.boxes import MAX_COORDINATE, TensorOperand, descriptor, tensor_operand
from polydyn.codegen.cuda.emit import bound_names, drop_covered_versions, emit
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.images import Im2colOperand
from polydyn.codegen.cuda.instructions import LANE, TENSOR
from polydyn.codegen.cuda.product import RASTER, THREAD_MAPPED_LOOPS, UNROLL_HINTS, block_limits, split_copies
from polydyn.codegen.cuda.sharing import RANK, Cluster, blocks_step
from polydyn.codegen.cuda.sums import LINE, Sums, block_parts, lane_points
from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.cuda.wgmma_operands import Maps, kind_of, tensor_operands, with_one_reduction
from polydyn.codegen.cuda.wgmma_tiles import FLOAT8_TILES, PANEL, POINTS, ROWS, STEP, TILES, WgmmaTile, suits
from polydyn.codegen.cuda.work import UNITS, with_epilogues
from polydyn.codegen.family import Family, Rule, Variant, build
from polydyn.codegen.indices import substitute
from polydyn.codegen.kernel import TF32, WORKERS, Block, Kernel, TensorMapOf, Work
from polydyn.codegen.lower import Lowering
from polydyn.codegen.passes.bind import fold
from polydyn.codegen.passes.threads import ROUND, WARP, WORKER, assign, rasterise, rounds
from polydyn.codegen.passes.tiles import TASK, balance
from polydyn.codegen.passes.warpgroups import (
    CLUSTER_ARRIVE,
    PING_PONG_BARRIER,
    WARPGROUP,
    Ring,
    accumulate,
    first_round,
    in_turn,
    specialise,
)
from polydyn.codegen.places import Places
from polydyn.codegen.printers.cuda_values import HALF
from polydyn.schedules.errors import CodegenError, Declined
from polydyn.schedules.expr import ITEMSIZE, FromIndex, Load
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike, product
from polydyn.schedules.tree.gpu import COPY_A, COPY_B, SLAB, STAGE, STAGED, senders
from polydyn.schedules.tree.names import MarkName, b, c, e, extent, f, g, s, w
from polydyn.schedules.tree.scheduled import Scheduled
from polydyn.schedules.tree.strategies import ACC, INIT
from polydyn.schedules.tree.warpgroups import COLUMNS, WarpgroupTile, warpgroup_parts, warpgroup_product

V = Index.of
FETCH_B = "FETCH_B"
LEAST_TURN_STEPS = 3
"""Minimum K steps of ping-pong tiles: with one or two, ptxas serialises the products (C7520)."""
"""The prefetch of columns to L2."""
CONSUMER_BARRIER_ID = 1
"""The barrier of the consumers after their last step."""
BLOCKS, BEFORE = "blocks", "before"
"""Blocks of a persistent grid, an argument of the launch; steps of a block's tiles before the current one, modulo
the period of the ring's slots and parities."""
EPILOGUE_LOOP_HINTS = {e("g"): "unroll", e("s"): "unroll1", e("p"): "unroll1"}
"""Epilogues are loops over slabs of columns, because their unrolled text would not fit the instruction cache."""
WAIT_FOR_TMA_STORE = ir.If((ir.Compare("==", LANE, ZERO),), (ir.Call("pd_tma_store_wait_read<0>"),))
"""Waits until TMA has read the boxes that a warp has sent."""


def wgmma_versions(
    product: ProductGroup, tf32: bool = False, tiles: Iterable[WgmmaTile] = (), wanted: bool = False
) -> list[Kernel]:
    """Return the versions for sm_90a, largest tile first; empty if wgmma or TMA do not support the product.

    Ping-pong tiles, clusters and split-K kernels have one version each, with 32-bit indices and wide stores. Other
    versions handle the remaining shapes. ``tf32``: float32 may be rounded to tf32. ``tiles``: only these; ``wanted``:
    for all numbers of rows and columns.
    """
    product = with_one_reduction(product)
    kind, maps = kind_of(product, tf32), tensor_operands(product)
    if isinstance(kind, Declined) or isinstance(maps, Declined):
        return []
    every = tuple(tiles) or (FLOAT8_TILES if kind == "qmma" else TILES)
    steps = product.K.ceildiv(STEP // ITEMSIZE[product.dtype]).constant
    if isinstance(maps[0], Im2colOperand):  # pixels past the last step are not zeros, and several blocks per SM spill
        every = tuple(t for t in every if t.parts == 1 or (t.blocks == 1 and (steps or 1) % t.parts == 0))
    if steps is not None and steps < LEAST_TURN_STEPS:
        every = tuple(t for t in every if not t.in_turn)
    chosen = (t for t in every if wanted or suits(t, product.M.constant, product.N.constant))
    some = {t: 1 if t.in_turn or t.cluster or t.parts > 1 or product.shares != ONE else 2 for t in every}
    forms = ([_Version(product, kind, maps, t, wide) for wide in (True, False)[: some[t]]] for t in chosen)
    return [k for of_tile in forms for k in drop_covered_versions(of_tile, first=some[of_tile[0].size])]


class _Version(Variant):
    """One tile; ``kind``: the warp instruction on the same operands, ``wide``: epilogues store 16 bytes at once."""

    def __init__(self, product: ProductGroup, kind: str, maps: Maps, size: WgmmaTile, wide: bool) -> None:
        self.of, self.maps, self.size, self.columns, self.stages = product, maps, size, size.columns, size.stages
        self.group, self.apart = product.group, kind == "qmma"
        self.step, self.points = STEP // ITEMSIZE[product.dtype], POINTS // ITEMSIZE[product.dtype]
        self.tile = CudaTile(kind, size.rows, size.columns, self.step, STAGED, size.columns, size.stages)
        self.out = self._out() if size.in_turn else None
        self.box = LINE // ITEMSIZE[product.epilogues[0].value.dtype] if self.out else 0
        self.schedule = self._schedule()
        self.places = Places(self.schedule)
        self.sharing = Cluster(size.parts) if size.parts > 1 else product.sharing
        unit, slabs = V("warp") - WARPGROUP // WARP, size.columns // SLAB
        buffer = "stage" if size.in_turn else "tile_b"
        self.sums = Sums(product, self.tile.kind, self.places, wide, unit=unit, slabs=slabs, buffer=buffer,
                         box=self.box, sharing=self.sharing)  # fmt: skip
        before = V(BEFORE) if size.in_turn else ZERO
        self.ring = Ring("", self.stages, (size.rows + self.columns) * STEP, None, before, size.cluster_size)
        self.done: ir.Body = (CLUSTER_ARRIVE,) if size.cluster else ()

    @property
    def symbols(self) -> tuple[str, ...]:
        """The kernel's parameters: with persistent blocks also their number."""
        return (*self.group.params, *[BLOCKS] * self.size.in_turn)

    def _schedule(self) -> Scheduled:
        """Tree and tile map."""
        panels, steps = self._panels(), (STEP // POINTS, self.points)
        fragments = self.columns // COLUMNS // panels
        tile = WarpgroupTile(*self.size.shape, ROWS // STAGED, panels, fragments, steps, self.box, self.size.cluster,
                             self.size.parts)  # fmt: skip
        if self.size.parts > 1:
            return warpgroup_parts(self.group, self.of.roles, tile)
        return warpgroup_product(self.group, self.of.roles, tile, self.of.shares != ONE)

    def _out(self) -> TensorOperand | None:
        """Return the result as a tensor operand, or None if lanes store it.

        Results replace the sums in shared memory, which other epilogues would have to read.
        """
        s, r = self.of.epilogues[0], self.of.roles
        item = ITEMSIZE[s.value.dtype]
        if len(self.of.epilogues) > 1 or item > 4 or self.columns % (LINE // item):
            return None
        batch = {x: self.of.extents[x] for x in r.batch}
        out = tensor_operand(self.group, Load(s.value.dtype, s.array, s.index), r.row, r.col, batch)
        return out if isinstance(out, TensorOperand) and out.along_k else None

    def _panels(self) -> int:
        """Return the number of panels of the columns that a TMA box loads at once."""
        return 1 if self.maps[1].along_k else self.columns // PANEL

    @property
    def version(self) -> str:
        """The name of the version: tile, slots of the ring."""
        t = self.tile
        version = "split_" * (self.of.shares != ONE) + "wgmma_" + "tf32_" * (t.instruction == "tf32")
        version += f"{t.bm}x{t.bn}x{t.bk}_{self.stages}"
        version += "_turns" * self.size.in_turn
        version += f"_cluster_{self.size.cluster}" if self.size.cluster else ""
        version += f"_parts_{self.size.parts}" if self.size.parts > 1 else ""
        return version + ("_boxes" if self.out else "_wide" * (max(map(self.sums.vector, self.of.epilogues)) > 1))

    @cached_property
    def name(self) -> str:
        """The kernel's name."""
        return f"{self.of.name}_{self.version}"

    def sizes(self) -> dict[str, Index]:
        """Return the numbers of all loops, except those that are mapped to threads."""
        sizes = {n: e for n, e in self.schedule.parameters().items() if n not in THREAD_MAPPED_LOOPS}
        return sizes | {extent(s("j")): V(self._panels()), extent(b("s")): self.of.shares}

    def numbers(self, body: ir.Body) -> ir.Body:
        """Bind sizes to numbers. They are not folded: the warps' roles need the ring's loop, even of one step."""
        return substitute(body, self.sizes())

    def units(self) -> dict[str, IndexLike]:
        """Return the indices of warpgroups and warps of a block, and of the blocks that K is split over."""
        unit = self.sums.unit
        if self.size.in_turn:
            return {w("i"): unit % (WARPGROUP // WARP), g("i"): ZERO}
        units: dict[str, IndexLike] = {w("i"): unit, g("i"): V("tid") // WARPGROUP - 1, e("w"): unit}
        return units | (block_parts(self.schedule) if self.size.parts > 1 else {})

    def split(self, body: ir.Body) -> ir.Body:
        """Distribute the reduction over slices."""
        return balance(body, b("k"), self.schedule.extents()[b("k")], self.of.shares, b("s"))

    def rounds(self, body: ir.Body) -> ir.Body:
        """Make blocks persistent workers; both roles of a block loop over the same tiles."""
        deal = ir.consume(body, MarkName.TASK, lambda x: rounds((ir.Mark(MarkName.TASK, x),), V(BLOCKS)))
        return (ir.Mark(MarkName.TASK, (ir.For(WORKER, ZERO, V(BLOCKS), deal, "parallel"),)),)

    def allocate(self, body: ir.Body) -> ir.Body:
        for name in ("acc", *["part"] * self.apart):
            body = (ir.Alloc(name, self.of.sums, V(self.sums.registers), "register", body),)
        return body

    @property
    def _mapped(self) -> tuple[TensorOperand | Im2colOperand, ...]:
        """The operands with tensor maps."""
        return (*self.maps, *([self.out] if self.out else []))

    @property
    def required_multiples(self) -> tuple[tuple[Index, int], ...]:
        """Alignment required by the tensor maps."""
        return tuple(x for m in self._mapped for x in m.multiples)

    def build(self) -> tuple[Kernel, ...]:
        """Build the kernel, with indices of both widths."""
        product = self.of
        body, count = build(WGMMA, self)
        parts = self.size.parts
        mapped, multiples = self._mapped, (*self.required_multiples, *self.sums.multiples)
        extents = (product.M, product.N, product.K, *(product.extents[x] for x in product.roles.batch))
        conditions = dict.fromkeys((ir.Compare(">=", product.K, ONE), *(x for m in mapped for x in m.conditions)))
        conditions |= {ir.Compare("<=", x, V(MAX_COORDINATE)): None for x in extents if x.constant is None}
        limits, launch = block_limits(product, self.tile, count), {}
        limits |= {**self._clusters(), c(self.size.cluster): self.size.cluster_size}
        if self.size.in_turn:
            several = self.size.cluster_size
            conditions |= {ir.Compare(">", self._tiles(), V(BLOCKS)): None}
            conditions |= {ir.Compare(">=", V(BLOCKS), V(several)): None} if several > 1 else {}
            limits, launch = limits | self._rounds(), {BLOCKS: V(WORKERS) // several * several}
        kernel = Kernel(
            self.name, self.symbols, count, launch=launch, version=self.version,
            multiples=tuple(dict.fromkeys(multiples)), conditions=tuple(conditions),
            block=Block(self.size.threads, "sm_90a", self._tensor_maps(), work=self._work(),
                        cluster=self.size.cluster_size * parts),
        )  # fmt: skip
        return emit(kernel, body, self.group.arrays, limits, self.size.blocks, self.sharing)

    def _tiles(self) -> Index:
        """Return the number of tiles of whole clusters."""
        batch = product(self.of.extents[x] for x in self.of.roles.batch)
        return batch * product(self._clusters().values()) * self.size.cluster_size

    def _clusters(self) -> dict[str, Index]:
        """Return the numbers of clusters along rows and columns."""
        product, side = self.of, {self.size.cluster: self.size.cluster_size}
        sides = (("i", product.M, self.tile.bm), ("j", product.N, self.columns))
        return {b(axis): x.ceildiv(n * side.get(axis, 1)) for axis, x, n in sides}

    def _rounds(self) -> dict[str, IndexLike]:
        """Return upper bounds of the counters of a persistent block."""
        tiles, steps = self._tiles(), self.of.K.ceildiv(self.step)
        before: dict[str, IndexLike] = dict.fromkeys((f"{ROUND}_rest", "steps_rest", BEFORE), self._period())
        before = before if steps.constant is None else {BEFORE: tiles * steps}
        return {TASK: tiles, ROUND: tiles, **before}

    def _period(self) -> int:
        """Return the number of steps after which slots of the ring and their parities repeat."""
        return 2 * self.stages

    def _work(self) -> Work:
        t, product = self.tile, self.of
        unit = t.instruction if t.instruction == "tf32" else UNITS[product.dtype]
        registers, flops = self.size.registers[0], 2 * t.bm * t.bn * self.step
        traffic = sum(n // self._sharers(which) * STEP for which, n in enumerate((t.bm, t.bn)))
        tiles = self._tiles().ceildiv(V(BLOCKS)) if self.size.in_turn else ONE
        added = self.apart * t.bm * t.bn // WARP  # sums of a step
        work = Work(product.K.ceildiv(self.step), registers, unit, flops, traffic=traffic, instructions=added,
                    flight=self.stages - 1, elements=t.bm * t.bn, by_warps=False,
                    cluster=self.size.cluster_size * self.size.parts, tiles=tiles, strip=RASTER)  # fmt: skip
        work = work.shared_by(product.shares * self.size.parts)
        return with_epilogues(work, product.group, product.epilogues, self.size.parts)

    def _sharers(self, which: int) -> int:
        """Return the number of blocks that load parts of an operand: a cluster's, if it runs along the other axis."""
        return self.size.cluster_size if self.size.cluster not in ("", "ij"[which]) else 1

    def _tensor_maps(self) -> tuple[TensorMapOf, ...]:
        product, out = self.of, []
        for which, (m, whole) in enumerate(zip(self.maps, (product.M, product.N), strict=True)):
            dtype = TF32 if self.tile.instruction == "tf32" else ""
            out.append(m.tensor_map("map_" + "ab"[which], whole, product.K, self._box(which), dtype))
        if self.out:
            out.append(self.out.tensor_map(f"map_{self.out.buffer}", product.M, product.N, (self.box, STAGED)))
        return tuple(out)

    def _box(self, which: int) -> tuple[int, int]:
        """Return the elements and lines of a copy of an operand."""
        side = (self.tile.bm, self.columns)[which]
        line, lines = (self.step, side) if self.maps[which].along_k else (PANEL, self.step)
        return line, lines // self._sharers(which)

    # -- marks ---------------------------------------------------------------------------------------------------

    def specialise_warps(self, body: ir.Body) -> ir.Body:
        """Split the loop into the producer and the consumers of the ring."""
        filled, multiply = self._roles(body)
        work = multiply(())
        early = first_round(*filled, COPY_B, FETCH_B) if self.of.fixed else ()
        return self._shared(specialise([filled], self.size.consumers, work, self.size.registers[1:],
                                       beside=self.sharing.meet(), early=early))  # fmt: skip

    def specialise_blocks(self, band: ir.Body) -> ir.Body:
        """Split the loop over all tiles of a block: the band occurs twice, for the producer and for the consumers."""
        (body,) = (n.body for n in ir.walk(band) if isinstance(n, ir.Mark) and n.name == MarkName.ROLES)
        filled, multiply = self._roles(body)
        steps = self.of.K.ceildiv(self.step)

        def tiles(part: ir.Body) -> ir.Body:
            inside: ir.Body = (ir.Let(BEFORE, V(ROUND) * steps, part),)
            if steps.constant is None:  # their number would often be too large for 32 bits
                period = self._period()
                inside = (ir.Let(BEFORE, V(f"{ROUND}_rest") * V("steps_rest") % period, part),)
                inside = (ir.Let(f"{ROUND}_rest", V(ROUND) % period, (ir.Let("steps_rest", steps % period, inside),)),)
            return (ir.Mark(MarkName.TASK, ir.consume(band, MarkName.ROLES, lambda _: inside)),)

        work = tiles(in_turn(V(ROUND), self.size.consumers, multiply))
        work += self.done
        work += (WAIT_FOR_TMA_STORE,) if self.out else ()  # a block's memory must stay until boxes are read
        body = specialise([filled], 1, work, self.size.registers[1:], lambda x: tiles((x,)), ((PING_PONG_BARRIER, 1),))
        rows = V(self.size.consumers * ROWS * self.columns)  # each consumer stages one instruction's sums at a time
        return self._shared((ir.Alloc("stage", self.of.sums, rows, "shared", body),))

    def _roles(self, body: ir.Body) -> tuple[tuple[Ring, ir.Body], Callable[[ir.Body], ir.Body]]:
        """Return the ring with its copies, and a function that adds statements after the last issue."""
        (loop,) = (n for n in body if isinstance(n, ir.For) and n.var == b("k"))
        copies, uses = split_copies(loop.body)
        ring = replace(self.ring, loop=loop)
        used = tuple(n for m in uses if isinstance(m, ir.Mark) for n in m.body)
        before, after = body[: body.index(loop)], body[body.index(loop) + 1 :]
        return (ring, copies), lambda issued: accumulate(ring, used, before, after, self._promote_sums(), issued)

    def _shared(self, body: ir.Body) -> ir.Body:
        """Allocate the rings."""
        for which, side in ((1, self.columns), (0, self.tile.bm)):
            size = V(side * self.step * self.stages)
            body = (ir.Alloc("tile_" + "ab"[which], self.of.dtypes[which], size, "shared", body),)
        return body

    def _promote_sums(self) -> ir.Body:
        """Add a step's sums to the sums so far in float32: tensor cores keep few bits of sums of 8-bit floats."""
        if not self.apart:
            return ()
        part, number = ir.FlatLoad(self.of.sums, "part", V("fragment")), V(self.columns // 2)
        keep = ir.Call(f"pd_wgmma_keep<{self.columns // 2}>", (ir.Pointer(self.of.sums, "part", ZERO),))
        return (keep, ir.For("fragment", ZERO, number, (ir.Store("acc", V("fragment"), part, "sum"),), "unroll"))

    def instruction(self, body: ir.Body) -> ir.Body:
        """Tensorize: a warpgroup's step of the reduction is one asynchronous group; else take a lane's points."""
        inst = next(n for n in ir.walk(body) if isinstance(n, ir.Inst))
        points = [n.var for n in ir.walk(body) if isinstance(n, ir.For)]
        if inst.statement == ACC:
            return substitute((inst,), dict.fromkeys(points, ZERO))
        return lane_points(inst, points)

    def epilogue(self, body: ir.Body) -> ir.Body:
        """Stage all sums of a tile in the ring of the columns, which is as large, after the last consumer has read it.

        In the ping-pong form each consumer has memory of its own.
        """
        if self.size.in_turn:
            return body
        threads = FromIndex("int32", V(self.size.consumers * WARPGROUP))
        consumed = ir.Call("pd_bar_sync", (FromIndex("int32", V(CONSUMER_BARRIER_ID)), threads))
        return (*self.done, consumed, *body)

    def reuse(self, body: ir.Body) -> ir.Body:
        """Stage a warp's sums in place of its boxes, once these are read."""
        return (WAIT_FOR_TMA_STORE, ir.Call("pd_syncwarp"), *body)

    # -- statements ----------------------------------------------------------------------------------------------

    def table(self) -> dict[str, Lowering]:
        sent: dict[str, Lowering] = {}
        if self.out:
            (s,), ((sender, _),) = self.of.epilogues, senders(self.group)
            sent = {sender: partial(self.sums.send, s, sender, self.out)}
        return sent | {
            INIT: partial(self.sums.init, INIT),
            COPY_A: partial(self.copy, 0),
            COPY_B: partial(self.copy, 1),
            FETCH_B: partial(self.copy, 1, fetch=True),
            ACC: self.accumulate,
            STAGE: self.sums.stage,
        }

    def _slot(self, which: int, a: Mapping[str, Index], more: IndexLike = 0) -> ir.Pointer:
        """Return an element of the current slot of an operand's ring."""
        size = (self.tile.bm if which == 0 else self.columns) * self.step
        return ir.Pointer(self.of.dtypes[which], "tile_" + "ab"[which], self.ring.slot(a[b("k")]) * size + more)

    def copy(self, which: int, a: Mapping[str, Index], fetch: bool = False) -> ir.Body:
        """Copy one box of an operand (a panel of it, if it is contiguous along its columns).

        If blocks share it, each loads a part of its lines into all. CodegenError: they do not copy the same box.
        ``fetch``: only to L2.
        """
        m, statement, axis = self.maps[which], (COPY_A, COPY_B)[which], "ij"[which]
        mn, k = (self.places.element(statement, x, a) for x in (axis, "k"))
        cell, blocks = self.places.cell(statement, "tile_" + "ab"[which], a)[axis], self._sharers(which)
        if blocks > 1:
            rank = a[c(self.size.cluster)]
            if rank.symbols() & (mn.symbols() | k.symbols()):
                raise CodegenError(f"blocks of a cluster copy different boxes of {m.buffer}: {mn}, {k}")
            first = rank * self._box(which)[1]
            mn, k, cell = (mn + first, k, cell + first) if m.along_k else (mn, k + first, cell + first)
        place = self._slot(which, a, cell * self.step)
        if fetch:
            assert isinstance(m, TensorOperand)
            return (m.fetch("map_" + "ab"[which], mn, k, a),)
        return (m.load("map_" + "ab"[which], place, mn, k, a, self.ring.full(a[b("k")]), blocks),)

    def accumulate(self, a: Mapping[str, Index]) -> ir.Body:
        """Issue the four instructions of a step, for every 64 rows."""
        along_k, at = self.maps[1].along_k, {**a, f("k"): V(f("k"))}
        cell = self.places.cell(ACC, "tile_a", at)
        item = ITEMSIZE[self.of.dtype]
        rows = descriptor(self._slot(0, a, cell["i"] * self.step), cell["k"] * item + V(f("i")) * (ROWS * STEP))
        across = (1, 0) if along_k else (PANEL, self.step * STEP)
        columns = descriptor(self._slot(1, a), cell["k"] * (item * across[0]), across[1])
        function = f"pd_wgmma_m64n{self.columns}k{self.points}_{TENSOR[self.of.dtypes]}"
        if self.of.dtype in HALF:
            function += f"<{int(not along_k)}>"
        sums, more = ("part", V(f("k"))) if self.apart else ("acc", ONE)  # the first one of a step starts from zero
        first = V(f("i")) * (self.columns // 2)
        args = (ir.Pointer(self.of.sums, sums, first), rows, columns, FromIndex("int32", more))
        every = ir.For(f("i"), ZERO, V(self.size.shape[1]), (ir.Call(function, args),), "unroll")
        return (ir.For(f("k"), ZERO, V(STEP // POINTS), (every,), "unroll"),)


WGMMA: Family[_Version] = Family(
    names=bound_names,
    first=(
        Rule("balance", "slices of the reduction", _Version.split, where=lambda x: x.of.shares != ONE),
        Rule("instruction", "points become an instruction", _Version.instruction, MarkName.INSTRUCTION),
        Rule("bind", "sizes become numbers", _Version.numbers),
        Rule("rank", "blocks of a cluster are units", lambda _, body: assign(body, {c("k"): RANK}), opens=(RANK,)),
        Rule("combine", "the blocks of a cluster synchronise", lambda x, _: x.sharing.meet(), MarkName.COMBINE),
        Rule("roles", "a producer and consumers around a ring", _Version.specialise_warps, MarkName.ROLES,
             opens=("acc", "part", ROUND), where=lambda x: not x.size.in_turn),
        Rule("roles", "a producer and consumers around a ring", _Version.specialise_blocks, MarkName.TASK,
             opens=("acc", "part", ROUND), where=lambda x: x.size.in_turn),
        Rule("fold", "decided guards and single iterations are removed", lambda _, body: fold(body)),
    ),
    units=_Version.units,
    marks=(
        Rule("store", "epilogues on staged rows", lambda x, body: x.sums.store(body), MarkName.STORE,
             opens=("stage",)),
        Rule("epilogue", "memory for staged rows", _Version.epilogue, MarkName.EPILOGUE),
        Rule("reuse", "boxes are read before others are staged", _Version.reuse, MarkName.START),
    ),
    statements=_Version.table,
    opened=lambda _: ("acc", "part"),
    registers=lambda _: UNROLL_HINTS | EPILOGUE_LOOP_HINTS,
    order=(
        Rule("rasterise", "blocks that share operands run together",
             lambda _, body: rasterise(body, b("i"), b("j"), RASTER)),
        Rule("rounds", "a block has several tiles", _Version.rounds, where=lambda x: x.size.in_turn),
    ),
    band=lambda x, _: (blocks_step(x.sharing),),
    around=(Rule("registers", "registers of a thread", _Version.allocate),),
)  # fmt: skip
