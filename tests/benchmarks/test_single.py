"""The table of single operators: its cases cover docs/operators.md, and it notices what is wrong, slow or crashes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.single import __main__ as command
from benchmarks.single import measure
from benchmarks.single.case import Case, Net, cases
from benchmarks.single.left_out import LEFT_OUT

DOCUMENT = Path(__file__).parents[2] / "docs" / "operators.md"


def documented() -> list[str]:
    table = DOCUMENT.read_text().split("| operator | built as |")[1].splitlines()[2:]
    return [row.split("|")[1].strip() for row in table if row.startswith("|")]


def small(build: Any = lambda n, x: n.Tanh(x)) -> Case:
    (case,) = cases("one", "T R,L", build, ((2, 3),))
    return case


def test_every_operator_has_a_case_or_a_reason() -> None:
    one_type = {c.name.rsplit(" ", 1)[0]: c for c in command.every()}
    covered = {o for c in one_type.values() for o in c.operators()}
    operators = documented()
    assert len(operators) > 250
    missing = [o for o in operators if o not in covered and o not in LEFT_OUT]
    assert not missing, f"no case of these, and no reason in left_out.py: {missing}"
    assert not [o for o in LEFT_OUT if o in covered or o not in operators], "a reason that is not needed"
    assert not covered - set(operators), "cases of operators that polydyn does not build"


def test_names_of_cases_are_unique_and_seeds_repeat() -> None:
    names = [c.name for c in command.every()]
    assert len(names) == len(set(names)) > 800
    case = small()
    a, b, c = (case.feeds({"R": 2, "L": 3}, seed)["x0"] for seed in (0, 0, 1))
    np.testing.assert_array_equal(a, b)
    assert (a != c).any()


def test_inputs_have_the_values_that_their_text_names() -> None:
    (case,) = cases("v", "f32+ R,9; f32~ R,9; i64<R R,9; i64! R,9; T R; u8 R,9", lambda n, *x: x, ((50,),), "f16")
    arrays = list(case.feeds({"R": 50}).values())
    assert arrays[0].min() > 0 and np.abs(arrays[1]).max() < 1
    assert arrays[2].min() >= 0 and 9 <= arrays[2].max() < 50
    np.testing.assert_array_equal(np.sort(arrays[3]), np.tile(np.arange(9), (50, 1)))
    assert arrays[4].dtype == np.float16 and arrays[5].dtype == np.uint8


def test_a_case_is_measured_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "LEAST", 0.0)  # the sizes stay as they are
    (row,) = measure.measured(small(), budget=0.0, seed=0)
    assert row["sizes"] == {"R": 2, "L": 3} and row["wrong"] == ""
    assert row["ratio"] == pytest.approx(row["polydyn"] / row["onnxruntime"])


def test_a_case_that_crashes_or_is_refused_costs_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = measure.measured(small(lambda n, x: os._exit(3)), budget=0.0, seed=0)
    assert row["refused"] == "crash"
    (row,) = measure.measured(small(lambda n, x: n.NoSuchOperator(x)), budget=0.0, seed=0)
    assert row["refused"] == "onnxruntime"
    monkeypatch.setattr(measure, "rows", lambda *_: 1 / 0)
    (row,) = measure.measured(small(), budget=0.0, seed=0)
    assert row["refused"] == "polydyn" and "ZeroDivisionError" in row["why"]


@pytest.mark.parametrize(
    ("name", "got", "want", "wrong"),
    [
        ("a", np.float32([1, 2]), np.float32([1, 2.0001]), ""),
        ("a", np.float32([1, 2]), np.float32([1, 2.01]), "of the largest value"),
        ("a", np.float32([1, np.nan]), np.float32([1, 2]), "NaN"),
        ("a", np.float32([1]), np.float32([1, 2]), "float32(1,)"),
        ("a", np.float32([1]), np.float64([1]), "float32(1,)"),
        ("a", np.int8([1]), np.int8([2]), "of the largest value"),
        ("QDQ a", np.int8([1]), np.int8([2]), ""),
        ("QDQ a", np.int8([1]), np.int8([3]), "off by 2"),
        ("QDQ a", np.float32([1]), np.float32([1.05]), ""),
        ("QDQ a", np.float32([1]), np.float32([1.1]), "of the largest value"),
    ],
)
def test_wrong_results_are_named(name: str, got: Any, want: Any, wrong: str) -> None:
    (case,) = cases(name, "T R,L", lambda n, x: n.Tanh(x), ((2, 3),))
    found = measure.differs(case, {"y": got}, {"y": want})
    assert (wrong in found) if wrong else not found


class FakeSession:
    """Takes a microsecond an element."""

    def __init__(self) -> None:
        self.now = 0.0

    def run(self, _: None, feeds: Mapping[str, Any]) -> None:
        self.now += 1e-6 * sum(a.size for a in feeds.values())


@pytest.mark.parametrize(("stated", "first"), [(1, 128), (300, 300), (100_000, 6250)])
def test_sizes_are_scaled_into_the_interval(monkeypatch: pytest.MonkeyPatch, stated: int, first: int) -> None:
    session = FakeSession()
    monkeypatch.setattr(measure.time, "process_time", lambda: session.now)
    assert measure.scaled(small(), {"R": stated, "L": 3}, session, 0) == {"R": first, "L": 3}


def test_table_and_file(tmp_path: Path) -> None:
    def timed(case: str, ratio: float, wrong: str = "") -> dict[str, Any]:
        return {"case": case, "sizes": {"R": 2}, "polydyn": ratio, "onnxruntime": 1.0, "ratio": ratio, "wrong": wrong}

    rows = [timed("slow", 4.0), timed("right", 0.25), timed("bad", 1.0, "y: off by 2")]
    rows += [{"case": "lacking", "refused": "polydyn", "why": "UnsupportedError"}]
    text = command.table(rows, worst=1)
    lines = text.splitlines()
    assert "slow" in lines[1] and "DIFFERS y: off by 2" in lines[3] and "UnsupportedError" in lines[4]
    assert "3 rows: 1 above 2 times" in text and "mean 1.000; 1 differ; not run by polydyn 1" in text
    path = command.merged(tmp_path, rows)
    command.merged(tmp_path, [timed("slow", 3.0)])
    assert path.name == "single.json"
    kept = command.rows_of(tmp_path)
    assert sorted(r["case"] for r in kept) == ["bad", "lacking", "right", "slow"]
    assert [r["ratio"] for r in kept if r["case"] == "slow"] == [3.0]


def test_operands_of_a_net() -> None:
    net = Net("n", "float16")
    values, places = net.TopK("x", [3], outputs=2)
    net.Add(values, 1.5)
    net.Resize("x", None, np.float32([2.0]))
    assert (values, places) == ("t0", "t0_1") and list(net.nodes[2].input) == ["x", "", "c2"]
    kinds = [c.data_type for c in net.constants]
    assert kinds == [7, 10, 1], "a list of int is int64, a float has the type of the case, an array its own"
