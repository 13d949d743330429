"""Programs whose time is compared with torch's: products, layers, attention, rows, convolutions, bytes, models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.gpu import sizes, weights
from benchmarks.gpu.halves import NUMPY_TYPE
from benchmarks.gpu.programs import LIMITS, Case, model, node
from benchmarks.gpu.transformers import build
from benchmarks.gpu.twins import CONFIGS

STITCH = ((4096, 768), (1024, 1024), (1023, 1021), (77, 3000), (1, 100), (8192, 128), (65536, 1024))
BANDWIDTH = 1 << 26
"""Number of elements that shows a device's bandwidth."""
ATTENTION = {
    (12, 64): ((8, 512), (1, 128), (32, 128), (1, 2048)), (32, 128): ((1, 2048),),
}  # fmt: skip
"""Maps (heads, size of a head) to (batch, length)."""
DECODING = ((12, 64), (32, 128))
"""(heads, size of a head) of a decoder's step: few queries of many keys."""
EPILOGUES = {
    "plain": ([], "y"), "bias": ([node("Add", "t", "c")], "t"),
    "relu": ([node("Add", "t", "c", to="u"), node("Relu", "u")], "t"),
    "gelu": ([node("Add", "t", "c", to="u"), node("Div", "u", "root", to="v"), node("Erf", "v", to="e"),
              node("Add", "e", "one", to="f"), node("Mul", "u", "f", to="g"), node("Mul", "g", "half")], "t"),
    "residual": ([node("Add", "t", "c", to="u"), node("Add", "u", "r")], "t"),
}  # fmt: skip
"""Operations after a product with constant weights: nodes, and the product's name."""
LAYER_ROWS = (1, 16, 128, 512, 4096)
LAYERS: dict[tuple[str, int, int], Sequence[int]] = {
    ("bias", 768, 768): LAYER_ROWS, ("gelu", 768, 3072): (*LAYER_ROWS, *sizes.FTUNER), ("relu", 768, 3072): LAYER_ROWS,
    ("residual", 3072, 768): (*LAYER_ROWS, *sizes.FTUNER), ("bias", 768, 2304): (*LAYER_ROWS, *sizes.DIETCODE),
    ("plain", 4096, 4096): (1, 2, 8, 16), ("plain", 14336, 4096): (1, 16),
    ("plain", 1024, 3072): [32 * n for n in sizes.LENGTHS], ("plain", 4096, 1024): [32 * n for n in sizes.LENGTHS],
}  # fmt: skip
"""Maps (epilogue, K, N) of layers with constant weights to row counts."""
CONVOLUTIONS = ((64, 64, 3, 56), (256, 64, 1, 56), (128, 128, 3, 28), (512, 512, 3, 7), (3, 64, 7, 224))
"""(channels, filters, window, side) in resnet50."""


def timed(quick: bool) -> Iterator[Case]:
    """Yield all timed cases; those that compile longest come first."""
    if not quick:
        yield from real()
    yield from products(quick)
    yield from layers(quick)
    yield from attention(quick)
    yield from stitched(quick)
    yield from bytes_(quick)
    if not quick:
        yield from convolutions()


def products(quick: bool) -> Iterator[Case]:
    """Yield products of two arguments: BERT's layers, large ones, samples of Vortex's ranges."""
    dims, rows = (sizes.TRANSFORMER[:1], (5, 128)) if quick else (sizes.TRANSFORMER, sizes.ROWS)
    matrices = {"a": ("float16", ["M", "K"]), "b": ("float16", ["K", "N"])}
    spread = [{"M": m, "N": n, "K": k} for m in (rows if quick else (512, 16, 1, 4096, *rows)) for n, k in dims]
    papers = [{"M": m, "N": n, "K": k} for _, m, n, k in sizes.vortex(0 if quick else 12)]
    large = [{"M": m, "N": n, "K": k} for m, n, k in (() if quick else sizes.LARGE_PRODUCTS)]
    ranges = unique([{"M": 33, "N": 64, "K": 72}, *large, *spread, *papers])
    yield Case("gemm", "gemm", model([node("MatMul", "a", "b")], matrices), ranges, "float16", 1, "matmul")
    turned = [node("Transpose", "b", to="t"), node("MatMul", "a", "t")]
    some = unique([ranges[0], *large, *spread[::5]])
    along = model(turned, matrices | {"b": ("float16", ["N", "K"])})
    yield Case("gemm_nt", "gemm", along, some, "float16", 1, "matmul_nt")


def unique(shapes: Sequence[Mapping[str, int]]) -> list[Mapping[str, int]]:
    """Return the shapes without repeats, in order."""
    return list({tuple(s.items()): s for s in shapes}.values())


