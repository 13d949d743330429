"""Long reductions into few results use split-K on the CPU, with the same slices for any number of threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from polydyn.checked import CheckedProgram
from polydyn.codegen.cpu.shares import FEW_TILES, LEAST_SHARES, SHARE_STEPS, share_of_steps
from polydyn.codegen.cpu.split import SHARE_ELEMENTS
from polydyn.compiler import compile, plan_program
from polydyn.runtime.opening import load
from polydyn.runtime.program import Program
from polydyn.schedules.index import Index
from polydyn.schedules.model import SHARES
from tests.support.tiny import model, node

RNG = np.random.default_rng(5)
STEPS, COLUMNS = LEAST_SHARES * SHARE_STEPS + 13, 17
CONSTANTS = {
    "w": (RNG.standard_normal((STEPS, COLUMNS)) / 80).astype(np.float32),
    "few": (RNG.standard_normal((STEPS, 4)) / 80).astype(np.float32),
    "b": RNG.standard_normal(COLUMNS).astype(np.float32),
    "rows": np.array([1]), "columns": np.array([0]), "all": np.array([0, 1]),
}  # fmt: skip
MODEL = model(
    [
        node("MatMul", "x w", "m"), node("Add", "m b", "s"), node("Relu", "s", "y"),
        node("MatMul", "x few", "h"), node("Neg", "h", "dots"), node("MatMul", "p q", "r"), node("Tanh", "r", "z"),
        node("ReduceSum", "u rows", "v", keepdims=0), node("Abs", "v", "row"),
        node("ReduceSum", "u all", "total", keepdims=0), node("ReduceMax", "t columns", "column", keepdims=0),
    ],
    {
        "x": ("float32", ["M", STEPS]), "p": ("float32", ["B", 3, "K"]), "q": ("float32", ["B", "K", 20]),
        "u": ("float32", ["B", "U"]), "t": ("float32", ["K", 24]),
    },
    ["y", "dots", "z", "row", "total", "column"],
    CONSTANTS,
)  # fmt: skip
SPLIT_STEPS = LEAST_SHARES * SHARE_STEPS
SIZES = [
    (0, 1, 0), (1, 0, 9000), (7, 2, 1), (33, 1, SPLIT_STEPS - 1), (8, 3, SPLIT_STEPS), (2, 1, 14_003),
    (9 * FEW_TILES, FEW_TILES + 1, 6200),
]  # fmt: skip
"""M, B, K; U is ten times K."""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Program]:
    """Compile one program per number of threads."""
    path: Path = tmp_path_factory.mktemp("split") / "split.polydyn"
    compile(MODEL, threads=1).save(path)
    return {n: load(path, threads=n) for n in (1, 2, 5)}


def feeds(m: int, b: int, k: int) -> dict[str, np.ndarray]:
    shapes = {"x": (m, STEPS), "p": (b, 3, k), "q": (b, k, 20), "u": (b, 10 * k), "t": (k, 24)}
    small = {"q": 80, "u": 300}
    return {n: (RNG.standard_normal(s) / small.get(n, 1)).astype(np.float32) for n, s in shapes.items()}


def expected(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    x, p, q, u, t = (inputs[n].astype(np.float64) for n in "xpqut")
    return {
        "y": np.maximum(x @ CONSTANTS["w"] + CONSTANTS["b"], 0), "dots": -(x @ CONSTANTS["few"]),
        "z": np.tanh(p @ q), "row": np.abs(u.sum(1)), "total": u.sum(), "column": t.max(0, initial=-np.inf),
    }  # fmt: skip


@pytest.mark.parametrize(("m", "b", "k"), SIZES)
def test_shares_depend_on_sizes_alone(programs: dict[int, Program], m: int, b: int, k: int) -> None:
    given = feeds(m, b, k)
    got = programs[1].run(given)
    for name, a in expected(given).items():
        np.testing.assert_allclose(got[name], a, rtol=0, atol=1e-5)
    for threads in (2, 5):
        assert all(np.array_equal(got[n], a) for n, a in programs[threads].run(given).items()), threads
    launches = programs[1].explain(M=m, B=b, K=k, U=10 * k).launches
    split = {x.label.split()[2].rstrip(",") for x in launches if x.label.startswith("shares of") and x.tasks > 0}
    least = LEAST_SHARES * SHARE_ELEMENTS
    assert split == {
        *(["y"] * (0 < m <= 8 * FEW_TILES)), *(["dots"] * (26 <= m <= 6 * FEW_TILES)),
        *(["z"] * (0 < b <= FEW_TILES and k >= SPLIT_STEPS)), *(["row"] * (b <= FEW_TILES and 10 * b * k >= least)),
        *(["total"] * (10 * b * k >= least)), *(["column"] * (24 * k >= least)),
    }  # fmt: skip


def test_every_read_of_shares_is_inside_and_written() -> None:
    checked = CheckedProgram(plan_program(MODEL))
    checked.run(feeds(3, 2, 6151))


LOCAL_RNG = np.random.default_rng(6)
GATHER_MODEL = model(
    [
        node("Gather", "table ids", "g"), node("Mul", "g weights", "h"), node("ReduceSum", "h one", "bag", keepdims=0),
        node("Gather", "names ids", "again"), node("Gather", "table again", "twice"),
        node("ReduceMax", "twice one", "most", keepdims=0),
        node("GatherElements", "x places", "moved", axis=1), node("ReduceSum", "moved columns", "elements", keepdims=0),
        node("SoftmaxCrossEntropyLoss", "x labels", "loss"),
    ],
    {
        "ids": ("int64", ["B", "L"]), "weights": ("float32", ["B", "L", 1]), "x": ("float32", ["K", 9]),
        "places": ("int64", ["K", 9]), "labels": ("int64", ["K"]),
    },
    ["bag", "most", "elements", "loss"],
    {
        "table": LOCAL_RNG.standard_normal((50, 24)).astype(np.float32), "names": LOCAL_RNG.permutation(50),
        "one": np.array([1]), "columns": np.array([0]),
    },
)  # fmt: skip


def test_gathers_are_split_with_what_they_fetch() -> None:
    """A group made of some statements keeps the arrays that their subscripts fetch."""
    program, other = compile(GATHER_MODEL, threads=1), onnxruntime.InferenceSession(GATHER_MODEL.SerializeToString())
    for b, length, k in ((1, 0, 1), (2, 1, 7), (3, 700, 2000)):
        ids, labels = RNG.integers(0, 50, (b, length)), RNG.integers(0, 9, (k,))
        given = {"ids": ids, "weights": RNG.standard_normal((b, length, 1)).astype(np.float32), "labels": labels,
                 "x": RNG.standard_normal((k, 9)).astype(np.float32), "places": RNG.integers(0, 9, (k, 9))}  # fmt: skip
        for (name, got), want in zip(program.run(given).items(), other.run(None, given), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4, err_msg=name)
    for target in ("cpu:avx512", "cuda:sm_80"):
        plan_program(GATHER_MODEL, target=target)


@pytest.mark.parametrize("steps", [0, 1, 15, 16, 6157, 9000])
@pytest.mark.parametrize("shares", [1, 4, 5, 70])
def test_shares_cover_all_steps_once(steps: int, shares: int) -> None:
    ends = [[i.evaluate({SHARES: shares}) for i in share_of_steps(Index.of(steps), Index.of(s))] for s in range(shares)]
    assert [x for lo, hi in ends for x in range(lo, hi)] == list(range(steps))
