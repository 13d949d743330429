"""Building blocks of random models: structures of a few nodes that exported models have (``random_onnx``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from polydyn.testing.drafts import Draft, Rejected

Motif: TypeAlias = Callable[[Draft], object]
END = 2**31 - 1


# -- parts of tensors and views ----------------------------------------------------------------------------------------


def unary(b: Draft, t: str = "") -> str:
    """Add an element-wise operator."""
    t = t or b.pick()
    op = b.random.choice(["Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Mul", "Add", "Exp", "Erf", "Softplus", "Clip"])
    if op in ("Mul", "Add"):
        return b.add(op, [t, b.const(np.float64(b.random.choice([4, 0.5, -1.25, 2])))])
    if op == "Clip" and b.opset >= 11:
        return b.add(op, [t, b.const(-1.0), b.const(2.5)])
    return b.add(op, [b.add("Tanh", [t]) if op == "Exp" else t])


def binary(b: Draft) -> None:
    """Combine two tensors that fit, or broadcast."""
    a = b.pick()
    c = b.pick(lambda s: b.shape(s) == b.shape(a)) if b.random.random() < 0.6 else b.pick()
    if b.random.random() < 0.9:
        b.add(b.random.choice(["Add", "Mul", "Sub", "Max", "Min"]), [a, c])
    else:
        b.add("Where", [b.add("Greater", [a, c]), a, c])


def cut(b: Draft, t: str = "", axis: int = -1, low: int = 0, high: int = END, step: int = 1) -> str:
    """Add a slice, with bounds as inputs or attributes."""
    if not t:
        t = b.pick(lambda s: b.rank(s) > 0)
        axis = b.fixed_axis(t) if b.random.random() < 0.6 else b.axis(t)
        n = min(b.shape(t)[axis])
        low, step = b.random.choice([0, 0, 1, 2, n // 2, -1, -n]), b.random.choice([1, 1, 1, 2, -1, -2])
        high = b.random.choice([END, -1, n, max(1, n // 2), 100])
        low, high = (-1, -END) if step < 0 and b.random.random() < 0.7 else (low, high)
    if b.opset < 10:
        if step != 1:
            raise Rejected("steps came with opset 10")
        return b.add("Slice", [t], axes=[axis], starts=[low], ends=[high])
    return b.add("Slice", [t, b.ints(low), b.ints(high), b.ints(axis), *([b.ints(step)] if step != 1 else [])])


def split(b: Draft, t: str, axis: int, sizes: Sequence[int]) -> list[str]:
    """Add a Split, with sizes as input or attribute."""
    if b.opset < 13:
        return b.add_all("Split", [t], len(sizes), axis=axis, split=list(sizes))
    return b.add_all("Split", [t, b.ints(*sizes)], len(sizes), axis=axis)


def parts(b: Draft, t: str = "") -> tuple[list[str], int]:
    """Return the parts of a tensor along a fixed axis."""
    t = t or b.pick(lambda s: any((b.fixed(s, a) or 0) > 1 for a in range(b.rank(s))))
    axis = b.fixed_axis(t, 2)
    n = b.fixed(t, axis) or 0
    k = b.random.choice([x for x in (2, 3, 4, n) if n % x == 0 and x <= 8] or [2])
    sizes = [n // k] * k if n % k == 0 else [1, n - 1]
    if n > 2 and b.random.random() < 0.4:
        cuts = sorted(b.random.sample(range(1, n), min(n - 1, b.random.choice([1, 2]))))
        sizes = [y - x for x, y in zip([0, *cuts], [*cuts, n], strict=True)]
    return split(b, t, axis, sizes), axis


def join(b: Draft, tensors: Sequence[str], axis: int) -> str:
    """Add a concatenation, perhaps an output."""
    t = b.add("Concat", tensors, axis=axis)
    b.extra.append(t)
    return t


def taken_apart(b: Draft) -> None:
    """Join the parts of a tensor again, some changed, perhaps in another order: RGB to BGR, YOLO's heads."""
    t = unary(b) if b.random.random() < 0.4 else ""
    found, axis = parts(b, t)
    found = [unary(b, x) if b.random.random() < 0.5 else x for x in found]
    if b.random.random() < 0.5:
        found = found[::-1] if b.random.random() < 0.5 else b.random.sample(found, len(found))
    join(b, found, axis)


def cuts_joined(b: Draft) -> None:
    """Join slices of one tensor, some changed."""
    t = b.pick(lambda s: any((b.fixed(s, a) or 0) > 2 for a in range(b.rank(s))))
    axis = b.fixed_axis(t, 3)
    n, found = b.fixed(t, axis) or 0, []
    for _ in range(b.random.choice([2, 2, 3])):
        low = b.random.randrange(n)
        x = cut(b, t, axis, low, b.random.randrange(low + 1, n + 1))
        found.append(unary(b, x) if b.random.random() < 0.5 else x)
    join(b, found, axis)


