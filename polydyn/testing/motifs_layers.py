"""Layers of random models (``motifs``): products, normalisations, attention, images."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from polydyn.testing.drafts import Dim, Draft, Rejected
from polydyn.testing.motifs import join, unary


def matmul(b: Draft) -> None:
    """Add a product with a weight, perhaps with a bias and an epilogue."""
    t = b.pick(lambda s: b.rank(s) > 0 and bool(b.fixed(s, b.rank(s) - 1)))
    k, n = b.fixed(t, b.rank(t) - 1) or 1, b.random.choice([1, 2, 4, 6, 8, 16, 5])
    y = b.add("MatMul", [t, b.weight(k, n)])
    if b.random.random() < 0.3:
        unary(b, b.add("Add", [y, b.weight(n)]))


def product(b: Draft) -> None:
    """Add a product of two tensors; the second is transposed if that fits."""
    t = b.pick(lambda s: b.rank(s) > 1)
    s = b.shape(t)
    u = b.pick(lambda u: b.rank(u) == len(s) and (b.shape(u)[-2] == s[-1] or b.shape(u)[-1] == s[-1]), recent=0)
    if b.shape(u)[-2] != s[-1]:
        u = b.add("Transpose", [u], perm=[*range(len(s) - 2), len(s) - 1, len(s) - 2])
    b.add("MatMul", [t, u])


def other_product(b: Draft) -> None:
    """Add a product of two inputs with otherwise unused dims: every dim is a name."""
    m, k, n = b.random.sample(["B", "L", "H", "W", "N"], 3)
    batch: list[Dim] = list(b.one_of([], [], [2], ["B"]))
    x, y = b.input([*batch, m, k]), b.input([*batch, k, n])
    z = b.add("MatMul", [x, y])
    if b.random.random() < 0.4:
        b.add("Transpose", [z], perm=[*range(len(batch)), len(batch) + 1, len(batch)])
    if b.random.random() < 0.3:
        z = b.add("Softmax", [z], axis=len(batch) + 1)
        b.add("MatMul", [z, b.input([*batch, n, b.one_of([m], [k], [4])[0]])])


def softmax(b: Draft) -> None:
    """Add softmax or a similar operator over some axis."""
    t = b.pick(lambda s: b.rank(s) > 0)
    op = b.random.choice(["Softmax", "Softmax", "LogSoftmax", "Hardmax"])
    b.add(op, [t], axis=b.random.choice([-1, b.axis(t)]) if b.opset > 10 else b.axis(t))


def norm(b: Draft) -> None:
    """Add a normalisation over the last axes, as an operator or by hand."""
    t = b.pick(lambda s: b.rank(s) > 0 and bool(b.fixed(s, b.rank(s) - 1)))
    k = b.fixed(t, b.rank(t) - 1) or 1
    if b.opset > 16 and b.random.random() < 0.5:
        b.add("LayerNormalization", [t, b.weight(k), *([b.weight(k)] if b.random.random() < 0.6 else [])])
        return
    centred = t
    if b.random.random() < 0.6:
        centred = b.add("Sub", [t, reduced(b, "ReduceMean", t, [-1], 1)])
    power = b.add("Mul", [centred, centred]) if b.random.random() < 0.5 else b.add("Pow", [centred, b.const(2.0)])
    size = b.add("Sqrt", [b.add("Add", [reduced(b, "ReduceMean", power, [-1], 1), b.const(1e-2)])])
    y = b.add("Div", [centred, size])
    if b.random.random() < 0.6:
        b.add("MatMul", [y, b.weight(k, 6)]) if b.random.random() < 0.5 else b.add("Mul", [y, b.weight(k)])


def reduced(b: Draft, op: str, t: str, axes: Sequence[int], keep: int) -> str:
    """Add a reduction, with its axes as input or attribute, depending on the opset."""
    if b.opset < 11:
        axes = [a % b.rank(t) for a in axes]
    first = 13 if op == "ReduceSum" else 18
    if b.opset >= first:
        return b.add(op, [t, b.ints(*axes)], keepdims=keep)
    return b.add(op, [t], axes=list(axes), keepdims=keep)


def reduction(b: Draft) -> None:
    """Add some reduction over some axes."""
    t = b.pick(lambda s: b.rank(s) > 0)
    ops = [
        "ReduceSum",
        "ReduceMean",
        "ReduceMax",
        "ReduceMin",
        "ReduceL2",
        "ReduceSumSquare",
        "ReduceLogSumExp",
        "ReduceL1",
    ]
    axes = b.random.sample(range(b.rank(t)), b.random.randint(1, min(2, b.rank(t))))
    reduced(b, b.random.choice(ops), t, axes, b.random.randrange(2))


def attention(b: Draft) -> None:
    """Add scores, perhaps scaled and masked, softmax, values; one head or several, once or twice."""
    d, heads = b.random.choice([(4, 1), (8, 2), (6, 2), (8, 1)])
    try:
        x = b.pick(lambda s: b.rank(s) == 3 and b.fixed(s, 2) == d and b.fixed(s, 1) is None)
    except Rejected:
        x = b.input(["B", "L", d])
    for _ in range(b.random.choice([1, 1, 2])):
        x = _attended(b, x, d, heads)


def _attended(b: Draft, x: str, d: int, heads: int) -> str:
    def operand(perm: Sequence[int]) -> str:
        y = b.add("MatMul", [x, b.weight(d, d)]) if b.random.random() < 0.8 else x
        if heads == 1:
            return b.add("Transpose", [y], perm=[0, 2, 1]) if perm[-2:] == [3, 1] else y
        return b.add("Transpose", [b.add("Reshape", [y, b.ints(0, 0, heads, d // heads)])], perm=list(perm))

    scores = b.add("MatMul", [operand([0, 2, 1, 3]), operand([0, 2, 3, 1])])
    if b.random.random() < 0.6:
        scores = b.add("Mul", [scores, b.const(0.5)])
    if b.random.random() < 0.4:
        mask = b.input(["B", *[1] * (heads > 1), 1, "L"])
        with contextlib.suppress(Rejected):
            scores = b.add("Add", [scores, mask])
    weights = b.add("Softmax", [scores], axis=2 + (heads > 1))
    y = b.add("MatMul", [weights, operand([0, 2, 1, 3])])
    if heads > 1:
        y = b.add("Reshape", [b.add("Transpose", [y], perm=[0, 2, 1, 3]), b.ints(0, 0, d)])
    return b.add("Add", [x, y]) if b.random.random() < 0.5 else y


def cache(b: Draft) -> None:
    """Add a cache that grows; the whole cache is an output and is also read."""
    heads, width = b.one_of([], [2]), b.random.choice([2, 4])
    past, new = b.input(["B", *heads, "N", width]), b.input(["B", *heads, "L", width])
    if b.random.random() < 0.7:
        new = unary(b, new)
    whole = join(b, [past, new], 1 + len(heads))
    if b.random.random() < 0.5:
        turned = b.add("Transpose", [whole], perm=[*range(1 + len(heads)), 2 + len(heads), 1 + len(heads)])
        scores = b.add("Softmax", [b.add("MatMul", [new, turned])], axis=2 + len(heads))
        b.add("MatMul", [scores, whole])
    else:
        unary(b, whole)


# -- images ------------------------------------------------------------------------------------------------------------


def conv(b: Draft, stride: int = 0, t: str = "") -> str:
    """Add a convolution with any attributes."""
    t = t or b.pick(lambda s: b.rank(s) == 4 and bool(b.fixed(s, 1)))
    c = b.fixed(t, 1) or 1
    group = c if b.random.random() < 0.2 else 1
    n, k = b.random.choice([2, 3, 4]) * group, b.random.choice([1, 3, 3, 2, 5])
    more: dict[str, Any] = {"group": group, "strides": [stride or b.random.choice([1, 1, 2])] * 2}
    if b.random.random() < 0.8:
        more["pads"] = [k // 2] * 4 if b.random.random() < 0.7 else [b.random.randrange(k) for _ in range(4)]
    else:
        more["auto_pad"] = b.random.choice(["SAME_UPPER", "SAME_LOWER", "VALID"])
    if b.random.random() < 0.15:
        more["dilations"] = [2, 1]
    return b.add(
        "Conv", [t, b.weight(n, c // group, k, k), *([b.weight(n)] if b.random.random() < 0.5 else [])], **more
    )


def half(b: Draft, t: str) -> str:
    """Return a map of half the height and width."""
    if b.random.random() < 0.5:
        return conv(b, 2, t)
    k, p = b.random.choice([(3, 1), (2, 0), (2, 0)])
    op = b.random.choice(["MaxPool", "AveragePool"])
    return b.add(op, [t], kernel_shape=[k, k], strides=[2, 2], pads=[p] * 4)


def doubled(b: Draft, t: str, by: int = 2) -> str:
    """Upsample by a factor."""
    scales = np.array([1, 1, by, by], np.float32)
    if b.opset < 9:
        return b.add("Upsample", [t], mode="nearest", scales=[1.0, 1.0, float(by), float(by)])
    if b.opset == 9:
        return b.add("Upsample", [t, b.const(scales, "float32")], mode="nearest")
    if b.opset == 10:
        return b.add("Resize", [t, b.const(scales, "float32")], mode="nearest")
    mode = b.random.choice(["nearest", "nearest", "linear"])
    more: dict[str, Any] = (
        {"nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"} if mode == "nearest" else {}
    )
    roi = b.const(np.zeros(0), "float32") if b.opset < 13 else ""
    return b.add("Resize", [t, roi, b.const(scales, "float32")], mode=mode, **more)


def pyramid(b: Draft) -> None:
    """Halve and double again, with skips by sums or concatenations: FPN, U-Net, HRNet."""
    t = b.pick(lambda s: b.rank(s) == 4 and bool(b.fixed(s, 1)) and b.fixed(s, 2) is None)
    maps = [t]
    for _ in range(b.random.choice([1, 2, 2, 3])):
        maps.append(half(b, maps[-1]))
    y = maps[-1]
    for skip in maps[-2::-1]:
        y = doubled(b, y)
        if b.random.random() < 0.6:
            y = b.add("Concat", [y, skip] if b.random.random() < 0.5 else [skip, y], axis=1)
        else:
            y = b.add("Add", [y if b.fixed(y, 1) == b.fixed(skip, 1) else conv_to(b, y, skip), skip])
        if b.random.random() < 0.2:
            break
    b.extra.append(y)


def conv_to(b: Draft, t: str, like: str) -> str:
    """Add a 1x1 convolution to the channels of another map."""
    return b.add("Conv", [t, b.weight(b.fixed(like, 1) or 1, b.fixed(t, 1) or 1, 1, 1)])


def batch_norm(b: Draft) -> None:
    """Add normalisations of maps."""
    t = b.pick(lambda s: b.rank(s) > 2 and bool(b.fixed(s, 1)))
    c = b.fixed(t, 1) or 1
    if b.random.random() < 0.5:
        b.add("InstanceNormalization", [t, b.weight(c), b.weight(c)])
    else:
        positive = b.const(np.abs(b.numbers.standard_normal(c)) + 0.5)
        b.add("BatchNormalization", [t, b.weight(c), b.weight(c), b.weight(c), positive])
