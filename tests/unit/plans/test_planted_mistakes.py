"""Mistakes planted in the plan of one small model: the interpreter of plans detects each of them."""

from __future__ import annotations

from collections import Counter
from functools import cache
from random import Random

import numpy as np
import onnx
import pytest

from polydyn.testing.plan.mistakes import ON_KERNELS, ON_LAUNCHES, ON_LOOPS, ON_SLOTS, Mistake
from polydyn.testing.plan.planned import Planned, plans_of
from polydyn.testing.plan.plant import first_fault, trial, trials
from tests.support.tiny import model, node

RNG = np.random.default_rng(0)
EACH = 5
"""Maximum number of mistakes of each kind, if the plan has sites for them."""


def small_model() -> onnx.ModelProto:
    """Build products, norms and pieces of three kinds: outputs, parts of concatenations, a cache that grows."""
    weight = {n: RNG.standard_normal((8, 8)).astype("f") for n in ("w0", "w1", "w2")}
    return model(
        [node("MatMul", "x w0", "a"), node("Softmax", "a", "s"), node("MatMul", "s w1", "b"),
         node("MatMul", "s w2", "c"), node("Tanh", "c", "t"), node("Add", "b t", "d"),
         node("Softmax", "d", "e", axis=1), node("Split", "e", "e0 e1", axis=2, num_outputs=2),
         node("Neg", "e0", "n0"), node("Concat", "e1 n0", "y", axis=2),
         node("Concat", "past b", "cache", axis=1), node("ReduceSum", "cache two", "r", keepdims=0),
         node("MatMul", "d w1", "f"), node("Softmax", "f", "z", axis=1)],
        {"x": ("float32", ["B", "L", 8]), "past": ("float32", ["B", "P", 8])}, ["y", "cache", "r", "z", "c"],
        {**weight, "two": np.array([2])},
    )  # fmt: skip


@cache
def planned() -> Planned:
    (made,) = plans_of(small_model())
    return made


def test_mistakes_are_seen() -> None:
    """At least 60 of at least 18 kinds, none missed; the verifiers of the product detect fewer."""
    found = list(trials(small_model(), EACH, Random(0), loops=True))
    missed = [f"{t.kind}: {t.what}" for t in found if not t.seen]
    kinds = Counter(t.kind for t in found)
    assert not missed
    assert len(found) >= 60
    assert len(kinds) >= 18
    assert sum(bool(t.refused) for t in found) < len(found)


@pytest.mark.parametrize("mistake", [*ON_LAUNCHES, *ON_KERNELS, *ON_SLOTS, *ON_LOOPS], ids=lambda m: m.__name__)
def test_a_plan_without_a_place_for_a_mistake_has_none(mistake: Mistake) -> None:
    """In a plan of one copy only mistakes with a site are planted, and they are detected."""
    (made,) = plans_of(model([node("Transpose", "x", "y", perm=[1, 0])], {"x": ("float32", ["B", "L"])}, ["y"]))
    assert first_fault(made) is None
    found = mistake(made, Random(0))
    assert found is None or trial(mistake, *found).seen
