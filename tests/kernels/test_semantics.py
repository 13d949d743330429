"""Operators at extreme types and settings, compiled: casts, pads, scales, diagonals, lengths."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx.parser
import pytest

import polydyn
import polydyn.compiler
from polydyn.errors import BuildError, InputError
from polydyn.graph import reference
from polydyn.program.assemble import build_artifact
from tests.support.one_node import import_model

RNG = np.random.default_rng(0)
INTEGERS = {"int8": 3, "uint8": 2, "int16": 5, "uint16": 4, "int32": 6, "int64": 7, "uint32": 12, "uint64": 13}


def parsed(text: str, opset: int = 19) -> onnx.ModelProto:
    """Parse a model in ONNX's own syntax, without the shapes of its outputs."""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : {opset}]> g {text}')
    for o in model.graph.output:
        o.type.tensor_type.ClearField("shape")
    return model


def test_a_cast_inside_a_kernel_is_the_cast_that_is_an_output() -> None:
    """ONNX does not define casts to an integer that cannot hold the number, but both casts give the same number."""
    body, outputs = "", list[str]()
    for name, code in INTEGERS.items():
        body += f"t_{name} = Cast <to = {code}> (x) u_{name} = Cast <to = 1> (t_{name}) "
        outputs += [f"{name}[A,B] t_{name}", f"float[A,B] u_{name}"]
    program = polydyn.compile(parsed(f"(float[A,B] x) => ({', '.join(outputs)}) {{ {body} }}"), threads=1)
    odd = [40000, -300, 300, 3.7, 1e10, -1e10, np.nan, np.inf, -np.inf, 2.0**31, 2.0**32, -0.5]
    for width in (5, 67):
        out = program.run({"x": np.resize(np.float32(odd), (3, width))})
        for name in INTEGERS:
            np.testing.assert_array_equal(out[f"t_{name}"].astype(np.float32), out[f"u_{name}"])
            assert not np.signbit(out[f"u_{name}"][out[f"u_{name}"] == 0]).any()


def test_pads_that_are_data_may_be_negative() -> None:
    program = polydyn.compile(parsed("(float[A,B] x, int64[4] p) => (float[C,D] y) { y = Pad (x, p) }"), threads=1)
    x = RNG.standard_normal((3, 5)).astype(np.float32)
    got = program.run({"x": x, "p": np.array([-1, 2, 1, -2])})["y"]
    np.testing.assert_array_equal(got, np.pad(x, [(0, 1), (2, 0)])[1:, :5])
    with pytest.raises(InputError):
        program.run({"x": x, "p": np.array([-2, 0, -2, 0])})
    model = parsed('(float[A,B] x, int64[2] p, int64[1] a) => (float[C,D] y) { y = Pad <mode = "wrap"> (x, p, , a) }')
    got = polydyn.compile(model, threads=1).run({"x": x, "p": np.array([-2, 4]), "a": np.array([-1])})["y"]
    np.testing.assert_array_equal(got, np.concatenate([x[:, 2:], x[:, 2:], x[:, 2:3]], 1))


