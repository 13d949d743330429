"""Random generators: distributions, seeds, types; equal numbers for any number of threads."""

from __future__ import annotations

import numpy as np
import pytest

import polydyn
from polydyn.errors import UnsupportedError
from tests.support.one_node import model_of
from tests.support.tiny import model, node

pytestmark = pytest.mark.compiler
N = 40_000


def draw(op: str, dims: tuple[int | str, ...] = ("N",), **attributes: object) -> np.ndarray:
    m = model_of(op, {"x": ("float32", dims)}, attributes, 22)
    return polydyn.compile(m).run({"x": np.zeros(N, np.float32)})["y"]


def test_uniform_numbers_fill_their_interval() -> None:
    y = draw("RandomUniformLike", low=-1.0, high=3.0, seed=1.0)
    assert -1 <= y.min() < -0.99 and 2.99 < y.max() < 3
    counts, _ = np.histogram(y, 20, (-1, 3))
    assert np.abs(counts - N / 20).max() < 6 * np.sqrt(N / 20)
    assert abs(np.corrcoef(y[:-1], y[1:])[0, 1]) < 0.02


def test_normal_numbers() -> None:
    y = draw("RandomNormalLike", mean=2.0, scale=0.5, seed=3.0)
    z = (y - 2) / 0.5
    assert abs(z.mean()) < 0.02
    assert abs(z.std() - 1) < 0.02
    assert abs((z**3).mean()) < 0.06
    assert abs((z**4).mean() - 3) < 0.15
    assert 3.5 < np.abs(z).max() < 6


def test_a_seed_decides_and_so_does_a_name_without_one() -> None:
    a, b = (draw("RandomUniformLike", seed=s) for s in (1.0, 2.0))
    assert np.array_equal(a, draw("RandomUniformLike", seed=1.0))
    assert abs(np.corrcoef(a, b)[0, 1]) < 0.02
    nodes = [node("RandomUniformLike", "x", "y"), node("RandomUniformLike", "x", "z")]
    out = polydyn.compile(model(nodes, {"x": ("float32", ["N"])}, ["y", "z"])).run({"x": np.zeros(N, np.float32)})
    assert abs(np.corrcoef(out["y"], out["z"])[0, 1]) < 0.02


def test_threads_change_nothing() -> None:
    m = model_of("RandomNormalLike", {"x": ("float32", ("A", "B"))}, {"seed": 5.0}, 22)
    x = {"x": np.zeros((300, 200), np.float32)}
    one, two = (polydyn.compile(m, threads=t).run(x)["y"] for t in (1, 2))
    assert np.array_equal(one, two)


@pytest.mark.parametrize("dtype", [1, 10, 11])
def test_types_and_shapes_of_attributes(dtype: int) -> None:
    m = model([node("RandomNormal", "", "y", shape=[3, 5], dtype=dtype, seed=1.0)], {}, ["y"], opset=22)
    y = polydyn.compile(m).run({})["y"]
    assert y.shape == (3, 5)
    assert y.dtype == {1: np.float32, 10: np.float16, 11: np.float64}[dtype]
    if dtype == 11:
        assert np.unique(y).size == 15


def test_bernoulli_draws_with_its_probabilities() -> None:
    m = model_of("Bernoulli", {"x": ("float32", ("P", "N"))}, {"seed": 4.0}, 22)
    p = np.repeat(np.array([[0.0], [0.3], [1.0]], np.float32), N, 1)
    np.testing.assert_allclose(polydyn.compile(m).run({"x": p})["y"].mean(1), [0, 0.3, 1], atol=0.02)


def test_multinomial_draws_by_the_weights() -> None:
    m = model_of("Multinomial", {"x": ("float32", ("B", "C"))}, {"seed": 4.0, "sample_size": N, "dtype": 7}, 22)
    weights = np.log(np.array([[0.1, 0.2, 0.7], [0.5, 0.5, 1e-30]], np.float32))
    y = polydyn.compile(m).run({"x": weights})["y"]
    assert y.shape == (2, N) and y.dtype == np.int64
    shares = np.stack([(y == c).mean(1) for c in range(3)], 1)
    np.testing.assert_allclose(shares, [[0.1, 0.2, 0.7], [0.5, 0.5, 0]], atol=0.02)


def test_dropout_in_training() -> None:
    constants = {"r": np.array(0.25, np.float32), "t": np.array(True)}
    m = model([node("Dropout", "x r t", "y m", seed=9)], {"x": ("float32", ["N"])}, ["y", "m"], constants, opset=22)
    out = polydyn.compile(m).run({"x": np.full(N, 3, np.float32)})
    assert abs(out["m"].mean() - 0.75) < 0.02
    np.testing.assert_allclose(out["y"], np.where(out["m"], 4.0, 0.0), 1e-6)


def test_numbers_of_integers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="numbers of int64"):
        draw("RandomUniformLike", dtype=7)
