"""float64 on the CPU: kernels in vectors of half as many lanes, right to float64's rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx.reference import ReferenceEvaluator

import polydyn
from polydyn.checked import CheckedProgram
from polydyn.compiler import plan_program
from polydyn.program.assemble import kernel_units
from polydyn.testing.halves import in_type
from polydyn.testing.inputs import feeds, shapes
from polydyn.verification import verify_model
from tests.support.marks import slow
from tests.support.stored import compiled, load
from tests.support.tiny import model, node

TOLERANCE = 1e-12
LANES = {"cpu:avx2": 4, "cpu:avx512": 8, "cpu:neon": 4}
CHECKED_GROUPS = (
    "linear", "choices", "depthwise", "maxima of columns",
    slow("computed operands"), slow("softmax"), slow("convolution"), slow("padding"),
)  # fmt: skip
R = np.random.default_rng(0)
SQUARE = ["M", "N"]
IMAGE = ["B", 8, "H", "W"]
W = {"w": R.standard_normal((70, 37)), "b": R.standard_normal(37), "v": R.standard_normal((70, 1))}
TAPS = {"k": R.standard_normal((16, 8, 3, 3)), "d": R.standard_normal((8, 1, 3, 3))}
GROUPS: dict[str, tuple[list[Any], dict[str, Any], dict[str, Any]]] = {
    "linear": ([node("MatMul", "x w", "p"), node("Add", "p b", "s"), node("Relu", "s", "o")], {"x": ["M", 70]}, W),
    "one column": ([node("MatMul", "x v", "o")], {"x": ["M", 70]}, W),
    "computed operands": ([node("MatMul", "x y", "o")], {"x": ["B", "M", "N"], "y": ["B", "N", "L"]}, {}),
    "transposed": ([node("Gemm", "x y", "o", transB=1)], {"x": ["M", "N"], "y": ["L", "N"]}, {}),
    "maps": ([node("Sigmoid", "x", "s"), node("Mul", "s x", "t"), node("Exp", "t", "e"), node("Tanh", "e", "o")],
             {"x": SQUARE}, {}),
    "choices": ([node("IsNaN", "x", "c"), node("Where", "c y x", "a"), node("Greater", "a y", "g"),
                 node("Where", "g a y", "m"), node("Max", "m x", "o")], {"x": SQUARE, "y": SQUARE}, {}),
    "softmax": ([node("Softmax", "x", "o", axis=-1)], {"x": SQUARE}, {}),
    "softmax of columns": ([node("Softmax", "x", "o", axis=0)], {"x": SQUARE}, {}),
    "sums": ([node("ReduceMean", "x", "m", axes=[1]), node("Sub", "x m", "o")], {"x": SQUARE}, {}),
    "maxima of columns": ([node("ReduceMax", "x", "o", axes=[0])], {"x": SQUARE}, {}),
    "transposition": ([node("Transpose", "x", "t", perm=[1, 0]), node("Abs", "t", "o")], {"x": SQUARE}, {}),
    "positions": ([node("ArgMax", "x", "i", axis=1), node("Cast", "i", "f", to=11), node("Add", "f x", "o")],
                  {"x": ["M", "M"]}, {}),
    "roundings": ([node("Floor", "x", "f"), node("Ceil", "x", "c"), node("Round", "x", "r"), node("Sqrt", "x", "q"),
                   node("Sum", "f c r q", "o")], {"x": SQUARE}, {}),
    "halves": ([node("Cast", "x", "h", to=10), node("Cast", "h", "o", to=11)], {"x": SQUARE}, {}),
    "integers": ([node("Cast", "x", "h", to=7), node("Cast", "h", "o", to=11)], {"x": SQUARE}, {}),
    "convolution": ([node("Conv", "x k", "o", pads=[1, 1, 1, 1])], {"x": IMAGE}, TAPS),
    "strides": ([node("Conv", "x k", "o", pads=[1, 1, 1, 1], strides=[2, 2])], {"x": IMAGE}, TAPS),
    "depthwise": ([node("Conv", "x d", "o", pads=[1, 1, 1, 1], group=8)], {"x": IMAGE}, TAPS),
    "pool": ([node("MaxPool", "x", "o", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1])], {"x": IMAGE}, {}),
    "padding": ([node("Pad", "x n", "p", mode="reflect"), node("AveragePool", "p", "o", kernel_shape=[3, 3])],
                {"x": IMAGE}, {"n": np.array([0, 0, 1, 1, 0, 0, 1, 1])}),
}  # fmt: skip
SIZES = ({}, {"M": 1, "N": 1, "L": 1, "B": 1, "H": 2, "W": 2}, {"M": 0}, {"M": 33, "N": 5, "L": 17, "H": 9, "W": 21})
USUAL = {"M": 6, "N": 47, "L": 12, "B": 2, "H": 7, "W": 8}


def model_of(name: str) -> Any:
    """Return the model of a group."""
    nodes, inputs, constants = GROUPS[name]
    return model(nodes, {n: ("float64", s) for n, s in inputs.items()}, ["o"], constants, opset=17)


def inputs_of(name: str, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Return random inputs of a group, NaN among them."""
    random = np.random.default_rng(len(name))
    out = {}
    for n, shape in GROUPS[name][1].items():
        x = random.standard_normal([{**USUAL, **sizes}[d] if isinstance(d, str) else d for d in shape]) * 3
        if name == "choices":
            x.flat[::5] = np.nan
        out[n] = x
    return out


