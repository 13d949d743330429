"""CUDA kernels for attention groups: scores, online softmax and values in one kernel.

A block keeps 64 rows of queries, four warps 16 each, and walks over tiles of 64 keys (float32: 32) that come through a
ring in shared memory. Scores stay in registers: fragments of sums are, packed to 16 bits or rounded to tf32, the
fragments of the second product; on CUDA cores (float32) lanes of a row exchange them by shuffles. Row statistics are
kept by the four lanes of a row. A row all of whose logits are -inf has sum 0 and gives NaN, as the model does; a row
without keys gives 0. Tiles that a mask of a large negative number hides come last, if any row needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from polydyn.codegen.cuda.emit import bound_names, emit, needed, ordered
from polydyn.codegen.cuda.instructions import COLUMN, HALVES, INSTRUCTIONS, KEY, LANE, PAIR
from polydyn.codegen.cuda.kernel import CudaKernel
from polydyn.codegen.cuda.product import (
    ProductGroup,
    TiledProduct,
    lane_points,
    product_declined,
    split_copies,
)
from polydyn.codegen.cuda.tile import CudaTile
from polydyn.codegen.cuda.work import WARP, Work, product_work
from polydyn.codegen.ir import (
    Alloc,
    Apply,
    Body,
    Call,
    Compare,
    Def,
    FlatLoad,
    For,
    If,
    Inst,
    Let,
    Mark,
    Reg,
    Set,
    Store,
    consume,
    substitute,
    walk,
)  # fmt: skip
from polydyn.codegen.lower import Lowering, flat, lower
from polydyn.codegen.passes.bind import bind, fold
from polydyn.codegen.passes.threads import assign, combine_lanes, one_each, pipeline, spread, unrolled
from polydyn.codegen.passes.tiles import task_count
from polydyn.codegen.pipeline import Step, loops, run
from polydyn.codegen.printers.cuda_values import HALF
from polydyn.schedules.errors import Declined, ScheduleError
from polydyn.schedules.expr import Const, FromIndex, Load, Value, const, op, transform
from polydyn.schedules.gpu_tiling import gpu_attention_tree
from polydyn.schedules.index import ONE, ZERO, Index, IndexLike, maximum, minimum
from polydyn.schedules.isl_util import Condition
from polydyn.schedules.laws.masks import Axis, Logits, visits
from polydyn.schedules.laws.online_softmax import softmax_logit
from polydyn.schedules.model import Array, Group
from polydyn.schedules.proof.gpu_attention import AttentionTiles, prove_gpu_attention
from polydyn.schedules.tiling import AttentionParts
from polydyn.schedules.tree.gpu import SLAB
from polydyn.schedules.tree.strategies import INIT

V = Index.of
ROWS, STAGES, WARPS = 64, 2, 4
KEYS = {"mma": 64, "tf32": 32, "lanes": 32}
"""Keys of a tile, by instruction: 128 bytes of them."""
DEPTHS = (32, 64, 128)
"""Head sizes that tiles are made for; others are filled up with zeros."""
PACK = {"float16": "pd_pack_f16x2", "bfloat16": "pd_pack_bf16x2"}
LOWEST = Const("float32", float("-inf"))
MORE = "more"
"""The register that says whether tiles beyond the mask's end are visited: 1 or 0."""
SCORE = 8
"""Instructions for each score: its logit, largest so far, difference, power, sum."""
UNROLLED = ("f_j1", "f_k1", "g_j1", "f_j2", "f_k2", "g_j2", "e_s", "e_f", "row_half", "column_of_pair", "fragment")


