"""Former bugs of CUDA kernels, one test each; on the strict emulation."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from onnx import helper

from polydyn.codegen.kernel import Kernel
from polydyn.lowering.place import PlacedGroup
from tests.support.cuda_groups import Arrays, first_fit, placed, plan_of, run, version
from tests.support.marks import slow

node = helper.make_node
RNG = np.random.default_rng(13)


def named(word: str, p: PlacedGroup, env: dict[str, int]) -> Kernel:
    """Return the version of this name if it may be launched, else the first that fits."""
    return version(p, word)


@pytest.mark.parametrize("word", ["mma_64x64x32_4_16_16_wide", "counted_", "split_mma", "gemv_8"])
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_an_operand_that_is_the_same_at_every_step(side: str, word: str) -> None:
    """Copies of it had no offset for steps that it does not run, and no product with it was built."""
    k, n = 520, 72
    a = {"rows": (1,), "columns": (k,)}[side]
    inputs: dict[str, tuple[Any, ...]] = {"x": ("M", *a), "c": (k if side == "rows" else 1, n)}
    spread = {"rows": ("x", [1, k]), "columns": ("c", [k, n])}[side]
    operands = ["e", "c"] if side == "rows" else ["x", "e"]
    nodes = [node("Expand", [spread[0], "shape"], ["e"]), node("MatMul", operands, ["y"])]
    plan = plan_of(nodes, inputs, ["y"], {"shape": np.array(spread[1])}, "float16")
    made = placed(plan)
    for m in (1, 7):
        feeds: Arrays = {n: RNG.standard_normal((m if d[0] == "M" else d[0], d[1])).astype(np.float16) for n, d in
                         inputs.items()}  # fmt: skip
        got, _ = run(plan, feeds, partial(named, word), made)
        x, c = (feeds[n].astype(np.float64) for n in "xc")
        want = np.broadcast_to(x, (m, k)) @ np.broadcast_to(c, (k, n))
        np.testing.assert_allclose(got["y"].astype(np.float64), want, 2e-3, 2e-3 * np.abs(want).max())


@pytest.mark.parametrize("m", [1, 3])
def test_a_known_number_of_one_row_or_one_column(m: int) -> None:
    """With split-K its axis is split: the operand without other loops is read along one slice."""
    k, n = 1024, 72 if m == 1 else 1
    plan = plan_of([node("MatMul", ["x", "c"], ["y"])], {"x": (m, k), "c": (k, n)}, ["y"], {}, "float16")
    made = placed(plan)
    feeds: Arrays = {
        "x": RNG.standard_normal((m, k)).astype(np.float16), "c": RNG.standard_normal((k, n)).astype(np.float16),
    }  # fmt: skip
    want = feeds["x"].astype(np.float64) @ feeds["c"].astype(np.float64)
    words = sorted({v.version for p in made for v in p.kernels if "counted" in v.version})
    assert words
    for w in words[:1]:
        got, _ = run(plan, feeds, partial(named, w), made)
        np.testing.assert_allclose(got["y"].astype(np.float64), want, 2e-3, 2e-3 * np.abs(want).max())


@pytest.mark.parametrize(("op", "inputs"), [
    ("MatMul", {"x": ("M", 24), "c": (24, 0)}), ("Gemm", {"x": (24, 0), "c": (24, 8)}),
])  # fmt: skip
def test_a_known_number_of_no_results(op: str, inputs: dict[str, tuple[Any, ...]]) -> None:
    """Steps of no columns are zero bytes apart, like the steps of an operand that is equal at every step."""
    plan = plan_of([node(op, ["x", "c"], ["y"], **({"transA": 1} if op == "Gemm" else {}))], inputs, ["y"])
    feeds = {n: np.zeros([3 if s == "M" else s for s in d], np.float32) for n, d in inputs.items()}
    assert run(plan, feeds)[0]["y"].shape == ((3, 0) if op == "MatMul" else (0, 8))


@pytest.mark.parametrize("arch", ["sm_80", slow("sm_90a")])
@pytest.mark.parametrize("spread", ["q", "k", "v", "heads"])
def test_attention_of_operands_that_are_the_same_along_an_axis(spread: str, arch: str) -> None:
    """Copies had no offset for the digits that such an operand does not run."""
    dims = {"q": ["B", 2, 9, 16], "k": ["B", 2, 70, 16], "v": ["B", 2, 70, 16]}
    whole = {n: [1, *d[1:]] for n, d in dims.items()}
    of = "k" if spread == "heads" else spread
    dims[of][3 if spread == "heads" else 2] = 1
    nodes = [
        node("Expand", [of, "shape"], ["e"]),
        node("Transpose", ["e" if of == "k" else "k"], ["t"], perm=[0, 1, 3, 2]),
        node("MatMul", ["e" if of == "q" else "q", "t"], ["s"]), node("Softmax", ["s"], ["p"]),
        node("MatMul", ["p", "e" if of == "v" else "v"], ["y"]),
    ]  # fmt: skip
    plan = plan_of(nodes, {n: tuple(d) for n, d in dims.items()}, ["y"], {"shape": np.array(whole[of])}, "float16")
    kernels = placed(plan, arch)
    assert len(kernels) == (3 if spread in ("q", "k") else 1), "scores of no rows or no keys are kernels of their own"
    feeds = {n: RNG.standard_normal([3 if s == "B" else s for s in d]).astype(np.float16) for n, d in dims.items()}
    q, k, v = (np.broadcast_to(feeds[n].astype(np.float64), (3, *whole[n][1:])) for n in "qkv")
    e = np.exp((x := q @ k.swapaxes(-1, -2)) - x.max(-1, keepdims=True))
    got, _ = run(plan, feeds, partial(first_fit, arch=arch), kernels)
    np.testing.assert_allclose(got["y"].astype(np.float64), e / e.sum(-1, keepdims=True) @ v, 0, 5e-3)


def test_reductions_of_no_steps() -> None:
    """A window of no taps shares nothing: their number was a divisor, and no model with a known size of 0 compiled."""
    nodes = [node("ReduceSum", ["x", "axes"], ["y"], keepdims=0), node("Conv", ["z", "w"], ["u"], pads=[1] * 4)]
    constants = {"axes": np.array([1, 2]), "w": np.zeros((16, 0, 3, 3), np.float32)}
    plan = plan_of(nodes, {"x": ("N", 0, 5, 8), "z": ("N", 0, 5, 5)}, ["y", "u"], constants)
    feeds: Arrays = {"x": np.zeros((2, 0, 5, 8), np.float32), "z": np.zeros((2, 0, 5, 5), np.float32)}
    got, _ = run(plan, feeds)
    assert got["y"].shape == (2, 8) and got["u"].shape == (2, 16, 5, 5) and not got["y"].any() and not got["u"].any()


@pytest.mark.parametrize("side", ["rows", "columns"])
def test_an_operand_that_is_one_number(side: str) -> None:
    """A product without rows whose other operand runs no steps either had nothing to copy along the reduction."""
    k, n = 72, 24
    shape, inputs = (
        ([k, n], {"x": ("M", k), "c": (1, 1)}) if side == "columns" else ([9, k], {"x": (k, "N"), "c": (1, 1)})
    )
    operands = ["x", "e"] if side == "columns" else ["e", "x"]
    nodes = [node("Expand", ["c", "shape"], ["e"]), node("MatMul", operands, ["y"])]
    plan = plan_of(nodes, inputs, ["y"], {"shape": np.array(shape)})
    for size in (1, 8):
        x, c = RNG.standard_normal((size, k) if side == "columns" else (k, size)), RNG.standard_normal((1, 1))
        feeds: Arrays = {"x": x.astype(np.float32), "c": c.astype(np.float32)}
        e = np.broadcast_to(c, shape)
        got, _ = run(plan, feeds)
        np.testing.assert_allclose(got["y"], x @ e if side == "columns" else e @ x, 1e-4, 1e-4)