SLOW_GROUPS = (
    "one column", "transposed", "softmax of columns", "transposition", "positions", "integers", "strides", "pool",
)  # fmt: skip


@pytest.mark.parametrize("name", [slow(n) if n in SLOW_GROUPS else n for n in GROUPS])
def test_groups_are_right_at_all_sizes(name: str) -> None:
    program = polydyn.compile(model_of(name), threads=1)
    reference = ReferenceEvaluator(model_of(name))
    for sizes in SIZES:
        inputs = inputs_of(name, sizes)
        with np.errstate(all="ignore"):
            try:
                expected = reference.run(None, inputs)[0]
            except ValueError:  # a maximum of no elements
                continue
        np.testing.assert_allclose(program.run(inputs)["o"], expected, TOLERANCE, TOLERANCE, err_msg=f"{sizes}")


@pytest.mark.parametrize("target", LANES)
@pytest.mark.parametrize("name", ["linear", "softmax", "depthwise", "maps"])
def test_kernels_have_vectors_that_are_one_register(name: str, target: str) -> None:
    plan = plan_program(model_of(name), target=target)
    for kernel in plan.kernels:
        assert "vload_f64" in kernel.text
        assert kernel.lanes == (LANES[target] if target != "cpu:neon" else 0)
    units = kernel_units(plan)
    assert all(t.startswith("#define PD_W") == (target != "cpu:neon") for t in units.values())


def test_only_kernels_of_float64_have_fewer_lanes() -> None:
    nodes = [node("Softmax", "x", "s"), node("Cast", "s", "d", to=11), node("Cast", "y", "c", to=11),
             node("MatMul", "d c", "p"), node("Cast", "p", "f", to=1), node("Softmax", "f", "o")]  # fmt: skip
    mixed = model(nodes, {"x": ("float32", SQUARE), "y": ("float32", ["N", "L"])}, ["o"])
    assert {k.lanes for k in plan_program(mixed, target="cpu:avx2").kernels} == {0, 4}
    x, y = (R.standard_normal(s, np.float32) for s in ((6, 47), (47, 12)))
    expected = ReferenceEvaluator(mixed).run(None, {"x": x, "y": y})[0]
    np.testing.assert_allclose(polydyn.compile(mixed).run({"x": x, "y": y})["o"], expected, 1e-5, 1e-6)


@pytest.mark.parametrize("name", CHECKED_GROUPS)
def test_every_access_is_checked(name: str) -> None:
    checked, program = CheckedProgram(plan_program(model_of(name))), polydyn.compile(model_of(name))
    for sizes in SIZES[:2]:
        inputs = inputs_of(name, sizes)
        np.testing.assert_array_equal(checked.run(inputs)["o"], program.run(inputs)["o"])


@pytest.mark.parametrize("name", ["linear", slow("softmax"), "depthwise"])
def test_every_pass_keeps_what_a_kernel_computes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYDYN_VERIFY", "2")
    for target in ("cpu:avx2", "cpu:avx512"):
        assert plan_program(model_of(name), target=target).kernels


@pytest.mark.parametrize("name", ["bert_tiny", slow("resnet_tiny"), slow("gpt2_past_tiny"), slow("vit_hw_tiny")])
def test_models_agree_with_themselves_in_float32(name: str) -> None:
    plain = load(name)
    doubles = polydyn.compile(in_type(plain, "float64"), threads=1)
    for shape in shapes(name)[:3]:
        inputs = feeds(plain, shape)
        wide = {n: x.astype(np.float64) if x.dtype == np.float32 else x for n, x in inputs.items()}
        got = doubles.run(wide)
        for n, expected in compiled(name, 1).run(inputs).items():
            assert np.abs(got[n] - expected).max(initial=0) <= 1e-4 * np.abs(expected).max(initial=1e-30), (n, shape)


def test_every_group_is_the_reference_s() -> None:
    inputs = feeds(load("bert_tiny"), {"B": 2, "L": 9})
    wide = {n: x.astype(np.float64) if x.dtype == np.float32 else x for n, x in inputs.items()}
    checks = verify_model(in_type(load("bert_tiny"), "float64"), wide)
    assert len(checks) > 10 and not [c for c in checks if not c.ok]


def test_a_program_is_built_again_from_its_sources(tmp_path: Path) -> None:
    program, inputs = polydyn.compile(model_of("linear"), threads=1), inputs_of("linear", {})
    program.save(tmp_path / "d.polydyn")
    again = polydyn.load(tmp_path / "d.polydyn", trust="sources")
    np.testing.assert_array_equal(again.run(inputs)["o"], program.run(inputs)["o"])
