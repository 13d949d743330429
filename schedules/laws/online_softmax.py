"""Recognise the rows of an attention as a softmax, and build the group that computes it online.

Online means that a row's maximum ``m``, sum ``z`` and weighted values ``a`` cover the keys processed so far. Further
keys with maximum ``t`` scale all of them by ``exp(m - max(m, t))``. The law needs weights that are exactly ``exp(x -
max x) / sum exp(x - max x)``, where the logit ``x`` depends on its own score only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.expr import Const, FromIndex, Load, Op, Value, const, loads, op, substitute, transform
from polydyn.schedules.index import Index, IndexLike
from polydyn.schedules.model import SHARE, SHARES, Array, Group, Statement, row_major
from polydyn.schedules.tiling import AttentionParts

V = Index.of
TILE, KEY, TILES = "tile", "key", "tiles"
"""Iterators: the tile of keys and the key in it; the parameter with the number of tiles."""
START, ROWS = ("TOP0", "TOTAL0", "VALUE0"), ("PEAK0", "PEAK", "SCALE", "WEIGHT", "SHRINK", "TOTAL", "TOP", "RESCALE")
"""Statements before the first tile, and between the two products of a tile."""
INIT, SCORE, LOGIT, VALUE, FINISH = "INIT", "ACC1", "LOGIT", "ACC2", "FINISH"
"""Further statements. Epilogues have the names that the group gives them."""
LEAVE_TOP, LEAVE_TOTAL = "LEAVE_TOP", "LEAVE_TOTAL"
"""Statements of split-KV: they store a row's maximum and sum next to its partial values."""
LOGITS, WEIGHTS, TOP, TOTAL, PEAK, SCALE, VALUES = "logits", "kept", "top", "total", "peak", "scale", "running"
"""Arrays of a tile, of a row so far, of a row and a tile, and of the values so far. The group has scores and
results."""


@dataclass(frozen=True)
class Softmax:
    """The softmax that the rows of an attention compute: the ``logit`` of a key is a value over ``scores`` and inputs.

    ``no_nan``: weights that are NaN become 0, as in frameworks that guard fully masked rows. Either all weights of a
    row are NaN or none, because their sum divides all of them and is NaN exactly if one of them is.
    """

    logit: Value
    no_nan: bool = False


def softmax(rows: Group, prefix: tuple[str, ...], column: str) -> Softmax:
    """Return the rows as a softmax of logits over the keys ``column``. ScheduleError: they are not a softmax."""
    peak, total = (_single(rows, r) for r in ("max", "sum"))
    (last,) = [s for s in rows.statements if s.array == "weights"]
    locals_ = {s.array: _named(s, prefix, column) for s in rows.statements if s.reduce is None and s.role == "map"}

    def inline(v: Value) -> Value:
        def f(x: Value) -> Value:
            made = locals_.get(x.buffer) if isinstance(x, Load) else None
            if made is None:
                return x
            assert isinstance(x, Load)
            return inline(substitute(made.value, {str(i): e for i, e in zip(made.index, x.index, strict=True)}))

        return transform(v, f)

    logit = inline(_named(peak, prefix, column).value)
    top, whole = (Load(s.value.dtype, s.array, s.index) for s in (peak, total))
    weight = op("exp", op("sub", logit, top))
    if inline(_named(total, prefix, column).value) != weight:
        raise ScheduleError("the sum of the rows is not the sum of exp(logit - maximum)", node=total.name)
    made, no_nan = _unguarded(inline(_named(last, prefix, column).value))
    if made not in (op("div", weight, whole), op("mul", weight, op("reciprocal", whole))):
        raise ScheduleError("the weights are not exp(logit - maximum) / sum", node=last.name)
    for x in loads(logit):
        if x.buffer == "scores" and x.index[-1] != Index.of(column):
            raise ScheduleError("a logit reads the score of another key", node=peak.name)
    return Softmax(logit, no_nan)


