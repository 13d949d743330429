"""The census: the judge of differences between polydyn and ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.census import MAX_FLOAT64_RUNS, Call, imported, judged
from benchmarks.models import architectures
from benchmarks.models.architectures import ROUNDINGS, Source

NAMES = ["boxes", "scores"]
BOXES, SCORES = np.linspace(0, 1, 12).reshape(3, 4), np.array([0.9, 0.5, 0.5])
SWAPPED_ROWS = (0, 2, 1)


def single(boxes: Any, rows: tuple[int, ...] = (0, 1, 2)) -> list[Any]:
    """Return results of float32, with rows in this order."""
    return [np.float32(boxes)[list(rows)], np.float32(SCORES)[list(rows)]]


def exact(_: Any, run: int) -> list[Any]:
    """Return two scores that no run can distinguish: every third run swaps them."""
    rows = list(SWAPPED_ROWS if run % 3 == 2 else (0, 1, 2))
    return [BOXES[rows], SCORES[rows]]


@pytest.mark.parametrize(
    ("theirs", "ours", "state", "runs"),
    [
        (single(BOXES, SWAPPED_ROWS), single(BOXES), "right", 1),
        (single(BOXES), single(BOXES, SWAPPED_ROWS), "right", 3),
        (single(BOXES), single(BOXES + 1e-3), "wrong", MAX_FLOAT64_RUNS),
        (single(BOXES), single(BOXES, (1, 0, 2)), "wrong", MAX_FLOAT64_RUNS),
        (single(BOXES), single(BOXES, (0, 1)), "wrong", MAX_FLOAT64_RUNS),
    ],
)
def test_what_differs_from_onnxruntime_is_judged_by_float64(theirs: Any, ours: Any, state: str, runs: int) -> None:
    row = judged(NAMES, [Call({}, {}, single(BOXES)), Call({}, {}, theirs)], [single(BOXES), ours], lambda: exact)
    assert (row["state"], row["judge"], row["runs"]) == (state, "float64", [runs])
    assert bool(row["beyond"]["boxes"][0]) == (runs > 1) and bool(row["beyond"]["boxes"][1]) == (runs == 1)


def test_float64_is_not_asked_about_what_agrees_and_its_failure_is_told() -> None:
    call = Call({}, {}, single(BOXES))
    assert judged(NAMES, [call], [single(BOXES + 1e-4)], lambda: 1 / 0) == {"state": "right", "judge": "ONNX Runtime"}
    row = judged(NAMES, [call], [single(BOXES + 1e-2)], lambda: 1 / 0)
    assert row["state"] == "wrong" and "ZeroDivisionError" in row["judge"]


def test_runs_in_float64_move_what_operators_compute_but_whole_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")

    class Model(torch.nn.Module):  # type: ignore[misc]
        def forward(self, x: Any) -> Any:
            y = x * 3
            y[0] = 1 / 3  # written in place, through a view
            return y, (x * 7 + 1).floor()

    x = np.float32([0.0, 0.1, 2.0, -5.3])
    monkeypatch.setattr(architectures, "source", lambda *_: Source(Model(), {"x": None}, {}))
    run = architectures.in_float64("timm", "any")
    exact, moved, again = run({"x": x}, 0), run({"x": x}, 1), run({"x": x}, 1)
    assert exact[0].dtype == np.float64 and exact[0].tolist() == [1 / 3, *(np.float64(x[1:]) * 3)]
    error = np.abs(moved[0] / exact[0] - 1)
    assert error[0] == error[2] == 0 and 0 < error[1] <= ROUNDINGS and 0 < error[3] <= ROUNDINGS
    assert np.array_equal(moved[0], again[0]) and np.array_equal(moved[1], exact[1])


@pytest.mark.parametrize("fallback", [False, True])
def test_a_model_is_imported_without_being_compiled(fallback: bool) -> None:
    row = imported(Path(__file__).parents[1] / "data" / "bert_tiny.onnx", fallback)
    assert (row["state"], row["steps"], row["left"]) == ("read", 0, 0)
