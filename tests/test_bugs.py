"""Every bug once found keeps a test here."""

from __future__ import annotations

import numpy as np
import pytest
from stored import load, path_of

import polydyn
from benchmarks.models.inputs import feeds
from polydyn.build.features import machine_features
from polydyn.errors import InputError


@pytest.mark.skipif("avx2" not in machine_features(), reason="needs AVX2")
def test_code_for_narrower_vectors_uses_narrower_vectors() -> None:
    """Units included the leaf header before its vector width was defined, so AVX2 kernels stored 16 lanes for 8."""
    program = polydyn.compile(path_of("bert_tiny"), target="cpu:avx2", threads=1)
    widths = [t.count("#define PD_W 8\n") for n, t in program.sources.items() if n == "pd_cpu.h"]
    assert widths == [1] and not any("#define PD_W" in t for n, t in program.sources.items() if n.startswith("kernels"))
    default = polydyn.compile(path_of("bert_tiny"), threads=1)
    for shape in ({"B": 1, "L": 1}, {"B": 2, "L": 13}):
        inputs = feeds(load("bert_tiny"), shape)
        a, b = (p.run(inputs)["last_hidden_state"] for p in (program, default))
        np.testing.assert_allclose(a, b, 1e-4, 1e-5)


def test_a_mask_shorter_than_past_and_present_is_refused() -> None:
    """Positions gathered from a symbolic axis had no guard: a short mask was read past its rows, in silence."""
    program = polydyn.compile(path_of("gpt2_past_tiny"), threads=1)
    inputs = feeds(load("gpt2_past_tiny"), {"B": 1, "L": 2, "P": 3, "T": 5})
    program.run(inputs)
    inputs["attention_mask"] = inputs["attention_mask"][:, :4]
    with pytest.raises(InputError, match=r"L \+ P is at most T, here 5 and 4"):
        program.run(inputs)
