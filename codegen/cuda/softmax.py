"""Online softmax: the statements on a warp's rows before, between and after the two products of an attention.

Scores, logits and weights use the same fragments of sums (``acc1``) one after another; the values so far use others
(``acc2``). A lane has two columns of rows g and g + 8, and the four lanes of a row agree by shuffles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from polydyn.codegen.cuda.instructions import HALVES, LANE, PAIR
from polydyn.codegen.cuda.slots import of_value
from polydyn.codegen.cuda.sums import Sums
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
    Node,
    Pointer,
    Reg,
    Set,
    Store,
    bodies,
    rewrite,
    walk,
    with_bodies,
)
from polydyn.codegen.ir import walk_value as walk_flat
from polydyn.codegen.lower import flat
from polydyn.codegen.passes.widen import stored_value, widen
from polydyn.codegen.printers.cuda_values import NORMAL, literal
from polydyn.schedules.expr import FLOATS, Const, Load, Op, Value, const, loads, op
from polydyn.schedules.expr import walk as walk_value
from polydyn.schedules.index import ZERO, Index
from polydyn.schedules.laws.masks import Logits, open_logit
from polydyn.schedules.laws.online_softmax import LEAVE_TOP, LOGIT
from polydyn.schedules.model import stored
from polydyn.schedules.tree.names import f, p

V = Index.of
MINUS_INFINITY, LOG2_E = Const("float32", float("-inf")), 1.4426950408889634
PACK = {"float16": "pd_pack_f16x2", "bfloat16": "pd_pack_bf16x2"}
ROUND = {"float16": "pd_round_f16x2", "bfloat16": "pd_round_bf16x2"}
STATISTICS = (("top", "float32", 2), ("total", "float32", 2), ("scale", "float32", 2))
"""(name, dtype, count) of a thread's registers for the two rows of a fragment: the maximum, its own part of the sum,
and the factor by which a tile's new maximum scales older sums."""
ROW_FRAGMENT = V("row_fragment")
THREAD_ROW = ROW_FRAGMENT * 2 + HALVES
"""The number of a row among the rows of a thread."""
UNMASKED_TILE = "WHOLE"
"""The logits of a tile whose keys all exist and are visible, and whose rows exist if that matters."""
MASK_LIMIT, MASK_SCALE = 2.0**100, 2.0**-60
"""Limits of masked rows.

A maximum below -MASK_LIMIT is a mask's number: the whole row is masked. In units of log 2 it would overflow, so
differences are multiplied by MASK_SCALE: 0 stays 0, and any nonzero difference, at least 2^77, still has a power of 0.
"""
SLOTS_PER_SCORE = 8
"""Issue slots per score: scaling, maximum, difference, power, sum. Its power occupies the special function unit,
which computes 16 per clock, for the same time."""


