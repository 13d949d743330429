"""Sort order: counting the elements that precede an element gives its position in the sorted sequence.

The operator's primitive uses the count; kernels that may sort match it.
"""

from __future__ import annotations

from polydyn.schedules.expr import FLOATS, FromIndex, Op, Value, op, substitute
from polydyn.schedules.index import Index


def before(a: Value, b: Value, largest: bool, earlier: Value) -> Value:
    """Whether ``a`` precedes ``b``. Equal elements keep their order; NaN counts as the largest."""
    first, equal = op("gt" if largest else "lt", a, b), op("eq", a, b)
    if a.dtype in FLOATS:
        x, y = (a, b) if largest else (b, a)
        first = op("or", first, op("and", op("isnan", x), op("not", op("isnan", y))))
        equal = op("or", equal, op("and", op("isnan", a), op("isnan", b)))
    return op("or", first, op("and", equal, earlier))


def counts_before(body: Value, here: str, there: str) -> tuple[Value, bool] | None:
    """Match a count of the elements ``there`` that precede element ``here``.

    Return the compared value over ``there`` and whether the largest comes first, or None if the body is not such a
    count.
    """
    if not isinstance(body, Op) or body.name != "cast" or not isinstance(body.args[0], Op):
        return None
    counted = body.args[0]
    first = counted
    while isinstance(first, Op) and first.name == "or":
        first = first.args[0]  # type: ignore[assignment]
    if not isinstance(first, Op) or first.name not in ("gt", "lt"):
        return None
    other, mine = first.args
    earlier = op("lt", FromIndex("int64", Index.of(there)), FromIndex("int64", Index.of(here)))
    largest = first.name == "gt"
    if counted != before(other, mine, largest, earlier) or substitute(other, {there: Index.of(here)}) != mine:
        return None
    return other, largest
