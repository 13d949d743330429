"""Versions of row kernels: rows on the stack, in scratch, and several passes that store nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest

import polydyn
from polydyn.backends import cpu
from polydyn.build.features import machine_features
from polydyn.checked import CheckedProgram
from polydyn.codegen.cpu.rows import MIN_PAIRED_ROW, PAIRED_BYTES, SHORT_ROW
from polydyn.compiler import plan_program
from polydyn.program.assemble import build_program
from tests.support.tiny import model, node

B = MIN_PAIRED_ROW
Feeds = dict[str, np.ndarray]
LENGTHS = (0, 1, 7, 16, 31, 32, 33, 64, 130)


def softmax(length: int | str, axis: int = -1) -> onnx.ModelProto:
    return model([node("Softmax", "x", "y", axis=axis)], {"x": ("float32", ["B", length])}, ["y"])


def residual_norm(length: int | str) -> onnx.ModelProto:
    """Build a residual sum, normalised over the row and squashed: two reductions over computed rows."""
    nodes = [
        node("Add", "x r", "s"), node("ReduceMean", "s axes", "m"), node("Sub", "s m", "c"), node("Mul", "c c", "q"),
        node("ReduceMean", "q axes", "v"), node("Add", "v eps", "w"), node("Sqrt", "w", "d"), node("Div", "c d", "n"),
        node("Tanh", "n", "y"),
    ]  # fmt: skip
    inputs = {"x": ("float32", ["B", length]), "r": ("float32", ["B", length])}
    return model(nodes, inputs, ["y"], {"axes": np.array([-1]), "eps": np.float32(1e-5)})


def numbers(rows: int, length: int, names: str) -> Feeds:
    rng = np.random.default_rng(rows * 1000 + length)
    return {n: rng.standard_normal((rows, length)).astype(np.float32) for n in names}


def expected(feeds: Feeds) -> np.ndarray:
    x = sum(a.astype(np.float64) for a in feeds.values())
    if len(feeds) == 1:
        e = np.exp(x - x.max(-1, keepdims=True, initial=-np.inf))
        return e / e.sum(-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        c = x - x.sum(-1, keepdims=True) / x.shape[-1]
        return np.tanh(c / np.sqrt((c * c).sum(-1, keepdims=True) / x.shape[-1] + 1e-5))


@pytest.mark.parametrize(("build", "names"), [(softmax, "x"), (residual_norm, "xr")])
def test_both_versions_of_a_symbolic_row_give_the_same_bits(
    build: object, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(build)
    kept = polydyn.compile(build("L"), threads=2)
    monkeypatch.setattr(cpu, "with_system_cache", lambda core: replace(core, l2=2 * 31 * 4))
    bounded = plan_program(build("L"))
    (launch,) = bounded.launches
    assert launch.candidates[0].scratch.evaluate({"B": 4, "L": 10**9, "nth": 1}) <= 2 * (31 * 4 + 64 * 3)
    checked = CheckedProgram(bounded)
    for length in LENGTHS:  # rows of up to 31 elements in scratch, longer ones in passes
        feeds = numbers(5, length, names)
        y = checked.run(feeds)["y"]
        np.testing.assert_allclose(y, expected(feeds), rtol=2e-5, atol=1e-6)
        # with 8 lanes gcc contracts a multiplication and an addition in one text and not in the other
        close = 0.0 if cpu.cpu_target("cpu").width == 16 else 1e-6
        np.testing.assert_allclose(y, kept.run(feeds)["y"], close, close)


def test_pairs_of_rows_are_the_same_ones_for_any_number_of_threads() -> None:
    """Many short rows that fit in caches run two at a time; the last one of an odd number is alone."""
    plan = plan_program(softmax("L"))
    (kernel,) = plan.kernels
    n = SHORT_ROW
    sizes = (B, n), (B - 1, n), (B, n + 1), (PAIRED_BYTES // 8 // n + 1, n)
    assert [kernel.values({"n0": b, "n1": n}, workers=64)["P_t"] for b, n in sizes] == [2, 1, 1, 1], (
        "few, long, and from memory"
    )
    programs, checked = [build_program(plan, threads=n) for n in (1, 2, 5)], CheckedProgram(plan)
    for b, length in ((B + 1, 33), (B, 1), (2 * B + 1, 130), (B, 0)):
        feeds = numbers(b, length, "x")
        y = programs[0].run(feeds)["y"]
        np.testing.assert_allclose(y, expected(feeds), rtol=2e-5, atol=1e-6)
        for other in (*programs[1:], checked):
            np.testing.assert_array_equal(other.run(feeds)["y"], y)


@pytest.mark.parametrize("length", [0, 16, 33])
def test_short_constant_rows_lie_on_the_stack(length: int) -> None:
    plan = plan_program(residual_norm(length))
    assert ("PD_STACK(f32, " in plan.kernels[0].text) == (length > 0)
    assert plan.launches[0].candidates[0].scratch.constant == 0
    feeds = numbers(4, length, "xr")
    np.testing.assert_allclose(CheckedProgram(plan).run(feeds)["y"], expected(feeds), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("length", [2, 3, 4, 5])
def test_rows_of_few_elements_are_lanes(length: int) -> None:
    """With AVX-512, rows of up to four elements; each vector has the same element of 16 rows."""
    nodes = [
        node("Softmax", "x", "p", axis=-1), node("ArgMax", "x", "best", axis=-1, keepdims=0),
        node("ReduceMax", "p axes", "most", keepdims=0),
    ]  # fmt: skip
    m = model(nodes, {"x": ("float32", ["B", length])}, ["p", "best", "most"], {"axes": np.array([-1])})
    plan = plan_program(m, target="cpu:avx512")
    assert all(("vloads" in k.text) == (length <= 4) for k in plan.kernels)
    if "avx512vl" not in machine_features():
        return
    program, checked = build_program(plan, threads=1), CheckedProgram(plan)
    for rows in (0, 1, 15, 16, 17, 100):
        feeds = numbers(rows, length, "x")
        feeds["x"][::7, -1] = np.nan
        feeds["x"][3::7] = 1.5
        got = program.run(feeds)
        np.testing.assert_allclose(got["p"], expected(feeds), rtol=2e-5, atol=1e-6)
        np.testing.assert_array_equal(got["best"], feeds["x"].argmax(-1))
        np.testing.assert_array_equal(got["most"], got["p"].max(-1))
        assert all(np.array_equal(a, got[n], equal_nan=a.dtype.kind == "f") for n, a in checked.run(feeds).items())


def test_long_constant_rows_keep_nothing() -> None:
    plan = plan_program(softmax(cpu.cpu_target("cpu").core.l2 // 4 + 1))
    assert "PD_SCRATCH" not in plan.kernels[0].text and plan.launches[0].candidates[0].scratch.constant == 0


def test_columns_in_lanes_have_row_buffers_side_by_side() -> None:
    """Rows that are strided in memory: the lanes are rows, each with a separate buffer in scratch."""
    nodes = [node("Transpose", "x", "t", perm=[1, 0]), node("Softmax", "t", "s", axis=-1)]
    build = model([*nodes, node("Transpose", "s", "y", perm=[1, 0])], {"x": ("float32", ["L", "B"])}, ["y"])
    plan = plan_program(build)
    (kernel,) = plan.kernels
    assert "vload_f32" in kernel.text and "PD_SCRATCH" in kernel.text and not any("scalar" in n for n in kernel.notes)
    checked = CheckedProgram(plan)
    for rows, length in ((0, 3), (1, 1), (17, 3), (130, 33)):
        feeds = numbers(rows, length, "x")
        want = expected({"x": feeds["x"].T}).T
        np.testing.assert_allclose(checked.run(feeds)["y"], want, rtol=2e-5, atol=1e-6)


def test_rows_made_by_reductions_stay_in_scratch() -> None:
    """A row whose elements are sums is not recomputed."""
    nodes = [node("ReduceSum", "x axes", "s", keepdims=0), node("Softmax", "s", "y", axis=-1)]
    build = model(nodes, {"x": ("float32", ["B", "L", 3])}, ["y"], {"axes": np.array([-1])})
    checked = CheckedProgram(plan_program(build))
    for length in (1, 33):
        x = np.random.default_rng(length).standard_normal((2, length, 3)).astype(np.float32)
        np.testing.assert_allclose(checked.run({"x": x})["y"], expected({"x": x.sum(-1)}), rtol=2e-5, atol=1e-6)
