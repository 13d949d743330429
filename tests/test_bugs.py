"""Every bug once found, each with the smallest case that showed it."""

from __future__ import annotations

import pytest
from stored import load, path_of

import polydyn
from benchmarks.accuracy import TOLERANCE, error, reference
from benchmarks.models.inputs import feeds, shapes
from polydyn.build.features import machine_features


@pytest.mark.skipif("avx2" not in machine_features(), reason="the processor has no AVX2")
def test_vectors_have_the_width_of_the_target_not_the_headers_default() -> None:
    """The unit's header was included before the first kernel's text defined PD_W: 16 lanes moved by code for 8."""
    program = polydyn.compile(path_of("bert_tiny"), target="cpu:avx2", threads=1)
    shape = shapes("bert_tiny")[3]
    (expected,) = reference(path_of("bert_tiny"), [shape])
    assert error(program.run(feeds(load("bert_tiny"), shape)), expected) <= TOLERANCE
