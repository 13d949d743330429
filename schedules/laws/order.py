"""The order of elements: counting those before an element gives its place among the sorted ones.

The operator writes the one (a primitive says what each element is), kernels that may sort use the other.
"""

from __future__ import annotations

from polydyn.schedules.expr import FLOATS, FromIndex, Op, Value, op, substitute
from polydyn.schedules.index import Index


def before(a: Value, b: Value, largest: bool, earlier: Value) -> Value:
    """Whether ``a`` comes before ``b``: equal ones in their order; NaN counts as the greatest."""
    first, equal = op("gt" if largest else "lt", a, b), op("eq", a, b)
    if a.dtype in FLOATS:
        x, y = (a, b) if largest else (b, a)
        first = op("or", first, op("and", op("isnan", x), op("not", op("isnan", y))))
        equal = op("or", equal, op("and", op("isnan", a), op("isnan", b)))
    return op("or", first, op("and", equal, earlier))


def counts_before(body: Value, here: str, there: str) -> tuple[Value, bool] | None:
    """What a count of elements ``there`` that come before the one ``here`` compares, over ``there``, and whether the
    largest comes first. None where a body counts something else.
    """
    if not isinstance(body, Op) or body.name != "cast" or not isinstance(body.args[0], Op):
        return None
    found = body.args[0]
    first = found
    while isinstance(first, Op) and first.name == "or":
        first = first.args[0]  # type: ignore[assignment]
    if not isinstance(first, Op) or first.name not in ("gt", "lt"):
        return None
    other, mine = first.args
    earlier = op("lt", FromIndex("int64", Index.of(there)), FromIndex("int64", Index.of(here)))
    largest = first.name == "gt"
    if found != before(other, mine, largest, earlier) or substitute(other, {there: Index.of(here)}) != mine:
        return None
    return other, largest