def layers(quick: bool) -> Iterator[Case]:
    """Yield products with constant weights and their epilogues."""
    for (after, k, n), rows in LAYERS.items():
        if quick and (after, k, n) != ("gelu", 768, 3072):
            continue
        k, n, rows = (72, 64, (5, 33)) if quick else (k, n, rows)
        shapes = unique([{"M": m} for m in rows])
        made = layer(after, k, n)
        yield Case(f"layer_{after}_{k}x{n}", "layers", made, shapes, "float16", int(quick), f"layer_{after}")


def layer(after: str, k: int, n: int) -> Any:
    """Build x w over x [M, k] with constant weights, in float16, and one of ``EPILOGUES``."""
    nodes, product = EPILOGUES[after]
    used = {i for x in nodes for i in x.input}
    constants = {x: a for x, a in weights.dense(k, n).items() if x == "w" or x in used}
    constants |= {x: np.float16(a) for x, a in {"root": 2**0.5, "one": 1, "half": 0.5}.items() if x in used}
    given = {"x": ("float16", ["M", k])} | ({"r": ("float16", ["M", n])} if "r" in used else {})
    return model([node("MatMul", "x", "w", to=product), *nodes], given, **constants)


def attention(quick: bool) -> Iterator[Case]:
    """Yield softmax(q k' / root + mask) v of several heads, with a key mask or a causal mask; few queries, many keys.
    """
    for (heads, size), shapes in ATTENTION.items():
        for mask in ("none", "keys", "causal"):
            if (quick and (heads, mask) != (12, "causal")) or (heads == 32 and mask == "keys"):
                continue
            heads_, lengths = (2, ((1, 65),)) if quick else (heads, shapes)
            wanted = [{"B": b, "L": n} for b, n in lengths]
            name = f"attention_{mask}_{heads_}x{size}"
            made = attention_model(heads_, size, mask)
            yield Case(name, "attention", made, wanted, "float16", int(quick), f"attention_{mask}", limit=6e-3)
    for heads, size in ((2, 64),) if quick else DECODING:
        few = ((1, 1, 2000),) if quick else ((1, 1, 4096), (1, 8, 4096), (4, 1, 2048), (1, 1, 32768))
        made, wanted = attention_model(heads, size, "none", "T"), [{"B": b, "L": n, "T": t} for b, n, t in few]
        name = f"attention_decode_{heads}x{size}"
        yield Case(name, "attention", made, wanted, "float16", int(quick), "attention_none", limit=6e-3)


def attention_model(heads: int, size: int, mask: str, keys: str = "L") -> Any:
    """Build attention in float16 of queries [B, heads, L, size]; ``keys``: the dim of keys and values, "T" if not L.

    A causal mask requires both dims to be equal.
    """
    dims, others = (("float16", ["B", heads, n, size]) for n in ("L", keys))
    given: dict[str, tuple[str, Sequence[Any]]] = {"q": dims, "k": others, "v": others}
    constants: dict[str, Any] = {"scale": np.float16(size**-0.5)}
    nodes = [node("Transpose", "k", to="kt", perm=[0, 1, 3, 2]), node("MatMul", "q", "kt", to="s"),
             node("Mul", "s", "scale", to="x0")]  # fmt: skip
    if mask == "keys":
        given["mask"] = ("float16", ["B", 1, 1, keys])
        nodes.append(node("Add", "x0", "mask", to="x"))
    elif mask == "causal":
        constants |= {"zero": np.array(0), "one": np.array(1), "first": np.array([0]), "second": np.array([1]),
                      "low": np.array(-np.inf, np.float16)}  # fmt: skip
        nodes += [node("Shape", "q", to="l1", start=2, end=3), node("Squeeze", "l1", to="l"),
                  node("Range", "zero", "l", "one", to="r0"), node("Unsqueeze", "r0", "second", to="r"),
                  node("Unsqueeze", "r0", "first", to="c"), node("LessOrEqual", "c", "r", to="keep"),
                  node("Where", "keep", "x0", "low", to="x")]  # fmt: skip
    nodes += [node("Softmax", "x" if mask != "none" else "x0", to="p", axis=-1), node("MatMul", "p", "v")]
    return model(nodes, given, **constants)


