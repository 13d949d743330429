"""Products with 4-bit weights: they stay packed in a program, and decode to the model's values."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from polydyn.build.features import machine_features
from polydyn.codegen.ir import Def, FlatLoad, For, Set
from polydyn.codegen.passes.factors import hoist_factors
from polydyn.compiler import plan_program
from polydyn.graph.expand import import_model
from polydyn.graph.reference import evaluate
from polydyn.program.assemble import build_program
from polydyn.program.plan import HostPlan
from polydyn.schedules.expr import Array, Op
from polydyn.schedules.index import ZERO, Index
from polydyn.testing.models import model
from tests.support.quantized import targets

RNG = np.random.default_rng(0)


def packed(n: int, k: int, block: int, zeros: bool, bias: bool = False, bits: int = 4) -> onnx.ModelProto:
    """Build MatMulNBits over random weights of 4 or 8 bits."""
    blocks = -(-k // block)
    constants: dict[str, Array] = {
        "w": RNG.integers(0, 256, (n, blocks, block * bits // 8)).astype(np.uint8),
        "s": RNG.random((n, blocks)).astype(np.float32) / 8,
    }
    names = ["x", "w", "s", "z" if zeros else "", "", "b" if bias else ""]
    constants |= {"z": RNG.integers(0, 256, (n, -(-blocks * bits // 8))).astype(np.uint8)} if zeros else {}
    constants |= {"b": RNG.standard_normal(n).astype(np.float32)} if bias else {}
    attributes: dict[str, Any] = {"K": k, "N": n, "bits": bits, "block_size": block}
    while not names[-1]:
        names.pop()
    nodes = [helper.make_node("MatMulNBits", names, ["h"], domain="com.microsoft", **attributes)]
    nodes.append(helper.make_node("Relu", ["h"], ["y"]))
    return model("packed", nodes, {"x": ["M", k]}, constants)


def by_blocks(n: int, k: int, block: int) -> onnx.ModelProto:
    """Build DequantizeLinear of signed 4-bit integers by blocks of the first axis, and the product with them."""
    weights = helper.make_tensor("w", TensorProto.INT4, [k, n], RNG.integers(-8, 8, k * n))
    scales = RNG.random((k // block, n)).astype(np.float32) / 8
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["f"], axis=0, block_size=block),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    made = model("blocks", nodes, {"x": ["M", k]}, {"s": scales})
    made.opset_import[0].version = 21
    made.graph.initializer.append(weights)
    return made


def agrees(m: onnx.ModelProto, target: str = "cpu", rows: tuple[int, ...] = (0, 1, 2, 7, 9, 65, 70)) -> HostPlan:
    """Check that results equal the reference's up to the order of sums; return the plan for further checks."""
    plan, graph = plan_program(m, target=target), import_model(m)
    program = build_program(plan, target=target, threads=1)
    for count in rows:
        x = RNG.standard_normal((count, m.graph.input[0].type.tensor_type.shape.dim[1].dim_value)).astype(np.float32)
        np.testing.assert_allclose(program.run({"x": x})["y"], evaluate(graph, {"x": x})["y"], rtol=1e-4, atol=1e-4)
    return plan


def bytes_of(plan: HostPlan) -> int:
    return sum(a.nbytes for a in plan.constants.values())


@pytest.mark.parametrize(("zeros", "target"), [pytest.param(False, targets()[-1], id="widest"), (True, targets()[0])])
def test_they_are_decoded_in_registers_for_few_rows_and_in_panels_for_many(zeros: bool, target: str) -> None:
    n, k, block = 50, 96, 32
    plan = agrees(packed(n, k, block, zeros, bias=True), target)
    assert len([x for x in plan.kernels if "M" not in x.name]) == 2
    columns = 64 if target == "cpu:avx2" else 96
    whole = columns * k // 2 + columns * k // block * (5 if zeros else 4) + 4 * n
    assert bytes_of(plan) <= whole, "weights have eight steps in a word, columns filled up to whole panels"


def test_blocks_of_any_whole_number_of_words() -> None:
    agrees(packed(17, 48, 32, zeros=True), rows=(1, 66))  # the last block is half of one
    agrees(packed(3, 128, 128, zeros=False), rows=(1, 66))  # one block is the reduction
    plan = agrees(by_blocks(40, 64, 16), rows=(1, 66))
    assert bytes_of(plan) <= 48 * 64 // 2 + 48 * 4 * 4


