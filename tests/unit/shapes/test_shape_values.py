"""Shape arithmetic through element-wise operators, detours through floats included, at every ugly size."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from polydyn.errors import UnsupportedError
from polydyn.graph.expand import import_model
from tests.support.tiny import model, node, run

F = "float32"
INT, FLOAT = 7, 1
FLOATS = {"halves": np.array([0.5, 1.5], np.float32)}
FLOATS |= {"half": np.float32(0.5), "third": np.float32(1 / 3), "two": np.float32(2)}

CHAINS = {
    "half": [node("Cast", "n", "f", to=FLOAT), node("Mul", "f half", "g"), node("Floor", "g", "h"),
             node("Cast", "h", "m", to=INT)],
    "ceil": [node("Cast", "n", "f", to=FLOAT), node("Div", "f two", "g"), node("Ceil", "g", "h"),
             node("Cast", "h", "m", to=INT)],
    "clip": [node("Sub", "n four", "a"), node("Max", "a zero", "b"), node("Min", "b nine", "m")],
    "mod": [node("Mod", "n four", "a"), node("Add", "a n", "m")],
    "choice": [node("Equal", "n minus", "c"), node("Where", "c four n", "m")],
    "square": [node("Pow", "n two_", "a"), node("Add", "a one_", "m")],
    "cube": [node("Sub", "n one_", "a"), node("Pow", "a three_", "b"), node("Mod", "b nine_", "m")],
    "float square": [node("Cast", "n", "f", to=FLOAT), node("Pow", "f two", "g"), node("Mul", "g half", "h"),
                     node("Cast", "h", "m", to=INT)],
    "sum": [node("Cast", "n", "f", to=FLOAT), node("Sum", "f half two", "g"), node("Cast", "g", "m", to=INT)],
    "clip both": [node("Clip", "n three_ nine_", "m")],
    "clip below": [node("Sub", "n four", "a"), node("Clip", "a zero_", "m")],
    "clip above": [node("Clip", "n - nine_", "m")],
    "relu": [node("Sub", "n four", "a"), node("Relu", "a", "m")],
    "round": [node("Cast", "n", "f", to=FLOAT), node("Mul", "f half", "g"), node("Round", "g", "h"),
              node("Cast", "h", "m", to=INT)],
    "round below 0": [node("Cast", "n", "f", to=FLOAT), node("Mul", "f half", "g"), node("Neg", "g", "h"),
                      node("Round", "h", "i"), node("Neg", "i", "j"), node("Cast", "j", "m", to=INT)],
    "sign": [node("Sub", "n four", "a"), node("Sign", "a", "b"), node("Add", "b four", "m")],
    "float extremes": [node("Cast", "n", "f", to=FLOAT), node("Mul", "f half", "g"), node("Max", "g two", "h"),
                       node("Min", "h f", "i"), node("Cast", "i", "m", to=INT)],
    "float mod": [node("Cast", "n", "f", to=FLOAT), node("Mod", "f two", "g", fmod=1), node("Cast", "g", "m", to=INT)],
    "exclusive or": [node("Less", "n four", "a"), node("Less", "n nine", "b"), node("Xor", "a b", "c"),
                     node("Cast", "c", "m", to=INT)],
    "finite": [node("Cast", "n", "f", to=FLOAT), node("IsNaN", "f", "a"), node("IsInf", "f", "b"),
               node("Or", "a b", "c"), node("Where", "c four n", "m")],
    "slice of floats": [node("Concat", "n n", "a", axis=0), node("Cast", "a", "f", to=FLOAT),
                        node("Mul", "f halves", "g"), node("Slice", "g one_ two_", "h"),
                        node("Cast", "h", "m", to=INT)],
    "prefix sums": [node("Concat", "n one_ n", "a", axis=0), node("CumSum", "a zero_", "b"),
                    node("CumSum", "a zero_", "c", exclusive=1, reverse=1), node("Add", "b c", "d"),
                    node("Slice", "d one_ two_", "m")],
    "read elements": [node("Concat", "one_ n", "a", axis=0), node("GatherElements", "a minus", "m")],
    "read tuples": [node("Concat", "one_ n", "a", axis=0), node("GatherND", "a tuple", "b"),
                    node("Add", "b one_", "m")],
    "written elements": [node("Concat", "one_ n", "a", axis=0), node("Add", "n two_", "b"),
                         node("ScatterElements", "a minus b", "c"), node("Slice", "c one_ two_", "m")],
    "written tuples": [node("Concat", "one_ four", "a", axis=0), node("ScatterND", "a tuple n", "b"),
                       node("Slice", "b one_ two_", "m")],
    "logic": [node("Less", "minus n", "a"), node("Not", "a", "b"), node("Cast", "b", "c", to=INT),
              node("Add", "c n", "m")],
}  # fmt: skip
INTS = {
    "four": np.array([4]), "zero": np.array([0]), "nine": np.array([9]), "minus": np.array([-1]), "one_": np.array([1]),
    "two_": np.array([2]), "three_": np.array(3), "nine_": np.array(9), "zero_": np.array(0), "tuple": np.array([[1]]),
}  # fmt: skip


def chain(name: str) -> onnx.ModelProto:
    nodes = [node("Shape", "x", "n"), *CHAINS[name], node("Expand", "one m", "y")]
    return model(nodes, {"x": (F, ["N"])}, ["y"], FLOATS | INTS | {"one": np.ones(1, np.float32)})


@pytest.mark.parametrize("name", CHAINS)
def test_sizes_survive_arithmetic(name: str) -> None:
    m = chain(name)
    graph = import_model(m)
    assert [n.output for n in graph.nodes] == ["y"], "no size is computed at run time"
    for n in (0, 1, 2, 5, 10, 127, 128):
        x = np.zeros(n, np.float32)
        assert run(graph, {"x": x})["y"].shape == ReferenceEvaluator(m).run(None, {"x": x})[0].shape, n


def test_floats_that_are_no_exact_fraction_are_left_to_the_host() -> None:
    nodes = [
        node("Shape", "x", "n"), node("Cast", "n", "f", to=FLOAT), node("Mul", "f third", "g"),
        node("Cast", "g", "m", to=INT), node("Expand", "one m", "y"),
    ]  # fmt: skip
    with pytest.raises(UnsupportedError, match="Expand_y needs a step of the host"):
        import_model(model(nodes, {"x": (F, ["N"])}, ["y"], FLOATS | {"one": np.ones(1, np.float32)}))


def test_sizes_used_as_data_are_written_out() -> None:
    nodes = [node("Shape", "x", "n"), node("Cast", "n", "f", to=FLOAT), node("Mul", "x f", "y")]
    graph = import_model(model(nodes, {"x": (F, ["N"])}, ["y"]))
    assert run(graph, {"x": np.ones(3, np.float32)})["y"].tolist() == [3, 3, 3]


BIG = {"int32": 70000, "int64": 10**10}


@pytest.mark.parametrize("dtype", BIG)
@pytest.mark.parametrize("op", ["Mul", "Sub", "Neg", "Abs", "ReduceProd"])
def test_constant_integers_wrap(op: str, dtype: str) -> None:
    ends = np.iinfo(dtype)
    c = {"Mul": [BIG[dtype], 3], "ReduceProd": [BIG[dtype], BIG[dtype]]}.get(op, [ends.min, ends.min])
    d = {"Mul": [BIG[dtype], -BIG[dtype]], "Sub": [1, ends.max]}.get(op)
    first = node(op, "c d" if d else "c", "e", **({"keepdims": 1} if op == "ReduceProd" else {}))
    constants = {"c": np.array(c, dtype)} | ({"d": np.array(d, dtype)} if d else {})
    m = model([first, node("Add", "x e", "y"), node("Mod", "e s", "z")], {"x": (dtype, ["N"])}, ["y", "z"],
              constants | {"s": np.array([7], dtype)})  # fmt: skip
    x = np.array([1, 2], dtype)
    with np.errstate(all="ignore"):
        want = ReferenceEvaluator(m).run(None, {"x": x})
    got = run(import_model(m), {"x": x})
    assert [got[k].tolist() for k in ("y", "z")] == [w.tolist() for w in want]


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("numbers", [("min", "max"), ("max", "min"), ("max", "max"), ("min", "min"), ("min", 0, "max")])
def test_extreme_constants(dtype: str, numbers: tuple[str, ...]) -> None:
    ends = {"min": np.iinfo(dtype).min, "max": np.iinfo(dtype).max}
    c = np.array([ends.get(n, 0) for n in numbers], dtype)
    m = model([node("Max", "x c", "y"), node("Equal", "x c", "z")], {"x": (dtype, ["N", len(c)])}, ["y", "z"], {"c": c})
    x = np.stack([c, c[::-1]])
    got = run(import_model(m), {"x": x})
    assert (got["y"] == np.maximum(x, c)).all() and (got["z"] == (x == c)).all()
