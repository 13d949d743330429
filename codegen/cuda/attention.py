"""CUDA kernels for attention groups: scores, online softmax and values in one kernel.

A block has 64 rows of queries, four warps 16 each, and loops over tiles of 64 keys (float32: 32) that are loaded
through a ring in shared memory. Scores stay in registers: the fragments of sums, packed to 16 bits or rounded to tf32,
are the operand fragments of the second product. On CUDA cores (float32) the lanes of a row exchange them by shuffles.
The four lanes of a row keep its statistics.

For many 16-bit queries a block has 128 rows: a warp holds two 16-row fragments and reuses each loaded key and value for
both. A row whose logits are all -inf has sum 0 and gives NaN, as in the model; a row without keys gives 0. Tiles that a
mask of a large negative number hides are visited last, if any row needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial

from polydyn.codegen.alternatives import Alternative, gather
from polydyn.codegen.cuda.attention_limits import DEPTHS, LARGE_DEPTHS
from polydyn.codegen.cuda.copies import Copy, Operand, copy_of
from polydyn.codegen.cuda.emit import (
    bound_names,
    drop_covered_versions,
    emit,
    narrow_indices_first,
    without_rows,
)
from polydyn.codegen.cuda.families import FamilyFactors, WarpgroupAttention
from polydyn.codegen.cuda.group import ProductGroup
from polydyn.codegen.cuda.instructions import COLUMN, INSTRUCTIONS, KEY, LANE
from polydyn.codegen.cuda.keys import loops_over_keys
from polydyn.codegen.cuda.product import THREAD_MAPPED_LOOPS, UNROLL_HINTS, deal_copies, products, split_copies
from polydyn.codegen.cuda.rows import CudaNestKernel
from polydyn.codegen.cuda.sharing import blocks_step
from polydyn.codegen.cuda.softmax import STATISTICS, UNMASKED_TILE, OnlineRows
from polydyn.codegen.cuda.sums import Sums, lane_points
from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.cuda.turns import MORE, VOTES, two_pass_loop, vote
from polydyn.codegen.cuda.warpgroup_attention import tensor_maps, warpgroup_attention
from polydyn.codegen.cuda.work import WARP, product_work, with_epilogues
from polydyn.codegen.family import Family, Rule, Variant, build, keep
from polydyn.codegen.indices import substitute
from polydyn.codegen.ir import (
    Alloc,
    Apply,
    Body,
    Call,
    FlatLoad,
    For,
    Inst,
    Let,
    Store,
    consume,
    walk,
)
from polydyn.codegen.kernel import WORKERS, Block, Kernel, Work, with_block
from polydyn.codegen.lower import Lowering
from polydyn.codegen.passes.threads import pipeline
from polydyn.codegen.places import Places
from polydyn.codegen.printers.cuda_values import HALF
from polydyn.codegen.sharing import UNSHARED, Sharing, SplitLaunch
from polydyn.codegen.split import attention_part, combining_attention, partial_attention
from polydyn.schedules.errors import Declined, first_refusal
from polydyn.schedules.expr import FromIndex, Load, loads, transform
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike, maximum, minimum, product
from polydyn.schedules.laws.masks import Axis, Logits, Visits, visits
from polydyn.schedules.laws.online_softmax import FINISH, INIT, LOGIT, SCORE, VALUE, softmax
from polydyn.schedules.model import Array, Group
from polydyn.schedules.tiling import AttentionParts
from polydyn.schedules.tree.gpu import STAGE
from polydyn.schedules.tree.names import Coord, MarkName, b, f, g, s, w
from polydyn.schedules.tree.names import extent as extent_of
from polydyn.schedules.tree.online import (
    COPY_K,
    COPY_Q,
    COPY_V,
    FRAG_K,
    FRAG_Q,
    FRAG_V,
    FRAG_W,
    J1,
    J2,
    K1,
    K2,
    OnlineTile,
    online_attention,
)
from polydyn.schedules.tree.scheduled import Scheduled

V = Index.of
ROWS, STAGES, WARPS = 64, 2, 4
TILE_KEYS = {"mma": 64, "tf32": 32, "lanes": 32}
"""Keys of a tile, by instruction: 128 bytes of them."""
DEEP_KEYS = 32
FRAGMENTS, MAX_FRAGMENT_HEAD, FEWER_KEYS = 2, 128, 32
"""16-row fragments of a warp for many queries; maximum head size of this form; keys of its tiles if heads are larger
than 64, where more keys would spill registers."""
RESIDENT, LEAST_TILES, FEW_BLOCKS = 3, 2, 4
"""Split-KV: blocks per multiprocessor, minimum tiles of a slice, maximum row blocks of a head (if known)."""
LOOPS = (f(J1), f(K1), g(J1), f(J2), f(K2), g(J2), "fragment", "row_fragment")
"""Loops over registers, in addition to those of a product."""


class CudaAttentionKernel:
    """Builds the versions of one attention group.

    ``arch``: versions for newer architectures are built only on request. ``tf32``: float32 on tensor cores, rounded to
    tf32. The group is one that ``attention_refusal`` accepts. ``kept``: the tuned tiles of ``family``, in place of its
    default tile. ``sharing``: with a SplitLaunch (split-KV) each block has a slice of the keys and stores its partial
    result of a row.
    """

    def __init__(
        self, name: str, group: Group, parts: AttentionParts, arch: str = "sm_80", tf32: bool = False,
        sharing: Sharing = UNSHARED,
    ) -> None:  # fmt: skip
        self.name, self.group, self.parts, self.arch, self.tf32 = name, group, parts, arch, tf32
        self.sharing, self.shares = sharing, sharing.slices
        self.kept: FamilyFactors | None = None
        self.scores = ProductGroup(name, parts.scores, parts.score_roles)
        self.values = ProductGroup(name, parts.values, parts.value_roles, sharing)
        self.kind = "mma" if self.scores.dtype in HALF else "tf32" if tf32 else "lanes"
        self.depths = tuple(_depth(x) for x in (self.scores.K, self.values.N))
        self.deep = max(self.depths) in LARGE_DEPTHS
        self.keys = DEEP_KEYS if self.deep else TILE_KEYS[self.kind]
        rows = softmax(parts.rows, parts.row_prefix, parts.score_roles.col)
        (score,) = self.scores.epilogues
        logit = transform(rows.logit, lambda x: score.value if isinstance(x, Load) and x.buffer == "scores" else x)
        self.softmax = replace(rows, logit=logit)
        self._forms: dict[int, tuple[Visits, Scheduled]] = {}

    def form(self, fragments: int) -> tuple[Visits, Scheduled]:
        """Return the visited tiles and the schedule, for ``fragments`` 16-row fragments per warp."""
        if fragments not in self._forms:
            (depth, width), step = self.depths, INSTRUCTIONS[self.kind].shape[2]
            keys = self.keys_of(fragments)
            tile = OnlineTile(WARPS, keys, depth, width, step, fragments)
            found = visits(self.logits(ROWS * fragments, keys))
            self._forms[fragments] = (found, online_attention(self.parts, self.softmax, tile, self.shares != ONE))
        return self._forms[fragments]

    def keys_of(self, fragments: int) -> int:
        """Return the keys of a tile, for ``fragments`` 16-row fragments per warp."""
        return self.keys if fragments == 1 or max(self.depths) <= 64 else FEWER_KEYS

    def logits(self, rows: int, keys: int) -> Logits:
        """Return the logits, in tiles of ``rows`` rows and ``keys`` keys."""
        r = self.parts.score_roles
        row, key = Axis(r.row, self.scores.M, rows, b("i")), Axis(r.col, self.scores.N, keys, b("l"))
        stored = (self.scores.acc.array, self.scores.dtype)
        return Logits(self.softmax.logit, r.batch, row, key, self.group.params, stored)

    def versions(self) -> tuple[tuple[Kernel, ...], tuple[tuple[str, str], ...]]:
        """Return the versions of every row of ``ATTENTIONS``, and the names and reasons of rows that decline."""
        kernels, declined = gather(ATTENTIONS, self)
        return narrow_indices_first(kernels), declined

    def warpgroups(self) -> tuple[Kernel, ...] | Declined:
        """Return the versions for warpgroups."""
        if self.arch != "sm_90a":
            return Declined(f"the target is {self.arch}, not sm_90a")
        if isinstance(maps := tensor_maps(self), Declined):
            return maps
        return tuple(self.kept.versions(self.family) if self.kept else warpgroup_attention(self))

    def tiles(self) -> tuple[Kernel, ...]:
        """Return one version per access width, widest first.

        A version is dropped if an earlier one can always run in its place.
        """
        narrow = ((8, False), (4, False), (2, False)) if self.kind == "mma" else ((4, False),)
        return self._factored(drop_covered_versions((
            *(_Version(self, 16, True, masks_in_pairs=x) for x in self.masks_in_pairs),
            *(_Version(self, width, wide) for width, wide in ((16, False), *narrow)),
        )))  # fmt: skip

    def _factored(self, kernels: Iterable[Kernel]) -> tuple[Kernel, ...]:
        """Return versions with the factor of unmeasured versions, if there are tuned tiles."""
        return tuple(with_block(k, factor=self.kept.others) if self.kept else k for k in kernels)

    @property
    def masks_in_pairs(self) -> tuple[bool, ...]:
        """Whether versions read masks in pairs of columns: first True, then False, if there is a mask."""
        masked = any(x.buffer != self.scores.acc.array for x in loads(self.softmax.logit))
        return (True, False) if masked else (False,)

    def several_fragments(self) -> tuple[Kernel, ...] | Declined:
        """Return the version with several row fragments per warp, with the widest copies.

        Heads of 128 need too many registers. On sm_90a warpgroup kernels serve them.
        """
        one_block = (self.scores.M.constant or ROWS + 1) <= ROWS
        most = 64 if self.arch == "sm_90a" else MAX_FRAGMENT_HEAD
        if refusal := first_refusal(
            (self.kind != "mma", "its operands are not of 16 bits"),
            (max(self.depths) > most, f"heads of {max(self.depths)} need too many registers"),
            (one_block, "its rows fill one block"),
        ):
            return refusal
        made = (_Version(self, 16, True, FRAGMENTS, x) for x in self.masks_in_pairs)
        kernels = drop_covered_versions(x for x in made if all(c.bytes == 16 for c in x.copies.values()))
        return self._factored(kernels) or NO_WIDE_COPIES

    def split_over_keys(self) -> tuple[Kernel, ...] | Declined:
        """Return the split-KV version for few queries and many keys, with the widest copies and 32-bit indices.

        Other versions handle the remaining shapes. A second launch combines the slices of each row.
        """
        rows, tiles = self.scores.M.ceildiv(ROWS), self.scores.N.ceildiv(self.keys)
        batch = product(self.scores.extents[x] for x in self.parts.score_roles.batch)
        if (rows.constant or 1) > FEW_BLOCKS or (tiles.constant or 2 * LEAST_TILES) < 2 * LEAST_TILES:
            return Declined("its rows are many, or its keys are few")
        values, roles = self.parts.values, self.parts.value_roles
        parts = replace(self.parts, values=partial_attention(values, roles))
        group = attention_part(self.group, parts)
        join = CudaNestKernel(f"{self.name}_join", *combining_attention(values, roles, self.softmax.no_nan))
        shares = minimum(V(WORKERS) * RESIDENT // maximum(1, batch * rows), tiles // LEAST_TILES)
        sharing = SplitLaunch(group=group, count=shares, add=lambda: join.build("columns")[-1])
        made = _Version(CudaAttentionKernel(f"{self.name}_part", group, parts, self.arch, self.tf32, sharing), 16, True)
        return NO_WIDE_COPIES if any(c.bytes < 16 for c in made.copies.values()) else made.build()[:1]

    @property
    def family(self) -> WarpgroupAttention:
        """The family of its warpgroup kernels."""
        return WarpgroupAttention(self)


NO_WIDE_COPIES = Declined("its operands are not copied 16 bytes at a time")
ATTENTIONS: tuple[Alternative[CudaAttentionKernel, tuple[Kernel, ...]], ...] = (
    Alternative("warpgroups", CudaAttentionKernel.warpgroups),
    Alternative("tiles", CudaAttentionKernel.tiles),
    Alternative("several fragments per warp", CudaAttentionKernel.several_fragments),
    Alternative("split over keys", CudaAttentionKernel.split_over_keys),
)
"""The kernels of an attention."""


def _depth(extent: Index) -> int:
    """Return the head size of the tiles."""
    return next(d for d in (*DEPTHS, *LARGE_DEPTHS) if int(extent) <= d)


class _Version(Variant):
    """One access width. ``fragments``: 16-row fragments of a warp; ``masks_in_pairs``: whether columns are in pairs."""

    def __init__(
        self, of: CudaAttentionKernel, width: int, wide: bool, fragments: int = 1, masks_in_pairs: bool = False
    ) -> None:
        self.of, self.group, self.parts = of, of.group, of.parts
        depth, columns = of.depths
        self.kind, self.keys, self.by_keys = INSTRUCTIONS[of.kind], of.keys_of(fragments), of.kind == "tf32"
        self.fragments, self.rows, of_warp = fragments, ROWS * fragments, ROWS * fragments // WARPS
        self.tiles = (CudaTile(of.kind, self.rows, self.keys, depth, of_warp, self.keys, STAGES),
                      CudaTile(of.kind, self.rows, columns, self.keys, of_warp, columns, STAGES))  # fmt: skip
        self.visits, self.schedule = of.form(fragments)
        self.places, self.logits = Places(self.schedule), of.logits(self.rows, self.keys)
        self.scores = Sums(of.scores, self.kind, self.places, wide, "acc1", ("i", J1))
        self.values = Sums(of.values, self.kind, self.places, wide, "acc2", ("i", J2))
        self.online = OnlineRows(self.scores, self.values, self.logits, of.softmax.no_nan, masks_in_pairs)
        self.copies = {c.operand.copy: c for c in (self._copy(width, *x) for x in (
            (of.scores, COPY_Q, FRAG_Q, "a1", "i", K1, (self.rows, depth), None),
            (of.scores, COPY_K, FRAG_K, "b1", J1, K1, (self.keys, depth), b("l")),
            (of.values, COPY_V, FRAG_V, "b2", J2, J1, (columns, self.keys), b("l"))))}  # fmt: skip

    def _copy(
        self, width: int, product: ProductGroup, copy: str, load: str, name: str, axis: str, steps: str,
        extents: tuple[int, int], slot: Coord | None,
    ) -> Copy:  # fmt: skip
        """Plan the copy of one operand: ``a1`` and ``b1`` are the queries and keys, ``b2`` the values."""
        column, loops = name.startswith("b"), (s("j") if name.startswith("b") else s("i"), s("k"))
        frag = f"{name[0]}_frag{name[1]}"
        x = Operand(f"tile_{name}", frag, product.values[column], axis, steps, extents, copy, load, loops, self.places,
                    slot, column)  # fmt: skip
        return copy_of(product.group, x, STAGES if slot else 1, width, self.kind)

    def build(self) -> tuple[Kernel, ...]:
        """Build the kernel, with indices of both widths."""
        of, version = self.of, self.version
        body, count = build(ATTENTION, self)
        multiples = (*self.required_multiples, *self.values.multiples, *self.online.multiples)
        few = sum(of.depths) > 128 or self.fragments > 1 or self.kind.name != "mma"  # too many registers for three
        blocks = 2 if few else 3
        rows, keys = of.scores.M.ceildiv(self.rows), of.scores.N.ceildiv(self.keys)
        limits: dict[str, IndexLike] = {b("i"): rows, b("l"): keys, "task": count, MORE: 1}
        limits |= {x: of.scores.extents[x] for x in self.parts.score_roles.batch} | {b("s"): of.shares}
        kernel = Kernel(self.name, self.symbols, count, version=version, multiples=tuple(dict.fromkeys(multiples)),
                        block=Block(WARPS * 32, work=self._work(keys, blocks)))  # fmt: skip
        return emit(kernel, body, self.arrays(), limits, blocks, of.sharing)

    @property
    def required_multiples(self) -> tuple[tuple[Index, int], ...]:
        """Alignment required by copies of this width."""
        return tuple(x for c in self.copies.values() for x in c.multiples)

    @property
    def version(self) -> str:
        """The name of the version: tile, bytes of the copies."""
        widths = "_".join(str(c.bytes) for c in self.copies.values())
        name = "attention" if self.kind.name == "mma" else f"attention_{self.kind.name}"
        wide = any(self.values.vector(s) > 1 for s in self.of.values.epilogues)
        name, ways = "split_" * (self.of.shares != ONE) + name, "_wide" * wide + "_pairs" * self.online.masks_in_pairs
        return f"{name}_{self.rows}x{self.keys}x{self.of.depths[0]}_{widths}{ways}"

    @cached_property
    def name(self) -> str:
        """The kernel's name."""
        return f"{self.of.name}_{self.version}"

    def arrays(self) -> dict[str, Array]:
        """The arrays in memory."""
        return without_rows(self.group.arrays)

    def sizes(self) -> dict[str, Index]:
        """Return the numbers of all loops, except those that are mapped to threads."""
        sizes = {n: x for n, x in self.schedule.parameters().items() if n not in THREAD_MAPPED_LOOPS}
        return sizes | ({extent_of(b("s")): self.of.shares} if self.of.shares != ONE else {})

    def unrolled(self) -> dict[str, str]:
        """Return the unroll pragmas of loops over registers."""
        kinds = UNROLL_HINTS | dict.fromkeys(LOOPS, "unroll")
        fewer = self.of.deep or self.keys < self.of.keys
        if self.kind.name == "lanes" or fewer:  # else all query fragments would stay in registers
            kinds |= {f(K1): "unroll2"}
        return kinds

    def tile_names(self) -> tuple[str, ...]:
        """Return the buffers of the copies."""
        return tuple(c.name for c in self.copies.values())

    def register_names(self) -> tuple[str, ...]:
        """Return the names of a thread's registers."""
        return tuple(n for n, _, _ in self.registers())

    def _work(self, keys: Index, blocks: int) -> Work:
        """Return the work of a block: both products of a key tile, and some instructions per score in between.

        All tiles count, even if a mask ends each block's loop. With such a mask, a block of twice as many rows visits
        32 more keys on average, and there are half as many blocks: 64 keys per block in this count.
        """
        ends = [c.expr for c in self.visits.live] + ([] if self.visits.end is None else [self.visits.end])
        if any(b("i") in x.symbols() for x in ends):
            keys = keys + (self.rows - ROWS) // self.keys
        tiles, copies = self.tiles, (self.copies[COPY_K], self.copies[COPY_V])
        first, second = (product_work(t, (c,), keys, blocks) for t, c in zip(tiles, copies, strict=True))
        both = replace(
            first, flops=first.flops + second.flops, shared=first.shared + second.shared,
            instructions=first.instructions + second.instructions + self.online.slots(self.rows * self.keys // WARP),
            traffic=first.traffic + second.traffic, elements=second.elements,
        )  # fmt: skip
        return with_epilogues(both, self.group, self.of.values.epilogues).shared_by(self.of.shares)

    # -- marks ---------------------------------------------------------------------------------------------------

    def copy(self, body: Body) -> Body:
        """Copy from global to shared memory, by all threads of the block."""
        return deal_copies(body, self.copies.values(), WARPS * 32, lambda c: c.bytes == 16 or not self.of.deep)

    def rows_of_lanes(self, body: Body) -> Body:
        """Lower the statements on a warp's rows before, between and after the products."""
        body = consume(body, MarkName.START, lambda x: self.online.start())
        body = consume(body, MarkName.ROWS, lambda x: (*self.online.rows(), *self.online.rescale()))
        return consume(body, MarkName.FINISH, self._finish)

    def _finish(self, body: Body) -> Body:
        """Divide the values of a row, or, with split-KV, store its partial result."""
        if self.of.shares == ONE:
            return self.online.finish()
        inst = next(n for n in walk(body) if isinstance(n, Inst))
        return () if inst.statement == FINISH else self.online.store_partial(body)

    def epilogue(self, body: Body) -> Body:
        """Stage rows in the memory of the ring."""
        return (Call("pd_syncthreads"), *self.values.stage_rows(body, WARPS))

    def ring(self, body: Body) -> Body:
        """Build the loop over the keys, in its shared memory."""
        if self.of.shares != ONE:
            body = self._slice_loop(body)
        else:
            body = self._key_loop(body) if self.visits.end is None else self._two_pass_loop(body)
        for n in (COPY_K, COPY_V):
            c = self.copies[n]
            body = (Alloc(c.name, c.dtype, V(c.elements * c.stages), "shared", body),)
        return body

    def _key_loop(self, body: Body) -> Body:
        return pipeline(body, b("l"), STAGES, split_copies)

    def _slice_loop(self, body: Body) -> Body:
        """Return the loop over the tiles of a slice: nearly equal parts of the tiles that the block would visit.

        Tiles that a mask of a large negative number hides are visited too, because the largest logit in other slices is
        unknown.
        """
        (loop,) = body
        assert isinstance(loop, For)
        every, n = maximum(0, loop.hi - loop.lo), self.of.shares
        first, last = (loop.lo + every * x // n for x in (V(b("s")), V(b("s")) + 1))
        walk = self._key_loop((replace(loop, lo=V("first"), hi=V("last")),))
        return (Let("first", first, (Let("last", last, walk),)),)

    def _two_pass_loop(self, body: Body) -> Body:
        """Visit the unmasked tiles first. Visit the masked tiles only if some row has found no larger logit."""
        (loop,) = body
        visits = self.visits
        assert isinstance(loop, For) and loop.lo == ZERO and visits.end is not None
        row = self.places.element(LOGIT, "i", {b("i"): V(b("i")), w("i"): V("warp")})
        decide = (*vote(self.online, visits.least or 0.0, row, V("warp")), Call("pd_syncthreads"))
        end = maximum(0, minimum(loop.hi, visits.end))
        walk = two_pass_loop(loop, end, WARPS, decide, lambda x: self._key_loop((x,)))
        return (Alloc(VOTES, "int32", V(WARPS), "shared", walk),)

    def instruction(self, body: Body) -> Body:
        """Tensorize: a product is one instruction; for other statements a lane takes its own points of a fragment."""
        inst = next(n for n in walk(body) if isinstance(n, Inst))
        points = [n.var for n in walk(body) if isinstance(n, For)]
        if inst.statement in (SCORE, VALUE):
            return substitute((inst,), dict.fromkeys(points, ZERO))
        return lane_points(inst, points, KEY if self.by_keys and inst.statement in (INIT, LOGIT) else COLUMN)

    # -- statements ----------------------------------------------------------------------------------------------

    def table(self) -> dict[str, Lowering]:
        q, k, v = (self.copies[n] for n in (COPY_Q, COPY_K, COPY_V))
        weights = replace(v, operand=replace(v.operand, fragment="a_frag2"))
        return {
            INIT: partial(self.scores.init, INIT),
            FRAG_Q: partial(q.load, self.kind),
            FRAG_K: partial(k.load, self.kind, keys=self.by_keys),
            SCORE: partial(products, self.scores, (q, k), SCORE),
            LOGIT: self.online.logits_of,
            UNMASKED_TILE: partial(self.online.logits_of, whole=True),
            FRAG_W: self.weights,
            FRAG_V: partial(v.load, self.kind),
            VALUE: partial(products, self.values, (weights, v), VALUE),
            STAGE: self.values.stage,
        }

    def weights(self, a: Mapping[str, Index]) -> Body:
        """Return the weights as the row operand of an instruction, from score fragments of the lane or row.

        16 bits: two packed fragments are 16 keys. tf32: a fragment is 8 keys (``KEY``). CUDA cores: four keys of rows g
        and g + 8, from the lanes that hold them.
        """
        step = a[f(K2)]
        if self.kind.name == "mma":
            return self.online.packed(step, a[f("i")] * 4, a[f("i")])
        if self.kind.name == "tf32":  # registers are (row half, half of the keys) = (r % 2, r / 2)
            scores = [FlatLoad("float32", "acc1", step * 4 + (r % 2 * 2 + r // 2)) for r in range(4)]
            return tuple(Store("a_frag2", V(r), Apply("uint32", "pd_f32_to_tf32", (x,))) for r, x in enumerate(scores))
        out: Body = ()
        for half, e in ((h, e) for h in range(2) for e in range(4)):
            weight = FlatLoad("float32", "acc1", step // 2 * 4 + (half * 2 + e % 2))
            lane = FromIndex("int32", LANE // 4 * 4 + step % 2 * 2 + e // 2)
            out += (Store("a_frag2", V(half * 4 + e), Apply("float32", "pd_shfl_idx", (weight, lane))),)
        return out

    def registers(self) -> tuple[tuple[str, str, int], ...]:
        """Return (name, dtype, count) of a thread's registers."""
        columns, kind, n = self.of.depths[1], self.kind.register, self.fragments
        a, b = self.kind.registers
        return (*((x, t, size * n) for x, t, size in STATISTICS), ("acc1", "float32", n * self.keys // 2),
                ("acc2", "float32", n * columns // 2), ("a_frag1", kind, n * a), ("b_frag1", kind, self.keys // 8 * b),
                ("a_frag2", kind, n * a), ("b_frag2", kind, columns // 8 * b))  # fmt: skip

    def allocate(self, body: Body) -> Body:
        for name, dtype, size in self.registers():
            body = (Alloc(name, dtype, V(size), "register", body),)
        c = self.copies[COPY_Q]
        return (Alloc(c.name, c.dtype, V(c.elements), "shared", body),)


ATTENTION: Family[_Version] = Family(
    names=lambda arrays, symbols: bound_names(without_rows(arrays), symbols),
    start=lambda x: loops_over_keys(x.name, x.proven, x.visits.live, x.logits),
    first=(
        Rule("copy", "copies are distributed over threads", _Version.copy, MarkName.COPY, opens=_Version.tile_names),
        Rule("pipeline", "copies run ahead in a ring", _Version.ring, MarkName.PIPELINE,
             opens=_Version.register_names),
        Rule("rows", "lanes process the rows of a warp", _Version.rows_of_lanes, opens=_Version.register_names),
    ),
    sizes=_Version.sizes,
    units=lambda _: {w("i"): "warp"},
    marks=(
        Rule("instruction", "points become an instruction", _Version.instruction, MarkName.INSTRUCTION),
        Rule("open", "tiles without bounds and masks", lambda x, body: x.online.split(body)),
        Rule("store", "epilogues on staged rows", lambda x, body: x.values.store(body), MarkName.STORE,
             opens=("stage",)),
        Rule("epilogue", "rows are staged in the memory of the ring", _Version.epilogue, MarkName.EPILOGUE),
        Rule("multiply", "the mark of the arithmetic is removed", keep, MarkName.MULTIPLY),
    ),
    statements=_Version.table,
    opened=lambda x: ("stage", *x.register_names()),
    stores=(Rule("pair", "masks of two columns are one access", lambda x, body: x.online.pair(body)),),
    registers=_Version.unrolled,
    band=lambda x, _: (blocks_step(x.sharing),),
    around=(Rule("registers", "registers of a thread", _Version.allocate),),
)  # fmt: skip
