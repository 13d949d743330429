"""Reductions along axes other than the last, and rows that a reshape cuts in two: one kernel each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import onnx
import pytest

from polydyn.backends import cpu
from polydyn.checked import CheckedProgram
from polydyn.codegen.cpu.target import AVX2
from polydyn.compiler import Options, plan_program
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.fusion.plan import FusionPlan
from polydyn.graph.expand import import_model
from polydyn.graph.reference import evaluate
from polydyn.schedules.expr import const, op
from polydyn.schedules.index import Index
from polydyn.testing.fuzz import compile_graph, difference
from polydyn.testing.plans import bytes_at
from tests.support.cuda_groups import placed, run
from tests.support.cuda_groups import plan_of as cuda_plan_of
from tests.support.graphs import Sheet, wrong
from tests.support.marks import slow
from tests.support.tiny import model, node

F = "float32"
RNG = np.random.default_rng(0)
Nodes = list[onnx.NodeProto]
CONSTANTS = {
    "ax1": np.array([1]), "eps": np.float32(1e-5), "halves": np.array([0, 2, -1]), "at0": np.array([0]),
    "at1": np.array([1]), "two": np.array([2]), "g8": RNG.standard_normal(8).astype(np.float32),
    "b8": RNG.standard_normal(8).astype(np.float32), "w": RNG.standard_normal((8, 3, 3, 3)).astype(np.float32) / 5,
    "v": RNG.standard_normal((4, 8, 3, 3)).astype(np.float32) / 8,
}  # fmt: skip
COLUMNS = {"x": (F, ["B", "C", "L"]), "r": (F, ["B", "C", "L"])}
PAIRS = {"x": (F, ["B", "L"])}
IMAGE = {"x": (F, ["N", 3, "H", "W"])}


def norm(x: str, y: str, keepdims: int = 1) -> Nodes:
    """Build LayerNorm over axis 1, from primitives."""
    mean, variance = ("m0", "v0") if keepdims else ("m1", "v1")
    first, second = ([] if keepdims else [node("Unsqueeze", f"{t}1 ax1", f"{t}0")] for t in "mv")
    return [
        node("ReduceMean", f"{x} ax1", mean, keepdims=keepdims), *first, node("Sub", f"{x} m0", "c"),
        node("Mul", "c c", "q"), node("ReduceMean", "q ax1", variance, keepdims=keepdims), *second,
        node("Add", "v0 eps", "e"), node("Sqrt", "e", "d"), node("Div", "c d", y),
    ]  # fmt: skip


CHAINS: dict[str, Nodes] = {
    "softmax": [node("Softmax", "x", "y", axis=1)],
    "log-softmax": [node("LogSoftmax", "x", "y", axis=1)],
    "softmax over the first axis": [node("Softmax", "x", "y", axis=0)],
    "residual + norm": [node("Add", "x r", "z"), *norm("z", "y")],
    "norm whose statistics lack the axis": norm("x", "y", keepdims=0),
    "l2 norm": [node("ReduceL2", "x ax1", "n"), node("Div", "x n", "y")],
    "tanh, then softmax": [node("Tanh", "x", "t"), node("Softmax", "t", "y", axis=1)],
    "sum of two softmaxes": [
        node("Softmax", "x", "p", axis=1), node("Softmax", "r", "o", axis=1), node("Add", "p o", "y"),
    ],
    "rows between transposes": [
        node("Transpose", "x", "t", perm=[0, 2, 1]), node("Softmax", "t", "s", axis=-1),
        node("Transpose", "s", "y", perm=[0, 2, 1]),
    ],
}  # fmt: skip
SIZES = [
    node("Shape", "x", "sizes"), node("Gather", "sizes at0", "rows"), node("Gather", "sizes at1", "length"),
    node("Div", "length two", "half"), node("Concat", "rows two half", "explicit", axis=0),
]  # fmt: skip
CUT: dict[str, Nodes] = {
    "softmax": [node("Softmax", "x", "s"), node("Reshape", "s halves", "y")],
    "softmax, sizes from the input": [*SIZES, node("Softmax", "x", "s"), node("Reshape", "s explicit", "y")],
    "scores, softmax, gelu": [
        node("Tanh", "x", "t"), node("Softmax", "t", "s"), node("Reshape", "s halves", "h"), node("Erf", "h", "y"),
    ],
    "norm": [*norm("x", "s"), node("Reshape", "s halves", "y")],
}  # fmt: skip


def build(nodes: Nodes, inputs: Mapping[str, tuple[str, list[int | str]]], outputs: list[str]) -> onnx.ModelProto:
    used = {i for n in nodes for i in n.input}
    known = {k: v for k, v in CONSTANTS.items() if k in used}
    return model(nodes, {k: v for k, v in inputs.items() if k in used}, outputs, known)


def side_by_side(chains: Mapping[str, Nodes], inputs: Mapping[str, tuple[str, list[int | str]]]) -> onnx.ModelProto:
    """Join all chains in one model, with a suffix on each name."""
    nodes = []
    for k, chain in enumerate(chains.values()):
        for n in chain:
            new = onnx.NodeProto()
            new.CopyFrom(n)
            new.name = f"{n.name}_{k}"
            new.input[:] = [i if i in inputs or i in CONSTANTS else f"{i}_{k}" for i in n.input]
            new.output[:] = [f"{o}_{k}" for o in n.output]
            nodes.append(new)
    return build(nodes, inputs, [f"y_{k}" for k in range(len(chains))])


def plan_of(m: onnx.ModelProto, *off: str) -> FusionPlan:
    return fusion_plan(rewrite_graph(import_model(m), off), off)


def numbers(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    return {n: RNG.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


# -- how many kernels ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_over_columns_is_one_kernel(name: str) -> None:
    """It reads its inputs and writes its output, nothing else."""
    m = build(CHAINS[name], COLUMNS, ["y"])
    plan = plan_of(m)
    (group,) = plan.groups
    assert group.kind == "nest" and group.outputs == ("y",)
    sizes = {"B": 2, "C": 8, "L": 16}
    assert bytes_at(plan, group, sizes) == 4 * 2 * 8 * 16 * (len(plan.graph.inputs) + 1)
    assert len(plan_of(m, "columns").groups) > 1


@pytest.mark.parametrize("name", CUT)
def test_a_row_cut_in_two_is_one_kernel(name: str) -> None:
    m = build(CUT[name], PAIRS, ["y"])
    plan = plan_of(m)
    (group,) = plan.groups
    assert group.kind == "nest" and group.outputs == ("y",)
    assert [(str(g.left), g.relation, str(g.right)) for g in plan.graph.guards] == [("L", "%==", "2")]


def test_a_norm_behind_a_convolution_is_one_kernel() -> None:
    """Between convolutions, channels-last: rows are (image, channel), pixels inside."""
    nodes = [
        node("Conv", "x w", "a", pads=[1, 1, 1, 1]), node("InstanceNormalization", "a g8 b8", "n"),
        node("Relu", "n", "p"), node("Conv", "p v", "y", pads=[1, 1, 1, 1]),
    ]  # fmt: skip
    m = build(nodes, IMAGE, ["y"])
    first, second, third = plan_of(m).groups
    assert [g.kind for g in (first, second, third)] == ["contract", "nest", "contract"]
    (made,) = second.outputs
    assert second.rows[made] == (0, 3) and len(plan_of(m, "columns").groups) == 4
    assert_right(m, "cpu", [{"x": (n, 3, h, w)} for n, h, w in ((1, 1, 1), (2, 5, 7), (0, 3, 3))])


# -- the numbers -----------------------------------------------------------------------------------------------------


def assert_right(m: onnx.ModelProto, target: str, shapes: list[dict[str, tuple[int, ...]]]) -> None:
    """Compare with the reference evaluator, and check for the same bits on two threads."""
    graph = import_model(m)
    one, two = compile_graph(graph, target)
    for s in shapes:
        feeds = numbers(**s)
        got, again, want = one.run(feeds), two.run(feeds), evaluate(graph, feeds)
        assert not difference(graph, feeds, got, want), s
        assert all(got[o].tobytes() == again[o].tobytes() for o in got), s


@pytest.mark.parametrize("target", ["cpu", slow("cpu:avx2")])
def test_columns_are_right_at_every_size(target: str) -> None:
    m = side_by_side(CHAINS, COLUMNS)
    shapes = ((1, 1, 1), (2, 3, 5), (1, 33, 17), (3, 2, 70), (2, 7, 130), (0, 3, 4), (2, 0, 3), (2, 3, 0))
    apart = Options(without={"siblings", "tidy"})  # two of the chains begin with the same reduction
    assert len(plan_program(m, target=target, options=apart).launches) == len(CHAINS)
    assert_right(m, target, [{"x": s, "r": s} for s in shapes])


@pytest.mark.parametrize("target", ["cpu", "cpu:avx2"])
def test_cut_rows_are_right_at_every_size(target: str) -> None:
    m = side_by_side(CUT, PAIRS)
    assert_right(m, target, [{"x": s} for s in ((1, 2), (2, 6), (3, 34), (5, 130), (0, 4), (2, 0))])


def test_columns_touch_nothing_else() -> None:
    checked = CheckedProgram(plan_program(side_by_side(CHAINS, COLUMNS)))
    cut = CheckedProgram(plan_program(side_by_side(CUT, PAIRS)))
    for s in ((1, 1, 1), (2, 3, 5), (1, 19, 33), (2, 0, 3)):
        checked.run(numbers(x=s, r=s))
    for p in ((1, 2), (3, 34)):
        cut.run(numbers(x=p))


def test_columns_kept_and_computed_again_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lanes are columns, each with a separate row buffer; columns too long for scratch are computed in every pass."""
    graph = import_model(build(CHAINS["softmax"], COLUMNS, ["y"]))
    kept, _ = compile_graph(graph, "cpu:avx2")
    monkeypatch.setitem(cpu.NAMED_TARGETS, "cpu:avx2", replace(AVX2, core=replace(AVX2.core, l2=8 * 4 * 20)))
    bounded, _ = compile_graph(graph, "cpu:avx2")
    (launch,) = plan_program(build(CHAINS["softmax"], COLUMNS, ["y"]), target="cpu:avx2").launches
    assert launch.candidates[0].scratch.evaluate({"B": 4, "C": 10**9, "L": 100, "nth": 1}) <= 8 * 4 * 20 + 64
    for length in (1, 20, 21, 50):  # columns of up to 20 elements in scratch
        x = numbers(x=(2, length, 43))
        y = bounded.run(x)["y"]
        np.testing.assert_array_equal(y, kept.run(x)["y"])
        np.testing.assert_allclose(y, evaluate(graph, x)["y"], rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("columns", [1, 2, 3, 4, 5])
def test_few_columns(columns: int) -> None:
    """Two or three columns would leave most of a vector empty: lanes then run down a column."""
    s = Sheet(x=("B", "C", columns))
    s.let("top", ("B", 1, columns), s.at("x", "d0", "r0", "d2"), ("C",), "max")
    s.let("e", ("B", "C", columns), op("exp", op("sub", s.at("x", "d0", "d1", "d2"), s.at("top", "d0", 0, "d2"))))
    s.let("total", ("B", 1, columns), s.at("e", "d0", "r0", "d2"), ("C",), "sum")
    s.let("y", ("B", "C", columns), op("div", s.at("e", "d0", "d1", "d2"), s.at("total", "d0", 0, "d2")))
    graph = s.graph("y")
    assert len(fusion_plan(graph).groups) == 1
    assert not wrong(graph, {"B": 2, "C": 37}, {"B": 1, "C": 1}, {"B": 3, "C": 0}, {"B": 0, "C": 2})


def test_on_cuda_too() -> None:
    nodes = [
        node("Softmax", "x", "y", axis=1), node("InstanceNormalization", "x g8 b8", "z"),
        node("Softmax", "t", "s"), node("Reshape", "s halves", "u"),
    ]  # fmt: skip
    known = {k: CONSTANTS[k] for k in ("g8", "b8", "halves")}
    plan = cuda_plan_of(nodes, {"x": ("B", 8, "L"), "t": ("B", "M")}, ["y", "z", "u"], known)
    assert len(plan.groups) == 3
    kernels = placed(plan)
    for b, length, m in ((1, 1, 2), (2, 5, 34), (1, 300, 66)):
        feeds = numbers(x=(b, 8, length), t=(b, m))
        want = evaluate(plan.graph, feeds)
        got, _ = run(plan, feeds, kernels=kernels)
        for t in plan.graph.outputs:
            np.testing.assert_allclose(got[t], want[t], rtol=0, atol=2e-5)


# -- separate kernels ------------------------------------------------------------------------------------------------


def outputs(s: Sheet, *names: str) -> list[tuple[str, ...]]:
    return [g.outputs for g in fusion_plan(s.graph(*names)).groups]


def test_rows_in_another_order_stay_apart() -> None:
    s = Sheet(x=("M", "N", "K"))
    s.let("e", ("M", "N", "K"), op("exp", s.at("x", "d0", "d1", "d2")))
    s.let("y", ("N", "M"), s.at("e", "d1", "d0", "r0"), ("K",), "sum")
    assert outputs(s, "y") == [("e",), ("y",)]
    plan = fusion_plan(s.graph("y"))
    assert "no locality: it reads other rows of the group than its own" in plan.why_apart(plan.groups[1])[0]


def test_a_part_of_a_column_stays_apart() -> None:
    s = Sheet(x=("M", "N"))
    s.let("e", ("M", "N"), op("exp", s.at("x", "d0", "d1")))
    s.let("y", ("N",), s.at("e", Index.of("M") - 1 - "r0", "d0"), ("M",), "sum")
    plan = fusion_plan(s.graph("y"))
    assert "does not run over whole rows" in plan.why_apart(plan.groups[1])[0]
    assert not wrong(s.graph("y"), {"M": 5, "N": 33}, {"M": 0, "N": 2})


def test_a_row_statistic_does_not_share_a_kernel_with_a_column_statistic() -> None:
    s = Sheet(x=("M", "N"))
    s.let("a", ("M", 1), s.at("x", "d0", "r0"), ("N",), "sum")
    s.let("b", ("M", "N"), op("mul", s.at("x", "d0", "d1"), s.at("a", "d0", 0)))
    s.let("c", ("N",), s.at("b", "r0", "d0"), ("M",), "max")
    s.let("y", ("M", "N"), op("add", s.at("b", "d0", "d1"), op("mul", s.at("c", "d1"), const(2, "float32"))))
    assert outputs(s, "y") == [("b",), ("y",)], "rows first, then columns with what reads both"
    assert not wrong(s.graph("y"), {"M": 5, "N": 33}, {"M": 1, "N": 1}, {"M": 0, "N": 3}, {"M": 4, "N": 0})
