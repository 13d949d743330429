"""Windows in register tiles: depthwise convolutions and poolings in both layouts, at every edge."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from polydyn.backends.cpu import cpu_target
from polydyn.checked import CheckedProgram
from polydyn.compiler import plan_program
from polydyn.graph import reference
from polydyn.graph.expand import import_model
from polydyn.program.assemble import build_program
from polydyn.program.plan import HostPlan
from polydyn.schedules.expr import Array
from polydyn.testing.halves import in_type, rounded, widened
from tests.support.marks import slow
from tests.support.quantized import random_bytes
from tests.support.tiny import model, node

RNG = np.random.default_rng(11)
F = "float32"
AXES = "HWD"


def floats(*shape: int) -> Array:
    return RNG.standard_normal(shape).astype(np.float32)


def window(op: str, channels: int, rank: int, last: bool, dtype: str = F, **attributes: Any) -> onnx.ModelProto:
    """Build one window with every size symbolic, between transposes if the data are channels-last."""
    constants: dict[str, Array] = {}
    x, y = ("s", "t") if last else ("x", "y")
    if op == "Conv":
        attributes |= {"group": channels}
        constants = {"w": floats(channels, 1, *attributes["kernel_shape"]), "b": floats(channels)}
    nodes = [node(op, f"{x} w b" if constants else x, y, **attributes)]
    dims: list[str | int] = ["N", channels, *AXES[:rank]]
    if last:
        nodes.insert(0, node("Transpose", "x", "s", perm=[0, rank + 1, *range(1, rank + 1)]))
        nodes.append(node("Transpose", "t", "y", perm=[0, *range(2, rank + 2), 1]))
        dims = ["N", *AXES[:rank], channels]
    return model(nodes, {"x": (dtype, dims)}, ["y"], constants)


def agrees(m: onnx.ModelProto, *shapes: tuple[int, ...], checked: bool = False) -> HostPlan:
    """Compare kernels with the reference evaluator; in the checked build the bits must be equal too."""
    plan, graph = plan_program(m), import_model(m)
    program = build_program(plan, threads=1)
    for shape in shapes:
        feeds = {"x": floats(*shape)}
        got = program.run(feeds)["y"]
        np.testing.assert_allclose(got, reference.evaluate(graph, feeds)["y"], 1e-5, 1e-5)
        if checked:
            np.testing.assert_array_equal(CheckedProgram(plan).run(feeds)["y"], got)
    return plan


def windows_of(plan: HostPlan) -> list[str]:
    """Return the kernels in register tiles."""
    return [k.name for k in plan.kernels if k.name.startswith("window_")]


CASES: list[tuple[str, int, int, dict[str, Any]]] = [
    ("Conv", 5, 2, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}),
    ("Conv", 33, 2, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    ("Conv", 17, 2, {"kernel_shape": [5, 3], "pads": [2, 0, 1, 2], "strides": [2, 1], "dilations": [1, 2]}),
    ("Conv", 16, 2, {"kernel_shape": [7, 7], "pads": [3, 3, 3, 3]}),
    ("Conv", 3, 1, {"kernel_shape": [4], "pads": [1, 2], "strides": [3]}),
    ("Conv", 6, 3, {"kernel_shape": [2, 3, 3], "pads": [0, 1, 1, 1, 1, 1]}),
    ("MaxPool", 7, 2, {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1], "strides": [2, 2]}),
    ("MaxPool", 18, 2, {"kernel_shape": [2, 2], "strides": [2, 2], "ceil_mode": 1}),
    ("AveragePool", 9, 2, {"kernel_shape": [5, 5], "pads": [2, 2, 2, 2]}),
    ("AveragePool", 20, 2, {"kernel_shape": [3, 2], "pads": [1, 0, 0, 1], "strides": [2, 2], "ceil_mode": 1}),
    ("AveragePool", 4, 3, {"kernel_shape": [2, 2, 2], "pads": [1, 0, 0, 0, 1, 1], "count_include_pad": 1}),
]
SLOW_CASES = (0, 4, 5, 8, 9, 10)
"""Cases whose channels-last run is left to ``make test-long``."""

SIZES: dict[int, list[tuple[int, ...]]] = {
    1: [(1, 4), (2, 33), (1, 130)],
    2: [(2, 5, 7), (1, 9, 40), (1, 34, 19), (0, 8, 8)],
    3: [(1, 4, 5, 19), (2, 3, 9, 4)],
}


@pytest.mark.parametrize(("last", "dtype"), [(False, "uint8"), (True, "int8")], ids=["planes", "last"])
def test_poolings_of_bytes(last: bool, dtype: str) -> None:
    m = window("MaxPool", 18, 2, last, dtype, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2])
    plan = plan_program(m)
    assert windows_of(plan)
    x = random_bytes(RNG, dtype, *((2, 9, 40, 18) if last else (2, 18, 9, 40)))
    expected = reference.evaluate(import_model(m), {"x": x})["y"]
    np.testing.assert_array_equal(CheckedProgram(plan).run({"x": x})["y"], expected)
    np.testing.assert_array_equal(build_program(plan, threads=1).run({"x": x})["y"], expected)


@pytest.mark.parametrize(
    ("case", "last"),
    [slow(i, last) if last and i in SLOW_CASES else (i, last) for i in range(len(CASES)) for last in (False, True)],
)
def test_windows_at_ugly_sizes(case: int, last: bool) -> None:
    op, channels, rank, attributes = CASES[case]
    shapes = [(n, *s, channels) if last else (n, channels, *s) for n, *s in SIZES[rank]]
    plan = agrees(window(op, channels, rank, last, **attributes), *shapes)
    assert len(windows_of(plan)) == 1
    chains = any("_second" in k.text for k in plan.kernels)
    assert chains or 7 not in attributes["kernel_shape"], "sums of many taps are two chains at an edge"


@pytest.mark.parametrize(
    ("case", "last", "dtype"), [(4, False, "bfloat16"), (1, False, "float16"), slow(1, True, "float16"),
                                slow(2, False, "bfloat16"), slow(6, False, "bfloat16"), slow(9, True, "float16")],
)  # fmt: skip
def test_windows_of_halves_are_those_of_floats_rounded_once(case: int, last: bool, dtype: str) -> None:
    """Elements are widened, sums are float32: the same additions in the same order."""
    op, channels, rank, attributes = CASES[case]
    whole = window(op, channels, rank, last, **attributes)
    for t in whole.graph.initializer:
        t.CopyFrom(numpy_helper.from_array(widened(rounded(numpy_helper.to_array(t), dtype), dtype), t.name))
    plan = plan_program(in_type(whole, dtype))
    assert len(windows_of(plan)) == 1
    halves, floats_, checked = build_program(plan, threads=1), build_program(plan_program(whole)), CheckedProgram(plan)
    for n, *s in SIZES[rank]:
        x = rounded(floats(n, *s, channels) if last else floats(n, channels, *s), dtype)
        got = widened(halves.run({"x": x})["y"], dtype)
        expected = rounded(floats_.run({"x": x.astype(np.float32)})["y"], dtype).astype(np.float32)
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(widened(checked.run({"x": x})["y"], dtype), got)


def test_a_lane_of_whole_vectors_has_no_tail_and_one_of_less_than_a_vector_no_loop() -> None:
    parts = {}
    for channels in (12, 32, 40):
        m = window("Conv", channels, 2, True, kernel_shape=[1, 3])
        (kernel,) = plan_program(m, target="cpu:avx512").kernels
        parts[channels] = "for (i64 t =" in kernel.text, "vstorem_f32" in kernel.text
    assert parts == {12: (False, True), 32: (True, False), 40: (True, True)}


@pytest.mark.parametrize("size", [(1, 1), slow((1, 8)), slow((8, 1)), slow((7, 16)), (16, 17), slow((9, 33))])
def test_a_padding_of_ones_at_every_kind_of_tile(size: tuple[int, int]) -> None:
    """No, one and several whole tiles; in the checked build no access leaves its tensor."""
    for last in (False, True):
        m = window("Conv", 3, 2, last, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
        agrees(m, (1, *size, 3) if last else (1, 3, *size), checked=True)
    agrees(window("MaxPool", 2, 2, False, kernel_shape=[3, 3], pads=[1, 1, 1, 1], strides=[2, 2]), (1, 2, *size),
           checked=True)  # fmt: skip


def test_what_follows_a_window_is_computed_in_its_tile() -> None:
    """A residual, a rectifier and a scale run in the tile's registers, also in partial tiles; if planes are lanes, they
    run in vectors along pixels after it.
    """
    nodes = [
        node("Conv", "x w b", "c", kernel_shape=[5, 5], pads=[2, 2, 2, 2], group=24), node("Add", "c x", "r"),
        node("Relu", "r", "p"), node("Mul", "p s", "y"),
    ]  # fmt: skip
    constants = {"w": floats(24, 1, 5, 5), "b": floats(24), "s": floats(24, 1, 1)}
    m = model(nodes, {"x": (F, ["N", 24, "H", "W"])}, ["y"], constants)
    lanes = cpu_target("cpu").width
    sizes = {(1, 9, 40): "window", (2, 5, 7): "turned", (1, 1, 1): "turned", (0, 7, 7): "turned", (1, 8, 16): "window"}
    if lanes == 8:  # five lanes of eight are enough
        sizes |= {(2, 5, 7): "window", (0, 7, 7): "window"}
    plan = agrees(m, *((n, 24, h, w) for n, h, w in sizes), checked=True)
    assert len(plan.launches) == 1 and len(windows_of(plan)) == 1
    program = build_program(plan, threads=1)
    chosen = [program.explain(N=n, H=h, W=w).launches[0].kernel.split("_")[0] for n, h, w in sizes]
    assert chosen == [*sizes.values()], f"5 of {lanes} lanes along a line, or all of them over planes"


def test_known_sizes_of_planes_are_decided_when_the_model_is_compiled() -> None:
    for side, kind in ((7, "turned"), (16, "window")):
        m = window("Conv", 16, 2, False, kernel_shape=[5, 5], pads=[2, 2, 2, 2])
        for dim in m.graph.input[0].type.tensor_type.shape.dim[2:]:
            dim.dim_value = side
        (kernel,) = plan_program(m, target="cpu:avx512").kernels
        assert kernel.name.startswith(kind)


@pytest.mark.parametrize("strides", [1, 2])
def test_long_windows_are_unrolled_inside_of_lines_only(strides: int) -> None:
    """At the ends of a line the taps stay a loop: the checks of so many taps would take gcc seconds."""
    taps = 70
    m = model(
        [node("Conv", "x w", "y", strides=[strides], pads=[taps // 2, taps // 2])],
        {"x": (F, ["N", 1, "L"])}, ["y"], {"w": floats(1, 1, taps)},
    )  # fmt: skip
    plan = agrees(m, (2, 1, 700), (1, 1, 33), (3, 1, 1), (0, 1, 9), checked=True)
    (kernel,) = plan.kernels
    assert kernel.name.startswith("window_")
    additions = kernel.text.count("l0_0 = (l0_0 + ")
    assert taps <= additions < 2 * taps, f"{additions} additions: one version has all taps in line"


FEW_PLANES = {
    "strided": (
        (12, 3, 3, 3),
        {"strides": [1, 2], "dilations": [2, 1], "pads": [2, 1, 0, 1]}, [(2, 5, 96), (1, 3, 131), (0, 3, 96)],
    ),
    "dilated": ((5, 2, 2, 3), {"dilations": [1, 2], "pads": [0, 3, 1, 0]}, [(1, 3, 63), (2, 2, 65), (1, 1, 80)]),
}  # fmt: skip


@pytest.mark.parametrize("case", ["strided", slow("dilated")])
def test_convolutions_to_few_planes_run_along_lines(case: str) -> None:
    """Results in planes, of few channels: all of them read a vector of pixels. In short rows it stays a product."""
    weight, attributes, shapes = FEW_PLANES[case]
    out, channels, *_ = weight
    nodes = [node("Conv", "x w b", "c", **attributes), node("Tanh", "c", "y")]
    m = model(nodes, {"x": (F, ["N", channels, "H", "W"])}, ["y"], {"w": floats(*weight), "b": floats(out)})
    plan = agrees(m, *((n, channels, h, w) for n, h, w in (*shapes, (1, 4, 9))), checked=True)
    assert len(plan.launches) == 1 and len(windows_of(plan)) == 1
    program = build_program(plan, threads=1)
    chosen = [program.explain(N=n, H=h, W=w).launches[0].kernel.split("_")[0] for n, h, w in (*shapes, (1, 4, 9))]
    assert chosen == ["window"] * len(shapes) + ["contract"]


def test_convolutions_that_stay_products() -> None:
    """64 channels, results that are contiguous along channels, elements 3 apart. Known sizes have one kernel."""
    taps: dict[str, Any] = {"pads": [1, 1, 1, 1]}
    last = [node("Conv", "x w", "c", **taps), node("Softmax", "c", "y", axis=1)]
    plain = [node("Conv", "x w", "y", **taps)]
    apart = [node("Conv", "x w", "y", strides=[3, 3], **taps)]
    kinds: list[tuple[list[onnx.NodeProto], int, Any, list[str]]] = [
        (plain, 64, "W", ["contract"]), (last, 8, "W", ["contract"]), (apart, 8, "W", ["contract"]),
        (plain, 8, 128, ["window"]), (plain, 8, 5, ["contract"]),
    ]  # fmt: skip
    for nodes, out, w, expected in kinds:
        m = model(nodes, {"x": (F, ["N", 16, "H", w])}, ["y"], {"w": floats(out, 16, 3, 3)})
        kernels = [k.name.split("_")[0] for k in plan_program(m).kernels]
        assert [k for k in kernels if k != "nest"] == expected, (out, w)


def test_a_pad_of_tokens_is_never_written() -> None:
    """Segformer's: tokens as an image, padded, through a depthwise convolution; the lane is the channel."""
    nodes = [
        node("Conv", "x v", "a", kernel_shape=[4, 4], strides=[4, 4]), node("Shape", "a", "n"),
        node("Reshape", "a flat", "f"), node("Transpose", "f", "t", perm=[0, 2, 1]),
        node("LayerNormalization", "t g", "l"), node("Transpose", "l", "u", perm=[0, 2, 1]),
        node("Reshape", "u n", "i"), node("Conv", "i w", "c", kernel_shape=[3, 3], pads=[1, 1, 1, 1], group=24),
        node("Relu", "c", "y"),
    ]  # fmt: skip
    constants = {"v": floats(24, 3, 4, 4), "w": floats(24, 1, 3, 3), "g": floats(24), "flat": np.array([0, 24, -1])}
    m = model(nodes, {"x": (F, ["N", 3, "H", "W"])}, ["y"], constants)
    plan = agrees(m, (1, 3, 12, 20), (2, 3, 37, 41))
    assert len(windows_of(plan)) == 1 and not [b for b in plan.buffers.values() if "+ 2" in str(b.shape)]


