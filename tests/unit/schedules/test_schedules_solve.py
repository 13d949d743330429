"""Schedule matrices and the shift solver."""

from __future__ import annotations

from dataclasses import replace

import islpy as isl
import pytest

from polydyn.schedules.errors import LegalityError, ScheduleError
from polydyn.schedules.group.dependence import analyse
from polydyn.schedules.index import Index
from polydyn.schedules.solution.matrix import Row, Unknown, matrix, row
from polydyn.schedules.solution.solve import solve
from tests.support.polyhedral_groups import PAD_CONV_FACTS, matmul, pad_conv, softmax
from tests.support.schedule_checks import check_legal, schedule_map


def q(name: str, expr: str | int = 0) -> Row:
    return row(expr, Unknown(name))


MATMUL = matrix({"S2": ["i", "j", q("a")], "S3": ["i", "j", "k"], "S4": ["i", "j", q("b")]})


def test_matmul_epilogue_sinks_to_the_last_reduction_step() -> None:
    g = matmul()
    d = analyse(g)
    s = solve(MATMUL, g, d)
    assert (s.shift("a"), s.shift("b")) == (0, Index.of("K") - 1)
    assert s.exprs("S4") == (Index.of("i"), Index.of("j"), Index.of("K") - 1)
    check_legal(g, d, schedule_map(s, g))


def test_paper_example_with_symbolic_channels() -> None:
    """The paper's 255 is I - 1; the window rows get 2 and 2."""
    g = pad_conv()
    d = analyse(g, PAD_CONV_FACTS)
    m = matrix(
        {
            "S1": [0, "n", "h", "w", "c", 0, 0, 0],
            "S2": [1, "n", "h", "w", "o", q("a"), q("b"), q("c")],
            "S3": [1, "n", "h", "w", "o", "c", "r", "s"],
            "S4": [1, "n", "h", "w", "o", q("d"), q("e"), q("f")],
        }
    )
    s = solve(m, g, d)
    assert [s.shift(x) for x in "def"] == [Index.of("I") - 1, 2, 2]
    check_legal(g, d, schedule_map(s, g))


def test_phases_instead_of_skews() -> None:
    g = softmax()
    d = analyse(g)
    skewed = {
        "M0": ["r", q("a")],
        "M1": ["r", "l"],
        "D0": ["r", q("b")],
        "D1": ["r", q("c", "l")],
        "Y": ["r", q("d", "l")],
    }
    s = solve(matrix(skewed), g, d)  # type: ignore[arg-type]
    assert s.shift("c") == Index.of("L") - 1 and s.shift("d") == 2 * Index.of("L") - 2
    phased = {
        "M0": ["r", 0, q("a")],
        "M1": ["r", 0, "l"],
        "D0": ["r", 1, q("b")],
        "D1": ["r", 1, "l"],
        "Y": ["r", 2, "l"],
    }
    s = solve(matrix(phased), g, d)  # type: ignore[arg-type]
    assert (s.shift("a"), s.shift("b")) == (0, 0)


def test_shared_unknown_has_one_value() -> None:
    g = matmul()
    m = matrix({"S2": ["i", "j", 0], "S3": ["i", "j", q("u", "k")], "S4": ["i", "j", Index.of("K") + 4]})
    assert solve(m, g, analyse(g)).shift("u") == 0
    late = matrix({"S2": ["i", "j", 7], "S3": ["i", "j", q("u", "k")], "S4": ["i", "j", q("v")]})
    s = solve(late, g, analyse(g))
    assert (s.shift("u"), s.shift("v")) == (7, Index.of("K") + 6)


def test_positive_cycle_is_named() -> None:
    g = softmax()
    m = {
        "M0": ["r", q("a")],
        "M1": ["r", q("u", "l")],
        "D0": ["r", q("b")],
        "D1": ["r", q("v", "l")],
        "Y": ["r", q("u", "l")],
    }
    with pytest.raises(ScheduleError, match=r"row 1: no shifts satisfy the cycle(.|\n)*M1(.|\n)*"):
        solve(matrix(m), g, analyse(g))  # type: ignore[arg-type]


def test_cycle_through_known_rows() -> None:
    g = matmul()
    m = matrix({"S2": ["i", "j", 5], "S3": ["i", "j", q("u", "k")], "S4": ["i", "j", Index.of("K") + 3]})
    with pytest.raises(ScheduleError, match="no shifts satisfy") as e:
        solve(m, g, analyse(g))
    assert "S2" in str(e.value) and "S4" in str(e.value)


def test_unbounded_shift_names_row_and_pair() -> None:
    g = matmul()
    d = analyse(g)
    wild = isl.UnionMap("[M,N,K] -> { S3[i,j,k] -> S4[i',j'] : k >= 0 }")
    with pytest.raises(ScheduleError, match="row 2: the shift between S3 and S4 is unbounded"):
        solve(matrix({"S2": [0, 0, 0], "S3": [0, 0, "k"], "S4": [0, 0, q("b")]}), g, replace(d, flow=wild))


@pytest.mark.parametrize("last", [0, Index.of("K") - 2])
def test_wrong_known_shift_has_a_witness(last: Index | int) -> None:
    g = matmul()
    m = matrix({"S2": ["i", "j", 0], "S3": ["i", "j", "k"], "S4": ["i", "j", last]})
    with pytest.raises(LegalityError, match=r"row 2 runs a dependence backwards: S3 -> S4(.|\n)*for example S3\["):
        solve(m, g, analyse(g))


def test_what_textual_order_cannot_satisfy() -> None:
    g = matmul()
    with pytest.raises(LegalityError, match="textual order does not: S3 -> S3"):
        solve(matrix({"S2": ["i", "j"], "S3": ["i", "j"], "S4": ["i", "j"]}), g, analyse(g))


def test_text() -> None:
    assert str(MATMUL).splitlines()[2] == "S4: (i, j, ?b)"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"S2": ["i"], "S3": ["i"]}, "rows for"),
        ({"S2": ["i"], "S3": ["i", "j"], "S4": ["i"]}, "has 2 rows"),
        ({"S2": ["k"], "S3": ["i"], "S4": ["i"]}, "mentions"),
        ({"S2": [row(0, "i")], "S3": ["i"], "S4": ["i"]}, "mentions"),
    ],
)
def test_malformed_matrices(rows: dict[str, list[Row | Index | int | str]], message: str) -> None:
    g = matmul()
    with pytest.raises(ScheduleError, match=message):
        solve(matrix(rows), g, analyse(g))
