"""Attention on sm_90a: both products by wgmma, K and V by TMA, warp-specialised.

One warpgroup is the producer: a thread loads the queries of the block, then tiles of keys and of values through a ring
each. The other warpgroups are consumers, with 64 queries each. Scores are computed into registers, become weights
there, are packed, and are the row operand of the second product from registers. A tile's second product and the next
tile's scores are in flight at the same time, and the next tile's softmax overlaps the second product. TMA pads heads to
panels of 128 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Protocol

from polydyn.codegen.cuda.boxes import MAX_COORDINATE, TensorOperand, descriptor, tensor_operand
from polydyn.codegen.cuda.emit import bound_names, drop_covered_versions, emit, without_rows
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.instructions import INSTRUCTIONS, LANE, TENSOR
from polydyn.codegen.cuda.keys import loops_over_keys
from polydyn.codegen.cuda.product import THREAD_MAPPED_LOOPS, UNROLL_HINTS
from polydyn.codegen.cuda.sharing import blocks_step
from polydyn.codegen.cuda.softmax import STATISTICS, UNMASKED_TILE, OnlineRows
from polydyn.codegen.cuda.sums import Sums, lane_points
from polydyn.codegen.cuda.turns import MORE, VOTES, two_pass_loop, vote
from polydyn.codegen.cuda.work import UNITS, with_epilogues
from polydyn.codegen.family import Family, Rule, Variant, build
from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import (
    Alloc,
    Body,
    Call,
    Compare,
    For,
    If,
    Inst,
    Mark,
    Node,
    Pointer,
    consume,
    walk,
)
from polydyn.codegen.kernel import Block, Kernel, TensorMapOf, Work
from polydyn.codegen.lower import Lowering
from polydyn.codegen.passes.threads import WARP
from polydyn.codegen.passes.warpgroups import WARPGROUP, Product, Ring, specialise, stagger
from polydyn.codegen.places import Places
from polydyn.codegen.printers.cuda_values import HALF
from polydyn.schedules.errors import Declined
from polydyn.schedules.expr import FromIndex, Value
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike, maximum, minimum
from polydyn.schedules.laws.masks import Logits, visits
from polydyn.schedules.laws.online_softmax import INIT, LOGIT, SCORE, VALUE, Softmax
from polydyn.schedules.model import Array, Group
from polydyn.schedules.proof.overlap import first_conflict
from polydyn.schedules.tiling import AttentionParts
from polydyn.schedules.tree.gpu import SLAB, STAGE
from polydyn.schedules.tree.names import MarkName, b, e, f, g, h, w
from polydyn.schedules.tree.online import COPY_K, COPY_Q, COPY_V, FRAG_W, J1, J2, K1, K2, KEYS
from polydyn.schedules.tree.online_warpgroups import WarpgroupOnlineTile, online_warpgroups

V = Index.of
GROUPS = 2
"""Consumer warpgroups, with 64 queries each."""
TILE_KEYS, LARGE_HEAD_KEYS, LARGE_HEAD = 128, 64, 128
"""Keys of a tile, also for heads deeper than ``LARGE_HEAD``: the sums of 256 columns take 128 registers of a thread."""
ROWS, WARPS = 64 * GROUPS, 4 * GROUPS
PANEL, STEP, LINE = 64, 16, 128
"""Columns of a panel, K steps of an instruction; bytes of a panel's row."""
WIDTHS = (32, 64, 128, 192, 256)
"""Columns of values that instructions support."""
MAX_HELD_REGISTERS, SHARED_BYTES = 176, 227 << 10
"""Maximum registers of a consumer for scores, weights and sums; bytes of shared memory of a block."""
CONSUMER_BARRIER_ID, VOTE_BARRIER = 1, "decided"
"""The barrier of the consumers after their last step; the mbarrier for the votes of warps."""
THREADS, REGISTERS = (GROUPS + 1) * WARPGROUP, 168
"""Threads of a block; registers of a thread at launch."""
LOOP_HINTS = {
    e("g"): "unroll", e("s"): "unroll1", "fragment": "unroll", f(J1): "unroll", f(K1): "unroll", f(K2): "unroll",
}  # fmt: skip


