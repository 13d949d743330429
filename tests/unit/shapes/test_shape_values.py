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
FLOATS = {"half": np.float32(0.5), "third": np.float32(1 / 3), "two": np.float32(2)}

CHAINS = {
    "half": [node("Cast", "n", "f", to=FLOAT), node("Mul", "f half", "g"), node("Floor", "g", "h"),
             node("Cast", "h", "m", to=INT)],
    "ceil": [node("Cast", "n", "f", to=FLOAT), node("Div", "f two", "g"), node("Ceil", "g", "h"),
             node("Cast", "h", "m", to=INT)],
    "clip": [node("Sub", "n four", "a"), node("Max", "a zero", "b"), node("Min", "b nine", "m")],
    "mod": [node("Mod", "n four", "a"), node("Add", "a n", "m")],
    "choice": [node("Equal", "n minus", "c"), node("Where", "c four n", "m")],
    "logic": [node("Less", "minus n", "a"), node("Not", "a", "b"), node("Cast", "b", "c", to=INT),
              node("Add", "c n", "m")],
}  # fmt: skip
INTS = {"four": np.array([4]), "zero": np.array([0]), "nine": np.array([9]), "minus": np.array([-1])}


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