@pytest.mark.parametrize(("zeros", "high", "target"), [
    pytest.param(False, 255, targets()[-1], id="widest"), (True, 255, targets()[0]), (False, 247, targets()[0]),
])  # fmt: skip
def test_weights_of_8_bits_are_two_digits(zeros: bool, high: int, target: str) -> None:
    """Bytes up to 247 are digits without an offset."""
    n, k, block = 50, 96, 32
    m = packed(n, k, block, zeros, bias=True, bits=8)
    w = onnx.numpy_helper.to_array(m.graph.initializer[0]).copy()
    w[0, 0, :2] = 0, high
    m.graph.initializer[0].raw_data = np.minimum(w, high).tobytes()
    plan = agrees(m, target)
    assert any("8 bits" in x for x in plan.notes)
    columns = 64 if target == "cpu:avx2" else 96
    assert bytes_of(plan) <= columns * k + columns * k // block * (5 if zeros else 4) + 4 * n
    assert len([x for x in plan.kernels if "M" not in x.name]) == 2


def test_bytes_of_other_forms_stay_bytes_or_become_floats() -> None:
    plan = agrees(packed(17, 48, 32, zeros=True, bits=8), rows=(1, 66))
    assert any("8 bits" in x for x in plan.notes)
    q = RNG.integers(-128, 128, (64, 40)).astype(np.int8)
    constants = {"w": q, "s": RNG.random((2, 40)).astype(np.float32) / 8}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s"], ["f"], axis=0, block_size=32),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    by_rows = model("bytes", nodes, {"x": ["M", 64]}, constants)
    by_rows.opset_import[0].version = 21
    assert any("8 bits" in x for x in agrees(by_rows, rows=(1, 66)).notes)
    by_columns = model("columns", nodes, {"x": ["M", 64]}, {"w": q, "s": RNG.random((1, 40)).astype(np.float32)})
    by_columns.graph.node[0].attribute[1].i = 64
    by_columns.opset_import[0].version = 21
    assert bytes_of(agrees(by_columns, rows=(1,))) >= 64 * 40 * 4, "one scale per column: folded to floats"
    wide = {"w": q.astype(np.int16) * 5, "s": constants["s"]}
    by_rows = model("words", nodes, {"x": ["M", 64]}, wide)
    by_rows.opset_import[0].version = 21
    assert bytes_of(agrees(by_rows, rows=(1,))) >= 64 * 40 * 4


def test_blocks_of_one_word_become_floats() -> None:
    """Scales are one more word of a block: a block of eight steps has no room for them."""
    for n, k, block in ((12, 8, 8), (5, 24, 8), (1, 8, 8)):
        plan = agrees(by_blocks(n, k, block), rows=(1,))
        assert not any("4 bits" in x for x in plan.notes)
    agrees(packed(12, 8, 16, zeros=True), rows=(1,))


def test_blocks_of_parts_of_words_and_far_zero_points_become_floats() -> None:
    plan = agrees(by_blocks(16, 24, 12), rows=(1,))
    assert bytes_of(plan) >= 16 * 24 * 4
    q = RNG.integers(0, 16, (24, 16)).astype(np.uint8)
    constants = {"w": q, "s": RNG.random((3, 16)).astype(np.float32), "z": np.full((3, 16), 200, np.uint8)}
    nodes = [
        helper.make_node("DequantizeLinear", ["w", "s", "z"], ["f"], axis=0, block_size=8),
        helper.make_node("MatMul", ["x", "f"], ["y"]),
    ]
    far = model("far", nodes, {"x": ["M", 24]}, constants)
    far.opset_import[0].version = 21
    assert bytes_of(agrees(far, rows=(1,))) >= 16 * 24 * 4


def test_only_what_no_loop_changes_comes_out_of_a_sum() -> None:
    def load(name: str, at: Index) -> FlatLoad:
        return FlatLoad("float32", name, at)

    def loop(scale: Index) -> For:
        term = Op("float32", "mul", (load("v", Index.of("k")), load("s", scale)))
        value = Op("float32", "mul", (load("x", Index.of("k")), term))
        return For("k", ZERO, Index.of(8), (Set("acc", value, 1, "sum"),))

    outside = hoist_factors((loop(Index.of("b")),))
    assert [type(x) for x in outside] == [Def, For, Set]
    assert outside[-1].value.args[1] == load("s", Index.of("b"))  # type: ignore[union-attr]
    inside = (loop(Index.of("k")),)
    assert hoist_factors(inside) == inside


@pytest.mark.parametrize(("zeros", "target"), [(False, "cpu"), (True, "cpu"), (False, targets()[0])])
def test_rows_rounded_to_bytes_are_multiplied_as_bytes(zeros: bool, target: str) -> None:
    m = packed(50, 96, 32, zeros)
    m.graph.node[0].attribute.append(helper.make_attribute("accuracy_level", 4))
    plan = agrees(m, target, (1, 4, 27))
    dots = [k for k in plan.kernels if "pd_dot_nibbles" in k.text]
    assert len(dots) == int(target == "cpu" and bool({"avx512_vnni", "avx_vnni"} & set(machine_features())))
