"""Chains that become one kernel by stitching (BladeDISC 4.2), from ONNX operators and from exporters' primitives."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from polydyn.backends import Options
from polydyn.compiler import compile
from polydyn.fusion.pipeline import fusion_plan, rewrite_graph
from polydyn.fusion.plan import FusionPlan
from polydyn.graph.expand import import_model
from polydyn.graph.reference import evaluate
from tests.support.tiny import model, node

F = "float32"
RNG = np.random.default_rng(0)
CONSTANTS = {
    "axes": np.array([-1]), "last": np.array([2, 3]), "eps": np.float32(1e-5), "two": np.float32(2),
    "flat": np.array([-1, 16]), "heads": np.array([0, 0, 4, 4]), "joined": np.array([0, 0, 16]),
    "groups": np.array([0, 2, -1]), "one": np.ones(2, np.float32), "zero": np.zeros(2, np.float32),
    "g": RNG.standard_normal(16).astype(np.float32), "b": RNG.standard_normal(16).astype(np.float32),
    "g8": RNG.standard_normal(8).astype(np.float32), "b8": RNG.standard_normal(8).astype(np.float32),
    "s8": RNG.standard_normal((8, 1, 1)).astype(np.float32), "n": np.array([16]),
}  # fmt: skip
ROWS = {"x": (F, ["B", "L", 16]), "r": (F, ["B", "L", 16])}
IMAGES = {"x": (F, ["N", 8, "H", "W"])}
Nodes = list[onnx.NodeProto]


def norm(x: str, y: str, p: str = "a") -> Nodes:
    """Build LayerNorm as exporters write it."""
    return [
        node("ReduceMean", f"{x} axes", f"{p}m"), node("Sub", f"{x} {p}m", f"{p}c"), node("Pow", f"{p}c two", f"{p}q"),
        node("ReduceMean", f"{p}q axes", f"{p}v"), node("Add", f"{p}v eps", f"{p}w"), node("Sqrt", f"{p}w", f"{p}d"),
        node("Div", f"{p}c {p}d", f"{p}n"), node("Mul", f"{p}n g", f"{p}h"), node("Add", f"{p}h b", y),
    ]  # fmt: skip


def rms(x: str, y: str) -> Nodes:
    return [
        node("Pow", f"{x} two", "q"), node("ReduceMean", "q axes", "v"), node("Add", "v eps", "w"),
        node("Sqrt", "w", "d"), node("Reciprocal", "d", "i"), node("Mul", f"{x} i", "n1"), node("Mul", "n1 g", y),
    ]  # fmt: skip


def softmax(x: str, y: str, log: bool = False) -> Nodes:
    ends = [node("Log", "u", "k"), node("Sub", "s k", y)] if log else [node("Div", "e u", y)]
    return [
        node("ReduceMax", f"{x} axes", "t"), node("Sub", f"{x} t", "s"), node("Exp", "s", "e"),
        node("ReduceSum", "e axes", "u"), *ends,
    ]  # fmt: skip


UNFLATTEN = [node("Shape", "x", "bl", start=0, end=2), node("Concat", "bl n", "shape", axis=0)]
OPERATORS: dict[str, Nodes] = {
    "Softmax": [node("Softmax", "x", "y")],
    "LogSoftmax": [node("LogSoftmax", "x", "y")],
    "LayerNormalization": [node("LayerNormalization", "x g b", "y")],
    "residual + LayerNormalization": [node("Add", "x r", "z"), node("LayerNormalization", "z g b", "y")],
    "two norms, one of the other": [*norm("x", "z"), node("Add", "z r", "o"), *norm("o", "y", "b")],
    "sum of two softmaxes": [node("Softmax", "x", "p"), node("Softmax", "r", "o"), node("Add", "p o", "y")],
}
CHAINS: dict[str, Nodes] = {
    "softmax": softmax("x", "y"),
    "log-softmax": softmax("x", "y", log=True),
    "LayerNorm": norm("x", "y"),
    "RMSNorm": rms("x", "y"),
    "residual + LayerNorm": [node("Add", "x r", "z"), *norm("z", "y")],
    "residual + RMSNorm": [node("Add", "x r", "z"), *rms("z", "y")],
    "l2 norm": [node("ReduceL2", "x axes", "m"), node("Div", "x m", "y")],
}
ROWS_AFTER_RESHAPE: dict[str, Nodes] = {
    "rows (B*L) joined by (B, L)": [
        *UNFLATTEN, node("Reshape", "x flat", "f"), *norm("f", "o"), node("Reshape", "o shape", "u"),
        node("Add", "u r", "y"),
    ],
    "rows (B, L) joined by (B*L)": [node("Add", "x r", "z"), node("Reshape", "z flat", "f"), *norm("f", "y")],
    "norm of (B, L), softmax of (B*L)": [*norm("x", "z"), node("Reshape", "z flat", "f"), *softmax("f", "y")],
    "rows of heads, then of all heads": [
        node("Add", "x r", "z"), node("Reshape", "z heads", "h"), node("Softmax", "h", "o"),
        node("Reshape", "o joined", "u"), node("Mul", "u r", "y"),
    ],
}  # fmt: skip
SPATIAL: dict[str, Nodes] = {
    "InstanceNormalization": [node("InstanceNormalization", "x g8 b8", "y")],
    "GroupNormalization": [node("GroupNormalization", "x g8 b8", "y", num_groups=2)],
    "instance norm": [
        node("ReduceMean", "x last", "m"), node("Sub", "x m", "c"), node("Mul", "c c", "q"),
        node("ReduceMean", "q last", "v"), node("Add", "v eps", "w"), node("Sqrt", "w", "d"), node("Div", "c d", "o"),
        node("Mul", "o s8", "y"),
    ],
    "group norm, as PyTorch exports it": [
        node("Reshape", "x groups", "f"), node("InstanceNormalization", "f one zero", "i"), node("Shape", "x", "sx"),
        node("Reshape", "i sx", "k"), node("Mul", "k s8", "y"),
    ],
}  # fmt: skip


def build(nodes: Nodes, inputs: object = ROWS, opset: int = 21) -> onnx.ModelProto:
    assert isinstance(inputs, dict)
    used = {i for n in nodes for i in n.input}
    m = model(
        nodes, {k: v for k, v in inputs.items() if k in used}, ["y"],
        {k: v for k, v in CONSTANTS.items() if k in used}, opset,
    )  # fmt: skip
    m.ir_version = 10
    return m


def plan_of(m: onnx.ModelProto) -> FusionPlan:
    return fusion_plan(rewrite_graph(import_model(m)))


@pytest.mark.parametrize("name", [*OPERATORS, *CHAINS, *ROWS_AFTER_RESHAPE])
def test_a_row_chain_is_one_kernel(name: str) -> None:
    (group,) = plan_of(build((OPERATORS | CHAINS | ROWS_AFTER_RESHAPE)[name])).groups
    assert group.kind == "nest" and group.outputs == ("y",)


def test_rms_normalization_is_one_kernel() -> None:
    assert len(plan_of(build([node("RMSNormalization", "x g", "y")], opset=23)).groups) == 1


@pytest.mark.parametrize("name", SPATIAL)
def test_a_norm_of_images_is_one_kernel(name: str) -> None:
    (group,) = plan_of(build(SPATIAL[name], IMAGES)).groups
    assert group.kind == "nest" and group.rows["y"] == (0, 1)


def merged(chains: dict[str, Nodes]) -> onnx.ModelProto:
    """Join all chains in one model, with a suffix on each name."""
    nodes, shared = [], {"x", "r", "", *CONSTANTS}
    for k, chain in enumerate(chains.values()):
        for n in chain:
            new = onnx.NodeProto()
            new.CopyFrom(n)
            new.name = f"{n.name}_{k}"
            new.input[:] = [i if i in shared else f"{i}_{k}" for i in n.input]
            new.output[:] = [f"{o}_{k}" for o in n.output]
            nodes.append(new)
    inputs = IMAGES if chains is SPATIAL else ROWS
    return model(nodes, inputs, [f"y_{k}" for k in range(len(chains))], CONSTANTS, 21)


@pytest.mark.parametrize("chains", [CHAINS | ROWS_AFTER_RESHAPE, SPATIAL], ids=["rows", "images"])
def test_stitched_kernels_are_right_at_every_size(chains: dict[str, Nodes]) -> None:
    m = merged(chains)
    m.ir_version = 10
    graph = import_model(m)
    program = compile(m, threads=2, options=Options(without={"tidy"}))  # some chains begin with equal nodes
    assert len(program.launches) == len(chains)
    images = chains is SPATIAL
    for shape in ((1, 1, 1), (2, 3, 5), (3, 7, 1), (1, 33, 31), (2, 1, 16)):
        dims = (shape[0], 8, *shape[1:]) if images else (*shape[:2], 16)
        feeds = {n: RNG.standard_normal(dims).astype(np.float32) for n in graph.inputs}
        expected = evaluate(graph, feeds)
        for name, got in program.run(feeds).items():
            assert got.shape == expected[name].shape
            np.testing.assert_allclose(got, expected[name], rtol=0, atol=2e-5, err_msg=f"{name} {shape}")
    empty = {n: np.zeros((0, 8, 3, 3) if images else (0, 4, 16), np.float32) for n in graph.inputs}
    assert all(a.shape == evaluate(graph, empty)[n].shape for n, a in program.run(empty).items())


def test_what_is_not_local_stays_apart_and_says_so_in_the_papers_words() -> None:
    nodes = [*norm("x", "z"), node("ReduceMean", "z ax1", "y", keepdims=0)]
    used = {i for n in nodes for i in n.input} & CONSTANTS.keys()
    constants = {k: CONSTANTS[k] for k in used} | {"ax1": np.array([1])}
    plan = plan_of(model(nodes, {"x": ROWS["x"]}, ["y"], constants))
    first, second = plan.groups
    assert first.outputs == ("z",)
    (line,) = plan.why_apart(second)
    assert "apart from z: no locality: a reduction does not keep the rows of the group" in line


@pytest.mark.parametrize(
    "reader", [node("ReduceMax", "part axes", "y"), node("Softmax", "part", "y", axis=-1)], ids=lambda n: n.op_type
)
@pytest.mark.parametrize(("start", "end"), [(0, -1), (0, 2), (1, 9)])
def test_readers_of_a_part_of_a_row_stay_apart(reader: onnx.NodeProto, start: int, end: int) -> None:
    cut = {"start": np.array([start]), "end": np.array([end])}
    nodes = [node("Softmax", "x", "s", axis=-1), node("Slice", "s start end axes", "part"), reader]
    constants = cut | {"axes": CONSTANTS["axes"]}
    m = model(nodes, {"x": (F, ["B", "W"])}, ["s", "y"], constants)
    program, graph = compile(m, threads=1), import_model(m)
    for shape in ((3, 7), (1, 3), (2, 40), (5, 2 + start)):
        feeds = {"x": RNG.standard_normal(shape).astype(np.float32)}
        for name, got in program.run(feeds).items():
            np.testing.assert_allclose(got, evaluate(graph, feeds)[name], rtol=0, atol=2e-6)
