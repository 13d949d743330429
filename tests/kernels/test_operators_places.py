"""Operators with data-dependent indices: TopK, scatters, MaxPool's indices and MaxUnpool, reversed sequences, Col2Im.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_operators_scalar import compiled_agrees

import polydyn
from polydyn.checked import CheckedProgram
from polydyn.compiler import plan_program
from polydyn.errors import InputError, UnsupportedError
from tests.support.one_node import check, import_model, model_of

SIZES = (0, 1, 2, 7, 31, 33)
RNG = np.random.default_rng(0)
Array = np.ndarray[Any, Any]


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize(
    ("dtype", "top", "largest"),
    [
        ("float32", 1, 1),
        ("int32", 1, 0),
        ("float32", 3, 1),
        ("int64", 3, 0),
        ("uint8", 40, 1),
        ("float16", 40, 0),
        ("float64", 40, 1),
        ("uint64", 40, 0),
    ],
)
def test_top_k_with_ties(dtype: str, top: int, largest: int) -> None:
    """Few elements, many, and few of many: the leaf has a separate method for each. One was ranked by comparing all."""
    k = np.array([top], np.int64)
    model = model_of(
        "TopK", {"x": (dtype, ("B", "L")), "k": k}, {"largest": largest, "axis": 1}, outputs=("values", "places"),
    )  # fmt: skip
    calls = [{"x": RNG.integers(0, 9, (b, n)).astype(dtype)} for b in (0, 1, 3) for n in (*SIZES, 40, 400) if n >= top]
    graph, program, checked = (
        import_model(model),
        polydyn.compile(model, threads=1),
        CheckedProgram(plan_program(model)),
    )
    assert program.launches[0] == "order places"
    for feeds in calls:
        x = feeds["x"].astype(np.float64)
        order = np.argsort(-x if largest else x, axis=1, kind="stable")[:, :top]
        for got in (program.run(feeds), checked.run(feeds), polydyn.graph.reference.evaluate(graph, feeds)):
            np.testing.assert_array_equal(got["places"], order)
            np.testing.assert_array_equal(got["values"], np.take_along_axis(feeds["x"], order, 1))
    with pytest.raises(InputError, match=f"{top} elements"):
        program.run({"x": np.zeros((2, min(2, top - 1)), dtype)})


def test_top_k_of_nan_comes_first_and_last() -> None:
    x = np.array([[1, np.nan, 3, np.nan, -np.inf]], np.float32)
    for largest, places in ((1, [1, 3, 2, 0, 4]), (0, [4, 0, 2, 1, 3])):
        given = {"x": ("float32", (1, "L")), "k": np.array([5], np.int64)}
        model = model_of("TopK", given, {"largest": largest}, outputs=("values", "places"))
        assert polydyn.compile(model, threads=1).run({"x": x})["places"].tolist() == [places]


def test_a_k_that_is_data_is_a_size_that_the_host_reads() -> None:
    with pytest.raises(UnsupportedError, match="step of the host"):
        import_model(model_of("TopK", {"x": ("float32", (5,)), "k": ("int64", (1,))}, outputs=("v", "i")))


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "max", "min"])
@pytest.mark.parametrize("axis", [0, 1])
def test_scatter_elements(reduction: str, axis: int) -> None:
    given = {"x": ("float32", ("N", "M")), "i": ("int64", ("P", "Q")), "u": ("float32", ("P", "Q"))}
    model = model_of("ScatterElements", given, {"axis": axis, "reduction": reduction})
    calls = []
    for n in SIZES:
        shape = (n, 5)
        rows, columns = (min(3, n), 4)
        if n:
            count, lines = (rows, columns) if axis == 0 else (columns, rows)
            line = np.stack([RNG.permutation(shape[axis])[:count] for _ in range(lines)])
            indices = line if axis else line.T
            indices = np.where(RNG.random(indices.shape) < 0.5, indices, indices - shape[axis])
            calls.append({"x": floats(*shape), "i": indices[:rows, :columns].astype(np.int64)})
            calls[-1]["u"] = floats(*calls[-1]["i"].shape)
    compiled_agrees(model, *calls)
    with pytest.raises(InputError):
        polydyn.compile(model, threads=1).run({"x": floats(2, 5), "i": np.array([[9]]), "u": floats(1, 1)})


@pytest.mark.parametrize("reduction", ["none", "add", "max"])
def test_scatter_nd_at_data(reduction: str) -> None:
    given = {"x": ("float32", ("N", "M", 3)), "i": ("int64", ("P", 2)), "u": ("float32", ("P", 3))}
    model = model_of("ScatterND", given, {"reduction": reduction})
    calls = []
    for n in (1, 2, 7, 31):
        places = RNG.permutation(n * 4)[: min(n, 5)]
        indices = np.stack([places // 4, places % 4 - 4], 1).astype(np.int64)
        calls.append({"x": floats(n, 4, 3), "i": indices, "u": floats(len(indices), 3)})
    calls.append({"x": floats(0, 4, 3), "i": np.zeros((0, 2), np.int64), "u": floats(0, 3)})
    compiled_agrees(model, *calls)


def test_the_last_of_equal_places_stays() -> None:
    given = {"x": ("float32", ("N",)), "i": ("int64", ("P",)), "u": ("float32", ("P",))}
    program = polydyn.compile(model_of("ScatterElements", given), threads=1)
    out = program.run({"x": floats(3), "i": np.array([1, 1, -2]), "u": np.array([5, 6, 7], np.float32)})
    assert out["y"][1] == 7


@pytest.mark.parametrize("mode", ["linear", "circular"])
def test_tensor_scatter(mode: str) -> None:
    given = {"past": ("float32", ("B", 2, "S", 3)), "new": ("float32", ("B", 2, "L", 3)), "at": ("int64", ("B",))}
    model = model_of("TensorScatter", given, {"mode": mode}, opset=24)
    calls = []
    for b, s, n in ((0, 5, 2), (1, 1, 1), (2, 7, 3), (3, 33, 31), (2, 4, 0)):
        at = RNG.integers(0, min(s, s - n + 1) if mode == "linear" else s, b)
        calls.append({"past": floats(b, 2, s, 3), "new": floats(b, 2, n, 3), "at": at})
    compiled_agrees(model, *calls)


@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_reversed_sequences(axes: tuple[int, int]) -> None:
    batch, time = axes
    given = {"x": ("float32", ("A", "B", 3)), "n": ("int64", ("C",))}
    model = model_of("ReverseSequence", given, {"batch_axis": batch, "time_axis": time})
    calls = []
    for a, b in ((1, 1), (2, 7), (31, 2), (5, 33)):
        lengths = RNG.integers(0, (a, b)[time] + 1, (a, b)[batch])
        calls.append({"x": floats(a, b, 3), "n": lengths})
    compiled_agrees(model, *calls)
    with pytest.raises(InputError):
        polydyn.compile(model, threads=1).run({"x": floats(2, 2, 3), "n": np.array([1, 3])})


def test_pooling_and_its_inverse() -> None:
    attributes = {"kernel_shape": [2, 2], "strides": [2, 2]}
    model = model_of("MaxPool", {"x": ("float32", ("N", 2, "H", "W"))}, attributes, outputs=("y", "places"))
    pool = polydyn.compile(model, threads=1)
    given = {"x": ("float32", ("N", 2, "H", "W")), "i": ("int64", ("N", 2, "H", "W"))}
    unpool = polydyn.compile(model_of("MaxUnpool", given, attributes), threads=1)
    graph = import_model(model)
    for n, h, w in ((1, 2, 2), (2, 4, 6), (0, 4, 4), (3, 8, 2)):
        x = floats(n, 2, h, w)
        check(model, {"x": x}, graph=graph)
        out = pool.run({"x": x})
        back = unpool.run({"x": out["y"], "i": out["places"]})["y"]
        want = np.zeros(x.size, np.float32)
        want[out["places"].reshape(-1)] = out["y"].reshape(-1)
        np.testing.assert_array_equal(back.reshape(-1), want)


@pytest.mark.parametrize("p", [1, 2, 3])
def test_norms_of_windows(p: int) -> None:
    attributes = {"kernel_shape": [3], "p": p, "pads": [1, 1], "strides": [2]}
    model = model_of("LpPool", {"x": ("float32", ("N", 2, "L"))}, attributes, opset=22)
    program = polydyn.compile(model, threads=1)
    for n in (1, 2, 7, 31, 33):
        x = floats(2, 2, n)
        padded = np.pad(np.abs(x.astype(np.float64)), ((0, 0), (0, 0), (1, 1))) ** p
        want = np.stack([padded[:, :, i : i + 3].sum(-1) for i in range(0, n, 2)], -1) ** (1 / p)
        np.testing.assert_allclose(program.run({"x": x})["y"], want, 1e-5)


def test_ones_on_a_diagonal() -> None:
    model = model_of("EyeLike", {"x": ("float32", ("N", "M"))}, {"k": 1})
    compiled_agrees(model, *({"x": floats(n, 3)} for n in SIZES))


def test_columns_become_an_image() -> None:
    image, block = np.array([5, 7], np.int64), np.array([2, 3], np.int64)
    attributes = {"strides": [1, 2], "pads": [1, 0, 0, 1], "dilations": [2, 1]}
    given = {"x": ("float32", ("N", "C", "L")), "image": image, "block": block}
    model = model_of("Col2Im", given, attributes)
    columns = 4 * 3
    compiled_agrees(model, *({"x": floats(n, 6 * c, columns)} for n in (1, 3) for c in (1, 2)))
    assert polydyn.compile(model, threads=1).run({"x": floats(0, 6, columns)})["y"].shape == (0, 1, 5, 7)


@pytest.mark.parametrize("op", ["CumSum", "CumProd"])
@pytest.mark.parametrize(("reverse", "exclusive"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_running_sums_and_products(op: str, reverse: int, exclusive: int) -> None:
    given = {"x": ("float64", ("B", "L")), "axis": np.array(1, np.int64)}
    model = model_of(op, given, {"reverse": reverse, "exclusive": exclusive}, opset=26 if op == "CumProd" else 14)
    compiled_agrees(model, *({"x": RNG.uniform(0.5, 1.5, (2, n))} for n in SIZES if n))


@pytest.mark.parametrize("reverse", [0, 1])
def test_running_sums_of_columns_go_row_by_row(reverse: int) -> None:
    given = {"x": ("float32", ("A", "L", "C")), "axis": np.array(1, np.int64)}
    model = model_of("CumSum", given, {"reverse": reverse}, opset=14)
    program, checked = polydyn.compile(model, threads=2), CheckedProgram(plan_program(model))
    assert program.launches == ["scan y"]
    for a, n, c in ((1, 1, 1), (2, 33, 7), (3, 2, 31), (1, 0, 3), (2, 7, 300)):
        x = floats(a, n, c)
        want = x[:, ::-1].cumsum(1, dtype=np.float32)[:, ::-1] if reverse else x.cumsum(1, dtype=np.float32)
        for made in (program, checked):
            np.testing.assert_array_equal(made.run({"x": x})["y"], want)
