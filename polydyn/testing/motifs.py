"""What random models are made of: structures of a few nodes that exported models have (``random_onnx``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import onnx
from onnx import TensorProto, helper

from polydyn.testing.drafts import Draft, Rejected

Motif: TypeAlias = Callable[[Draft], None]
END = 2**31 - 1


# -- parts of tensors and views ----------------------------------------------------------------------------------------


def unary(b: Draft, t: str = "") -> str:
    """An element-wise operator."""
    t = t or b.pick()
    op = b.random.choice(["Relu", "Sigmoid", "Tanh", "Neg", "Abs", "Mul", "Add", "Exp", "Erf", "Softplus", "Clip"])
    if op in ("Mul", "Add"):
        return b.add(op, [t, b.const(np.float64(b.random.choice([4, 0.5, -1.25, 2])))])
    if op == "Clip" and b.opset >= 11:
        return b.add(op, [t, b.const(-1.0), b.const(2.5)])
    return b.add(op, [b.add("Tanh", [t]) if op == "Exp" else t])


def binary(b: Draft) -> None:
    """Two tensors that fit, or broadcast."""
    a = b.pick()
    c = b.pick(lambda s: b.shape(s) == b.shape(a)) if b.random.random() < 0.6 else b.pick()
    b.add(b.random.choice(["Add", "Mul", "Sub", "Max", "Min", "Where", "Add"][: 7 if b.opset > 8 else 5]), [a, c]) \
        if b.random.random() < 0.9 else b.add("Where", [b.add("Greater", [a, c]), a, c])  # fmt: skip


def cut(b: Draft, t: str = "", axis: int = -1, low: int = 0, high: int = END, step: int = 1) -> str:
    """A slice, as input or attributes."""
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
    """Split, as input or attribute."""
    if b.opset < 13:
        return b.add_all("Split", [t], len(sizes), axis=axis, split=list(sizes))
    return b.add_all("Split", [t, b.ints(*sizes)], len(sizes), axis=axis)


def parts(b: Draft, t: str = "") -> tuple[list[str], int]:
    """The parts of a tensor along a fixed axis."""
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
    """A concatenation, perhaps an output."""
    t = b.add("Concat", tensors, axis=axis)
    b.extra.append(t)
    return t


def taken_apart(b: Draft) -> None:
    """The parts of a tensor put together again, some changed, perhaps in another order: RGB to BGR, YOLO's heads."""
    t = unary(b) if b.random.random() < 0.4 else ""
    found, axis = parts(b, t)
    found = [unary(b, x) if b.random.random() < 0.5 else x for x in found]
    if b.random.random() < 0.5:
        found = found[::-1] if b.random.random() < 0.5 else b.random.sample(found, len(found))
    join(b, found, axis)


def cuts_joined(b: Draft) -> None:
    """Slices of one tensor joined, some changed."""
    t = b.pick(lambda s: any((b.fixed(s, a) or 0) > 2 for a in range(b.rank(s))))
    axis = b.fixed_axis(t, 3)
    n, found = b.fixed(t, axis) or 0, []
    for _ in range(b.random.choice([2, 2, 3])):
        low = b.random.randrange(n)
        x = cut(b, t, axis, low, b.random.randrange(low + 1, n + 1))
        found.append(unary(b, x) if b.random.random() < 0.5 else x)
    join(b, found, axis)


def concat(b: Draft) -> None:
    """Any tensors that fit."""
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
    """Every second pixel, four times, joined: YOLO's Focus."""
    t = b.pick(lambda s: b.rank(s) == 4)
    if b.opset < 10:
        raise Rejected("steps came with opset 10")
    quarter = [b.add("Slice", [t, b.ints(i, j), b.ints(END, END), b.ints(2, 3), b.ints(2, 2)])
               for i, j in ((0, 0), (1, 0), (0, 1), (1, 1))]  # fmt: skip
    join(b, quarter, 1)


