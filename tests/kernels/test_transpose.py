"""Strided vector loads become blocks that are transposed in registers: the passes, the leaf, whole copies."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnxruntime
import pytest

import polydyn
from polydyn.checked import CheckedProgram
from polydyn.codegen.ir import Body, FlatLoad, For, Store
from polydyn.codegen.passes.transpose import by_blocks, dense_along, transpose_copies, transpose_loads
from polydyn.codegen.show import show
from polydyn.compiler import plan_program
from polydyn.fusion.inline import absorb_permutations
from polydyn.fusion.pipeline import rewrite_graph
from polydyn.graph.expand import import_model
from polydyn.schedules.expr import op
from polydyn.schedules.index import ZERO, Index
from tests.support.tiny import model, node

ix = Index.of
W = 8
GAPS = FlatLoad("float32", "x", ix("s") * "v" * W + "u", W, ix("s"))
DENSE = FlatLoad("float32", "x", ix("u") * "s" + ix("v") * W, W)


def over(var: str, extent: str, *body: Store) -> Body:
    return (For(var, ZERO, ix(extent), body),)


def test_far_loads_come_from_a_block_and_near_ones_stay() -> None:
    loop = over("u", "E", Store("y", ix("u") * "n", op("add", GAPS, op("mul", GAPS, DENSE)), lanes=W))
    text = show(transpose_loads(loop, "u", W))
    assert text.count("pd_transpose_f32") == 1 and text.count("block0") == 4
    assert transpose_loads(loop, "v", W) == loop
    only_near = over("u", "E", Store("y", ix("u") * "n", DENSE, lanes=W))
    assert transpose_loads(only_near, "u", W) == only_near


def test_a_loop_that_only_copies_goes_from_registers_to_its_rows() -> None:
    copy = Store("y", ix("u") * "n" + "c", GAPS, lanes=W, stream=ix("s"))
    text = show(transpose_loads(over("u", "E", copy), "u", W))
    assert text.count("pd_transpose_rows_f32") == 1 and "alloc" not in text and "serial" not in text
    half = replace(copy, mask=ix("m"))  # lanes that are not loaded would be stored
    for other in (half, replace(copy, reduce="sum"), replace(copy, stride=ix(2)), replace(copy, value=op("exp", GAPS))):
        assert "pd_transpose_rows_f32" not in show(transpose_loads(over("u", "E", other), "u", W))


def test_blocks_cover_a_loop_of_any_extent() -> None:
    (blocks,) = by_blocks(over("u", "E", Store("y", ix("u") + 5, DENSE, lanes=W)), "u", W)
    assert isinstance(blocks, For) and isinstance(blocks.body[0], For)
    inner = blocks.body[0]
    (store,) = inner.body
    assert isinstance(store, Store)
    for extent in (0, 1, W - 1, W, W + 1, 3 * W):
        env = {"E": extent}
        seen = [
            store.address.evaluate({"u_block": b, "u": u})
            for b in range(blocks.hi.evaluate(env))
            for u in range(inner.hi.evaluate({**env, "u_block": b}))
        ]
        assert seen == [5 + i for i in range(extent)]


def test_loads_under_a_guard_or_of_what_is_written_stay() -> None:
    guarded = op("where", op("lt", DENSE, DENSE), GAPS, DENSE)
    for store in (Store("y", ix("u") * "n", guarded, lanes=W), Store("x", ix("u") * "n", GAPS, lanes=W)):
        loop = over("u", "E", store)
        assert transpose_loads(loop, "u", W) == loop


def test_a_packed_panel_is_written_by_blocks() -> None:
    loop = over("u", "K", Store("p", ix("u") * W + "c", GAPS, lanes=W))
    assert "pd_transpose_f32" in show(transpose_copies(loop, "u", W))
    wider = over("u", "K", Store("p", ix("u") * 2 * W, GAPS, lanes=W))
    assert transpose_copies(wider, "u", W) == wider


def test_what_counts_as_dense() -> None:
    assert dense_along(GAPS, "u", W) and not dense_along(DENSE, "u", W) and not dense_along(GAPS, "v", W)
    other = FlatLoad("int32", "x", GAPS.address, W, GAPS.stride)
    masked = FlatLoad("float32", "x", GAPS.address, W, GAPS.stride, ix("u"))
    assert not dense_along(other, "u", W) and not dense_along(masked, "u", W)


SIZES = [(0, 3), (1, 1), (1, 40), (16, 16), (15, 17), (33, 31), (61, 300), (130, 7)]


def turned() -> onnx.ModelProto:
    nodes = [node("Transpose", "x", "t", perm=[0, 2, 1]), node("Mul", "t z", "m"), node("Exp", "m", "y")]
    return model(nodes, {"x": ("float32", ["B", "R", "L"]), "z": ("float32", ["B", "L", "R"])}, ["y"])


def operands(batch: int, rows: int, length: int) -> dict[str, np.ndarray]:
    r = np.random.default_rng(rows)
    x, z = (r.standard_normal(s, np.float32) for s in ((batch, rows, length), (batch, length, rows)))
    return {"x": x, "z": z}


@pytest.mark.parametrize("target", ["cpu", "cpu:avx2"])
def test_transposed_operands_at_ugly_sizes(target: str) -> None:
    program = polydyn.compile(turned(), target=target, threads=2)
    assert any("pd_transpose_f32" in text for name, text in program.sources.items() if name.startswith("kernels"))
    for rows, length in SIZES:
        for batch in (1, 3):
            feeds = operands(batch, rows, length)
            want = np.exp(feeds["x"].transpose(0, 2, 1) * feeds["z"])
            np.testing.assert_allclose(program.run(feeds)["y"], want, rtol=3e-6)


@pytest.mark.parametrize("rows", [1, 7, 16, 40])
def test_constant_axes(rows: int) -> None:
    made = model([node("Transpose", "x", "y", perm=[1, 0])], {"x": ("float32", ["R", rows])}, ["y"])
    program = polydyn.compile(made, threads=1)
    for length in (1, 15, 33):
        x = np.random.default_rng(0).standard_normal((length, rows), np.float32)
        assert (program.run({"x": x})["y"] == x.T).all()


def test_transposes_pass_every_check() -> None:
    plain, checked = polydyn.compile(turned(), threads=1), CheckedProgram(plan_program(turned()))
    for rows, length in SIZES:
        feeds = operands(2, rows, length)
        assert np.array_equal(checked.run(feeds)["y"], plain.run(feeds)["y"])


TO_LAST = node("Transpose", "x", "a", perm=[0, 2, 3, 1])
TO_FIRST = {"perm": [0, 3, 1, 2]}
BETWEEN = {
    "a chain": [TO_LAST, node("Sub", "a mean", "b"), node("Mul", "b scale", "c"), node("Sigmoid", "c", "d")],
    "two inputs": [TO_LAST, node("Transpose", "z", "e", perm=[0, 2, 3, 1]), node("Mul", "a e", "b"),
                   node("Mul", "b b", "c"), node("Exp", "c", "d")],
    "a reduction before": [node("MatMul", "x w", "p"), node("Transpose", "p", "a", perm=[0, 2, 3, 1]),
                           node("Sub", "a mean", "b"), node("Sigmoid", "b", "d")],
}  # fmt: skip
"""Nodes from x [N, C, H, W] to d [N, H, W, C]."""


@pytest.mark.parametrize("form", BETWEEN)
def test_maps_between_opposite_transposes_need_neither(form: str) -> None:
    """Converters from channels last write every layer like this."""
    inputs = {n: ("float32", ["N", 3, "H", 5]) for n in ("x", "z" if form == "two inputs" else "x")}
    constants = {"mean": np.float32([1, 2, 3]), "scale": np.float32([0.5, 0.25, 2]), "w": np.eye(5, dtype=np.float32)}
    m = model([*BETWEEN[form], node("Transpose", "d", "y", **TO_FIRST)], inputs, ["y"], constants)
    program = polydyn.compile(m, threads=1)
    assert len(program.launches) == 1
    rng = np.random.default_rng(0)
    session = onnxruntime.InferenceSession(m.SerializeToString(), providers=["CPUExecutionProvider"])
    for n, h in ((2, 7), (1, 1), (0, 3)):
        feeds = {k: rng.standard_normal((n, 3, h, 5)).astype(np.float32) for k in inputs}
        np.testing.assert_allclose(program.run(feeds)["y"], session.run(None, feeds)[0], 1e-5, 1e-6)


def test_a_single_transpose_stays_behind_the_map_before_it() -> None:
    """Its map reads rows in the model's order; moved, it would read columns."""
    graph = rewrite_graph(import_model(model([node("Exp", "x", "a"), node("Transpose", "a", "y", **TO_FIRST)],
                                             {"x": ("float32", ["N", "H", "W", 3])}, ["y"])))  # fmt: skip
    assert [n.output for n in absorb_permutations(graph).nodes] == ["a", "y"]
