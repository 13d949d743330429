"""Invalid and extreme models: compiled correctly or rejected by name; none crashes the process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import polydyn
from polydyn.compiler import plan_program
from polydyn.errors import ModelError, PolydynError, UnsupportedError
from polydyn.graph.expand import import_model
from polydyn.testing.damage import attempt
from tests.support.tiny import model, node

F, I64, BOOL = "float32", "int64", "bool"
X: Any = {"x": (F, ["B", "L"])}
Edit = Callable[[onnx.ModelProto], object]


def relu() -> onnx.ModelProto:
    return model([node("Relu", "x", "y")], X, ["y"])


def edited(edit: Edit) -> onnx.ModelProto:
    nodes = [node("Concat", "x w", "t", axis=0), node("Relu", "t", "y")]
    m = model(nodes, X, ["y"], {"w": np.ones((1, 3), np.float32)})
    edit(m)
    return m


# -- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.graph.initializer.append(m.graph.initializer[0]), "initializer w is there twice"),
        (lambda m: m.graph.input.append(m.graph.input[0]), "input x is there twice"),
        (lambda m: m.graph.node[0].output.append("t"), "t is defined twice|has 2 outputs"),
        (lambda m: m.graph.node.append(node("Split", "x", "s s", axis=0)), "s is defined twice"),
        (lambda m: m.graph.node.append(node("Relu", "x", "w")), "w is defined twice"),
        (lambda m: setattr(m.graph.initializer[0], "name", ""), "an initializer has no name"),
        (lambda m: setattr(m.graph.input[0], "name", ""), "an input has no name"),
        (lambda m: setattr(m.graph.output[0], "name", ""), "an output has no name"),
        (lambda m: m.graph.initializer.pop(), "w is read but defined nowhere"),
        (lambda m: m.graph.node[1].input.__setitem__(0, "lost"), "lost is read but defined nowhere"),
        (lambda m: m.graph.node[0].input.__setitem__(0, "y"), "in a cycle"),
    ],
)
def test_names_that_contradict_each_other_are_refused(edit: Edit, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        polydyn.compile(edited(edit))


def test_names_that_are_no_text_are_refused() -> None:
    data = edited(lambda m: [m.graph.node[k].ClearField(f) for k, f in ((0, "output"), (1, "input"))])
    data.graph.node[0].output.append("tttt")
    data.graph.node[1].input.append("tttt")
    with pytest.raises(ModelError, match="not text"):
        polydyn.compile(data.SerializeToString().replace(b"tttt", b"t\xff\xfet"))


STRANGE = [
    "größe/λ 张量", 'a"b\\c', "a\nb", "*/ } #error", "%s%n%d", "?" + "?/", "a\0b", "d0", "r1", "nth", "x@0", "int", "2",
    "%n0",
]  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
def test_any_text_is_a_name(name: str, tmp_path: Path) -> None:
    """Names of tensors, dims, nodes and the graph appear unchanged in C text, manifests and messages."""
    mid, out, weights = f"{name}.mid", f"{name}.out", f"{name}.w"
    w = np.arange(12, dtype=np.float32).reshape(3, 4)
    nodes = [
        helper.make_node("MatMul", [name, weights], [mid], name=f"{name}.node"),
        helper.make_node("Softmax", [mid], [out], name=name, axis=-1),
        helper.make_node("Shape", [name], [f"{out}.shape"]),
    ]
    m = model(nodes, {name: (F, [name, 3])}, [out, f"{out}.shape"], {weights: w})
    m.graph.name = name
    program = polydyn.compile(m, threads=1)
    program.save(tmp_path / "p")
    loaded = polydyn.load(tmp_path / "p", threads=1)
    x = np.ones((5, 3), np.float32)
    e = np.exp(x @ w - (x @ w).max(-1, keepdims=True))
    for p in (program, loaded):
        got = p.run({name: x})
        np.testing.assert_allclose(got[out], e / e.sum(-1, keepdims=True), 1e-5)
        assert got[f"{out}.shape"].tolist() == [5, 3]
    (symbol,) = loaded.symbols
    assert name in loaded.inputs and str(loaded.explain(**{symbol: 7})) and loaded.explain(**{symbol: 0}).details()


def test_names_like_those_of_parts_and_passes_are_kept_apart() -> None:
    """``c/0`` is the internal name of a part of the concatenation c, ``y.1`` of a tensor of an expansion."""
    nodes = [
        node("Concat", "x z", "c", axis=0), node("Neg", "c/0", "y.1"), node("Exp", "x", "c/0"),
        node("Softmax", "c", "y", axis=-1), node("Add", "y.1 z", "c/1"),
    ]  # fmt: skip
    nodes = [nodes[2], nodes[1], nodes[0], nodes[3], nodes[4]]
    m = model(nodes, {"x": (F, ["B", 3]), "z": (F, ["B", 3])}, ["c", "c/1", "y"])
    program = polydyn.compile(m, threads=1)
    r = np.random.default_rng(0)
    x, z = r.standard_normal((2, 4, 3)).astype(np.float32)
    got = program.run({"x": x, "z": z})
    np.testing.assert_array_equal(got["c"], np.concatenate([x, z]))
    np.testing.assert_allclose(got["c/1"], z - np.exp(x), 1e-5, 1e-5)


def test_dims_and_inputs_that_are_called_like_numbers() -> None:
    """isl rejected them in proofs of a convolution's subscripts."""
    w = np.ones((1, 1, 3, 3), np.float32)
    m = model([node("Conv", "1 w", "y")], {"1": (F, ["0", 1, "-2", None])}, ["y"], {"w": w})
    got = polydyn.compile(m, threads=1).run({"1": np.ones((2, 1, 4, 5), np.float32)})["y"]
    assert got.shape == (2, 1, 2, 3) and (got == 9).all()


