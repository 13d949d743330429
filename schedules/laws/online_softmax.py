"""Recognising the rows of an attention as a softmax, which may then be computed online.

Online: a row's maximum ``m``, sum ``z`` and weighted values ``a`` are kept over the keys seen so far; for further keys
with maximum ``t`` all are scaled by ``exp(m - max(m, t))``. The law needs weights that are exactly
``exp(x - max x) / sum exp(x - max x)``, where the logit ``x`` depends on its own score only.
"""

from __future__ import annotations

from dataclasses import replace

from polydyn.schedules.errors import ScheduleError
from polydyn.schedules.expr import Load, Op, Value, loads, op, substitute, transform
from polydyn.schedules.index import Index
from polydyn.schedules.model import Group, Statement


def softmax_logit(rows: Group, prefix: tuple[str, ...], column: str) -> Value:
    """The logit as a value over ``scores`` and inputs, its key being ``column``.

    ScheduleError: the rows are not a softmax.
    """
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
        raise ScheduleError("the sum of the rows is not that of exp(logit - maximum)", node=total.name)
    made = inline(_named(last, prefix, column).value)
    while isinstance(made, Op) and made.name == "cast":
        made = made.args[0]
    if made not in (op("div", weight, whole), op("mul", weight, op("reciprocal", whole))):
        raise ScheduleError("the weights are not exp(logit - maximum) / sum", node=last.name)
    for x in loads(logit):
        if x.buffer == "scores" and x.index[-1] != Index.of(column):
            raise ScheduleError("a logit reads the score of another key", node=peak.name)
    return logit


def _single(rows: Group, reduction: str) -> Statement:
    found = [s for s in rows.statements if s.reduce == reduction]
    if len(found) != 1 or sum(s.reduce is not None for s in rows.statements) != 2:
        raise ScheduleError("the rows have other reductions than one maximum and one sum", node=rows.name)
    return found[0]


def _named(s: Statement, prefix: tuple[str, ...], column: str) -> Statement:
    """The statement with its one inner iterator called ``column``."""
    inner = [x for x in s.iterators if x not in prefix]
    if len(inner) > 1:
        raise ScheduleError(f"{s.name} runs over more than the keys: {inner}", node=s.name)
    env = dict.fromkeys(inner, column)
    return replace(s, value=substitute(s.value, env), index=tuple(i.subs(env) for i in s.index))
