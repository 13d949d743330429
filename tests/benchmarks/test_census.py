"""The census: who judges where polydyn and ONNX Runtime differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from benchmarks.census import MOST_RUNS, Call, judged

NAMES = ["boxes", "scores"]
BOXES, SCORES = np.linspace(0, 1, 12).reshape(3, 4), np.array([0.9, 0.5, 0.5])
SWAPPED = (0, 2, 1)


def single(boxes: Any, rows: tuple[int, ...] = (0, 1, 2)) -> list[Any]:
    """Results of float32, with rows in this order."""
    return [np.float32(boxes)[list(rows)], np.float32(SCORES)[list(rows)]]


def exact(_: Any, run: int) -> list[Any]:
    """Two scores that no run can tell apart: every third has them the other way round."""
    rows = list(SWAPPED if run % 3 == 2 else (0, 1, 2))
    return [BOXES[rows], SCORES[rows]]


@pytest.mark.parametrize(
    ("theirs", "ours", "state", "runs"),
    [
        (single(BOXES, SWAPPED), single(BOXES), "right", 1),
        (single(BOXES), single(BOXES, SWAPPED), "right", 3),
        (single(BOXES), single(BOXES + 1e-3), "wrong", MOST_RUNS),
        (single(BOXES), single(BOXES, (1, 0, 2)), "wrong", MOST_RUNS),
        (single(BOXES), single(BOXES, (0, 1)), "wrong", MOST_RUNS),
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
