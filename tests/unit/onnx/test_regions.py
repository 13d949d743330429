"""Regions of nodes that another runtime computes: their nodes, their order, and their internal tensors."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from polydyn.errors import UnsupportedError
from polydyn.graph.cut import cut, verify_parts
from polydyn.graph.expand import import_parts
from polydyn.graph.importer import ImportedGraph, ModelInput
from polydyn.graph.ir import Graph
from polydyn.graph.operators.registry import OPERATORS, ExpandContext, OnnxNode, Operator
from polydyn.graph.reference import evaluate
from polydyn.graph.regions import CannotCross, FallbackNodes, members, with_regions
from tests.support.tiny import model, node

F = "float32"


def graph(text: str, outputs: str, constants: str = "") -> ImportedGraph:
    """Build ``a=Op(x,y)`` for each node; nodes are called by their result, capitals are unsupported."""
    nodes = []
    for line in text.split():
        made, _, rest = line.partition("=")
        op, _, inputs = rest.rstrip(")").partition("(")
        nodes.append(OnnxNode(made, op, tuple(filter(None, inputs.split(","))), (made,), {}, 18))
    return ImportedGraph("g", (ModelInput("x", F, ("N",)),), tuple(outputs.split()), tuple(nodes), {})


def regions(g: ImportedGraph, fallback: FallbackNodes | None = None) -> str:
    """Return the nodes in order, with regions in brackets together with their results."""
    cut_ = with_regions(g, fallback or FallbackNodes(), lambda n: n.op.islower())
    shown = [
        f"[{' '.join(m.name for m in members(n))} -> {' '.join(n.outputs)}]" if n.fallback else n.name
        for n in cut_.nodes
    ]
    return " ".join(shown)


@pytest.mark.parametrize(
    ("text", "outputs", "expected"),
    [
        ("a=f(x) b=F(a) c=F(b) d=f(c)", "d", "a [b c -> c] d"),
        ("a=F(x) b=f(a) c=F(b)", "c", "[a -> a] b [c -> c]"),
        ("a=F(x) b=f(a) c=F(a,b)", "c a", "[a -> a] b [c -> c]"),  # not convex as one
        ("a=F(x) b=f(x) c=F(a,b)", "c", "b [a c -> c]"),  # a tensor that only a region reads waits for it
        ("a=F(x) b=F(x) c=f(a,b)", "c", "[a -> a] [b -> b] c"),
        ("a=F(x) b=f(x) c=F(b) d=f(a,c)", "d", "b [a -> a] [c -> c] d"),
        ("a=F(x) b=f(x)", "b", "b"),  # unused
        ("a=f(x) b=f(a)", "b", "a b"),
    ],
)
def test_regions_are_as_large_as_they_can_be(text: str, outputs: str, expected: str) -> None:
    assert regions(graph(text, outputs)) == expected


def test_what_cannot_cross_stays_inside_with_all_that_lies_between() -> None:
    g = graph("a=f(x) s=f(a) t=f(s,x) b=f(a) u=f(b,t)", "u b")
    assert regions(g, FallbackNodes(tensors={"t": "a sequence"})) == "a s b [t u -> u]"
    assert regions(g, FallbackNodes(tensors={"s": "a sequence"})) == "a b [s t -> t] u"
    between = graph("s=f(x) a=f(s) b=g(a) c=f(s,b)", "c")
    cut_ = with_regions(between, FallbackNodes(tensors={"s": "a sequence"}), lambda n: True)
    assert [m.name for m in members(cut_.nodes[0])] == ["s", "a", "b", "c"]
    assert "lies between" in members(cut_.nodes[0])[2].fallback
    crossed = graph("s=f(x) t=f(x) b=f(s,t) c=f(b) d=f(s,c) e=f(t,c)", "d e")
    assert regions(crossed, FallbackNodes(tensors={"s": "", "t": ""})) == "[s t b c d e -> d e]"


def test_two_chains_that_read_each_other_make_one_region() -> None:
    """Neither could run first: each has a part that reads the other."""
    g = graph("s=f(x) t=f(x) a=f(s) b=f(t) c=g(a) d=g(b) e=f(s,d) h=f(t,c)", "e h")
    assert regions(g, FallbackNodes(tensors={"s": "", "t": ""})) == "[s t a b c d e h -> e h]"


def test_a_tensor_from_outside_that_cannot_cross_is_refused_by_name() -> None:
    left, refused = FallbackNodes(), OnnxNode("n", "F", ("x",), ("y",), {}, 18, "the operator is not built")
    left.keep(refused, CannotCross("y", "a sequence"))
    with pytest.raises(UnsupportedError, match="n cannot be left to ONNX Runtime: y is a sequence"):
        left.keep(refused, CannotCross("y", "a sequence"))


# -- with ONNX Runtime's types -----------------------------------------------------------------------------------------


def imported(m: onnx.ModelProto) -> Graph:
    pytest.importorskip("onnxruntime")
    g = import_parts(m, left=FallbackNodes())
    verify_parts(cut(g))
    return g


def labels() -> onnx.ModelProto:
    """Build numbers to texts and back, between two nodes that are compiled."""
    m = model(
        [node("Floor", "x", "a"), node("Cast", "a", "s", to=TensorProto.STRING), node("Concat", "s t", "u", axis=0),
         helper.make_node("LabelEncoder", ["u"], ["n"], "labels", domain="ai.onnx.ml", keys_strings=["1", "z"],
                          values_floats=[5.0, 7.0], default_float=-1.0), node("Exp", "n", "y")],
        {"x": (F, ["N"])}, ["y"],
    )  # fmt: skip
    m.opset_import.append(helper.make_opsetid("ai.onnx.ml", 4))
    m.graph.initializer.append(helper.make_tensor("t", TensorProto.STRING, [1], [b"z"]))
    return m


def test_strings_stay_inside_a_region() -> None:
    g = imported(labels())
    (step,) = g.steps
    assert step.inputs == ("a",) and step.outputs == ("n",)
    notes = "\n".join(g.notes)
    assert "Cast_s (Cast) runs in ONNX Runtime: " in notes
    assert "Concat_u (Concat) runs in ONNX Runtime: u is a tensor(string)" in notes
    assert "labels (ai.onnx.ml::LabelEncoder) runs in ONNX Runtime: u is a tensor(string)" in notes
    with pytest.raises(UnsupportedError, match="STRING"):
        import_parts(labels())


def test_sequences_that_data_decide_stay_inside_a_region() -> None:
    m = model(
        [node("Neg", "x", "a"), node("SplitToSequence", "a two", "s", axis=0), node("SequenceAt", "s k", "b"),
         node("Relu", "b", "y")], {"x": (F, ["N", 3]), "k": ("int64", [])}, ["y"], {"two": np.array(2)},
    )  # fmt: skip
    (step,) = imported(m).steps
    assert step.inputs == ("a", "k") and step.outputs == ("b",)
    out = model([node("SequenceErase", "s k", "t"), node("SequenceInsert", "t x", "y")], {"x": (F, ["N"])}, ["y"])
    out.graph.node.insert(0, node("SequenceConstruct", "x x", "s"))
    out.graph.input.append(helper.make_tensor_value_info("k", TensorProto.INT64, []))
    with pytest.raises(UnsupportedError, match=r"y is a seq\(tensor\(float\)\)"):
        imported(out)


def test_one_slice_of_an_unknown_number_is_a_gather() -> None:
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    for split, at, axis, want in (("x", -1, 1, x[:, -1]), ("x", 2, 0, x[2]), ("x one", 1, 0, x[1])):
        nodes = [node("SplitToSequence", split, "s", axis=axis, keepdims=0), node("SequenceAt", "s k", "y")]
        m = model(nodes, {"x": (F, ["N", "M"])}, ["y"], {"one": np.array(1), "k": np.array(at)})
        np.testing.assert_array_equal(evaluate(import_parts(m), {"x": x})["y"], want)


def test_what_only_the_expansion_refuses_is_left_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(n: OnnxNode, ctx: ExpandContext) -> None:
        raise UnsupportedError(f"{n.name} is not written out")

    monkeypatch.setitem(OPERATORS, "Softsign", Operator("Softsign", OPERATORS["Softsign"].infer, refused))
    m = model([node("Neg", "x", "a"), node("Softsign", "a", "b"), node("Softsign", "b", "c"), node("Exp", "c", "y")],
              {"x": (F, ["N"])}, ["y"])  # fmt: skip
    with pytest.raises(UnsupportedError, match="Softsign_b is not written out"):
        import_parts(m)
    (step,) = imported(m).steps
    assert step.inputs == ("a",) and step.outputs == ("c",)


def test_a_loop_with_something_that_is_not_built_is_left_as_a_whole() -> None:
    nodes = [
        node("Identity", "c", "d"), node("MaxRoiPool", "q r", "p", pooled_shape=[1, 1]),
        node("ReduceSum", "p", "e", keepdims=0), node("Add", "v e", "w"),
    ]  # fmt: skip
    inputs = [helper.make_tensor_value_info(n, t, []) for n, t in (("i", 7), ("c", 9), ("v", 1))]
    outputs = [helper.make_tensor_value_info(n, t, []) for n, t in (("d", 9), ("w", 1))]
    body = helper.make_graph(nodes, "body", inputs, outputs)
    m = model(
        [node("Neg", "x", "q"), node("Loop", "k - z", "s", body=body), node("Exp", "s", "y")],
        {"x": (F, ["N", 1, 4, 4]), "r": (F, ["R", 5])}, ["y"], {"k": np.int64(3), "z": np.float32(0)},
    )  # fmt: skip
    m.graph.value_info.append(helper.make_tensor_value_info("s", 1, []))  # else its rank is open, and Exp is left too
    g = imported(m)
    assert set(g.steps[0].inputs) == {"q", "r"} and g.steps[0].outputs == ("s",)
    assert any("Loop_s (Loop) runs in ONNX Runtime: " in n and "MaxRoiPool" in n for n in g.notes)
    del m.graph.value_info[:]
    with pytest.raises(UnsupportedError, match="y is a tensor of a rank that data decide"):
        imported(m)
