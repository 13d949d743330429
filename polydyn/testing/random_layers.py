"""Random ONNX models of a few layers: convolutions, products, attention, and operators on rows.

A layer is a function of its seed and its family. Its sizes are symbols if the operators allow it, its numbers are
float32 that 16-bit floats hold exactly, and its shapes have sizes 0, 1, primes and sizes around tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from polydyn.testing.layer_writer import MICROSOFT, Dims, Layer, Writer, exact

SMALL_SIZES = (0, 1, 1, 2, 3, 4, 5)
LENGTHS = (0, 1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 61, 63, 64, 65, 100, 127, 128, 129, 130, 193, 257)
SIDES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13, 14, 16, 17, 19, 24, 31, 33)
CHANNELS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 24, 33, 64, 130)
WIDTHS = (1, 2, 3, 7, 8, 16, 24, 31, 32, 33, 48, 64, 65, 72, 128, 130, 256)


# -- convolutions ------------------------------------------------------------------------------------------------------


def convolution(w: Writer) -> None:
    """Add a convolution with operators before and after it."""
    rank = w.pick(1, 2, 2, 2, 2, 3)
    c = w.pick(*CHANNELS)
    w.sizes |= {"N": SMALL_SIZES} | dict.fromkeys("HWD"[:rank], SIDES)
    last = rank == 2 and w.chance(0.3)
    dims = ["N", *"HWD"[:rank]]
    x = w.input("x", [*dims, c] if last else ["N", c, *dims[1:]])
    if last:
        x = w.add("Transpose", x, perm=[0, 3, 1, 2])
    x, c = _before(w, x, c, rank)
    x, c = _conv(w, x, c, rank)
    for _ in range(w.pick(0, 1, 1, 2, 3)):
        x, c = _after(w, x, c, rank)
    if rank == 2 and w.chance(0.3):
        x = w.add("Transpose", x, perm=[0, 2, 3, 1])
    w.outputs.append(x)


def _before(w: Writer, x: str, c: int, rank: int) -> tuple[str, int]:
    kind = w.pick("none", "none", "none", "Relu", "scale", "pad", "concat", "pool", "batch")
    if kind == "Relu":
        return w.add("Relu", x), c
    if kind == "scale":
        return w.add("Mul", x, w.floats(c, *[1] * rank)), c
    if kind == "batch":
        return _batch(w, x, c), c
    if kind == "concat":
        other = w.pick(1, 3, 8, 16)
        y = w.input("y", ["N", other, *"HWD"[:rank]])
        return w.add("Concat", x, y, axis=1), c + other
    if kind == "pad":
        pads = [0, 0, *(w.pick(0, 1, 2) for _ in range(rank)), 0, 0, *(w.pick(0, 1, 3) for _ in range(rank))]
        return w.add("Pad", x, w.const(pads), w.const(0, np.float32)), c
    return (_pool(w, x, rank), c) if kind == "pool" else (x, c)


def _batch(w: Writer, x: str, c: int) -> str:
    numbers = (w.floats(c), w.floats(c), w.floats(c), w.floats(c, positive=True))
    return w.add("BatchNormalization", x, *numbers)


def _pool(w: Writer, x: str, rank: int) -> str:
    kernel = [w.pick(1, 2, 3) for _ in range(rank)]
    pads = [w.pick(0, k // 2) for k in kernel * 2]
    more: dict[str, Any] = {"kernel_shape": kernel, "strides": [w.pick(1, 2) for _ in kernel], "pads": pads}
    if w.chance(0.5):
        return w.add("MaxPool", x, ceil_mode=w.pick(0, 0, 1), **more)
    return w.add("AveragePool", x, count_include_pad=w.pick(0, 1), **more)


def _conv(w: Writer, x: str, c: int, rank: int) -> tuple[str, int]:
    group = w.pick(1, 1, 1, c, c, w.pick(*[g for g in range(1, c + 1) if c % g == 0]))
    out = group * w.pick(1, 1, 2) if group == c > 1 else group * max(1, w.pick(*CHANNELS) // group)
    transposed = w.chance(0.12)
    most = {1: 7, 2: 7, 3: 3}[rank]
    kernel = [w.pick(1, 1, 2, 3, 3, 3, 4, 5, 7) for _ in range(rank)] if w.chance(0.5) else [w.pick(1, 3)] * rank
    kernel = [min(k, most) for k in kernel]
    strides = [w.pick(1, 1, 2, 3) for _ in kernel] if w.chance(0.5) else [w.pick(1, 2)] * rank
    dilations = [w.pick(1, 1, 2, 3) for _ in kernel] if w.chance(0.25) else [1] * rank
    more: dict[str, Any] = {"group": group, "strides": strides, "dilations": dilations}
    if w.chance(0.15) and not transposed:
        more |= {"auto_pad": w.pick("SAME_UPPER", "SAME_LOWER", "VALID"), "dilations": [1] * rank}
    else:
        more["pads"] = [w.pick(0, k // 2, k // 2, k - 1) for k in kernel * 2]
    per = c // group * prod(kernel)
    w.work = max(w.work, out * per / (prod(strides) if not transposed else 1))
    shape = (c, out // group) if transposed else (out, c // group)
    weights = w.floats(*shape, *kernel, scale=per**-0.5)
    bias = [w.floats(out)] if w.chance(0.6) else []
    return w.add("ConvTranspose" if transposed else "Conv", x, weights, *bias, **more), out


def _after(w: Writer, x: str, c: int, rank: int) -> tuple[str, int]:
    kind = w.pick("act", "act", "batch", "pool", "global", "resize", "conv", "residual", "concat", "gate")
    if kind == "batch":
        return _batch(w, x, c), c
    if kind == "pool":
        return _pool(w, x, rank), c
    if kind == "global":
        return w.add(w.pick("GlobalAveragePool", "GlobalMaxPool"), x), c
    if kind == "resize" and rank == 2:
        scales = w.const([1, 1, w.pick(1, 2, 3), w.pick(1, 2)], np.float32)
        mode = w.pick("nearest", "linear")
        place = "half_pixel" if mode == "linear" else "asymmetric"
        near: dict[str, Any] = {} if mode == "linear" else {"nearest_mode": "floor"}
        return w.add("Resize", x, "", scales, mode=mode, coordinate_transformation_mode=place, **near), c
    if kind == "conv":
        return _conv(w, x, c, rank)
    if kind == "residual":
        weights = w.floats(c, c, *[1] * rank, scale=c**-0.5)
        return w.add("Add", w.add("Relu", w.add("Conv", x, weights)), x), c
    if kind == "concat":
        return w.add("Concat", w.add("Relu", x), x, axis=1), 2 * c
    if kind == "gate":
        weights = w.floats(c, c, *[1] * rank, scale=c**-0.5)
        gate = w.add("Sigmoid", w.add("Conv", w.add("GlobalAveragePool", x), weights))
        return w.add("Mul", x, gate), c
    return w.activation(x), c


# -- products ----------------------------------------------------------------------------------------------------------


def product(w: Writer) -> None:
    """Add consecutive products, with epilogues and norms."""
    kind = w.pick("dense", "dense", "dense", "batched", "batched", "gemm", "nbits")
    if kind == "batched":
        _batched(w)
    elif kind == "gemm":
        _gemm(w)
    else:
        _chain(w, kind)


def _chain(w: Writer, kind: str) -> None:
    k = w.pick(*WIDTHS)
    if kind == "nbits":
        k = w.pick(16, 32, 48, 64, 128, 160)
    w.sizes["M"] = LENGTHS
    if w.chance(0.4):
        w.sizes["B"] = SMALL_SIZES
    x = first = w.input("x", [*(["B"] if "B" in w.sizes else []), "M", k])
    width = k
    for n in range(w.pick(1, 1, 2, 3)):
        if w.chance(0.25) and width > 1:
            x = w.norm(x, width)
        x, width = _nbits(w, x, width) if kind == "nbits" and n == 0 else _dense(w, x, width)
        if width == k and w.chance(0.5):
            x = w.add("Add", x, first)
    if w.chance(0.25) and width > 1:
        x = w.norm(x, width)
    if w.chance(0.15):
        x = w.add("Softmax", x, axis=-1)
    w.outputs.append(x)


def _dense(w: Writer, x: str, k: int) -> tuple[str, int]:
    n = w.pick(*WIDTHS)
    w.work = max(w.work, k * n)
    y = w.add("MatMul", x, w.floats(k, n, scale=k**-0.5))
    if w.chance(0.6):
        y = w.add("Add", y, w.floats(n))
    return w.activation(y), n


def _nbits(w: Writer, x: str, k: int) -> tuple[str, int]:
    n, bits, block = w.pick(8, 16, 24, 33, 64, 130), w.pick(4, 4, 8), w.pick(16, 32, 64)
    w.work = max(w.work, k * n)
    blocks = -(-k // block)
    packed = w.const(w.numbers.integers(0, 256, (n, blocks, block * bits // 8)), np.uint8)
    scales = w.const(exact(w.numbers.uniform(0.01, 0.1, (n, blocks))) * 8 / 2**bits, np.float32)
    zeros = [w.const(w.numbers.integers(0, 256, (n, -(-blocks * bits // 8))), np.uint8)] if w.chance(0.5) else []
    more = {"K": k, "N": n, "bits": bits, "block_size": block}
    return w.add("MatMulNBits", x, packed, scales, *zeros, domain=MICROSOFT, **more), n


def _gemm(w: Writer) -> None:
    ta, tb, n = w.pick(0, 1), w.pick(0, 1), w.pick(*WIDTHS)
    w.sizes |= {"M": LENGTHS, "K": LENGTHS}
    w.work = n
    a = w.input("a", ["K", "M"] if ta else ["M", "K"])
    b = w.input("b", [n, "K"] if tb else ["K", n])
    c = w.pick([], [w.floats(n)], [w.floats(1, n)], [w.floats(1)], [w.input("c", ["M", n])], [w.input("c", ["M", 1])])
    more = {"transA": ta, "transB": tb, "alpha": w.pick(1.0, 0.25), "beta": w.pick(1.0, 0.5)}
    w.outputs.append(w.activation(w.add("Gemm", a, b, *c, **more)))


def _batched(w: Writer) -> None:
    """Add a product of two inputs, with batches that are broadcast, perhaps transposed."""
    w.sizes |= {"B": SMALL_SIZES, "M": LENGTHS, "K": LENGTHS, "N": LENGTHS}
    h = w.pick(1, 2, 3)
    left, right = w.pick(
        (["B", h], ["B", h]), (["B", h], [h]), (["B", h], ["B", 1]), (["B", 1], [1, h]), ([], ["B", h]), (["B"], ["B"]),
        (["B", h], []), ([], []), ([1, h], ["B", h]),
    )  # fmt: skip
    w.work = h
    a, b = w.input("a", [*left, "M", "K"]), w.input("b", [*right, "K", "N"])
    if w.chance(0.4):
        w.inputs["b"] = (TensorProto.FLOAT, [*right, "N", "K"])
        r = len(right)
        b = w.add("Transpose", b, perm=[*range(r), r + 1, r])
    elif w.chance(0.2):
        w.inputs["a"] = (TensorProto.FLOAT, [*left, "K", "M"])
        r = len(left)
        a = w.add("Transpose", a, perm=[*range(r), r + 1, r])
    y = w.add("MatMul", a, b)
    if w.chance(0.3) and max(len(left), len(right)) == 2:
        y = w.add("Transpose", y, perm=[0, 2, 1, 3])
    w.outputs.append(w.activation(y))


# -- attention ---------------------------------------------------------------------------------------------------------

MASKS: tuple[Dims, ...] = (
    ("B", 1, 1, "T"), ("B", 1, "L", "T"), (1, 1, "L", "T"), ("L", "T"), ("B", "H", "L", "T"), ("T",),
)  # fmt: skip


def attention(w: Writer) -> None:
    """Add scores, perhaps masked, softmax, values."""
    heads, groups = w.pick((1, 1), (2, 1), (3, 1), (4, 2), (4, 4), (6, 3))
    kv = heads // groups
    d = w.pick(32, 40, 64, 64, 64, 80, 96, 128, 128, 192, 256, 8, 5, 33)
    v_width = d if w.chance(0.8) else w.pick(8, 32, 64, 72)
    w.sizes |= {"B": SMALL_SIZES, "L": LENGTHS}
    self_, past = w.chance(0.4), w.chance(0.4)
    if past:
        w.sizes["P"] = (0, 1, 2, 7, 63, 64, 65, 130)
        w.sums["T"] = ("P", "L") if self_ else ("P", "S")
    if not self_:
        w.sizes["S"] = LENGTHS
    keys = "L" if self_ else "S"
    total = "T" if past else keys
    w.work = heads * (d + v_width)
    folded = w.chance(0.4)
    parts = [_heads(w, n, h, rows, width, folded)
             for n, h, rows, width in (("q", heads, "L", d), ("k", kv, keys, d), ("v", kv, keys, v_width))]  # fmt: skip
    q, k, v = parts
    if past:
        k = w.add("Concat", w.input("past_k", ["B", kv, "P", d]), k, axis=2)
        v = w.add("Concat", w.input("past_v", ["B", kv, "P", v_width]), v, axis=2)
        w.outputs += [k, v] if w.chance(0.7) else []
    if groups > 1:
        k, v = (_repeated(w, x, kv, groups, n) for x, n in ((k, d), (v, v_width)))
    k = w.add("Transpose", k, perm=[0, 1, 3, 2])
    scale = w.const(exact(d**-0.5), np.float32)
    if w.chance(0.5):
        s = w.add("Mul", w.add("MatMul", q, k), scale)
    else:
        s = w.add("MatMul", w.add("Mul", q, scale), k)
    s = _masked(w, s, heads, total)
    y = w.add("MatMul", w.add("Softmax", s, axis=-1), v)
    if w.chance(0.6):
        y = w.add("Transpose", y, perm=[0, 2, 1, 3])
        if w.chance(0.7):
            y = w.add("Reshape", y, w.const([0, 0, heads * v_width]))
    w.outputs.append(y)


def _heads(w: Writer, name: str, heads: int, rows: str, width: int, folded: bool) -> str:
    if not folded:
        return w.input(name, ["B", heads, rows, width])
    x = w.add("Reshape", w.input(name, ["B", rows, heads * width]), w.const([0, 0, heads, width]))
    return w.add("Transpose", x, perm=[0, 2, 1, 3])


def _repeated(w: Writer, x: str, kv: int, groups: int, width: int) -> str:
    five = w.add("Unsqueeze", x, w.const([2]))
    many = w.add("Expand", five, w.const([1, 1, groups, 1, 1]))
    return w.add("Reshape", many, w.const([0, kv * groups, -1, width]))


def _masked(w: Writer, s: str, heads: int, total: str) -> str:
    """Return the scores without a mask, with an added or selecting mask, or with a triangle."""
    kind = w.pick("none", "add", "add", "where", "causal", "causal")
    if kind == "none":
        return s
    of: dict[int | str, int | str] = {"H": heads, "T": total}
    form = [of.get(x, x) for x in w.pick(*MASKS)]
    if kind == "add":
        return w.add("Add", s, w.input("bias", form))
    low = w.const(w.pick(-1e4, -np.inf, -3e38), np.float32)
    if kind == "where":
        return w.add("Where", w.input("mask", form, TensorProto.BOOL), s, low)
    sizes = w.add("Shape", s, start=2)
    ones = w.add("ConstantOfShape", sizes, value=numpy_helper.from_array(np.array([1], np.float32)))
    rows, columns = (w.add("Gather", sizes, w.const(a)) for a in (0, 1))
    lower = w.add("Trilu", ones, w.add("Sub", columns, rows), upper=0)
    return w.add("Where", w.add("Cast", lower, to=TensorProto.BOOL), s, low)


# -- rows --------------------------------------------------------------------------------------------------------------


def rows(w: Writer) -> None:
    """Add an element-wise operator, then a reduction, norm or scan over some axes, perhaps another one."""
    rank = w.pick(1, 2, 2, 3, 3, 4)
    dims: list[int | str] = []
    for name in "ABCD"[:rank]:
        small = prod(d for d in dims if isinstance(d, int)) <= 8
        dims.append(w.pick(1, 2, 3, 7, 8, 33, 64, 256, 300) if small and w.chance(0.25) else name)
    if not any(isinstance(d, str) for d in dims):
        dims[0] = "A"
    w.sizes |= {d: (*LENGTHS, 255, 256, 300, 768, 1025) for d in dims if isinstance(d, str)}
    w.work = 64.0 * prod(d for d in dims if isinstance(d, int))
    x = w.input("x", dims)
    if w.chance(0.3):
        x = w.add("Add", x, w.input("y", [d if w.chance(0.6) else 1 for d in dims]))
    for _ in range(w.pick(1, 1, 2)):
        if w.chance(0.4):
            x = w.activation(x)
        kind = w.pick("reduce", "reduce", "Softmax", "LogSoftmax", "norm", "CumSum", "shift")
        x = _row(w, x, kind, rank)
    if x not in w.inputs:
        w.outputs.append(x)
    if w.chance(0.25):
        _places(w, rank)


def _row(w: Writer, x: str, kind: str, rank: int) -> str:
    axis = w.random.randrange(rank)
    if kind == "reduce":
        op = "Reduce" + w.pick("Sum", "Mean", "Max", "Min", "L2", "LogSumExp", "SumSquare")
        some = w.const(sorted(w.random.sample(range(rank), w.random.randint(1, rank))))
        if w.chance(0.4):  # read again
            return w.add("Sub", x, w.add(op, x, some, keepdims=1))
        y = w.add(op, x, some, keepdims=0)
        w.outputs.append(y)
        return x
    if kind == "CumSum":
        return w.add("CumSum", x, w.const(axis), exclusive=w.pick(0, 0, 1), reverse=w.pick(0, 0, 1))
    if kind == "norm":
        axes = w.const(list(range(axis, rank)))
        centred = w.add("Sub", x, w.add("ReduceMean", x, axes, keepdims=1))
        mean = w.add("ReduceMean", w.add("Mul", centred, centred), axes, keepdims=1)
        return w.add("Div", centred, w.add("Sqrt", w.add("Add", mean, w.const(2.0**-7, np.float32))))
    if kind == "shift":
        return w.add("Sub", x, w.add("ReduceMax", x, w.const([axis]), keepdims=1))
    return w.add(kind, x, axis=axis)


def _places(w: Writer, rank: int) -> None:
    """Add indices of the largest elements of an input itself: rounding must not make ties."""
    axis = w.random.randrange(rank)
    if w.chance(0.5):
        op = w.pick("ArgMax", "ArgMin")
        w.outputs.append(w.add(op, "x", axis=axis, keepdims=w.pick(0, 1), select_last_index=w.pick(0, 1)))
    else:
        y = w.add("TopK", "x", w.const([w.pick(1, 1, 2, 3)]), axis=axis, largest=w.pick(0, 1), outputs=2)
        w.outputs += [y, f"{y}_1"]


# -- bytes -------------------------------------------------------------------------------------------------------------


def bytes_(w: Writer) -> None:
    """Add products or convolutions of quantized numbers whose scales are powers of two: every sum is exact."""
    image = w.chance(0.6)
    c, kind = w.pick(1, 2, 3, 4, 8, 16, 24, 33, 64), w.pick(np.uint8, np.int8)
    w.sizes |= {"N": SMALL_SIZES, "H": SIDES, "W": SIDES} if image else {"M": LENGTHS}
    x = w.input("x", ["N", c, "H", "W"] if image else ["M", c])
    x = _steps(w, x, kind)
    for _ in range(w.pick(1, 1, 2)):
        x, c = _byte_conv(w, x, c) if image else _byte_product(w, x, c)
        x = w.add("Relu", x) if w.chance(0.4) else x
        x = _steps(w, x, kind) if w.chance(0.8) else x
    if image and w.chance(0.3):
        x = _steps(w, w.add("MaxPool", x, kernel_shape=[2, 2], strides=[2, 2], pads=[0, 0, 1, 1]), kind)
    w.outputs.append(x)


def _steps(w: Writer, x: str, kind: Any) -> str:
    scale, zero = w.const(w.pick(2.0**-4, 2.0**-3), np.float32), w.const(w.pick(0, 3, 120, 127), kind)
    return w.add("DequantizeLinear", w.add("QuantizeLinear", x, scale, zero), scale, zero)


def _byte_weights(w: Writer, shape: Sequence[int], axis: int) -> str:
    """Return weights of one scale, or of one scale per result."""
    many = w.chance(0.5)
    n = shape[axis]
    scale = 2.0 ** -w.numbers.integers(5, 7, n) if many else w.pick(2.0**-5, 2.0**-6)
    kind = w.pick(np.int8, np.int8, np.uint8)
    zero = np.zeros(n) if many else 0 if kind is np.int8 else 128
    low, high = (-8, 8) if kind is np.int8 else (120, 136)
    more = {"axis": axis} if many else {}
    kind = np.int8 if many else kind
    low, high = (-8, 8) if many else (low, high)
    return w.add("DequantizeLinear", w.const(w.numbers.integers(low, high, shape), kind),
                 w.const(scale, np.float32), w.const(zero, kind), **more)  # fmt: skip


def _byte_conv(w: Writer, x: str, c: int) -> tuple[str, int]:
    group = w.pick(1, 1, 1, c)
    out = c if group == c else w.pick(1, 3, 8, 16, 33, 64)
    k, s = w.pick(1, 1, 3, 3, 2, 5), w.pick(1, 1, 2)
    w.work = max(w.work, out * (c // group) * k * k / s / s)
    more: dict[str, Any] = {"group": group, "strides": [s, s], "pads": [w.pick(0, k // 2) for _ in range(4)]}
    return w.add("Conv", x, _byte_weights(w, (out, c // group, k, k), 0), **more), out


def _byte_product(w: Writer, x: str, c: int) -> tuple[str, int]:
    n = w.pick(*WIDTHS)
    w.work = max(w.work, c * n)
    return w.add("MatMul", x, _byte_weights(w, (c, n), 1)), n


FAMILIES: Mapping[str, Callable[[Writer], None]] = {
    "convolution": convolution, "product": product, "attention": attention, "rows": rows, "bytes": bytes_,
}  # fmt: skip


def random_layer(family: str, seed: int, count: int = 5) -> Layer:
    """Return the layer of a family and a seed, with at most ``count`` shapes."""
    w = Writer(seed)
    FAMILIES[family](w)
    return w.layer(family, count, exact=family == "bytes")
