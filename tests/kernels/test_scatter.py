"""ScatterND at positions, which exporters write for ``x[:, 1:] = y``; scatters at data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polydyn
from polydyn.checked import CheckedProgram
from polydyn.compiler import plan_program
from polydyn.errors import InputError
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from tests.support.one_node import model_of
from tests.support.tiny import model, node


def shifted(attributes: dict[str, Any] | None = None) -> Any:
    """Build y = x with row b, columns 1.. replaced by u, for every b; indices from shapes."""
    return model(
        [
            node("Shape", "x", "b", start=0, end=1), node("Squeeze", "b", "bs"),
            node("Shape", "u", "l", start=1, end=2), node("Squeeze", "l", "ls"), node("Add", "ls one", "end"),
            node("Range", "zero bs one", "rows"), node("Range", "one end one", "columns"),
            node("Unsqueeze", "rows behind", "rows1"), node("Shape", "u", "both"),
            node("Expand", "rows1 both", "r"), node("Expand", "columns both", "c"),
            node("Unsqueeze", "r last", "r1"), node("Unsqueeze", "c last", "c1"),
            node("Concat", "r1 c1", "tuples", axis=-1),
            node("ScatterND", "x tuples u", "y", **(attributes or {})),
        ],
        {"x": ("float32", ["B", "L"]), "u": ("float32", ["B", "M"])},
        ["y"],
        {"zero": np.array(0), "one": np.array(1), "behind": np.array([1]), "last": np.array([-1])},
    )  # fmt: skip


COMBINATIONS: dict[str, Any] = {
    "none": lambda old, new: new, "add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum,
}  # fmt: skip


@pytest.mark.parametrize("reduction", ["none", "add", "max"])
def test_a_slice_is_assigned(reduction: str) -> None:
    graph = import_model(shifted({"reduction": reduction} if reduction != "none" else None))
    for b, length, cut in ((2, 5, 1), (1, 1, 1), (3, 7, 4), (0, 3, 1)):
        x, u = (np.random.default_rng(0).standard_normal((b, n)).astype(np.float32) for n in (length, length - cut))
        want = x.copy()
        want[:, 1 : 1 + length - cut] = COMBINATIONS[reduction](want[:, 1 : 1 + length - cut], u)
        np.testing.assert_array_equal(reference.evaluate(graph, {"x": x, "u": u})["y"], want)


def test_positions_outside_are_refused_on_the_call() -> None:
    program = polydyn.compile(shifted(), threads=1)
    x = np.ones((2, 4), np.float32)
    assert program.run({"x": x, "u": 2 * x[:, :3]})["y"].tolist() == [[1, 2, 2, 2]] * 2
    with pytest.raises(InputError, match="ScatterND"):
        program.run({"x": x, "u": 2 * x})


def in_order(x: Any, places: Any, updates: Any, combine: Any) -> Any:
    """Apply updates one by one at ``places``."""
    out = x.copy()
    for place, u in zip(places, updates, strict=True):
        out[place] = combine(out[place], u)
    return out


@pytest.mark.parametrize("reduction", ["none", "add", "mul", "min"])
@pytest.mark.parametrize("form", ["line", "columns", "tuples"])
def test_updates_at_data_come_in_their_order(form: str, reduction: str) -> None:
    """Many updates collide: the bits equal sequential updates, in one kernel, with every access checked."""
    op = "ScatterND" if form == "tuples" else "ScatterElements"
    given: Any = {
        "line": {"x": ("float32", ("N", "M")), "i": ("int64", ("N", "P")), "u": ("float32", ("N", "P"))},
        "columns": {"x": ("float32", ("N", "M")), "i": ("int64", ("P", "Q")), "u": ("float32", ("P", "Q"))},
        "tuples": {"x": ("float32", ("N", "M", 5)), "i": ("int64", ("P", 2)), "u": ("float32", ("P", 5))},
    }[form]
    attributes = {"reduction": reduction} | ({} if form == "tuples" else {"axis": int(form == "line")})
    m = model_of(op, given, attributes)
    program, checked = polydyn.compile(m, threads=2), CheckedProgram(plan_program(m))
    assert program.launches == ["scatter y"]
    rng = np.random.default_rng(0)
    for n, size, count in ((2, 7, 40), (1, 1, 9), (3, 33, 0), (31, 5, 20)):
        x = rng.standard_normal((n, size, 5) if form == "tuples" else (n, size)).astype(np.float32)
        if form == "tuples":
            i = np.stack([rng.integers(-n, n, count), rng.integers(-size, size, count)], 1)
            places = [(int(a), int(b)) for a, b in i]
            u = rng.standard_normal((count, 5)).astype(np.float32)
            wanted = in_order(x, places, u, COMBINATIONS[reduction])
        else:
            shape = (n, count) if form == "line" else (count, size - size // 3)
            i = rng.integers(-x.shape[form == "line"], x.shape[form == "line"], shape)
            u = rng.standard_normal(shape).astype(np.float32)
            at = [(r, c) for r, c in np.ndindex(shape)]
            places = [(r, int(i[r, c])) if form == "line" else (int(i[r, c]), c) for r, c in at]
            wanted = in_order(x, places, u.reshape(-1), COMBINATIONS[reduction])
        feeds: dict[str, Any] = {"x": x, "i": i, "u": u}
        np.testing.assert_array_equal(program.run(feeds)["y"], wanted)
        np.testing.assert_array_equal(checked.run(feeds)["y"], wanted)
