"""The worklist: facts reach siblings, earlier nodes, and postponed decisions; open questions are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from polydyn.errors import InputError, ShapeError, UnsupportedError
from polydyn.graph.expand import import_model
from polydyn.graph.importer import load_model
from polydyn.graph.ir import Graph
from polydyn.graph.operators.registry import OPERATORS
from polydyn.graph.propagate import load_operators, propagate
from polydyn.graph.reference import evaluate
from polydyn.shapes.sizes import Sizes
from tests.support.tiny import model, node

F = "float32"


def shapes(m: onnx.ModelProto, dims: Any = None) -> dict[str, str]:
    typed = propagate(load_model(m), dims)
    return {o: str(typed.tensor(o).shape) for n in typed.nodes for o in n.outputs}


def one(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


def test_rules_stand_beside_the_operators() -> None:
    for name, o in load_operators().items():
        assert o.infer.__module__.startswith("polydyn.graph.operators."), name
        expand = getattr(o.expand, "func", o.expand)  # some are partial
        assert expand.__module__.startswith("polydyn.graph.operators."), name
    assert len(OPERATORS) > 80


@pytest.mark.parametrize("swapped", [True, False])
def test_a_sibling_learns_from_the_other_operand_and_what_was_computed_from_it_too(swapped: bool) -> None:
    """relu(x) and a Concat of it are known before the product with a constant determines the length of its axis."""
    inputs = {"x": (F, ["M", "K"] if swapped else ["K", "M"])}
    axis = 1 if swapped else 0
    nodes = [
        node("Relu", "x", "r"), node("Concat", "r r", "c", axis=axis), node("MatMul", "r w" if swapped else "w r", "y"),
    ]  # fmt: skip
    got = shapes(model(nodes, inputs, ["y", "c"], {"w": one(3, 4) if swapped else one(4, 3)}))
    assert got == (
        {"r": "(M, 3)", "c": "(M, 6)", "y": "(M, 4)"} if swapped else {"r": "(3, M)", "c": "(6, M)", "y": "(4, M)"}
    )


def test_siblings_computed_on_both_sides_of_a_product_agree_afterwards() -> None:
    inputs = {"x": (F, ["M", "K"]), "z": (F, ["P", "Q"])}
    nodes = [
        node("Relu", "x", "a"), node("Transpose", "z", "b", perm=[1, 0]), node("MatMul", "a b", "y"),
        node("Add", "x z", "late"),
    ]  # fmt: skip
    got = shapes(model(nodes, inputs, ["y", "late"]))
    assert got == {"a": "(M, K)", "b": "(K, M)", "y": "(M, M)", "late": "(M, K)"}, "P and Q are gone everywhere"


def test_a_squeeze_waits_for_the_fact_that_decides_it() -> None:
    """Algorithm 1 as printed computes Squeeze once, before Concat has shown that M is 1."""
    nodes = [node("Squeeze", "x", "s"), node("Concat", "x row", "c", axis=0), node("Relu", "s", "y")]
    m = model(nodes, {"x": (F, ["N", "M"])}, ["y", "c"], {"row": one(2, 1)})
    assert shapes(m, {"N": (2, 9)}) == {"s": "(N,)", "c": "((N + 2), 1)", "y": "(N,)"}


def branch(op: str) -> onnx.GraphProto:
    n = helper.make_node(op, ["x"], ["inside"], name=f"{op}_inside")
    return helper.make_graph([n], op, [], [onnx.ValueInfoProto(name="inside")])


def choice() -> list[onnx.NodeProto]:
    return [
        node("Shape", "x", "p", start=0, end=1), node("Shape", "z", "q", start=0, end=1), node("Equal", "p q", "e"),
        node("Squeeze", "e", "c"), node("If", "c", "y", then_branch=branch("Relu"), else_branch=branch("Neg")),
    ]  # fmt: skip


def test_a_branch_waits_for_the_fact_that_decides_it() -> None:
    m = model([*choice(), node("Concat", "x z", "k", axis=1)], {"x": (F, ["N", 2]), "z": (F, ["M", 2])}, ["y", "k"])
    assert [n.op for n in propagate(load_model(m)).nodes if n.name.startswith("If_y/")] == ["Relu"]


# -- open decisions
# ------------------------------------------------------------------------------------------------------


def refusal(m: onnx.ModelProto, dims: Any = None) -> str:
    with pytest.raises((ShapeError, UnsupportedError)) as e:
        import_model(m, dims)
    assert e.value.node and (e.value.remedy or e.value.rule), "names its node and what to do"
    return str(e.value)


def test_a_branch_that_no_fact_decides_is_left_to_the_host() -> None:
    said = refusal(model(choice(), {"x": (F, ["N", 2]), "z": (F, ["M", 2])}, ["y"]), {"N": (1, 8)})
    assert "If_y needs a step of the host (branch)" in said


def test_a_squeeze_whose_rank_no_fact_decides_is_refused_as_a_result_with_its_sizes() -> None:
    nodes = [node("Add", "x z", "a"), node("Squeeze", "a", "y")]
    m = model(nodes, {"x": (F, ["N", 3, "d"]), "z": (F, ["M", 3, "d"])}, ["y"])
    said = refusal(m, {"M": (0, 64)})
    for part in ("y has rank", "node: Squeeze_y/", "dim: N, d", "as in dims={'N': (1, 1), 'd': (1, 1)}"):
        assert part in said, part
    m = model(nodes, {"x": (F, ["N", 3]), "z": (F, ["M", 3])}, ["y"])
    assert shapes(m, {"N": (2, None)})["y"] == "(N, 3)"


def test_a_result_of_two_ranks_has_the_rank_that_the_model_declares() -> None:
    m = model([node("Squeeze", "x", "y")], {"x": (F, ["N", 3])}, [], opset=12)
    for dims, guard in (([3], ("N", "==", "1")), (["N", 3], ("1", "<=", "max((-N + 1), (N - 1))"))):
        del m.graph.output[:]
        m.graph.output.append(helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, dims))
        graph = import_model(m)
        assert len(graph.tensors["y"].shape) == len(dims) and graph.notes
        assert [(str(g.left), g.relation, str(g.right)) for g in graph.guards] == [guard]
        assert "the model says that its result y has rank" in graph.guards[0].message
    m.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 2, 3]))
    assert "y has rank" in refusal(m), "a declared rank that no branch gives says nothing"


def test_a_branch_that_what_follows_rules_out_is_not_taken() -> None:
    """Gemm takes matrices only, so x[N, 1, 3] is squeezed to two axes in every call."""
    first, x = node("Squeeze", "x", "s"), {"x": (F, ["N", 1, 3])}
    cases = {
        ("1", "<=", "max((-N + 1), (N - 1))"): (node("Gemm", "s w", "y"), {"w": one(3, 5)}),
        ("N", "==", "1"): (node("Transpose", "s", "y", perm=[0]), {}),
    }
    for guard, (last, constants) in cases.items():
        m = model([first, last], x, ["y"], constants, opset=12)
        graph = import_model(m)
        assert import_model(m, symbols={"x": ["M", None, None]}).guards, "an axis without a size has guards by any name"
        assert not graph.steps
        assert [(str(g.left), g.relation, str(g.right)) for g in graph.guards] == [guard]
        assert " cannot run: " in graph.guards[0].message


def test_a_recurrence_ties_the_batch_of_its_states_to_that_of_x() -> None:
    nodes = [node("GRU", "x w r b seq h", "o last", hidden_size=4), node("Squeeze", "o", "y")]
    inputs = {"x": (F, [1, "B", 3]), "seq": ("int32", [1]), "h": (F, [1, "K", 4])}
    m = model(nodes, inputs, ["y"], {"w": one(1, 12, 3), "r": one(1, 12, 4), "b": one(1, 24)}, opset=12)
    assert shapes(m)["y"] == "(4,)"


def test_dims_that_are_never_equal_are_not_guessed_to_broadcast() -> None:
    """x[N] + z[2 * M + 1 of N even]: one of them must be 1, and nothing decides which."""
    nodes = [node("Concat", "z z one", "odd", axis=0), node("Add", "x odd", "y")]
    m = model(nodes, {"x": (F, ["N"]), "z": (F, ["M"])}, ["y"], {"one": one(1)})
    said = refusal(m, {"N": Sizes(multiple=2)})
    for part in ("never equal, and which of them is 1 is not known", "N is x axis 0", "multiples of 2", "Add_y"):
        assert part in said, part
    graph = import_model(m, {"N": Sizes(2, None, 2)})  # then it must be 2 * M + 1 that is 1
    assert str(graph.tensors["y"].shape) == "(N,)" and not graph.notes
    assert ("(2*M + 1)", "==", "1") in [(str(g.left), g.relation, str(g.right)) for g in graph.guards]


def test_contradictions_name_node_dims_and_the_facts_before() -> None:
    nodes = [node("MatMul", "x w", "a"), node("Add", "x row", "y")]
    said = refusal(model(nodes, {"x": (F, ["N", "K"])}, ["a", "y"], {"w": one(3, 4), "row": one(5)}))
    assert "3 and 5 can never be equal" in said and "Add_y" in said
    nodes = [node("MatMul", "x w", "a"), node("Reshape", "x four", "y")]
    m = model(nodes, {"x": (F, ["N", "K"])}, ["a", "y"], {"w": one(3, 4), "four": np.array([-1, 4])})
    assert [(str(g.left), g.relation) for g in import_model(m).guards] == [("K", "=="), ("3*N", "%==")]
    said = refusal(m, {"N": (1, 1)})
    assert "is reshaped to" in said and "Reshape_y" in said


def test_sizes_from_data_need_a_step_of_the_host() -> None:
    nodes = [node("ReduceMax", "i", "m", keepdims=0), node("Unsqueeze", "m zero", "v"), node("Expand", "x v", "y")]
    m = model(nodes, {"x": (F, [1]), "i": ("int64", ["N"])}, ["y"], {"zero": np.array([0])})
    assert "Expand_y needs a step of the host" in refusal(m)


IMAGE = {"x": (F, ["N", "C", "H", "W"])}
MISFITS: dict[str, tuple[list[onnx.NodeProto], dict[str, Any], dict[str, Any], dict[str, np.ndarray]]] = {
    "channels": ([node("Conv", "x w", "y")], IMAGE, {"w": one(4, 3, 1, 1)}, {"x": one(1, 5, 4, 4)}),
    "bias": ([node("Conv", "x w b", "y")], IMAGE | {"b": (F, ["K"])}, {"w": one(4, 3, 1, 1)},
             {"x": one(1, 3, 4, 4), "b": one(3)}),
    "gemm bias": ([node("Gemm", "x w b", "y")], {"x": (F, ["N", "K"]), "b": (F, ["M"])}, {"w": one(3, 4)},
                  {"x": one(1, 3), "b": one(5)}),
    "layer scale": ([node("LayerNormalization", "x s s", "y")], {"x": (F, ["N", "D"])}, {"s": one(3)},
                    {"x": one(1, 5)}),
    "instance scale": ([node("InstanceNormalization", "x s s", "y")], IMAGE, {"s": one(3)}, {"x": one(1, 5, 2, 2)}),
    "groups": ([node("GroupNormalization", "x s s", "y", num_groups=2)], IMAGE, {"s": one(2)},
               {"x": one(1, 5, 2, 2)}),
    "other axes": ([node("GatherElements", "x i", "y", axis=0)], {"x": (F, ["N", "C"]), "i": ("int64", ["M", "D"])},
                   {}, {"x": one(3, 2), "i": np.zeros((1, 5), np.int64)}),
    "on and off": ([node("OneHot", "i d v", "y")], {"i": ("int64", ["N"]), "v": (F, ["M"])}, {"d": np.array(3)},
                   {"i": np.zeros(2, np.int64), "v": one(1)}),
    "depth": ([node("DepthToSpace", "x", "y", blocksize=2)], IMAGE, {}, {"x": one(1, 5, 2, 2)}),
    "space": ([node("SpaceToDepth", "x", "y", blocksize=2)], IMAGE, {}, {"x": one(1, 5, 2, 3)}),
    "reflect": ([node("Pad", "x p", "y", mode="reflect")], {"x": (F, ["N"])}, {"p": np.array([3, 0])}, {"x": one(3)}),
    "edge": ([node("Pad", "x p", "y", mode="edge")], {"x": (F, ["N"])}, {"p": np.array([0, 1])}, {"x": one(0)}),
    "resize": ([node("Resize", "x - - s", "y", mode="nearest")], {"x": (F, ["N"])}, {"s": np.array([4])},
               {"x": one(0)}),
    "negative": ([node("Shape", "x", "s"), node("Sub", "s three", "n"), node("ConstantOfShape", "n", "c"),
                  node("ReduceSum", "c", "y", keepdims=0)], {"x": (F, ["N"])}, {"three": np.array([3])},
                 {"x": one(2)}),
}  # fmt: skip
"""Calls that read non-existing elements without a check."""


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_a_guard(case: str) -> None:
    nodes, inputs, constants, feeds = MISFITS[case]
    graph: Graph = import_model(model(nodes, inputs, ["y"], constants))
    with pytest.raises(InputError):
        evaluate(graph, feeds)
    at = {s.symbol: feeds[s.input].shape[s.axis] for s in graph.sources}
    broken = [g for g in graph.guards if not {"==": g.left.evaluate(at) == g.right.evaluate(at),
              "<=": g.left.evaluate(at) <= g.right.evaluate(at),
              "%==": g.left.evaluate(at) % max(1, g.right.evaluate(at)) == 0}[g.relation]]  # fmt: skip
    assert broken and any(n.name in broken[0].message for n in nodes), "the guard names the node"


def test_the_last_place_of_every_row_lies_inside_a_flat_tensor() -> None:
    """``b * T + T - 1`` is below ``B * T`` for any T that a strided convolution leaves; no batch needs a guard."""
    nodes = [
        node("Conv", "x w", "f", strides=[5]), node("Transpose", "f", "t", perm=[0, 2, 1]), node("Shape", "t", "s"),
        node("Gather", "s zero", "B"), node("Gather", "s one", "T"), node("Range", "zero B one", "b"),
        node("Mul", "b T", "first"), node("Sub", "T one", "rest"), node("Add", "first rest", "last"),
        node("Reshape", "t flat", "rows"), node("Gather", "rows last", "y"),
    ]  # fmt: skip
    constants = {"w": one(3, 1, 10), "zero": np.array(0), "one": np.array(1), "flat": np.array([-1, 3])}
    graph = import_model(model(nodes, {"x": (F, ["N", 1, "L"])}, ["y"], constants))
    assert {frozenset(g.left.symbols() | g.right.symbols()) for g in graph.guards} <= {frozenset("L")}
