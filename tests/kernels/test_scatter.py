"""ScatterND at positions: what ``x[:, 1:] = y`` becomes in exported models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import polydyn
from polydyn.errors import InputError
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from tests.support.tiny import model, node


def shifted(attributes: dict[str, Any] | None = None) -> Any:
    """y = x with row b, columns 1.. replaced by u, for every b; indices from shapes."""
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


COMBINED = {"none": lambda old, new: new, "add": np.add, "max": np.maximum}


@pytest.mark.parametrize("reduction", COMBINED)
def test_a_slice_is_assigned(reduction: str) -> None:
    graph = import_model(shifted({"reduction": reduction} if reduction != "none" else None))
    for b, length, cut in ((2, 5, 1), (1, 1, 1), (3, 7, 4), (0, 3, 1)):
        x, u = (np.random.default_rng(0).standard_normal((b, n)).astype(np.float32) for n in (length, length - cut))
        want = x.copy()
        want[:, 1 : 1 + length - cut] = COMBINED[reduction](want[:, 1 : 1 + length - cut], u)
        np.testing.assert_array_equal(reference.evaluate(graph, {"x": x, "u": u})["y"], want)


def test_positions_outside_are_refused_on_the_call() -> None:
    program = polydyn.compile(shifted(), threads=1)
    x = np.ones((2, 4), np.float32)
    assert program.run({"x": x, "u": 2 * x[:, :3]})["y"].tolist() == [[1, 2, 2, 2]] * 2
    with pytest.raises(InputError, match="ScatterND"):
        program.run({"x": x, "u": 2 * x})