def _unguarded(v: Value) -> tuple[Value, bool]:
    """Return weights without casts and without a guard that replaces NaN by 0, and whether there was a guard."""
    v = _uncast(v)
    if isinstance(v, Op) and v.name in ("where", "select"):
        asked, other, weight = map(_uncast, v.args)
        guards = isinstance(asked, Op) and asked.name == "isnan" and _uncast(asked.args[0]) == weight
        if guards and isinstance(other, Const) and other.value == 0:
            return weight, True
    return v, False


def _uncast(v: Value) -> Value:
    while isinstance(v, Op) and v.name == "cast":
        v = v.args[0]
    return v


def online(parts: AttentionParts, softmax: Softmax, keys: int, shares: bool = False) -> tuple[Group, Index]:
    """Return the group of an attention in tiles of ``keys`` keys, and the key as a function of its iterators.

    ``softmax``: its logit over the scores' accumulator. ``top`` is the row's maximum so far, ``total`` the sum of its
    weights, ``running`` its weighted values, all relative to that maximum; a tile with a larger maximum scales them.
    Keys past the last one, and rows past the last one, have the logit -inf: weight 0. Before: scores of all keys;
    maximum, sum, weights; values. After, ``around`` tiles: scores; logits; new maximum; weights; sum and values, scaled
    and increased.

    ``shares`` (split-KV): every statement runs once for each of ``SHARES`` slices of the tiles, as in
    ``rewrites.split_reduction``. Nothing is divided then. The single epilogue stores a slice's values in an array
    (slice, batch.., row, column), and the row's maximum and sum follow its last column
    (``codegen.split.partial_attention``).
    """
    r, q = parts.score_roles, parts.value_roles
    first, second, done = parts.scores.backbone, parts.values.backbone, parts.values.epilogues
    share = ((SHARE, V(SHARES)),) if shares else ()
    rows, kind = (*share, *((x, dict(first.iters)[x]) for x in (*r.batch, r.row))), first.value.dtype
    extent, width = dict(first.iters)[r.col], (q.col, dict(second.iters)[q.col])
    lead, key = tuple(V(x) for x, _ in rows), V(TILE) * keys + KEY
    tile, point = (*rows, (TILE, V(TILES))), (KEY, V(keys))
    of_share = tuple(V(x) for x, _ in share)
    at, inside, column = (*lead, V(TILE)), (*lead, V(TILE), V(KEY)), (*of_share, *second.index)
    arrays = {n: a for n, a in {**parts.scores.arrays, **parts.values.arrays}.items() if a.role != "rows"}

    def local(name: str, *iters: tuple[str, Index]) -> str:
        shape = tuple(e for _, e in iters)
        arrays[name] = Array(name, kind, shape, "local", row_major(shape))
        return name

    scores = local(first.array, *tile, point)
    shape = (*(e for _, e in share), *arrays[second.array].shape)
    for name in (second.array, VALUES):
        arrays[name] = replace(arrays[second.array], name=name, shape=shape, strides=row_major(shape))
    for name in (LOGITS, WEIGHTS):
        local(name, *tile, point)
    for name, iters in ((TOP, rows), (TOTAL, rows), (PEAK, tile), (SCALE, tile)):
        local(name, *iters)
    lowest, zero, one = Const(kind, float("-inf")), const(0, kind), const(1, kind)
    top, peak, scale, weight = (Load(kind, n, i) for n, i in ((TOP, lead), (PEAK, at), (SCALE, at), (WEIGHTS, inside)))
    score, x = Load(kind, scores, inside), Load(kind, LOGITS, inside)
    total, value = Load(kind, TOTAL, lead), Load(kind, VALUES, column)

    def moved(v: Value, own: str) -> Value:
        """Return the value in the new iterators. The product's own operand belongs to the tile."""
        v = substitute(v, {own: key})
        held = {scores: score, "weights": weight}
        return transform(v, lambda y: _instead(held, y))

    def less(i: IndexLike, n: Index) -> Value:
        return op("lt", FromIndex("int64", V(i)), FromIndex("int64", n))

    exists = op("and", less(key, extent), less(r.row, dict(rows)[r.row]))
    shrink = op("where", op("eq", peak, top), one, op("exp", op("sub", top, peak)))  # also when both are -inf
    held = op("where", op("eq", x, lowest), zero, op("exp", op("sub", x, peak)))
    some = op("gt", FromIndex("int64", extent), FromIndex("int64", V(0)))
    divided = op("where", some, op("div", value, total), value)
    if softmax.no_nan:  # also when the sum is NaN
        divided = op("where", op("gt", total, zero), op("div", value, total), zero)
    left: tuple[Statement, ...] = ()
    if shares:
        divided, (store,) = value, done
        done = (replace(store, iters=(*share, *store.iters), value=Load(kind, second.array, column)),)
        left = tuple(
            Statement(name, rows, store.array, tuple(i.subs({q.col: width[1] + n}) for i in store.index), found)
            for n, (name, found) in enumerate(((LEAVE_TOP, top), (LEAVE_TOTAL, total)))
        )
    steps = tuple(y for y in first.iters if y[0] == r.block)
    statements = (
        Statement("TOP0", rows, TOP, lead, lowest), Statement("TOTAL0", rows, TOTAL, lead, zero),
        Statement("VALUE0", (*rows, width), VALUES, column, zero),
        Statement(INIT, (*tile, point), scores, inside, zero, None, "init"),
        Statement(SCORE, (*tile, point, *steps), scores, inside, moved(first.value, r.col), "sum", "backbone"),
        Statement(LOGIT, (*tile, point), LOGITS, inside, op("where", exists, moved(softmax.logit, r.col), lowest)),
        Statement("PEAK0", tile, PEAK, at, top), Statement("PEAK", (*tile, point), PEAK, at, x, "max"),
        Statement("SCALE", tile, SCALE, at, shrink),
        Statement("WEIGHT", (*tile, point), WEIGHTS, inside, held),
        Statement("SHRINK", tile, TOTAL, lead, op("mul", total, scale)),
        Statement("TOTAL", (*tile, point), TOTAL, lead, weight, "sum"),
        Statement("TOP", tile, TOP, lead, peak),
        Statement("RESCALE", (*tile, width), VALUES, column, op("mul", value, scale)),
        Statement(VALUE, (*tile, width, point), VALUES, column, moved(second.value, q.block), "sum", "backbone"),
        *left, Statement(FINISH, (*rows, width), second.array, column, divided), *done,
    )  # fmt: skip
    name, params = parts.values.name, (*parts.values.params, *([SHARES] if shares else []), TILES)
    return Group(name, params, arrays, statements, around=TILE), key


def _instead(moved: dict[str, Load], v: Value) -> Value:
    """Return a load of an array from where the rewrite stores it."""
    return replace(moved[v.buffer], dtype=v.dtype) if isinstance(v, Load) and v.buffer in moved else v


def _single(rows: Group, reduction: str) -> Statement:
    found = [s for s in rows.statements if s.reduce == reduction]
    if len(found) != 1 or sum(s.reduce is not None for s in rows.statements) != 2:
        raise ScheduleError("the rows have other reductions than one maximum and one sum", node=rows.name)
    return found[0]


def _named(s: Statement, prefix: tuple[str, ...], column: str) -> Statement:
    """Return the statement with its only inner iterator renamed to ``column``."""
    inner = [x for x in s.iterators if x not in prefix]
    if len(inner) > 1:
        raise ScheduleError(f"{s.name} runs over more than the keys: {inner}", node=s.name)
    env = dict.fromkeys(inner, column)
    return replace(s, value=substitute(s.value, env), index=tuple(i.subs(env) for i in s.index))
