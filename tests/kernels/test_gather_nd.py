"""GatherND: every component of an index tuple belongs to its own axis; tuples of positions are views, not gathers."""

from __future__ import annotations

import numpy as np
import pytest

import polydyn
from polydyn.errors import InputError
from polydyn.graph.expand import import_model
from polydyn.schedules.expr import indices
from tests.support.one_node import model_of
from tests.support.tiny import model, node


@pytest.fixture(scope="module")
def program() -> polydyn.Program:
    return polydyn.compile(model_of("GatherND", {"x": ("float32", ("A", "B", "C")), "i": ("int64", ("R", 2))}))


X = np.arange(2 * 5 * 3, dtype=np.float32).reshape(2, 5, 3)


def test_each_component_is_checked_against_its_own_axis(program: polydyn.Program) -> None:
    i = np.array([[1, 4], [0, -5], [-2, 2]])
    np.testing.assert_array_equal(program.run({"x": X, "i": i})["y"], X[i[:, 0], i[:, 1]])
    assert program.run({"x": X, "i": i[:0]})["y"].shape == (0, 3)


@pytest.mark.parametrize(
    ("tuples", "message"),
    [
        ([[0, 0], [2, 0]], "axis of size A, here 2: element 2 is 2"),
        ([[0, 4], [1, 5]], "axis of size B, here 5: element 3 is 5"),
        ([[-3, 0]], "axis of size A, here 2: element 0 is -3"),
        ([[0, -6]], "axis of size B, here 5: element 1 is -6"),
    ],
)
def test_tuples_outside_are_refused_by_axis(program: polydyn.Program, tuples: list[list[int]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        program.run({"x": X, "i": np.array(tuples)})


def test_tuples_that_are_nowhere_in_memory_are_checked_too() -> None:
    """A transposed input is checked in place, arithmetic where it is used."""
    m = model(
        [node("Transpose", "i", "t", perm=[1, 0]), node("Mul", "t two", "j"), node("GatherND", "x j", "y")],
        {"x": ("float32", ["A", "B", "C"]), "i": ("int64", [2, "R"])}, ["y"], {"two": np.array(2)},
    )  # fmt: skip
    transposed = polydyn.compile(m, threads=2)
    i = np.array([[0, -1, 0], [1, 2, 0]])
    np.testing.assert_array_equal(transposed.run({"x": X, "i": i})["y"], X[2 * i[0], 2 * i[1]])
    with pytest.raises(InputError, match="axis of size B, here 5: element 1 is 6"):
        transposed.run({"x": X, "i": np.array([[0, 0], [1, 3]])})
    assert transposed.run({"x": X, "i": i[:, :0]})["y"].shape == (0, 3)


def test_tuples_of_positions_are_a_view() -> None:
    """torch.export writes ``mask[arange(B)[:, None], arange(L)[None]]`` in this way."""
    graph = import_model(
        model(
            [
                node("Shape", "m", "b", start=0, end=1), node("Squeeze", "b", "bs"),
                node("Shape", "m", "l", start=1, end=2), node("Squeeze", "l", "ls"),
                node("Range", "zero bs one", "rows"), node("Range", "zero ls one", "columns"),
                node("Unsqueeze", "rows last", "rows1"), node("Unsqueeze", "columns first", "columns1"),
                node("Shape", "m", "both"),
                node("Expand", "rows1 both", "r"), node("Expand", "columns1 both", "c"),
                node("Unsqueeze", "r behind", "r1"), node("Unsqueeze", "c behind", "c1"),
                node("Concat", "r1 c1", "tuples", axis=-1), node("GatherND", "m tuples", "y"),
            ],
            {"m": ("float32", ["B", "L"])},
            ["y"],
            {
                "zero": np.array(0), "one": np.array(1), "last": np.array([1]), "first": np.array([0]),
                "behind": np.array([2]),
            },
        )
    )  # fmt: skip
    assert not graph.bounds
    assert not any(i.fetches() for n in graph.nodes if hasattr(n, "body") for i in indices(n.body))


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_numbers_from_the_end_of_an_axis_of_unknown_size_cost_no_division(dtype: str) -> None:
    """A 64-bit division per element made such gathers twice as slow."""
    nodes = [node("GatherElements", "x i", "y", axis=1), node("Gather", "x j", "z", axis=1)]
    inputs = {"x": ("float32", ["N", "M"]), "i": (dtype, ["N", "K"]), "j": (dtype, ["L"])}
    program = polydyn.compile(model(nodes, inputs, ["y", "z"]), threads=1)
    kernels = [k for name, text in program.sources.items() if "kernel" in name for k in text.splitlines()]
    assert not [k for k in kernels if "PD_PUT" in k and "fdiv" in k]
    for n, m, count in ((3, 5, 7), (1, 1, 1), (4, 33, 2), (2, 6, 0)):
        x = np.arange(n * m, dtype=np.float32).reshape(n, m)
        i = np.random.default_rng(m).integers(-m, m, (n, count)).astype(dtype)
        j = np.array([0, -m, m - 1, -1], dtype)
        got = program.run({"x": x, "i": i, "j": j})
        np.testing.assert_array_equal(got["y"], np.take_along_axis(x, i % m, 1))
        np.testing.assert_array_equal(got["z"], x[:, j])
        for wrong in (m, -m - 1):
            with pytest.raises(InputError, match=f"is {wrong}"):
                program.run({"x": x, "i": i, "j": np.array([wrong], dtype)})
