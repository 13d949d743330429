"""Reading ONNX: accepted models, and rejections that name the place and the remedy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from polydyn.errors import ModelError, PolydynError, ShapeError, UnsupportedError
from polydyn.graph.expand import import_model
from polydyn.graph.fold import fold
from polydyn.graph.importer import load_model
from polydyn.schedules.names import given_back
from tests.support.tiny import model, node, run

F, I64 = "float32", "int64"
X = {"x": (F, ["B", "L"])}


def flat() -> onnx.ModelProto:
    return model([node("Concat", "x w", "y", axis=0)], {"x": (F, ["B", 3])}, ["y"], {"w": np.ones((2, 3), np.float32)})


def test_nodes_may_be_in_any_order() -> None:
    branch = [
        helper.make_graph([node("Neg", x, "y"), node("Abs", "y", f"{x}_")], x, [], [value(f"{x}_")]) for x in "ab"
    ]  # "y" inside of a branch is not the result of the If
    nodes = [
        helper.make_node("If", ["c"], ["y"], then_branch=branch[0], else_branch=branch[1]),
        node("Add", "a x", "b"), node("Exp", "x", "a"), node("ReduceMax", "x", "m", keepdims=0),
        node("Less", "m zero", "c"),
    ]  # fmt: skip
    made = load_model(model(nodes, X, ["y"], {"zero": np.float32(0)}))
    assert [n.outputs for n in made.nodes] == [("m",), ("c",), ("a",), ("b",), ("y",)]
    sums = [node("Add", "x a", "y"), node("Exp", "x", "a")]
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.allclose(run(import_model(model(sums, X, ["y"])), {"x": x})["y"], x + np.exp(x))


def value(name: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


def test_path_bytes_and_proto_give_the_same_graph(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(flat(), path)
    graphs = [import_model(path), import_model(str(path)), import_model(path.read_bytes()), import_model(flat())]
    assert all(g.nodes == graphs[0].nodes and g.tensors == graphs[0].tensors for g in graphs)


def test_external_data_is_mapped_and_stays_in_the_folder(tmp_path: Path) -> None:
    m = model([node("Concat", "x w", "y", axis=0)], {"x": (F, ["B", 300])}, ["y"], {"w": np.ones((9, 300), np.float32)})
    onnx.save(m, tmp_path / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    loaded = load_model(tmp_path / "m.onnx").constants["w"]
    assert not loaded.flags.writeable and not loaded.flags.owndata and loaded.sum() == 2700
    with pytest.raises(ModelError, match="not given as a path"):
        load_model((tmp_path / "m.onnx").read_bytes())
    proto = onnx.load(tmp_path / "m.onnx", load_external_data=False)
    proto.graph.initializer[0].external_data[0].value = "../w.bin"
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "m.onnx").write_bytes(proto.SerializeToString())
    with pytest.raises(ModelError, match="not next to the model"):
        load_model(tmp_path / "sub" / "m.onnx")


def test_typed_data_and_all_dtypes_are_read() -> None:
    tensors = [
        helper.make_tensor("f", TensorProto.FLOAT, [2], [1.5, -2]),
        helper.make_tensor("h", TensorProto.FLOAT16, [1], np.array([0.5], np.float16).tobytes(), raw=True),
        helper.make_tensor("b", TensorProto.BFLOAT16, [1], [2.5]),
        helper.make_tensor("t", TensorProto.BOOL, [2], [True, False]),
    ]
    m = model([node("Identity", n, f"y{n}") for n in "fhbt"], {}, [f"y{n}" for n in "fhbt"])
    m.graph.initializer.extend(tensors)
    got = run(import_model(m), {})
    assert [str(got[f"y{n}"].dtype) for n in "fhbt"] == ["float32", "float16", "bfloat16", "bool"]
    assert got["yf"].tolist() == [1.5, -2] and float(got["yb"][0]) == 2.5


def test_functions_are_inlined() -> None:
    function = helper.make_function(
        "local", "Twice", ["a"], ["b"], [helper.make_node("Concat", ["a", "a"], ["b"], axis=0)],
        [helper.make_opsetid("", 18)],
    )  # fmt: skip
    m = model([helper.make_node("Twice", ["x"], ["y"], domain="local")], X, ["y"])
    m.functions.append(function)
    m.opset_import.append(helper.make_opsetid("local", 1))
    assert run(import_model(m), {"x": np.ones((1, 2), np.float32)})["y"].shape == (2, 2)


def function_of(name: str, opset: int, *nodes: onnx.NodeProto, **defaults: float) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("local", 1)]
    attributes = [helper.make_attribute(k, v) for k, v in defaults.items()]
    return helper.make_function("local", name, ["a"], ["b"], nodes, opsets, attribute_protos=attributes)


def calling(function: str, *functions: onnx.FunctionProto, **given: float) -> onnx.ModelProto:
    """A model that calls a function on its input, and again on the result with the given attributes."""
    calls = [helper.make_node(function, ["x"], ["t"], domain="local"),
             helper.make_node(function, ["t"], ["y"], domain="local", **given)]  # fmt: skip
    m = model(calls, X, ["y"])
    m.functions.extend(functions)
    m.opset_import.append(helper.make_opsetid("local", 1))
    return m


def with_reference(op: str, attribute: str, reference: str, **names: str) -> onnx.NodeProto:
    n = helper.make_node(op, ["a"], ["b"], **names)
    n.attribute.add(name=attribute, ref_attr_name=reference, type=onnx.AttributeProto.FLOAT)
    return n


def test_attributes_of_functions_have_their_defaults() -> None:
    """The operator's own default was taken: 0.01 instead of 0.5."""
    leaky = function_of("Leaky", 18, with_reference("LeakyRelu", "alpha", "slope"), slope=0.5)
    outer = function_of("Outer", 18, with_reference("Leaky", "slope", "steep", domain="local"))
    x = -np.ones((1, 2), np.float32)
    for m in (calling("Leaky", leaky, slope=0.25), calling("Outer", outer, leaky, steep=0.25)):
        assert (run(import_model(m), {"x": x})["y"] == -0.125).all()


