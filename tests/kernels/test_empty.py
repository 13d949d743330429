"""Sizes that are 0 in every call: tensors without elements have no kernel, and sums over nothing are numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx.parser
import pytest
from onnx.reference import ReferenceEvaluator

import polydyn
from polydyn.compiler import plan_program
from polydyn.fusion.pipeline import rewrite_graph
from polydyn.graph.expand import import_model
from polydyn.graph.ir import Compute, Concat

VALUES = (
    "axis = Constant <value_ints = [1]> () none = Constant <value_ints = [4, 0]> () one = Constant <value_int = 1> () "
)
CASES: dict[str, tuple[str, str]] = {
    "products": (
        "float[A, 0] x, float[0, 5] w, float[5] b, float[A, 5] z, float[5, 0] v",
        "m = MatMul (x, w) n = Add (m, b) o0 = Relu (n) p = MatMul (z, v) o1 = Relu (p) "
        'o2 = Einsum <equation = "ij,jk->ki"> (x, w)',
    ),
    "windows": (
        "float[A, 0, 5, 5] x, float[2, 0, 3, 3] w, float[2] b, float[A, 2, 5, 5] z, float[0, 2, 3, 3] v",
        "o0 = Conv (x, w, b) o1 = Conv (z, v) o2 = MaxPool <kernel_shape = [2, 2]> (x)",
    ),
    "reductions": (
        "float[A, 0] x, float[0] s",
        "o0 = ReduceSum (x, axis) o1 = ReduceProd <keepdims = 0> (x, axis) o2 = ReduceSum <keepdims = 0> (x) "
        "o3 = Softmax (x) o4 = LayerNormalization (x, s) c = CumSum (x, one) o5 = Exp (c)",
    ),
    "pieces": (
        "float[A, 4] x, float[0, 3] w, int64[A, 0] i, float[A, 0] e",
        "t, u = Split <axis = 1> (x, none) o0 = MatMul (u, w) r = Exp (t) o1 = Concat <axis = 1> (u, r, u) "
        "o2 = Concat <axis = 1> (u, o0, t) o3 = Concat <axis = 1> (u, u) o4 = ScatterElements <axis = 1> (x, i, e) "
        "o5 = GatherElements <axis = 1> (x, i)",
    ),
    "attention": (
        "float[A, 5, 8] x, float[A, 8, 0] k, float[A, 0, 6] v, float[A, 8, 7] l, float[A, 7, 0] w",
        "s = MatMul (x, k) p = Softmax (s) o0 = MatMul (p, v) t = MatMul (x, l) q = Softmax (t) o1 = MatMul (q, w)",
    ),
}


def parsed(inputs: str, nodes: str) -> Any:
    outputs = ", ".join(f"float[] o{k}" for k in range(9) if f"o{k} " in nodes)
    text = f'<ir_version: 10, opset_import: ["" : 18]> g ({inputs}) => ({outputs}) {{ {VALUES} {nodes} }}'
    made = onnx.parser.parse_model(text)
    for x in made.graph.output:
        x.type.tensor_type.ClearField("shape")
    return made


def operands(model: Any, a: int) -> dict[str, np.ndarray]:
    shapes = {i.name: [d.dim_value if d.HasField("dim_value") else a for d in i.type.tensor_type.shape.dim]
              for i in model.graph.input}  # fmt: skip
    return {n: np.ones(s, np.int64 if n == "i" else np.float32) for n, s in shapes.items()}


@pytest.mark.parametrize("name", CASES)
def test_they_are_what_the_reference_says(name: str) -> None:
    made = parsed(*CASES[name])
    program = polydyn.compile(made, threads=1)
    for a in (0, 1, 3):
        given = operands(made, a)
        with np.errstate(all="ignore"):  # the reference divides by nothing
            wants = ReferenceEvaluator(made).run(None, given)
        for (output, got), want in zip(program.run(given).items(), wants, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=output)
            assert got.shape == want.shape, output
    for target in ("cpu:avx512", "cuda:sm_80"):
        plan_program(made, target=target)


@pytest.mark.parametrize("name", CASES)
def test_no_node_reads_what_is_empty(name: str) -> None:
    graph = rewrite_graph(import_model(parsed(*CASES[name])))
    for n in graph.nodes:
        assert not any(0 in graph.tensors[t].shape for t in n.inputs), n.output
        assert isinstance(n, Concat) or (isinstance(n, Compute) and 0 not in n.reduction), n.output


def test_a_slice_by_computed_sizes_that_is_always_empty() -> None:
    nodes = ("two = Constant <value_ints = [2]> () n = Shape (x) L = Slice (n, axis, two) h = Div (L, two) "
             "b = Slice (x, h, L, axis) a = Slice (x, h, h, axis) o0 = Concat <axis = 1> (b, a)")  # fmt: skip
    program = polydyn.compile(parsed("float[A, L] x", nodes), threads=1)
    x = np.arange(15, dtype=np.float32).reshape(3, 5)
    np.testing.assert_array_equal(program.run({"x": x})["o0"], x[:, 2:])