def stitched(quick: bool) -> Iterator[Case]:
    """Yield row operations and element-wise operations."""
    some = [{"M": m, "N": n} for m, n in (((3, 70), (16, 256)) if quick else ((3, 70), *STITCH))]
    for t in LIMITS:
        x = {"x": (t, ["M", "N"])}
        yield Case(f"softmax_{t}", "stitch", model([node("Softmax", "x", axis=-1)], x), some, t, 1, "softmax")
        vectors = x | {"s": (t, ["N"]), "b": (t, ["N"])}
        normal = model([node("LayerNormalization", "x", "s", "b", axis=-1)], vectors)
        yield Case(f"layernorm_{t}", "stitch", normal, some, t, 1, "layernorm")
    heads = [{"M": m} for m in ((5, 33) if quick else (49152, 384))]
    short = {"x": ("float16", ["M", 64]), "s": ("float16", [64]), "b": ("float16", [64])}
    normal = model([node("LayerNormalization", "x", "s", "b", axis=-1)], short)
    yield Case("layernorm_64", "stitch", normal, heads, "float16", 1, "layernorm")
    columns = [{"M": m, "N": n} for m, n in (((70, 33),) if quick else ((4096, 64), (49, 2048), (4096, 768)))]
    total = model([node("ReduceSum", "x", "axis", keepdims=0)], {"x": ("float32", ["M", "N"])}, axis=[0])
    yield Case("column_sum", "stitch", total, columns, "float32", 1, "column_sum")
    flat = {"x": ("float16", ["N"]), "z": ("float16", ["N"])}
    length = [{"N": 1 << 10}] if quick else [{"N": BANDWIDTH}, {"N": 1 << 20}]
    yield Case("add", "stitch", model([node("Add", "x", "z")], flat), length, "float16", int(quick), "add")
    half = {"x": np.float16(2**-0.5), "one": np.float16(1), "half": np.float16(0.5)}
    nodes = [node("Mul", "z", "x", to="v"), node("Erf", "v", to="e"), node("Add", "e", "one", to="f"),
             node("Mul", "z", "f", to="g"), node("Mul", "g", "half")]  # fmt: skip
    gelu = model(nodes, {"z": ("float16", ["N"])}, **half)
    yield Case("gelu", "stitch", gelu, length, "float16", int(quick), "gelu")


def bytes_(quick: bool) -> Iterator[Case]:
    """Yield bytes times constant bytes; float16 quantized to 8-bit floats times constants of them."""
    k, n, rows = (64, 32, (33,)) if quick else (4096, 4096, (32, 128, 1024, 4096))
    made = model([node("MatMulInteger", "x", "w")], {"x": ("int8", ["M", k])}, w=weights.whole(k, n))
    shapes = [{"M": m} for m in rows]
    yield Case(f"bytes_{k}x{n}", "bytes", made, shapes, "int8", int(quick), "bytes")
    yield Case(f"float8_{k}x{n}", "bytes", float8_layer(k, n), shapes, "float8", int(quick), "float8")


def float8_layer(k: int, n: int) -> Any:
    """Build x w over x [M, k] and constant weights, both quantized to float8_e4m3fn."""
    w, scale = weights.scaled("w", k, n), np.float16(weights.FLOAT8_SCALE)
    nodes = [
        node("QuantizeLinear", "x", "scale", "zero", to="xq"), node("DequantizeLinear", "xq", "scale", "zero", to="xd"),
        node("DequantizeLinear", "wq", "scale", "zero", to="wd"), node("MatMul", "xd", "wd"),
    ]  # fmt: skip
    small = NUMPY_TYPE["float8"]
    wq, zero = (w.astype(np.float32) / scale).astype(small), np.zeros((), small)
    return model(nodes, {"x": ("float16", ["M", k])}, wq=wq, zero=zero, scale=scale)


def convolutions() -> Iterator[Case]:
    """Yield convolutions of resnet50, 1 and 32 images, and samples of Vortex's ranges."""
    for channels, filters, window, side in CONVOLUTIONS:
        yield convolution(channels, filters, window, side, 2 if window == 7 else 1, (32, 1))
    for images, side, window, channels, filters in sizes.vortex_convolutions(3):
        yield convolution(channels, filters, window, side, 1, (images,))


def convolution(channels: int, filters: int, window: int, side: int, stride: int, images: Sequence[int]) -> Case:
    """Return one layer with padding and constant weights, for any number of images."""
    w = weights.convolution(channels, filters, window)
    layer = node("Conv", "x", "w", pads=[window // 2] * 4, strides=[stride] * 2)
    made = model([layer], {"x": ("float16", ["B", channels, side, side])}, w=w)
    name = f"conv_{channels}_{filters}_{window}x{window}_{side}"
    return Case(name, "conv", made, [{"B": n} for n in images], "float16", 0, f"conv_{stride}")


def real() -> Iterator[Case]:
    """Yield BERT-base and GPT-2 in float16, compiled once, at 25 random shapes."""
    shapes = [{"B": b, "L": n} for b, n in sizes.batches(25)]
    for name in CONFIGS:
        yield Case(name, "real", build(name, "float16"), shapes, "float16", 0, name, limit=3e-2)