def test_two_dims_of_reserved_names_stay_two() -> None:
    m = model([node("Identity", "x", "y")], {"x": (F, ["d0", "d0_"])}, ["y"])
    assert polydyn.compile(m, threads=1).run({"x": np.ones((2, 3), np.float32)})["y"].shape == (2, 3)


# -- nodes -----------------------------------------------------------------------------------------------------------


def shaped(dims: list[Any], *nodes: onnx.NodeProto, **constants: Any) -> onnx.ModelProto:
    inputs = {"x": (F, dims), "i": (I64, ["N"]), "c": (BOOL, ["N"])}
    return model(list(nodes), inputs, [nodes[-1].output[0]], {k: np.asarray(v) for k, v in constants.items()})


BROKEN: dict[str, onnx.ModelProto] = {
    "Relu.*has 0 inputs": shaped(["B"], helper.make_node("Relu", [], ["y"])),
    "Relu.*has 2 inputs": shaped(["B"], node("Relu", "x x", "y")),
    "Add.*has 1 inputs": shaped(["B"], node("Add", "x", "y")),
    "Split.*has 0 outputs": shaped(["B"], helper.make_node("Split", ["x"], [], axis=0), node("Relu", "x", "y")),
    r"input 0 \(X\) is absent": shaped(["B"], node("Relu", "-", "y")),
    "input 1 .* is absent": shaped(["B"], node("Concat", "x -", "y", axis=0)),
    "attribute axis is missing": shaped(["B"], node("Concat", "x x", "y")),
    "attribute to is missing": shaped(["B"], node("Cast", "x", "y")),
    "attribute axis is a str": shaped(["B"], node("Concat", "x x", "y", axis="last")),
    "attribute perm is a int": shaped(["B", 2], node("Transpose", "x", "y", perm=1)),
    "attribute alpha is a int": shaped(["B"], node("LeakyRelu", "x", "y", alpha=1)),
    "x and i are float32 and int64": shaped(["B"], node("Add", "x i", "y")),
    "x is float32, Not takes booleans": shaped(["B"], node("Not", "x", "y")),
    "c is bool, Relu takes": shaped(["B"], node("Relu", "c", "y")),
    "i is int64, Where takes booleans": shaped(["B"], node("Where", "i x x", "y")),
    "x is float32, Reshape takes integers": shaped(["B"], node("Reshape", "x x", "y")),
    "Gemm cannot take": shaped(["B", 2, 3], node("Gemm", "x x", "y")),
    "axis 7": shaped(["B"], node("Softmax", "x", "y", axis=7)),
    "perm": shaped(["B", 2], node("Transpose", "x", "y", perm=[0, 0])),
    "at most one size": shaped(["B"], node("Reshape", "x s", "y"), s=np.array([-1, -1])),
    "step of 0": shaped(["B"], node("Slice", "x a b d e", "y"), a=[0], b=[1], d=[0], e=[0]),
    "different lengths": shaped(["B"], node("Slice", "x a b", "y"), a=[0], b=[1, 2]),
    "Conv": shaped(["B"], node("Conv", "x x", "y")),
    "MatMul of a scalar": shaped([], node("MatMul", "x x", "y")),
}


