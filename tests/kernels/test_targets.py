"""Kernels of all kinds for every processor of this architecture: compiled always, and run where the processor can.

One model has several results of a kind, so that a target costs a handful of compilations.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx import TensorProto, helper, numpy_helper

from polydyn.build import compiler
from polydyn.build.compiler import architecture_of, find_compiler, required_features
from polydyn.build.features import architecture, machine_features
from polydyn.compiler import Options, compile_artifact, plan_program
from polydyn.graph import reference
from polydyn.graph.dtypes import numpy_dtype
from polydyn.graph.expand import import_model
from polydyn.runtime.opening import open_program
from polydyn.testing.halves import rounded

TARGETS = ("cpu:amx-emulated", "cpu:avx512", "cpu:avx2")
KINDS: dict[str, tuple[str, str]] = {
    "products": (
        "float[M, 64] x, float[B, M, K] p, float[B, K, 20] q, float[1, 300] one",
        "a = MatMul (x, w64_48) a1 = Add (a, v48) o0 = Relu (a1) o1 = MatMul (p, q) o2 = MatMul (one, w300_33) "
        "h = Mul (x, x) o3 = MatMul (h, w64_3) o4 = Gemm <transA = 1> (x, x)",
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
}
"""Inputs and nodes. A constant is named by its kind and its sides: weights w, vectors v, bytes b, integers of 4 bits n,
halves g, bfloat16 r, scales s.
"""
SIZES = ({"M": 33, "B": 2, "K": 19, "N": 2, "H": 7}, {"M": 1, "B": 1, "K": 1, "N": 1, "H": 3})
ROUNDS = {"words": 2e-3, "rounded": 2.0**-6}


def constant(name: str) -> onnx.TensorProto:
    r = np.random.default_rng(len(name))
    if name in ("first", "last", "three", "axis"):
        value = np.array({"first": [0], "last": [-1], "three": [1], "axis": 1}[name])
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
def model(kind: str) -> onnx.ModelProto:
    inputs, nodes = KINDS[kind]
    outputs = ", ".join(f"float[] o{k}" for k in range(9) if f"o{k} " in nodes)
    text = f'<ir_version: 10, opset_import: ["" : 21]> g ({inputs}) => ({outputs}) {{ {nodes} }}'
    made = onnx.parser.parse_model(text)
    known = {i.name for i in made.graph.input} | {x for n in made.graph.node for x in n.output}
    needed = dict.fromkeys(x for n in made.graph.node for x in n.input if x not in known)
    made.graph.initializer.extend(map(constant, needed))
    for x in made.graph.output:
        x.type.ClearField("tensor_type")
    return made


def can_run(target: str) -> bool:
    """Whether this processor executes code for a target."""
    return set(required_features(find_compiler(), target)) <= machine_features()


def operands(made: onnx.ModelProto, sizes: dict[str, int]) -> dict[str, Any]:
    r = np.random.default_rng(0)
    given = {}
    for i in made.graph.input:
        t = i.type.tensor_type
        shape = [d.dim_value if d.HasField("dim_value") else sizes[d.dim_param] for d in t.shape.dim]
        dtype = {TensorProto.BFLOAT16: "bfloat16", TensorProto.FLOAT16: "float16"}.get(t.elem_type, "float32")
        whole = t.elem_type == TensorProto.INT64
        given[i.name] = r.integers(0, 3, shape) if whole else rounded(r.standard_normal(shape, np.float32), dtype)
    return given


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compile_for_every_processor_and_run_where_it_is(
    kind: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if architecture_of(target) != architecture():
        pytest.skip("for another architecture")
    if not can_run(target):  # types and intrinsics are checked without optimisation too, in a third of the time
        monkeypatch.setattr(compiler, "FLAGS", tuple("-O0" if f == "-O2" else f for f in compiler.FLAGS))
    made, graph = model(kind), import_model(model(kind))
    artifact, _ = compile_artifact(
        made, target=target, options=Options(precision="bf16" if kind == "rounded" else None)
    )
    if not can_run(target):
        return
    program, close = open_program(artifact, threads=2), ROUNDS.get(kind, 1e-4)
    for sizes in SIZES:
        given = operands(made, sizes)
        want, got = reference.evaluate(graph, given), program.run(given)
        for name, x in want.items():
            y = got[name].view(numpy_dtype(graph.tensors[name].dtype)).astype(np.float64)
            largest = max(1.0, np.abs(x.astype(np.float64)).max(initial=0))
            np.testing.assert_allclose(y, x.astype(np.float64), rtol=0, atol=close * largest, err_msg=f"{name} {sizes}")


def test_the_matrix_unit_multiplies_rows_that_are_stored_as_words() -> None:
    """Pairs of bfloat16 and quads of bytes that lie in memory are loaded as they are."""
    kernels = [
        k for kind in ("rounded", "words")
        for k in plan_program(model(kind), target=TARGETS[0], options=Options(precision="bf16")).kernels
    ]  # fmt: skip
    unit = [k for k in kernels if k.amx]
    assert {x for k in unit for x in ("pd_amx_add_bf16", "pd_amx_add_quads") if x in k.text} == {
        "pd_amx_add_bf16", "pd_amx_add_quads",
    }  # fmt: skip
    assert sum("rows copied" not in " ".join(k.notes) and "pd_amx_add_bf16" in k.text for k in unit) == 1
