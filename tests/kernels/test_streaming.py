"""Stores around the caches: their conditions, their begin and end, and results that do not depend on them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

import polydyn
from polydyn.codegen.cpu.streaming import STREAM
from polydyn.compiler import plan_program
from polydyn.program.plan import HostPlan
from polydyn.runtime.native import OUTPUT_BYTES, PAGE
from tests.support.tiny import model, node

CACHE = 32 << 20
"""The last-level cache is assumed to be no larger."""


def summed() -> onnx.ModelProto:
    return model([node("Add", "x z", "y")], {n: ("float32", ["R", "L"]) for n in "xz"}, ["y"])


def split_heads() -> onnx.ModelProto:
    inputs = {"x": ("float32", ["B", "L", 12, "D"])}
    return model([node("Transpose", "x", "y", perm=[0, 2, 1, 3])], inputs, ["y"])


def turned() -> onnx.ModelProto:
    nodes = [node("Transpose", "x", "t", perm=[1, 0]), node("Add", "t z", "y")]
    return model(nodes, {"x": ("float32", ["R", "L"]), "z": ("float32", ["L", "R"])}, ["y"])


def copied() -> onnx.ModelProto:
    return model([node("Transpose", "x", "y", perm=[1, 0])], {"x": ("float32", ["R", "L"])}, ["y"])


def squashed() -> onnx.ModelProto:
    return model([node("Softmax", "x", "y", axis=-1)], {"x": ("float32", ["R", "L"])}, ["y"])


def moved(plan: HostPlan, **dims: int) -> int:
    (launch,), (kernel,) = plan.launches, plan.kernels
    (candidate,) = launch.candidates
    return candidate.symbols[kernel.symbols.index(STREAM)].evaluate({**dims, "nth": 1})


def test_only_launches_that_no_cache_holds_stream() -> None:
    three, two = plan_program(summed()), plan_program(squashed())
    assert moved(three, R=128, L=768) == 3 * 4 * 128 * 768 < CACHE
    assert moved(three, R=0, L=5) == 0 and moved(two, R=1, L=1) == 8
    assert moved(three, R=4096, L=1024) >= CACHE > moved(two, R=1008, L=3072) == 2 * 4 * 1008 * 3072
    scattered = plan_program(copied())
    assert moved(scattered, R=1000, L=3001) == 2 * 2 * 4 * 1000 * 3001 >= CACHE  # counted twice
    window = model([node("MaxPool", "x", "y", kernel_shape=[3, 3])], {"x": ("float32", ["N", 8, "H", "W"])}, ["y"])
    assert moved(plan_program(window), N=1, H=34, W=34) == 3 * 4 * 8 * 32 * 32


def test_copies_that_stream_run_in_the_order_of_their_operand() -> None:
    text = plan_program(split_heads()).kernels[0].text
    ordered, plain = text.split("} else {")
    assert "if (stream >= 1) {" in ordered
    assert [part.index("for (i64 i1 ") < part.index("for (i64 i2 ") for part in (ordered, plain)] == [False, True]
    for made in (summed(), turned(), squashed()):  # nothing to reorder, operands that disagree, a row kernel
        text = plan_program(made).kernels[0].text
        assert text.count("pd_drain();") == text.count("(stream >= 1)") == 1 and "vstream_f32(" in text


def large(name: str) -> tuple[onnx.ModelProto, dict[str, np.ndarray], np.ndarray]:
    """Return a model, inputs that make it stream (only heads are a multiple of a vector), and its output."""
    r = np.random.default_rng(0)
    x = r.standard_normal((2503, 1701), np.float32)
    if name == "split_heads":
        heads = x.reshape(-1)[: 9 * 461 * 12 * 64].reshape(9, 461, 12, 64)
        return split_heads(), {"x": heads}, heads.transpose(0, 2, 1, 3)
    if name == "copied":
        return copied(), {"x": x}, x.T
    z = np.ascontiguousarray(x[::-1])
    if name == "turned":
        z = np.ascontiguousarray(z.T)
        return turned(), {"x": x, "z": z}, x.T + z
    return summed(), {"x": x, "z": z}, x + z


@pytest.mark.parametrize("target", ["cpu", "cpu:avx2"])
@pytest.mark.parametrize("name", ["summed", "turned", "copied", "split_heads"])
def test_results_do_not_depend_on_it(name: str, target: str) -> None:
    made, feeds, want = large(name)
    assert moved(plan_program(made), **sizes(made, feeds)) >= CACHE
    program = polydyn.compile(made, target=target, threads=2)
    np.testing.assert_array_equal(program.run(feeds)["y"], want)
    memory = np.full(want.size + 40, 7, np.float32)
    for first in (16 - memory.ctypes.data // 4 % 16, 19 - memory.ctypes.data // 4 % 16):  # whole lines, and none
        out = memory[first : first + want.size].reshape(want.shape)
        program.run(feeds, out={"y": out})
        np.testing.assert_array_equal(out, want)
        assert (memory[:first] == 7).all() and (memory[first + want.size :] == 7).all()
        memory[:] = 7


def sizes(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, int]:
    """Return the symbols' values."""
    dims = {v.name: v.type.tensor_type.shape.dim for v in model.graph.input}
    return {d.dim_param: n for v, a in feeds.items() for d, n in zip(dims[v], a.shape, strict=True) if d.dim_param}


def test_large_outputs_begin_with_a_page() -> None:
    program = polydyn.compile(summed(), threads=1)
    for rows in (0, 1, OUTPUT_BYTES // 4 // 61, OUTPUT_BYTES // 4 // 61 + 1, 5000):
        feeds = {n: np.ones((rows, 61), np.float32) for n in "xz"}
        y = program.run(feeds)["y"]
        assert y.shape == (rows, 61) and y.flags.c_contiguous and y.flags.writeable and (y == 2).all()
        assert y.nbytes < OUTPUT_BYTES or y.ctypes.data % PAGE == 0