class OnlineRows:
    """The statements on the rows of one attention, for its ``logits``: values over the sums of ``scores``.

    Tiles that are whole, and in which masks hide nothing, have simpler logits (``split``). 16 bits: a positive factor
    common to all logits is removed from them, because a maximum does not need it, and multiplied once in the powers,
    which are powers of 2. ``no_nan``: a row whose weights are NaN gives 0. ``masks_in_pairs``: whole tiles read other
    arrays in pairs of columns (``pair``), if addresses satisfy ``multiples``.
    """

    def __init__(
        self, scores: Sums, values: Sums, logits: Logits, no_nan: bool = False, masks_in_pairs: bool = False
    ) -> None:
        self.scores, self.values, self.powers = scores, values, scores.kind.name == "mma"
        self.logits, self.logit, self.no_nan = logits, logits.value, no_nan
        self.array, self.group = scores.of.acc.array, scores.of.group
        self.open, self.conditions = open_logit(logits)
        self.factor = 1.0
        if self.powers:
            (factor, masked), (other, shown) = map(take_factor, (self.logit, self.open))
            if factor == other:
                self.factor, self.logit, self.open = factor, masked, shown
        self.read, self.shown = self._reads(self.logit), self._reads(self.open)
        self.far = self.powers and any(_may_be_far(x, self.array) for x in walk_value(self.logit))
        self.masks_in_pairs = masks_in_pairs and bool(self.shown)
        self.multiples: dict[tuple[Index, int], None] = {}

    # -- statements ------------------------------------------------------------------------------------------------

    def start(self) -> Body:
        """Initialise the statistics of the rows."""
        zero = Const("float32", 0.0)
        statistics = (Store("top", THREAD_ROW, MINUS_INFINITY), Store("total", THREAD_ROW, zero))
        return self.each_row((*statistics, *self._values(lambda v: zero)))

    def slots(self, scores: int) -> int:
        """Return a warp's issue slots for a lane's ``scores``: from the products to the weights, in a typical tile."""
        each = SLOTS_PER_SCORE + of_value(self.open, self.powers)
        return each * scores + len(self.shown) * scores // (2 if self.masks_in_pairs else 1)

    def split(self, body: Sequence[Node]) -> Body:
        """Use ``whole`` logits in whole tiles in which masks hide nothing, and the full logits in the others."""

        def of(n: Node) -> list[Inst]:
            return [i for i in walk((n,)) if isinstance(i, Inst)]

        def whole(n: Node) -> Node:
            return replace(n, statement=UNMASKED_TILE) if isinstance(n, Inst) else n

        def both(n: Node) -> Node:
            every = of(n)
            if {i.statement for i in every} == {LOGIT}:
                return If(self._whole(every[0].at), rewrite((n,), whole), (n,))
            inner = tuple(tuple(map(both, b)) for b in bodies(n))
            return with_bodies(n, inner) if any(i.statement == LOGIT for i in every) else n

        return tuple(map(both, body))

    def _whole(self, at: Mapping[str, Index]) -> tuple[Compare, ...]:
        """Return the conditions of a whole tile at these coordinates.

        If the keys are one tile, there is no loop over keys.
        """
        x, env = self.logits, {**self.scores.places.env(LOGIT, at), **at}
        keys, rows = (Compare("<=", (at[a.tile] + 1) * a.size, a.extent) for a in (x.key, x.row))
        asked = (Compare("==" if c.equality else ">=", c.expr.subs(env), ZERO) for c in self.conditions)
        return (keys, *((rows,) if self.shown else ()), *asked)

    def logits_of(self, a: Mapping[str, Index], whole: bool = False) -> Body:
        """Return the logit of a score; -inf past the last key.

        ``whole``: in a tile that satisfies the conditions of ``split``.
        """
        env = self.scores.places.env(LOGIT, a)
        place = self.scores.register(*self.scores.fragment(LOGIT, a))
        score, logit = FlatLoad("float32", "acc1", place), self.open if whole else self.logit
        value = flat(self.group, logit, env, lambda x: score if x.buffer == self.array else None)
        bare = getattr(logit, "buffer", "") == self.array
        kept: Body = () if bare else (Store("acc1", place, value),)
        rows, keys = self.scores.live(env)  # a row past the end is not stored, but must not read either
        live = () if whole else (rows, keys) if self.read else (keys,)
        if bare and live == (keys,):
            return (If((Compare(">=", keys.left, keys.right),), (Store("acc1", place, MINUS_INFINITY),)),)
        return (If(live, kept, (Store("acc1", place, MINUS_INFINITY),)),) if live else kept

    def pair(self, body: Body) -> Body:
        """Combine logits of two columns: their masks are one access, and they are rounded together."""
        return rewrite(body, self._of_two_columns) if self.masks_in_pairs else body

    def _of_two_columns(self, n: Node) -> Node | Body:
        logit = n.body[0] if isinstance(n, For) and V(n.var) == PAIR and len(n.body) == 1 else None
        if not (isinstance(n, For) and isinstance(logit, Store) and logit.buffer == "acc1"):
            return n
        read = [x for x in walk_flat(logit.value) if isinstance(x, FlatLoad) and x.buffer in self.shown]
        if not read:
            return n
        narrow = _rounded(logit.value)
        exact = logit if narrow is None else replace(logit, value=stored_value(narrow))
        names = frozenset(x for r in read for x in r.address.symbols()) - set(self.group.params)
        made = widen((exact,), n.var, 2, stored(self.group.arrays), names)
        if made is None:
            return n
        self.multiples |= dict.fromkeys(made[1])
        if narrow is None:
            return made[0]
        two = Pointer("float32", "acc1", logit.address.subs({n.var: 0}))
        return (*made[0], Call(ROUND[narrow.dtype], (two,)))

    def rows(self) -> Body:
        """Compute the new maximum, the scale of older sums, the weights and their sum; ``rescale`` scales values."""
        top, total, scale = (FlatLoad("float32", n, THREAD_ROW) for n in ("top", "total", "scale"))
        peak, base = (Reg("float32", n) for n in ("peak", "base"))
        two = [[FlatLoad("float32", n, V(e)) for e in range(2)] for n in ("most", "part")]
        score = FlatLoad("float32", "acc1", self.scores.register(ROW_FRAGMENT, V("fragment")))
        zero = Const("float32", 0.0)
        finite = op("where", op("eq", peak, MINUS_INFINITY), zero, peak)  # a row that has no logit yet has weights of 0
        far = op("lt", peak, const(-MASK_LIMIT / max(1.0, self.factor), "float32"))
        half: Body = (
            *_pair((Store("most", PAIR, top), Store("part", PAIR, zero))),
            *self._scores((Store("most", PAIR, score, "max"),)),
            Def("peak", op("max", *two[0])),
            *_reduce_lanes("peak", "max"),
            *((Def("unit", op("where", far, const(MASK_SCALE, "float32"), self._unit)),) if self.far else ()),
            Def("base", self._scaled(finite)),
            Store("scale", THREAD_ROW, self._power(top, base)),
            *self._scores((Store("acc1", score.address, self._power(score, base)), Store("part", PAIR, score, "sum"))),
            Store("total", THREAD_ROW, op("add", op("mul", total, scale), op("add", *two[1]))),
            Store("top", THREAD_ROW, peak),
        )
        for name in ("most", "part"):  # two chains each, or the lanes would wait for their own sums
            half = (Alloc(name, "float32", V(2), "register", half),)
        return self.each_row(half)

    def rescale(self) -> Body:
        """Scale the values so far to the new maximum."""
        scale = FlatLoad("float32", "scale", THREAD_ROW)
        return self.each_row(self._values(lambda v: op("mul", v, scale)))

    def packed(self, step: Index, to: Index, row: Index = ZERO) -> Body:
        """Pack the weights of 16 keys, two fragments, as an instruction's row operand: four registers from ``to`` on.

        ``row``: the number of the instruction's rows among those of a warp.
        """

        def pack(register: int) -> Value:
            at = (row * self.scores.fragments[1] + step * 2 + register // 2) * 4 + register % 2 * 2
            pair = tuple(FlatLoad("float32", "acc1", at + e) for e in range(2))
            return Apply("uint32", PACK[self.values.of.dtype], pair)

        return tuple(Store("a_frag2", to + r, pack(r)) for r in range(4))

    def finish(self) -> Body:
        """Divide values by the sum of the weights, unless there are no keys."""
        whole, zero = Reg("float32", "whole"), Const("float32", 0.0)

        def divided(v: Value) -> Value:
            found = op("div", v, whole)
            return op("where", op("gt", whole, zero), found, zero) if self.no_nan else found

        half: Body = (
            Def("whole", FlatLoad("float32", "total", THREAD_ROW)),
            *_reduce_lanes("whole", "sum"),
            *self._values(divided),
        )  # fmt: skip
        return (If((Compare(">", self.scores.of.N, ZERO),), self.each_row(half)),)

    def store_partial(self, body: Body) -> Body:
        """Store a slice's maximum of a row, as a logit, or the sum of its weights."""
        (inst,) = (n for n in walk(body) if isinstance(n, Inst))
        places, value = self.scores.places, Reg("float32", "whole")
        s = places.schedule.group.statement(inst.statement)
        env = places.env(s.name, {**inst.at, f("i"): ROW_FRAGMENT, p("i"): LANE // 4 + HALVES * 8})
        address = places.schedule.group.arrays[s.array].address(tuple(i.subs(env) for i in s.index))
        first = Compare("==", LANE % 4, ZERO), Compare("<", env[self.scores.roles.row], self.scores.of.M)
        top = inst.statement == LEAVE_TOP
        found = op("mul", FlatLoad("float32", "top", THREAD_ROW), const(self.factor, "float32"))
        half: Body = (
            Def("whole", found if top else FlatLoad("float32", "total", THREAD_ROW)),
            *(() if top else _reduce_lanes("whole", "sum")),
            If(first, (Store(s.array, address, value),)),
        )
        return self.each_row(half)

    # -- parts -----------------------------------------------------------------------------------------------------

    def each_row(self, body: Body) -> Body:
        """Return ``body`` for each row of a thread (``THREAD_ROW``)."""
        half = For("row_half", ZERO, V(2), body)
        return (For("row_fragment", ZERO, V(self.scores.fragments[0]), (half,)),)

    def _reads(self, logit: Value) -> set[str]:
        """Return the arrays that a logit reads in addition to scores."""
        return {x.buffer for x in loads(logit)} - {self.array}

    @property
    def _unit(self) -> Value:
        """The factor of a logit in powers of 2."""
        return Const("float32", self.factor * LOG2_E)

    def _scaled(self, x: Value) -> Value:
        """Return the subtrahend of logits: for 16 bits in units of log 2, as ``ex2`` expects."""
        return op("mul", x, Reg("float32", "unit") if self.far else self._unit) if self.powers else x

    def _power(self, x: Value, base: Value) -> Value:
        """Return exp(x - base), with ``base`` from ``_scaled``; 16 bits: one multiply-add and one ``ex2``."""
        if self.powers:
            return Apply("float32", "pd_exp2_fast", (op("sub", self._scaled(x), base),))
        return op("exp", op("sub", x, base))

    def _scores(self, leaf: Body) -> Body:
        return (For("fragment", ZERO, V(self.scores.fragments[1]), _pair(leaf)),)

    def _values(self, f: Callable[[Value], Value]) -> Body:
        at = self.values.register(ROW_FRAGMENT, V("fragment"))
        leaf: Body = (Store("acc2", at, f(FlatLoad("float32", "acc2", at))),)
        return (For("fragment", ZERO, V(self.values.fragments[1]), _pair(leaf)),)


def _may_be_far(x: Value, scores: str) -> bool:
    """Return whether part of a logit is or may be below -MASK_LIMIT; scores are sums that do not overflow."""
    if isinstance(x, Const) and x.dtype in FLOATS:
        return float("-inf") < float(x.value) < -MASK_LIMIT
    return isinstance(x, Load) and x.buffer != scores and x.dtype in FLOATS and x.dtype != "float16"


def _rounded(v: Value) -> Op | None:
    """Return the last rounding to 16 bits of a value in a register, or None."""
    x = v.args[0] if isinstance(v, Op) and v.name == "cast" and v.dtype == "float32" else None
    return x if isinstance(x, Op) and x.dtype in ROUND and stored_value(x) is not x else None


def take_factor(logit: Value) -> tuple[float, Value]:
    """Return a positive factor of a logit, and the logit without it. The factor is 1 if none is found."""
    if isinstance(logit, Op) and logit.dtype == "float32":
        if logit.name in ("where", "select") and (low := literal(logit.args[2])) is not None:
            factor, rest = take_factor(logit.args[1])
            if low == float("-inf") or abs(low) < min(1.0, factor) * MASK_LIMIT:
                return factor, op(logit.name, logit.args[0], rest, Const("float32", low / factor))
        pairs = [logit.args] if logit.name == "div" else [logit.args, logit.args[::-1]] if logit.name == "mul" else []
        for x, y in pairs:
            if (by := literal(y)) is not None and NORMAL < by < 1 / NORMAL:
                factor, rest = take_factor(x)
                product = factor * (by if logit.name == "mul" else 1 / by)
                return (product, rest) if NORMAL < product < 1 / NORMAL else (1.0, logit)
    return 1.0, logit


def _pair(leaf: Body) -> Body:
    return (For("column_of_pair", ZERO, V(2), leaf),)


def _reduce_lanes(register: str, reduce: str) -> Body:
    """Combine a register of the four lanes of a row."""
    value = Reg("float32", register)
    return tuple(Set(register, Apply("float32", "pd_shfl_xor", (value, const(o, "int32"))), 1, reduce) for o in (1, 2))
