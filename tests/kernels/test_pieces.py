"""Pieces of one tensor that a concatenation joins for maps: rotary positions, rolls; on both targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from onnx import helper

import polydyn
from polydyn.checked import CheckedProgram
from polydyn.compiler import plan_program
from polydyn.fusion.plan import FusionPlan
from tests.support.cuda_groups import placed, plan_of, run
from tests.support.marks import slow
from tests.support.tiny import model

node = helper.make_node
Array = np.ndarray[Any, Any]
SHAPES = [(1, 1), (2, 3), (1, 17), (3, 0)]


def rotated(size: int) -> tuple[list[Any], dict[str, Array], dict[str, tuple[Any, ...]]]:
    """Build x cos + (-x2, x1) sin, where x1 and x2 are the halves of x: nodes, constants, inputs."""
    ends = {"zero": 0, "half": size // 2, "end": size, "last": -1}
    nodes = [
        node("Slice", ["x", "half", "end", "last"], ["x2"]), node("Slice", ["x", "zero", "half", "last"], ["x1"]),
        node("Neg", ["x2"], ["m"]), node("Concat", ["m", "x1"], ["r"], axis=-1), node("Mul", ["x", "cos"], ["a"]),
        node("Mul", ["r", "sin"], ["b"]), node("Add", ["a", "b"], ["y"]),
    ]  # fmt: skip
    dims = {"x": ("B", 3, "L", size), "cos": ("B", 1, "L", size), "sin": ("B", 1, "L", size)}
    return nodes, {n: np.array([v]) for n, v in ends.items()}, dims


def rotation(size: int, dtype: str = "float32") -> FusionPlan:
    nodes, constants, dims = rotated(size)
    return plan_of(nodes, dims, ["y"], constants, dtype)


def operands(size: int, batch: int, length: int, dtype: str = "float32") -> tuple[dict[str, Array], Array]:
    rng = np.random.default_rng(size)
    shapes = {"x": (batch, 3, length, size), "cos": (batch, 1, length, size), "sin": (batch, 1, length, size)}
    feeds = {n: rng.standard_normal(s).astype(dtype) for n, s in shapes.items()}
    x, cos, sin = (feeds[n].astype(np.float64) for n in shapes)
    turned = np.concatenate([-x[..., size // 2 :], x[..., : size // 2]], -1)
    return feeds, x * cos + turned * sin


def roll(constant: bool) -> Any:
    """Build exp of x with its last rows moved to the front."""
    rows = 12 if constant else "R"
    nodes = [
        node("Slice", ["x", "three", "far", "zero"], ["x1"]), node("Slice", ["x", "zero", "three", "zero"], ["x2"]),
        node("Concat", ["x1", "x2"], ["r"], axis=0), node("Exp", ["r"], ["y"]),
    ]  # fmt: skip
    ends = {"zero": 0, "three": 3, "far": 2**31 - 1}
    return model(nodes, {"x": ("float32", [rows, "N"])}, ["y"], {n: np.array([v]) for n, v in ends.items()})


@pytest.mark.parametrize("size", [2, slow(16), 20, 64])
def test_a_rotation_is_one_kernel(size: int) -> None:
    nodes, constants, dims = rotated(size)
    made = model(nodes, {n: ("float32", d) for n, d in dims.items()}, ["y"], constants)
    program, checked = polydyn.compile(made, threads=2), CheckedProgram(plan_program(made))
    assert len(program.manifest["launches"]) == 1
    for batch, length in SHAPES:
        feeds, want = operands(size, batch, length)
        np.testing.assert_allclose(program.run(feeds)["y"], want, rtol=3e-6, atol=3e-6)
        assert np.array_equal(checked.run(feeds)["y"], program.run(feeds)["y"])


@pytest.mark.parametrize(("size", "dtype"), [(64, "float16"), (20, "float16"), slow(16, "float32"), (6, "float32")])
def test_halves_that_are_whole_vectors_are_loaded_as_such(size: int, dtype: str) -> None:
    """On CUDA by vectors, other sizes by elements."""
    plan = rotation(size, dtype)
    kernels = placed(plan)
    (p,) = kernels
    wide = p.kernels[0].text
    vectors = size // 2 % (16 // np.dtype(dtype).itemsize) == 0
    assert (wide.count("pd_ldg_wide") == 5 and "pd_ldg(" not in wide) is vectors
    for batch, length in SHAPES:
        feeds, want = operands(size, batch, length, dtype)
        got = [run(plan, feeds, kernels=kernels, reverse=x)[0]["y"] for x in (False, True)]
        assert np.array_equal(*got)
        np.testing.assert_allclose(got[0].astype(np.float64), want, rtol=4e-3, atol=4e-3)


def test_vectors_of_three_pieces_are_loaded_where_all_conditions_hold() -> None:
    """On CUDA, in both orders of warps: a piece under its own condition alone would begin before its tensor."""
    ends = {"zero": 0, "one": 8, "two": 16, "end": 24, "last": -1}
    pairs = (("two", "end"), ("zero", "one"), ("one", "two"))
    nodes = [node("Slice", ["x", a, b, "last"], [f"p{n}"]) for n, (a, b) in enumerate(pairs)]
    nodes += [node("Concat", ["p0", "p1", "p2"], ["r"], axis=-1), node("Mul", ["r", "z"], ["y"])]
    constants = {n: np.array([v]) for n, v in ends.items()}
    plan = plan_of(nodes, {"x": ("B", 24), "z": ("B", 24)}, ["y"], constants, "float16")
    kernels = placed(plan)
    assert len(kernels) == 1 and "pd_ldg(" not in kernels[0].kernels[0].text
    x, z = (np.random.default_rng(0).standard_normal((3, 24)).astype(np.float16) for _ in range(2))
    for reverse in (False, True):
        got, _ = run(plan, {"x": x, "z": z}, kernels=kernels, reverse=reverse)
        np.testing.assert_allclose(got["y"], np.concatenate([x[:, 16:], x[:, :16]], 1) * z, 1e-3, 1e-3)


def test_rolls_of_known_length_are_one_kernel() -> None:
    """Parts of symbolic length are written next to each other."""
    for known in (True, False):
        program = polydyn.compile(roll(known), threads=1)
        assert (len(program.manifest["launches"]) == 1) is known
        for rows, columns in ((12, 1), (12, 35)):
            x = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
            np.testing.assert_allclose(program.run({"x": x})["y"], np.exp(np.roll(x, -3, 0)), rtol=3e-6)


def test_pieces_of_two_tensors_and_outputs_are_joined_in_memory() -> None:
    nodes, constants, dims = rotated(8)
    assert [g.kind for g in plan_of(nodes, dims, ["y"], constants).groups] == ["nest"]
    assert len(plan_of(nodes, dims, ["r", "y"], constants).groups) > 1, "the model gives it back"
    other = [node("Slice", ["cos", "half", "end", "last"], ["x2"]) if n.output[0] == "x2" else n for n in nodes]
    assert len(plan_of(other, {**dims, "cos": dims["x"]}, ["y"], constants).groups) > 1
    summed = [*nodes[:4], node("ReduceSum", ["r", "last"], ["y"], keepdims=0)]
    assert len(plan_of(summed, {"x": dims["x"]}, ["y"], constants).groups) > 1, "a sum reads it"


def rolled(x: str, y: str, places: str, axis: int) -> list[Any]:
    """Build a tensor whose first elements along an axis move to its end."""
    a = {1: "one", 2: "two"}[axis]
    return [node("Slice", [x, places, "far", a], [f"{y}l"]), node("Slice", [x, "zero", places, a], [f"{y}r"]),
            node("Concat", [f"{y}l", f"{y}r"], [y], axis=axis)]  # fmt: skip


def test_shifted_windows_are_read_by_a_product() -> None:
    """Both parts of each of two rolls have their condition in the product's promotion."""
    nodes = [
        *rolled("x", "p", "four", 1), *rolled("p", "q", "three", 2), node("Reshape", ["q", "cut"], ["v"]),
        node("Transpose", ["v"], ["t"], perm=[0, 1, 3, 2, 4, 5]), node("Reshape", ["t", "rows"], ["u"]),
        node("MatMul", ["u", "w"], ["y"]),
    ]  # fmt: skip
    numbers = {"zero": [0], "one": [1], "two": [2], "three": [3], "four": [4], "far": [2**62],
               "cut": [-1, 2, 7, 2, 7, 8], "rows": [-1, 49, 8]}  # fmt: skip
    rng = np.random.default_rng(0)
    w = rng.standard_normal((8, 24)).astype(np.float32)
    constants = {"w": w} | {n: np.array(v) for n, v in numbers.items()}
    made = model(nodes, {"x": ("float32", ["N", 14, 14, 8])}, ["y"], constants)
    program = polydyn.compile(made, threads=1)
    for n in (0, 1, 3):
        x = rng.standard_normal((n, 14, 14, 8)).astype(np.float32)
        cut = np.roll(x, (-4, -3), (1, 2)).reshape(n, 2, 7, 2, 7, 8).transpose(0, 1, 3, 2, 4, 5)
        np.testing.assert_allclose(program.run({"x": x})["y"], cut.reshape(4 * n, 49, 8) @ w, rtol=1e-4, atol=1e-5)
    for target in ("cpu:avx512", "cuda:sm_80"):
        plan_program(made, target=target)


