"""Attributes of old opsets: right, or rejected as in ONNX. The authority is numpy, by ONNX's text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from polydyn.errors import ModelError, PolydynError
from polydyn.graph import reference
from polydyn.schedules.expr import Array
from tests.support.one_node import import_model, model_of

RNG = np.random.default_rng(0)
BINARY: dict[str, Any] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Div": np.divide, "Pow": np.power, "Less": np.less,
    "Greater": np.greater, "Equal": np.equal, "And": np.logical_and, "Or": np.logical_or, "Xor": np.logical_xor,
}  # fmt: skip


def run(
    op: str, feeds: dict[str, Array], attributes: dict[str, Any], opset: int, constants: dict[str, Array] | None = None
) -> Array:
    """Return the only output, with a name for every dim."""
    inputs: dict[str, Any] = {n: (str(x.dtype), [f"{n}{a}" for a in range(x.ndim)]) for n, x in feeds.items()}
    graph = import_model(model_of(op, inputs | (constants or {}), attributes, opset, ("z",)))
    return reference.evaluate(graph, feeds)["z"]


@pytest.mark.parametrize("op", BINARY)
def test_broadcasting_begins_at_an_axis(op: str) -> None:
    kind = "bool" if op in ("And", "Or", "Xor") else "int32" if op == "Equal" else "float32"
    shapes = ((0, (2,)), (1, (2,)), (0, (2, 2)), (1, (2, 3)), (None, (3,)), (None, ()), (-1, (2, 3)), (2, (3,)))
    for axis, right in shapes:
        x, y = (RNG.integers(1, 3, s).astype(kind) for s in ((2, 2, 3), right))
        attributes = {"broadcast": 1} | ({} if axis is None else {"axis": axis})
        at = 3 - len(right) if axis in (None, -1) else axis
        want = BINARY[op](x, y.reshape(y.shape + (1,) * (3 - at - y.ndim)))
        for opset in (1, 6):
            np.testing.assert_allclose(run(op, {"x": x, "y": y}, attributes, opset), want, 1e-6)


def test_broadcasting_without_room_is_refused() -> None:
    feeds = {"x": np.zeros((2, 2, 2), np.float32), "y": np.zeros((2, 2), np.float32)}
    with pytest.raises(ModelError, match="its axis 2 leaves no room"):
        run("Add", feeds, {"broadcast": 1, "axis": 2}, 6)


def test_a_vector_of_slopes_is_one_for_each_channel() -> None:
    x, slope = RNG.standard_normal((2, 3, 3)).astype(np.float32), np.float32([1, 10, 100])
    got = run("PRelu", {"x": x}, {}, 6, {"s": slope})
    np.testing.assert_allclose(got, np.where(x < 0, x * slope[:, None], x))
    newer = run("PRelu", {"x": x}, {}, 9, {"s": slope})
    np.testing.assert_allclose(newer, np.where(x < 0, x * slope, x))


def test_attributes_that_became_inputs() -> None:
    x = RNG.standard_normal((1, 1, 2, 3)).astype(np.float32)
    assert run("Concat", {"x": x, "y": x}, {}, 3).shape == (1, 2, 2, 3)
    assert run("Cast", {"x": x}, {"to": "INT32"}, 5).dtype == np.int32
    padded = run("Pad", {"x": x}, {"paddings": [0, 0, 1, 0, 0, 0, 0, -1], "value": 2.0}, 1)
    np.testing.assert_array_equal(padded, np.pad(x, [(0, 0), (0, 0), (1, 0), (0, 0)], constant_values=2)[..., :2])
    tiled = run("Tile", {"x": x}, {}, 1, {"n": np.array([2.0], np.float32), "a": np.array([3.0], np.float32)})
    np.testing.assert_array_equal(tiled, np.tile(x, (1, 1, 1, 2)))
    wanted = x.repeat(2, 2).repeat(3, 3)
    np.testing.assert_array_equal(run("Upsample", {"x": x}, {"scales": [1.0, 1.0, 2.0, 3.0]}, 7), wanted)
    np.testing.assert_array_equal(run("Upsample", {"x": x}, {"height_scale": 2.0, "width_scale": 3.0}, 1), wanted)
    bilinear = run("Upsample", {"x": x}, {"height_scale": 1.0, "width_scale": 2.0, "mode": "bilinear"}, 1)
    linear = run("Upsample", {"x": x}, {"mode": "linear"}, 9, {"s": np.float32([1, 1, 1, 2])})
    np.testing.assert_array_equal(bilinear, linear)


def test_masks_of_old_dropouts_have_the_type_of_the_input() -> None:
    for opset, dtype in ((7, "float64"), (10, "bool")):
        m = model_of("Dropout", {"x": ("float64", ["N"])}, {"ratio": 0.4}, opset, ("y", "mask"))
        got = reference.evaluate(import_model(m), {"x": np.float64([2, 3])})
        np.testing.assert_array_equal(got["y"], [2, 3])
        assert got["mask"].dtype == dtype and got["mask"].all()


def test_names_of_types_and_axes_that_do_not_exist_are_refused() -> None:
    x = np.zeros((2, 3), np.float32)
    for op, attributes, more in (
        ("Cast", {"to": "INT31"}, {}),
        ("Tile", {}, {"n": np.float32([2]), "a": np.float32([2])}),
    ):
        with pytest.raises(PolydynError, match=op):
            run(op, {"x": x}, attributes, 5, more)


def test_parameters_of_a_batch_normalization_for_every_element_of_a_sample() -> None:
    shape, opsets = (3, 4), (6, 7)
    x, scale, bias, mean, variance = (RNG.random(s).astype(np.float32) for s in ((2, *shape), *[shape] * 4))
    want = (x - mean) / np.sqrt(variance + np.float32(1e-5)) * scale + bias
    for opset in opsets:
        feeds = {"x": x, "s": scale, "b": bias, "m": mean, "v": variance}
        np.testing.assert_allclose(run("BatchNormalization", feeds, {"spatial": 0}, opset), want, 1e-4, 1e-4)
        constants = {k: feeds.pop(k) for k in "sbmv"}
        np.testing.assert_allclose(run("BatchNormalization", feeds, {"spatial": 0}, opset, constants), want, 1e-4, 1e-4)
    with pytest.raises(PolydynError, match=r"s has 2 axes, not 1"):
        run("BatchNormalization", {"x": x}, {}, 7, constants)


def test_defaults_are_those_of_the_opset_in_float32() -> None:
    x = np.array([-36446.656, 1.0])
    np.testing.assert_array_equal(run("LeakyRelu", {"x": x}, {}, 16)[0], x[0] * float(np.float32(0.01)))
    low = np.float32([-2.0])
    first, later = (run("Selu", {"x": low}, {}, opset) for opset in (1, 6))
    np.testing.assert_allclose(first, 1.0507 * 1.6732 * (np.exp(low) - 1), 1e-6)
    np.testing.assert_allclose(later, 1.05070102214813232421875 * 1.67326319217681884765625 * (np.exp(low) - 1), 1e-6)
    far = np.array([1e300, -1e300, 1.0])
    ends = np.float32([3.4028235e38, -3.4028235e38, 1]).astype(np.float64)
    np.testing.assert_array_equal(run("Clip", {"x": far}, {}, 6), ends)


def test_a_vector_has_one_channel() -> None:
    x = RNG.random(5).astype(np.float32)
    one: dict[str, Any] = {"s": np.float32([2]), "b": np.float32([0.5]), "m": np.float32([0.25]), "v": np.float32([2])}
    want = (x - 0.25) / np.sqrt(np.float32(2 + 1e-5)) * 2 + 0.5
    for opset, attributes in ((7, {}), (7, {"spatial": 0}), (9, {}), (15, {})):
        np.testing.assert_allclose(run("BatchNormalization", {"x": x, **one}, attributes, opset), want, 1e-5)
        np.testing.assert_allclose(run("BatchNormalization", {"x": x}, attributes, opset, one), want, 1e-5)


def test_an_axis_of_operands_of_one_rank_chooses_nothing() -> None:
    x, y = (RNG.random((2, 3, 4)).astype(np.float32) for _ in "xy")
    np.testing.assert_array_equal(run("Sub", {"x": x, "y": y}, {"broadcast": 1, "axis": 2}, 1), x - y)


@pytest.mark.parametrize("op", ["ArgMax", "ArgMin"])
def test_the_extreme_of_a_scalar_is_at_0(op: str) -> None:
    assert run(op, {"x": np.float32(3)}, {"keepdims": 0}, 1) == 0