@pytest.mark.parametrize("scale", [0.4, 0.3, 0.7, 1.3])
@pytest.mark.parametrize("given", ["constant", "data"])
def test_nearest_elements_follow_from_the_fraction_that_a_scale_represents(scale: float, given: str) -> None:
    """As in torch. The float32 of 0.4 is above it, so the exact quotient 2 / 0.4 is below 5."""
    head = "(float[A] x, float[1] s) => (float[B] y)" + (f" <float[1] s = {{{scale}}}>" if given == "constant" else "")
    resize = 'Resize <mode = "nearest", nearest_mode = "floor", coordinate_transformation_mode = "asymmetric">'
    program = polydyn.compile(parsed(f"{head} {{ y = {resize} (x, , s) }}"), threads=1)
    s = {} if given == "constant" else {"s": np.float32([scale])}
    for n in (1, 4, 13, 317):
        x = np.arange(n, dtype=np.float32)
        want = np.arange(int(n * round(10 * scale)) // 10) * 10 // round(10 * scale)
        np.testing.assert_array_equal(program.run({"x": x, **s})["y"], want)


@pytest.mark.parametrize("mode", ["nearest", "linear"])
def test_scales_that_are_data(mode: str) -> None:
    resize = f'y = Resize <mode = "{mode}"> (x, , s) }}'
    program = polydyn.compile(parsed(f"(float[1,N,W] x, float[3] s) => (float[] y) {{ {resize}"), threads=1)
    x = RNG.standard_normal((1, 2, 10)).astype(np.float32)
    for scale, size in ((0.7, 7), (1 / 3, 3), (2.5, 25)):
        constant = f"s = Constant <value_floats = [1.0, 1.0, {scale:.9f}]> ()"
        fixed = import_model(parsed(f"(float[1,N,W] x) => (float[] y) {{ {constant} {resize}"))
        got = program.run({"x": x, "s": np.float32([1, 1, scale])})["y"]
        assert got.shape == (1, 2, size)
        np.testing.assert_allclose(got, reference.evaluate(fixed, {"x": x})["y"], 1e-5, 1e-6)
    for scale in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(InputError, match="a scale is above 0"):
            program.run({"x": x, "s": np.float32([1, 1, scale])})


@pytest.mark.parametrize("upper", [0, 1])
def test_diagonals_beyond_every_element(upper: int) -> None:
    text = f"(float[N,4] x, int64 k) => (float[] y) {{ y = Trilu <upper = {upper}> (x, k) }}"
    program, x = polydyn.compile(parsed(text), threads=1), np.ones((3, 4), np.float32)
    for k in (-(2**63), -(2**63) + 1, -9, -1, 0, 2, 2**62, 2**63 - 2, 2**63 - 1):
        near = int(np.clip(k, -9, 9))
        np.testing.assert_array_equal(
            program.run({"x": x, "k": np.array(k)})["y"], np.triu(x, near) if upper else np.tril(x, near)
        )


def test_lengths_of_sequences_lie_inside_the_axis() -> None:
    text = "(float[T,N] x, int64[N] n) => (float[] y) { y = ReverseSequence <time_axis = 0, batch_axis = 1> (x, n) }"
    program, x = polydyn.compile(parsed(text), threads=1), np.arange(6, dtype=np.float32).reshape(3, 2)
    np.testing.assert_array_equal(program.run({"x": x, "n": np.array([3, 0])})["y"], [[4, 1], [2, 3], [0, 5]])
    for n in (-1, 4, -4, -(2**63), 2**63 - 1):
        with pytest.raises(InputError, match="outside"):
            program.run({"x": x, "n": np.array([1, n])})


def test_outputs_of_a_program_of_parts_that_share_memory_are_refused() -> None:
    text = "(float[N] x) => (int64[1,K] n, float[N] a, float[N] b) { n = NonZero (x) a = Mul (x, x) b = Identity (x) }"
    program, x, same = polydyn.compile(parsed(text), threads=1), np.arange(4, dtype=np.float32), np.zeros(4, np.float32)
    with pytest.raises(InputError, match=r"out\['b'\] may share memory with 'a'"):
        program.run({"x": x}, {"a": same, "b": same})
    assert not same.any()
    out = {"a": x, "b": same}  # an output in the memory of an input that another output is a copy of
    program.run({"x": x}, out)
    np.testing.assert_array_equal(out["a"], [0, 1, 4, 9])
    np.testing.assert_array_equal(out["b"], [0, 1, 2, 3])


def test_an_output_that_is_an_input() -> None:
    for nodes in ("y = Neg (x)", "y = NonZero (x)"):
        kind = "int64[1,K]" if "Zero" in nodes else "float[N]"
        program = polydyn.compile(parsed(f"(float[N] x) => ({kind} y, float[N] x) {{ {nodes} }}"), threads=1)
        out = program.run({"x": np.float32([1, 2])})
        assert list(out) == ["y", "x"]
        np.testing.assert_array_equal(out["x"], [1, 2])


def test_a_function_that_no_header_has_names_the_kernel_and_the_node() -> None:
    model = parsed("(float[N] x) => (float[] y) { [the_erf] y = Erf (x) }")
    plan = polydyn.compiler.plan_program(model)
    (kernel,) = plan.kernels
    broken = replace(plan, kernels=(replace(kernel, text=kernel.text.replace("erf", "nowhere")),))
    with pytest.raises(BuildError, match=r"nowhere(.|\n)*node: (.|\n)*rule: kernel nest_"):
        build_artifact(broken)
