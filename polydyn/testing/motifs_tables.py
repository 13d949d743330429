"""Structures of random models (``motifs``) with data-dependent or constant indices: tables, orders, sums."""

from __future__ import annotations

from typing import Any

import numpy as np

from polydyn.testing.drafts import Draft, Rejected
from polydyn.testing.motifs import cut, unary
from polydyn.testing.motifs_layers import reduced


def bag(b: Draft) -> None:
    """Read rows of a table by ids, then reduce, normalise or multiply: bags of embeddings."""
    rows, width = b.random.choice([5, 9, 30]), b.random.choice([3, 4, 8])
    table = b.weight(rows, width) if b.random.random() < 0.7 else b.input(["N", width])
    dims = b.one_of(["B", "L"], ["L"], ["B", 3])
    ids = b.input(dims, b.random.choice(["int64", "int32"]), rows if table in b.constants else "N")
    y = b.add("Gather", [table, ids])
    kind = b.random.choice(["sum", "last", "weighted", "matmul", "norm"])
    if kind == "sum":
        op = b.random.choice(["ReduceMean", "ReduceSum", "ReduceMax"])
        reduced(b, op, y, [len(dims) - 1], b.random.randrange(2))
    elif kind == "last":
        reduced(b, "ReduceSum", y, [len(dims)], 0)
    elif kind == "weighted":
        m = b.input([*dims, 1])
        reduced(b, "ReduceSum", b.add("Mul", [y, m]), [len(dims) - 1], 0)
    elif kind == "matmul":
        b.add("MatMul", [y, b.weight(width, 4)])
    else:
        b.add("Softmax", [y], axis=len(dims) - 1)


def gather(b: Draft) -> None:
    """Gather some elements of an axis: constant or input indices, one or many."""
    t = b.pick(lambda s: b.rank(s) > 0)
    axis = b.fixed_axis(t)
    n = b.fixed(t, axis) or 1
    if b.random.random() < 0.6:
        at = b.const(np.array([b.random.randrange(-n, n) for _ in range(b.random.choice([1, 2, n]))], np.int64))
    else:
        at = b.input(b.one_of(["L"], [], ["B", 2]), "int64", n)
    b.add("Gather", [t, at], axis=axis)


def gather_elements(b: Draft) -> None:
    """Add GatherElements and GatherND, perhaps before a reduction."""
    t = b.pick(lambda s: b.rank(s) > 1 and b.opset > 10)
    axis = b.fixed_axis(t)
    n = b.fixed(t, axis) or 1
    dims = _dims(b, t)
    if b.random.random() < 0.7:
        dims[axis] = b.random.choice([1, 2, n])
        y = b.add("GatherElements", [t, b.input(dims, "int64", n)], axis=axis)
    else:
        first = b.fixed(t, 0)
        if not first:
            raise Rejected("the first axis is not fixed")
        y = b.add("GatherND", [t, b.input(["L", 1], "int64", first)])
    if b.random.random() < 0.5:
        reduced(b, "ReduceSum", y, [axis % b.rank(y)], 0)


def _dims(b: Draft, t: str) -> list[int | str]:
    """Return the dims of a tensor as an input could have them. Rejected: one is not a dim of an input."""
    out: list[int | str] = []
    for a, sizes in enumerate(b.shape(t)):
        fixed = b.fixed(t, a)
        named = [n for n in b.samples[0] if tuple(s[n] for s in b.samples) == sizes]
        if fixed is None and not named:
            raise Rejected("a computed size")
        out.append(fixed if fixed is not None else named[0])
    return out


def scatter(b: Draft) -> None:
    """Replace or combine rows or elements."""
    t = b.pick(lambda s: b.rank(s) > 1 and bool(b.fixed(s, 0)) and b.opset > 10)
    n = b.fixed(t, 0) or 1
    k = b.random.randint(1, n)
    at = np.array(b.random.sample(range(n), k), np.int64)
    rows = cut(b, t, 0, 0, k)
    more: dict[str, Any] = {"reduction": b.random.choice(["none", "add", "mul", "max"])} if b.opset > 17 else {}
    if b.random.random() < 0.6:
        b.add("ScatterND", [t, b.const(at[:, None]), unary(b, rows)], **more)
    else:
        index = b.add("Expand", [b.const(at.reshape(-1, *[1] * (b.rank(t) - 1))), b.add("Shape", [rows])])
        b.add("ScatterElements", [t, index, unary(b, rows)], axis=0, **more)


def running(b: Draft) -> None:
    """Add a running sum."""
    t = b.pick(lambda s: b.rank(s) > 0)
    b.add("CumSum", [t, b.const(np.int64(b.axis(t)))], reverse=b.random.randrange(2), exclusive=b.random.randrange(2))


def top(b: Draft) -> None:
    """Add the largest or smallest elements, their positions, or the first position of the extreme."""
    t = b.pick(lambda s: b.rank(s) > 0)
    axis = b.fixed_axis(t)
    if b.random.random() < 0.5 and b.opset > 9:
        b.add_all("TopK", [t, b.ints(b.random.randint(1, b.fixed(t, axis) or 1))], 2, axis=axis)
    else:
        b.add(b.random.choice(["ArgMax", "ArgMin"]), [t], axis=axis, keepdims=b.random.randrange(2))
