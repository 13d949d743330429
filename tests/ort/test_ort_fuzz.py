"""The fuzzer of the provider: random nodes are refused, and a wrong result is noticed."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest

import polydyn.ort
from polydyn.testing import fuzz_ort
from polydyn.testing.random_onnx import random_case


def test_refused_nodes_are_random_and_the_same_each_time() -> None:
    drawn = [fuzz_ort.refused_nodes(random_case(seed, "").model, seed) for seed in range(12)]
    assert drawn == [fuzz_ort.refused_nodes(random_case(seed, "").model, seed) for seed in range(12)]
    assert [] in drawn and any(len(names) > 1 for names in drawn)


def test_a_model_is_right_and_a_wrong_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = fuzz_ort.run_seed(3)
    assert right.finding is None and right.counts["models right"] == 1
    assert right.counts["calls compared"] > 1
    if hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"):
        assert right.counts["sets"] > 0
    real = polydyn.ort.InferenceSession

    def wrong(data: bytes, *arguments: object, **options: object) -> object:
        return Doubled(real(data, *arguments, **options))

    class Doubled:
        def __init__(self, session: object) -> None:
            self.session = session

        def __getattr__(self, name: str) -> object:
            return getattr(self.session, name)

        def run(self, *arguments: object) -> list[object]:
            with np.errstate(over="ignore"):  # the model has inputs at the end of their type
                return [a + a + 1 for a in self.session.run(*arguments)]  # type: ignore[attr-defined]

    monkeypatch.setattr(polydyn.ort, "InferenceSession", wrong)
    finding = fuzz_ort.run_seed(3).finding
    assert finding is not None and finding.kind == "wrong" and finding.message.startswith("refused [")
