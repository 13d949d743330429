"""GridSample, RoiAlign and DeformConv at ugly sizes, compiled, against onnx's reference and ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest
from test_operators_scalar import compiled_agrees

import polydyn
from polydyn.checked import CheckedProgram
from polydyn.compiler import plan_program
from polydyn.errors import InputError, UnsupportedError
from polydyn.program.assemble import build_program
from tests.support.marks import slow
from tests.support.one_node import import_model, model_of
from tests.support.tiny import model, node

RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray[Any, Any]:
    return RNG.standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
@pytest.mark.parametrize("mode", ["nearest", slow("linear"), "cubic"])
def test_grid_sample(mode: str, padding: str) -> None:
    given = {"x": ("float32", ("N", 2, "H", "W")), "g": ("float32", ("N", "P", "Q", 2))}
    for corners in (0, 1):
        attributes = {"mode": mode, "padding_mode": padding, "align_corners": corners}
        sizes = [(1, 7, 2, 3, 2), (2, 2, 31, 1, 7), (1, 5, 3, 2, 2)]
        calls = [
            {"x": floats(n, 2, h, w), "g": RNG.uniform(-1.6, 1.6, (n, p, q, 2)).astype(np.float32)}
            for n, h, w, p, q in sizes
        ]
        model = model_of("GridSample", given, attributes, opset=20)
        if (mode, padding) != ("cubic", "border"):
            compiled_agrees(model, *calls, tolerance=2e-4)
            continue
        program, session = polydyn.compile(model, threads=1), onnxruntime.InferenceSession(model.SerializeToString())
        for feeds in calls:  # ONNX's reference moves the coordinate inside, torch and ONNX Runtime the neighbours
            np.testing.assert_allclose(program.run(feeds)["y"], session.run(None, feeds)[0], 2e-4, 2e-4)


def test_grid_sample_of_volumes_and_of_what_is_no_number() -> None:
    given = {"x": ("float32", (1, 2, "D", "H", "W")), "g": ("float32", (1, "P", 1, 2, 3))}
    model = model_of("GridSample", given, {"mode": "linear"}, opset=20)
    grid = RNG.uniform(-1.3, 1.3, (1, 5, 1, 2, 3)).astype(np.float32)
    compiled_agrees(model, {"x": floats(1, 2, 3, 4, 5), "g": grid}, tolerance=1e-4)
    program = polydyn.compile(model, threads=1)
    for far in (np.nan, np.inf, -np.inf, 1e30):
        out = program.run({"x": floats(1, 2, 3, 4, 5), "g": np.full_like(grid, far)})["y"]
        assert out.shape == (1, 2, 5, 1, 2)
        assert np.isnan(out).all() or (out == 0).all()
    with pytest.raises(InputError):
        program.run({"x": floats(1, 2, 0, 4, 5), "g": grid})


@pytest.mark.parametrize("mode", ["avg", "max"])
@pytest.mark.parametrize("corners", ["half_pixel", "output_half_pixel"])
def test_roi_align(mode: str, corners: str) -> None:
    given = {"x": ("float32", ("N", 3, "H", "W")), "r": ("float32", ("R", 4)), "b": ("int64", ("R",))}
    attributes = {
        "mode": mode, "output_height": 3, "output_width": 2, "sampling_ratio": 2, "spatial_scale": 0.5,
        "coordinate_transformation_mode": corners,
    }  # fmt: skip
    model = model_of("RoiAlign", given, attributes)
    program, session = polydyn.compile(model, threads=1), onnxruntime.InferenceSession(model.SerializeToString())
    for n, h, w, r in ((1, 7, 5, 4), (2, 31, 33, 7), (1, 1, 1, 2), (2, 4, 4, 0)):
        start = RNG.uniform(-4, 2 * h, (r, 2))
        boxes = np.concatenate([start, start + RNG.uniform(-1, 2 * h, (r, 2))], 1).astype(np.float32)
        feeds = {"x": floats(n, 3, h, w), "r": boxes, "b": RNG.integers(0, n, r)}
        np.testing.assert_allclose(program.run(feeds)["y"], session.run(None, feeds)[0], 1e-4, 1e-5)
    with pytest.raises(UnsupportedError, match="sampling_ratio 0"):
        import_model(model_of("RoiAlign", given, {"sampling_ratio": 0}))
    with pytest.raises(InputError):
        program.run({"x": floats(1, 3, 4, 4), "r": floats(1, 4), "b": np.array([1])})


@pytest.mark.parametrize(("group", "offset_group"), [slow(1, 1), (2, 1), slow(1, 2)])
def test_deformed_convolutions(group: int, offset_group: int) -> None:
    given = {
        "x": ("float32", ("N", 4, "H", "W")), "w": floats(6, 4 // group, 3, 2),
        "o": ("float32", ("N", offset_group * 12, "P", "Q")), "b": floats(6),
        "m": ("float32", ("N", offset_group * 6, "P", "Q")),
    }  # fmt: skip
    attributes = {"group": group, "offset_group": offset_group, "pads": [1, 0, 1, 1], "strides": [2, 1]}
    model = model_of("DeformConv", given, attributes, opset=22)
    calls = []
    for n, h, w in ((1, 5, 4), (2, 7, 3)):
        p, q = (h + 2 - 3) // 2 + 1, w + 1 - 2 + 1
        calls.append({"x": floats(n, 4, h, w), "o": 2 * floats(n, offset_group * 12, p, q)})
        calls[-1]["m"] = floats(n, offset_group * 6, p, q)
    compiled_agrees(model, *calls, tolerance=2e-4)


@pytest.mark.parametrize(
    ("times", "pads"), [(2, (0, 0)), (2, (2, 4)), (2, (1, 1)), (4, (3, 0)), (3, (1, 2)), (7, (2, 0))]
)
def test_resizes_to_the_nearest_element_read_runs(times: int, pads: tuple[int, int]) -> None:
    """Vectors read consecutive elements and repeat them, from any place of a run on, under the guard of a padding."""
    attributes = {"mode": "nearest", "coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    x = node("Resize", "x - s", "a", **attributes)
    constants = {"s": np.array([1, 1, times, times], np.float32), "p": np.array([0, 0, 1, pads[0], 0, 0, 0, pads[1]])}
    m = model([x, node("Pad", "a p", "y")], {"x": ("float32", ["N", 3, "H", "W"])}, ["y"], constants)
    plan = plan_program(m)
    assert "vrepeat" in "".join(k.text for k in plan.kernels)
    program, checked = build_program(plan, threads=1), CheckedProgram(plan)
    for shape in ((2, 3, 5, 7), (1, 3, 1, 1), (1, 3, 2, 64), (1, 3, 3, 1100), (0, 3, 4, 4)):
        feeds = {"x": floats(*shape)}
        resized = feeds["x"].repeat(times, 2).repeat(times, 3)
        expected = np.pad(resized, ((0, 0), (0, 0), (1, 0), pads))
        np.testing.assert_array_equal(program.run(feeds)["y"], expected)
        np.testing.assert_array_equal(checked.run(feeds)["y"], expected)


@pytest.mark.parametrize("mode", ["reflect", "edge", "wrap"])
def test_paddings_that_repeat_elements_read_segments(mode: str) -> None:
    """Lines are cut where a subscript changes its direction or begins again."""
    m = model([node("Pad", "x p", "y", mode=mode)], {"x": ("float32", ["N", "H", "W"])}, ["y"],
              {"p": np.array([0, 1, 3, 0, 0, 5])}, opset=19)  # fmt: skip
    plan = plan_program(m)
    assert "vload" in "".join(k.text for k in plan.kernels)
    program, checked = build_program(plan, threads=1), CheckedProgram(plan)
    for shape in ((1, 2, 6), (2, 5, 7), (1, 3, 64), (1, 2, 2100), (0, 2, 6)):
        feeds = {"x": floats(*shape)}
        expected = np.pad(feeds["x"], ((0, 0), (1, 0), (3, 5)), mode=mode)
        np.testing.assert_array_equal(program.run(feeds)["y"], expected)
        np.testing.assert_array_equal(checked.run(feeds)["y"], expected)


def test_tiles_of_any_length_repeat_lines() -> None:
    m = model([node("Tile", "x t", "y")], {"x": ("int64", ["N", "W"])}, ["y"], {"t": np.array([2, 3])})
    plan = plan_program(m)
    program, checked = build_program(plan, threads=1), CheckedProgram(plan)
    for shape in ((1, 1), (2, 3), (3, 64), (1, 700), (0, 4), (4, 0)):
        feeds = {"x": RNG.integers(-9, 9, shape)}
        for p in (program, checked):
            np.testing.assert_array_equal(p.run(feeds)["y"], np.tile(feeds["x"], (2, 3)))
