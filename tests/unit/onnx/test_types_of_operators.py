"""Operators on integers and booleans, and at extreme settings, compared with onnx's reference or ONNX Runtime."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from polydyn.errors import InputError, UnsupportedError
from polydyn.graph import reference
from polydyn.graph.operators.resize import simplest
from tests.support.one_node import check, check_with_onnxruntime, expected, import_model, model_of

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32", "uint64"])
def test_roots_and_logarithms_of_integers(dtype: str) -> None:
    x = np.array([[3, 4], [5, 12], [1, 1]], dtype)
    axes = {"x": (dtype, ("A", "B")), "axes": np.array([1])}
    for op, want in (
        ("ReduceL2", [5, 13, 1]), ("ReduceLogSum", np.log(x.sum(1))), ("ReduceLogSumExp", np.log(np.exp(x).sum(1)))
    ):  # fmt: skip
        got = reference.evaluate(import_model(model_of(op, axes, {"keepdims": 0})), {"x": x})["y"]
        assert got.dtype == x.dtype
        np.testing.assert_array_equal(got, np.asarray(want).astype(dtype))


@pytest.mark.parametrize("reduction", ["add", "mul", "max", "min"])
def test_scatters_of_booleans(reduction: str) -> None:
    x, u = np.array([[True, False], [False, True]]), np.array([[True, False], [False, True]])
    given = {"x": ("bool", ("A", 2)), "i": np.array([[0, 1], [0, 0]]), "u": ("bool", ("A", 2))}
    check(model_of("ScatterElements", given, {"reduction": reduction}), {"x": x, "u": u})
    slices = {"x": ("bool", ("A", 2)), "i": np.array([[1], [1]]), "u": ("bool", (2, 2))}
    check(model_of("ScatterND", slices, {"reduction": reduction}), {"x": x, "u": u})


def test_sums_and_samples_of_booleans() -> None:
    columns = {"x": ("bool", (1, 4, "K")), "i": np.array([2, 3]), "b": np.array([2, 2])}
    feeds = {"x": np.array([[[1, 0], [0, 1], [0, 0], [0, 1]]], bool)}
    got = reference.evaluate(import_model(model_of("Col2Im", columns)), feeds)["y"]
    np.testing.assert_array_equal(got[0, 0], [[1, 0, 1], [0, 0, 1]])
    given = {"x": ("bool", (1, 1, "H", "W")), "g": ("float32", (1, "P", 1, 2))}
    sampled = {"x": RNG.random((1, 1, 3, 4)) > 0.5, "g": RNG.uniform(-1, 1, (1, 5, 1, 2)).astype(np.float32)}
    for mode in ("nearest", "linear", "cubic"):
        check(model_of("GridSample", given, {"mode": mode}, opset=20), sampled)
    with pytest.raises(UnsupportedError, match=r"GridSample: mode linear of int32(.|\n)*cast to float32"):
        import_model(model_of("GridSample", given | {"x": ("int32", (1, 1, "H", "W"))}, {"mode": "linear"}, opset=20))


@pytest.mark.parametrize("base", ["float32", "float16", "int32", "int64"])
def test_powers_of_two_types(base: str) -> None:
    x = np.array([3, 7, 46340, 2, 5]).astype(base)
    for kind in ("float32", "float64", "int64", "uint8"):
        y = np.array([2, 3, 2, 15, 0]).astype(kind)
        check(model_of("Pow", {"x": (base, ("A",)), "e": (kind, ("A",))}), {"x": x, "e": y}, 1e-3)
    large = {"x": np.array([2**24 + 1, 46340]), "e": np.float32([1, 2])}
    check(model_of("Pow", {"x": ("int64", ("A",)), "e": ("float32", ("A",))}), large, 0)


@pytest.mark.parametrize("kind", ["int8", "int32", "int64"])
def test_negative_powers_of_integers(kind: str) -> None:
    """The result is 0 except for the bases 1 and -1, as in C; ONNX Runtime has the minimum integer if the base is 0."""
    x, y = np.array([1, -1, -1, 2, -3, 0, 5]).astype(kind), np.array([-3, -3, -2, -1, -2, -1, 2]).astype(kind)
    graph = import_model(model_of("Pow", {"x": (kind, ("A",)), "e": (kind, ("A",))}))
    assert reference.evaluate(graph, {"x": x, "e": y})["y"].tolist() == [1, -1, 1, 0, 0, 0, 25]
    constants = import_model(model_of("Pow", {"x": x, "e": y}))
    assert next(iter(reference.evaluate(constants, {}).values())).tolist() == [1, -1, 1, 0, 0, 0, 25]


@pytest.mark.parametrize("scale", [0.6, 0.75, 0.5, 1.0, 1.7, 2.0, 1 / 3, 0.7])
def test_nearest_before_opset_11(scale: float) -> None:
    x = np.arange(60, dtype=np.float32).reshape(1, 1, 2, 30)
    given = {"x": ("float32", (1, 1, "H", "W")), "s": np.float32([1, 1, 1, scale])}
    check_with_onnxruntime(model_of("Resize", given, {"mode": "nearest"}, opset=10), {"x": x})
    fraction = Fraction(scale).limit_denominator(100)
    for mode, whole in (("floor", math.floor), ("ceil", math.ceil)):
        newer = {"x": given["x"], "roi": np.zeros(0, np.float32), "s": given["s"]}
        attributes = {"nearest_mode": mode, "coordinate_transformation_mode": "asymmetric"}
        got = reference.evaluate(import_model(model_of("Resize", newer, attributes, opset=13)), {"x": x})["y"]
        assert got.shape[3] == int(np.float32(30) * np.float32(scale))
        np.testing.assert_array_equal(got, x[..., [min(whole(i / fraction), 29) for i in range(got.shape[3])]])


def test_a_scale_is_the_fraction_that_its_float_stands_for() -> None:
    for top, bottom in ((1, 3), (7, 10), (3, 1), (640, 427), (1, 1024), (99991, 7)):
        found = simplest(float(np.float32(top / bottom)))
        assert (found.numerator, found.denominator) == (top, bottom)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "int32", "int64", "uint64"])
@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_resized_integers_are_rounded_and_saturate(mode: str, dtype: str) -> None:
    x = RNG.integers(*(0, 100) if dtype != "uint8" else (0, 256), (1, 1, 12, 20)).astype(dtype)
    for antialias in (0, 1):
        given = {"x": (dtype, (1, 1, "H", "W")), "roi": np.zeros(0, np.float32), "s": np.float32([1, 1, 1.5, 0.8])}
        model = model_of("Resize", given, {"mode": mode, "antialias": antialias}, opset=19)
        got = reference.evaluate(import_model(model), {"x": x})["y"]
        off = np.abs(got.astype(np.float64) - expected(model, {"x": x})[0].astype(np.float64))
        assert off.max() <= 1 and (off > 0).mean() < 0.1  # ties after arithmetic in float32


def test_corners_that_are_aligned_divide_by_the_size_of_the_result() -> None:
    x = RNG.standard_normal((1, 2, 4, 5)).astype(np.float32)
    given = {"x": ("float32", ("N", 2, "H", "W")), "roi": np.zeros(0, np.float32), "s": np.float32([1, 1, 1.5, 0.7])}
    for mode in ("linear", "cubic"):
        attributes = {"mode": mode, "coordinate_transformation_mode": "align_corners"}
        check_with_onnxruntime(model_of("Resize", given, attributes, opset=13), {"x": x}, 1e-4)


@pytest.mark.parametrize("policy", ["not_larger", "not_smaller"])
def test_proportions_are_kept_for_every_size(policy: str) -> None:
    given: dict[str, Any] = {"x": ("float32", (1, 1, "H", "W")), "": np.zeros(0, np.float32), "z": np.array([7, 9])}
    attributes = {"keep_aspect_ratio_policy": policy, "axes": [2, 3], "mode": "nearest"}
    del given[""]
    model = model_of("Resize", given, attributes, 18, names=["x", "", "", "z"])
    graph = import_model(model)
    for h, w in ((3, 5), (5, 3), (7, 9), (14, 2), (1, 1)):
        x = RNG.standard_normal((1, 1, h, w)).astype(np.float32)
        check(model, {"x": x}, graph=graph)


GRIDS = [(("N", 2, 3), (2, 3, 4, 5)), ((1, 3, 4), (1, 2, 2, 3, 4)), (("N", 2, 3), (3, 1, 1, 2))]


@pytest.mark.parametrize(("dims", "size"), GRIDS)
def test_affine_grids(dims: tuple[int | str, ...], size: tuple[int, ...]) -> None:
    theta = RNG.standard_normal((size[0], *map(int, dims[1:]))).astype(np.float32)
    for corners in (0, 1):
        given = {"t": ("float32", dims), "s": np.array(size)}
        with np.errstate(divide="ignore"):
            check(model_of("AffineGrid", given, {"align_corners": corners}, opset=20), {"t": theta})


def test_what_is_cut_off_is_not_repeated() -> None:
    x = np.arange(6, dtype=np.float32)
    for before, after in ((2, -3), (-1, 2), (-3, 2), (-2, -1), (7, 8)):
        model = model_of("Pad", {"x": ("float32", ("A",)), "p": np.array([before, after])}, {"mode": "wrap"}, 19)
        rest = x[max(0, -before) : len(x) - max(0, -after)]
        wrapped = rest[np.arange(-max(0, before), len(rest) + max(0, after)) % len(rest)]
        assert np.array_equal(reference.evaluate(import_model(model), {"x": x})["y"], wrapped)
        if max(before, after) <= len(rest):  # ONNX Runtime 1.23, the last one for Python 3.10, reads past the end
            check_with_onnxruntime(model, {"x": x})
    nothing = model_of("Pad", {"x": ("float32", ("A",)), "p": np.array([-3, 2])}, {"mode": "wrap"}, 19)
    with pytest.raises(InputError, match="padded by 2 in mode wrap"):
        reference.evaluate(import_model(nothing), {"x": x[:3]})