class CudaAttentionKernel:
    """Builds the versions of one attention group.

    ``tf32``: float32 on tensor cores, rounded to tf32. The group is one that ``declined`` has nothing against.
    """

    def __init__(self, name: str, group: Group, parts: AttentionParts, tf32: bool = False) -> None:
        self.name, self.group, self.parts = name, group, parts
        self.scores = ProductGroup(name, parts.scores, parts.score_roles)
        self.values = ProductGroup(name, parts.values, parts.value_roles)
        self.kind = "mma" if self.scores.dtype in HALF else "tf32" if tf32 else "lanes"
        self.depths = tuple(_depth(x) for x in (self.scores.K, self.values.N))
        logit = softmax_logit(parts.rows, parts.row_prefix, parts.score_roles.col)
        (score,) = self.scores.epilogues
        self.logit = transform(logit, lambda x: score.value if isinstance(x, Load) and x.buffer == "scores" else x)
        r = parts.score_roles
        row, key = Axis(r.row, self.scores.M, ROWS, "b_i"), Axis(r.col, self.scores.N, KEYS[self.kind], "b_l")
        self.logits = Logits(self.logit, r.batch, row, key, group.params)
        self.visits = visits(self.logits)

    def versions(self) -> tuple[CudaKernel, ...]:
        """Versions for wide and for narrower accesses, those that may be launched only where an earlier one may left
        out.
        """
        narrow = ((8, False), (4, False), (2, False)) if self.kind == "mma" else ((4, False),)
        accesses = ((16, True), (16, False), *narrow)
        return ordered(needed(_Version(self, width, wide).build() for width, wide in accesses))


def declined(parts: AttentionParts) -> Declined | None:
    """Why an attention is better run as kernels of its parts; None when it is not."""
    for part, roles in ((parts.scores, parts.score_roles), (parts.values, parts.value_roles)):
        if refused := product_declined(part, roles):
            return refused
    scores = ProductGroup("scores", parts.scores, parts.score_roles)
    values = ProductGroup("values", parts.values, parts.value_roles)
    floats = scores.sums == values.sums == "float32"
    if values.dtype != scores.dtype or parts.score_roles.inner or not floats:
        return Declined(f"an attention of {scores.dtype} and {values.dtype}")
    for extent in (scores.K, values.N):
        if extent.constant is None or extent.constant > DEPTHS[-1]:
            return Declined(f"an attention with heads of {extent}, more than {DEPTHS[-1]}")
    try:
        softmax_logit(parts.rows, parts.row_prefix, parts.score_roles.col)
    except ScheduleError as e:
        return Declined(str(e).partition("\n")[0])
    return None


def _depth(extent: Index) -> int:
    """The head size of the tiles."""
    return next(d for d in DEPTHS if int(extent) <= d)