class Attention(Protocol):
    """The properties of an attention that do not depend on its kernel."""

    name: str
    group: Group
    parts: AttentionParts
    scores: ProductGroup
    values: ProductGroup
    softmax: Softmax

    @property
    def masks_in_pairs(self) -> tuple[bool, ...]:
        """Whether versions read masks in pairs of columns."""

    def logits(self, rows: int, keys: int) -> Logits:
        """Return its logits, in tiles of ``rows`` rows and ``keys`` keys."""


MAPS = {COPY_Q: "map_q", COPY_K: "map_k", COPY_V: "map_v"}
"""Copies -> tensor maps."""


@dataclass(frozen=True)
class AttentionTile:
    """Keys of a tile, slots of both rings."""

    keys: int
    stages: int = 2


def broken_rule(t: AttentionTile, depth: int, width: int) -> str | None:
    """Return the rule that a tile breaks for heads with ``depth`` key and ``width`` value columns, or None."""
    panels, columns = (-(-x // PANEL) for x in (depth, width)), next(n for n in WIDTHS if width <= n)
    queries, values = panels
    rings = t.stages * t.keys * LINE * (queries + values)
    rules = {
        "a tile has 64 or 128 keys": t.keys not in (64, 128),
        "rings have two slots or more": t.stages < 2,
        "scores, weights and sums fit the registers": t.keys // 2 + t.keys // 4 + columns // 2 > MAX_HELD_REGISTERS,
        "sums leave through the rings": ROWS * columns * 4 > rings,
        "queries and rings fit shared memory": ROWS * LINE * queries + rings > SHARED_BYTES,
    }
    return next((rule for rule, broken in rules.items() if broken), None)


def attention_tiles(attention: Attention) -> tuple[AttentionTile, ...]:
    """Return every tile that can be built, the default first; empty if there are no versions."""
    first = _default_tile(attention)
    every = dict.fromkeys((first, *(AttentionTile(k, s) for k in (128, 64) for s in (2, 3, 4))))
    size = int(attention.scores.K), int(attention.values.N)
    if isinstance(tensor_maps(attention, first), Declined):
        return ()
    return tuple(t for t in every if not broken_rule(t, *size))


def _default_tile(attention: Attention) -> AttentionTile:
    deep = max(int(attention.scores.K), int(attention.values.N)) > LARGE_HEAD
    return AttentionTile(LARGE_HEAD_KEYS if deep else TILE_KEYS)


def warpgroup_attention(attention: Attention, tile: AttentionTile | None = None) -> list[Kernel]:
    """Return the versions for sm_90a with a tile, by default the default one.

    The result is empty if TMA cannot load an operand or its layout does not suit wgmma. Queries and keys are contiguous
    along the head, values along their columns, all of 16 bits. Values of deep heads are at most as wide as the heads:
    the rings of fewer keys have no room for other sums, and their threads lack registers for masks in pairs.
    """
    tile = tile or _default_tile(attention)
    maps = tensor_maps(attention, tile)
    deep = int(attention.scores.K) > LARGE_HEAD
    forms = (*((True, x) for x in attention.masks_in_pairs if not (x and deep)), (False, False))
    if isinstance(maps, Declined):
        return []
    return drop_covered_versions(_Version(attention, maps, tile, *x) for x in forms)


def tensor_maps(attention: Attention, tile: AttentionTile | None = None) -> dict[str, TensorOperand] | Declined:
    """Return the operands with tensor maps, for the default tile or another; declined if there are no versions."""
    tile = tile or _default_tile(attention)
    deep = max(int(attention.scores.K), int(attention.values.N)) > LARGE_HEAD
    if attention.scores.dtype not in HALF or (deep and int(attention.values.N) > int(attention.scores.K)):
        return Declined("its operands are not of 16 bits, or its values are wider than deep heads")
    keys = attention.scores.N.constant
    if keys is not None and keys <= tile.keys:  # one tile: no copy overlaps a product
        return Declined("its keys are one tile, so no copy overlaps a product")
    r, second = attention.parts.score_roles, attention.parts.value_roles
    batch = {x: attention.scores.extents[x] for x in r.batch}
    q, k = (
        tensor_operand(attention.group, v, mn, r.block, batch)
        for v, mn in zip(attention.scores.values, (r.row, r.col), strict=True)
    )
    v = tensor_operand(attention.group, attention.values.values[1], second.col, second.block, batch)
    found = {COPY_Q: q, COPY_K: k, COPY_V: v}
    for name, x in found.items():
        if isinstance(x, Declined):
            return Declined(f"TMA does not reach {name}: {x}")
    maps = {name: x for name, x in found.items() if isinstance(x, TensorOperand)}
    if [x.along_k for x in maps.values()] != [True, True, False]:
        return Declined("its queries and keys are not contiguous along the head, or its values along their columns")
    return maps


@dataclass(frozen=True)
class _Boxes:
    """An operand in shared memory: ``stages`` tiles of ``panels`` panels with ``rows`` rows."""

    buffer: str
    rows: int
    panels: int
    stages: int

    @property
    def elements(self) -> int:
        """The number of elements of a tile."""
        return self.panels * self.rows * PANEL

    def ring(self, loop: For | None = None) -> Ring:
        """Return its ring of mbarriers."""
        return Ring(f"_{self.buffer}", self.stages, self.panels * self.rows * LINE, loop)

    def slot(self, a: Mapping[str, Index]) -> Index:
        """Return the slot that an instance accesses."""
        return a[b("l")] % self.stages if self.stages > 1 else ZERO


class _Version(Variant):
    """One version. ``wide``: epilogues store 16 bytes at once; ``masks_in_pairs``: masks are read in column pairs."""

    def __init__(
        self, attention: Attention, maps: Mapping[str, TensorOperand], size: AttentionTile, wide: bool,
        masks_in_pairs: bool,
    ) -> None:  # fmt: skip
        self.of, self.maps, self.group, self.wide = attention, maps, attention.group, wide
        depth, width = int(attention.scores.K), int(attention.values.N)
        self.panels = -(-depth // PANEL), -(-width // PANEL)
        self.steps_of_panel = PANEL // STEP if depth > PANEL else -(-depth // STEP)
        self.width = next(n for n in WIDTHS if width <= n)
        self.keys, self.stages = size.keys, size.stages
        columns = min(self.width, PANEL)
        tile = WarpgroupOnlineTile(GROUPS, self.keys, (self.panels[0], self.steps_of_panel),
                                   (self.panels[1], columns // 8), STEP)  # fmt: skip
        self.schedule = online_warpgroups(attention.parts, attention.softmax, tile)
        self.places = Places(self.schedule)
        kind, unit = INSTRUCTIONS["mma"], V("warp") - WARPGROUP // WARP
        self.scores = Sums(attention.scores, kind, self.places, wide, "acc1", ("i", J1))
        self.values = Sums(attention.values, kind, self.places, wide, "acc2", ("i", J2), unit, slabs=self.width // SLAB,
                           buffer="tile_b1")  # fmt: skip
        self.logits = attention.logits(ROWS, self.keys)
        self.online = OnlineRows(self.scores, self.values, self.logits, attention.softmax.no_nan, masks_in_pairs)
        self.visits = visits(self.logits)
        boxes = ((COPY_Q, "tile_a1", ROWS, 1, 0), (COPY_K, "tile_b1", self.keys, self.stages, 0),
                 (COPY_V, "tile_b2", self.keys, self.stages, 1))  # fmt: skip
        self.boxes = {c: _Boxes(n, rows, self.panels[side], stages) for c, n, rows, stages, side in boxes}

    @property
    def required_multiples(self) -> tuple[tuple[Index, int], ...]:
        """Alignment required by the tensor maps."""
        return tuple(m for x in self.maps.values() for m in x.multiples)

    @property
    def version(self) -> str:
        """The name of the version."""
        wide = any(self.values.vector(s) > 1 for s in self.of.values.epilogues)
        slots = (f"_{self.stages}" if self.stages != 2 else "") + "_wide" * wide + "_pairs" * self.online.masks_in_pairs
        return f"attention_wgmma_{ROWS}x{self.keys}x{PANEL * self.panels[0]}{slots}"

    def build(self) -> tuple[Kernel, ...]:
        """Build the kernel, with indices of both widths."""
        attention = self.of
        body, count = build(WARPGROUP_ATTENTION, self)
        multiples = (*self.required_multiples, *self.values.multiples, *self.online.multiples)
        scores = attention.scores
        extents = (scores.M, scores.N, *(scores.extents[x] for x in attention.parts.score_roles.batch))
        conditions = dict.fromkeys(
            (Compare(">=", scores.N, ONE), *(c for m in self.maps.values() for c in m.conditions))
        )
        conditions |= {Compare("<=", x, V(MAX_COORDINATE)): None for x in extents if x.constant is None}
        kernel = Kernel(
            self.name, self.symbols, count, version=self.version, multiples=tuple(dict.fromkeys(multiples)),
            conditions=tuple(conditions), block=Block(THREADS, "sm_90a", self._tensor_maps(), work=self._work()),
        )  # fmt: skip
        limits: dict[str, IndexLike] = {
            b("i"): attention.scores.M.ceildiv(ROWS),
            b("l"): attention.scores.N.ceildiv(self.keys),
            "task": count,
            MORE: 1,
        }
        limits |= {x: attention.scores.extents[x] for x in attention.parts.score_roles.batch}
        return emit(kernel, body, self.arrays(), limits)

    @cached_property
    def name(self) -> str:
        """The kernel's name."""
        return f"{self.of.name}_{self.version}"

    def arrays(self) -> dict[str, Array]:
        """The arrays in memory."""
        return without_rows(self.group.arrays)

    def _work(self) -> Work:
        keys, depth = self.of.scores.N.ceildiv(self.keys), PANEL * self.panels[0]
        flops = 2 * ROWS * self.keys * (depth + self.width)
        traffic = self.keys * LINE * sum(self.panels)
        work = Work(keys, REGISTERS, UNITS[self.of.scores.dtype], flops, traffic=traffic,
                    instructions=self.online.slots(ROWS * self.keys // WARP), flight=self.stages - 1,
                    elements=ROWS * self.width, by_warps=False)  # fmt: skip
        return with_epilogues(work, self.group, self.of.values.epilogues)

    def _tensor_maps(self) -> tuple[TensorMapOf, ...]:
        x, y = self.of.scores, self.of.values
        sides = {COPY_Q: (x.M, x.K), COPY_K: (x.N, x.K), COPY_V: (y.N, x.N)}
        return tuple(m.tensor_map(MAPS[n], *sides[n], (PANEL, self.boxes[n].rows)) for n, m in self.maps.items())

    def sizes(self) -> dict[str, Index]:
        """Return the numbers of all loops, except those that are mapped to threads."""
        return {n: x for n, x in self.schedule.parameters().items() if n not in THREAD_MAPPED_LOOPS}

    def units(self) -> dict[str, IndexLike]:
        """Return the indices of warpgroups and warps of a block."""
        unit, group = self.values.unit, V("tid") // WARPGROUP - 1
        return {w("i"): unit, g("i"): group, h("i"): unit - group * (WARPGROUP // WARP)}

    def rows_of_lanes(self, body: Body) -> Body:
        """Lower the statements on a warp's rows: its lanes process them."""
        online = self.online
        rows = ((MarkName.START, online.start), (MarkName.ROWS, online.rows),
                (MarkName.RESCALE, online.rescale), (MarkName.FINISH, online.finish))  # fmt: skip
        for mark, made in rows:
            body = consume(body, mark, lambda _, made=made: made())  # type: ignore[misc]
        return body

    def register_names(self) -> tuple[str, ...]:
        """Return the names of a thread's registers."""
        return tuple(n for n, _, _ in self.registers())

    def registers(self) -> tuple[tuple[str, str, int], ...]:
        """Return (name, dtype, count) of a thread's registers."""
        return (*STATISTICS, ("acc1", "float32", self.keys // 2), ("acc2", "float32", self.width // 2),
                ("a_frag2", "uint32", self.keys // 4))  # fmt: skip

    def allocate(self, body: Body) -> Body:
        for name, dtype, size in self.registers():
            body = (Alloc(name, dtype, V(size), "register", body),)
        return body

    # -- marks ---------------------------------------------------------------------------------------------------

    def instruction(self, body: Body) -> Body:
        """Tensorize: a warpgroup's product of a tile is one group of instructions; else take a lane's points."""
        inst = next(n for n in walk(body) if isinstance(n, Inst))
        points = [n.var for n in walk(body) if isinstance(n, For)]
        if inst.statement in (SCORE, VALUE):
            return substitute((inst,), dict.fromkeys(points, ZERO))
        return lane_points(inst, points)

    def roles(self, body: Body) -> Body:
        """Split the loop into the producer and the consumers of the rings of keys and values; queries are loaded once.
        """
        (loop,) = (n for n in body if isinstance(n, For) and n.var == b("l"))
        at = body.index(loop)
        # a fully masked tile changes nothing; a block without tiles would need a separate path
        tiles = replace(loop, hi=maximum(loop.hi, loop.lo + 1))
        rings = {c: x.ring(tiles if x.stages > 1 else None) for c, x in self.boxes.items()}
        every, queries = (*body[:at], *loop.body), rings[COPY_Q].wait()
        copies = [(ring, tuple(n for n in every if _statements_of(n) == {c})) for c, ring in rings.items()]
        before = tuple(n for n in body[:at] if _statements_of(n) != {COPY_Q})
        # the end of a wait ends the basic block: ptxas would move the powers after the products
        products = partial(stagger, fence=(queries,), **self._products(loop, rings))
        consume = (*before, queries, *self._key_loop(tiles, self._vote(), products), *body[at + 1 :])
        two = ((VOTE_BARRIER, WARPS),) if self.visits.end is not None else ()
        out = specialise(copies, GROUPS, consume, walk=self._fill, barriers=two)
        out = (Alloc(VOTES, "int32", V(WARPS), "shared", out),) if two else out
        for x in reversed(tuple(self.boxes.values())):
            out = (Alloc(x.buffer, self.of.scores.dtype, V(x.stages * x.elements), "shared", out),)
        return out

    def _products(self, loop: For, rings: Mapping[str, Ring]) -> dict[str, Any]:
        """Return both products of a tile, the statements that overlap the second one, and those that wait for it."""
        scores, values = (n for n in loop.body if isinstance(n, Mark) and n.name == MarkName.MULTIPLY)
        between = [n for n in loop.body if not _statements_of(n) & {COPY_K, COPY_V, INIT, SCORE, VALUE}]
        split = first_conflict(self.schedule, VALUE, [{INIT, SCORE}, *map(_statements_of, between)]) - 1
        weights = _keep("a_frag2", self.keys // 4, "uint32")
        return {
            "first": Product(scores.body, rings[COPY_K], (_keep("acc1", self.keys // 2),)),
            "second": Product(values.body, rings[COPY_V], (_keep("acc2", self.width // 2), weights)),
            "beside": self.online.split(between[:split]), "behind": tuple(between[split:]),
        }  # fmt: skip

    def _key_loop(self, tiles: For, decide: Body, walk: Callable[[For], Body]) -> Body:
        """Visit all tiles; or those before the mask's end, at least one, and then the others if a warp votes for it."""
        if self.visits.end is None:
            return walk(tiles)
        assert tiles.lo == ZERO
        end = maximum(1, minimum(tiles.hi, self.visits.end))
        return two_pass_loop(tiles, end, WARPS, decide, lambda x: (If((Compare(">", x.hi, x.lo),), walk(x)),))

    def _fill(self, tiles: For) -> Body:
        """Return the producer's loop."""
        return self._key_loop(tiles, (_decided(),), lambda x: (x,))

    def _vote(self) -> Body:
        """Store a consumer's vote and wait for the others."""
        row = self.places.element(LOGIT, "i", {b("i"): V(b("i")), w("i"): self.values.unit})
        arrive = Call("pd_mbar_arrive", (Pointer("uint64", VOTE_BARRIER, ZERO),))
        voted = If((Compare("==", LANE, ZERO),), (arrive,))
        return (*vote(self.online, self.visits.least or 0.0, row, self.values.unit), voted, _decided())

    def epilogue(self, body: Body) -> Body:
        """Stage sums in the rings after the last consumer has read them."""
        threads = FromIndex("int32", V(GROUPS * WARPGROUP))
        return (Call("pd_bar_sync", (FromIndex("int32", V(CONSUMER_BARRIER_ID)), threads)), *body)

    # -- statements ----------------------------------------------------------------------------------------------

    def table(self) -> dict[str, Lowering]:
        return {
            INIT: lambda a: (),  # the first instruction of a tile starts from zero
            **{c: partial(self.copy, c) for c in self.maps},
            SCORE: self.score,
            LOGIT: self.online.logits_of,
            UNMASKED_TILE: partial(self.online.logits_of, whole=True),
            FRAG_W: lambda a: self.online.packed(a[f(K2)], a[f(K2)] * 4),
            VALUE: self.value,
            STAGE: self.values.stage,
        }

    def _slot(self, copy: str, a: Mapping[str, Index], more: IndexLike = 0) -> Pointer:
        """Return an element of the current slot of an operand's ring."""
        x = self.boxes[copy]
        return Pointer(self.of.scores.dtype, x.buffer, x.slot(a) * x.elements + more)

    def copy(self, copy: str, a: Mapping[str, Index]) -> Body:
        """Copy one panel of an operand."""
        mn, k = {COPY_Q: ("i", K1), COPY_K: (KEYS, K1), COPY_V: (J2, KEYS)}[copy]
        at = [self.places.element(copy, x, a) for x in (mn, k)]
        x = self.boxes[copy]
        across = self.places.cell(copy, x.buffer, a)[J2 if copy == COPY_V else K1]
        place, full = self._slot(copy, a, across * x.rows), x.ring().full(x.slot(a))
        return (self.maps[copy].load(MAPS[copy], place, at[0], at[1], a, full),)

    def score(self, a: Mapping[str, Index]) -> Body:
        """Issue the instructions for a tile's scores, starting from zero."""
        step = V(f(K1))
        panel, inside = step // self.steps_of_panel * LINE, step % self.steps_of_panel * (STEP * 2)
        row = self.places.cell(SCORE, "tile_a1", a)["i"]
        places = (self._slot(COPY_Q, a, row * PANEL), self._slot(COPY_K, a))
        sides = (descriptor(x, panel * rows + inside) for x, rows in zip(places, (ROWS, self.keys), strict=True))
        function = f"pd_wgmma_m64n{self.keys}k{STEP}_{TENSOR[self.of.scores.dtypes]}<0>"
        issue = Call(function, (Pointer("float32", "acc1", ZERO), *sides, _number(step)))
        return (For(f(K1), ZERO, V(self.panels[0] * self.steps_of_panel), (issue,)),)

    def value(self, a: Mapping[str, Index]) -> Body:
        """Issue the instructions that add a tile's values; the weights are the row operand."""
        step = V(f(K2))
        columns = descriptor(self._slot(COPY_V, a), step * (STEP * LINE), self.keys * LINE)
        function = f"pd_wgmma_rs_m64n{self.width}k{STEP}_{TENSOR[self.of.values.dtypes]}<1>"
        args = (Pointer("float32", "acc2", ZERO), Pointer("uint32", "a_frag2", step * 4), columns, _number(1))
        return (For(f(K2), ZERO, V(self.keys // STEP), (Call(function, args),)),)


def _decided() -> Call:
    """Wait until all warps have voted."""
    return Call("pd_mbar_wait", (Pointer("uint64", VOTE_BARRIER, ZERO), _number(0)))


def _statements_of(n: Node) -> set[str]:
    """Return the statements below a node."""
    return {x.statement for x in walk((n,)) if isinstance(x, Inst)}


def _keep(buffer: str, registers: int, dtype: str = "float32") -> Call:
    """Keep registers of a running product: the compiler must not move their uses across the wait."""
    return Call(f"pd_wgmma_keep<{registers}>", (Pointer(dtype, buffer, ZERO),))


def _number(i: IndexLike) -> Value:
    return FromIndex("int32", V(i))


WARPGROUP_ATTENTION: Family[_Version] = Family(
    names=lambda arrays, symbols: bound_names(without_rows(arrays), symbols),
    start=lambda x: loops_over_keys(x.name, x.proven, x.visits.live, x.logits),
    first=(Rule("instruction", "points become an instruction", _Version.instruction, MarkName.INSTRUCTION),),
    sizes=_Version.sizes,
    units=_Version.units,
    marks=(
        Rule("roles", "a producer and consumers", _Version.roles, MarkName.ROLES, opens=_Version.register_names),
        Rule("rows", "lanes process the rows of a warp", _Version.rows_of_lanes, opens=_Version.register_names),
        Rule("store", "epilogues on staged rows", lambda x, body: x.values.store(body), MarkName.STORE,
             opens=("stage",)),
        Rule("epilogue", "rows are staged in the rings", _Version.epilogue, MarkName.EPILOGUE),
    ),
    statements=_Version.table,
    stores=(Rule("pair", "masks of two columns are one access", lambda x, body: x.online.pair(body)),),
    registers=lambda _: UNROLL_HINTS | LOOP_HINTS,
    band=lambda x, _: (blocks_step(x.sharing),),
    around=(Rule("registers", "registers of a thread", _Version.allocate),),
)  # fmt: skip