def test_an_explicit_pad_joins_its_window() -> None:
    """TensorFlow's padding for stride 2: one guard, no separate kernel."""
    nodes = [
        node("Conv", "x v", "a"), node("Pad", "a pads", "p"),
        node("Conv", "p w", "c", kernel_shape=[3, 3], strides=[2, 2], group=8), node("Conv", "c u", "y"),
    ]  # fmt: skip
    constants = {"v": floats(8, 3, 1, 1), "w": floats(8, 1, 3, 3), "u": floats(4, 8, 1, 1),
                 "pads": np.array([0, 0, 0, 0, 0, 0, 1, 1])}  # fmt: skip
    plan = agrees(model(nodes, {"x": (F, ["N", 3, "H", "W"])}, ["y"], constants), (1, 3, 8, 18), (1, 3, 9, 7))
    assert len(plan.launches) == 3 and len(windows_of(plan)) == 1


def test_a_norm_of_groups_keeps_the_order_of_its_image() -> None:
    """GroupNorm as exporters write it; with one group, nothing is written in planes between two convolutions."""
    nodes = [
        node("Conv", "x v", "a"), node("Shape", "a", "n"), node("Reshape", "a groups", "g"),
        node("InstanceNormalization", "g one zero", "i"), node("Reshape", "i n", "k"), node("Mul", "k s", "m"),
        node("Add", "m b", "o"), node("Conv", "o w", "y"),
    ]  # fmt: skip
    for groups in (1, 4):
        constants = {"v": floats(8, 3, 1, 1), "w": floats(5, 8, 1, 1), "s": floats(8, 1, 1), "b": floats(8, 1, 1),
                     "groups": np.array([0, groups, -1]), "one": np.ones(groups, np.float32),
                     "zero": np.zeros(groups, np.float32)}  # fmt: skip
        plan = agrees(model(nodes, {"x": (F, ["N", 3, "H", "W"])}, ["y"], constants), (2, 3, 5, 7), (1, 3, 20, 9))
        assert not [n for k in plan.kernels for n in k.notes if "scalar" in n]
        assert groups > 1 or "o@last" in plan.buffers