def concat(b: Draft) -> None:
    """Concatenate any tensors that fit."""
    t = b.pick(lambda s: b.rank(s) > 0)
    axis = b.axis(t)
    s = b.shape(t)

    def fits(u: str) -> bool:
        z = b.shape(u)
        return len(z) == len(s) and all(x == y for a, (x, y) in enumerate(zip(s, z, strict=True)) if a != axis)

    found = [t, *(b.pick(fits, recent=0) for _ in range(b.random.choice([1, 1, 2])))]
    b.random.shuffle(found)
    join(b, found, axis - len(s) if b.random.random() < 0.3 and b.opset > 10 else axis)


def focus(b: Draft) -> None:
    """Join every second pixel, four times: YOLO's Focus."""
    t = b.pick(lambda s: b.rank(s) == 4)
    if b.opset < 10:
        raise Rejected("steps came with opset 10")
    quarter = [b.add("Slice", [t, b.ints(i, j), b.ints(END, END), b.ints(2, 3), b.ints(2, 2)])
               for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))]  # fmt: skip
    join(b, quarter, 1)


def roll(b: Draft, t: str = "", axes: Sequence[int] = ()) -> str:
    """Exchange slices along one axis or two."""
    t = t or b.pick(lambda s: b.rank(s) > 0)
    for axis in axes or [b.axis(t) for _ in range(b.random.choice([1, 1, 2]))]:
        by = b.random.choice([1, 2, -1, max(1, min(b.shape(t)[axis]) // 2)])
        t = b.add("Concat", [cut(b, t, axis, by, END), cut(b, t, axis, 0, by)], axis=axis)
    return t


def windows(b: Draft) -> None:
    """Cut a map, perhaps rolled, into windows, and apply a product or an attention to each: Swin."""
    c = b.random.choice([4, 8])
    side, w = b.random.choice([(8, 4), (4, 2), (6, 3), (8, 2)])
    x = b.input(["N", side, side, c])
    if b.random.random() < 0.7:
        x = roll(b, x, [1, 2] if b.random.random() < 0.7 else [1])
    k = side // w
    v = b.add("Reshape", [x, b.ints(-1, k, w, k, w, c)])
    v = b.add("Transpose", [v], perm=[0, 1, 3, 2, 4, 5])
    v = b.add("Reshape", [v, b.ints(-1, w * w, c)])
    y = b.add("MatMul", [v, b.weight(c, b.random.choice([c, 3 * c, 5]))])
    if b.random.random() < 0.3 and b.fixed(y, 2) == c:
        y = b.add("Transpose", [b.add("Reshape", [y, b.ints(-1, k, k, w, w, c)])], perm=[0, 1, 3, 2, 4, 5])
        b.extra.append(b.add("Reshape", [y, b.ints(-1, side, side, c)]))


def transpose(b: Draft, t: str = "") -> str:
    """Transpose to some order of axes."""
    t = t or b.pick(lambda s: b.rank(s) > 1)
    return b.add("Transpose", [t], perm=b.random.sample(range(b.rank(t)), b.rank(t)))


def reshape(b: Draft) -> None:
    """Add views: merged, split, flattened, with axes of one element."""
    t = b.pick(lambda s: b.rank(s) > 0)
    n, form = b.rank(t), b.random.choice(["merge", "flat", "split", "one", "squeeze", "flatten", "halves"])
    sizes = [b.fixed(t, a) for a in range(n)]
    if form == "merge" and n > 1:
        k = b.random.randrange(n - 1)
        rest = [s if s is not None else 0 for s in sizes[k + 2 :]]
        b.add("Reshape", [t, b.ints(*[0] * k, -1, *rest)])
    elif form in ("split", "halves") and (sizes[-1] or 1) % 2 == 0:
        two = b.random.choice([(2, -1), (-1, 2)]) if form == "halves" else (2, sizes[-1] // 2 if sizes[-1] else -1)
        b.add("Reshape", [t, b.ints(*[0] * (n - 1), *two)])
    elif form == "one":
        k = b.random.randrange(n + 1)
        b.add("Unsqueeze", [t, b.ints(k)]) if b.opset > 12 else b.add("Unsqueeze", [t], axes=[k])
    elif form == "squeeze":
        a = b.axis(t, lambda a: b.fixed(t, a) == 1)
        if b.random.random() < 0.3:
            b.add("Squeeze", [t])
        else:
            b.add("Squeeze", [t, b.ints(a)]) if b.opset > 12 else b.add("Squeeze", [t], axes=[a])
    elif form == "flatten":
        b.add("Flatten", [t], axis=b.random.randrange(n + 1))
    else:
        b.add("Reshape", [t, b.ints(-1)])
