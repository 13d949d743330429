"""Numbers between two bytes: the interpreter of plans tries other inputs before it calls a number wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polydyn.backends import target_of
from polydyn.graph.expand import import_parts
from polydyn.testing.plan import check
from polydyn.testing.plan.check import check_programs
from polydyn.testing.plan.faults import Fault
from polydyn.testing.plan.framed import programs_of
from tests.support.tiny import model, node

VALUE, ORDER = (Fault(kind, "launch", "y", "planted") for kind in ("value", "order"))
SCALES = {"s": np.float32(0.1), "z": np.uint8(3), "w": np.ones((4, 4), np.float32)}
BYTES = [node("MatMul", "x w", "t"), node("QuantizeLinear", "t s z", "y")]


@pytest.mark.parametrize(
    ("nodes", "fault", "seeds", "is_fault"),
    [
        (BYTES, VALUE, {0}, False), (BYTES, VALUE, {0, 1}, False), (BYTES, VALUE, {0, 1, 2}, True),
        (BYTES, ORDER, {0}, True), ([node("MatMul", "x w", "y")], VALUE, {0}, True),
    ],
)  # fmt: skip
def test_a_number_is_wrong_with_all_inputs_or_is_a_tie(
    nodes: list[Any], fault: Fault, seeds: set[int], is_fault: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    used = {i for n in nodes for i in n.input} & SCALES.keys()
    made = model(nodes, {"x": ("float32", ["B", 4])}, ["y"], {n: SCALES[n] for n in sorted(used)})
    monkeypatch.setattr(check, "_faults", lambda p, env, limit, there, loops, seed: [fault] if seed in seeds else [])
    programs = programs_of(import_parts(made), target_of("cpu:avx2", None))
    assert bool(check_programs(programs, {}, [{}])) == is_fault