@pytest.mark.parametrize("message", BROKEN)
def test_nodes_that_onnx_does_not_define_are_refused(message: str) -> None:
    with pytest.raises(PolydynError, match=message) as e:
        polydyn.compile(BROKEN[message])
    assert "broke an invariant" not in str(e.value)


@pytest.mark.parametrize("opset", [0, -3, 10_000, 2**40])
def test_opsets_that_onnx_does_not_know_are_refused(opset: int) -> None:
    m = relu()
    m.opset_import[0].version = opset
    with pytest.raises(UnsupportedError, match=f"opset {opset}, onnx"):
        polydyn.compile(m)


def test_damaged_files_are_read_or_refused_with_a_place() -> None:
    """``make damage`` has three thousand."""
    results = [attempt(number) for number in range(60)]
    assert not [r for r in results if r.startswith("failed")]
    assert {"read", "refused"} <= set(results)


# -- graphs ----------------------------------------------------------------------------------------------------------


def test_a_sum_of_a_thousand_nodes_is_compiled() -> None:
    """The chain is far deeper than Python's recursion limit."""
    count = 1200
    nodes = [node("Add" if k % 2 else "Abs", f"t{k} one" if k % 2 else f"t{k}", f"t{k + 1}") for k in range(count)]
    m = model(nodes, {"t0": (F, ["N"])}, [f"t{count}"], {"one": np.float32(1)})
    program = polydyn.compile(m, threads=1)
    x = np.array([-2, 3, 0.5], np.float32)
    np.testing.assert_array_equal(program.run({"t0": x})[f"t{count}"], np.abs(x) + np.float32(count // 2))


def test_a_sum_of_many_operands_is_compiled() -> None:
    def sum_of(count: int) -> onnx.ModelProto:
        nodes = [helper.make_node("Mean", ["x", "z"] * (count // 2), ["y"])]
        return model(nodes, {n: (F, ["N"]) for n in "xz"}, ["y"])

    x, z = np.random.default_rng(0).standard_normal((2, 7)).astype(np.float32)
    got = polydyn.compile(sum_of(70), threads=1).run({"x": x, "z": z})
    np.testing.assert_allclose(got["y"], (x + z) / 2, 1e-4, 1e-5)
    assert len(import_model(sum_of(1500)).nodes) > 3, "nested no deeper than Python's recursion goes"


@pytest.mark.parametrize(("count", "power"), [(1000, 1), (20, 2)])
def test_many_positions_behind_a_size_are_written_out(count: int, power: int) -> None:
    """``arange(1000) + length`` is shape arithmetic of a thousand elements, and read as data; also with gaps."""

    def model_of(positions: Any) -> onnx.ModelProto:
        nodes = [node("Shape", "x", "s", start=0, end=1), node("Add", "p s", "q"), node("Cast", "q", "y", to=1)]
        return model(nodes, {"x": (F, ["N"])}, ["y"], {"p": positions})

    positions = np.arange(count) ** power
    program = polydyn.compile(model_of(positions), threads=1)
    for n in (0, 1, 5):
        assert (program.run({"x": np.zeros(n, np.float32)})["y"] == positions + n).all()
    import_model(model_of(np.arange(1000) ** power))  # nested no deeper than Python's recursion limit


def test_a_concatenation_of_many_parts_is_compiled() -> None:
    m = model([helper.make_node("Concat", ["x", "z"] * 25, ["y"], axis=0)], {n: (F, [n, 2]) for n in "xz"}, ["y"])
    program = polydyn.compile(m, threads=1)
    x, z = np.ones((2, 2), np.float32), np.zeros((3, 2), np.float32)
    assert (program.run({"x": x, "z": z})["y"] == np.concatenate([x, z] * 25)).all()


def test_inputs_that_nobody_reads_are_asked_for_and_checked() -> None:
    m = model([node("Relu", "x", "y")], X | {"unused": (I64, ["K", "B"])}, ["y"], {"w": np.ones(3, np.float32)})
    program = polydyn.compile(m, threads=1)
    x = np.ones((2, 3), np.float32)
    assert program.run({"x": x, "unused": np.zeros((0, 2), np.int64)})["y"].shape == (2, 3)
    for feeds in ({"x": x}, {"x": x, "unused": np.zeros((0, 3), np.int64)}, {"x": x, "unused": np.zeros(2, np.int64)}):
        with pytest.raises(PolydynError, match="unused"):
            program.run(feeds)


def test_a_model_without_inputs_runs() -> None:
    m = model([node("Range", "a b c", "y")], {}, ["y"], {"a": np.int64(0), "b": np.int64(5), "c": np.int64(2)})
    assert polydyn.compile(m, threads=1).run({})["y"].tolist() == [0, 2, 4]


def test_a_function_that_calls_itself_is_refused() -> None:
    m = model([helper.make_node("f", ["x"], ["y"], domain="local")], X, ["y"])
    m.opset_import.append(helper.make_opsetid("local", 1))
    for name, called in (("f", "g"), ("g", "f")):
        body = [helper.make_node(called, ["a"], ["b"], domain="local")]
        m.functions.append(helper.make_function("local", name, ["a"], ["b"], body, [helper.make_opsetid("local", 1)]))
    with pytest.raises(ModelError, match="local::f calls itself"):
        polydyn.compile(m)


def test_functions_that_double_the_nodes_are_refused() -> None:
    def nested(depth: int) -> onnx.ModelProto:
        m = model([helper.make_node("f0", ["x"], ["y"], domain="local")], X, ["y"])
        m.opset_import.append(helper.make_opsetid("local", 1))
        opsets = list(m.opset_import)
        for k in range(depth):
            op, domain = (f"f{k + 1}", "local") if k + 1 < depth else ("Abs", "")
            body = [helper.make_node(op, [a], [b], domain=domain) for a, b in ("at", "tb")]
            m.functions.append(helper.make_function("local", f"f{k}", ["a"], ["b"], body, opsets))
        return m

    assert len(import_model(nested(3)).nodes) == 8
    with pytest.raises(UnsupportedError, match=f"has {2**40} nodes with those of its calls of functions"):
        import_model(nested(40))


def test_long_chains_of_views_and_of_shape_arithmetic_are_compiled() -> None:
    """Both recursed once for each node. A size with more than 32 nested divisions is computed by the program."""
    turns = [node("Transpose", f"t{k}", f"t{k + 1}", perm=[1, 0]) for k in range(400)]
    assert import_model(model([*turns, node("Abs", "t400", "y")], {"t0": (F, ["M", "N"])}, ["y"])).nodes
    plan_program(model([*turns, node("Abs", "t400", "y")], {"t0": (F, ["M", "N"])}, ["y"]))
    halves = [node("Div" if k % 2 else "Mul", f"s{k} c{k % 2}", f"s{k + 1}") for k in range(300)]
    nodes = [node("Shape", "x", "s0"), *halves, node("Expand", "v s300", "y")]
    m = model(nodes, {"x": (F, ["N"])}, ["y"], {"v": np.ones(1, np.float32), "c0": np.array([2]), "c1": np.array([2])})
    assert polydyn.compile(m, threads=1).run({"x": np.ones(3, np.float32)})["y"].shape == (3,)


def test_more_axes_than_the_runtime_has_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"(?s)'x' has 17 axes.*16"):
        polydyn.compile(model([node("Relu", "x", "y")], {"x": (F, [1] * 16 + ["N"])}, ["y"]))


# -- data files ------------------------------------------------------------------------------------------------------


def external(folder: Path, **info: str | None) -> Path:
    """Write a model whose constant is stored in ``w.bin``, with entries of its location replaced or (None) omitted."""
    folder.mkdir(exist_ok=True)
    m = model([node("Concat", "x w", "y", axis=0)], {"x": (F, ["B", 300])}, ["y"], {"w": np.ones((9, 300), np.float32)})
    onnx.save(m, folder / "m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    proto = onnx.load(folder / "m.onnx", load_external_data=False)
    entries = proto.graph.initializer[0].external_data
    given = {e.key: e.value for e in entries} | info
    del entries[:]
    for key, value in given.items():
        if value is not None:
            entries.add(key=key, value=value)
    (folder / "m.onnx").write_bytes(proto.SerializeToString())
    return folder / "m.onnx"


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"location": "gone.bin"}, "not next to the model"),
        ({"location": "../secret.bin"}, "not next to the model"),
        ({"location": "SECRET"}, "not next to the model"),
        ({"location": "link.bin"}, "not next to the model"),
        ({"location": "loop.bin"}, "not next to the model|do not fit"),
        ({"location": "."}, "not next to the model"),
        ({"location": ""}, "not next to the model"),
        ({"location": None}, "not next to the model"),
        ({"location": "/dev/zero"}, "not next to the model"),
        ({"location": "w\0.bin"}, "not next to the model"),
        ({"offset": "-4096"}, "do not fit"),
        ({"offset": "4096"}, "do not fit"),
        ({"offset": "many"}, "do not fit"),
        ({"offset": str(2**70)}, "do not fit"),
        ({"length": "12"}, "do not fit"),
        ({"length": "-1"}, "do not fit"),
    ],
)
def test_data_files_that_lie_elsewhere_or_hold_something_else_are_refused(
    info: dict[str, str | None], message: str, tmp_path: Path
) -> None:
    (tmp_path / "secret.bin").write_bytes(bytes(20_000))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "link.bin").symlink_to(tmp_path / "secret.bin")
    (tmp_path / "model" / "loop.bin").symlink_to("loop.bin")
    if info.get("location") == "SECRET":
        info = {"location": str(tmp_path / "secret.bin")}
    with pytest.raises(ModelError, match=message):
        polydyn.compile(external(tmp_path / "model", **info))


