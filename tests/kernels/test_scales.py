"""Scale factors of product operands are hoisted out of the sums if the unscaled operand is in memory anyway."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

import polydyn
from polydyn.backends import Options
from polydyn.compiler import plan_program
from polydyn.graph.expand import import_model
from polydyn.graph.fold import fold
from polydyn.graph.passes.scales import products_without_scales
from tests.support.tiny import model

node = helper.make_node
Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(7)


def scores(
    scale: Any = 0.25, dtype: str = "float32", extra: tuple[Any, ...] = ()
) -> tuple[list[Any], dict[str, Array]]:
    """Return nodes and constants of q (k c)', four heads on two keys; keys are expanded and transposed after or before.
    """
    nodes = [
        node("Unsqueeze", ["k", "two"], ["k1"]), node("Expand", ["k1", "wide"], ["k2"]),
        node("Reshape", ["k2", "whole"], ["k3"]), node("Transpose", ["k3"], ["k4"], perm=[0, 1, 3, 2]),
        node("Mul", ["k4", "c"], ["k5"]), node("MatMul", ["q", "k5"], ["s"]), *extra,
    ]  # fmt: skip
    constants = {"two": np.array([2]), "wide": np.array([1, 1, 2, 1, 1]), "whole": np.array([0, 4, -1, 16]),
                 "c": np.array(scale, dtype)}  # fmt: skip
    return nodes, constants


DIMS = {"q": ("B", 4, "L", 16), "k": ("B", 2, "T", 16)}


def operands(length: int, keys: int, dtype: str) -> tuple[dict[str, Array], Array]:
    feeds = {
        "q": RNG.standard_normal((2, 4, length, 16)).astype(dtype),
        "k": RNG.standard_normal((2, 2, keys, 16)).astype(dtype),
    }
    q, k = (feeds[n].astype(np.float64) for n in "qk")
    return feeds, q @ np.repeat(k, 2, 1).swapaxes(-1, -2)


def build(nodes: list[Any], constants: dict[str, Array], outputs: list[str], dtype: str = "float32") -> onnx.ModelProto:
    return model(nodes, {n: (dtype, d) for n, d in DIMS.items()}, outputs, constants)


def compiled(nodes: list[Any], constants: dict[str, Array], outputs: list[str], **options: Any) -> polydyn.Program:
    return polydyn.compile(build(nodes, constants, outputs), threads=1, options=Options(**options))


def launches(program: polydyn.Program) -> int:
    return len(program.manifest["launches"])


def test_scaled_keys_are_no_copy() -> None:
    nodes, constants = scores()
    program = compiled(nodes, constants, ["s"])
    assert launches(program) == 1 < launches(compiled(nodes, constants, ["s"], without=("scales",)))
    for length, keys in ((1, 1), (1, 37), (17, 5), (3, 0)):
        feeds, want = operands(length, keys, "float32")
        np.testing.assert_allclose(program.run(feeds)["s"], want * 0.25, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_on_cuda(dtype: str) -> None:
    nodes, constants = scores(dtype=dtype)
    assert len(plan_program(build(nodes, constants, ["s"], dtype), target="cuda:sm_80").launches) == 1


def taken_out(nodes: list[Any], constants: dict[str, Array], outputs: list[str]) -> bool:
    notes = products_without_scales(fold(import_model(build(nodes, constants, outputs)))).notes
    return any("the product is scaled, not its operand" in n for n in notes)


@pytest.mark.parametrize("scale", [np.inf, 1e-39, np.full((16, 1), 0.5, np.float32)], ids=["inf", "tiny", "vector"])
def test_what_is_no_ordinary_number_stays(scale: Any) -> None:
    assert not taken_out(*scores(scale), ["s"])


def test_what_is_computed_for_the_scaling_alone_stays() -> None:
    """The kernel would scale it for nothing. The same holds for outputs of the model, which are in memory."""
    nodes, constants = scores()
    first = node("Unsqueeze", ["e", "two"], ["k1"])
    computed = [node("Exp", ["k"], ["e"]), first, *nodes[1:]]
    assert not taken_out(computed, constants, ["s"]) and taken_out(computed, constants, ["s", "e"])
    assert taken_out(nodes, constants, ["s"]) and not taken_out(nodes, constants, ["s", "k5"])


def test_a_product_of_a_scaled_product() -> None:
    """The readers of an unscaled product include its factor, also through another scaling."""
    more = (
        node("Mul", ["s", "d"], ["m"]), node("Exp", ["s"], ["e"]), node("Transpose", ["m"], ["t"], perm=[0, 1, 3, 2]),
        node("MatMul", ["t", "e"], ["u"]),
    )  # fmt: skip
    nodes, constants = scores(extra=more)
    program = compiled(nodes, constants | {"d": np.array(0.5, np.float32)}, ["u"])
    for length, keys in ((1, 1), (5, 33)):
        feeds, want = operands(length, keys, "float32")
        u = (want * 0.125).swapaxes(-1, -2) @ np.exp(want * 0.25)
        np.testing.assert_allclose(program.run(feeds)["u"], u, rtol=2e-5, atol=2e-5 * np.abs(u).max())


def test_both_operands() -> None:
    nodes, constants = scores(extra=(node("Mul", ["q", "d"], ["q1"]), node("MatMul", ["q1", "k5"], ["u"])))
    program = compiled(nodes, constants | {"d": np.array(-3, np.float32)}, ["u"])
    assert launches(program) == 1
    feeds, want = operands(5, 33, "float32")
    np.testing.assert_allclose(program.run(feeds)["u"], want * -0.75, rtol=1e-5, atol=1e-5)
