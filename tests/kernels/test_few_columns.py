"""Contractions with few columns run vectors along the reduction, at every size."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import NodeProto

from polydyn.checked import CheckedProgram
from polydyn.compiler import compile, plan_program
from tests.support.marks import slow
from tests.support.tiny import model, node

RNG = np.random.default_rng(2)
COLUMNS = (1, 2, 3, 6, 10)


def dense(n: int) -> list[NodeProto]:
    return [node("MatMul", f"x{n} w{n}", f"m{n}"), node("Add", f"m{n} b{n}", f"a{n}"), node("Relu", f"a{n}", f"y{n}")]


@pytest.mark.parametrize("steps", [slow(32), 45, slow(64), 1500])
def test_few_columns(steps: int) -> None:
    """A kernel for each number of columns, all in one program."""
    w = {f"w{n}": RNG.standard_normal((steps, n)).astype(np.float32) for n in COLUMNS}
    b = {f"b{n}": RNG.standard_normal(n).astype(np.float32) for n in COLUMNS}
    nodes = [x for n in COLUMNS for x in dense(n)]
    inputs = {f"x{n}": ("float32", ["M", steps]) for n in COLUMNS}
    program = compile(model(nodes, inputs, [f"y{n}" for n in COLUMNS], {**w, **b}), threads=2)
    assert len(program.launches) == len(COLUMNS), "they stay apart"
    for rows in (0, 1, 2, 7, 33, 130):
        x = {n: RNG.standard_normal((rows, steps)).astype(np.float32) for n in COLUMNS}
        got = program.run({f"x{n}": a for n, a in x.items()})
        for n, a in x.items():
            expected = np.maximum(a.astype(np.float64) @ w[f"w{n}"] + b[f"b{n}"], 0)
            np.testing.assert_allclose(got[f"y{n}"], expected, rtol=0, atol=1e-6 * steps, err_msg=f"{n} columns")


def test_dynamic_columns_of_unit_stride() -> None:
    """Both operands are computed: queries against a few keys, the keys read in place."""
    nodes = [node("Transpose", "k", "t", perm=[0, 2, 1]), node("MatMul", "q t", "y")]
    m = model(nodes, {"q": ("float32", ["B", "Q", 48]), "k": ("float32", ["B", 5, 48])}, ["y"])
    program = compile(m, threads=1)
    for b, n in ((1, 1), (3, 7), (2, 64)):
        q, k = (RNG.standard_normal(s).astype(np.float32) for s in ((b, n, 48), (b, 5, 48)))
        np.testing.assert_allclose(program.run({"q": q, "k": k})["y"], q @ k.transpose(0, 2, 1), rtol=0, atol=1e-4)


SIZES = (
    *((b, 5, n, 33) for n in (0, 1, 2, 3, 4, 5, 8, 9, 16, 17, 49) for b in (1, 3)),
    *((2, m, n, 40) for m in (0, 1, 2, 3, 4, 6, 7, 13) for n in (1, 3, 4, 6)),
    *((2, 7, n, k) for k in (0, 1, 7, 8, 15, 16, 31, 130, 900) for n in (1, 2, 4, 7, 20)),
    (0, 7, 3, 40),
)  # fmt: skip
"""Batches, rows, columns, steps."""


def computed() -> object:
    """Build relu(a b + c), every size symbolic."""
    nodes = [node("MatMul", "a b", "m"), node("Add", "m c", "s"), node("Relu", "s", "y")]
    inputs = {"a": ("float32", ["B", "M", "K"]), "b": ("float32", ["B", "K", "N"]), "c": ("float32", ["N"])}
    return model(nodes, inputs, ["y"])


def feeds(b: int, m: int, n: int, k: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    x = {s: RNG.standard_normal(d).astype(np.float32) for s, d in (("a", (b, m, k)), ("b", (b, k, n)), ("c", (n,)))}
    return x, np.maximum(x["a"].astype(np.float64) @ x["b"] + x["c"], 0)


@pytest.mark.parametrize("target", ["cpu", slow("cpu:avx2")])
def test_computed_columns(target: str) -> None:
    program = compile(computed(), threads=2, target=target)
    for size in SIZES:
        x, expected = feeds(*size)
        bound = 1e-6 * max(10, size[3])
        np.testing.assert_allclose(program.run(x)["y"], expected, rtol=0, atol=bound, err_msg=str(size))


@pytest.mark.slow
def test_computed_columns_touch_nothing_else() -> None:
    """The bits equal the normal build's, with no access out of bounds, in both versions."""
    checked, plain = CheckedProgram(plan_program(computed())), compile(computed(), threads=1)
    for size in ((2, 13, 3, 40), (1, 7, 4, 17), (2, 6, 1, 8), (1, 9, 7, 19), (2, 3, 2, 30), (1, 2, 50, 9)):
        x, _ = feeds(*size)
        assert np.array_equal(checked.run(x)["y"], plain.run(x)["y"]), size


def test_sizes_choose_the_version() -> None:
    program = compile(computed(), threads=1)

    def kernel(m: int, n: int, k: int) -> str:
        return program.explain(B=2, M=m, N=n, K=k).launches[0].kernel.partition("_")[0]

    assert kernel(9, 4, 40) == kernel(4, 2, 8) == kernel(1, 1, 40) == "dot"
    assert kernel(9, 5, 40) == kernel(3, 4, 40) == kernel(9, 4, 7) == "contract"


def test_partial_sums_are_added_only_where_the_split_kernel_runs() -> None:
    """Long reductions into few columns: the table's first row serves some of the sizes at which slices exist."""
    inputs = {"a": ("float32", ["M", "K"]), "b": ("float32", ["K", 3])}
    program, ran = compile(model([node("MatMul", "a b", "y")], inputs, ["y"]), threads=2), set[str]()
    for m, k in ((1, 40000), (3, 20000), (4, 14000), (5, 90000), (64, 12000), (0, 20000), (9, 40)):
        x = {s: RNG.standard_normal(d).astype(np.float32) for s, d in (("a", (m, k)), ("b", (k, 3)))}
        expected = x["a"].astype(np.float64) @ x["b"]
        np.testing.assert_allclose(program.run(x)["y"], expected, rtol=0, atol=1e-6 * k, err_msg=str((m, k)))
        ran.add(program.explain(M=m, K=k).launches[0].kernel.partition("_")[0])
    assert {"dot", "split"} <= ran