def test_a_model_behind_a_link_finds_its_data(tmp_path: Path) -> None:
    path = external(tmp_path / "model", length=None)
    (tmp_path / "folder").symlink_to(tmp_path / "model")
    (tmp_path / "link.onnx").symlink_to(path)
    for p in (tmp_path / "folder" / "m.onnx", tmp_path / "link.onnx"):
        assert [str(d) for d in import_model(p).tensors["y"].shape] == ["(B + 9)", "300"]


@pytest.mark.parametrize("dims", [[-1], [2, -3], [2**62, 8], [2**40, 2**40], [7]])
def test_constants_of_impossible_shapes_are_refused(dims: list[int]) -> None:
    def edit(m: onnx.ModelProto) -> None:
        m.graph.initializer[0].dims[:] = dims

    with pytest.raises(ModelError, match="do not fit its shape"):
        polydyn.compile(edited(edit))


def test_dims_of_any_size_are_refused_or_stay_exact() -> None:
    nodes = [node("Reshape", "x s", "r"), node("Shape", "r", "y")]
    m = model(nodes, {"x": (F, ["B", 2**40])}, ["y"], {"s": np.array([-1])})
    program = polydyn.compile(m, threads=1)
    assert program.run({"x": np.zeros((0, 2**40), np.float32)})["y"].tolist() == [0]
    with pytest.raises(PolydynError, match="64 bits"):
        plan_program(model([node("Relu", "x", "y")], {"x": (F, [2**40, 2**40])}, ["y"]))
        polydyn.compile(model([node("Relu", "x", "y")], {"x": (F, [2**40, 2**40])}, ["y"]), threads=1)


def test_the_types_of_initializers_are_refused_by_name() -> None:
    m = edited(lambda m: setattr(m.graph.initializer[0], "data_type", TensorProto.STRING))
    with pytest.raises(UnsupportedError, match="STRING"):
        polydyn.compile(m)