def test_a_function_of_another_opset_is_read_where_its_operators_are_the_same() -> None:
    """It was refused as an unknown operator."""
    x = np.array([[-1, 2, 0.5]], np.float32)
    for opset in (17, 18):
        m = calling("Twice", function_of("Twice", opset, node("Relu", "a", "b")))
        assert (run(import_model(m), {"x": x})["y"] == np.maximum(x, 0)).all()
    with pytest.raises(ModelError, match="Softmax of the function Old is of opset 11, the model of 18") as e:
        import_model(calling("Old", function_of("Old", 11, node("Softmax", "a", "b"))))
    assert e.value.node == "Old_0" and "same form" in str(e.value.rule)


def test_names_inside_a_function_hide_nothing_outside() -> None:
    """A branch inside has a tensor of the name that the call's argument has outside, and an output is an input."""
    inner = helper.make_graph([node("Exp", "a", "x"), node("Neg", "x", "r")], "t", [], [onnx.ValueInfoProto(name="r")])
    other = helper.make_graph([node("Identity", "a", "t")], "e", [], [onnx.ValueInfoProto(name="t")])
    nodes = [helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(np.array(True))),
             helper.make_node("If", ["c"], ["b"], then_branch=inner, else_branch=other)]  # fmt: skip
    m = calling("F", function_of("F", 18, *nodes))
    m.functions.append(helper.make_function("local", "Two", ["p"], ["p", "q"], [node("Neg", "p", "q")],
                                            [helper.make_opsetid("", 18)]))  # fmt: skip
    m.graph.node.append(helper.make_node("Two", ["y"], ["same", "minus"], domain="local"))
    m.graph.output.extend(onnx.ValueInfoProto(name=n) for n in ("same", "minus"))
    x = np.full((1, 2), 0.5, np.float32)
    got = run(import_model(m), {"x": x})
    y = -np.exp(-np.exp(x))
    assert np.allclose(got["y"], y) and np.allclose(got["same"], y) and np.allclose(got["minus"], -y)
    m.graph.node[0].input.append("x")
    with pytest.raises(ModelError, match="F is called with 2 inputs and 1 outputs, the function has 1 and 1"):
        import_model(m)