class _Version:
    """One width of accesses."""

    def __init__(self, of: CudaAttentionKernel, width: int, wide: bool) -> None:
        self.of, self.name, self.group, self.parts = of, of.name, of.group, of.parts
        depth, columns = of.depths
        self.kind, self.keys, self.keyed = INSTRUCTIONS[of.kind], KEYS[of.kind], of.kind == "tf32"
        first = CudaTile(of.kind, ROWS, self.keys, depth, ROWS // WARPS, self.keys, STAGES)
        second = CudaTile(of.kind, ROWS, columns, self.keys, ROWS // WARPS, columns, STAGES)
        self.scores = TiledProduct(of.scores, first, width, wide, "1", self.keyed)
        self.values = TiledProduct(of.values, second, width, wide, "2")
        self.copies = {"COPY_Q": self.scores.copies[0], "COPY_K": self.scores.copies[1],
                       "COPY_V": self.values.copies[1]}  # fmt: skip

    def build(self) -> tuple[CudaKernel, ...]:
        """The kernel, with indices of both widths."""
        of, version = self.of, self.version
        name, names = f"{self.name}_{version}", bound_names(self._arrays(), self.group.params)
        body = self._loops(name, of.visits.live)
        body = body if _walks(body) else self._loops(name, ())
        body = run(name, body, self.steps(), names)
        count = task_count(body)
        body = run(name, body, (
            Step("blocks", "a block is a task", one_each),
            Step("registers", "scores, sums and fragments are registers", self._allocate),
            Step("fold", "decided guards and single trips go", fold),
        ), names)  # fmt: skip
        wanted = [*(x for c in self.copies.values() for x in c.multiples), *self.values.wanted]
        few = sum(of.depths) > 128 or self.kind.name != "mma"  # more registers than three blocks leave
        blocks = 2 if few else 3
        rows, keys = of.scores.M.ceildiv(ROWS), of.scores.N.ceildiv(self.keys)
        known: dict[str, IndexLike] = {"b_i": rows, "b_l": keys, "task": count, MORE: 1}
        known |= {x: of.scores.extents[x] for x in self.parts.score_roles.batch}
        kernel = CudaKernel(name, "", (), self.group.params, WARPS * 32, count, ZERO, version,
                            tuple(dict.fromkeys(wanted)), work=self._work(keys, blocks))  # fmt: skip
        return emit(kernel, body, self._arrays(), known, blocks)

    @property
    def version(self) -> str:
        """What the version is called: tile, bytes of the copies."""
        widths = "_".join(str(c.bytes) for c in self.copies.values())
        name = "attention" if self.kind.name == "mma" else f"attention_{self.kind.name}"
        wide = any(self.values.vector(s) > 1 for s in self.of.values.epilogues)
        return f"{name}_{ROWS}x{self.keys}x{self.of.depths[0]}_{widths}" + "_wide" * wide

    def _arrays(self) -> dict[str, Array]:
        return {n: a for n, a in self.group.arrays.items() if a.role != "rows"}

    def steps(self) -> tuple[Step, ...]:
        """The passes up to the coincident band."""
        (depth, columns), values, k = self.of.depths, self.values, self.kind.shape[2]
        rows, keys = self.of.scores.M.ceildiv(ROWS), self.of.scores.N.ceildiv(self.keys)
        sizes: dict[str, IndexLike] = {"B_i": rows, "B_l": keys, "W_i": WARPS, "P_i": 16}
        sizes |= {"F_j1": self.keys // 8, "G_j1": self.keys // 16, "F_k1": depth // k, "P_j1": 8, "P_k1": k}
        sizes |= {"F_j2": columns // 8, "G_j2": columns // 16, "F_k2": self.keys // k, "P_j2": 8, "P_k2": k}
        sizes |= {"E_s": columns // SLAB, "E_f": SLAB // 8}
        kinds = dict.fromkeys(UNROLLED, "unroll") | ({"f_k1": "unroll2"} if self.kind.name == "lanes" else {})
        tiles, held = tuple(c.name for c in self.copies.values()), tuple(n for n, _, _ in self._registers())
        return (
            Step("copy", "copies are dealt to threads", lambda b: consume(b, "copy", self.copy), tiles),
            Step("pipeline", "copies run ahead in a ring", lambda b: consume(b, "pipeline", self.ring), held),
            Step("bind", "sizes become constants", lambda b: bind(b, sizes)),
            Step("assign", "units are warps", lambda b: assign(b, {"w_i": "warp"})),
            Step("instruction", "points become an instruction", lambda b: consume(b, "instruction", self.instruction)),
            Step("store", "epilogues on staged rows", lambda b: consume(b, "store", values.store), ("stage",)),
            Step("epilogue", "staged rows lie where the ring was", lambda b: consume(b, "epilogue", values.epilogue)),
            Step("multiply", "the mark of the arithmetic goes", lambda b: consume(b, "multiply")),
            Step("lower", "statements become instructions", lambda b: lower(b, self._table()), ("stage", *held)),
            Step("unroll", "loops over registers", lambda b: unrolled(b, kinds)),
            Step("fold", "decided guards and single trips go", fold),
        )

    def _loops(self, name: str, live: tuple[Condition, ...]) -> Body:
        """The loops of the tree over tiles of keys that satisfy ``live``, proven."""
        depth, columns = self.of.depths
        tiled = gpu_attention_tree(self.parts.scores, self.parts.score_roles, len(self.of.values.epilogues), live)
        proven = AttentionTiles(ROWS, self.keys, depth, columns, self.kind.shape[2])
        prove_gpu_attention(tiled, self.of.logits, live, proven)
        return loops(name, tiled)

    def _work(self, keys: Index, blocks: int) -> Work:
        """Both products of a tile of keys; between them a lane has some instructions for each of its scores."""
        tiles, copies = (self.scores.tile, self.values.tile), (self.copies["COPY_K"], self.copies["COPY_V"])
        first, second = (product_work(t, (c,), keys, blocks) for t, c in zip(tiles, copies, strict=True))
        issued = first.issued + second.issued + ROWS * self.keys // WARP * SCORE
        return replace(first, flops=first.flops + second.flops, shared=first.shared + second.shared, issued=issued,
                       moved=first.moved + second.moved, elements=second.elements)  # fmt: skip

    # -- marks ---------------------------------------------------------------------------------------------------

    def copy(self, body: Body) -> Body:
        """Global -> shared, dealt to all threads of the block."""
        inst = next(n for n in walk(body) if isinstance(n, Inst))
        c = self.copies[inst.statement]
        stages = 1 if inst.statement == "COPY_Q" else STAGES

        def issue(a: Mapping[str, Index]) -> Body:
            return c.issue(self._view(a, inst.statement == "COPY_V"), stages, a.get("b_l", ZERO))

        body = bind(body, {f"S{x[1:]}": n for x, n in c.trips().items()})
        body = lower(body, {inst.statement: issue})
        return spread(body, "s_k" if c.along_k else c.own, WARPS * 32, "unroll" if c.asynchronous else "unroll2")

    def ring(self, body: Body) -> Body:
        """The walk over the keys, in its shared memory."""
        body = self._walk(body) if self.of.visits.end is None else self._turns(body)
        for n in ("COPY_K", "COPY_V"):
            c = self.copies[n]
            body = (Alloc(c.name, c.dtype, V(c.elements * STAGES), "shared", body),)
        return body

    def _walk(self, body: Body) -> Body:
        return pipeline(body, "b_l", STAGES, split_copies)

    def _turns(self, body: Body) -> Body:
        """Tiles before the mask's end, then the others if a row of the block has seen nothing above their logits."""
        (loop,) = body
        assert isinstance(loop, For) and loop.lo == ZERO and self.of.visits.end is not None
        end = maximum(0, minimum(loop.hi, self.of.visits.end))
        zero, one = const(0, "int32"), const(1, "int32")
        votes: Value = zero
        for w in range(WARPS):
            votes = op("add", votes, FlatLoad("int32", "votes", V(w)))
        some = op("and", op("gt", FromIndex("int32", V("turn")), zero), op("gt", votes, zero))
        last = end + V(MORE) * (loop.hi - end)
        walk: Body = self._walk((replace(loop, lo=V("first"), hi=V("last")),))
        turn: Body = (
            If((Compare("==", V("turn"), ONE),), self._vote()),
            Def(MORE, op("where", some, one, zero)),
            Let("first", V("turn") * end, (Let("last", last, walk),)),
        )
        return (Alloc("votes", "int32", V(WARPS), "shared", (For("turn", ZERO, V(2), turn, "unroll1"),)),)

    def _vote(self) -> Body:
        """Whether a warp has a row for which masked logits may count: 1 or 0."""
        seen, least = Reg("float32", "seen"), Const("float32", self.of.visits.least or 0.0)
        row = V("b_i") * ROWS + V("warp") * (ROWS // WARPS) + LANE // 4 + HALVES * 8
        own = Set("seen", FlatLoad("float32", "top", HALVES), 1, "min")
        enough = op("where", op("ge", seen, least), const(0, "int32"), const(1, "int32"))
        return (
            Def("seen", Const("float32", float("inf"))),
            For("row_half", ZERO, V(2), (If((Compare("<", row, self.of.scores.M),), (own,)),)),
            *combine_lanes("seen", seen, "min"),
            If((Compare("==", LANE, ZERO),), (Store("votes", V("warp"), enough),)),
            Call("pd_syncthreads"),
        )

    def instruction(self, body: Body) -> Body:
        """Tensorization: products are one instruction; elsewhere a lane takes its own points of a fragment."""
        inst = next(n for n in walk(body) if isinstance(n, Inst))
        points = [n.var for n in walk(body) if isinstance(n, For)]
        if inst.statement.startswith("ACC"):
            return substitute((inst,), dict.fromkeys(points, ZERO))
        return lane_points(inst, points, KEY if self.keyed and inst.statement in ("INIT", "LOGIT") else COLUMN)

    # -- statements ----------------------------------------------------------------------------------------------

    def _view(self, a: Mapping[str, Index], values: bool) -> dict[str, Index]:
        """Coordinates of one of the products as that product names them."""
        fixed = dict.fromkeys(("f_i", "g_i", "w_j", "b_j", "b_k"), ZERO)
        fixed["b_k" if values else "b_j"] = a.get("b_l", ZERO)
        suffix = "2" if values else "1"
        return fixed | {x.removesuffix(suffix) if "_" in x else x: i for x, i in a.items()}

    def _table(self) -> dict[str, Lowering]:
        scores, values = self.scores, self.values
        return {
            "START": self.start,
            "INIT": lambda a: scores.init(self._view(a, False)),
            "FRAG_Q": lambda a: scores.fragment(0, self._view(a, False)),
            "FRAG_K": lambda a: scores.fragment(1, self._view(a, False) | {"b_k": a["b_l"]}),
            "ACC1": lambda a: scores.accumulate(self._view(a, False)),
            "LOGIT": self.logits,
            "ROWS": self.rows,
            "FRAG_W": self.weights,
            "FRAG_V": lambda a: values.fragment(1, self._view(a, True)),
            "ACC2": lambda a: values.accumulate(self._view(a, True)),
            "FINISH": self.finish,
            "STAGE": lambda a: values.stage(self._view(a, True)),
        }

    def start(self, a: Mapping[str, Index]) -> Body:
        """Nothing seen yet."""
        zero = Const("float32", 0.0)
        half: Body = (Store("top", HALVES, LOWEST), Store("total", HALVES, zero), *self._values(lambda v: zero))
        return (For("row_half", ZERO, V(2), half),)

    def logits(self, a: Mapping[str, Index]) -> Body:
        """The logit of a score; -inf beyond the last key."""
        view = self._view(a, False)
        env = self.scores.places.env(INIT, view)
        own, place = self.of.scores.acc.array, self.scores.register(view)
        score = FlatLoad("float32", "acc1", place)
        value = flat(self.group, self.of.logit, env, lambda x: score if x.buffer == own else None)
        return (If(self.scores.live(env), (Store("acc1", place, value),), (Store("acc1", place, LOWEST),)),)

    def rows(self, a: Mapping[str, Index]) -> Body:
        """Online softmax: the new maximum, what was there scaled to it, weights and their sum."""
        top, total = (FlatLoad("float32", n, HALVES) for n in ("top", "total"))
        peak, scale, part = (Reg("float32", n) for n in ("peak", "scale", "part"))
        score = FlatLoad("float32", "acc1", V("fragment") * 4 + HALVES * 2 + PAIR)
        one, zero = Const("float32", 1.0), Const("float32", 0.0)
        weight = op("where", op("eq", score, LOWEST), zero, op("exp", op("sub", score, peak)))
        shrink = op("where", op("eq", peak, top), one, op("exp", op("sub", top, peak)))  # also when both are -inf
        half: Body = (
            Def("peak", top),
            *self._scores((Set("peak", score, 1, "max"),)),
            *_across("peak", "max"),
            Def("scale", shrink),
            Def("part", zero),
            *self._scores((Store("acc1", score.address, weight), Set("part", score, 1, "sum"))),
            Store("total", HALVES, op("add", op("mul", total, scale), part)),
            Store("top", HALVES, peak),
            *self._values(lambda v: op("mul", v, scale)),
        )
        return (For("row_half", ZERO, V(2), half),)

    def weights(self, a: Mapping[str, Index]) -> Body:
        """Weights as the row operand of an instruction: a lane has them in its fragments of scores, or in its row's.

        16 bits: two fragments, packed, are 16 keys. tf32: a fragment is 8 keys (``KEY``). CUDA cores: four keys of
        rows g and g + 8, from the lanes that have them.
        """
        if self.kind.name != "mma":
            return self._weights_of_float32(a["f_k2"])

        def packed(register: int) -> Value:
            at = (a["f_k2"] * 2 + register // 2) * 4 + register % 2 * 2
            pair = tuple(FlatLoad("float32", "acc1", at + e) for e in range(2))
            return Apply("uint32", PACK[self.of.values.dtype], pair)

        return tuple(Store("a_frag2", V(r), packed(r)) for r in range(4))

    def _weights_of_float32(self, step: Index) -> Body:
        if self.kind.name == "tf32":  # registers are (row half, half of the keys) = (r % 2, r / 2)
            scores = [FlatLoad("float32", "acc1", step * 4 + (r % 2 * 2 + r // 2)) for r in range(4)]
            return tuple(Store("a_frag2", V(r), Apply("uint32", "pd_f32_to_tf32", (x,))) for r, x in enumerate(scores))
        out: Body = ()
        for half, e in ((h, e) for h in range(2) for e in range(4)):
            own = FlatLoad("float32", "acc1", step // 2 * 4 + (half * 2 + e % 2))
            lane = FromIndex("int32", LANE // 4 * 4 + step % 2 * 2 + e // 2)
            out += (Store("a_frag2", V(half * 4 + e), Apply("float32", "pd_shfl_idx", (own, lane))),)
        return out

    def finish(self, a: Mapping[str, Index]) -> Body:
        """Values over the sum of the weights, unless there are no keys."""
        whole = Reg("float32", "whole")
        half: Body = (
            Def("whole", FlatLoad("float32", "total", HALVES)),
            *_across("whole", "sum"),
            *self._values(lambda v: op("div", v, whole)),
        )
        return (If((Compare(">", self.of.scores.N, ZERO),), (For("row_half", ZERO, V(2), half),)),)

    def _scores(self, leaf: Body) -> Body:
        pair = For("column_of_pair", ZERO, V(2), leaf)
        return (For("fragment", ZERO, V(self.keys // 8), (pair,)),)

    def _values(self, f: Callable[[Value], Value]) -> Body:
        at = V("fragment") * 4 + HALVES * 2 + PAIR
        leaf: Body = (Store("acc2", at, f(FlatLoad("float32", "acc2", at))),)
        pair = For("column_of_pair", ZERO, V(2), leaf)
        return (For("fragment", ZERO, V(self.of.depths[1] // 8), (pair,)),)

    def _registers(self) -> tuple[tuple[str, str, int], ...]:
        """(name, dtype, number) of what a thread holds."""
        columns, kind = self.of.depths[1], self.kind.register
        a, b = self.kind.registers
        return (("top", "float32", 2), ("total", "float32", 2), ("acc1", "float32", self.keys // 2),
                ("acc2", "float32", columns // 2), ("a_frag1", kind, a), ("b_frag1", kind, self.keys // 8 * b),
                ("a_frag2", kind, a), ("b_frag2", kind, columns // 8 * b))  # fmt: skip

    def _allocate(self, body: Body) -> Body:
        for name, dtype, size in self._registers():
            body = (Alloc(name, dtype, V(size), "register", body),)
        c = self.copies["COPY_Q"]
        return (Alloc(c.name, c.dtype, V(c.elements), "shared", body),)


def _walks(body: Body) -> bool:
    """Whether one loop walks over the keys in every block: not so where masks leave one tile, or nothing of a head."""
    rings = [n for n in walk(body) if isinstance(n, Mark) and n.name == "pipeline"]
    guarded = any(m is r for n in walk(body) if isinstance(n, If) for m in walk((n,)) for r in rings)
    loops = [n for r in rings for n in r.body]
    return len(loops) == 1 and isinstance(loops[0], For) and not guarded


def _across(register: str, reduce: str) -> Body:
    """The four lanes of a row agree."""
    own = Reg("float32", register)
    return tuple(Set(register, Apply("float32", "pd_shfl_xor", (own, const(o, "int32"))), 1, reduce) for o in (1, 2))
