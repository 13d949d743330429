"""Attention as one kernel: matched over primitives, right at every length, and separate kernels if it does not match.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import onnx
import onnx.parser
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

import polydyn
from polydyn.codegen.passes.tiles import pieces
from polydyn.compiler import Options, plan_program
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.graph.expand import import_model
from polydyn.program.assemble import build_artifact
from polydyn.runtime.artifact import Artifact
from polydyn.runtime.opening import open_program
from polydyn.runtime.program import Program
from polydyn.testing import models
from tests.support.marks import slow

D = 16
SHAPES = [(1, 1, 1), (1, 8, 8), (2, 7, 7), (1, 33, 33), (2, 65, 65), (1, 130, 130), (3, 1, 31), (1, 13, 64), (0, 4, 4)]


def attention(heads: int, kv_heads: int | None = None, *, mask: str = "", rotary: bool = False) -> onnx.ModelProto:
    """Build q [B, Q, heads*D], k and v [B, K, kv_heads*D] to [B, Q, heads*D], as exporters write it."""
    kv = kv_heads or heads
    nodes: list[onnx.NodeProto] = []
    constants: dict[str, np.ndarray] = {
        "split_q": np.array([0, 0, heads, D]), "split_k": np.array([0, 0, kv, D]), "merge": np.array([0, 0, heads * D]),
        "scale": np.array(D**-0.5, np.float32),
    }  # fmt: skip

    def add(op: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        nodes.append(helper.make_node(op, list(inputs), [output], name=f"n_{output}", **attributes))
        return output

    for x, split in (("q", "split_q"), ("k", "split_k"), ("v", "split_k")):
        add("Transpose", [add("Reshape", [x, split], f"{x}4")], f"{x}h", perm=[0, 2, 1, 3])
    q, k, v = "qh", "kh", "vh"
    if rotary:
        q = rotated(add, constants, q)
    if kv != heads:
        k, v = (repeated(add, constants, x, heads // kv, heads) for x in (k, v))
    add("Transpose", [k], "kt", perm=[0, 1, 3, 2])
    s = add("Mul", [add("MatMul", [q, "kt"], "s0"), "scale"], "s1")
    if mask:
        s = add("Add", [s, "mask"], "s2")
    o = add("MatMul", [add("Softmax", [s], "p", axis=-1), v], "o")
    add("Reshape", [add("Transpose", [o], "ot", perm=[0, 2, 1, 3]), "merge"], "y")
    shapes = {"q": ["B", "Q", heads * D], "k": ["B", "K", kv * D], "v": ["B", "K", kv * D]}
    if mask:
        shapes["mask"] = ["B", 1, "Q" if mask == "full" else 1, "K"]
    inputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in shapes.items()]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["B", "Q", heads * D])]
    values = [numpy_helper.from_array(a, n) for n, a in constants.items()]
    graph = helper.make_graph(nodes, "attention", inputs, outputs, values)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def rotated(add: Any, constants: dict[str, np.ndarray], q: str) -> str:
    """Add q * 0.6 + rotate_half(q) * 0.8."""
    half = D // 2
    constants |= {f"at{i}": np.array([i]) for i in (0, half, D)}
    constants |= {"last": np.array([3]), "cos": np.array(0.6, np.float32), "sin": np.array(0.8, np.float32)}
    low = add("Slice", [q, "at0", f"at{half}", "last"], "low")
    high = add("Neg", [add("Slice", [q, f"at{half}", f"at{D}", "last"], "high")], "minus_high")
    turned = add("Mul", [add("Concat", [high, low], "turned", axis=3), "sin"], "turned_sin")
    return str(add("Add", [add("Mul", [q, "cos"], "q_cos"), turned], "q_rotated"))


def repeated(add: Any, constants: dict[str, np.ndarray], x: str, times: int, heads: int) -> str:
    """Repeat each key-value head for ``times`` query heads."""
    constants |= {"two": np.array([2]), "ones": np.array([1, 1, times, 1, 1]), "heads": np.array([0, heads, -1, D])}
    wide = add("Expand", [add("Unsqueeze", [x, "two"], f"{x}_u"), "ones"], f"{x}_e")
    return str(add("Reshape", [wide, "heads"], f"{x}_r"))


CASES = {
    "plain": attention(4),
    "mask": attention(4, mask="row"),
    "full mask": attention(3, mask="full"),
    "grouped queries": attention(4, 2, mask="row"),
    "one kv head": attention(4, 1),
    "rotary": attention(2, rotary=True),
}


def feeds(model: onnx.ModelProto, b: int, q: int, k: int, seed: int = 0) -> dict[str, np.ndarray]:
    r = np.random.default_rng(seed)
    sizes = {"B": b, "Q": q, "K": k}
    out = {}
    for i in model.graph.input:
        shape = [sizes[d.dim_param] if d.dim_param else d.dim_value for d in i.type.tensor_type.shape.dim]
        out[i.name] = r.standard_normal(shape).astype(np.float32)
        if i.name == "mask":
            out[i.name] = np.where(r.random(shape) < 0.3, np.float32(-1e9), np.float32(0))
    return out


@cache
def _artifact(name: str) -> Artifact:
    return build_artifact(plan_program(CASES[name]))[0]


def compiled(name: str, threads: int | None = None) -> Program:
    """Return the program of a case, compiled once for all tests."""
    return open_program(_artifact(name), threads=threads)


SLOW_CASES = ("full mask", "grouped queries", "one kv head")


@pytest.mark.parametrize("name", [slow(n) if n in SLOW_CASES else n for n in CASES])
def test_one_kernel_and_right_at_every_length(name: str) -> None:
    model = CASES[name]
    program = compiled(name, 2)
    assert sum(label.startswith("attention ") for label in program.launches) == 1
    assert not any(label.startswith("contract ") for label in program.launches)
    session = ort.InferenceSession(model.SerializeToString())
    for shape in SHAPES:
        f = feeds(model, *shape)
        if 0 in shape:  # ONNX Runtime does not reshape empty tensors
            assert program.run(f)["y"].shape == (shape[0], *f["q"].shape[1:])
            continue
        expected = session.run(None, f)[0]
        np.testing.assert_allclose(program.run(f)["y"], expected, rtol=0, atol=3e-6, err_msg=f"{name} {shape}")


def test_rows_masked_everywhere_give_what_the_model_gives() -> None:
    model = CASES["full mask"]
    f = feeds(model, 1, 5, 9)
    f["mask"][0, 0, 2] = -np.inf
    expected = ort.InferenceSession(model.SerializeToString()).run(None, f)[0]
    got = compiled("full mask").run(f)["y"]
    assert np.isnan(expected[0, 2]).all() and np.isnan(got[0, 2]).all()
    np.testing.assert_allclose(np.delete(got, 2, 1), np.delete(expected, 2, 1), rtol=0, atol=3e-6)


def test_apart_and_together_agree_and_threads_do_not_change_bits() -> None:
    model = CASES["mask"]
    f = feeds(model, 2, 37, 41)
    apart = polydyn.compile(model, options=Options(without=frozenset({"attention"})))
    assert sum(label.startswith("contract ") for label in apart.launches) == 2
    one, two = (compiled("mask", t).run(f)["y"] for t in (1, 2))
    np.testing.assert_array_equal(one, two)
    np.testing.assert_allclose(apart.run(f)["y"], one, rtol=0, atol=3e-6)


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8], {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (7,), 8: (8,)}),
        ([1, 2, 3, 4, 5, 6], {3: (2, 1), 5: (5,)}),
        (list(range(1, 13)), {3: (2, 1), 7: (4, 2, 1), 10: (8, 2), 11: (11,)}),
        ([3, 4], {3: (3,), 4: (4,)}),
        ([1, 2, 3], {3: (3,)}),
        ([5], {5: (5,)}),
    ],
)
def test_few_functions_compute_every_number_of_rows(rows: list[int], expected: dict[int, tuple[int, ...]]) -> None:
    made = pieces(rows)
    assert list(made) == rows and all(sum(parts) == r for r, parts in made.items())
    assert {r: made[r] for r in expected} == expected


def test_five_functions_compute_eight_numbers_of_rows() -> None:
    (kernel,) = (k for k in plan_program(CASES["plain"], target="cpu:avx512").kernels if k.name[0] == "a")
    assert kernel.text.count("noinline") == 6, "powers of two, the two largest numbers, and the softmax of all"


def test_weights_that_others_read_stay_apart() -> None:
    model = attention(2)
    model.graph.output.append(helper.make_tensor_value_info("p", TensorProto.FLOAT, ["B", 2, "Q", "K"]))
    program = polydyn.compile(model)
    assert not any(label.startswith("attention ") for label in program.launches)
    reasons = [r for x in program.manifest["launches"] for r in x["reasons"]]
    assert "no attention: others read what its rows give" in "\n".join(reasons)
    f = feeds(model, 2, 5, 6)
    expected = ort.InferenceSession(model.SerializeToString()).run(["y", "p"], f)
    got = program.run(f)
    np.testing.assert_allclose(got["y"], expected[0], rtol=0, atol=3e-6)
    np.testing.assert_allclose(got["p"], expected[1], rtol=0, atol=3e-6)


def test_a_wrong_scale_is_seen() -> None:
    """The tolerance is tight enough to detect a head whose scale is off by 1 %."""
    model = CASES["plain"]
    f = feeds(model, 1, 9, 9)
    expected = ort.InferenceSession(model.SerializeToString()).run(None, f)[0]
    off = {**f, "q": f["q"] * np.where(np.arange(4 * D) < D, np.float32(1.01), np.float32(1))}
    assert np.abs(compiled("plain").run(off)["y"] - expected).max() > 3e-5


def test_scores_of_several_reductions_are_packed_and_prefetched() -> None:
    """A convolution in place, a softmax of its rows and a product are one kernel; taps are a loop inside channels."""
    r, node = np.random.default_rng(0), helper.make_node
    nodes = [
        node("Conv", ["x", "first"], ["a"], strides=[4]),
        node("Conv", ["a", "taps"], ["c"], strides=[2]),
        node("Relu", ["c"], ["g"]),
        node("Transpose", ["g"], ["t"], perm=[0, 2, 1]),
        node("Softmax", ["t"], ["n"], axis=-1),
        node("MatMul", ["n", "w"], ["y"]),
    ]
    sizes = {"first": (48, 1, 5), "taps": (48, 48, 2), "w": (48, 24)}
    constants = {n: r.standard_normal(s, np.float32) / 4 for n, s in sizes.items()}
    made = models.model("taps", nodes, {"x": ["N", 1, "L"]}, constants)
    program, other = polydyn.compile(made), ort.InferenceSession(made.SerializeToString())
    assert [x.kernel.split("_")[0] for x in program.explain(N=2, L=99).launches] == ["contract", "attention"]
    for shape in ((1, 1, 25), (3, 1, 1033)):
        x = r.standard_normal(shape, np.float32)
        np.testing.assert_allclose(program.run({"x": x})["y"], other.run(None, {"x": x})[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("nodes", "attentions"),
    [
        ("s = MatMul (x, w) p = LayerNormalization (s, g) y = MatMul (p, w)", 0),
        ("s = MatMul (x, w) e = Elu (s) p = LayerNormalization (e, g) y = MatMul (p, w)", 0),
        ("s = MatMul (x, w) e = Relu (s) m = ReduceSum (e, last) p = Div (e, m) y = MatMul (p, w)", 0),
        ("s = MatMul (x, w) p = LogSoftmax (s) y = MatMul (p, w)", 0),
        ("s = MatMul (x, w) e = Exp (s) m = ReduceSum (e, last) p = Div (e, m) y = MatMul (p, w)", 1),
        ("s = MatMul (x, w) p = Softmax (s) q = Mul (p, g) y = MatMul (q, w)", 1),
        ("a = MatMul (x, w) b = Softmax (a) c = MatMul (b, w) d = Softmax (c) y = MatMul (d, w)", 1),
        ("a = MatMul (x, w) b = Softmax (a) c = MatMul (b, w) d = Softmax (c) e = MatMul (d, w) f = Softmax (e) "
         "y = MatMul (f, w)", 2),
    ],
)  # fmt: skip
def test_an_attention_has_a_softmax_over_its_scores(nodes: str, attentions: int) -> None:
    """The value product of one attention that is also the score product of the next belongs to the first."""
    text = f'<ir_version: 10, opset_import: ["" : 18]> g (float[L, 16] x) => (float[L, 16] y) {{ {nodes} }}'
    made = onnx.parser.parse_model(text)
    r = np.random.default_rng(0)
    constants = {"w": r.random((16, 16), np.float32), "g": r.random(16, np.float32), "last": np.array([-1])}
    made.graph.initializer.extend(numpy_helper.from_array(a, n) for n, a in constants.items())
    kinds = [g.kind for g in fusion_plan(rewrite_graph(import_model(made))).groups]
    assert kinds.count("attention") == attentions


def test_attentions_in_a_row_are_right() -> None:
    node = helper.make_node
    nodes = [node("Transpose", ["x0"], ["t"], perm=[1, 0])]
    for k in range(3):
        nodes += [node("MatMul", [f"x{k}", "t"], [f"s{k}"]), node("Softmax", [f"s{k}"], [f"p{k}"])]
        nodes.append(node("MatMul", [f"p{k}", "x0"], [f"x{k + 1}" if k < 2 else "y"]))
    made = models.model("row", nodes, {"x0": ["L", 8]}, {})
    program, other = polydyn.compile(made), ort.InferenceSession(made.SerializeToString())
    for length in (0, 1, 7, 33):
        x = {"x0": np.random.default_rng(length).standard_normal((length, 8), np.float32)}
        np.testing.assert_allclose(program.run(x)["y"], other.run(None, x)[0], rtol=1e-4, atol=1e-5)