def test_an_if_whose_condition_is_known_becomes_its_branch() -> None:
    def branch(name: str, op: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph([op], name, [], [onnx.ValueInfoProto(name=op.output[0])])

    yes, no = branch("t", node("Identity", "x", "o")), branch("e", node("Transpose", "x", "o"))
    m = model([node("If", "c", "y", then_branch=yes, else_branch=no)], X, ["y"], {"c": np.array(False)})
    assert run(import_model(m), {"x": np.ones((1, 2), np.float32)})["y"].shape == (2, 1)
    m = model([node("If", "c", "y", then_branch=yes, else_branch=no)], X | {"c": ("bool", [])}, ["y"])
    with pytest.raises(UnsupportedError, match="If_y needs a step of the host") as e:
        import_model(m)
    assert e.value.node == "If_y"


def test_all_unsupported_operators_are_listed_at_once() -> None:
    nodes = [
        node("Nonsense", "x", "a"),
        helper.make_node("Gelu", ["a"], ["b"], domain="com.acme"),
        node("StringSplit", "b", "y"),
    ]
    names = r"3 operator.*Nonsense.*StringSplit \(node StringSplit_y\), com.acme::Gelu"
    with pytest.raises(UnsupportedError, match=names):
        import_model(model(nodes, X, ["y"]))


def test_layouts_of_one_processor_name_the_level_that_has_none() -> None:
    nodes = [helper.make_node("ReorderInput", ["x"], ["y"], domain="com.microsoft.nchwc")]
    with pytest.raises(UnsupportedError, match="remedy: save the optimized model at level ORT_ENABLE_EXTENDED, "):
        import_model(model(nodes, X, ["y"]))


def check(m: object, message: str, error: type[PolydynError] = ModelError) -> None:
    with pytest.raises(error, match=message) as e:
        import_model(m)  # type: ignore[arg-type]
    assert e.value.remedy or e.value.rule or e.value.tensor


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    check(b"\x08garbage" * 40, "not an ONNX protobuf|no graph")
    check(flat().SerializeToString()[:-9], "truncated|do not fit|no graph|no outputs")
    check(b"", "no graph")
    check(tmp_path / "absent.onnx", "cannot read")
    check(42, "a int is not a model")
    check(model([node("Identity", "q", "y")], X, ["y"]), "q is read but defined nowhere")
    cyclic = [node("Concat", "x a", "b", axis=0), node("Identity", "b", "a")]
    check(model(cyclic, X, ["b"]), "in a cycle")
    check(model([node("Identity", "x", "y"), node("Identity", "x", "y")], X, ["y"]), "defined twice")
    check(model([node("Identity", "x", "y")], X, ["z"]), "computed by no node")
    short = flat()
    short.graph.initializer[0].raw_data = b"1234"
    check(short, "do not fit its shape")
    check(model([node("Identity", "x", "y")], {"x": (F, None)}, ["y"]), "rank of input x is unknown", UnsupportedError)
    strings = flat()
    strings.graph.input[0].type.tensor_type.elem_type = TensorProto.STRING
    check(strings, "of texts is not supported", UnsupportedError)


def test_symbols_of_inputs_and_ranges() -> None:
    inputs = {"x": (F, ["B", None]), "w": (F, ["B", None]), "z": (I64, ["d0"])}
    nodes = [node("Concat", "x w", "y", axis=1), node("Identity", "z", "z2")]
    graph = import_model(model(nodes, inputs, ["y", "z2"]), {"B": (1, 8)})
    assert [(given_back(s.symbol), s.input, s.axis) for s in graph.sources] == [
        ("B", "x", 0), ("x_1", "x", 1), ("w_0", "w", 0), ("w_1", "w", 1), ("d0", "z", 0),
    ]  # fmt: skip
    assert [(given_back(str(g.left)), g.relation, str(g.right)) for g in graph.guards] == [
        ("1", "<=", "B"), ("B", "<=", "8"), ("w_0", "==", "B"),
    ]  # fmt: skip
    assert "x axis 0 are both called B" in graph.guards[2].message
    used = {s for t in graph.tensors.values() for d in t.shape for s in d.symbols()}
    assert used <= {s.symbol for s in graph.sources}, "no symbol is invented"
    with pytest.raises(ShapeError, match="dims names Q"):
        import_model(flat(), {"Q": (1, 2)})


def late_fact() -> onnx.ModelProto:
    """Reshape reads [N, 4] and M before the Concat shows that N equals M."""
    nodes = [
        node("Shape", "v", "s", start=0, end=1), node("Concat", "s rest", "t", axis=0), node("Reshape", "x t", "r"),
        node("Expand", "u s", "e"), node("Concat", "x v", "y", axis=1),
    ]  # fmt: skip
    inputs = {"x": (F, ["N", 4]), "u": (F, ["N"]), "v": (F, ["M", 4])}
    return model(nodes, inputs, ["r", "e", "y"], {"rest": np.array([-1])})


def test_a_fact_learned_late_holds_for_tensors_computed_early() -> None:
    # Algorithm 1 as printed marks Reshape as processed with the shape [M, 4*N // M], and would have to guess at Expand.
    graph = import_model(late_fact())
    assert [str(graph.tensors[t].shape) for t in ("r", "e", "y")] == ["(N, 4)", "(N,)", "(N, 8)"]
    assert not graph.notes, "nothing was guessed: Expand waited until Concat had spoken"
    assert [(given_back(str(g.left)), g.relation, str(g.right)) for g in graph.guards] == [
        ("u_0", "==", "N"), ("M", "==", "N"),
    ], "and 4*N %== M needs no guard any more"  # fmt: skip


def test_a_guess_is_made_last_and_noted() -> None:
    m = model([node("Shape", "v", "s"), node("Expand", "u s", "y")], {"u": (F, ["N"]), "v": (F, ["M"])}, ["y"])
    graph = import_model(m)
    (g,) = graph.guards
    assert (str(g.left), str(g.right)) == ("M", "N") and "Expand_y" in g.message and "Expand_y" in graph.notes[0]


def test_a_cache_makes_a_sum_of_sizes() -> None:
    nodes = [node("Concat", "past x", "k", axis=1), node("Add", "k mask", "y")]
    m = model(nodes, {"mask": (F, ["B", "T"]), "x": (F, ["B", "L"]), "past": (F, ["B", "P"])}, ["y"])
    graph = import_model(m)
    assert [str(d) for d in graph.tensors["y"].shape] == ["B", "(L + P)"]
    assert ("(L + P)", "==", "T") in [(str(g.left), g.relation, str(g.right)) for g in graph.guards]
    feeds = {t: np.ones((2, n), np.float32) for t, n in (("x", 1), ("past", 3), ("mask", 4))}
    assert run(graph, feeds)["y"].sum() == 16


def test_sizes_that_nothing_reads_as_data_are_not_computed() -> None:
    nodes = [
        node("Shape", "x", "s"),
        node("Gather", "s i", "n"),
        node("Unsqueeze", "n a", "n1"),
        node("Expand", "w n1", "y"),
    ]
    constants = {"i": np.array(1), "a": np.array([0]), "w": np.ones(1, np.float32)}
    assert [n.output for n in import_model(model(nodes, X, ["y"], constants)).nodes] == ["y"]
    graph = import_model(model(nodes, X, ["y", "n1"], constants))
    assert run(graph, {"x": np.ones((2, 5), np.float32)})["n1"].tolist() == [5]


def test_constants_are_folded_by_the_reference() -> None:
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    nodes = [node("Transpose", "w", "t"), node("Expand", "w big", "e"), node("Concat", "x t", "y", axis=0)]
    m = model([*nodes, node("Gather", "e i", "z", axis=0)], {"x": (F, ["B", 2]), "i": (I64, ["K"])}, ["y", "z"],
              {"w": w, "big": np.array([9999, 2, 3])})  # fmt: skip
    graph = fold(import_model(m))
    assert [n.output for n in graph.nodes] == ["e", "y", "z"], "an Expand that grows a constant is not folded"
    assert graph.constants["t"].tolist() == w.T.tolist()
    assert run(graph, {"x": w[:0, :2], "i": np.zeros(0, np.int64)})["y"].tolist() == w.T.tolist()


def test_nested_ifs_read_names_of_the_branches_around_them() -> None:
    def branch(name: str, *ops: onnx.NodeProto) -> onnx.GraphProto:
        return helper.make_graph(list(ops), name, [], [onnx.ValueInfoProto(name=ops[-1].output[0])])

    inner = branch("t", node("Transpose", "a", "o"))
    outer = branch("t", node("Identity", "x", "a"), node("If", "c", "b", then_branch=inner, else_branch=inner))
    m = model([node("If", "c", "y", then_branch=outer, else_branch=outer)], X, ["y"], {"c": np.array(True)})
    assert run(import_model(m), {"x": np.ones((1, 2), np.float32)})["y"].shape == (2, 1)


def test_verify_finds_broken_graphs() -> None:
    from dataclasses import replace

    from polydyn.graph.verify import verify_graph

    graph = import_model(flat())
    with pytest.raises(PolydynError, match="defined twice"):
        verify_graph(replace(graph, nodes=graph.nodes * 2))
    with pytest.raises(PolydynError, match="has no source"):
        verify_graph(replace(graph, sources=()))
    with pytest.raises(PolydynError, match="no node computes"):
        verify_graph(replace(graph, nodes=()))
    verify_graph(graph)  # its nodes are remembered, with the tensors that they were checked with
    for name in (*graph.inputs, *graph.outputs):
        wrong = replace(graph.tensors[name], dtype="float64")
        with pytest.raises(PolydynError, match="broke an invariant"):
            verify_graph(replace(graph, tensors={**graph.tensors, name: wrong}))


def test_numpy_views_are_not_copied() -> None:
    raw = np.arange(6, dtype=np.float32)
    m = model([node("Concat", "x w", "y", axis=0)], {"x": (F, ["B"])}, ["y"])
    m.graph.initializer.append(numpy_helper.from_array(raw, "w"))
    assert not load_model(m).constants["w"].flags.owndata