def roll(b: Draft, t: str = "", axes: Sequence[int] = ()) -> str:
    """Slices change places along one axis or two."""
    t = t or b.pick(lambda s: b.rank(s) > 0)
    for axis in axes or [b.axis(t) for _ in range(b.random.choice([1, 1, 2]))]:
        by = b.random.choice([1, 2, -1, max(1, min(b.shape(t)[axis]) // 2)])
        t = b.add("Concat", [cut(b, t, axis, by, END), cut(b, t, axis, 0, by)], axis=axis)
    return t


def windows(b: Draft) -> None:
    """A map, perhaps rolled, cut into windows, and a product or an attention of each: Swin."""
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


def transpose(b: Draft) -> None:
    """Some order of axes."""
    t = b.pick(lambda s: b.rank(s) > 1)
    b.add("Transpose", [t], perm=b.random.sample(range(b.rank(t)), b.rank(t)))


def reshape(b: Draft) -> None:
    """Views: merged, split, flattened, with axes of one element."""
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


# -- products, norms, attention ----------------------------------------------------------------------------------------


def matmul(b: Draft) -> None:
    """A product with a weight, perhaps with a bias and what follows."""
    t = b.pick(lambda s: b.rank(s) > 0 and bool(b.fixed(s, b.rank(s) - 1)))
    k, n = b.fixed(t, b.rank(t) - 1) or 1, b.random.choice([1, 2, 4, 6, 8, 16, 5])
    y = b.add("MatMul", [t, b.weight(k, n)])
    if b.random.random() < 0.3:
        unary(b, b.add("Add", [y, b.weight(n)]))


def product(b: Draft) -> None:
    """A product of two tensors: the second is turned where that fits."""
    t = b.pick(lambda s: b.rank(s) > 1)
    s = b.shape(t)
    u = b.pick(lambda u: b.rank(u) == len(s) and (b.shape(u)[-2] == s[-1] or b.shape(u)[-1] == s[-1]), recent=0)
    if b.shape(u)[-2] != s[-1]:
        u = b.add("Transpose", [u], perm=[*range(len(s) - 2), len(s) - 1, len(s) - 2])
    b.add("MatMul", [t, u])


def other_product(b: Draft) -> None:
    """Two inputs of dims that meet nowhere else: every dim of a product is a name."""
    m, k, n = b.random.sample(["B", "L", "H", "W", "N"], 3)
    batch = b.random.choice([[], [], [2], ["B"]])
    x, y = b.input([*batch, m, k]), b.input([*batch, k, n])
    z = b.add("MatMul", [x, y])
    if b.random.random() < 0.4:
        b.add("Transpose", [z], perm=[*range(len(batch)), len(batch) + 1, len(batch)])
    if b.random.random() < 0.3:
        z = b.add("Softmax", [z], axis=len(batch) + 1)
        b.add("MatMul", [z, b.input([*batch, n, b.random.choice([m, k, 4])])])


def softmax(b: Draft) -> None:
    """Softmax and its kin over some axis."""
    t = b.pick(lambda s: b.rank(s) > 0)
    op = b.random.choice(["Softmax", "Softmax", "LogSoftmax", "Hardmax"])
    b.add(op, [t], axis=b.random.choice([-1, b.axis(t)]) if b.opset > 10 else b.axis(t))


def norm(b: Draft) -> None:
    """A normalisation over the last axes, as an operator or by hand."""
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
    """A reduction, with its axes where the opset has them."""
    if b.opset < 11:
        axes = [a % b.rank(t) for a in axes]
    first = 13 if op == "ReduceSum" else 18
    if b.opset >= first:
        return b.add(op, [t, b.ints(*axes)], keepdims=keep)
    return b.add(op, [t], axes=list(axes), keepdims=keep)


def reduction(b: Draft) -> None:
    """Some reduction over some axes."""
    t = b.pick(lambda s: b.rank(s) > 0)
    ops = ["ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceL2", "ReduceSumSquare", "ReduceLogSumExp", "ReduceL1"]
    axes = b.random.sample(range(b.rank(t)), b.random.randint(1, min(2, b.rank(t))))
    reduced(b, b.random.choice(ops), t, axes, b.random.randrange(2))


def attention(b: Draft) -> None:
    """Scores, perhaps scaled and masked, softmax, values; one head or several, once or twice."""
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
        try:
            scores = b.add("Add", [scores, mask])
        except Rejected:
            pass
    weights = b.add("Softmax", [scores], axis=2 + (heads > 1))
    y = b.add("MatMul", [weights, operand([0, 2, 1, 3])])
    if heads > 1:
        y = b.add("Reshape", [b.add("Transpose", [y], perm=[0, 2, 1, 3]), b.ints(0, 0, d)])
    return b.add("Add", [x, y]) if b.random.random() < 0.5 else y


def cache(b: Draft) -> None:
    """A cache that grows, whose whole is an output and is read too."""
    heads, width = b.random.choice([[], [2]]), b.random.choice([2, 4])
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
    """A convolution with any attributes."""
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
    return b.add("Conv", [t, b.weight(n, c // group, k, k), *([b.weight(n)] if b.random.random() < 0.5 else [])], **more)


def half(b: Draft, t: str) -> str:
    """A map of half the height and width."""
    if b.random.random() < 0.5:
        return conv(b, 2, t)
    k, p = b.random.choice([(3, 1), (2, 0), (2, 0)])
    op = b.random.choice(["MaxPool", "AveragePool"])
    return b.add(op, [t], kernel_shape=[k, k], strides=[2, 2], pads=[p] * 4)


def doubled(b: Draft, t: str, by: int = 2) -> str:
    """Upsampled by a factor."""
    scales = np.array([1, 1, by, by], np.float32)
    if b.opset < 9:
        return b.add("Upsample", [t], mode="nearest", scales=[1.0, 1.0, float(by), float(by)])
    if b.opset == 9:
        return b.add("Upsample", [t, b.const(scales, "float32")], mode="nearest")
    if b.opset == 10:
        return b.add("Resize", [t, b.const(scales, "float32")], mode="nearest")
    mode = b.random.choice(["nearest", "nearest", "linear"])
    more = {"nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"} if mode == "nearest" else {}
    roi = b.const(np.zeros(0), "float32") if b.opset < 13 else ""
    return b.add("Resize", [t, roi, b.const(scales, "float32")], mode=mode, **more)


def pyramid(b: Draft) -> None:
    """Halved and doubled again, with skips by sums or concatenations: FPN, U-Net, HRNet."""
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
    """A 1x1 convolution to the channels of another map."""
    return b.add("Conv", [t, b.weight(b.fixed(like, 1) or 1, b.fixed(t, 1) or 1, 1, 1)])


def batch_norm(b: Draft) -> None:
    """Normalisations of maps."""
    t = b.pick(lambda s: b.rank(s) > 2 and bool(b.fixed(s, 1)))
    c = b.fixed(t, 1) or 1
    if b.random.random() < 0.5:
        b.add("InstanceNormalization", [t, b.weight(c), b.weight(c)])
    else:
        positive = b.const(np.abs(b.numbers.standard_normal(c)) + 0.5)
        b.add("BatchNormalization", [t, b.weight(c), b.weight(c), b.weight(c), positive])


# -- tables ------------------------------------------------------------------------------------------------------------


def bag(b: Draft) -> None:
    """Rows of a table by ids, then a reduction, a norm or a product: bags of embeddings."""
    rows, width = b.random.choice([5, 9, 30]), b.random.choice([3, 4, 8])
    table = b.weight(rows, width) if b.random.random() < 0.7 else b.input(["N", width])
    dims = b.random.choice([["B", "L"], ["L"], ["B", 3]])
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
    """Some elements of an axis: constant or given indices, one or many."""
    t = b.pick(lambda s: b.rank(s) > 0)
    axis = b.fixed_axis(t)
    n = b.fixed(t, axis) or 1
    if b.random.random() < 0.6:
        at = b.const(np.array([b.random.randrange(-n, n) for _ in range(b.random.choice([1, 2, n]))], np.int64))
    else:
        at = b.input(b.random.choice([["L"], [], ["B", 2]]), "int64", n)
    b.add("Gather", [t, at], axis=axis)


def gather_elements(b: Draft) -> None:
    """GatherElements and GatherND, perhaps before a reduction."""
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
    """The dims of a tensor as an input could have them. Rejected: one is no dim of an input."""
    out: list[int | str] = []
    for a, sizes in enumerate(b.shape(t)):
        fixed = b.fixed(t, a)
        named = [n for n in b.samples[0] if tuple(s[n] for s in b.samples) == sizes]
        if fixed is None and not named:
            raise Rejected("a computed size")
        out.append(fixed if fixed is not None else named[0])
    return out


def scatter(b: Draft) -> None:
    """Rows or elements are replaced or combined."""
    t = b.pick(lambda s: b.rank(s) > 1 and bool(b.fixed(s, 0)) and b.opset > 10)
    n = b.fixed(t, 0) or 1
    k = b.random.randint(1, n)
    at = np.array(b.random.sample(range(n), k), np.int64)
    rows = cut(b, t, 0, 0, k)
    more = {"reduction": b.random.choice(["none", "add", "mul", "max"])} if b.opset > 17 else {}
    if b.random.random() < 0.6:
        b.add("ScatterND", [t, b.const(at[:, None]), unary(b, rows)], **more)
    else:
        index = b.add("Expand", [b.const(at.reshape(-1, *[1] * (b.rank(t) - 1))), b.add("Shape", [rows])])
        b.add("ScatterElements", [t, index, unary(b, rows)], axis=0, **more)


def running(b: Draft) -> None:
    """A running sum."""
    t = b.pick(lambda s: b.rank(s) > 0)
    b.add("CumSum", [t, b.const(np.int64(b.axis(t)))], reverse=b.random.randrange(2), exclusive=b.random.randrange(2))


def top(b: Draft) -> None:
    """The largest or smallest elements, their places, or the first place of the extreme."""
    t = b.pick(lambda s: b.rank(s) > 0)
    axis = b.fixed_axis(t)
    if b.random.random() < 0.5 and b.opset > 9:
        b.add_all("TopK", [t, b.ints(b.random.randint(1, b.fixed(t, axis) or 1))], 2, axis=axis)
    else:
        b.add(b.random.choice(["ArgMax", "ArgMin"]), [t], axis=axis, keepdims=b.random.randrange(2))


def body(name: str, nodes: Sequence[onnx.NodeProto], inputs: Sequence[Any], outputs: Sequence[Any]) -> onnx.GraphProto:
    """A body; inputs and outputs are (name, type) of unknown rank."""
    info = [[helper.make_tensor_value_info(n, t, None if t not in (TensorProto.BOOL, TensorProto.INT64) else [])
             for n, t in x] for x in (inputs, outputs)]  # fmt: skip
    return helper.make_graph(list(nodes), name, *info)
