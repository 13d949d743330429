"""The fuzzer of torch.compile: a few of its cases are right, and it detects each kind of difference."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the extra [torch] is not installed")
pytest.importorskip("onnxscript", reason="the extra [torch] is not installed")

from polydyn.testing.fuzz_torch import run_seed  # noqa: E402
from polydyn.testing.torch_aten import functions  # noqa: E402
from polydyn.testing.torch_check import Case, _Check, check  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # torch warns about its own plans

x = torch.tensor([[1.0, -2.5, 1e-3], [0.0, 3.0, float("nan")]])


def case(eager: Any, compiled: Any) -> Case:
    """Return a case in which eager torch and the compiled program run different functions."""
    built: list[Any] = []

    def build() -> Any:
        built.append(eager if len(built) % 2 == 0 else compiled)
        return built[-1], iter([(x.clone(),)])

    return Case("planted", build)


@pytest.mark.parametrize("seed", [7, 9, 43])
def test_cases_that_are_right(seed: int) -> None:
    result = run_seed(seed, "both", False)
    assert result.finding is None and result.counts["calls right"], result


@pytest.mark.parametrize(
    ("compiled", "message"),
    [
        (lambda x: x * 1.00001, "expected"),
        (lambda x: x.nan_to_num(), "expected nan"),
        (lambda x: x.double(), "expected torch.float32"),
        (lambda x: x.t().contiguous().t() * 1, "strides"),
        (lambda x: x.view(3, 2) * 1, r"expected torch.float32\[2, 3\]"),
        (lambda x: x, "memory is shared"),
    ],
)
def test_planted_differences_are_seen(compiled: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Check, "_torch_differs", lambda *_: False)  # it would compile the planted function too
    verdict = check(case(lambda x: x * 1, compiled), False)
    assert verdict.kind == "different"
    assert re.search(message, verdict.message)


def test_roundings_are_no_difference() -> None:
    verdict = check(case(lambda x: (x / 3).sum(1), lambda x: (x * (1 / 3)).sum(1)), False)
    assert verdict.kind == "right", verdict


def test_the_sweep_has_all_of_torchs_table() -> None:
    assert len(functions()) > 500 and len({f.name for f in functions()}) > 400