@pytest.mark.parametrize("rows", [8, "H"])
def test_four_pieces_before_a_convolution(rows: int | str) -> None:
    """Focus: every second pixel, four times, as channels. The pieces are equally long if H is even."""
    nodes: list[Any] = []
    for n, (a, b) in enumerate((("zero", "zero"), ("one", "zero"), ("zero", "one"), ("one", "one"))):
        nodes += [node("Slice", ["x", a, "far", "two", "two"], [f"h{n}"]),
                  node("Slice", [f"h{n}", b, "far", "three", "two"], [f"s{n}"])]  # fmt: skip
    nodes += [node("Concat", ["s0", "s1", "s2", "s3"], ["c"], axis=1), node("Conv", ["c", "w"], ["y"], pads=[1] * 4)]
    rng = np.random.default_rng(0)
    w = rng.standard_normal((5, 12, 3, 3)).astype(np.float32)
    numbers = {"zero": 0, "one": 1, "two": 2, "three": 3, "far": 2**62}
    constants = {"w": w} | {n: np.array([v]) for n, v in numbers.items()}
    made = model(nodes, {"x": ("float32", ["N", 3, rows, 10])}, ["y"], constants)
    program, other = polydyn.compile(made, threads=1), ort.InferenceSession(made.SerializeToString())
    for n, h in ((0, 8), (1, 8), (2, 8), *(((1, 2), (3, 26)) if rows == "H" else ())):
        x = {"x": rng.standard_normal((n, 3, h, 10)).astype(np.float32)}
        np.testing.assert_allclose(program.run(x)["y"], other.run(None, x)[0], rtol=1e-4, atol=1e-4)
