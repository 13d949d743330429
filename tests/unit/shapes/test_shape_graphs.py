"""Random models of shape arithmetic give the shapes, sizes and elements that ONNX Runtime gives, or reject the call."""

from __future__ import annotations

import collections

import pytest

from polydyn.testing.fuzz_shapes import check
from polydyn.testing.random_models import random_feeds, random_model


@pytest.mark.parametrize("first", range(0, 50, 10))
def test_random_shape_graphs_agree_with_onnxruntime(first: int) -> None:
    calls: collections.Counter[str] = collections.Counter()
    for seed in range(first, first + 10):
        done = check(random_model(seed), seed, feeds=4)
        assert not done.wrong, f"python -m polydyn.testing.fuzz_shapes 1 --first {seed}: {done.wrong[0]}"
        calls += done.calls
    assert calls["same"] >= 10, calls


def test_models_and_feeds_repeat_with_the_seed() -> None:
    assert random_model(7) == random_model(7) != random_model(8)
    feeds = [random_feeds(random_model(7), 3) for _ in range(2)]
    assert all((feeds[0][n] == feeds[1][n]).all() for n in feeds[0])
