"""Small graphs that together need every kind of kernel: products, windows, rows, attention, sorting, tables, bytes.

Each graph has several results of a kind, so that a target needs a handful of compilations. Tests compile them for every
processor, and ``benchmarks.replay`` compares their kernels before and after a change.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx.parser
from onnx import TensorProto, helper, numpy_helper

from polydyn.testing.halves import rounded

GRAPHS: dict[str, tuple[str, str]] = {
    "products": (
        "float[M, 64] x, float[B, M, K] p, float[B, K, 20] q, float[1, 300] one, float[M, 300] z",
        "a = MatMul (x, w64_48) a1 = Add (a, v48) o0 = Relu (a1) o1 = MatMul (p, q) o2 = MatMul (one, w300_33) "
        "h = Mul (x, x) o3 = MatMul (h, w64_3) o4 = Gemm <transA = 1> (x, x) o5 = MatMul (z, w300_56)",
    ),
    "words": (
        "float[M, 64] x, float[N, 16, H, 9] c",
        "u, us, uz = DynamicQuantizeLinear (x) i = MatMulInteger (u, b64_48, uz) o0 = Cast <to = 1> (i) "
        "d = DequantizeLinear <axis = 1> (n64_48, s48) o1 = MatMul (x, d) "
        "k, ks, kz = DynamicQuantizeLinear (c) j = ConvInteger <pads = [1, 1, 1, 1]> (k, b24_16_3_3, kz) "
        "o2 = Cast <to = 1> (j)",
    ),
    "rounded": (
        "bfloat16[M, 256] x, float[M, 64] f, float16[M, 64] g",
        "o0 = MatMul (x, r256_256) o1 = MatMul (f, w64_48) o2 = MatMul (g, g64_48) o3 = Relu (g) o4 = Exp (x)",
    ),
    "windows": (
        "float[N, 16, H, 9] x, float[N, 1600, 5, 4] many",
        "o0 = Conv <pads = [1, 1, 1, 1]> (x, w24_16_3_3) o1 = Conv <strides = [2, 2]> (x, w24_16_1_1) "
        "o2 = Conv <group = 16, pads = [1, 1, 1, 1]> (x, w16_1_3_3) "
        "o3 = ConvTranspose <strides = [2, 2]> (x, w16_5_2_2) "
        "o4 = MaxPool <kernel_shape = [3, 3], strides = [2, 2], pads = [1, 1, 1, 1]> (x) o5 = GlobalAveragePool (x) "
        "o6 = Conv <strides = [2, 2]> (many, w180_1600_1_1)",
    ),
    "rows": (
        "float[M, 64] x, float[B, M, K] p, int64[M] i",
        "o0 = Softmax (x) o1 = LayerNormalization (x, v64) o2 = ReduceSum <keepdims = 0> (p, first) "
        "o3 = ReduceMax <keepdims = 0> (p, last) o4 = Transpose <perm = [2, 0, 1]> (p) o5 = Gather (w64_48, i) "
        "o6 = CumSum (x, axis) s, o7 = TopK (x, three) g = Gather (w64_48, i) o8 = ReduceSum <keepdims = 0> (g, first)",
    ),
    "attention": (
        "float[B, M, 16] x, float[B, K, 16] y, float[B, 1, 16] one, float[M, K] mask",
        "t = Transpose <perm = [0, 2, 1]> (y) a = MatMul (x, t) b = Add (a, mask) c = Softmax (b) o0 = MatMul (c, y) "
        "d = MatMul (one, t) e = Softmax (d) o1 = MatMul (e, y)",
    ),
    "halves": (
        "float16[M, 256] x, float16[B, M, 64] p, float16[B, 64, K] q, float16[N, 32, H, 16] c",
        "o0 = MatMul (x, g256_512) r = Relu (o0) o1 = MatMul (r, g512_64) o2 = MatMul (p, q) "
        "o3 = LayerNormalization (x, g256) o4 = Conv <pads = [1, 1, 1, 1]> (c, g64_32_3_3) "
        "o5 = Conv <group = 32, pads = [1, 1, 1, 1]> (c, g32_1_3_3) o6 = ReduceMean <keepdims = 0> (c, pixels) "
        "o7 = Softmax (x)",
    ),
    "attention of halves": (
        "float16[B, 4, M, 64] q, float16[B, 4, K, 64] k, float16[B, 4, K, 64] v, float16[M, K] mask",
        "t = Transpose <perm = [0, 1, 3, 2]> (k) a = MatMul (q, t) b = Add (a, mask) c = Softmax (b) "
        "o0 = MatMul (c, v)",
    ),
    "few rows": (
        "float16[1, 1024] x, float[1, 1024] y, float[4, 1024] z, float[1, M] a, float[M, 40] b",
        "o0 = MatMul (x, g1024_512) o1 = MatMul (y, w1024_256) o2 = MatMul (z, w1024_256) o3 = MatMul (a, b)",
    ),
    "bytes": (
        "float[M, 256] x, float[1, 256] one",
        "u, us, uz = DynamicQuantizeLinear (x) i = MatMulInteger (u, b256_128, uz) o0 = Cast <to = 1> (i) "
        "k, ks, kz = DynamicQuantizeLinear (one) j = MatMulInteger (k, b256_128, kz) o1 = Cast <to = 1> (j)",
    ),
    "tables": (
        "float[M, 16] x, int64[K, 1] i, float[K, 16] u, int64[M, 16] j, float[M, 16] w, float[B, M] r",
        'o0 = ScatterND (x, i, u) o1 = ScatterND <reduction = "add"> (x, i, u) '
        'o2 = ScatterElements <axis = 0, reduction = "max"> (x, j, w) o3 = GatherElements <axis = 0> (x, j) '
        "o4 = CumSum <exclusive = 1, reverse = 1> (r, axis) o5, k = TopK (r, three) o6 = ReduceSum <keepdims = 0> (r)",
    ),
}
"""Inputs and nodes. A constant is named by its kind and its sides: weights w, vectors v, bytes b, integers of 4 bits n,
halves g, bfloat16 r, scales s.
"""


def constant(name: str) -> onnx.TensorProto:
    """Return the constant of a name."""
    r = np.random.default_rng(len(name))
    if name in ("first", "last", "three", "axis", "pixels"):
        value = np.array({"first": [0], "last": [-1], "three": [1], "axis": 1, "pixels": [2, 3]}[name])
        return numpy_helper.from_array(value, name)
    kind, shape = name[0], [int(n) for n in name[1:].split("_")]
    if kind in "bn":
        low, high = (-128, 128) if kind == "b" else (-8, 8)
        made = r.integers(low, high, shape)
        return helper.make_tensor(
            name, TensorProto.INT8 if kind == "b" else TensorProto.INT4, shape, made.ravel().tolist()
        )
    values = r.standard_normal(shape) / (8 if len(shape) > 1 else 1)
    if kind == "r":
        return helper.make_tensor(name, TensorProto.BFLOAT16, shape, values.ravel().tolist())
    return numpy_helper.from_array(values.astype(np.float16 if kind == "g" else np.float32), name)


@cache
def graph(name: str) -> onnx.ModelProto:
    """Return a graph of ``GRAPHS`` as a model."""
    inputs, nodes = GRAPHS[name]
    outputs = ", ".join(f"float[] o{k}" for k in range(9) if f"o{k} " in nodes)
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => ({outputs}) {{ {nodes} }}'
    made = onnx.parser.parse_model(text)
    known = {i.name for i in made.graph.input} | {x for n in made.graph.node for x in n.output}
    needed = dict.fromkeys(x for n in made.graph.node for x in n.input if x not in known)
    made.graph.initializer.extend(map(constant, needed))
    for x in made.graph.output:
        x.type.ClearField("tensor_type")
    return made


def operands(model: onnx.ModelProto, sizes: dict[str, int]) -> dict[str, Any]:
    """Return random inputs of a model at the sizes of its symbols."""
    r = np.random.default_rng(0)
    given = {}
    for i in model.graph.input:
        t = i.type.tensor_type
        shape = [d.dim_value if d.HasField("dim_value") else sizes[d.dim_param] for d in t.shape.dim]
        dtype = {TensorProto.BFLOAT16: "bfloat16", TensorProto.FLOAT16: "float16"}.get(t.elem_type, "float32")
        whole = t.elem_type == TensorProto.INT64
        given[i.name] = r.integers(0, 3, shape) if whole else rounded(r.standard_normal(shape, np.float32), dtype)
    return given
